//! What can happen to a task and its deliveries: `Event`, each with a reason that a person understands, and `Counts` of them.
//!
//! Events become log lines here and nowhere else, one a skip. None holds a payload or an output.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use taskonce_core::key::Fingerprint;
use taskonce_core::record::{Failure, FailureClass};

macro_rules! events {
    ($($(#[doc = $doc:literal])+ $variant:ident $({ $($(#[doc = $field_doc:literal])+ $field:ident: $type:ty,)+ })? = $name:literal, $level:ident;)+) => {
        /// What happened.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Event {
            $($(#[doc = $doc])+ $variant $({ $($(#[doc = $field_doc])+ $field: $type,)+ })?,)+
        }

        #[derive(Clone, Copy)]
        enum Number { $($variant,)+ }

        /// The name of every event, in the order of the documentation.
        pub const EVENT_NAMES: &[&str] = &[$($name,)+];

        impl Event {
            fn number(&self) -> Number {
                match self { $(Event::$variant { .. } => Number::$variant,)+ }
            }

            /// The stable name, in log lines and counts.
            #[must_use]
            pub fn name(&self) -> &'static str {
                EVENT_NAMES[self.number() as usize]
            }

            fn level(&self) -> tracing::Level {
                match self { $(Event::$variant { .. } => tracing::Level::$level,)+ }
            }
        }
    };
}

events! {
    /// A task is about to run.
    Claimed {
        /// Its attempt, from 1.
        attempt: u32,
    } = "claimed", DEBUG;
    /// A task is about to run whose holder was silent for its lease.
    Takeover {
        /// Its attempt, from 1.
        attempt: u32,
        /// How many of its claims have ended so.
        crashes: u32,
        /// How the last one ended.
        failure: String,
    } = "takeover", WARN;
    /// A person took the delivery back from the dead letters, and it arrives for the first time since.
    Redriven = "redriven", INFO;
    /// A duplicate of a done task: its delivery is acknowledged.
    Replayed {
        /// The first run's attempt.
        attempt: u32,
        /// Who ran it.
        owner: Arc<str>,
        /// How long ago it was done.
        age: Duration,
    } = "replayed", INFO;
    /// Another runs the task: the delivery comes again when that one's lease has passed.
    Busy {
        /// The attempt that runs.
        attempt: u32,
        /// Who runs it.
        owner: Arc<str>,
        /// How long it has been running.
        age: Duration,
        /// When the delivery comes again.
        delay: Duration,
    } = "busy", INFO;
    /// The task waits for its next attempt, and the delivery with it.
    Waiting {
        /// The attempt that failed last.
        attempt: u32,
        /// Who ran it.
        owner: Arc<str>,
        /// How long it has been waiting.
        age: Duration,
        /// When the delivery comes again.
        delay: Duration,
    } = "waiting", INFO;
    /// The key is in use for another payload: neither run nor replayed.
    Mismatch {
        /// Of the payload that the key stands for.
        held: Fingerprint,
        /// Of this delivery's payload.
        given: Fingerprint,
        /// Who ran the other.
        owner: Arc<str>,
        /// How long it has been in its state.
        age: Duration,
    } = "mismatch", WARN;
    /// The task took effect.
    Completed {
        /// The attempt.
        attempt: u32,
        /// How long the handler ran.
        took: Duration,
    } = "completed", DEBUG;
    /// The task took effect, and its record could not be told so yet.
    NotRecorded {
        /// Why.
        error: String,
    } = "not_recorded", ERROR;
    /// An attempt failed, and another follows.
    Failed {
        /// The attempt.
        attempt: u32,
        /// What kind of failure it was.
        class: FailureClass,
        /// What the handler said.
        message: String,
        /// When the next one follows.
        delay: Duration,
    } = "failed", WARN;
    /// The task is dead: no attempt follows.
    Dead {
        /// The last attempt.
        attempt: u32,
        /// The last failure.
        message: String,
    } = "dead", ERROR;
    /// The task is in doubt, and waits for a person.
    Parked {
        /// The last attempt.
        attempt: u32,
        /// The last failure.
        message: String,
    } = "parked", ERROR;
    /// A heartbeat was not answered: it is tried again until the lease has passed.
    HeartbeatLate {
        /// The attempt that is running.
        attempt: u32,
        /// Why.
        error: String,
    } = "heartbeat_late", WARN;
    /// The lease passed without a heartbeat, or another has the task: its handler is cancelled.
    LeaseLost {
        /// The attempt that was running.
        attempt: u32,
    } = "lease_lost", WARN;
    /// A task took effect after its lease, and was recorded: nobody had taken over.
    LateAccepted {
        /// The attempt.
        attempt: u32,
        /// By how much it was late.
        late: Duration,
    } = "late_completion_accepted", WARN;
    /// A task ended after its lease, and another had taken over: nothing was recorded.
    LateRefused {
        /// The attempt.
        attempt: u32,
    } = "late_completion_refused", WARN;
    /// The delivery cannot be read: it goes to the dead letters.
    Unreadable {
        /// Why.
        message: String,
    } = "unreadable", ERROR;
    /// The delivery is older than its record would be: whether its task was done nobody knows, and a person decides.
    TooOld {
        /// How old it is, by its producer's clock and this one's.
        age: Duration,
        /// How long a record stays.
        retention: Duration,
    } = "too_old", ERROR;
    /// A newer program wrote the record: the delivery is left to a newer worker.
    Newer {
        /// When it comes again.
        delay: Duration,
    } = "newer", WARN;
    /// The store is away, or could not answer: the delivery comes again, and no attempt is counted.
    Degraded {
        /// Why.
        error: String,
        /// When it comes again.
        delay: Duration,
    } = "degraded", WARN;
    /// The store is away, and the handler runs all the same, since its route says so.
    Unguarded {
        /// Why.
        error: String,
    } = "unguarded", WARN;
    /// Retries would be too large a share of all starts: the attempt is given back, and not counted.
    RetryPutOff {
        /// When it comes again.
        delay: Duration,
    } = "retry_put_off", INFO;
    /// The source could not be told what becomes of a delivery: it comes again, and its record answers it.
    NotSettled {
        /// Why.
        error: String,
    } = "not_settled", ERROR;
    /// Deliveries of handlers that this worker does not have: they stay where they are, for others.
    LeftInPlace {
        /// The handlers, some of them where there are many.
        handlers: Vec<Arc<str>>,
    } = "left_in_place", WARN;
    /// There are deliveries that this worker could take, and it receives none.
    Stalled {
        /// How many are deliverable.
        ready: u64,
        /// How long the oldest has been so.
        oldest: Duration,
        /// How long nothing was received.
        silent: Duration,
    } = "stalled", ERROR;
}

impl Event {
    /// An attempt that failed, where another follows.
    pub(crate) fn failed(attempt: u32, failure: &Failure, delay: Duration) -> Event {
        Event::Failed { attempt, class: failure.class, message: failure.message.clone(), delay }
    }

    /// What log lines are searched by: the attempt that it is about, who ran that, and how long ago.
    fn of(&self) -> (Option<u32>, Option<&str>, Option<Duration>) {
        match self {
            Event::Replayed { attempt, owner, age }
            | Event::Busy { attempt, owner, age, .. }
            | Event::Waiting { attempt, owner, age, .. } => (Some(*attempt), Some(owner), Some(*age)),
            Event::Mismatch { owner, age, .. } => (None, Some(owner), Some(*age)),
            Event::Claimed { attempt }
            | Event::Takeover { attempt, .. }
            | Event::Completed { attempt, .. }
            | Event::Failed { attempt, .. }
            | Event::Dead { attempt, .. }
            | Event::Parked { attempt, .. }
            | Event::HeartbeatLate { attempt, .. }
            | Event::LeaseLost { attempt }
            | Event::LateAccepted { attempt, .. }
            | Event::LateRefused { attempt } => (Some(*attempt), None, None),
            Event::TooOld { age, .. } => (None, None, Some(*age)),
            Event::Redriven
            | Event::NotRecorded { .. }
            | Event::Unreadable { .. }
            | Event::Newer { .. }
            | Event::Degraded { .. }
            | Event::Unguarded { .. }
            | Event::RetryPutOff { .. }
            | Event::NotSettled { .. }
            | Event::LeftInPlace { .. }
            | Event::Stalled { .. } => (None, None, None),
        }
    }

    /// Counts it in this process, and writes its log line.
    pub(crate) fn tell(&self, key: &dyn fmt::Display) {
        counts().add(self);
        self.log(key);
    }

    /// Writes its log line.
    pub fn log(&self, key: &dyn fmt::Display) {
        // The level of a tracing event is a constant of its place in the code.
        let (attempt, owner, age) = self.of();
        let age_ms = age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        macro_rules! line {
            ($level:ident) => {
                tracing::event!(tracing::Level::$level, event = self.name(), %key, attempt, owner, age_ms, "{self}")
            };
        }
        match self.level() {
            tracing::Level::ERROR => line!(ERROR),
            tracing::Level::WARN => line!(WARN),
            tracing::Level::INFO => line!(INFO),
            _ => line!(DEBUG),
        }
    }
}

/// The reason, for people.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Claimed { attempt } => write!(f, "attempt {attempt} begins"),
            Event::Takeover { attempt, crashes, failure } => {
                write!(
                    f,
                    "attempt {attempt} begins: the claim before ended without a word, the {crashes}. time ({failure})"
                )
            }
            Event::Redriven => write!(f, "a person took it back from the dead letters"),
            Event::Replayed { attempt, owner, age } => {
                write!(f, "done {age:.1?} ago by {owner} in attempt {attempt}: not run again")
            }
            Event::Busy { attempt, owner, age, delay } => {
                write!(f, "{owner} has been running attempt {attempt} for {age:.1?}: comes again in {delay:.1?}")
            }
            Event::Waiting { attempt, owner, age, delay } => write!(
                f,
                "attempt {attempt} of {owner} ended {age:.1?} ago, and the next is not due: comes again in {delay:.1?}"
            ),
            Event::Mismatch { held, given, owner, age } => write!(
                f,
                "the key stands for another payload, of {owner} {age:.1?} ago: fingerprint {held}, and {given} here"
            ),
            Event::Completed { attempt, took } => write!(f, "attempt {attempt} took effect in {took:.1?}"),
            Event::NotRecorded { error } => write!(f, "it took effect, and that could not be recorded yet: {error}"),
            Event::Failed { attempt, class, message, delay } => {
                write!(f, "attempt {attempt} failed ({}), the next follows in {delay:.1?}: {message}", class.name())
            }
            Event::Dead { attempt, message } => write!(f, "dead after attempt {attempt}: {message}"),
            Event::Parked { attempt, message } => {
                write!(f, "parked for a person after attempt {attempt}: {message}")
            }
            Event::HeartbeatLate { attempt, error } => {
                write!(f, "a heartbeat of attempt {attempt} was not answered, and is tried again: {error}")
            }
            Event::LeaseLost { attempt } => {
                write!(f, "the claim of attempt {attempt} is lost: its lease passed, or another has the task")
            }
            Event::LateAccepted { attempt, late } => {
                write!(f, "attempt {attempt} ended {late:.1?} after its lease, and is recorded: nobody had taken over")
            }
            Event::LateRefused { attempt } => {
                write!(f, "attempt {attempt} ended after another had taken over: nothing is recorded of it")
            }
            Event::Unreadable { message } => write!(f, "it cannot be read: {message}"),
            Event::TooOld { age, retention } => write!(
                f,
                "sent {age:.0?} ago, and a record stays for {retention:.0?}: whether it was done is not known any more"
            ),
            Event::Newer { delay } => {
                write!(f, "a newer program wrote the record: left to a newer worker, comes again in {delay:.1?}")
            }
            Event::Degraded { error, delay } => {
                write!(f, "the store did not answer, no attempt is counted, comes again in {delay:.1?}: {error}")
            }
            Event::Unguarded { error } => {
                write!(f, "the store is away, and it runs unguarded, as its route says: {error}")
            }
            Event::RetryPutOff { delay } => {
                write!(f, "too many of the starts are retries: given back, not counted, comes again in {delay:.1?}")
            }
            Event::NotSettled { error } => write!(f, "a delivery could not be settled, and comes again: {error}"),
            Event::LeftInPlace { handlers } => {
                write!(f, "deliveries are left to workers that have the handler: {}", handlers.join(", "))
            }
            Event::Stalled { ready, oldest, silent } => write!(
                f,
                "{ready} deliveries are ready, the oldest for {oldest:.1?}, and none was received for {silent:.1?}"
            ),
        }
    }
}

/// How often each event has happened in this process: with all its workers, heartbeats and runs.
#[must_use]
pub fn counts() -> &'static Counts {
    static COUNTS: LazyLock<Counts> = LazyLock::new(Counts::default);
    &COUNTS
}

/// How often each event has happened.
#[derive(Debug)]
pub struct Counts([AtomicU64; EVENT_NAMES.len()]);

impl Default for Counts {
    fn default() -> Counts {
        Counts(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counts {
    /// Counts one that was told of already.
    pub(crate) fn add(&self, event: &Event) {
        self.0[event.number() as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one here and in the process, and writes its log line.
    pub(crate) fn tell(&self, event: &Event, key: &dyn fmt::Display) {
        self.add(event);
        event.tell(key);
    }

    /// How often the event of this name has happened; zero for a name that no event has.
    #[must_use]
    pub fn of(&self, name: &str) -> u64 {
        self.all().find(|(other, _)| *other == name).map_or(0, |(_, count)| count)
    }

    /// All of them, by name.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
        EVENT_NAMES.iter().zip(&self.0).map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_is_counted_under_its_own_name_and_has_a_reason() {
        let counts = Counts::default();
        let events = [
            Event::Claimed { attempt: 1 },
            Event::Redriven,
            Event::Busy { attempt: 2, owner: "a/1".into(), age: Duration::from_secs(3), delay: Duration::from_secs(7) },
            Event::RetryPutOff { delay: Duration::from_secs(1) },
        ];
        for event in &events {
            counts.tell(event, &"shop/charge@2/a");
            counts.tell(event, &"shop/charge@2/a");
            assert_eq!(counts.of(event.name()), 2, "{event}");
        }
        assert_eq!(counts.all().map(|(_, count)| count).sum::<u64>(), 8);
        assert_eq!(events[2].of(), (Some(2), Some("a/1"), Some(Duration::from_secs(3))));
        assert_eq!(events[2].to_string(), "a/1 has been running attempt 2 for 3.0s: comes again in 7.0s");
        let mut names = EVENT_NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!((names.len(), counts.of("no such")), (EVENT_NAMES.len(), 0));
    }

    #[test]
    fn everything_that_can_become_of_a_task_has_a_name() {
        for name in [
            "claimed",
            "replayed",
            "busy",
            "waiting",
            "mismatch",
            "heartbeat_late",
            "lease_lost",
            "takeover",
            "late_completion_accepted",
            "late_completion_refused",
            "completed",
            "failed",
            "dead",
            "parked",
            "redriven",
            "degraded",
            "unguarded",
        ] {
            assert!(EVENT_NAMES.contains(&name), "{name}");
        }
    }
}
