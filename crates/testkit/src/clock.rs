//! A clock that a test holds, for a server that is started under `libfaketime`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs};

use anyhow::{Context, Result};

/// The file by which the server is told the time, in its folder.
const FILE: &str = "clock";
/// Where Debian and Ubuntu have the library, below a folder for each kind of machine.
const LIBRARIES: &str = "/usr/lib";
/// Names the library where it is elsewhere.
pub const VARIABLE: &str = "TASKONCE_FAKETIME";

/// Whose time a server goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The machine's.
    Machine,
    /// The test's.
    Test,
}

/// The library.
///
/// # Errors
/// When there is none; the error says how to get it.
pub fn library() -> Result<PathBuf> {
    if let Some(named) = env::var_os(VARIABLE).map(PathBuf::from) {
        return named.is_file().then_some(named).with_context(|| format!("{VARIABLE} names no file"));
    }
    let folders = fs::read_dir(LIBRARIES).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files = folders.chain([PathBuf::from(LIBRARIES)]).map(|folder| folder.join("faketime/libfaketime.so.1"));
    files.find(|file| file.is_file()).with_context(|| {
        format!("there is no libfaketime on this machine; install it with `apt-get install faketime`, or name it in {VARIABLE}")
    })
}

/// What `env` has to be told before a server, whose time is then that of the file in its folder.
pub(crate) fn environment(folder: &Path) -> Result<Vec<OsString>> {
    let assign = |name: &str, value: &Path| {
        let mut word = OsString::from(name);
        word.push("=");
        word.push(value);
        word
    };
    Ok(vec![
        assign("LD_PRELOAD", &library()?),
        assign("FAKETIME_TIMESTAMP_FILE", &folder.join(FILE)),
        "FAKETIME_NO_CACHE=1".into(),
        // Its timers go on: only the time of day is ours.
        "DONT_FAKE_MONOTONIC=1".into(),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
        "TZ=UTC".into(),
    ])
}

/// The time goes on as everywhere.
pub(crate) fn run(folder: &Path) -> Result<()> {
    shift(folder, 0)
}

/// The time is so many seconds after the machine's, or before it, and goes on.
pub(crate) fn shift(folder: &Path, seconds: i64) -> Result<()> {
    write(folder, &format!("{seconds:+}"))
}

/// The time stands still.
pub(crate) fn freeze(folder: &Path) -> Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    write(folder, &utc(seconds))
}

/// The whole file at once: the server may read it at any moment.
fn write(folder: &Path, text: &str) -> Result<()> {
    let next = folder.join("clock.next");
    fs::write(&next, format!("{text}\n"))?;
    Ok(fs::rename(next, folder.join(FILE))?)
}

/// A time in the form that the library reads. Source of the calendar: Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `civil_from_days`.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_the_library_reads_it() {
        assert_eq!(utc(0), "1970-01-01 00:00:00");
        assert_eq!(utc(951_782_399), "2000-02-28 23:59:59");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(utc(1_796_039_999), "2026-11-30 11:59:59");
    }
}
