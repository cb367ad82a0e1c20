//! One delivery, from its key to its verdict: which task it brings, what the ledger says of that, and what follows.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::host::NoKeeper;
use taskonce_core::key::{Key, Task};
use taskonce_core::ledger::{Admission, Claim, Ledger, Seen};
use taskonce_core::memory::MemoryStore;
use taskonce_core::policy::Policy;
use taskonce_core::record::{FailureClass, Found, Output, Record, State};
use taskonce_core::{Error, ErrorKind, Result, Retry};

use super::Shared;
use super::desk::Arrived;
use super::handler::Prepared;
use super::settle::Verdict;
use crate::events::Event;
use crate::outcome::{Outcome, Settlement};
use crate::routes::{Ended, Route, Start, StoreAway};
use crate::run::{answer, persist, run_claimed};
use crate::source::{Death, Delivery};
use crate::span;

/// How long a record of a newer format is left to newer workers.
const NEWER_DELAY: Duration = Duration::from_secs(10);
/// How long to defer where somebody's transaction makes the record, or others changed it again and again.
const LOCKED_DELAY: Duration = Duration::from_secs(1);
/// How much later than told a delivery comes again, at most: a tenth of its delay, so that many do not come at once.
const SPREAD: f64 = 0.1;
/// What is kept off the retention, for clocks that differ and for what runs or waits: a tenth of it.
const RETENTION_MARGIN: u32 = 10;
/// How long a run without a ledger may think that it holds its task.
const UNGUARDED_LEASE: Duration = Duration::from_secs(86_400);

/// Finds out what becomes of a delivery, running its task if it is to run.
pub(super) async fn deliver(shared: &Shared, arrived: &Arrived) -> (Verdict, Ended) {
    span::within(&arrived.delivery, &**shared.ledger.host(), judge(shared, arrived)).await
}

async fn judge(shared: &Shared, arrived: &Arrived) -> (Verdict, Ended) {
    let route = shared.routes.get(arrived.route);
    let delivery = &arrived.delivery;
    let task = match route.task(delivery) {
        Ok(task) => task,
        Err(error) => return unreadable(shared, delivery, error.to_string()),
    };
    span::is_of(&task.key);
    let mut run = Delivered { shared, route, task: &task, attempt: None };
    if delivery.redriven_at.is_some() && delivery.number == 1 {
        run.tell(&Event::Redriven);
    }
    if let Some(age) = delivery.age(shared.ledger.host().wall_time()).filter(|age| is_too_old(*age, &route.policy)) {
        match shared.ledger.store().load(&task.key).await {
            Ok(None) => return run.too_old(age),
            // The record answers it.
            Ok(Some(_)) => {}
            Err(error) => return run.refused(error),
        }
    }
    let Some((_, prepare)) = shared.handler(arrived.route) else {
        return (Verdict::Defer(LOCKED_DELAY), Ended::NotStarted);
    };
    let prepared = match prepare(delivery.clone()) {
        Ok(prepared) => prepared,
        Err(message) => return unreadable(shared, delivery, message),
    };
    match prepared {
        Prepared::Own(own) => {
            let outcome = own(shared.ledger.clone(), task.clone(), route.policy.clone()).await;
            match outcome {
                Ok(outcome) => run.conclude(outcome),
                Err(error) => run.refused(error),
            }
        }
        Prepared::Plain(handler) => match shared.ledger.claim(&task, &route.policy).await {
            Ok(Admission::Run(claim)) => {
                shared.desk().away.answered();
                let claim = match run.within_budget(claim).await {
                    Ok(claim) => claim,
                    Err(put_off) => return (put_off, Ended::NotStarted),
                };
                run.tell(&begun(&claim));
                run.attempt = Some(claim.attempt());
                match run_claimed(&shared.ledger, claim, handler, Output::clone).await {
                    Ok(outcome) => run.conclude(outcome),
                    Err(error) => run.refused(error),
                }
            }
            Ok(admission) => match answer(admission, |_seen: &Seen| Ok(None::<Output>)) {
                Ok(outcome) => run.conclude(outcome),
                Err(error) => run.refused(error),
            },
            Err(error) if route.store_away == StoreAway::Open && is_away(&error) => {
                shared.desk().away.failed(shared.now());
                run.tell(&Event::Unguarded { error: error.to_string() });
                match unguarded(shared, route, &task).await {
                    Ok((ledger, claim)) => match run_claimed(&ledger, claim, handler, Output::clone).await {
                        Ok(outcome) => run.conclude(outcome),
                        Err(error) => run.refused(error),
                    },
                    Err(error) => run.refused(error),
                }
            }
            Err(error) => run.refused(error),
        },
    }
}

fn unreadable(shared: &Shared, delivery: &Delivery, message: String) -> (Verdict, Ended) {
    let event = Event::Unreadable { message: message.clone() };
    shared.counts.tell(&event, &delivery.envelope.key.as_deref().unwrap_or(&delivery.coordinates).escape_debug());
    let id = format!("unreadable/{}", delivery.coordinates);
    (Verdict::Die(Death { id, reason: "unreadable".into(), message }), Ended::NotStarted)
}

/// A claim in a store of this run's own, which says what a handler may ask of one.
async fn unguarded(shared: &Shared, route: &Route, task: &Task) -> Result<(Ledger, Claim)> {
    let host = Arc::clone(shared.ledger.host());
    let clock = Arc::clone(&host);
    let store = MemoryStore::new(move || clock.uptime());
    let ledger = Ledger::new(Arc::new(store), host, Arc::new(NoKeeper));
    let lease = UNGUARDED_LEASE.max(route.policy.run_max.unwrap_or_default());
    let policy = Policy { lease, heartbeat: None, retention: lease, store_may_forget: true, ..route.policy.clone() };
    match ledger.claim(task, &policy).await? {
        Admission::Run(claim) => Ok((ledger, claim)),
        Admission::Replay(_)
        | Admission::Busy(_)
        | Admission::Waiting(_)
        | Admission::Dead(_)
        | Admission::Parked(_)
        | Admission::Mismatch { .. } => Err(Error::new(ErrorKind::Protocol, "an empty store knows the task")),
    }
}

/// Whether a record of a delivery of this age may be gone already.
fn is_too_old(age: Duration, policy: &Policy) -> bool {
    age >= policy.retention - policy.retention / RETENTION_MARGIN
}

/// What a claim begins.
fn begun(claim: &Claim) -> Event {
    let attempt = claim.attempt();
    match claim.held().last_failure() {
        Some(failure) if failure.class == FailureClass::Crashed => {
            Event::Takeover { attempt, crashes: claim.held().crashes(), failure: failure.message }
        }
        Some(_) | None => Event::Claimed { attempt },
    }
}

/// Whether an error says that nothing can be asked of the store now.
fn is_away(error: &Error) -> bool {
    match error.kind() {
        // A transaction of another holds the one record, or others changed it.
        ErrorKind::Locked | ErrorKind::Changed => false,
        kind => match kind.retry() {
            Retry::Later => true,
            Retry::Elsewhere | Retry::Never => false,
        },
    }
}

/// A delivery whose task is known.
struct Delivered<'a> {
    shared: &'a Shared,
    route: &'a Route,
    task: &'a Task,
    /// That of the claim, where the worker made it.
    attempt: Option<u32>,
}

impl Delivered<'_> {
    fn key(&self) -> &Key {
        &self.task.key
    }

    fn tell(&self, event: &Event) {
        self.shared.counts.tell(event, self.key());
    }

    /// Gives the claim back where its attempt would be one retry too many.
    async fn within_budget(&self, claim: Claim) -> Result<Claim, Verdict> {
        let now = self.shared.now();
        let start = self.shared.desk().may_attempt(&self.route.source, claim.attempt(), now);
        match start {
            Start::Now => Ok(claim),
            Start::WaitUntil(moment) => {
                // Should this fail, the keeper goes on with it.
                let _released = persist(&self.shared.ledger, claim.release().await).await;
                let delay = self.spread(moment.saturating_sub(now));
                self.tell(&Event::RetryPutOff { delay });
                Err(Verdict::Defer(delay))
            }
        }
    }

    /// What follows from what became of the task.
    fn conclude<T>(&self, outcome: Outcome<T>) -> (Verdict, Ended) {
        self.shared.desk().away.answered();
        let settlement = outcome.settlement();
        match outcome {
            Outcome::Ran { record, .. } => {
                self.tell(&Event::Completed { attempt: record.attempt, took: record.ran_for });
                (Verdict::Acknowledge, Ended::Succeeded)
            }
            Outcome::Replayed(first) => {
                self.tell(&Event::Replayed { attempt: first.attempt, owner: first.owner, age: first.age });
                (Verdict::Acknowledge, Ended::NotStarted)
            }
            Outcome::Busy(seen) => {
                let delay = self.spread(seen.defer_for());
                let (attempt, owner, age) = (seen.attempt(), Arc::clone(&seen.found.record.owner), seen.age());
                self.tell(&Event::Busy { attempt, owner, age, delay });
                (Verdict::Defer(delay), Ended::NotStarted)
            }
            Outcome::Waiting(seen) => {
                let delay = seen.defer_for();
                let (attempt, owner, age) = (seen.attempt(), Arc::clone(&seen.found.record.owner), seen.age());
                self.tell(&Event::Waiting { attempt, owner, age, delay });
                (Verdict::Defer(delay), Ended::NotStarted)
            }
            Outcome::Failed { failure, record: Some(record) } => {
                let ended = Ended::of(failure.class);
                let verdict = match record.state {
                    State::Dead | State::Parked => self.ended(&record),
                    State::Running | State::Waiting | State::Done => {
                        self.tell(&Event::failed(record.attempt, &failure, record.delay));
                        self.follow(settlement, &record)
                    }
                };
                (verdict, ended)
            }
            Outcome::Failed { failure, record: None } => {
                self.tell(&Event::NotRecorded { error: failure.message.clone() });
                (self.unknown(settlement), Ended::of(failure.class))
            }
            Outcome::DoneNotRecorded { error, .. } => {
                self.tell(&Event::NotRecorded { error: error.to_string() });
                (self.unknown(settlement), Ended::Succeeded)
            }
            Outcome::Dead(seen) | Outcome::Parked(seen) => (self.ended(&seen.found.record), Ended::NotStarted),
            Outcome::Mismatch { seen, given } => {
                let held = seen.found.record.fingerprint;
                let event =
                    Event::Mismatch { held, given, owner: Arc::clone(&seen.found.record.owner), age: seen.age() };
                self.tell(&event);
                let id = format!("mismatch/{given}/{}", self.key());
                let death = Death { id, reason: "mismatch".into(), message: event.to_string() };
                (Verdict::Die(death), Ended::NotStarted)
            }
            Outcome::ClaimLost { found } => {
                let held = found.as_ref().map_or(0, |found| found.record.attempt);
                // The heart, or the run itself, has told it.
                self.shared.counts.add(&Event::LeaseLost { attempt: self.attempt.unwrap_or(held) });
                let verdict = match found {
                    Some(Found { record, .. }) => self.follow(settlement, &record),
                    None => self.unknown(settlement),
                };
                (verdict, Ended::Neither)
            }
        }
    }

    /// The task is dead or parked.
    fn ended(&self, record: &Record) -> Verdict {
        let (attempt, message) = (record.attempt, record.failure.as_ref().map_or("", |failure| &failure.message));
        let message = message.to_owned();
        let (reason, event) = if record.state == State::Parked {
            ("parked", Event::Parked { attempt, message: message.clone() })
        } else {
            ("dead", Event::Dead { attempt, message: message.clone() })
        };
        self.tell(&event);
        // The same for every duplicate, so that one dead letter stays of them.
        Verdict::Die(Death { id: format!("{reason}/{}", self.key()), reason: reason.into(), message })
    }

    /// There is no record, and if there was one it may be gone: run or not, that may be wrong.
    fn too_old(&self, age: Duration) -> (Verdict, Ended) {
        let event = Event::TooOld { age, retention: self.route.policy.retention };
        self.tell(&event);
        let id = format!("too_old/{}", self.key());
        (Verdict::Die(Death { id, reason: "too_old".into(), message: event.to_string() }), Ended::NotStarted)
    }

    fn follow(&self, settlement: Settlement, record: &Record) -> Verdict {
        match settlement {
            Settlement::Acknowledge => Verdict::Acknowledge,
            Settlement::Defer(delay) => Verdict::Defer(delay),
            Settlement::DeadLetter(_) => self.ended(record),
        }
    }

    /// Nobody knows what the store holds by now.
    fn unknown(&self, settlement: Settlement) -> Verdict {
        match settlement {
            Settlement::Defer(delay) => Verdict::Defer(delay),
            Settlement::Acknowledge | Settlement::DeadLetter(_) => Verdict::Defer(LOCKED_DELAY),
        }
    }

    /// The ledger could not say what becomes of the task.
    fn refused(&self, error: Error) -> (Verdict, Ended) {
        let verdict = match error.kind() {
            ErrorKind::NewerFormat => {
                let delay = self.spread(NEWER_DELAY);
                self.tell(&Event::Newer { delay });
                Verdict::Defer(delay)
            }
            // The record, not the store: that is said of the task.
            ErrorKind::Corrupt if error.subject() == Some(&*format!("task `{}`", self.key())) => {
                self.tell(&Event::Unreadable { message: error.to_string() });
                let id = format!("unreadable_record/{}", self.key());
                Verdict::Die(Death { id, reason: "unreadable_record".into(), message: error.to_string() })
            }
            ErrorKind::Locked | ErrorKind::Changed => {
                let delay = self.spread(LOCKED_DELAY);
                self.tell(&Event::Degraded { error: error.to_string(), delay });
                Verdict::Defer(delay)
            }
            // Every other one is the store's, or a setting's that a person has to mend: nothing is lost meanwhile.
            _ => {
                let delay = self.shared.desk().away.failed(self.shared.now());
                let delay = self.spread(delay.max(LOCKED_DELAY));
                self.tell(&Event::Degraded { error: error.to_string(), delay });
                Verdict::Defer(delay)
            }
        };
        (verdict, Ended::NotStarted)
    }

    /// The delay, and up to a tenth more.
    fn spread(&self, delay: Duration) -> Duration {
        let share = (self.shared.ledger.host().random() as u32) as f64 / f64::from(u32::MAX);
        delay + delay.mul_f64(SPREAD * share)
    }
}
