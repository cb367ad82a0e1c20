//! A PostgreSQL database of effects, other than the ledger's, and the suite's driver on it, by tokio-postgres.

#![allow(dead_code, reason = "no binary uses all of it")]

use std::sync::Arc;

use async_trait::async_trait;
use taskonce::Failure;
use taskonce::postgres::Beside as _;
use taskonce::postgres::tokio_postgres::{self, Client, NoTls};
use taskonce::store::Store;
use taskonce_contract::beside::BesideUnderTest;
use taskonce_contract::transactional::Script;
use taskonce_testkit::postgres::Database;
use taskonce_testkit::shared;
use taskonce_worker::steps::StepOf;

/// Who runs the tests.
pub(crate) const WORKER: &str = "taskonce_payer";
/// Makes that role, of the whole server: other tests make it too.
pub(crate) const ROLE: &str = "do $$ begin create role taskonce_payer login; \
    exception when duplicate_object or unique_violation then null; end $$;";

/// A connection of a test's own.
pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The database of the effects.
pub(crate) struct Shop(pub(crate) Database);

impl Shop {
    /// With the table of steps.
    pub(crate) fn new() -> Shop {
        let shop = Shop::without_table();
        shop.make_table();
        shop
    }

    pub(crate) fn without_table() -> Shop {
        let database = shared::database().unwrap();
        // Only appended to, and no unique index: an effect that happened twice is counted twice.
        database
            .psql(&format!("{ROLE} create table effect (key text not null); grant all on effect to {WORKER}"))
            .unwrap();
        Shop(database)
    }

    /// From its printed SQL, by somebody else than the worker, who may do what that says and nothing else.
    pub(crate) fn make_table(&self) {
        self.0.psql(&taskonce::steps_sql(&self.0.url(), Some(WORKER)).unwrap()).unwrap();
    }

    pub(crate) fn url_at(&self, port: u16) -> String {
        format!("postgres://{WORKER}@127.0.0.1:{port}/{}", self.0.name())
    }

    pub(crate) fn url(&self) -> String {
        self.url_at(self.0.port())
    }

    pub(crate) async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    fn count(&self, sql: &str) -> usize {
        self.0.psql(sql).unwrap().parse().unwrap()
    }

    pub(crate) fn effects(&self) -> usize {
        self.count("select count(*) from effect")
    }

    pub(crate) fn rows(&self) -> usize {
        self.count("select count(*) from taskonce_step")
    }

    /// Whether a session waits for another's transaction to end.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.count(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        ) > 0
    }
}

/// The driver, and the way to a store of the ledger's, which it keeps alive.
pub(crate) struct ByTokioPostgres {
    shop: Shop,
    /// Settings of each session.
    settings: &'static str,
    ledger: Box<dyn Fn() -> Arc<dyn Store> + Send + Sync>,
}

impl ByTokioPostgres {
    pub(crate) fn new(settings: &'static str, ledger: impl Fn() -> Arc<dyn Store> + Send + Sync + 'static) -> Self {
        ByTokioPostgres { shop: Shop::without_table(), settings, ledger: Box::new(ledger) }
    }

    async fn step_on(mut client: Client, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        let run = step.beside(&mut client, |tx, _step| {
            let script = Arc::clone(&script);
            Box::pin(async move {
                tx.execute("insert into effect values ('booked')", &[]).await?;
                Ok(script.play().await?)
            })
        });
        run.await
    }

    async fn client(&self) -> Client {
        let client = self.shop.client().await;
        client.batch_execute(self.settings).await.unwrap();
        client
    }
}

#[async_trait]
impl BesideUnderTest for ByTokioPostgres {
    async fn ledger(&self) -> Arc<dyn Store> {
        (self.ledger)()
    }

    async fn make_table(&self) {
        self.shop.make_table();
    }

    async fn effects(&self) -> usize {
        self.shop.effects()
    }

    async fn rows(&self) -> usize {
        self.shop.rows()
    }

    async fn is_waited_for(&self) -> bool {
        self.shop.is_waited_for()
    }

    async fn step(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        ByTokioPostgres::step_on(self.client().await, step, script).await
    }

    async fn step_in_an_open_transaction(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        let client = self.client().await;
        client.batch_execute("begin; insert into effect values ('stray')").await.unwrap();
        ByTokioPostgres::step_on(client, step, script).await
    }
}
