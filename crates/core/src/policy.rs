//! How a task is treated: the kind of its effect, its lease, attempts, delays and retention.
//!
//! What follows from a policy is decided in `decide`.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::record::FailureClass;
use crate::store::{Memory, Store};

/// What kind of effect a handler has. It decides what the system can promise, so there is no default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// The effect is written in the transaction that completes the record: once. Needs a store that a transaction of yours
    /// can reach (PostgreSQL, SQLite), and is refused on any other.
    Transactional,
    /// The provider deduplicates on the downstream key: once within the provider's window.
    Keyed,
    /// The resource refuses a smaller fencing token: no stale overwrite; additive effects may double.
    Fenced,
    /// None of these: at most once per redrive; a claim that ended in doubt is parked for a person.
    Unrepeatable,
    /// Repeating is harmless: at least once.
    Repeatable,
}

impl Effect {
    /// Every kind.
    pub const ALL: [Effect; 5] =
        [Effect::Transactional, Effect::Keyed, Effect::Fenced, Effect::Unrepeatable, Effect::Repeatable];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Effect::Transactional => "transactional",
            Effect::Keyed => "keyed",
            Effect::Fenced => "fenced",
            Effect::Unrepeatable => "unrepeatable",
            Effect::Repeatable => "repeatable",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Effect> {
        Effect::ALL.into_iter().find(|effect| effect.name() == name)
    }
}

/// Exponential backoff with full jitter: a delay drawn evenly between zero and a bound that grows by a factor per attempt.
///
/// Source: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Upper bound of the first delay.
    pub delay_min: Duration,
    /// Upper bound of every delay.
    pub delay_max: Duration,
    /// What the bound grows by per attempt, at least 1.
    pub factor: f64,
}

impl Backoff {
    /// No delay at all.
    pub const NONE: Backoff = Backoff { delay_min: Duration::ZERO, delay_max: Duration::ZERO, factor: 1.0 };

    /// The upper bound of the delay after attempt number `attempt` (counted from 1).
    #[must_use]
    pub fn bound(&self, attempt: u32) -> Duration {
        let grown = self.delay_min.as_secs_f64() * self.factor.powf(f64::from(attempt.saturating_sub(1)));
        Duration::try_from_secs_f64(grown).unwrap_or(self.delay_max).min(self.delay_max)
    }

    /// The delay after attempt number `attempt`, by a random number.
    #[must_use]
    pub fn delay(&self, attempt: u32, random: u64) -> Duration {
        let share = random as f64 / u64::MAX as f64;
        let delay = self.bound(attempt).mul_f64(share);
        Duration::from_millis(crate::record::millis(delay))
    }
}

impl Default for Backoff {
    /// Up to 1 s after the first attempt, doubling, up to 10 min.
    fn default() -> Backoff {
        Backoff { delay_min: Duration::from_secs(1), delay_max: Duration::from_secs(600), factor: 2.0 }
    }
}

/// A lease below this is refused.
pub const LEASE_MIN: Duration = Duration::from_millis(500);
/// A lease below this is warned about: a pause of the machine may lose it.
pub const LEASE_ADVISED_MIN: Duration = Duration::from_secs(5);
/// An `output_max` above this is refused: records are read and written whole. 64 MiB, and 64 KiB for an envelope.
pub const OUTPUT_LIMIT: usize = 64 * 1024 * 1024 + 64 * 1024;
/// The longest duration that a policy takes: 100 years.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// How the tasks of one handler are treated.
///
/// Made with [`Policy::new`] and the fields that differ; [`Policy::check`] names every contradiction at once. Claiming
/// checks it too.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// What kind of effect the handler has.
    pub effect: Effect,
    /// How long a claim holds without a heartbeat. Default 30 s. With heartbeats it is sized by pauses, not by the work.
    pub lease: Duration,
    /// Time between heartbeats, before jitter. Default (`None`) and upper limit: a third of the lease.
    pub heartbeat: Option<Duration>,
    /// How long a handler may run. Then its renewals end and the attempt fails. Default: no limit.
    pub run_max: Option<Duration>,
    /// The most attempts, counted at claim. Default 5.
    pub attempts_max: u32,
    /// The attempt at which a failure for good is the end, at most `attempts_max`. Default 1: no such failure is tried again.
    pub permanent_attempts_max: u32,
    /// The attempt at which a handler that ran longer than `run_max` is the end, at most and by default (`None`)
    /// `attempts_max`. It holds a worker for so long each time.
    pub poison_attempts_max: Option<u32>,
    /// The most claims that may end by a passed lease; then the task is parked. Default 3.
    pub crashes_max: u32,
    /// Delay between attempts.
    pub backoff: Backoff,
    /// How long a record stays after its last write. Default 14 days. At least: redelivery window, dead-letter dwell,
    /// redrive window and the longest handler, together.
    pub retention: Duration,
    /// How long an output stays, at most as long as its record. Default 24 h; on Redis the output lives as long as its record.
    pub output_retention: Duration,
    /// The largest output that is kept, in bytes. A larger one makes the task done without output. Default 1 MiB; zero keeps none.
    pub output_max: usize,
    /// Accepts a store that may forget, for an effect that must not be repeated or is fenced. Default `false`.
    pub store_may_forget: bool,
}

impl Policy {
    /// The defaults, for a kind of effect.
    #[must_use]
    pub fn new(effect: Effect) -> Policy {
        Policy {
            effect,
            lease: Duration::from_secs(30),
            heartbeat: None,
            run_max: None,
            attempts_max: 5,
            permanent_attempts_max: 1,
            poison_attempts_max: None,
            crashes_max: 3,
            backoff: Backoff::default(),
            retention: Duration::from_secs(14 * 24 * 60 * 60),
            output_retention: Duration::from_secs(24 * 60 * 60),
            output_max: 1024 * 1024,
            store_may_forget: false,
        }
    }

    /// Time between heartbeats, before jitter.
    #[must_use]
    pub fn heartbeat_every(&self) -> Duration {
        self.heartbeat.unwrap_or(self.lease / 3)
    }

    /// The attempt at which a failure of this class is the end.
    #[must_use]
    pub fn attempts_max_of(&self, class: FailureClass) -> u32 {
        let of_class = match class {
            FailureClass::Permanent => self.permanent_attempts_max,
            FailureClass::RanTooLong => self.poison_attempts_max.unwrap_or(self.attempts_max),
            FailureClass::Retryable
            | FailureClass::Dropped
            | FailureClass::Crashed
            | FailureClass::StepChanged
            | FailureClass::StepInDoubt => self.attempts_max,
        };
        of_class.min(self.attempts_max)
    }

    /// What is kept off the lease, so that the worker stops before the store lets another in: a tenth of it.
    #[must_use]
    pub fn margin(&self) -> Duration {
        self.lease / 10
    }

    /// Everything that contradicts itself, all at once.
    ///
    /// # Errors
    /// [`ErrorKind::BadPolicy`], with a line a contradiction.
    pub fn check(&self) -> Result<()> {
        let mut faults = Vec::new();
        if self.lease < LEASE_MIN {
            faults.push(format!("lease is {:?}; at least {LEASE_MIN:?} is needed", self.lease));
        }
        let heartbeat = self.heartbeat_every();
        if heartbeat > self.lease / 3 {
            faults.push(format!("heartbeat every {heartbeat:?} is above a third of the lease, {:?}", self.lease / 3));
        }
        if heartbeat.is_zero() {
            faults.push("heartbeat is zero".to_owned());
        }
        if self.retention < self.lease {
            faults.push(format!("retention {:?} is below the lease {:?}", self.retention, self.lease));
        }
        if let Some(run_max) = self.run_max {
            if run_max.is_zero() {
                faults.push("run_max is zero".to_owned());
            }
            if self.retention < run_max {
                faults.push(format!("retention {:?} is below run_max {run_max:?}", self.retention));
            }
        }
        if self.output_max > OUTPUT_LIMIT {
            faults.push(format!("output_max is {} bytes; at most {OUTPUT_LIMIT} are allowed", self.output_max));
        }
        if self.attempts_max == 0 {
            faults.push("attempts_max is 0; the first run is an attempt".to_owned());
        }
        let of_classes = [
            ("permanent_attempts_max", Some(self.permanent_attempts_max)),
            ("poison_attempts_max", self.poison_attempts_max),
        ];
        for (name, max) in of_classes {
            match max {
                Some(0) => faults.push(format!("{name} is 0; the first run is an attempt")),
                Some(max) if max > self.attempts_max => {
                    faults.push(format!("{name} is {max}, above attempts_max {}", self.attempts_max));
                }
                Some(_) | None => {}
            }
        }
        if self.crashes_max == 0 {
            faults.push("crashes_max is 0; a task is parked when it reaches it".to_owned());
        }
        if !self.backoff.factor.is_finite() || self.backoff.factor < 1.0 {
            faults.push(format!("backoff.factor is {}; at least 1 is needed", self.backoff.factor));
        }
        if self.backoff.delay_min > self.backoff.delay_max {
            faults.push(format!(
                "backoff.delay_min {:?} is above backoff.delay_max {:?}",
                self.backoff.delay_min, self.backoff.delay_max
            ));
        }
        if self.retention < self.backoff.delay_max {
            faults.push(format!(
                "retention {:?} is below backoff.delay_max {:?}: the record would go while the task waits",
                self.retention, self.backoff.delay_max
            ));
        }
        for (name, duration) in [("lease", self.lease), ("retention", self.retention)] {
            if duration > DURATION_MAX {
                faults.push(format!("{name} is above 100 years"));
            }
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::BadPolicy, faults.join("; ")).about("policy"))
        }
    }

    /// What is allowed, but risky; for a log line or a person.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.lease < LEASE_ADVISED_MIN {
            warnings.push(format!(
                "lease {:?} is below {LEASE_ADVISED_MIN:?}: a pause of the machine may lose it",
                self.lease
            ));
        }
        warnings
    }

    /// Whether a store can keep what the effect promises.
    ///
    /// # Errors
    /// [`ErrorKind::ForgetfulStore`] for an unrepeatable or fenced effect on a store that may forget, unless
    /// `store_may_forget` accepts it; [`ErrorKind::Unsupported`] for a transactional effect on a store that no transaction
    /// of the caller's can reach.
    pub fn check_store(&self, store: &dyn Store) -> Result<()> {
        if self.effect == Effect::Transactional && store.ground().is_none() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the effect is transactional, and no transaction of yours can reach the records of this store",
            )
            .with_hint(
                "use PostgreSQL or SQLite; or say `keyed`, `unrepeatable` or `repeatable`, whichever is true of the effect",
            ));
        }
        self.check_memory(self.effect, store)
    }

    /// Whether a store can keep what an effect promises that the task has in one of its steps.
    ///
    /// # Errors
    /// [`ErrorKind::ForgetfulStore`], as [`Policy::check_store`].
    pub fn check_memory(&self, effect: Effect, store: &dyn Store) -> Result<()> {
        let needs_memory = match effect {
            Effect::Unrepeatable | Effect::Fenced => true,
            Effect::Transactional | Effect::Keyed | Effect::Repeatable => false,
        };
        if needs_memory && store.memory() == Memory::MayForget && !self.store_may_forget {
            return Err(Error::new(
                ErrorKind::ForgetfulStore,
                format!("the effect is {}, and this store may forget what it acknowledged", effect.name()),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictory_policies_are_refused_all_at_once() {
        let policy = Policy {
            lease: Duration::from_secs(9),
            heartbeat: Some(Duration::from_secs(4)),
            retention: Duration::from_secs(5),
            attempts_max: 0,
            poison_attempts_max: Some(3),
            ..Policy::new(Effect::Keyed)
        };
        let error = policy.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadPolicy);
        let text = error.to_string();
        for part in [
            "heartbeat every 4s is above a third of the lease",
            "retention 5s is below the lease",
            "attempts_max is 0",
            "permanent_attempts_max is 1, above attempts_max 0",
            "poison_attempts_max is 3, above attempts_max 0",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(Policy::new(Effect::Keyed).check().is_ok());
    }

    #[test]
    fn a_class_of_failure_has_its_own_last_attempt_within_that_of_all() {
        let policy = Policy { attempts_max: 4, poison_attempts_max: Some(2), ..Policy::new(Effect::Keyed) };
        assert_eq!(FailureClass::ALL.map(|class| policy.attempts_max_of(class)), [4, 1, 2, 4, 4, 4, 4]);
        assert_eq!(Policy::new(Effect::Keyed).attempts_max_of(FailureClass::RanTooLong), 5);
        let lenient = Policy { permanent_attempts_max: 9, ..policy };
        assert_eq!(lenient.attempts_max_of(FailureClass::Permanent), 4);
    }

    #[test]
    fn backoff_grows_within_its_bounds() {
        let backoff = Backoff::default();
        assert_eq!(backoff.bound(1), Duration::from_secs(1));
        assert_eq!(backoff.bound(4), Duration::from_secs(8));
        assert_eq!(backoff.bound(u32::MAX), Duration::from_secs(600));
        assert_eq!(backoff.delay(3, 0), Duration::ZERO);
        assert_eq!(backoff.delay(3, u64::MAX), Duration::from_secs(4));
        assert_eq!(Backoff::NONE.delay(9, u64::MAX), Duration::ZERO);
    }

    #[test]
    fn unrepeatable_effects_on_a_forgetful_store_are_refused_unless_accepted() {
        let forgetful = crate::memory::MemoryStore::new(|| Duration::ZERO);
        for effect in [Effect::Unrepeatable, Effect::Fenced] {
            let policy = Policy::new(effect);
            assert_eq!(policy.check_store(&forgetful).unwrap_err().kind(), ErrorKind::ForgetfulStore);
            assert!(Policy { store_may_forget: true, ..policy }.check_store(&forgetful).is_ok());
        }
        assert!(Policy::new(Effect::Keyed).check_store(&forgetful).is_ok());
    }

    #[test]
    fn transactional_effects_are_refused_where_no_transaction_reaches_the_records() {
        let unreachable = crate::memory::MemoryStore::new(|| Duration::ZERO);
        let refused = Policy::new(Effect::Transactional).check_store(&unreachable).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }
}
