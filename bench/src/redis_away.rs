//! Calls while Redis is down (SIGKILL) or stopped (SIGSTOP): how long they take, and how soon they work again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use taskonce::{Ledger, Policy};
use taskonce_testkit::RedisServer;
use tokio::task::JoinSet;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::quantile;
use crate::setup::{self, Setup, run_once};

/// The store's default deadline for a call.
const DEADLINE: Duration = Duration::from_millis(500);
/// What a call may take beyond it.
const BEYOND: Duration = Duration::from_millis(20);
/// How soon calls work again after the server's return.
const BACK: Duration = Duration::from_millis(100);
/// Callers at once while the server is away.
const CALLERS: usize = 64;
/// A caller that was refused asks again after this, as any caller with a backoff does.
const PAUSE: Duration = Duration::from_millis(10);
/// Around the server's return a call starts every so often.
const PROBE_EVERY: Duration = Duration::from_millis(2);
/// For how long before the return, and after it.
const PROBE_BEFORE: Duration = Duration::from_millis(100);
const PROBE_AFTER: Duration = Duration::from_millis(600);

/// How the server is away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Away {
    Stopped,
    Down,
}

/// The calls while the server is stopped and while it is down, each with the time until calls work again.
pub(crate) fn away(setup: &Setup) -> Result<Vec<Figure>> {
    let (rounds, long) = (setup.pick(1, 4), setup.pick(Duration::from_millis(1_200), Duration::from_secs(3)));
    let mut figures = Vec::new();
    for (away, how) in [(Away::Stopped, "stopped (SIGSTOP)"), (Away::Down, "down (SIGKILL)")] {
        let (mut calls, mut back) = setup::run(async move {
            let (mut calls, mut back) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                // A server and a ledger of its own: nothing is left over from the round before.
                let (more, returned) = one(away, long).await?;
                calls.extend(more);
                back.push(returned);
            }
            Ok((calls, back))
        })?;
        let p999 = quantile(&mut calls, 0.999);
        let (p50, worst) = (quantile(&mut calls, 0.5) / 1e6, quantile(&mut calls, 1.0) / 1e6);
        back.sort_by_key(|back| back.after);
        let Some(slowest) = back.pop() else { continue };
        figures.push(Figure {
            name: format!("Redis {how}: a call, p99.9"),
            unit: Unit::Nanos,
            ours: p999,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost((DEADLINE + BEYOND).as_nanos() as f64),
            notes: vec![format!("{} calls of {CALLERS} callers; p50 {p50:.1} ms, worst {worst:.1} ms", calls.len())],
        });
        figures.push(Figure {
            name: format!("Redis {how}: works again after its return"),
            unit: Unit::Nanos,
            ours: slowest.after.as_nanos() as f64,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(BACK.as_nanos() as f64),
            notes: [
                Some(format!(
                    "the slowest of {rounds}; until the first success, and past the last call that was started and failed"
                )),
                slowest.last_failure,
            ]
            .into_iter()
            .flatten()
            .collect(),
        });
    }
    Ok(figures)
}

/// When calls worked again.
struct Back {
    /// After the server's return.
    after: Duration,
    /// The last call that was started after the return and failed.
    last_failure: Option<String>,
}

/// The calls that began and ended while the server was away, and when calls worked again.
async fn one(away: Away, long: Duration) -> Result<(Vec<Duration>, Back)> {
    let mut server = RedisServer::start(&[])?;
    let ledger = setup::ledger(&server.url())?;
    let policy = setup::policy();
    run_once(&ledger, &setup::tasks(1)?[0], &policy).await?;
    match away {
        Away::Stopped => server.stop()?,
        Away::Down => server.kill(),
    }
    let ended = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        callers.spawn(call_on(ledger.clone(), policy.clone(), Arc::clone(&ended)));
    }
    tokio::time::sleep(long).await;
    ended.store(true, Ordering::Relaxed);
    let mut calls = Vec::new();
    while let Some(caller) = callers.join_next().await {
        calls.extend(caller??);
    }

    let (told, returns) = tokio::sync::watch::channel(None);
    let probes = tokio::spawn(probe(ledger, policy, returns));
    tokio::time::sleep(PROBE_BEFORE).await;
    // Off the runtime: a restart waits for the server.
    let server = tokio::task::spawn_blocking(move || {
        match away {
            Away::Stopped => server.cont()?,
            Away::Down => server.restart()?,
        }
        told.send(Some(Instant::now())).context("the probes ended early")?;
        anyhow::Ok(server)
    })
    .await??;
    let back = probes.await??;
    drop(server);
    Ok((calls, back))
}

/// Calls until told to end. No call succeeds meanwhile.
async fn call_on(ledger: Ledger, policy: Policy, ended: Arc<AtomicBool>) -> Result<Vec<Duration>> {
    let mut calls = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        let task = &setup::tasks(1)?[0];
        let start = Instant::now();
        let answer = ledger.claim(task, &policy).await;
        calls.push(start.elapsed());
        anyhow::ensure!(answer.is_err(), "a claim was answered by a server that is away");
        tokio::time::sleep(PAUSE).await;
    }
    Ok(calls)
}

/// Starts a call every few milliseconds around the server's return, and says when calls worked again.
async fn probe(ledger: Ledger, policy: Policy, returns: tokio::sync::watch::Receiver<Option<Instant>>) -> Result<Back> {
    let mut probes = JoinSet::new();
    let mut every = tokio::time::interval(PROBE_EVERY);
    loop {
        every.tick().await;
        if returns.borrow().is_some_and(|returned| returned.elapsed() > PROBE_AFTER) {
            break;
        }
        let (ledger, policy, task) = (ledger.clone(), policy.clone(), setup::tasks(1)?.swap_remove(0));
        probes.spawn(async move {
            let start = Instant::now();
            let failure = run_once(&ledger, &task, &policy).await.err();
            (start, Instant::now(), failure)
        });
    }
    let returned = returns.borrow().context("the server did not return")?;
    let (mut first_success, mut last_failure) = (None::<Instant>, None::<(Instant, String)>);
    while let Some(ended) = probes.join_next().await {
        let (start, end, failure) = ended?;
        match failure {
            None if end >= returned => first_success = Some(first_success.map_or(end, |first| first.min(end))),
            Some(error) if start >= returned && last_failure.as_ref().is_none_or(|(last, _)| start > *last) => {
                let (after, took) = (start - returned, end - start);
                last_failure =
                    Some((start, format!("a call {after:.1?} after the return failed in {took:.1?}: {error:#}")));
            }
            None | Some(_) => {}
        }
    }
    let first_success = first_success.context("no call succeeded after the server's return")?;
    let works = last_failure.as_ref().map_or(first_success, |(start, _)| first_success.max(*start));
    Ok(Back { after: works - returned, last_failure: last_failure.map(|(_, text)| text) })
}
