//! Done records in this process's memory: a duplicate is answered without the store.
//!
//! Only `Done` is cached. A dead task may be redriven at any time, and then must run.

use std::sync::Arc;
use std::time::Duration;

use quick_cache::{Weighter, sync};

use crate::key::{Key, Task};
use crate::record::{Age, Found, Output, Record, State, millis};

/// The bounds of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// The most records. Default 10,000.
    pub records_max: usize,
    /// The most bytes of keys and outputs together. Default 64 MiB.
    pub bytes_max: u64,
    /// How long a record answers from here at most. Default 60 s.
    pub life_max: Duration,
}

impl Default for CacheLimits {
    fn default() -> CacheLimits {
        CacheLimits { records_max: 10_000, bytes_max: 64 * 1024 * 1024, life_max: Duration::from_secs(60) }
    }
}

/// What a record costs beside its output, in bytes, about.
const RECORD_BYTES: u64 = 512;

pub(crate) struct Cache {
    records: sync::Cache<Key, Cached, ByBytes>,
    limits: CacheLimits,
}

#[derive(Clone)]
struct Cached {
    record: Arc<Record>,
    age: Age,
    read_at: Duration,
    until: Duration,
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<Key, Cached> for ByBytes {
    fn weight(&self, key: &Key, cached: &Cached) -> u64 {
        RECORD_BYTES + key.as_str().len() as u64 + cached.record.output.len() as u64
    }
}

impl Cache {
    pub(crate) fn new(limits: CacheLimits) -> Cache {
        let bytes = limits.bytes_max.min(limits.records_max as u64 * (RECORD_BYTES + 64 * 1024)).max(RECORD_BYTES);
        Cache { records: sync::Cache::with_weighter(limits.records_max.max(1), bytes, ByBytes), limits }
    }

    /// A done record of this task with the same payload, if one is here and lives.
    pub(crate) fn get(&self, task: &Task, now: Duration) -> Option<Found> {
        let cached = self.records.get(&task.key)?;
        if now >= cached.until {
            self.records.remove(&task.key);
            return None;
        }
        if cached.record.fingerprint != task.fingerprint {
            return None;
        }
        // Another thread may have put it here a moment after `now` was read.
        let here = i64::try_from(now.saturating_sub(cached.read_at).as_millis()).unwrap_or(i64::MAX);
        Some(Found { record: cached.record, age: Age::from_millis(cached.age.millis.saturating_add(here)) })
    }

    /// Keeps a done record. `now` is a moment before the store was asked for it, so that it lives no longer here than
    /// there.
    pub(crate) fn put(&self, key: &Key, found: &Found, now: Duration) {
        if found.record.state != State::Done {
            return;
        }
        let mut life = found.age.left_of(found.record.retention).min(self.limits.life_max);
        if matches!(found.record.output, Output::Kept { .. }) {
            life = life.min(found.age.left_of(found.record.output_retention));
        }
        if millis(life) == 0 {
            return;
        }
        let cached =
            Cached { record: Arc::clone(&found.record), age: found.age, read_at: now, until: now.saturating_add(life) };
        self.records.insert(key.clone(), cached);
    }

    pub(crate) fn remove(&self, key: &Key) {
        self.records.remove(key);
    }
}
