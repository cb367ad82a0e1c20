//! What the PostgreSQL store does on real servers, and on what lies between it and them.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "../common/mod.rs"]
mod common;
mod doctor;
mod heartbeats;
mod held;
mod lost;
mod migrations;
mod plain_sql;
mod poolers;
mod refusals;
mod standbys;
mod statements;
mod support;
mod sweeps;
mod tls;
