//! The protocol of taskonce. No I/O, no clock, no randomness of its own.
//!
//! The life of a task: its [`key`] says who it is; a [`record`] is what is remembered of it, and of its
//! [`step`]s; a [`policy`] says how it
//! is treated; [`decide`] says what a claim, a heartbeat, a completion or a failure makes of the record; a [`store`]
//! keeps it by compare-and-swap; the [`ledger`] applies one to the other. [`codec`] makes bytes of a record.
//!
//! Read them in this order.

pub mod key;
pub mod json;
pub mod record;
pub mod step;
pub mod policy;
pub mod decide;
pub mod store;
pub mod held;
pub mod transaction;
pub mod ledger;
pub mod people;
pub mod process;
pub mod host;
pub mod memory;
pub mod codec;
pub mod error;
pub mod units;
mod cache;

pub use cache::CacheLimits;
pub use error::{Error, ErrorKind, Result, Retry};
