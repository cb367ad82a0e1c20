//! A store that counts, fails and hangs on request, and a ledger over it with a real heart.
#![allow(dead_code)]
#![allow(clippy::unwrap_used)] // test helpers outside of `#[test]` functions

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::host::Host;
use taskonce_core::json::Input;
use taskonce_core::key::{Handler, Key, Task};
use taskonce_core::ledger::Ledger;
use taskonce_core::memory::MemoryStore;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Found, Record, State};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_worker::{Heart, SystemHost};
use tokio::sync::Semaphore;

/// What the next swaps meet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The swap is not made.
    Refused,
    /// The swap is made, and its answer is lost.
    AnswerLost,
    /// The swap is not made, and never will be.
    Never,
    /// The store cannot hold the record.
    TooLarge,
}

pub(crate) struct Trouble {
    inner: MemoryStore,
    pub(crate) swaps: AtomicUsize,
    pub(crate) loads: AtomicUsize,
    /// Faults by the state that a swap would write.
    faults: Mutex<Vec<(State, Fault, usize)>>,
    /// Swaps to this state wait for a permit.
    gate: Mutex<Option<(State, Arc<Semaphore>)>>,
    pub(crate) at_gate: AtomicUsize,
    /// It calls those who wait at once, for nothing.
    pub(crate) restless: AtomicBool,
}

impl Trouble {
    pub(crate) fn fail(&self, state: State, fault: Fault, times: usize) {
        self.faults.lock().unwrap().push((state, fault, times));
    }

    pub(crate) fn heal(&self) {
        self.faults.lock().unwrap().clear();
    }

    pub(crate) fn close_gate(&self, state: State) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        *self.gate.lock().unwrap() = Some((state, Arc::clone(&gate)));
        gate
    }

    fn fault(&self, state: State) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap();
        let (_, fault, times) = faults.iter_mut().find(|(of, _, times)| *of == state && *times > 0)?;
        *times -= 1;
        Some(*fault)
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Unreachable, "planted")
}

#[async_trait]
impl Store for Trouble {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        self.inner.load(key).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        self.swaps.fetch_add(1, Ordering::SeqCst);
        let Some(state) = (match next {
            Next::Keep(record) | Next::Claim(record) => Some(record.state),
            Next::Erase => None,
        }) else {
            return self.inner.swap(key, expected, next).await;
        };
        let gate = self.gate.lock().unwrap().clone().filter(|(of, _)| *of == state);
        if let Some((_, gate)) = gate {
            self.at_gate.fetch_add(1, Ordering::SeqCst);
            gate.acquire().await.unwrap().forget();
        }
        match self.fault(state) {
            None => self.inner.swap(key, expected, next).await,
            Some(Fault::Refused) => Err(lost()),
            Some(Fault::Never) => Err(Error::new(ErrorKind::BadPolicy, "planted")),
            Some(Fault::TooLarge) => Err(Error::new(ErrorKind::BadOutput, "planted")),
            Some(Fault::AnswerLost) => {
                self.inner.swap(key, expected, next).await?;
                Err(lost())
            }
        }
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.inner.scan(filter, cursor).await
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.inner.purge(filter).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        self.inner.discard(key).await
    }

    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        if self.restless.load(Ordering::SeqCst) {
            return Ok(true);
        }
        self.inner.changed(key, seen).await
    }

    async fn examine(&self) -> Vec<Finding> {
        self.inner.examine().await
    }

    fn told(&self, key: &Key, end: &Arc<Record>) {
        self.inner.told(key, end);
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    /// As if a transaction could reach it: what the tests play as a driver's attempt needs none.
    fn ground(&self) -> Option<Ground> {
        Some(Ground { system: "memory", place: "here".into(), timeout: Duration::from_secs(2) })
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        self.inner.generation().await
    }
}

pub(crate) struct Bench {
    pub(crate) store: Arc<Trouble>,
    pub(crate) memory: MemoryStore,
    pub(crate) heart: Heart,
    pub(crate) ledger: Ledger,
}

/// A worker process of its own over the same records.
pub(crate) fn another(bench: &Bench) -> Bench {
    over(bench.memory.clone())
}

pub(crate) fn bench() -> Bench {
    let host = SystemHost::new();
    over(MemoryStore::new(move || host.uptime()))
}

fn over(memory: MemoryStore) -> Bench {
    let store = Arc::new(Trouble {
        inner: memory.clone(),
        swaps: AtomicUsize::new(0),
        loads: AtomicUsize::new(0),
        faults: Mutex::default(),
        gate: Mutex::default(),
        at_gate: AtomicUsize::new(0),
        restless: AtomicBool::new(false),
    });
    let host: Arc<dyn Host> = Arc::new(SystemHost::new());
    let heart = Heart::new(Arc::clone(&store) as Arc<dyn Store>, Arc::clone(&host));
    let ledger = Ledger::new(Arc::clone(&store) as Arc<dyn Store>, host, Arc::new(heart.clone()));
    Bench { store, memory, heart, ledger }
}

pub(crate) fn task(id: &str) -> Task {
    Handler::new("worker", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap()
}

/// The shortest lease allowed, no backoff.
pub(crate) fn policy(effect: Effect) -> Policy {
    Policy { lease: Duration::from_millis(600), backoff: Backoff::NONE, store_may_forget: true, ..Policy::new(effect) }
}

/// Looks until it is so, at most 10 s.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let end = tokio::time::Instant::now() + Duration::from_secs(10);
    while !is_so().await {
        assert!(tokio::time::Instant::now() < end, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn state(bench: &Bench, task: &Task) -> Option<State> {
    bench.memory.load(&task.key).await.unwrap().map(|found| found.record.state)
}
