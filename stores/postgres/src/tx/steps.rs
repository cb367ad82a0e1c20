//! The table of steps whose effects live in this database while the ledger's records live elsewhere: its SQL, the
//! statements that drivers run on it, and how it is made and purged.
//!
//! A step's row is inserted first of all in the transaction of its effect: who inserts it runs the step.

use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::{Failure, Output};
use taskonce_core::step::StepRow;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, Transaction};

use crate::connect::{Connection, Dial, Schema};
use crate::fault::Fault;
use crate::joint::{Meaning, Met, SESSION, SILENCE_MIN, at_most};
use crate::migrate::{LOCK, MIGRATION_MAX, Migrated, check, one, quoted_role};
use crate::tx;
use crate::url::Settings;

/// The table's name. Statements name it without a schema: it is where the connection's `search_path` finds it.
pub const TABLE: &str = "taskonce_step";
/// The version of the table that this program knows; it stands in the table's comment.
const VERSION: u32 = 1;
/// The most rows that one statement removes.
const PURGE_MAX: i64 = 1000;
/// The most statements of one purge: a table that grows as fast as it is purged must not hold the caller for ever.
const BATCHES_MAX: usize = 100_000;
/// The oldest that a purge can be told to leave, in years: what is older is a slip of the pen.
const AGE_MAX: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// The columns and what they hold.
const COLUMNS: &str = r#"    operation   text collate "C" not null,      -- the task's key, namespace/handler@version/id
    step        text collate "C" not null,      -- its name
    input       bytea   not null,               -- the digest of its input, 16 bytes
    output      bytea,                          -- what it returned
    output_type text,                           -- and in which encoding, as in the record
    attempt     integer not null,               -- the attempt of the task that ran it
    done_at     timestamptz not null default clock_timestamp(),
    primary key (operation, step)
"#;

/// Inserts the row: `$1` the task's key, `$2` the step's name, `$3` the digest of its input, `$4` the attempt. One row: the step
/// is to run, in this transaction. None: another run has ended it. While another run is under way it waits for the end of that.
pub const STEP_INSERT: &str = "insert into taskonce_step (operation, step, input, attempt) values ($1, $2, $3, $4) \
                               on conflict (operation, step) do nothing returning attempt";
/// Reads the row: `$1` the task's key, `$2` the step's name.
pub const STEP_READ: &str =
    "select input, output, output_type, attempt from taskonce_step where operation = $1 and step = $2";
/// Writes what the step returned into the row that this transaction has inserted: `$3` its bytes, `$4` what they are. It must
/// change one row: none means that the transaction was over already.
pub const STEP_WRITE: &str = "update taskonce_step set output = $3, output_type = $4 where operation = $1 and step = $2 \
                              and current_setting('taskonce.step', true) = pg_current_xact_id()::text";

/// The first statement of all: marks the transaction, and bounds how long it waits for a lock and how long it may be silent: for
/// a lease, at least 5 s, unless the session's own limits are shorter. Its commit waits for the disk, whatever the session says: the
/// ledger will hold that the step took effect. Its row has in column 4 the session's process id (`int4`), and in column 5 when the
/// transaction began, in microseconds since 1970 (`int8`): both name what may have to be cancelled.
#[must_use]
pub fn step_limits_sql(lease: Duration) -> String {
    let limit = lease.max(SILENCE_MIN).as_millis();
    format!(
        "select set_config('taskonce.step', pg_current_xact_id()::text, true),
                set_config('lock_timeout', {}, true),
                set_config('idle_in_transaction_session_timeout', {}, true),
                set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), true),
                {SESSION}",
        at_most("current_setting('lock_timeout')", limit),
        at_most("current_setting('idle_in_transaction_session_timeout')", limit)
    )
}

/// Asked before the transaction is begun, each on its own: the first sets what ends with the transaction that it stands in, and the
/// second says whether it is still set. Then somebody's transaction is open on the connection, and a step must not join it.
pub const OPEN_MARK: &str = "select set_config('taskonce.open', 'yes', true)";
/// The second.
pub const OPEN_READ: &str = "select coalesce(current_setting('taskonce.open', true), '') = 'yes'";

/// Demands that no transaction is open on the connection of a step, and leaves one that is as it was. For drivers.
///
/// # Errors
/// [`ErrorKind::WrongState`] where one is open; what the server answered, and what that means.
pub async fn check_no_transaction(client: &Client, key: &Key, name: &str) -> Result<(), Met> {
    // Sent in this order, without waiting for one another: one round trip.
    let (marked, open) = tokio::join!(biased; client.query_typed(OPEN_MARK, &[]), client.query_typed(OPEN_READ, &[]));
    let met = |error| met_at_open(key, name, tx::met(key, &error));
    marked.map_err(met)?;
    let rows = open.map_err(met)?;
    match rows.first().map(|row| row.try_get(0)).transpose().map_err(met)? {
        Some(true) => Err(transaction_is_open(key, name)),
        Some(false) | None => Ok(()),
    }
}

/// What an error of those two means: a transaction that has failed is open, too.
fn met_at_open(key: &Key, name: &str, met: Met) -> Met {
    if met.meaning == Meaning::Aborted { transaction_is_open(key, name) } else { met }
}

/// What it means that a transaction is open on the connection of a step.
#[must_use]
pub fn transaction_is_open(key: &Key, name: &str) -> Met {
    let what =
        format!("a transaction is open on the connection of step `{name}`, which would not commit by itself there");
    let error = Error::new(ErrorKind::WrongState, what).about(format!("task `{key}`")).with_hint(
        "commit or roll back before the step, or give it another connection; one that a pool lent so is to be closed",
    );
    Met { meaning: Meaning::Unusable, error }
}

/// What an error of the statements on the table means: one that is missing is told with how to make it.
#[must_use]
pub fn met_at_step(key: &Key, met: Met) -> Met {
    if met.error.kind() != ErrorKind::NoSchema {
        return met;
    }
    let error = Error::new(ErrorKind::NoSchema, format!("the database of the step's effect has no table `{TABLE}`, or an older one"))
        .about(format!("task `{key}`"))
        .with_hint("run `taskonce migrate --steps --store URL` with the URL of that database; the connection's `search_path` has to find the table");
    Met { error, ..met }
}

/// What the row of a step says to who comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepEntry {
    /// This transaction has inserted it: the step runs, and its value is written by [`end_step`].
    Run,
    /// Another run has ended it.
    Done(StepRow),
    /// Another run came in between, or its row was removed: roll back, and begin anew. A snapshot from before the other's
    /// commit cannot see its row, a new one can.
    Anew,
}

/// Inserts a step's row, or reads the one that is there, in one round trip. To be called before anything else in the
/// transaction. For drivers.
///
/// # Errors
/// What the server answered, and what that means; [`ErrorKind::NoSchema`] with the command that makes the table.
pub async fn enter_step(
    tx: &Transaction<'_>,
    key: &Key,
    name: &str,
    input: &[u8],
    attempt: u32,
    lease: Duration,
) -> Result<StepEntry, Met> {
    let (limits, attempt) = (step_limits_sql(lease), i32::try_from(attempt).unwrap_or(i32::MAX));
    let operation = key.as_str();
    let row: [(&(dyn ToSql + Sync), Type); 4] =
        [(&operation, Type::TEXT), (&name, Type::TEXT), (&input, Type::BYTEA), (&attempt, Type::INT4)];
    let asked: [(&(dyn ToSql + Sync), Type); 2] = [(&operation, Type::TEXT), (&name, Type::TEXT)];
    // Sent in this order, without waiting for one another: one round trip.
    let (limited, inserted, found) = tokio::join!(biased;
        tx.query_typed(&limits, &[]), tx.query_typed(STEP_INSERT, &row), tx.query_typed(STEP_READ, &asked));
    let met = |error| met_at_step(key, tx::met(key, &error));
    limited.map_err(met)?;
    match inserted {
        Ok(rows) if rows.is_empty() => {}
        Ok(_mine) => return Ok(StepEntry::Run),
        Err(error) if error.code().is_some_and(|code| is_overtaken(code.code())) => return Ok(StepEntry::Anew),
        Err(error) => return Err(met(error)),
    }
    match found.map_err(met)?.first() {
        None => Ok(StepEntry::Anew),
        Some(row) => step_row(row).map(StepEntry::Done).map_err(met),
    }
}

/// Whether a code of [`STEP_INSERT`] says that another run of the step came in between: a serialisation failure, a deadlock.
#[must_use]
pub fn is_overtaken(code: &str) -> bool {
    ["40001", "40P01"].contains(&code)
}

fn step_row(row: &Row) -> Result<StepRow, tokio_postgres::Error> {
    let (output, output_type): (Option<Vec<u8>>, Option<String>) = (row.try_get(1)?, row.try_get(2)?);
    let attempt: i32 = row.try_get(3)?;
    Ok(StepRow { input: row.try_get(0)?, output: output_type.zip(output), attempt: attempt.unsigned_abs() })
}

/// Writes what a step returned into its row, in the transaction that has inserted it. For drivers.
///
/// # Errors
/// [`ErrorKind::WrongState`] where that transaction is over; what the server answered, and what that means.
pub async fn end_step(tx: &Transaction<'_>, key: &Key, name: &str, output: &Output) -> Result<(), Met> {
    let (bytes, content_type) = step_output(output);
    let operation = key.as_str();
    let row: [(&(dyn ToSql + Sync), Type); 4] =
        [(&operation, Type::TEXT), (&name, Type::TEXT), (&bytes, Type::BYTEA), (&content_type, Type::TEXT)];
    let written = tx.execute_typed(STEP_WRITE, &row).await.map_err(|error| met_at_step(key, tx::met(key, &error)))?;
    if written == 1 { Ok(()) } else { Err(step_is_over(key, name)) }
}

/// What [`STEP_WRITE`] takes of an output: its bytes, and what they are.
#[must_use]
pub fn step_output(output: &Output) -> (Option<&[u8]>, Option<&str>) {
    match output {
        Output::Kept { content_type, bytes } => (Some(bytes), Some(content_type)),
        Output::Nothing | Output::Dropped(_) => (None, None),
    }
}

/// What it means that [`STEP_WRITE`] changed no row.
#[must_use]
pub fn step_is_over(key: &Key, name: &str) -> Met {
    let what = format!("the transaction of step `{name}` was over before its code returned");
    let error = Error::new(ErrorKind::WrongState, what)
        .about(format!("task `{key}`"))
        .with_hint("neither commit nor roll back by a statement of your own: return from the step instead");
    Met { meaning: Meaning::Refused, error }
}

/// The failure of a step that could not begin: nothing of it has run.
#[must_use]
pub fn step_not_begun(met: &Met) -> Failure {
    Failure::retryable(told(met)).nothing_happened()
}

/// The failure of a step that other runs of it came before, each time that it was begun.
#[must_use]
pub fn step_overtaken(name: &str) -> Failure {
    Failure::retryable(format!("step `{name}` was overtaken each time by other runs of it")).nothing_happened()
}

/// The failure of a step whose value could not be written into its row.
#[must_use]
pub fn step_not_ended(met: &Met, name: &str) -> Failure {
    match met.meaning {
        Meaning::Aborted => Failure::retryable(format!(
            "a statement of step `{name}` failed, and its code went on: the transaction could not commit"
        )),
        Meaning::Again
        | Meaning::Broken
        | Meaning::Lost
        | Meaning::Refused
        | Meaning::RolledBack
        | Meaning::Unusable => Failure::retryable(told(met)),
    }
}

/// The failure of a step whose commit has no answer.
#[must_use]
pub fn step_not_answered(met: &Met, name: &str) -> Failure {
    Failure::retryable(format!(
        "the commit of step `{name}` was not answered, and the next run finds its row or runs it: {}",
        met.error
    ))
}

fn told(met: &Met) -> String {
    format!("{}: {}", met.error, met.error.hint())
}

/// The SQL that makes the table, in a schema or where the `search_path` says. Safe to run again.
///
/// Workers need less than who makes it: see [`step_grants_sql`].
///
/// # Errors
/// [`ErrorKind::BadUrl`] for what is no name of a schema.
pub fn step_table_sql(schema: Option<&str>) -> Result<String> {
    if let Some(schema) = schema {
        check(schema)?;
    }
    let table = table(schema);
    Ok(format!(
        "-- A row for each step whose effect is in this database; taskonce, version {VERSION}.\n\
         create table if not exists {table} (\n{COLUMNS});\n\
         create index if not exists {TABLE}_done_at on {table} (done_at);\n\
         comment on table {table} is 'taskonce steps, version {VERSION}';\n"
    ))
}

/// What the role of a worker's connection needs on the table, and no more; a purge needs `delete`, too. To be run by whoever made the
/// table, after it.
///
/// # Errors
/// [`ErrorKind::BadUrl`] for what is no name of a schema, or a role with a zero byte.
pub fn step_grants_sql(schema: Option<&str>, role: &str) -> Result<String> {
    let role = quoted_role(role)?;
    let mut sql = String::new();
    if let Some(schema) = schema {
        check(schema)?;
        sql = format!("grant usage on schema \"{schema}\" to {role};\n");
    }
    sql.push_str(&format!("grant select, insert, update on {} to {role};\n", table(schema)));
    Ok(sql)
}

fn table(schema: Option<&str>) -> String {
    schema.map_or_else(|| TABLE.to_owned(), |schema| format!("\"{schema}\".{TABLE}"))
}

/// The schema that a URL names for the table, if it names one.
///
/// # Errors
/// [`ErrorKind::BadUrl`] with everything that is wrong with the URL.
pub fn step_schema_of(url: &str) -> Result<Option<String>> {
    let settings = Settings::read(url)?;
    let is_named =
        url.split_once('?').is_some_and(|(_, query)| query.split('&').any(|pair| pair.starts_with("schema=")));
    Ok(is_named.then_some(settings.schema))
}

/// Makes the table in the database of the effects, in the schema that the URL names or else where the user's `search_path` says.
/// Two that run at once wait for one another.
///
/// # Errors
/// [`ErrorKind::NewerSchema`] where a newer program made it, and those of a connection.
pub async fn migrate_steps(url: &str) -> Result<Migrated> {
    let schema = step_schema_of(url)?;
    let (connection, about) = connect(url).await?;
    let ran = timeout(MIGRATION_MAX, make(&connection, schema.as_deref())).await;
    let ran = ran.unwrap_or_else(|_| Err(Fault::late(MIGRATION_MAX)));
    // Where it failed its transaction ends with it.
    connection.task.abort();
    ran.map_err(about)
}

async fn connect(url: &str) -> Result<(Connection, impl Fn(Fault) -> Error + use<>)> {
    let settings = Settings::read(url)?;
    let label = settings.label.clone();
    let about = move |fault: Fault| fault.about(format!("store `{label}`"));
    let dial = Dial::new(&settings).map_err(&about)?;
    let connected = timeout(settings.timeout, dial.connect(Schema::NotYet)).await;
    let connection = connected.unwrap_or_else(|_| Err(Fault::late(settings.timeout))).map_err(&about)?;
    Ok((connection, about))
}

async fn make(connection: &Connection, schema: Option<&str>) -> Result<Migrated, Fault> {
    let batch = async |sql: &str| connection.client.batch_execute(sql).await.map_err(|error| Fault::of(&error));
    batch(&format!(
        "begin; set local statement_timeout = 0; set local lock_timeout = 0; \
         set local idle_in_transaction_session_timeout = 0; select pg_advisory_xact_lock({LOCK})"
    ))
    .await?;
    let table = table(schema);
    let found = version(connection, &table).await?;
    if found > VERSION {
        let what = format!("table `{TABLE}` has version {found}, this program knows up to {VERSION}");
        return Err(Fault::new(ErrorKind::NewerSchema, what));
    }
    if let Some(schema) = schema {
        let ask = format!("select exists (select from pg_namespace where nspname = '{schema}')");
        if !one::<bool>(connection, &ask).await? {
            batch(&format!("create schema \"{schema}\"")).await?;
        }
    }
    if found < VERSION {
        let sql = step_table_sql(schema).map_err(|error| Fault::new(error.kind(), error.to_string()))?;
        batch(&sql).await?;
    }
    let ask = format!("select relnamespace::regnamespace::text from pg_class where oid = to_regclass('{table}')");
    let schema = one::<String>(connection, &ask).await?;
    batch("commit").await?;
    Ok(Migrated { schema, from: found, to: VERSION })
}

/// The version of the table that is there; 0 where there is none. One made by hand, without a comment, is of the first version.
async fn version(connection: &Connection, table: &str) -> Result<u32, Fault> {
    let ask = format!(
        "select case when to_regclass('{table}') is null then 0 else coalesce(
             substring(obj_description(to_regclass('{table}'), 'pg_class') from 'taskonce steps, version ([0-9]+)')::int, 1) end"
    );
    one::<i32>(connection, &ask).await.map(i32::unsigned_abs)
}

/// Removes the rows of steps that ended at least so long ago, by the server's clock, in batches of 1000; rows that are in use are
/// passed over. Says how many.
///
/// A row has to stay as long as the task may come again: the record's retention and the longest time in which a copy can still
/// be on its way, together.
///
/// # Errors
/// [`ErrorKind::NoSchema`] where there is no table, and those of a connection.
pub async fn purge_steps(url: &str, older_than: Duration) -> Result<u64> {
    let table = table(step_schema_of(url)?.as_deref());
    let (connection, about) = connect(url).await?;
    let purged = remove(&connection, &table, older_than).await;
    connection.task.abort();
    purged.map_err(about)
}

async fn remove(connection: &Connection, table: &str, older_than: Duration) -> Result<u64, Fault> {
    let seconds = older_than.min(AGE_MAX).as_secs_f64();
    let sql = format!(
        "delete from {table} where ctid = any (array(
             select ctid from {table} where done_at <= clock_timestamp() - $1 * interval '1 second'
             order by done_at limit {PURGE_MAX} for update skip locked))"
    );
    let mut removed = 0;
    for _ in 0..BATCHES_MAX {
        let rows = connection.client.execute_typed(&sql, &[(&seconds, Type::FLOAT8)]).await.map_err(|error| {
            let missing = error.code().is_some_and(|code| code.code() == "42P01");
            if missing { no_table() } else { Fault::of(&error) }
        })?;
        removed += rows;
        if rows < PURGE_MAX.unsigned_abs() {
            break;
        }
    }
    Ok(removed)
}

fn no_table() -> Fault {
    Fault::new(ErrorKind::NoSchema, format!("the database has no table `{TABLE}`"))
        .hint("run `taskonce migrate --steps` with the same URL, as a user who may make a table")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_the_very_table() {
        let page = include_str!("../../../../docs/steps.md");
        assert!(page.contains(&format!("create table if not exists {TABLE} (\n{COLUMNS});")), "{COLUMNS}");
        assert!(page.contains(step_grants_sql(None, "worker").unwrap().trim_end()));
    }

    #[test]
    fn only_names_of_schemas_are_taken() {
        assert_eq!(step_table_sql(Some("a\"b")).unwrap_err().kind(), ErrorKind::BadUrl);
        assert!(step_table_sql(Some("Shop")).unwrap().contains("on table \"Shop\".taskonce_step"));
        assert_eq!(step_grants_sql(Some("a\"b"), "worker").unwrap_err().kind(), ErrorKind::BadUrl);
        assert_eq!(
            step_grants_sql(Some("Shop"), "a\"b").unwrap(),
            "grant usage on schema \"Shop\" to \"a\"\"b\";\n\
             grant select, insert, update on \"Shop\".taskonce_step to \"a\"\"b\";\n"
        );
    }
}
