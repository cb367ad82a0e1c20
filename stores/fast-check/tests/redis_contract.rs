//! What every store promises, with a Redis as the front and a SQLite file as the ledger.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use rusqlite::{Connection, params};
use taskonce_contract::{StoreUnderTest, store_suite};
use taskonce_core::key::Key;
use taskonce_core::store::Store;
use taskonce_fast_check::{FastCheck, Options};
use taskonce_redis::RedisStore;
use taskonce_sqlite::SqliteStore;
use taskonce_testkit::RedisServer;

const PREFIX: &str = "hint:";

/// What the front is given on a busy machine: a hint that was not written in time only delays, and the cases ask for more.
const FRONT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// A file and a server for the records and hints of one case.
struct Place {
    folder: tempfile::TempDir,
    server: RedisServer,
    opened: Mutex<Vec<FastCheck>>,
}

impl Place {
    fn beside(&self, write: impl FnOnce(&Connection) -> rusqlite::Result<usize>) {
        let beside = Connection::open(self.folder.path().join("tasks.db")).unwrap();
        write(&beside).unwrap();
    }
}

#[async_trait]
impl StoreUnderTest for Place {
    async fn open(&self) -> Arc<dyn Store> {
        let file = self.folder.path().join("tasks.db");
        let ledger = SqliteStore::open(&file, taskonce_sqlite::Options::default()).unwrap();
        let front = RedisStore::from_url(&format!("{}?prefix={PREFIX}", self.server.url())).unwrap();
        let options = Options { front_timeout: FRONT_TIMEOUT, ..Options::default() };
        let fast = FastCheck::new(Arc::new(front), Arc::new(ledger), options);
        self.opened.lock().unwrap().push(fast.clone());
        Arc::new(fast)
    }

    /// Both clocks go on: those of the file and of the front. Hints under way are of the time before.
    async fn shift_age(&self, key: &Key, millis: i64) {
        let opened = self.opened.lock().unwrap().clone();
        for fast in opened {
            fast.hints_written().await;
        }
        let name = format!("{PREFIX}{key}");
        let left = self.server.command(&["PTTL", &name]).unwrap().int().unwrap();
        if left >= 0 {
            self.server.command(&["PEXPIRE", &name, &(left - millis).to_string()]).unwrap();
        }
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

async fn open(_case: &str) -> Place {
    Place { folder: tempfile::tempdir().unwrap(), server: RedisServer::start(&[]).unwrap(), opened: Mutex::default() }
}

store_suite!(open);
