//! The reference store: a map in this process, with a clock that is given.
//!
//! It keeps records as bytes, like every other store. Nothing survives the process.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::codec;
use crate::error::Result;
use crate::key::Key;
use crate::record::{Age, DropReason, Fence, Found, Output, Record, State, millis};
use crate::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Level, Memory, Next, Page, Purged, Row, Store, Swap,
};

/// A store in this process's memory. Clones share it.
#[derive(Clone)]
pub struct MemoryStore {
    clock: Arc<dyn Fn() -> Duration + Send + Sync>,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    records: BTreeMap<Key, Kept>,
    fence: u64,
}

struct Kept {
    bytes: Vec<u8>,
    written_at: i64,
}

impl MemoryStore {
    /// An empty store that judges leases by `clock`, a monotonic one.
    pub fn new(clock: impl Fn() -> Duration + Send + Sync + 'static) -> MemoryStore {
        MemoryStore { clock: Arc::new(clock), inner: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> i64 {
        millis((self.clock)()) as i64
    }

    /// How many records it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().records.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts raw bytes under a key, as another program or a newer version might.
    pub fn put_raw(&self, key: &Key, bytes: Vec<u8>) {
        let written_at = self.now();
        self.lock().records.insert(key.clone(), Kept { bytes, written_at });
    }

    /// Makes what a key holds older (or younger, if negative), as if the clock had gone on.
    pub fn age_by(&self, key: &Key, millis: i64) {
        if let Some(kept) = self.lock().records.get_mut(key) {
            kept.written_at = kept.written_at.saturating_sub(millis);
        }
    }
}

fn read(key: &Key, kept: &Kept, now: i64) -> Result<Found> {
    let mut record = codec::decode(key, &kept.bytes)?;
    let age = Age::from_millis(now.saturating_sub(kept.written_at));
    if output_is_due(&record, age) {
        record.output = Output::Dropped(DropReason::Expired);
    }
    Ok(Found { record: Arc::new(record), age })
}

fn output_is_due(record: &Record, age: Age) -> bool {
    matches!(record.output, Output::Kept { .. }) && age.as_duration() >= record.output_retention
}

#[async_trait]
impl Store for MemoryStore {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        let now = self.now();
        self.lock().records.get(key).map(|kept| read(key, kept, now)).transpose()
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        let expected = expected.token();
        let now = self.now();
        let mut inner = self.lock();
        let found = inner.records.get(key).map(|kept| read(key, kept, now)).transpose()?;
        let there = found.as_ref().map(|found| found.record.token);
        let (record, is_claim) = match next {
            Next::Keep(record) => (record, false),
            Next::Claim(record) => (record, true),
            Next::Erase => {
                if there != expected {
                    return Ok(Swap::Conflict(found));
                }
                inner.records.remove(key);
                return Ok(Swap::Stored(Fence(0)));
            }
        };
        match found {
            Some(found) if found.record.token == record.token => return Ok(Swap::Stored(found.record.fence)),
            found if there != expected => return Ok(Swap::Conflict(found)),
            _ => {}
        }
        let fence = if is_claim {
            inner.fence = inner.fence.max(record.fence.0.saturating_sub(1)) + 1;
            Fence(inner.fence)
        } else {
            record.fence
        };
        let bytes = codec::encode(&Record { fence, ..record.clone() });
        inner.records.insert(key.clone(), Kept { bytes, written_at: now });
        Ok(Swap::Stored(fence))
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        let now = self.now();
        let after = cursor.map(|cursor| cursor.key()).transpose()?;
        let inner = self.lock();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut page = Page::default();
        for (key, kept) in inner.records.range((from, Bound::Unbounded)) {
            if page.rows.len() >= filter.page() {
                page.next = page.rows.last().map(|row: &Row| Cursor::behind(&row.key));
                break;
            }
            if !filter.admits_key(key) {
                continue;
            }
            let found = read(key, kept, now);
            if found.as_ref().is_ok_and(|found| !filter.admits_record(found)) {
                continue;
            }
            page.rows.push(Row { key: key.clone(), found });
        }
        Ok(page)
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        let now = self.now();
        let mut inner = self.lock();
        let mut purged = Purged::default();
        let mut gone = Vec::new();
        for (key, kept) in &mut inner.records {
            let Ok(record) = codec::decode(key, &kept.bytes) else { continue };
            let found = Found { age: Age::from_millis(now.saturating_sub(kept.written_at)), record: Arc::new(record) };
            if !filter.admits_key(key) || !filter.admits_record(&found) {
                continue;
            }
            if purged.records < filter.page() && is_purgeable(&found) {
                gone.push(key.clone());
                purged.records += 1;
            } else if purged.outputs < filter.page() && output_is_due(&found.record, found.age) {
                let output = Output::Dropped(DropReason::Expired);
                kept.bytes = codec::encode(&Record { output, ..(*found.record).clone() });
                purged.outputs += 1;
            }
        }
        for key in gone {
            inner.records.remove(&key);
        }
        Ok(purged)
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        let mut inner = self.lock();
        let unreadable = inner.records.get(key).is_some_and(|kept| codec::is_damaged(key, &kept.bytes));
        if unreadable {
            inner.records.remove(key);
        }
        Ok(unreadable)
    }

    /// It cannot tell: this crate has no clock and no tasks of its own.
    async fn changed(&self, _key: &Key, _seen: &Record) -> Result<bool> {
        Ok(false)
    }

    async fn examine(&self) -> Vec<Finding> {
        vec![Finding {
            level: Level::Warning,
            subject: "durability".into(),
            text: format!("{} records in this process's memory", self.len()),
            hint: "nothing survives the process; use SQLite or Redis for anything that must".into(),
        }]
    }

    fn told(&self, _key: &Key, _end: &Arc<Record>) {}

    fn memory(&self) -> Memory {
        Memory::MayForget
    }

    fn ground(&self) -> Option<Ground> {
        None
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        Ok(None)
    }
}

fn is_purgeable(found: &Found) -> bool {
    match found.record.state {
        // A clock that went back ends a lease, but no retention: what is forgotten would run again.
        State::Done | State::Dead => found.age.as_duration() >= found.record.retention,
        State::Running | State::Waiting | State::Parked => false,
    }
}
