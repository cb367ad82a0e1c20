//! A record as people and programs read it: the pieces that several subcommands print.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use taskonce::store::record::WallTime;
use taskonce::{
    Aftermath, DropReason, Effect, Event, EventKind, Failure, FailureClass, Found, Key, Output, Record, State, Step,
    StepState,
};

use crate::plain;
use crate::run::capture;
use crate::units::{spell, spell_left, spell_size};

/// A time of day, in this machine's zone.
pub(crate) fn time(at: WallTime) -> String {
    let stamp = i64::try_from(at.0).ok().and_then(|millis| Timestamp::from_millisecond(millis).ok());
    match stamp {
        Some(stamp) => stamp.to_zoned_datetime(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S %:z").to_string(),
        None => format!("{} ms after 1970", at.0),
    }
}

/// The same as RFC 3339 in UTC, for programs.
pub(crate) fn time_json(at: WallTime) -> Value {
    let stamp = i64::try_from(at.0).ok().and_then(|millis| Timestamp::from_millisecond(millis).ok());
    stamp.map_or(Value::Null, |stamp| json!(stamp.to_string()))
}

/// Whole milliseconds, for programs.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// One sentence: what happened to this task.
pub(crate) fn sentence(found: &Found) -> String {
    let record = &*found.record;
    let ago = spell(found.in_state_for());
    let (owner, attempt) = (plain::line(&record.owner), record.attempt);
    match record.state {
        State::Running if found.lease_left().is_zero() => {
            let then = match record.effect {
                Effect::Unrepeatable => "parks it for a person, since its effect is unrepeatable",
                Effect::Repeatable | Effect::Keyed | Effect::Transactional | Effect::Fenced => "takes over",
            };
            format!("its holder {owner} is silent: the lease of attempt {attempt} has passed, the next call {then}")
        }
        State::Running => format!("running for {ago} on {owner}, attempt {attempt}"),
        State::Waiting if attempt == 0 => "waiting for its first attempt".to_owned(),
        State::Waiting if found.delay_left().is_zero() => {
            format!("waiting for its next attempt, which may start now; attempt {attempt} ended {ago} ago")
        }
        State::Waiting => {
            let left = spell_left(found.delay_left());
            format!("waiting for its next attempt, which may start in {left}; attempt {attempt} ended {ago} ago")
        }
        State::Done if matches!(record.output, Output::Dropped(DropReason::Resolved)) => {
            format!("done: a person said so {ago} ago")
        }
        State::Done => format!("done {ago} ago by {owner}, attempt {attempt}"),
        State::Dead => format!("dead: it failed for good {ago} ago, after {}", count(attempt, "attempt")),
        State::Parked => match (step_in_doubt(record), has_changed(record)) {
            (Some(step), _) => {
                format!("parked {ago} ago: whether its step `{}` took effect is in doubt", plain::line(&step.name))
            }
            (None, true) => format!("parked {ago} ago: its code has other steps than are recorded"),
            (None, false) => format!("parked {ago} ago: whether it took effect is in doubt"),
        },
    }
}

/// The step that began and did not end, of a task that is over for now.
pub(crate) fn step_in_doubt(record: &Record) -> Option<&Step> {
    record.steps.last().filter(|step| step.state == StepState::Begun)
}

/// Whether its code was found to have other steps than are recorded.
fn has_changed(record: &Record) -> bool {
    record.failure.as_ref().is_some_and(|failure| failure.class == FailureClass::StepChanged)
}

/// What to do next with a task; empty when there is nothing to do.
pub(crate) fn advice(key: &Key, record: &Record) -> String {
    let key = quoted(key.as_str());
    match record.state {
        State::Running | State::Waiting | State::Done => String::new(),
        State::Dead => format!("`taskonce redrive {key}` returns it to work"),
        State::Parked if step_in_doubt(record).is_some() => format!(
            "look at the effect of the step, then `taskonce resolve {key} --step-done --reason …`, and the task goes on behind \
             it, or `--not-done`, and the step runs again"
        ),
        State::Parked if has_changed(record) => format!(
            "let code run that asks for the recorded steps, and `taskonce redrive {key}`; or, if nothing is left to do, \
             `taskonce resolve {key} --done --reason …`"
        ),
        State::Parked => format!(
            "look at the effect, then `taskonce resolve {key} --done --reason …` or `--not-done`; \
             `taskonce redrive {key}` runs it again{}",
            if record.effect == Effect::Unrepeatable { ", and its effect may happen twice" } else { "" }
        ),
    }
}

/// A word as a shell takes it.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/@._-:+,=%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// `1 attempt`, `2 attempts`.
pub(crate) fn count(number: impl Into<u64>, what: &str) -> String {
    let number = number.into();
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// What is kept of the output.
pub(crate) fn output(output: &Output) -> String {
    match output {
        Output::Nothing => "none".to_owned(),
        Output::Kept { content_type, bytes } if content_type == capture::CONTENT_TYPE => match capture::read(bytes) {
            Some(kept) => {
                let cut = if kept.is_cut() { ", cut" } else { "" };
                let size = |bytes: &[u8]| spell_size(bytes.len() as u64);
                format!("kept: stdout {}, stderr {}{cut}", size(kept.stdout), size(kept.stderr))
            }
            None => format!("kept, and unreadable: {}", spell_size(bytes.len() as u64)),
        },
        Output::Kept { content_type, bytes } => {
            format!("kept: {} of {}", spell_size(bytes.len() as u64), plain::line(content_type))
        }
        Output::Dropped(reason) => format!("not kept: {}", why_dropped(*reason)),
    }
}

/// Why there is no output to replay.
pub(crate) fn why_dropped(reason: DropReason) -> String {
    match reason {
        DropReason::TooLarge { bytes } => format!("it was too large, {}", spell_size(bytes)),
        DropReason::NotEncodable => "it could not be encoded".to_owned(),
        DropReason::Expired => "its retention has passed".to_owned(),
        DropReason::NotKept => "as the first run asked".to_owned(),
        DropReason::Resolved => "a person said that the task was done".to_owned(),
    }
}

/// A failure in one line.
pub(crate) fn failure(failure: &Failure) -> String {
    let aftermath = match failure.aftermath {
        Aftermath::InDoubt => "",
        Aftermath::NothingHappened => "; nothing happened",
    };
    format!("{}{aftermath}", plain::line(&failure.message))
}

/// How an attempt ended, behind its number.
pub(crate) fn class(class: FailureClass) -> &'static str {
    match class {
        FailureClass::Retryable => "failed",
        FailureClass::Permanent => "failed for good",
        FailureClass::RanTooLong => "ran too long",
        FailureClass::Dropped => "was cancelled",
        FailureClass::Crashed => "crashed",
        FailureClass::StepChanged => "found other steps than its code has",
        FailureClass::StepInDoubt => "left a step in doubt",
    }
}

/// A line of history.
pub(crate) fn event(event: &Event) -> String {
    let (time, who, note) = (time(event.at), plain::line(&event.who), plain::line(&event.note));
    match event.kind {
        EventKind::Failed(class) => {
            format!("{time}  attempt {} {} on {who}: {note}", event.attempt, self::class(class))
        }
        EventKind::Redriven => format!("{time}  redriven by {who}: {note}"),
        EventKind::ResolvedDone => format!("{time}  resolved as done by {who}: {note}"),
        EventKind::ResolvedNotDone => format!("{time}  resolved as not done by {who}: {note}"),
        EventKind::Cleared => format!("{time}  cleared by {who}: {note}"),
    }
}

pub(crate) fn event_json(event: &Event) -> Value {
    json!({
        "kind": event.kind.name(),
        "at": time_json(event.at),
        "who": event.who,
        "attempt": event.attempt,
        "note": event.note,
    })
}

/// The steps of a record, a line each.
pub(crate) fn steps(steps: &[Step]) -> Vec<String> {
    let name_width = steps.iter().map(|step| plain::line(&step.name).chars().count()).max().unwrap_or(0);
    let line = |(place, step): (usize, &Step)| {
        let ended = match step.state {
            StepState::Begun => "-".to_owned(),
            StepState::Done => spell(step.ran_for),
        };
        format!(
            "{:>2}  {:<name_width$}  {:<13}  {:<5}  attempt {}  {:<8}  input {}  {}",
            place + 1,
            plain::line(&step.name),
            step.effect.name(),
            step.state.name(),
            step.attempt,
            ended,
            step.input,
            step_output(&step.output)
        )
    };
    steps.iter().enumerate().map(line).collect()
}

fn step_output(output: &Output) -> String {
    match output {
        Output::Nothing => "no output".to_owned(),
        Output::Kept { bytes, .. } => format!("output {}", spell_size(bytes.len() as u64)),
        Output::Dropped(_) => "output not kept".to_owned(),
    }
}

fn step_json(step: &Step) -> Value {
    json!({
        "name": step.name,
        "effect": step.effect.name(),
        "state": step.state.name(),
        "attempt": step.attempt,
        "ran_for_ms": millis(step.ran_for),
        "input": step.input.to_string(),
        "output": output_json(&step.output),
    })
}

fn failure_json(failure: &Failure) -> Value {
    json!({
        "class": failure.class.name(),
        "message": failure.message,
        "nothing_happened": failure.aftermath == Aftermath::NothingHappened,
    })
}

fn output_json(output: &Output) -> Value {
    match output {
        Output::Nothing => json!({ "kept": false, "reason": "nothing" }),
        Output::Kept { content_type, bytes } => {
            json!({ "kept": true, "content_type": content_type, "bytes": bytes.len() })
        }
        Output::Dropped(reason) => json!({ "kept": false, "reason": reason.name() }),
    }
}

/// A record as JSON. Numbers of 64 bits are strings; durations are milliseconds.
pub(crate) fn record_json(key: &Key, found: &Found) -> Value {
    let record: &Record = &found.record;
    json!({
        "key": key.as_str(),
        "state": record.state.name(),
        "owner": &*record.owner,
        "attempt": record.attempt,
        "crashes": record.crashes,
        "fence": record.fence.to_string(),
        "effect": record.effect.name(),
        "fingerprint": record.fingerprint.to_string(),
        "age_ms": found.age.millis,
        "in_state_ms": millis(found.in_state_for()),
        "lease_ms": millis(record.lease),
        "lease_left_ms": (record.state == State::Running).then(|| millis(found.lease_left())),
        "delay_left_ms": (record.state == State::Waiting).then(|| millis(found.delay_left())),
        "ran_for_ms": millis(record.ran_for),
        "retention_ms": millis(record.retention),
        "output_retention_ms": millis(record.output_retention),
        "output": output_json(&record.output),
        "failure": record.failure.as_ref().map(failure_json),
        "steps": record.steps.iter().map(step_json).collect::<Vec<_>>(),
        "history": record.history.iter().map(event_json).collect::<Vec<_>>(),
        "history_dropped": record.history_dropped,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_local_with_their_offset_and_never_fail() {
        assert!(time(WallTime(1_700_000_000_000)).starts_with("2023-11-1"));
        assert_eq!(time(WallTime(u64::MAX)), format!("{} ms after 1970", u64::MAX));
    }

    #[test]
    fn odd_words_are_quoted_for_the_shell() {
        assert_eq!(quoted("default/run@1/invoice-42"), "default/run@1/invoice-42");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
