//! Cases of what is sent: as it was, when it was asked for, and once where that was asked.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::record::WallTime;
use taskonce_worker::source::{Entrance, Envelope, HANDLER_MAX, HEADERS_MAX, Priority, Sent};
use tokio::task::JoinSet;

use super::{AT_ONCE, HANDLER, Yard, accepted, all, done, payloads, task};

pub(super) async fn what_is_sent_is_delivered_as_it_was_sent(yard: Yard) {
    let sent = Envelope {
        handler: HANDLER.into(),
        key: Some("shop/charge@2/invoice 42 ü".into()),
        payload: br#"{"amount": 12}"#.into(),
        content_type: Some("application/json; charset=utf-8".into()),
        headers: vec![
            ("traceparent".into(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
            ("X-Twice".into(), "first".into()),
            ("x-twice".into(), String::new()),
            ("x-text".into(), "naïve: \"quoted\", 100 %\t\u{1f980}".into()),
        ],
        sent_at: Some(WallTime(1_764_500_000_123)),
        priority: Priority::High,
    };
    let bare = Envelope::new(HANDLER, *b"bare");
    accepted(yard.source.send(&sent, AT_ONCE, Entrance::Open).await.unwrap());
    accepted(yard.source.send(&bare, AT_ONCE, Entrance::Open).await.unwrap());
    let deliveries = all(&*yard.other, AT_ONCE).await;
    assert_eq!(deliveries.len(), 2);
    assert_eq!(deliveries[0].envelope, sent);
    assert_eq!(deliveries[1].envelope, bare);
    for delivery in &deliveries {
        assert_eq!(delivery.source, yard.source.describe().name);
        assert_eq!((delivery.number, delivery.redriven_at), (1, None));
    }
}

pub(super) async fn empty_binary_and_large_payloads_come_back_byte_for_byte(yard: Yard) {
    let every: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..1024 * 1024_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let sent = [Vec::new(), every, large, b"\r\n\0$-1\r\n".to_vec()];
    for payload in &sent {
        accepted(yard.source.send(&Envelope::new(HANDLER, payload.clone()), AT_ONCE, Entrance::Open).await.unwrap());
    }
    let deliveries = all(&*yard.source, AT_ONCE).await;
    assert_eq!(deliveries.len(), sent.len());
    for (delivery, payload) in deliveries.iter().zip(&sent) {
        assert!(delivery.envelope.payload == *payload, "a payload of {} bytes comes back as it was", payload.len());
    }
}

pub(super) async fn a_delayed_send_comes_not_before_its_delay(yard: Yard) {
    let delay = Duration::from_secs(600);
    accepted(yard.source.send(&task("later"), delay, Entrance::Open).await.unwrap());
    yard.send("now").await;
    assert_eq!(payloads(&yard.receive().await), ["now"]);
    yard.pass(delay - Duration::from_secs(5)).await;
    // What was not settled has come again meanwhile.
    assert_eq!(payloads(&yard.receive().await), ["now"]);
    yard.pass(Duration::from_secs(5)).await;
    let late = yard.one().await;
    assert_eq!((payloads(std::slice::from_ref(&late)), late.number), (vec!["later".to_owned()], 1));
}

fn keyed(key: &str, payload: &str) -> Envelope {
    Envelope { key: Some(key.into()), ..task(payload) }
}

pub(super) async fn one_key_is_queued_once_where_that_is_asked(yard: Yard) {
    let first = accepted(yard.source.send(&keyed("a", "1"), AT_ONCE, Entrance::OncePerKey).await.unwrap());
    let again = yard.other.send(&keyed("a", "2"), AT_ONCE, Entrance::OncePerKey).await.unwrap();
    assert_eq!(again, Sent::AlreadyQueued(first.clone()));
    // Another key, another handler, and whoever does not ask.
    accepted(yard.source.send(&keyed("b", "3"), AT_ONCE, Entrance::OncePerKey).await.unwrap());
    let elsewhere = Envelope { handler: "refund@1".into(), ..keyed("a", "4") };
    accepted(yard.source.send(&elsewhere, AT_ONCE, Entrance::OncePerKey).await.unwrap());
    accepted(yard.source.send(&keyed("a", "5"), AT_ONCE, Entrance::Open).await.unwrap());
    assert_eq!(payloads(&yard.receive().await), ["1", "3", "5"]);
    // In flight it is queued still.
    let again = yard.source.send(&keyed("a", "6"), AT_ONCE, Entrance::OncePerKey).await.unwrap();
    assert_eq!(again, Sent::AlreadyQueued(first));
    let error = yard.source.send(&task("no key"), AT_ONCE, Entrance::OncePerKey).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadEnvelope);
}

pub(super) async fn a_key_can_be_queued_again_once_it_is_settled(yard: Yard) {
    for round in 0..3 {
        let sent = yard.source.send(&keyed("a", "1"), AT_ONCE, Entrance::OncePerKey).await.unwrap();
        accepted(sent);
        let held = yard.one().await;
        done(yard.source.defer(&held.receipt, AT_ONCE).await.unwrap());
        let again = yard.source.send(&keyed("a", "1"), AT_ONCE, Entrance::OncePerKey).await.unwrap();
        assert_eq!(again, Sent::AlreadyQueued(held.coordinates.clone()), "deferred is queued");
        let held = yard.one().await;
        match round {
            0 => done(yard.source.acknowledge(&held.receipt).await.unwrap()),
            _ => done(yard.source.dead_letter(&held.receipt, &super::death("a")).await.unwrap()),
        }
    }
}

pub(super) async fn of_many_sends_of_one_key_at_once_one_is_accepted(yard: Yard) {
    let mut sends = JoinSet::new();
    for number in 0..32 {
        let source = if number % 2 == 0 { &yard.source } else { &yard.other };
        let source = std::sync::Arc::clone(source);
        sends.spawn(async move { source.send(&keyed("a", "1"), AT_ONCE, Entrance::OncePerKey).await.unwrap() });
    }
    let sent = sends.join_all().await;
    let won: Vec<_> = sent.iter().filter(|sent| matches!(sent, Sent::Accepted(_))).collect();
    assert_eq!(won.len(), 1, "{sent:?}");
    let coordinates = yard.one().await.coordinates;
    assert!(sent.iter().all(|sent| match sent {
        Sent::Accepted(named) | Sent::AlreadyQueued(named) => *named == coordinates,
    }));
}

pub(super) async fn what_breaks_a_limit_is_refused_and_not_queued(yard: Yard) {
    let too_large = vec![0; yard.source.describe().payload_max + 1];
    for envelope in [
        Envelope::new("", *b"a"),
        Envelope::new("h".repeat(HANDLER_MAX + 1), *b"a"),
        Envelope::new(HANDLER, too_large),
        Envelope { headers: vec![("a".into(), "b".into()); HEADERS_MAX + 1], ..task("a") },
        Envelope { headers: vec![("a".into(), "b\r\nc: d".into())], ..task("a") },
        Envelope { key: Some(String::new()), ..task("a") },
    ] {
        let error = yard.source.send(&envelope, AT_ONCE, Entrance::Open).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadEnvelope, "{error:?}");
    }
    assert_eq!(yard.kept().await, 0);
    yard.nothing().await;
}

pub(super) async fn many_sends_at_once_are_neither_lost_nor_doubled(yard: Yard) {
    const COUNT: usize = 500;
    let mut sends = JoinSet::new();
    for number in 0..COUNT {
        let source = if number % 2 == 0 { &yard.source } else { &yard.other };
        let source = std::sync::Arc::clone(source);
        sends.spawn(async move {
            accepted(source.send(&task(&number.to_string()), AT_ONCE, Entrance::Open).await.unwrap())
        });
    }
    let coordinates: BTreeSet<_> = sends.join_all().await.into_iter().collect();
    assert_eq!(coordinates.len(), COUNT, "each has coordinates of its own");
    let deliveries = yard.receive().await;
    let arrived: BTreeSet<String> = payloads(&deliveries).into_iter().collect();
    assert_eq!((deliveries.len(), arrived.len()), (COUNT, COUNT));
    yard.nothing().await;
}
