//! What the file keeps: across reopening, purges and many writers at once.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Hand, Place, claim, commits_in_log, held, keep, key, record, stored};
use taskonce_core::ErrorKind;
use taskonce_core::record::{Age, DropReason, Output, Record, State};
use taskonce_core::store::{Cursor, Expected, Filter, Memory, Next, PAGE_MAX, Purged, Store as _, Swap};
use taskonce_sqlite::{Options, SqliteStore, Synchronous};

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test]
async fn records_and_outputs_are_there_after_reopening() {
    let place = Place::new();
    let output = Output::kept("application/octet-stream", vec![0, 255, 10, 13]);
    let big = Output::kept("text/plain", vec![b'x'; 1024 * 1024]);
    {
        let store = place.open();
        for (id, output) in [("small", output.clone()), ("big", big.clone())] {
            let running = claim(&store, &key(id)).await;
            keep(&store, &key(id), &running, Record { output, ..record(State::Done) }).await;
        }
    }
    let store = place.open();
    assert_eq!(held(&store, &key("small")).await.record.output, output);
    assert_eq!(held(&store, &key("big")).await.record.output, big);
    assert_eq!(store.load(&key("other")).await.unwrap(), None);
    assert_eq!(claim(&store, &key("other")).await.fence.0, 3, "the sequence goes on");
}

#[tokio::test]
async fn a_swap_that_is_sent_again_is_recognised_with_its_fence() {
    let place = Place::new();
    let store = place.open();
    let (key, first) = (key("a"), record(State::Running));
    let fence = stored(store.swap(&key, Expected::Nothing, Next::Claim(&first)).await.unwrap());
    claim(&store, &common::key("b")).await;
    assert_eq!(stored(store.swap(&key, Expected::Nothing, Next::Claim(&first)).await.unwrap()), fence);

    let done = Record { fence, ..record(State::Done) };
    for _ in 0..2 {
        assert_eq!(stored(store.swap(&key, Expected::Record(&first), Next::Keep(&done)).await.unwrap()), fence);
    }
    let other = record(State::Running);
    let Swap::Conflict(Some(found)) = store.swap(&key, Expected::Record(&first), Next::Claim(&other)).await.unwrap()
    else {
        panic!("the token has moved")
    };
    assert_eq!(*found.record, done);
}

#[tokio::test]
async fn fences_grow_across_purges_and_keys() {
    let place = Place::new();
    let hand = Hand::at(1_000_000);
    let store = place.open_with(hand.options());
    let mut last = 0;
    for round in 0..5 {
        let running = claim(&store, &key("a")).await;
        assert!(running.fence.0 > last, "round {round}");
        last = running.fence.0;
        keep(&store, &key("a"), &running, record(State::Done)).await;
        hand.advance(15 * DAY);
        assert_eq!(store.purge(&Filter::default()).await.unwrap(), Purged { records: 1, outputs: 0 });
        assert_eq!(store.load(&key("a")).await.unwrap(), None);
    }
    // A record that carries more than the sequence has given is not overtaken from behind.
    let carried = Record { fence: taskonce_core::record::Fence(1000), ..record(State::Running) };
    assert_eq!(stored(store.swap(&key("b"), Expected::Nothing, Next::Claim(&carried)).await.unwrap()).0, 1000);
    assert_eq!(claim(&store, &key("c")).await.fence.0, 1001);
}

#[tokio::test]
async fn an_output_goes_after_its_retention_and_its_record_stays_untouched() {
    let place = Place::new();
    let hand = Hand::at(1_000_000);
    let store = place.open_with(hand.options());
    let running = claim(&store, &key("a")).await;
    let done = Record { output: Output::kept("text/plain", "42"), ..record(State::Done) };
    let done = keep(&store, &key("a"), &running, done).await;

    hand.advance(DAY - Duration::from_millis(1));
    assert_eq!(*held(&store, &key("a")).await.record, done);
    assert_eq!(store.purge(&Filter::default()).await.unwrap(), Purged::default());

    // What a duplicate is told does not wait for a purge.
    hand.advance(Duration::from_millis(1));
    let expired = Record { output: Output::Dropped(DropReason::Expired), ..done };
    assert_eq!(*held(&store, &key("a")).await.record, expired);

    assert_eq!(store.purge(&Filter::default()).await.unwrap(), Purged { records: 0, outputs: 1 });
    assert_eq!(store.purge(&Filter::default()).await.unwrap(), Purged::default());
    let found = held(&store, &key("a")).await;
    assert_eq!(*found.record, expired, "the token is the same, too");
    assert_eq!(found.age, Age::from_millis(DAY.as_millis() as i64), "and so is the age");
    let bytes: i64 = place
        .beside()
        .query_row("SELECT instr(body, CAST('text/plain' AS BLOB)) FROM task", [], |row| row.get(0))
        .unwrap();
    assert_eq!(bytes, 0, "the output is out of the file's row");

    hand.advance(13 * DAY);
    assert_eq!(store.purge(&Filter::default()).await.unwrap(), Purged { records: 1, outputs: 0 });
}

#[tokio::test]
async fn a_purge_is_bounded_and_never_takes_what_is_not_final() {
    let place = Place::new();
    let hand = Hand::at(1_000_000);
    let store = place.open_with(hand.options());
    for state in State::ALL {
        for number in 0..3 {
            let key = key(&format!("{state}-{number}"));
            let running = claim(&store, &key).await;
            if state != State::Running {
                keep(&store, &key, &running, record(state)).await;
            }
        }
    }
    hand.advance(1000 * DAY);
    let filter = Filter { page_max: 4, ..Filter::default() };
    assert_eq!(store.purge(&filter).await.unwrap().records, 4);
    assert_eq!(store.purge(&filter).await.unwrap().records, 2);
    assert_eq!(store.purge(&filter).await.unwrap().records, 0);
    let left = all(&store, &Filter::default()).await;
    assert_eq!(left.len(), 9);
    assert!(left.iter().all(|id| !id.starts_with("done") && !id.starts_with("dead")), "{left:?}");
}

#[tokio::test]
async fn a_purge_takes_only_what_its_filter_names() {
    let place = Place::new();
    let hand = Hand::at(1_000_000);
    let store = place.open_with(hand.options());
    for (id, state) in [("a1", State::Done), ("a2", State::Dead), ("b1", State::Done), ("b2", State::Dead)] {
        let running = claim(&store, &key(id)).await;
        keep(&store, &key(id), &running, record(state)).await;
    }
    hand.advance(15 * DAY);
    let filter = Filter { id_prefix: "a".into(), states: vec![State::Dead], ..Filter::default() };
    assert_eq!(store.purge(&filter).await.unwrap().records, 1);
    assert_eq!(all(&store, &Filter::default()).await, ["a1", "b1", "b2"]);
}

async fn all(store: &SqliteStore, filter: &Filter) -> Vec<String> {
    let (mut ids, mut cursor) = (Vec::new(), None);
    for _ in 0..1000 {
        let page = store.scan(filter, cursor).await.unwrap();
        assert!(page.rows.len() <= filter.page());
        ids.extend(page.rows.iter().map(|row| row.key.id().to_owned()));
        cursor = page.next;
        if cursor.is_none() {
            return ids;
        }
    }
    panic!("the walk does not end");
}

#[tokio::test]
async fn pages_have_no_gaps_and_no_repeats_and_obey_every_filter() {
    let place = Place::new();
    let store = place.open();
    for number in 0..50 {
        let state = State::ALL[number % 5];
        let key = key(&format!("{number:02}"));
        let running = claim(&store, &key).await;
        if state != State::Running {
            keep(&store, &key, &running, record(state)).await;
        }
    }
    let filter = Filter { page_max: 7, ..Filter::default() };
    let every: Vec<String> = (0..50).map(|number| format!("{number:02}")).collect();
    assert_eq!(all(&store, &filter).await, every);
    for (number, state) in State::ALL.into_iter().enumerate() {
        let wanted: Vec<String> = (0..50).filter(|at| at % 5 == number).map(|at| format!("{at:02}")).collect();
        assert_eq!(all(&store, &Filter { states: vec![state], ..filter.clone() }).await, wanted, "{state}");
    }
    let billing = Some(taskonce_core::key::Name::new("billing").unwrap());
    let charge = Some(taskonce_core::key::Name::new("charge").unwrap());
    let char = Some(taskonce_core::key::Name::new("char").unwrap());
    let narrow =
        Filter { namespace: billing.clone(), handler: charge.clone(), id_prefix: "4".into(), ..filter.clone() };
    assert_eq!(all(&store, &narrow).await.len(), 10);
    assert_eq!(all(&store, &Filter { namespace: charge, ..filter.clone() }).await.len(), 0);
    assert_eq!(all(&store, &Filter { handler: char.clone(), ..filter.clone() }).await.len(), 0);
    assert_eq!(all(&store, &Filter { namespace: billing, handler: char, ..filter.clone() }).await.len(), 0);
    assert_eq!(all(&store, &Filter { age_min: DAY, ..filter.clone() }).await.len(), 0);
    // A cursor from outside of the filter is no way out of it.
    let outside = Cursor("a/b@1/c".into());
    let page = store.scan(&Filter { page_max: PAGE_MAX, ..narrow }, Some(outside)).await.unwrap();
    assert_eq!((page.rows.len(), page.next), (10, None));
}

#[tokio::test]
async fn erasing_needs_the_token() {
    let place = Place::new();
    let store = place.open();
    let running = claim(&store, &key("a")).await;
    let other = record(State::Running).token;
    assert!(matches!(
        store.swap(&key("a"), Expected::Token(other), Next::Erase).await.unwrap(),
        Swap::Conflict(Some(_))
    ));
    assert!(matches!(store.swap(&key("a"), Expected::Nothing, Next::Erase).await.unwrap(), Swap::Conflict(Some(_))));
    stored(store.swap(&key("a"), Expected::Record(&running), Next::Erase).await.unwrap());
    assert_eq!(store.load(&key("a")).await.unwrap(), None);
    assert_eq!(store.swap(&key("a"), Expected::Record(&running), Next::Erase).await.unwrap(), Swap::Conflict(None));
}

#[tokio::test]
async fn an_age_follows_the_clock_also_backwards() {
    let place = Place::new();
    let hand = Hand::at(1_000_000);
    let store = place.open_with(hand.options());
    let running = claim(&store, &key("a")).await;
    hand.advance(Duration::from_secs(20));
    assert_eq!(held(&store, &key("a")).await.age, Age::from_millis(20_000));
    hand.set(999_000);
    assert_eq!(held(&store, &key("a")).await.age, Age::from_millis(-1000));
    keep(&store, &key("a"), &running, record(State::Running)).await;
    assert_eq!(held(&store, &key("a")).await.age, Age::from_millis(0));
}

#[test]
fn of_64_threads_on_one_key_exactly_one_is_stored_in_each_round() {
    const THREADS: usize = 64;
    const ROUNDS: usize = 20;
    let place = Place::new();
    let store = place.open();
    let barrier = Barrier::new(THREADS);
    let wins = Mutex::new(vec![Vec::new(); ROUNDS]);
    let errors = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                let mut expected = Expected::Nothing;
                for round in 0..ROUNDS {
                    let next = record(State::Running);
                    barrier.wait();
                    match runtime.block_on(store.swap(&key("one"), expected, Next::Claim(&next))) {
                        Ok(Swap::Stored(fence)) => wins.lock().unwrap()[round].push((next.token, fence)),
                        Ok(Swap::Conflict(_) | Swap::Locked(_)) => {}
                        // Kept for later: a thread that ends here would leave the others at the barrier.
                        Err(error) => errors.lock().unwrap().push(error),
                    }
                    barrier.wait();
                    expected = wins.lock().unwrap()[round]
                        .first()
                        .map_or(Expected::Nothing, |(token, _)| Expected::Token(*token));
                }
            });
        }
    });
    let (wins, errors) = (wins.into_inner().unwrap(), errors.into_inner().unwrap());
    assert!(errors.is_empty(), "{errors:?}");
    assert!(wins.iter().all(|round| round.len() == 1), "{wins:?}");
    assert!(wins.windows(2).all(|pair| pair[0][0].1 < pair[1][0].1), "fences grow: {wins:?}");
}

#[tokio::test]
async fn swaps_that_wait_together_share_one_commit() {
    const SWAPS: usize = 64;
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("first")).await;
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let commits = commits_in_log(&place.path);

    let (keys, records): (Vec<_>, Vec<_>) =
        (0..SWAPS).map(|number| (key(&format!("{number}")), record(State::Running))).unzip();
    let mut swaps: Vec<_> = keys
        .iter()
        .zip(&records)
        .map(|(key, record)| store.swap(key, Expected::Nothing, Next::Claim(record)))
        .collect();
    // Each is asked once, which hands it to the writer; the writer waits for the other one's transaction.
    let mut context = Context::from_waker(Waker::noop());
    for swap in &mut swaps {
        assert!(swap.as_mut().poll(&mut context).is_pending());
    }
    beside.execute_batch("ROLLBACK").unwrap();
    let mut fences = BTreeSet::new();
    for swap in swaps {
        fences.insert(stored(swap.await.unwrap()));
    }
    assert_eq!(fences.len(), SWAPS, "each has a fence of its own");
    assert_eq!(commits_in_log(&place.path) - commits, 1);
}

#[tokio::test]
async fn a_dropped_swap_disturbs_no_other() {
    let place = Place::new();
    let store = place.open();
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (keys, records): (Vec<_>, Vec<_>) =
        (0..30).map(|number| (key(&format!("{number}")), record(State::Running))).unzip();
    let mut swaps: Vec<_> = keys
        .iter()
        .zip(&records)
        .map(|(key, record)| Some(store.swap(key, Expected::Nothing, Next::Claim(record))))
        .collect();
    let mut context = Context::from_waker(Waker::noop());
    for swap in swaps.iter_mut().flatten() {
        assert!(swap.as_mut().poll(&mut context).is_pending());
    }
    for dropped in swaps.iter_mut().step_by(3) {
        *dropped = None;
    }
    beside.execute_batch("ROLLBACK").unwrap();
    for (number, swap) in swaps.into_iter().enumerate() {
        if let Some(swap) = swap {
            stored(swap.await.unwrap());
            assert_eq!(held(&store, &keys[number]).await.record.token, records[number].token);
        }
    }
}

/// Reads are answered at once, and a future that never waits never yields by itself. 64 loops over duplicates on two
/// worker threads once held up everything else of their runtime, and running tasks lost their claims.
#[tokio::test]
async fn a_loop_over_duplicates_lets_other_tasks_run() {
    /// Tokio's budget is 128 steps.
    const READS_MAX: usize = 1000;
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("a")).await;
    let (one, next) = (key("a"), record(State::Running));
    let turn = || {
        let turn = Arc::new(AtomicBool::new(false));
        let taken = Arc::clone(&turn);
        tokio::spawn(async move { taken.store(true, Ordering::SeqCst) });
        turn
    };
    for look in [true, false] {
        let turn = turn();
        for reads in 0.. {
            assert!(reads < READS_MAX, "the other task never ran");
            if turn.load(Ordering::SeqCst) {
                break;
            }
            if look {
                store.load(&one).await.unwrap();
            } else {
                store.swap(&one, Expected::Nothing, Next::Claim(&next)).await.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn reads_outside_of_a_runtime_are_answered_at_the_first_poll() {
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("a")).await;
    let (one, next) = (key("a"), record(State::Running));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut context = Context::from_waker(Waker::noop());
            for _ in 0..1000 {
                assert!(store.load(&one).as_mut().poll(&mut context).is_ready());
                assert!(store.swap(&one, Expected::Nothing, Next::Claim(&next)).as_mut().poll(&mut context).is_ready());
            }
        });
    });
}

#[test]
fn many_may_open_a_new_file_at_once() {
    let place = Place::new();
    let barrier = Barrier::new(16);
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (place, barrier) = (&place, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let store = place.open();
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(claim(&store, &key(&format!("{number}"))));
            });
        }
    });
    let count: i64 = place.beside().query_row("SELECT count(*) FROM task", [], |row| row.get(0)).unwrap();
    assert_eq!(count, 16);
}

#[tokio::test]
async fn a_person_can_read_the_file() {
    let place = Place::new();
    let hand = Hand::at(1_700_000_000_000);
    let store = place.open_with(hand.options());
    let key = key("a/b@c");
    let running = claim(&store, &key).await;
    keep(&store, &key, &running, record(State::Done)).await;
    let row: [String; 6] = place
        .beside()
        .query_row("SELECT namespace, handler, version, id, state, written_at FROM tasks", [], |row| {
            Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?])
        })
        .unwrap();
    assert_eq!(row, ["billing", "charge", "2", "a/b@c", "done", "2023-11-14 22:13:20"]);
}

#[test]
fn only_full_synchronous_promises_to_keep() {
    let place = Place::new();
    assert_eq!(place.open().memory(), Memory::Keeps);
    let normal = Options { synchronous: Synchronous::Normal, ..Options::default() };
    assert_eq!(place.open_with(normal).memory(), Memory::MayForget);
}

#[tokio::test]
async fn a_url_opens_the_file_that_it_names() {
    let place = Place::new();
    let path = place.folder.path().join("a b.db");
    let url = format!("sqlite://{}?timeout=3s", path.display().to_string().replace(' ', "%20"));
    let store = SqliteStore::from_url(&url).unwrap();
    claim(&store, &key("a")).await;
    assert!(path.is_file());
    assert_eq!(SqliteStore::from_url("sqlite:x.db?colour=red").unwrap_err().kind(), ErrorKind::BadUrl);
}
