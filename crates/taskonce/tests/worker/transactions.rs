//! Handlers whose effects commit together with their tasks' completion, in SQLite.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use taskonce::routes::Settings;
use taskonce::sqlite::RunInTransaction as _;
use taskonce::{Effect, Failure};

use crate::stage::{CHARGE, Kind, Stage, start};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_in_the_ledgers_own_file_commits_with_its_task() {
    let stage = Stage::new(Kind::Sqlite);
    let beside = taskonce::sqlite::rusqlite::Connection::open(stage.folder.path().join("tasks.db")).unwrap();
    beside.execute_batch("CREATE TABLE charge (key TEXT NOT NULL)").unwrap();
    stage.send_many(40, 3).await;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let worker = stage
        .worker(Settings { effect: Some(Effect::Transactional), ..Stage::settings() })
        .handler_in_transaction(CHARGE, move |job| {
            let counted = Arc::clone(&counted);
            async move {
                let handler = move |tx: &taskonce::sqlite::rusqlite::Transaction<'_>, context: &taskonce::Context| {
                    tx.execute("INSERT INTO charge VALUES (?1)", [context.key().as_str()])?;
                    if counted.fetch_add(1, Ordering::SeqCst).is_multiple_of(5) && context.attempt() == 1 {
                        return Err(Failure::retryable("planted, after the effect was written"));
                    }
                    Ok(())
                };
                job.ledger.run_in_transaction(&job.task, &job.policy, handler).await
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    let (rows, keys): (i64, i64) = beside
        .query_row("SELECT count(*), count(DISTINCT key) FROM charge", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap();
    assert_eq!((rows, keys), (40, 40));
    assert!(runs.load(Ordering::SeqCst) > 40, "some failed first");
    let report = running.end().await;
    assert!(report.is_clean(), "{report}");
}
