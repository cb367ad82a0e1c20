//! Connections that break: before the commit, at the commit on either side of the server, and those that are replaced.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use taskonce::postgres::{CommitIn as _, CompleteIn as _, Joined, RunInTransaction as _, StepInTransaction as _, Stop};
use taskonce::{Admission, Effect, ErrorKind, Outcome, Output, Policy, Run as _, State};
use taskonce_testkit::PostgresProxy;

use crate::place::{EFFECT, Place, connect, found, policy, state, task, until};

fn behind_a_proxy() -> (Place, PostgresProxy) {
    let place = Place::new();
    let proxy = PostgresProxy::start(place.database.port()).unwrap();
    (place.through(proxy.port()), proxy)
}

/// The server has committed; nobody was told.
#[tokio::test]
async fn a_commit_whose_reply_is_lost_is_found_to_be_done() {
    let (place, proxy) = behind_a_proxy();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    proxy.cut_after_commits(1);
    let calls = AtomicU32::new(0);
    let outcome = ledger
        .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
            let calls = &calls;
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok("receipt".to_owned())
            })
        })
        .await
        .unwrap();
    let Outcome::Ran { value, record } = outcome else { panic!("{outcome:?}") };
    assert_eq!((value.as_str(), record.state, calls.into_inner()), ("receipt", State::Done, 1));
    assert_eq!((proxy.cuts_left(), place.effects(&task.key).await), (0, 1));
    assert_eq!(found(&ledger, &task).await.record.output, record.output);
}

/// The commit never arrived: what is found is a rollback, and the claim goes on.
#[tokio::test]
async fn a_commit_that_never_arrived_is_found_to_be_rolled_back_and_tried_again() {
    let (place, proxy) = behind_a_proxy();
    let (ledger, task) = (place.ledger(), task("a"));
    proxy.cut_before_commits(2);
    let calls = AtomicU32::new(0);
    let url = place.client_url();
    let outcome = ledger
        .run_in_transaction_on(
            |attempt| {
                let url = url.clone();
                Box::pin(async move {
                    let mut client = connect(&url).await;
                    Ok(attempt.on(&mut client).await)
                })
            },
            &task,
            &policy(),
            Duration::ZERO,
            |tx, context| {
                let calls = &calls;
                Box::pin(async move {
                    calls.fetch_add(1, Ordering::SeqCst);
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    Ok(context.attempt())
                })
            },
        )
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
    assert_eq!((proxy.cuts_left(), calls.into_inner(), place.effects(&task.key).await), (0, 3, 1));
}

/// With its one connection gone there is nothing to go on with: the attempt is given back, and another delivery runs it.
#[tokio::test]
async fn a_run_on_one_connection_ends_with_it_and_leaves_nothing() {
    let (place, proxy) = behind_a_proxy();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    proxy.cut_before_commits(1);
    let run = async |client: &mut _| {
        ledger
            .run_in_transaction(client, &task, &policy(), |tx, context| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    Ok(context.attempt())
                })
            })
            .await
    };
    let error = run(&mut client).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.hint().contains("run_in_transaction_on"), "{error:?}");
    assert_eq!(place.effects(&task.key).await, 0);
    until("the claim is over", async || state(&ledger, &task).await == State::Waiting).await;
    let outcome = run(&mut place.client().await).await.unwrap();
    assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
    assert_eq!(place.effects(&task.key).await, 1);
    // A closed connection claims nothing for long.
    let again = crate::place::task("b");
    let closed = ledger.run_in_transaction(&mut client, &again, &policy(), |_, _| Box::pin(async { Ok(1) })).await;
    assert_eq!(closed.unwrap_err().kind(), ErrorKind::Unreachable);
    assert_eq!(found(&ledger, &again).await.record.attempt, 0);
}

/// By hand: the completion knows what to ask.
#[tokio::test]
async fn a_completion_by_hand_finds_out_what_became_of_a_commit_on_either_side() {
    for (id, cut, effects) in [("before", false, 0), ("after", true, 1)] {
        let (place, proxy) = behind_a_proxy();
        let (ledger, mut client, task) = (place.ledger(), place.client().await, task(id));
        let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
        let tx = client.transaction().await.unwrap();
        claim.lock_in(&tx).await.unwrap();
        tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
        let completion = claim.complete_in(&tx, Output::Nothing).await.unwrap();
        if cut {
            proxy.cut_after_commits(1)
        } else {
            proxy.cut_before_commits(1)
        }
        let mut unresolved = completion.commit_in(tx).await.unwrap_err();
        let start = Instant::now();
        // The server may still be ending the session.
        let (joined, _claim) = loop {
            match unresolved.completion.find_out().await {
                Ok(found) => break found,
                Err(again) => {
                    assert_eq!(again.error.kind(), ErrorKind::Locked, "{:?}", again.error);
                    assert!(start.elapsed() < crate::place::PATIENCE);
                    unresolved = again;
                }
            }
        };
        assert_eq!(matches!(joined, Joined::Committed(_)), cut, "{id}: {joined:?}");
        assert_eq!(matches!(joined, Joined::RolledBack), !cut, "{id}: {joined:?}");
        assert_eq!(place.effects(&task.key).await, effects, "{id}");
    }
}

#[tokio::test]
async fn a_connection_that_breaks_inside_the_handler_rolls_back_and_the_next_one_goes_on() {
    let place = Place::new();
    let (ledger, task) = (place.ledger(), task("a"));
    let calls = AtomicU32::new(0);
    let url = place.client_url();
    let outcome = ledger
        .run_in_transaction_on(
            |attempt| {
                let url = url.clone();
                Box::pin(async move { Ok(attempt.on(&mut connect(&url).await).await) })
            },
            &task,
            &policy(),
            Duration::ZERO,
            |tx, context| {
                let (calls, place) = (&calls, &place);
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                        let pid: i32 = tx.query_one("select pg_backend_pid()", &[]).await?.get(0);
                        place.beside("select pg_terminate_backend($1)", &[&pid]).await;
                    }
                    tx.execute("select 1", &[]).await?;
                    Ok(context.attempt())
                })
            },
        )
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
    assert_eq!((calls.into_inner(), place.effects(&task.key).await), (2, 1));
}

/// A pool that is exhausted for a while: the task is run when it has a connection again.
#[tokio::test]
async fn a_pool_without_a_connection_is_asked_again_while_the_claim_holds() {
    let place = Place::new();
    let (ledger, task) = (place.ledger(), task("a"));
    let asked = AtomicU32::new(0);
    let url = place.client_url();
    let outcome = ledger
        .run_in_transaction_on(
            |attempt| {
                let (url, asked) = (url.clone(), &asked);
                Box::pin(async move {
                    if asked.fetch_add(1, Ordering::SeqCst) < 3 {
                        return Err("timed out waiting for a connection of the pool".into());
                    }
                    Ok(attempt.on(&mut connect(&url).await).await)
                })
            },
            &task,
            &policy(),
            Duration::ZERO,
            |tx, context| Box::pin(async move { Ok(tx.execute(EFFECT, &[&context.key().as_str()]).await?) }),
        )
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
    assert_eq!((asked.into_inner(), place.effects(&task.key).await), (4, 1));
}

/// Cut off at each of its waits, the run leaves both or neither, and the next delivery sees to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_anywhere_leaves_effect_and_record_both_or_neither() {
    let place = Place::new();
    let ledger = place.ledger();
    let policy = Policy { attempts_max: 1000, crashes_max: 1000, ..policy() };
    let (mut committed, mut waited) = (0, Duration::ZERO);
    for number in 0..60 {
        let task = task(&format!("t-{number}"));
        let mut client = place.client().await;
        let run = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok::<_, Stop>(())
            })
        });
        let is_ended = tokio::time::timeout(waited, run).await.is_ok();
        // sleeps: the moment at which a run is dropped moves on through all that it does.
        waited = if is_ended { Duration::ZERO } else { waited + Duration::from_micros(400) };
        committed += u32::from(is_ended);
        drop(client);
        assert!(ledger.finish(crate::place::PATIENCE).await, "what was dropped is settled");
        let effects = place.effects(&task.key).await;
        let done = ledger.show(&task.key).await.unwrap().is_some_and(|found| found.record.state == State::Done);
        assert_eq!(effects, usize::from(done), "{}", task.key);
        let mut client = place.client().await;
        let outcome = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(())
            })
        });
        let outcome = outcome.await.unwrap();
        assert_eq!(matches!(outcome, Outcome::Replayed(_)), done, "{outcome:?}");
        assert_eq!(place.effects(&task.key).await, 1, "{}", task.key);
    }
    assert!((1..60).contains(&committed), "some ended and some were dropped: {committed}");
}

const SLEEPS: &str = "select 1 from pg_stat_activity
    where query = 'select pg_sleep(30)' and state = 'active' and datname = current_database()";

/// Its server went on with the statement, and held the record until that ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_ends_the_statement_that_its_server_is_at() {
    let place = Place::new();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    let policy = policy();
    let run = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
        Box::pin(async move {
            tx.execute(EFFECT, &[&context.key().as_str()]).await?;
            Ok(tx.execute("select pg_sleep(30)", &[]).await?)
        })
    });
    tokio::select! {
        outcome = run => panic!("{outcome:?}"),
        () = until("its server is at it", async || !place.beside(SLEEPS, &[]).await.is_empty()) => {}
    }
    let start = Instant::now();
    let (other, mut second) = (place.ledger(), place.client().await);
    until("another runs it", async || {
        let outcome = other.run_in_transaction(&mut second, &task, &policy, |tx, context| {
            Box::pin(async move { Ok(tx.execute(EFFECT, &[&context.key().as_str()]).await?) })
        });
        matches!(outcome.await.unwrap(), Outcome::Ran { .. })
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(10), "long before it would have ended: {:?}", start.elapsed());
    assert_eq!(place.effects(&task.key).await, 1);
}

/// `begin` on a connection that is in a transaction only warns, and the run's commit would be that transaction's.
#[tokio::test]
async fn a_transaction_that_somebody_left_open_is_never_committed_with_a_task() {
    let place = Place::new();
    let (ledger, mut client) = (place.ledger(), place.client_with("begin; insert into effect values ('stray')").await);
    let mut run = async |id: &str| {
        let task = task(id);
        let policy = policy();
        let run = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(context.attempt())
            })
        });
        let outcome = run.await;
        (outcome, place.effects(&task.key).await)
    };
    let (refused, effects) = run("a").await;
    let error = refused.unwrap_err();
    assert_eq!((error.kind(), effects), (ErrorKind::WrongState, 0), "{error:?}");
    assert!(error.hint().contains("somebody left it open, and it was rolled back"), "{error:?}");
    // It was no attempt, and the connection is fit for use again.
    let (outcome, effects) = run("a").await;
    assert!(matches!(outcome, Ok(Outcome::Ran { value: 1, .. })) && effects == 1, "{outcome:?}");
    assert_eq!(place.beside("select from effect where key = 'stray'", &[]).await.len(), 0);
}

#[tokio::test]
async fn a_transaction_that_was_left_open_with_nothing_in_it_keeps_no_task_from_running() {
    let place = Place::new();
    let ledger = place.ledger();
    for left_open in ["begin; select 1", "begin; select 1 / 0"] {
        let (mut client, task) = (place.client().await, task(left_open));
        let _failed = client.batch_execute(left_open).await;
        let policy = policy();
        let run = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(context.attempt())
            })
        });
        let outcome = run.await;
        assert!(matches!(outcome, Ok(Outcome::Ran { value: 1, .. })), "{left_open}: {outcome:?}");
        assert_eq!(place.effects(&task.key).await, 1, "{left_open}");
    }
}

/// The step's commit would be that transaction's, too.
#[tokio::test]
async fn a_transaction_that_somebody_left_open_is_never_committed_with_a_step() {
    for (left_open, attempt) in
        [("begin; insert into effect values ('stray')", 2), ("begin; select 1", 1), ("begin; select 1 / 0", 1)]
    {
        let place = Place::new();
        let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
        let _failed = client.batch_execute(left_open).await;
        let policy = Policy { effect: Effect::Repeatable, ..policy() };
        let mut outcome = None;
        for _ in 0..attempt {
            let run = ledger.run(&task, &policy, |context| {
                let client = &mut client;
                async move {
                    let (key, step) = (context.key().as_str(), context.step_of("book", Effect::Transactional));
                    let booked = step.in_transaction(client, |tx, step| {
                        Box::pin(async move {
                            tx.execute(EFFECT, &[&key]).await?;
                            Ok(step.attempt())
                        })
                    });
                    booked.await
                }
            });
            outcome = Some(run.await.unwrap());
        }
        let Some(Outcome::Ran { value, record }) = outcome else { panic!("{left_open}: {outcome:?}") };
        assert_eq!((value, record.steps.len(), place.effects(&task.key).await), (attempt, 1, 1), "{left_open}");
        let said = record.history.iter().map(|attempt| format!("{attempt:?}")).collect::<String>();
        assert_eq!(said.contains("had written something"), attempt == 2, "{left_open}: {said}");
        assert_eq!(place.beside("select from effect where key = 'stray'", &[]).await.len(), 0);
    }
}
