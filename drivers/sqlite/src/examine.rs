//! A file's health, for people: what it lies on, what endangers what it holds, and what to do about it.

use std::sync::mpsc;
use std::time::Duration;

use rusqlite::Connection;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::store::{Finding, Level};

use crate::Content;
use crate::connect::SQLITE_OLDEST;
use crate::host::{self, FileSystem};
use crate::live::Live;
use crate::options::Synchronous;

/// A write that takes longer is worth knowing of.
const WRITE_SLOW: Duration = Duration::from_millis(100);
/// Less room than this is worth knowing of, in bytes.
const ROOM_ADVISED: u64 = 256 * 1024 * 1024;
/// With less room than this writes fail soon, in bytes.
const ROOM_MIN: u64 = 4 * 1024 * 1024;
/// How long the file is searched for damage; a large one is not searched to its end.
const CHECK_MAX: Duration = Duration::from_secs(2);

/// Looks at one thing in the file, at this time of its clock.
pub type Look = fn(&Connection, i64) -> rusqlite::Result<Finding>;

/// A look and what it looks at.
type Named<'a> = (&'a str, Look);

/// Every finding: those of any file, and those of the content's own looks, each with what it looks at. `probe` is how long a
/// write took, or why it failed.
#[must_use]
pub fn examine<C: Content>(live: &Live<C>, probe: Result<Duration>, own: &[(&str, Look)]) -> Vec<Finding> {
    let mut findings = vec![library(), file(live), file_system(live)];
    findings.extend(room(live));
    findings.push(synchronous(live));
    findings.push(round_trip(probe));
    let (first, last): (Named<'_>, Named<'_>) = (("journal", journal), ("content", content));
    for (subject, look) in [&first].into_iter().chain(own).chain([&last]) {
        let now = live.now();
        let found = live.with_reader("examining", |conn| look(conn, now));
        findings.push(found.unwrap_or_else(|error| fault_of(subject, &error)));
    }
    findings
}

/// An error as a finding.
#[must_use]
pub fn fault_of(subject: &str, error: &Error) -> Finding {
    finding(Level::Fault, subject, error.to_string(), error.hint())
}

/// A finding; the hint is empty where all is well.
#[must_use]
pub fn finding(level: Level, subject: &str, text: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { level, subject: subject.to_owned(), text: text.into(), hint: hint.into() }
}

fn library() -> Finding {
    // An older one is refused when a store is opened.
    let text = format!("SQLite {}, at least {SQLITE_OLDEST} is needed", rusqlite::version());
    finding(Level::Fine, "library", text, "")
}

fn file<C: Content>(live: &Live<C>) -> Finding {
    let size = |suffix: &str| {
        let mut path = live.path().as_os_str().to_owned();
        path.push(suffix);
        std::fs::metadata(path).map_or(0, |meta| meta.len())
    };
    let text = format!(
        "`{}`, {} KiB and a log of {} KiB, schema {}",
        live.path().display(),
        size("").div_ceil(1024),
        size("-wal").div_ceil(1024),
        C::KIND.version()
    );
    finding(Level::Fine, "file", text, "")
}

fn file_system<C: Content>(live: &Live<C>) -> Finding {
    let subject = "file system";
    match host::file_system(host::folder(live.path())) {
        FileSystem::Local => finding(Level::Fine, subject, "local", ""),
        FileSystem::Remote(name) => finding(
            Level::Fault,
            subject,
            format!("the file lies on {name}, through which processes cannot share memory: records can be lost"),
            "move the file to a local disk, or use Redis for several hosts",
        ),
        FileSystem::Volatile(name) => finding(
            Level::Warning,
            subject,
            format!("the file lies in memory ({name}): a restart of the host forgets every task"),
            "move the file to a disk",
        ),
    }
}

fn room<C: Content>(live: &Live<C>) -> Option<Finding> {
    let room = host::room(host::folder(live.path()))?;
    let text = format!("{} MiB free", room.free / (1024 * 1024));
    let hint = "free space, or purge records and shorten retention";
    Some(if room.read_only {
        finding(Level::Fault, "room", "the file system is mounted read-only", "mount it writable")
    } else if room.free < ROOM_MIN {
        finding(Level::Fault, "room", text, hint)
    } else if room.free < ROOM_ADVISED {
        finding(Level::Warning, "room", text, hint)
    } else {
        finding(Level::Fine, "room", text, "")
    })
}

fn synchronous<C: Content>(live: &Live<C>) -> Finding {
    match live.options().synchronous {
        Synchronous::Full => finding(Level::Fine, "synchronous", "full: a write is on the disk before it counts", ""),
        Synchronous::Normal => finding(
            Level::Warning,
            "synchronous",
            "normal: a power cut may take back the last acknowledged writes",
            "leave out `synchronous=normal` where a repeated effect does harm",
        ),
    }
}

fn round_trip(probe: Result<Duration>) -> Finding {
    let subject = "write";
    match probe {
        Ok(took) if took > WRITE_SLOW => finding(
            Level::Warning,
            subject,
            format!("a write took {took:.1?}"),
            "the disk is slow, or other processes write much; heartbeats need far less than a third of the lease",
        ),
        Ok(took) => finding(Level::Fine, subject, format!("a write took {took:.1?}"), ""),
        Err(error) if error.kind() == ErrorKind::Locked => finding(
            Level::Fault,
            subject,
            error.to_string(),
            "find the process that holds a transaction open: `fuser` on the file names those that have it",
        ),
        Err(error) => fault_of(subject, &error),
    }
}

fn journal(conn: &Connection, _now: i64) -> rusqlite::Result<Finding> {
    let mode: String = conn.pragma_query_value(None, "journal_mode", |row| row.get(0))?;
    Ok(if mode == "wal" {
        finding(Level::Fine, "journal", "wal", "")
    } else {
        finding(
            Level::Fault,
            "journal",
            format!("`{mode}`; another program changed it, and readers and writers block each other"),
            "end all programs that use the file and open it again",
        )
    })
}

fn content(conn: &Connection, _now: i64) -> rusqlite::Result<Finding> {
    let (checked, is_checked) = mpsc::channel::<()>();
    let interrupt = conn.get_interrupt_handle();
    let found = std::thread::scope(|scope| {
        scope.spawn(move || {
            // Ends at once when the check has ended.
            if is_checked.recv_timeout(CHECK_MAX) == Err(mpsc::RecvTimeoutError::Timeout) {
                interrupt.interrupt();
            }
        });
        let found: rusqlite::Result<String> = conn.query_row("PRAGMA quick_check(1)", [], |row| row.get(0));
        drop(checked);
        found
    });
    Ok(match found {
        Ok(text) if text == "ok" => finding(Level::Fine, "content", "no damage found", ""),
        Ok(text) => finding(
            Level::Fault,
            "content",
            format!("the file is damaged: {text}"),
            "stop all workers, keep a copy, and restore the file from a backup",
        ),
        Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::OperationInterrupted) => finding(
            Level::Fine,
            "content",
            format!("no damage found within {CHECK_MAX:?}; the file is too large to be read in that time"),
            "",
        ),
        Err(error) => return Err(error),
    })
}
