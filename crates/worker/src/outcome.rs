//! What became of a run, and how values become outputs.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::key::{Fingerprint, Key};
use taskonce_core::ledger::Seen;
use taskonce_core::record::{Age, DropReason, Failure, Found, Output, Record, State};
use taskonce_core::{Error, ErrorKind, Result};

/// The content type of values encoded by [`encode`].
pub const MSGPACK: &str = "application/msgpack";
/// The content type of outputs that other languages and people write; [`decode`] reads it too.
pub const JSON: &str = "application/json";

/// What became of a run. None of these is an error; `Busy` and `Waiting` must be deferred, never acknowledged.
#[must_use = "a busy or waiting task has not been done"]
#[derive(Debug)]
pub enum Outcome<T> {
    /// The handler ran, and its success is recorded.
    Ran {
        /// What it returned.
        value: T,
        /// The record as stored.
        record: Arc<Record>,
    },
    /// Done before.
    Replayed(Replayed<T>),
    /// Another claim holds; defer by [`Seen::defer_for`].
    Busy(Seen),
    /// The delay before the next attempt has not passed; defer by [`Seen::defer_for`].
    Waiting(Seen),
    /// The handler ran and failed.
    Failed {
        /// How.
        failure: Failure,
        /// The record as stored: waiting with its delay, dead, or parked. `None`: the failure is not recorded yet.
        record: Option<Arc<Record>>,
    },
    /// Out of attempts, or failed for good.
    Dead(Seen),
    /// In doubt; waits for a person.
    Parked(Seen),
    /// The key is in use for another payload.
    Mismatch {
        /// What the key holds.
        seen: Seen,
        /// The fingerprint that was asked with.
        given: Fingerprint,
    },
    /// The claim was lost while the handler ran: another took over, or the record was removed. Nothing was recorded.
    ClaimLost {
        /// What the key holds now.
        found: Option<Found>,
    },
    /// The handler succeeded, and the store could not be told. It is tried on in the background for one lease; then
    /// the operation follows its effect's rule.
    DoneNotRecorded {
        /// What the handler returned.
        value: T,
        /// Why it could not be recorded.
        error: Error,
    },
}

/// The first run's result, for a duplicate.
#[derive(Debug)]
pub struct Replayed<T> {
    /// What the first run returned; `None` when it was not kept.
    pub value: Option<T>,
    /// Why it was not kept.
    pub dropped: Option<DropReason>,
    /// The first run's attempt.
    pub attempt: u32,
    /// Who ran it.
    pub owner: Arc<str>,
    /// How long ago it was done.
    pub age: Duration,
    /// Whether this process's cache answered.
    pub cached: bool,
}

/// What a consumer does with the delivery that brought the task.
#[must_use = "a delivery that is not settled comes again"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// The task took effect: acknowledge the delivery.
    Acknowledge,
    /// Let the delivery come again after this time, and do not hold a worker's slot for it. Never acknowledge it: it may
    /// be the only copy left when the holder dies.
    Defer(Duration),
    /// No delivery brings it further before a person acts: move it to the dead-letter queue with this reason, then
    /// acknowledge it.
    DeadLetter(&'static str),
}

/// How long to defer where nobody knows what the store holds by now.
const DEFER_UNKNOWN: Duration = Duration::from_secs(1);

fn settlement_of(found: &Found) -> Settlement {
    match found.record.state {
        State::Done => Settlement::Acknowledge,
        State::Running => Settlement::Defer(found.lease_left()),
        State::Waiting => Settlement::Defer(found.delay_left()),
        State::Dead => Settlement::DeadLetter("dead"),
        State::Parked => Settlement::DeadLetter("parked"),
    }
}

impl<T> Outcome<T> {
    /// What to do with the delivery that brought the task.
    pub fn settlement(&self) -> Settlement {
        match self {
            Outcome::Ran { .. } | Outcome::Replayed(_) => Settlement::Acknowledge,
            // It may be held by a transaction that is open, beyond its lease.
            Outcome::Busy(seen) => Settlement::Defer(seen.defer_for()),
            Outcome::Waiting(seen) | Outcome::Dead(seen) | Outcome::Parked(seen) => settlement_of(&seen.found),
            Outcome::Failed { record: Some(record), .. } => {
                settlement_of(&Found { record: Arc::clone(record), age: Age::default() })
            }
            Outcome::Mismatch { .. } => Settlement::DeadLetter("mismatch"),
            Outcome::ClaimLost { found: Some(found) } => settlement_of(found),
            Outcome::ClaimLost { found: None }
            | Outcome::Failed { record: None, .. }
            | Outcome::DoneNotRecorded { .. } => Settlement::Defer(DEFER_UNKNOWN),
        }
    }

    /// The value, of a run or a replay.
    pub fn into_value(self) -> Option<T> {
        match self {
            Outcome::Ran { value, .. } | Outcome::DoneNotRecorded { value, .. } => Some(value),
            Outcome::Replayed(replayed) => replayed.value,
            Outcome::Busy(_)
            | Outcome::Waiting(_)
            | Outcome::Failed { .. }
            | Outcome::Dead(_)
            | Outcome::Parked(_)
            | Outcome::Mismatch { .. }
            | Outcome::ClaimLost { .. } => None,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::Ran { .. } => "ran",
            Outcome::Replayed(_) => "replayed",
            Outcome::Busy(_) => "busy",
            Outcome::Waiting(_) => "waiting",
            Outcome::Failed { .. } => "failed",
            Outcome::Dead(_) => "dead",
            Outcome::Parked(_) => "parked",
            Outcome::Mismatch { .. } => "mismatch",
            Outcome::ClaimLost { .. } => "claim_lost",
            Outcome::DoneNotRecorded { .. } => "done_not_recorded",
        }
    }

    /// The same outcome with another value.
    ///
    /// # Errors
    /// What `change` returns.
    pub fn try_map<U>(self, mut change: impl FnMut(T) -> Result<U>) -> Result<Outcome<U>> {
        Ok(match self {
            Outcome::Ran { value, record } => Outcome::Ran { value: change(value)?, record },
            Outcome::Replayed(Replayed { value, dropped, attempt, owner, age, cached }) => {
                Outcome::Replayed(Replayed {
                    value: value.map(change).transpose()?,
                    dropped,
                    attempt,
                    owner,
                    age,
                    cached,
                })
            }
            Outcome::Busy(seen) => Outcome::Busy(seen),
            Outcome::Waiting(seen) => Outcome::Waiting(seen),
            Outcome::Failed { failure, record } => Outcome::Failed { failure, record },
            Outcome::Dead(seen) => Outcome::Dead(seen),
            Outcome::Parked(seen) => Outcome::Parked(seen),
            Outcome::Mismatch { seen, given } => Outcome::Mismatch { seen, given },
            Outcome::ClaimLost { found } => Outcome::ClaimLost { found },
            Outcome::DoneNotRecorded { value, error } => Outcome::DoneNotRecorded { value: change(value)?, error },
        })
    }
}

/// A value as an output: MessagePack with named fields. What cannot be encoded is dropped, flagged.
pub fn encode<T: Serialize>(value: &T) -> Output {
    match rmp_serde::to_vec_named(value) {
        Ok(bytes) => Output::kept(MSGPACK, bytes),
        Err(error) => {
            tracing::warn!(%error, "the output cannot be encoded; the task is done without it");
            Output::Dropped(DropReason::NotEncodable)
        }
    }
}

/// The value of an output.
///
/// # Errors
/// [`ErrorKind::BadOutput`] when it is of another content type, or of another shape than `T`.
pub fn decode<T: DeserializeOwned>(key: &Key, output: &Output) -> Result<Option<T>> {
    let bad = |what: String| Error::new(ErrorKind::BadOutput, what).about(format!("task `{key}`"));
    match output {
        Output::Kept { content_type, bytes } if content_type == MSGPACK => {
            rmp_serde::from_slice(bytes).map(Some).map_err(|error| {
                bad("the stored output has another shape than the type asked for".into()).with_source(error)
            })
        }
        Output::Kept { content_type, bytes } if content_type == JSON => {
            serde_json::from_slice(bytes).map(Some).map_err(|error| {
                bad("the stored output has another shape than the type asked for".into()).with_source(error)
            })
        }
        Output::Kept { content_type, .. } => {
            Err(bad(format!("the stored output is {content_type}, neither {MSGPACK} nor {JSON}")))
        }
        Output::Nothing | Output::Dropped(_) => Ok(None),
    }
}
