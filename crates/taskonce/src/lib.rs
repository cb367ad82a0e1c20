//! Queues deliver twice; taskonce makes every task take effect once.
//!
//! The life of a task in eight lines: a [`Handler`] and an id or an input make a [`Task`]; a [`Policy`] says what kind
//! of [`Effect`] it has; [`open`] gives a [`Ledger`] over a store; [`Run::run`] claims the task, keeps the claim alive,
//! runs the handler and records its end; a duplicate gets the first run's value as [`Outcome::Replayed`], or is told
//! to come again ([`Outcome::Busy`], [`Outcome::Waiting`]) and must then be deferred, never acknowledged; a worker that
//! dies is succeeded when its lease has passed; what cannot succeed is [`Outcome::Dead`], and what is in doubt is
//! [`Outcome::Parked`] for a person.
//!
//! ```
//! use taskonce::{Effect, Failure, Handler, Input, Outcome, Policy, Run};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> taskonce::Result<()> {
//! let ledger = taskonce::open("memory:")?;
//! let charge = Handler::within("billing", "charge", "2")?;
//! let task = charge.task("invoice-42", &Input::from_json(br#"{"amount": 1200}"#)?)?;
//! let policy = Policy::new(Effect::Keyed);
//!
//! for _delivery in 0..2 {
//!     let outcome = ledger
//!         .run(&task, &policy, |context| async move {
//!             // The provider deduplicates on this key, which is the same in every attempt.
//!             let key = context.downstream_key("").to_string();
//!             Ok::<_, Failure>(format!("charged with {key}"))
//!         })
//!         .await?;
//!     match outcome {
//!         Outcome::Ran { value, .. } => println!("ran: {value}"),
//!         Outcome::Replayed(first) => println!("done {:?} ago, attempt {}", first.age, first.attempt),
//!         other => println!("{}: {:?}", other.name(), other.settlement()),
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! # Features
//!
//! No store is on by default, since SQLite is bundled as C code and a program can link only one copy of it.
//!
//! * `sqlite`: the embedded store, `sqlite:tasks.db`, and the embedded queue, see [`source`].
//! * `postgres`: PostgreSQL 13 or later, `postgres://user:password@host:5432/database`.
//! * `redis`: Redis and Valkey, `redis://host:6379/0`, `redis+sentinel://…/SERVICE`, `redis+cluster://…`.
//! * `fast-check`: a Redis in front of another store, `sqlite:tasks.db?front=redis://host:6379`; see `fast_check`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod open;
mod front;
mod steps;
pub mod blocking;
pub mod source;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "postgres")]
pub mod postgres;

pub use open::{MEMORY_SCHEME, Migration, SCHEMES, migrate, migration_sql, open, open_existing};
pub use steps::{migrate_steps, purge_steps, steps_sql};

pub use taskonce_core::decide::By;
pub use taskonce_core::held::{Held, Renewal, Settled};
pub use taskonce_core::host::{Host, Keeper};
pub use taskonce_core::json::{Digest, Fields, Input};
pub use taskonce_core::key::{DownstreamKey, Fingerprint, Handler, Key, Name, Task};
pub use taskonce_core::ledger::{Admission, Claim, Ledger, Seen, Unsettled};
pub use taskonce_core::people::Walk;
pub use taskonce_core::policy::{Backoff, Effect, Policy};
pub use taskonce_core::process::{Process, Publisher};
pub use taskonce_core::record::{
    Aftermath, Age, ClaimId, DropReason, Event, EventKind, Failure, FailureClass, Fence, Found, Output, Record, State,
    Token, WallTime,
};
pub use taskonce_core::step::{Step, StepState};
pub use taskonce_core::store::{Cursor, Filter, Finding, Level, Memory, Purged, Row, Store};
pub use taskonce_core::units;
pub use taskonce_core::{CacheLimits, Error, ErrorKind, Result, Retry};
pub use taskonce_worker::elsewhere::run_elsewhere;
pub use taskonce_worker::outcome::{JSON, MSGPACK};
pub use taskonce_worker::{Context, Heart, Outcome, Replayed, Run, Settlement, StepContext, SystemHost};
pub use taskonce_worker::{events, routes, send, span, worker};

/// The examples of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// A fast store in front of a transactional one, for those who put it together themselves and read its counts.
#[cfg(feature = "fast-check")]
pub use taskonce_fast_check as fast_check;

/// What a store's author writes against.
pub mod store {
    pub use taskonce_core::memory::MemoryStore;
    pub use taskonce_core::store::*;
    pub use taskonce_core::{codec, record};
}
