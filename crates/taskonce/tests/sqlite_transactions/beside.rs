//! Steps whose effect is in another file than the ledger's, by rusqlite: what every driver promises, and the row that decides,
//! whoever is killed when.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce::sqlite::Beside as _;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::store::Store;
use taskonce::{
    Backoff, Context, Effect, ErrorKind, Failure, Handler, Input, Migration, Outcome, Policy, Record, Run as _, State,
    Task,
};

use super::{InFile, add_effect};
use crate::shop::{ByRusqlite, Shop, open};

const LEDGER: &str = "TASKONCE_TEST_LEDGER";
const SHOP: &str = "TASKONCE_TEST_SHOP";
/// How long a worker waits for a task that another holds.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What every driver promises.
mod suite {
    taskonce_contract::beside_suite!(|_| async { super::driver() });
}

fn driver() -> ByRusqlite {
    let place = InFile::new();
    ByRusqlite::new(move || Arc::new(place.store()) as Arc<dyn Store>)
}

fn task(id: &str) -> Task {
    Handler::new("order", "1").unwrap().task(id, &Input::from_json(b"1200").unwrap()).unwrap()
}

fn policy() -> Policy {
    Policy { lease: Duration::from_secs(1), backoff: Backoff::NONE, ..Policy::new(Effect::Keyed) }
}

/// One step with an effect, that counts how often its code runs.
async fn book(context: &Context, shop: &mut Connection, input: u32, calls: &AtomicU32) -> Result<String, Failure> {
    let step = context.step_of("book", Effect::Transactional).input(&input);
    step.beside(shop, |tx, step| {
        calls.fetch_add(1, Ordering::SeqCst);
        add_effect(tx, context.key());
        Ok(format!("booked in attempt {}", step.attempt()))
    })
    .await
}

/// Runs a handler, behind whoever holds its task.
async fn play<T, F>(
    place: &InFile,
    task: &Task,
    handler: impl FnOnce(Context) -> F + Send,
) -> taskonce::Result<Outcome<T>>
where
    T: Serialize + DeserializeOwned + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    taskonce::open(&place.url())?.run_or_wait(task, &policy(), WAIT_MAX, handler).await
}

async fn run(
    place: &InFile,
    task: &Task,
    shop: &Shop,
    input: u32,
    calls: &AtomicU32,
) -> taskonce::Result<Outcome<String>> {
    let mut conn = shop.open();
    let conn = &mut conn;
    play(place, task, |context| async move { book(&context, conn, input, calls).await }).await
}

fn ran(outcome: taskonce::Result<Outcome<String>>) -> (String, Arc<Record>) {
    match outcome.unwrap() {
        Outcome::Ran { value, record } => (value, record),
        other => panic!("it ran; it was {other:?}"),
    }
}

fn failed(outcome: taskonce::Result<Outcome<String>>) -> (Failure, Arc<Record>) {
    match outcome.unwrap() {
        Outcome::Failed { failure, record: Some(record) } => (failure, record),
        other => panic!("it failed; it was {other:?}"),
    }
}

/// The ledger's file is locked by the test when the step commits: the worker cannot record it, and is killed.
#[tokio::test]
async fn a_worker_killed_between_its_commit_and_the_record_is_followed_by_a_short_run() {
    let (place, shop, task) = (InFile::new(), Shop::new(), task("a"));
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "beside::a_worker_books_once", "--nocapture"])
        .env(LEDGER, place.url())
        .env(SHOP, shop.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(worker.stderr.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap() == "in the step"));
    let held = place.beside();
    held.execute_batch("BEGIN IMMEDIATE").unwrap();
    drop(worker.stdin.take());
    let began = std::time::Instant::now();
    while shop.count("effect") == 0 {
        assert!(began.elapsed() < WAIT_MAX, "the step never commits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    kill_process(Pid::from_child(&worker), Signal::KILL).unwrap();
    worker.wait().unwrap();
    held.execute_batch("ROLLBACK").unwrap();
    let before = taskonce::open(&place.url()).unwrap().show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((before.state, before.steps.len()), (State::Running, 0));

    let calls = AtomicU32::new(0);
    let (value, record) = ran(run(&place, &task, &shop, 1, &calls).await);
    assert_eq!((value.as_str(), record.attempt, record.steps[0].attempt), ("booked in attempt 1", 2, 1));
    assert_eq!((calls.into_inner(), shop.count("effect")), (0, 1));
}

#[tokio::test]
async fn a_table_of_another_kind_and_a_missing_file_are_told() {
    let shop = Shop::without_table();
    shop.open().execute_batch("CREATE TABLE taskonce_step (operation TEXT)").unwrap();
    let error = taskonce::migrate_steps(&shop.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSchema, "{error:?}");
    let missing = format!("sqlite:{}", shop.0.path().join("other.db").display());
    assert_eq!(taskonce::migrate_steps(&missing).await.unwrap_err().kind(), ErrorKind::Unreachable);
    assert!(!shop.0.path().join("other.db").exists());
}

#[tokio::test]
async fn a_step_whose_code_ends_its_transaction_leaves_neither_its_effect_nor_its_row() {
    let (place, shop, task) = (InFile::new(), Shop::new(), task("a"));
    let mut conn = shop.open();
    let outcome = play(&place, &task, |context| {
        let conn = &mut conn;
        async move {
            let key = context.key();
            let step = context.step_of("book", Effect::Transactional);
            step.beside(conn, |tx, _step| {
                add_effect(tx, key);
                tx.execute_batch("ROLLBACK")?;
                Ok(String::new())
            })
            .await
        }
    });
    let (failure, record) = failed(outcome.await);
    assert!(failure.message.contains("was over before its code returned"), "{failure:?}");
    assert_eq!((shop.count("effect"), shop.count("taskonce_step"), record.steps.len()), (0, 0, 0));
}

#[tokio::test]
async fn the_table_is_made_once_and_the_file_stays_its_programs_own() {
    let shop = Shop::without_table();
    let table = "taskonce_step".to_owned();
    for made in [
        Migration::Migrated { schema: table.clone(), from: 0, to: 1 },
        Migration::UpToDate { schema: table.clone(), version: 1 },
    ] {
        assert_eq!(taskonce::migrate_steps(&shop.url()).await.unwrap(), made);
    }
    let version: i32 = shop.open().pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!((version, shop.count("taskonce_step")), (7, 0));
}

#[tokio::test]
async fn a_connection_whose_commits_a_power_cut_takes_back_runs_no_step() {
    let (place, shop, task) = (InFile::new(), Shop::new(), task("a"));
    let (calls, mut conn) = (AtomicU32::new(0), shop.open());
    conn.pragma_update(None, "synchronous", "normal").unwrap();
    let outcome = play(&place, &task, |context| {
        let (conn, calls) = (&mut conn, &calls);
        async move { book(&context, conn, 1, calls).await }
    });
    assert!(failed(outcome.await).0.message.contains("PRAGMA synchronous = FULL"));
    assert_eq!((calls.into_inner(), shop.count("effect")), (0, 0));
}

#[tokio::test]
async fn a_purge_removes_old_rows_in_batches_and_leaves_young_ones() {
    let shop = Shop::new();
    let rows = "INSERT INTO taskonce_step (operation, step, input, attempt, done_at)
                WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500)
                SELECT 'n/h@1/' || i, 's', x'00', 1, unixepoch() * 1000 - i * 86400000 FROM n";
    shop.open().execute_batch(rows).unwrap();
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(taskonce::purge_steps(&shop.url(), day * 10 - Duration::from_secs(3600)).await.unwrap(), 2491);
    assert_eq!((shop.count("taskonce_step"), taskonce::purge_steps(&shop.url(), Duration::MAX).await.unwrap()), (9, 0));
    let error = taskonce::purge_steps(&Shop::without_table().url(), day).await.unwrap_err();
    assert_eq!((error.kind(), error.hint().contains("--steps")), (ErrorKind::NoSchema, true), "{error:?}");
}

/// Runs the task of one step, as a process of its own of a test above; by itself, twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_books_once() {
    let calls = AtomicU32::new(0);
    let (Ok(ledger), Ok(shop)) = (std::env::var(LEDGER), std::env::var(SHOP)) else {
        let (place, shop, task) = (InFile::new(), Shop::new(), task("a"));
        ran(run(&place, &task, &shop, 1, &calls).await);
        assert!(matches!(run(&place, &task, &shop, 1, &calls).await.unwrap(), Outcome::Replayed(_)));
        assert_eq!((calls.into_inner(), shop.count("effect")), (1, 1));
        return;
    };
    let (mut conn, task) = (open(shop.as_ref()), task("a"));
    let ledger = taskonce::open(&ledger).unwrap();
    let policy = policy();
    let outcome = ledger.run(&task, &policy, |context| {
        let conn = &mut conn;
        async move {
            let key = context.key();
            let step = context.step_of("book", Effect::Transactional).input(&1_u32);
            step.beside(conn, |tx, step| {
                add_effect(tx, key);
                eprintln!("in the step");
                // Until the test closes it.
                std::io::stdin().lines().for_each(drop);
                Ok(format!("booked in attempt {}", step.attempt()))
            })
            .await
        }
    });
    let outcome: taskonce::Result<Outcome<String>> = outcome.await;
    panic!("it should have been killed: {outcome:?}");
}
