//! Keeps the deliveries in hand: extends each before its visibility timeout, beside the heartbeats of its claim.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use crate::source::{Receipt, Settled};

/// The most deliveries that are extended at once, so that settlements do not wait behind them.
const AT_ONCE_MAX: usize = 256;
/// How often is looked for those whose time has come, at most; else ten times in a visibility timeout.
const LOOK_MIN: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The deliveries that are held, with when each is to be extended, on the host's clock.
#[derive(Default)]
pub(super) struct Holds(Mutex<HashMap<Receipt, (usize, Duration)>>);

impl Holds {
    fn lock(&self) -> MutexGuard<'_, HashMap<Receipt, (usize, Duration)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A delivery that is held until this is dropped.
pub(super) struct Hold {
    shared: Arc<Shared>,
    receipt: Receipt,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.shared.holds.lock().remove(&self.receipt);
    }
}

/// Holds a delivery that was received at this moment.
pub(super) fn hold(shared: &Arc<Shared>, source: usize, receipt: &Receipt, at: Duration) -> Hold {
    let due = at + visibility(shared, source) / 3;
    shared.holds.lock().insert(receipt.clone(), (source, due));
    Hold { shared: Arc::clone(shared), receipt: receipt.clone() }
}

fn visibility(shared: &Shared, source: usize) -> Duration {
    shared.sources[source].describe().visibility
}

/// Extends what is due, until it is dropped.
pub(super) async fn keep(shared: Arc<Shared>) {
    let shortest = shared.sources.iter().map(|source| source.describe().visibility).min().unwrap_or(LOOK_MAX);
    let look = (shortest / 10).clamp(LOOK_MIN, LOOK_MAX);
    let mut extending = JoinSet::new();
    loop {
        // sleeps: until it is looked again for what is due
        tokio::time::sleep(look).await;
        while extending.try_join_next().is_some() {}
        let now = shared.now();
        let mut due = Vec::new();
        for (receipt, (source, at)) in shared.holds.lock().iter_mut() {
            if *at <= now && extending.len() + due.len() < AT_ONCE_MAX {
                // Due again before the timeout, should this one fail.
                *at = now + visibility(&shared, *source) / 4;
                due.push((*source, receipt.clone()));
            }
        }
        for (source, receipt) in due {
            extending.spawn(extend(Arc::clone(&shared), source, receipt));
        }
    }
}

async fn extend(shared: Arc<Shared>, source: usize, receipt: Receipt) {
    let visibility = visibility(&shared, source);
    match shared.sources[source].extend(&receipt, visibility).await {
        Ok(Settled::Done) => {}
        Ok(Settled::Gone) => {
            // Settled this moment, or handed out again: then the record says busy there, and this run goes on.
            if shared.holds.lock().remove(&receipt).is_some() {
                let name = &*shared.sources[source].describe().name;
                tracing::warn!(source = name, "a delivery was handed out again while its task runs");
            }
        }
        Err(error) => tracing::warn!(%error, "a delivery could not be extended, and is tried again"),
    }
}
