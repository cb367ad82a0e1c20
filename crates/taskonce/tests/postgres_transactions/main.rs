//! Tasks whose effect is written to PostgreSQL in the transaction that completes them: what every driver promises, and what
//! happens when servers, connections and workers fail.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "../shops/postgres.rs"]
mod shop;
mod place;
mod process;
mod hand;
mod contract;
mod pgbouncer;
mod conflicts;
mod connections;
mod pools;
mod refusals;
mod beside;
mod kills;
mod servers;
mod standby;
