//! A worker over a queue and a ledger, in memory and in SQLite: each task takes effect once, whatever is delivered and whatever
//! fails. Effects are counted outside of both.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod stage;
mod wrap;
mod publishing;
#[cfg(feature = "redis")]
mod redis;
mod sending;
mod settling;
mod service;
mod draining;
mod trouble;
mod bounds;
mod transactions;
mod poison;
mod load;
