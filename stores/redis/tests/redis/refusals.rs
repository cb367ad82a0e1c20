//! Servers that refuse: passwords, permissions, replicas, full memory, evicting policies, old versions, other programs.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_redis::RedisStore;
use taskonce_testkit::{RedisServer, eventually, resp};

use crate::support::{claim_error, done, key, load, open, running, store};

#[tokio::test]
async fn a_wrong_password_is_denied_and_never_shown() {
    let server = RedisServer::start(&["--requirepass", "right"]).unwrap();
    let port = server.port();
    for url in [
        format!("redis://:hunter2@127.0.0.1:{port}"),
        format!("redis://ada:hunter2@127.0.0.1:{port}"),
        format!("redis://127.0.0.1:{port}"),
    ] {
        let error = claim_error(&open(&url), "a").await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(!format!("{error:?} {error}").contains("hunter2"));
    }
    store(&open(&server.url()), &key("a"), None, &running()).await;
}

#[tokio::test]
async fn a_user_with_few_permissions_can_do_everything() {
    let server = RedisServer::start(&[]).unwrap();
    let rights = "+get +set +del +getrange +pexpire +pttl +evalsha +eval +scan +echo \
                  +zadd +zrem +zscore +zcard +zrange +zrangebyscore +zscan +time";
    let mut words = vec!["ACL", "SETUSER", "ada", "on", ">p:w", "~taskonce:*"];
    words.extend(rights.split(' '));
    server.command(&words).unwrap();
    let redis = open(&format!("redis://ada:p%3Aw@127.0.0.1:{}", server.port()));
    let (first, second) = (running(), done());
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &second).await;
    assert_eq!(*load(&redis, &key("a")).await.record, second);
    assert_eq!(redis.scan(&taskonce_core::store::Filter::default(), None).await.unwrap().rows.len(), 1);
    let findings = redis.examine().await;
    assert!(findings.iter().any(|finding| finding.subject == "eviction policy" && finding.text.contains("may not")));
    let third = crate::support::record(taskonce_core::record::State::Dead);
    store(&redis, &key("b"), None, &third).await;
    let listed = taskonce_core::store::Filter {
        states: vec![third.state],
        walk: taskonce_core::store::Walk::Listed,
        ..taskonce_core::store::Filter::default()
    };
    assert_eq!(redis.scan(&listed, None).await.unwrap().rows.len(), 1);
    assert!(findings.iter().any(|finding| finding.subject == "lists" && finding.hint.is_empty()), "{findings:?}");
    assert!(matches!(redis.swap(&key("a"), Expected::Record(&second), Next::Erase).await.unwrap(), Swap::Stored(_)));

    server.command(&["ACL", "SETUSER", "ada", "-evalsha"]).unwrap();
    let error = redis.swap(&key("a"), Expected::Record(&first), Next::Keep(&second)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("evalsha") && error.hint().contains("docs/redis/README.md"), "{error:?}");
}

#[tokio::test]
async fn a_read_only_replica_is_said_to_be_one() {
    let primary = RedisServer::start(&[]).unwrap();
    let port = primary.port().to_string();
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port]).unwrap();
    let first = running();
    store(&open(&primary.url()), &key("a"), None, &first).await;
    let redis = open(&replica.url());
    let synced = || replica.command(&["INFO", "replication"]).unwrap().text().contains("master_link_status:up");
    assert!(eventually(Duration::from_secs(20), synced));
    assert_eq!(claim_error(&redis, "b").await.kind(), ErrorKind::ReadOnly);
    let error = redis.swap(&key("a"), Expected::Record(&first), Next::Keep(&done())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
    // Promoted behind the same address, it works at once.
    replica.command(&["REPLICAOF", "NO", "ONE"]).unwrap();
    store(&redis, &key("b"), None, &running()).await;
}

#[tokio::test]
async fn a_full_memory_refuses_claims_and_still_takes_completions() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]).unwrap();
    let redis = open(&server.url());
    let first = running();
    store(&redis, &key("held"), None, &first).await;
    // Less than the empty server takes.
    server.command(&["CONFIG", "SET", "maxmemory", "100kb"]).unwrap();
    let error = claim_error(&redis, "new").await;
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    let (beat, last) = (running(), done());
    store(&redis, &key("held"), Some(&first), &beat).await;
    store(&redis, &key("held"), Some(&beat), &last).await;
    assert_eq!(*load(&redis, &key("held")).await.record, last);
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    store(&redis, &key("new"), None, &running()).await;
}

#[tokio::test]
async fn an_evicting_server_is_refused_unless_accepted() {
    for policy in ["allkeys-lru", "volatile-ttl"] {
        let server = RedisServer::start(&["--maxmemory", "64mb", "--maxmemory-policy", policy]).unwrap();
        let redis = open(&server.url());
        let error = claim_error(&redis, "a").await;
        assert_eq!(error.kind(), ErrorKind::Evicting, "{error:?}");
        assert!(error.to_string().contains(policy) && error.hint().contains("noeviction"), "{error:?}");
        assert_eq!(redis.load(&key("a")).await.unwrap_err().kind(), ErrorKind::Evicting);
        assert_eq!(server.command(&["DBSIZE"]).unwrap().int(), Some(0));
        store(&open(&format!("{}?eviction=accept", server.url())), &key("a"), None, &running()).await;
        // Mended, it works without a restart of the worker.
        server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
        store(&redis, &key("b"), None, &running()).await;
    }
    let harmless = RedisServer::start(&["--maxmemory", "0", "--maxmemory-policy", "allkeys-lru"]).unwrap();
    store(&open(&harmless.url()), &key("a"), None, &running()).await;
}

#[tokio::test]
async fn a_database_number_that_is_not_there_is_named() {
    let server = RedisServer::start(&["--databases", "4"]).unwrap();
    store(&open(&format!("{}/3", server.url())), &key("a"), None, &running()).await;
    let error = claim_error(&open(&format!("{}/4", server.url())), "a").await;
    assert_eq!(error.kind(), ErrorKind::BadUrl, "{error:?}");
    assert!(error.to_string().contains("/4"), "{error}");
}

#[tokio::test]
async fn a_server_without_room_for_clients_is_unreachable_for_now() {
    let server = RedisServer::start(&["--maxclients", "1"]).unwrap();
    let held = server.connect().unwrap();
    let mut held = held;
    held.ask(&["PING"]).unwrap();
    let redis = open(&server.url());
    let error = claim_error(&redis, "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    drop(held);
    crate::support::until_claimed(&redis, Duration::from_secs(5)).await;
}

/// Answers the first command of a connection with the first of `replies`, and so on; the last one serves for the rest,
/// and an empty one closes the connection.
fn impostor(replies: &'static [&'static [u8]]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let serve = move |mut client: TcpStream| {
        let (mut buffer, mut unread, mut count) = (vec![0; 1 << 16], Vec::new(), 0);
        while let Ok(read @ 1..) = client.read(&mut buffer) {
            unread.extend_from_slice(&buffer[..read]);
            while let Some(length) = resp::frame_length(&unread) {
                unread.drain(..length);
                let reply = replies[count.min(replies.len() - 1)];
                count += 1;
                if reply.is_empty() || client.write_all(reply).is_err() {
                    return;
                }
            }
        }
    };
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve(client));
        }
    });
    url
}

#[tokio::test]
async fn what_is_not_redis_is_told_apart_from_what_is_away() {
    let http = claim_error(&open(&impostor(&[b"HTTP/1.1 400 Bad Request\r\n\r\n"])), "a").await;
    assert_eq!(http.kind(), ErrorKind::Protocol, "{http:?}");
    let closing = claim_error(&open(&impostor(&[b""])), "a").await;
    assert_eq!(closing.kind(), ErrorKind::Unreachable, "{closing:?}");
    let old = claim_error(&open(&impostor(&[b"-ERR unknown command `HELLO`\r\n"])), "a").await;
    assert_eq!(old.kind(), ErrorKind::Unsupported, "{old:?}");
    assert!(old.to_string().contains("6.2"), "{old}");
}

#[tokio::test]
async fn a_loading_server_is_away_for_now() {
    const HELLO: &[u8] = b"*4\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$4\r\nrole\r\n$6\r\nmaster\r\n";
    const LOADING: &[u8] = b"-LOADING Redis is loading the dataset in memory\r\n";
    let error = claim_error(&open(&impostor(&[HELLO, LOADING])), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("loading"), "{error}");
}

#[tokio::test]
async fn bad_urls_are_refused_when_opened() {
    for url in ["redis://", "http://127.0.0.1", "redis://h?timeout=1h&nonsense=1", "rediss://h?ca=/no/such/file"] {
        let Err(error) = RedisStore::from_url(url) else { panic!("{url} was opened") };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
    }
}
