//! A database with the ledger's schema and a table of effects, and a user who may do what a worker needs and nothing else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce::postgres::tokio_postgres::types::ToSql;
use taskonce::postgres::tokio_postgres::{Client, Row};
use taskonce::{Backoff, Effect, Found, Handler, Input, Key, Ledger, Policy, State, Task};
use taskonce_testkit::postgres::Database;
use taskonce_testkit::shared;

use crate::shop::ROLE;
pub(crate) use crate::shop::{WORKER, connect};

/// The schema of the tests; not the one by default.
pub(crate) const SCHEMA: &str = "Tasks_of_tests";
/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A database of its own, and the way to it.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) database: Arc<Database>,
    /// Where clients connect to: the server, or what stands before it.
    pub(crate) port: u16,
}

impl Place {
    /// On the shared server.
    pub(crate) fn new() -> Place {
        Place::of(shared::database().unwrap())
    }

    /// In this database, which is empty.
    pub(crate) fn of(database: Database) -> Place {
        let schema = taskonce::migration_sql(&format!("{}?schema={SCHEMA}", database.url()), Some(WORKER));
        database.psql(&format!("{ROLE} {}", schema.unwrap().unwrap())).unwrap();
        let effects = "create table effect (key text, at timestamptz default clock_timestamp(), worker text);
            create table counter (id int primary key, n int);
            insert into counter select i, 0 from generate_series(1, 100) i;";
        database.psql(&format!("{effects} grant all on effect, counter to {WORKER}")).unwrap();
        let port = database.port();
        Place { database: Arc::new(database), port }
    }

    /// The same database, reached through what listens at this port.
    pub(crate) fn through(&self, port: u16) -> Place {
        Place { port, ..self.clone() }
    }

    /// The store's URL, with more options.
    pub(crate) fn url_with(&self, options: &str) -> String {
        let name = self.database.name();
        format!("postgres://{WORKER}@127.0.0.1:{}/{name}?schema={SCHEMA}&{options}", self.database.port())
    }

    /// A ledger, as a process has it, by the straight way.
    pub(crate) fn ledger(&self) -> Ledger {
        taskonce::open(&self.url_with("timeout=20s")).unwrap()
    }

    /// A connection of the worker's user for transactions.
    pub(crate) async fn client(&self) -> Client {
        self.client_with("").await
    }

    /// The same with settings of the session.
    pub(crate) async fn client_with(&self, settings: &str) -> Client {
        let client = connect(&self.client_url()).await;
        client.batch_execute(settings).await.unwrap();
        client
    }

    pub(crate) fn client_url(&self) -> String {
        format!("postgres://{WORKER}@127.0.0.1:{}/{}", self.port, self.database.name())
    }

    /// One statement by the superuser; `{schema}` in it is the schema.
    pub(crate) async fn beside(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Vec<Row> {
        let client = connect(&self.database.url()).await;
        client.query(&sql.replace("{schema}", &format!("\"{SCHEMA}\"")), parameters).await.unwrap()
    }

    /// How many effects of a key are committed.
    pub(crate) async fn effects(&self, key: &Key) -> usize {
        let rows = self.beside("select count(*) from effect where key = $1", &[&key.as_str()]).await;
        usize::try_from(rows[0].get::<_, i64>(0)).unwrap()
    }
}

pub(crate) fn task(id: &str) -> Task {
    Handler::within("billing", "pay", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap()
}

pub(crate) fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::new(Effect::Transactional) }
}

/// The statement that is the effect of a task.
pub(crate) const EFFECT: &str = "insert into effect (key) values ($1)";

pub(crate) async fn found(ledger: &Ledger, task: &Task) -> Found {
    ledger.show(&task.key).await.unwrap().unwrap()
}

pub(crate) async fn state(ledger: &Ledger, task: &Task) -> State {
    found(ledger, task).await.record.state
}

/// Waits for a condition that another process or thread brings about.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
