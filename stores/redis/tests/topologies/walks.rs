//! Walks over the nodes of a Cluster: they miss nothing, also while slots and keys move from node to node.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use taskonce_core::key::Key;
use taskonce_core::store::{Filter, Store};
use taskonce_redis::RedisStore;
use taskonce_testkit::RedisCluster;

use crate::support::{done, key, open, store};

/// The most pages of a walk here; a walk without an end is a failure.
const PAGES_MAX: usize = 2000;

fn patient(cluster: &RedisCluster) -> RedisStore {
    open(&format!("{}?timeout=20s", cluster.url_of(&[0])))
}

async fn fill(redis: &RedisStore, ids: impl Iterator<Item = String>) -> BTreeSet<Key> {
    let mut keys = BTreeSet::new();
    for id in ids {
        store(redis, &key(&id), None, &done()).await;
        keys.insert(key(&id));
    }
    keys
}

/// Walks in small pages, with `between` after each of them.
async fn walk(redis: &RedisStore, mut between: impl FnMut(usize)) -> BTreeSet<Key> {
    let filter = Filter { page_max: 5, ..Filter::default() };
    let (mut seen, mut cursor) = (BTreeSet::new(), None);
    for pages in 0..PAGES_MAX {
        let page = redis.scan(&filter, cursor).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| {
            row.found.unwrap();
            row.key
        }));
        cursor = page.next;
        if cursor.is_none() {
            return seen;
        }
        between(pages);
    }
    panic!("the walk does not end");
}

#[tokio::test]
async fn a_walk_shows_the_tasks_of_all_nodes() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let keys = fill(&redis, (0..100).map(|i| format!("a-{i}"))).await;
    assert_eq!(walk(&redis, |_| {}).await, keys);
}

#[tokio::test]
async fn a_walk_asks_how_the_slots_lie_when_it_begins_and_ends_and_not_for_each_page() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    fill(&redis, (0..200).map(|i| format!("a-{i}"))).await;
    let calls = || cluster.server(0).calls("cluster|nodes").unwrap();
    let (before, start, mut pages) = (calls(), Instant::now(), 0);
    walk(&redis, |_| pages += 1).await;
    let asked = calls() - before;
    assert!(pages > 20, "{pages} pages");
    assert!((2..=3 + start.elapsed().as_secs()).contains(&asked), "asked {asked} times for {pages} pages");
}

#[tokio::test]
async fn a_slot_that_nobody_serves_ends_no_walk_over_the_others() {
    let cluster = RedisCluster::start(3, 0, &["--cluster-require-full-coverage", "no"]).unwrap();
    let redis = patient(&cluster);
    let keys = fill(&redis, (0..50).map(|i| format!("a-{i}"))).await;
    let slots: Vec<u16> = keys.iter().map(|key| cluster.slot_of(format!("taskonce:{key}")).unwrap()).collect();
    let lost = (0..).find(|slot| !slots.contains(slot)).unwrap();
    for n in 0..3 {
        cluster.server(n).command(&["CLUSTER", "DELSLOTS", &lost.to_string()]).unwrap();
    }
    let start = Instant::now();
    assert_eq!(walk(&redis, |_| {}).await, keys);
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_walk_misses_no_task_whose_slot_moves_behind_it() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let keys = fill(&redis, (0..90).map(|i| format!("{{m-{}}}-{i}", i % 9))).await;
    let slots: Vec<u16> = (0..9).map(|i| cluster.slot_of(format!("m-{i}")).unwrap()).collect();
    let ports = cluster.ports();
    // In the order of addresses, as the walk goes: from the last nodes to the first, when that has been walked over.
    let mut order: Vec<usize> = (0..3).collect();
    order.sort_by_key(|n| format!("127.0.0.1:{}", ports[*n]));
    let first = order[0];
    let size = |n: usize| cluster.server(n).command(&["DBSIZE"]).unwrap().int().unwrap();
    assert!(size(first) < 90, "all tasks are at the first node");
    let seen = walk(&redis, |page| {
        if page % 8 == 7
            && let Some(slot) = slots.get(page / 8)
        {
            cluster.move_slot(*slot, first).unwrap();
        }
    })
    .await;
    assert_eq!(keys.difference(&seen).count(), 0, "missed");
}

#[tokio::test]
async fn a_walk_misses_no_task_of_a_slot_that_is_on_its_way_all_the_time() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = patient(&cluster);
    let slot = cluster.slot_of("way").unwrap();
    let ports = cluster.ports();
    let mut order: Vec<usize> = (0..3).collect();
    order.sort_by_key(|n| format!("127.0.0.1:{}", ports[*n]));
    // From the last node that is visited to the first.
    let (first, last) = (order[0], order[2]);
    cluster.move_slot(slot, last).unwrap();
    let mut keys = fill(&redis, (0..30).map(|i| format!("{{way}}-{i}"))).await;
    let moving: Vec<Key> = keys.iter().cloned().collect();
    keys.extend(fill(&redis, (0..60).map(|i| format!("rest-{i}"))).await);
    cluster.begin_move(slot, first).unwrap();
    let mut to_move = moving.iter();
    let seen = walk(&redis, |page| {
        // Not before the first node has been walked over in part.
        if page >= 4 {
            for key in to_move.by_ref().take(3) {
                cluster.migrate_key(format!("taskonce:{key}"), first).unwrap();
            }
        }
    })
    .await;
    assert!(to_move.len() < 30, "no key moved");
    assert_eq!(keys.difference(&seen).count(), 0, "missed");
}
