//! A transaction of the caller's own that completes a claim: `CompleteIn`, and the connection for it.
//!
//! What is written in it is judged as the store's own writes are, by `judge`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension as _, Transaction};
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::held::Held;
use taskonce_core::key::Key;
use taskonce_core::ledger::{Claim, Completion, Ledger, Refused};
use taskonce_core::record::{Found, Output, Record};
use taskonce_core::store::{Ground, Memory, Next, Swap};
use taskonce_sqlite_file::{Options, Purpose, Synchronous, Turn, host_clock};

use crate::fault::{about, fault};
use crate::judge::{Answer, Job, Judge, Write};
use crate::read::{blob, found};
use crate::schema::{check_current, connect};

/// The longest that a lock waits for a heartbeat of the same claim to be answered. A heartbeat has the store's `timeout`,
/// 2 s unless said otherwise.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);
/// What a connection's `synchronous` is at least where the store keeps what it acknowledges: `FULL`.
const FULL: i64 = 2;

/// Completes a claim in a transaction of the caller's own on the ledger's file, so that the effect commits with its record.
///
/// The rule: lock first, then the statements of your own, then complete, then commit. Where any of it fails, roll back.
///
/// ```
/// use rusqlite::Connection;
/// use taskonce_core::ledger::{Claim, Refused};
/// use taskonce_core::record::Output;
/// use taskonce_sqlite::{CompleteIn, rusqlite};
///
/// fn pay(claim: Claim, conn: &mut Connection) -> Result<(), Box<dyn std::error::Error>> {
///     let tx = conn.transaction()?;
///     claim.lock_in(&tx)?;
///     tx.execute("INSERT INTO payment (invoice, amount) VALUES (?1, ?2)", ("invoice-42", 1200))?;
///     let completion = claim.complete_in(&tx, Output::kept("text/plain", "paid")).map_err(|refused| refused.error)?;
///     tx.commit()?;
///     completion.committed();
///     Ok(())
/// }
/// ```
///
/// # What else to know
///
/// * **Keep it short.** SQLite has one write lock a file. From `lock_in` to the commit nobody else writes to the file: no other
///   task is claimed, completed or renewed, in any process. Other claims are not lost by it as long as the transaction takes
///   less than what is left of their leases; the default lease is 30 s, and is renewed every 10 s. Call other services before
///   the transaction, not in it.
/// * **One file.** Your tables lie in the ledger's file, under names of their own (not `task`, `tasks` or `store`). What a
///   transaction writes to an attached file does not commit with it.
/// * **One library.** The connection is of this crate's [`rusqlite`]. A second copy of SQLite in one process
///   would drop this one's locks.
/// * **Your connection's settings** are yours: a busy timeout, and `synchronous` at least `FULL` where the store keeps what it
///   acknowledges (it is checked).
/// * Heartbeats of this claim stand back from `lock_in` on, until the claim has ended, or the transaction turned out to be
///   rolled back ([`Completion::find_out`]). After a rollback of your own before `complete_in`, lock again soon, end the claim
///   by [`fail`](Claim::fail), or let heartbeats keep it again by [`Held::part`].
pub trait CompleteIn: Sized {
    /// Takes the file's write lock, and demands that the record is still this claim's. To be called before the
    /// transaction has read anything; blocks until a heartbeat under way is answered, and until other writers are done.
    ///
    /// The claim counts as entered from then on: dropped, it is a failed attempt.
    ///
    /// # Errors
    /// [`ErrorKind::ClaimLost`]: another took over, and none of your statements may run. [`ErrorKind::Unsupported`] where the
    /// connection is not one of the ledger's file, or would not keep what it commits. [`ErrorKind::Locked`] where others
    /// wrote for longer than the connection waits, or since the transaction first read. Roll back in each case.
    fn lock_in(&self, tx: &Transaction<'_>) -> Result<()>;

    /// Writes that the task is done, with this output, into the transaction. It is true once the transaction has committed:
    /// tell that to the completion.
    ///
    /// # Errors
    /// With the claim. [`ErrorKind::BadOutput`] where the output cannot be kept; [`ErrorKind::ClaimLost`];
    /// [`ErrorKind::WrongState`] without a lock. Roll back, unless you complete with a smaller output.
    fn complete_in(self, tx: &Transaction<'_>, output: Output) -> Result<Completion, Refused>;
}

impl CompleteIn for Claim {
    fn lock_in(&self, tx: &Transaction<'_>) -> Result<()> {
        lock_held(self.ledger(), self.held(), tx)?;
        self.held().enter();
        Ok(())
    }

    fn complete_in(self, tx: &Transaction<'_>, output: Output) -> Result<Completion, Refused> {
        match complete_held(self.ledger(), self.held(), tx, output) {
            Ok(_end) => Ok(self.into_completion()),
            Err(error) => Err(Refused { claim: self, error }),
        }
    }
}

/// What [`CompleteIn::lock_in`] does, for drivers: the handler is not entered by it.
///
/// # Errors
/// As there.
pub fn lock_held(ledger: &Ledger, held: &Held, tx: &Transaction<'_>) -> Result<()> {
    if !join(held).inspect_err(|_| held.part())? {
        return Err(lost(held));
    }
    match lock_record(ledger, held.key(), tx) {
        Ok(found) => held.check_found(found.as_ref().map(|found| &*found.record)).inspect_err(|_| held.lose()),
        Err(error) => {
            // Nothing holds the record, so that heartbeats have to.
            held.part();
            Err(error)
        }
    }
}

/// What [`CompleteIn::complete_in`] does, for drivers. Answers the record that is written.
///
/// # Errors
/// As there.
pub fn complete_held(ledger: &Ledger, held: &Held, tx: &Transaction<'_>, output: Output) -> Result<Arc<Record>> {
    let found = lock_record(ledger, held.key(), tx)?;
    let found = found.as_ref().map(|found| &*found.record);
    held.check_found(found)?;
    // Checked right above; there is no claim without its record.
    let found = found.ok_or_else(|| lost(held))?;
    let end = held.join_end(&**ledger.host(), found, output)?;
    replace_record(held.key(), tx, found, &end)?;
    Ok(end)
}

/// Takes the file's write lock in the transaction, and answers what the key holds. For drivers.
///
/// # Errors
/// Those of [`CompleteIn::lock_in`] but the lost claim.
pub fn lock_record(ledger: &Ledger, key: &Key, tx: &Transaction<'_>) -> Result<Option<Found>> {
    let path = check_ground(ledger, tx)?;
    // Nothing is changed by it, but it takes the lock, and so must come before anything is read.
    tx.execute("UPDATE main.task SET state = state WHERE id = -1", ()).map_err(|error| turned_away(&path, error))?;
    check_current(tx, &path)?;
    check_kept(ledger, tx, &path)?;
    let failed = |error| fault(&path, "reading the record", error);
    tx.prepare_cached("SELECT written_at, body FROM main.task WHERE key = ?1")
        .map_err(failed)?
        .query_row([key.as_str()], |row| {
            let written_at: i64 = row.get(0)?;
            Ok(found(key, written_at, blob(row.get_ref(1)?), host_clock()))
        })
        .optional()
        .map_err(failed)?
        .transpose()
}

/// Writes `next` in the place of `found`, which the transaction has locked. For drivers.
///
/// # Errors
/// [`ErrorKind::Changed`] where something else is there; [`ErrorKind::BadOutput`] where the record is too large for SQLite;
/// those of the file.
pub fn replace_record(key: &Key, tx: &Transaction<'_>, found: &Record, next: &Record) -> Result<()> {
    let path = path_of(tx);
    let write = Write::of(Next::Keep(next)).map_err(|error| error.about(format!("task `{key}`")))?;
    let mut job = Job::Swap { key: key.clone(), expected: Some(found.token), write };
    let mut judge = Judge::new(tx, host_clock());
    let answer = judge.judge(&mut job).map_err(|error| fault(&path, "writing the record", error))??;
    judge.finish().map_err(|error| fault(&path, "writing the record", error))?;
    match answer {
        Answer::Swapped(Swap::Stored(_)) => Ok(()),
        Answer::Swapped(Swap::Conflict(_) | Swap::Locked(_))
        | Answer::Purged(_)
        | Answer::Discarded(_)
        | Answer::Probed => Err(Error::new(ErrorKind::Changed, "the record changed inside the transaction")
            .about(format!("task `{key}`"))
            .with_hint("roll back; nothing but `complete_in` may write to the store's own tables")),
    }
}

/// A connection of the store's own to the ledger's file, for a transaction that completes a claim: its waits are fair and as
/// long as the store's own, and what it commits is kept as the store keeps it.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a ledger that is not over SQLite; those of [`SqliteStore::open`](crate::SqliteStore::open).
pub fn connect_beside(ledger: &Ledger) -> Result<Connection> {
    let ground = ground(ledger)?;
    let synchronous = match ledger.store().memory() {
        Memory::Keeps => Synchronous::Full,
        Memory::MayForget => Synchronous::Normal,
    };
    let options = Options { synchronous, timeout: ground.timeout, ..Options::default() };
    let turn = Turn::new(options.timeout);
    connect(Path::new(&ground.place), &options, Purpose::Write, &turn)
}

/// What SQLite says of a statement or a commit, as an error of ours about the ledger's file. For drivers.
#[must_use]
pub fn fault_in(ledger: &Ledger, doing: &str, error: rusqlite::Error) -> Error {
    let place = ledger.store().ground().map(|ground| ground.place).unwrap_or_default();
    fault(Path::new(&place), doing, error)
}

fn ground(ledger: &Ledger) -> Result<Ground> {
    ledger.store().ground().filter(|ground| ground.system == "sqlite").ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the ledger's records are not in a file of SQLite")
            .with_hint("open the ledger as `sqlite:FILE`, or use the transactions of the ledger's own database")
    })
}

fn path_of(tx: &Transaction<'_>) -> PathBuf {
    PathBuf::from(tx.path().unwrap_or_default())
}

/// Demands that the transaction's own file is the ledger's.
fn check_ground(ledger: &Ledger, tx: &Transaction<'_>) -> Result<PathBuf> {
    let ground = ground(ledger)?;
    let path = path_of(tx);
    let place = path.canonicalize().unwrap_or_else(|_| path.clone());
    if place.display().to_string() != ground.place {
        return Err(about(
            &path,
            ErrorKind::Unsupported,
            format!("the transaction is on this file, the ledger's records are in `{}`", ground.place),
        )
        .with_hint("begin it on a connection whose main file is the ledger's: a commit is one only within a file"));
    }
    Ok(path)
}

/// Demands that a commit is kept as the store promises it.
fn check_kept(ledger: &Ledger, tx: &Transaction<'_>, path: &Path) -> Result<()> {
    if ledger.store().memory() == Memory::MayForget {
        return Ok(());
    }
    let synchronous: i64 = tx
        .pragma_query_value(None, "synchronous", |row| row.get(0))
        .map_err(|error| fault(path, "reading the connection's settings", error))?;
    if synchronous >= FULL {
        return Ok(());
    }
    Err(about(
        path,
        ErrorKind::Unsupported,
        "a power cut could take back what this connection commits, and the store keeps it",
    )
    .with_hint("say `PRAGMA synchronous = FULL` on the connection, or open the ledger with `?synchronous=normal`"))
}

/// The write lock was not to be had.
fn turned_away(path: &Path, error: rusqlite::Error) -> Error {
    let found = fault(path, "locking the record", error);
    if found.kind() != ErrorKind::Locked {
        return found;
    }
    found.with_hint(
        "roll back and try again; lock before the transaction has read anything, and give the connection a busy timeout",
    )
}

fn lost(held: &Held) -> Error {
    Error::new(ErrorKind::ClaimLost, "the claim is lost, or was given up").about(format!("task `{}`", held.key()))
}

/// Stops the claim's heartbeats, and waits for those under way.
fn join(held: &Held) -> Result<bool> {
    let until = Instant::now() + HEARTBEAT_MAX;
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut joining = std::pin::pin!(held.join());
    loop {
        if let Poll::Ready(joined) = joining.as_mut().poll(&mut context) {
            return Ok(joined);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::TimedOut, format!("a heartbeat had no answer within {HEARTBEAT_MAX:?}"))
                .about(format!("task `{}`", held.key()))
                .with_hint(
                    "roll back and try again; where heartbeats are sent by this very thread, lock before or after",
                ));
        }
        std::thread::park_timeout(left);
    }
}

/// Wakes the thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
