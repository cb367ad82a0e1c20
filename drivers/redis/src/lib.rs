//! Connections to Redis or Valkey servers: one server, several that replicate one another, Sentinels or a Cluster. What lies
//! under the keys is not here.
//!
//! The store and the queue each say what they ask by a [`Question`](connection::Question), and have the rest in common: calls
//! that travel together, answers that are proven to be one's own, another try elsewhere when a server is away, and a fresh
//! start in a child that was forked. It is no crate to build on by itself.

pub mod url;
pub mod place;
pub mod address;
pub mod examine;
pub mod health;
pub mod connection;
mod cluster;
mod slots;
pub mod shape;
mod primary;
mod sentinels;
mod lines;
pub mod node;
pub mod shared;
mod process;
pub mod dial;
pub mod server;
pub mod pipe;
mod driver;
pub mod script;
pub mod wire;
pub mod fault;
