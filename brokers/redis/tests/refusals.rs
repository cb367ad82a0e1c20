//! What is refused, with which error: wrong URLs, servers that are away, full or evict, keys of others, newer programs.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::time::{Duration, Instant};

use common::{AT_ONCE, HANDLER, done, names, open, open_with, payloads, receive, send};
use taskonce_core::ErrorKind;
use taskonce_core::store::Level;
use taskonce_queue_redis::RedisQueue;
use taskonce_testkit::RedisServer;
use taskonce_worker::source::{DeadFilter, Death, Entrance, Envelope, Left, Source};

#[test]
fn a_wrong_url_is_refused_with_advice_and_without_its_password() {
    for url in ["", "queue", "sqlite:queue.db", "redis://", "redis://:hunter2@h?visibility=1", "redis://h?name="] {
        let Err(error) = RedisQueue::from_url(url) else { panic!("{url} must be refused") };
        assert_eq!(error.kind(), ErrorKind::BadUrl, "{url}");
        assert!(error.hint().contains("visibility=30s"), "{}", error.hint());
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_away_is_told_by_every_call() {
    let mut server = RedisServer::start(&[]).unwrap();
    let queue = open_with(&server, "timeout=500ms");
    server.kill();
    let began = Instant::now();
    let errors = [
        queue.send(&Envelope::new(HANDLER, *b"a"), AT_ONCE, Entrance::Open).await.map(drop).unwrap_err(),
        queue
            .receive(&[taskonce_worker::source::Want { handler: HANDLER.into(), max: 1 }], 1, AT_ONCE)
            .await
            .map(drop)
            .unwrap_err(),
        queue.depth().await.map(drop).unwrap_err(),
    ];
    for error in errors {
        names(&error, ErrorKind::Unreachable, "source `redis://127.0.0.1");
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    let findings = queue.examine().await;
    assert_eq!(findings.iter().filter(|finding| finding.level == Level::Fault).count(), 1, "{findings:?}");
    server.restart().unwrap();
    send(&queue, *b"b").await;
}

#[tokio::test]
async fn a_key_of_another_program_is_an_error_that_names_the_handler() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    for (end, wanted) in [("normal", "charge@2"), ("held", "charge@2"), ("clock", "charge@2")] {
        let key = format!("taskonce-queue:{{queue:charge@2}}:{end}");
        server.command(&["SET", &key, "mine"]).unwrap();
        let sent = queue.send(&Envelope::new(HANDLER, *b"a"), Duration::from_secs(9), Entrance::Open).await;
        names(&sent.unwrap_err(), ErrorKind::Corrupt, wanted);
        assert_eq!(server.command(&["GET", &key]).unwrap().text(), "mine");
        server.command(&["FLUSHALL"]).unwrap();
    }
}

#[tokio::test]
async fn a_newer_layout_is_refused_and_left_as_it_is() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    send(&queue, *b"a").await;
    let clock = "taskonce-queue:{queue:charge@2}:clock";
    server.command(&["HSET", clock, "layout", "2"]).unwrap();
    let error = queue.send(&Envelope::new(HANDLER, *b"b"), AT_ONCE, Entrance::Open).await.unwrap_err();
    names(&error, ErrorKind::NewerSchema, "source `redis:");
    assert_eq!(queue.depth().await.unwrap_err().kind(), ErrorKind::NewerSchema);
    server.command(&["HSET", clock, "layout", "1"]).unwrap();
    assert_eq!(payloads(&receive(&queue, 10, AT_ONCE).await), ["a"]);
}

/// While workers are replaced one by one, older ones meet what newer ones sent.
#[tokio::test]
async fn what_a_newer_program_sent_is_put_off_and_never_a_dead_letter() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    let stream = "taskonce-queue:{queue:charge@2}:normal";
    server.command(&["XADD", stream, "*", "body", "in a new form", "taskonce:v", "2"]).unwrap();
    send(&queue, *b"known").await;
    let clock = "taskonce-queue:{queue:charge@2}:clock";
    for _ in 0..3 {
        let held = receive(&queue, 10, AT_ONCE).await;
        assert_eq!(payloads(&held), ["known"]);
        done(queue.defer(&held[0].receipt, AT_ONCE).await.unwrap());
        server.command(&["HINCRBY", clock, "ahead", "10000"]).unwrap();
    }
    assert_eq!(queue.dead_letters(&DeadFilter::default(), None).await.unwrap().lines, []);
    let depth = &queue.depth().await.unwrap()[0];
    assert_eq!((depth.ready, depth.deferred), (2, 0), "it is looked at again");
}

#[tokio::test]
async fn a_full_memory_refuses_sends_and_the_backlog_is_worked_off() {
    let server = RedisServer::start(&["--maxmemory", "16mb", "--maxmemory-policy", "noeviction"]).unwrap();
    let queue = open(&server);
    let large = Envelope::new(HANDLER, vec![7; 400_000]);
    let mut accepted = 0;
    let error = loop {
        match queue.send(&large, AT_ONCE, Entrance::Open).await {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
        assert!(accepted < 200, "the memory must be full");
    };
    names(&error, ErrorKind::Full, "source `redis:");
    // Also what buffers take is too much now.
    server.command(&["CONFIG", "SET", "maxmemory", "4mb"]).unwrap();
    let mut held = receive(&queue, 2, AT_ONCE).await;
    assert_eq!(held.len(), 2);
    done(queue.extend(&held[0].receipt, Duration::from_secs(60)).await.unwrap());
    done(queue.defer(&held[0].receipt, Duration::from_secs(60)).await.unwrap());
    let death = Death { id: "a".into(), reason: "dead".into(), message: String::new() };
    done(queue.dead_letter(&held[1].receipt, &death).await.unwrap());
    assert_eq!(queue.drop_dead("a").await.unwrap(), Left::Done);
    let mut settled = 2;
    while settled < accepted {
        held = receive(&queue, 100, AT_ONCE).await;
        if held.is_empty() {
            break;
        }
        for delivery in held {
            done(queue.acknowledge(&delivery.receipt).await.unwrap());
            settled += 1;
        }
    }
    assert_eq!(settled, accepted);
    server.command(&["CONFIG", "SET", "maxmemory", "16mb"]).unwrap();
    send(&queue, *b"there is room").await;
}

#[tokio::test]
async fn a_server_that_evicts_is_refused_unless_that_is_accepted() {
    let server = RedisServer::start(&["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]).unwrap();
    let error = open(&server).send(&Envelope::new(HANDLER, *b"a"), AT_ONCE, Entrance::Open).await.unwrap_err();
    names(&error, ErrorKind::Evicting, "source `redis:");
    let queue = open_with(&server, "eviction=accept");
    send(&queue, *b"a").await;
    let findings = queue.examine().await;
    assert!(findings.iter().any(|finding| finding.subject == "eviction policy" && finding.level == Level::Warning));
}

#[tokio::test]
async fn a_user_with_the_rights_of_the_page_can_do_everything() {
    let server = RedisServer::start(&[]).unwrap();
    let page = std::fs::read_to_string(format!("{}/../../docs/queue-redis.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let line = page.lines().find(|line| line.starts_with("ACL SETUSER ")).expect("the page has the line of a user");
    let words: Vec<&str> = line.split_whitespace().collect();
    server.command(&words).unwrap();
    let queue =
        RedisQueue::from_url(&format!("redis://queue:PASSWORD@127.0.0.1:{}/0?timeout=20s", server.port())).unwrap();
    let keyed = Envelope { key: Some("a".into()), ..Envelope::new(HANDLER, *b"a") };
    let _sent = queue.send(&keyed, Duration::from_millis(20), Entrance::OncePerKey).await.unwrap();
    let held = receive(&queue, 1, common::PATIENCE).await;
    let death = Death { id: "a".into(), reason: "dead".into(), message: String::new() };
    done(queue.extend(&held[0].receipt, Duration::from_secs(9)).await.unwrap());
    done(queue.dead_letter(&held[0].receipt, &death).await.unwrap());
    assert_eq!(queue.dead_letters(&DeadFilter::default(), None).await.unwrap().lines.len(), 1);
    assert!(queue.dead_one("a").await.unwrap().is_some());
    assert_eq!(queue.redrive("a").await.unwrap(), Left::Done);
    let held = receive(&queue, 1, common::PATIENCE).await;
    done(queue.acknowledge(&held[0].receipt).await.unwrap());
    let findings = queue.examine().await;
    let waiting = findings.iter().find(|finding| finding.subject == "waiting").unwrap();
    assert_eq!(waiting.level, Level::Fine, "{waiting:?}");
    assert!(findings.iter().all(|finding| finding.level != Level::Fault), "{findings:?}");
}
