//! Cases of what is received: by one at a time, in order, in turn, and soon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce_worker::source::{Delivery, Entrance, Envelope, Priority, RECEIVE_MAX, Source, Want};
use tokio::task::JoinSet;

use super::{AT_ONCE, HANDLER, PATIENCE, VISIBILITY, Yard, accepted, all, done, payloads, task, wants};

/// How soon a receive that waits has to wake, beyond what the source says itself: the machine may be busy.
const SLACK: Duration = Duration::from_secs(3);

pub(super) async fn an_empty_source_answers_nothing_when_the_wait_is_over(yard: Yard) {
    let wait = Duration::from_millis(120);
    let began = Instant::now();
    assert_eq!(all(&*yard.source, wait).await, []);
    let took = began.elapsed();
    assert!(took >= wait && took < wait + SLACK, "it waited {took:?}");
    assert_eq!(yard.source.receive(&[], RECEIVE_MAX, AT_ONCE).await.unwrap(), []);
}

pub(super) async fn a_delivery_that_is_held_is_given_to_nobody_else(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    yard.nothing().await;
    yard.pass(VISIBILITY - Duration::from_secs(10)).await;
    yard.nothing().await;
    done(yard.source.acknowledge(&held.receipt).await.unwrap());
}

pub(super) async fn of_many_consumers_at_once_each_delivery_has_one(yard: Yard) {
    const COUNT: usize = 200;
    for number in 0..COUNT {
        yard.send(&number.to_string()).await;
    }
    let mut consumers = JoinSet::new();
    for number in 0..8 {
        let source = if number % 2 == 0 { &yard.source } else { &yard.other };
        let source: Arc<dyn Source> = Arc::clone(source);
        consumers.spawn(async move {
            let mut taken: Vec<Delivery> = Vec::new();
            // Each round takes something, so that the loop ends.
            loop {
                let more = source.receive(&wants(&[HANDLER]), 7, AT_ONCE).await.unwrap();
                if more.is_empty() {
                    return taken;
                }
                taken.extend(more);
            }
        });
    }
    let taken: Vec<Delivery> = consumers.join_all().await.into_iter().flatten().collect();
    let mut holders: BTreeMap<&str, usize> = BTreeMap::new();
    for delivery in &taken {
        *holders.entry(&delivery.coordinates).or_default() += 1;
    }
    assert!(holders.values().all(|holders| *holders == 1), "{holders:?}");
    assert_eq!(holders.len(), COUNT);
}

pub(super) async fn deliveries_come_by_priority_then_by_age(yard: Yard) {
    let send = async |priority, payload: &str| {
        let envelope = Envelope { priority, ..task(payload) };
        accepted(yard.source.send(&envelope, AT_ONCE, Entrance::Open).await.unwrap());
    };
    send(Priority::Low, "low 1").await;
    send(Priority::Normal, "normal 1").await;
    send(Priority::High, "high 1").await;
    send(Priority::Normal, "normal 2").await;
    send(Priority::Low, "low 2").await;
    send(Priority::High, "high 2").await;
    // By one at a time, so that the order is the source's, not that within an answer.
    let mut order = Vec::new();
    for _ in 0..6 {
        let one = yard.source.receive(&wants(&[HANDLER]), 1, AT_ONCE).await.unwrap();
        order.extend(payloads(&one));
    }
    assert_eq!(order, ["high 1", "high 2", "normal 1", "normal 2", "low 1", "low 2"]);
    // What comes again keeps its age: it goes before what was sent after it.
    send(Priority::Normal, "normal 3").await;
    yard.pass(VISIBILITY).await;
    assert_eq!(
        payloads(&yard.receive().await),
        ["high 1", "high 2", "normal 1", "normal 2", "normal 3", "low 1", "low 2"]
    );
}

pub(super) async fn a_receive_keeps_to_its_bounds(yard: Yard) {
    for number in 0..6 {
        yard.send(&number.to_string()).await;
        let other = Envelope::new("refund@1", number.to_string());
        accepted(yard.source.send(&other, AT_ONCE, Entrance::Open).await.unwrap());
    }
    let want = |handler: &str, max| Want { handler: handler.into(), max };
    let of = |deliveries: &[Delivery], handler: &str| {
        deliveries.iter().filter(|delivery| delivery.envelope.handler == handler).count()
    };
    let none = yard.source.receive(&[want(HANDLER, 0)], 10, AT_ONCE).await.unwrap();
    assert_eq!(none.len(), 0, "a handler that is to be left alone is");
    let none = yard.source.receive(&wants(&[HANDLER]), 0, AT_ONCE).await.unwrap();
    assert_eq!(none.len(), 0);
    let some = yard.source.receive(&[want(HANDLER, 1), want("refund@1", 4)], 10, AT_ONCE).await.unwrap();
    assert_eq!((of(&some, HANDLER), of(&some, "refund@1")), (1, 4));
    let some = yard.source.receive(&[want(HANDLER, 5), want("refund@1", 5)], 3, AT_ONCE).await.unwrap();
    assert_eq!(some.len(), 3);
}

pub(super) async fn no_handler_waits_because_another_has_much(yard: Yard) {
    for number in 0..100 {
        yard.send(&number.to_string()).await;
    }
    for handler in ["aaa", "aaa", "aaa", "aaa", "zzz"] {
        accepted(yard.source.send(&Envelope::new(handler, *b"few"), AT_ONCE, Entrance::Open).await.unwrap());
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        let some = yard.source.receive(&wants(&["aaa", HANDLER, "zzz"]), 2, AT_ONCE).await.unwrap();
        seen.extend(some.into_iter().map(|delivery| delivery.envelope.handler));
    }
    assert!(seen.iter().any(|handler| handler == "aaa"), "{seen:?}");
    assert!(seen.iter().any(|handler| handler == "zzz"), "{seen:?}");
}

pub(super) async fn a_handler_that_nobody_asks_for_is_left_in_place(yard: Yard) {
    let unknown = Envelope::new("not-deployed-yet@1", *b"x");
    accepted(yard.source.send(&unknown, AT_ONCE, Entrance::Open).await.unwrap());
    yard.send("a").await;
    for _ in 0..3 {
        for delivery in yard.receive().await {
            assert_eq!(delivery.envelope.handler, HANDLER);
        }
        yard.pass(VISIBILITY).await;
    }
    assert_eq!(
        yard.source.receive(&wants(&["not-deployed-yet@", "not-deployed-yet@10"]), 10, AT_ONCE).await.unwrap(),
        []
    );
    let arrived = yard.other.receive(&wants(&["not-deployed-yet@1"]), 10, AT_ONCE).await.unwrap();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].number, 1, "nobody was given it before");
}

pub(super) async fn a_receive_that_waits_wakes_soon_after_a_send(yard: Yard) {
    for sender in [&yard.source, &yard.other] {
        let waiting = Arc::clone(&yard.source);
        let receive = tokio::spawn(async move {
            let deliveries = all(&*waiting, PATIENCE).await;
            (deliveries, Instant::now())
        });
        // sleeps: the receive has to be waiting, which nothing shows from outside.
        tokio::time::sleep(Duration::from_millis(60)).await;
        let sent = Instant::now();
        accepted(sender.send(&task("wake"), AT_ONCE, Entrance::Open).await.unwrap());
        let (deliveries, woke) = receive.await.unwrap();
        assert_eq!(payloads(&deliveries), ["wake"]);
        let took = woke.saturating_duration_since(sent);
        assert!(took < yard.source.describe().wake_max + SLACK, "it woke after {took:?}");
        done(yard.source.acknowledge(&deliveries[0].receipt).await.unwrap());
    }
}

pub(super) async fn a_receive_that_waits_wakes_when_a_delay_ends(yard: Yard) {
    let delay = Duration::from_millis(300);
    let began = Instant::now();
    accepted(yard.source.send(&task("a"), delay, Entrance::Open).await.unwrap());
    let held = all(&*yard.other, PATIENCE).await;
    let took = began.elapsed();
    assert_eq!(payloads(&held), ["a"]);
    let latest = delay + yard.source.describe().delay_step + SLACK;
    // A clock of whole milliseconds may be ahead of this one by a part of one.
    assert!(
        took + Duration::from_millis(1) >= delay && took < latest,
        "sent with a delay of {delay:?}, it came after {took:?}"
    );
    let deferred = Instant::now();
    done(yard.other.defer(&held[0].receipt, delay).await.unwrap());
    let held = all(&*yard.other, PATIENCE).await;
    let took = deferred.elapsed();
    assert_eq!(payloads(&held), ["a"]);
    assert!(took + Duration::from_millis(1) >= delay && took < latest, "deferred by {delay:?}, it came after {took:?}");
}

pub(super) async fn a_receive_that_is_given_up_keeps_nothing_from_others(yard: Yard) {
    for _ in 0..5 {
        let wanted = wants(&[HANDLER]);
        let receive = yard.source.receive(&wanted, 10, PATIENCE);
        assert!(tokio::time::timeout(Duration::from_millis(20), receive).await.is_err(), "there is nothing to receive");
    }
    yard.send("a").await;
    let held = all(&*yard.other, PATIENCE).await;
    assert_eq!((payloads(&held), held[0].number), (vec!["a".to_owned()], 1));
}

pub(super) async fn coordinates_name_one_delivery_at_each_arrival(yard: Yard) {
    let sent = [yard.send("a").await, yard.send("a").await];
    assert_ne!(sent[0], sent[1]);
    for round in 1..=3 {
        let deliveries = yard.receive().await;
        let named: Vec<_> = deliveries.iter().map(|delivery| delivery.coordinates.clone()).collect();
        assert_eq!(named, sent);
        assert!(deliveries.iter().all(|delivery| delivery.number == round), "{deliveries:?}");
        yard.pass(VISIBILITY).await;
    }
}
