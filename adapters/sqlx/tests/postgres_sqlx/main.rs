//! Tasks whose effect is written to PostgreSQL in a transaction of sqlx: what every driver promises, and what is sqlx's own.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod place;
mod contract;
mod pgbouncer;
mod own;
mod beside;
