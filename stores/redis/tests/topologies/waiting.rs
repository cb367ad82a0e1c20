//! Waiting where keys move: those who wait are called at the server that holds the key now, and never wait at another.

use std::time::{Duration, Instant};

use taskonce_core::key::Key;
use taskonce_core::record::{Record, State, Token};
use taskonce_core::store::Store;
use taskonce_redis::RedisStore;
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisCluster, RedisServer, Sentinels};
use tokio::task::JoinSet;

use crate::support::{done, key, open, running, store};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two tries of what may fail for a moment.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits as callers do, until the task is done: how often the store called.
async fn wait(redis: &RedisStore, key: &Key, seen: &Record) -> usize {
    let mut calls = 0;
    loop {
        match redis.load(key).await {
            Ok(Some(found)) if found.record.state == State::Done => return calls,
            Ok(Some(found)) => assert_eq!(found.record.claim, seen.claim),
            Ok(None) => panic!("the record vanished"),
            Err(error) => {
                assert_eq!(error.kind().retry(), taskonce_core::Retry::Later, "{error:?}");
                // sleeps: the store is away
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        }
        match redis.changed(key, seen).await {
            Ok(true) => calls += 1,
            // sleeps: the store is away, or the key's slot is on its way
            Ok(false) | Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

fn waiting(redis: &RedisStore, key: &Key, seen: &Record, count: usize) -> JoinSet<usize> {
    let mut all = JoinSet::new();
    for _ in 0..count {
        let (redis, key, seen) = (redis.clone(), key.clone(), seen.clone());
        all.spawn(async move { wait(&redis, &key, &seen).await });
    }
    all
}

async fn calls(all: JoinSet<usize>) -> Vec<usize> {
    tokio::time::timeout(PATIENCE, all.join_all()).await.expect("all who wait see the end")
}

fn is_watched(server: &RedisServer) -> bool {
    server.command(&["CLIENT", "LIST"]).is_ok_and(|list| list.text().contains("name=taskonce-watch"))
}

async fn until_watched(server: &RedisServer) {
    let start = Instant::now();
    while !is_watched(server) {
        assert!(start.elapsed() < PATIENCE, "nobody waits there");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Writes until it works: a server may be about to take over.
async fn complete(redis: &RedisStore, key: &Key, claim: &Record) {
    let last = done();
    let start = Instant::now();
    loop {
        let next = taskonce_core::store::Next::Keep(&last);
        match redis.swap(key, taskonce_core::store::Expected::Record(claim), next).await {
            Ok(swap) => return assert!(matches!(swap, taskonce_core::store::Swap::Stored(_)), "{swap:?}"),
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error:?}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_takes_those_who_wait_along() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let url = format!("{}?timeout=5s", cluster.url());
    let (redis, other) = (open(&url), open(&url));
    let (key, claim) = (key("moves"), running());
    store(&other, &key, None, &claim).await;
    let slot = cluster.slot_of(format!("taskonce:{key}")).unwrap();
    let from = cluster.owner_of_slot(slot).unwrap();
    let all = waiting(&redis, &key, &claim, 50);
    until_watched(cluster.server(from)).await;
    for to in [(from + 1) % 3, (from + 2) % 3] {
        cluster.move_slot(slot, to).unwrap();
        until_watched(cluster.server(to)).await;
    }
    let beat = Record { token: Token::from(7), ..claim.clone() };
    store(&other, &key, Some(&claim), &beat).await;
    store(&other, &key, Some(&beat), &done()).await;
    for calls in calls(all).await {
        assert!(calls <= 200, "{calls} calls for two moves, a heartbeat and an end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_on_a_cluster_outlast_a_replica_that_takes_over() {
    let mut cluster = RedisCluster::start(3, 1, &[]).unwrap();
    let url = format!("{}?timeout=2s&wait_replicas=1", cluster.url());
    let (redis, other) = (open(&url), open(&url));
    for how in ["asked", "killed"] {
        let (key, claim) = (key(how), running());
        store(&other, &key, None, &claim).await;
        let master = cluster.server_of(format!("taskonce:{key}")).unwrap();
        let replica = cluster.replicas_of(master).unwrap()[0];
        let all = waiting(&redis, &key, &claim, 50);
        until_watched(cluster.server(master)).await;
        if how == "asked" {
            cluster.failover(replica).unwrap();
            cluster.await_whole().unwrap();
        } else {
            cluster.kill(master);
            cluster.await_master(replica).unwrap();
        }
        let plain = open(&format!("{}?timeout=2s", cluster.url()));
        complete(&plain, &key, &claim).await;
        calls(all).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_by_sentinel_go_on_at_the_new_primary() {
    let mut sentinels = Sentinels::start(&SentinelOptions::quick()).unwrap();
    let url = format!("{}?timeout=2s", sentinels.url());
    let (redis, other) = (open(&url), open(&format!("{url}&wait_replicas=1")));
    for how in ["asked", "killed"] {
        sentinels.await_whole().unwrap();
        let (key, claim) = (key(how), running());
        store(&other, &key, None, &claim).await;
        let all = waiting(&redis, &key, &claim, 50);
        until_watched(sentinels.server(sentinels.primary().unwrap())).await;
        if how == "asked" {
            sentinels.failover().unwrap();
        } else {
            sentinels.kill_primary().unwrap();
        }
        let plain = open(&url);
        complete(&plain, &key, &claim).await;
        calls(all).await;
    }
}

/// How soon one who waits is told of the end, in the best of some rounds: a busy machine may hold up the others.
async fn soonest(redis: &RedisStore, other: &RedisStore, name: &str, is_armed: impl Fn() -> u64) -> Duration {
    let mut soonest = PATIENCE;
    for round in 0..5 {
        let (key, claim) = (key(&format!("{name}-{round}")), running());
        store(other, &key, None, &claim).await;
        let before = is_armed();
        let waiting = tokio::spawn({
            let (redis, key, claim) = (redis.clone(), key.clone(), claim.clone());
            async move {
                wait(&redis, &key, &claim).await;
                Instant::now()
            }
        });
        let start = Instant::now();
        while is_armed() == before {
            assert!(start.elapsed() < PATIENCE, "nobody reads the key there");
            tokio::time::sleep(PAUSE).await;
        }
        store(other, &key, Some(&claim), &done()).await;
        let end = Instant::now();
        soonest = soonest.min(waiting.await.unwrap().saturating_duration_since(end));
    }
    soonest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_is_told_within_a_tenth_of_a_second_also_where_the_slot_has_moved_to() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let url = format!("{}?timeout=5s", cluster.url());
    let (redis, other) = (open(&url), open(&url));
    let slot = cluster.slot_of("moves").unwrap();
    let from = cluster.owner_of_slot(slot).unwrap();
    for at in [from, (from + 1) % 3, (from + 2) % 3] {
        if at != from {
            cluster.move_slot(slot, at).unwrap();
        }
        let reads = || cluster.server(at).calls("getrange").unwrap();
        let soonest = soonest(&redis, &other, &format!("{{moves}}-{at}"), reads).await;
        assert!(soonest < Duration::from_millis(100), "told after {soonest:?}");
    }
}

#[tokio::test]
async fn a_key_whose_slot_is_on_its_way_for_long_is_asked_for_no_more_than_once_a_second() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let (redis, key, claim) = (open(&format!("{}?timeout=5s", cluster.url())), key("half"), running());
    store(&redis, &key, None, &claim).await;
    let name = format!("taskonce:{key}");
    let slot = cluster.slot_of(&name).unwrap();
    let from = cluster.owner_of_slot(slot).unwrap();
    let to = (from + 1) % 3;
    cluster.begin_move(slot, to).unwrap();
    cluster.migrate_key(&name, to).unwrap();
    // A read that is sent elsewhere is counted as refused.
    let reads = || -> u64 {
        let stats = cluster.server(from).command(&["INFO", "commandstats"]).unwrap().text();
        let line = stats.lines().find(|line| line.starts_with("cmdstat_getrange:")).unwrap_or_default();
        let refused = line.split(',').find_map(|field| field.strip_prefix("rejected_calls="));
        refused.map_or(0, |refused| refused.trim().parse().unwrap())
    };
    let (before, start) = (reads(), Instant::now());
    while start.elapsed() < Duration::from_secs(2) {
        let told = tokio::time::timeout(PATIENCE, redis.changed(&key, &claim)).await.expect("it is answered");
        assert!(!told.unwrap(), "the server cannot call while the slot moves");
        tokio::time::sleep(PAUSE).await;
    }
    let (reads, seconds) = (reads() - before, start.elapsed().as_secs());
    assert!((1..=seconds + 1).contains(&reads), "{reads} reads in {seconds} s");
    cluster.end_move(slot, to).unwrap();
    let all = waiting(&redis, &key, &claim, 10);
    let there = open(&format!("{}?timeout=5s", cluster.url()));
    complete(&there, &key, &claim).await;
    calls(all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_at_a_primary_that_was_replaced_and_does_not_know_it_goes_on_at_the_new_one() {
    let stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    let (key, claim) = (key("a"), running());
    let old = stand.primary().unwrap();
    store(&open(&format!("{}?timeout=1s&wait_replicas=1", stand.url())), &key, None, &claim).await;
    let all = waiting(&redis, &key, &claim, 50);
    until_watched(stand.server(old)).await;
    let new = stand.failover().unwrap();
    // The old one keeps those who wait, and nobody tells them.
    complete(&open(&stand.server(new).url()), &key, &claim).await;
    let start = Instant::now();
    calls(all).await;
    assert!(start.elapsed() < Duration::from_secs(5), "told after {:?}", start.elapsed());
}
