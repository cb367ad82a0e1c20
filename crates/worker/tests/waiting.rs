//! Waiting for another's run, for the end of all runs, and for nothing at all.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Fault, another, bench, policy, state, task, until};
use taskonce_core::ledger::Admission;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, State};
use taskonce_worker::{Outcome, Run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_wait_none_runs_again_and_few_look() {
    let bench = bench();
    let task = task("waited for");
    let runs = Arc::new(AtomicU32::new(0));
    let open = Arc::new(tokio::sync::Semaphore::new(0));
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let (ledger, task, runs, open) = (bench.ledger.clone(), task.clone(), Arc::clone(&runs), Arc::clone(&open));
        waiting.spawn(async move {
            let handler = |_| async move {
                runs.fetch_add(1, Ordering::SeqCst);
                open.acquire().await.unwrap().forget();
                Ok::<u8, Failure>(9)
            };
            ledger.run_or_wait(&task, &policy(Effect::Keyed), Duration::from_secs(30), handler).await.unwrap()
        });
    }
    until("all have asked once", || async { bench.store.swaps.load(Ordering::SeqCst) >= 200 }).await;
    let before = bench.store.swaps.load(Ordering::SeqCst);
    let second = tokio::time::Instant::now() + Duration::from_secs(1);
    tokio::time::sleep_until(second).await;
    let looks = bench.store.swaps.load(Ordering::SeqCst) - before;
    assert!(looks < 40, "{looks} looks in a second for 200 who wait");
    let before = bench.store.swaps.load(Ordering::SeqCst);
    open.add_permits(1);
    while let Some(outcome) = waiting.join_next().await {
        assert_eq!(outcome.unwrap().into_value(), Some(9));
    }
    let looks = bench.store.swaps.load(Ordering::SeqCst) - before;
    assert!(looks < 40, "{looks} looks to tell 200 that the task is done");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_those_who_wait_takes_over_when_the_leader_fails_or_dies() {
    let bench = bench();
    let leader = another(&bench);
    for dies in [false, true] {
        let task = task(if dies { "dies" } else { "fails" });
        let Admission::Run(claim) = leader.ledger.claim(&task, &policy(Effect::Keyed)).await.unwrap() else {
            panic!("not claimed")
        };
        claim.enter();
        let runs = Arc::new(AtomicUsize::new(0));
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (ledger, task, runs) = (bench.ledger.clone(), task.clone(), Arc::clone(&runs));
            waiting.spawn(async move {
                let handler = |_| async move {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok::<u8, Failure>(1)
                };
                ledger.run_or_wait(&task, &policy(Effect::Keyed), Duration::from_secs(30), handler).await.unwrap()
            });
        }
        if dies {
            // Killed: no more heartbeats, no release.
            leader.store.fail(State::Running, Fault::Refused, usize::MAX);
            leader.store.fail(State::Waiting, Fault::Refused, usize::MAX);
            std::mem::forget(claim);
        } else {
            claim.fail(Failure::retryable("no")).await.unwrap();
        }
        while let Some(outcome) = waiting.join_next().await {
            assert_eq!(outcome.unwrap().into_value(), Some(1));
        }
        assert_eq!(runs.load(Ordering::SeqCst), 1, "dies: {dies}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_for_a_moment_ends_no_wait() {
    let bench = bench();
    let leader = another(&bench);
    let task = task("away");
    let slow = Policy { lease: Duration::from_secs(20), ..policy(Effect::Keyed) };
    let Admission::Run(claim) = leader.ledger.claim(&task, &slow).await.unwrap() else { panic!("not claimed") };
    claim.enter();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (ledger, task, slow) = (bench.ledger.clone(), task.clone(), slow.clone());
        waiting.spawn(async move {
            ledger.run_or_wait(&task, &slow, Duration::from_secs(30), |_| async { Ok::<u8, Failure>(1) }).await
        });
    }
    until("all have asked, and one again", || async { bench.store.swaps.load(Ordering::SeqCst) > 9 }).await;
    bench.store.fail(State::Running, Fault::Refused, 6);
    let before = bench.store.swaps.load(Ordering::SeqCst);
    until("the store was away", || async { bench.store.swaps.load(Ordering::SeqCst) >= before + 8 }).await;
    assert!(waiting.try_join_next().is_none(), "all wait on");
    claim.fail(Failure::permanent("no")).await.unwrap();
    while let Some(outcome) = waiting.join_next().await {
        assert!(matches!(outcome.unwrap().unwrap(), Outcome::Dead(_)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_stays_away_ends_the_waits_of_all_with_its_error() {
    let bench = bench();
    let leader = another(&bench);
    let task = task("gone");
    let slow = Policy { lease: Duration::from_secs(20), ..policy(Effect::Keyed) };
    let Admission::Run(claim) = leader.ledger.claim(&task, &slow).await.unwrap() else { panic!("not claimed") };
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (ledger, task, slow) = (bench.ledger.clone(), task.clone(), slow.clone());
        waiting.spawn(async move {
            ledger.run_or_wait(&task, &slow, Duration::from_secs(600), |_| async { Ok::<u8, Failure>(1) }).await
        });
    }
    until("all have asked, and one again", || async { bench.store.swaps.load(Ordering::SeqCst) > 9 }).await;
    bench.store.fail(State::Running, Fault::Refused, usize::MAX);
    let ended = async {
        while let Some(outcome) = waiting.join_next().await {
            assert_eq!(outcome.unwrap().unwrap_err().kind(), taskonce_core::ErrorKind::Unreachable);
        }
    };
    // One bears with it for ten seconds, for all.
    tokio::time::timeout(Duration::from_secs(40), ended).await.expect("nobody waits for a store that stays away");
    bench.store.heal();
    drop(claim);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_calls_for_nothing_is_looked_at_no_more_often_than_one_that_cannot_call() {
    let bench = bench();
    let leader = another(&bench);
    let task = task("restless");
    let slow = Policy { lease: Duration::from_secs(30), ..policy(Effect::Keyed) };
    let Admission::Run(claim) = leader.ledger.claim(&task, &slow).await.unwrap() else { panic!("not claimed") };
    bench.store.restless.store(true, Ordering::SeqCst);
    let waiting = tokio::spawn({
        let (ledger, task, slow) = (bench.ledger.clone(), task.clone(), slow.clone());
        async move { ledger.run_or_wait(&task, &slow, Duration::from_secs(30), |_| async { Ok::<u8, Failure>(1) }).await }
    });
    // The pauses grow by then.
    until("it has looked ten times", || async { bench.store.swaps.load(Ordering::SeqCst) >= 10 }).await;
    let before = bench.store.swaps.load(Ordering::SeqCst);
    let end = tokio::time::Instant::now() + Duration::from_secs(2);
    tokio::time::sleep_until(end).await;
    let looks = bench.store.swaps.load(Ordering::SeqCst) - before;
    assert!(looks <= 9, "{looks} looks in two seconds");
    claim.fail(Failure::permanent("no")).await.unwrap();
    assert!(matches!(waiting.await.unwrap().unwrap(), Outcome::Dead(_)));
}

#[tokio::test]
async fn waiting_ends_at_its_deadline_with_what_it_saw() {
    let bench = bench();
    let task = task("deadline");
    let Admission::Run(claim) = bench.ledger.claim(&task, &policy(Effect::Keyed)).await.unwrap() else {
        panic!("not claimed")
    };
    let wait = Duration::from_millis(80);
    let outcome =
        bench.ledger.run_or_wait(&task, &policy(Effect::Keyed), wait, |_| async { Ok::<u8, Failure>(1) }).await;
    assert!(matches!(outcome.unwrap(), Outcome::Busy(_)));
    assert!(bench.heart.claims() == 1);
    drop(claim);
}

#[tokio::test]
async fn a_heartbeat_comes_no_earlier_than_its_period_less_its_jitter() {
    let bench = bench();
    // A period of 3 s, which the heart's thread wakes into before it is over.
    let slow = Policy { lease: Duration::from_secs(9), ..policy(Effect::Keyed) };
    let Admission::Run(claim) = bench.ledger.claim(&task("period"), &slow).await.unwrap() else {
        panic!("not claimed")
    };
    // sleeps: nothing must happen for most of the period
    tokio::time::sleep(Duration::from_millis(2400)).await;
    assert_eq!(bench.store.swaps.load(Ordering::SeqCst), 1, "only the claim was written");
    until("the heartbeat comes", || async { bench.store.swaps.load(Ordering::SeqCst) == 2 }).await;
    drop(claim);
}

#[tokio::test]
async fn an_idle_heart_asks_nothing_of_the_store() {
    let bench = bench();
    let task = task("idle");
    let ran = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<u8, Failure>(1) }).await.unwrap();
    assert!(matches!(ran, Outcome::Ran { .. }));
    assert_eq!(bench.heart.claims(), 0);
    let (swaps, loads) = (bench.store.swaps.load(Ordering::SeqCst), bench.store.loads.load(Ordering::SeqCst));
    // sleeps: more than two leases, in which heartbeats would be due.
    tokio::time::sleep(Duration::from_millis(1300)).await;
    assert_eq!((bench.store.swaps.load(Ordering::SeqCst), bench.store.loads.load(Ordering::SeqCst)), (swaps, loads));
}

#[tokio::test]
async fn finishing_waits_for_handlers_that_run() {
    let bench = bench();
    let task = task("graceful");
    let open = Arc::new(tokio::sync::Semaphore::new(0));
    let run = tokio::spawn({
        let (ledger, task, open) = (bench.ledger.clone(), task.clone(), Arc::clone(&open));
        async move {
            let handler = |_| async move {
                open.acquire().await.unwrap().forget();
                Ok::<u8, Failure>(1)
            };
            ledger.run(&task, &policy(Effect::Keyed), handler).await
        }
    });
    until("it runs", || async { bench.heart.claims() == 1 }).await;
    assert!(!bench.ledger.finish(Duration::from_millis(50)).await, "a handler runs");
    open.add_permits(1);
    assert!(bench.ledger.finish(Duration::from_secs(10)).await);
    assert_eq!(state(&bench, &task).await, Some(State::Done));
    assert!(matches!(run.await.unwrap().unwrap(), Outcome::Ran { .. }));
}
