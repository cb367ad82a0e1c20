//! Two million tasks whose records are kept for five seconds: what is left of them, in Redis and in SQLite.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use taskonce::{Backoff, Filter, Ledger, Policy, Purged};
use taskonce_testkit::RedisServer;
use tokio::task::JoinSet;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::redis_memory::used;
use crate::setup::{self, Setup, run_once};

/// Tasks that run at once.
const AT_ONCE: usize = 64;
/// How long a record is kept.
const RETENTION: Duration = Duration::from_secs(5);
/// How often the SQLite store is purged.
const PURGE_EVERY: Duration = Duration::from_secs(1);
/// How often sizes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long after the last task everything may take to be gone: the retention, and the server's own pace.
const GONE_WAIT: Duration = Duration::from_secs(120);
/// What the server may keep of its memory: tables that it shrinks in its own time, buffers of connections.
const LEFT_MAX: f64 = (4 << 20) as f64;

fn policy() -> Policy {
    Policy {
        lease: RETENTION,
        retention: RETENTION,
        output_retention: RETENTION,
        backoff: Backoff::NONE,
        ..setup::policy()
    }
}

/// The tasks through each store.
pub(crate) fn soak(setup: &Setup) -> Result<Vec<Figure>> {
    let tasks = setup.pick(5_000, 2_000_000);
    let file = setup.sqlite_file();
    let mut figures = setup::run(redis(tasks))?;
    figures.extend(setup::run(async move { sqlite(&file, tasks).await })?);
    Ok(figures)
}

/// So many tasks, of which so many at once. `done` counts them.
async fn work(ledger: &Ledger, tasks: usize, done: &Arc<AtomicUsize>) -> Result<()> {
    let mut running = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (ledger, policy, done) = (ledger.clone(), policy(), Arc::clone(done));
        running.spawn(async move {
            while done.fetch_add(1, Ordering::Relaxed) < tasks {
                run_once(&ledger, &setup::tasks(1)?[0], &policy).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

async fn redis(tasks: usize) -> Result<Vec<Figure>> {
    let server = RedisServer::start(&[])?;
    let ledger = setup::ledger(&server.url())?;
    let done = Arc::new(AtomicUsize::new(0));
    // Connections and the script are there already; of what they need nothing is counted as left.
    work(&ledger, AT_ONCE, &done).await?;
    let gone = || until(GONE_WAIT, || Ok(keys(&server)? == 0));
    gone().await?;
    let (memory_before, began) = (used(&server)?, Instant::now());
    done.store(0, Ordering::Relaxed);
    let (mut keys_most, mut memory_most) = (0, 0.0_f64);
    let running = tokio::spawn({
        let (ledger, done) = (ledger.clone(), Arc::clone(&done));
        async move { work(&ledger, tasks, &done).await }
    });
    while !running.is_finished() {
        keys_most = keys_most.max(keys(&server)?);
        memory_most = memory_most.max(used(&server)?);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    running.await??;
    let (took, ended) = (began.elapsed(), Instant::now());
    gone().await?;
    let all_gone = ended.elapsed();
    // Tables shrink in steps after the last key has gone.
    let _returned = until(GONE_WAIT, || Ok(used(&server)? - memory_before <= LEFT_MAX)).await;
    let left = used(&server)? - memory_before;
    let rate = tasks as f64 / took.as_secs_f64() / 1e3;
    Ok(vec![
        Figure {
            name: format!("Redis, {} records of {RETENTION:?}: keys left", count(tasks)),
            unit: Unit::Count,
            ours: keys(&server)? as f64,
            floor: Some(0.0),
            judged: Judged::Ours,
            bound: Bound::AtMost(0.0),
            notes: vec![format!(
                "{rate:.1} k tasks a second, at most {keys_most} keys; none {all_gone:.1?} after the last completion"
            )],
        },
        Figure {
            name: format!("Redis, {} records of {RETENTION:?}: memory left", count(tasks)),
            unit: Unit::Bytes,
            ours: left.max(0.0),
            floor: Some(0.0),
            judged: Judged::Ours,
            bound: Bound::AtMost(LEFT_MAX),
            notes: vec![format!(
                "used_memory: {:.1} MB before, at most {:.1} MB, {:.1} MB after",
                memory_before / 1e6,
                memory_most / 1e6,
                (memory_before + left) / 1e6
            )],
        },
    ])
}

async fn sqlite(file: &Path, tasks: usize) -> Result<Vec<Figure>> {
    let ledger = setup::ledger(&setup::sqlite_url(file))?;
    let (done, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let began = Instant::now();
    let running = tokio::spawn({
        let (ledger, done) = (ledger.clone(), Arc::clone(&done));
        async move { work(&ledger, tasks, &done).await }
    });
    let purging = tokio::spawn({
        let (ledger, over) = (ledger.clone(), Arc::clone(&over));
        async move {
            let mut removed = 0;
            while !over.load(Ordering::Relaxed) {
                removed += purge(&ledger).await?;
                tokio::time::sleep(PURGE_EVERY).await;
            }
            anyhow::Ok(removed)
        }
    });
    // The first half fills the file with as much as is kept at once; the second must find its room there.
    let (mut first_half, mut second_half) = (0, 0);
    while !running.is_finished() {
        let size = size(file);
        if done.load(Ordering::Relaxed) < tasks / 2 {
            first_half = first_half.max(size);
        } else {
            second_half = second_half.max(size);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    running.await??;
    let took = began.elapsed();
    over.store(true, Ordering::Relaxed);
    let mut removed = purging.await??;
    let ended = Instant::now();
    while removed < tasks {
        ensure!(ended.elapsed() < GONE_WAIT, "{removed} of {tasks} records were purged within {GONE_WAIT:?}");
        tokio::time::sleep(LOOK_EVERY).await;
        removed += purge(&ledger).await?;
    }
    let left = ledger.walk(Filter::default()).next_page().await?.map_or(0, |page| page.len());
    let ratio = second_half as f64 / first_half.max(1) as f64;
    let rate = tasks as f64 / took.as_secs_f64() / 1e3;
    Ok(vec![
        Figure {
            name: format!("SQLite, {} records of {RETENTION:?}: the file, second half by first", count(tasks)),
            unit: Unit::Bytes,
            ours: second_half as f64,
            floor: Some(first_half as f64),
            judged: Judged::Ratio(ratio),
            bound: Bound::AtMost(1.25),
            notes: vec![format!(
                "file and write-ahead log at their largest; {rate:.1} k tasks a second, purged each second"
            )],
        },
        Figure {
            name: format!("SQLite, {} records of {RETENTION:?}: records left", count(tasks)),
            unit: Unit::Count,
            ours: left as f64,
            floor: Some(0.0),
            judged: Judged::Ours,
            bound: Bound::AtMost(0.0),
            notes: vec![format!("{removed} purged, the last {:.1?} after the last completion", ended.elapsed())],
        },
    ])
}

/// Batches until nothing is due.
async fn purge(ledger: &Ledger) -> Result<usize> {
    let mut removed = 0;
    loop {
        let batch = ledger.purge(&Filter::default()).await?;
        removed += batch.records;
        if batch == Purged::default() {
            return Ok(removed);
        }
    }
}

async fn until(at_most: Duration, mut reached: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !reached()? {
        ensure!(start.elapsed() < at_most, "not so within {at_most:?}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn keys(server: &RedisServer) -> Result<i64> {
    server.command(&["DBSIZE"])?.int().context("no DBSIZE")
}

/// The file with its write-ahead log.
fn size(file: &Path) -> u64 {
    let log = format!("{}-wal", file.display());
    [file, Path::new(&log)].iter().filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}

fn count(tasks: usize) -> String {
    if tasks >= 1_000_000 { format!("{} million", tasks / 1_000_000) } else { tasks.to_string() }
}
