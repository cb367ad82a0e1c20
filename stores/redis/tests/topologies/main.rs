//! The Redis store on several servers: Clusters whose slots move and whose nodes die, Sentinels that switch, replicas that
//! are promoted, and URLs that say something else than what is there.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod doctor;
mod hosts;
mod lists;
mod load;
mod slots;
mod waiting;
#[path = "../redis/support.rs"]
#[allow(dead_code, reason = "the tests of one server use the rest")]
mod support;
mod switch;
mod trouble;
mod urls;
mod walks;
