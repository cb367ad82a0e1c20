//! Nodes of a Cluster that die, stop and are replaced: calls end in time, other keys are not held up, nothing is wrong,
//! and everything comes back by itself.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::key::Key;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_redis::RedisStore;
use taskonce_testkit::{RedisCluster, RedisServer};

use crate::load::{Load, until_claimed};
use crate::support::{done, key, load, open, running, store};

/// What a call may take, and what it may take on a machine that is busy.
const TIMEOUT: Duration = Duration::from_secs(1);
const TIMEOUT_BUSY: Duration = Duration::from_secs(3);

fn quick(cluster: &RedisCluster) -> RedisStore {
    open(&format!("{}?timeout=1s", cluster.url()))
}

fn with_failover() -> RedisCluster {
    RedisCluster::start(3, 1, &["--cluster-node-timeout", "1000"]).unwrap()
}

/// Keys that a node serves.
fn keys_at(cluster: &RedisCluster, node: usize, name: &str) -> impl Iterator<Item = Key> {
    let named = |i: u32| key(&format!("{name}-{i}"));
    let owners: Vec<usize> = (0..60).map(|i| cluster.server_of(format!("taskonce:{}", named(i))).unwrap()).collect();
    (0..60)
        .filter(move |i| owners[*i as usize] == node)
        .map(move |i| key(&format!("{name}-{i}")))
        .collect::<Vec<_>>()
        .into_iter()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_is_replaced_while_the_others_go_on() {
    let mut cluster = with_failover();
    let redis = quick(&cluster);
    let load = Load::start(&redis, "kill", 32);
    load.await_more(100);
    let replica = cluster.replicas_of(0).unwrap()[0];
    let tag = keys_at(&cluster, 0, "tag").next().unwrap();
    cluster.kill(0);
    cluster.await_master(replica).unwrap();
    let back = until_claimed(&redis, |i| key(&format!("{{taskonce:{tag}}}-{i}"))).await;
    load.await_more(100);
    let report = load.end().await;
    assert!(back < TIMEOUT_BUSY, "back after {back:?}");
    assert!(report.longest < TIMEOUT_BUSY, "a call took {:?}", report.longest);
    let there = report.kept(&redis).await;
    assert!(there > report.completed.len() / 2, "{there} of {}", report.completed.len());
}

#[tokio::test]
async fn a_stranger_that_listens_where_a_node_was_is_passed_over() {
    let mut cluster = with_failover();
    let redis = quick(&cluster);
    for (master, args) in [(0, &["--requirepass", "another"][..]), (1, &[])] {
        let tag = keys_at(&cluster, master, "tag").next().unwrap();
        let form = |i| key(&format!("{{taskonce:{tag}}}-{i}"));
        store(&redis, &form(100), None, &running()).await;
        let replica = cluster.replicas_of(master).unwrap()[0];
        cluster.kill(master);
        let port = cluster.ports()[master].to_string();
        let stranger = RedisServer::start(&[&["--port", &port], args].concat()).unwrap();
        let error = redis.load(&form(100)).await.unwrap_err();
        assert!(error.to_string().contains(&port), "{error:?}");
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        cluster.await_master(replica).unwrap();
        let back = until_claimed(&redis, form).await;
        assert!(back < TIMEOUT_BUSY, "back after {back:?}");
        drop(stranger);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stops_is_left_for_its_replica_however_long_calls_may_take() {
    let cluster = with_failover();
    let redis = open(&format!("{}?timeout=30s", cluster.url()));
    let tag = keys_at(&cluster, 0, "tag").next().unwrap();
    let form = move |i| key(&format!("{{taskonce:{tag}}}-{i}"));
    store(&redis, &form(100), None, &running()).await;
    let replica = cluster.replicas_of(0).unwrap()[0];
    cluster.stop(0).unwrap();
    let waiting = tokio::spawn({
        let redis = redis.clone();
        async move { until_claimed(&redis, form).await }
    });
    cluster.await_master(replica).unwrap();
    let start = Instant::now();
    waiting.await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "back after {:?}", start.elapsed());
    cluster.cont(0).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_a_replica_takes_over_in_order() {
    let cluster = with_failover();
    let redis = quick(&cluster);
    let load = Load::start(&redis, "order", 32);
    load.await_more(100);
    for master in 0..3 {
        cluster.failover(cluster.replicas_of(master).unwrap()[0]).unwrap();
        load.await_more(100);
    }
    let report = load.end().await;
    assert!(report.longest < TIMEOUT_BUSY, "a call took {:?}", report.longest);
    assert_eq!(report.lost, 0);
    assert_eq!(report.kept(&redis).await, report.completed.len());
}

#[tokio::test]
async fn a_stopped_node_holds_up_only_its_own_keys() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = open(&format!("{}?timeout=4s", cluster.url()));
    let keys = |node| keys_at(&cluster, node, "stop").collect::<Vec<_>>();
    let (own, others) = (keys(0), [keys(1), keys(2)].concat());
    for key in own.iter().chain(&others) {
        assert!(redis.load(key).await.unwrap().is_none());
    }
    cluster.stop(0).unwrap();
    let mut waiting = tokio::task::JoinSet::new();
    for key in own.clone() {
        let redis = redis.clone();
        waiting.spawn(async move { redis.swap(&key, Expected::Nothing, Next::Claim(&running())).await.unwrap_err() });
    }
    let start = Instant::now();
    for key in &others {
        store(&redis, key, None, &running()).await;
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(2), "{} calls of others took {took:?}", others.len());
    for error in waiting.join_all().await {
        assert!([ErrorKind::TimedOut, ErrorKind::Unreachable].contains(&error.kind()), "{error:?}");
    }
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    cluster.cont(0).unwrap();
    let back = until_claimed(&redis, |i| key(&format!("{{taskonce:{}}}-{i}", own[0]))).await;
    assert!(back < Duration::from_secs(8), "{back:?}");
}

#[tokio::test]
async fn what_a_failover_forgets_runs_again_and_its_old_holder_is_told() {
    let mut cluster = with_failover();
    let redis = quick(&cluster);
    let keys: Vec<Key> = keys_at(&cluster, 0, "forgotten").collect();
    let replica = cluster.replicas_of(0).unwrap()[0];
    let (kept, forgotten) = (&keys[0], &keys[1..]);
    let first = running();
    store(&redis, kept, None, &first).await;
    let copied = cluster.server(0).command(&["WAIT", "1", "5000"]).unwrap().int();
    assert_eq!(copied, Some(1));
    cluster.stop(replica).unwrap();
    // Else the replica would find what follows in its socket when it goes on.
    cluster.server(0).command(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    let mut held = Vec::new();
    for key in forgotten {
        let claim = running();
        store(&redis, key, None, &claim).await;
        held.push((key, claim));
    }
    cluster.kill(0);
    cluster.cont(replica).unwrap();
    cluster.await_master(replica).unwrap();
    assert_eq!(*load(&redis, kept).await.record, first);
    for (key, claim) in &held {
        let end = redis.swap(key, Expected::Record(claim), Next::Keep(&done())).await.unwrap();
        assert!(matches!(end, Swap::Conflict(None)), "{end:?}");
        let again = running();
        store(&redis, key, None, &again).await;
        // The old holder does not get it back.
        let end = redis.swap(key, Expected::Record(claim), Next::Keep(&done())).await.unwrap();
        assert!(matches!(&end, Swap::Conflict(Some(found)) if *found.record == again), "{end:?}");
    }
}

#[tokio::test]
async fn a_slot_that_nobody_serves_is_an_error_of_its_own() {
    let cluster = RedisCluster::start(3, 0, &["--cluster-require-full-coverage", "no"]).unwrap();
    let redis = quick(&cluster);
    let (gone, other) = (key("gone"), keys_at(&cluster, 1, "other").next().unwrap());
    let name = format!("taskonce:{gone}");
    let slot = cluster.slot_of(&name).unwrap();
    for n in 0..3 {
        cluster.server(n).command(&["CLUSTER", "DELSLOTS", &slot.to_string()]).unwrap();
    }
    let start = Instant::now();
    let error = redis.load(&gone).await.unwrap_err();
    assert!(start.elapsed() < TIMEOUT_BUSY);
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains(&format!("serves slot {slot}")), "{error}");
    assert!(!error.hint().is_empty());
    if cluster.server_of(format!("taskonce:{other}")).is_ok() {
        store(&redis, &other, None, &running()).await;
    }
}

#[tokio::test]
async fn a_cluster_that_is_away_is_unreachable_within_the_time_of_a_call_and_comes_back() {
    let mut cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = quick(&cluster);
    store(&redis, &key("a"), None, &running()).await;
    for n in 0..3 {
        cluster.kill(n);
    }
    for redis in [redis.clone(), quick(&cluster)] {
        let start = Instant::now();
        let error = redis.load(&key("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        assert!(error.to_string().contains("refused"), "{error}");
        assert!(start.elapsed() < TIMEOUT_BUSY + TIMEOUT, "{:?}", start.elapsed());
    }
    for n in 0..3 {
        cluster.restart(n).unwrap();
    }
    until_claimed(&redis, |i| key(&format!("back-{i}"))).await;
}
