//! Runs a task in a transaction of the caller's, so that its effect commits with its record.
//!
//! What is the same for every driver is here: claim, heartbeats, tries, and what became of a commit whose answer was
//! lost. A driver makes one attempt: it begins the transaction, locks the record, runs the handler, writes the
//! completion and commits.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::held::{Joined, Settled};
use taskonce_core::key::Task;
use taskonce_core::ledger::{Admission, Claim, Ledger};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, State};
use taskonce_core::transaction::Attempted;
use taskonce_core::{Error, ErrorKind, Result, Retry};
use tokio::time::{Instant, sleep, sleep_until};

use crate::heartbeat::{AGAIN_MAX, AGAIN_MIN};
use crate::outcome::{Outcome, Replayed, decode};
use crate::run::{Context, answer, fail, found_now, persist, replayed};
use crate::wait;

/// How often one claim tries its transaction, where the database refused it for what others did at the same time.
const TRIES_MAX: usize = 20;

/// One attempt in a transaction, as a driver makes it.
pub type Attempt<'a, T> = Pin<Box<dyn Future<Output = Attempted<T>> + Send + 'a>>;

/// Runs a task whose effect is written in the transaction that completes its record. For drivers; users call the
/// `run_in_transaction` of theirs.
///
/// A busy or waiting task is waited for, at most `wait_max`. `attempt` is called again after a serialisation failure or a
/// deadlock, and after a lost connection where the transaction turned out to be rolled back; at most 20 times a claim, and
/// only while the claim holds.
///
/// # Errors
/// Those of [`Ledger::claim`]; [`ErrorKind::Unsupported`] for an effect of another kind than transactional, before anything is
/// claimed; the store's when nobody can say for a lease what became of a commit. Then effect and record
/// are still stored both or neither: the next delivery finds out.
pub async fn run_in_transaction<'a, T>(
    ledger: &Ledger,
    task: &Task,
    policy: &Policy,
    wait_max: Duration,
    attempt: impl FnMut(Context) -> Attempt<'a, T> + Send,
) -> Result<Outcome<T>>
where
    T: serde::de::DeserializeOwned + Send,
{
    check_effect(task, policy)?;
    match wait::claim_or_wait(ledger, task, policy, wait_max).await? {
        Admission::Run(claim) => {
            let outcome = run_claimed(ledger, claim, attempt).await;
            wait::ended(ledger, &task.key);
            outcome
        }
        admission => answer(admission, |seen| replayed(&task.key, seen)),
    }
}

/// A handler may be called several times within one attempt, where the database refused its transaction; and one that failed is
/// called again, since nothing of it was kept. That is right for what the transaction writes, and for nothing else.
fn check_effect(task: &Task, policy: &Policy) -> Result<()> {
    match policy.effect {
        Effect::Transactional => Ok(()),
        Effect::Keyed | Effect::Fenced | Effect::Unrepeatable | Effect::Repeatable => Err(Error::new(
            ErrorKind::Unsupported,
            format!("the effect is {}, and a run in a transaction is for a transactional one", policy.effect.name()),
        )
        .about(format!("task `{}`", task.key))
        .with_hint(
            "say `transactional`; what the handler calls outside of the transaction belongs into a task or a step of its own, \
             run by `run`",
        )),
    }
}

async fn run_claimed<'a, T>(
    ledger: &Ledger,
    claim: Claim,
    mut attempt: impl FnMut(Context) -> Attempt<'a, T> + Send,
) -> Result<Outcome<T>>
where
    T: serde::de::DeserializeOwned + Send,
{
    let held = Arc::clone(claim.held());
    let ends_at = held.policy().run_max.map(|run_max| (Instant::now() + run_max, run_max));
    let too_long = async {
        match ends_at {
            Some((at, run_max)) => {
                sleep_until(at).await;
                run_max
            }
            None => std::future::pending().await,
        }
    };
    tokio::pin!(too_long);
    let mut delay = AGAIN_MIN;
    for tried in 1..=TRIES_MAX {
        if let Some((at, run_max)) = ends_at
            && Instant::now() >= at
        {
            return ran_too_long(ledger, claim, run_max).await;
        }
        // Heartbeats go on until the driver has its connection and is about to lock the record: it may wait long for one.
        if !claim.may_start_effect() {
            return Ok(lost(ledger, claim).await);
        }
        let context = Context::new(Arc::clone(&held), ledger);
        let attempted = tokio::select! {
            biased;
            attempted = attempt(context.clone()) => attempted,
            // Dropped, the attempt is rolled back.
            run_max = &mut too_long => return ran_too_long(ledger, claim, run_max).await,
        };
        let (value, error) = match attempted {
            Attempted::Committed(value) => {
                let record = held.join_committed();
                return Ok(match record {
                    Some(record) => {
                        ledger.store().told(held.key(), &record);
                        Outcome::Ran { value, record }
                    }
                    None => lost(ledger, claim).await,
                });
            }
            Attempted::Failed(failure) => return Ok(fail(ledger, claim, context.stopped().unwrap_or(failure)).await),
            Attempted::Lost => {
                held.lose();
                return Ok(lost(ledger, claim).await);
            }
            Attempted::Refused(error) => {
                let _settled = persist(ledger, claim.release().await).await;
                return Err(error);
            }
            Attempted::Again(error) => (None, error),
            Attempted::Unknown(value, error) => (value, error),
        };
        tracing::warn!(key = %held.key(), %error, tried, "the transaction did not come to its end");
        match find_out(ledger, &held).await? {
            Joined::Committed(record) => {
                ledger.store().told(held.key(), &record);
                return match value {
                    Some(value) => Ok(Outcome::Ran { value, record }),
                    // The next delivery replays it.
                    None => Err(error),
                };
            }
            Joined::Lost(found) => return Ok(Outcome::ClaimLost { found }),
            // Where the handler never came to its turn, nothing was attempted.
            Joined::RolledBack if tried == TRIES_MAX && !held.is_entered() => {
                let _settled = persist(ledger, claim.release().await).await;
                return Err(error);
            }
            Joined::RolledBack if tried == TRIES_MAX => {
                return Ok(fail(ledger, claim, Failure::from(error).nothing_happened()).await);
            }
            Joined::RolledBack => pause(ledger, &mut delay).await,
        }
    }
    Ok(lost(ledger, claim).await)
}

/// `run_max` has passed: a failed attempt, or none where the handler did not come to its turn.
async fn ran_too_long<T>(ledger: &Ledger, claim: Claim, run_max: Duration) -> Result<Outcome<T>>
where
    T: serde::de::DeserializeOwned + Send,
{
    let held = Arc::clone(claim.held());
    if !held.is_entered() {
        let _settled = persist(ledger, claim.release().await).await;
        return Err(Error::new(ErrorKind::TimedOut, format!("no transaction was begun within run_max {run_max:?}"))
            .about(format!("task `{}`", held.key()))
            .with_hint("the database has no connection to spare, or is slow; raise `run_max` or its pool"));
    }
    let failure = Failure::new(FailureClass::RanTooLong, format!("ran longer than run_max {run_max:?}"));
    match fail(ledger, claim, failure).await {
        // Its commit was under way, and came first.
        Outcome::Failed { record: Some(record), .. } if record.state == State::Done => {
            ledger.store().told(held.key(), &record);
            Ok(Outcome::Replayed(Replayed {
                value: decode(held.key(), &record.output)?,
                dropped: None,
                attempt: record.attempt,
                owner: Arc::clone(&record.owner),
                age: Duration::ZERO,
                cached: false,
            }))
        }
        outcome => Ok(outcome),
    }
}

/// Why a step did not come to its commit. For drivers.
#[derive(Debug)]
pub enum NotRun {
    /// The database refused it for what others did at the same time, and it was rolled back: it may be tried again.
    Conflict(Failure),
    /// It failed, or cannot run.
    Failed(Failure),
}

impl NotRun {
    /// What the handler is to return.
    #[must_use]
    pub fn into_failure(self) -> Failure {
        match self {
            NotRun::Conflict(failure) => failure.nothing_happened(),
            NotRun::Failed(failure) => failure,
        }
    }
}

/// The tries of one step whose transaction the database may refuse for what others do at the same time. For drivers.
#[derive(Debug)]
pub struct Tries {
    tried: usize,
    delay: Duration,
}

impl Default for Tries {
    /// The first one is under way.
    fn default() -> Tries {
        Tries { tried: 1, delay: AGAIN_MIN }
    }
}

impl Tries {
    /// Pauses before the next try, and says whether there is one: 20 at most, and none once the claim is lost or its lease over.
    pub async fn again(&mut self, context: &Context) -> bool {
        if self.tried == TRIES_MAX {
            return false;
        }
        self.tried += 1;
        pause(context.ledger(), &mut self.delay).await;
        context.may_start_effect()
    }
}

async fn pause(ledger: &Ledger, delay: &mut Duration) {
    sleep(delay.mul_f64(0.5 + 0.5 * share(ledger))).await;
    *delay = (*delay * 2).min(AGAIN_MAX);
}

/// A random share, so that those who were refused together do not come again together.
fn share(ledger: &Ledger) -> f64 {
    f64::from(ledger.host().random() as u8) / 255.0
}

/// The claim was lost before its handler could do anything, or is no more.
pub(crate) async fn lost<T>(ledger: &Ledger, claim: Claim) -> Outcome<T> {
    match persist(ledger, claim.release().await).await {
        Ok(Settled::Recorded(record)) => Outcome::ClaimLost { found: Some(found_now(record)) },
        Ok(Settled::Lost(found)) => Outcome::ClaimLost { found },
        Err(_unsettled) => Outcome::ClaimLost { found: None },
    }
}

/// What became of the transaction, asked for as long as a lease.
pub(crate) async fn find_out(ledger: &Ledger, held: &Arc<taskonce_core::held::Held>) -> Result<Joined> {
    let until = Instant::now() + held.policy().lease;
    let mut delay = AGAIN_MIN;
    loop {
        match held.resolve(&**ledger.store(), &**ledger.host()).await {
            Err(error) if error.kind().retry() == Retry::Later && Instant::now() < until => {
                tracing::warn!(key = %held.key(), %error, "what became of the transaction is not known yet");
                sleep(delay).await;
                delay = (delay * 2).min(AGAIN_MAX);
            }
            Err(error) => return Err(in_doubt(error)),
            Ok(joined) => return Ok(joined),
        }
    }
}

fn in_doubt(error: Error) -> Error {
    error.with_hint("effect and record are stored both or neither; the next delivery finds out which")
}
