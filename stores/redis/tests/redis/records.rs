//! What lies on the server: keys, expiry, ages, and what is not a record.

use std::collections::HashMap;
use std::time::Duration;

use taskonce_core::key::Name;
use taskonce_core::record::{Output, PARKED_LIFE, State, Token};
use taskonce_core::store::{Cursor, Expected, Filter, Memory, Next, Purged, Store, Swap};
use taskonce_core::{ErrorKind, codec};
use taskonce_redis::RedisStore;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{RedisServer, eventually};

use crate::support::{RETENTION, done, key, load, open, record, running, store};

#[tokio::test]
async fn a_record_comes_back_as_it_was_written() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let mut kept = done();
    kept.output = Output::kept("application/octet-stream", (0..=255).cycle().take(1 << 20).collect::<Vec<u8>>());
    assert_eq!(redis.load(&key("a")).await.unwrap(), None);
    store(&redis, &key("a"), None, &kept).await;
    assert_eq!(*load(&redis, &key("a")).await.record, kept);
    assert_eq!(redis.memory(), Memory::MayForget);
    assert_eq!(redis.purge(&Filter::default()).await.unwrap(), Purged::default());
}

#[tokio::test]
async fn the_expiry_is_the_retention_and_never_the_lease() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let pttl = |id: &str| server.command(&["PTTL", &format!("taskonce:{}", key(id))]).unwrap().int().unwrap();
    let near = |left: i64, life: Duration| (0..5000).contains(&(life.as_millis() as i64 - left));
    for state in State::ALL {
        store(&redis, &key(state.name()), None, &record(state)).await;
        let life = if state == State::Parked { PARKED_LIFE } else { RETENTION };
        assert!(near(pttl(state.name()), life), "{state}: {} ms", pttl(state.name()));
    }
    let (first, mut second) = (running(), running());
    second.retention = RETENTION * 3;
    store(&redis, &key("renewed"), None, &first).await;
    store(&redis, &key("renewed"), Some(&first), &second).await;
    assert!(near(pttl("renewed"), RETENTION * 3));
}

#[tokio::test]
async fn an_absurd_retention_is_stored_and_ages() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    for retention in [Duration::ZERO, Duration::MAX] {
        let mut first = running();
        first.retention = retention;
        let swap = redis.swap(&key("odd"), Expected::Nothing, Next::Claim(&first)).await.unwrap();
        assert!(matches!(swap, Swap::Stored(_)));
        let odd = key("odd");
        if retention.is_zero() {
            assert!(eventually(Duration::from_secs(5), || server.command(&["DBSIZE"]).unwrap().int() == Some(0)));
            assert_eq!(redis.load(&odd).await.unwrap(), None);
        } else {
            assert!((0..5000).contains(&redis.load(&odd).await.unwrap().unwrap().age.millis));
        }
    }
}

#[tokio::test]
async fn age_is_the_servers_own_and_grows_from_the_last_write() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let (first, second) = (running(), running());
    store(&redis, &key("a"), None, &first).await;
    let name = format!("taskonce:{}", key("a"));
    // As if a minute had passed on the server.
    server.command(&["PEXPIRE", &name, &(RETENTION.as_millis() - 60_000).to_string()]).unwrap();
    let age = load(&redis, &key("a")).await.age.millis;
    assert!((60_000..65_000).contains(&age), "{age}");
    let conflict = redis.swap(&key("a"), Expected::Nothing, Next::Claim(&running())).await.unwrap();
    let Swap::Conflict(Some(found)) = conflict else { panic!("{conflict:?}") };
    assert!((60_000..65_000).contains(&found.age.millis));
    store(&redis, &key("a"), Some(&first), &second).await;
    assert!((0..5000).contains(&load(&redis, &key("a")).await.age.millis));
}

#[tokio::test]
async fn a_key_made_permanent_by_hand_is_held_and_not_free() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    store(&redis, &key("a"), None, &running()).await;
    server.command(&["PERSIST", &format!("taskonce:{}", key("a"))]).unwrap();
    assert_eq!(load(&redis, &key("a")).await.age.millis, 0);
}

#[tokio::test]
async fn a_swap_needs_the_token_that_is_there() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let (first, second, third) = (running(), running(), done());
    store(&redis, &key("a"), None, &first).await;
    // The same swap again is recognised.
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &second).await;
    store(&redis, &key("a"), Some(&first), &second).await;
    let late = redis.swap(&key("a"), Expected::Record(&first), Next::Keep(&third)).await.unwrap();
    assert!(matches!(&late, Swap::Conflict(Some(found)) if *found.record == second), "{late:?}");
    let absent = redis.swap(&key("b"), Expected::Record(&first), Next::Keep(&third)).await.unwrap();
    assert_eq!(absent, Swap::Conflict(None));
    assert_eq!(redis.load(&key("b")).await.unwrap(), None);
}

#[tokio::test]
async fn erasing_needs_the_token_too() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let first = done();
    assert!(matches!(redis.swap(&key("a"), Expected::Nothing, Next::Erase).await.unwrap(), Swap::Stored(_)));
    store(&redis, &key("a"), None, &first).await;
    assert!(matches!(redis.swap(&key("a"), Expected::Nothing, Next::Erase).await.unwrap(), Swap::Conflict(Some(_))));
    let wrong = redis.swap(&key("a"), Expected::Token(Token::from(1)), Next::Erase).await.unwrap();
    assert!(matches!(wrong, Swap::Conflict(Some(_))));
    assert!(matches!(redis.swap(&key("a"), Expected::Record(&first), Next::Erase).await.unwrap(), Swap::Stored(_)));
    assert_eq!(redis.swap(&key("a"), Expected::Record(&first), Next::Erase).await.unwrap(), Swap::Conflict(None));
    assert_eq!(redis.load(&key("a")).await.unwrap(), None);
}

#[tokio::test]
async fn what_is_no_record_is_an_error_that_names_its_key() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let name = |id: &str| format!("taskonce:{}", key(id));
    server.command(&["SET", &name("short"), "x"]).unwrap();
    server.command(&["SET", &name("empty"), ""]).unwrap();
    server.command(&["SET", &name("garbage"), &"g".repeat(200)]).unwrap();
    server.command(&["RPUSH", &name("list"), "x"]).unwrap();
    server.command(&["HSET", &name("hash"), "f", "x"]).unwrap();
    for id in ["short", "empty", "garbage", "list", "hash"] {
        let before = server.command(&["TYPE", &name(id)]).unwrap();
        for error in [
            redis.load(&key(id)).await.map(drop).unwrap_err(),
            redis.swap(&key(id), Expected::Nothing, Next::Claim(&running())).await.map(drop).unwrap_err(),
            redis.swap(&key(id), Expected::Token(Token::from(1)), Next::Keep(&running())).await.map(drop).unwrap_err(),
            redis.swap(&key(id), Expected::Token(Token::from(1)), Next::Erase).await.map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{id}: {error:?}");
            assert!(error.to_string().contains(key(id).as_str()), "{error}");
        }
        assert_eq!(server.command(&["TYPE", &name(id)]).unwrap(), before, "{id} was overwritten");
    }
    assert_eq!(server.command(&["GET", &name("short")]).unwrap().text(), "x");
}

async fn walk(store: &RedisStore, filter: &Filter) -> HashMap<String, bool> {
    let mut rows = HashMap::new();
    let mut cursor: Option<Cursor> = None;
    for _ in 0..10_000 {
        let page = store.scan(filter, cursor).await.unwrap();
        assert!(page.rows.len() <= filter.page());
        rows.extend(page.rows.into_iter().map(|row| (row.key.to_string(), row.found.is_ok())));
        cursor = page.next;
        if cursor.is_none() {
            return rows;
        }
    }
    panic!("the walk does not end");
}

#[tokio::test]
async fn a_walk_sees_every_record_once_the_filter_admits_it() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let other = taskonce_core::key::Handler::within("shop", "mail", "2").unwrap();
    for i in 0..1500 {
        store(&redis, &key(&format!("[{i}]*")), None, &if i % 3 == 0 { done() } else { running() }).await;
    }
    for i in 0..20 {
        store(&redis, &other.key(&format!("x/{i}")).unwrap(), None, &record(State::Parked)).await;
    }
    server.command(&["SET", "taskonce:no key of ours", "x"]).unwrap();
    server.command(&["SET", &format!("taskonce:{}", key("broken")), "x"]).unwrap();
    server.command(&["RPUSH", &format!("taskonce:{}", key("list")), "x"]).unwrap();
    for page_max in [1, 7, 1000] {
        let filter = Filter { namespace: Name::new("shop").ok(), page_max, ..Filter::default() };
        assert_eq!(walk(&redis, &filter).await.len(), 20, "pages of {page_max}");
    }
    let all = walk(&redis, &Filter::default()).await;
    assert_eq!((all.len(), all.values().filter(|whole| !**whole).count()), (1522, 2));
    let finished = Filter { states: vec![State::Done], handler: Name::new("charge").ok(), ..Filter::default() };
    assert_eq!(walk(&redis, &finished).await.len(), 502);
    let prefixed = Filter { id_prefix: "[14".into(), ..Filter::default() };
    assert_eq!(walk(&redis, &prefixed).await.len(), 111);
    let old = Filter { age_min: Duration::from_secs(600), ..Filter::default() };
    assert_eq!(walk(&redis, &old).await.len(), 2);
}

#[tokio::test]
async fn prefixes_and_databases_keep_stores_apart() {
    let server = RedisServer::start(&[]).unwrap();
    let stores = [
        open(&server.url()),
        open(&format!("{}?prefix=other:", server.url())),
        open(&format!("{}?prefix=task*:", server.url())),
        open(&format!("{}/3", server.url())),
    ];
    for redis in &stores {
        assert_eq!(redis.load(&key("a")).await.unwrap(), None);
        store(redis, &key("a"), None, &running()).await;
        assert_eq!(walk(redis, &Filter::default()).await.len(), 1);
    }
    assert_ne!(server.command(&["GET", &format!("other:{}", key("a"))]).unwrap(), Reply::Nil);
    assert_eq!(server.command(&["DBSIZE"]).unwrap().int(), Some(3));
}

#[tokio::test]
async fn a_done_record_fits_the_memory_it_may_take() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    const COUNT: usize = 20_000;
    let used = || -> i64 {
        let info = server.command(&["INFO", "memory"]).unwrap().text();
        info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().trim().parse().unwrap()
    };
    let id = |i: usize| format!("{i:034}");
    assert_eq!(format!("taskonce:{}", key(&id(0))).len(), 60);
    let mut plain = server.connect().unwrap();
    let before = used();
    for i in 0..COUNT {
        plain.ask(&["SET", &format!("bareones:{}", key(&id(i))), "x", "PX", "1209600000"]).unwrap();
    }
    let bare = used() - before;
    plain.ask(&["FLUSHALL"]).unwrap();
    store(&redis, &key("warm"), None, &done()).await;
    let before = used();
    let mut record = done();
    record.retention = Duration::from_secs(14 * 86_400);
    record.output_retention = Duration::from_secs(86_400);
    for i in 0..COUNT {
        record.token = Token::from(i as u128);
        store(&redis, &key(&id(i)), None, &record).await;
    }
    let ratio = (used() - before) as f64 / bare as f64;
    // An allocator with other size classes than jemalloc's wastes other amounts.
    let jemalloc = server.command(&["INFO", "memory"]).unwrap().text().contains("mem_allocator:jemalloc");
    let limit = if jemalloc { 1.6 } else { 2.0 };
    assert!(ratio <= limit, "{ratio:.3} times a bare key; the record has {} bytes", codec::encode(&record).len());
}
