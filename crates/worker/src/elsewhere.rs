//! Runs a task that another program completes by its own hand: it is told the claim, and writes effect and completion in one
//! transaction of its own, by plain SQL.
//!
//! What it says by ending well is not believed: the record has to be done by this very claim.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::Result;
use taskonce_core::held::{Held, Joined, Settled};
use taskonce_core::key::Task;
use taskonce_core::ledger::{Admission, Claim, Ledger};
use taskonce_core::policy::Policy;
use taskonce_core::record::{Failure, FailureClass, Found, Output};

use crate::outcome::Outcome;
use crate::run::{Context, answer, persist};
use crate::transaction::{find_out, lost};
use crate::wait;

/// Runs a task whose record the handler completes elsewhere; see this module. A wait of zero does not wait.
///
/// A handler that ends well without having completed the record is a failed attempt: nothing is replayed as done. One that
/// fails after it has completed it is done all the same. Heartbeats go on beside the transaction that holds the record, which
/// makes them wait; it has to end within the lease.
///
/// # Errors
/// Those of [`Ledger::claim`], also for a store that no transaction of the handler's can reach; the store's when nobody can say
/// for a lease whether the record was completed.
pub async fn run_elsewhere<H, F>(
    ledger: &Ledger,
    task: &Task,
    policy: &Policy,
    wait_max: Duration,
    handler: H,
) -> Result<Outcome<Output>>
where
    H: FnOnce(Context) -> F + Send,
    F: Future<Output = std::result::Result<(), Failure>> + Send,
{
    match wait::claim_or_wait(ledger, task, policy, wait_max).await? {
        Admission::Run(claim) => {
            let outcome = run_claimed(ledger, claim, handler).await;
            wait::ended(ledger, &task.key);
            outcome
        }
        admission => answer(admission, |seen| Ok(Some(seen.output().clone()))),
    }
}

async fn run_claimed<H, F>(ledger: &Ledger, claim: Claim, handler: H) -> Result<Outcome<Output>>
where
    H: FnOnce(Context) -> F + Send,
    F: Future<Output = std::result::Result<(), Failure>> + Send,
{
    let held = Arc::clone(claim.held());
    if !claim.may_start_effect() {
        return Ok(lost(ledger, claim).await);
    }
    let context = Context::new(Arc::clone(&held), ledger);
    claim.enter();
    let mut running = pin!(handler(context.clone()));
    let ended = tokio::select! {
        biased;
        ended = &mut running => ended,
        () = held.lost() => {
            // A heartbeat finds a record that the handler has completed to be nobody's any more: the handler may end in peace.
            let completed = ledger.store().load(held.key()).await?.filter(|found| held.completed_elsewhere(found));
            let Some(found) = completed else {
                let failure = Failure::new(FailureClass::Dropped, "cancelled: the lease passed without a renewal");
                return Ok(failed(ledger, claim, failure).await);
            };
            let _late = tokio::time::timeout(context.lease_left(), &mut running).await;
            return Ok(ran(ledger, &held, found));
        }
    };
    if let Err(failure) = ended {
        return Ok(failed(ledger, claim, failure).await);
    }
    match find_out(ledger, &held).await? {
        Joined::Lost(Some(found)) if held.completed_elsewhere(&found) => Ok(ran(ledger, &held, found)),
        Joined::Committed(record) => Ok(ran(ledger, &held, Found { record, age: Default::default() })),
        Joined::Lost(found) => Ok(Outcome::ClaimLost { found }),
        Joined::RolledBack => {
            let what = "it ended well without having completed its task: nothing is done, and nothing will be replayed";
            Ok(failed(ledger, claim, Failure::retryable(what)).await)
        }
    }
}

fn ran(ledger: &Ledger, held: &Held, found: Found) -> Outcome<Output> {
    ledger.store().told(held.key(), &found.record);
    Outcome::Ran { value: found.record.output.clone(), record: found.record }
}

/// Records the failure, unless the record was completed before it.
async fn failed(ledger: &Ledger, claim: Claim, failure: Failure) -> Outcome<Output> {
    let held = Arc::clone(claim.held());
    match persist(ledger, claim.fail(failure.clone()).await).await {
        Ok(Settled::Recorded(record)) => Outcome::Failed { failure, record: Some(record) },
        Ok(Settled::Lost(Some(found))) if held.completed_elsewhere(&found) => ran(ledger, &held, found),
        Ok(Settled::Lost(found)) => Outcome::ClaimLost { found },
        Err(_unsettled) => Outcome::Failed { failure, record: None },
    }
}
