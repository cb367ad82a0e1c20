//! Walks over many keys: what they ask of the server, and a table that is resized under them.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::key::{Handler, Key, Name};
use taskonce_core::record::{Output, State};
use taskonce_core::store::{Cursor, Filter, Store};
use taskonce_redis::RedisStore;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{Proxy, RedisServer, eventually};

use crate::support::{done, key, open, record, running, store};

/// The most pages of a walk here; a walk without an end is a failure.
const PAGES_MAX: usize = 20_000;
/// How the keys begin that come and go to have the server resize its table, and how many there are.
const PASSING: &str = "default/passing@1/";
const PASSING_COUNT: usize = 4000;

/// Puts copies of what one key holds under `count` ids of a handler.
fn copy_many(server: &RedisServer, from: &Key, to: &str, count: usize) {
    let script = "local value = redis.call('GET', KEYS[1]) \
        for number = 1, ARGV[2] do redis.call('SET', ARGV[1] .. number, value, 'PX', 3600000) end";
    let (from, to) = (format!("taskonce:{from}"), format!("taskonce:{to}"));
    server.command(&["EVAL", script, "1", &from, &to, &count.to_string()]).unwrap();
}

/// Walks to the end: the keys that were seen, how many rows there were, and how many pages.
async fn walk(redis: &RedisStore, filter: &Filter) -> (BTreeSet<Key>, usize, usize) {
    let (mut seen, mut rows, mut cursor) = (BTreeSet::new(), 0, None);
    for pages in 1..=PAGES_MAX {
        let page = redis.scan(filter, cursor).await.unwrap();
        assert!(page.rows.len() <= filter.page());
        rows += page.rows.len();
        seen.extend(page.rows.into_iter().map(|row| row.key));
        cursor = page.next;
        if cursor.is_none() {
            return (seen, rows, pages);
        }
    }
    panic!("the walk does not end");
}

#[tokio::test]
async fn a_narrow_walk_over_many_keys_takes_few_round_trips() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&format!("{}/0?timeout=20s", proxy.url()));
    store(&redis, &key("done"), None, &done()).await;
    copy_many(&server, &key("done"), "default/other@1/", 20_000);
    let wanted: BTreeSet<Key> = ["a", "b", "c"].map(|id| Handler::new("rare", "1").unwrap().key(id).unwrap()).into();
    for key in &wanted {
        store(&redis, key, None, &record(State::Dead)).await;
    }
    for page_max in [1, 100] {
        let before = proxy.round_trips();
        let by_name = Filter { handler: Name::new("rare").ok(), page_max, ..Filter::default() };
        let (seen, rows, pages) = walk(&redis, &by_name).await;
        let trips = proxy.round_trips() - before;
        assert_eq!((&seen, rows), (&wanted, 3));
        assert!(trips <= 40 && pages <= 40, "{trips} round trips, {pages} pages of {page_max}");

        // All names match, few records do.
        let before = proxy.round_trips();
        let by_state = Filter { states: vec![State::Dead], page_max, ..Filter::default() };
        let (seen, rows, pages) = walk(&redis, &by_state).await;
        let trips = proxy.round_trips() - before;
        assert_eq!((&seen, rows), (&wanted, 3));
        assert!(trips <= 300 && pages <= 40, "{trips} round trips, {pages} pages of {page_max}");
    }
}

#[tokio::test]
async fn a_broad_walk_is_made_of_well_filled_pages() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&format!("{}/0?timeout=20s", proxy.url()));
    store(&redis, &key("done"), None, &done()).await;
    // Small pages take many round trips, and are as well filled with few keys.
    for (count, page_max, trips_max) in [(1000, 1, 6), (1000, 5, 8), (10_000, 100, 12), (10_000, 1000, 16)] {
        copy_many(&server, &key("done"), "default/other@1/", count);
        let before = proxy.round_trips();
        let (seen, rows, pages) = walk(&redis, &Filter { page_max, ..Filter::default() }).await;
        let trips = proxy.round_trips() - before;
        assert_eq!((seen.len(), rows), (count + 1, count + 1));
        assert!(pages * page_max < (count + 1) * 2, "{pages} pages of {page_max}");
        assert!(trips <= pages as u64 * trips_max, "{trips} round trips for {pages} pages of {page_max}");
    }
}

/// The server's table grows and shrinks between pages, and with it what a `SCAN` answers. Records that are there all the
/// time are seen, whatever page a step of the walk was divided at.
#[tokio::test]
async fn a_walk_misses_nothing_while_the_table_is_resized() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let staying: BTreeSet<Key> = (0..300).map(|number| key(&format!("staying-{number}"))).collect();
    for key in &staying {
        store(&redis, key, None, &running()).await;
    }
    let mut divided = 0;
    for page_max in [1, 50] {
        for every in [1, 40] {
            let filter = Filter { id_prefix: "staying-".into(), page_max, ..Filter::default() };
            let (mut seen, mut cursor) = (BTreeSet::new(), None::<Cursor>);
            let mut ended = false;
            for round in 0..PAGES_MAX {
                let page = redis.scan(&filter, cursor).await.unwrap();
                seen.extend(page.rows.into_iter().map(|row| row.key));
                cursor = page.next;
                let Some(Cursor(text)) = &cursor else {
                    ended = true;
                    break;
                };
                divided += usize::from(text.contains('/'));
                match round % (2 * every) {
                    0 => copy_many(&server, &key("staying-1"), PASSING, PASSING_COUNT),
                    at if at == every => remove_passing(&server, PASSING_COUNT),
                    _ => {}
                }
            }
            assert!(ended, "pages of {page_max} have no end");
            assert_eq!(seen, staying, "pages of {page_max}, resized every {every}");
            remove_passing(&server, PASSING_COUNT);
        }
    }
    assert!(divided > 0, "no step of a walk was divided between pages");
}

/// A step of a walk is divided between two pages while the table is large; when the table is small, the same step covers
/// more, and what it covers besides was on no page yet.
#[tokio::test]
async fn a_divided_step_hides_nothing_when_the_table_becomes_smaller() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&format!("{}/0?timeout=20s", server.url()));
    store(&redis, &key("staying-1"), None, &running()).await;
    copy_many(&server, &key("staying-1"), "default/charge@1/staying-", 2000);
    let staying: BTreeSet<Key> = (1..=2000).map(|number| key(&format!("staying-{number}"))).collect();
    copy_many(&server, &key("staying-1"), PASSING, 5 * PASSING_COUNT);
    let large = table_bytes(&server);

    // Every place at which a step is divided, with what pages have shown until there.
    let filter = Filter { id_prefix: "staying-".into(), page_max: 1, ..Filter::default() };
    let (mut places, mut seen, mut cursor) = (Vec::new(), BTreeSet::new(), None);
    for _ in 0..PAGES_MAX {
        let page = redis.scan(&filter, cursor).await.unwrap();
        seen.extend(page.rows.into_iter().map(|row| row.key));
        cursor = page.next;
        let Some(cursor) = &cursor else { break };
        if cursor.0.contains('/') {
            places.push((cursor.clone(), seen.clone()));
        }
    }
    assert_eq!((cursor, &seen), (None, &staying));
    assert!(places.len() > 20, "only {} steps were divided", places.len());

    remove_passing(&server, 5 * PASSING_COUNT);
    assert!(eventually(Duration::from_secs(20), || table_bytes(&server) * 4 <= large), "the table stays large");
    for (cursor, mut seen) in places {
        let mut next = Some(cursor.clone());
        for _ in 0..PAGES_MAX {
            let page = redis.scan(&Filter { page_max: 100, ..filter.clone() }, next).await.unwrap();
            seen.extend(page.rows.into_iter().map(|row| row.key));
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        assert!(next.is_none(), "the walk from {cursor:?} has no end");
        let missed: Vec<_> = staying.difference(&seen).collect();
        assert!(missed.is_empty(), "the walk from {cursor:?} misses {missed:?}");
    }
}

/// How many bytes the server's table of keys takes, without the keys.
fn table_bytes(server: &RedisServer) -> i64 {
    fn find(reply: &Reply) -> Option<i64> {
        let Reply::Array(items) = reply else { return None };
        let named =
            items.windows(2).find(|pair| matches!(&pair[0], Reply::Bulk(name) if name == b"overhead.hashtable.main"));
        named.and_then(|pair| pair[1].int()).or_else(|| items.iter().find_map(find))
    }
    find(&server.command(&["MEMORY", "STATS"]).unwrap()).unwrap()
}

/// Removes what passes, so that the server makes its table small again.
fn remove_passing(server: &RedisServer, count: usize) {
    let script = "for number = 1, ARGV[2] do redis.call('DEL', ARGV[1] .. number) end";
    server.command(&["EVAL", script, "0", &format!("taskonce:{PASSING}"), &count.to_string()]).unwrap();
}

#[tokio::test]
async fn long_outputs_make_short_pages() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&format!("{}/0?timeout=20s", server.url()));
    let mut long = done();
    long.output = Output::kept("application/octet-stream", vec![7; 1 << 20]);
    store(&redis, &key("long"), None, &long).await;
    copy_many(&server, &key("long"), "default/charge@1/", 100);
    let filter = Filter { page_max: 1000, ..Filter::default() };
    let (seen, rows, pages) = walk(&redis, &filter).await;
    assert_eq!((seen.len(), rows), (101, 101));
    assert!((6..=30).contains(&pages), "{pages} pages of 101 MiB");
}
