//! Slots that move: redirections are followed, nothing is doubled and nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_redis::RedisStore;
use taskonce_testkit::{RedisCluster, eventually};

use crate::support::{done, key, load, open, running, store};

/// A store whose calls wait long, for tests that are not about time.
fn patient(cluster: &RedisCluster) -> RedisStore {
    open(&format!("{}?timeout=20s", cluster.url_of(&[0])))
}

/// How often the nodes were asked for their slots so far.
fn looks(cluster: &RedisCluster) -> u64 {
    (0..cluster.size()).map(|n| cluster.server(n).calls("cluster|slots").unwrap()).sum()
}

#[tokio::test]
async fn tasks_live_on_all_nodes_and_one_address_is_enough() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    for i in 0..100 {
        let (key, claim, last) = (key(&format!("a-{i}")), running(), done());
        store(&redis, &key, None, &claim).await;
        store(&redis, &key, Some(&claim), &last).await;
        assert_eq!(*load(&redis, &key).await.record, last);
    }
    for n in 0..3 {
        let size = cluster.server(n).command(&["DBSIZE"]).unwrap().int().unwrap();
        assert!(size > 10, "{size} of 100 tasks at node {n}");
    }
    assert_eq!(looks(&cluster), 1);
}

#[tokio::test]
async fn a_tag_in_an_id_decides_the_slot_as_it_does_for_every_client() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    for id in ["{order-1}/a", "{order-1}/b", "x{}y", "a{b", "}{c}{d}"] {
        store(&redis, &key(id), None, &running()).await;
        let name = format!("taskonce:{}", key(id));
        let server = cluster.server(cluster.server_of(&name).unwrap());
        assert_eq!(server.command(&["EXISTS", &name]).unwrap().int(), Some(1), "{id}");
    }
}

#[tokio::test]
async fn a_moved_slot_is_followed() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let (key, claim, last) = (key("moves"), running(), done());
    store(&redis, &key, None, &claim).await;
    let slot = cluster.slot_of(format!("taskonce:{key}")).unwrap();
    let from = cluster.owner_of_slot(slot).unwrap();
    cluster.move_slot(slot, (from + 1) % 3).unwrap();
    store(&redis, &key, Some(&claim), &last).await;
    cluster.move_slot(slot, (from + 2) % 3).unwrap();
    assert_eq!(*load(&redis, &key).await.record, last);
    let duplicate = redis.swap(&key, Expected::Nothing, Next::Claim(&running())).await.unwrap();
    assert!(matches!(&duplicate, Swap::Conflict(Some(found)) if *found.record == last), "{duplicate:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_that_are_sent_on_at_once_cost_a_bounded_number_of_looks_at_the_slots() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let mut held = Vec::new();
    for i in 0..300 {
        let (key, claim) = (key(&format!("{{storm}}-{i}")), running());
        store(&redis, &key, None, &claim).await;
        held.push((key, claim));
    }
    let slot = cluster.slot_of("storm").unwrap();
    let before = looks(&cluster);
    cluster.move_slot(slot, (cluster.owner_of_slot(slot).unwrap() + 1) % 3).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for (key, claim) in held {
        let redis = redis.clone();
        tasks.spawn(async move { store(&redis, &key, Some(&claim), &done()).await });
    }
    tasks.join_all().await;
    assert!(eventually(Duration::from_secs(20), || looks(&cluster) > before), "the map stays old");
    store(&redis, &key("{storm}-last"), None, &running()).await;
    let looks = looks(&cluster) - before;
    assert!(looks <= 5, "{looks} looks for 300 calls that were sent on");
}

#[tokio::test]
async fn a_slot_on_its_way_answers_for_keys_on_both_sides() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let slot = cluster.slot_of("half").unwrap();
    let from = cluster.owner_of_slot(slot).unwrap();
    let to = (from + 1) % 3;
    let mut held = Vec::new();
    for i in 0..20 {
        let (key, claim) = (key(&format!("{{half}}-{i}")), running());
        store(&redis, &key, None, &claim).await;
        held.push((key, claim));
    }
    cluster.begin_move(slot, to).unwrap();
    for (key, _) in held.iter().step_by(2) {
        cluster.migrate_key(format!("taskonce:{key}"), to).unwrap();
    }
    // The script is not known there, and has to be sent whole, after an `ASKING` of its own.
    cluster.server(to).command(&["SCRIPT", "FLUSH"]).unwrap();
    for (key, claim) in &held {
        assert_eq!(*load(&redis, key).await.record, *claim, "{key}");
        let (beat, last) = (running(), done());
        store(&redis, key, Some(claim), &beat).await;
        store(&redis, key, Some(&beat), &last).await;
        let duplicate = redis.swap(key, Expected::Nothing, Next::Claim(&running())).await.unwrap();
        assert!(matches!(&duplicate, Swap::Conflict(Some(found)) if *found.record == last), "{duplicate:?}");
        // Sent again, as after a lost answer.
        store(&redis, key, Some(&beat), &last).await;
    }
    // What is new in such a slot is made where it goes.
    let (fresh, claim) = (key("{half}-fresh"), running());
    assert!(redis.load(&fresh).await.unwrap().is_none());
    store(&redis, &fresh, None, &claim).await;
    store(&redis, &fresh, Some(&claim), &done()).await;
    let there = cluster.server(to).command(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]).unwrap().int();
    assert_eq!(there, Some(11));
    cluster.end_move(slot, to).unwrap();
    for (key, _) in &held {
        assert_eq!(load(&redis, key).await.record.state, taskonce_core::record::State::Done);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_doubled_or_lost_while_slots_move_under_load() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..32 {
        let (redis, stop, count) = (redis.clone(), Arc::clone(&stop), Arc::clone(&count));
        tasks.spawn(async move {
            let mut finished = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let key = key(&format!("{{load-{}}}-{number}-{}", finished.len() % 8, finished.len()));
                let (claim, last) = (running(), done());
                store(&redis, &key, None, &claim).await;
                // Of two claims one wins.
                let other = redis.swap(&key, Expected::Nothing, Next::Claim(&running())).await.unwrap();
                assert!(matches!(&other, Swap::Conflict(Some(found)) if *found.record == claim), "{key}: {other:?}");
                store(&redis, &key, Some(&claim), &last).await;
                finished.push((key, last));
                count.fetch_add(1, Ordering::Relaxed);
            }
            finished
        });
    }
    let slots: Vec<u16> = (0..8).map(|i| cluster.slot_of(format!("load-{i}")).unwrap()).collect();
    let more = |count: &AtomicUsize| {
        let wanted = count.load(Ordering::Relaxed) + 200;
        assert!(eventually(Duration::from_secs(60), || count.load(Ordering::Relaxed) >= wanted), "tasks stand still");
    };
    more(&count);
    let (before, start) = (looks(&cluster), Instant::now());
    for round in 0..3 {
        for slot in &slots {
            cluster.move_slot(*slot, (usize::from(*slot) + round) % 3).unwrap();
        }
        more(&count);
    }
    let (looks, seconds) = (looks(&cluster) - before, start.elapsed().as_secs() + 1);
    stop.store(true, Ordering::Relaxed);
    let finished: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    for (key, last) in &finished {
        assert_eq!(*load(&redis, key).await.record, *last, "{key}");
    }
    assert!(looks <= 20 * seconds, "{looks} looks at the slots in {seconds} s");
}
