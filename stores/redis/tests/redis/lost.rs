//! Answers that are lost on the way, calls that are given up, and connections that are cut: no answer reaches another
//! key, and nothing is doubled.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::record::{ClaimId, Record, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::{Proxy, RedisServer};

use crate::support::{done, key, load, of_each_way, open, record, replacing, running, store};

#[tokio::test]
async fn a_lost_answer_to_a_claim_is_recognised_as_its_own() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        for cuts in [true, false] {
            let id = format!("claim-{cuts}");
            // Before 7.0 a claim is a script too.
            lose(&proxy, if server.version().unwrap() >= (7, 0) { "SET" } else { "EVALSHA" }, cuts);
            let claim = running();
            store(&redis, &key(&id), None, &claim).await;
            assert_eq!(proxy.losses_left(), 0);
            assert_eq!(*load(&redis, &key(&id)).await.record, claim);
            // Another claimer is not taken for it.
            let other = redis.swap(&key(&id), Expected::Nothing, Next::Claim(&running())).await.unwrap();
            assert!(matches!(&other, Swap::Conflict(Some(found)) if found.record.claim == claim.claim), "{other:?}");
        }
    }
}

#[tokio::test]
async fn lost_answers_to_heartbeats_and_completions_are_recognised_and_not_doubled() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        for cuts in [true, false] {
            let id = format!("complete-{cuts}");
            let (claim, beat, last) = (running(), running(), done());
            store(&redis, &key(&id), None, &claim).await;
            lose(&proxy, replacing(&server), cuts);
            store(&redis, &key(&id), Some(&claim), &beat).await;
            lose(&proxy, replacing(&server), cuts);
            store(&redis, &key(&id), Some(&beat), &last).await;
            assert_eq!(proxy.losses_left(), 0);
            assert_eq!(*load(&redis, &key(&id)).await.record, last);
            // A late copy of the heartbeat changes nothing any more.
            let late = redis.swap(&key(&id), Expected::Record(&claim), Next::Keep(&beat)).await.unwrap();
            assert!(matches!(&late, Swap::Conflict(Some(found)) if *found.record == last), "{late:?}");
        }
    }
}

/// Else a person is told that nothing was there, and no note of the removal is left.
#[tokio::test]
async fn a_lost_answer_to_the_removal_of_what_is_damaged_is_recognised() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        for cuts in [true, false] {
            let name = format!("taskonce:{}", key("a"));
            server.command(&["SET", &name, "garbage that somebody put here"]).unwrap();
            // The script is known, so that one answer is lost and not the question for its text.
            assert!(redis.discard(&key("a")).await.unwrap());
            server.command(&["SET", &name, "garbage that somebody put here"]).unwrap();
            lose(&proxy, "EVALSHA", cuts);
            assert!(redis.discard(&key("a")).await.unwrap());
            assert_eq!(proxy.losses_left(), 0);
            assert!(!redis.discard(&key("a")).await.unwrap(), "it is gone");
        }
    }
}

fn lose(proxy: &Proxy, command: &str, cuts: bool) {
    if cuts {
        proxy.cut_at_replies(command, 1);
    } else {
        proxy.drop_replies(command, 1);
    }
}

#[tokio::test]
async fn when_every_answer_is_lost_the_outcome_is_unknown_and_asking_again_recognises_it() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        let (claim, last) = (running(), done());
        store(&redis, &key("a"), None, &claim).await;
        proxy.cut_at_replies(replacing(&server), 2);
        let error = redis.swap(&key("a"), Expected::Record(&claim), Next::Keep(&last)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        assert_eq!(*load(&redis, &key("a")).await.record, last);
        store(&redis, &key("a"), Some(&claim), &last).await;
    }
}

#[tokio::test]
async fn scripts_that_were_flushed_are_loaded_again() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let mut held = Vec::new();
    for i in 0..50 {
        let claim = running();
        store(&redis, &key(&format!("f-{i}")), None, &claim).await;
        held.push((key(&format!("f-{i}")), claim));
    }
    server.command(&["SCRIPT", "FLUSH"]).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for (key, claim) in held {
        let redis = redis.clone();
        tasks.spawn(async move { store(&redis, &key, Some(&claim), &done()).await });
    }
    tasks.join_all().await;
}

/// A record that tells its key, so that a mix-up shows.
fn telling(state: State, number: u128) -> Record {
    let mut record = record(state);
    record.claim = ClaimId::from(number);
    record
}

/// Claims, loads and completions of many keys at once, some of them given up at random moments. Every answer is checked
/// to be of its own key.
async fn turmoil(redis: &taskonce_redis::RedisStore, tasks_max: u128, rounds: u32) {
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..tasks_max {
        let redis = redis.clone();
        tasks.spawn(async move {
            for round in 0..rounds {
                let key = key(&format!("t-{number}-{round}"));
                let (claim, last) = (telling(State::Running, number), telling(State::Done, number));
                let mut fresh = true;
                let mut current: Option<Arc<Record>> = None;
                for next in [&claim, &last, &last] {
                    let patience = Duration::from_micros(fastrand::u64(0..3000));
                    let call = async {
                        if fastrand::bool() {
                            let expected = match &current {
                                None => Expected::Nothing,
                                Some(there) if fastrand::bool() => Expected::Record(there),
                                Some(there) => Expected::Token(there.token),
                            };
                            redis.swap(&key, expected, Next::Keep(next)).await.map(Some)
                        } else {
                            let found = redis.load(&key).await?;
                            if let Some(found) = found {
                                assert_eq!(found.record.claim, ClaimId::from(number), "an answer of another key");
                            } else {
                                assert!(fresh, "a record vanished");
                            }
                            Ok(None)
                        }
                    };
                    match tokio::time::timeout(patience, call).await {
                        // Given up: the outcome is unknown.
                        Err(_) => fresh = false_if_stored(&redis, &key, number, &mut current).await,
                        Ok(Ok(None)) => {}
                        Ok(Ok(Some(Swap::Stored(_)))) => (fresh, current) = (false, Some(Arc::new(next.clone()))),
                        Ok(Ok(Some(Swap::Locked(found)))) => panic!("no transaction is open, and {found:?} is locked"),
                        Ok(Ok(Some(Swap::Conflict(None)))) => assert!(fresh, "a record vanished"),
                        Ok(Ok(Some(Swap::Conflict(Some(found))))) => {
                            assert_eq!(found.record.claim, ClaimId::from(number), "an answer of another key");
                            (fresh, current) = (false, Some(found.record));
                        }
                        Ok(Err(error)) => {
                            let retry = error.kind().retry();
                            assert_eq!(retry, taskonce_core::error::Retry::Later, "{error:?}");
                            fresh = false_if_stored(&redis, &key, number, &mut current).await;
                        }
                    }
                }
            }
        });
    }
    tasks.join_all().await;
}

/// Looks what a call of unknown outcome has left, until the store answers: whether the key is still free.
async fn false_if_stored(
    redis: &taskonce_redis::RedisStore,
    key: &taskonce_core::key::Key,
    number: u128,
    current: &mut Option<Arc<Record>>,
) -> bool {
    for _ in 0..100 {
        if let Ok(found) = redis.load(key).await {
            if let Some(found) = &found {
                assert_eq!(found.record.claim, ClaimId::from(number), "an answer of another key");
                *current = Some(found.record.clone());
            }
            return found.is_none();
        }
    }
    panic!("the store does not answer any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_given_up_at_random_never_hand_an_answer_to_another_key() {
    for server in of_each_way() {
        turmoil(&open(&server.url()), 64, 60).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_lost_under_load_never_hand_an_answer_to_another_key() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        for command in ["SET", "PTTL", "GET", "EVALSHA", "ECHO"] {
            proxy.drop_replies(command, 3);
            proxy.cut_at_replies(command, 2);
            turmoil(&redis, 32, 10).await;
        }
        assert!(proxy.losses_left() < 25, "the proxy lost nothing");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_lost_answer_never_lets_the_next_caller_take_its_place() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&proxy.url());
    store(&redis, &key("held"), None, &telling(State::Done, 1)).await;
    for round in 0..20 {
        // Both replies to one claim are lost and the connection stays: the next reply is in the wrong place.
        proxy.drop_replies("SET", 1);
        proxy.drop_replies("PTTL", 1);
        let (held, fresh) = (key("held"), key(&format!("fresh-{round}")));
        let claim = telling(State::Running, 2);
        let (duplicate, own) = tokio::join!(
            redis.swap(&held, Expected::Nothing, Next::Claim(&claim)),
            redis.swap(&fresh, Expected::Nothing, Next::Claim(&claim)),
        );
        let duplicate = duplicate.unwrap();
        assert!(
            matches!(&duplicate, Swap::Conflict(Some(found)) if found.record.claim == ClaimId::from(1)),
            "{duplicate:?}"
        );
        assert!(matches!(own.unwrap(), Swap::Stored(_)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_claims_by_two_stores_exactly_one_wins() {
    let server = RedisServer::start(&[]).unwrap();
    let stores = [open(&server.url()), open(&server.url())];
    for round in 0..20 {
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..64_usize {
            let redis = stores[number % 2].clone();
            tasks.spawn(async move {
                let claim = telling(State::Running, number as u128);
                match redis.swap(&key(&format!("race-{round}")), Expected::Nothing, Next::Claim(&claim)).await.unwrap()
                {
                    Swap::Stored(_) => (true, claim.claim),
                    Swap::Conflict(found) | Swap::Locked(found) => (false, found.unwrap().record.claim),
                }
            });
        }
        let answers = tasks.join_all().await;
        let winners: Vec<_> = answers.iter().filter(|(won, _)| *won).collect();
        assert_eq!(winners.len(), 1);
        assert!(answers.iter().all(|(_, claim)| *claim == winners[0].1), "a loser was told of another winner");
    }
}
