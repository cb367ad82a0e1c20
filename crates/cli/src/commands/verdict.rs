//! What a command says of its task, by its exit code and by a small JSON: done, failed and how, and whether anything happened.

use std::time::Duration;

use serde::Deserialize;
use taskonce::{Failure, units};

use super::child::End;
use crate::run::signals;

/// The longest JSON of a result.
pub(crate) const RESULT_MAX: usize = 64 * 1024;
/// What a result is, for those whose command wrote something else.
const FORM: &str = "one JSON object with `outcome`, that is `done`, `retryable`, `permanent` or `nothing_happened`, and where wanted \
                    `message`, `retry_after` and `nothing_happened`";
/// EX_DATAERR of sysexits: what the task is made of is wrong, and no attempt mends that.
const DATA_WRONG: i32 = 65;

/// What a command says by words.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Told {
    pub(crate) outcome: Word,
    #[serde(default)]
    message: String,
    retry_after: Option<String>,
    #[serde(default)]
    nothing_happened: bool,
}

/// What became of the task.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Word {
    Done,
    Retryable,
    Permanent,
    NothingHappened,
}

impl Told {
    /// Reads it. The error says what is wrong with it, and nothing of what it holds.
    pub(crate) fn read(text: &[u8]) -> Result<Told, String> {
        let told: Told = serde_json::from_slice(text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            format!("line {line}, column {column} does not read as a result, which is {FORM}")
        })?;
        told.check()?;
        Ok(told)
    }

    /// What was read elsewhere.
    pub(crate) fn new(
        outcome: Word,
        message: String,
        retry_after: Option<String>,
        nothing_happened: bool,
    ) -> Result<Told, String> {
        let told = Told { outcome, message, retry_after, nothing_happened };
        told.check()?;
        Ok(told)
    }

    fn check(&self) -> Result<(), String> {
        match self.retry_after.as_deref().map(units::duration) {
            Some(Err(why)) => Err(format!("its `retry_after`: {why}")),
            Some(Ok(_)) | None => Ok(()),
        }
    }

    /// The failure that it tells, if it tells one.
    pub(crate) fn failure(self) -> Option<Failure> {
        let message =
            |otherwise: &str| if self.message.is_empty() { otherwise.to_owned() } else { self.message.clone() };
        let failure = match self.outcome {
            Word::Done => return None,
            Word::Retryable => Failure::retryable(message("the command failed")),
            Word::Permanent => Failure::permanent(message("the command failed for good")),
            Word::NothingHappened => Failure::retryable(message("nothing happened")).nothing_happened(),
        };
        let failure = if self.nothing_happened { failure.nothing_happened() } else { failure };
        let delay = self.retry_after.as_deref().and_then(|text| units::duration(text).ok());
        Some(match delay {
            Some(delay) => failure.retry_after(delay),
            None => failure,
        })
    }
}

/// What follows from how a command ended, what it told and the last line of its stderr. A failure that either says is one.
pub(crate) fn judge(end: &End, told: Option<Result<Told, String>>, last_line: Option<&str>) -> Result<(), Failure> {
    let because = |text: String| match last_line {
        Some(line) => format!("{text}: {line}"),
        None => text,
    };
    let of_told = match told {
        Some(Ok(told)) => told.failure(),
        Some(Err(why)) => Some(Failure::retryable(format!("the command's result cannot be used: {why}"))),
        None => None,
    };
    match (end, of_told) {
        (End::Exited(_) | End::Killed(_), Some(failure)) => Err(failure),
        (End::Exited(0), None) => Ok(()),
        (End::Exited(DATA_WRONG), None) => Err(Failure::permanent(because(format!("exit code {DATA_WRONG}")))),
        (End::Exited(code), None) => Err(Failure::retryable(because(format!("exit code {code}")))),
        (End::Killed(signal), None) => Err(Failure::retryable(because(format!("ended by {}", signals::name(*signal))))),
    }
}

/// A command that could not be started.
pub(crate) fn not_started(command: &str, error: &std::io::Error) -> Failure {
    Failure::retryable(format!("`{command}` cannot be started: {error}")).nothing_happened()
}

/// How long a process that left the group may keep a stream open after the command's end.
pub(crate) const GRACE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use taskonce::{Aftermath, FailureClass};

    use super::*;

    fn told(text: &str) -> Option<Result<Told, String>> {
        Some(Told::read(text.as_bytes()))
    }

    #[test]
    fn exit_codes_and_results_decide_as_the_page_says() {
        use FailureClass::{Permanent, Retryable};
        let cases = [
            (End::Exited(0), None, None),
            (End::Exited(0), told(r#"{"outcome":"done"}"#), None),
            (End::Exited(1), None, Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(75), None, Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(65), None, Some((Permanent, Aftermath::InDoubt))),
            (End::Killed(9), None, Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(1), told(r#"{"outcome":"done"}"#), Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(0), told(r#"{"outcome":"retryable"}"#), Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(1), told(r#"{"outcome":"permanent"}"#), Some((Permanent, Aftermath::InDoubt))),
            (End::Exited(1), told(r#"{"outcome":"nothing_happened"}"#), Some((Retryable, Aftermath::NothingHappened))),
            (
                End::Exited(65),
                told(r#"{"outcome":"permanent","nothing_happened":true}"#),
                Some((Permanent, Aftermath::NothingHappened)),
            ),
            (End::Exited(0), told(r#"{"outcome":"dnoe"}"#), Some((Retryable, Aftermath::InDoubt))),
            (End::Exited(0), told("done"), Some((Retryable, Aftermath::InDoubt))),
        ];
        for (end, told, want) in cases {
            let said = format!("{end:?} {told:?}");
            let judged = judge(&end, told, None).err().map(|failure| (failure.class, failure.aftermath));
            assert_eq!(judged, want, "{said}");
        }
    }

    #[test]
    fn a_failure_says_why_and_when_to_try_again() {
        let told = told(r#"{"outcome":"retryable","message":"slow down","retry_after":"30s"}"#);
        let failure = judge(&End::Exited(1), told, Some("noise")).unwrap_err();
        assert_eq!((failure.message.as_str(), failure.retry_after), ("slow down", Some(Duration::from_secs(30))));
        let failure = judge(&End::Exited(3), None, Some("no route to host")).unwrap_err();
        assert_eq!(failure.message, "exit code 3: no route to host");
        assert!(Told::read(br#"{"outcome":"retryable","retry_after":"30"}"#).unwrap_err().contains("retry_after"));
        assert!(!Told::read(br#"{"outcome":"secret"}"#).unwrap_err().contains("secret"));
    }
}
