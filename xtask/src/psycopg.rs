//! The PostgreSQL driver psycopg for the examples in Python: the machine's own where it is new enough, else one that is fetched
//! once, by its hash.
//!
//! It is the form without compiled parts, which uses the `libpq` that comes with PostgreSQL: one archive for every machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, ensure};
use taskonce_testkit::program::cache_folder;

use crate::{pip, process};

/// The folder in the cache, which names the version.
const FOLDER: &str = "psycopg-3.3.9";
/// The archives on PyPI, as `pip` wants them named.
const ARCHIVES: [&str; 2] = [
    "psycopg==3.3.9 --hash=sha256:d2d7d04a1ce6dab4f5b27316bea3b52585cafa2f2d631e5b09dd69823f5c26f6",
    "typing_extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8",
];
/// Ends well where the examples can run: with a psycopg that has raw cursors, and its `libpq`.
const PROBE: &str = "import psycopg; assert psycopg.RawCursor and psycopg.pq.version()";

/// Makes sure that there is one; says in a few words which.
pub(crate) fn ensure() -> Result<String> {
    find_or_fetch().map(|(_, how)| format!("psycopg {how}"))
}

/// What `PYTHONPATH` has to be for the examples; `None`: as it is.
pub(crate) fn path() -> Result<Option<PathBuf>> {
    find_or_fetch().map(|(path, _)| path)
}

fn find_or_fetch() -> Result<(Option<PathBuf>, &'static str)> {
    if runs(None) {
        return Ok((None, "found"));
    }
    let cache = cache_folder().ok_or_else(|| anyhow!(advice("HOME is not set, so there is nowhere to keep one")))?;
    let folder = cache.join(FOLDER);
    if runs(Some(&folder)) {
        return Ok((Some(folder), "found in the cache"));
    }
    fetch(&cache, &folder).map_err(|error| anyhow!(advice(&format!("none could be fetched: {error:#}"))))?;
    ensure!(runs(Some(&folder)), advice("the one that was fetched does not run: it needs Python 3.10 and libpq"));
    Ok((Some(folder), "fetched"))
}

/// What a person has to do when none is there and none can be fetched.
fn advice(why: &str) -> String {
    format!(
        "python3 has no psycopg of 3.2 or later, and {why}\n\
         hint: install one, such as `pip install 'psycopg[binary]'`;\n      \
         `cargo xtask test --no-services` does without, and says what it leaves out"
    )
}

/// Whether Python can use it.
fn runs(folder: Option<&Path>) -> bool {
    let mut command = Command::new("python3");
    command.args(["-c", PROBE]).envs(folder.map(|folder| ("PYTHONPATH", OsString::from(folder))));
    process::answers(command)
}

/// Puts it in its place, whole or not at all.
fn fetch(cache: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let work = tempfile::Builder::new().prefix(".fetch-").tempdir_in(cache)?;
    let fetched = work.path().join("fetched");
    println!("fetching psycopg with pip");
    pip::run("install", &ARCHIVES, &["--no-compile", "--root-user-action", "ignore"], ("--target", &fetched))?;
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::rename(&fetched, folder).with_context(|| format!("cannot make {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_it_is_not_taken_for_one() {
        // Python looks there first: what stands in the way is not passed over.
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("psycopg.py"), "").unwrap();
        assert!(!runs(Some(folder.path())));
        fs::write(folder.path().join("psycopg.py"), "RawCursor = 1\nclass pq:\n    version = lambda: 1\n").unwrap();
        assert!(runs(Some(folder.path())));
    }

    #[test]
    fn who_has_none_is_told_how_to_get_one() {
        let text = advice("there is no network");
        for part in ["3.2 or later", "pip install", "--no-services"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
