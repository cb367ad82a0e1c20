//! What a store keeps of a task: `Record`, its states, and the small values in it.
//!
//! How records change is in `decide`; how they become bytes is in `codec`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::Fingerprint;
use crate::policy::Effect;
use crate::step::Step;

/// Where a task stands. Absent is the sixth state, and is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// A claim is out, and holds until its lease passes.
    Running,
    /// An attempt failed or was released; the next may start when the delay has passed.
    Waiting,
    /// It took effect. Final until purged.
    Done,
    /// Out of attempts, or failed for good. Final until purged or redriven.
    Dead,
    /// In doubt. Stays until a person resolves it.
    Parked,
}

impl State {
    /// Every state, in the order of a task's life.
    pub const ALL: [State; 5] = [State::Running, State::Waiting, State::Done, State::Dead, State::Parked];

    /// The word for it, everywhere.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Waiting => "waiting",
            State::Done => "done",
            State::Dead => "dead",
            State::Parked => "parked",
        }
    }

    /// The state of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Whether no claim changes it any more, and purge may remove it.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, State::Done | State::Dead)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

macro_rules! random_id {
    ($(#[doc = $doc:literal])+ $name:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub [u8; 16]);

        impl From<u128> for $name {
            fn from(random: u128) -> $name {
                $name(random.to_be_bytes())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    };
}

random_id! {
    /// Moves on every write to a record; the next write must name it. Random, made by the caller, the same when a
    /// write is sent again.
    Token
}

random_id! {
    /// Names one claim call. Made by the claimer before it asks, so that a repeated request recognises its own claim.
    ClaimId
}

/// Orders the claims of a task; shown to the handler as its fencing token.
///
/// In SQL stores it comes from one store-wide increasing sequence and survives purge. Elsewhere it is counted in the
/// record and begins again at 1 when the record is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(pub u64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How old a record is by its store's own clock, in milliseconds.
///
/// Negative when that clock went back since the write. Ages are compared with durations, never with a time of day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Age {
    /// Milliseconds since the record's last write.
    pub millis: i64,
}

impl Age {
    /// An age in milliseconds.
    #[must_use]
    pub fn from_millis(millis: i64) -> Age {
        Age { millis }
    }

    /// Whether `duration` has passed. An age below minus one `duration` (the store's clock went back) counts as passed.
    #[must_use]
    pub fn has_passed(self, duration: Duration) -> bool {
        let limit = millis(duration) as i64;
        self.millis >= limit || self.millis < -limit
    }

    /// What is left of `duration`, at least zero and at most the whole of it.
    #[must_use]
    pub fn left_of(self, duration: Duration) -> Duration {
        if self.has_passed(duration) {
            return Duration::ZERO;
        }
        duration.saturating_sub(self.as_duration())
    }

    /// The age as a duration; zero when the clock went back.
    #[must_use]
    pub fn as_duration(self) -> Duration {
        Duration::from_millis(u64::try_from(self.millis).unwrap_or(0))
    }
}

/// A wall-clock time in milliseconds since 1970, as a label for people. No rule compares it with anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub u64);

/// Whole milliseconds of a duration, capped at what a record can hold.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).min(i64::MAX as u64)
}

/// What the effect left as its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// The task has none.
    Nothing,
    /// Kept, and replayed to duplicates. Empty bytes are a value like any other.
    Kept {
        /// What the bytes are, such as `application/msgpack`.
        content_type: String,
        /// The bytes themselves.
        bytes: Vec<u8>,
    },
    /// There was one, and it is not here: the task is done all the same.
    Dropped(DropReason),
}

impl Output {
    /// Bytes of a content type.
    #[must_use]
    pub fn kept(content_type: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Output {
        Output::Kept { content_type: content_type.into(), bytes: bytes.into() }
    }

    /// The length of what is kept, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Output::Kept { bytes, .. } => bytes.len(),
            Output::Nothing | Output::Dropped(_) => 0,
        }
    }

    /// Whether no bytes are kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why an output is not in its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// It was larger than the policy's limit.
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
    },
    /// It could not be encoded.
    NotEncodable,
    /// Its own retention passed.
    Expired,
    /// The policy keeps none.
    NotKept,
    /// A person said that the task was done.
    Resolved,
}

impl DropReason {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DropReason::TooLarge { .. } => "too_large",
            DropReason::NotEncodable => "not_encodable",
            DropReason::Expired => "expired",
            DropReason::NotKept => "not_kept",
            DropReason::Resolved => "resolved",
        }
    }
}

/// What kind of failure ended an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// Another attempt may succeed.
    Retryable,
    /// No attempt can succeed: the task goes to dead at once.
    Permanent,
    /// The handler ran longer than `run_max`.
    RanTooLong,
    /// The handler was cancelled or dropped after it was entered.
    Dropped,
    /// The lease passed without a heartbeat: the process crashed, hung or was cut off.
    Crashed,
    /// The steps that the code asks for are not those that are recorded: a person has to look.
    StepChanged,
    /// A step that must not be repeated began and never ended: a person has to look.
    StepInDoubt,
}

impl FailureClass {
    /// Every class.
    pub const ALL: [FailureClass; 7] = [
        FailureClass::Retryable,
        FailureClass::Permanent,
        FailureClass::RanTooLong,
        FailureClass::Dropped,
        FailureClass::Crashed,
        FailureClass::StepChanged,
        FailureClass::StepInDoubt,
    ];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FailureClass::Retryable => "retryable",
            FailureClass::Permanent => "permanent",
            FailureClass::RanTooLong => "ran_too_long",
            FailureClass::Dropped => "dropped",
            FailureClass::Crashed => "crashed",
            FailureClass::StepChanged => "step_changed",
            FailureClass::StepInDoubt => "step_in_doubt",
        }
    }

    /// Whether it parks the task whatever its effect: no further attempt can help before a person has looked.
    #[must_use]
    pub fn parks(self) -> bool {
        match self {
            FailureClass::StepChanged | FailureClass::StepInDoubt => true,
            FailureClass::Retryable
            | FailureClass::Permanent
            | FailureClass::RanTooLong
            | FailureClass::Dropped
            | FailureClass::Crashed => false,
        }
    }
}

/// Whether a failed attempt may have had its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aftermath {
    /// The effect may or may not have happened.
    InDoubt,
    /// The handler says that nothing happened, so that even an unrepeatable effect may be tried again.
    NothingHappened,
}

/// A failed attempt: its class, a message, and whether the effect may have happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What kind of failure.
    pub class: FailureClass,
    /// What a person needs to know; cut to [`MESSAGE_MAX`] bytes.
    pub message: String,
    /// Whether the effect may have happened.
    pub aftermath: Aftermath,
    /// How long the next attempt has to wait, in place of the backoff. It becomes the record's delay, and is not kept
    /// with the failure.
    pub retry_after: Option<Duration>,
}

/// The longest message that a record keeps, in bytes.
pub const MESSAGE_MAX: usize = 1024;

impl Failure {
    /// Another attempt may succeed.
    #[must_use]
    pub fn retryable(message: impl Into<String>) -> Failure {
        Failure::new(FailureClass::Retryable, message)
    }

    /// No attempt can succeed.
    #[must_use]
    pub fn permanent(message: impl Into<String>) -> Failure {
        Failure::new(FailureClass::Permanent, message)
    }

    /// A failure of a class, in doubt about the effect.
    #[must_use]
    pub fn new(class: FailureClass, message: impl Into<String>) -> Failure {
        Failure { class, message: cut(message.into(), MESSAGE_MAX), aftermath: Aftermath::InDoubt, retry_after: None }
    }

    /// Says how long the next attempt has to wait, in place of the backoff; at most the policy's retention. For services
    /// that say when to come again.
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Failure {
        self.retry_after = Some(delay);
        self
    }

    /// Says that the effect did not happen.
    #[must_use]
    pub fn nothing_happened(mut self) -> Failure {
        self.aftermath = Aftermath::NothingHappened;
        self
    }
}

impl<E: std::error::Error> From<E> for Failure {
    /// Any error is retryable, unless the handler says otherwise.
    fn from(error: E) -> Failure {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message.push_str(": ");
            message.push_str(&cause.to_string());
            source = cause.source();
        }
        Failure::retryable(message)
    }
}

/// Cuts a text to at most `max` bytes, between characters.
pub(crate) fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        let mut end = max;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}

/// One line of a record's history: an attempt that ended badly, or a change by a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// When, by the wall clock of whoever wrote it: a label for people.
    pub at: WallTime,
    /// The owner of the attempt, or the person.
    pub who: String,
    /// The attempt it ended, or that was current.
    pub attempt: u32,
    /// The failure's message, or the person's reason.
    pub note: String,
}

/// What a line of history tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// An attempt failed.
    Failed(FailureClass),
    /// A person returned the task to work; the counters began again.
    Redriven,
    /// A person said that the parked task was done.
    ResolvedDone,
    /// A person said that the parked task had no effect.
    ResolvedNotDone,
    /// A person removed the record; kept in a note of its own.
    Cleared,
}

impl EventKind {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Failed(class) => class.name(),
            EventKind::Redriven => "redriven",
            EventKind::ResolvedDone => "resolved_done",
            EventKind::ResolvedNotDone => "resolved_not_done",
            EventKind::Cleared => "cleared",
        }
    }
}

/// The most lines of history that a record keeps; the oldest go first, and are counted.
pub const HISTORY_MAX: usize = 16;

/// How long the key of a parked task lives in a store whose keys expire.
pub const PARKED_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// What a store keeps of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where the task stands.
    pub state: State,
    /// Names this version of the record; the next write must name it.
    pub token: Token,
    /// Orders claims.
    pub fence: Fence,
    /// The claim that wrote the record last as its holder.
    pub claim: ClaimId,
    /// A label of the last holder, for people: host, process, worker.
    pub owner: Arc<str>,
    /// Attempts started, counted at claim.
    pub attempt: u32,
    /// Claims that ended by a passed lease.
    pub crashes: u32,
    /// What kind of effect the last claimer said the handler has.
    pub effect: Effect,
    /// How long a claim holds without a heartbeat.
    pub lease: Duration,
    /// How long a waiting task waits from this write.
    pub delay: Duration,
    /// How long the record stays after its last write.
    pub retention: Duration,
    /// How long its output stays in stores that purge outputs by themselves.
    pub output_retention: Duration,
    /// How long the task had been in this state when this version was written (heartbeats and renewed retention
    /// write a record without changing its state).
    pub state_age: Duration,
    /// How long the run took that completed or failed last, on its worker's own clock.
    pub ran_for: Duration,
    /// The digest of the payload; it lives as long as the record.
    pub fingerprint: Fingerprint,
    /// The result, of a done task.
    pub output: Output,
    /// The last failure.
    pub failure: Option<Failure>,
    /// The steps that began, in the order of the code; see [`step`](crate::step).
    pub steps: Vec<Step>,
    /// Attempts that ended badly and changes by people, oldest first.
    pub history: Vec<Event>,
    /// Lines of history dropped for the bound.
    pub history_dropped: u32,
}

impl Record {
    /// How long a store whose keys expire keeps this version: retention, or ten years for a parked task. Never the lease.
    #[must_use]
    pub fn life(&self) -> Duration {
        match self.state {
            State::Running | State::Waiting | State::Done | State::Dead => self.retention,
            State::Parked => PARKED_LIFE,
        }
    }

    /// Adds a line of history, within [`HISTORY_MAX`].
    pub fn remember(&mut self, event: Event) {
        if self.history.len() >= HISTORY_MAX {
            self.history.remove(0);
            self.history_dropped = self.history_dropped.saturating_add(1);
        }
        self.history.push(Event { note: cut(event.note, MESSAGE_MAX), ..event });
    }
}

/// A record as a store returned it, with its age by the store's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The record.
    pub record: Arc<Record>,
    /// Time since its last write, by the store's clock.
    pub age: Age,
}

impl Found {
    /// How long the task has been in its state.
    #[must_use]
    pub fn in_state_for(&self) -> Duration {
        self.record.state_age.saturating_add(self.age.as_duration())
    }

    /// What is left of the lease, of a running task.
    #[must_use]
    pub fn lease_left(&self) -> Duration {
        self.age.left_of(self.record.lease)
    }

    /// What is left of the delay, of a waiting task.
    #[must_use]
    pub fn delay_left(&self) -> Duration {
        self.age.left_of(self.record.delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{self, Ask, ClaimStep, Stamp};
    use crate::policy::Policy;

    #[test]
    fn an_age_below_minus_one_lease_counts_as_passed() {
        let lease = Duration::from_secs(30);
        assert!(!Age::from_millis(29_999).has_passed(lease));
        assert!(Age::from_millis(30_000).has_passed(lease));
        assert!(!Age::from_millis(-30_000).has_passed(lease));
        assert!(Age::from_millis(-30_001).has_passed(lease));
        assert_eq!(Age::from_millis(-1).left_of(lease), lease);
    }

    #[test]
    fn messages_are_cut_between_characters() {
        assert_eq!(cut("aäb".into(), 2), "a");
        assert_eq!(cut("aäb".into(), 3), "aä");
    }

    #[test]
    fn a_record_outlives_its_lease_in_every_state() {
        let policy = Policy::new(Effect::Keyed);
        let owner = Arc::from("owner");
        let ask = Ask { claim: ClaimId::from(1), owner: &owner, fingerprint: Fingerprint([0; 16]), policy: &policy };
        let stamp = Stamp { token: Token::from(1), at: WallTime(0) };
        let ClaimStep::Run(record) = decide::claim(None, &ask, stamp) else { panic!("an absent record is claimed") };
        for state in State::ALL {
            assert!(Record { state, ..record.clone() }.life() >= policy.retention, "{state}");
        }
    }
}
