//! Runs one task: claim, handler, heartbeat, completion; everything in between is recovered.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::held::{Held, Settled};
use taskonce_core::key::{DownstreamKey, Key, Task};
use taskonce_core::ledger::{Admission, Claim, Ledger, Seen, Unsettled};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Age, DropReason, Failure, FailureClass, Fence, Found, Output, Record};
use taskonce_core::{Error, ErrorKind, Result, Retry};

use crate::events::Event;
use crate::heartbeat::{AGAIN_MAX, AGAIN_MIN};
use crate::outcome::{Outcome, Replayed, decode, encode};
use crate::steps::Steps;
use crate::wait;

/// What a handler is given.
#[derive(Clone)]
pub struct Context {
    held: Arc<Held>,
    ledger: Ledger,
    steps: Arc<Steps>,
}

impl Context {
    pub(crate) fn new(held: Arc<Held>, ledger: &Ledger) -> Context {
        Context { held, ledger: ledger.clone(), steps: Arc::default() }
    }

    /// The claim as the process holds it. For drivers of transactions.
    #[must_use]
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// The ledger that the task runs through.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Its steps.
    pub(crate) fn steps(&self) -> &Steps {
        &self.steps
    }

    /// Why the task stops for a person, whatever its handler makes of it.
    pub(crate) fn stopped(&self) -> Option<Failure> {
        self.steps.stopped()
    }

    /// The task's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.held.key()
    }

    /// The number of this attempt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.held.attempt()
    }

    /// The fencing token: a resource that refuses a smaller one than it has seen refuses stale writes.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.held.fence()
    }

    /// The key for a provider that deduplicates: the same in every attempt; `""` for a task of one step.
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> DownstreamKey {
        self.held.key().downstream(step)
    }

    /// The `traceparent` for what the handler calls or sends, where its task came with one and is run by a worker: in the same
    /// trace, with this run as the parent. To be asked in the handler itself, not in what it spawned.
    #[must_use]
    pub fn traceparent(&self) -> Option<String> {
        crate::span::current()
    }

    /// The failure of the attempt before, if there was one.
    #[must_use]
    pub fn last_failure(&self) -> Option<Failure> {
        self.held.last_failure()
    }

    /// Whether an effect may still be started. To be asked right before each, by handlers that block.
    #[must_use]
    pub fn may_start_effect(&self) -> bool {
        self.held.may_start_effect(self.ledger.host().uptime())
    }

    /// Completes when the claim is lost. Async handlers are cancelled by then; this is for what they spawned.
    pub async fn lost(&self) {
        self.held.lost().await;
    }

    /// What is left of the lease, less its margin.
    #[must_use]
    pub fn lease_left(&self) -> Duration {
        self.held.deadline().saturating_sub(self.ledger.host().uptime())
    }
}

/// Runs tasks through a ledger.
///
/// A panic of the handler goes on to the caller; the attempt counts as failed, like one that was cancelled.
///
/// Cancellation: when the future is dropped, a claim whose handler was not entered is released; a handler that was
/// entered counts as a failed attempt (an unrepeatable effect is parked); a completion that has begun is finished in the
/// background.
pub trait Run {
    /// Runs the handler if the task is free, and records what it returns. A duplicate gets the first run's value.
    ///
    /// The handler is cancelled (its future dropped) when the claim is lost, or `run_max` has passed. One that blocks its
    /// thread cannot be cancelled: then [`Context::may_start_effect`] says no, and what it returns at last is recorded
    /// unless another has taken over.
    ///
    /// # Errors
    /// Those of [`Ledger::claim`]; [`taskonce_core::ErrorKind::BadOutput`] when a stored output is of another type;
    /// [`taskonce_core::ErrorKind::Unsupported`] for a transactional effect, which a driver's `run_in_transaction` runs.
    fn run<T, H, F>(&self, task: &Task, policy: &Policy, handler: H) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<T, Failure>> + Send;

    /// The same, but a busy or waiting task is waited for, at most `wait_max`: until the first run is done (then its
    /// value is replayed), or it failed or died (then one of those who wait runs the task).
    ///
    /// # Errors
    /// As for [`Run::run`].
    fn run_or_wait<T, H, F>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<T, Failure>> + Send;

    /// As [`Run::run_or_wait`], with outputs as bytes of a content type. A wait of zero does not wait.
    ///
    /// # Errors
    /// Those of [`Ledger::claim`].
    fn run_bytes<H, F>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<Output>>> + Send
    where
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<Output, Failure>> + Send;
}

impl Run for Ledger {
    async fn run<T, H, F>(&self, task: &Task, policy: &Policy, handler: H) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<T, Failure>> + Send,
    {
        self.run_or_wait(task, policy, Duration::ZERO, handler).await
    }

    async fn run_or_wait<T, H, F>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<T, Failure>> + Send,
    {
        check_effect(task, policy)?;
        let encoded = |value: &T| encode(value);
        match wait::claim_or_wait(self, task, policy, wait_max).await? {
            Admission::Run(claim) => run_claimed(self, claim, handler, encoded).await,
            admission => answer(admission, |seen| replayed(&task.key, seen)),
        }
    }

    async fn run_bytes<H, F>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<Output>>
    where
        H: FnOnce(Context) -> F + Send,
        F: Future<Output = Result<Output, Failure>> + Send,
    {
        check_effect(task, policy)?;
        match wait::claim_or_wait(self, task, policy, wait_max).await? {
            Admission::Run(claim) => run_claimed(self, claim, handler, Output::clone).await,
            admission => answer(admission, |seen| Ok(Some(seen.output().clone()))),
        }
    }
}

/// A handler whose effect is transactional says nothing by returning: the effect's transaction has to commit the completion.
fn check_effect(task: &Task, policy: &Policy) -> Result<()> {
    if policy.effect != Effect::Transactional {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unsupported, "the effect is transactional, and a plain run has no transaction for it")
        .about(format!("task `{}`", task.key))
        .with_hint("run it with `run_in_transaction`, or say which other kind of effect the handler has"))
}

/// The first run's value.
pub(crate) fn replayed<T: DeserializeOwned>(key: &Key, seen: &Seen) -> Result<Option<T>> {
    decode(key, seen.output())
}

pub(crate) fn answer<T>(admission: Admission, value: impl FnOnce(&Seen) -> Result<Option<T>>) -> Result<Outcome<T>> {
    Ok(match admission {
        Admission::Run(claim) => {
            // Only for the compiler: the caller has taken this case.
            drop(claim);
            Outcome::ClaimLost { found: None }
        }
        Admission::Replay(seen) => Outcome::Replayed(Replayed {
            value: value(&seen)?,
            dropped: match seen.output() {
                Output::Dropped(reason) => Some(*reason),
                Output::Nothing | Output::Kept { .. } => None,
            },
            attempt: seen.attempt(),
            owner: Arc::clone(&seen.found.record.owner),
            age: seen.age(),
            cached: seen.cached,
        }),
        Admission::Busy(seen) => Outcome::Busy(seen),
        Admission::Waiting(seen) => Outcome::Waiting(seen),
        Admission::Dead(seen) => Outcome::Dead(seen),
        Admission::Parked(seen) => Outcome::Parked(seen),
        Admission::Mismatch { seen, given } => Outcome::Mismatch { seen, given },
    })
}

pub(crate) async fn run_claimed<T, H, F>(
    ledger: &Ledger,
    claim: Claim,
    handler: H,
    encode: impl FnOnce(&T) -> Output,
) -> Result<Outcome<T>>
where
    T: Send,
    H: FnOnce(Context) -> F + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    let key = claim.held().key().clone();
    let context = Context::new(Arc::clone(claim.held()), ledger);
    let ended = match (run_handler(&claim, &context, handler).await, context.stopped()) {
        (Ended::Returned(_) | Ended::RanTooLong(_), Some(failure)) => Ended::Returned(Err(failure)),
        (Ended::Returned(Ok(value)), None) => match context.end_steps().await {
            Ok(()) => Ended::Returned(Ok(value)),
            Err(failure) => Ended::Returned(Err(failure)),
        },
        (ended, _) => ended,
    };
    let outcome = match ended {
        Ended::Returned(Ok(value)) => {
            let output = encode(&value);
            if let Output::Dropped(DropReason::NotEncodable) = output {
                tracing::warn!(%key, "done without output: it cannot be encoded");
            }
            let (attempt, deadline) = (claim.attempt(), claim.held().deadline());
            match persist(ledger, claim.complete(output).await).await {
                Ok(Settled::Recorded(record)) => {
                    let late = ledger.host().uptime().saturating_sub(deadline);
                    if !late.is_zero() {
                        Event::LateAccepted { attempt, late }.tell(&key);
                    }
                    Outcome::Ran { value, record }
                }
                Ok(Settled::Lost(found)) => {
                    Event::LateRefused { attempt }.tell(&key);
                    Outcome::ClaimLost { found }
                }
                Err(unsettled) => {
                    tracing::error!(%key, error = %unsettled.error, "done, not recorded");
                    Outcome::DoneNotRecorded { value, error: unsettled.into_error() }
                }
            }
        }
        Ended::Returned(Err(failure)) => fail(ledger, claim, failure).await,
        Ended::RanTooLong(run_max) => {
            let failure = Failure::new(FailureClass::RanTooLong, format!("ran longer than run_max {run_max:?}"));
            fail(ledger, claim, failure).await
        }
        Ended::LostBeforeEntered => {
            // Nothing was started, so the attempt does not count, unless another has taken over already.
            match persist(ledger, claim.release().await).await {
                Ok(Settled::Recorded(record)) => Outcome::ClaimLost { found: Some(found_now(record)) },
                Ok(Settled::Lost(found)) => Outcome::ClaimLost { found },
                Err(_unsettled) => Outcome::ClaimLost { found: None },
            }
        }
        Ended::ClaimLost => {
            // When nobody took over (the store was away), the attempt is recorded as failed; else the token refuses it.
            let failure = Failure::new(FailureClass::Dropped, "cancelled: the lease passed without a renewal");
            match persist(ledger, claim.fail(failure).await).await {
                Ok(Settled::Recorded(record)) => Outcome::ClaimLost { found: Some(found_now(record)) },
                Ok(Settled::Lost(found)) => Outcome::ClaimLost { found },
                Err(_unsettled) => Outcome::ClaimLost { found: None },
            }
        }
    };
    wait::ended(ledger, &key);
    Ok(outcome)
}

enum Ended<T> {
    Returned(Result<T, Failure>),
    RanTooLong(Duration),
    ClaimLost,
    LostBeforeEntered,
}

/// A record that was written just now.
pub(crate) fn found_now(record: Arc<Record>) -> Found {
    Found { record, age: Age::default() }
}

async fn run_handler<T, H, F>(claim: &Claim, context: &Context, handler: H) -> Ended<T>
where
    H: FnOnce(Context) -> F + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    if !claim.may_start_effect() {
        return Ended::LostBeforeEntered;
    }
    let held = Arc::clone(claim.held());
    let run_max = held.policy().run_max;
    let too_long = async {
        match run_max {
            Some(run_max) => {
                tokio::time::sleep(run_max).await;
                run_max
            }
            None => std::future::pending().await,
        }
    };
    claim.enter();
    tokio::select! {
        biased;
        result = handler(context.clone()) => Ended::Returned(result),
        () = held.lost() => Ended::ClaimLost,
        run_max = too_long => Ended::RanTooLong(run_max),
    }
}

pub(crate) async fn fail<T>(ledger: &Ledger, claim: Claim, failure: Failure) -> Outcome<T> {
    let (key, attempt) = (claim.held().key().clone(), claim.attempt());
    match persist(ledger, claim.fail(failure.clone()).await).await {
        Ok(Settled::Recorded(record)) => Outcome::Failed { failure, record: Some(record) },
        Ok(Settled::Lost(found)) => {
            Event::LateRefused { attempt }.tell(&key);
            Outcome::ClaimLost { found }
        }
        Err(unsettled) => {
            tracing::error!(key = %unsettled.held().key(), error = %unsettled.error, "failure not recorded");
            Outcome::Failed { failure, record: None }
        }
    }
}

/// Tries the end of a claim again while its lease lasts, where trying can help.
pub(crate) async fn persist(ledger: &Ledger, tried: Result<Settled, Unsettled>) -> Result<Settled, Unsettled> {
    let mut tried = tried;
    let mut delay = AGAIN_MIN;
    loop {
        match tried {
            Err(unsettled) if unsettled.error.kind() == ErrorKind::BadOutput && unsettled.held().shed_output() => {
                tracing::error!(key = %unsettled.held().key(), error = %unsettled.error, "done without its output");
                tried = unsettled.again().await;
            }
            Err(unsettled)
                if unsettled.error.kind().retry() == Retry::Later
                    && ledger.host().uptime() < unsettled.held().deadline() =>
            {
                tracing::warn!(key = %unsettled.held().key(), error = %unsettled.error, "end not recorded, trying again");
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(AGAIN_MAX);
                tried = unsettled.again().await;
            }
            tried => return tried,
        }
    }
}
