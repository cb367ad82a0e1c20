//! `dead show`: one dead letter, and what the record of its task says.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::{Value, json};
use taskonce::source::DeadLetter;
use taskonce::{Found, Ledger};

use super::ShowArgs;
use super::pick::{by_ids, key_of};
use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::sources::Opened;
use crate::units::{spell, spell_size};
use crate::{block_on, plain, view};

/// The most of a payload that is shown, in bytes; `--payload` writes all of it.
const PAYLOAD_SHOWN_MAX: usize = 2048;

/// Shows it.
pub(super) fn show(args: &ShowArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    let ledger = if args.payload { None } else { args.sources.ledger(common.store.as_deref()).ok() };
    let (letters, found) = block_on(async {
        let mut letters = Vec::new();
        for picked in by_ids(&sources, std::slice::from_ref(&args.id)).await? {
            let opened = &sources[picked.source];
            if let Some(letter) = opened.source.dead_one(&picked.line.death.id).await? {
                letters.push((opened, letter));
            }
        }
        let found = match (&ledger, letters.first()) {
            (Some(ledger), Some((_, letter))) => record(ledger, letter).await,
            (Some(_) | None, _) => Record::NotAsked,
        };
        Ok::<_, crate::report::Trouble>((letters, found))
    })??;
    let Some((opened, letter)) = letters.first() else { return Err(super::pick::not_there(&args.id, &sources)) };
    if args.payload {
        report::data_bytes(&letter.envelope.payload);
        return Ok(Code::Fine.exit());
    }
    match form {
        Form::Json => report::data_json(&letter_json(opened, letter, &found)),
        Form::Text => report::data(&text(opened, letter, &found)),
    }
    for (_, other) in &letters[1..] {
        report::say(format_args!("there is another of this task: `{}`", plain::line(&other.death.id)));
    }
    Ok(Code::Fine.exit())
}

/// What the ledger says of its task.
enum Record {
    /// It has no task of its own, or there is no ledger.
    NotAsked,
    None,
    Found(Found),
    Failed(taskonce::Error),
}

async fn record(ledger: &Ledger, letter: &DeadLetter) -> Record {
    let Some(key) = key_of(&letter.death.id, &letter.death.reason, letter.envelope.key.as_deref()) else {
        return Record::NotAsked;
    };
    match ledger.show(&key).await {
        Ok(Some(found)) => Record::Found(found),
        Ok(None) => Record::None,
        Err(error) => Record::Failed(error),
    }
}

fn letter_json(opened: &Opened, letter: &DeadLetter, record: &Record) -> Value {
    let envelope = &letter.envelope;
    let key = key_of(&letter.death.id, &letter.death.reason, letter.envelope.key.as_deref());
    let record = match (record, &key) {
        (Record::Found(found), Some(key)) => view::record_json(key, found),
        (Record::Failed(error), _) => json!({ "error": error.to_string() }),
        (Record::Found(_) | Record::None | Record::NotAsked, _) => Value::Null,
    };
    json!({
        "id": letter.death.id,
        "source": opened.name(),
        "reason": letter.death.reason,
        "error": letter.death.message,
        "handler": envelope.handler,
        "key": key.map(|key| key.as_str().to_owned()).or_else(|| envelope.key.clone()),
        "age_ms": view::millis(letter.age),
        "deliveries": letter.number,
        "coordinates": &*letter.coordinates,
        "sent_at": envelope.sent_at.map(view::time_json),
        "redriven_at": letter.redriven_at.map(view::time_json),
        "priority": envelope.priority.name(),
        "headers": envelope.headers,
        "content_type": envelope.content_type,
        "payload_bytes": envelope.payload.len(),
        "payload": payload_text(&envelope.payload),
        "record": record,
    })
}

/// The payload where it is text, and all of it can be shown.
fn payload_text(payload: &[u8]) -> Option<&str> {
    std::str::from_utf8(payload).ok().filter(|text| text.len() <= PAYLOAD_SHOWN_MAX)
}

fn text(opened: &Opened, letter: &DeadLetter, record: &Record) -> String {
    let (death, envelope) = (&letter.death, &letter.envelope);
    let mut text = format!("dead letter {} in {}\n", plain::line(&death.id), plain::line(opened.name()));
    let mut line = |name: &str, value: &str| {
        // Writing into a string cannot fail.
        let _ = writeln!(text, "  {name:<12} {value}");
    };
    line("reason", &format!("{}: {}", plain::line(&death.reason), meaning(&death.reason)));
    line("error", &plain::line(&death.message));
    line("died", &format!("{} ago, at delivery {}", spell(letter.age), letter.number));
    line("handler", &plain::line(&envelope.handler));
    line("key", &envelope.key.as_deref().map_or("none".into(), plain::line));
    if let Some(at) = envelope.sent_at {
        line("sent", &view::time(at));
    }
    if let Some(at) = letter.redriven_at {
        line("redriven", &view::time(at));
    }
    line("coordinates", &letter.coordinates);
    for (name, value) in &envelope.headers {
        line("header", &format!("{}: {}", plain::line(name), plain::line(value)));
    }
    let size = spell_size(envelope.payload.len() as u64);
    let content_type = envelope.content_type.as_deref().map_or("of no type".into(), plain::line);
    line("payload", &format!("{size}, {content_type}"));
    match String::from_utf8_lossy(&envelope.payload[..envelope.payload.len().min(PAYLOAD_SHOWN_MAX)]) {
        shown if envelope.payload.is_empty() => drop(shown),
        shown if std::str::from_utf8(&envelope.payload).is_err() => {
            drop(shown);
            line("", "no text; `--payload` writes it to stdout");
        }
        shown => {
            line("", &plain::line(shown.trim_end_matches('\u{fffd}')));
            if envelope.payload.len() > PAYLOAD_SHOWN_MAX {
                line("", "… (its beginning; `--payload` writes all of it to stdout)");
            }
        }
    }
    match record {
        Record::NotAsked => {}
        Record::None => line("record", "none: a redrive runs it from the beginning"),
        Record::Found(found) => line("record", &view::sentence(found)),
        Record::Failed(error) => line("record", &plain::line(&error.to_string())),
    }
    let _ = writeln!(text, "{}", advice(opened, &death.id, &death.reason));
    text
}

/// What a reason means, in a few words.
fn meaning(reason: &str) -> &'static str {
    match reason {
        "dead" => "it failed for good, or its attempts are used up",
        "parked" => "whether it took effect is in doubt",
        "mismatch" => "its key stands for another payload",
        "unreadable" => "its key or payload cannot be read",
        "unreadable_record" => "the record of its task is damaged",
        "too_old" => "it is older than its record would be",
        _ => "as its sender or broker says",
    }
}

/// What to do.
fn advice(opened: &Opened, id: &str, reason: &str) -> String {
    let (id, option) = (view::quoted(id), &opened.option);
    let redrive = format!("`taskonce dead redrive {id} {option}`");
    let drop = format!("`taskonce dead drop {id} {option}`");
    match reason {
        "dead" => format!("when its cause is mended, {redrive} runs it again"),
        "parked" => format!(
            "look at its effect first: if it happened, `taskonce resolve` says so, and {redrive} settles the delivery; \
             if it did not, {redrive} runs it again"
        ),
        "mismatch" => format!("see which producer uses the key twice; {drop} forgets this one"),
        "unreadable" => format!("mend the producer or the handler, then {redrive}; or {drop}"),
        "unreadable_record" => format!("`taskonce clear` removes the record, then {redrive} runs it; or {drop}"),
        "too_old" => format!("if it was not done before, {redrive} runs it; else {drop}"),
        _ => format!("{redrive} publishes it again, {drop} forgets it"),
    }
}
