//! Runs what sources deliver: `Worker`, from receiving to settling. What is decided of a task is not here, but in the ledger.
//!
//! In reading order: `handler` (the user's functions), `service` (those of tower), `receive` (what is worth receiving), `desk` (what is in hand, and what
//! may start), `deliver` (one delivery, from its key to its verdict), `settle` (the verdict, told to the source), `hold`
//! (keeps deliveries meanwhile), `drain` (the main loop, and its end), `watch` (what nobody takes), `publish` (how it stands).

mod handler;
mod service;
mod away;
mod desk;
mod receive;
mod deliver;
mod settle;
mod hold;
mod drain;
mod watch;
mod monitor;
mod publish;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::Effect;
use taskonce_core::process::Publisher;
use taskonce_core::record::{Failure, Output};
use taskonce_core::{Error, ErrorKind, Result};
use tokio::sync::Notify;
use tower_service::Service;

use crate::events::Counts;
use crate::outcome::Outcome;
use crate::routes::{RouteId, Routes};
use crate::run::Context;
use crate::source::{Delivery, Envelope, Source};
use desk::Desk;
use handler::{Kind, Prepare};
use hold::Holds;
use watch::Watch;

pub use drain::Report;
pub use handler::Job;
pub use monitor::{Monitor, RouteSnapshot, Snapshot};
pub use service::{Request, ServiceFailure};

/// How many tasks run at once in a process, unless said otherwise.
pub const CONCURRENCY: usize = 64;
/// How long running tasks may go on after a stop, unless said otherwise.
pub const GRACE: Duration = Duration::from_secs(20);
/// After what time without a delivery, while there are some, a worker says that it is stalled, unless said otherwise.
pub const STALLED_AFTER: Duration = Duration::from_secs(30);

/// How often a worker may say how it stands.
const PUBLISH_MIN: Duration = Duration::from_secs(1);
const PUBLISH_MAX: Duration = Duration::from_secs(300);

/// Takes deliveries from sources and runs their tasks, each through the ledger, until it is told to stop.
///
/// * **Settling.** A delivery is acknowledged when its task is done, deferred while it is busy or waits, and goes to the dead
///   letters when no delivery can bring it further. One whose handler this worker does not have stays where it is.
/// * **Bounded.** Never more is received than can be started soon: the worker's memory does not grow with the queue.
/// * **Fair.** Routes are served in turn, by their weights.
/// * **The store away.** Nothing is received while it is away, but one delivery now and then that tries it. A route that is open
///   in this case runs unguarded, and that is counted.
///
/// Several workers, in as many processes as one likes, share sources and store.
///
/// ```
/// # use std::sync::Arc;
/// # use taskonce_core::ledger::Ledger;
/// # use taskonce_core::record::Failure;
/// # use taskonce_worker::routes::Routes;
/// # use taskonce_worker::source::Source;
/// # use taskonce_worker::worker::Worker;
/// # async fn example(ledger: Ledger, queue: Arc<dyn Source>, stop: impl Future<Output = ()>) -> taskonce_core::Result<()> {
/// let routes = Routes::from_toml(
///     r#"
///     [sources.queue]
///     [handlers."charge@2"]
///     effect = "keyed"
///     [routes.queue."charge@2"]
///     "#,
/// )?;
/// let worker = Worker::builder(ledger, routes)
///     .source(queue)
///     .handler("charge@2", |context, amount: u64| async move {
///         if amount == 0 {
///             return Err(Failure::permanent("the amount is zero"));
///         }
///         // The provider deduplicates on this key.
///         Ok(context.downstream_key("").to_string())
///     })
///     .build()?;
/// let report = worker.run_until(stop).await;
/// assert!(report.is_clean(), "{report}");
/// # Ok(()) }
/// ```
pub struct Worker {
    shared: Arc<Shared>,
    grace: Duration,
}

/// What the parts of a worker share.
struct Shared {
    ledger: Ledger,
    routes: Arc<Routes>,
    sources: Vec<Arc<dyn Source>>,
    /// What runs the tasks of each route, by the route's number; none where this worker has no code for it.
    handlers: Vec<Option<(usize, Prepare)>>,
    counts: Arc<Counts>,
    desk: Mutex<Desk>,
    holds: Holds,
    watch: Watch,
    /// Something may be started.
    work: Notify,
    /// Something may be received.
    room: Notify,
    stalled_after: Duration,
    /// How often it says how it stands.
    publish_every: Option<Duration>,
    publisher: tokio::sync::Mutex<Option<Publisher>>,
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.ledger.host().uptime()
    }

    /// The source that has this route, and what runs its tasks.
    fn handler(&self, route: RouteId) -> Option<&(usize, Prepare)> {
        self.handlers.get(route.0 as usize)?.as_ref()
    }
}

/// Makes a [`Worker`]; every contradiction is found when it is built.
pub struct WorkerBuilder {
    ledger: Ledger,
    routes: Arc<Routes>,
    sources: Vec<Arc<dyn Source>>,
    handlers: Vec<(String, Kind, Prepare)>,
    concurrency_max: usize,
    grace: Duration,
    stalled_after: Duration,
    publish_every: Option<Duration>,
}

impl Worker {
    /// A worker that runs tasks through this ledger, as this table says.
    #[must_use]
    pub fn builder(ledger: Ledger, routes: Routes) -> WorkerBuilder {
        WorkerBuilder {
            ledger,
            routes: Arc::new(routes),
            sources: Vec::new(),
            handlers: Vec::new(),
            concurrency_max: CONCURRENCY,
            grace: GRACE,
            stalled_after: STALLED_AFTER,
            publish_every: None,
        }
    }

    /// How it stands, now and while it runs.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor::new(&self.shared)
    }

    /// Works until `stop` completes, then drains, and tells what became of what was in hand.
    ///
    /// Draining: nothing more is received; what was received and not started is given back, which counts no attempt; running
    /// tasks go on for the grace period at most, and are cancelled then. Their attempts have failed, an unrepeatable effect is parked.
    ///
    /// Needs a runtime with timers. When the future is dropped, all handlers are cancelled, and what was in hand comes again
    /// after its visibility timeout.
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> Report {
        drain::run(self.shared, self.grace, stop).await
    }
}

impl WorkerBuilder {
    /// Takes deliveries from this source too. The table knows it by the name that it describes itself with.
    #[must_use]
    pub fn source(mut self, source: Arc<dyn Source>) -> WorkerBuilder {
        self.sources.push(source);
        self
    }

    /// Runs the tasks of this handler, named as senders name it (`charge@2`), from every source that has a route for it.
    ///
    /// The payload is JSON, or MessagePack where its content type says so; one that does not read as `T` goes to the dead
    /// letters. The output is kept for replays, within the limits of the route.
    ///
    /// The handler is cancelled (its future dropped) when its claim is lost or `run_max` has passed. A panic is a failed attempt.
    #[must_use]
    pub fn handler<T, O, H, F>(self, name: &str, handler: H) -> WorkerBuilder
    where
        T: DeserializeOwned + Send + 'static,
        O: Serialize + 'static,
        H: Fn(Context, T) -> F + Send + Sync + 'static,
        F: Future<Output = Result<O, Failure>> + Send + 'static,
    {
        self.with(name, Kind::Plain, handler::typed(handler))
    }

    /// The same for a handler that reads the payload by itself, whatever it is, and says what its output is.
    #[must_use]
    pub fn handler_of_bytes<H, F>(self, name: &str, handler: H) -> WorkerBuilder
    where
        H: Fn(Context, Envelope) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Output, Failure>> + Send + 'static,
    {
        self.with(name, Kind::Plain, handler::of_bytes(handler))
    }

    /// The same for one that looks at the whole delivery: the source that brought it, and how often it came.
    #[must_use]
    pub fn handler_of_delivery<H, F>(self, name: &str, handler: H) -> WorkerBuilder
    where
        H: Fn(Context, Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Output, Failure>> + Send + 'static,
    {
        self.with(name, Kind::Plain, handler::of_delivery(handler))
    }

    /// The same for a handler that claims and completes its task by itself: by a driver's `run_in_transaction`, for
    /// transactional effects. What it answers settles the delivery.
    #[must_use]
    pub fn handler_in_transaction<H, F>(self, name: &str, handler: H) -> WorkerBuilder
    where
        H: Fn(Job) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Outcome<()>>> + Send + 'static,
    {
        self.with(name, Kind::Own, handler::own(handler))
    }

    /// The same for a service of tower, with its middleware. It is called when it is ready: what waits there runs already, and
    /// holds one of the places of its route. Its error is a retryable failure, or the [`ServiceFailure`] that it is or wraps.
    #[must_use]
    pub fn handler_service<T, O, S>(self, name: &str, service: S) -> WorkerBuilder
    where
        T: DeserializeOwned + Send + 'static,
        O: Serialize + 'static,
        S: Service<Request<T>, Response = O> + Clone + Send + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        S::Future: Send + 'static,
    {
        self.with(name, Kind::Plain, service::service(service))
    }

    fn with(mut self, name: &str, kind: Kind, prepare: Prepare) -> WorkerBuilder {
        self.handlers.push((name.to_owned(), kind, prepare));
        self
    }

    /// The most tasks that run at once in this worker, at least 1. Default 64.
    #[must_use]
    pub fn concurrency_max(mut self, count: usize) -> WorkerBuilder {
        self.concurrency_max = count.max(1);
        self
    }

    /// How long running tasks may go on after a stop. Default 20 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> WorkerBuilder {
        self.grace = grace;
        self
    }

    /// After what time without a delivery, while the source has some that this worker could take, it says that it is stalled.
    /// Default 30 s.
    #[must_use]
    pub fn stalled_after(mut self, time: Duration) -> WorkerBuilder {
        self.stalled_after = time;
        self
    }

    /// Says so often in the store how it stands, for `taskonce top` and [`Ledger::processes`]: one write each time, of numbers
    /// and names of routes only. From 1 s to 5 min; what lies outside counts as the nearest. Default: never.
    #[must_use]
    pub fn publish_every(mut self, time: Duration) -> WorkerBuilder {
        self.publish_every = Some(time.clamp(PUBLISH_MIN, PUBLISH_MAX));
        self
    }

    /// The worker.
    ///
    /// # Errors
    /// [`ErrorKind::BadRoutes`] with everything that does not fit together: a handler without a route, two of one name, a source
    /// that is given twice, an effect that the store or the handler's form cannot keep.
    pub fn build(self) -> Result<Worker> {
        let mut faults = Vec::new();
        let routed: HashSet<&str> = self.routes.iter().map(|route| &*route.handler).collect();
        let mut by_name: HashMap<&str, (Kind, &Prepare)> = HashMap::new();
        for (name, kind, prepare) in &self.handlers {
            if by_name.insert(name, (*kind, prepare)).is_some() {
                faults.push(format!("handler `{name}` is given twice"));
            }
            if !routed.contains(&**name) {
                faults.push(format!("handler `{name}` has no route"));
            }
        }
        let mut by_source: HashMap<&str, usize> = HashMap::new();
        for (at, source) in self.sources.iter().enumerate() {
            let name = &*source.describe().name;
            if by_source.insert(name, at).is_some() {
                faults.push(format!("source `{name}` is given twice"));
            }
            if self.routes.of_source(name).next().is_none() {
                faults.push(format!("source `{name}` has no route"));
            }
        }
        let mut handlers = Vec::with_capacity(self.routes.iter().len());
        for route in self.routes.iter() {
            let found = by_source.get(&*route.source).zip(by_name.get(&*route.handler));
            let Some((source, (kind, prepare))) = found else {
                handlers.push(None);
                continue;
            };
            if let Err(error) = route.policy.check_store(&**self.ledger.store()) {
                faults.push(format!("route {}: {error}", route.name()));
            }
            if (route.policy.effect == Effect::Transactional) != (*kind == Kind::Own) {
                faults.push(format!(
                    "route {}: its effect is {}, and {}",
                    route.name(),
                    route.policy.effect.name(),
                    kind.needs()
                ));
            }
            handlers.push(Some((*source, Arc::clone(prepare))));
        }
        if self.sources.is_empty() {
            faults.push("no source is given".to_owned());
        }
        if !faults.is_empty() {
            return Err(Error::new(ErrorKind::BadRoutes, faults.join("; ")).about("worker"));
        }
        let desk = Desk::new(&self.routes, self.concurrency_max);
        let watch = Watch::new(self.sources.len());
        let shared = Shared {
            ledger: self.ledger,
            routes: self.routes,
            sources: self.sources,
            handlers,
            counts: Arc::default(),
            desk: Mutex::new(desk),
            holds: Holds::default(),
            watch,
            work: Notify::new(),
            room: Notify::new(),
            stalled_after: self.stalled_after,
            publish_every: self.publish_every,
            publisher: tokio::sync::Mutex::default(),
        };
        Ok(Worker { shared: Arc::new(shared), grace: self.grace })
    }
}
