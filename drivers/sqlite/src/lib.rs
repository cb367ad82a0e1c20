//! One SQLite file that several processes share: its connections, its one writer, its faults. What lies in the file is not here.
//!
//! The store and the queue each say what their file holds by a [`Content`], and have the rest in common: the write-ahead log,
//! fair turns among processes, many writes in one commit, answers in time when the disk hangs, and a fresh start in a
//! child that was forked. It is no crate to build on by itself.

mod commit;
mod connect;
pub mod examine;
pub mod fault;
mod file;
pub mod host;
pub mod live;
mod options;
pub mod url;
mod writer;

pub use connect::{
    Purpose, SQLITE_OLDEST, Turn, check_current, check_library, check_version, connect, gone, is_read_only, prepare,
};
pub use file::File;
pub use options::{Clock, Options, Synchronous, host_clock};

use rusqlite::Connection;
use taskonce_core::error::Result;

/// What a file is: how it is known, and how its schema is made.
#[derive(Debug)]
pub struct Kind {
    /// Marks the file as of this kind, in its header.
    pub application_id: i32,
    /// The steps that make the schema, oldest first. The number of steps taken is the file's schema version.
    pub steps: &'static [&'static str],
    /// What it is called: `store`.
    pub noun: &'static str,
}

impl Kind {
    /// The schema version that this program needs.
    #[must_use]
    pub const fn version(&self) -> i32 {
        self.steps.len() as i32
    }
}

/// What lies in a file, and how what waits for the writer is written.
pub trait Content: Send + Sync + 'static {
    /// What a caller asks of the writer.
    type Job: Send + 'static;
    /// What the writer answers.
    type Answer: Send + 'static;

    /// What the file is.
    const KIND: &'static Kind;

    /// What a job does to the room in the file. Where that is short, jobs are judged one by one, and those that free some first.
    fn room(job: &Self::Job) -> Room;

    /// About how many bytes a job brings.
    fn size(job: &Self::Job) -> usize;

    /// Does these jobs in the transaction that has begun, at this time of the file's clock, and answers each in its place. The
    /// inner results are the jobs' own; the outer one ends the whole transaction. A job whose transaction was rolled back may
    /// be done once more, with others or alone.
    ///
    /// # Errors
    /// SQLite's.
    fn write(conn: &Connection, now: i64, jobs: &mut [Self::Job]) -> rusqlite::Result<Vec<Result<Self::Answer>>>;
}

/// What a job does to the room in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Room {
    /// It removes something.
    Frees,
    /// It changes what is there.
    Keeps,
    /// It adds something.
    Takes,
}
