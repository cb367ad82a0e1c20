//! Writes that count only when replicas have them, and what a failover then takes.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::codec;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_redis::RedisStore;
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use tokio::task::JoinSet;

use crate::support::{CATCH_UP, Pair, RETENTION, done, key, load, open, record, running, store};

/// A call's time where it is to succeed.
const AMPLE: &str = "timeout=20s";
/// A call's time where it is to fail.
const SHORT: &str = "timeout=2s";

impl Pair {
    fn store(&self, options: &str) -> RedisStore {
        open(&format!("{}?{options}", self.primary.url()))
    }

    /// Stops the replica and takes its connection away, so that nothing more reaches it, not even a buffer of the system.
    fn part(&self) {
        self.replica.stop().unwrap();
        self.primary.command(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    }

    /// The primary dies, and the replica takes its place as it is.
    fn fail_over(&mut self) {
        self.primary.kill();
        self.replica.cont().unwrap();
        self.replica.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    }

    fn replica_has(&self, id: &str) -> bool {
        self.replica.command(&["EXISTS", &format!("taskonce:{}", key(id))]).unwrap() == Reply::Int(1)
    }
}

/// Claims keys of this name at once: the ids of those that counted, and the kinds of the other answers.
async fn claim_all(redis: &RedisStore, name: &str, count: u32) -> (Vec<String>, Vec<ErrorKind>) {
    let mut claims = JoinSet::new();
    for number in 0..count {
        let (redis, id) = (redis.clone(), format!("{name}-{number}"));
        claims.spawn(async move {
            let answer = redis.swap(&key(&id), Expected::Nothing, Next::Claim(&running())).await;
            answer.map(|swap| {
                assert!(matches!(swap, Swap::Stored(_)), "{id}: {swap:?}");
                id
            })
        });
    }
    let (mut counted, mut refused) = (Vec::new(), Vec::new());
    for answer in claims.join_all().await {
        match answer {
            Ok(id) => counted.push(id),
            Err(error) => refused.push(error.kind()),
        }
    }
    (counted, refused)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_on_the_replica_when_the_call_returns() {
    let pair = Pair::start();
    let redis = pair.store(&format!("wait_replicas=1&{AMPLE}"));
    for round in 0..20 {
        let id = format!("a-{round}");
        let (claim, last) = (running(), done());
        store(&redis, &key(&id), None, &claim).await;
        assert!(pair.replica_has(&id), "{id}");
        store(&redis, &key(&id), Some(&claim), &last).await;
        let there = pair.replica.command(&["GET", &format!("taskonce:{}", key(&id))]).unwrap();
        assert!(matches!(&there, Reply::Bulk(bytes) if bytes[2..18] == last.token.0), "{there:?}");
    }
    // Calls made at once share their question.
    let before = pair.primary.calls("wait").unwrap();
    let (counted, refused) = claim_all(&redis, "many", 512).await;
    assert_eq!((counted.len(), refused), (512, Vec::new()));
    assert!(counted.iter().all(|id| pair.replica_has(id)));
    let asked = pair.primary.calls("wait").unwrap() - before;
    assert!((1..=256).contains(&asked), "{asked} questions for 512 claims");
}

#[tokio::test]
async fn without_a_replica_in_time_a_write_is_unreplicated_until_it_really_is_there() {
    unreplicated_until_it_is_there(Pair::start()).await;
}

/// Here `WAIT` counts only what its own connection wrote, and a reconnected one has written nothing.
#[tokio::test]
async fn on_valkey_a_write_of_another_connection_is_unreplicated_until_it_really_is_there() {
    unreplicated_until_it_is_there(Pair::of(|args| RedisServer::start_valkey(args).unwrap())).await;
}

async fn unreplicated_until_it_is_there(pair: Pair) {
    let redis = pair.store(&format!("wait_replicas=1&{SHORT}"));
    store(&redis, &key("held"), None, &running()).await;
    let (claim, last) = (running(), done());
    store(&redis, &key("b"), None, &claim).await;
    pair.replica.stop().unwrap();

    let fresh = running();
    let unreplicated = async |redis: &RedisStore, id: &str, expected: Expected<'_>, next: Next<'_>| {
        let start = Instant::now();
        let error = redis.swap(&key(id), expected, next).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreplicated, "{error:?}");
        assert!(error.to_string().contains("0 replicas") && error.hint().contains("wait_replicas"), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    };
    for _ in 0..2 {
        unreplicated(&redis, "a", Expected::Nothing, Next::Claim(&fresh)).await;
        unreplicated(&redis, "b", Expected::Record(&claim), Next::Keep(&last)).await;
        // A new connection has written nothing that it could wait for, and finds the writes of the other.
        let other = pair.store(&format!("wait_replicas=1&{SHORT}"));
        unreplicated(&other, "a", Expected::Nothing, Next::Claim(&fresh)).await;
        unreplicated(&other, "b", Expected::Record(&claim), Next::Keep(&last)).await;
    }
    // What writes nothing needs no replica.
    assert!(redis.load(&key("a")).await.unwrap().is_some());
    let busy = redis.swap(&key("held"), Expected::Nothing, Next::Claim(&running())).await.unwrap();
    assert!(matches!(busy, Swap::Conflict(Some(_))), "{busy:?}");

    pair.replica.cont().unwrap();
    pair.await_link();
    let other = pair.store(&format!("wait_replicas=1&{AMPLE}"));
    store(&other, &key("a"), None, &fresh).await;
    store(&other, &key("b"), Some(&claim), &last).await;
    assert!(pair.replica_has("a"));
}

/// Else a delivery would be acknowledged by what a failover takes back.
#[tokio::test]
async fn a_duplicate_is_answered_by_an_end_that_replicas_have_and_by_no_other() {
    for pair in [Pair::start(), Pair::of(|args| RedisServer::start_valkey(args).unwrap())] {
        let (redis, other) = (pair.store(&format!("wait_replicas=1&{SHORT}")), pair.store("wait_replicas=0"));
        let duplicate =
            async |redis: &RedisStore, id: &str| redis.swap(&key(id), Expected::Nothing, Next::Claim(&running())).await;
        pair.replica.stop().unwrap();
        for (id, last) in [("done", done()), ("dead", record(State::Dead))] {
            store(&other, &key(id), None, &last).await;
            let error = duplicate(&redis, id).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreplicated, "{error:?}");
            // Who does not ask for replicas, and who only looks, is told.
            assert!(matches!(duplicate(&other, id).await.unwrap(), Swap::Conflict(Some(_))));
            assert_eq!(*load(&redis, &key(id)).await.record, last);
        }
        // Of what ended long ago nobody is asked.
        let (name, old) = (format!("taskonce:{}", key("old")), done());
        let left = (RETENTION - Duration::from_secs(300)).as_millis().to_string();
        pair.primary.command(&[b"SET", name.as_bytes(), &codec::encode(&old), b"PX", left.as_bytes()]).unwrap();
        assert!(matches!(duplicate(&redis, "old").await.unwrap(), Swap::Conflict(Some(found)) if *found.record == old));

        pair.replica.cont().unwrap();
        pair.await_link();
        let redis = pair.store(&format!("wait_replicas=1&{AMPLE}"));
        for id in ["done", "dead"] {
            let before = load(&redis, &key(id)).await;
            let there = duplicate(&redis, id).await.unwrap();
            assert!(matches!(&there, Swap::Conflict(Some(found)) if found.record == before.record), "{there:?}");
            assert!(pair.replica_has(id));
            assert!(load(&redis, &key(id)).await.age.as_duration() >= before.age.as_duration(), "its life is the same");
        }
    }
}

#[tokio::test]
async fn a_connection_that_waits_for_replicas_is_not_taken_for_a_dead_one() {
    let pair = Pair::start();
    let redis = pair.store(&format!("wait_replicas=1&{SHORT}"));
    store(&redis, &key("first"), None, &running()).await;
    let clients = || {
        let list = pair.primary.command(&["CLIENT", "LIST"]).unwrap().text();
        let ours = list.lines().filter(|line| line.contains("name=taskonce "));
        ours.map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let before = clients();
    assert_eq!(before.len(), 1);
    pair.replica.stop().unwrap();
    for round in 0..3 {
        let (counted, refused) = claim_all(&redis, &format!("r-{round}"), 8).await;
        assert!(counted.is_empty() && refused.iter().all(|kind| *kind == ErrorKind::Unreplicated), "{refused:?}");
    }
    assert_eq!(clients(), before);
}

#[tokio::test]
async fn more_replicas_than_there_are_is_told_with_their_number() {
    let pair = Pair::start();
    let redis = pair.store(&format!("wait_replicas=2&{SHORT}"));
    let claim = running();
    let start = Instant::now();
    loop {
        let error = redis.swap(&key("a"), Expected::Nothing, Next::Claim(&claim)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreplicated, "{error:?}");
        assert!(error.to_string().contains("not 2"), "{error}");
        // The one that there is may be late too, on a machine under load.
        if error.to_string().contains("1 replica ") {
            return;
        }
        assert!(start.elapsed() < CATCH_UP, "{error}");
    }
}

/// Claims before and after the replica was parted from its primary, then the failover: how many counted, and how many
/// of these are gone.
async fn lost_at_failover(options: &str) -> (usize, usize) {
    let mut pair = Pair::start();
    let redis = pair.store(&format!("{options}&{SHORT}"));
    let (mut counted, refused) = claim_all(&redis, "before", 20).await;
    assert_eq!(refused, []);
    // Without the option the replica may still be behind; what is measured is the time after it was parted.
    pair.await_link();
    pair.part();
    counted.extend(claim_all(&redis, "after", 20).await.0);
    pair.fail_over();
    let lost = counted.iter().filter(|id| !pair.replica_has(id)).count();
    (counted.len(), lost)
}

#[tokio::test]
async fn every_claim_that_counted_survives_a_failover_if_it_waited_for_the_replica() {
    assert_eq!(lost_at_failover("wait_replicas=1").await, (20, 0));
    // The same without waiting: half of what was acknowledged is gone.
    assert_eq!(lost_at_failover("wait_replicas=0").await, (40, 20));
}

#[test]
fn effects_that_need_memory_are_refused_also_where_writes_wait_for_replicas() {
    for url in ["redis://127.0.0.1", "redis://127.0.0.1?wait_replicas=2"] {
        let store = open(url);
        for effect in [Effect::Unrepeatable, Effect::Fenced] {
            let refused = Policy::new(effect).check_store(&store).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ForgetfulStore, "{url} {effect:?}");
        }
        assert!(Policy::new(Effect::Keyed).check_store(&store).is_ok());
    }
}
