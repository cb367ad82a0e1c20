//! Waiting for a key to change. A store that cannot call those who wait passes as well: they look again and again.

use std::time::Duration;

use taskonce_core::key::Key;
use taskonce_core::record::{Found, Record, State, Token};
use taskonce_core::store::{Expected, Next, Store};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::stored;
use crate::records::plain;
use crate::stage::Stage;

/// The longest that a case waits to see a change: far above what the port promises, to tell a busy machine from a store
/// that misses one.
const SEEN_WITHIN: Duration = Duration::from_secs(20);
/// How often those look who cannot be called.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How many wait at once.
const AT_ONCE: usize = 16;
/// How many changes are made while somebody begins to wait.
const ROUNDS: u128 = 40;
/// Heartbeats while somebody waits, and how many of them may call for no reason.
const BEATS: u128 = 30;
const CALLS_MAX: usize = 10;

/// What one saw who waited.
struct Waited {
    found: Option<Found>,
    /// How often the store called.
    calls: usize,
}

/// Waits as the port says, until the key holds another state or claim than `seen`.
async fn wait(store: &dyn Store, key: &Key, seen: &Record) -> Waited {
    let mut calls = 0;
    let waited = async {
        loop {
            let found = store.load(key).await.unwrap();
            let there = found.as_ref().map(|found| (found.record.state, found.record.claim));
            if there != Some((seen.state, seen.claim)) {
                return Waited { found, calls };
            }
            if store.changed(key, seen).await.unwrap() {
                calls += 1;
            } else {
                sleep(LOOK_EVERY).await;
            }
        }
    };
    timeout(SEEN_WITHIN, waited).await.expect("a change is seen by who waits for it")
}

/// So many who wait on one handle.
fn waiting(stage: &Stage, key: &Key, seen: &Record, count: usize) -> JoinSet<Waited> {
    let mut all = JoinSet::new();
    for _ in 0..count {
        let (stage, key, seen) = (stage.clone(), key.clone(), seen.clone());
        all.spawn(async move { wait(stage.store(), &key, &seen).await });
    }
    all
}

async fn put(stage: &Stage, key: &Key, before: Option<&Record>, record: &Record) {
    stored(stage.other().swap(key, Expected::record(before), Next::Keep(record)).await.unwrap());
}

pub(super) async fn no_end_is_missed_by_those_who_wait(stage: Stage) {
    for round in 0..ROUNDS {
        let key = stage.key(&format!("round-{round}"));
        let (claim, last) = (plain(State::Running, 1), plain(State::Done, 2));
        put(&stage, &key, None, &claim).await;
        let all = waiting(&stage, &key, &claim, 2);
        // The end falls before, into and after the moment in which the waiting begins.
        for _ in 0..round {
            tokio::task::yield_now().await;
        }
        put(&stage, &key, Some(&claim), &last).await;
        for waited in all.join_all().await {
            assert_eq!(waited.found.expect("it is done").record.state, State::Done);
        }
    }
}

pub(super) async fn a_wait_for_what_is_no_longer_so_ends_at_once(stage: Stage) {
    let (old, new) = (plain(State::Running, 1), plain(State::Running, 2));
    let key = stage.key("taken over");
    put(&stage, &key, None, &old).await;
    // Somebody waits already, so that the store may know the key.
    let first = waiting(&stage, &key, &old, 1);
    put(&stage, &key, Some(&old), &new).await;
    for store in [stage.store(), stage.other()] {
        let told = timeout(SEEN_WITHIN, store.changed(&key, &old)).await.expect("another claim is told at once");
        told.unwrap();
        let told = timeout(SEEN_WITHIN, store.changed(&stage.key("absent"), &old)).await;
        told.expect("nothing is told at once").unwrap();
    }
    assert_eq!(first.join_all().await[0].found.as_ref().expect("it runs").record.claim, new.claim);
}

pub(super) async fn a_heartbeat_calls_nobody_who_waits(stage: Stage) {
    let key = stage.key("a");
    let claim = plain(State::Running, 1);
    put(&stage, &key, None, &claim).await;
    let all = waiting(&stage, &key, &claim, AT_ONCE);
    let mut before = claim.clone();
    for beat in 0..BEATS {
        let next = Record { token: Token::from(100 + beat), ..claim.clone() };
        put(&stage, &key, Some(&before), &next).await;
        before = next;
        sleep(LOOK_EVERY).await;
    }
    put(&stage, &key, Some(&before), &plain(State::Waiting, 2)).await;
    for waited in all.join_all().await {
        assert_eq!(waited.found.expect("it waits").record.state, State::Waiting);
        assert!(waited.calls <= CALLS_MAX, "{} calls for {BEATS} heartbeats", waited.calls);
    }
}

pub(super) async fn an_erased_key_ends_the_wait(stage: Stage) {
    let key = stage.key("a");
    let claim = plain(State::Running, 1);
    put(&stage, &key, None, &claim).await;
    let all = waiting(&stage, &key, &claim, AT_ONCE);
    tokio::task::yield_now().await;
    stored(stage.other().swap(&key, Expected::Record(&claim), Next::Erase).await.unwrap());
    assert!(all.join_all().await.iter().all(|waited| waited.found.is_none()));
}

/// Those who give up leave the others waiting, and the last of them leaves a store that can be waited on again.
pub(super) async fn waits_that_are_given_up_take_nothing_from_others(stage: Stage) {
    for round in 0..ROUNDS {
        let key = stage.key(&format!("round-{}", round % 4));
        let (claim, last) = (plain(State::Running, 2 * round + 1), plain(State::Done, 2 * round + 2));
        let before = (round >= 4).then(|| plain(State::Done, 2 * (round - 4) + 2));
        put(&stage, &key, before.as_ref(), &claim).await;
        let given_up = waiting(&stage, &key, &claim, AT_ONCE);
        for _ in 0..round {
            tokio::task::yield_now().await;
        }
        let all = waiting(&stage, &key, &claim, 2);
        drop(given_up);
        put(&stage, &key, Some(&claim), &last).await;
        for waited in all.join_all().await {
            assert_eq!(waited.found.expect("it is done").record.token, last.token);
        }
    }
}
