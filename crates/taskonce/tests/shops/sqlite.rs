//! A SQLite file of effects, other than the ledger's, and the suite's driver on it, by rusqlite.

#![allow(dead_code, reason = "no binary uses all of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use taskonce::Failure;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::sqlite::{Beside as _, step_table_sql};
use taskonce::store::Store;
use taskonce_contract::beside::BesideUnderTest;
use taskonce_contract::transactional::Script;
use taskonce_worker::steps::StepOf;

/// How long a connection that waits for the file sleeps before it looks again.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Whether a connection of this process has waited for the file; SQLite's handler has no place for more. Where tests share a
/// process it may be another's, which makes a case weaker, and never fail.
static WAITED: AtomicBool = AtomicBool::new(false);

/// Called by SQLite while another holds the file.
fn wait(_times: i32) -> bool {
    WAITED.store(true, Ordering::SeqCst);
    std::thread::sleep(LOOK_EVERY); // sleeps: SQLite looks again when this returns
    true
}

/// The same on a thread of a runtime whose other tasks go on elsewhere meanwhile.
fn wait_in_place(times: i32) -> bool {
    tokio::task::block_in_place(|| wait(times))
}

/// A connection that waits for as long as it takes.
pub(crate) fn open(path: &Path) -> Connection {
    let mut conn = Connection::open(path).unwrap();
    conn.busy_handler(Some(wait)).unwrap();
    conn
}

/// The file of the effects.
pub(crate) struct Shop(pub(crate) tempfile::TempDir);

impl Shop {
    pub(crate) fn new() -> Shop {
        let shop = Shop::without_table();
        shop.make_table();
        shop
    }

    /// As a program has it that keeps other things there.
    pub(crate) fn without_table() -> Shop {
        let shop = Shop(tempfile::tempdir().unwrap());
        let mode = shop.open().pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0));
        assert_eq!(mode.unwrap(), "wal");
        // Only appended to, and no unique index: an effect that happened twice is counted twice.
        shop.open().execute_batch("PRAGMA user_version = 7; CREATE TABLE effect (key TEXT NOT NULL)").unwrap();
        shop
    }

    pub(crate) fn make_table(&self) {
        self.open().execute_batch(step_table_sql()).unwrap();
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("shop.db")
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    pub(crate) fn open(&self) -> Connection {
        open(&self.path())
    }

    pub(crate) fn count(&self, table: &str) -> usize {
        let count = format!("SELECT count(*) FROM {table}");
        let count: i64 = self.open().query_row(&count, (), |row| row.get(0)).unwrap();
        usize::try_from(count).unwrap()
    }
}

/// The driver, and the way to a store of the ledger's, which it keeps alive.
pub(crate) struct ByRusqlite {
    shop: Shop,
    ledger: Box<dyn Fn() -> Arc<dyn Store> + Send + Sync>,
}

impl ByRusqlite {
    pub(crate) fn new(ledger: impl Fn() -> Arc<dyn Store> + Send + Sync + 'static) -> Self {
        ByRusqlite { shop: Shop::without_table(), ledger: Box::new(ledger) }
    }

    async fn step_on(mut conn: Connection, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        conn.busy_handler(Some(wait_in_place)).unwrap();
        let run = step.beside(&mut conn, |tx, _step| {
            tx.execute("INSERT INTO effect VALUES ('booked')", ())?;
            tokio::task::block_in_place(|| script.play_blocking())
        });
        run.await
    }
}

#[async_trait]
impl BesideUnderTest for ByRusqlite {
    async fn ledger(&self) -> Arc<dyn Store> {
        (self.ledger)()
    }

    async fn make_table(&self) {
        self.shop.make_table();
    }

    async fn effects(&self) -> usize {
        self.shop.count("effect")
    }

    async fn rows(&self) -> usize {
        self.shop.count("taskonce_step")
    }

    async fn is_waited_for(&self) -> bool {
        WAITED.load(Ordering::SeqCst)
    }

    async fn step(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        ByRusqlite::step_on(self.shop.open(), step, script).await
    }

    async fn step_in_an_open_transaction(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        let conn = self.shop.open();
        conn.execute_batch("BEGIN; INSERT INTO effect VALUES ('stray')").unwrap();
        ByRusqlite::step_on(conn, step, script).await
    }
}
