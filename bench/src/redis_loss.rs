//! What Redis loses of what it acknowledged: under load something happens to the server, and then every task that was
//! acknowledged as done is asked for again.
//!
//! SIGKILL ends the process, not the machine: what the server had written and not synchronised survives in the system's
//! memory. So what a power cut takes is not measured here; `appendfsync` says how long it may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use taskonce::{Admission, Ledger, Output, Policy, Task};
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use tokio::task::JoinSet;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::{self, Setup};

/// Callers at once.
const CALLERS: usize = 64;
/// A caller that was refused asks again after this, as any caller with a backoff does.
const PAUSE: Duration = Duration::from_millis(10);
/// For how long a replica is parted from its primary before that dies.
const PARTED: Duration = Duration::from_millis(500);
/// How long a replica may take to follow.
const FOLLOWS: Duration = Duration::from_secs(30);
/// What a server with `appendfsync everysec` may hold back from its disk.
const EVERY_SECOND: Duration = Duration::from_secs(2);
/// The memory of the server that evicts.
const SMALL: &str = "8mb";

/// What happens to the server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    /// SIGKILL, and a start over the same files.
    Killed,
    /// Nothing but the load.
    Nothing,
    Flushed,
    /// SIGKILL of the primary, and its replica is promoted.
    FailedOver,
    /// The same, after the replica was cut off for a while.
    FailedOverLate,
}

/// One case.
struct Case {
    name: &'static str,
    args: &'static [&'static str],
    options: &'static str,
    event: Event,
    /// What may be lost of the time before; `None`: all of it.
    may_lose: Option<Duration>,
}

const CASES: &[Case] = &[
    Case { name: "SIGKILL, appendonly no", args: &[], options: "", event: Event::Killed, may_lose: None },
    Case {
        name: "SIGKILL, a snapshot each second",
        args: &["--save", "1", "1"],
        options: "",
        event: Event::Killed,
        may_lose: None,
    },
    Case {
        name: "SIGKILL, appendfsync no",
        args: &["--appendonly", "yes", "--appendfsync", "no"],
        options: "",
        event: Event::Killed,
        may_lose: Some(EVERY_SECOND),
    },
    Case {
        name: "SIGKILL, appendfsync everysec",
        args: &["--appendonly", "yes", "--appendfsync", "everysec"],
        options: "",
        event: Event::Killed,
        may_lose: Some(EVERY_SECOND),
    },
    Case {
        name: "SIGKILL, appendfsync always",
        args: &["--appendonly", "yes", "--appendfsync", "always"],
        options: "",
        event: Event::Killed,
        may_lose: Some(Duration::ZERO),
    },
    Case { name: "failover", args: &[], options: "", event: Event::FailedOver, may_lose: None },
    Case {
        name: "failover, wait_replicas=1",
        args: &[],
        options: "wait_replicas=1",
        event: Event::FailedOver,
        may_lose: Some(Duration::ZERO),
    },
    Case {
        name: "failover, replica cut off for 0.5 s",
        args: &[],
        options: "",
        event: Event::FailedOverLate,
        may_lose: None,
    },
    Case {
        name: "failover, replica cut off for 0.5 s, wait_replicas=1",
        args: &[],
        options: "wait_replicas=1",
        event: Event::FailedOverLate,
        may_lose: Some(Duration::ZERO),
    },
    Case {
        name: "eviction, 8 MB of allkeys-lru, accepted",
        args: &["--maxmemory", SMALL, "--maxmemory-policy", "allkeys-lru"],
        options: "eviction=accept",
        event: Event::Nothing,
        may_lose: None,
    },
    Case { name: "FLUSHALL", args: &[], options: "", event: Event::Flushed, may_lose: None },
];

/// The time before each event of which something acknowledged was lost.
pub(crate) fn loss(setup: &Setup) -> Result<Vec<Figure>> {
    let long = setup.pick(Duration::from_millis(400), Duration::from_secs(3));
    let mut figures = Vec::new();
    for case in CASES {
        figures.push(setup::run(run(case, long)).with_context(|| case.name.to_owned())?);
    }
    Ok(figures)
}

/// A task that was acknowledged as done, and when.
struct Acknowledged {
    task: Task,
    at: Instant,
}

async fn run(case: &Case, long: Duration) -> Result<Figure> {
    let mut primary = RedisServer::start(&[case.args, &["--repl-diskless-sync-delay", "0"]].concat())?;
    let mut replica = match case.event {
        Event::FailedOver | Event::FailedOverLate => Some(follow(&primary)?),
        Event::Killed | Event::Nothing | Event::Flushed => None,
    };
    let policy = setup::policy();
    let url = |server: &RedisServer, options: &str| format!("{}?{options}", server.url());
    let ledger = setup::ledger(&url(&primary, case.options))?;
    let ended = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    let begun = Instant::now();
    for _ in 0..CALLERS {
        callers.spawn(work(ledger.clone(), policy.clone(), Arc::clone(&ended)));
    }
    tokio::time::sleep(long).await;
    if let (Event::FailedOverLate, Some(replica)) = (case.event, &replica) {
        replica.stop()?;
        primary.command(&["CLIENT", "KILL", "TYPE", "replica"])?;
        tokio::time::sleep(PARTED).await;
    }
    match case.event {
        Event::Killed | Event::FailedOver | Event::FailedOverLate => primary.kill(),
        Event::Flushed => {
            primary.command(&["FLUSHALL"])?;
        }
        Event::Nothing => {}
    }
    let happened = Instant::now();
    ended.store(true, Ordering::Relaxed);
    let (mut acknowledged, mut refused) = (Vec::new(), 0);
    while let Some(caller) = callers.join_next().await {
        let (done, errors) = caller?;
        acknowledged.extend(done);
        refused += errors;
    }
    // What was acknowledged after a flush is not what the flush took.
    acknowledged.retain(|done| done.at <= happened);
    drop(ledger);
    let survivor = match &mut replica {
        Some(replica) => {
            replica.cont()?;
            replica.command(&["REPLICAOF", "NO", "ONE"])?;
            &*replica
        }
        None => {
            if primary.pid().is_none() {
                primary.restart()?;
            }
            &primary
        }
    };
    // What it holds is asked without waiting for anybody.
    let options = if case.options.starts_with("eviction") { case.options } else { "" };
    let lost = ask_again(&setup::ledger(&url(survivor, options))?, &policy, &acknowledged).await?;
    figure(case, &acknowledged, &lost, refused, (begun, happened))
}

/// A replica that follows a primary.
fn follow(primary: &RedisServer) -> Result<RedisServer> {
    let port = primary.port().to_string();
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port])?;
    let mut connection = primary.connect()?;
    let begun = Instant::now();
    // The first write may have been part of the copy that it began with.
    for write in ["1", "2"] {
        connection.ask(&["SET", "follows", write])?;
        while connection.ask(&["WAIT", "1", "1000"])? != Reply::Int(1) {
            ensure!(begun.elapsed() < FOLLOWS, "the replica does not follow its primary");
        }
    }
    Ok(replica)
}

/// Claims and completes tasks until told to end: what was acknowledged, and how many calls were not.
async fn work(ledger: Ledger, policy: Policy, ended: Arc<AtomicBool>) -> (Vec<Acknowledged>, u64) {
    let (mut acknowledged, mut refused) = (Vec::new(), 0);
    while !ended.load(Ordering::Relaxed) {
        let Ok(mut tasks) = setup::tasks(1) else { break };
        let task = tasks.swap_remove(0);
        let done = match ledger.claim(&task, &policy).await {
            Ok(Admission::Run(claim)) => claim.complete(Output::Nothing).await.is_ok(),
            Ok(_) | Err(_) => false,
        };
        if done {
            acknowledged.push(Acknowledged { task, at: Instant::now() });
        } else {
            refused += 1;
            tokio::time::sleep(PAUSE).await;
        }
    }
    (acknowledged, refused)
}

/// Asks for every task once more: when those were acknowledged that are not answered as done, and so would run again.
async fn ask_again(ledger: &Ledger, policy: &Policy, acknowledged: &[Acknowledged]) -> Result<Vec<Instant>> {
    let mut lost = Vec::new();
    for done in acknowledged.chunks(CALLERS) {
        let mut asked = JoinSet::new();
        for Acknowledged { task, at } in done {
            let (ledger, policy, task, at) = (ledger.clone(), policy.clone(), task.clone(), *at);
            asked.spawn(async move {
                match ledger.claim(&task, &policy).await? {
                    Admission::Replay(_) => Ok(None),
                    // It runs again, now or when the lease of a claim without its end has passed.
                    Admission::Run(_) | Admission::Busy(_) | Admission::Waiting(_) => Ok(Some(at)),
                    other => bail!("a done task was answered with {other:?}"),
                }
            });
        }
        while let Some(answer) = asked.join_next().await {
            lost.extend(answer??);
        }
    }
    Ok(lost)
}

fn figure(
    case: &Case,
    acknowledged: &[Acknowledged],
    lost: &[Instant],
    refused: u64,
    (begun, happened): (Instant, Instant),
) -> Result<Figure> {
    let first = lost.iter().min().copied();
    let window = first.map_or(Duration::ZERO, |first| happened.saturating_duration_since(first));
    ensure!(!acknowledged.is_empty(), "nothing was acknowledged");
    let took = happened.duration_since(begun);
    let mut notes = vec![format!(
        "{} tasks acknowledged as done in {:.1} s, {} of them forgotten: asked for again, they run again",
        acknowledged.len(),
        took.as_secs_f64(),
        lost.len()
    )];
    if refused > 0 {
        notes.push(format!("{refused} calls were answered with an error, and count as nothing"));
    }
    Ok(Figure {
        name: format!("Redis loses, {}", case.name),
        unit: Unit::Nanos,
        ours: window.as_nanos() as f64,
        floor: None,
        judged: Judged::Ours,
        bound: Bound::AtMost(case.may_lose.unwrap_or(took).as_nanos() as f64),
        notes,
    })
}
