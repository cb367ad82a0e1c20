//! The real program, in processes of its own, over SQLite files and private Redis servers.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test, like the test itself")]

mod arguments;
mod dead;
mod dying;
mod harness;
mod operators;
mod outcomes;
mod postgres;
mod postgres_transactions;
mod queue;
mod redis;
mod replaying;
mod routes;
mod sending;
mod steps;
mod streams;
mod terminal;
mod top;
mod transcripts;
