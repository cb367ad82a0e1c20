//! What goes over the wire: round trips, nothing while idle, and a connection for each runtime.

use std::time::Duration;

use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::{Proxy, RedisServer};

use crate::support::{done, key, load, open, running, store};

/// A store that never sends a request again because the machine is slow.
fn patient(proxy: &Proxy) -> taskonce_redis::RedisStore {
    open(&format!("{}?timeout=20s", proxy.url()))
}

#[tokio::test]
async fn round_trips_are_as_few_as_promised() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = patient(&proxy);
    store(&redis, &key("warm"), None, &running()).await;
    proxy.set_delay(Duration::from_millis(5));

    let (claim, last) = (running(), done());
    let before = proxy.round_trips();
    store(&redis, &key("a"), None, &claim).await;
    store(&redis, &key("a"), Some(&claim), &last).await;
    assert_eq!(proxy.round_trips() - before, 2, "a fresh claim and its completion");

    let before = proxy.round_trips();
    let duplicate = redis.swap(&key("a"), Expected::Nothing, Next::Claim(&running())).await.unwrap();
    assert!(matches!(duplicate, Swap::Conflict(Some(_))));
    assert_eq!(proxy.round_trips() - before, 1, "a duplicate of a done task");

    let mut held = Vec::new();
    for i in 0..100 {
        let claim = running();
        store(&redis, &key(&format!("held-{i}")), None, &claim).await;
        held.push((key(&format!("held-{i}")), claim, running()));
    }
    proxy.set_delay(Duration::from_millis(20));
    let before = proxy.round_trips();
    let mut beats = tokio::task::JoinSet::new();
    for (key, claim, beat) in held {
        let redis = redis.clone();
        beats.spawn(async move { store(&redis, &key, Some(&claim), &beat).await });
    }
    beats.join_all().await;
    assert_eq!(proxy.round_trips() - before, 1, "the heartbeat of 100 held claims");
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn connecting_takes_one_round_trip_and_happens_on_first_use() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = patient(&proxy);
    assert_eq!(proxy.connections(), 0);
    store(&redis, &key("a"), None, &running()).await;
    assert_eq!((proxy.connections(), proxy.round_trips()), (1, 2));
}

#[tokio::test]
async fn an_idle_store_sends_nothing() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&proxy.url());
    store(&redis, &key("a"), None, &running()).await;
    let before = (proxy.commands(), proxy.connections());
    // sleeps: longer than any deadline, pause or margin that the store knows.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!((proxy.commands(), proxy.connections()), before);
    let runtime = tokio::runtime::Handle::current();
    assert_eq!(runtime.metrics().num_alive_tasks(), 1, "the connection's own task, which sleeps");
    load(&redis, &key("a")).await;
    assert_eq!(proxy.connections(), before.1);
}

#[test]
fn every_runtime_has_a_connection_of_its_own_and_outlives_the_others() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = patient(&proxy);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    first.block_on(store(&redis, &key("a"), None, &running()));
    {
        let second = runtime();
        second.block_on(load(&redis, &key("a")));
        assert_eq!(proxy.connections(), 2);
    }
    first.block_on(load(&redis, &key("a")));
    assert_eq!(proxy.connections(), 2);
    for _ in 0..40 {
        runtime().block_on(load(&redis, &key("a")));
    }
    drop(first);
    runtime().block_on(load(&redis, &key("a")));
}

#[test]
fn outside_of_a_runtime_the_error_says_so() {
    let redis = open("redis://127.0.0.1:1");
    let key = key("a");
    let mut load = redis.load(&key);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = load.as_mut().poll(&mut context) else { panic!("it waits") };
    assert!(error.to_string().contains("runtime"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn big_records_go_both_ways_at_once() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&format!("{}?timeout=20s", server.url()));
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..32_u8 {
        let redis = redis.clone();
        tasks.spawn(async move {
            let key = key(&format!("big-{i}"));
            let (claim, mut last) = (running(), done());
            last.output = taskonce_core::record::Output::kept("text/plain", vec![i; 2 << 20]);
            store(&redis, &key, None, &claim).await;
            store(&redis, &key, Some(&claim), &last).await;
            assert_eq!(*load(&redis, &key).await.record, last);
        });
    }
    tasks.join_all().await;
}
