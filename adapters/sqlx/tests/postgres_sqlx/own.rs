//! What is sqlx's own: transactions left open on a connection of the pool, connections that break, errors passed over.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::ledger::Admission;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Output, State};
use taskonce_sqlx::{
    CommitIn as _, CompleteIn as _, Joined, RunInTransaction as _, StepIn as _, StepInTransaction as _,
};
use taskonce_testkit::PostgresProxy;
use taskonce_worker::{Outcome, Run as _};

use crate::place::{EFFECT, Place, policy, says, state, task, until};

/// As after a `begin()` that was cancelled: sqlx does not know of it, and hands the connection out.
#[tokio::test]
async fn a_transaction_that_somebody_left_open_is_never_committed_with_a_task() {
    let place = Place::new();
    let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, "").await, task("a"));
    let mut left_open = pool.acquire().await.unwrap();
    sqlx::raw_sql("begin; insert into effect values ('stray')").execute(&mut *left_open).await.unwrap();
    let session = says(&mut left_open, "select pg_backend_pid()::text").await;
    drop(left_open);
    let calls = AtomicU32::new(0);
    let outcome = ledger
        .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
            let calls = &calls;
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                Ok(says(&mut tx, "select pg_backend_pid()::text").await)
            })
        })
        .await
        .unwrap();
    let Outcome::Ran { value, record } = outcome else { panic!("{outcome:?}") };
    assert_eq!(
        (value, record.attempt, calls.into_inner()),
        (session, 1, 1),
        "on the same connection, once it is clean"
    );
    assert_eq!((place.effects(&task.key), place.count("select count(*) from effect")), (1, 1));
}

/// It refuses even a `begin`, and sqlx leaves such a connection in its pool.
#[tokio::test]
async fn a_transaction_that_somebody_left_open_and_that_has_failed_keeps_no_task_from_running() {
    let place = Place::new();
    let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, "").await, task("a"));
    let mut left_open = pool.acquire().await.unwrap();
    sqlx::raw_sql("begin; select 1 / 0").execute(&mut *left_open).await.unwrap_err();
    drop(left_open);
    let outcome = ledger
        .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
            Box::pin(async move {
                sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                Ok(context.attempt())
            })
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
    assert_eq!(place.effects(&task.key), 1);
}

/// As for a run: it is rolled back, or its connection closed.
#[tokio::test]
async fn a_transaction_that_somebody_left_open_is_never_committed_with_a_step() {
    for stray in ["begin; insert into effect values ('stray')", "begin; select 1 / 0"] {
        let place = Place::new();
        let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, "").await, task("a"));
        let mut left_open = pool.acquire().await.unwrap();
        let _failed = sqlx::raw_sql(stray).execute(&mut *left_open).await;
        drop(left_open);
        let policy = Policy { effect: Effect::Keyed, ..policy() };
        let outcome = ledger.run(&task, &policy, |context| {
            let pool = &pool;
            async move {
                let (key, step) = (context.key().as_str(), context.step_of("book", Effect::Transactional));
                let booked = step.in_transaction(pool, |mut tx, step| {
                    Box::pin(async move {
                        sqlx::query(EFFECT).bind(key).execute(&mut *tx).await?;
                        Ok(step.attempt())
                    })
                });
                booked.await
            }
        });
        let outcome = outcome.await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{stray}: {outcome:?}");
        assert_eq!((place.effects(&task.key), place.count("select count(*) from effect")), (1, 1), "{stray}");
    }
}

#[tokio::test]
async fn a_connection_in_no_transaction_locks_nothing() {
    let place = Place::new();
    let (ledger, pool, task) = (place.ledger(), place.pool().await, task("a"));
    let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
    let mut tx = pool.begin().await.unwrap();
    // Ended behind sqlx's back.
    sqlx::raw_sql("rollback").execute(&mut *tx).await.unwrap();
    let error = claim.lock_in(&mut tx).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongState, "{error:?}");
    drop(tx);
    let mut tx = pool.begin().await.unwrap();
    claim.lock_in(&mut tx).await.unwrap();
}

#[tokio::test]
async fn a_commit_that_is_cut_on_either_side_is_found_out_and_the_effect_happens_once() {
    for (id, is_after, calls_wanted) in [("before", false, 2), ("after", true, 1)] {
        let place = Place::new();
        let proxy = PostgresProxy::start(place.database.port()).unwrap();
        let (ledger, pool, task) = (place.ledger(), place.pool_at(proxy.port(), 2, "").await, task(id));
        if is_after {
            proxy.cut_after_commits(1)
        } else {
            proxy.cut_before_commits(1)
        }
        let calls = AtomicU32::new(0);
        let outcome = ledger
            .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
                let calls = &calls;
                Box::pin(async move {
                    calls.fetch_add(1, Ordering::SeqCst);
                    sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                    Ok(context.attempt())
                })
            })
            .await
            .unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{id}: {outcome:?}");
        assert_eq!((proxy.cuts_left(), calls.into_inner(), place.effects(&task.key)), (0, calls_wanted, 1), "{id}");
    }
}

#[tokio::test]
async fn a_serialisation_failure_is_tried_again_at_once() {
    let place = Place::new();
    let settings = "set default_transaction_isolation = 'repeatable read'";
    let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, settings).await, task("a"));
    let calls = AtomicU32::new(0);
    let outcome = ledger
        .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
            let (calls, place) = (&calls, &place);
            Box::pin(async move {
                sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                    place.beside("update counter set n = n + 1 where id = 1");
                }
                sqlx::query("update counter set n = n + 1 where id = 1").execute(&mut *tx).await?;
                Ok(context.attempt())
            })
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
    assert_eq!((calls.into_inner(), place.effects(&task.key)), (2, 1));
}

#[tokio::test]
async fn a_handler_that_passes_over_an_error_is_never_recorded_as_done() {
    let place = Place::new();
    let (ledger, pool, task) = (place.ledger(), place.pool().await, task("a"));
    let outcome = ledger
        .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
            Box::pin(async move {
                sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                sqlx::query("select 1 / 0").execute(&mut *tx).await.unwrap_err();
                Ok(())
            })
        })
        .await
        .unwrap();
    assert!(
        matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains("it went on")),
        "{outcome:?}"
    );
    assert_eq!((state(&ledger, &task).await, place.effects(&task.key)), (State::Waiting, 0));

    // By hand, after the completion was written.
    let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
    let mut tx = pool.begin().await.unwrap();
    claim.lock_in(&mut tx).await.unwrap();
    sqlx::query(EFFECT).bind(task.key.as_str()).execute(&mut *tx).await.unwrap();
    let completion = claim.complete_in(&mut tx, Output::Nothing).await.unwrap();
    sqlx::query("select 1 / 0").execute(&mut *tx).await.unwrap_err();
    let mut unresolved = completion.commit_in(tx).await.unwrap_err();
    let joined = loop {
        match unresolved.completion.find_out().await {
            Ok((joined, _claim)) => break joined,
            // The rollback of a transaction that was dropped is under way.
            Err(again) if again.error.kind() == ErrorKind::Locked => unresolved = again,
            Err(other) => panic!("{:?}", other.error),
        }
    };
    assert_eq!((joined, place.effects(&task.key)), (Joined::RolledBack, 0));
}

/// By a constraint of the user's that is checked there, and by a trigger that was ended for its time.
#[tokio::test]
async fn what_the_server_refuses_at_the_commit_is_a_failed_attempt_in_its_own_words() {
    let place = Place::new();
    place.beside(
        "create table slip (code text);
         create function check_slip() returns trigger language plpgsql as $$ begin
             raise exception 'out of slips' using errcode = new.code; end $$;
         create constraint trigger slip_is_checked after insert on slip deferrable initially deferred
             for each row execute function check_slip();
         grant all on slip to public",
    );
    let (ledger, pool) = (place.ledger(), place.pool().await);
    for code in ["23503", "57014"] {
        let (task, calls) = (task(code), AtomicU32::new(0));
        let outcome = ledger
            .run_in_transaction(&pool, &task, &policy(), |mut tx, context| {
                let calls = &calls;
                Box::pin(async move {
                    calls.fetch_add(1, Ordering::SeqCst);
                    sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                    sqlx::query("insert into slip values ($1)").bind(code).execute(&mut *tx).await?;
                    Ok(())
                })
            })
            .await
            .unwrap();
        assert!(
            matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains("out of slips")),
            "{code}: {outcome:?}"
        );
        assert_eq!((state(&ledger, &task).await, calls.into_inner()), (State::Waiting, 1), "{code}");

        // By hand.
        let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
        let mut tx = pool.begin().await.unwrap();
        claim.lock_in(&mut tx).await.unwrap();
        sqlx::query("insert into slip values ($1)").bind(code).execute(&mut *tx).await.unwrap();
        let completion = claim.complete_in(&mut tx, Output::Nothing).await.unwrap();
        let unresolved = completion.commit_in(tx).await.unwrap_err();
        assert_eq!(unresolved.error.kind(), ErrorKind::RolledBack, "{:?}", unresolved.error);
        assert!(
            unresolved.error.to_string().contains(&format!("out of slips (SQLSTATE {code})")),
            "{}",
            unresolved.error
        );
        assert_eq!(place.effects(&task.key), 0, "{code}");
    }
}

/// Its server went on with the statement, and held the record until that ended. The pool has no other connection to ask on.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_ends_the_statement_that_its_server_is_at() {
    let place = Place::new();
    let (ledger, task, policy) = (place.ledger(), task("a"), policy());
    let pool = place.pool_at(place.database.port(), 1, "").await;
    let is_at_it = "select count(*) from pg_stat_activity
        where query = 'select pg_sleep(30)' and state = 'active' and datname = current_database()";
    let run = ledger.run_in_transaction(&pool, &task, &policy, |mut tx, context| {
        Box::pin(async move {
            sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
            sqlx::query("select pg_sleep(30)").execute(&mut *tx).await?;
            Ok(())
        })
    });
    tokio::select! {
        outcome = run => panic!("{outcome:?}"),
        () = until("its server is at it", async || place.count(is_at_it) == 1) => {}
    }
    let start = Instant::now();
    until("another runs it", async || {
        let outcome = ledger.run_in_transaction(&pool, &task, &policy, |mut tx, context| {
            Box::pin(async move {
                sqlx::query(EFFECT).bind(context.key().as_str()).execute(&mut *tx).await?;
                Ok(())
            })
        });
        matches!(outcome.await.unwrap(), Outcome::Ran { .. })
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(10), "long before it would have ended: {:?}", start.elapsed());
    assert_eq!(place.effects(&task.key), 1);
}

/// It was a failed attempt.
#[tokio::test]
async fn a_step_in_a_transaction_of_its_own_meets_a_serialisation_failure_and_runs_again_in_the_same_attempt() {
    let place = Place::new();
    let settings = "set default_transaction_isolation = 'repeatable read'";
    let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, settings).await, task("a"));
    let (policy, calls) = (Policy { effect: Effect::Keyed, ..policy() }, AtomicU32::new(0));
    let outcome = ledger.run(&task, &policy, |context| {
        let (pool, place, calls, key) = (&pool, &place, &calls, task.key.as_str());
        async move {
            let step = context.step_of("book", Effect::Transactional);
            let booked = step.in_transaction(pool, |mut tx, _step| {
                Box::pin(async move {
                    sqlx::query(EFFECT).bind(key).execute(&mut *tx).await?;
                    if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                        place.beside("update counter set n = n + 1 where id = 1");
                    }
                    sqlx::query("update counter set n = n + 1 where id = 1").execute(&mut *tx).await?;
                    Ok("booked".to_owned())
                })
            });
            Ok((booked.await?, context.attempt()))
        }
    });
    let outcome = outcome.await.unwrap();
    let Outcome::Ran { value, record } = outcome else { panic!("{outcome:?}") };
    assert_eq!((value.0.as_str(), value.1, record.steps.len(), record.history.len()), ("booked", 1, 1, 0));
    assert_eq!((calls.into_inner(), place.effects(&task.key)), (2, 1));
}

/// The role may have eight connections more than the runs hold: the four that ask at once, and as many that are about to end.
/// One more would be refused, and its statement would go on.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_runs_that_are_dropped_together_each_has_its_statement_ended_on_few_connections() {
    const RUNS: u32 = 32;
    let place = Place::new();
    place.beside(&format!(
        "do $$ begin create role taskonce_sqlx_crowd login; exception when duplicate_object or unique_violation then null; end $$;
         alter role taskonce_sqlx_crowd connection limit {}; grant taskonce_sqlx_payer to taskonce_sqlx_crowd",
        RUNS + 8
    ));
    let (ledger, port) = (place.ledger(), place.database.port());
    let pool = place.pool_of("taskonce_sqlx_crowd", port, RUNS, "").await;
    let is_at_it = "select count(*) from pg_stat_activity
        where query = 'select pg_sleep(60)' and state = 'active' and datname = current_database()";
    let mut runs = tokio::task::JoinSet::new();
    for id in 0..RUNS {
        let (ledger, pool, task) = (ledger.clone(), pool.clone(), task(&id.to_string()));
        runs.spawn(async move {
            let policy = policy();
            let run = ledger.run_in_transaction(&pool, &task, &policy, |mut tx, _context| {
                Box::pin(async move {
                    sqlx::query("select pg_sleep(60)").execute(&mut *tx).await?;
                    Ok(())
                })
            });
            run.await.map(drop)
        });
    }
    until("the servers are at it", async || place.count(is_at_it) == RUNS as usize).await;
    let start = Instant::now();
    runs.shutdown().await;
    until("no server is at it any more", async || place.count(is_at_it) == 0).await;
    assert!(start.elapsed() < Duration::from_secs(30), "long before they would have ended: {:?}", start.elapsed());
}

/// A heartbeat came between what the transaction had seen and the step.
#[tokio::test]
async fn a_step_whose_transaction_read_before_a_heartbeat_is_told_to_begin_anew_and_may() {
    let place = Place::new();
    let settings = "set default_transaction_isolation = 'repeatable read'";
    let (ledger, pool, task) = (place.ledger(), place.pool_at(place.database.port(), 1, settings).await, task("a"));
    let policy = Policy { effect: Effect::Keyed, ..policy() };
    let outcome = ledger.run(&task, &policy, |context| async move {
        let mut tx = pool.begin().await?;
        says(&mut tx, "select n::text from counter where id = 1").await;
        context.held().renew(&**context.ledger().store(), &**context.ledger().host()).await?;
        for is_new in [false, true] {
            let key = context.key().clone();
            let step = context.step_in(&mut tx, "book", |mut tx, _| {
                Box::pin(async move {
                    sqlx::query(EFFECT).bind(key.as_str()).execute(&mut *tx).await?;
                    Ok(())
                })
            });
            match step.await {
                Ok(()) => assert!(is_new),
                Err(failure) => {
                    assert!(!is_new && failure.message.contains("roll back and begin anew"), "{failure:?}");
                    tx.rollback().await?;
                    tx = pool.begin().await?;
                }
            }
        }
        tx.commit().await?;
        Ok(context.attempt())
    });
    let outcome = outcome.await.unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
    assert_eq!(place.effects(&task.key), 1);
}
