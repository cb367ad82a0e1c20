//! Servers that are down, stopped, restarted and cut off: every call ends in time, and work goes on at once afterwards.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::{Proxy, RedisServer, port};

use crate::support::{claim_error, done, key, open, record, running, store, until_claimed};

/// The default deadline of a call.
const DEADLINE: Duration = Duration::from_millis(500);
/// What a call may be late.
const LATE: Duration = Duration::from_millis(20);
/// How soon a call must work again.
const BACK: Duration = Duration::from_millis(100);

#[tokio::test]
async fn nothing_listening_is_unreachable_and_said_at_once() {
    let redis = open(&format!("redis://127.0.0.1:{}", port::free().unwrap()));
    for _ in 0..20 {
        let start = Instant::now();
        let error = claim_error(&redis, "a").await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        assert!(start.elapsed() < BACK, "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_unreachable_in_time() {
    let redis = open("redis://no-such-host.invalid");
    let start = Instant::now();
    let kind = claim_error(&redis, "a").await.kind();
    assert!(matches!(kind, ErrorKind::Unreachable | ErrorKind::TimedOut), "{kind:?}");
    assert!(start.elapsed() < DEADLINE + LATE);
}

/// How late plain timers of the runtime are meanwhile, at worst: a busy machine is no fault of the store's.
async fn lateness(lasting: Duration) -> Duration {
    let start = Instant::now();
    let mut worst = Duration::ZERO;
    while start.elapsed() < lasting {
        let begin = Instant::now();
        tokio::time::sleep(Duration::from_millis(5)).await;
        worst = worst.max(begin.elapsed().saturating_sub(Duration::from_millis(5)));
    }
    worst
}

/// Many calls at once, again and again, for a while: how long each took, and that all of them failed.
async fn storm(redis: &taskonce_redis::RedisStore, lasting: Duration) -> Vec<Duration> {
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..64 {
        let redis = redis.clone();
        tasks.spawn(async move {
            let mut took = Vec::new();
            let mut round = 0;
            while start.elapsed() < lasting {
                let begin = Instant::now();
                let answer =
                    redis.swap(&key(&format!("s-{worker}-{round}")), Expected::Nothing, Next::Claim(&running())).await;
                took.push(begin.elapsed());
                let error = answer.unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::TimedOut), "{error:?}");
                round += 1;
            }
            took
        });
    }
    let mut took: Vec<Duration> = tasks.join_all().await.into_iter().flatten().collect();
    took.sort_unstable();
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_a_stopped_server_end_by_their_deadline_and_work_again_at_once() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    store(&redis, &key("a"), None, &running()).await;
    server.stop().unwrap();
    let lasting = Duration::from_secs(3);
    let (took, busy) = tokio::join!(storm(&redis, lasting), tokio::spawn(lateness(lasting)));
    let (late, busy) = (took[took.len() * 999 / 1000], busy.unwrap());
    assert!(took.len() >= 64 * 5 && late <= DEADLINE + LATE + busy, "{} calls, p99.9 {late:?}, {busy:?}", took.len());
    server.cont().unwrap();
    let back = until_claimed(&redis, Duration::from_secs(5)).await;
    assert!(back <= BACK, "{back:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_a_dead_server_end_by_their_deadline_and_work_again_at_once() {
    let mut server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&proxy.url());
    store(&redis, &key("a"), None, &running()).await;
    server.kill();
    let before = proxy.connections();
    let lasting = Duration::from_secs(2);
    let (took, busy) = tokio::join!(storm(&redis, lasting), tokio::spawn(lateness(lasting)));
    let (late, busy) = (took[took.len() * 999 / 1000], busy.unwrap());
    assert!(late <= DEADLINE + LATE + busy, "p99.9 {late:?}, {busy:?}");
    // One attempt each 20 ms at most, however many calls there are.
    let attempts = proxy.connections() - before;
    assert!((10..=110).contains(&attempts), "{attempts} attempts to connect in two seconds");
    server.restart().unwrap();
    let back = until_claimed(&redis, Duration::from_secs(5)).await;
    assert!(back <= BACK, "{back:?}");
}

#[tokio::test]
async fn a_server_that_restarted_while_nobody_called_is_not_noticed() {
    let mut server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let first = running();
    store(&redis, &key("a"), None, &first).await;
    server.restart().unwrap();
    // The connection is dead, the script is gone, and so are the records.
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &done()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_restarted_under_load_loses_nothing_that_it_kept() {
    let mut server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let redis = open(&server.url());
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..16 {
        let (redis, stop) = (redis.clone(), stop.clone());
        tasks.spawn(async move {
            let mut stored = Vec::new();
            for round in 0.. {
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
                let id = format!("r-{worker}-{round}");
                let (claim, last) = (running(), done());
                for (expected, next) in [(Expected::Nothing, &claim), (Expected::Record(&claim), &last)] {
                    // Asked again with the same token until the outcome is known, as the ledger does.
                    loop {
                        match redis.swap(&key(&id), expected, Next::Keep(next)).await {
                            Ok(Swap::Stored(_)) => break,
                            Ok(conflict) => panic!("{id}: {conflict:?}"),
                            Err(error) => assert_eq!(error.kind().retry(), taskonce_core::error::Retry::Later),
                        }
                    }
                }
                stored.push((id, last));
            }
            stored
        });
    }
    let served = |server: &RedisServer| server.command(&["DBSIZE"]).unwrap().int().unwrap_or(0);
    for restart in 1..=3 {
        let goal = served(&server) + 50;
        let reached = async {
            while served(&server) < goal {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .unwrap_or_else(|_| panic!("no work before {restart}"));
        server.restart().unwrap();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let all: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    assert!(all.len() > 100, "{} tasks", all.len());
    for (id, last) in all {
        assert_eq!(*crate::support::load(&redis, &key(&id)).await.record, last, "{id}");
    }
}

#[tokio::test]
async fn a_silent_connection_is_given_up_even_by_calls_that_never_wait_long() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&proxy.url());
    store(&redis, &key("a"), None, &running()).await;
    // The next answers are lost, and the connection stays open: a firewall forgot it.
    proxy.drop_replies("GET", 3);
    let start = Instant::now();
    loop {
        let brief = tokio::time::timeout(Duration::from_millis(100), redis.load(&key("a"))).await;
        if let Ok(found) = brief {
            assert_eq!(found.unwrap().unwrap().record.state, State::Running);
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(3), "still on the silent connection");
    }
    assert!(proxy.connections() >= 2);
}

#[tokio::test]
async fn the_deadline_is_the_urls() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&format!("{}?timeout=80ms", server.url()));
    store(&redis, &key("a"), None, &record(State::Waiting)).await;
    server.stop().unwrap();
    let start = Instant::now();
    let error = redis.load(&key("a")).await.unwrap_err();
    server.cont().unwrap();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!(
        (Duration::from_millis(75)..Duration::from_millis(140)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
}
