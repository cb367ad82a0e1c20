//! Swaps judged inside one transaction: what the key holds decides, each for itself.

use rusqlite::{CachedStatement, Connection, OptionalExtension as _, params};
use taskonce_core::codec;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::{DropReason, Fence, Output, Record, State, Token};
use taskonce_core::store::{Next, Purged, Swap};

use taskonce_sqlite_file::Room;

use crate::read::{blob, found};

/// The largest encoded record. SQLite itself takes 1 GB.
const BODY_MAX: usize = 256 * 1024 * 1024;

/// What a caller asks of the writer.
#[derive(Debug)]
pub(crate) enum Job {
    /// A compare-and-swap.
    Swap {
        /// Of this key.
        key: Key,
        /// If it holds this token.
        expected: Option<Token>,
        /// What to put in its place.
        write: Write,
    },
    /// Removes the records, and the outputs, of those keys that are still past their retention.
    Purge {
        /// Whose records go.
        records: Vec<Key>,
        /// Whose outputs go.
        outputs: Vec<Key>,
    },
    /// Removes what this key holds, if it is no record.
    Discard(Key),
    /// Writes something, to see whether it works.
    Probe,
}

impl Job {
    /// What it does to the room in the file.
    pub(crate) fn room(&self) -> Room {
        match self {
            Job::Swap { write: Write::Erase, .. } | Job::Purge { .. } | Job::Discard(_) => Room::Frees,
            Job::Swap { expected: Some(_), .. } | Job::Probe => Room::Keeps,
            Job::Swap { expected: None, .. } => Room::Takes,
        }
    }

    /// About how many bytes it brings. A claim brings only what earlier runs recorded.
    pub(crate) fn size(&self) -> usize {
        match self {
            Job::Swap { write: Write::Keep(line), .. } => line.body.len(),
            Job::Swap { write: Write::Claim(_) | Write::Erase, .. }
            | Job::Purge { .. }
            | Job::Discard(_)
            | Job::Probe => 0,
        }
    }
}

/// What the writer answers.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Of a swap.
    Swapped(Swap),
    /// Of a purge.
    Purged(Purged),
    /// Of a discard: whether something was removed.
    Discarded(bool),
    /// Of a probe.
    Probed,
}

/// The next record, as the writer needs it.
#[derive(Debug)]
pub(crate) enum Write {
    /// Encoded already, in the caller's thread.
    Keep(Line),
    /// To be encoded when its fence is known.
    Claim(Box<Record>),
    /// Nothing.
    Erase,
}

/// A record as a row, its times still relative to the moment of the write.
#[derive(Debug)]
pub(crate) struct Line {
    token: Token,
    fence: Fence,
    state: i64,
    expires_after: Option<i64>,
    output_after: Option<i64>,
    body: Vec<u8>,
}

impl Write {
    /// Takes over what a caller wants written.
    pub(crate) fn of(next: Next<'_>) -> Result<Write> {
        match next {
            Next::Keep(record) => {
                let line = Line::of(record);
                if line.body.len() > BODY_MAX {
                    return Err(Error::new(
                        ErrorKind::BadOutput,
                        format!("the record has {} bytes, {BODY_MAX} at most are stored", line.body.len()),
                    )
                    .with_hint("keep a reference to the output, not the output"));
                }
                Ok(Write::Keep(line))
            }
            Next::Claim(record) => Ok(Write::Claim(Box::new(record.clone()))),
            Next::Erase => Ok(Write::Erase),
        }
    }

    fn token(&self) -> Option<Token> {
        match self {
            Write::Keep(line) => Some(line.token),
            Write::Claim(record) => Some(record.token),
            Write::Erase => None,
        }
    }
}

impl Line {
    fn of(record: &Record) -> Line {
        Line {
            token: record.token,
            fence: record.fence,
            state: state_code(record.state),
            expires_after: record.state.is_final().then(|| millis(record.retention)),
            output_after: output_after(record),
            body: codec::encode(record),
        }
    }
}

/// The age at which a record's output goes, if it has one that goes.
pub(crate) fn output_after(record: &Record) -> Option<i64> {
    match (record.state, &record.output) {
        (State::Done, Output::Kept { .. }) => Some(millis(record.output_retention)),
        (State::Done, Output::Nothing | Output::Dropped(_))
        | (State::Running | State::Waiting | State::Dead | State::Parked, _) => None,
    }
}

/// The number of a state, as the schema has it.
pub(crate) fn state_code(state: State) -> i64 {
    match state {
        State::Running => 1,
        State::Waiting => 2,
        State::Done => 3,
        State::Dead => 4,
        State::Parked => 5,
    }
}

fn millis(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Judges the jobs of one transaction.
pub(crate) struct Judge<'conn> {
    conn: &'conn Connection,
    now: i64,
    /// The sequence's last value, once it is known. It is read once and written once a transaction.
    fence: Option<u64>,
    /// Statements that most jobs of a transaction need: taken out of the connection's cache once.
    look: Held<'conn>,
    add: Held<'conn>,
    end: Held<'conn>,
}

/// A statement, once it was needed.
#[derive(Default)]
struct Held<'conn>(Option<CachedStatement<'conn>>);

impl<'conn> Held<'conn> {
    fn of(&mut self, conn: &'conn Connection, sql: &str) -> rusqlite::Result<&mut CachedStatement<'conn>> {
        match &mut self.0 {
            Some(statement) => Ok(statement),
            none => Ok(none.insert(conn.prepare_cached(sql)?)),
        }
    }
}

impl<'conn> Judge<'conn> {
    /// For a transaction that has begun, at this time of the store's clock.
    pub(crate) fn new(conn: &'conn Connection, now: i64) -> Judge<'conn> {
        Judge { conn, now, fence: None, look: Held::default(), add: Held::default(), end: Held::default() }
    }

    /// Does one job. The inner result is the job's own; the outer one ends the whole transaction.
    pub(crate) fn judge(&mut self, job: &mut Job) -> rusqlite::Result<Result<Answer>> {
        Ok(match job {
            Job::Swap { key, expected, write } => self.swap(key, *expected, write)?.map(Answer::Swapped),
            Job::Purge { records, outputs } => Ok(Answer::Purged(self.purge(records, outputs)?)),
            Job::Discard(key) => Ok(Answer::Discarded(self.discard(key)?)),
            Job::Probe => {
                self.conn.prepare_cached("UPDATE store SET probed_at = ?1")?.execute([self.now])?;
                Ok(Answer::Probed)
            }
        })
    }

    /// Writes what the transaction has gathered, before its commit.
    pub(crate) fn finish(self) -> rusqlite::Result<()> {
        if let Some(fence) = self.fence {
            self.conn
                .prepare_cached("UPDATE store SET fence = ?1, claimed_at = ?2")?
                .execute([fence.cast_signed(), self.now])?;
        }
        Ok(())
    }

    fn swap(&mut self, key: &Key, expected: Option<Token>, write: &mut Write) -> rusqlite::Result<Result<Swap>> {
        if expected.is_none()
            && let Some(fence) = self.insert(key, write)?
        {
            return Ok(Ok(Swap::Stored(fence)));
        }
        let held = self
            .look
            .of(self.conn, "SELECT id, state, written_at, body FROM task WHERE key = ?1")?
            .query_row([key.as_str()], |row| {
                let written_at: i64 = row.get(2)?;
                Ok((row.get(0)?, row.get(1)?, found(key, written_at, blob(row.get_ref(3)?), self.now)))
            })
            .optional()?;
        let Some((id, state, held)) = held else {
            // Nothing was there to be replaced, or to be removed.
            return Ok(Ok(match expected {
                None => Swap::Stored(Fence::default()),
                Some(_) => Swap::Conflict(None),
            }));
        };
        let held = match held {
            Ok(held) => held,
            Err(error) => return Ok(Err(error)),
        };
        let token = Some(held.record.token);
        Ok(Ok(if write.token() == token {
            Swap::Stored(held.record.fence)
        } else if expected == token {
            self.replace(id, state, write)?
        } else {
            Swap::Conflict(Some(held))
        }))
    }

    /// Makes the record where the key holds none, and says its fence; `None` where it holds one, or where there is none to make.
    fn insert(&mut self, key: &Key, write: &mut Write) -> rusqlite::Result<Option<Fence>> {
        let fence_before = self.fence;
        let mut made = None;
        let Some(line) = self.line(write, &mut made)? else { return Ok(None) };
        let (now, after) = (self.now, |millis: Option<i64>| millis.map(|millis| self.now.saturating_add(millis)));
        let rows = self
            .add
            .of(
                self.conn,
                "INSERT INTO task (key, state, written_at, expires_at, output_until, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (key) DO NOTHING",
            )?
            .execute(params![
                key.as_str(),
                line.state,
                now,
                after(line.expires_after),
                after(line.output_after),
                line.body
            ])?;
        if rows == 0 {
            // Its fence was not given out: a duplicate alone writes nothing.
            self.fence = fence_before;
            return Ok(None);
        }
        Ok(Some(line.fence))
    }

    fn replace(&mut self, id: i64, state_held: i64, write: &mut Write) -> rusqlite::Result<Swap> {
        let mut made = None;
        let Some(line) = self.line(write, &mut made)? else {
            self.conn.prepare_cached("DELETE FROM task WHERE id = ?1")?.execute([id])?;
            return Ok(Swap::Stored(Fence::default()));
        };
        if line.state == state_held && line.expires_after.is_none() {
            // A heartbeat, above all: no index is touched.
            self.conn
                .prepare_cached("UPDATE task SET written_at = ?2, body = ?3 WHERE id = ?1")?
                .execute(params![id, self.now, line.body])?;
        } else {
            let (expires_at, output_until) = (self.after(line.expires_after), self.after(line.output_after));
            self.end
                .of(
                    self.conn,
                    "UPDATE task SET state = ?2, written_at = ?3, expires_at = ?4, output_until = ?5, body = ?6
                     WHERE id = ?1",
                )?
                .execute(params![id, line.state, self.now, expires_at, output_until, line.body])?;
        }
        Ok(Swap::Stored(line.fence))
    }

    /// What to write, if anything; that of a claim is made here, when its fence is known.
    fn line<'w>(&mut self, write: &'w mut Write, made: &'w mut Option<Line>) -> rusqlite::Result<Option<&'w Line>> {
        Ok(match write {
            Write::Keep(line) => Some(line),
            Write::Claim(record) => {
                record.fence = self.next_fence(record.fence)?;
                Some(made.insert(Line::of(record)))
            }
            Write::Erase => None,
        })
    }

    /// The sequence's next value, and above what the record has had.
    fn next_fence(&mut self, carried: Fence) -> rusqlite::Result<Fence> {
        let last = match self.fence {
            Some(last) => last,
            None => self
                .conn
                .prepare_cached("SELECT fence FROM store")?
                .query_row([], |row| row.get::<_, i64>(0))?
                .cast_unsigned(),
        };
        let next = last.saturating_add(1).max(carried.0);
        self.fence = Some(next);
        Ok(Fence(next))
    }

    fn after(&self, millis: Option<i64>) -> Option<i64> {
        millis.map(|millis| self.now.saturating_add(millis))
    }

    fn discard(&self, key: &Key) -> rusqlite::Result<bool> {
        let damaged = self
            .conn
            .prepare_cached("SELECT body FROM task WHERE key = ?1")?
            .query_row([key.as_str()], |row| Ok(codec::is_damaged(key, blob(row.get_ref(0)?))))
            .optional()?;
        if damaged != Some(true) {
            return Ok(false);
        }
        self.conn.prepare_cached("DELETE FROM task WHERE key = ?1")?.execute([key.as_str()]).map(|rows| rows > 0)
    }

    fn purge(&self, records: &[Key], outputs: &[Key]) -> rusqlite::Result<Purged> {
        let mut purged = Purged::default();
        let mut delete =
            self.conn.prepare_cached("DELETE FROM task WHERE key = ?1 AND expires_at <= ?2 AND state IN (3, 4)")?;
        for key in records {
            purged.records += delete.execute(params![key.as_str(), self.now])?;
        }
        for key in outputs {
            purged.outputs += self.strip(key)?;
        }
        Ok(purged)
    }

    /// Takes the output out of a record. Its age, token and retention stay: nothing happened to the task.
    fn strip(&self, key: &Key) -> rusqlite::Result<usize> {
        let body: Option<Vec<u8>> = self
            .conn
            .prepare_cached("SELECT body FROM task WHERE key = ?1 AND output_until <= ?2 AND state = 3")?
            .query_row(params![key.as_str(), self.now], |row| row.get(0))
            .optional()?;
        let Some(body) = body else { return Ok(0) };
        let mut record = match codec::decode(key, &body) {
            Ok(record) => record,
            // A newer program will see to it.
            Err(error) if error.kind() == ErrorKind::NewerFormat => return Ok(0),
            Err(_) => {
                // A person will. The body stays as it is, and purges look for it no more.
                self.conn
                    .prepare_cached("UPDATE task SET output_until = NULL WHERE key = ?1")?
                    .execute([key.as_str()])?;
                return Ok(0);
            }
        };
        record.output = Output::Dropped(DropReason::Expired);
        self.conn
            .prepare_cached("UPDATE task SET output_until = NULL, body = ?2 WHERE key = ?1")?
            .execute(params![key.as_str(), codec::encode(&record)])
    }
}
