//! What calls cost: one statement each, and duplicates write nothing.

use taskonce_core::record::{Record, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::PostgresServer;

use crate::common::Place;
use crate::support::{claim, key, next, replace, running};

#[tokio::test]
async fn claim_completion_and_duplicate_are_one_statement_each() {
    let server = PostgresServer::start(&["-c", "fsync=off", "-c", "log_statement=all"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    // The first of each is also prepared.
    run(&store, "first").await;
    let count = || server.log().unwrap().matches("execute s").count();
    let before = count();
    run(&store, "second").await;
    assert_eq!(count() - before, 4, "claim, heartbeat, completion and duplicate");
}

async fn run(store: &taskonce_postgres::PostgresStore, id: &str) {
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
    // Nothing of the server's own is written meanwhile: no vacuum, and no snapshots for standbys.
    let quiet = ["-c", "fsync=off", "-c", "autovacuum=off", "-c", "wal_level=minimal", "-c", "max_wal_senders=0"];
    let server = PostgresServer::start(&quiet).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    let key = key("a");
    let held = claim(&store, &key, &running(1)).await;
    replace(&store, &key, &held, &next(&held, State::Done)).await;
    let state = "select txid_snapshot_xmax(txid_current_snapshot()), last_value, pg_current_wal_insert_lsn()::text
                 from {schema}.fence";
    // Once, so that what a first read leaves behind (hint bits, statistics) is there already.
    duplicates(&store, &key).await;
    let before = place.beside(state, &[]).await;
    duplicates(&store, &key).await;
    let after = place.beside(state, &[]).await;
    type Seen = (i64, i64, String);
    let of = |rows: &[tokio_postgres::Row]| -> Seen { (rows[0].get(0), rows[0].get(1), rows[0].get(2)) };
    assert_eq!(of(&before), of(&after));
}

async fn duplicates(store: &taskonce_postgres::PostgresStore, key: &taskonce_core::key::Key) {
    for number in 0..100 {
        let swap = store.swap(key, Expected::Nothing, Next::Claim(&running(100 + number))).await.unwrap();
        assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
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
    let raised = Record { fence: taskonce_core::record::Fence(second.fence.0 + 5), ..next(&first, State::Waiting) };
    replace(&store, &key("a"), &first, &raised).await;
    let again = Record { fence: taskonce_core::record::Fence(raised.fence.0 + 1), ..running(3) };
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
