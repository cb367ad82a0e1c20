//! Receives from one source: as much as can be started soon, and after a fault of the source again, with growing pauses.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::desk::{Arrived, WAIT_MAX};
use super::settle::{Verdict, settle};
use crate::routes::RouteId;
use crate::source::{Delivery, RECEIVE_MAX, Want};

/// How long a receive waits where everything that it could bring may start.
const WAIT: Duration = Duration::from_secs(5);
/// How long it waits where some routes are full, and may soon have room again.
const WAIT_SHORT: Duration = Duration::from_millis(250);
/// How long it waits for room before it looks again: a rate may let something through.
const ROOM_LOOK: Duration = Duration::from_millis(50);
/// The first pause after a receive that failed; it doubles.
const AGAIN_MIN: Duration = Duration::from_millis(100);
/// The longest pause between two receives that fail.
const AGAIN_MAX: Duration = Duration::from_secs(5);
/// How long a delivery is left to others that came though no route asked for its handler.
const UNKNOWN_DELAY: Duration = Duration::from_secs(30);

/// The same after a panic, and a pause.
pub(super) async fn receive_again(shared: Arc<Shared>, source: usize) {
    // sleeps: what panics at once must not do so again and again
    tokio::time::sleep(AGAIN_MAX).await;
    receive(shared, source).await;
}

/// Receives until it is dropped.
pub(super) async fn receive(shared: Arc<Shared>, source: usize) {
    let port = Arc::clone(&shared.sources[source]);
    let name = Arc::clone(&port.describe().name);
    let routes: Vec<RouteId> = shared
        .routes
        .of_source(&name)
        .filter(|route| shared.handler(route.id).is_some())
        .map(|route| route.id)
        .collect();
    let mut wants: Vec<Want> =
        routes.iter().map(|id| Want { handler: Arc::clone(&shared.routes.get(*id).handler), max: 0 }).collect();
    let by_handler: HashMap<Arc<str>, RouteId> =
        wants.iter().zip(&routes).map(|(want, id)| (Arc::clone(&want.handler), *id)).collect();
    let mut again = None;
    // Each round waits for deliveries, for room or for the end of a pause.
    loop {
        let room = shared.room.notified();
        let worth = shared.desk().wants(&routes, &mut wants, shared.now());
        if worth.total == 0 {
            let _ = tokio::time::timeout(ROOM_LOOK, room).await;
            continue;
        }
        let wait = if worth.is_short { WAIT_SHORT } else { WAIT };
        let at = shared.now();
        match port.receive(&wants, worth.total.min(RECEIVE_MAX), wait).await {
            Ok(deliveries) => {
                if again.take().is_some() {
                    tracing::info!(source = &*name, "the source answers again");
                }
                if !deliveries.is_empty() {
                    arrive(&shared, source, &by_handler, deliveries, at).await;
                }
            }
            Err(error) => {
                let pause = again.map_or(AGAIN_MIN, |pause: Duration| (pause * 2).min(AGAIN_MAX));
                again = Some(pause);
                tracing::warn!(source = &*name, %error, ?pause, "receiving failed, trying again");
                // sleeps: a source that is away is not asked again at once
                tokio::time::sleep(pause).await;
            }
        }
    }
}

async fn arrive(
    shared: &Shared,
    source: usize,
    by_handler: &HashMap<Arc<str>, RouteId>,
    deliveries: Vec<Delivery>,
    asked_at: Duration,
) {
    let mut arrived = Vec::with_capacity(deliveries.len());
    let mut unknown = Vec::new();
    // A delivery is its receiver's from some moment after this one on.
    let visibility = shared.sources[source].describe().visibility;
    let at = asked_at.max(shared.now().saturating_sub(visibility / 10));
    let back_at = at + WAIT_MAX.min(visibility / 3);
    for delivery in deliveries {
        match by_handler.get(&*delivery.envelope.handler) {
            Some(route) => arrived.push(Arrived { delivery, source, route: *route, at, back_at }),
            None => unknown.push(delivery),
        }
    }
    shared.watch.received(source, shared.now());
    shared.desk().arrive(arrived);
    shared.work.notify_one();
    for delivery in unknown {
        tracing::warn!(
            handler = delivery.envelope.handler,
            "a delivery of a handler that was not asked for is left to others"
        );
        settle(shared, source, &delivery.receipt, &Verdict::Defer(UNKNOWN_DELAY)).await;
    }
}
