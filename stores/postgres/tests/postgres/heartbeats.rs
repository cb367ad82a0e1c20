//! Heartbeats: many in one statement, and no index touched.

use std::time::{Duration, Instant};

use taskonce_core::record::{Record, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::PostgresServer;

use crate::common::Place;
use crate::support::{PATIENCE, claim, key, next, running};

/// The least share of heartbeats that touch no index.
const HOT_MIN: f64 = 0.95;

#[tokio::test]
async fn heartbeats_that_wait_at_the_same_time_are_one_statement() {
    let server = PostgresServer::start(&["-c", "fsync=off", "-c", "log_statement=all"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    let mut held = Vec::new();
    for number in 0..50 {
        let key = key(&format!("k-{number}"));
        let record = claim(&store, &key, &running(number + 1)).await;
        held.push((key, record));
    }
    let count = || server.log().unwrap().matches("for update of t skip locked").count();
    let before = count();
    beat_all(&store, &mut held).await;
    let sent = count() - before;
    assert!((1..=3).contains(&sent), "{sent} statements for 50 heartbeats");
}

#[tokio::test]
async fn heartbeats_touch_no_index() {
    let server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    let mut held = Vec::new();
    for number in 0..200 {
        let key = key(&format!("k-{number}"));
        let record = claim(&store, &key, &running(number + 1)).await;
        held.push((key, record));
    }
    for _ in 0..20 {
        beat_all(&store, &mut held).await;
    }
    let sql = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'task'";
    let start = Instant::now();
    loop {
        let row = &place.beside(sql, &[]).await[0];
        let (all, hot): (i64, i64) = (row.get(0), row.get(1));
        // The server tells of them a little later.
        if all >= 4000 {
            assert!(hot as f64 >= all as f64 * HOT_MIN, "{hot} of {all} touched no index");
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{all} of 4000 heartbeats were counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn beat_all(store: &taskonce_postgres::PostgresStore, held: &mut [(taskonce_core::key::Key, Record)]) {
    let mut calls = tokio::task::JoinSet::new();
    for (number, (key, record)) in held.iter().enumerate() {
        let (store, key, before) = (store.clone(), key.clone(), record.clone());
        let after = Record { state_age: Duration::from_secs(10), ..next(record, State::Running) };
        calls.spawn(async move {
            let swap = store.swap(&key, Expected::Record(&before), Next::Keep(&after)).await.unwrap();
            assert_eq!(swap, Swap::Stored(after.fence));
            (number, after)
        });
    }
    while let Some(call) = calls.join_next().await {
        let (number, after) = call.unwrap();
        held[number].1 = after;
    }
}
