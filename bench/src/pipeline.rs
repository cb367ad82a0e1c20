//! The pipeline: what the ledger costs a worker, what an idle one costs, and how soon the task of a killed one runs again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde::de::IgnoredAny;
use taskonce::routes::Routes;
use taskonce::source::{self, Depth, Entrance, Envelope, Sent, Source};
use taskonce::store::record::{Fence, Found, Record};
use taskonce::store::{Expected, Generation, Ground, Next, Purged, Swap};
use taskonce::worker::Worker;
use taskonce::{Cursor, Filter, Finding, Heart, Host, Key, Ledger, Memory, Store, SystemHost};
use taskonce_testkit::RedisServer;
use tokio::task::JoinSet;

use crate::child::{Child, processor_time};
use crate::figure::{Bound, Figure, Judged, Unit};
use crate::idle::commands;
use crate::measure::{Rounds, quantile};
use crate::setup::{self, Setup};

const HANDLER: &str = "empty@1";
/// Sends that are under way at once while a queue is filled.
const SENDS_AT_ONCE: usize = 256;
/// Tasks that run at once.
const AT_ONCE: usize = 64;
/// How long a queue is waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between two looks at whether a worker is through.
const LOOK: Duration = Duration::from_millis(1);

/// How a bench's tasks are treated.
fn routes(lease: &str) -> Result<Routes> {
    let text = format!(
        "[sources.queue]\n[handlers.\"{HANDLER}\"]\neffect = \"keyed\"\nlease = \"{lease}\"\nconcurrency_max = {AT_ONCE}\n\
         [routes.queue.\"{HANDLER}\"]\n"
    );
    Ok(Routes::from_toml(&text)?)
}

/// A store that keeps nothing: under it a worker does all that it does but remembering.
struct NoStore;

#[async_trait]
impl Store for NoStore {
    async fn load(&self, _key: &Key) -> taskonce::Result<Option<Found>> {
        Ok(None)
    }

    async fn swap(&self, _key: &Key, _expected: Expected<'_>, _next: Next<'_>) -> taskonce::Result<Swap> {
        Ok(Swap::Stored(Fence(1)))
    }

    async fn scan(&self, _filter: &Filter, _cursor: Option<Cursor>) -> taskonce::Result<taskonce::store::Page> {
        Ok(taskonce::store::Page::default())
    }

    async fn purge(&self, _filter: &Filter) -> taskonce::Result<Purged> {
        Ok(Purged::default())
    }

    async fn discard(&self, _key: &Key) -> taskonce::Result<bool> {
        Ok(false)
    }

    async fn changed(&self, _key: &Key, _seen: &Record) -> taskonce::Result<bool> {
        Ok(false)
    }

    fn told(&self, _key: &Key, _end: &Arc<Record>) {}

    async fn examine(&self) -> Vec<Finding> {
        Vec::new()
    }

    fn memory(&self) -> Memory {
        Memory::Keeps
    }

    fn ground(&self) -> Option<Ground> {
        None
    }

    async fn generation(&self) -> taskonce::Result<Option<Generation>> {
        Ok(None)
    }
}

/// A ledger without a memory.
fn no_ledger() -> Ledger {
    let (store, host): (Arc<dyn Store>, Arc<dyn Host>) = (Arc::new(NoStore), Arc::new(SystemHost::new()));
    let heart = Heart::new(Arc::clone(&store), Arc::clone(&host));
    Ledger::new(store, host, Arc::new(heart))
}

/// Queues so many tasks, the keys of which nobody has seen.
async fn fill(queue: &Arc<dyn Source>, count: usize) -> Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut sends = JoinSet::new();
    for _ in 0..count {
        if sends.len() == SENDS_AT_ONCE {
            sends.join_next().await.context("a send is under way")???;
        }
        let queue = Arc::clone(queue);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        sends.spawn(async move {
            let task = Envelope { key: Some(format!("default/{HANDLER}/{number}")), ..Envelope::new(HANDLER, "null") };
            let sent = queue.send(&task, Duration::ZERO, Entrance::Open).await?;
            ensure!(matches!(sent, Sent::Accepted(_)), "a new task was queued before");
            Ok(())
        });
    }
    while let Some(sent) = sends.join_next().await {
        sent??;
    }
    Ok(())
}

/// Works off so many tasks: how many a second, from the start of the worker until nothing is left in the queue.
async fn work_off(ledger: &Ledger, queue: &Arc<dyn Source>, count: usize) -> Result<f64> {
    fill(queue, count).await?;
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ran);
    let worker = Worker::builder(ledger.clone(), routes("30s")?)
        .source(Arc::clone(queue))
        .concurrency_max(AT_ONCE)
        .handler(HANDLER, move |_context, _payload: IgnoredAny| {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok(()))
        })
        .build()?;
    let start = Instant::now();
    let report = worker.run_until(is_through(Arc::clone(&ran), count)).await;
    let elapsed = start.elapsed();
    // Draining settles what the last handlers left to be settled.
    let left = Depth::total(&queue.depth().await?);
    ensure!(report.is_clean(), "the worker did not end cleanly: {report}");
    ensure!(left.ready + left.deferred + left.in_flight + left.dead == 0, "something is left: {left:?}");
    ensure!(ran.load(Ordering::Relaxed) == count, "{} of {count} tasks ran", ran.load(Ordering::Relaxed));
    Ok(count as f64 / elapsed.as_secs_f64())
}

async fn is_through(ran: Arc<AtomicUsize>, count: usize) {
    let start = Instant::now();
    while ran.load(Ordering::Relaxed) < count && start.elapsed() < PATIENCE {
        tokio::time::sleep(LOOK).await;
    }
}

/// The same worker and queue with this ledger and without one.
async fn beside_none(name: &str, url: &str, queue_url: &str, round_count: usize, count: usize) -> Result<Figure> {
    let queue = source::open(queue_url)?;
    let (ledger, none) = (setup::ledger(url)?, no_ledger());
    work_off(&none, &queue, count.min(AT_ONCE)).await?;
    let mut rounds = Rounds::new(2);
    for round in 0..round_count {
        for side in rounds.order(round) {
            let ledger = if side == 0 { &ledger } else { &none };
            rounds.push(side, work_off(ledger, &queue, count).await?);
        }
    }
    Ok(Figure {
        name: format!("{name}, empty handler: tasks per second"),
        unit: Unit::PerSecond,
        ours: rounds.ours(),
        floor: Some(rounds.floor()),
        judged: Judged::Ratio(rounds.ratio()),
        bound: Bound::AtLeast(0.5),
        notes: vec![
            format!("{AT_ONCE} at once, {count} tasks a round; floor: the same worker with a store that keeps nothing"),
            rounds.spread(),
        ],
    })
}

/// SQLite queue and SQLite ledger, each in a file of its own, every commit on the disk.
pub(crate) fn sqlite(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, count) = (setup.pick(1, 9), setup.pick(100, 10_000));
    let (ledger, queue) = (setup::sqlite_url(&setup.sqlite_file()), queue_url(&setup.sqlite_file()));
    setup::run(async move {
        Ok(vec![beside_none("SQLite queue + SQLite ledger", &ledger, &queue, round_count, count).await?])
    })
}

/// Redis Streams, and the ledger on the same server.
pub(crate) fn redis(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, count) = (setup.pick(1, 9), setup.pick(100, 10_000));
    let server = RedisServer::start(&[])?;
    setup::run(async move {
        let queue = format!("{}?name=queue", server.url());
        Ok(vec![
            beside_none("Redis Streams + ledger on the same Redis", &server.url(), &queue, round_count, count).await?,
        ])
    })
}

fn queue_url(file: &Path) -> String {
    format!("{}?name=queue", setup::sqlite_url(file))
}

/// From the SIGKILL of a worker to the second start of its task, in another process.
pub(crate) fn takeover(setup: &Setup) -> Result<Vec<Figure>> {
    /// The lease and the visibility timeout.
    const LEASE: Duration = Duration::from_secs(2);
    let times = setup.pick(1, 5);
    let mut took = Vec::new();
    for _ in 0..times {
        let (ledger, queue) = (setup::sqlite_url(&setup.sqlite_file()), queue_url(&setup.sqlite_file()));
        let queue = format!("{queue}&visibility={}s", LEASE.as_secs());
        setup::runtime()?.block_on(async { fill(&source::open(&queue)?, 1).await })?;
        let mut first = Child::start(&["work-and-hang", &ledger, &queue, &LEASE.as_secs().to_string()])?;
        first.begin()?;
        let begun = first.line()?;
        ensure!(begun == STARTED, "the first worker said `{begun}`");
        let mut second = Child::start(&["work-and-hang", &ledger, &queue, &LEASE.as_secs().to_string()])?;
        second.begin()?;
        let killed = Instant::now();
        drop(first);
        let begun = second.line()?;
        ensure!(begun == STARTED, "the second worker said `{begun}`");
        took.push(killed.elapsed());
    }
    let longest = quantile(&mut took, 1.0);
    Ok(vec![Figure {
        name: "takeover after SIGKILL: from the kill to the second start, longest".into(),
        unit: Unit::Nanos,
        ours: longest,
        floor: None,
        judged: Judged::Ours,
        bound: Bound::AtMost((LEASE + Duration::from_secs(1)).as_nanos() as f64),
        notes: vec![format!(
            "lease and visibility timeout {LEASE:?}; of {times}, the bound is the lease + 1 s; median {}",
            Unit::Nanos.show(quantile(&mut took, 0.5))
        )],
    }])
}

/// What such a worker says when its task starts.
const STARTED: &str = "started";

/// A worker that says when its task has started, and never ends it.
pub(crate) fn work_and_hang(ledger: &str, queue: &str, lease: &str, begin: fn() -> Result<()>) -> Result<()> {
    setup::runtime()?.block_on(async {
        let worker = Worker::builder(setup::ledger(ledger)?, routes(&format!("{lease}s"))?)
            .source(source::open(queue)?)
            .handler(HANDLER, |_context, _payload: IgnoredAny| async {
                crate::print(STARTED);
                std::future::pending::<Result<(), taskonce::Failure>>().await
            })
            .build()?;
        begin()?;
        let report = worker.run_until(std::future::pending()).await;
        ensure!(report.is_clean(), "{report}");
        Ok(())
    })
}

/// What an idle worker costs.
pub(crate) fn idle(setup: &Setup) -> Result<Vec<Figure>> {
    let long: Duration = setup.pick(Duration::from_secs(1), Duration::from_secs(10));
    let rest = |ledger: &str, queue: &str| Child::start(&["work-idle", ledger, queue, &long.as_millis().to_string()]);
    let mut child = rest(&setup::sqlite_url(&setup.sqlite_file()), &queue_url(&setup.sqlite_file()))?;
    child.begin()?;
    let on_sqlite = idle_time("SQLite", child.report()?.parse()?, long);
    let server = RedisServer::start(&[])?;
    let mut child = rest(&server.url(), &format!("{}?name=queue", server.url()))?;
    let before = commands(&server)?;
    child.begin()?;
    let spent = child.report()?.parse()?;
    let asked = commands(&server)? - before;
    Ok(vec![
        on_sqlite,
        idle_time("Redis", spent, long),
        Figure {
            name: "idle worker on Redis: commands a second".into(),
            unit: Unit::Count,
            ours: asked as f64 / long.as_secs_f64(),
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(2.0),
            notes: vec![format!("in {long:?} and the end of the process, by the server's own count")],
        },
    ])
}

fn idle_time(name: &str, spent: u64, long: Duration) -> Figure {
    Figure {
        name: format!("idle worker on {name}: processor time"),
        unit: Unit::Share,
        ours: spent as f64 / long.as_nanos() as f64,
        floor: None,
        judged: Judged::Ours,
        bound: Bound::AtMost(0.01),
        notes: vec![format!("as a share of one core, of all its threads, in {long:?}")],
    }
}

/// A worker that has run one task, and then has nothing to do for so long. Returns the processor time of that, in nanoseconds.
pub(crate) fn work_and_rest(ledger: &str, queue: &str, long: Duration, begin: fn() -> Result<()>) -> Result<u64> {
    let runtime = setup::runtime()?;
    let queue = source::open(queue)?;
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ran);
    let worker = Worker::builder(setup::ledger(ledger)?, routes("30s")?)
        .source(Arc::clone(&queue))
        .handler(HANDLER, move |_context, _payload: IgnoredAny| {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok(()))
        })
        .build()?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let working = runtime.spawn(worker.run_until(async { drop(stopped.await) }));
    runtime.block_on(async {
        fill(&queue, 1).await?;
        is_through(ran, 1).await;
        anyhow::Ok(())
    })?;
    begin()?;
    let before = processor_time();
    std::thread::sleep(long);
    let spent = processor_time() - before;
    drop(stop);
    let report = runtime.block_on(working)?;
    ensure!(report.is_clean(), "{report}");
    Ok(u64::try_from(spent.as_nanos())?)
}
