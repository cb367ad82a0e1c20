//! What the tests share: a queue, a ledger, a worker between them, and effects that are counted outside.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use taskonce::routes::{Rate, Routes, Settings, SourceRules};
use taskonce::source::{DeadFilter, DeadLine, Depth, Entrance, Envelope, MemorySource, Source};
use taskonce::store::{MemoryStore, Store};
use taskonce::worker::{Monitor, Report, Worker, WorkerBuilder};
use taskonce::{Effect, Found, Handler, Heart, Host, Key, Ledger, SystemHost};
use taskonce_contract::{Fault, Faulty};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::wrap::Meter;

pub(crate) const CHARGE: &str = "charge@2";
pub(crate) const AT_ONCE: Duration = Duration::ZERO;
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// More calls than any test makes while the store is away.
const CALLS_MANY: usize = 1_000_000;
/// How long a delivery is its receiver's.
pub(crate) const VISIBILITY: Duration = Duration::from_millis(600);

/// Where queue and records lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Sqlite,
    #[cfg(feature = "redis")]
    Redis,
}

/// Makes a test of each function of a module for queue and records in memory, and one for those in SQLite.
macro_rules! on_both {
    (mod memory and mod sqlite: $($name:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::stage::Stage::new(crate::stage::Kind::Memory)).await; })+
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::stage::Stage::new(crate::stage::Kind::Sqlite)).await; })+
        }
    };
}
pub(crate) use on_both;

/// A payload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) id: String,
}

/// A queue, a ledger and what is counted.
pub(crate) struct Stage {
    pub(crate) ledger: Ledger,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) source: Arc<Meter>,
    /// Between the ledger and the store.
    trouble: Arc<Faulty>,
    pub(crate) effects: Effects,
    /// Removed with the stage.
    pub(crate) folder: tempfile::TempDir,
    /// Ends with the stage.
    #[cfg(feature = "redis")]
    _server: Option<taskonce_testkit::RedisServer>,
}

/// How often each task took effect.
#[derive(Clone, Default)]
pub(crate) struct Effects(Arc<Mutex<BTreeMap<String, usize>>>);

impl Effects {
    pub(crate) fn happen(&self, id: &str) {
        *self.0.lock().unwrap().entry(id.to_owned()).or_default() += 1;
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(crate) fn of(&self, id: &str) -> usize {
        self.0.lock().unwrap().get(id).copied().unwrap_or(0)
    }

    /// Checks that there are so many, each once.
    pub(crate) fn are_once(&self, count: usize) {
        let effects = self.0.lock().unwrap();
        assert_eq!(effects.len(), count);
        let doubled: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(doubled.is_empty(), "{doubled:?}");
    }
}

impl Stage {
    pub(crate) fn new(kind: Kind) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let host: Arc<dyn Host> = Arc::new(SystemHost::new());
        let clock = Arc::clone(&host);
        #[cfg(feature = "redis")]
        let mut server = None;
        let (store, source): (Arc<dyn Store>, Arc<dyn Source>) = match kind {
            #[cfg(feature = "redis")]
            Kind::Redis => {
                let server = server.insert(taskonce_testkit::RedisServer::start(&[]).unwrap());
                let url = format!("{}/0?timeout=20s", server.url());
                let store = taskonce_redis::RedisStore::from_url(&url).unwrap();
                let url = format!("{url}&visibility={}ms", VISIBILITY.as_millis());
                (Arc::new(store), taskonce::source::open(&url).unwrap())
            }
            Kind::Memory => {
                let source = MemorySource::new("queue", VISIBILITY, move || SystemHost::new().uptime());
                (Arc::new(MemoryStore::new(move || clock.uptime())), Arc::new(source))
            }
            Kind::Sqlite => {
                let path = |name: &str| folder.path().join(name).display().to_string();
                let store = taskonce_sqlite::SqliteStore::from_url(&format!("sqlite:{}", path("tasks.db"))).unwrap();
                let url = format!("sqlite:{}?visibility={}ms", path("queue.db"), VISIBILITY.as_millis());
                (Arc::new(store), taskonce::source::open(&url).unwrap())
            }
        };
        let trouble = Arc::new(Faulty::new(Arc::clone(&store)));
        let between: Arc<dyn Store> = Arc::<Faulty>::clone(&trouble);
        let heart = Heart::new(Arc::clone(&between), Arc::clone(&host));
        let ledger = Ledger::new(between, host, Arc::new(heart));
        let source = Arc::new(Meter::new(source));
        Stage {
            ledger,
            store,
            source,
            trouble,
            effects: Effects::default(),
            folder,
            #[cfg(feature = "redis")]
            _server: server,
        }
    }

    /// The store goes away for the ledger, or comes back.
    pub(crate) fn store_is_away(&self, is_away: bool) {
        self.trouble.plan(std::iter::repeat_n(Fault::Before, if is_away { CALLS_MANY } else { 0 }));
    }

    /// How one handler is treated: keyed, tried again soon, and no bound on retries, unless said otherwise.
    pub(crate) fn settings() -> Settings {
        Settings {
            effect: Some(Effect::Keyed),
            // A duplicate that comes while its task runs is deferred by it; and no pause of a busy machine is as long.
            lease: Some(Duration::from_millis(1500)),
            backoff_min: Some(Duration::from_millis(10)),
            backoff_max: Some(Duration::from_millis(50)),
            concurrency_max: Some(64),
            breaker_failures: Some(None),
            ..Settings::default()
        }
    }

    pub(crate) fn table(handlers: &[(&str, Settings)]) -> Routes {
        let source = SourceRules { retry_share: 1.0, retry_floor: Rate::per_second(1000), ..SourceRules::new("queue") };
        let mut routes = Routes::builder().source(source, Settings::default());
        for (handler, settings) in handlers {
            routes = routes.handler(handler, settings.clone()).route("queue", handler, Settings::default());
        }
        routes.build().unwrap()
    }

    /// A worker of one handler.
    pub(crate) fn worker(&self, settings: Settings) -> WorkerBuilder {
        self.worker_of(&[(CHARGE, settings)])
    }

    pub(crate) fn worker_of(&self, handlers: &[(&str, Settings)]) -> WorkerBuilder {
        let source: Arc<dyn Source> = Arc::<Meter>::clone(&self.source);
        Worker::builder(self.ledger.clone(), Stage::table(handlers)).source(source)
    }

    /// A worker whose handler only has its effect.
    pub(crate) fn simple(&self, settings: Settings) -> Worker {
        let effects = self.effects.clone();
        self.worker(settings)
            .handler(CHARGE, move |_context, order: Order| {
                let effects = effects.clone();
                async move {
                    effects.happen(&order.id);
                    Ok(order.id)
                }
            })
            .build()
            .unwrap()
    }

    pub(crate) fn key(id: &str) -> Key {
        Handler::new("charge", "2").unwrap().key(id).unwrap()
    }

    /// Sends a task of the usual handler.
    pub(crate) async fn send(&self, id: &str) {
        let payload = serde_json::to_vec(&Order { id: id.to_owned() }).unwrap();
        self.send_raw(CHARGE, Some(Stage::key(id).as_str()), payload).await;
    }

    pub(crate) async fn send_raw(&self, handler: &str, key: Option<&str>, payload: impl Into<Vec<u8>>) {
        let envelope = Envelope { key: key.map(str::to_owned), ..Envelope::new(handler, payload) };
        self.source.inner.send(&envelope, AT_ONCE, Entrance::Open).await.map(drop).unwrap();
    }

    /// Sends so many tasks, each so often.
    pub(crate) async fn send_many(&self, count: usize, copies: usize) {
        let mut sends = tokio::task::JoinSet::new();
        for number in 0..count * copies {
            let id = format!("order-{}", number % count);
            let payload = serde_json::to_vec(&Order { id: id.clone() }).unwrap();
            let key = Some(Stage::key(&id).to_string());
            let source = Arc::clone(&self.source.inner);
            sends.spawn(async move {
                let envelope = Envelope { key, ..Envelope::new(CHARGE, payload) };
                source.send(&envelope, AT_ONCE, Entrance::Open).await.map(drop)
            });
        }
        while let Some(sent) = sends.join_next().await {
            sent.unwrap().unwrap();
        }
    }

    pub(crate) async fn record(&self, id: &str) -> Option<Found> {
        self.store.load(&Stage::key(id)).await.unwrap()
    }

    pub(crate) async fn depth(&self) -> Depth {
        Depth::total(&self.source.inner.depth().await.unwrap())
    }

    pub(crate) async fn dead(&self) -> Vec<DeadLine> {
        self.source.inner.dead_letters(&DeadFilter::default(), None).await.unwrap().lines
    }

    /// Waits until the queue holds nothing but dead letters.
    pub(crate) async fn is_worked_off(&self) {
        let began = Instant::now();
        loop {
            let depth = self.depth().await;
            if depth.ready + depth.deferred + depth.in_flight == 0 {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{depth:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Waits for something to become true.
pub(crate) async fn until(what: &str, is_true: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_true() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A worker that runs.
pub(crate) struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Report>,
    pub(crate) monitor: Monitor,
}

pub(crate) fn start(worker: Worker) -> Running {
    let (stop, stopped) = oneshot::channel::<()>();
    let monitor = worker.monitor();
    let task = tokio::spawn(worker.run_until(async move {
        let _ = stopped.await;
    }));
    Running { stop, task, monitor }
}

impl Running {
    /// Tells it to stop, and does not wait.
    pub(crate) fn stop(self) -> JoinHandle<Report> {
        self.stop.send(()).unwrap();
        self.task
    }

    /// Tells it to stop, and waits for its report.
    pub(crate) async fn end(self) -> Report {
        self.stop().await.unwrap()
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        self.monitor.counts().of(name)
    }
}

/// A counter that knows its highest value.
#[derive(Default)]
pub(crate) struct Gauge {
    now: AtomicUsize,
    pub(crate) most: AtomicUsize,
}

impl Gauge {
    pub(crate) fn up(&self) {
        self.most.fetch_max(self.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
    }

    pub(crate) fn down(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn now(&self) -> usize {
        self.now.load(Ordering::SeqCst)
    }
}
