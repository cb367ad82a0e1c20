//! What one process has of a file: its connections and its desk. A forked child gets its own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use rusqlite::Connection;
use taskonce_core::error::{ErrorKind, Result};

use crate::Content;
use crate::connect::{Purpose, Turn, connect};
use crate::fault::{about, fault};
use crate::options::Options;
use crate::writer::Desk;

/// The most read connections. A read takes microseconds, so that a few serve any number of threads.
const READERS_MAX: usize = 8;

/// A file as one process has it.
///
/// SQLite's connections, and the locks that they hold for their process, must not be used in a child that was forked.
/// So every call looks which process it is in. In a new one the connections that were inherited are closed, which frees
/// SQLite's own notes on locks that the child does not hold, and a successor takes over.
pub struct Live<C: Content> {
    place: Arc<Place>,
    process: u32,
    /// Whether the file may be used here. Not in a child that was forked in the middle of a call.
    is_usable: bool,
    readers: Mutex<Readers>,
    returned: Condvar,
    /// The writer's connection while no batch is being written.
    pub(crate) writer: Mutex<Option<Connection>>,
    /// How the writer waits for its turn.
    pub(crate) turn: Arc<Turn>,
    pub(crate) desk: Desk<C>,
    successor: OnceLock<Arc<Live<C>>>,
}

struct Place {
    path: PathBuf,
    options: Options,
}

#[derive(Default)]
struct Readers {
    idle: Vec<Connection>,
    lent: usize,
    /// Callers that wait for one to come back.
    waiting: usize,
    /// Moves when the file was replaced: connections of before are closed when they come back.
    generation: u64,
}

impl<C: Content> Live<C> {
    /// For this process, with the connection that opened the file, if it may write.
    pub(crate) fn new(path: PathBuf, options: Options, writer: Option<Connection>, turn: Arc<Turn>) -> Arc<Live<C>> {
        let place = Arc::new(Place { path, options });
        Arc::new(Live::begin(place, std::process::id(), true, writer, turn))
    }

    fn begin(place: Arc<Place>, process: u32, is_usable: bool, writer: Option<Connection>, turn: Arc<Turn>) -> Live<C> {
        Live {
            place,
            process,
            is_usable,
            readers: Mutex::default(),
            returned: Condvar::new(),
            writer: Mutex::new(writer),
            turn,
            desk: Desk::default(),
            successor: OnceLock::new(),
        }
    }

    /// The one of this process, beginning it after a fork.
    pub(crate) fn current(self: &Arc<Live<C>>) -> Result<&Arc<Live<C>>> {
        let process = std::process::id();
        let mut live = self;
        // One step a fork between the process that opened the file and this one.
        while live.process != process {
            live = live.successor.get_or_init(|| Arc::new(live.succeed(process)));
        }
        if live.is_usable {
            Ok(live)
        } else {
            Err(about(live.path(), ErrorKind::Unreachable, "this process was forked while the file was in use")
                .with_hint("fork before it is used, or between uses"))
        }
    }

    /// The one of this process, if it has begun.
    pub(crate) fn begun(self: &Arc<Live<C>>) -> Option<&Arc<Live<C>>> {
        let process = std::process::id();
        let mut live = self;
        while live.process != process {
            live = live.successor.get()?;
        }
        Some(live)
    }

    /// Takes over in a forked child. Locks that another thread held at the fork are never released here: try, never wait.
    fn succeed(&self, process: u32) -> Live<C> {
        let is_usable = match (self.writer.try_lock(), self.readers.try_lock()) {
            (Ok(mut writer), Ok(mut readers)) if readers.lent == 0 && self.is_usable => {
                writer.take();
                readers.idle.clear();
                true
            }
            _ => false,
        };
        Live::begin(Arc::clone(&self.place), process, is_usable, None, Turn::new(self.place.options.timeout))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// How it was opened.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.place.options
    }

    /// The file's clock.
    #[must_use]
    pub fn now(&self) -> i64 {
        (self.place.options.clock)()
    }

    /// Lends a read connection. A connection on which something went wrong is closed, not lent again.
    ///
    /// # Errors
    /// SQLite's as ours; [`ErrorKind::TimedOut`] where all are in use.
    pub fn with_reader<T>(
        &self,
        doing: &str,
        read: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<T>,
    ) -> Result<T> {
        let mut reader = self.reader()?;
        match read(reader.connection()) {
            Ok(value) => Ok(value),
            Err(error) => {
                let error = match error {
                    // A text column that is no text: a person's hand, or damage.
                    rusqlite::Error::FromSqlConversionFailure(..) | rusqlite::Error::InvalidColumnType(..) => {
                        about(self.path(), ErrorKind::Corrupt, format!("{doing} failed: {error}"))
                    }
                    other => fault(self.path(), doing, other),
                };
                if error.kind() != ErrorKind::Locked {
                    reader.discard();
                }
                Err(error)
            }
        }
    }

    /// Lends a read connection, waiting for one within the deadline.
    fn reader(&self) -> Result<Reader<'_, C>> {
        let mut readers = self.lock_readers();
        if readers.idle.is_empty() && readers.lent >= READERS_MAX {
            let deadline = Instant::now() + self.options().timeout;
            while readers.idle.is_empty() && readers.lent >= READERS_MAX {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(about(self.path(), ErrorKind::TimedOut, "all read connections are in use"));
                }
                readers.waiting += 1;
                readers = self.returned.wait_timeout(readers, left).unwrap_or_else(PoisonError::into_inner).0;
                readers.waiting -= 1;
            }
        }
        readers.lent += 1;
        let generation = readers.generation;
        let idle = readers.idle.pop();
        drop(readers);
        let mut reader = Reader { live: self, conn: idle, generation };
        if reader.conn.is_none() {
            let turn = Turn::new(self.options().timeout);
            // When this fails the reader goes back empty.
            reader.conn = Some(connect(C::KIND, self.path(), self.options(), Purpose::Read, &turn)?);
        }
        Ok(reader)
    }

    /// Closes the read connections: the file is not what it was.
    pub(crate) fn discard_readers(&self) {
        let mut readers = self.lock_readers();
        readers.generation += 1;
        let idle = std::mem::take(&mut readers.idle);
        drop(readers);
        drop(idle);
    }

    fn lock_readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read connection on loan.
struct Reader<'live, C: Content> {
    live: &'live Live<C>,
    conn: Option<Connection>,
    generation: u64,
}

impl<C: Content> Reader<'_, C> {
    /// The connection.
    fn connection(&self) -> &Connection {
        self.conn.as_ref().expect("a reader has a connection from `Live::reader` until it is discarded or dropped")
    }

    /// Closes the connection instead of returning it.
    fn discard(&mut self) {
        self.conn = None;
    }
}

impl<C: Content> Drop for Reader<'_, C> {
    fn drop(&mut self) {
        let mut readers = self.live.lock_readers();
        readers.lent -= 1;
        let is_awaited = readers.waiting > 0;
        let stale = if readers.generation == self.generation {
            readers.idle.extend(self.conn.take());
            None
        } else {
            self.conn.take()
        };
        drop(readers);
        drop(stale);
        if is_awaited {
            self.live.returned.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::connect::prepare;
    use crate::writer::tests::Pond;

    /// Once two connections that came back together woke one caller, and the other waited until its deadline beside an
    /// idle connection.
    #[test]
    fn every_connection_that_comes_back_wakes_a_caller_that_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.db");
        let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
        let turn = Turn::new(options.timeout);
        let conn = connect(Pond::KIND, &path, &options, Purpose::Open, &turn).unwrap();
        prepare(Pond::KIND, &conn, &path, &options).unwrap();
        let live: Arc<Live<Pond>> = Live::new(path, options.clone(), Some(conn), turn);

        let mut lent: Vec<_> = (0..READERS_MAX).map(|_| live.reader().unwrap()).collect();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| drop(live.reader().unwrap()));
            }
            while live.lock_readers().waiting < 3 {
                assert!(began.elapsed() < options.timeout);
                std::thread::yield_now();
            }
            lent.truncate(READERS_MAX - 3);
        });
        assert!(began.elapsed() < options.timeout, "{:?}", began.elapsed());
    }
}
