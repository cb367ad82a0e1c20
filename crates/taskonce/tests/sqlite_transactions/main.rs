//! What every driver of transactions promises, on a SQLite file of its own for each case; what SQLite's promises beside;
//! and workers that are killed and stopped in between.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "../shops/sqlite.rs"]
mod shop;
mod beside;
mod kills;
mod rules;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce::sqlite::rusqlite::{Connection, Transaction, params};
use taskonce::sqlite::{CompleteIn as _, Completion, Refused, RunInTransaction as _, StepIn as _};
use taskonce::store::Store;
use taskonce::{Claim, Context, Failure, Key, Ledger, Outcome, Output, Policy, Result, Task};
use taskonce_contract::transactional::{ByHand, Script, StepEnd, TransactionsUnderTest};
use taskonce_contract::{StoreUnderTest, transaction_suite};
use taskonce_sqlite::{Options, SqliteStore};
use tokio::sync::oneshot;

/// The longest that a connection of a test's own waits for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

struct InFile(tempfile::TempDir);

async fn open(_case: &str) -> InFile {
    InFile::new()
}

impl InFile {
    fn new() -> InFile {
        let place = InFile(tempfile::tempdir().unwrap());
        drop(place.store());
        // Only appended to, and no unique index: an effect that happened twice is counted twice.
        place.beside().execute_batch("CREATE TABLE effect (key TEXT NOT NULL)").unwrap();
        place
    }

    fn count(&self, key: &Key) -> usize {
        let count = "SELECT count(*) FROM effect WHERE key = ?1";
        let effects: i64 = self.beside().query_row(count, [key.as_str()], |row| row.get(0)).unwrap();
        usize::try_from(effects).unwrap()
    }

    /// Whether somebody holds the file's write lock.
    fn is_held(&self) -> bool {
        let conn = Connection::open(self.path()).unwrap();
        conn.busy_timeout(Duration::ZERO).unwrap();
        conn.execute_batch("BEGIN IMMEDIATE").is_err()
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("tasks.db")
    }

    fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.path(), Options::default()).unwrap()
    }

    fn beside(&self) -> Connection {
        let conn = Connection::open(self.path()).unwrap();
        conn.busy_timeout(PATIENCE).unwrap();
        conn
    }
}

fn add_effect(tx: &Transaction<'_>, key: &Key) {
    tx.execute("INSERT INTO effect (key) VALUES (?1)", [key.as_str()]).unwrap();
}

#[async_trait]
impl StoreUnderTest for InFile {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.store())
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        let sql = "UPDATE task SET written_at = written_at - ?2, expires_at = expires_at - ?2,
                   output_until = output_until - ?2 WHERE key = ?1";
        self.beside().execute(sql, params![key.as_str(), millis]).unwrap();
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        let sql = "INSERT INTO task (key, state, written_at, body) VALUES (?1, 3, unixepoch() * 1000, ?2)
                   ON CONFLICT (key) DO UPDATE SET body = ?2";
        self.beside().execute(sql, params![key.as_str(), bytes]).unwrap();
    }
}

#[async_trait]
impl TransactionsUnderTest for InFile {
    async fn open_elsewhere(&self) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(&self.0.path().join("elsewhere.db"), Options::default()).unwrap())
    }

    async fn effects(&self, key: &Key) -> usize {
        self.count(key)
    }

    async fn run(
        &self,
        ledger: &Ledger,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        script: Arc<Script>,
    ) -> Result<Outcome<String>> {
        let handler = move |tx: &Transaction<'_>, context: &Context| {
            add_effect(tx, context.key());
            script.play_blocking()
        };
        if wait_max.is_zero() {
            ledger.run_in_transaction(task, policy, handler).await
        } else {
            ledger.run_in_transaction_or_wait(task, policy, wait_max, handler).await
        }
    }

    async fn begin(&self) -> Box<dyn ByHand> {
        let (asks, asked) = mpsc::channel();
        let conn = self.beside();
        std::thread::spawn(move || serve(conn, &asked));
        Box::new(OnThread { asks })
    }

    async fn step(
        &self,
        context: &Context,
        name: &str,
        input: u32,
        script: Arc<Script>,
        end: StepEnd,
    ) -> Result<String, Failure> {
        let (context, name, mut conn) = (context.clone(), name.to_owned(), self.beside());
        let step = tokio::task::spawn_blocking(move || {
            let tx = conn.transaction()?;
            let value = context.step_in_with(&tx, &name, &input, |_| {
                add_effect(&tx, context.key());
                script.play_blocking()
            })?;
            match end {
                StepEnd::Commit => tx.commit()?,
                StepEnd::RollBack => tx.rollback()?,
            }
            Ok(value)
        });
        step.await.unwrap()
    }
}

type Ask = Box<dyn FnOnce(&Transaction<'_>) + Send>;

enum Asked {
    Do(Ask),
    End(StepEnd, oneshot::Sender<()>),
}

/// A transaction on a thread of its own, since it cannot leave the thread that began it.
struct OnThread {
    asks: mpsc::Sender<Asked>,
}

fn serve(mut conn: Connection, asked: &mpsc::Receiver<Asked>) {
    let tx = conn.transaction().unwrap();
    while let Ok(asked) = asked.recv() {
        match asked {
            Asked::Do(ask) => ask(&tx),
            Asked::End(end, ended) => {
                match end {
                    StepEnd::Commit => tx.commit().unwrap(),
                    StepEnd::RollBack => tx.rollback().unwrap(),
                }
                let _ = ended.send(());
                return;
            }
        }
    }
}

impl OnThread {
    async fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&Transaction<'_>) -> T + Send + 'static) -> T {
        let (answer, answered) = oneshot::channel();
        let ask: Ask = Box::new(move |tx| {
            let _ = answer.send(ask(tx));
        });
        self.asks.send(Asked::Do(ask)).unwrap();
        answered.await.unwrap()
    }

    async fn end(self, end: StepEnd) {
        let (ended, has_ended) = oneshot::channel();
        self.asks.send(Asked::End(end, ended)).unwrap();
        has_ended.await.unwrap();
    }
}

#[async_trait]
impl ByHand for OnThread {
    async fn lock(&mut self, claim: Claim) -> (Claim, Result<()>) {
        self.ask(move |tx| {
            let locked = claim.lock_in(tx);
            (claim, locked)
        })
        .await
    }

    async fn add_effect(&mut self, key: &Key) {
        let key = key.clone();
        self.ask(move |tx| add_effect(tx, &key)).await;
    }

    async fn complete(&mut self, claim: Claim, output: Output) -> Result<Completion, Refused> {
        self.ask(move |tx| claim.complete_in(tx, output)).await
    }

    async fn commit(self: Box<Self>) {
        self.end(StepEnd::Commit).await;
    }

    async fn roll_back(self: Box<Self>) {
        self.end(StepEnd::RollBack).await;
    }
}

transaction_suite!(open);
