//! Primaries that Sentinels switch while calls run.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::Sentinels;
use taskonce_testkit::sentinel::SentinelOptions;

use crate::load::{Load, SOON, accepted, until_claimed};
use crate::support::{claim_error, done, key, load, open, running, store};

/// What a call may take on a machine that is busy; the URLs say one second.
const TIMEOUT_BUSY: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_switch_of_the_sentinels_is_followed_while_calls_run() {
    let mut stand = Sentinels::start(&SentinelOptions::quick()).unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    let load = Load::start(&redis, "switch", 8);
    load.await_more(100);
    stand.failover().unwrap();
    load.await_more(100);
    let report = load.end().await;
    assert!(report.longest < TIMEOUT_BUSY, "a call took {:?}", report.longest);
    // The old primary takes writes until the Sentinels make it a replica, which may be seconds later.
    let kept = report.kept(&redis).await;
    assert!(kept > 0, "of {} tasks nothing is there", report.completed.len());

    stand.await_whole().unwrap();
    let load = Load::start(&redis, "kill", 8);
    load.await_more(100);
    let dead = stand.kill_primary().unwrap();
    stand.await_failover(dead).unwrap();
    let back = until_claimed(&redis, |i| key(&format!("back-{i}"))).await;
    load.await_more(100);
    let report = load.end().await;
    assert!(back < TIMEOUT_BUSY, "back after {back:?}");
    assert!(report.longest < TIMEOUT_BUSY, "a call took {:?}", report.longest);
    assert!(report.failed > 0, "nobody noticed that the primary was dead");
    assert!(report.kept(&redis).await > 0, "of {} tasks nothing is there", report.completed.len());
}

#[tokio::test]
async fn a_primary_that_was_replaced_and_does_not_know_it_is_left() {
    let stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    store(&redis, &key("a"), None, &running()).await;
    let new = stand.failover().unwrap();
    // Nobody cuts the connection, and the old one still takes writes for many seconds.
    let moved = async || {
        let id = format!("probe-{}", fastrand::u64(..));
        let swap = redis.swap(&key(&id), Expected::Nothing, Next::Claim(&running())).await;
        let name = format!("taskonce:{}", key(&id));
        swap.is_ok() && stand.server(new).command(&["EXISTS", &name]).unwrap().int() == Some(1)
    };
    let start = Instant::now();
    while !moved().await {
        assert!(start.elapsed() < Duration::from_secs(5), "still at the old one");
    }
}

#[tokio::test]
async fn what_a_switch_forgets_runs_again() {
    let mut stand = Sentinels::start(&SentinelOptions::quick()).unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    let (kept, forgotten) = (running(), running());
    store(&redis, &key("kept"), None, &kept).await;
    let (primary, replica) = (stand.primary().unwrap(), stand.replica().unwrap());
    assert_eq!(stand.server(primary).command(&["WAIT", "1", "5000"]).unwrap().int(), Some(1));
    stand.server(replica).stop().unwrap();
    // Else the replica would find what follows in its socket when it goes on.
    stand.server(primary).command(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    store(&redis, &key("forgotten"), None, &forgotten).await;
    stand.kill_primary().unwrap();
    stand.server(replica).cont().unwrap();
    stand.await_failover(primary).unwrap();
    until_claimed(&redis, |i| key(&format!("back-{i}"))).await;
    assert_eq!(*load(&redis, &key("kept")).await.record, kept);
    let end = redis.swap(&key("forgotten"), Expected::Record(&forgotten), Next::Keep(&done())).await.unwrap();
    assert!(matches!(end, Swap::Conflict(None)), "{end:?}");
    store(&redis, &key("forgotten"), None, &running()).await;
}

#[tokio::test]
async fn one_sentinel_that_answers_is_enough() {
    let mut stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let url = format!("{}?timeout=1s", stand.url());
    stand.sentinel_mut(0).kill();
    stand.sentinel(1).stop().unwrap();
    let start = Instant::now();
    store(&open(&url), &key("a"), None, &running()).await;
    assert!(start.elapsed() < TIMEOUT_BUSY, "{:?}", start.elapsed());
    stand.sentinel_mut(2).kill();
    let error = claim_error(&open(&url), "b").await;
    assert!([ErrorKind::Unreachable, ErrorKind::TimedOut].contains(&error.kind()), "{error:?}");
    stand.sentinel(1).cont().unwrap();
}

#[tokio::test]
async fn what_one_sentinel_does_not_know_does_not_decide_while_others_may_come_back() {
    let mut stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let url = format!("{}?timeout=1s", stand.url());
    stand.sentinel(0).command(&["SENTINEL", "REMOVE", "tasks"]).unwrap();
    store(&open(&url), &key("a"), None, &running()).await;
    stand.sentinel_mut(1).kill();
    stand.sentinel_mut(2).kill();
    let error = claim_error(&open(&url), "b").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("no service `tasks`") && error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_sentinel_that_missed_a_switch_pulls_nobody_back() {
    let mut stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    stand.sentinel_mut(0).kill();
    let new = stand.failover().unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    store(&redis, &key("a"), None, &running()).await;
    // Of those that know better nobody answers now.
    stand.sentinel(1).stop().unwrap();
    stand.sentinel(2).stop().unwrap();
    stand.sentinel_mut(0).restart().unwrap();
    let mut stale = stand.sentinel(0).connect().unwrap();
    let before = accepted(&mut stale);
    let start = Instant::now();
    let (mut heard_at, mut number) = (None::<Instant>, 0);
    // It is heard again and again; after 8 s it would turn the new primary into a replica itself.
    while heard_at.is_none_or(|heard_at| heard_at.elapsed() < Duration::from_millis(2500)) {
        if accepted(&mut stale) > before {
            heard_at.get_or_insert_with(Instant::now);
        }
        number += 1;
        let id = key(&format!("b-{number}"));
        store(&redis, &id, None, &running()).await;
        let there = stand.server(new).command(&["EXISTS", &format!("taskonce:{id}")]).unwrap();
        assert_eq!(there.int(), Some(1), "{id} went elsewhere");
        assert!(start.elapsed() < SOON, "the Sentinel was never asked");
    }
    stand.sentinel(1).cont().unwrap();
    stand.sentinel(2).cont().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_asked_on_connections_that_are_kept() {
    let mut stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let redis = open(&format!("{}?timeout=1s", stand.url()));
    let mut sentinel = stand.sentinel(0).connect().unwrap();
    store(&redis, &key("a"), None, &running()).await;
    let before = accepted(&mut sentinel);
    let primary = stand.primary().unwrap();
    let own = accepted(&mut sentinel) - before;
    let load = Load::start(&redis, "kept", 4);
    for _ in 0..3 {
        // sleeps: looks come with time, and the calls go on meanwhile.
        tokio::time::sleep(Duration::from_secs(1)).await;
        load.await_more(10);
    }
    // And while the primary is away, which nobody replaces for long.
    stand.server_mut(primary).kill();
    // sleeps: the same of attempts to find it.
    tokio::time::sleep(Duration::from_secs(3)).await;
    stand.server_mut(primary).restart().unwrap();
    load.await_more(10);
    let report = load.end().await;
    assert!(report.failed > 0, "nobody noticed that the primary was away");
    let made = accepted(&mut sentinel) - before - own;
    assert!(made <= 3, "{made} connections to one Sentinel");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_stops_is_left_for_the_new_one_however_long_calls_may_take() {
    let stand = Sentinels::start(&SentinelOptions::quick()).unwrap();
    let redis = open(&format!("{}?timeout=30s", stand.url()));
    store(&redis, &key("a"), None, &running()).await;
    let primary = stand.primary().unwrap();
    stand.server(primary).stop().unwrap();
    let waiting = tokio::spawn({
        let redis = redis.clone();
        async move { until_claimed(&redis, |i| key(&format!("b-{i}"))).await }
    });
    stand.await_failover(primary).unwrap();
    let start = Instant::now();
    waiting.await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "back after {:?}", start.elapsed());
    stand.server(primary).cont().unwrap();
}
