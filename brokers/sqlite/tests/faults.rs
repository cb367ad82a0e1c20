//! What goes wrong with the file, the clock and the callers of a queue, and what comes of it.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::time::{Duration, Instant};

use common::{AT_ONCE, HANDLER, PATIENCE, Place, Shift, done, names, receive, send};
use taskonce_core::ErrorKind;
use taskonce_core::store::Level;
use taskonce_queue_sqlite::{Options, QueueOptions, SqliteQueue};
use taskonce_worker::source::{DeadFilter, Death, Entrance, Envelope, Left, Sent, Source, Want};

#[test]
fn a_wrong_url_is_refused_with_advice() {
    for url in ["", "queue.db", "redis://host", "sqlite:", "sqlite:a.db?visibility=1", "sqlite:a.db?name="] {
        let Err(error) = SqliteQueue::from_url(url) else { panic!("{url} must be refused") };
        assert_eq!(error.kind(), ErrorKind::BadUrl, "{url}");
        assert!(error.hint().contains("visibility=30s"), "{}", error.hint());
    }
}

#[test]
fn a_missing_folder_is_refused_with_advice() {
    let place = Place::new();
    let path = place.folder.path().join("not there").join("queue.db");
    let Err(error) = SqliteQueue::open(&path, QueueOptions::default()) else { panic!("it must be refused") };
    names(&error, ErrorKind::Unreachable, "queue.db");
    assert!(error.hint().contains("mkdir -p"), "{}", error.hint());
}

#[test]
fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let place = Place::new();
    let garbage: Vec<u8> = (0..20_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&place.path, &garbage).unwrap();
    names(&place.refusal(), ErrorKind::Corrupt, "queue.db");
    assert_eq!(std::fs::read(&place.path).unwrap(), garbage);
}

#[test]
fn the_ledgers_file_is_refused_and_left_as_it_is() {
    let place = Place::new();
    let ledger = place.beside();
    // As the store marks its file.
    ledger
        .execute_batch("PRAGMA application_id = 0x7461736b; PRAGMA user_version = 1; CREATE TABLE task (id)")
        .unwrap();
    drop(ledger);
    let before = std::fs::read(&place.path).unwrap();
    let error = place.refusal();
    names(&error, ErrorKind::BadUrl, "queue.db");
    assert!(error.hint().contains("give the queue a file of its own"), "{}", error.hint());
    assert_eq!(std::fs::read(&place.path).unwrap(), before);
}

#[tokio::test]
async fn a_newer_schema_is_refused_also_when_it_comes_under_way() {
    let place = Place::new();
    let queue = place.open();
    send(&queue, *b"a").await;
    place.beside().pragma_update(None, "user_version", 99).unwrap();
    for _ in 0..2 {
        let error = queue.send(&Envelope::new(HANDLER, *b"b"), AT_ONCE, Entrance::Open).await.unwrap_err();
        names(&error, ErrorKind::NewerSchema, "queue.db");
    }
    names(&place.refusal(), ErrorKind::NewerSchema, "queue.db");
    place.beside().pragma_update(None, "user_version", 2).unwrap();
    assert_eq!(receive(&queue, 10, AT_ONCE).await.len(), 1, "nothing of what was refused was queued");
}

#[tokio::test]
async fn a_full_file_refuses_sends_and_lets_settlements_through() {
    let place = Place::new();
    let file = Options { size_max: Some(1024 * 1024), ..Options::default() };
    let queue = place.open_with(QueueOptions { file, ..QueueOptions::default() });
    let mut accepted = 0;
    let error = loop {
        let sent = queue.send(&Envelope::new(HANDLER, vec![7; 60_000]), AT_ONCE, Entrance::Open).await;
        match sent {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
        assert!(accepted < 100, "the file must be full");
    };
    names(&error, ErrorKind::Full, "queue.db");
    // What is there goes out, and makes room.
    let deliveries = receive(&queue, 100, AT_ONCE).await;
    assert_eq!(deliveries.len(), accepted);
    for delivery in deliveries {
        done(queue.acknowledge(&delivery.receipt).await.unwrap());
    }
    send(&queue, vec![7; 60_000]).await;
}

/// Once a send that a full file refused failed every settlement that shared its commit, and whatever waited behind it: what
/// was done was delivered again for as long as somebody sent.
#[tokio::test]
async fn a_full_file_is_worked_off_while_somebody_sends() {
    const LARGE: usize = 60_000;
    let place = Place::new();
    let file = Options { size_max: Some(1024 * 1024), ..Options::default() };
    let queue = place.open_with(QueueOptions { file, ..QueueOptions::default() });
    let large = Envelope::new(HANDLER, vec![7; LARGE]);
    while queue.send(&large, AT_ONCE, Entrance::Open).await.is_ok() {}
    let held = receive(&queue, 100, AT_ONCE).await;
    assert!(held.len() > 8, "{}", held.len());

    // Held, so that all that is asked meanwhile shares one commit.
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut sends = tokio::task::JoinSet::new();
    let mut settlements = tokio::task::JoinSet::new();
    for (number, delivery) in held.into_iter().enumerate() {
        let (sender, settler, large) = (queue.clone(), queue.clone(), large.clone());
        sends.spawn(async move { sender.send(&large, AT_ONCE, Entrance::Open).await });
        settlements.spawn(async move {
            let minute = Duration::from_secs(60);
            match number % 3 {
                0 => settler.acknowledge(&delivery.receipt).await,
                1 => settler.defer(&delivery.receipt, minute).await,
                _ => settler.extend(&delivery.receipt, minute).await,
            }
        });
    }
    // On one thread, each asks before this goes on.
    tokio::task::yield_now().await;
    beside.execute_batch("ROLLBACK").unwrap();
    let mut freed = 0_usize;
    while let Some(settled) = settlements.join_next().await {
        done(settled.unwrap().unwrap());
        freed += 1;
    }
    let (mut accepted, mut refused) = (0_usize, 0);
    while let Some(sent) = sends.join_next().await {
        match sent.unwrap() {
            Ok(Sent::Accepted(_) | Sent::AlreadyQueued(_)) => accepted += 1,
            Err(error) => {
                names(&error, ErrorKind::Full, "queue.db");
                refused += 1;
            }
        }
    }
    assert_eq!(accepted, freed.div_ceil(3), "as many as were acknowledged; {refused} were refused");
    assert_eq!(receive(&queue, 100, AT_ONCE).await.len(), accepted);
}

#[tokio::test]
async fn a_file_that_was_removed_is_an_error_and_not_made_anew() {
    let place = Place::new();
    let queue = place.open();
    send(&queue, *b"a").await;
    std::fs::remove_file(&place.path).unwrap();
    let error = queue.send(&Envelope::new(HANDLER, *b"b"), AT_ONCE, Entrance::Open).await.unwrap_err();
    names(&error, ErrorKind::Unreachable, "queue.db");
    assert!(!place.path.exists());
}

#[tokio::test]
async fn another_process_that_holds_the_file_is_told_as_locked_within_the_timeout() {
    let place = Place::new();
    let file = Options { timeout: Duration::from_millis(200), ..Options::default() };
    let queue = place.open_with(QueueOptions { file, ..QueueOptions::default() });
    send(&queue, *b"a").await;
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let began = Instant::now();
    let error = queue.receive(&[Want { handler: HANDLER.into(), max: 1 }], 1, PATIENCE).await.unwrap_err();
    names(&error, ErrorKind::Locked, "queue.db");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    beside.execute_batch("ROLLBACK").unwrap();
    assert_eq!(receive(&queue, 1, AT_ONCE).await.len(), 1);
}

/// Once one row that a hand had damaged would have held up every other: each receive failed on it.
#[tokio::test]
async fn a_row_that_cannot_be_read_is_set_aside_and_holds_up_nobody() {
    let place = Place::new();
    let queue = place.open();
    for payload in ["good 1", "bad headers", "bad size", "good 2"] {
        send(&queue, payload).await;
    }
    send(&queue, vec![b'x'; 5000]).await;
    let beside = place.beside();
    beside
        .execute_batch(
            "UPDATE delivery SET headers = '{\"no\": \"list\"}' WHERE payload = CAST('bad headers' AS BLOB);
             UPDATE delivery SET size = 3 WHERE payload = CAST('bad size' AS BLOB);
             DELETE FROM large",
        )
        .unwrap();
    let deliveries = receive(&queue, 10, AT_ONCE).await;
    let payloads: Vec<_> = deliveries.iter().map(|delivery| delivery.envelope.payload.as_slice()).collect();
    assert_eq!(payloads, [b"good 1", b"good 2"]);
    let page = queue.dead_letters(&DeadFilter::default(), None).await.unwrap();
    assert_eq!(page.lines.len(), 3);
    for line in &page.lines {
        assert_eq!(line.death.reason, "unreadable");
        names(&queue.dead_one(&line.death.id).await.unwrap_err(), ErrorKind::Corrupt, "queue.db");
        assert_eq!(queue.drop_dead(&line.death.id).await.unwrap(), Left::Done);
    }
}

/// Once one such row hid every dead letter from the list.
#[tokio::test]
async fn a_dead_letter_whose_row_is_damaged_is_listed_with_the_others() {
    let place = Place::new();
    let queue = place.open();
    for payload in ["a", "b", "c", "d"] {
        send(&queue, payload).await;
    }
    for delivery in receive(&queue, 10, AT_ONCE).await {
        let id = format!("dead/{}", String::from_utf8(delivery.envelope.payload).unwrap());
        let death = Death { id, reason: "dead".into(), message: "no luck".into() };
        done(queue.dead_letter(&delivery.receipt, &death).await.unwrap());
    }
    place
        .beside()
        .execute_batch(
            "UPDATE delivery SET number = -1 WHERE death_id = 'dead/a';
             UPDATE delivery SET number = 9223372036854775807, message = NULL WHERE death_id = 'dead/b';
             UPDATE delivery SET handler = CAST(x'ff41' AS TEXT), size = -7 WHERE death_id = 'dead/c';",
        )
        .unwrap();
    let page = queue.dead_letters(&DeadFilter::default(), None).await.unwrap();
    let numbers: Vec<_> = page.lines.iter().map(|line| (&*line.death.id, line.number)).collect();
    assert_eq!(numbers, [("dead/a", 0), ("dead/b", u32::MAX), ("dead/c", 1), ("dead/d", 1)]);
    assert_eq!(queue.dead_one("dead/b").await.unwrap().unwrap().number, u32::MAX);
    assert_eq!(queue.redrive("dead/a").await.unwrap(), Left::Done);
    // A number that no counting leads to is none that holds up the delivery.
    place.beside().execute_batch("UPDATE delivery SET number = 9223372036854775807 WHERE state = 1").unwrap();
    assert_eq!(receive(&queue, 10, AT_ONCE).await[0].number, u32::MAX);
}

/// While workers are replaced one by one, older ones meet what newer ones sent.
#[tokio::test]
async fn what_a_newer_program_wrote_is_put_off_and_never_a_dead_letter() {
    let place = Place::new();
    let clock = Shift::default();
    let queue = place.open_with(clock.options());
    for payload in ["new", "known"] {
        send(&queue, payload).await;
    }
    let write = |sql: &str| place.beside().execute_batch(sql).unwrap();
    write("UPDATE delivery SET format = 2, headers = 'in a new form' WHERE id = 1");
    for _ in 0..3 {
        let held = receive(&queue, 10, AT_ONCE).await;
        let payloads: Vec<_> = held.iter().map(|delivery| delivery.envelope.payload.as_slice()).collect();
        assert_eq!(payloads, [b"known"]);
        done(queue.defer(&held[0].receipt, AT_ONCE).await.unwrap());
        clock.advance(Duration::from_secs(10));
    }
    assert_eq!(queue.dead_letters(&DeadFilter::default(), None).await.unwrap().lines, []);
    // To a program that knows it, it is what it was.
    write("UPDATE delivery SET format = 1, headers = NULL WHERE id = 1");
    clock.advance(Duration::from_secs(10));
    let held = receive(&queue, 1, AT_ONCE).await;
    assert_eq!((held[0].number, &*held[0].envelope.payload), (1, &b"new"[..]));
    // A person cannot read it here either, and can still drop it.
    let death = Death { id: "new".into(), reason: "dead".into(), message: String::new() };
    done(queue.dead_letter(&held[0].receipt, &death).await.unwrap());
    write("UPDATE delivery SET format = 2 WHERE id = 1");
    names(&queue.dead_one("new").await.unwrap_err(), ErrorKind::NewerFormat, "queue.db");
    assert_eq!(queue.drop_dead("new").await.unwrap(), Left::Done);
}

/// The clock of a host goes back when it is set right by hand. What was deferred by a minute would wait for an hour.
#[tokio::test]
async fn a_clock_that_goes_back_makes_nothing_wait_longer_than_it_was_told() {
    let place = Place::new();
    let clock = Shift::default();
    let queue = place.open_with(clock.options());
    let minute = Duration::from_secs(60);
    for payload in ["held", "deferred", "ready"] {
        send(&queue, payload).await;
    }
    let held = receive(&queue, 2, AT_ONCE).await;
    done(queue.defer(&held[1].receipt, minute).await.unwrap());
    clock.advance(Duration::from_secs(10));
    clock.go_back(Duration::from_secs(3600));
    // Whoever looks next finds it out, a reader as well as a writer.
    let mut payloads: Vec<_> = receive(&queue, 10, AT_ONCE).await;
    assert_eq!(payloads.len(), 1);
    assert_eq!(payloads.remove(0).envelope.payload, b"ready");
    clock.advance(Duration::from_secs(45));
    let again = receive(&queue, 10, AT_ONCE).await;
    assert!(again.iter().any(|delivery| delivery.envelope.payload == b"held"), "its visibility timeout has passed");
    assert!(again.iter().all(|delivery| delivery.envelope.payload != b"deferred"));
    clock.advance(Duration::from_secs(20));
    let again = receive(&queue, 10, AT_ONCE).await;
    assert!(again.iter().any(|delivery| delivery.envelope.payload == b"deferred"));
}

#[tokio::test]
async fn a_clock_that_goes_back_while_nothing_is_ready_is_found_by_who_waits() {
    let place = Place::new();
    let clock = Shift::default();
    let queue = place.open_with(clock.options());
    queue.send(&Envelope::new(HANDLER, *b"a"), Duration::from_millis(1500), Entrance::Open).await.map(drop).unwrap();
    clock.go_back(Duration::from_secs(3600));
    let began = Instant::now();
    assert_eq!(receive(&queue, 1, PATIENCE).await.len(), 1);
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_examination_tells_a_clock_that_went_back_and_a_file_that_is_held() {
    let place = Place::new();
    let clock = Shift::default();
    let QueueOptions { file, .. } = clock.options();
    let file = Options { timeout: Duration::from_millis(200), ..file };
    let queue = place.open_with(QueueOptions { file, ..QueueOptions::default() });
    send(&queue, *b"a").await;
    let beside = place.beside();
    // Held, so that the examination's own write puts nothing right.
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    clock.go_back(Duration::from_secs(3600));
    let findings = queue.examine().await;
    let of = |subject: &str| findings.iter().find(|finding| finding.subject == subject).unwrap();
    assert_eq!(of("write").level, Level::Fault, "{findings:?}");
    assert_eq!(of("clock").level, Level::Warning, "{findings:?}");
    for subject in ["journal", "content", "deliveries"] {
        assert_eq!(of(subject).level, Level::Fine, "{findings:?}");
    }
    beside.execute_batch("ROLLBACK").unwrap();
    let findings = queue.examine().await;
    assert!(findings.iter().all(|finding| finding.level < Level::Fault), "{findings:?}");
}

/// Once a receive that was given up while the writer worked left its deliveries in flight, for their whole visibility.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dropped_receive_was_given_is_given_back_at_once() {
    let place = Place::new();
    let queue = place.open();
    for round in 0..40 {
        send(&queue, round.to_string()).await;
        // Dropped when the writer has answered, and nobody has heard it.
        let wants = [Want { handler: HANDLER.into(), max: 10 }];
        let mut dropped = Box::pin(queue.receive(&wants, 10, AT_ONCE));
        std::future::poll_fn(|context| {
            let _ = dropped.as_mut().poll(context);
            std::task::Poll::Ready(())
        })
        .await;
        let start = Instant::now();
        while queue.depth().await.unwrap()[0].in_flight == 0 {
            assert!(start.elapsed() < PATIENCE, "round {round}: nothing was taken");
        }
        drop(dropped);
        let held = receive(&queue, 10, PATIENCE).await;
        assert_eq!(held.len(), 1, "round {round}");
        done(queue.acknowledge(&held[0].receipt).await.unwrap());
    }
}

/// How long the write-ahead log is, in bytes.
fn log(place: &Place) -> u64 {
    std::fs::metadata(place.folder.path().join("queue.db-wal")).unwrap().len()
}

#[tokio::test]
async fn a_large_payload_is_not_written_again_when_its_delivery_is_extended_or_deferred() {
    let place = Place::new();
    let queue = place.open();
    send(&queue, vec![5; 8 * 1024 * 1024]).await;
    place.beside().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    for _ in 0..3 {
        let held = receive(&queue, 1, AT_ONCE).await;
        for _ in 0..10 {
            done(queue.extend(&held[0].receipt, Duration::from_secs(60)).await.unwrap());
        }
        done(queue.defer(&held[0].receipt, AT_ONCE).await.unwrap());
    }
    assert!(log(&place) < 1024 * 1024, "{} bytes for 36 changes", log(&place));
}

#[tokio::test]
async fn who_waits_for_nothing_writes_nothing() {
    let place = Place::new();
    let queue = place.open();
    send(&queue, *b"a").await;
    queue.send(&Envelope::new("another", *b"b"), AT_ONCE, Entrance::Open).await.map(drop).unwrap();
    let held = receive(&queue, 1, AT_ONCE).await;
    done(queue.defer(&held[0].receipt, Duration::from_secs(600)).await.unwrap());
    let before = log(&place);
    assert!(receive(&queue, 1, Duration::from_millis(400)).await.is_empty());
    assert_eq!(log(&place), before);
}

#[tokio::test]
async fn a_file_that_is_worked_off_stops_growing() {
    let place = Place::new();
    let queue = place.open();
    let mut sizes = Vec::new();
    for _ in 0..5 {
        for number in 0..60_usize {
            send(&queue, vec![b'x'; 100 * number]).await;
        }
        for delivery in receive(&queue, 100, AT_ONCE).await {
            done(queue.acknowledge(&delivery.receipt).await.unwrap());
        }
        place.beside().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        sizes.push(std::fs::metadata(&place.path).unwrap().len());
    }
    assert!(sizes[4] <= sizes[1] + sizes[1] / 10, "it goes on growing: {sizes:?}");
}

#[tokio::test]
async fn ten_thousand_handlers_are_served_in_turn() {
    const COUNT: usize = 10_000;
    let place = Place::new();
    let queue = place.open();
    let wants: Vec<Want> = (0..COUNT).map(|number| Want { handler: format!("h{number}").into(), max: 3 }).collect();
    for number in [0, 7, 4711, 9999] {
        for _ in 0..5 {
            let envelope = Envelope::new(format!("h{number}"), *b"x");
            queue.send(&envelope, AT_ONCE, Entrance::Open).await.map(drop).unwrap();
        }
    }
    // Unknown ones in between.
    for number in 0..50 {
        let envelope = Envelope::new(format!("h{number}-unknown"), *b"x");
        queue.send(&envelope, AT_ONCE, Entrance::Open).await.map(drop).unwrap();
    }
    let mut counts = std::collections::BTreeMap::new();
    for delivery in queue.receive(&wants, 8, AT_ONCE).await.unwrap() {
        *counts.entry(delivery.envelope.handler).or_insert(0) += 1;
    }
    assert_eq!(counts, ["h0", "h7", "h4711", "h9999"].map(|name| (name.to_owned(), 2)).into());
}
