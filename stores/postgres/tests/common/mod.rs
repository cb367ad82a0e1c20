//! A database with the schema, and a user who may do what a worker needs and nothing else.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it, and a test may")]

use std::sync::OnceLock;

use taskonce_postgres::{PostgresStore, grants_sql, migrate, plain_sql};
use taskonce_testkit::PgBouncer;
use taskonce_testkit::postgres::Database;
use taskonce_testkit::shared;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls};

/// The schema of the tests; not the one by default.
pub(crate) const SCHEMA: &str = "Tasks_of_tests";
/// Who runs the tests.
pub(crate) const WORKER: &str = "taskonce_worker";

/// A database of its own, and the way to it.
pub(crate) struct Place {
    pub(crate) database: Database,
    pooler: Option<PgBouncer>,
    beside: OnceLock<Client>,
}

impl Place {
    /// On the shared server, reached directly.
    pub(crate) async fn direct() -> Place {
        Place::of(shared::database().unwrap()).await
    }

    /// On the shared server, behind a pooler with so many connections.
    pub(crate) async fn pooled(connections: u32) -> Place {
        let place = Place::direct().await;
        let pooler = PgBouncer::start(place.database.port(), connections, &[WORKER], "").unwrap();
        Place { pooler: Some(pooler), ..place }
    }

    /// In this database, which is empty.
    pub(crate) async fn of(database: Database) -> Place {
        migrate(&format!("{}?schema={SCHEMA}", database.url())).await.unwrap();
        let role = format!(
            "do $$ begin create role {WORKER} login; exception when duplicate_object or unique_violation then null; end $$;"
        );
        database.psql(&format!("{role} {}", grants_sql(SCHEMA, WORKER).unwrap())).unwrap();
        Place { database, pooler: None, beside: OnceLock::new() }
    }

    /// The store's URL, with more options.
    pub(crate) fn url_with(&self, options: &str) -> String {
        let port = self.pooler.as_ref().map_or(self.database.port(), PgBouncer::port);
        format!("postgres://{WORKER}@127.0.0.1:{port}/{}?schema={SCHEMA}&{options}", self.database.name())
    }

    /// A store of its own.
    pub(crate) fn store(&self) -> PostgresStore {
        self.store_with("timeout=20s")
    }

    /// The same with other options.
    pub(crate) fn store_with(&self, options: &str) -> PostgresStore {
        PostgresStore::from_url(&self.url_with(options)).unwrap()
    }

    /// A connection past the store, as the worker's user.
    pub(crate) async fn client(&self) -> Client {
        connect(&self.database.url_of(WORKER)).await
    }

    /// Sends a statement past the store; `{schema}` in it is the schema.
    pub(crate) async fn beside(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Vec<tokio_postgres::Row> {
        if self.beside.get().is_none() {
            let _ = self.beside.set(connect(&self.database.url()).await);
        }
        let client = self.beside.get().unwrap();
        client.query(&plain_sql(sql, SCHEMA), parameters).await.unwrap()
    }
}

/// A connection of the tests' own.
pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async move {
        let _ended = connection.await;
    });
    client
}
