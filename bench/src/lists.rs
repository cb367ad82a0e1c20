//! Listing tasks in rare states beside millions of done ones, on Redis and on SQLite.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rusqlite::Connection;
use taskonce::{Admission, Claim, Effect, Failure, Filter, Ledger, Policy, State, Task};
use taskonce_testkit::RedisServer;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::Rounds;
use crate::setup::run_once;
use crate::setup::{self, Setup};

/// The states that are listed.
const RARE: [State; 4] = [State::Running, State::Waiting, State::Dead, State::Parked];
/// Tasks in each of them; a list shows as many.
const EACH: usize = 100;
/// The lease of those that run: a heartbeat, from which on they are listed, comes within a third of it.
const LEASE: Duration = Duration::from_secs(3);
/// The longest that is waited for it.
const BEAT_WAIT: Duration = Duration::from_secs(60);
/// Copies of a record that one script makes.
const COPIES: usize = 10_000;
/// What a list may take.
const LIST_MAX: Duration = Duration::from_millis(100);
/// And by how much more than without done tasks.
const RATIO_MAX: f64 = 2.0;

/// Lists on Redis: the time of each state's list, with and without the done tasks.
pub(crate) fn redis(setup: &Setup) -> Result<Vec<Figure>> {
    let (done, rounds) = (setup.pick(20_000, 2_000_000), setup.pick(3, 25));
    setup::run(async move {
        let (full, empty) = (RedisServer::start(&[])?, RedisServer::start(&[])?);
        let (_held, sample) = fill(&full.url()).await?;
        let (_held_too, _) = fill(&empty.url()).await?;
        let name = format!("taskonce:{}", sample.key);
        let script = "local value, life = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]) \
                      for number = ARGV[1], ARGV[2] do redis.call('SET', KEYS[1] .. '-' .. number, value, 'PX', life) end";
        for start in (0..done).step_by(COPIES) {
            let end = (start + COPIES).min(done) - 1;
            // A copy is found under another key than its record names, and so is not one of the copied task.
            server_did(&full, &["EVAL", script, "1", &name, &start.to_string(), &end.to_string()])?;
        }
        let keys = full.command(&["DBSIZE"])?.int().context("no DBSIZE")?;
        ensure!(keys as usize >= done, "{keys} keys");
        figures("Redis", done, rounds, &full.url(), &empty.url()).await
    })
}

fn server_did(server: &RedisServer, words: &[&str]) -> Result<()> {
    match server.command(words)? {
        taskonce_testkit::resp::Reply::Error(text) => bail!("{}: {text}", words[0]),
        _ => Ok(()),
    }
}

/// The same on SQLite.
pub(crate) fn sqlite(setup: &Setup) -> Result<Vec<Figure>> {
    let (done, rounds) = (setup.pick(20_000, 2_000_000), setup.pick(3, 25));
    let (full, empty) = (setup.sqlite_file(), setup.sqlite_file());
    setup::run(async move {
        let (full_url, empty_url) = (setup::sqlite_url(&full), setup::sqlite_url(&empty));
        let (_held, sample) = fill(&full_url).await?;
        let (_held_too, _) = fill(&empty_url).await?;
        let connection = Connection::open(&full)?;
        connection.busy_timeout(BEAT_WAIT)?;
        for start in (0..done).step_by(COPIES) {
            // In steps, so that heartbeats come between them.
            let end = (start + COPIES).min(done);
            connection.execute(
                "WITH RECURSIVE number(at) AS (SELECT ?2 UNION ALL SELECT at + 1 FROM number WHERE at + 1 < ?3)
                 INSERT INTO task (key, state, written_at, expires_at, output_until, body)
                 SELECT key || '-' || at, state, written_at, expires_at, output_until, body FROM task, number
                 WHERE key = ?1",
                rusqlite::params![sample.key.as_str(), start as i64, end as i64],
            )?;
        }
        figures("SQLite", done, rounds, &full_url, &empty_url).await
    })
}

/// Makes tasks in each rare state, and one that is done.
async fn fill(url: &str) -> Result<(Vec<Claim>, Task)> {
    let ledger = setup::ledger(url)?;
    let policy = Policy { lease: LEASE, ..setup::policy() };
    let once = Policy { store_may_forget: true, effect: Effect::Unrepeatable, ..policy.clone() };
    let mut held = Vec::new();
    for state in RARE {
        for task in setup::tasks(EACH)? {
            let policy = if state == State::Parked { &once } else { &policy };
            let claim = match ledger.claim(&task, policy).await? {
                Admission::Run(claim) => claim,
                other => bail!("not fresh: {other:?}"),
            };
            let failure = match state {
                State::Running => {
                    held.push(claim);
                    continue;
                }
                State::Dead => Failure::permanent("refused by the provider"),
                State::Waiting | State::Parked | State::Done => Failure::retryable("timed out"),
            };
            claim.fail(failure).await.map_err(taskonce::Unsettled::into_error)?;
        }
    }
    let sample = setup::tasks(1)?.remove(0);
    run_once(&ledger, &sample, &policy).await?;
    let start = Instant::now();
    while list(&ledger, State::Running).await? < EACH {
        ensure!(start.elapsed() < BEAT_WAIT, "not all that run are listed within {BEAT_WAIT:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok((held, sample))
}

/// How many tasks a list of one state shows.
async fn list(ledger: &Ledger, state: State) -> Result<usize> {
    let mut walk = ledger.walk(Filter { states: vec![state], page_max: EACH, ..Filter::default() }.listed());
    let mut count = 0;
    while count < EACH {
        let Some(rows) = walk.next_page().await? else { break };
        for row in &rows {
            ensure!(row.found.as_ref().is_ok_and(|found| found.record.state == state), "`{}` is not {state}", row.key);
        }
        count += rows.len();
    }
    Ok(count)
}

/// How long a list takes from opening the store on, as on a command line.
async fn time_of_list(url: &str, state: State) -> Result<f64> {
    let start = Instant::now();
    let count = list(&setup::ledger(url)?, state).await?;
    ensure!(count == EACH, "{count} tasks are listed as {state}");
    Ok(start.elapsed().as_nanos() as f64)
}

async fn figures(store: &str, done: usize, round_count: usize, full: &str, empty: &str) -> Result<Vec<Figure>> {
    let (mut figures, mut all) = (Vec::new(), [Vec::new(), Vec::new()]);
    for state in RARE {
        let mut rounds = Rounds::new(2);
        for round in 0..round_count {
            for side in rounds.order(round) {
                let nanos = time_of_list(if side == 0 { full } else { empty }, state).await?;
                rounds.push(side, nanos);
                all[side].push(nanos);
            }
        }
        figures.push(Figure {
            name: format!("{store}, list of {EACH} {state} tasks beside {} done", shown(done)),
            unit: Unit::Nanos,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtMost(RATIO_MAX),
            notes: vec![format!("{}; floor: the same without the done", rounds.spread())],
        });
    }
    let [ours, floor] = all.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[all.len() - 1]
    });
    figures.push(Figure {
        name: format!("{store}, the slowest of these lists"),
        unit: Unit::Nanos,
        ours,
        floor: Some(floor),
        judged: Judged::Ours,
        bound: Bound::AtMost(LIST_MAX.as_nanos() as f64),
        notes: vec![format!("with opening the store; {} lists", RARE.len() * round_count)],
    });
    Ok(figures)
}

fn shown(count: usize) -> String {
    if count < 1_000_000 { format!("{} k", count / 1000) } else { format!("{} M", count / 1_000_000) }
}
