//! The PostgreSQL store of taskonce: PostgreSQL 13 and later, on several hosts, directly or through a pooler.
//!
//! # What it promises
//!
//! * **Durable.** A write is acknowledged when the server has committed it. What a commit survives is the server's matter:
//!   `fsync`, `synchronous_commit`, its standbys. `taskonce doctor` says what endangers it.
//! * **One row a task**, written by compare-and-swap on its token: of concurrent writers one wins.
//! * **One clock**, the server's, read for each write and each answer (`clock_timestamp()`).
//! * **Fences** come from one sequence. They grow by each claim of any task, and survive a purge.
//! * **One round trip** for a fresh claim, a duplicate of a done task and a completion. A duplicate takes no lock, no value of the
//!   sequence and writes nothing. Heartbeats that wait at the same time are one statement.
//! * **An end.** Every call ends within `timeout` (2 s). A connection that was cut is replaced within that time, and the
//!   statement sent again: a write is recognised by its token, never doubled.
//! * **No session state is needed**: behind a pooler that lends connections by the transaction nothing is prepared under a
//!   name, and limits are set by each statement. No advisory lock, no `NOTIFY`.
//! * **A record that a transaction holds** is [`Swap::Locked`](taskonce_core::store::Swap) after `lock_timeout` (500 ms), and
//!   heartbeats pass it over.
//!
//! # What it needs
//!
//! The schema, made by [`migrate`] (or `taskonce migrate`) and never by a worker that starts. A worker's user needs what
//! [`grants_sql`] says. The connections of a process are few: `connections` (16) for each runtime that uses the store.
//!
//! # What it cannot
//!
//! A standby that is promoted without the last commits forgets them, with the effects that were in the same transactions.
//! [`Store::generation`](taskonce_core::store::Store::generation) moves then.
//!
//! Records past their retention stay until they are purged: nothing is swept by itself.
//!
//! # Plain SQL
//!
//! Programs in other languages lock and complete a claim in their own transaction with two statements: [`LOCK`] and
//! [`COMPLETE`]. The view `tasks` shows the records in readable columns.
//!
//! ```no_run
//! let store = taskonce_postgres::PostgresStore::from_url("postgres://ada@db.example/app?schema=taskonce")?;
//! # Ok::<(), taskonce_core::Error>(())
//! ```

mod url;
mod store;
mod sql;
mod row;
mod known;
mod desk;
mod lines;
mod scan;
mod pool;
mod connect;
mod tls;
mod process;
mod migrate;
mod plain;
pub mod joint;
pub mod tx;
mod examine;
mod fault;

pub use migrate::{Migrated, grants_sql, migrate, migration_sql, schema_of};
pub use plain::{COMPLETE, LIMITS, LOCK, plain_sql};
pub use store::PostgresStore;
pub use tokio_postgres;
pub use tx::{CommitIn, CompleteIn};
