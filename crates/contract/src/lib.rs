//! What a taskonce store promises, as tests that every store runs.
//!
//! A store is a few hundred lines behind one port, [`taskonce_core::store::Store`]; the rules of the protocol live above
//! it. This crate is the ticket of entry: a list of named cases ([`CASES`]), traces that a reader can follow, and random
//! histories checked against a small model of the protocol. They are for your own store too.
//!
//! # Run it on your store
//!
//! Say how a test opens your store and moves its clock, and hand that to [`store_suite!`]. It makes one `#[test]` of
//! each case. No case sleeps: time passes by [`StoreUnderTest::shift_age`], which makes a record older by your store's
//! own clock. No case has a branch for a store, and a store needs none for a case.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Instant;
//! use async_trait::async_trait;
//! use taskonce_contract::{StoreUnderTest, store_suite};
//! use taskonce_core::{key::Key, memory::MemoryStore, store::Store};
//!
//! struct InMemory(MemoryStore);
//!
//! /// An empty store of its own for each case.
//! async fn open(_case: &str) -> InMemory {
//!     let start = Instant::now();
//!     InMemory(MemoryStore::new(move || start.elapsed()))
//! }
//!
//! #[async_trait]
//! impl StoreUnderTest for InMemory {
//!     async fn open(&self) -> Arc<dyn Store> {
//!         Arc::new(self.0.clone())
//!     }
//!     async fn shift_age(&self, key: &Key, millis: i64) {
//!         self.0.age_by(key, millis);
//!     }
//!     async fn put_raw(&self, key: &Key, bytes: &[u8]) {
//!         self.0.put_raw(key, bytes.to_vec());
//!     }
//! }
//!
//! store_suite!(open);
//! # fn main() {}
//! ```
//!
//! The random histories of a run are few, so that it ends in seconds. `PROPTEST_CASES=5000` makes a long one of it, and
//! `PROPTEST_RNG_SEED=7` plays others where the seed is fixed, as it is in this repository.
//!
//! # What else is here
//!
//! * [`Faulty`], a store in front of a store that loses answers, refuses calls or falls silent on request, and counts.
//! * [`VirtualHost`] and [`RecordingKeeper`]: a process whose clock, random numbers and background work a test holds.
//! * [`trace`]: the text form of a story about one or two tasks, its parser, and its player.
//! * [`model`]: the protocol in a few lines, written apart from the code that it checks.
//! * [`records`]: any record, for property tests of your own encoding.
//! * [`broker`]: what a source of deliveries promises, as a suite of its own.
//! * [`transactional`]: what a driver promises that lets a transaction of the user's complete a claim.
//! * [`beside`]: what a driver promises that runs steps beside their effects, in another database than the ledger's.
//! * `fixtures/v1/records.json`: records of format 1 as bytes, with what they say. `vectors/keys.json`: keys and their
//!   digests.

pub mod beside;
pub mod broker;
mod cases;
mod faulty;
mod host;
pub mod model;
pub mod records;
mod stage;
mod suite;
pub mod trace;
pub mod transactional;

pub use cases::CASES;
pub use faulty::{Fault, Faulty};
pub use host::{Delays, RecordingKeeper, VirtualHost};
pub use stage::{Actor, Stage, StoreUnderTest};
pub use suite::{Case, run_case};
