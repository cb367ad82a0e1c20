//! What calls cost: one statement each, and duplicates write nothing.

use std::time::{Duration, Instant};

use taskonce_core::key::Key;
use taskonce_core::policy::Effect;
use taskonce_core::record::{ClaimId, Fence, Output, Record, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_postgres::{PostgresStore, plain_sql};
use taskonce_testkit::PostgresServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::common::{Place, SCHEMA};
use crate::support::{claim, key, load, next, replace, running};

/// Elsewhere an advisory lock for each task cost twenty times a unique index, and a notification in each completion two thirds of the
/// throughput.
#[tokio::test]
async fn a_claim_with_its_look_a_completion_and_a_duplicate_are_one_statement_each_without_advisory_lock_or_notification()
 {
    let server = PostgresServer::start(&["-c", "fsync=off", "-c", "log_statement=all"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    // The first of each is also prepared.
    run(&store, "first").await;
    let before = server.log().unwrap().len();
    run(&store, "second").await;
    let said = server.log().unwrap()[before..].to_lowercase();
    assert_eq!(said.matches("execute s").count(), 5, "claim and its look, heartbeat, completion and duplicate");
    assert!(!said.contains("advisory") && !said.contains("notify"), "{said}");
}

async fn run(store: &PostgresStore, id: &str) {
    let key = key(id);
    let held = claim(store, &key, &running(1)).await;
    let beat = next(&held, State::Running);
    replace(store, &key, &held, &beat).await;
    replace(store, &key, &beat, &next(&beat, State::Done)).await;
    let swap = store.swap(&key, Expected::Nothing, Next::Claim(&running(2))).await.unwrap();
    assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
}

/// A duplicate that takes a value of the sequence makes a transaction, and flushes, each 32nd time.
#[tokio::test]
async fn duplicates_take_no_fence_no_transaction_and_write_nothing() {
    duplicates_write_nothing("timeout=20s").await;
}

#[tokio::test]
async fn neither_do_duplicates_behind_a_pooler() {
    duplicates_write_nothing("timeout=20s&statements=unnamed").await;
}

async fn duplicates_write_nothing(options: &str) {
    // Nothing of the server's own is written meanwhile: no vacuum, and no snapshots for standbys.
    let quiet = ["-c", "fsync=off", "-c", "autovacuum=off", "-c", "wal_level=minimal", "-c", "max_wal_senders=0"];
    let server = PostgresServer::start(&quiet).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store_with(options);
    let keys: Vec<Key> = (0..100).map(|number| key(&format!("k-{number}"))).collect();
    for (number, key) in keys.iter().enumerate() {
        let held = claim(&store, key, &running(number as u128 + 1)).await;
        replace(&store, key, &held, &next(&held, State::Done)).await;
    }
    let state = "select txid_snapshot_xmax(txid_current_snapshot()), last_value, pg_current_wal_insert_lsn()::text
                 from {schema}.fence";
    // Once, so that what a first read leaves behind (hint bits, statistics) is there already.
    duplicates(&place.store_with(options), &keys).await;
    let before = place.beside(state, &[]).await;
    let other = place.store_with(options);
    // It meets each for the first time, and then again.
    duplicates(&other, &keys).await;
    duplicates(&other, &keys).await;
    let after = place.beside(state, &[]).await;
    type Seen = (i64, i64, String);
    let of = |rows: &[tokio_postgres::Row]| -> Seen { (rows[0].get(0), rows[0].get(1), rows[0].get(2)) };
    assert_eq!(of(&before), of(&after));
}

async fn duplicates(store: &PostgresStore, keys: &[Key]) {
    for (number, key) in keys.iter().enumerate() {
        let swap = store.swap(key, Expected::Nothing, Next::Claim(&running(1000 + number as u128))).await.unwrap();
        assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
    }
}

/// Where all tasks of a queue are delivered again, each was tried before it was looked at.
#[tokio::test]
async fn behind_many_duplicates_the_next_is_a_bare_read_and_a_fresh_task_is_claimed_as_ever() {
    let server = PostgresServer::start(&["-c", "fsync=off", "-c", "log_statement=all"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let (store, other) = (place.store(), place.store());
    let keys: Vec<Key> = (0..40).map(|number| key(&format!("k-{number}"))).collect();
    for (number, key) in keys.iter().enumerate() {
        claim(&store, key, &running(number as u128 + 1)).await;
    }
    duplicates(&other, &keys[..20]).await;
    let count = || server.log().unwrap().matches("execute s").count();
    let before = count();
    duplicates(&other, &keys[20..]).await;
    assert_eq!(count() - before, 20);
    // The guess is wrong once, and not again.
    let before = count();
    claim(&other, &key("a"), &running(101)).await;
    assert_eq!(count() - before, 3, "a look, a claim and its look");
    let before = count();
    let held = claim(&other, &key("b"), &running(102)).await;
    assert_eq!(count() - before, 2);
    assert!(load(&store, &key("b")).await.record.fence == held.fence);
}

/// Over a line on which each answer takes long.
#[tokio::test]
async fn a_fresh_claim_a_duplicate_and_an_end_take_one_round_trip_each() {
    const DELAY: Duration = Duration::from_millis(400);
    let place = Place::direct().await;
    let relay = slow(place.database.port(), DELAY).await;
    let url = place.url_with("timeout=20s").replace(&format!(":{}/", place.database.port()), &format!(":{relay}/"));
    let (near, store) = (place.store(), PostgresStore::from_url(&url).unwrap());
    run(&near, "first").await;
    // Connected to, and everything is prepared.
    run(&store, "second").await;
    let duplicate = |id| {
        let (store, key) = (store.clone(), key(id));
        async move { store.swap(&key, Expected::Nothing, Next::Claim(&running(9))).await.unwrap() }
    };
    let start = Instant::now();
    let held = claim(&store, &key("third"), &running(1)).await;
    let claimed = Instant::now();
    replace(&store, &key("third"), &held, &next(&held, State::Done)).await;
    let ended = Instant::now();
    let answers = [duplicate("first").await, duplicate("third").await];
    let took = [claimed - start, ended - claimed, ended.elapsed() / 2];
    assert!(answers.iter().all(|swap| matches!(swap, Swap::Conflict(Some(_)))), "{answers:?}");
    assert!(took.iter().all(|took| *took < 2 * DELAY), "{took:?}");
}

/// A relay to this port that holds back all that a server says so long. It ends with the runtime.
async fn slow(server: u16, delay: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            let ((mut asked, mut told), (mut said, mut sent)) = (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut asked, &mut sent).await });
            tokio::spawn(async move {
                let mut chunk = vec![0; 64 * 1024];
                while let Ok(first @ 1..) = said.read(&mut chunk).await {
                    // sleeps: the line is long
                    tokio::time::sleep(delay).await;
                    // What followed at once comes with it.
                    let more = said.try_read(&mut chunk[first..]).unwrap_or(0);
                    if told.write_all(&chunk[..first + more]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// An end writes only the columns that it changes.
#[tokio::test]
async fn every_column_follows_its_record_whichever_statement_writes_it() {
    let place = Place::direct().await;
    let store = place.store();
    let changes: [fn(&mut Record); 9] = [
        |_| {},
        |end| end.output = Output::kept("text/plain", b"out"),
        |end| end.attempt += 1,
        |end| end.owner = "another".into(),
        |end| end.effect = Effect::Repeatable,
        |end| end.retention *= 2,
        |end| end.output_retention *= 2,
        |end| end.claim = ClaimId::from(77),
        |end| end.fence = Fence(end.fence.0 + 100),
    ];
    // One after the other, and all at once.
    for way in ["alone", "together"] {
        let mut calls = JoinSet::new();
        let mut ends = Vec::new();
        for (number, change) in changes.iter().enumerate() {
            let key = key(&format!("{way}-{number}"));
            let held = claim(&store, &key, &running(number as u128 + 1)).await;
            let mut end = next(&held, State::Done);
            change(&mut end);
            ends.push((key.clone(), end.clone()));
            let store = store.clone();
            calls.spawn(async move { replace(&store, &key, &held, &end).await });
            if way == "alone" {
                calls.join_next().await.unwrap().unwrap();
            }
        }
        calls.join_all().await;
        for (key, end) in ends {
            assert_eq!(*load(&store, &key).await.record, end, "{key}");
            let columns = "select attempt, owner, effect::int, retention, output_retention, claim, fence, state::int,
                                  extract(epoch from expires_at - written_at)::bigint * 1000,
                                  extract(epoch from output_until - written_at)::bigint * 1000
                           from {schema}.task where key = $1";
            let row = &place.beside(columns, &[&key.as_str()]).await[0];
            let of = |column| row.get::<_, i64>(column) as u128;
            assert_eq!((row.get::<_, i32>(0) as u32, row.get::<_, &str>(1)), (end.attempt, &*end.owner), "{key}");
            assert_eq!(row.get::<_, i32>(2), if end.effect == Effect::Repeatable { 5 } else { 2 }, "{key}");
            assert_eq!((of(3), of(4)), (end.retention.as_millis(), end.output_retention.as_millis()), "{key}");
            assert_eq!(row.get::<_, uuid::Uuid>(5).as_bytes(), &end.claim.0, "{key}");
            assert_eq!((row.get::<_, i64>(6) as u64, row.get::<_, i32>(7)), (end.fence.0, 3), "{key}");
            assert_eq!(of(8), end.retention.as_millis(), "{key}");
            let output_until = row.get::<_, Option<i64>>(9).map(|millis| millis as u128);
            let is_kept = matches!(end.output, Output::Kept { .. });
            assert_eq!(output_until, is_kept.then_some(end.output_retention.as_millis()), "{key}");
        }
    }
}

/// What a process remembers of a key is a guess: where the record has gone since, the claim is a fresh one.
#[tokio::test]
async fn a_key_that_was_met_and_is_gone_is_claimed_afresh() {
    let place = Place::direct().await;
    let (store, other) = (place.store(), place.store());
    let key = key("a");
    let held = claim(&store, &key, &running(1)).await;
    let swap = store.swap(&key, Expected::Nothing, Next::Claim(&running(2))).await.unwrap();
    assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
    assert!(matches!(other.swap(&key, Expected::Record(&held), Next::Erase).await.unwrap(), Swap::Stored(_)));
    let again = claim(&store, &key, &running(3)).await;
    assert!(again.fence > held.fence);
    // Its own claim, sent again, is recognised.
    let swap = store.swap(&key, Expected::Nothing, Next::Claim(&running(3))).await.unwrap();
    assert_eq!(swap, Swap::Stored(again.fence));
}

#[tokio::test]
async fn claims_and_ends_that_come_at_once_share_statements() {
    const AT_ONCE: usize = 64;
    let server = PostgresServer::start(&["-c", "fsync=off", "-c", "log_statement=all"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let (store, other) = (place.store(), place.store());
    let count = || server.log().unwrap().matches("execute s").count();
    let keys: Vec<Key> = (0..AT_ONCE).map(|number| key(&format!("k-{number}"))).collect();
    let mut calls = JoinSet::new();
    for (number, key) in keys.iter().cloned().enumerate() {
        let store = store.clone();
        calls.spawn(async move { (number, claim(&store, &key, &running(number as u128 + 1)).await) });
    }
    let mut held = calls.join_all().await;
    held.sort_by_key(|(number, _)| *number);
    let fences: std::collections::HashSet<u64> = held.iter().map(|(_, record)| record.fence.0).collect();
    assert_eq!(fences.len(), AT_ONCE, "each has a fence of its own");
    let mut calls = JoinSet::new();
    for (number, record) in held {
        let (store, key) = (store.clone(), keys[number].clone());
        calls.spawn(async move { replace(&store, &key, &record, &next(&record, State::Done)).await });
    }
    calls.join_all().await;
    let sent = count();
    assert!(sent < AT_ONCE, "{sent} statements for {AT_ONCE} claims and as many ends");
    let mut calls = JoinSet::new();
    for key in keys {
        let other = other.clone();
        calls.spawn(async move { other.swap(&key, Expected::Nothing, Next::Claim(&running(999))).await.unwrap() });
    }
    for swap in calls.join_all().await {
        assert!(matches!(&swap, Swap::Conflict(Some(found)) if found.record.state == State::Done), "{swap:?}");
    }
    assert!(count() - sent < AT_ONCE / 2, "so do duplicates");
}

/// A trigger of the user's, an audit table without room, a row policy: nineteen ends failed with the one.
#[tokio::test]
async fn what_the_database_refuses_among_those_that_come_at_once_fails_alone() {
    let place = Place::direct().await;
    let store = place.store();
    let keys: Vec<Key> = (0..20).map(|number| key(&format!("k-{number}"))).collect();
    let mut held = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        held.push(claim(&store, key, &running(number as u128 + 1)).await);
    }
    let refuse = "create function refuse() returns trigger language plpgsql as
         $$ begin
             if new.key like '%/k-9' or new.key like '%/n-9' then raise 'not this one' using errcode = 'UE001'; end if;
             return new;
         end $$;
         create trigger refuse before insert or update on {schema}.task for each row execute function refuse()";
    place.database.psql(&plain_sql(refuse, SCHEMA)).unwrap();
    // Heartbeats, ends and claims, each of their kind at once.
    let mut beats = JoinSet::new();
    for (number, (name, held)) in keys.iter().cloned().zip(held.clone()).enumerate() {
        let store = store.clone();
        beats.spawn(async move {
            let beat = next(&held, State::Running);
            let answer = store.swap(&name, Expected::Record(&held), Next::Keep(&beat)).await;
            (number, answer.map(|swap| (swap, beat)))
        });
    }
    for (number, answer) in beats.join_all().await {
        match answer {
            Ok((swap, record)) => {
                assert!(matches!(swap, Swap::Stored(_)) && number != 9, "{number}: {swap:?}");
                held[number] = record;
            }
            Err(error) => assert!(error.to_string().contains("not this one") && number == 9, "{number}: {error}"),
        }
    }
    let mut calls = JoinSet::new();
    for (number, (name, held)) in keys.iter().cloned().zip(held).enumerate() {
        let (ends, claims, other) = (store.clone(), store.clone(), key(&format!("n-{number}")));
        calls.spawn(async move {
            let end = next(&held, State::Done);
            (number, ends.swap(&name, Expected::Record(&held), Next::Keep(&end)).await)
        });
        calls.spawn(async move {
            let next = running(100 + number as u128);
            (number, claims.swap(&other, Expected::Nothing, Next::Claim(&next)).await)
        });
    }
    for (number, answer) in calls.join_all().await {
        match answer {
            Ok(swap) => assert!(matches!(swap, Swap::Stored(_)) && number != 9, "{number}: {swap:?}"),
            Err(error) => assert!(error.to_string().contains("not this one") && number == 9, "{number}: {error}"),
        }
    }
}

#[tokio::test]
async fn stale_ends_among_those_that_come_at_once_are_refused() {
    let place = Place::direct().await;
    let (store, other) = (place.store(), place.store());
    let mut ends = JoinSet::new();
    let mut held = Vec::new();
    for number in 0..20 {
        let key = key(&format!("k-{number}"));
        let record = claim(&store, &key, &running(number + 1)).await;
        // Each second one has moved on since.
        let is_stale = number % 2 == 1;
        if is_stale {
            replace(&other, &key, &record, &next(&record, State::Running)).await;
        }
        held.push((key, record, is_stale));
    }
    for (key, record, is_stale) in held {
        let store = store.clone();
        ends.spawn(async move {
            // With a token of its own, also beside the one that came first.
            let end = next(&next(&record, State::Running), State::Done);
            (is_stale, store.swap(&key, Expected::Record(&record), Next::Keep(&end)).await.unwrap())
        });
    }
    for (is_stale, swap) in ends.join_all().await {
        match swap {
            Swap::Stored(_) => assert!(!is_stale),
            Swap::Conflict(Some(found)) => assert_eq!((is_stale, found.record.state), (true, State::Running)),
            swap => panic!("{swap:?}"),
        }
    }
}

#[tokio::test]
async fn fences_order_the_claims_of_all_tasks_and_pass_what_a_person_raised() {
    let place = Place::direct().await;
    let (store, other) = (place.store(), place.store());
    let first = claim(&store, &key("a"), &running(1)).await;
    let second = claim(&other, &key("b"), &running(2)).await;
    assert!(second.fence > first.fence);
    // A person's redrive raises a fence without the sequence.
    let raised = Record { fence: Fence(second.fence.0 + 5), ..next(&first, State::Waiting) };
    replace(&store, &key("a"), &first, &raised).await;
    let again = Record { fence: Fence(raised.fence.0 + 1), ..running(3) };
    let Swap::Stored(third) = store.swap(&key("a"), Expected::Record(&raised), Next::Claim(&again)).await.unwrap()
    else {
        panic!("it was there")
    };
    assert!(third > raised.fence, "{third} follows {}", raised.fence);
    let fourth = claim(&other, &key("c"), &running(4)).await;
    assert!(fourth.fence > third, "{} follows {third}", fourth.fence);
}

#[test]
fn a_store_serves_several_runtimes_of_a_process_at_once() {
    let start = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (one, two) = (start(), start());
    let place = one.block_on(Place::direct());
    let store = place.store();
    one.block_on(claim(&store, &key("a"), &running(1)));
    two.block_on(claim(&store, &key("b"), &running(2)));
    drop(one);
    two.block_on(claim(&store, &key("c"), &running(3)));
    start().block_on(claim(&store, &key("d"), &running(4)));
}
