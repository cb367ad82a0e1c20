//! What the tests of the Redis queue share: the usual handler, and what is sent and received of it.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind};
use taskonce_queue_redis::RedisQueue;
use taskonce_testkit::RedisServer;
use taskonce_worker::source::{Delivery, Entrance, Envelope, Sent, Settled, Source, Want};

pub(crate) const HANDLER: &str = "charge@2";
pub(crate) const AT_ONCE: Duration = Duration::ZERO;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A handle of the queue on this server. A machine under load is slow, and only some tests are about that.
pub(crate) fn open(server: &RedisServer) -> RedisQueue {
    open_with(server, "timeout=20s")
}

pub(crate) fn open_with(server: &RedisServer, options: &str) -> RedisQueue {
    RedisQueue::from_url(&format!("{}/0?{options}", server.url())).unwrap()
}

/// Sends a payload to the usual handler.
pub(crate) async fn send(queue: &RedisQueue, payload: impl Into<Vec<u8>>) -> Arc<str> {
    match queue.send(&Envelope::new(HANDLER, payload), AT_ONCE, Entrance::Open).await.unwrap() {
        Sent::Accepted(coordinates) | Sent::AlreadyQueued(coordinates) => coordinates,
    }
}

/// At most so many of the usual handler.
pub(crate) async fn receive(queue: &RedisQueue, max: usize, wait: Duration) -> Vec<Delivery> {
    queue.receive(&[Want { handler: HANDLER.into(), max }], max, wait).await.unwrap()
}

/// The payloads of deliveries, in their order.
pub(crate) fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8_lossy(&delivery.envelope.payload).into_owned()).collect()
}

pub(crate) fn done(settled: Settled) {
    assert_eq!(settled, Settled::Done);
}

/// Checks an error's kind and that it names what it is about.
pub(crate) fn names(error: &Error, kind: ErrorKind, subject: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.subject().is_some_and(|named| named.contains(subject)), "{error:?} does not name {subject}");
    assert!(!error.hint().is_empty());
}
