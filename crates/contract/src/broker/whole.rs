//! Cases of the source as a whole: what it counts, what it leaves behind, and its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::store::{Finding, Level};
use taskonce_worker::source::{DeadFilter, Depth, Entrance, Envelope, RECEIVE_MAX, Receipt, UNTAKEN_MAX};

use super::{AT_ONCE, HANDLER, PATIENCE, VISIBILITY, Yard, accepted, death, done, task, wants};

pub(super) async fn depth_counts_what_is_there(yard: Yard) {
    assert_eq!(yard.source.depth().await.unwrap(), []);
    for number in 0..10 {
        yard.send(&number.to_string()).await;
    }
    accepted(yard.source.send(&task("later"), VISIBILITY, Entrance::Open).await.unwrap());
    accepted(yard.source.send(&Envelope::new("refund@1", *b"x"), AT_ONCE, Entrance::Open).await.unwrap());
    let held = yard.source.receive(&wants(&[HANDLER]), 6, AT_ONCE).await.unwrap();
    done(yard.source.acknowledge(&held[0].receipt).await.unwrap());
    done(yard.source.defer(&held[1].receipt, 3 * VISIBILITY).await.unwrap());
    done(yard.source.dead_letter(&held[2].receipt, &death("a")).await.unwrap());
    let counted = |depth: &Depth| (depth.handler.to_string(), depth.ready, depth.deferred, depth.in_flight, depth.dead);
    let mut depths: Vec<_> = yard.other.depth().await.unwrap().iter().map(counted).collect();
    depths.sort();
    assert_eq!(depths, [(HANDLER.to_owned(), 4, 2, 3, 1), ("refund@1".to_owned(), 1, 0, 0, 0)]);
    // What is overdue is deliverable, whether somebody has looked or not.
    yard.pass(2 * VISIBILITY).await;
    let depth = yard.depth().await;
    assert_eq!((depth.ready, depth.deferred, depth.in_flight, depth.dead), (9, 1, 0, 1));
}

pub(super) async fn the_oldest_deliverable_tells_its_age(yard: Yard) {
    assert_eq!(yard.depth().await.oldest, None);
    let delay = Duration::from_secs(300);
    accepted(yard.source.send(&task("later"), delay, Entrance::Open).await.unwrap());
    assert_eq!(yard.depth().await.oldest, None, "what is deferred is not deliverable");
    yard.pass(delay + Duration::from_secs(40)).await;
    yard.send("new").await;
    let about = |wanted: u64, oldest: Option<Duration>| {
        let oldest = oldest.expect("something is deliverable").as_secs();
        assert!((wanted..wanted + 60).contains(&oldest), "{oldest} s, not {wanted} s");
    };
    about(40, yard.depth().await.oldest);
    // What comes again is deliverable since its visibility timeout passed.
    let held = yard.receive().await;
    assert_eq!((held.len(), yard.depth().await.oldest), (2, None));
    yard.pass(VISIBILITY + Duration::from_secs(100)).await;
    about(100, yard.depth().await.oldest);
    done(yard.source.defer(&yard.receive().await[0].receipt, AT_ONCE).await.unwrap());
    about(0, yard.depth().await.oldest);
}

pub(super) async fn what_is_settled_leaves_nothing_behind(yard: Yard) {
    for round in 0..4 {
        for number in 0..25 {
            let envelope = Envelope { key: Some(format!("{round}-{number}")), ..task("x") };
            accepted(yard.source.send(&envelope, AT_ONCE, Entrance::OncePerKey).await.unwrap());
        }
        for delivery in yard.receive().await {
            done(yard.source.acknowledge(&delivery.receipt).await.unwrap());
        }
        assert_eq!(yard.kept().await, 0);
    }
    assert_eq!(yard.source.depth().await.unwrap(), []);
}

pub(super) async fn an_examination_finds_what_nobody_takes(yard: Yard) {
    yard.send("a").await;
    let faults = |findings: &[Finding]| findings.iter().filter(|finding| finding.level == Level::Fault).count();
    let untaken = |findings: &[Finding]| {
        findings.iter().any(|finding| finding.level == Level::Warning && finding.text.contains(HANDLER))
    };
    let findings = yard.source.examine().await;
    assert_eq!((faults(&findings), untaken(&findings)), (0, false), "{findings:?}");
    yard.pass(2 * UNTAKEN_MAX).await;
    let findings = yard.source.examine().await;
    assert_eq!((faults(&findings), untaken(&findings)), (0, true), "{findings:?}");
    assert_eq!(yard.one().await.number, 1, "looking takes nothing");
    yard.source.close().await;
    let findings = yard.source.examine().await;
    assert_eq!(faults(&findings), 1, "{findings:?}");
}

pub(super) async fn a_closed_source_refuses_with_an_error_of_its_own(yard: Yard) {
    yard.send("a").await;
    let held = yard.one().await;
    let closed = &yard.source;
    closed.close().await;
    closed.close().await;
    let (receipt, nowhere) = (&held.receipt, Receipt("none".into()));
    let errors = [
        closed.send(&task("b"), AT_ONCE, Entrance::Open).await.map(drop).unwrap_err(),
        closed.receive(&wants(&[HANDLER]), RECEIVE_MAX, AT_ONCE).await.map(drop).unwrap_err(),
        closed.acknowledge(receipt).await.map(drop).unwrap_err(),
        closed.acknowledge(&nowhere).await.map(drop).unwrap_err(),
        closed.defer(receipt, AT_ONCE).await.map(drop).unwrap_err(),
        closed.extend(receipt, VISIBILITY).await.map(drop).unwrap_err(),
        closed.dead_letter(receipt, &death("a")).await.map(drop).unwrap_err(),
        closed.dead_letters(&DeadFilter::default(), None).await.map(drop).unwrap_err(),
        closed.dead_one("a").await.map(drop).unwrap_err(),
        closed.redrive("a").await.map(drop).unwrap_err(),
        closed.drop_dead("a").await.map(drop).unwrap_err(),
        closed.depth().await.map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    }
    // Others go on, and nothing of what was refused has happened.
    done(yard.other.acknowledge(receipt).await.unwrap());
    assert_eq!(yard.kept().await, 0);
}

pub(super) async fn closing_ends_a_receive_that_waits(yard: Yard) {
    let waiting = Arc::clone(&yard.source);
    let receive = tokio::spawn(async move { waiting.receive(&wants(&[HANDLER]), RECEIVE_MAX, PATIENCE).await });
    // sleeps: the receive has to be waiting, which nothing shows from outside.
    tokio::time::sleep(Duration::from_millis(60)).await;
    let began = Instant::now();
    yard.source.close().await;
    let error = receive.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    assert!(began.elapsed() < PATIENCE / 2, "it ended after {:?}", began.elapsed());
}
