//! What is written to the queue, judged inside one transaction: `Job` in, `Answer` out. Handing out is in `take`.

use std::sync::{Arc, Weak};

use rusqlite::{Connection, OptionalExtension as _, params};
use taskonce_core::error::Result;
use taskonce_sqlite_file::live::Live;
use taskonce_sqlite_file::{Content, Kind, Room};
use taskonce_worker::source::{Death, Entrance, Envelope, Left, Sent, Settled};

use crate::rows::{FORMAT, Holder, INLINE_MAX, coordinates, headers_text, priority_code};
use crate::take::{self, Taken, Wanted};

/// What a file of a queue is: `tqui` in ASCII marks it.
pub(crate) const KIND: Kind = Kind {
    application_id: 0x7471_7569,
    steps: &[include_str!("../schema.sql"), include_str!("../schema-2.sql")],
    noun: "queue",
};

/// A clock that is behind the last time seen by more than this went back, in milliseconds.
pub(crate) const BACK_MAX: i64 = 1000;
/// The last time seen is written when it is older than this, in milliseconds, so that not every commit has to.
const MARK_EVERY: i64 = 500;

/// The content of a queue's file.
pub(crate) struct Queue;

/// What a caller asks of the writer.
pub(crate) enum Job {
    /// Queue this.
    Send {
        /// What is sent.
        envelope: Box<Envelope>,
        /// After so many milliseconds.
        delay: i64,
        /// Whether its key may be queued twice.
        entrance: Entrance,
    },
    /// Hand out what is deliverable.
    Take(Ask),
    /// Settle the delivery of this holder.
    Settle(Holder, Settle),
    /// Publish the dead letter of this id again.
    Redrive(String),
    /// Forget the dead letter of this id.
    DropDead(String),
    /// Write something, to see whether it works.
    Probe,
}

/// What to hand out.
pub(crate) struct Ask {
    /// Of which handlers, and how much of each.
    pub(crate) wanted: Arc<Wanted>,
    /// The most of all.
    pub(crate) total_max: usize,
    /// For how many milliseconds.
    pub(crate) visibility: i64,
    /// Which handler is the first in turn.
    pub(crate) turn: usize,
    /// Where receipts begin: a random number.
    pub(crate) salt: u64,
    /// The source's name.
    pub(crate) source: Arc<str>,
    /// Where what nobody takes is given back.
    pub(crate) home: Weak<Live<Queue>>,
}

/// What becomes of a delivery.
pub(crate) enum Settle {
    /// It is forgotten.
    Acknowledge,
    /// It comes again after so many milliseconds.
    Defer(i64),
    /// It stays with its holder for so many milliseconds from now on.
    Extend(i64),
    /// It is dead.
    Die(Box<Death>),
}

/// What the writer answers.
pub(crate) enum Answer {
    /// Of a send.
    Sent(Sent),
    /// Of a take.
    Taken(Taken),
    /// Of a settlement.
    Settled(Settled),
    /// Of a redrive or a drop.
    Left(Left),
    /// Of a probe.
    Probed,
}

impl Content for Queue {
    type Job = Job;
    type Answer = Answer;
    const KIND: &'static Kind = &KIND;

    fn room(job: &Job) -> Room {
        match job {
            Job::Settle(_, Settle::Acknowledge) | Job::DropDead(_) => Room::Frees,
            Job::Settle(_, Settle::Defer(_) | Settle::Extend(_) | Settle::Die(_))
            | Job::Take(_)
            | Job::Redrive(_)
            | Job::Probe => Room::Keeps,
            Job::Send { .. } => Room::Takes,
        }
    }

    fn size(job: &Job) -> usize {
        match job {
            Job::Send { envelope, .. } => envelope.payload.len(),
            Job::Take(_) | Job::Settle(..) | Job::Redrive(_) | Job::DropDead(_) | Job::Probe => 0,
        }
    }

    fn write(conn: &Connection, now: i64, jobs: &mut [Job]) -> rusqlite::Result<Vec<Result<Answer>>> {
        let mut writing = Writing::begin(conn, now)?;
        let mut answers = Vec::with_capacity(jobs.len());
        for job in jobs {
            answers.push(Ok(match job {
                Job::Send { envelope, delay, entrance } => Answer::Sent(writing.send(envelope, *delay, *entrance)?),
                Job::Take(ask) => Answer::Taken(take::take(&writing, ask)?),
                Job::Settle(holder, how) => Answer::Settled(writing.settle(*holder, how)?),
                Job::Redrive(id) => Answer::Left(writing.redrive(id)?),
                Job::DropDead(id) => Answer::Left(writing.drop_dead(id)?),
                Job::Probe => {
                    writing.probe()?;
                    Answer::Probed
                }
            }));
        }
        writing.finish()?;
        Ok(answers)
    }
}

/// One transaction.
pub(crate) struct Writing<'conn> {
    pub(crate) conn: &'conn Connection,
    pub(crate) now: i64,
    pub(crate) life: String,
    last_id: i64,
    /// As it is in the file.
    written: (i64, i64),
}

impl<'conn> Writing<'conn> {
    fn begin(conn: &'conn Connection, now: i64) -> rusqlite::Result<Writing<'conn>> {
        let (life, last_id, clock_at) = conn
            .prepare_cached("SELECT life, last_id, clock_at FROM queue")?
            .query_row([], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, i64>(2)?)))?;
        let mut written = (last_id, clock_at);
        if now < clock_at.saturating_sub(BACK_MAX) {
            // The host's clock went back: everything that waits for a time would wait for longer than it was told.
            conn.prepare_cached("UPDATE delivery SET due_at = due_at - ?1")?.execute([clock_at - now])?;
            written.1 = i64::MIN;
        }
        Ok(Writing { conn, now, life, last_id, written })
    }

    /// Writes what belongs to the queue as a whole, where it changed.
    fn finish(self) -> rusqlite::Result<()> {
        let (last_id, clock_at) = self.written;
        if self.last_id != last_id || self.now >= clock_at.saturating_add(MARK_EVERY) {
            self.conn
                .prepare_cached("UPDATE queue SET last_id = ?1, clock_at = ?2")?
                .execute([self.last_id, self.now.max(clock_at)])?;
        }
        Ok(())
    }

    fn send(&mut self, envelope: &Envelope, delay: i64, entrance: Entrance) -> rusqlite::Result<Sent> {
        let entrance = match entrance {
            Entrance::Open => None,
            Entrance::OncePerKey => envelope.key.as_deref(),
        };
        if let Some(key) = entrance {
            let queued = self
                .conn
                .prepare_cached("SELECT id FROM delivery WHERE handler = ?1 AND entrance = ?2")?
                .query_row([&*envelope.handler, key], |row| row.get(0))
                .optional()?;
            if let Some(id) = queued {
                return Ok(Sent::AlreadyQueued(coordinates(&self.life, id)));
            }
        }
        self.last_id += 1;
        let id = self.last_id;
        let is_large = envelope.payload.len() > INLINE_MAX;
        self.conn
            .prepare_cached(
                "INSERT INTO delivery (id, handler, state, priority, due_at, number, sent_at, key, entrance, content_type,
                                       headers, size, payload, format)
                 VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
            )?
            .execute(params![
                id,
                envelope.handler,
                if delay > 0 { 2 } else { 1 },
                priority_code(envelope.priority),
                self.now.saturating_add(delay),
                envelope.sent_at.map(|at| i64::try_from(at.0).unwrap_or(i64::MAX)),
                envelope.key,
                entrance,
                envelope.content_type,
                headers_text(&envelope.headers),
                i64::try_from(envelope.payload.len()).unwrap_or(i64::MAX),
                (!is_large).then_some(&envelope.payload),
                FORMAT,
            ])?;
        if is_large {
            self.conn
                .prepare_cached("INSERT INTO large (id, payload) VALUES (?1, ?2)")?
                .execute(params![id, envelope.payload])?;
        }
        Ok(Sent::Accepted(coordinates(&self.life, id)))
    }

    fn settle(&self, holder: Holder, how: &Settle) -> rusqlite::Result<Settled> {
        let Holder { id, number } = holder;
        let changed = match how {
            Settle::Acknowledge => self.delete(
                "DELETE FROM delivery WHERE id = ?1 AND receipt = ?2 RETURNING id, size",
                params![id, number],
            )?,
            Settle::Defer(delay) => self
                .conn
                .prepare_cached(
                    "UPDATE delivery SET state = ?3, due_at = ?4, receipt = NULL WHERE id = ?1 AND receipt = ?2",
                )?
                .execute(params![id, number, if *delay > 0 { 2 } else { 1 }, self.now.saturating_add(*delay)])?,
            Settle::Extend(visibility) => self
                .conn
                .prepare_cached("UPDATE delivery SET state = 2, due_at = ?3 WHERE id = ?1 AND receipt = ?2")?
                .execute([id, number, self.now.saturating_add(*visibility)])?,
            Settle::Die(death) => self.die(holder, death)?,
        };
        Ok(if changed == 0 { Settled::Gone } else { Settled::Done })
    }

    fn die(&self, holder: Holder, death: &Death) -> rusqlite::Result<usize> {
        let Holder { id, number } = holder;
        let is_dead = self.conn.prepare_cached("SELECT 1 FROM delivery WHERE death_id = ?1")?.exists([&death.id])?;
        if is_dead {
            return self
                .delete("DELETE FROM delivery WHERE id = ?1 AND receipt = ?2 RETURNING id, size", params![id, number]);
        }
        self.conn
            .prepare_cached(
                "UPDATE delivery SET state = 3, due_at = ?3, receipt = NULL, entrance = NULL, death_id = ?4, reason = ?5,
                                     message = ?6
                 WHERE id = ?1 AND receipt = ?2",
            )?
            .execute(params![id, number, self.now, death.id, death.reason, death.message_cut()])
    }

    fn redrive(&self, id: &str) -> rusqlite::Result<Left> {
        // It takes its key's place at the entrance again, unless another was sent meanwhile.
        let changed = self
            .conn
            .prepare_cached(
                "UPDATE delivery SET state = 1, due_at = ?2, receipt = NULL, number = 0, redriven_at = ?2, death_id = NULL,
                                     reason = NULL, message = NULL,
                                     entrance = iif(EXISTS (SELECT 1 FROM delivery AS other WHERE other.handler = delivery.handler
                                                                                 AND other.entrance = delivery.key), NULL, key)
                 WHERE death_id = ?1",
            )?
            .execute(params![id, self.now])?;
        Ok(left(changed))
    }

    fn drop_dead(&self, id: &str) -> rusqlite::Result<Left> {
        self.delete("DELETE FROM delivery WHERE death_id = ?1 RETURNING id, size", params![id]).map(left)
    }

    /// Writes, and changes nothing.
    fn probe(&self) -> rusqlite::Result<()> {
        self.conn.prepare_cached("UPDATE queue SET last_id = last_id")?.execute([]).map(drop)
    }

    /// Deletes at most one delivery by a statement that returns its id and size, and what lies beside it.
    fn delete(&self, sql: &str, which: impl rusqlite::Params) -> rusqlite::Result<usize> {
        let deleted = self
            .conn
            .prepare_cached(sql)?
            .query_row(which, |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))
            .optional()?;
        let Some((id, size)) = deleted else { return Ok(0) };
        if usize::try_from(size).is_ok_and(|size| size > INLINE_MAX) {
            self.conn.prepare_cached("DELETE FROM large WHERE id = ?1")?.execute([id])?;
        }
        Ok(1)
    }
}

fn left(changed: usize) -> Left {
    if changed == 0 { Left::NotThere } else { Left::Done }
}
