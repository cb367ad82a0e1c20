//! A fast store in front of a transactional one: hints answer duplicates, the database decides.
//!
//! `FastCheck` is a store over two others. The *ledger* keeps the records, and every move is its own. The *front*, such as
//! a Redis, holds a hint for a task, and spares the ledger the storm of duplicates of a running one. It is slower without
//! the front, and never wrong: away, slow, flushed, failed over, evicting or with a clock that stands still.
//!
//! # What it promises
//!
//! * **The database decides.** A claim is stored there, and then hinted at; a task's end is stored there, then hinted at,
//!   then answered. A record is never taken from a hint for a write.
//! * **Busy delays, and never decides.** A hint that says Running answers a duplicate without the database for at most a
//!   third of the lease, by the process's own monotonic clock since it first saw that hint, and no longer than the lease.
//!   Then one caller of the process asks the database, and the hint is written anew.
//! * **Done and Dead are verified** by one read of the primary key. With [`DoneHint::Trusted`] a hint that says Done is the
//!   answer; what that risks is told there.
//! * **Hints of a database that lost writes do not count.** Each is marked with the database's generation
//!   ([`Store::generation`](taskonce_core::store::Store::generation)), as it was known before the database was asked. It
//!   counts only for a process that knows the same one, and has read it lately.
//! * **Hints never go back.** A late Busy overwrites no end of the same fence, and nothing of a larger one.
//! * **The front costs little when it is away.** Each of its calls has a deadline of its own. After three failures in a row
//!   a breaker opens, and calls do without the front at once until a probe in the background finds it again.
//! * **Nothing while idle**: no commands, no timers.
//!
//! What a claim costs: for a new task one read of the front and one write of the database; for a duplicate of a running
//! task one read of the front; of one that is over one read of the front and one of the database.
//!
//! Lists, purges, examinations, waiting and memory are the ledger's.
//!
//! # The front's own life
//!
//! Its hints have keys like records, so give it a prefix of its own, and no task that is a record there. How a hint lies in
//! it is told in the module `hint`.
//!
//! ```no_run
//! use std::sync::Arc;
//! use taskonce_core::memory::MemoryStore;
//! use taskonce_fast_check::{FastCheck, Options};
//!
//! let start = std::time::Instant::now();
//! let store = |start: std::time::Instant| Arc::new(MemoryStore::new(move || start.elapsed()));
//! let (front, ledger) = (store(start), store(start));
//! let fast = FastCheck::new(front, ledger, Options::default());
//! assert_eq!(fast.counts().degraded, 0);
//! ```

mod options;
mod store;
mod hint;
mod board;
mod front;
mod write;
mod breaker;
mod generation;
mod process;
mod counts;
mod examine;

pub use counts::Counts;
pub use options::{DoneHint, Options};
pub use store::FastCheck;
