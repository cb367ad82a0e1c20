//! Cases of dead letters: whole, once, and back in work only when a person says so.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::record::WallTime;
use taskonce_core::store::Cursor;
use taskonce_worker::source::{
    DEATH_MESSAGE_MAX, DeadFilter, DeadLine, Death, Entrance, Envelope, Left, Priority, Sent,
};

use super::{AT_ONCE, HANDLER, VISIBILITY, Yard, accepted, death, done, gone, payloads, wants};

/// More pages than any case has.
const PAGES_MAX: usize = 100;

/// All dead letters that match, by pages.
async fn listed(yard: &Yard, filter: &DeadFilter) -> Vec<DeadLine> {
    let (mut lines, mut cursor) = (Vec::new(), None);
    for _ in 0..PAGES_MAX {
        let page = yard.other.dead_letters(filter, cursor).await.unwrap();
        assert!(page.lines.len() <= filter.page_max, "{} lines", page.lines.len());
        lines.extend(page.lines);
        cursor = page.next;
        if cursor.is_none() {
            return lines;
        }
    }
    panic!("the walk does not end");
}

/// Sends one and lets it die.
async fn dies(yard: &Yard, envelope: &Envelope, why: &Death) {
    accepted(yard.source.send(envelope, AT_ONCE, Entrance::Open).await.unwrap());
    let held = yard.source.receive(&wants(&[&envelope.handler]), 1, AT_ONCE).await.unwrap();
    done(yard.source.dead_letter(&held[0].receipt, why).await.unwrap());
}

fn full() -> Envelope {
    Envelope {
        key: Some("shop/charge@2/7".into()),
        payload: (0..=255).collect(),
        content_type: Some("application/octet-stream".into()),
        headers: vec![("traceparent".into(), "00-01".into()), ("a".into(), String::new())],
        sent_at: Some(WallTime(17)),
        priority: Priority::Low,
        ..Envelope::new(HANDLER, *b"")
    }
}

pub(super) async fn a_dead_letter_keeps_what_was_sent_and_why(yard: Yard) {
    let envelope = full();
    let coordinates = accepted(yard.source.send(&envelope, AT_ONCE, Entrance::Open).await.unwrap());
    drop(yard.one().await);
    yard.pass(VISIBILITY).await;
    let held = yard.one().await;
    let long = Death { message: "é".repeat(DEATH_MESSAGE_MAX), ..death("shop/charge@2/7") };
    done(yard.source.dead_letter(&held.receipt, &long).await.unwrap());
    yard.pass(Duration::from_secs(100)).await;
    let kept = yard.other.dead_one("shop/charge@2/7").await.unwrap().expect("it is there");
    assert_eq!(kept.envelope, envelope);
    assert_eq!((kept.number, kept.coordinates, kept.redriven_at), (2, coordinates, None));
    assert_eq!(kept.death, Death { message: long.message_cut().to_owned(), ..long });
    let age = kept.age.as_secs();
    assert!((100..160).contains(&age), "{age} s");
    let lines = listed(&yard, &DeadFilter::default()).await;
    assert_eq!(lines.len(), 1);
    let line = &lines[0];
    assert_eq!((&line.handler, &line.key, line.number, line.payload_len), (&envelope.handler, &envelope.key, 2, 256));
    assert_eq!(line.death, kept.death);
    assert_eq!(yard.other.dead_one("shop/charge@2/8").await.unwrap(), None);
}

pub(super) async fn a_dead_letter_is_delivered_no_more(yard: Yard) {
    dies(&yard, &full(), &death("a")).await;
    yard.pass(1000 * VISIBILITY).await;
    yard.nothing().await;
    let depth = yard.depth().await;
    assert_eq!((depth.dead, depth.ready, depth.in_flight, depth.deferred), (1, 0, 0, 0));
}

pub(super) async fn two_deaths_of_one_id_are_one_dead_letter(yard: Yard) {
    dies(&yard, &Envelope::new(HANDLER, *b"first"), &death("a")).await;
    dies(&yard, &Envelope::new(HANDLER, *b"second"), &Death { reason: "parked".into(), ..death("a") }).await;
    dies(&yard, &Envelope::new(HANDLER, *b"third"), &death("b")).await;
    let lines = listed(&yard, &DeadFilter::default()).await;
    assert_eq!(lines.iter().map(|line| line.death.id.as_str()).collect::<BTreeSet<_>>(), ["a", "b"].into());
    assert_eq!(lines.len(), 2);
    let kept = yard.source.dead_one("a").await.unwrap().expect("it is there");
    assert_eq!((kept.envelope.payload.as_slice(), kept.death), (b"first".as_slice(), death("a")));
    yard.nothing().await;
    assert_eq!(yard.kept().await, 2);
}

pub(super) async fn a_dead_letter_is_redriven_once(yard: Yard) {
    let envelope = full();
    dies(&yard, &envelope, &death("a")).await;
    let coordinates = yard.source.dead_one("a").await.unwrap().expect("it is there").coordinates;
    let (one, two) = tokio::join!(yard.source.redrive("a"), yard.other.redrive("a"));
    let mut answers = [one.unwrap(), two.unwrap()];
    answers.sort_by_key(|answer| *answer == Left::NotThere);
    assert_eq!(answers, [Left::Done, Left::NotThere]);
    assert_eq!(yard.source.dead_one("a").await.unwrap(), None);
    let again = yard.one().await;
    assert_eq!(again.envelope, envelope);
    assert_eq!((again.number, &again.coordinates), (1, &coordinates));
    assert!(again.redriven_at.is_some(), "it tells that it is old for a reason");
    yard.nothing().await;
    done(yard.source.acknowledge(&again.receipt).await.unwrap());
    assert_eq!(yard.kept().await, 0);
    assert_eq!(yard.source.redrive("a").await.unwrap(), Left::NotThere);
}

pub(super) async fn what_was_redriven_can_die_again(yard: Yard) {
    let held = {
        accepted(yard.source.send(&full(), AT_ONCE, Entrance::Open).await.unwrap());
        yard.one().await
    };
    done(yard.source.dead_letter(&held.receipt, &death("a")).await.unwrap());
    for _ in 0..3 {
        assert_eq!(yard.source.redrive("a").await.unwrap(), Left::Done);
        let again = yard.one().await;
        // The receipt of a life before settles nothing in this one.
        gone(yard.source.acknowledge(&held.receipt).await.unwrap());
        done(yard.source.dead_letter(&again.receipt, &death("a")).await.unwrap());
    }
    assert_eq!(listed(&yard, &DeadFilter::default()).await.len(), 1);
}

/// A dead letter lost its place at the entrance, and did not get it back: a sender that asked for once, and a redrive, queued two.
pub(super) async fn what_was_redriven_is_queued_once(yard: Yard) {
    let once = |envelope: Envelope| {
        let source = &yard.other;
        async move { source.send(&envelope, AT_ONCE, Entrance::OncePerKey).await.unwrap() }
    };
    let of = |key: &str| Envelope { key: Some(key.into()), ..full() };
    dies(&yard, &of("a"), &death("a")).await;
    assert_eq!(yard.source.redrive("a").await.unwrap(), Left::Done);
    let Sent::AlreadyQueued(_) = once(of("a")).await else { panic!("the redriven one is queued") };
    let held = yard.one().await;
    let Sent::AlreadyQueued(coordinates) = once(of("a")).await else { panic!("it is in flight") };
    assert_eq!(coordinates, held.coordinates);
    // Where another was sent meanwhile, both are queued: a redrive loses nothing.
    done(yard.source.dead_letter(&held.receipt, &death("a")).await.unwrap());
    accepted(once(of("a")).await);
    assert_eq!(yard.source.redrive("a").await.unwrap(), Left::Done);
    let both = yard.receive().await;
    assert_eq!(both.len(), 2);
    for delivery in both {
        done(yard.source.acknowledge(&delivery.receipt).await.unwrap());
    }
    accepted(once(of("a")).await);
    // What has no key has no place to take.
    let nameless = Envelope { key: None, ..full() };
    dies(&yard, &nameless, &death("b")).await;
    assert_eq!(yard.source.redrive("b").await.unwrap(), Left::Done);
}

pub(super) async fn a_dropped_dead_letter_is_gone(yard: Yard) {
    dies(&yard, &full(), &death("a")).await;
    yard.send("alive").await;
    assert_eq!(yard.other.drop_dead("b").await.unwrap(), Left::NotThere);
    assert_eq!(yard.other.drop_dead("a").await.unwrap(), Left::Done);
    assert_eq!(yard.other.drop_dead("a").await.unwrap(), Left::NotThere);
    assert_eq!(yard.source.redrive("a").await.unwrap(), Left::NotThere);
    assert_eq!(payloads(&yard.receive().await), ["alive"]);
    assert_eq!(yard.kept().await, 1);
}

pub(super) async fn dead_letters_are_paged_without_gaps_or_repeats(yard: Yard) {
    for number in 0..23 {
        let (handler, reason) =
            (if number % 2 == 0 { HANDLER } else { "refund@1" }, if number % 3 == 0 { "parked" } else { "dead" });
        let why = Death { reason: reason.into(), ..death(&number.to_string()) };
        dies(&yard, &Envelope::new(handler, number.to_string()), &why).await;
    }
    yard.send("alive").await;
    let ids = |lines: &[DeadLine]| {
        let mut ids: Vec<usize> = lines.iter().map(|line| line.death.id.parse().unwrap()).collect();
        ids.sort_unstable();
        ids
    };
    for page_max in [1, 5, 23, 100] {
        let filter = DeadFilter { page_max, ..DeadFilter::default() };
        assert_eq!(ids(&listed(&yard, &filter).await), (0..23).collect::<Vec<_>>(), "pages of {page_max}");
    }
    let filter = DeadFilter { handler: Some(HANDLER.into()), reason: Some("parked".into()), page_max: 3 };
    assert_eq!(ids(&listed(&yard, &filter).await), [0, 6, 12, 18]);
    let filter = DeadFilter { reason: Some("unreadable".into()), ..DeadFilter::default() };
    assert_eq!(listed(&yard, &filter).await, []);
    // What goes and comes while a walk is under way neither hides nor doubles what stays.
    let filter = DeadFilter { page_max: 10, ..DeadFilter::default() };
    let first = yard.source.dead_letters(&filter, None).await.unwrap();
    for line in &first.lines {
        assert_eq!(yard.source.drop_dead(&line.death.id).await.unwrap(), Left::Done);
    }
    let mut rest = Vec::new();
    let mut cursor = first.next;
    for _ in 0..PAGES_MAX {
        let Some(at) = cursor else { break };
        let page = yard.source.dead_letters(&filter, Some(at)).await.unwrap();
        rest.extend(page.lines);
        cursor = page.next;
    }
    let mut seen = ids(&first.lines);
    seen.extend(ids(&rest));
    seen.sort_unstable();
    assert_eq!(seen, (0..23).collect::<Vec<_>>());
}

pub(super) async fn a_foreign_cursor_of_dead_letters_is_refused(yard: Yard) {
    let error = yard.source.dead_letters(&DeadFilter::default(), Some(Cursor("x' OR 1".into()))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadCursor);
}
