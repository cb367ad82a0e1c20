//! The port, kept by a SQLite file: `SqliteStore`.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::{Found, Record};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_sqlite_file::url::{self, Further};
use taskonce_sqlite_file::{File, Options, Synchronous};

use crate::examine;
use crate::fault::about;
use crate::judge::{Answer, Job, Write};
use crate::read;
use crate::schema::{Live, Tasks};

/// A store in one SQLite file. Clones share it; its threads end with the last of them.
#[derive(Clone)]
pub struct SqliteStore {
    file: Arc<File<Tasks>>,
}

impl SqliteStore {
    /// Opens a file, and makes it if there is none. Its folder must exist.
    ///
    /// A file that this user may only read can be read beside the worker that has it open, or after one that was killed;
    /// writes are refused as [`ErrorKind::ReadOnly`]. Nothing is read without the log that a worker keeps beside it.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] where the folder is missing or the file cannot be opened, [`ErrorKind::ReadOnly`],
    /// [`ErrorKind::Corrupt`] for a file that is no database, [`ErrorKind::BadUrl`] for what is no file and for another
    /// program's database (it is left as it is), [`ErrorKind::NewerSchema`], [`ErrorKind::Unsupported`] for a SQLite that loses commits.
    pub fn open(path: &Path, options: Options) -> Result<SqliteStore> {
        Ok(SqliteStore { file: Arc::new(File::open(path, options)?) })
    }

    /// Opens `sqlite:tasks.db`, `sqlite:/abs/path.db` or `sqlite:///abs/path.db`.
    ///
    /// Options: `synchronous=full` (default) or `normal`, `timeout=2s` (default). Paths are percent-decoded.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`] with everything that is wrong with the URL; those of [`SqliteStore::open`].
    pub fn from_url(url: &str) -> Result<SqliteStore> {
        let (path, options) = url::parse(url, Further { what: "store", known: "", take: &mut |_, _| None })?;
        SqliteStore::open(&path, options)
    }

    /// The same, but a file that is missing is an error and is not made.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; those of [`SqliteStore::from_url`].
    pub fn existing_from_url(url: &str) -> Result<SqliteStore> {
        let (path, options) = url::parse(url, Further { what: "store", known: "", take: &mut |_, _| None })?;
        match path.try_exists() {
            Ok(false) => Err(about(&path, ErrorKind::NotFound, "there is no such file")
                .with_hint("check the path; `taskonce run` makes the store with the first task")),
            // What cannot be looked at is told better by opening it.
            Ok(true) | Err(_) => SqliteStore::open(&path, options),
        }
    }

    async fn write(live: &Arc<Live>, job: Job) -> Result<Answer> {
        let answer = live.ask(job)?;
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(about(live.path(), ErrorKind::Unreachable, "the thread that writes has ended")),
        }
    }
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SqliteStore").field(&self.file.path()).finish()
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        take_turns().await;
        read::load(self.file.current()?, key)
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        let expected = expected.token();
        let live = self.file.current()?;
        if expected.is_none() {
            take_turns().await;
            // Most claims are of duplicates or of new tasks. The former need no writer.
            if let Some(found) = read::load(live, key)? {
                let token = match next {
                    Next::Keep(record) | Next::Claim(record) => Some(record.token),
                    Next::Erase => None,
                };
                return Ok(if token == Some(found.record.token) {
                    Swap::Stored(found.record.fence)
                } else {
                    Swap::Conflict(Some(found))
                });
            }
        }
        let job = Job::Swap { key: key.clone(), expected, write: Write::of(next)? };
        match SqliteStore::write(live, job).await? {
            Answer::Swapped(swap) => Ok(swap),
            Answer::Purged(_) | Answer::Discarded(_) | Answer::Probed => Err(crossed(live)),
        }
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        read::scan(self.file.current()?, filter, cursor.as_ref())
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        let live = self.file.current()?;
        // Found without the writer, so that the search holds up nobody; the writer checks each again.
        let (records, outputs) = read::expired(live, filter)?;
        if records.is_empty() && outputs.is_empty() {
            return Ok(Purged::default());
        }
        match SqliteStore::write(live, Job::Purge { records, outputs }).await? {
            Answer::Purged(purged) => Ok(purged),
            Answer::Swapped(_) | Answer::Discarded(_) | Answer::Probed => Err(crossed(live)),
        }
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        let live = self.file.current()?;
        match SqliteStore::write(live, Job::Discard(key.clone())).await? {
            Answer::Discarded(discarded) => Ok(discarded),
            Answer::Swapped(_) | Answer::Purged(_) | Answer::Probed => Err(crossed(live)),
        }
    }

    /// It cannot tell: nobody is told of what another process writes.
    async fn changed(&self, _key: &Key, _seen: &Record) -> Result<bool> {
        Ok(false)
    }

    async fn examine(&self) -> Vec<Finding> {
        match self.file.current() {
            Ok(live) => {
                let began = std::time::Instant::now();
                let probe = match SqliteStore::write(live, Job::Probe).await {
                    Ok(Answer::Probed) => Ok(began.elapsed()),
                    Ok(Answer::Swapped(_) | Answer::Purged(_) | Answer::Discarded(_)) => Err(crossed(live)),
                    Err(error) => Err(error),
                };
                examine::examine(live, probe)
            }
            Err(error) => vec![examine::fault_of("process", &error)],
        }
    }

    fn told(&self, _key: &Key, _end: &Arc<Record>) {}

    fn memory(&self) -> Memory {
        match self.file.options().synchronous {
            Synchronous::Full => Memory::Keeps,
            // A power cut may take back the last commits, and the fences that they gave out.
            Synchronous::Normal => Memory::MayForget,
        }
    }

    fn ground(&self) -> Option<Ground> {
        let path = self.file.path();
        let place = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let timeout = self.file.options().timeout;
        Some(Ground { system: "sqlite", place: place.display().to_string(), timeout })
    }

    /// A file that was replaced is an error of each call, so one that answers is always the same.
    async fn generation(&self) -> Result<Option<Generation>> {
        Ok(None)
    }
}

/// Lets the other tasks of a tokio runtime run now and then: a read never waits, so that a loop over duplicates would
/// hold its thread for as long as it goes on, and with it the heartbeats of the runtime's other tasks. Outside of tokio
/// there is no budget, and this is ready at once.
async fn take_turns() {
    tokio::task::coop::consume_budget().await;
}

/// An answer to another question: never taken for one's own.
fn crossed(live: &Live) -> taskonce_core::Error {
    about(live.path(), ErrorKind::Protocol, "the writer answered another question")
}
