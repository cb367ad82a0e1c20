//! What SQLite's driver promises beside what every driver does.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use taskonce::sqlite::rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior};
use taskonce::sqlite::{CompleteIn as _, RunInTransaction as _, StepIn as _};
use taskonce::{Admission, Claim, Context, Effect, ErrorKind, Failure, FailureClass, Handler, Input, Ledger, Outcome};
use taskonce::{Policy, Result, Run as _, State, Task};
use taskonce_contract::transactional::Gate;

use super::{InFile, add_effect};

/// The lease of the claims beside a long transaction, how long that takes, and how much of a lease may be gone before the
/// first heartbeat that meets it.
const LEASE: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_millis(3500);
/// The longest that a test waits for what another thread is about to do.
const BOUND: Duration = Duration::from_secs(30);
/// A statement that has no end.
const ENDLESS: &str = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n";

fn task(id: &str) -> Task {
    Handler::new("pay", "1").unwrap().task(id, &Input::from_json(b"1200").unwrap()).unwrap()
}

fn transactional() -> &'static Policy {
    static POLICY: LazyLock<Policy> = LazyLock::new(|| Policy::new(Effect::Transactional));
    &POLICY
}

async fn claim(ledger: &Ledger, task: &Task) -> Claim {
    match ledger.claim(task, transactional()).await.unwrap() {
        Admission::Run(claim) => claim,
        other => panic!("the task runs; the answer was {other:?}"),
    }
}

/// Runs a handler, and demands that its attempt failed and left nothing.
async fn leaves_nothing(place: &InFile, handler: fn(&Transaction<'_>) -> Result<(), Failure>) -> Failure {
    let ledger = taskonce::open(&place.url()).unwrap();
    let task = task("a");
    let outcome = ledger.run_in_transaction(&task, transactional(), move |tx, context| {
        add_effect(tx, context.key());
        handler(tx)?;
        // It goes on as if nothing were wrong.
        let _late = tx.execute("INSERT INTO effect (key) VALUES (?1)", [context.key().as_str()]);
        Ok(())
    });
    let outcome = outcome.await.unwrap();
    let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("it failed; it was {outcome:?}") };
    assert_eq!((record.state, place.count(&task.key)), (State::Waiting, 0));
    failure
}

#[tokio::test]
async fn a_handler_that_commits_by_itself_leaves_nothing() {
    let place = InFile::new();
    let failure = leaves_nothing(&place, |tx| {
        tx.execute_batch("COMMIT").expect_err("only the completion commits");
        Ok(())
    });
    assert!(failure.await.message.contains("was over before its handler returned"));
}

/// SQLite ends a transaction by itself after some errors, and takes what follows as transactions of their own.
#[tokio::test]
async fn what_a_handler_writes_after_its_transaction_is_over_leaves_nothing() {
    let place = InFile::new();
    let failure = leaves_nothing(&place, |tx| Ok(tx.execute_batch("ROLLBACK")?)).await;
    assert!(failure.message.contains("was over before its handler returned"), "{failure:?}");
}

/// It was tried twenty times at once, or said to be given up.
#[tokio::test]
async fn a_constraint_that_is_checked_at_the_commit_fails_the_attempt_in_sqlites_words() {
    let place = InFile::new();
    let sql = "CREATE TABLE seat (id INTEGER PRIMARY KEY);
               CREATE TABLE booking (seat INTEGER REFERENCES seat DEFERRABLE INITIALLY DEFERRED)";
    place.beside().execute_batch(sql).unwrap();
    let ledger = taskonce::open(&place.url()).unwrap();
    let (task, calls) = (task("a"), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&calls);
    let outcome = ledger.run_in_transaction(&task, transactional(), move |tx, context| {
        counted.fetch_add(1, Ordering::SeqCst);
        add_effect(tx, context.key());
        tx.execute("INSERT INTO booking (seat) VALUES (7)", ())?;
        Ok(())
    });
    let outcome = outcome.await.unwrap();
    let Outcome::Failed { failure, record: Some(record) } = outcome else { panic!("it failed; it was {outcome:?}") };
    assert!(failure.message.contains("FOREIGN KEY constraint failed"), "{failure:?}");
    assert_eq!((record.state, calls.load(Ordering::SeqCst), place.count(&task.key)), (State::Waiting, 1, 0));
}

/// It waited two seconds each time, whatever the store's URL said.
#[tokio::test]
async fn a_transactions_own_connection_waits_for_its_turn_as_long_as_the_stores_url_says() {
    let place = InFile::new();
    let ledger = taskonce::open(&format!("{}?timeout=100ms", place.url())).unwrap();
    let holder = place.beside();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut conn = taskonce_sqlite::tx::connect_beside(&ledger).unwrap();
    let start = Instant::now();
    let refused = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap_err();
    assert_eq!(refused.sqlite_error_code(), Some(ErrorCode::DatabaseBusy));
    let waited = start.elapsed();
    assert!((Duration::from_millis(100)..Duration::from_millis(1500)).contains(&waited), "{waited:?}");
}

#[tokio::test]
async fn a_handler_has_savepoints_of_its_own() {
    let place = InFile::new();
    let (ledger, task) = (taskonce::open(&place.url()).unwrap(), task("a"));
    let outcome = ledger.run_in_transaction(&task, transactional(), |tx, context| {
        add_effect(tx, context.key());
        tx.execute_batch("SAVEPOINT mine")?;
        add_effect(tx, context.key());
        tx.execute_batch("ROLLBACK TO mine; RELEASE mine")?;
        Ok(())
    });
    assert!(matches!(outcome.await.unwrap(), Outcome::Ran { .. }));
    assert_eq!(place.count(&task.key), 1);
}

#[tokio::test]
async fn a_connection_that_would_not_keep_its_commit_is_refused() {
    let place = InFile::new();
    let ledger = taskonce::open(&place.url()).unwrap();
    let claim = claim(&ledger, &task("a")).await;
    let mut conn = place.beside();
    for (level, is_taken) in [("OFF", false), ("NORMAL", false), ("FULL", true), ("EXTRA", true)] {
        conn.pragma_update(None, "synchronous", level).unwrap();
        let tx = conn.transaction().unwrap();
        match claim.lock_in(&tx) {
            Ok(()) => assert!(is_taken, "{level}"),
            Err(error) => {
                assert!(!is_taken && error.kind() == ErrorKind::Unsupported, "{level}: {error:?}");
                assert!(error.hint().contains("PRAGMA synchronous = FULL"), "{error:?}");
            }
        }
    }
    drop(claim);
    // A store that may forget asks no more of the connection than it gives.
    let ledger = taskonce::open(&format!("{}?synchronous=normal", place.url())).unwrap();
    let claim = self::claim(&ledger, &task("b")).await;
    conn.pragma_update(None, "synchronous", "NORMAL").unwrap();
    claim.lock_in(&conn.transaction().unwrap()).unwrap();
}

/// It would have to change what it has not seen.
#[tokio::test]
async fn a_transaction_that_read_before_others_wrote_is_turned_away() {
    let place = InFile::new();
    let ledger = taskonce::open(&place.url()).unwrap();
    let claim = claim(&ledger, &task("a")).await;
    let mut conn = place.beside();
    let tx = conn.transaction().unwrap();
    tx.query_row("SELECT count(*) FROM effect", [], |row| row.get::<_, i64>(0)).unwrap();
    drop(self::claim(&ledger, &task("b")).await);
    let error = claim.lock_in(&tx).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
    assert!(error.hint().contains("before the transaction has read"), "{error:?}");
    drop(tx);
    claim.lock_in(&conn.transaction().unwrap()).unwrap();
}

#[tokio::test]
async fn a_file_of_another_program_is_refused() {
    let place = InFile::new();
    let ledger = taskonce::open(&place.url()).unwrap();
    let claim = claim(&ledger, &task("a")).await;
    for mut conn in [Connection::open_in_memory().unwrap(), Connection::open(place.0.path().join("other.db")).unwrap()]
    {
        // A record under the same names does not help.
        conn.execute_batch("CREATE TABLE task (id INTEGER, key TEXT, state INTEGER, written_at INTEGER, body BLOB)")
            .unwrap();
        let error = claim.lock_in(&conn.transaction().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    }
    // By another name it is the same file.
    std::os::unix::fs::symlink(place.path(), place.0.path().join("link.db")).unwrap();
    let mut conn = Connection::open(place.0.path().join("link.db")).unwrap();
    claim.lock_in(&conn.transaction().unwrap()).unwrap();
}

/// Measured: two claims of other ledgers, renewed every 2 s, beside a handler that holds the file for 3.5 s. Their heartbeats
/// fail meanwhile, after the store's timeout, and are sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_that_is_shorter_than_what_is_left_of_a_lease_loses_no_other_claim() {
    let place = InFile::new();
    let holds = Arc::new(Gate::default());
    let mut beside = Vec::new();
    for id in ["b", "c"] {
        let (ledger, holds) = (taskonce::open(&place.url()).unwrap(), Arc::clone(&holds));
        let policy = Policy { lease: LEASE, ..Policy::new(Effect::Keyed) };
        let (claimed, task) = (Arc::new(Gate::default()), task(id));
        let is_claimed = Arc::clone(&claimed);
        beside.push(tokio::spawn(async move {
            let run = ledger.run(&task, &policy, |context| async move {
                claimed.open();
                holds.pass().await;
                // sleeps: the handler works while the other's transaction holds the file
                tokio::time::sleep(LONG).await;
                Ok::<bool, Failure>(context.may_start_effect())
            });
            run.await.unwrap()
        }));
        is_claimed.pass().await;
    }
    let (ledger, told, task) = (taskonce::open(&place.url()).unwrap(), Arc::clone(&holds), task("a"));
    let long = ledger.run_in_transaction(&task, transactional(), move |tx, context| {
        add_effect(tx, context.key());
        told.open();
        // sleeps: the transaction has to hold the file for longer than the store waits for its turn
        std::thread::sleep(LONG);
        Ok(())
    });
    assert!(matches!(long.await.unwrap(), Outcome::Ran { .. }));
    for run in beside {
        let outcome = run.await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { value: true, .. }), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_runs_is_interrupted_when_its_run_is_dropped() {
    let place = InFile::new();
    let (ledger, task) = (taskonce::open(&place.url()).unwrap(), task("a"));
    let (entered, left) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let (enters, leaves) = (Arc::clone(&entered), Arc::clone(&left));
    let (running, asked) = (ledger.clone(), task.clone());
    let run = tokio::spawn(async move {
        let run = running.run_in_transaction(&asked, transactional(), move |tx, context: &Context| {
            add_effect(tx, context.key());
            enters.open();
            let ended = tx.query_row(ENDLESS, [], |row| row.get::<_, i64>(0));
            leaves.open();
            Ok(ended?)
        });
        run.await
    });
    entered.pass().await;
    // The statement may not have begun yet, and one that begins later is not interrupted.
    tokio::time::sleep(Duration::from_millis(200)).await; // sleeps: so that it has
    run.abort();
    left.pass().await;
    assert!(ledger.finish(BOUND).await);
    let record = ledger.show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.attempt, place.count(&task.key)), (State::Waiting, 1, 0));
    assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::Dropped));
}

#[tokio::test]
async fn steps_are_refused_in_a_handler_that_is_one_transaction() {
    let place = InFile::new();
    let (ledger, task) = (taskonce::open(&place.url()).unwrap(), task("a"));
    let outcome = ledger.run_in_transaction(&task, transactional(), |tx, context| {
        context.step_in(tx, "book", |_| {
            add_effect(tx, context.key());
            Ok(1)
        })
    });
    let outcome = outcome.await.unwrap();
    assert!(matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains("one")), "{outcome:?}");
    assert_eq!(place.count(&task.key), 0);
}

#[test]
fn the_blocking_ledger_runs_in_a_transaction_too() {
    let place = InFile::new();
    let ledger = taskonce::blocking::open(&place.url()).unwrap();
    let (mut calls, task) = (0, task("a"));
    let policy = Policy { backoff: taskonce::Backoff::NONE, ..transactional().clone() };
    for (attempt, wanted) in [(1, "failed"), (2, "ran"), (2, "replayed")] {
        let outcome = ledger.run_in_transaction(&task, &policy, |tx, context| {
            calls += 1;
            add_effect(tx, context.key());
            if context.attempt() == 1 { Err(Failure::retryable("not today")) } else { Ok("paid".to_owned()) }
        });
        let outcome = outcome.unwrap();
        assert_eq!(outcome.name(), wanted, "{outcome:?}");
        assert_eq!(ledger.show(&task.key).unwrap().unwrap().record.attempt, attempt);
        assert_eq!(place.count(&task.key), usize::from(attempt > 1));
        assert!(wanted == "failed" || outcome.into_value().as_deref() == Some("paid"));
    }
    assert_eq!(calls, 2);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        ledger.run_in_transaction(&self::task("b"), &policy, |tx, context| -> Result<(), Failure> {
            add_effect(tx, context.key());
            panic!("planned");
        })
    }));
    assert!(panicked.is_err());
    assert!(ledger.finish(BOUND));
    let key = self::task("b").key;
    assert_eq!((ledger.show(&key).unwrap().unwrap().record.state, place.count(&key)), (State::Waiting, 0));
}

/// Two processes' worth of tasks at once: each holds the file for a moment, and all take effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_tasks_at_once_take_effect_once_each() {
    const TASKS: usize = 24;
    let place = InFile::new();
    let began = Instant::now();
    let runs: Vec<_> = (0..2)
        .map(|_| taskonce::open(&place.url()).unwrap())
        .flat_map(|ledger| (0..TASKS).map(move |number| (ledger.clone(), task(&format!("task-{number}")))))
        .map(|(ledger, task)| {
            tokio::spawn(async move {
                let run = ledger.run_in_transaction_or_wait(&task, transactional(), BOUND, |tx, context| {
                    add_effect(tx, context.key());
                    Ok(1_u8)
                });
                run.await.unwrap()
            })
        })
        .collect();
    for run in runs {
        let outcome = run.await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { .. } | Outcome::Replayed(_)), "{outcome:?}");
    }
    for number in 0..TASKS {
        assert_eq!(place.count(&task(&format!("task-{number}")).key), 1);
    }
    assert!(began.elapsed() < BOUND);
}
