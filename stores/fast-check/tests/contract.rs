//! What every store promises, with a front in memory and a SQLite file as the ledger.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use rusqlite::{Connection, params};
use taskonce_contract::StoreUnderTest;
use taskonce_core::key::Key;
use taskonce_core::memory::MemoryStore;
use taskonce_core::store::Store;
use taskonce_fast_check::{DoneHint, FastCheck, Options};
use taskonce_sqlite::SqliteStore;

mod common;

use common::Watched;

/// A file and a front for the records and hints of one case.
struct Place {
    folder: tempfile::TempDir,
    front: MemoryStore,
    options: Options,
    opened: Mutex<Vec<FastCheck>>,
}

impl Place {
    fn new(done: DoneHint) -> Place {
        let start = Instant::now();
        Place {
            folder: tempfile::tempdir().unwrap(),
            front: MemoryStore::new(move || start.elapsed()),
            options: Options { done, ..Options::default() },
            opened: Mutex::default(),
        }
    }

    /// Writes to the file as another process might.
    fn beside(&self, write: impl FnOnce(&Connection) -> rusqlite::Result<usize>) {
        let beside = Connection::open(self.folder.path().join("tasks.db")).unwrap();
        write(&beside).unwrap();
    }
}

#[async_trait]
impl StoreUnderTest for Place {
    async fn open(&self) -> Arc<dyn Store> {
        let file = self.folder.path().join("tasks.db");
        let ledger = Arc::new(SqliteStore::open(&file, taskonce_sqlite::Options::default()).unwrap());
        let ledger = Watched::new(ledger, Some("1"));
        let fast = FastCheck::new(Arc::new(self.front.clone()), ledger, self.options.clone());
        self.opened.lock().unwrap().push(fast.clone());
        Arc::new(fast)
    }

    /// Both clocks go on: those of the file and of the front. Hints under way are of the time before.
    async fn shift_age(&self, key: &Key, millis: i64) {
        let opened = self.opened.lock().unwrap().clone();
        for fast in opened {
            fast.hints_written().await;
        }
        self.front.age_by(key, millis);
        self.beside(|beside| {
            beside.execute(
                "UPDATE task SET written_at = written_at - ?2, expires_at = expires_at - ?2,
                 output_until = output_until - ?2 WHERE key = ?1",
                params![key.as_str(), millis],
            )
        });
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        self.beside(|beside| {
            beside.execute(
                "INSERT INTO task (key, state, written_at, body) VALUES (?1, 3, unixepoch() * 1000, ?2)
                 ON CONFLICT (key) DO UPDATE SET body = ?2",
                params![key.as_str(), bytes],
            )
        });
    }
}

/// Hints of done tasks are verified.
mod verified {
    use taskonce_contract::store_suite;
    use taskonce_fast_check::DoneHint;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::new(DoneHint::Verified)
    }

    store_suite!(open);
}

/// Hints of done tasks are trusted.
mod trusted {
    use taskonce_contract::store_suite;
    use taskonce_fast_check::DoneHint;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::new(DoneHint::Trusted)
    }

    store_suite!(open);
}
