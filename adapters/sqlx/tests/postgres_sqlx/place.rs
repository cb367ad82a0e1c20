//! A database with the ledger's schema and a table of effects, and a pool of sqlx on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool, Row as _};
use taskonce_core::host::Host;
use taskonce_core::json::Input;
use taskonce_core::key::{Handler, Key, Task};
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::State;
use taskonce_core::store::Store;
use taskonce_postgres::{PostgresStore, grants_sql, migration_sql};
use taskonce_testkit::postgres::Database;
use taskonce_testkit::shared;
use taskonce_worker::{Heart, SystemHost};

/// Who runs the tests.
pub(crate) const WORKER: &str = "taskonce_sqlx_payer";
/// The schema of the tests; not the one by default.
pub(crate) const SCHEMA: &str = "tasks_by_sqlx";
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The statement that is the effect of a task.
pub(crate) const EFFECT: &str = "insert into effect (key) values ($1)";

pub(crate) struct Place {
    pub(crate) database: Database,
}

impl Place {
    pub(crate) fn new() -> Place {
        let database = shared::database().unwrap();
        let role = format!(
            "do $$ begin create role {WORKER} login; exception when duplicate_object or unique_violation then null; end $$;"
        );
        let (schema, grants) = (migration_sql(SCHEMA).unwrap(), grants_sql(SCHEMA, WORKER).unwrap());
        let effects = "create table effect (key text); create table counter (id int primary key, n int); \
                       insert into counter values (1, 0), (2, 0);";
        database.psql(&format!("{role} {schema} {grants} {effects} grant all on effect, counter to {WORKER}")).unwrap();
        Place { database }
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        let url = format!("{}?schema={SCHEMA}&timeout=20s", self.database.url_of(WORKER));
        Arc::new(PostgresStore::from_url(&url).unwrap())
    }

    /// A ledger, as a process has it.
    pub(crate) fn ledger(&self) -> Ledger {
        let host: Arc<dyn Host> = Arc::new(SystemHost::new());
        let heart = Heart::new(self.store(), Arc::clone(&host));
        Ledger::new(self.store(), host, Arc::new(heart))
    }

    /// A pool whose sessions have these settings, on what listens at this port.
    pub(crate) async fn pool_at(&self, port: u16, connections: u32, settings: &'static str) -> PgPool {
        self.pool_of(WORKER, port, connections, settings).await
    }

    /// The same of another role.
    pub(crate) async fn pool_of(&self, role: &str, port: u16, connections: u32, settings: &'static str) -> PgPool {
        let url = format!("postgres://{role}@127.0.0.1:{port}/{}?sslmode=disable", self.database.name());
        let options = PgPoolOptions::new().max_connections(connections).after_connect(move |connection, _| {
            Box::pin(async move { sqlx::raw_sql(settings).execute(connection).await.map(drop) })
        });
        options.connect(&url).await.unwrap()
    }

    pub(crate) async fn pool(&self) -> PgPool {
        self.pool_at(self.database.port(), 2, "").await
    }

    /// What the superuser counts.
    pub(crate) fn count(&self, sql: &str) -> usize {
        self.database.psql(sql).unwrap().parse().unwrap()
    }

    pub(crate) fn effects(&self, key: &Key) -> usize {
        self.count(&format!("select count(*) from effect where key = '{key}'"))
    }

    /// One statement by the superuser; `{schema}` in it is the schema.
    pub(crate) fn beside(&self, sql: &str) {
        self.database.psql(&sql.replace("{schema}", &format!("\"{SCHEMA}\""))).unwrap();
    }
}

pub(crate) fn task(id: &str) -> Task {
    Handler::within("billing", "pay", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap()
}

pub(crate) fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::new(Effect::Transactional) }
}

pub(crate) async fn state(ledger: &Ledger, task: &Task) -> State {
    ledger.show(&task.key).await.unwrap().unwrap().record.state
}

/// Waits for a condition that another process or thread brings about.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What a session says.
pub(crate) async fn says(connection: &mut sqlx::PgConnection, sql: &str) -> String {
    sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await.unwrap().get(0)
}
