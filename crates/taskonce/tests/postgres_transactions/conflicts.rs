//! Statements that fail: the handler's own, for what others did, and those that the handler passes over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use taskonce::postgres::{
    CommitIn as _, CompleteIn as _, RunInTransaction as _, StepIn as _, StepInTransaction as _, Stop, tokio_postgres,
};
use taskonce::{Admission, Effect, ErrorKind, Failure, FailureClass, Outcome, Output, Policy, Run as _, State};
use tokio::sync::Barrier;

use crate::place::{EFFECT, PATIENCE, Place, found, policy, state, task};

const ADD: &str = "update counter set n = n + 1 where id = $1";

#[tokio::test(flavor = "multi_thread")]
async fn a_serialisation_failure_is_tried_again_at_once_and_is_no_failed_attempt() {
    let place = Place::new();
    for level in ["repeatable read", "serializable"] {
        let settings = format!("set default_transaction_isolation = '{level}'");
        let (ledger, mut client, task) = (place.ledger(), place.client_with(&settings).await, task(level));
        let tries = AtomicU32::new(0);
        let outcome = ledger
            .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
                let (place, tries) = (&place, &tries);
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    if tries.fetch_add(1, Ordering::SeqCst) < 2 {
                        // Another's write comes in between what this transaction sees and what it writes.
                        place.beside(ADD, &[&1]).await;
                    }
                    tx.execute(ADD, &[&1]).await?;
                    Ok(context.attempt())
                })
            })
            .await
            .unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{outcome:?}");
        assert_eq!((tries.into_inner(), place.effects(&task.key).await), (3, 1), "{level}");
        assert_eq!(found(&ledger, &task).await.record.history.len(), 0);
    }
}

/// A write skew that only the commit can refuse.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_refused_for_what_others_did_is_tried_again() {
    let place = Place::new();
    let both_have_read = Arc::new(Barrier::new(2));
    let tries = Arc::new(AtomicU32::new(0));
    let mut runs = tokio::task::JoinSet::new();
    for (name, reads, writes) in [("left", 1, 2), ("right", 2, 1)] {
        let (place, both, tries) = (place.clone(), Arc::clone(&both_have_read), Arc::clone(&tries));
        runs.spawn(async move {
            let settings = "set default_transaction_isolation = 'serializable'";
            let (ledger, mut client, task) = (place.ledger(), place.client_with(settings).await, task(name));
            let mut is_first = true;
            let outcome = ledger
                .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
                    let (both, tries, waits) = (&both, &tries, std::mem::take(&mut is_first));
                    Box::pin(async move {
                        tries.fetch_add(1, Ordering::SeqCst);
                        tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                        let seen: i32 = tx.query_one("select n from counter where id = $1", &[&reads]).await?.get(0);
                        if waits {
                            both.wait().await;
                        }
                        tx.execute("update counter set n = $2 where id = $1", &[&writes, &(seen + 1)]).await?;
                        if waits {
                            both.wait().await;
                        }
                        Ok(())
                    })
                })
                .await
                .unwrap();
            assert!(matches!(outcome, Outcome::Ran { .. }), "{name}: {outcome:?}");
            assert_eq!(place.effects(&task.key).await, 1, "{name}");
        });
    }
    while let Some(run) = runs.join_next().await {
        run.unwrap();
    }
    assert!(tries.load(Ordering::SeqCst) > 2, "one of them was refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_handlers_in_a_deadlock_both_take_effect_once() {
    let place = Place::new();
    let both_hold_one = Arc::new(Barrier::new(2));
    let tries = Arc::new(AtomicU32::new(0));
    let mut runs = tokio::task::JoinSet::new();
    for (name, first, second) in [("up", 1, 2), ("down", 2, 1)] {
        let (place, both, tries) = (place.clone(), Arc::clone(&both_hold_one), Arc::clone(&tries));
        runs.spawn(async move {
            let (ledger, mut client, task) = (place.ledger(), place.client().await, task(name));
            let mut is_first = true;
            let outcome = ledger
                .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
                    let (both, tries, waits) = (&both, &tries, std::mem::take(&mut is_first));
                    Box::pin(async move {
                        tries.fetch_add(1, Ordering::SeqCst);
                        tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                        tx.execute(ADD, &[&first]).await?;
                        if waits {
                            both.wait().await;
                        }
                        tx.execute(ADD, &[&second]).await?;
                        Ok(())
                    })
                })
                .await
                .unwrap();
            assert!(matches!(outcome, Outcome::Ran { .. }), "{name}: {outcome:?}");
            assert_eq!(place.effects(&task.key).await, 1, "{name}");
        });
    }
    while let Some(run) = runs.join_next().await {
        run.unwrap();
    }
    assert_eq!(tries.load(Ordering::SeqCst), 3, "one of them was the victim, once");
    let counted: i64 = place.beside("select sum(n) from counter where id < 3", &[]).await[0].get(0);
    assert_eq!(counted, 4);
}

#[tokio::test]
async fn a_statement_that_fails_is_a_failed_attempt_that_leaves_nothing() {
    let place = Place::new();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    let run = async |client: &mut _, sql: &'static str| {
        ledger
            .run_in_transaction(client, &task, &policy(), |tx, context| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    tx.execute(sql, &[]).await?;
                    Ok(())
                })
            })
            .await
            .unwrap()
    };
    let outcome = run(&mut client, "insert into counter values (1, 0)").await;
    let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("{outcome:?}") };
    assert!(failure.message.contains("duplicate key"), "{failure:?}");
    assert_eq!((record.state, record.attempt, place.effects(&task.key).await), (State::Waiting, 1, 0));
    // One of the handler's own that took too long is its own matter, too.
    client.batch_execute("set statement_timeout = '100ms'").await.unwrap();
    let outcome = run(&mut client, "select pg_sleep(5)").await;
    assert!(matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains("timeout")), "{outcome:?}");
    let outcome = run(&mut client, "select 1").await;
    assert!(matches!(&outcome, Outcome::Ran { record, .. } if record.attempt == 3), "{outcome:?}");
    assert_eq!(place.effects(&task.key).await, 1);
}

/// Its server answers the commit of such a transaction with a rollback, and the driver takes that for a success.
#[tokio::test]
async fn a_handler_that_passes_over_an_error_is_never_recorded_as_done() {
    let place = Place::new();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    let outcome = ledger
        .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                let passed_over = tx.execute("select 1 / 0", &[]).await;
                assert!(passed_over.is_err());
                Ok(())
            })
        })
        .await
        .unwrap();
    let Outcome::Failed { failure, .. } = outcome else { panic!("{outcome:?}") };
    assert!(failure.message.contains("it went on"), "{failure:?}");
    assert_eq!((state(&ledger, &task).await, place.effects(&task.key).await), (State::Waiting, 0));

    // By hand, after the completion was written.
    let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
    let tx = client.transaction().await.unwrap();
    claim.lock_in(&tx).await.unwrap();
    tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
    let completion = claim.complete_in(&tx, Output::Nothing).await.unwrap();
    tx.execute("select 1 / 0", &[]).await.unwrap_err();
    let unresolved = completion.commit_in(tx).await.unwrap_err();
    assert_eq!((state(&ledger, &task).await, place.effects(&task.key).await), (State::Running, 0));
    let (joined, claim) = unresolved.completion.find_out().await.unwrap();
    assert_eq!(joined, taskonce::postgres::Joined::RolledBack);
    let tx = client.transaction().await.unwrap();
    claim.lock_in(&tx).await.unwrap();
    tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
    claim.complete_in(&tx, Output::Nothing).await.unwrap().commit_in(tx).await.unwrap();
    assert_eq!((state(&ledger, &task).await, place.effects(&task.key).await), (State::Done, 1));
}

/// Whatever it did before is its own doing then; the completion does not stand alone.
#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_completes_nothing() {
    let place = Place::new();
    for (id, statement) in [("rolls back", "rollback"), ("begins anew", "rollback; begin"), ("commits", "commit")] {
        let (ledger, mut client, task) = (place.ledger(), place.client().await, task(id));
        let outcome = ledger
            .run_in_transaction(&mut client, &task, &policy(), |tx, _| {
                Box::pin(async move { Ok(tx.batch_execute(statement).await?) })
            })
            .await
            .unwrap();
        let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("{id}: {outcome:?}") };
        assert!(failure.message.contains("has ended"), "{failure:?}");
        assert_eq!((failure.class, record.state), (FailureClass::Permanent, State::Dead), "{id}");
    }
}

#[tokio::test]
async fn a_constraint_that_is_checked_at_the_commit_fails_the_attempt() {
    let place = Place::new();
    place
        .database
        .psql("create table slip (id int unique deferrable initially deferred); grant all on slip to public")
        .unwrap();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    for (attempt, value) in [(1, 1), (2, 2)] {
        let outcome = ledger
            .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    tx.execute("insert into slip values (1), ($1)", &[&value]).await?;
                    Ok(())
                })
            })
            .await
            .unwrap();
        match outcome {
            Outcome::Failed { failure, record: Some(record) } if attempt == 1 => {
                assert!(failure.message.contains("duplicate key"), "{failure:?}");
                assert_eq!((record.state, place.effects(&task.key).await), (State::Waiting, 0));
            }
            Outcome::Ran { record, .. } => assert_eq!((record.attempt, place.effects(&task.key).await), (2, 1)),
            outcome => panic!("{outcome:?}"),
        }
    }
}

/// A heartbeat came between what the transaction had seen and the step. The handler was told to raise a timeout.
#[tokio::test]
async fn a_step_whose_transaction_read_before_a_heartbeat_is_told_to_begin_anew_and_may() {
    let place = Place::new();
    for level in ["repeatable read", "serializable"] {
        let settings = format!("set default_transaction_isolation = '{level}'");
        let (ledger, mut client, task) = (place.ledger(), place.client_with(&settings).await, task(level));
        let policy = Policy { effect: Effect::Keyed, ..policy() };
        let outcome = ledger.run(&task, &policy, |context| async move {
            let held = context.held();
            let tx = client.transaction().await?;
            tx.query_one("select n from counter where id = 1", &[]).await?;
            held.renew(&**context.ledger().store(), &**context.ledger().host()).await?;
            let key = context.key().as_str();
            let refused = context.step_in(&tx, "book", async |_| Ok(tx.execute(EFFECT, &[&key]).await?)).await;
            let failure = refused.unwrap_err();
            assert!(failure.message.contains("roll back and begin anew"), "{level}: {failure:?}");
            tx.rollback().await?;
            let tx = client.transaction().await?;
            context.step_in(&tx, "book", async |_| Ok(tx.execute(EFFECT, &[&key]).await?)).await?;
            tx.commit().await?;
            Ok(context.attempt())
        });
        let outcome = outcome.await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: 1, .. }), "{level}: {outcome:?}");
        assert_eq!(place.effects(&task.key).await, 1, "{level}");
    }
}

/// Each was a failed attempt, or had to be tried again by the handler.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_in_a_transaction_of_its_own_meets_a_serialisation_failure_and_runs_again_in_the_same_attempt() {
    let place = Place::new();
    for level in ["repeatable read", "serializable"] {
        let settings = format!("set default_transaction_isolation = '{level}'");
        let (ledger, mut client, task) = (place.ledger(), place.client_with(&settings).await, task(level));
        let (policy, calls) = (Policy { effect: Effect::Repeatable, ..policy() }, AtomicU32::new(0));
        let outcome = ledger.run(&task, &policy, |context| {
            let (client, place, calls, key) = (&mut client, &place, &calls, task.key.as_str());
            async move {
                let step = context.step_of("book", Effect::Transactional);
                let booked = step.in_transaction(client, |tx, _step| {
                    Box::pin(async move {
                        tx.execute(EFFECT, &[&key]).await?;
                        if calls.fetch_add(1, Ordering::SeqCst) < 2 {
                            place.beside(ADD, &[&1]).await;
                        }
                        tx.execute(ADD, &[&1]).await?;
                        Ok("booked".to_owned())
                    })
                });
                Ok((booked.await?, context.attempt()))
            }
        });
        let outcome = outcome.await.unwrap();
        let Outcome::Ran { value, record } = outcome else { panic!("{level}: {outcome:?}") };
        assert_eq!((value.0.as_str(), value.1, record.steps.len(), record.history.len()), ("booked", 1, 1, 0));
        assert_eq!((calls.into_inner(), place.effects(&task.key).await), (3, 1), "{level}");
    }
}

/// A conflict that only the commit finds is one too, and what is no conflict is the step's failure.
#[tokio::test]
async fn a_step_whose_commit_is_refused_runs_again_only_where_that_can_help() {
    let place = Place::new();
    place.database.psql(SLIPS).unwrap();
    for (code, wanted) in [("40001", 3), ("40P01", 3), ("23514", 1)] {
        let (ledger, mut client, task) = (place.ledger(), place.client().await, task(code));
        let (policy, calls) = (Policy { effect: Effect::Repeatable, ..policy() }, AtomicU32::new(0));
        let outcome = ledger.run(&task, &policy, |context| {
            let (client, calls) = (&mut client, &calls);
            async move {
                let step = context.step_of("book", Effect::Transactional);
                let booked = step.in_transaction(client, |tx, _step| {
                    Box::pin(async move {
                        let refused = i32::from(calls.fetch_add(1, Ordering::SeqCst) < 2);
                        Ok(tx
                            .execute("insert into slip select $1 from generate_series(1, $2)", &[&code, &refused])
                            .await?)
                    })
                });
                booked.await
            }
        });
        let record = match outcome.await.unwrap() {
            Outcome::Failed { failure, record: Some(record) } if wanted == 1 => {
                assert!(failure.message.contains("out of slips"), "{failure:?}");
                record
            }
            Outcome::Ran { record, .. } if wanted > 1 => record,
            outcome => panic!("{code}: {outcome:?}"),
        };
        assert_eq!((calls.into_inner(), record.attempt, record.steps.len()), (wanted, 1, usize::from(wanted > 1)));
    }
}

/// A table whose rows are checked at the commit, by a trigger of the user's that raises the code that the row names.
const SLIPS: &str = "create table slip (code text);
    create function check_slip() returns trigger language plpgsql as $$ begin
        raise exception 'out of slips' using errcode = new.code; end $$;
    create constraint trigger slip_is_checked after insert on slip deferrable initially deferred
        for each row execute function check_slip();
    grant all on slip to public";
/// A rule broken, a trigger's own error, a right that lacks, a table that lacks, a statement ended for its time or for a lock.
const CODES: [&str; 6] = ["23514", "P0001", "42501", "42P01", "57014", "55P03"];

/// What was said was that the ledger's record or schema is damaged; and a deferred trigger that took too long was tried again
/// twenty times, at once.
#[tokio::test]
async fn what_the_server_refuses_at_the_commit_is_a_failed_attempt_in_its_own_words() {
    let place = Place::new();
    place.database.psql(SLIPS).unwrap();
    let (ledger, mut client) = (place.ledger(), place.client().await);
    for code in CODES {
        let (task, calls) = (task(code), AtomicU32::new(0));
        let outcome = ledger
            .run_in_transaction(&mut client, &task, &policy(), |tx, context| {
                let calls = &calls;
                Box::pin(async move {
                    calls.fetch_add(1, Ordering::SeqCst);
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    Ok(tx.execute("insert into slip values ($1)", &[&code]).await?)
                })
            })
            .await
            .unwrap();
        let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("{code}: {outcome:?}") };
        assert!(failure.message.contains("out of slips") && failure.class == FailureClass::Retryable, "{failure:?}");
        assert_eq!(
            (record.state, calls.into_inner(), place.effects(&task.key).await),
            (State::Waiting, 1, 0),
            "{code}"
        );

        // By hand.
        let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
        let tx = client.transaction().await.unwrap();
        claim.lock_in(&tx).await.unwrap();
        tx.execute("insert into slip values ($1)", &[&code]).await.unwrap();
        let completion = claim.complete_in(&tx, Output::Nothing).await.unwrap();
        let mut unresolved = completion.commit_in(tx).await.unwrap_err();
        assert_eq!(unresolved.error.kind(), ErrorKind::RolledBack, "{:?}", unresolved.error);
        assert!(
            unresolved.error.to_string().contains(&format!("out of slips (SQLSTATE {code})")),
            "{}",
            unresolved.error
        );
        let source = std::error::Error::source(&unresolved.error).and_then(|source| source.downcast_ref());
        assert_eq!(source.and_then(tokio_postgres::Error::code).map(|said| said.code()), Some(code));
        let start = Instant::now();
        let (joined, claim) = loop {
            match unresolved.completion.find_out().await {
                Ok(found) => break found,
                // The server says no, and lets go of the record a moment later.
                Err(again) => {
                    assert_eq!(again.error.kind(), ErrorKind::Locked, "{:?}", again.error);
                    assert!(start.elapsed() < PATIENCE, "the record is let go");
                    unresolved = again;
                }
            }
        };
        assert_eq!(joined, taskonce::postgres::Joined::RolledBack, "{code}");
        assert!(matches!(claim.fail(Failure::permanent("no slip")).await, Ok(_settled)));
        assert_eq!(state(&ledger, &task).await, State::Dead, "{code}");
    }
}

/// Savepoints are the handler's own: what it rolls back to is before its own statements, not before the lock.
#[tokio::test]
async fn a_handler_may_go_back_to_a_savepoint() {
    let place = Place::new();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    let outcome = ledger
        .run_in_transaction(&mut client, &task, &policy(), |mut tx, context| {
            Box::pin(async move {
                let inner = tx.transaction().await?;
                inner.execute(EFFECT, &[&context.key().as_str()]).await?;
                inner.execute("select 1 / 0", &[]).await.unwrap_err();
                inner.rollback().await?;
                let inner = tx.transaction().await?;
                inner.execute(EFFECT, &[&context.key().as_str()]).await?;
                inner.commit().await?;
                Ok(())
            })
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
    assert_eq!(place.effects(&task.key).await, 1);
}

/// The short wait for the record must not become the handler's own, nor may it lift a limit of the user's.
#[tokio::test]
async fn the_handlers_own_statements_wait_for_locks_as_its_session_says() {
    let place = Place::new();
    let ask = "select current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')";
    for (settings, expected) in [
        ("", ["20s", "20s"]),
        ("set lock_timeout = '3s'; set idle_in_transaction_session_timeout = '4s'", ["3s", "4s"]),
        ("set lock_timeout = '1h'; set idle_in_transaction_session_timeout = '1h'", ["20s", "20s"]),
    ] {
        let (ledger, mut client, task) =
            (place.ledger(), place.client_with(settings).await, task(settings_id(settings)));
        let policy = Policy { lease: Duration::from_secs(20), ..policy() };
        let outcome = ledger
            .run_in_transaction(&mut client, &task, &policy, |tx, _| {
                Box::pin(async move {
                    let row = tx.query_one(ask, &[]).await?;
                    Ok([row.get::<_, String>(0), row.get::<_, String>(1)])
                })
            })
            .await
            .unwrap();
        assert_eq!(outcome.into_value().unwrap(), expected, "{settings}");
        let after = client.query_one(ask, &[]).await.unwrap();
        let outside = [after.get::<_, String>(0), after.get::<_, String>(1)];
        assert!(settings.is_empty() || settings.contains(&outside[0]), "the session is as it was: {outside:?}");
    }
}

fn settings_id(settings: &'static str) -> &'static str {
    if settings.is_empty() { "none" } else { settings }
}

#[tokio::test]
async fn a_failure_that_is_permanent_is_dead_at_once() {
    let place = Place::new();
    let (ledger, mut client, task) = (place.ledger(), place.client().await, task("a"));
    let outcome: Outcome<()> = ledger
        .run_in_transaction(&mut client, &task, &policy(), |_, _| {
            Box::pin(async { Err(Stop::from(Failure::permanent("no such account"))) })
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Failed { .. }), "{outcome:?}");
    assert_eq!(state(&ledger, &task).await, State::Dead);
}
