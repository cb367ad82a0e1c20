//! What every store promises, on a file of its own for each case.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::{Connection, params};
use taskonce_contract::{StoreUnderTest, store_suite};
use taskonce_core::key::Key;
use taskonce_core::store::Store;
use taskonce_sqlite::{Options, SqliteStore};

struct InFile(tempfile::TempDir);

async fn open(_case: &str) -> InFile {
    InFile(tempfile::tempdir().unwrap())
}

impl InFile {
    /// Writes to the file as another process might.
    fn beside(&self, write: impl FnOnce(&Connection) -> rusqlite::Result<usize>) {
        let beside = Connection::open(self.0.path().join("tasks.db")).unwrap();
        write(&beside).unwrap();
    }
}

#[async_trait]
impl StoreUnderTest for InFile {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(&self.0.path().join("tasks.db"), Options::default()).unwrap())
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
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

store_suite!(open);
