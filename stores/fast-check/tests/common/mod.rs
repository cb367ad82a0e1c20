//! A ledger that is watched: its questions are counted, its generation is set, and it can be away.

#![allow(dead_code, clippy::unwrap_used, reason = "not every test uses all of it; a test may")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use taskonce_core::key::Key;
use taskonce_core::record::{Found, Record};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{Error, ErrorKind, Result};

/// A store that is watched.
pub(crate) struct Watched {
    inner: Arc<dyn Store>,
    generation: Mutex<Option<String>>,
    questions: AtomicUsize,
    away: AtomicBool,
    locked: AtomicBool,
}

impl Watched {
    /// In front of a store, with a generation of this name.
    pub(crate) fn new(inner: Arc<dyn Store>, generation: Option<&str>) -> Arc<Watched> {
        Arc::new(Watched {
            inner,
            generation: Mutex::new(generation.map(str::to_owned)),
            questions: AtomicUsize::new(0),
            away: AtomicBool::new(false),
            locked: AtomicBool::new(false),
        })
    }

    /// Loads and claims since the last time this was asked.
    pub(crate) fn take_questions(&self) -> usize {
        self.questions.swap(0, Ordering::SeqCst)
    }

    /// From now on the generation has this name.
    pub(crate) fn set_generation(&self, name: &str) {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner) = Some(name.to_owned());
    }

    /// From now on no call reaches it, or all do.
    pub(crate) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::SeqCst);
    }

    /// From now on a transaction holds every record, or none does.
    pub(crate) fn set_locked(&self, locked: bool) {
        self.locked.store(locked, Ordering::SeqCst);
    }

    fn reach(&self) -> Result<()> {
        if self.away.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unreachable, "planned: the database is away"));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Watched {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.questions.fetch_add(1, Ordering::SeqCst);
        self.reach()?;
        self.inner.load(key).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        if let (Expected::Nothing, Next::Claim(_)) = (expected, next) {
            self.questions.fetch_add(1, Ordering::SeqCst);
        }
        self.reach()?;
        if self.locked.load(Ordering::SeqCst) {
            return Ok(Swap::Locked(self.inner.load(key).await?));
        }
        self.inner.swap(key, expected, next).await
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.reach()?;
        self.inner.scan(filter, cursor).await
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.reach()?;
        self.inner.purge(filter).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        self.reach()?;
        self.inner.discard(key).await
    }

    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
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

    fn ground(&self) -> Option<Ground> {
        self.inner.ground()
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        self.reach()?;
        Ok(self.generation.lock().unwrap_or_else(PoisonError::into_inner).clone().map(Generation))
    }
}
