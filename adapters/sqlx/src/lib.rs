//! Tasks of taskonce whose effect is written to PostgreSQL in a transaction of sqlx, which completes them.
//!
//! For programs that have a pool of sqlx already. The ledger keeps its own connections (`taskonce::open("postgres://…")`);
//! the pool is one on the same database. [`RunInTransaction`] is the one-call form, [`CompleteIn`] the same for a claim held
//! by hand, [`StepInTransaction`] and [`StepIn`] for the steps of a handler; [`Beside`] runs a step whose effect is in another
//! database than the ledger's, which may then be on any store.
//!
//! ```no_run
//! use taskonce_core::key::Handler;
//! use taskonce_core::json::Input;
//! use taskonce_core::policy::{Effect, Policy};
//! use taskonce_sqlx::RunInTransaction as _;
//!
//! # async fn f(ledger: taskonce_core::ledger::Ledger, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let task = Handler::within("billing", "pay", "1")?.task("invoice-7", &Input::from_json(br#"{"amount": 1200}"#)?)?;
//! let policy = Policy::new(Effect::Transactional);
//! let outcome = ledger
//!     .run_in_transaction(&pool, &task, &policy, |mut tx, context| Box::pin(async move {
//!         sqlx::query("insert into payment (invoice, amount) values ($1, 1200)")
//!             .bind(context.key().id())
//!             .execute(&mut *tx)
//!             .await?;
//!         Ok(format!("paid in attempt {}", context.attempt()))
//!     }))
//!     .await?;
//! # drop(outcome); Ok(()) }
//! ```
//!
//! The rules are those of `taskonce::postgres`, with one more: sqlx 0.9.0 may hand out a connection inside of a transaction
//! that somebody left open, when a `begin()` was cancelled. [`RunInTransaction`] and [`Beside`] find that out before anything of
//! yours runs, and begin anew: what was written there is never committed. A run or step that is dropped half way has its statement
//! ended at the server, on a connection beside the pool's: at most 4 of them at once in a process.
//!
//! Built without sqlx's `macros` and `migrate`, which would not link beside the SQLite of taskonce.

mod cancel;
mod hand;
mod run;
mod steps;
mod beside;

pub use beside::Beside;
pub use hand::{CommitIn, CompleteIn};
pub use run::{Handled, RunInTransaction, Stop, Tx};
pub use steps::{StepIn, StepInTransaction};
pub use taskonce_core::held::Joined;
pub use taskonce_core::ledger::{Completion, Refused, Unresolved};
