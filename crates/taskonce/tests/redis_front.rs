//! A fast check by URL: a Redis in front of a SQLite file, as users open it.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use taskonce::sqlite::RunInTransaction as _;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::{
    Admission, Effect, ErrorKind, Failure, Handler, Input, Ledger, Level, Outcome, Output, Policy, Task, open,
    open_existing,
};
use taskonce_testkit::RedisServer;
use tokio::task::JoinSet;

fn task(id: &str) -> Task {
    Handler::new("front", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap()
}

async fn claim(ledger: &Ledger, id: &str) -> Admission {
    ledger.claim(&task(id), &Policy::new(Effect::Unrepeatable)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_url_puts_a_front_before_a_file() {
    let (server, folder) = (RedisServer::start(&[]).unwrap(), tempfile::tempdir().unwrap());
    let file = folder.path().join("tasks.db");
    let encoded = server.url().replace(':', "%3A").replace('/', "%2F");
    let plain = format!("sqlite:{}?front={}&front_timeout=1s", file.display(), server.url());
    let with_options = format!("sqlite:{}?front={encoded}%3Ftimeout%3D1s&trust_done=yes&timeout=1s", file.display());
    let (a, b) = (open(&plain).unwrap(), open_existing(&with_options).unwrap());
    let Admission::Run(one) = claim(&a, "x").await else { panic!("it runs") };
    let Admission::Busy(_) = claim(&b, "x").await else { panic!("it is busy") };
    one.complete(Output::kept("text/plain", "result")).await.unwrap();
    let Admission::Replay(seen) = claim(&b, "x").await else { panic!("it is done") };
    assert_eq!(seen.output(), &Output::kept("text/plain", "result"));

    // Hints have a prefix of their own, so that no record of a Redis ledger is met, and they end by themselves.
    let keys = server.command(&["KEYS", "*"]).unwrap();
    let name = format!("taskonce-hint:{}", task("x").key);
    assert_eq!(server.command(&["EXISTS", &name]).unwrap().int(), Some(1), "{keys:?}");
    let left = Duration::from_millis(server.command(&["PTTL", &name]).unwrap().int().unwrap() as u64);
    assert!(left <= Duration::from_secs(24 * 3600), "{left:?}");

    // `trust_done` has no effect before a file, and that is said; the front's faults are none.
    let findings = b.examine().await;
    assert!(findings.iter().any(|found| found.text.contains("`trust_done` has no effect")), "{findings:?}");
    assert!(findings.iter().all(|found| found.level != Level::Fault), "{findings:?}");
    assert!(findings.iter().any(|found| found.subject == "front: version"), "{findings:?}");
}

const TASKS: u32 = 150;
const COPIES: u32 = 3;

/// The effect is written in the transaction that completes its task, and the front is flushed and stopped meanwhile. The
/// table of effects is only appended to, and has no unique index.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effect_of_a_transaction_happens_once_whatever_becomes_of_the_front() {
    let (server, folder) = (RedisServer::start(&[]).unwrap(), tempfile::tempdir().unwrap());
    let file = folder.path().join("tasks.db");
    let url = format!("sqlite:{}?front={}&trust_done=yes&timeout=20s", file.display(), server.url());
    let ledgers = [open(&url).unwrap(), open(&url).unwrap()];
    let beside = Connection::open(&file).unwrap();
    beside.execute_batch("CREATE TABLE effect (id INTEGER NOT NULL)").unwrap();
    let queue: Arc<Mutex<VecDeque<u32>>> = Arc::new(Mutex::new((0..COPIES).flat_map(|_| 0..TASKS).collect()));
    let left = Arc::new(AtomicU32::new(TASKS * COPIES));
    let mut workers = JoinSet::new();
    for worker in 0..6 {
        let (ledger, queue, left) = (ledgers[worker % 2].clone(), Arc::clone(&queue), Arc::clone(&left));
        workers.spawn(async move {
            while left.load(Ordering::SeqCst) > 0 {
                let next = queue.lock().unwrap().pop_front();
                let Some(id) = next else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let policy = Policy::new(Effect::Transactional);
                let outcome = ledger
                    .run_in_transaction(&task(&id.to_string()), &policy, move |tx, _context| {
                        tx.execute("INSERT INTO effect (id) VALUES (?1)", [id])?;
                        Ok::<_, Failure>(id)
                    })
                    .await
                    .unwrap();
                match outcome {
                    Outcome::Busy(_) => queue.lock().unwrap().push_back(id),
                    outcome => {
                        assert_eq!(outcome.into_value(), Some(id));
                        left.fetch_sub(1, Ordering::SeqCst);
                    }
                }
            }
        });
    }
    let at = |share: u32| TASKS * COPIES - TASKS * COPIES * share / 10;
    let mut done = 0;
    while left.load(Ordering::SeqCst) > 0 {
        if left.load(Ordering::SeqCst) < at(done + 1) && done < 9 {
            done += 1;
            match done {
                4 => server.stop().unwrap(),
                6 => server.cont().unwrap(),
                _ if server.answers() => drop(server.command(&["FLUSHALL"]).unwrap()),
                _ => {}
            }
        }
        // sleeps: between two looks at how far the workers are
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    workers.join_all().await;
    let mut counts = beside.prepare("SELECT id, count(*) FROM effect GROUP BY id ORDER BY id").unwrap();
    let counted = counts.query_map((), |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    let counted: Vec<(u32, u32)> = counted.map(Result::unwrap).collect();
    assert_eq!(counted, (0..TASKS).map(|id| (id, 1)).collect::<Vec<_>>());
}

/// The end is written past the store, and its duplicates need not wait for a third of the lease all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_transaction_completed_is_soon_replayed() {
    let (server, folder) = (RedisServer::start(&[]).unwrap(), tempfile::tempdir().unwrap());
    let url = format!("sqlite:{}?front={}&front_timeout=1s", folder.path().join("tasks.db").display(), server.url());
    let (a, b) = (open(&url).unwrap(), open(&url).unwrap());
    let policy = Policy::new(Effect::Transactional);
    let ran = a.run_in_transaction(&task("x"), &policy, |_tx, _context| Ok::<_, Failure>(7)).await.unwrap();
    assert!(matches!(ran, Outcome::Ran { value: 7, .. }));
    let start = Instant::now();
    while !matches!(b.claim(&task("x"), &policy).await.unwrap(), Admission::Replay(_)) {
        assert!(start.elapsed() < Duration::from_secs(5), "a third of the lease is 10 s");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Nothing of the front is needed: it may be away from the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_is_away_from_the_start_keeps_nothing_from_running() {
    let folder = tempfile::tempdir().unwrap();
    let port = taskonce_testkit::port::free().unwrap();
    let url = format!("sqlite:{}?front=redis://127.0.0.1:{port}", folder.path().join("tasks.db").display());
    let ledger = open(&url).unwrap();
    for id in ["a", "b", "c", "d", "e"] {
        let Admission::Run(one) = claim(&ledger, id).await else { panic!("it runs") };
        one.complete(Output::Nothing).await.unwrap();
        assert!(matches!(claim(&ledger, id).await, Admission::Replay(_)));
    }
    let findings = ledger.examine().await;
    let away = findings.iter().find(|found| found.subject == "fast check").unwrap();
    assert!(away.level == Level::Warning && away.text.contains("degraded"), "{away:?}");
}

#[test]
fn a_front_stands_before_a_store_that_keeps_and_is_no_file() {
    for url in [
        "redis://h?front=redis://h",
        "memory:?front=redis://h",
        "sqlite:a.db?front=sqlite:b.db",
        "sqlite:a.db?front=redis://h?x=y",
        "sqlite:a.db?trust_done=yes",
    ] {
        let error = open(url).err().unwrap_or_else(|| panic!("{url} is refused"));
        assert_eq!(error.kind(), ErrorKind::BadUrl, "{url}");
    }
    // A mistake in the front's URL makes no file.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tasks.db");
    open(&format!("sqlite:{}?front=redis://ada@h", file.display())).err().unwrap();
    assert!(!file.exists());
}
