//! Lists on a Cluster: on other nodes than the records that they name.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::key::Key;
use taskonce_core::record::{Record, State, Token};
use taskonce_core::store::{Filter, Store, Walk};
use taskonce_redis::RedisStore;
use taskonce_testkit::{RedisCluster, eventually};

use crate::support::{done, key, open, record, store};

const RARE: [State; 4] = [State::Running, State::Waiting, State::Dead, State::Parked];

async fn ids(redis: &RedisStore, states: &[State], walk: Walk) -> BTreeSet<String> {
    let filter = Filter { states: states.to_vec(), walk, page_max: 7, ..Filter::default() };
    let (mut ids, mut cursor) = (BTreeSet::new(), None);
    for _ in 0..1000 {
        let page = redis.scan(&filter, cursor).await.unwrap();
        ids.extend(page.rows.into_iter().map(|row| row.key.id().to_owned()));
        cursor = page.next;
        if cursor.is_none() {
            return ids;
        }
    }
    panic!("the walk has no end");
}

#[tokio::test]
async fn a_list_names_tasks_of_all_nodes_and_a_walk_over_all_nodes_mends_it() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    let redis = open(&format!("{}?timeout=20s", cluster.url_of(&[0])));
    for number in 0..30 {
        for state in RARE {
            let record = Record { state_age: Duration::from_secs(10), ..record(state) };
            store(&redis, &key(&format!("{state}-{number}")), None, &record).await;
        }
        store(&redis, &key(&format!("done-{number}")), None, &done()).await;
    }
    let wanted = |state: State| (0..30).map(|number| format!("{state}-{number}")).collect::<BTreeSet<_>>();
    for state in RARE {
        assert_eq!(ids(&redis, &[state], Walk::Listed).await, wanted(state));
    }
    assert_eq!(ids(&redis, &RARE, Walk::Listed).await.len(), 120);
    for state in RARE {
        let name = format!("taskonce:~list:{state}");
        cluster.server(cluster.server_of(&name).unwrap()).command(&["DEL", &name]).unwrap();
        assert_eq!(ids(&redis, &[state], Walk::Listed).await, BTreeSet::new());
    }
    assert_eq!(ids(&redis, &[], Walk::All).await.len(), 150);
    for state in RARE {
        assert_eq!(ids(&redis, &[state], Walk::Listed).await, wanted(state));
    }
}

/// A Cluster of three whose slots are served while another's are not.
fn cluster() -> RedisCluster {
    RedisCluster::start(3, 0, &["--cluster-require-full-coverage", "no"]).unwrap()
}

fn list(state: State) -> String {
    format!("taskonce:~list:{state}")
}

/// Running tasks that lie on other nodes than this one.
async fn elsewhere(cluster: &RedisCluster, redis: &RedisStore, node: usize, count: usize) -> Vec<(Key, Record)> {
    let name = fastrand::u32(..);
    let keys = (0..60).map(|number| key(&format!("id-{name}-{number}")));
    let mut tasks = Vec::new();
    for key in keys.filter(|key| cluster.server_of(format!("taskonce:{key}")).unwrap() != node).take(count) {
        let first = record(State::Running);
        store(redis, &key, None, &first).await;
        tasks.push((key, first));
    }
    assert_eq!(tasks.len(), count);
    tasks
}

fn end(before: &Record, state: State) -> Record {
    Record { state, token: Token::from(fastrand::u128(..)), ..before.clone() }
}

/// How many entries a list has; none while its node does not answer for it.
fn entries(cluster: &RedisCluster, node: usize, state: State) -> i64 {
    cluster.server(node).command(&["ZCARD", &list(state)]).unwrap().int().unwrap_or(0)
}

/// The node with a list is stopped: what others hold is written all the same, well before a call's end.
#[tokio::test]
async fn a_list_whose_node_does_not_answer_holds_up_no_write_for_long() {
    let cluster = cluster();
    let redis = open(&format!("{}?timeout=20s", cluster.url()));
    let node = cluster.server_of(list(State::Dead)).unwrap();
    let tasks = elsewhere(&cluster, &redis, node, 3).await;
    // A connection to that node.
    assert_eq!(ids(&redis, &[State::Dead], Walk::Listed).await, BTreeSet::new());
    cluster.server(node).stop().unwrap();
    for (key, first) in &tasks {
        let start = Instant::now();
        store(&redis, key, Some(first), &end(first, State::Dead)).await;
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
    cluster.server(node).cont().unwrap();
}

/// Each costs as much as without a list, and so does looking who serves it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_and_failures_do_not_wait_for_a_list_whose_node_is_away() {
    let cluster = cluster();
    let redis = open(&format!("{}?timeout=5s", cluster.url()));
    for state in [State::Running, State::Waiting] {
        let node = cluster.server_of(list(state)).unwrap();
        let tasks = elsewhere(&cluster, &redis, node, 20).await;
        let looks = || -> u64 {
            let others = (0..cluster.size()).filter(|number| *number != node);
            others.map(|number| cluster.server(number).calls("cluster|slots").unwrap()).sum()
        };
        cluster.server(node).stop().unwrap();
        let before = looks();
        let start = Instant::now();
        for (key, first) in &tasks {
            let state_age = Duration::from_secs(10);
            store(&redis, key, Some(first), &Record { state_age, ..end(first, state) }).await;
        }
        // A tenth of a call's time each would be 10 s.
        assert!(start.elapsed() < Duration::from_secs(5), "{state}: {:?}", start.elapsed());
        let looks = looks() - before;
        assert!(looks <= 150, "{state}: {looks} looks at the slots");
        cluster.server(node).cont().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_failed_while_the_node_of_its_list_was_away_is_listed_when_it_is_back() {
    let mut cluster = cluster();
    let redis = open(&format!("{}?timeout=2s", cluster.url()));
    for state in [State::Waiting, State::Dead, State::Parked] {
        let node = cluster.server_of(list(state)).unwrap();
        let tasks = elsewhere(&cluster, &redis, node, 3).await;
        cluster.kill(node);
        for (key, first) in &tasks {
            store(&redis, key, Some(first), &end(first, state)).await;
        }
        // What was redriven meanwhile is not announced any more.
        let (redriven, first) = &tasks[2];
        let before = redis.load(redriven).await.unwrap().unwrap().record;
        assert_ne!(before.token, first.token);
        store(&redis, redriven, Some(&before), &end(&before, State::Done)).await;
        cluster.restart(node).unwrap();
        let listed = || entries(&cluster, node, state) >= 2;
        assert!(eventually(Duration::from_secs(60), listed), "{state}: {} entries", entries(&cluster, node, state));
        let wanted: BTreeSet<String> = tasks[..2].iter().map(|(key, _)| key.id().to_owned()).collect();
        assert_eq!(ids(&redis, &[state], Walk::Listed).await, wanted);
    }
}

/// A process that lives for one task has no connection to the node of the list, and ends with the call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_died_is_listed_by_the_end_of_the_call_though_the_node_of_the_list_is_slow() {
    let cluster = cluster();
    let (near, url) = (open(&format!("{}?timeout=20s", cluster.url())), format!("{}?timeout=4s", cluster.url()));
    for state in [State::Dead, State::Parked] {
        let node = cluster.server_of(list(state)).unwrap();
        let (key, first) = elsewhere(&cluster, &near, node, 1).await.remove(0);
        let (url, next, at) = (url.clone(), end(&first, state), key.clone());
        cluster.server(node).stop().unwrap();
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { store(&open(&url), &at, Some(&first), &next).await });
        });
        // sleeps: longer than a call waits for what is worth no wait
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!process.is_finished(), "{state}: the call did not wait");
        cluster.server(node).cont().unwrap();
        process.join().unwrap();
        assert_eq!(entries(&cluster, node, state), 1, "{state}");
    }
}

/// Each row is there: what is on the node that is away with the reason.
#[tokio::test]
async fn a_list_goes_on_where_the_node_of_a_record_is_away() {
    let mut cluster = cluster();
    let redis = open(&format!("{}?timeout=2s", cluster.url()));
    let node = cluster.server_of(list(State::Dead)).unwrap();
    let away = (node + 1) % 3;
    let mut owners = BTreeMap::new();
    for number in 0..40 {
        let key = key(&format!("dead-{number}"));
        store(&redis, &key, None, &record(State::Dead)).await;
        owners.insert(key.id().to_owned(), cluster.server_of(format!("taskonce:{key}")).unwrap());
    }
    cluster.kill(away);
    let filter = Filter { states: vec![State::Dead], walk: Walk::Listed, page_max: 25, ..Filter::default() };
    let (mut seen, mut cursor, mut pages) = (BTreeSet::new(), None, 0);
    loop {
        let start = Instant::now();
        let page = redis.scan(&filter, cursor).await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        for row in page.rows {
            match row.found {
                Ok(_) => assert_ne!(owners[row.key.id()], away, "{}", row.key),
                Err(error) => {
                    assert_eq!(owners[row.key.id()], away, "{error}");
                    assert!([ErrorKind::Unreachable, ErrorKind::TimedOut].contains(&error.kind()), "{error:?}");
                }
            }
            seen.insert(row.key.id().to_owned());
        }
        (cursor, pages) = (page.next, pages + 1);
        if cursor.is_none() {
            break;
        }
        assert!(pages < 40, "the walk has no end");
    }
    assert_eq!(seen.len(), 40);
    // Nothing was removed for it.
    assert_eq!(entries(&cluster, node, State::Dead), 40);
}
