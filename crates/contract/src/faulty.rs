//! `Faulty`: a store in front of a store that loses answers, refuses calls or falls silent on request, and counts calls.

use std::collections::VecDeque;
use std::future::{Future, pending};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use taskonce_core::key::Key;
use taskonce_core::record::{Found, Record};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{Error, ErrorKind, Result};
use tokio::sync::Notify;

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: the call goes through.
    None,
    /// The call fails without having reached the store.
    Before,
    /// The store does what it was asked, and the answer is lost.
    After,
    /// The store does what it was asked, and the answer comes when [`Faulty::let_answer`] is called.
    Late,
    /// The call never reaches the store and never ends.
    SilentBefore,
    /// The store does what it was asked, and the call never ends.
    SilentAfter,
}

/// A store that misbehaves as it is told. Loads, swaps, scans, purges and discards count; examinations do not.
pub struct Faulty {
    inner: Arc<dyn Store>,
    plan: Mutex<VecDeque<Fault>>,
    calls: AtomicUsize,
    late: Notify,
}

impl Faulty {
    /// A well-behaved store in front of another.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Faulty {
        Faulty { inner, plan: Mutex::default(), calls: AtomicUsize::new(0), late: Notify::new() }
    }

    /// What happens to the next calls, in order. It replaces what was planned before; later calls go through.
    pub fn plan(&self, faults: impl IntoIterator<Item = Fault>) {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner) = faults.into_iter().collect();
    }

    /// Lets the answer of one late call come, now or as soon as there is one.
    pub fn let_answer(&self) {
        self.late.notify_one();
    }

    /// Calls since the last time this was asked.
    pub fn take_calls(&self) -> usize {
        self.calls.swap(0, Ordering::SeqCst)
    }

    async fn disturb<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let fault = self.plan.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(Fault::None);
        match fault {
            Fault::None => call.await,
            Fault::Before => Err(Error::new(ErrorKind::Unreachable, "planned: the call did not reach the store")),
            Fault::After => {
                call.await?;
                Err(Error::new(ErrorKind::TimedOut, "planned: the answer was lost"))
            }
            Fault::Late => {
                let answer = call.await?;
                self.late.notified().await;
                Ok(answer)
            }
            Fault::SilentBefore => pending().await,
            Fault::SilentAfter => {
                call.await?;
                pending().await
            }
        }
    }
}

#[async_trait]
impl Store for Faulty {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.disturb(self.inner.load(key)).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        self.disturb(self.inner.swap(key, expected, next)).await
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.disturb(self.inner.scan(filter, cursor)).await
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.disturb(self.inner.purge(filter)).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        self.disturb(self.inner.discard(key)).await
    }

    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        self.disturb(self.inner.changed(key, seen)).await
    }

    fn told(&self, key: &Key, end: &Arc<Record>) {
        self.inner.told(key, end);
    }

    async fn examine(&self) -> Vec<Finding> {
        self.inner.examine().await
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn ground(&self) -> Option<Ground> {
        self.inner.ground()
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        self.disturb(self.inner.generation()).await
    }
}
