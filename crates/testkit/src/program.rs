//! The server programs that tests start, and where they are looked for.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Names another server program than `redis-server`, to run the tests against another version.
pub const REDIS_VARIABLE: &str = "TASKONCE_REDIS_SERVER";
/// Names a Valkey server program.
pub const VALKEY_VARIABLE: &str = "TASKONCE_VALKEY_SERVER";
/// Names the folder with PostgreSQL's programs (`postgres`, `initdb`, `psql`), to run the tests against another version.
pub const POSTGRES_VARIABLE: &str = "TASKONCE_POSTGRES_BIN";
/// Names a PgBouncer program.
pub const PGBOUNCER_VARIABLE: &str = "TASKONCE_PGBOUNCER";
/// Where Debian and Ubuntu keep PostgreSQL's programs, in a folder for each version.
const POSTGRES_FOLDER: &str = "/usr/lib/postgresql";
/// The oldest Valkey that the tests of Valkey are about: the first with `SET … IFEQ`.
pub const VALKEY_VERSION_MIN: (u32, u32) = (8, 1);

/// A server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `redis-server`, or what [`REDIS_VARIABLE`] names.
    Redis,
    /// The `redis-server` on the path, whatever [`REDIS_VARIABLE`] says: what that names may be built without TLS.
    RedisWithTls,
    /// `postgres`, with `initdb` and `psql` beside it: in the folder that [`POSTGRES_VARIABLE`] names, on the path, or the
    /// newest below `/usr/lib/postgresql`.
    Postgres,
    /// `pgbouncer`, or what [`PGBOUNCER_VARIABLE`] names.
    PgBouncer,
    /// A `valkey-server` with `SET … IFEQ`: what [`VALKEY_VARIABLE`] names, the one on the path if it is new enough, or
    /// the one that `cargo xtask test` keeps in the user's cache.
    Valkey,
}

impl Program {
    /// The file of the program.
    ///
    /// # Errors
    /// When there is none; the error says how to get it.
    pub fn path(self) -> Result<PathBuf> {
        match self {
            Program::Redis => redis(env::var_os(REDIS_VARIABLE).map(PathBuf::from)),
            Program::RedisWithTls => redis(None),
            Program::Valkey => valkey(),
            Program::Postgres => postgres(),
            Program::PgBouncer => pgbouncer(),
        }
    }
}

fn redis(named: Option<PathBuf>) -> Result<PathBuf> {
    let program = named.unwrap_or_else(|| "redis-server".into());
    found(&program).with_context(|| {
        format!(
            "there is no `{}` on this machine; install it with `apt-get install redis-server`, \
             or name another program in {REDIS_VARIABLE}",
            program.display()
        )
    })
}

fn postgres() -> Result<PathBuf> {
    if let Some(named) = env::var_os(POSTGRES_VARIABLE).map(PathBuf::from) {
        let program = named.join("postgres");
        ensure!(program.is_file(), "{POSTGRES_VARIABLE} names {}: there is no `postgres` in it", named.display());
        return Ok(program);
    }
    // Its programs find one another by their own folder, so a link on the path is followed.
    let on_path = found(Path::new("postgres")).and_then(|program| program.canonicalize().ok());
    on_path.or_else(newest_postgres).context(
        "there is no PostgreSQL server on this machine; install it with `apt-get install postgresql`, \
         or name the folder of its programs in TASKONCE_POSTGRES_BIN",
    )
}

/// The newest version in the folders of Debian and Ubuntu.
fn newest_postgres() -> Option<PathBuf> {
    let folders = std::fs::read_dir(POSTGRES_FOLDER).ok()?.flatten();
    let version = |folder: &PathBuf| folder.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    let newest = folders.map(|entry| entry.path()).filter(|folder| version(folder).is_some()).max_by_key(version)?;
    Some(newest.join("bin").join("postgres")).filter(|program| program.is_file())
}

fn pgbouncer() -> Result<PathBuf> {
    let program = env::var_os(PGBOUNCER_VARIABLE).map_or_else(|| PathBuf::from("pgbouncer"), PathBuf::from);
    // Debian puts it where only administrators look.
    let aside = Path::new("/usr/sbin/pgbouncer");
    found(&program).or_else(|| aside.is_file().then(|| aside.to_owned())).with_context(|| {
        format!(
            "there is no `{}` on this machine; install it with `apt-get install pgbouncer`, \
             or name another program in {PGBOUNCER_VARIABLE}",
            program.display()
        )
    })
}

fn valkey() -> Result<PathBuf> {
    if let Some(named) = env::var_os(VALKEY_VARIABLE).map(PathBuf::from) {
        let program =
            found(&named).with_context(|| format!("{VALKEY_VARIABLE} names {}: no such file", named.display()))?;
        let version = version_of(&program)?;
        ensure!(
            version >= VALKEY_VERSION_MIN,
            "{VALKEY_VARIABLE} names version {}.{}, older than {}.{}",
            version.0,
            version.1,
            VALKEY_VERSION_MIN.0,
            VALKEY_VERSION_MIN.1
        );
        return Ok(program);
    }
    if let Some(program) = valkey_on_path() {
        return Ok(program);
    }
    match valkey_in_cache().filter(|program| program.is_file()) {
        Some(program) => Ok(program),
        None => bail!(
            "there is no `valkey-server` of {}.{} or later on this machine; `cargo xtask programs` fetches one, \
             or name a program in {VALKEY_VARIABLE}",
            VALKEY_VERSION_MIN.0,
            VALKEY_VERSION_MIN.1
        ),
    }
}

/// The `valkey-server` on the path, if it is new enough.
#[must_use]
pub fn valkey_on_path() -> Option<PathBuf> {
    let program = found(Path::new("valkey-server"))?;
    version_of(&program).is_ok_and(|version| version >= VALKEY_VERSION_MIN).then_some(program)
}

/// Where `cargo xtask test` keeps the `valkey-server` that it fetched; `None` where the user has no cache folder.
#[must_use]
pub fn valkey_in_cache() -> Option<PathBuf> {
    Some(cache_folder()?.join("valkey-8.1.8").join("valkey-server"))
}

/// Where `cargo xtask test` keeps what it fetched; `None` where the user has no cache folder.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("taskonce"))
}

/// The version that a server program states, such as `(7, 0)`.
///
/// # Errors
/// When it does not run, or states none.
pub fn version_of(program: &Path) -> Result<(u32, u32)> {
    let said = Command::new(program).arg("--version").output();
    let said = said.with_context(|| format!("ask `{}` for its version", program.display()))?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    // `Redis server v=7.0.15 sha=…`
    let version = said.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or_default();
    parse_version(version).with_context(|| format!("`{}` states no version: {said}", program.display()))
}

/// Major and minor of `7.0.15`.
pub(crate) fn parse_version(text: &str) -> Result<(u32, u32)> {
    let mut parts = text.trim().split('.').map(str::parse);
    Ok((parts.next().context("no major version")??, parts.next().context("no minor version")??))
}

/// A program by its file, or by its name on the path.
fn found(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_a_program_says() {
        assert!(version_of(&Program::Redis.path().unwrap()).unwrap() >= (6, 2));
        assert_eq!(parse_version("8.1.8").unwrap(), (8, 1));
        assert!(version_of(&found(Path::new("sh")).unwrap()).is_err());
    }
}
