//! What a process brings to the ledger: its own clock, random numbers and label, and somebody who keeps its claims alive.
//!
//! Time and randomness are arguments in this crate; these two ports are how they come in.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::held::Held;
use crate::key::Key;
use crate::record::{ClaimId, WallTime};

/// The process: clock, random numbers, and its label.
///
/// # Contract
///
/// * `random` comes from a source that other processes, and forks of this one, do not share.
/// * `uptime` never goes back, and goes on while the machine is suspended.
/// * `owner` is new at each process start and after each fork.
pub trait Host: Send + Sync {
    /// 128 random bits.
    fn random(&self) -> u128;
    /// The process's own monotonic clock, from an arbitrary start.
    fn uptime(&self) -> Duration;
    /// The time of day, as a label for people.
    fn wall_time(&self) -> WallTime;
    /// A label for people: host, process, worker.
    fn owner(&self) -> Arc<str>;
}

/// Keeps claims alive, and finishes what a dropped future left unfinished.
///
/// # Contract
///
/// * No call blocks, and none fails: they hand work over.
/// * Each claim kept is renewed until it is settled or lost, or its `run_max` has passed.
/// * What is handed over is tried until it is done, or the claim's lease has passed.
pub trait Keeper: Send + Sync {
    /// Renews this claim from now on.
    fn keep(&self, held: &Arc<Held>);
    /// The claim is over: renews it no more.
    fn forget(&self, held: &Arc<Held>);
    /// Writes the end that was decided for the claim; see [`Held::is_decided`].
    fn settle(&self, held: Arc<Held>);
    /// Releases a claim whose answer nobody waited for: it may or may not have been stored.
    fn release(&self, key: Key, claim: ClaimId, lease: Duration);
    /// Waits until no claim is kept and everything handed over is done, at most so long. Says whether it is so.
    fn finish(&self, within: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}

/// A keeper that does nothing: claims live for one lease, and dropped ones wait for its end. For tests and tools.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoKeeper;

impl Keeper for NoKeeper {
    fn keep(&self, _held: &Arc<Held>) {}
    fn forget(&self, _held: &Arc<Held>) {}
    fn settle(&self, _held: Arc<Held>) {}
    fn release(&self, _key: Key, _claim: ClaimId, _lease: Duration) {}
    fn finish(&self, _within: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(std::future::ready(true))
    }
}
