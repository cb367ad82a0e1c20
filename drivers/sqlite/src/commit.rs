//! How what was taken from the desk is committed: together, or one by one where the file has no room for all.

use rusqlite::{Connection, FileControl};
use taskonce_core::error::{Error, ErrorKind, Result};

use crate::Content;
use crate::connect::{Purpose, check_version, connect, gone};
use crate::fault::fault;
use crate::live::Live;

/// What became of those that were taken together.
pub(crate) struct Batch<C: Content> {
    pub(crate) others: Others,
    /// In the order of the jobs. True from their commit on.
    pub(crate) answers: Vec<Result<C::Answer>>,
}

/// Whether other processes wrote since this one did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    Idle,
    Wrote,
}

impl<C: Content> Live<C> {
    /// Writes what waits: in one transaction, or, where that is refused for what a job of it brings, in as many as it needs.
    pub(crate) fn write_batch(&self, writer: &mut Option<Connection>) -> Result<Batch<C>> {
        let conn: &Connection = match writer {
            Some(conn) => conn,
            None => writer.insert(connect(C::KIND, self.path(), self.options(), Purpose::Write, &self.turn)?),
        };
        let seen = data_version(conn);
        let mut jobs = Vec::new();
        let mut others = Others::Idle;
        let written = self.transaction(conn, |conn| {
            if data_version(conn) != seen {
                others = Others::Wrote;
                check_version(C::KIND, conn, self.path())?;
            }
            // Taken only now that the turn has come, so that all who came during the wait share this commit.
            jobs = self.desk.take();
            self.write_inside(conn, &mut jobs)
        });
        let batch = match written {
            Ok(answers) => return Ok(Batch { others, answers }),
            Err(error) if is_of_one_job(error.kind()) && !jobs.is_empty() => {
                Ok(Batch { others, answers: self.one_by_one(conn, jobs, error) })
            }
            Err(error) => Err(error),
        };
        if batch.as_ref().err().is_none_or(|error| error.kind() != ErrorKind::Locked) {
            // A connection that met an error of the disk or the file is not trusted again.
            *writer = None;
        }
        batch
    }

    /// Judges each of these jobs by itself: one that the file has no room for must not take along those that make room.
    fn one_by_one(&self, conn: &Connection, jobs: Vec<C::Job>, error: Error) -> Vec<Result<C::Answer>> {
        if jobs.len() == 1 {
            return vec![Err(error)];
        }
        let mut in_turn: Vec<(usize, C::Job)> = jobs.into_iter().enumerate().collect();
        in_turn.sort_by_key(|(_, job)| C::room(job));
        let (places, mut jobs): (Vec<usize>, Vec<C::Job>) = in_turn.into_iter().unzip();
        let mut answers = Vec::with_capacity(jobs.len());
        for group in jobs.chunk_by_mut(|one, other| C::room(one) == C::room(other)) {
            self.write_apart(conn, group, &mut answers);
        }
        let mut answers: Vec<_> = places.into_iter().zip(answers).collect();
        answers.sort_by_key(|(place, _)| *place);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Writes these jobs in one transaction, or, where it is refused, each half of them likewise: some refused ones among
    /// many cost few transactions more.
    fn write_apart(&self, conn: &Connection, jobs: &mut [C::Job], answers: &mut Vec<Result<C::Answer>>) {
        let written = self.transaction(conn, |conn| {
            check_version(C::KIND, conn, self.path())?;
            self.write_inside(conn, jobs)
        });
        match written {
            Ok(written) => answers.extend(written),
            Err(error) if is_of_one_job(error.kind()) && jobs.len() > 1 => {
                let (first, second) = jobs.split_at_mut(jobs.len() / 2);
                self.write_apart(conn, first, answers);
                self.write_apart(conn, second, answers);
            }
            Err(error) => answers.extend(jobs.iter().map(|_| Err(error.again()))),
        }
    }

    /// One transaction, which is rolled back where anything of it fails.
    fn transaction<T>(&self, conn: &Connection, inside: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        run(conn, "BEGIN IMMEDIATE").map_err(|error| fault(self.path(), "waiting for the turn to write", error))?;
        let written = if has_moved(conn) {
            self.discard_readers();
            Err(gone(self.path()))
        } else {
            inside(conn)
        };
        let committed = written.and_then(|written| {
            run(conn, "COMMIT").map(|()| written).map_err(|error| fault(self.path(), "committing", error))
        });
        if committed.is_err() {
            // SQLite may have rolled back by itself; the first error says more than the second.
            let _ = run(conn, "ROLLBACK");
        }
        committed
    }

    fn write_inside(&self, conn: &Connection, jobs: &mut [C::Job]) -> Result<Vec<Result<C::Answer>>> {
        C::write(conn, self.now(), jobs).map_err(|error| fault(self.path(), "writing", error))
    }
}

/// Whether one job may be refused so for what it brings or meets, and the others not.
fn is_of_one_job(kind: ErrorKind) -> bool {
    kind == ErrorKind::Full || kind == ErrorKind::Corrupt
}

fn run(conn: &Connection, sql: &str) -> rusqlite::Result<()> {
    conn.prepare_cached(sql)?.execute([]).map(drop)
}

/// Moves when another connection has written. Of no use where SQLite cannot tell.
fn data_version(conn: &Connection) -> Option<u32> {
    let mut version = 0;
    conn.file_control(None::<&str>, FileControl::DataVersion(&mut version)).ok().map(|()| version)
}

#[cfg(unix)]
fn has_moved(conn: &Connection) -> bool {
    let mut moved = 0;
    conn.file_control(None::<&str>, FileControl::HasMoved(&mut moved)).is_ok() && moved != 0
}

/// Where files in use cannot be removed.
#[cfg(not(unix))]
fn has_moved(_conn: &Connection) -> bool {
    false
}
