//! Says what became of a run: to people on stderr, to programs as exit code and, with `--json`, as an object.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use taskonce::{
    DropReason, Effect, Error, Fingerprint, Found, MSGPACK, Outcome, Output, Record, Replayed, Seen, State,
};

use super::Call;
use super::capture::{self, Kept, Stream};
use super::child::Streams;
use super::handler::{End, Errand};
use super::signals::{self, Signals};
use super::told::{REPLAYED, Told, millis, out, show_bytes, shown, with_streams};
use crate::exit::Code;
use crate::report::{self, Form};
use crate::units::{spell, spell_left, spell_size};
use crate::{plain, view};

/// How long the end of the program waits for what a lost claim left to be written.
const FINISH_MAX: Duration = Duration::from_secs(2);

/// What is usually behind a lost claim.
const LOST_HINT: &str = "this process was stopped, or the store was away, for longer than the lease; \
                         call again, with a longer `--lease` if that is normal here";

/// An attempt of this call failed, and another follows; unless a signal, which is returned, came meanwhile.
pub(super) async fn will_retry(
    call: &Call,
    outcome: &Outcome<Output>,
    errand: &Errand,
    signals: &mut Signals,
) -> Option<i32> {
    errand.close();
    let cut_by = shown(errand.take_shows(), signals).await;
    if let Outcome::Failed { failure, record: Some(record) } = outcome {
        report::say(format_args!(
            "failed: attempt {} of {}: {}; the next starts in {}",
            record.attempt,
            call.policy.attempts_max,
            view::failure(failure),
            spell(record.delay)
        ));
    }
    cut_by
}

/// Says what became of the call, and gives its exit code.
pub(super) async fn tell(call: &Call, outcome: Outcome<Output>, errand: &Errand, signals: &mut Signals) -> ExitCode {
    errand.close();
    let mut cut_by = match &outcome {
        // First of all it is to be recorded.
        Outcome::DoneNotRecorded { .. } | Outcome::Failed { record: None, .. } => None,
        Outcome::Ran { .. }
        | Outcome::Replayed(_)
        | Outcome::Busy(_)
        | Outcome::Waiting(_)
        | Outcome::Failed { record: Some(_), .. }
        | Outcome::Dead(_)
        | Outcome::Parked(_)
        | Outcome::Mismatch { .. }
        | Outcome::ClaimLost { .. } => shown(errand.take_shows(), signals).await,
    };
    let told = match outcome {
        Outcome::Ran { value, record } => ran(call, &value, &record, errand),
        Outcome::Replayed(replayed) => {
            let (told, note, streams) = replay(&replayed);
            if let Some((stdout, stderr)) = streams {
                let stdout = if call.form == Form::Text { stdout } else { &[] };
                cut_by = show_bytes(Stream::Stdout, stdout, signals).await;
                if cut_by.is_none() {
                    cut_by = show_bytes(Stream::Stderr, stderr, signals).await;
                }
                if ends_within_a_line(stdout, stderr) {
                    report::say("");
                }
            }
            say_replayed(&replayed, note);
            told
        }
        Outcome::Busy(seen) => busy(call, &seen),
        Outcome::Waiting(seen) => waiting(call, &seen),
        Outcome::Failed { record, .. } if errand.end() == Some(End::LeasePassed) => {
            let found = record.map(|record| Found { record, age: Default::default() });
            claim_lost(call, found.as_ref(), errand).await
        }
        Outcome::Failed { failure, record } => {
            if record.is_none() {
                cut_by = try_on(call, signals).await;
            }
            failed(call, &view::failure(&failure), record.as_deref(), errand)
        }
        Outcome::Dead(seen) => dead(call, &seen),
        Outcome::Parked(seen) => parked(call, &seen),
        Outcome::Mismatch { seen, given } => mismatch(call, &seen, given),
        Outcome::ClaimLost { found } => {
            call.ledger.finish(FINISH_MAX).await;
            claim_lost(call, found.as_ref(), errand).await
        }
        Outcome::DoneNotRecorded { value, error } => {
            let told;
            (told, cut_by) = not_recorded(call, &value, error, errand, signals).await;
            told
        }
    };
    out(call, told, errand, cut_by, signals).await
}

/// The command has ended, and a signal came while that could not be recorded: says so plainly.
pub(super) async fn not_recorded_for(call: &Call, errand: &Errand, signal: i32, signals: &mut Signals) -> ExitCode {
    errand.close();
    let told = match errand.end() {
        Some(End::Exited(0)) | None => done_not_recorded(call, &format!("interrupted by {}", signals::name(signal))),
        Some(End::Exited(code)) => failed(call, &format!("exit code {code}"), None, errand),
        Some(End::Killed(signal)) => failed(call, &format!("ended by {}", signals::name(signal)), None, errand),
        Some(End::NotStarted(_, why)) => failed(call, &why, None, errand),
        Some(End::LeasePassed | End::GuardGone) => claim_lost(call, None, errand).await,
    };
    out(call, told, errand, Some(signal), signals).await
}

/// The end could not be recorded: tries on for another lease, unless a signal comes, which is returned.
async fn try_on(call: &Call, signals: &mut Signals) -> Option<i32> {
    tokio::select! {
        _finished = call.ledger.finish(call.policy.lease) => None,
        signal = signals.next_end() => Some(signal),
    }
}

fn ran(call: &Call, value: &Output, record: &Record, errand: &Errand) -> Told {
    let told = Told::new("ran", Code::Fine.number())
        .with("owner", &*record.owner)
        .with("attempt", record.attempt)
        .with("fence", record.fence.to_string())
        .with("ran_for_ms", millis(record.ran_for));
    let Output::Kept { bytes, .. } = value else { return told };
    let Some(kept) = capture::read(bytes) else { return told };
    if let (Streams::Kept { .. }, true) = (errand.streams(), kept.is_cut()) {
        report::say(format_args!("note: {}; a replay will end there", cut(&kept)));
    }
    match call.form {
        Form::Text => told,
        Form::Json => with_streams(told, &kept),
    }
}

fn cut(kept: &Kept<'_>) -> String {
    let mut parts = Vec::new();
    for (name, bytes, cut) in [("stdout", kept.stdout, kept.stdout_cut), ("stderr", kept.stderr, kept.stderr_cut)] {
        if cut > 0 {
            let all = bytes.len() as u64 + cut;
            parts.push(format!("only the first {} of {} of {name}", spell_size(bytes.len() as u64), spell_size(all)));
        }
    }
    format!("{} are kept", parts.join(" and "))
}

/// With what the command of this call wrote, for programs.
fn with_captured(told: Told, call: &Call, errand: &Errand) -> Told {
    match (call.form, errand.streams(), errand.end()) {
        (Form::Json, Streams::Kept { capture, .. }, Some(_)) => match capture.output() {
            Output::Kept { bytes, .. } => match capture::read(&bytes) {
                Some(kept) => with_streams(told, &kept),
                None => told,
            },
            Output::Nothing | Output::Dropped(_) => told,
        },
        (Form::Text | Form::Json, _, _) => told,
    }
}

/// What a replay tells, a note on it, and the two streams to be written again.
type Replay<'a> = (Told, Option<String>, Option<(&'a [u8], &'a [u8])>);

fn replay(first: &Replayed<Output>) -> Replay<'_> {
    let mut told = Told::new(REPLAYED, Code::Fine.number())
        .with("owner", &*first.owner)
        .with("attempt", first.attempt)
        .with("in_state_ms", millis(first.age));
    let (mut note, mut streams) = (None, None);
    match &first.value {
        Some(Output::Kept { content_type, bytes }) if content_type == capture::CONTENT_TYPE => {
            match capture::read(bytes) {
                Some(kept) => {
                    streams = Some((kept.stdout, kept.stderr));
                    note = kept.is_cut().then(|| cut(&kept));
                    told = with_streams(told, &kept);
                }
                None => note = Some("its output is kept in a form that this version cannot read".to_owned()),
            }
        }
        // A person gave it, with the word that it was done.
        Some(Output::Kept { content_type, bytes }) if content_type != MSGPACK => {
            let kept = Kept { stdout: bytes, stderr: &[], stdout_cut: 0, stderr_cut: 0 };
            streams = Some((kept.stdout, kept.stderr));
            told = with_streams(told, &kept).with("content_type", content_type.as_str());
        }
        Some(Output::Kept { content_type, bytes }) => {
            let (size, content_type) = (spell_size(bytes.len() as u64), plain::line(content_type));
            note = Some(format!("its output is {size} of {content_type}, not a command's"));
        }
        Some(Output::Dropped(reason)) => {
            told = told.with("output_dropped", reason.name());
            note = match reason {
                // That is what the line before says.
                DropReason::Resolved => None,
                DropReason::TooLarge { .. } | DropReason::NotEncodable | DropReason::Expired | DropReason::NotKept => {
                    Some(format!("its output is not kept: {}", view::why_dropped(*reason)))
                }
            };
        }
        Some(Output::Nothing) | None => {}
    }
    (told, note, streams)
}

/// Whether what was written last left the terminal's cursor within a line.
fn ends_within_a_line(stdout: &[u8], stderr: &[u8]) -> bool {
    let (last, is_shown) = match (stdout, stderr) {
        (stdout, []) => (stdout, io::stdout().is_terminal()),
        (_, stderr) => (stderr, true),
    };
    last.last().is_some_and(|byte| *byte != b'\n') && is_shown && io::stderr().is_terminal()
}

fn say_replayed(first: &Replayed<Output>, note: Option<String>) {
    let ago = spell(first.age);
    match &first.value {
        Some(Output::Dropped(DropReason::Resolved)) => {
            report::say(format_args!("replayed: a person said {ago} ago that it was done"));
        }
        Some(Output::Dropped(_) | Output::Kept { .. } | Output::Nothing) | None => report::say(format_args!(
            "replayed: done {ago} ago by {}, attempt {}",
            plain::line(&first.owner),
            first.attempt
        )),
    }
    if let Some(note) = note {
        report::say(format_args!("note: {note}"));
    }
}

fn busy(call: &Call, seen: &Seen) -> Told {
    let left = seen.defer_for();
    let text = format!(
        "task `{}` is running elsewhere\n  held by  {}, attempt {}, lease ends in {} unless it is renewed",
        call.task.key,
        plain::line(seen.owner()),
        seen.attempt(),
        spell_left(left)
    );
    Told::refused("busy", Code::Busy, text, later(call)).with_seen(seen)
}

fn later(call: &Call) -> String {
    if call.wait.is_zero() {
        "call again later, or pass `--wait 30s` to wait for it here".to_owned()
    } else {
        format!("it is still so after {}; call again later, or wait longer", spell(call.wait))
    }
}

fn waiting(call: &Call, seen: &Seen) -> Told {
    let mut text = format!(
        "task `{}` waits for its next attempt, which may start in {}",
        call.task.key,
        spell_left(seen.defer_for())
    );
    if let Some(failure) = seen.failure() {
        text.push_str(&format!(
            "\n  failed   attempt {} on {}: {}",
            seen.attempt(),
            plain::line(seen.owner()),
            view::failure(failure)
        ));
    }
    Told::refused("waiting", Code::Busy, text, later(call)).with_seen(seen)
}

fn failed(call: &Call, failure: &str, record: Option<&Record>, errand: &Errand) -> Told {
    let code = match errand.end() {
        // It said that it went well, and its task is not done: it was to complete it.
        Some(End::Exited(0)) => Code::NotSo.number(),
        Some(end) => end.code(),
        None => Code::NotExecutable.number(),
    };
    let key = view::quoted(call.task.key.as_str());
    let told = with_captured(Told::new("failed", code).with("failure", failure), call, errand);
    let Some(record) = record else {
        report::say(format_args!(
            "error: the command failed ({failure}), and that could not be recorded\n\
             hint: until its lease has passed, the task is busy; then the next call decides by its effect"
        ));
        return told.with("recorded", false);
    };
    let attempt = record.attempt;
    match record.state {
        State::Dead => report::say(format_args!(
            "dead: attempt {attempt} of {} failed: {failure}\nhint: {}",
            call.policy.attempts_max,
            view::advice(&call.task.key, record)
        )),
        State::Parked => report::say(format_args!(
            "parked: attempt {attempt} failed: {failure}; whether it took effect is in doubt\nhint: {}",
            view::advice(&call.task.key, record)
        )),
        State::Waiting | State::Running | State::Done => report::say(format_args!(
            "failed: attempt {attempt}: {failure}\nhint: the next call tries again; `taskonce show {key}` has its history"
        )),
    }
    told.with("recorded", true)
        .with("state", record.state.name())
        .with("attempt", attempt)
        .with("owner", &*record.owner)
}

fn dead(call: &Call, seen: &Seen) -> Told {
    let mut text = format!("task `{}` is {}", call.task.key, view::sentence(&seen.found));
    if let Some(failure) = seen.failure() {
        text.push_str(&format!("\n  failed   {}", view::failure(failure)));
    }
    Told::refused("dead", Code::Dead, text, view::advice(&call.task.key, &seen.found.record)).with_seen(seen)
}

fn parked(call: &Call, seen: &Seen) -> Told {
    let mut text = format!("task `{}` was {}", call.task.key, view::sentence(&seen.found));
    if let Some(failure) = seen.failure() {
        text.push_str(&format!(
            "\n  ended    attempt {} on {}: {}",
            seen.attempt(),
            plain::line(seen.owner()),
            view::failure(failure)
        ));
    }
    Told::refused("parked", Code::Parked, text, view::advice(&call.task.key, &seen.found.record)).with_seen(seen)
}

fn mismatch(call: &Call, seen: &Seen, given: Fingerprint) -> Told {
    let held = seen.found.record.fingerprint;
    let text = format!(
        "task `{}` is in use for another payload\n  recorded  {held}  ({})\n  given     {given}",
        call.task.key,
        view::sentence(&seen.found)
    );
    let hint = format!(
        "use another key, or `--version` for a new meaning of this one; `taskonce clear {} --reason …` removes the record",
        view::quoted(call.task.key.as_str())
    );
    Told::refused("mismatch", Code::Mismatch, text, hint)
        .with("recorded_fingerprint", held.to_string())
        .with("given_fingerprint", given.to_string())
}

async fn claim_lost(call: &Call, found: Option<&Found>, errand: &Errand) -> Told {
    let key = &call.task.key;
    let what = if errand.has_begun() {
        "was lost while its command ran; the command was killed"
    } else {
        "was lost before its command was started; no command was run"
    };
    let (now, hint) = match found {
        Some(found) => (format!("it is now: {}", view::sentence(found)), LOST_HINT.to_owned()),
        None => match tokio::time::timeout(FINISH_MAX, removed(call)).await {
            Ok(Ok(Removal::Not(found))) => (format!("it is now: {}", view::sentence(&found)), LOST_HINT.to_owned()),
            Ok(Ok(Removal::By(note))) => (
                format!("its record was removed{note}"),
                format!("the task may run again; `taskonce show {}` says who removed it", view::quoted(key.as_str())),
            ),
            Ok(Err(_)) | Err(_) => ("the store could not be asked what it is now".to_owned(), LOST_HINT.to_owned()),
        },
    };
    Told::refused("claim_lost", Code::Busy, format!("the claim on task `{key}` {what}\n  {now}"), hint)
        .with("state", found.map(|found| found.record.state.name()))
}

/// Whether a record that a claim no longer found was removed.
enum Removal {
    Not(Box<Found>),
    /// With what its note says, if one is kept.
    By(String),
}

async fn removed(call: &Call) -> taskonce::Result<Removal> {
    if let Some(found) = call.ledger.show(&call.task.key).await? {
        return Ok(Removal::Not(Box::new(found)));
    }
    let note = call.ledger.cleared(&call.task.key).await?;
    let note = note.as_ref().and_then(|note| note.record.history.last());
    Ok(Removal::By(note.map_or_else(String::new, |event| format!(":\n  {}", view::event(event)))))
}

/// The command succeeded and the store was away: tries on for another lease, or until a signal comes; then says so
/// plainly. The signal that cut short the writing of output is returned.
async fn not_recorded(
    call: &Call,
    value: &Output,
    error: Error,
    errand: &Errand,
    signals: &mut Signals,
) -> (Told, Option<i32>) {
    report::say(format_args!(
        "warning: the command succeeded, and that is not recorded yet: {error}\n         trying on for {}",
        spell(call.policy.lease)
    ));
    if let Some(signal) = try_on(call, signals).await {
        let why = format!("{error}; interrupted by {}", signals::name(signal));
        return (with_captured(done_not_recorded(call, &why), call, errand), Some(signal));
    }
    if let Ok(Some(found)) = call.ledger.show(&call.task.key).await
        && found.record.state == State::Done
    {
        report::say("recorded: done");
        let cut_by = shown(errand.take_shows(), signals).await;
        return (ran(call, value, &found.record, errand), cut_by);
    }
    (with_captured(done_not_recorded(call, &error.to_string()), call, errand), None)
}

fn done_not_recorded(call: &Call, why: &str) -> Told {
    let then = match call.policy.effect {
        Effect::Unrepeatable => "the next call parks the task for a person, since its effect is unrepeatable",
        Effect::Keyed => "the next call runs the command again with the same TASKONCE_DOWNSTREAM_KEY",
        Effect::Repeatable | Effect::Transactional | Effect::Fenced => "the next call runs the command again",
    };
    let text = format!("task `{}`: the command was done, and that could not be recorded: {why}", call.task.key);
    Told::refused("done_not_recorded", Code::StoreAway, text, format!("repair the store; {then}"))
}
