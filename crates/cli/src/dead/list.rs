//! `dead list`: dead letters one by one, or in groups of those that died of the same.

use std::collections::HashMap;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use taskonce::source::DeadLine;

use super::ListArgs;
use super::pick::{Picked, Wants, key_of, walk};
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::sources::Opened;
use crate::units::spell;
use crate::width::Shrinks;
use crate::{block_on, plain, view, width};

/// The most groups: beyond that errors differ in something else than numbers.
const GROUPS_MAX: usize = 10_000;
/// The longest error that groups are told apart by, in characters.
const ERROR_MAX: usize = 200;

/// Lists them.
pub(super) fn list(args: &ListArgs, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    if args.group { groups(args, &sources, form) } else { letters(args, &sources, form) }
}

fn letters(args: &ListArgs, sources: &[Opened], form: Form) -> Result<ExitCode> {
    let limit = args.limit as usize;
    let mut picked: Vec<Picked> = Vec::new();
    let ended = block_on(walk(sources, &args.pick, |letter| {
        if picked.len() == limit {
            return Wants::Nothing;
        }
        picked.push(letter);
        Wants::More
    }))??;
    match form {
        Form::Json => report::data_json(&json!({
            "dead_letters": picked.iter().map(|letter| line_json(sources, letter)).collect::<Vec<_>>(),
            "more": ended == Wants::Nothing,
        })),
        Form::Text if picked.is_empty() => report::say("no dead letter matches"),
        Form::Text => {
            let rows = picked.iter().map(|letter| cells(&letter.line)).collect();
            let shrinks = Shrinks { column: 4, min: 12 };
            report::data(&width::table(["REASON", "ID", "FOR", "DELIVERIES", "ERROR"], rows, shrinks, columns()));
            if ended == Wants::Nothing {
                report::say("there are more: raise `--limit`, or group them with `--group`");
            }
        }
    }
    Ok(Code::Fine.exit())
}

fn columns() -> Option<usize> {
    width::of(io::stdout())
}

fn cells(line: &DeadLine) -> [String; 5] {
    [
        plain::line(&line.death.reason).into_owned(),
        plain::line(&line.death.id).into_owned(),
        spell(line.age),
        line.number.to_string(),
        width::cut(&plain::line(&line.death.message), ERROR_MAX),
    ]
}

/// A dead letter for programs, without its payload.
pub(super) fn line_json(sources: &[Opened], letter: &Picked) -> Value {
    let line = &letter.line;
    json!({
        "id": line.death.id,
        "source": sources[letter.source].name(),
        "reason": line.death.reason,
        "error": line.death.message,
        "handler": line.handler,
        "key": key_of(&line.death.id, &line.death.reason, line.key.as_deref()).map(|key| key.as_str().to_owned()).or_else(|| line.key.clone()),
        "age_ms": view::millis(line.age),
        "deliveries": line.number,
        "payload_bytes": line.payload_len,
    })
}

/// Those that died of the same.
struct Group {
    count: u64,
    oldest: Duration,
    newest: Duration,
    /// The id of one.
    example: String,
}

/// What a group is known by.
type Same = (String, String, String);

fn groups(args: &ListArgs, sources: &[Opened], form: Form) -> Result<ExitCode> {
    let mut groups: HashMap<Same, Group> = HashMap::new();
    let mut others = 0_u64;
    block_on(walk(sources, &args.pick, |Picked { line, .. }| {
        let same = (line.handler.clone(), line.death.reason.clone(), outline(&line.death.message));
        if groups.len() >= GROUPS_MAX && !groups.contains_key(&same) {
            others += 1;
            return Wants::More;
        }
        let example = || line.death.id.clone();
        let group = groups.entry(same).or_insert_with(|| Group {
            count: 0,
            oldest: line.age,
            newest: line.age,
            example: example(),
        });
        group.count += 1;
        group.oldest = group.oldest.max(line.age);
        group.newest = group.newest.min(line.age);
        Wants::More
    }))??;
    let mut groups: Vec<(Same, Group)> = groups.into_iter().collect();
    groups.sort_by(|(a, one), (b, other)| other.count.cmp(&one.count).then_with(|| a.cmp(b)));
    let left: u64 = others + groups.iter().skip(args.limit as usize).map(|(_, group)| group.count).sum::<u64>();
    groups.truncate(args.limit as usize);
    match form {
        Form::Json => report::data_json(&json!({
            "groups": groups.iter().map(group_json).collect::<Vec<_>>(),
            "of_other_groups": left,
        })),
        Form::Text if groups.is_empty() => report::say("no dead letter matches"),
        Form::Text => {
            let rows = groups.iter().map(group_cells).collect();
            let heads = ["COUNT", "HANDLER", "REASON", "OLDEST", "NEWEST", "ONE OF THEM", "ERROR"];
            report::data(&width::table(heads, rows, Shrinks { column: 6, min: 12 }, columns()));
            if left > 0 {
                report::say(format_args!("{left} more are of other groups: raise `--limit`"));
            }
        }
    }
    Ok(Code::Fine.exit())
}

fn group_json(((handler, reason, error), group): &(Same, Group)) -> Value {
    json!({
        "count": group.count,
        "handler": handler,
        "reason": reason,
        "error": error,
        "oldest_ms": view::millis(group.oldest),
        "newest_ms": view::millis(group.newest),
        "example": group.example,
    })
}

fn group_cells(((handler, reason, error), group): &(Same, Group)) -> [String; 7] {
    [
        group.count.to_string(),
        plain::line(handler).into_owned(),
        plain::line(reason).into_owned(),
        spell(group.oldest),
        spell(group.newest),
        plain::line(&group.example).into_owned(),
        plain::line(error).into_owned(),
    ]
}

/// After these words a number says what went wrong: `exit code 64`, `status 503`.
const TELLING: [&str; 6] = ["code", "status", "signal", "http", "error", "errno"];

/// An error without what differs from one task to the next: words with a digit in them, and what stands in quotation marks, are
/// `…`, but for a number that says what went wrong. What is beyond some length does not count.
fn outline(message: &str) -> String {
    let (mut outline, mut rest, mut last) = (String::new(), message, "");
    // Each round takes a piece of the message.
    while let Some(first) = rest.chars().next() {
        let in_word = outline.chars().last().is_some_and(char::is_alphanumeric);
        let is_quote = matches!(first, '"' | '`') || first == '\'' && !in_word;
        let quoted = is_quote.then(|| rest[1..].find(first)).flatten();
        let taken = match quoted {
            Some(end) => {
                outline.push_str(&format!("{first}…{first}"));
                end + 2
            }
            None if first.is_alphanumeric() => {
                let is_word = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '/' | '@');
                let end = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
                let word = &rest[..end];
                let ends = word.trim_end_matches(|c: char| !c.is_alphanumeric());
                let is_number = ends.chars().all(|c| c.is_ascii_digit());
                let is_telling = is_number && TELLING.iter().any(|word| last.eq_ignore_ascii_case(word));
                last = ends;
                if ends.contains(|c: char| c.is_ascii_digit()) && !is_telling {
                    outline.push('…');
                } else {
                    outline.push_str(ends);
                }
                outline.push_str(&word[ends.len()..]);
                end
            }
            None => {
                outline.push(first);
                first.len_utf8()
            }
        };
        rest = &rest[taken..];
        if outline.chars().count() > ERROR_MAX {
            break;
        }
    }
    width::cut(&outline, ERROR_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_differ_in_numbers_and_quoted_words_only_have_one_outline() {
        for (one, other) in [
            ("the card 4711 was declined", "the card 12 was declined"),
            ("timeout after 2.5s: host db-1:5432", "timeout after 10s: host db-22:5432"),
            ("no user `ada`", "no user `bob`"),
            ("task shop/charge@2/a-1: no", "task shop/charge@2/b-2: no"),
            ("id 3f2a-77 is gone", "id 9-bc is gone"),
        ] {
            assert_eq!(outline(one), outline(other));
        }
        assert_ne!(outline("exit code 64"), outline("exit code 1"));
        assert_eq!(outline("HTTP 503 of order 17: Status 4"), "HTTP 503 of order …: Status 4");
        assert_ne!(outline("the card was declined"), outline("the card has expired"));
        assert_eq!(outline("it's 5 o'clock: 'a b'"), "it's … o'clock: '…'");
        assert_eq!(outline("naïve \"1\" ü"), "naïve \"…\" ü");
        assert_eq!(outline(""), "");
        assert!(outline(&"a ".repeat(4000)).chars().count() <= ERROR_MAX);
    }
}
