//! Says now and then in the store how this worker stands, for those who look at all of them at once.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use taskonce_core::process::{Publisher, SUMMARY_MAX};

use super::monitor::{RouteSnapshot, Snapshot};
use super::{Monitor, Shared};
use crate::events::Counts;
use crate::routes::BreakerState;

/// A worker that has said nothing for so many of its pauses is gone.
const LIFE: u32 = 5;
/// The most routes that are told of: those that hold something, or are paused.
const ROUTES_MAX: usize = 50;
/// How long the end of a worker waits for its last word.
const WITHDRAW_MAX: Duration = Duration::from_secs(1);
/// The form of what is said.
const FORMAT: u32 = 1;

/// Says it again and again, until it is dropped.
pub(super) async fn publish(shared: Arc<Shared>) {
    let Some(every) = shared.publish_every else { return };
    match shared.ledger.publisher(every * LIFE) {
        Ok(publisher) => *shared.publisher.lock().await = Some(publisher),
        Err(error) => return tracing::warn!(%error, "this worker is not shown to others"),
    }
    let monitor = Monitor::new(&shared);
    let mut heard = true;
    loop {
        let summary = summary(&monitor.snapshot(), monitor.counts());
        if let Some(publisher) = &mut *shared.publisher.lock().await {
            match publisher.publish(&summary).await {
                Ok(()) if heard => {}
                Ok(()) => {
                    tracing::info!("the store takes again how this worker stands");
                    heard = true;
                }
                // Once, and at the start already: with an empty queue nothing else asks the store.
                Err(error) if heard => {
                    tracing::warn!(%error, "the store does not take how this worker stands");
                    heard = false;
                }
                Err(error) => tracing::debug!(%error, "the store does not take how this worker stands"),
            }
        }
        // sleeps: until it is said again
        tokio::time::sleep(every).await;
    }
}

/// The worker has ended: nobody is to look for it.
pub(super) async fn withdraw(shared: &Shared) {
    let publisher: Option<Publisher> = shared.publisher.lock().await.take();
    if let Some(publisher) = publisher {
        // Else it expires.
        let _withdrawn = tokio::time::timeout(WITHDRAW_MAX, publisher.withdraw()).await;
    }
}

/// What is said, as JSON: no key, no payload, no error.
fn summary(snapshot: &Snapshot, counts: &Counts) -> Vec<u8> {
    let whole = told(snapshot, counts, ROUTES_MAX).to_string().into_bytes();
    if whole.len() <= SUMMARY_MAX { whole } else { told(snapshot, counts, 0).to_string().into_bytes() }
}

fn told(snapshot: &Snapshot, counts: &Counts, routes_max: usize) -> Value {
    let routes = snapshot.routes.iter().filter(|route| is_busy(route)).take(routes_max).map(|route| {
        json!({
            "route": route.name,
            "running": route.gate.running,
            "waiting": route.waiting,
            "breaker": route.gate.breaker.map(breaker),
        })
    });
    let counts: serde_json::Map<String, Value> =
        counts.all().filter(|(_, count)| *count > 0).map(|(name, count)| (name.to_owned(), json!(count))).collect();
    json!({
        "format": FORMAT,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "store_away": snapshot.is_store_away,
        "routes": routes.collect::<Vec<_>>(),
        "counts": counts,
    })
}

fn is_busy(route: &RouteSnapshot) -> bool {
    let is_paused = match route.gate.breaker {
        Some(BreakerState::Open { .. } | BreakerState::Probing) => true,
        Some(BreakerState::Closed { .. }) | None => false,
    };
    route.gate.running > 0 || route.waiting > 0 || is_paused
}

fn breaker(state: BreakerState) -> &'static str {
    match state {
        BreakerState::Closed { .. } => "closed",
        BreakerState::Open { .. } => "open",
        BreakerState::Probing => "probing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Event;
    use crate::routes::{GateSnapshot, RouteId};

    fn snapshot(routes: usize, name: &str) -> Snapshot {
        let route = |number: usize| RouteSnapshot {
            id: RouteId(number as u32),
            name: format!("{name}{number} × charge@2"),
            waiting: 0,
            gate: GateSnapshot { running: u32::from(number.is_multiple_of(2)), room: 3, breaker: None, opened: 0 },
        };
        Snapshot {
            running: routes / 2,
            waiting: 0,
            is_store_away: false,
            routes: (0..routes).map(route).collect(),
            budgets: Vec::new(),
        }
    }

    #[test]
    fn a_summary_tells_of_what_is_busy_and_keeps_to_its_bound() {
        let counts = Counts::default();
        counts.add(&Event::Redriven);
        let said: Value = serde_json::from_slice(&summary(&snapshot(6, "orders"), &counts)).unwrap();
        assert_eq!((&said["running"], &said["counts"]), (&json!(3), &json!({ "redriven": 1 })));
        assert_eq!(said["routes"].as_array().unwrap().len(), 3);
        let many = summary(&snapshot(10_000, "orders"), &counts);
        assert!(many.len() <= SUMMARY_MAX);
        let long = summary(&snapshot(200, &"o".repeat(1000)), &counts);
        let said: Value = serde_json::from_slice(&long).unwrap();
        assert_eq!((long.len() <= SUMMARY_MAX, &said["routes"]), (true, &json!([])));
    }
}
