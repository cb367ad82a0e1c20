//! The loop around a driver's attempts: what a claim is worth while a connection is waited for, and what counts.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{another, bench, policy, task, until};
use taskonce_core::held::Phase;
use taskonce_core::ledger::Admission;
use taskonce_core::policy::Effect;
use taskonce_core::record::{Output, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_core::transaction::Attempted;
use taskonce_core::{Error, ErrorKind};
use taskonce_worker::transaction::run_in_transaction;
use taskonce_worker::{Context, Outcome};

/// What a driver does once it has a connection: it locks, runs, completes and commits.
async fn commit(context: &Context) -> Attempted<u8> {
    let (held, store) = (context.held(), context.ledger().store());
    if !held.join().await {
        return Attempted::Lost;
    }
    held.enter();
    let found = store.load(held.key()).await.unwrap().unwrap().record;
    let end = held.join_end(&**context.ledger().host(), &found, Output::Nothing).unwrap();
    match store.swap(held.key(), Expected::Record(&found), Next::Keep(&end)).await.unwrap() {
        Swap::Stored(_) => Attempted::Committed(7),
        Swap::Conflict(_) | Swap::Locked(_) => Attempted::Lost,
    }
}

/// Once heartbeats stopped before there was a connection: who waited long for one was taken over, and a task whose
/// database was busy was parked.
#[tokio::test]
async fn who_waits_long_for_a_connection_keeps_the_claim() {
    let (bench, task, policy) = (bench(), task("pool"), policy(Effect::Transactional));
    let other = another(&bench);
    let outcome = run_in_transaction(&bench.ledger, &task, &policy, Duration::ZERO, |context| {
        let (other, task, policy) = (&other, &task, &policy);
        Box::pin(async move {
            let end = tokio::time::Instant::now() + policy.lease * 5 / 2;
            while tokio::time::Instant::now() < end {
                let admission = other.ledger.claim(task, policy).await.unwrap();
                assert!(matches!(admission, Admission::Busy(_)), "{admission:?}");
                // sleeps: the lease has to pass, more than twice
                tokio::time::sleep(policy.lease / 10).await;
            }
            commit(&context).await
        })
    })
    .await
    .unwrap();
    let Outcome::Ran { value: 7, record } = outcome else { panic!("{outcome:?}") };
    assert_eq!((record.state, record.attempt, record.crashes), (State::Done, 1, 0));
}

/// Once a database that gave no connection used up the attempts of its tasks, and they were dead.
#[tokio::test]
async fn without_a_connection_nothing_was_attempted() {
    let (bench, task, policy) = (bench(), task("refused"), policy(Effect::Transactional));
    let tries = AtomicUsize::new(0);
    let refused = run_in_transaction::<u8>(&bench.ledger, &task, &policy, Duration::ZERO, |_context| {
        tries.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Attempted::Unknown(None, Error::new(ErrorKind::Unreachable, "no connection is left")) })
    })
    .await
    .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    assert!(tries.load(Ordering::SeqCst) > 5);
    let record = bench.memory.load(&task.key).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.attempt, record.crashes, &record.failure), (State::Waiting, 0, 0, &None));
}

/// Once a transaction that was rolled back by hand left its claim without heartbeats, and nobody was told.
#[tokio::test]
async fn a_claim_whose_transaction_ended_without_a_word_is_kept_again() {
    let (bench, task, policy) = (bench(), task("by-hand"), policy(Effect::Keyed));
    let Admission::Run(claim) = bench.ledger.claim(&task, &policy).await.unwrap() else { panic!("fresh") };
    let held = Arc::clone(claim.held());
    assert!(held.join().await);
    held.enter();
    // Its transaction is over, and nobody says so.
    until("the claim is kept again", || async { held.phase() == Phase::Entered }).await;
    let other = another(&bench);
    let end = tokio::time::Instant::now() + policy.lease * 2;
    while tokio::time::Instant::now() < end {
        let admission = other.ledger.claim(&task, &policy).await.unwrap();
        assert!(matches!(admission, Admission::Busy(_)), "{admission:?}");
        // sleeps: the lease has to pass, twice
        tokio::time::sleep(policy.lease / 10).await;
    }
    drop(claim.complete(Output::Nothing).await.unwrap());
}
