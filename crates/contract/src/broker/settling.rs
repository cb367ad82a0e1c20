//! Cases of what is settled: by the receipt that holds it, once, and by no other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use taskonce_worker::source::{Receipt, Settled};
use tokio::task::JoinSet;

use super::{AT_ONCE, VISIBILITY, Yard, all, death, done, gone, payloads};

/// A moment that is long by any test's measure, and short by the visibility timeout's.
const MOMENT: Duration = Duration::from_secs(5);

pub(super) async fn what_is_not_settled_comes_again_after_its_visibility(yard: Yard) {
    yard.send("a").await;
    assert_eq!(yard.one().await.number, 1);
    yard.pass(VISIBILITY - MOMENT).await;
    yard.nothing().await;
    yard.pass(MOMENT).await;
    let again = all(&*yard.other, AT_ONCE).await;
    assert_eq!(payloads(&again), ["a"]);
    assert_eq!(again[0].number, 2);
    yard.nothing().await;
}

pub(super) async fn what_is_extended_does_not_come_again(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    // Three heartbeats, and the last one is longer.
    for visibility in [VISIBILITY, VISIBILITY, 10 * VISIBILITY] {
        yard.pass(VISIBILITY - MOMENT).await;
        done(yard.source.extend(&held.receipt, visibility).await.unwrap());
        yard.nothing().await;
    }
    yard.pass(10 * VISIBILITY - MOMENT).await;
    yard.nothing().await;
    // A shorter one counts as well: from now on, not from before.
    done(yard.source.extend(&held.receipt, MOMENT).await.unwrap());
    yard.pass(MOMENT).await;
    assert_eq!(yard.one().await.number, 2);
    gone(yard.source.extend(&held.receipt, VISIBILITY).await.unwrap());
}

pub(super) async fn what_is_deferred_comes_not_before_its_delay(yard: Yard) {
    yard.send("a").await;
    for round in 1..=3 {
        let held = yard.one().await;
        assert_eq!(held.number, round);
        // Longer than the visibility timeout, and shorter.
        let delay = if round % 2 == 0 { 2 * MOMENT } else { 3 * VISIBILITY };
        done(yard.source.defer(&held.receipt, delay).await.unwrap());
        yard.nothing().await;
        yard.pass(delay - MOMENT).await;
        yard.nothing().await;
        yard.pass(MOMENT).await;
    }
    assert_eq!(yard.one().await.number, 4);
}

pub(super) async fn what_is_deferred_by_nothing_comes_at_once(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    done(yard.source.defer(&held.receipt, AT_ONCE).await.unwrap());
    let again = all(&*yard.other, AT_ONCE).await;
    assert_eq!((payloads(&again), again[0].number), (vec!["a".to_owned()], 2));
}

pub(super) async fn what_is_acknowledged_never_comes_again(yard: Yard) {
    yard.send("a").await;
    yard.send("b").await;
    let held = yard.receive().await;
    done(yard.source.acknowledge(&held[0].receipt).await.unwrap());
    yard.pass(100 * VISIBILITY).await;
    assert_eq!(payloads(&yard.receive().await), ["b"]);
}

pub(super) async fn a_stale_receipt_settles_nothing(yard: Yard) {
    yard.send("a").await;
    let stale = yard.one().await.receipt;
    yard.pass(VISIBILITY).await;
    let held = all(&*yard.other, AT_ONCE).await.remove(0);
    assert_ne!(stale, held.receipt);
    gone(yard.source.acknowledge(&stale).await.unwrap());
    gone(yard.source.extend(&stale, 10 * VISIBILITY).await.unwrap());
    gone(yard.source.defer(&stale, AT_ONCE).await.unwrap());
    gone(yard.source.dead_letter(&stale, &death("a")).await.unwrap());
    yard.nothing().await;
    assert_eq!(yard.depth().await.dead, 0);
    // It is still the other's, for as long as that was given it.
    done(yard.other.extend(&held.receipt, VISIBILITY).await.unwrap());
    yard.pass(VISIBILITY).await;
    assert_eq!(yard.one().await.number, 3);
}

pub(super) async fn a_settlement_sent_again_changes_nothing(yard: Yard) {
    for payload in ["acknowledged", "deferred", "dead"] {
        yard.send(payload).await;
    }
    let held = yard.receive().await;
    let [acknowledged, deferred, dead] = held.as_slice() else { panic!("three are there") };
    let delay = 2 * VISIBILITY;
    for wanted in [Settled::Done, Settled::Gone, Settled::Gone] {
        assert_eq!(yard.source.acknowledge(&acknowledged.receipt).await.unwrap(), wanted);
        assert_eq!(yard.source.defer(&deferred.receipt, delay).await.unwrap(), wanted);
        assert_eq!(yard.source.dead_letter(&dead.receipt, &death("a")).await.unwrap(), wanted);
        yard.pass(MOMENT).await;
    }
    // No other verb brings back what one verb has settled.
    for receipt in [&acknowledged.receipt, &deferred.receipt, &dead.receipt] {
        gone(yard.source.extend(receipt, AT_ONCE).await.unwrap());
        gone(yard.source.defer(receipt, AT_ONCE).await.unwrap());
    }
    yard.nothing().await;
    let depth = yard.depth().await;
    assert_eq!((depth.deferred, depth.in_flight, depth.ready, depth.dead), (1, 0, 0, 1));
    yard.pass(delay - 3 * MOMENT).await;
    assert_eq!(payloads(&yard.receive().await), ["deferred"], "its delay counts from the first deferral");
}

pub(super) async fn a_late_settlement_counts_while_nobody_else_has_it(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    yard.pass(2 * VISIBILITY).await;
    done(yard.source.extend(&held.receipt, VISIBILITY).await.unwrap());
    yard.nothing().await;
    yard.pass(2 * VISIBILITY).await;
    done(yard.source.acknowledge(&held.receipt).await.unwrap());
    yard.nothing().await;
    assert_eq!(yard.kept().await, 0);
}

pub(super) async fn a_receipt_of_nothing_settles_nothing(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    let like = format!("{}0", held.receipt.0);
    for text in ["", "-", "1", "no receipt", "1-1-1", "\u{0}", like.as_str()] {
        let receipt = Receipt(text.into());
        if receipt == held.receipt {
            continue;
        }
        gone(yard.source.acknowledge(&receipt).await.unwrap());
        gone(yard.source.defer(&receipt, AT_ONCE).await.unwrap());
    }
    yard.nothing().await;
    done(yard.source.acknowledge(&held.receipt).await.unwrap());
}

pub(super) async fn a_killed_consumers_deliveries_come_back(yard: Yard) {
    for number in 0..20 {
        yard.send(&number.to_string()).await;
    }
    let dying = yard.open().await;
    let held = all(&*dying, AT_ONCE).await;
    assert_eq!(held.len(), 20);
    done(dying.acknowledge(&held[3].receipt).await.unwrap());
    drop(dying);
    yard.pass(VISIBILITY - MOMENT).await;
    yard.nothing().await;
    yard.pass(MOMENT).await;
    let again = yard.receive().await;
    let wanted: Vec<String> = (0..20).filter(|number| *number != 3).map(|number| number.to_string()).collect();
    assert_eq!(payloads(&again), wanted);
    assert!(again.iter().all(|delivery| delivery.number == 2));
}

pub(super) async fn a_drain_leaves_nothing_in_flight(yard: Yard) {
    const COUNT: u64 = 60;
    for number in 0..COUNT {
        yard.send(&number.to_string()).await;
    }
    let held = yard.receive().await;
    let (started, waiting) = held.split_at(10);
    for delivery in started {
        done(yard.source.acknowledge(&delivery.receipt).await.unwrap());
    }
    for delivery in waiting {
        done(yard.source.defer(&delivery.receipt, AT_ONCE).await.unwrap());
    }
    yard.source.close().await;
    let depth = yard.depth().await;
    assert_eq!((depth.ready, depth.in_flight, depth.deferred), (COUNT - 10, 0, 0));
    assert_eq!(all(&*yard.other, AT_ONCE).await.len() as u64, COUNT - 10);
}

pub(super) async fn many_settlements_at_once_do_not_mix(yard: Yard) {
    const COUNT: usize = 240;
    for number in 0..COUNT {
        yard.send(&number.to_string()).await;
    }
    let held = yard.receive().await;
    assert_eq!(held.len(), COUNT);
    let mut settlements = JoinSet::new();
    for (number, delivery) in held.into_iter().enumerate() {
        // A receipt is good with each handle of the queue.
        let source = Arc::clone(if number % 8 < 4 { &yard.source } else { &yard.other });
        settlements.spawn(async move {
            done(match number % 4 {
                0 => source.acknowledge(&delivery.receipt).await.unwrap(),
                1 => source.defer(&delivery.receipt, AT_ONCE).await.unwrap(),
                2 => source.extend(&delivery.receipt, 4 * VISIBILITY).await.unwrap(),
                _ => source.dead_letter(&delivery.receipt, &death(&number.to_string())).await.unwrap(),
            });
        });
    }
    settlements.join_all().await;
    let of =
        |rest: usize| (0..COUNT).filter(move |number| number % 4 == rest).map(|number| number.to_string()).collect();
    let set = |deliveries: Vec<_>| payloads(&deliveries).into_iter().collect::<BTreeSet<String>>();
    let ready: BTreeSet<String> = of(1);
    assert_eq!(set(yard.receive().await), ready);
    yard.pass(3 * VISIBILITY).await;
    assert_eq!(set(yard.receive().await), ready, "what is extended stays");
    let depth = yard.depth().await;
    assert_eq!((depth.in_flight, depth.dead), (2 * COUNT as u64 / 4, COUNT as u64 / 4));
}
