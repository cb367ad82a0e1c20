//! What a run promises, with real heartbeats over a store that fails on request.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Fault, another, bench, policy, state, task, until};
use taskonce_core::ErrorKind;
use taskonce_core::json::Input;
use taskonce_core::key::Handler;
use taskonce_core::ledger::Admission;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Output, State};
use taskonce_worker::{Outcome, Run, Settlement};

#[tokio::test]
async fn a_second_run_replays_the_first_with_its_attempt_age_and_owner() {
    let bench = bench();
    let task = task("replay");
    let first = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(vec![1u64, 2]) }).await;
    assert!(matches!(first.unwrap(), Outcome::Ran { value, .. } if value == [1, 2]));
    let second = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<Vec<u64>, Failure>(vec![]) }).await;
    let Outcome::Replayed(replayed) = second.unwrap() else { panic!("not replayed") };
    assert_eq!(replayed.value.unwrap(), [1, 2]);
    assert_eq!(replayed.attempt, 1);
    assert_eq!(replayed.owner, bench.ledger.host().owner());
    assert!(replayed.age < Duration::from_secs(10));
}

/// A framework that takes the key from the function's name makes every key new when it is renamed or moved.
#[tokio::test]
async fn a_renamed_function_keeps_the_keys_of_its_handler() {
    async fn charge(_: taskonce_worker::Context) -> Result<u8, Failure> {
        Ok(1)
    }
    mod moved {
        use super::Failure;

        pub(super) async fn charge_card(_: taskonce_worker::Context) -> Result<u8, Failure> {
            Ok(2)
        }
    }
    let bench = bench();
    let task = task("renamed");
    let before = bench.ledger.run(&task, &policy(Effect::Keyed), charge).await.unwrap();
    assert!(matches!(before, Outcome::Ran { value: 1, .. }), "{before:?}");
    let after = bench.ledger.run(&task, &policy(Effect::Keyed), moved::charge_card).await.unwrap();
    assert!(matches!(&after, Outcome::Replayed(first) if first.value == Some(1)), "{after:?}");
}

#[tokio::test]
async fn falsy_results_replay_as_they_were() {
    let bench = bench();
    let policy = policy(Effect::Keyed);
    async fn twice<T>(bench: &common::Bench, policy: &Policy, id: &str, value: T)
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug + Clone + Send + Sync,
    {
        let task = task(id);
        for _ in 0..2 {
            let given = value.clone();
            let outcome = bench.ledger.run(&task, policy, |_| async { Ok::<T, Failure>(given) }).await.unwrap();
            assert_eq!(outcome.into_value(), Some(value.clone()), "{id}");
        }
    }
    twice(&bench, &policy, "zero", 0u8).await;
    twice(&bench, &policy, "empty", String::new()).await;
    twice(&bench, &policy, "list", Vec::<u8>::new()).await;
    twice(&bench, &policy, "false", false).await;
    twice(&bench, &policy, "none", None::<u8>).await;
    twice(&bench, &policy, "unit", ()).await;
}

#[tokio::test]
async fn a_blocked_event_loop_keeps_its_claim() {
    let bench = bench();
    let other = another(&bench);
    let task = task("blocked");
    let watched = task.clone();
    let outcome = bench
        .ledger
        .run(&task, &policy(Effect::Keyed), |_| async move {
            // The handler blocks the only thread of its runtime for more than two leases, while another asks for the task.
            let seen = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let end = tokio::time::Instant::now() + Duration::from_millis(1500);
                    let mut asked = 0;
                    while tokio::time::Instant::now() < end {
                        let admission = other.ledger.claim(&watched, &policy(Effect::Keyed)).await.unwrap();
                        assert!(matches!(admission, Admission::Busy(_)), "{admission:?}");
                        asked += 1;
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    asked
                })
            });
            Ok::<usize, Failure>(seen.join().unwrap())
        })
        .await
        .unwrap();
    assert!(matches!(&outcome, Outcome::Ran { value, .. } if *value > 10), "{outcome:?}");
}

/// The thread's own handle of the store found its way there only at the first renewal, when the way may be gone.
#[tokio::test]
async fn the_heart_reaches_the_store_soon_after_the_first_claim_and_once() {
    let bench = bench();
    // Its renewals, and looks at what became of them, are far away.
    let policy = Policy { lease: Duration::from_secs(600), ..policy(Effect::Keyed) };
    for id in ["first", "second"] {
        let store = Arc::clone(&bench.store);
        let task = task(id);
        let run = bench.ledger.run(&task, &policy, |_| async move {
            until("the store is reached", || async { store.loads.load(Ordering::SeqCst) == 1 }).await;
            Ok::<_, Failure>(1_u8)
        });
        assert!(matches!(run.await.unwrap(), Outcome::Ran { value: 1, .. }));
    }
    assert_eq!(bench.store.loads.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn one_failed_heartbeat_does_not_cancel_healthy_work() {
    let bench = bench();
    let task = task("blip");
    let outcome = bench
        .ledger
        .run(&task, &policy(Effect::Keyed), |context| {
            let store = Arc::clone(&bench.store);
            async move {
                store.fail(State::Running, Fault::Refused, 2);
                let beats = store.swaps.load(Ordering::SeqCst);
                until("heartbeats went on", || std::future::ready(store.swaps.load(Ordering::SeqCst) >= beats + 5))
                    .await;
                Ok::<bool, Failure>(context.may_start_effect())
            }
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: true, .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_handler_is_cancelled_when_the_lease_has_really_passed() {
    let bench = bench();
    let task = task("cut off");
    bench.store.fail(State::Running, Fault::Refused, 0);
    let outcome = bench
        .ledger
        .run(&task, &policy(Effect::Keyed), |_| {
            let store = Arc::clone(&bench.store);
            async move {
                store.fail(State::Running, Fault::Refused, usize::MAX);
                std::future::pending::<()>().await;
                Ok::<(), Failure>(())
            }
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::ClaimLost { .. }), "{outcome:?}");
    // Nobody took over, so the attempt is recorded as failed, and the next may run.
    assert_eq!(state(&bench, &task).await, Some(State::Waiting));
}

#[tokio::test]
async fn a_taken_over_run_is_told_and_its_completion_is_refused() {
    let bench = bench();
    let other = another(&bench);
    let task = task("taken over");
    let outcome = bench
        .ledger
        .run(&task, &policy(Effect::Keyed), |context| {
            let (task, memory) = (task.clone(), bench.memory.clone());
            async move {
                memory.age_by(&task.key, 60_000);
                let limits = policy(Effect::Keyed);
                let second =
                    other.ledger.run(&task, &limits, |_| async { Ok::<_, Failure>("second".to_owned()) }).await;
                assert!(matches!(second.unwrap(), Outcome::Ran { .. }));
                context.lost().await;
                Ok::<String, Failure>("first".into())
            }
        })
        .await
        .unwrap();
    let Outcome::ClaimLost { found: Some(found) } = outcome else { panic!("{outcome:?}") };
    assert_eq!((found.record.state, found.record.attempt), (State::Done, 2));
}

#[tokio::test]
async fn completion_is_retried_and_stored_once_when_its_answer_is_lost() {
    let bench = bench();
    for (id, fault) in [("refused", Fault::Refused), ("answer lost", Fault::AnswerLost)] {
        let task = task(id);
        bench.store.fail(State::Done, fault, 3);
        let outcome =
            bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(7u8) }).await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: 7, .. }), "{outcome:?}");
        assert_eq!(state(&bench, &task).await, Some(State::Done));
        bench.store.heal();
    }
}

#[tokio::test]
async fn done_but_not_recorded_is_told_apart_from_failed_and_finished_in_the_background() {
    let bench = bench();
    let task = task("not recorded");
    bench.store.fail(State::Done, Fault::Refused, usize::MAX);
    let outcome = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(7u8) }).await.unwrap();
    let Outcome::DoneNotRecorded { value: 7, error } = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    bench.store.heal();
    assert!(bench.ledger.finish(Duration::from_secs(10)).await);
    assert_eq!(state(&bench, &task).await, Some(State::Done));
}

#[tokio::test]
async fn a_completion_that_has_begun_is_not_cancelled() {
    let bench = bench();
    let task = task("begun");
    let gate = bench.store.close_gate(State::Done);
    let run = tokio::spawn({
        let (ledger, task) = (bench.ledger.clone(), task.clone());
        async move { ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(7u8) }).await.map(drop) }
    });
    until("the completion has begun", || async { bench.store.at_gate.load(Ordering::SeqCst) > 0 }).await;
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    gate.add_permits(10);
    until("it is done", || async { state(&bench, &task).await == Some(State::Done) }).await;
}

#[tokio::test]
async fn a_run_cancelled_inside_its_handler_is_a_counted_failure() {
    for (effect, after) in [(Effect::Keyed, State::Waiting), (Effect::Unrepeatable, State::Parked)] {
        let bench = bench();
        let task = task("cancelled");
        let entered = Arc::new(tokio::sync::Notify::new());
        let run = tokio::spawn({
            let (ledger, task, entered) = (bench.ledger.clone(), task.clone(), Arc::clone(&entered));
            async move {
                let handler = |_| async move {
                    entered.notify_one();
                    std::future::pending::<Result<(), Failure>>().await
                };
                ledger.run(&task, &policy(effect), handler).await.map(drop)
            }
        });
        entered.notified().await;
        run.abort();
        until("the failure is recorded", || async { state(&bench, &task).await == Some(after) }).await;
        let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
        assert_eq!((record.attempt, record.failure.as_ref().unwrap().class), (1, FailureClass::Dropped));
    }
}

#[tokio::test]
async fn a_claim_dropped_before_its_handler_was_entered_does_not_count() {
    let bench = bench();
    let task = task("dropped");
    let Admission::Run(claim) = bench.ledger.claim(&task, &policy(Effect::Unrepeatable)).await.unwrap() else {
        panic!("not claimed")
    };
    drop(claim);
    assert!(bench.ledger.finish(Duration::from_secs(10)).await);
    let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.attempt), (State::Waiting, 0));
}

#[tokio::test]
async fn a_claim_call_given_up_is_released_by_its_claim_id() {
    let bench = bench();
    let task = task("given up");
    bench.store.fail(State::Running, Fault::AnswerLost, 1);
    let error = bench.ledger.claim(&task, &policy(Effect::Unrepeatable)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(bench.ledger.finish(Duration::from_secs(10)).await);
    let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.attempt, record.crashes), (State::Waiting, 0, 0));
}

#[tokio::test]
async fn a_claim_that_came_too_late_to_be_entered_is_released() {
    // The answer to the claim takes longer than the lease: the handler must not be entered, and nothing has happened.
    let bench = bench();
    let task = task("too late");
    let gate = bench.store.close_gate(State::Running);
    let run = tokio::spawn({
        let (ledger, task) = (bench.ledger.clone(), task.clone());
        async move {
            let handler = |_| async { panic!("it must not be entered") };
            ledger.run::<(), _, _>(&task, &policy(Effect::Unrepeatable), handler).await
        }
    });
    until("the claim is on its way", || async { bench.store.at_gate.load(Ordering::SeqCst) > 0 }).await;
    // sleeps: the lease has to pass
    tokio::time::sleep(Duration::from_millis(650)).await;
    gate.add_permits(10);
    let outcome = run.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::ClaimLost { .. }), "{outcome:?}");
    let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.attempt, record.failure.is_none()), (State::Waiting, 0, true));
}

#[tokio::test]
async fn an_error_that_cannot_pass_ends_the_tries_at_once() {
    let bench = bench();
    let task = task("never");
    bench.store.fail(State::Done, Fault::Never, usize::MAX);
    let began = tokio::time::Instant::now();
    let outcome = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(7u8) }).await.unwrap();
    let Outcome::DoneNotRecorded { error, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.kind(), ErrorKind::BadPolicy);
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_output_that_the_store_cannot_hold_leaves_the_task_done_without_it() {
    let bench = bench();
    let task = task("cannot hold");
    bench.store.fail(State::Done, Fault::TooLarge, 1);
    let outcome =
        bench.ledger.run(&task, &policy(Effect::Unrepeatable), |_| async { Ok::<_, Failure>(7u8) }).await.unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 7, .. }), "{outcome:?}");
    let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert!(matches!(record.output, Output::Dropped(_)), "{:?}", record.output);
}

#[tokio::test]
async fn a_delay_that_the_handler_names_takes_the_place_of_the_backoff() {
    let bench = bench();
    let task = task("come again");
    let handler =
        |_| async { Err::<(), _>(Failure::retryable("too many requests").retry_after(Duration::from_secs(90))) };
    let outcome = bench.ledger.run(&task, &policy(Effect::Keyed), handler).await.unwrap();
    let Settlement::Defer(delay) = outcome.settlement() else { panic!("{outcome:?}") };
    assert_eq!(delay, Duration::from_secs(90));
    let again = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<(), Failure>(()) }).await.unwrap();
    assert!(matches!(&again, Outcome::Waiting(seen) if seen.defer_for() > Duration::from_secs(80)), "{again:?}");
}

#[tokio::test]
async fn every_outcome_says_what_to_do_with_its_delivery() {
    let bench = bench();
    let once = Policy { attempts_max: 1, ..policy(Effect::Keyed) };
    let ok = |_| async { Ok::<u8, Failure>(1) };
    let no = |_| async { Err::<u8, _>(Failure::retryable("no")) };
    let run = async |id: &str, policy: &Policy, fails: bool| {
        let task = task(id);
        let ran =
            if fails { bench.ledger.run(&task, policy, no).await } else { bench.ledger.run(&task, policy, ok).await };
        ran.unwrap().settlement()
    };
    assert_eq!(run("done", &once, false).await, Settlement::Acknowledge);
    assert_eq!(run("done", &once, false).await, Settlement::Acknowledge);
    assert_eq!(run("dead", &once, true).await, Settlement::DeadLetter("dead"));
    assert_eq!(run("dead", &once, false).await, Settlement::DeadLetter("dead"));
    assert_eq!(run("parked", &policy(Effect::Unrepeatable), true).await, Settlement::DeadLetter("parked"));
    assert_eq!(run("parked", &policy(Effect::Unrepeatable), false).await, Settlement::DeadLetter("parked"));
    assert_eq!(run("again", &policy(Effect::Keyed), true).await, Settlement::Defer(Duration::ZERO));
    let busy = task("busy");
    let Admission::Run(claim) = bench.ledger.claim(&busy, &once).await.unwrap() else { panic!("not claimed") };
    assert!(matches!(run("busy", &once, false).await, Settlement::Defer(left) if left > Duration::from_millis(300)));
    let other = Handler::new("worker", "1").unwrap().task("busy", &Input::from_json(b"1").unwrap()).unwrap();
    let mismatch = bench.ledger.run(&other, &once, ok).await.unwrap();
    assert_eq!(mismatch.settlement(), Settlement::DeadLetter("mismatch"));
    let found = bench.ledger.show(&busy.key).await.unwrap();
    let taken_over = Outcome::<u8>::ClaimLost { found };
    assert!(matches!(taken_over.settlement(), Settlement::Defer(left) if left > Duration::from_millis(300)));
    assert!(matches!(Outcome::<u8>::ClaimLost { found: None }.settlement(), Settlement::Defer(_)));
    drop(claim);
}

#[tokio::test]
async fn run_max_ends_a_hung_handler_as_a_counted_failure() {
    let bench = bench();
    let task = task("hung");
    let policy = Policy { run_max: Some(Duration::from_millis(50)), ..policy(Effect::Keyed) };
    let outcome = bench.ledger.run(&task, &policy, |_| std::future::pending::<Result<(), Failure>>()).await.unwrap();
    let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("{outcome:?}") };
    assert_eq!(failure.class, FailureClass::RanTooLong);
    assert_eq!((record.state, record.attempt), (State::Waiting, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_handler_that_blocks_its_thread_does_not_live_by_its_heartbeat() {
    let bench = bench();
    let other = another(&bench);
    let task = task("hung thread");
    let limits = Policy { run_max: Some(Duration::from_millis(100)), ..policy(Effect::Keyed) };
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let entered = Arc::new(tokio::sync::Notify::new());
    let run = tokio::spawn({
        let (ledger, task, limits) = (bench.ledger.clone(), task.clone(), limits.clone());
        let entered = Arc::clone(&entered);
        async move {
            let handler = |_| async move {
                entered.notify_one();
                let _released = ended.recv();
                Ok::<_, Failure>("late".to_owned())
            };
            ledger.run(&task, &limits, handler).await
        }
    });
    entered.notified().await;
    until("another takes over", || async {
        let taken = other.ledger.run(&task, &limits, |_| async { Ok::<_, Failure>("taken".to_owned()) }).await;
        matches!(taken.unwrap(), Outcome::Ran { .. })
    })
    .await;
    end.send(()).unwrap();
    assert!(matches!(run.await.unwrap().unwrap(), Outcome::ClaimLost { .. }));
}

#[tokio::test]
async fn a_panicking_handler_is_a_counted_failure() {
    let bench = bench();
    let task = task("panics");
    let run = tokio::spawn({
        let (ledger, task) = (bench.ledger.clone(), task.clone());
        async move {
            let handler =
                |_| async { if std::hint::black_box(true) { panic!("planted") } else { Ok::<(), Failure>(()) } };
            ledger.run(&task, &policy(Effect::Keyed), handler).await.map(drop)
        }
    });
    assert!(run.await.unwrap_err().is_panic());
    until("the failure is recorded", || async { state(&bench, &task).await == Some(State::Waiting) }).await;
    let record = bench.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert!(record.failure.as_ref().unwrap().message.contains("panicked"), "{:?}", record.failure);
}

#[tokio::test]
async fn failures_wait_then_end_as_dead() {
    let bench = bench();
    let task = task("fails");
    let policy = Policy { attempts_max: 2, ..policy(Effect::Keyed) };
    for (attempt, after) in [(1, State::Waiting), (2, State::Dead)] {
        let outcome =
            bench.ledger.run(&task, &policy, |_| async { Err::<(), _>(Failure::retryable("no")) }).await.unwrap();
        let Outcome::Failed { record: Some(record), .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!((record.attempt, record.state), (attempt, after));
    }
    let outcome = bench.ledger.run(&task, &policy, |_| async { Ok::<(), Failure>(()) }).await.unwrap();
    assert!(matches!(outcome, Outcome::Dead(seen) if seen.failure().unwrap().message == "no"));
}

#[tokio::test]
async fn an_unrepeatable_failure_is_parked_unless_nothing_happened() {
    let bench = bench();
    let policy = policy(Effect::Unrepeatable);
    let doubt = task("doubt");
    let failed =
        bench.ledger.run(&doubt, &policy, |_| async { Err::<(), _>(Failure::retryable("cut")) }).await.unwrap();
    assert!(matches!(failed, Outcome::Failed { record: Some(record), .. } if record.state == State::Parked));
    let nothing = task("nothing");
    let handler = |_| async { Err::<(), _>(Failure::retryable("refused at the door").nothing_happened()) };
    let failed = bench.ledger.run(&nothing, &policy, handler).await.unwrap();
    assert!(matches!(failed, Outcome::Failed { record: Some(record), .. } if record.state == State::Waiting));
}

#[tokio::test]
async fn an_output_too_large_is_done_without_output_flagged() {
    let bench = bench();
    let task = task("large");
    let policy = Policy { output_max: 10, ..policy(Effect::Keyed) };
    let handler = |_| async { Ok::<_, Failure>(Output::kept("text/plain", vec![b'x'; 11])) };
    let ran = bench.ledger.run_bytes(&task, &policy, Duration::ZERO, handler).await.unwrap();
    assert!(matches!(ran, Outcome::Ran { .. }));
    let again = bench.ledger.run_bytes(&task, &policy, Duration::ZERO, |_| async { unreachable!() }).await.unwrap();
    let Outcome::Replayed(replayed) = again else { panic!("{again:?}") };
    assert_eq!(replayed.dropped.unwrap().name(), "too_large");
}

#[tokio::test]
async fn an_output_that_cannot_be_encoded_is_done_without_output_flagged() {
    #[derive(Debug)]
    struct Stubborn;
    impl serde::Serialize for Stubborn {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("no form"))
        }
    }
    impl<'de> serde::Deserialize<'de> for Stubborn {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Stubborn)
        }
    }
    let bench = bench();
    let task = task("stubborn");
    let ran = bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(Stubborn) }).await.unwrap();
    assert!(matches!(ran, Outcome::Ran { .. }));
    let again =
        bench.ledger.run(&task, &policy(Effect::Keyed), |_| async { Ok::<_, Failure>(Stubborn) }).await.unwrap();
    let Outcome::Replayed(replayed) = again else { panic!("{again:?}") };
    assert_eq!((replayed.value.is_none(), replayed.dropped.unwrap().name()), (true, "not_encodable"));
}

#[tokio::test]
async fn a_cached_duplicate_asks_no_store_and_only_while_the_record_lives() {
    let bench = bench();
    let ledger = bench.ledger.with_cache(taskonce_core::CacheLimits::default());
    let policy = Policy { output_retention: Duration::from_millis(700), ..policy(Effect::Keyed) };
    let task = task("cached");
    assert!(matches!(
        ledger.run(&task, &policy, |_| async { Ok::<_, Failure>(1u8) }).await.unwrap(),
        Outcome::Ran { .. }
    ));
    let asked = bench.store.swaps.load(Ordering::SeqCst);
    let Outcome::Replayed(replayed) = ledger.run(&task, &policy, |_| async { Ok::<u8, Failure>(2) }).await.unwrap()
    else {
        panic!("not replayed")
    };
    assert_eq!((replayed.cached, replayed.value), (true, Some(1)));
    assert_eq!(bench.store.swaps.load(Ordering::SeqCst), asked);
    until("the output's life ends the cached one's", || async {
        matches!(ledger.claim(&task, &policy).await.unwrap(), Admission::Replay(seen) if !seen.cached)
    })
    .await;
}
