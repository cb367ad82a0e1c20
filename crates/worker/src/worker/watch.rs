//! Looks now and then for what nobody takes: a backlog of which this worker receives nothing, and handlers that it does not have.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Shared;
use crate::events::Event;
use crate::source::Depth;

/// The most handlers that one line names.
const NAMED_MAX: usize = 5;

/// When something was received last from each source, on the host's clock.
pub(super) struct Watch(Mutex<Vec<Duration>>);

impl Watch {
    pub(super) fn new(sources: usize) -> Watch {
        Watch(Mutex::new(vec![Duration::ZERO; sources]))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn received(&self, source: usize, now: Duration) {
        self.lock()[source] = now;
    }
}

/// Looks at every source, until it is dropped.
pub(super) async fn watch(shared: Arc<Shared>) {
    let began = shared.now();
    let mut told = vec![BTreeSet::new(); shared.sources.len()];
    loop {
        // sleeps: until the next look; each costs the source a count of all that it has
        tokio::time::sleep(shared.stalled_after).await;
        for (at, told) in told.iter_mut().enumerate() {
            let source = &shared.sources[at];
            let name = Arc::clone(&source.describe().name);
            let depths = match source.depth().await {
                Ok(depths) => depths,
                Err(error) => {
                    tracing::warn!(source = &*name, %error, "what the source has could not be looked at");
                    continue;
                }
            };
            let is_ours = |depth: &&Depth| {
                shared.routes.find(&name, &depth.handler).is_some_and(|route| shared.handler(route.id).is_some())
            };
            let (ours, others): (Vec<&Depth>, Vec<&Depth>) = depths.iter().partition(is_ours);
            let others: BTreeSet<Arc<str>> =
                others.into_iter().filter(|depth| depth.ready > 0).map(|depth| Arc::clone(&depth.handler)).collect();
            if *told != others {
                if !others.is_empty() {
                    let handlers = others.iter().take(NAMED_MAX).cloned().collect();
                    shared.counts.tell(&Event::LeftInPlace { handlers }, &name);
                }
                *told = others;
            }
            stalled(&shared, at, &name, &ours, began);
        }
    }
}

fn stalled(shared: &Shared, source: usize, name: &Arc<str>, ours: &[&Depth], began: Duration) {
    let now = shared.now();
    let silent = now.saturating_sub(shared.watch.lock()[source].max(began));
    if silent < shared.stalled_after || !shared.desk().is_idle() {
        return;
    }
    let ready = ours.iter().map(|depth| depth.ready).sum();
    let oldest = ours.iter().filter_map(|depth| depth.oldest).max().unwrap_or_default();
    if ready > 0 && oldest >= shared.stalled_after {
        shared.counts.tell(&Event::Stalled { ready, oldest, silent }, name);
    }
}
