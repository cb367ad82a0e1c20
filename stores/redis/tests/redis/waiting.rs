//! Waiting for a key to change: called once for many who wait, never missed, and given up where nobody can call.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::codec;
use taskonce_core::record::{Output, Record, State, Token};
use taskonce_core::store::Store;
use taskonce_redis::RedisStore;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{Proxy, RedisServer};
use tokio::task::JoinSet;

use crate::support::{done, key, open, record, running, store};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Shorter than the time after which a watcher that hears nothing looks by itself: what is read within it was called out.
const CALLED_WITHIN: Duration = Duration::from_secs(10);

/// So many who wait for a key to differ from what they saw. Each says what it was told.
fn wait_for(redis: &RedisStore, id: &str, seen: &Record, count: usize) -> JoinSet<Result<bool, ErrorKind>> {
    let mut waiting = JoinSet::new();
    for _ in 0..count {
        let (redis, key, seen) = (redis.clone(), key(id), seen.clone());
        waiting.spawn(async move { redis.changed(&key, &seen).await.map_err(|error| error.kind()) });
    }
    waiting
}

/// What all of them were told.
async fn told(mut waiting: JoinSet<Result<bool, ErrorKind>>) -> Vec<Result<bool, ErrorKind>> {
    let all = async {
        let mut all = Vec::new();
        while let Some(told) = waiting.join_next().await {
            all.push(told.unwrap());
        }
        all
    };
    tokio::time::timeout(PATIENCE, all).await.expect("all who wait are told")
}

async fn until(what: &str, is_so: impl FnMut() -> bool) {
    within(PATIENCE, what, is_so).await;
}

async fn within(patience: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < patience, "not within {patience:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The lines of `CLIENT LIST` of connections that watch.
fn watchers(server: &RedisServer) -> Vec<String> {
    let list = server.command(&["CLIENT", "LIST"]).unwrap().text();
    list.lines().filter(|line| line.contains("name=taskonce-watch")).map(str::to_owned).collect()
}

/// Writes a record past the store, whose scripts read as well, so that only those who watch are counted.
fn put(server: &RedisServer, id: &str, record: &Record) {
    let life = record.life().as_millis().to_string();
    let name = format!("taskonce:{}", key(id));
    let set = [b"SET".as_slice(), name.as_bytes(), &codec::encode(record), b"PX", life.as_bytes()];
    assert_eq!(server.command(&set).unwrap(), Reply::Status("OK".into()));
}

/// Reads of those who watch.
fn reads(server: &RedisServer) -> u64 {
    server.calls("getrange").unwrap()
}

/// The record as a heartbeat writes it.
fn renewed(record: &Record) -> Record {
    Record { token: Token::from(fastrand::u128(..)), ..record.clone() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_who_wait_cost_one_read_and_wake_at_the_end_and_not_at_a_heartbeat() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let claim = running();
    put(&server, "a", &claim);
    let mut waiting = wait_for(&redis, "a", &claim, 1000);
    until("the key is read", || reads(&server) >= 1).await;
    let mut now = claim.clone();
    for beats in 1..=3 {
        let next = renewed(&now);
        put(&server, "a", &next);
        now = next;
        within(CALLED_WITHIN, "the heartbeat is read", || reads(&server) > beats).await;
    }
    assert!(waiting.try_join_next().is_none(), "a heartbeat wakes nobody");
    assert_eq!(reads(&server), 4, "one read at the start, one a heartbeat");
    assert_eq!(watchers(&server).len(), 1);
    let mut last = done();
    last.output = Output::kept("text/plain", vec![7; 1 << 20]);
    put(&server, "a", &last);
    assert_eq!(told(waiting).await, vec![Ok(true); 1000]);
    assert_eq!(reads(&server), 5);
    // Whoever has seen an older version is told at once.
    assert_eq!(told(wait_for(&redis, "a", &now, 3)).await, vec![Ok(true); 3]);
}

#[tokio::test]
async fn what_changed_before_anybody_waited_is_told_at_once() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let (claim, next, last) = (running(), running(), done());
    assert_eq!(told(wait_for(&redis, "absent", &claim, 2)).await, vec![Ok(true); 2], "there is no record");
    put(&server, "a", &claim);
    // Somebody waits already, and what was read of the key is older than what the next one has seen.
    let mut first = wait_for(&redis, "a", &claim, 1);
    until("the key is read", || reads(&server) >= 1).await;
    put(&server, "a", &next);
    let mut second = wait_for(&redis, "a", &next, 1);
    assert_eq!(told(std::mem::take(&mut first)).await, [Ok(true)], "another claim");
    // A wake-up for no reason is allowed: then it waits again.
    while let Some(told) = second.try_join_next() {
        assert_eq!(told.unwrap(), Ok(true));
        second = wait_for(&redis, "a", &next, 1);
    }
    put(&server, "a", &last);
    assert_eq!(told(second).await, [Ok(true)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_end_is_missed_however_it_falls() {
    let server = RedisServer::start(&[]).unwrap();
    let (redis, other) = (open(&server.url()), open(&server.url()));
    for round in 0..300 {
        let id = format!("r-{round}");
        let (claim, last) = (running(), done());
        store(&other, &key(&id), None, &claim).await;
        let waiting = wait_for(&redis, &id, &claim, 3);
        // Before, during or after the read.
        for _ in 0..fastrand::u32(0..40) {
            tokio::task::yield_now().await;
        }
        store(&other, &key(&id), Some(&claim), &last).await;
        assert_eq!(told(waiting).await, vec![Ok(true); 3], "round {round}");
    }
    assert_eq!(watchers(&server).len(), 1, "one connection served all rounds");
}

#[tokio::test]
async fn every_change_that_is_no_heartbeat_is_told() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let changes = [
        (State::Running, Some(State::Running)),
        (State::Running, Some(State::Waiting)),
        (State::Running, Some(State::Dead)),
        (State::Running, Some(State::Parked)),
        (State::Running, None),
        // A person ends the delay.
        (State::Waiting, Some(State::Waiting)),
        (State::Waiting, Some(State::Running)),
    ];
    for (number, (before, after)) in changes.into_iter().enumerate() {
        let id = format!("c-{number}");
        let seen = record(before);
        put(&server, &id, &seen);
        let waiting = wait_for(&redis, &id, &seen, 2);
        until("the key is read", || reads(&server) > number as u64 * 2).await;
        match after {
            Some(after) => put(&server, &id, &record(after)),
            None => {
                server.command(&["DEL", &format!("taskonce:{}", key(&id))]).unwrap();
            }
        }
        assert_eq!(told(waiting).await, vec![Ok(true); 2], "{before:?} to {after:?}");
        until("the change is read", || reads(&server) == number as u64 * 2 + 2).await;
    }
}

#[tokio::test]
async fn an_expiry_and_a_flush_are_told() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let short = Record { retention: Duration::from_millis(300), ..running() };
    put(&server, "short", &short);
    assert_eq!(told(wait_for(&redis, "short", &short, 2)).await, vec![Ok(true); 2]);
    for flush in ["FLUSHALL", "FLUSHDB"] {
        let claim = running();
        put(&server, "a", &claim);
        let before = reads(&server);
        let waiting = wait_for(&redis, "a", &claim, 2);
        until("the key is read", || reads(&server) > before).await;
        server.command(&[flush]).unwrap();
        assert_eq!(told(waiting).await, vec![Ok(true); 2], "{flush}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_is_cut_off_wakes_all_and_the_next_wait_has_another() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&proxy.url());
    let (claim, last) = (running(), done());
    put(&server, "a", &claim);
    for cut in ["CLIENT KILL", "proxy"] {
        let before = reads(&server);
        let waiting = wait_for(&redis, "a", &claim, 100);
        until("the key is read", || reads(&server) > before).await;
        if cut == "proxy" {
            proxy.cut();
        } else {
            let line = watchers(&server).remove(0);
            let id = line.split_once("id=").unwrap().1.split(' ').next().unwrap().to_owned();
            assert_eq!(server.command(&["CLIENT", "KILL", "ID", &id]).unwrap(), Reply::Int(1));
        }
        assert_eq!(told(waiting).await, vec![Ok(true); 100], "{cut}");
    }
    let before = reads(&server);
    let waiting = wait_for(&redis, "a", &claim, 100);
    until("the key is read over a new connection", || reads(&server) > before).await;
    put(&server, "a", &last);
    assert_eq!(told(waiting).await, vec![Ok(true); 100]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_wakes_all_and_one_that_is_back_calls_again() {
    let mut server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let claim = running();
    put(&server, "a", &claim);
    let waiting = wait_for(&redis, "a", &claim, 100);
    until("the key is read", || reads(&server) >= 1).await;
    server.kill();
    assert_eq!(told(waiting).await, vec![Ok(true); 100]);
    let refused = told(wait_for(&redis, "a", &claim, 100)).await;
    assert_eq!(refused, vec![Err(ErrorKind::Unreachable); 100]);
    server.restart().unwrap();
    crate::support::until_claimed(&redis, PATIENCE).await;
    put(&server, "b", &claim);
    // What was refused a moment ago is asked again.
    let mut waiting = wait_for(&redis, "b", &claim, 100);
    until("it is watched", || {
        if waiting.try_join_next().is_some() {
            waiting = wait_for(&redis, "b", &claim, 100);
        }
        reads(&server) >= 1
    })
    .await;
    put(&server, "b", &done());
    assert_eq!(told(waiting).await.last(), Some(&Ok(true)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_holds_nobody_up() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let claim = running();
    put(&server, "a", &claim);
    put(&server, "b", &claim);
    let watched = wait_for(&redis, "a", &claim, 10);
    until("the key is read", || reads(&server) >= 1).await;
    server.stop().unwrap();
    // A read that is not answered in time ends the connection, and so the wait for every key on it.
    let other = wait_for(&redis, "b", &claim, 10);
    assert_eq!(told(watched).await, vec![Ok(true); 10]);
    assert_eq!(told(other).await, vec![Ok(true); 10]);
    // A new connection is not answered either.
    let unreached = told(wait_for(&redis, "a", &claim, 10)).await;
    assert_eq!(unreached, vec![Err(ErrorKind::TimedOut); 10]);
    server.cont().unwrap();
}

#[tokio::test]
async fn who_may_not_track_is_told_so_and_the_server_is_not_asked_again_and_again() {
    let server = RedisServer::start(&[]).unwrap();
    let denied: &[&str] = if server.version().unwrap() >= (7, 0) { &["-client|tracking"] } else { &["-client"] };
    let rules = ["ACL", "SETUSER", "ada", "on", ">secret", "~*", "+@all"];
    server.command(&[&rules[..], denied].concat()).unwrap();
    let redis = open(&server.url().replace("redis://", "redis://ada:secret@"));
    let claim = running();
    put(&server, "a", &claim);
    assert_eq!(told(wait_for(&redis, "a", &claim, 10)).await, vec![Ok(false); 10]);
    let connections = || server.command(&["INFO", "stats"]).unwrap().text();
    let before = connections();
    let received = |info: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix("total_connections_received:")).unwrap();
        line.trim().parse().unwrap()
    };
    for _ in 0..20 {
        assert!(!redis.changed(&key("a"), &claim).await.unwrap());
    }
    assert_eq!(received(&connections()) - received(&before), 1, "only the question itself connected");
}

#[tokio::test]
async fn a_user_with_a_password_and_a_database_is_called() {
    let server = RedisServer::start(&[]).unwrap();
    server.command(&["ACL", "SETUSER", "ada", "on", ">secret", "~*", "+@all"]).unwrap();
    let redis = open(&(server.url().replace("redis://", "redis://ada:secret@") + "/3"));
    let claim = running();
    put(&server, "a", &claim);
    let waiting = wait_for(&redis, "a", &claim, 2);
    until("the key is read", || reads(&server) >= 1).await;
    put(&server, "a", &done());
    assert_eq!(told(waiting).await, vec![Ok(true); 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_no_more_leaves_nothing_behind() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let claim = running();
    for round in 0..50 {
        let id = format!("d-{}", round % 5);
        if round < 5 {
            put(&server, &id, &claim);
        }
        let patience = Duration::from_micros(fastrand::u64(0..4000));
        let waited = tokio::time::timeout(patience, redis.changed(&key(&id), &claim)).await;
        assert!(waited.is_err() || matches!(waited, Ok(Ok(true))), "{waited:?}");
    }
    // Nobody waits: heartbeats are read by nobody.
    until("the last read is answered", || watchers(&server).len() == 1).await;
    let before = reads(&server);
    let mut now = claim.clone();
    for _ in 0..20 {
        let next = renewed(&now);
        put(&server, "d-0", &next);
        now = next;
    }
    // One who waits proves that the connection works on, and is read once.
    let waiting = wait_for(&redis, "d-0", &now, 1);
    until("the key is read", || reads(&server) > before).await;
    put(&server, "d-0", &done());
    assert_eq!(told(waiting).await, [Ok(true)]);
    assert!(reads(&server) - before <= 3, "{} reads", reads(&server) - before);
    drop(redis);
    until("the connection closes with its store", || watchers(&server).is_empty()).await;
}
