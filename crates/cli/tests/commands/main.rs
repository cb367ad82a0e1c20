//! `work`: real workers with real commands, between a queue and a ledger in SQLite files.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test, like the test itself")]

#[path = "../cli/harness.rs"]
#[allow(dead_code, reason = "the tests of the other commands use the rest of it")]
mod harness;
mod floor;

mod deaths;
mod pools;
mod results;
mod stops;
