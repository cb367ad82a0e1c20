//! The embedded store: one SQLite file, any number of processes on one host.
//!
//! # What it promises
//!
//! * **Durable.** Every write is in the file, and the disk has been told to keep it, before `swap` answers
//!   ([`Synchronous::Full`], the default). It survives SIGKILL, a crash of the host and a power cut, as far as the disk
//!   honours `fsync`. With [`Synchronous::Normal`] it survives the end of processes, but a power cut may take the last
//!   acknowledged writes back; so [`Store::memory`](taskonce_core::store::Store::memory) says
//!   [`Memory::MayForget`](taskonce_core::store::Memory) then.
//! * **Fair.** Several processes write in turn: none waits much longer than its share. A write that cannot get its turn
//!   within [`Options::timeout`] is refused as locked.
//! * **Fences** come from one sequence of the store. They grow by each claim and survive a purge.
//! * **Clock.** The host's, in milliseconds, read by the process that writes or answers. All processes of a host share it.
//! * **Outputs** past their own retention are answered as dropped, whether a purge has removed them already or not. So
//!   what a duplicate is told depends on the record's age alone. Records past their retention stay until they are purged.
//!
//! # What it needs
//!
//! A local file system. SQLite's write-ahead log shares memory between processes, which network file systems cannot do.
//! It brings its own SQLite, and refuses one older than 3.51.3, which can lose committed transactions when two processes
//! share a file. Nothing else may write to the live file with an older library, and no second copy of SQLite may open
//! the file *inside the same process* (closing it would drop this one's locks, as POSIX has it).
//!
//! A user who may only read the file, and not write to its folder, reads it while a worker has it open, or after one was
//! killed: SQLite needs the log and the shared memory that a worker keeps beside the file. Writes are refused.
//!
//! # Transactions of your own
//!
//! A transaction on the same file can complete a claim together with its effect: [`CompleteIn`]. It holds the file's one write
//! lock from the lock of the record to its end, so it has to be short; every process's writes wait for it.
//!
//! # Threads and forks
//!
//! Reads run in the caller's thread, on a few connections with prepared statements, and take some microseconds. Writes go
//! to one thread a store and process, which joins those that wait into one commit. A second thread answers in time when
//! the disk hangs. Both start with the first write, sleep while there is nothing to do, and end with the last clone of the
//! store. No async runtime is needed.
//!
//! After a fork the child closes what it inherited and begins anew. When another thread was using the store at that very
//! moment this is impossible, and every call in the child is refused: fork before using the store, or between uses.
//!
//! ```no_run
//! use taskonce_sqlite::SqliteStore;
//!
//! let store = SqliteStore::from_url("sqlite:///var/lib/taskonce/tasks.db?timeout=1s")?;
//! # Ok::<(), taskonce_core::Error>(())
//! ```

mod examine;
mod judge;
mod read;
mod schema;
mod store;
pub mod steps;
pub mod tx;

use taskonce_sqlite_file::fault;

pub use store::SqliteStore;
pub use taskonce_sqlite_file::{Clock, Options, SQLITE_OLDEST, Synchronous};
pub use tx::CompleteIn;

/// The SQLite of this store. A connection for a transaction that completes a claim has to be of this one.
pub use rusqlite;
