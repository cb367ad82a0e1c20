//! Connections to the file, and its schema: made when the file is new, brought up to date when it is old.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use taskonce_core::error::{Error, ErrorKind, Result};

use crate::Kind;
use crate::fault::{about, fault};
use crate::host;
use crate::options::Options;

/// The oldest SQLite that is let near a file. 3.7.0 to 3.51.2 can lose committed transactions when two processes share
/// a write-ahead log.
pub const SQLITE_OLDEST: &str = "3.51.3";
const SQLITE_OLDEST_NUMBER: i32 = 3_051_003;

/// The page cache of a connection, in KiB.
const CACHE_KIB: i32 = 4096;
/// The statements that a connection keeps prepared: more than any content has, since one that is not kept is compiled at each use.
const STATEMENTS_KEPT: usize = 64;
/// The naps after which a wait naps longer: some 80 ms, which few writing processes never wait for.
const SHORT_NAPS_MAX: u32 = 256;
/// A long nap in short ones.
const LONG_NAP: u32 = 8;
/// What the write-ahead log is cut back to after it had to grow, in bytes.
const LOG_KEPT: i32 = 16 * 1024 * 1024;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The first one, which may make the file.
    Open,
    /// Writing to a file that is there.
    Write,
    /// Reading only.
    Read,
}

/// How a connection waits for its turn: in short naps, so that no process starves, up to a moment.
///
/// Naps of 0.2 to 0.3 ms gave four writing processes equal shares. SQLite's own handler sleeps up to 100 ms, and starved three.
/// Of 60 processes at once on two cores those naps left the one whose turn it was no processor: half of the others were
/// still waiting after 2 s. So who has waited long naps longer.
#[derive(Debug)]
pub struct Turn {
    timeout: Duration,
    until: Mutex<Option<Instant>>,
    waited: AtomicBool,
}

impl Turn {
    /// Waits at most `timeout` for each lock, unless told until when.
    #[must_use]
    pub fn new(timeout: Duration) -> Arc<Turn> {
        Arc::new(Turn { timeout, until: Mutex::new(None), waited: AtomicBool::new(false) })
    }

    /// Waits until this moment from now on.
    pub fn wait_until(&self, until: Instant) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    /// Whether there was something to wait for since the last time that this was asked.
    pub fn take_waited(&self) -> bool {
        self.waited.swap(false, Ordering::Relaxed)
    }

    fn handler(self: Arc<Turn>) -> impl FnMut(i32) -> bool + Send + 'static {
        let mut deadline = Instant::now();
        move |naps| {
            if naps == 0 {
                let told = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
                deadline = told.unwrap_or_else(|| Instant::now() + self.timeout);
            }
            self.waited.store(true, Ordering::Relaxed);
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(nap(naps.unsigned_abs()));
            true
        }
    }
}

/// How long to sleep before asking for the lock again, after so many naps.
fn nap(naps: u32) -> Duration {
    let spread = (naps.wrapping_mul(37) ^ std::process::id()) % 100;
    let short = Duration::from_micros(200 + u64::from(spread));
    if naps < SHORT_NAPS_MAX { short } else { short * LONG_NAP }
}

/// Refuses a SQLite that can lose what it committed.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub fn check_library() -> Result<()> {
    if rusqlite::version_number() < SQLITE_OLDEST_NUMBER {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the SQLite in use is {}; versions before {SQLITE_OLDEST} can lose committed writes of several processes",
                rusqlite::version()
            ),
        )
        .with_hint("build with the bundled SQLite, or link a newer one"));
    }
    Ok(())
}

/// Opens a connection.
///
/// # Errors
/// SQLite's; those of [`gone`] and [`is_read_only`].
pub fn connect(kind: &Kind, path: &Path, options: &Options, purpose: Purpose, turn: &Arc<Turn>) -> Result<Connection> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if purpose == Purpose::Open {
        flags |= OpenFlags::SQLITE_OPEN_CREATE;
    } else if !path.exists() {
        return Err(gone(path));
    }
    let mut conn = Connection::open_with_flags(path, flags).map_err(|error| fault(path, "opening", error))?;
    // Looked at before anything is read, which is when SQLite makes files of its own.
    if is_read_only(&conn, path)? {
        check_reading(path, purpose)?;
    }
    configure(&mut conn, options, purpose, turn).map_err(|error| fault(path, "opening", error))?;
    if purpose != Purpose::Open {
        // The file may have been replaced since the store was opened.
        let found = content(kind, &conn).map_err(|error| fault(path, "opening", error))?;
        if steps_of(kind, path, found)? < kind.steps.len() {
            return Err(gone(path));
        }
    }
    Ok(conn)
}

/// Whether SQLite could open the file for reading only.
///
/// # Errors
/// SQLite's.
pub fn is_read_only(conn: &Connection, path: &Path) -> Result<bool> {
    conn.is_readonly("main").map_err(|error| fault(path, "opening", error))
}

/// Refuses a file that this user may only read, unless it is to be read and what SQLite needs beside it is there.
///
/// SQLite reads a write-ahead log that it may not write to, but not a file without one: whoever opens the file next may
/// write at any moment. Where the folder may be written it would make the log itself, as this user's own file, and so
/// shut out those who may write.
fn check_reading(path: &Path, purpose: Purpose) -> Result<()> {
    let refused = |message: &str| about(path, ErrorKind::ReadOnly, message);
    match purpose {
        Purpose::Write => {
            return Err(refused("this user may read the file, not write to it").with_hint(host::write_hint(path)));
        }
        Purpose::Open | Purpose::Read => {}
    }
    // SQLite follows links before it names the log.
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if host::may_write(host::folder(&file)) {
        return Err(refused(
            "this user may write to the folder, not to the file, and cannot read it without harm: the \
                            log beside it would become this user's own",
        )
        .with_hint("give this user the right to write to the file, or take away the right to write to its folder"));
    }
    let is_beside = |suffix: &str| {
        let mut beside = file.clone().into_os_string();
        beside.push(suffix);
        Path::new(&beside).exists()
    };
    if !(is_beside("-wal") && is_beside("-shm")) {
        return Err(refused("this user may only read the file, and no worker has it open: it has no log beside it")
            .with_hint(format!("read it while a worker runs, or {}", host::write_hint(path))));
    }
    Ok(())
}

/// The file was removed or replaced while it was in use.
#[must_use]
pub fn gone(path: &Path) -> Error {
    about(path, ErrorKind::Unreachable, "the file was removed or replaced while it was in use")
        .with_hint("put the file back; a new one would forget every task, so it is made at a start only")
}

fn configure(conn: &mut Connection, options: &Options, purpose: Purpose, turn: &Arc<Turn>) -> rusqlite::Result<()> {
    conn.set_prepared_statement_cache_capacity(STATEMENTS_KEPT);
    conn.busy_handler(Some(Arc::clone(turn).handler()))?;
    conn.pragma_update(None, "synchronous", options.synchronous.name())?;
    conn.pragma_update(None, "cache_size", -CACHE_KIB)?;
    if purpose == Purpose::Read {
        return conn.pragma_update(None, "query_only", true);
    }
    conn.pragma_update(None, "journal_size_limit", LOG_KEPT)?;
    if let Some(size_max) = options.size_max {
        let page_size: u32 = conn.pragma_query_value(None, "page_size", |row| row.get(0))?;
        let pages = i64::try_from(size_max / u64::from(page_size).max(1)).unwrap_or(i64::MAX).max(1);
        conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))?;
    }
    Ok(())
}

/// What a file holds.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Nothing yet.
    Empty,
    /// One of this kind, of this schema version.
    Ours(i32),
    /// Another program's tables.
    Foreign,
}

/// Looks within one transaction: between two looks another process may make the schema.
fn content(kind: &Kind, conn: &Connection) -> rusqlite::Result<Found> {
    // Inside a migration there is one already.
    let _snapshot = if conn.is_autocommit() { Some(conn.unchecked_transaction()?) } else { None };
    let application: i32 = conn.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let version: i32 = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let objects: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    Ok(match (application, version, objects) {
        (mark, version, _) if mark == kind.application_id => Found::Ours(version),
        (0, 0, 0) => Found::Empty,
        _ => Found::Foreign,
    })
}

/// Makes the file one of the current schema, or says why it cannot be one. Writes to nothing that is not ours.
///
/// # Errors
/// [`ErrorKind::BadUrl`] for another program's file, [`ErrorKind::NewerSchema`]; SQLite's.
pub fn prepare(kind: &Kind, conn: &Connection, path: &Path, options: &Options) -> Result<()> {
    let deadline = Instant::now() + options.timeout;
    let steps_taken = steps_of(kind, path, content(kind, conn).map_err(|error| fault(path, "reading", error))?)?;
    share(conn, path, deadline)?;
    if steps_taken < kind.steps.len() {
        migrate(kind, conn, path)?;
    }
    Ok(())
}

/// Refuses a schema that became newer while the file was in use.
///
/// # Errors
/// [`ErrorKind::NewerSchema`]; SQLite's.
pub fn check_version(kind: &Kind, conn: &Connection, path: &Path) -> Result<()> {
    let version: i32 = conn
        .prepare_cached("PRAGMA user_version")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .map_err(|error| fault(path, "reading the schema's version", error))?;
    steps_of(kind, path, Found::Ours(version)).map(|_| ())
}

/// Refuses a file that has not the schema that this program knows.
///
/// # Errors
/// [`ErrorKind::NewerSchema`], [`ErrorKind::BadUrl`], [`ErrorKind::Unreachable`]; SQLite's.
pub fn check_current(kind: &Kind, conn: &Connection, path: &Path) -> Result<()> {
    let found = content(kind, conn).map_err(|error| fault(path, "reading the schema's version", error))?;
    if steps_of(kind, path, found)? == kind.steps.len() { Ok(()) } else { Err(gone(path)) }
}

fn steps_of(kind: &Kind, path: &Path, found: Found) -> Result<usize> {
    match found {
        Found::Empty => Ok(0),
        Found::Ours(version) if version > kind.version() => Err(about(
            path,
            ErrorKind::NewerSchema,
            format!("its schema is version {version}, this program knows up to {}", kind.version()),
        )),
        Found::Ours(version) => Ok(usize::try_from(version).unwrap_or(0)),
        Found::Foreign => {
            Err(about(path, ErrorKind::BadUrl, "it is a SQLite database of another program, and was left as it is")
                .with_hint(format!("give the {} a file of its own", kind.noun)))
        }
    }
}

/// Switches the file to the write-ahead log, where it is not there yet.
///
/// SQLite does not wait for its turn here, so this does.
fn share(conn: &Connection, path: &Path, deadline: Instant) -> Result<()> {
    loop {
        let switched = conn.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0)).and_then(|mode| {
            if mode == "wal" {
                return Ok(mode);
            }
            conn.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get(0))
        });
        match switched {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => {
                return Err(about(
                    path,
                    ErrorKind::Unsupported,
                    format!("its journal stays `{mode}`, `wal` is needed"),
                )
                .with_hint("put the file on a local file system that can share memory between processes"));
            }
            Err(error) => {
                let error = fault(path, "switching to the write-ahead log", error);
                if error.kind() != ErrorKind::Locked || Instant::now() >= deadline {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn migrate(kind: &Kind, conn: &Connection, path: &Path) -> Result<()> {
    let failed = |error| fault(path, "making the schema", error);
    conn.execute_batch("BEGIN IMMEDIATE").map_err(failed)?;
    let made = migrate_inside(kind, conn, path);
    match made {
        Ok(()) => conn.execute_batch("COMMIT").map_err(failed),
        Err(error) => {
            // The error of the step says more than one of the rollback could.
            let _ = conn.execute_batch("ROLLBACK");
            Err(error)
        }
    }
}

fn migrate_inside(kind: &Kind, conn: &Connection, path: &Path) -> Result<()> {
    let failed = |error| fault(path, "making the schema", error);
    let steps_taken = steps_of(kind, path, content(kind, conn).map_err(failed)?)?;
    if steps_taken == kind.steps.len() {
        // Another process was faster. With nothing written, its followers do not wait for the disk one after the other.
        return Ok(());
    }
    for step in &kind.steps[steps_taken..] {
        conn.execute_batch(step).map_err(failed)?;
    }
    conn.pragma_update(None, "application_id", kind.application_id).map_err(failed)?;
    conn.pragma_update(None, "user_version", kind.version()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        application_id: 7,
        steps: &["CREATE TABLE a (b ANY) STRICT", "CREATE TABLE c (d ANY) STRICT"],
        noun: "pond",
    };

    #[test]
    fn the_bundled_sqlite_does_not_lose_commits_of_two_processes() {
        assert!(rusqlite::version_number() >= SQLITE_OLDEST_NUMBER, "{}", rusqlite::version());
        let [major, minor, patch]: [i32; 3] =
            SQLITE_OLDEST.split('.').map(|part| part.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(major * 1_000_000 + minor * 1000 + patch, SQLITE_OLDEST_NUMBER);
        check_library().unwrap();
    }

    #[test]
    fn a_long_wait_leaves_the_processor_to_those_whose_turn_it_is() {
        let (mut slept, mut naps) = (Duration::ZERO, 0);
        while slept < Duration::from_secs(2) {
            slept += nap(naps);
            naps += 1;
            // A fair turn among a few: 80 ms, asked for often.
            assert!(naps > 200 || slept <= Duration::from_micros(300) * naps);
        }
        assert!(naps <= 2000, "asked {naps} times within 2 s");
    }

    /// Once each of many that began on a new file wrote the same version again, and waited for the disk.
    #[test]
    fn who_finds_the_schema_made_by_another_writes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.db");
        let options = Options::default();
        let open = || connect(&KIND, &path, &options, Purpose::Open, &Turn::new(options.timeout)).unwrap();
        let (faster, slower) = (open(), open());
        prepare(&KIND, &faster, &path, &options).unwrap();
        let log = folder.path().join("tasks.db-wal");
        let before = std::fs::read(&log).unwrap();
        migrate(&KIND, &slower, &path).unwrap();
        assert_eq!(std::fs::read(&log).unwrap(), before);
    }

    /// Once many that began on a new file at the same time were told now and then that it was another program's: the
    /// version was read before the first of them had made the schema, and the tables after.
    #[test]
    fn while_one_makes_the_schema_the_others_see_nothing_or_all_of_it() {
        let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
        for _ in 0..20 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("tasks.db");
            let open = || connect(&KIND, &path, &options, Purpose::Open, &Turn::new(options.timeout)).unwrap();
            let other = open();
            std::thread::scope(|scope| {
                scope.spawn(|| prepare(&KIND, &open(), &path, &options).unwrap());
                let began = Instant::now();
                loop {
                    match content(&KIND, &other).unwrap() {
                        Found::Empty => assert!(began.elapsed() < options.timeout, "the schema must be made"),
                        Found::Ours(version) => break assert_eq!(version, KIND.version()),
                        Found::Foreign => panic!("it is taken for another program's"),
                    }
                }
            });
        }
    }
}
