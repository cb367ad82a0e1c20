//! SQLite: tasks a second of 64 at once, and how long a duplicate takes.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rusqlite::{Connection, params};
use taskonce::{Admission, Ledger, Policy};

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::Rounds;
use crate::setup::{self, Setup, run_once};

/// Tasks that run at once.
const AT_ONCE: usize = 64;
/// Done tasks among which duplicates are looked up.
const KNOWN: usize = 1_000;

/// A bare connection as the floors use it: WAL, and every commit on the disk.
pub(crate) fn bare(file: &Path) -> Result<Connection> {
    let bare = Connection::open(file)?;
    let mode: String = bare.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    ensure!(mode == "wal", "the journal mode is {mode}");
    bare.execute_batch(
        "PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS bare (key TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID;",
    )?;
    Ok(bare)
}

/// A bare pair: two writes, each its own commit.
pub(crate) const BARE_CLAIM: &str = "INSERT INTO bare (key, body) VALUES (?1, ?2) ON CONFLICT DO NOTHING";
pub(crate) const BARE_COMPLETE: &str = "UPDATE bare SET body = ?2 WHERE key = ?1";

/// 64 tasks at once: writes a second, beside one bare commit per write. In the same folder, each in a file of its own.
pub(crate) fn rate(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, each, bare_writes) = (setup.pick(2, 11), setup.pick(5, 60), setup.pick(50, 800));
    let (file, bare_file) = (setup.sqlite_file(), setup.sqlite_file());
    setup::run(async move {
        let ledger = setup::ledger(&setup::sqlite_url(&file))?;
        let policy = setup::policy();
        let first = &setup::tasks(1)?[0];
        run_once(&ledger, first, &policy).await?;
        let found = ledger.show(&first.key).await?.context("no record")?;
        let body = vec![b'x'; taskonce::store::codec::encode(&found.record).len()];
        let bare = bare(&bare_file)?;
        let mut rounds = Rounds::new(2);
        for round in 0..round_count {
            for side in rounds.order(round) {
                let rate = if side == 0 {
                    let elapsed = at_once(&ledger, &policy, each).await?;
                    // A claim and a completion: two writes a task.
                    (AT_ONCE * each * 2) as f64 / elapsed.as_secs_f64()
                } else {
                    bare_rate(&bare, bare_writes, &body)?
                };
                rounds.push(side, rate);
            }
        }
        Ok(vec![Figure {
            name: format!("SQLite FULL, {AT_ONCE} tasks at once: writes per second"),
            unit: Unit::PerSecond,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtLeast(4.0),
            notes: vec![
                format!("a fresh claim + complete is two writes; records of {} bytes", body.len()),
                rounds.spread(),
            ],
        }])
    })
}

async fn at_once(ledger: &Ledger, policy: &Policy, each: usize) -> Result<Duration> {
    let work = (0..AT_ONCE).map(|_| setup::tasks(each)).collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    let running: Vec<_> = work
        .into_iter()
        .map(|tasks| {
            let (ledger, policy) = (ledger.clone(), policy.clone());
            tokio::spawn(async move {
                for task in &tasks {
                    run_once(&ledger, task, &policy).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for task in running {
        task.await??;
    }
    Ok(start.elapsed())
}

fn bare_rate(bare: &Connection, writes: usize, body: &[u8]) -> Result<f64> {
    let tasks = setup::tasks(writes / 2)?;
    let (mut claim, mut complete) = (bare.prepare(BARE_CLAIM)?, bare.prepare(BARE_COMPLETE)?);
    let start = Instant::now();
    for task in &tasks {
        claim.execute(params![task.key.as_str(), body])?;
        complete.execute(params![task.key.as_str(), body])?;
    }
    Ok((tasks.len() * 2) as f64 / start.elapsed().as_secs_f64())
}

/// A duplicate of a done task, key prepared, beside a bare prepared `SELECT` of the same row; both in the caller's thread.
pub(crate) fn duplicate(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, turns) = (setup.pick(3, 101), setup.pick(1, 3));
    let file = setup.sqlite_file();
    setup::run(async move {
        let ledger = setup::ledger(&setup::sqlite_url(&file))?;
        let policy = setup::policy();
        let tasks = setup::tasks(KNOWN)?;
        for some in tasks.chunks(AT_ONCE) {
            let mut running = tokio::task::JoinSet::new();
            for task in some {
                let (ledger, policy, task) = (ledger.clone(), policy.clone(), task.clone());
                running.spawn(async move { run_once(&ledger, &task, &policy).await });
            }
            while let Some(ended) = running.join_next().await {
                ended??;
            }
        }
        let bare = Connection::open(&file)?;
        let mut rounds = Rounds::new(2);
        for round in 0..round_count {
            for side in rounds.order(round) {
                let nanos = if side == 0 {
                    let start = Instant::now();
                    for task in tasks.iter().cycle().take(KNOWN * turns) {
                        let admission = ledger.claim(black_box(task), &policy).await?;
                        ensure!(matches!(black_box(admission), Admission::Replay(_)), "not a duplicate");
                    }
                    start.elapsed().as_nanos()
                } else {
                    bare_reads(&bare, &tasks, turns)?.as_nanos()
                };
                rounds.push(side, nanos as f64 / (KNOWN * turns) as f64);
            }
        }
        Ok(vec![Figure {
            name: "SQLite duplicate of a done task, p50".into(),
            unit: Unit::Nanos,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtMost(2.0),
            notes: vec![format!("medians of rounds of {} calls each, key prepared", KNOWN * turns), rounds.spread()],
        }])
    })
}

fn bare_reads(bare: &Connection, tasks: &[taskonce::Task], turns: usize) -> Result<Duration> {
    let mut select = bare.prepare("SELECT written_at, body FROM task WHERE key = ?1")?;
    let start = Instant::now();
    for task in tasks.iter().cycle().take(tasks.len() * turns) {
        let row: (i64, Vec<u8>) =
            select.query_row([black_box(task.key.as_str())], |row| Ok((row.get(0)?, row.get(1)?)))?;
        black_box(row);
    }
    Ok(start.elapsed())
}
