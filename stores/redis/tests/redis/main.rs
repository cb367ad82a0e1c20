//! What the Redis store does on real servers, and on what lies between it and them.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod away;
mod compares;
mod connections;
mod doctor;
mod lists;
mod lost;
mod records;
mod refusals;
mod replicas;
mod support;
mod tls;
mod user;
mod waiting;
mod walks;
