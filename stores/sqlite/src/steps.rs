//! The table of steps whose effects live in this file while the ledger's records live elsewhere: its SQL, the statements of
//! the driver, and how it is made and purged.
//!
//! The file is the user's own, with tables of any program; nothing else in it is touched.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, Transaction, params};
use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::Output;
use taskonce_core::step::StepRow;
use taskonce_sqlite_file::url::{self, Further};
use taskonce_sqlite_file::{Options, check_library, host_clock};

use crate::fault::{about, fault};

/// The table's name.
pub const TABLE: &str = "taskonce_step";
/// The most rows that one statement removes: the file's other writers wait for it.
const PURGE_MAX: u32 = 1000;
/// The most statements of one purge: a table that grows as fast as it is purged must not hold the caller for ever.
const BATCHES_MAX: usize = 100_000;
/// What a connection's `synchronous` is at least so that a power cut takes nothing back: `FULL`.
const FULL: i64 = 2;

/// What makes the table. Safe to run again.
const STEP_TABLE: &str = "\
-- A row for each step whose effect is in this file; taskonce, version 1.
CREATE TABLE IF NOT EXISTS taskonce_step (
    operation   TEXT    NOT NULL,   -- the task's key, namespace/handler@version/id
    step        TEXT    NOT NULL,   -- its name
    input       BLOB    NOT NULL,   -- the digest of its input, 16 bytes
    output      BLOB,               -- what it returned
    output_type TEXT,               -- and in which encoding, as in the record
    attempt     INTEGER NOT NULL,   -- the attempt of the task that ran it
    done_at     INTEGER NOT NULL,   -- milliseconds since 1970, by the host's clock
    PRIMARY KEY (operation, step)
);
CREATE INDEX IF NOT EXISTS taskonce_step_done_at ON taskonce_step (done_at);
";
/// The columns that this program needs.
const COLUMNS: [&str; 7] = ["operation", "step", "input", "output", "output_type", "attempt", "done_at"];

/// The SQL that makes the table, for those who make the tables of their file themselves. Safe to run again.
#[must_use]
pub fn step_table_sql() -> &'static str {
    STEP_TABLE
}

/// What the row of a step says to who comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepEntry {
    /// This transaction has inserted it: the step runs, and its value is written by [`end_step`].
    Run,
    /// Another run has ended it.
    Done(StepRow),
}

/// Inserts a step's row, or reads the one that is there. To be called first of all in the transaction. For drivers.
///
/// # Errors
/// [`ErrorKind::NoSchema`] where there is no table, [`ErrorKind::Locked`] where others wrote for longer than the connection waits;
/// those of the file.
pub fn enter_step(tx: &Transaction<'_>, key: &Key, name: &str, input: &[u8], attempt: u32) -> Result<StepEntry> {
    let path = path_of(tx);
    check_table(tx, &path)?;
    let failed = |error| fault(&path, "writing the step's row", error);
    let inserted = tx
        .prepare_cached(
            "INSERT INTO main.taskonce_step (operation, step, input, attempt, done_at) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (operation, step) DO NOTHING",
        )
        .map_err(failed)?
        .execute(params![key.as_str(), name, input, attempt, host_clock()])
        .map_err(failed)?;
    if inserted == 1 {
        return Ok(StepEntry::Run);
    }
    let failed = |error| fault(&path, "reading the step's row", error);
    tx.prepare_cached(
        "SELECT input, output, output_type, attempt FROM main.taskonce_step WHERE operation = ?1 AND step = ?2",
    )
    .map_err(failed)?
    .query_row([key.as_str(), name], |row| {
        let (output, output_type): (Option<Vec<u8>>, Option<String>) = (row.get(1)?, row.get(2)?);
        Ok(StepEntry::Done(StepRow { input: row.get(0)?, output: output_type.zip(output), attempt: row.get(3)? }))
    })
    .map_err(failed)
}

/// Writes what a step returned into its row, in the transaction that has inserted it. For drivers.
///
/// # Errors
/// [`ErrorKind::WrongState`] where the row is not there any more; those of the file.
pub fn end_step(tx: &Transaction<'_>, key: &Key, name: &str, output: &Output) -> Result<()> {
    let path = path_of(tx);
    let (bytes, content_type) = match output {
        Output::Kept { content_type, bytes } => (Some(bytes), Some(content_type)),
        Output::Nothing | Output::Dropped(_) => (None, None),
    };
    let failed = |error| fault(&path, "writing the step's row", error);
    let written = tx
        .prepare_cached(
            "UPDATE main.taskonce_step SET output = ?3, output_type = ?4 WHERE operation = ?1 AND step = ?2",
        )
        .map_err(failed)?
        .execute(params![key.as_str(), name, bytes, content_type])
        .map_err(failed)?;
    if written == 1 && !tx.is_autocommit() {
        return Ok(());
    }
    Err(about(
        &path,
        ErrorKind::WrongState,
        format!("the transaction of step `{name}` was over before its code returned"),
    )
    .with_hint("neither commit nor roll back by a statement of your own: return from the step instead"))
}

/// Demands that what the connection commits is kept: the ledger will say that the step took effect.
///
/// # Errors
/// [`ErrorKind::Unsupported`]; those of the file.
pub fn check_kept(conn: &Connection) -> Result<()> {
    let path = path_of(conn);
    let synchronous: i64 = conn
        .pragma_query_value(None, "synchronous", |row| row.get(0))
        .map_err(|error| fault(&path, "reading the connection's settings", error))?;
    if synchronous >= FULL {
        return Ok(());
    }
    let what = "a power cut could take back what this connection commits, and the ledger keeps that it took effect";
    Err(about(&path, ErrorKind::Unsupported, what)
        .with_hint("say `PRAGMA synchronous = FULL` on the connection of the step"))
}

fn path_of(conn: &Connection) -> PathBuf {
    PathBuf::from(conn.path().unwrap_or_default())
}

/// The columns of the table that is there; none where there is no table.
fn columns(conn: &Connection, path: &Path) -> Result<Vec<String>> {
    let failed = |error| fault(path, "looking for the table of steps", error);
    let mut ask = conn.prepare_cached("SELECT name FROM pragma_table_info('taskonce_step', 'main')").map_err(failed)?;
    let names = ask.query_map([], |row| row.get(0)).map_err(failed)?;
    names.collect::<Result<_, _>>().map_err(failed)
}

fn check_table(conn: &Connection, path: &Path) -> Result<()> {
    let there = columns(conn, path)?;
    if COLUMNS.iter().all(|name| there.iter().any(|column| column == name)) {
        return Ok(());
    }
    let what = if there.is_empty() { "the file has no table" } else { "the file has another kind of table" };
    Err(about(path, ErrorKind::NoSchema, format!("{what} `{TABLE}`"))
        .with_hint(format!("run `taskonce migrate --steps --store sqlite:{}`", path.display())))
}

/// Makes the table in the file that a URL names, which has to be there. Says whether it was made now.
///
/// # Errors
/// [`ErrorKind::Unreachable`] where there is no file, [`ErrorKind::NoSchema`] where a table of another kind has its name; those of the
/// file.
pub fn migrate_steps(url: &str) -> Result<StepTable> {
    let (mut conn, path) = open(url)?;
    let failed = |error| fault(&path, "making the table of steps", error);
    let tx = conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(failed)?;
    let before = columns(&tx, &path)?;
    if before.is_empty() {
        tx.execute_batch(STEP_TABLE).map_err(failed)?;
    }
    check_table(&tx, &path)?;
    tx.commit().map_err(failed)?;
    Ok(if before.is_empty() { StepTable::Made } else { StepTable::WasThere })
}

/// What [`migrate_steps`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepTable {
    /// It made the table.
    Made,
    /// The table was there.
    WasThere,
}

/// Removes the rows of steps that ended at least so long ago, by the host's clock, in batches of 1000. Says how many.
///
/// # Errors
/// As for [`migrate_steps`].
pub fn purge_steps(url: &str, older_than: Duration) -> Result<u64> {
    let (conn, path) = open(url)?;
    check_table(&conn, &path)?;
    let until = host_clock().saturating_sub(i64::try_from(older_than.as_millis()).unwrap_or(i64::MAX));
    let mut removed = 0;
    for _ in 0..BATCHES_MAX {
        let batch = conn
            .execute(
                "DELETE FROM main.taskonce_step WHERE rowid IN
                     (SELECT rowid FROM main.taskonce_step WHERE done_at <= ?1 ORDER BY done_at LIMIT ?2)",
                params![until, PURGE_MAX],
            )
            .map_err(|error| fault(&path, "removing rows of steps", error))?;
        removed += batch as u64;
        if batch < PURGE_MAX as usize {
            break;
        }
    }
    Ok(removed)
}

/// A connection to a file that is there.
fn open(url: &str) -> Result<(Connection, PathBuf)> {
    check_library()?;
    let further = Further { what: "store", known: "", take: &mut |_, _| None };
    let (path, Options { timeout, .. }) = url::parse(url, further)?;
    if let Ok(false) = path.try_exists() {
        return Err(about(&path, ErrorKind::Unreachable, "there is no such file")
            .with_hint("name the file that has the tables of the effects; the program that owns it makes it"));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let failed = |error| fault(&path, "opening", error);
    let conn = Connection::open_with_flags(&path, flags).map_err(failed)?;
    conn.busy_timeout(timeout).map_err(failed)?;
    conn.pragma_update(None, "synchronous", "full").map_err(failed)?;
    Ok((conn, path))
}
