//! `show`: what happened to this key?

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::json;
use taskonce::{Found, Key, Output, State};

use crate::args::{Common, OneTask, ShowArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::run::capture;
use crate::units::{spell, spell_left, spell_size};
use crate::{block_on, plain, store, view};

/// Prints what is remembered of a task.
pub(crate) fn show(args: &ShowArgs, common: &Common, form: Form) -> Result<ExitCode> {
    if args.output && form == Form::Json {
        return Err(Trouble::usage("`--output` writes bytes, not JSON", "leave out `--json`, or `--output`"));
    }
    let key = args.task.key()?;
    let ledger = store::open_existing(common.store.as_deref())?;
    let (found, cleared) = block_on(async {
        match ledger.show(&key).await? {
            Some(found) => Ok((Some(found), None)),
            None => Ok::<_, taskonce::Error>((None, ledger.cleared(&key).await?)),
        }
    })??;
    if args.output {
        return output(&key, found.as_ref(), &args.task);
    }
    match (found, form) {
        (Some(found), Form::Text) => report::data(&describe(&key, &found)),
        (Some(found), Form::Json) => report::data_json(&view::record_json(&key, &found)),
        (None, Form::Text) => {
            report::data(&absent(&key, cleared.as_ref(), &args.task));
            return Ok(Code::NotSo.exit());
        }
        (None, Form::Json) => {
            let notes = cleared.iter().flat_map(|found| &found.record.history).map(view::event_json);
            report::data_json(&json!({ "key": key.as_str(), "state": "absent", "cleared": notes.collect::<Vec<_>>() }));
            return Ok(Code::NotSo.exit());
        }
    }
    Ok(Code::Fine.exit())
}

/// Writes the kept output, or says why there is none.
fn output(key: &Key, found: Option<&Found>, task: &OneTask) -> Result<ExitCode> {
    let none = |why: String, hint: String| Trouble::new(Code::NotSo, "no_output", format!("task `{key}`: {why}"), hint);
    let Some(found) = found else {
        return Err(none("there is no record of it".to_owned(), task.elsewhere()));
    };
    if found.record.state != State::Done {
        let hint = format!("`taskonce show {}` says what became of it", view::quoted(key.as_str()));
        return Err(none(format!("it is {}, and only a done task has an output", found.record.state), hint));
    }
    match &found.record.output {
        Output::Kept { content_type, bytes } if content_type == capture::CONTENT_TYPE => {
            let kept = capture::read(bytes).ok_or_else(|| {
                let hint = "read it with the version of taskonce that wrote it";
                none("its output is kept in a form that this version cannot read".to_owned(), hint.to_owned())
            })?;
            report::data_bytes(kept.stdout);
            if kept.stdout_cut > 0 {
                let missing = spell_size(kept.stdout_cut);
                report::say(format_args!("note: it ends early: {missing} of stdout are not kept"));
            }
        }
        Output::Kept { bytes, .. } => report::data_bytes(bytes),
        Output::Nothing => {
            return Err(none("it has no output".to_owned(), "its handler returned nothing".to_owned()));
        }
        Output::Dropped(reason) => {
            let hint = "`--output-max` and `--retain-output` of `taskonce run` decide what is kept of the next one";
            return Err(none(format!("its output is not kept: {}", view::why_dropped(*reason)), hint.to_owned()));
        }
    }
    Ok(Code::Fine.exit())
}

/// Writes the lines `name  value`.
struct Lines(String);

impl Lines {
    fn add(&mut self, name: &str, value: &str) {
        // Writing into a string cannot fail.
        let _ = writeln!(self.0, "  {name:<13}{value}");
    }
}

fn describe(key: &Key, found: &Found) -> String {
    let record = &*found.record;
    let mut lines = Lines(format!("{key}\n{}\n\n", view::sentence(found)));
    lines.add("state", record.state.name());
    lines.add("owner", &plain::line(&record.owner));
    lines.add("attempt", &record.attempt.to_string());
    if record.crashes > 0 {
        lines.add("crashes", &format!("{} (claims that ended by a passed lease)", record.crashes));
    }
    lines.add("effect", record.effect.name());
    lines.add("fence", &record.fence.to_string());
    match record.state {
        State::Running => {
            let left = match found.lease_left() {
                left if left.is_zero() => "passed".to_owned(),
                left => format!("{} left", spell_left(left)),
            };
            lines.add("lease", &format!("{}, {left}", spell(record.lease)));
            lines.add("last beat", &format!("{} ago", spell(found.age.as_duration())));
        }
        State::Waiting => lines.add(
            "next attempt",
            &match found.delay_left() {
                left if left.is_zero() => "may start now".to_owned(),
                left => format!("may start in {}", spell_left(left)),
            },
        ),
        State::Done | State::Dead | State::Parked => {}
    }
    if !record.ran_for.is_zero() {
        lines.add("ran for", &spell(record.ran_for));
    }
    if record.state == State::Done {
        lines.add("output", &kept_output(found));
    }
    if let Some(failure) = &record.failure {
        lines.add("last failure", &format!("it {}: {}", view::class(failure.class), view::failure(failure)));
    }
    if record.state.is_final() {
        let left = found.age.left_of(record.retention);
        let left = if left.is_zero() { "until the next purge".to_owned() } else { format!("{} more", spell(left)) };
        lines.add("record stays", &left);
    }
    lines.add("fingerprint", &record.fingerprint.to_string());
    lines.add("downstream", &key.downstream("").to_string());
    let mut text = lines.0;
    if !record.steps.is_empty() {
        text.push_str("\n  steps\n");
        for step in view::steps(&record.steps) {
            let _ = writeln!(text, "   {step}");
        }
    }
    if !record.history.is_empty() {
        text.push_str("\n  history\n");
        if record.history_dropped > 0 {
            let _ = writeln!(text, "    … {} earlier ones are not kept", record.history_dropped);
        }
        for event in &record.history {
            let _ = writeln!(text, "    {}", view::event(event));
        }
    }
    let advice = view::advice(key, record);
    if !advice.is_empty() {
        let _ = writeln!(text, "\nhint: {advice}");
    }
    text
}

/// What is kept of the output, and how long. A store may keep it as long as its record, so its own retention is the least.
fn kept_output(found: &Found) -> String {
    let record = &*found.record;
    let left = found.age.left_of(record.output_retention.min(record.retention));
    match &record.output {
        Output::Kept { .. } if !left.is_zero() => {
            format!("{}, for at least {} more", view::output(&record.output), spell(left))
        }
        Output::Kept { .. } | Output::Nothing | Output::Dropped(_) => view::output(&record.output),
    }
}

fn absent(key: &Key, cleared: Option<&Found>, task: &OneTask) -> String {
    let mut text = format!("{key}\n");
    let Some(note) = cleared else {
        text.push_str("there is no record of it: it never ran here, or its record was purged after its retention\n");
        let _ = writeln!(text, "\nhint: {}", task.elsewhere());
        return text;
    };
    text.push_str("there is no record of it: a person removed it\n\n  history\n");
    for event in &note.record.history {
        let _ = writeln!(text, "    {}", view::event(event));
    }
    text
}
