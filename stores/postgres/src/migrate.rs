//! The schema: made and brought up to date by an explicit step, never by a worker that starts.

use taskonce_core::Error;
use taskonce_core::error::{ErrorKind, Result};
use tokio::time::timeout;

use std::time::Duration;

use crate::connect::{Connection, Dial, Schema};
use crate::fault::Fault;
use crate::plain::plain_sql;
use crate::url::{Settings, is_schema};

/// The steps that make the schema, oldest first. The number of steps taken is the schema's version.
const STEPS: [&str; 1] = [include_str!("../schema.sql")];

/// The schema version that this program needs.
pub(crate) const VERSION: i32 = STEPS.len() as i32;

/// The longest that a migration may take; a step over a large table takes its time.
pub(crate) const MIGRATION_MAX: Duration = Duration::from_secs(600);
/// Marks the migrations of taskonce among advisory locks: `task` in ASCII. Held until the migration commits.
pub(crate) const LOCK: i64 = 0x7461_736b;

/// What a migration did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The schema's name.
    pub schema: String,
    /// The version before; 0 where there was none.
    pub from: u32,
    /// The version now.
    pub to: u32,
}

/// Makes the schema that a store's URL names, or brings it up to date. Two that run at once wait for one another.
///
/// The user needs the right to make a schema in the database, or one that is empty and theirs. Workers need less: see
/// [`grants_sql`].
///
/// # Errors
/// [`ErrorKind::NewerSchema`] where a newer program made it, and those of a connection.
pub async fn migrate(url: &str) -> Result<Migrated> {
    // A pooler in between is no matter: all is one transaction.
    let settings = Settings::read(url)?;
    let about = |fault: Fault| fault.about(format!("store `{}`", settings.label));
    let dial = Dial::new(&settings).map_err(about)?;
    let connected = timeout(settings.timeout, dial.connect(Schema::NotYet)).await;
    let connection = connected.unwrap_or_else(|_| Err(Fault::late(settings.timeout))).map_err(about)?;
    let ran = timeout(MIGRATION_MAX, run(&connection, &settings.schema)).await;
    let ran = ran.unwrap_or_else(|_| Err(Fault::late(MIGRATION_MAX)));
    if ran.is_err() {
        // Its transaction ends with it.
        connection.task.abort();
    }
    ran.map_err(about)
}

async fn run(connection: &Connection, schema: &str) -> Result<Migrated, Fault> {
    let batch = async |sql: &str| connection.client.batch_execute(sql).await.map_err(|error| Fault::of(&error));
    batch(&format!(
        "begin; set local statement_timeout = 0; set local lock_timeout = 0; \
         set local idle_in_transaction_session_timeout = 0; select pg_advisory_xact_lock({LOCK})"
    ))
    .await?;
    let found = version(connection, schema).await?;
    if found > VERSION {
        return Err(Fault::other_schema(schema, found, VERSION));
    }
    if !one::<bool>(connection, &format!("select exists (select from pg_namespace where nspname = '{schema}')")).await?
    {
        batch(&format!("create schema \"{schema}\"")).await?;
    }
    let taken = usize::try_from(found).unwrap_or(0);
    for step in &STEPS[taken..] {
        batch(&plain_sql(step, schema)).await?;
    }
    batch(&format!("update \"{schema}\".meta set version = {VERSION}; commit")).await?;
    Ok(Migrated { schema: schema.to_owned(), from: found.unsigned_abs(), to: VERSION.unsigned_abs() })
}

/// The version of the schema that is there; 0 where there is none.
async fn version(connection: &Connection, schema: &str) -> Result<i32, Fault> {
    if one::<bool>(connection, &format!("select to_regclass('\"{schema}\".meta') is not null")).await? {
        one(connection, &format!("select version from \"{schema}\".meta")).await
    } else {
        Ok(0)
    }
}

pub(crate) async fn one<T: tokio_postgres::types::FromSqlOwned>(
    connection: &Connection,
    ask: &str,
) -> Result<T, Fault> {
    let rows = connection.once(ask, &[]).await?;
    let row = rows.first().ok_or_else(|| Fault::new(ErrorKind::Protocol, "the server answered no row"))?;
    row.try_get(0).map_err(|error| Fault::of(&error))
}

/// All that makes the schema from nothing, for those who run migrations themselves.
///
/// # Errors
/// [`ErrorKind::BadUrl`] for what is no name of a schema.
pub fn migration_sql(schema: &str) -> Result<String> {
    check(schema)?;
    let mut sql = format!(
        "-- Makes the schema of taskonce, version {VERSION}.\nbegin;\ncreate schema if not exists \"{schema}\";\n\n"
    );
    for step in STEPS {
        sql.push_str(&plain_sql(step, schema));
        sql.push('\n');
    }
    sql.push_str(&format!("update \"{schema}\".meta set version = {VERSION};\ncommit;\n"));
    Ok(sql)
}

/// What a worker's user needs, and no more: to be run by whoever made the schema.
///
/// # Errors
/// [`ErrorKind::BadUrl`] for what is no name of a schema, or a role with a zero byte.
pub fn grants_sql(schema: &str, role: &str) -> Result<String> {
    check(schema)?;
    let role = quoted_role(role)?;
    Ok(format!(
        "grant usage on schema \"{schema}\" to {role};\n\
         grant select, insert, update, delete on \"{schema}\".task to {role};\n\
         grant select on \"{schema}\".meta, \"{schema}\".tasks to {role};\n\
         grant usage on sequence \"{schema}\".fence to {role};\n"
    ))
}

/// A role's name as SQL has it.
pub(crate) fn quoted_role(role: &str) -> Result<String> {
    if role.is_empty() || role.contains('\0') {
        return Err(Error::new(ErrorKind::BadUrl, "a role needs a name").about("role"));
    }
    Ok(format!("\"{}\"", role.replace('"', "\"\"")))
}

/// The schema that a store's URL names.
///
/// # Errors
/// [`ErrorKind::BadUrl`] with everything that is wrong with the URL.
pub fn schema_of(url: &str) -> Result<String> {
    Settings::read(url).map(|settings| settings.schema)
}

pub(crate) fn check(schema: &str) -> Result<()> {
    if is_schema(schema) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::BadUrl, format!("`{}` is no name for a schema", schema.escape_debug()))
        .about("schema")
        .with_hint("use letters, digits and `_`, at most 63"))
}
