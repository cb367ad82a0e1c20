//! Records that somebody's transaction holds: nobody waits long, nobody decides, and what is rolled back never was.

use std::time::{Duration, Instant};

use taskonce_core::record::State;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_postgres::{LOCK, plain_sql};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::common::{Place, SCHEMA};
use crate::support::{claim, key, load, next, running};

/// Longer than a lock is waited for, and far shorter than a call's time.
const SOON: Duration = Duration::from_secs(8);

#[tokio::test]
async fn a_record_that_a_transaction_holds_is_locked_and_shown_as_it_can_be_read() {
    for place in [Place::direct().await, Place::pooled(2).await] {
        let (store, client) = (place.store_with("timeout=20s&lock_timeout=200ms"), place.client().await);
        let key = key("a");
        let held = claim(&store, &key, &running(1)).await;
        client.batch_execute("begin").await.unwrap();
        client.query(&plain_sql(LOCK, SCHEMA), &[&key.as_str(), &Uuid::from_bytes(held.claim.0)]).await.unwrap();
        let (end, takeover) = (next(&held, State::Done), running(2));
        for write in [Next::Keep(&end), Next::Claim(&takeover), Next::Erase] {
            let start = Instant::now();
            let swap = store.swap(&key, Expected::Record(&held), write).await.unwrap();
            let Swap::Locked(Some(found)) = swap else { panic!("{swap:?}") };
            assert_eq!(*found.record, held, "what can be read until the transaction ends");
            assert!((Duration::from_millis(150)..SOON).contains(&start.elapsed()), "{:?}", start.elapsed());
        }
        // A duplicate takes no lock, and so waits for none.
        let start = Instant::now();
        let swap = store.swap(&key, Expected::Nothing, Next::Claim(&takeover)).await.unwrap();
        assert!(matches!(swap, Swap::Conflict(Some(_))) && start.elapsed() < Duration::from_secs(5), "{swap:?}");
        client.batch_execute("rollback").await.unwrap();
        let swap = store.swap(&key, Expected::Record(&held), Next::Keep(&end)).await.unwrap();
        assert_eq!(swap, Swap::Stored(held.fence));
    }
}

#[tokio::test]
async fn heartbeats_pass_over_what_a_transaction_holds_and_do_not_wait_for_it() {
    let place = Place::direct().await;
    let (store, client) = (place.store_with("timeout=20s&lock_timeout=10s"), place.client().await);
    let keys: Vec<_> = (0..20).map(|number| key(&format!("k-{number}"))).collect();
    let mut held = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        held.push(claim(&store, key, &running(number as u128 + 1)).await);
    }
    client.batch_execute("begin").await.unwrap();
    client.query(&plain_sql(LOCK, SCHEMA), &[&keys[3].as_str(), &Uuid::from_bytes(held[3].claim.0)]).await.unwrap();
    let start = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for (number, (key, held)) in keys.iter().cloned().zip(held.iter().cloned()).enumerate() {
        let store = store.clone();
        calls.spawn(async move {
            let beat = next(&held, State::Running);
            (number, store.swap(&key, Expected::Record(&held), Next::Keep(&beat)).await.unwrap())
        });
    }
    while let Some(call) = calls.join_next().await {
        let (number, swap) = call.unwrap();
        match swap {
            Swap::Locked(Some(found)) => assert_eq!((number, &*found.record), (3, &held[3])),
            swap => assert_eq!((swap, number == 3), (Swap::Stored(held[number].fence), false)),
        }
    }
    assert!(start.elapsed() < Duration::from_secs(9), "nobody waited: {:?}", start.elapsed());
    client.batch_execute("commit").await.unwrap();
    let beat = next(&held[3], State::Running);
    let swap = store.swap(&keys[3], Expected::Record(&held[3]), Next::Keep(&beat)).await.unwrap();
    assert_eq!(swap, Swap::Stored(held[3].fence));
}

/// Also those that come after one which waits, and was the first to be sent.
#[tokio::test]
async fn ends_at_once_pass_over_what_a_transaction_holds_and_do_not_wait_for_it() {
    let place = Place::direct().await;
    for locked in [0, 9] {
        let (store, client) = (place.store_with("timeout=30s&lock_timeout=20s&connections=1"), place.client().await);
        let keys: Vec<_> = (0..20).map(|number| key(&format!("k-{locked}-{number}"))).collect();
        let mut held = Vec::new();
        for (number, key) in keys.iter().enumerate() {
            held.push(claim(&store, key, &running(number as u128 + 1)).await);
        }
        client.batch_execute("begin").await.unwrap();
        let parameters: [&(dyn ToSql + Sync); 2] = [&keys[locked].as_str(), &Uuid::from_bytes(held[locked].claim.0)];
        client.query(&plain_sql(LOCK, SCHEMA), &parameters).await.unwrap();
        let start = Instant::now();
        let mut calls = tokio::task::JoinSet::new();
        for (number, (key, held)) in keys.iter().cloned().zip(held.iter().cloned()).enumerate() {
            let store = store.clone();
            calls.spawn(async move {
                let end = next(&held, State::Done);
                (number, store.swap(&key, Expected::Record(&held), Next::Keep(&end)).await.unwrap())
            });
        }
        for _ in 1..keys.len() {
            let (number, swap) = calls.join_next().await.unwrap().unwrap();
            assert_eq!((swap, number == locked), (Swap::Stored(held[number].fence), false));
        }
        assert!(start.elapsed() < Duration::from_secs(18), "nobody else waited: {:?}", start.elapsed());
        client.batch_execute("rollback").await.unwrap();
        assert_eq!(calls.join_next().await.unwrap().unwrap(), (locked, Swap::Stored(held[locked].fence)));
    }
}

/// Each waited on a connection of the pool: of a task whose transaction was longer than its lease, sixteen duplicates kept
/// all others from the ledger.
#[tokio::test]
async fn takeovers_of_what_a_transaction_holds_keep_no_connection_waiting() {
    for place in [Place::direct().await, Place::pooled(4).await] {
        let store = place.store_with("timeout=30s&lock_timeout=20s&connections=2");
        let (client, key) = (place.client().await, key("a"));
        let held = claim(&store, &key, &running(1)).await;
        client.batch_execute("begin").await.unwrap();
        client.query(&plain_sql(LOCK, SCHEMA), &[&key.as_str(), &Uuid::from_bytes(held.claim.0)]).await.unwrap();
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..8 {
            let (store, key, held) = (store.clone(), key.clone(), held.clone());
            calls.spawn(async move {
                let next = running(10 + number);
                store.swap(&key, Expected::Record(&held), Next::Claim(&next)).await.unwrap()
            });
        }
        let start = Instant::now();
        for number in 0..20 {
            claim(&store, &crate::support::key(&format!("other-{number}")), &running(100 + number)).await;
        }
        assert!(start.elapsed() < Duration::from_secs(15), "the others went on: {:?}", start.elapsed());
        assert!(calls.try_join_next().is_none(), "they wait until it is decided");
        client.batch_execute("commit").await.unwrap();
        let swaps = calls.join_all().await;
        let stored = swaps.iter().filter(|swap| matches!(swap, Swap::Stored(fence) if *fence > held.fence)).count();
        let refused = swaps.iter().filter(|swap| matches!(swap, Swap::Conflict(Some(_)))).count();
        assert_eq!((stored, refused), (1, 7), "{swaps:?}");
    }
}

#[tokio::test]
async fn claims_at_once_do_not_fail_with_one_whose_row_another_is_making() {
    let place = Place::direct().await;
    let (store, client) = (place.store_with("timeout=30s&lock_timeout=300ms"), place.client().await);
    let (first, keys) = (key("first"), (0..20).map(|number| key(&format!("k-{number}"))).collect::<Vec<_>>());
    claim(&store, &first, &running(1)).await;
    client.batch_execute("begin").await.unwrap();
    client.query(&plain_sql(COPY, SCHEMA), &[&keys[9].as_str(), &first.as_str()]).await.unwrap();
    let mut calls = tokio::task::JoinSet::new();
    for (number, key) in keys.iter().cloned().enumerate() {
        let store = store.clone();
        calls.spawn(async move {
            let next = running(100 + number as u128);
            (number, store.swap(&key, Expected::Nothing, Next::Claim(&next)).await.unwrap())
        });
    }
    for (number, swap) in calls.join_all().await {
        match swap {
            Swap::Stored(_) => assert_ne!(number, 9),
            swap => assert_eq!((number, swap), (9, Swap::Locked(None))),
        }
    }
    client.batch_execute("rollback").await.unwrap();
    claim(&store, &keys[9], &running(200)).await;
}

#[tokio::test]
async fn a_claim_that_waits_for_a_row_that_another_is_making_holds_up_no_other() {
    let place = Place::direct().await;
    for locked in [0, 9] {
        let (store, client) = (place.store_with("timeout=30s&lock_timeout=20s&connections=1"), place.client().await);
        let keys: Vec<_> = (0..20).map(|number| key(&format!("k-{locked}-{number}"))).collect();
        let first = key(&format!("first-{locked}"));
        claim(&store, &first, &running(1)).await;
        client.batch_execute("begin").await.unwrap();
        client.query(&plain_sql(COPY, SCHEMA), &[&keys[locked].as_str(), &first.as_str()]).await.unwrap();
        let start = Instant::now();
        let mut calls = tokio::task::JoinSet::new();
        for (number, key) in keys.iter().cloned().enumerate() {
            let store = store.clone();
            calls.spawn(async move {
                let next = running(100 + number as u128);
                (number, store.swap(&key, Expected::Nothing, Next::Claim(&next)).await.unwrap())
            });
        }
        for _ in 1..keys.len() {
            let (number, swap) = calls.join_next().await.unwrap().unwrap();
            assert!(matches!(swap, Swap::Stored(_)) && number != locked, "{number}: {swap:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(18), "nobody else waited: {:?}", start.elapsed());
        client.batch_execute("rollback").await.unwrap();
        let (number, swap) = calls.join_next().await.unwrap().unwrap();
        assert!(matches!(swap, Swap::Stored(_)) && number == locked, "{number}: {swap:?}");
    }
}

/// A row of another's, as a person with `psql` makes it.
const COPY: &str = "insert into {schema}.task select $1, state, token, claim, fence, attempt, owner, effect, retention,
    output_retention, written_at, expires_at, output_until, output_type, output, body from {schema}.task where key = $2";

/// Once elsewhere: a conflict was reported though the other transaction rolled back, and the task was never stored.
#[tokio::test]
async fn a_conflict_with_what_was_rolled_back_never_counts() {
    let place = Place::direct().await;
    let (store, other, client) = (place.store(), place.store(), place.client().await);
    let (first, key) = (key("first"), key("a"));
    let held = claim(&store, &first, &running(1)).await;
    client.batch_execute("begin").await.unwrap();
    // A row of another's that is not committed.
    client.query(&plain_sql(COPY, SCHEMA), &[&key.as_str(), &first.as_str()]).await.unwrap();
    let (waits, name) = (running(2), key.clone());
    let waiting = tokio::spawn(async move { other.swap(&name, Expected::Nothing, Next::Claim(&waits)).await.unwrap() });
    let watch = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    while place.beside(watch, &[]).await.is_empty() {
        assert!(!waiting.is_finished(), "it has to wait for the other");
        tokio::task::yield_now().await;
    }
    client.batch_execute("rollback").await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Swap::Stored(fence) if fence > held.fence));
    assert_eq!(load(&store, &key).await.record.claim, running(2).claim);
}
