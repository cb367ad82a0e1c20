//! Workers as processes of their own, one after the other killed by a task: the others' tasks take effect once, and that one is
//! parked for a person.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce::routes::Settings;
use taskonce::source::{DeadFilter, Depth, Entrance, Envelope, Source};
use taskonce::sqlite::RunInTransaction as _;
use taskonce::sqlite::rusqlite::{Connection, Transaction};
use taskonce::worker::Worker;
use taskonce::{Effect, Failure, State};

use crate::stage::{AT_ONCE, CHARGE, Order, PATIENCE, Stage};

const FOLDER: &str = "TASKONCE_TEST_FOLDER";
const POISON: &str = "poison";
const CRASHES_MAX: u32 = 2;

fn open(folder: &Path) -> (taskonce::Ledger, Arc<dyn Source>) {
    let url = |name: &str| format!("sqlite:{}", folder.join(name).display());
    let ledger = taskonce::open(&url("tasks.db")).unwrap();
    (ledger, taskonce::source::open(&format!("{}?visibility=1s", url("queue.db"))).unwrap())
}

/// Works off the queue of its parent, if it can; does nothing by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_works_off_its_parents_queue() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let (ledger, queue) = open(&folder);
    let settings = Settings {
        effect: Some(Effect::Transactional),
        lease: Some(Duration::from_millis(700)),
        crashes_max: Some(CRASHES_MAX),
        ..Stage::settings()
    };
    let worker = Worker::builder(ledger, Stage::table(&[(CHARGE, settings)]))
        .source(Arc::clone(&queue))
        .concurrency_max(4)
        .handler_in_transaction(CHARGE, |job| async move {
            let order: Order = serde_json::from_slice(&job.delivery.envelope.payload).unwrap();
            let handler = move |tx: &Transaction<'_>, _context: &taskonce::Context| -> Result<(), Failure> {
                tx.execute("INSERT INTO effect VALUES (?1)", [&order.id])?;
                if order.id == POISON {
                    std::process::abort();
                }
                Ok(())
            };
            job.ledger.run_in_transaction(&job.task, &job.policy, handler).await
        })
        .build()
        .unwrap();
    let is_worked_off = async {
        loop {
            let depth = Depth::total(&queue.depth().await.unwrap());
            if depth.ready + depth.deferred + depth.in_flight == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let report = worker.run_until(is_worked_off).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test]
async fn a_task_that_kills_every_worker_is_parked_and_the_others_take_effect_once() {
    const COUNT: usize = 40;
    let folder = tempfile::tempdir().unwrap();
    let (ledger, queue) = open(folder.path());
    let beside = Connection::open(folder.path().join("tasks.db")).unwrap();
    beside.execute_batch("CREATE TABLE effect (id TEXT NOT NULL)").unwrap();
    for number in 0..COUNT {
        let id = if number == 7 { POISON.to_owned() } else { format!("order-{number}") };
        let payload = format!("{{\"id\": \"{id}\"}}");
        let task = Envelope { key: Some(Stage::key(&id).to_string()), ..Envelope::new(CHARGE, payload) };
        for _copy in 0..2 {
            queue.send(&task, AT_ONCE, Entrance::Open).await.map(drop).unwrap();
        }
    }
    let began = Instant::now();
    let mut killed = 0;
    // Each round ends a worker, and all but so many end by the poison.
    loop {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", "poison::a_worker_works_off_its_parents_queue"]).env(FOLDER, folder.path());
        let status = child.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        if status.success() {
            break;
        }
        killed += 1;
        assert!(killed <= CRASHES_MAX && began.elapsed() < PATIENCE, "{killed} workers were killed");
    }
    assert_eq!(killed, CRASHES_MAX);
    let (rows, ids): (i64, i64) = beside
        .query_row("SELECT count(*), count(DISTINCT id) FROM effect", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap();
    assert_eq!((rows, ids), (COUNT as i64 - 1, COUNT as i64 - 1));
    let record = ledger.store().load(&Stage::key(POISON)).await.unwrap().unwrap().record;
    assert_eq!((record.state, record.crashes), (State::Parked, CRASHES_MAX));
    let dead = queue.dead_letters(&DeadFilter::default(), None).await.unwrap().lines;
    let reasons: Vec<_> = dead.iter().map(|line| &*line.death.id).collect();
    assert_eq!(reasons, ["parked/default/charge@2/poison"]);
}
