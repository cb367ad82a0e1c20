//! Several hosts of a URL that replicate one another: the primary is the one that says so, and is changed by hand.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::{RedisServer, eventually};

use crate::load::{SOON, accepted, until_claimed};
use crate::support::{claim_error, done, key, load, open, running, store};

/// A primary and its replica, which has its data.
fn pair() -> (RedisServer, RedisServer) {
    let primary = RedisServer::start(&[]).unwrap();
    let port = primary.port().to_string();
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]).unwrap();
    await_link(&replica);
    (primary, replica)
}

fn await_link(replica: &RedisServer) {
    let linked = || replica.command(&["INFO", "replication"]).unwrap().text().contains("master_link_status:up");
    assert!(eventually(SOON, linked));
}

fn url_of(servers: &[&RedisServer]) -> String {
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    format!("redis://{}?timeout=1s", hosts.join(","))
}

#[tokio::test]
async fn of_several_hosts_the_primary_is_used_and_a_promoted_replica_is_found() {
    let (mut first, second) = pair();
    let redis = open(&url_of(&[&second, &first]));
    let claim = running();
    store(&redis, &key("a"), None, &claim).await;
    assert_eq!(first.command(&["WAIT", "1", "5000"]).unwrap().int(), Some(1));
    // In order: the connection to the first stays open, and it refuses writes.
    second.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    first.command(&["REPLICAOF", "127.0.0.1", &second.port().to_string()]).unwrap();
    let last = done();
    store(&redis, &key("a"), Some(&claim), &last).await;
    let loaded = load(&redis, &key("a")).await;
    assert_eq!(*loaded.record, last);
    // And back, after the second has died.
    await_link(&first);
    let mut second = second;
    second.kill();
    let error = claim_error(&redis, "b").await;
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
    assert!(error.to_string().contains("is a replica") && error.to_string().contains("refused"), "{error}");
    assert!(error.hint().contains("REPLICAOF NO ONE"), "{error:?}");
    first.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    until_claimed(&redis, |i| key(&format!("back-{i}"))).await;
    assert_eq!(*load(&redis, &key("a")).await.record, last);
    first.kill();
    let error = claim_error(&redis, "c").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
}

#[tokio::test]
async fn a_primary_that_lacks_replicas_says_so_at_once_and_keeps_its_connection() {
    let (primary, replica) = pair();
    let mut connection = primary.connect().unwrap();
    connection.ask(&["CONFIG", "SET", "min-replicas-to-write", "2"]).unwrap();
    for url in [url_of(&[&primary]), url_of(&[&primary, &replica])] {
        let redis = open(&url.replace("timeout=1s", "timeout=20s"));
        let error = claim_error(&redis, "a").await;
        let before = accepted(&mut connection);
        let start = Instant::now();
        for i in 0..30 {
            let error = claim_error(&redis, &format!("a-{i}")).await;
            assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
        }
        assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        let more = accepted(&mut connection) - before;
        assert!(more < 5, "30 refused calls made {more} connections");
        connection.ask(&["CONFIG", "SET", "min-replicas-to-write", "0"]).unwrap();
        store(&redis, &key(&format!("b-{}", url.len())), None, &running()).await;
        connection.ask(&["CONFIG", "SET", "min-replicas-to-write", "2"]).unwrap();
    }
}

#[tokio::test]
async fn a_wrong_password_of_one_does_not_decide_while_another_may_come_back() {
    // A replica with another password, and a primary that is away.
    let (mut primary, replica) = pair();
    replica.command(&["CONFIG", "SET", "requirepass", "another"]).unwrap();
    primary.kill();
    let error = claim_error(&open(&url_of(&[&replica, &primary])), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("password") && error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_host_that_does_not_answer_holds_nobody_up() {
    let (primary, replica) = pair();
    replica.stop().unwrap();
    let redis = open(&url_of(&[&replica, &primary]).replace("timeout=1s", "timeout=20s"));
    let start = Instant::now();
    store(&redis, &key("a"), None, &running()).await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    replica.cont().unwrap();
}

#[tokio::test]
async fn two_that_say_that_they_are_the_primary_are_refused_by_name() {
    let (one, other) = (RedisServer::start(&[]).unwrap(), RedisServer::start(&[]).unwrap());
    let redis = open(&url_of(&[&one, &other]));
    let error = claim_error(&redis, "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    let text = error.to_string();
    assert!(text.contains("two servers say that they are the primary"), "{text}");
    for server in [&one, &other] {
        assert!(text.contains(&format!("`127.0.0.1:{}`", server.port())), "{text}");
    }
    // Mended, it works without a restart.
    other.command(&["REPLICAOF", "127.0.0.1", &one.port().to_string()]).unwrap();
    until_claimed(&redis, |i| key(&format!("back-{i}"))).await;
}

#[tokio::test]
async fn one_that_is_promoted_beside_the_primary_is_noticed_on_an_open_connection() {
    let (first, second) = pair();
    let redis = open(&url_of(&[&first, &second]));
    store(&redis, &key("a"), None, &running()).await;
    second.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let start = Instant::now();
    let error = loop {
        let id = key(&format!("b-{}", fastrand::u64(..)));
        match redis.swap(&id, Expected::Nothing, Next::Claim(&running())).await {
            Ok(Swap::Stored(_)) => assert!(start.elapsed() < SOON, "still written to the first"),
            Ok(Swap::Conflict(found) | Swap::Locked(found)) => panic!("a new key held {found:?}"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    for server in [&first, &second] {
        assert!(error.to_string().contains(&format!("`127.0.0.1:{}`", server.port())), "{error}");
    }
    first.command(&["REPLICAOF", "127.0.0.1", &second.port().to_string()]).unwrap();
    until_claimed(&redis, |i| key(&format!("c-{i}"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_promoted_while_the_primary_says_nothing_is_found_however_long_calls_may_take() {
    let (first, second) = pair();
    let redis = open(&url_of(&[&first, &second]).replace("timeout=1s", "timeout=30s"));
    store(&redis, &key("a"), None, &running()).await;
    let mut connection = second.connect().unwrap();
    let before = accepted(&mut connection);
    first.stop().unwrap();
    let waiting = tokio::spawn({
        let redis = redis.clone();
        async move { until_claimed(&redis, |i| key(&format!("b-{i}"))).await }
    });
    // Not before it was asked, and said that it is a replica.
    assert!(eventually(Duration::from_secs(10), || accepted(&mut connection) > before + 1), "it was not asked");
    connection.ask(&["REPLICAOF", "NO", "ONE"]).unwrap();
    let start = Instant::now();
    waiting.await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "back after {:?}", start.elapsed());
    first.cont().unwrap();
}
