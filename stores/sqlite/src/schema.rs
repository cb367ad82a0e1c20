//! What the file of a store is: its mark, its schema, and how what waits is written.

use std::path::Path;
use std::sync::Arc;

use rusqlite::Connection;
use taskonce_core::error::Result;
use taskonce_sqlite_file::{Content, Kind, Options, Purpose, Room, Turn};

use crate::judge::{Answer, Job, Judge};

/// A store's file: `task` in ASCII marks it.
const KIND: Kind = Kind { application_id: 0x7461_736b, steps: &[include_str!("../schema.sql")], noun: "store" };

/// What lies in a store's file: tasks.
pub(crate) struct Tasks;

/// A store's file as one process has it.
pub(crate) type Live = taskonce_sqlite_file::live::Live<Tasks>;

impl Content for Tasks {
    type Job = Job;
    type Answer = Answer;
    const KIND: &'static Kind = &KIND;

    fn room(job: &Job) -> Room {
        job.room()
    }

    fn size(job: &Job) -> usize {
        job.size()
    }

    fn write(conn: &Connection, now: i64, jobs: &mut [Job]) -> rusqlite::Result<Vec<Result<Answer>>> {
        let mut judge = Judge::new(conn, now);
        let mut answers = Vec::with_capacity(jobs.len());
        for job in jobs {
            answers.push(judge.judge(job)?);
        }
        judge.finish()?;
        Ok(answers)
    }
}

/// Opens a connection to a store's file.
pub(crate) fn connect(path: &Path, options: &Options, purpose: Purpose, turn: &Arc<Turn>) -> Result<Connection> {
    taskonce_sqlite_file::connect(&KIND, path, options, purpose, turn)
}

/// Refuses a file that is not a store of the schema that this program knows.
pub(crate) fn check_current(conn: &Connection, path: &Path) -> Result<()> {
    taskonce_sqlite_file::check_current(&KIND, conn, path)
}
