//! Waiting for another's run: what a thousand who wait ask of Redis, and how soon they go on after its end.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::time::{ClockId, clock_gettime};
use taskonce::{Admission, Handler, Input, Ledger, Outcome, Output, Run, Task, Unsettled};
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::child::Child;
use crate::figure::{Bound, Figure, Judged, Unit};
use crate::idle::commands;
use crate::measure::quantile;
use crate::setup::{self, Setup};

/// How many wait in all.
const WAITERS: usize = 1000;
/// How soon they must go on after the end.
const WAKE_MAX: Duration = Duration::from_millis(100);
/// With more processes than this, most of what is measured is how long they wait for one of few processors: shown beside
/// the floor, which waits for them too.
const PROCESSES_JUDGED_MAX: usize = 10;
/// How long they wait at most.
const WAIT_MAX: Duration = Duration::from_secs(600);
/// When nothing was asked of the server for so long, all who wait have begun to.
const QUIET: Duration = Duration::from_millis(500);
/// How often is looked whether it is so.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The floor's key and channel.
const BARE: &str = "bareonce:waited-for";
/// The floor: the values before and after the end.
const BARE_STATES: [&str; 2] = ["running", "done"];

/// Who waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    /// Pub/sub by hand: one subscription a process, a `GET` when a message comes, all who wait told.
    Bare,
}

/// Commands for each who waits, and how soon they go on, in one process and in many.
pub(crate) fn wait(setup: &Setup) -> Result<Vec<Figure>> {
    let (long, rounds) = (setup.pick(Duration::from_secs(1), Duration::from_secs(36)), setup.pick(1, 3));
    let mut figures = Vec::new();
    for processes in [1, setup.pick(5, 10), setup.pick(6, 100)] {
        let (mut rates, mut ours, mut floor) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let round = Round::new(processes, long / rounds)?;
            rates.push(round.ours(&mut ours)?);
            round.bare(&mut floor)?;
        }
        let share = format!("{WAITERS} who wait in {processes} process(es)");
        figures.push(Figure {
            name: format!("Redis: {share}, commands/s each"),
            unit: Unit::Count,
            ours: rates.iter().copied().fold(0.0, f64::max),
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(1.0),
            notes: vec![format!(
                "the most of {rounds} rounds, in {:?} each, heartbeats among them; polling every 250 ms: {:.2}",
                long / rounds,
                4.0 * processes as f64 / WAITERS as f64
            )],
        });
        figures.push(Figure {
            name: format!("Redis: {share}, go on, p99"),
            unit: Unit::Nanos,
            ours: quantile(&mut ours, 0.99),
            floor: Some(quantile(&mut floor, 0.99)),
            judged: Judged::Ours,
            bound: if processes > PROCESSES_JUDGED_MAX {
                Bound::Shown
            } else {
                Bound::AtMost(WAKE_MAX.as_nanos() as f64)
            },
            notes: vec![format!(
                "from the sending of the completion; p50 {:.1} ms, worst {:.1} ms; the floor is pub/sub by hand",
                quantile(&mut ours, 0.5) / 1e6,
                quantile(&mut ours, 1.0) / 1e6
            )],
        });
    }
    Ok(figures)
}

/// A server of its own, and who waits.
struct Round {
    server: RedisServer,
    processes: usize,
    long: Duration,
}

impl Round {
    fn new(processes: usize, long: Duration) -> Result<Round> {
        Ok(Round { server: RedisServer::start(&[])?, processes, long })
    }

    fn children(&self, side: Side) -> Result<Vec<Child>> {
        let work = match side {
            Side::Ours => "redis-wait",
            Side::Bare => "redis-wait-bare",
        };
        let waiters = (WAITERS / self.processes).to_string();
        let start = |_| Child::start(&[work, &self.server.url(), &waiters]);
        let children: Vec<Child> = (0..self.processes).map(start).collect::<Result<_>>()?;
        let mut quiet_since = now();
        let mut last = commands(&self.server)?;
        while now().saturating_sub(quiet_since) < QUIET {
            std::thread::sleep(LOOK_EVERY);
            let asked = commands(&self.server)?;
            if asked != last {
                (last, quiet_since) = (asked, now());
            }
        }
        Ok(children)
    }

    /// Has them wait for a run. Commands a second of each who waits; how soon each went on is added to `after`.
    fn ours(&self, after: &mut Vec<Duration>) -> Result<f64> {
        let runtime = setup::runtime()?;
        let (ledger, policy) = (setup::ledger(&self.server.url())?, setup::policy());
        let Admission::Run(claim) = runtime.block_on(ledger.claim(&task()?, &policy))? else { bail!("not fresh") };
        let children = self.children(Side::Ours)?;
        let before = commands(&self.server)?;
        std::thread::sleep(self.long);
        let asked = commands(&self.server)? - before;
        let sent = now();
        runtime.block_on(claim.complete(Output::Nothing)).map_err(Unsettled::into_error)?;
        reports(children, sent, after)?;
        Ok(asked as f64 / self.long.as_secs_f64() / WAITERS as f64)
    }

    fn bare(&self, after: &mut Vec<Duration>) -> Result<()> {
        let [running, done] = BARE_STATES;
        let mut connection = self.server.connect()?;
        connection.ask(&["SET", BARE, running])?;
        let children = self.children(Side::Bare)?;
        let sent = now();
        connection.ask(&["SET", BARE, done])?;
        let heard = connection.ask(&["PUBLISH", BARE, "ended"])?;
        ensure!(heard == Reply::Int(i64::try_from(self.processes)?), "not all have subscribed: {heard:?}");
        reports(children, sent, after)
    }
}

/// When each went on who waited in these processes.
fn reports(mut children: Vec<Child>, sent: Duration, after: &mut Vec<Duration>) -> Result<()> {
    // They wait already; this asks for their report.
    for child in &mut children {
        child.begin()?;
    }
    for child in children {
        let moments: Vec<u64> = serde_json::from_str(&child.report()?)?;
        for moment in moments {
            let moment = Duration::from_nanos(moment);
            ensure!(moment > sent, "one went on before the end");
            after.push(moment - sent);
        }
    }
    Ok(())
}

/// The task that is waited for.
fn task() -> Result<Task> {
    Ok(Handler::within("bench", "charge", "1")?.task("waited-for", &Input::from_json(b"null")?)?)
}

/// The clock that all processes of a machine share.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn nanos() -> u64 {
    u64::try_from(now().as_nanos()).unwrap_or(u64::MAX)
}

/// The work of a child: waits, and reports when each went on. `await_begin` is called when all wait.
pub(crate) fn child(url: &str, waiters: usize, await_begin: impl FnOnce() -> Result<()>) -> Result<Vec<u64>> {
    setup::runtime()?.block_on(async {
        let ledger = setup::ledger(url)?;
        let mut waiting = JoinSet::new();
        for _ in 0..waiters {
            let (ledger, task): (Ledger, Task) = (ledger.clone(), task()?);
            waiting.spawn(async move {
                let handler = |_| async { Ok(()) };
                let outcome = ledger.run_or_wait(&task, &setup::policy(), WAIT_MAX, handler).await?;
                ensure!(matches!(outcome, Outcome::Replayed(_)), "a waiter was told `{}`", outcome.name());
                Ok(nanos())
            });
        }
        tokio::task::block_in_place(await_begin)?;
        waiting.join_all().await.into_iter().collect()
    })
}

/// The same over pub/sub by hand.
pub(crate) fn bare_child(url: &str, waiters: usize, await_begin: impl FnOnce() -> Result<()>) -> Result<Vec<u64>> {
    let address = url.strip_prefix("redis://").context("a URL without a password")?;
    setup::runtime()?.block_on(async {
        let (told, tell) = watch::channel(false);
        let mut waiting = JoinSet::new();
        for _ in 0..waiters {
            let mut tell = tell.clone();
            waiting.spawn(async move {
                tell.wait_for(|told| *told).await?;
                anyhow::Ok(nanos())
            });
        }
        let (mut calls, mut channel) = (TcpStream::connect(address).await?, TcpStream::connect(address).await?);
        calls.set_nodelay(true)?;
        ask(&mut channel, &["SUBSCRIBE", BARE], "subscribe").await?;
        let [running, done] = BARE_STATES;
        // What is published before the subscription is seen here.
        ask(&mut calls, &["GET", BARE], running).await?;
        let listening = tokio::spawn(async move {
            ask(&mut channel, &[], "ended").await?;
            ask(&mut calls, &["GET", BARE], done).await?;
            told.send(true)?;
            anyhow::Ok(())
        });
        tokio::task::block_in_place(await_begin)?;
        listening.await??;
        waiting.join_all().await.into_iter().collect()
    })
}

/// Sends a command, if there is one, and reads until an answer comes with this word in it.
async fn ask(stream: &mut TcpStream, words: &[&str], wanted: &str) -> Result<()> {
    if !words.is_empty() {
        stream.write_all(&taskonce_testkit::resp::request(words)).await?;
    }
    let mut answer = Vec::new();
    while !String::from_utf8_lossy(&answer).contains(wanted) {
        ensure!(stream.read_buf(&mut answer).await? > 0, "the server closed the connection");
    }
    Ok(())
}
