//! SQLite's errors as ours: which kind each one is, and about which file.

use std::path::Path;

use rusqlite::ErrorCode;
use taskonce_core::error::{Error, ErrorKind};

use crate::host;

/// Room below which a failed write counts as a full disk: one page of the write-ahead log and some.
const ROOM_MIN: u64 = 64 * 1024;

/// An error of SQLite, met while `doing` something with the file.
#[must_use]
pub fn fault(path: &Path, doing: &str, error: rusqlite::Error) -> Error {
    let (kind, hint) = match &error {
        rusqlite::Error::SqliteFailure(failure, _) => kind_of(path, *failure),
        // The remaining ones come from columns that do not hold what the schema says.
        _ => (ErrorKind::Corrupt, None),
    };
    let found = about(path, kind, format!("{doing} failed: {error}"));
    let found = match hint {
        Some(hint) => found.with_hint(hint),
        None if kind == ErrorKind::Corrupt => {
            found.with_hint("the file is damaged or is no database: restore it from a backup, or move it away")
        }
        None => found,
    };
    found.with_source(error)
}

/// An error of ours about the file.
pub fn about(path: &Path, kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, message).about(format!("file `{}`", path.display()))
}

fn kind_of(path: &Path, failure: rusqlite::ffi::Error) -> (ErrorKind, Option<String>) {
    let folder = host::folder(path);
    match failure.code {
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed => {
            (ErrorKind::Locked, None)
        }
        ErrorCode::DiskFull => (ErrorKind::Full, None),
        ErrorCode::ReadOnly => (ErrorKind::ReadOnly, Some(host::write_hint(path))),
        ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied => (ErrorKind::Denied, None),
        ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => (ErrorKind::Corrupt, None),
        ErrorCode::SystemIoFailure => match host::room(folder) {
            Some(room) if room.free < ROOM_MIN => (ErrorKind::Full, None),
            Some(room) if room.read_only => (ErrorKind::ReadOnly, Some(host::write_hint(path))),
            Some(_) | None => (
                ErrorKind::Unreachable,
                Some("the disk refused a read or a write: look at the system's log, the quota and the file".to_owned()),
            ),
        },
        ErrorCode::CannotOpen => {
            let closed = if path.exists() && !host::may_write(path) { path } else { folder };
            if host::may_write(closed) {
                (ErrorKind::Unreachable, Some("check that the path names a file that this user may open".to_owned()))
            } else {
                (ErrorKind::ReadOnly, Some(format!("give this user the right to write to `{}`", closed.display())))
            }
        }
        // Everything else is a limit of memory, or a fault of ours that asking again cannot make worse.
        _ => (ErrorKind::Unreachable, None),
    }
}
