//! Sixty-four tasks at once while their primary is killed: how long calls take, and how soon they work on its replica.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use taskonce::{Admission, Handler, Input, Ledger, Output, Settled};
use taskonce_testkit::resp::{Connection, Reply};
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisCluster, Sentinels};
use tokio::task::{JoinSet, block_in_place};

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::{self, Setup};

/// The store's default deadline for a call.
const DEADLINE: Duration = Duration::from_millis(500);
/// What the machine may add to it until the caller runs again.
const BEYOND: Duration = Duration::from_millis(20);
/// How soon calls work after the new primary takes writes.
const BACK: Duration = Duration::from_secs(1);
/// Callers at once.
const CALLERS: usize = 64;
/// A caller pauses so long between two tasks.
const PAUSE: Duration = Duration::from_millis(10);
/// For how long tasks run before the primary is killed.
const BEFORE: Duration = Duration::from_millis(500);
/// And after the new one takes writes.
const AFTER: Duration = Duration::from_millis(1_500);
/// How often the new primary is tried with a write.
const TRY_EVERY: Duration = Duration::from_millis(2);
/// How long a failover may take.
const FAILOVER_WAIT: Duration = Duration::from_secs(60);
/// An answer of the old primary may still lie in a buffer for so long after its death.
const LATE: Duration = Duration::from_millis(100);
/// How long a silent node of the Cluster lives in the others' eyes, in milliseconds.
const NODE_TIMEOUT: &str = "1000";

/// A stand whose primary can be killed.
enum Stand {
    Sentinel(Sentinels),
    Cluster(RedisCluster),
}

impl Stand {
    fn url(&self) -> String {
        match self {
            Stand::Sentinel(sentinels) => sentinels.url(),
            Stand::Cluster(cluster) => cluster.url(),
        }
    }

    /// What every id begins with: on a Cluster a tag that puts all keys into a slot of its first master.
    fn tag(&self) -> Result<String> {
        match self {
            Stand::Sentinel(_) => Ok("{all}".to_owned()),
            Stand::Cluster(cluster) => {
                for number in 0..1_000 {
                    let tag = format!("{{{number}}}");
                    if cluster.server_of(&tag)? == 0 {
                        return Ok(tag);
                    }
                }
                anyhow::bail!("the first master has no slots")
            }
        }
    }

    /// Kills the primary. Returns the address of the replica that will take its place.
    fn kill(&mut self) -> Result<std::net::SocketAddr> {
        match self {
            Stand::Sentinel(sentinels) => {
                let replica = sentinels.replica()?;
                sentinels.kill_primary()?;
                Ok(sentinels.server(replica).address())
            }
            Stand::Cluster(cluster) => {
                let replica = *cluster.replicas_of(0)?.first().context("no replica")?;
                cluster.kill(0);
                Ok(cluster.server(replica).address())
            }
        }
    }
}

/// The calls around a failover, through Sentinels and in a Cluster.
pub(crate) fn failover(setup: &Setup) -> Result<Vec<Figure>> {
    let rounds = setup.pick(1, 3);
    let mut figures = Vec::new();
    for name in ["Sentinels", "Cluster"] {
        let mut seen = Vec::new();
        for _ in 0..rounds {
            seen.push(setup::run(async move {
                let stand = block_in_place(|| match name {
                    "Cluster" => {
                        RedisCluster::start(3, 1, &["--cluster-node-timeout", NODE_TIMEOUT]).map(Stand::Cluster)
                    }
                    _ => Sentinels::start(&SentinelOptions::quick()).map(Stand::Sentinel),
                })?;
                one(stand).await
            })?);
        }
        let most = |of: fn(&Seen) -> Duration| seen.iter().map(of).max().unwrap_or_default();
        let calls: usize = seen.iter().map(|seen| seen.calls).sum();
        figures.push(Figure {
            name: format!("{name}, primary killed under {CALLERS} tasks: longest call"),
            unit: Unit::Nanos,
            ours: most(|seen| seen.longest).as_nanos() as f64,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost((DEADLINE + BEYOND).as_nanos() as f64),
            notes: vec![format!("{calls} calls, of {rounds} failovers; a call's deadline is {DEADLINE:?}")],
        });
        figures.push(Figure {
            name: format!("{name}, primary killed: works again after the new one does"),
            unit: Unit::Nanos,
            ours: most(|seen| seen.back).as_nanos() as f64,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(BACK.as_nanos() as f64),
            notes: vec![format!(
                "the slowest of {rounds}: from the first write that the new primary takes from another connection to the \
                 first task done; it took writes at most {:.1?} after the kill",
                most(|seen| seen.failover)
            )],
        });
    }
    Ok(figures)
}

/// What was seen around one failover.
struct Seen {
    longest: Duration,
    calls: usize,
    /// From the kill to the first write that the new primary took.
    failover: Duration,
    /// From there to the first task that was done.
    back: Duration,
}

/// What one caller did.
#[derive(Default)]
struct Called {
    longest: Duration,
    calls: usize,
    /// When tasks were done.
    done: Vec<Instant>,
}

async fn one(mut stand: Stand) -> Result<Seen> {
    let ledger = setup::ledger(&stand.url())?;
    let tag = block_in_place(|| stand.tag())?;
    let ended = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for number in 0..CALLERS {
        callers.spawn(call_on(ledger.clone(), format!("{tag}-{number}"), Arc::clone(&ended)));
    }
    tokio::time::sleep(BEFORE).await;
    let probe = format!("{tag}-probe");
    let (stand, killed, accepted) = tokio::task::spawn_blocking(move || {
        let replica = stand.kill()?;
        let killed = Instant::now();
        await_write(replica, &probe, killed)?;
        anyhow::Ok((stand, killed, Instant::now()))
    })
    .await??;
    tokio::time::sleep(AFTER).await;
    ended.store(true, Ordering::Relaxed);
    let mut all = Called::default();
    while let Some(caller) = callers.join_next().await {
        let Called { longest, calls, done } = caller??;
        all.longest = all.longest.max(longest);
        all.calls += calls;
        all.done.extend(done);
    }
    drop(stand);
    ensure!(all.done.iter().any(|done| *done < killed), "no task was done before the kill");
    let first = all.done.iter().filter(|done| **done > killed + LATE).min();
    let first =
        first.with_context(|| format!("no task was done within {AFTER:?} after the new primary took writes"))?;
    let back = first.saturating_duration_since(accepted);
    Ok(Seen { longest: all.longest, calls: all.calls, failover: accepted - killed, back })
}

/// Waits until a server takes a write.
fn await_write(server: std::net::SocketAddr, key: &str, start: Instant) -> Result<()> {
    // A server that becomes a primary cuts its connections.
    let takes =
        || matches!(Connection::open(server).and_then(|mut it| it.ask(&["SET", key, "x"])), Ok(Reply::Status(_)));
    while !takes() {
        ensure!(start.elapsed() < FAILOVER_WAIT, "no new primary within {FAILOVER_WAIT:?}");
        std::thread::sleep(TRY_EVERY);
    }
    Ok(())
}

/// Does one task after the other until told to end. A task that fails is left, and the next one begun.
async fn call_on(ledger: Ledger, beginning: String, ended: Arc<AtomicBool>) -> Result<Called> {
    let (handler, payload) = (Handler::within("bench", "failover", "1")?, Input::from_json(b"null")?);
    let policy = setup::policy();
    let mut called = Called::default();
    for number in 0_u64.. {
        if ended.load(Ordering::Relaxed) {
            break;
        }
        let task = handler.task(&format!("{beginning}-{number}"), &payload)?;
        let start = Instant::now();
        let admission = ledger.claim(&task, &policy).await;
        called.note(start);
        if let Ok(Admission::Run(claim)) = admission {
            let start = Instant::now();
            let settled = claim.complete(Output::Nothing).await;
            called.note(start);
            // A claim that the new primary never heard of is lost: that task runs again, with its next delivery.
            if matches!(settled, Ok(Settled::Recorded(_))) {
                called.done.push(Instant::now());
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(called)
}

impl Called {
    fn note(&mut self, start: Instant) {
        self.calls += 1;
        self.longest = self.longest.max(start.elapsed());
    }
}
