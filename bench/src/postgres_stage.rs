//! A PostgreSQL server with everybody who is measured on it: a ledger, and bare connections beside it.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use taskonce::{Ledger, Policy, Task};
use taskonce_testkit::PostgresServer;
use tokio::task::block_in_place;
use tokio_postgres::{Client, NoTls, Statement};

use crate::cores::Cores;
use crate::setup::{self, run_once};

/// The database that the benches use.
const DATABASE: &str = "postgres";
/// How many records one statement copies.
const COPIED_AT_ONCE: u64 = 500_000;

/// A server, a ledger over it, and bare connections to it.
pub(crate) struct Stage {
    server: PostgresServer,
    pub(crate) ledger: Ledger,
    pub(crate) policy: Policy,
    pub(crate) bare: Vec<Bare>,
    width: usize,
}

/// A connection by tokio-postgres with prepared statements, as a program without taskonce has it.
pub(crate) struct Bare {
    client: Client,
    insert: Statement,
    update: Statement,
    read: Statement,
    body: Arc<Vec<u8>>,
}

impl Bare {
    /// A connection of a caller's own.
    pub(crate) async fn connect(url: &str) -> Result<Client> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    async fn new(url: &str, body: Arc<Vec<u8>>) -> Result<Bare> {
        let client = Bare::connect(url).await?;
        let insert = client.prepare("insert into bare (key, body) values ($1, $2) on conflict do nothing").await?;
        let update = client.prepare("update bare set body = $2 where key = $1").await?;
        let read = client.prepare("select body from bare where key = $1").await?;
        Ok(Bare { client, insert, update, read, body })
    }

    pub(crate) async fn insert(&self, key: &str) -> Result<()> {
        let rows = self.client.execute(&self.insert, &[&key, &*self.body]).await?;
        ensure!(rows == 1, "the row was there");
        Ok(())
    }

    pub(crate) async fn update(&self, key: &str) -> Result<()> {
        let rows = self.client.execute(&self.update, &[&key, &*self.body]).await?;
        ensure!(rows == 1, "the row was not there");
        Ok(())
    }

    pub(crate) async fn read(&self, key: &str) -> Result<()> {
        let row = self.client.query_one(&self.read, &[&key]).await?;
        let body: &[u8] = row.get(0);
        ensure!(body.len() == self.body.len(), "another row");
        Ok(())
    }
}

impl Stage {
    /// A server of its own with the schema, and so many bare connections.
    pub(crate) async fn open(clients: usize) -> Result<Arc<Stage>> {
        Stage::over(block_in_place(|| PostgresServer::start(&[]))?, clients).await
    }

    /// The same with the server on cores of its own.
    pub(crate) async fn open_apart(clients: usize, cores: Cores) -> Result<Arc<Stage>> {
        let server = block_in_place(|| cores.on_servers(|| PostgresServer::start(&[])))?;
        Stage::over(server, clients).await
    }

    async fn over(server: PostgresServer, clients: usize) -> Result<Arc<Stage>> {
        let url = server.url(DATABASE);
        taskonce::migrate(&url).await?;
        let ledger = setup::ledger(&url)?;
        let policy = setup::policy();
        // Connections are made before anything is measured.
        let mut running = tokio::task::JoinSet::new();
        for task in setup::tasks(64)? {
            let (ledger, policy) = (ledger.clone(), policy.clone());
            running.spawn(async move { run_once(&ledger, &task, &policy).await });
        }
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        let mut stage = Stage { server, ledger, policy, bare: Vec::new(), width: 0 };
        stage.psql(
            "create table bare (key text collate \"C\" primary key, body bytea not null) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02)",
        )?;
        // As wide as our rows, key and all: what is left of one without its key and the head of a row.
        let width: usize = stage.number("select avg(pg_column_size(t))::bigint from taskonce.task t")?.try_into()?;
        let key = setup::tasks(1)?[0].key.as_str().len();
        let empty: usize = stage
            .number(&format!("select pg_column_size(r) from (select repeat('k', {key})::text, ''::bytea) r"))?
            .try_into()?;
        let body = Arc::new(vec![b'x'; width.saturating_sub(empty).max(1)]);
        stage.width = width;
        for _ in 0..clients {
            stage.bare.push(Bare::new(&url, Arc::clone(&body)).await?);
        }
        Ok(Arc::new(stage))
    }

    /// One more bare connection, as another process has it.
    pub(crate) async fn another_bare(&self) -> Result<Bare> {
        let bare = Bare::new(&self.url(), Arc::clone(&self.bare[0].body)).await?;
        for task in &setup::tasks(8)? {
            bare.pair(task.key.as_str()).await?;
        }
        Ok(bare)
    }

    /// A ledger that has met no task yet, as another process has it, and whose connection is made.
    pub(crate) async fn another_process(&self) -> Result<Ledger> {
        let ledger = setup::ledger(&self.url())?;
        for task in &setup::tasks(8)? {
            run_once(&ledger, task, &self.policy).await?;
        }
        Ok(ledger)
    }

    /// Its URL for its superuser.
    pub(crate) fn url(&self) -> String {
        self.server.url(DATABASE)
    }

    /// How wide our rows are, in bytes.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn psql(&self, script: &str) -> Result<String> {
        block_in_place(|| self.server.psql(DATABASE, script))
    }

    /// A number that a query answers.
    pub(crate) fn number(&self, query: &str) -> Result<i64> {
        let said = self.psql(query)?;
        said.trim().parse().with_context(|| format!("`{query}` answered `{said}`"))
    }

    /// Done tasks, each with a bare row beside it.
    pub(crate) async fn done(&self, count: usize) -> Result<Vec<Task>> {
        let tasks = setup::tasks(count)?;
        for task in &tasks {
            run_once(&self.ledger, task, &self.policy).await?;
            self.bare[0].insert(task.key.as_str()).await?;
        }
        Ok(tasks)
    }

    /// Updates of our table, and those of them that touched no index, by the server's own count.
    pub(crate) fn updates(&self) -> Result<(i64, i64)> {
        let of = |column: &str| {
            self.number(&format!(
                "select {column} from pg_stat_user_tables where schemaname = 'taskonce' and relname = 'task'"
            ))
        };
        Ok((of("n_tup_upd")?, of("n_tup_hot_upd")?))
    }

    /// The number of the next transaction that writes. Asking takes one.
    pub(crate) fn transactions(&self) -> Result<i64> {
        self.number("select txid_current()")
    }

    /// How often our table was looked at, whichever way the planner took, by the server's own count.
    pub(crate) fn reads(&self) -> Result<i64> {
        self.number(
            "select seq_scan + idx_scan from pg_stat_user_tables where schemaname = 'taskonce' and relname = 'task'",
        )
    }

    /// Fills our table with copies of a done record that the ledger wrote.
    pub(crate) async fn fill(&self, count: u64) -> Result<()> {
        let example = setup::numbered_task(count)?;
        run_once(&self.ledger, &example, &self.policy).await?;
        let (key, width) = (example.key.as_str(), setup::id_width());
        let beginning = &key[..key.len() - width];
        let columns = self.psql(
            "select string_agg(quote_ident(column_name), ', ') from information_schema.columns
             where table_schema = 'taskonce' and table_name = 'task' and column_name <> 'key'",
        )?;
        let columns = columns.trim();
        let mut first = 0;
        while first < count {
            let last = (first + COPIED_AT_ONCE).min(count) - 1;
            self.psql(&format!(
                "set synchronous_commit = off;
                 insert into taskonce.task (key, {columns})
                 select '{beginning}' || lpad(n::text, {width}, '0'), {columns}
                 from taskonce.task, generate_series({first}::bigint, {last}) n where key = '{key}'"
            ))?;
            first = last + 1;
        }
        self.psql("vacuum (analyze) taskonce.task")?;
        self.psql("checkpoint").map(drop)
    }

    /// How many records there are, by the planner's guess.
    pub(crate) fn count(&self) -> Result<i64> {
        self.number("select reltuples::bigint from pg_class where oid = 'taskonce.task'::regclass")
    }
}
