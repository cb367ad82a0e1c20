//! What goes wrong with the server, the way to it and the callers of a queue, and what comes of it.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{AT_ONCE, HANDLER, PATIENCE, done, open, open_with, payloads, receive, send};
use taskonce_core::ErrorKind;
use taskonce_queue_redis::RedisQueue;
use taskonce_testkit::{Proxy, RedisServer};
use taskonce_worker::source::{DeadFilter, Depth, Entrance, Envelope, Priority, Sent, Source, Want};
use tokio::task::JoinSet;

const STREAM: &str = "taskonce-queue:{queue:charge@2}:normal";

fn through(proxy: &Proxy) -> RedisQueue {
    RedisQueue::from_url(&format!("{}/0?timeout=5s", proxy.url())).unwrap()
}

async fn total(queue: &RedisQueue) -> Depth {
    Depth::total(&queue.depth().await.unwrap())
}

#[tokio::test]
async fn a_send_whose_answer_was_lost_is_queued_once() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let queue = through(&proxy);
    send(&queue, *b"first").await;
    for (number, delay) in [AT_ONCE, Duration::from_secs(600)].into_iter().enumerate() {
        for entrance in [Entrance::Open, Entrance::OncePerKey] {
            proxy.cut_at_replies("EVALSHA", 1);
            let key = format!("{number}-{entrance:?}");
            let envelope = Envelope { key: Some(key), ..Envelope::new(HANDLER, *b"x") };
            let Sent::Accepted(_) = queue.send(&envelope, delay, entrance).await.unwrap() else {
                panic!("it is its own sending that is queued")
            };
            assert_eq!(proxy.losses_left(), 0);
        }
    }
    let depth = total(&queue).await;
    assert_eq!((depth.ready, depth.deferred), (3, 2));
}

#[tokio::test]
async fn a_receive_whose_answer_was_lost_gets_the_same_deliveries() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let (queue, beside) = (through(&proxy), open(&server));
    for number in 0..5 {
        send(&beside, number.to_string()).await;
    }
    send(&queue, *b"5").await;
    proxy.cut_at_replies("EVALSHA", 1);
    let held = receive(&queue, 4, AT_ONCE).await;
    assert_eq!((payloads(&held), held[0].number), (["0", "1", "2", "3"].map(str::to_owned).to_vec(), 1));
    assert_eq!(proxy.losses_left(), 0);
    for delivery in &held {
        done(queue.acknowledge(&delivery.receipt).await.unwrap());
    }
    let depth = total(&beside).await;
    assert_eq!((depth.ready, depth.in_flight), (2, 0));
}

/// Once they would have been in flight, with nobody, until their visibility timeout had passed.
#[tokio::test]
async fn what_a_dropped_receive_was_given_is_given_back_at_once() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let (queue, beside) = (through(&proxy), open(&server));
    send(&queue, *b"a").await;
    proxy.set_delay(Duration::from_millis(600));
    let wants = [Want { handler: HANDLER.into(), max: 1 }];
    let dropped = tokio::time::timeout(Duration::from_millis(200), queue.receive(&wants, 1, PATIENCE)).await;
    assert!(dropped.is_err(), "it was dropped on its way");
    proxy.set_delay(AT_ONCE);
    // Another has it long before the timeout of 30 s.
    let began = Instant::now();
    let held = receive(&beside, 1, PATIENCE).await;
    assert_eq!(payloads(&held), ["a"]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_connection_that_is_cut_again_and_again_loses_nothing_and_leaves_nothing() {
    const COUNT: usize = 300;
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Arc::new(Proxy::start(server.address()).unwrap());
    let queue = through(&proxy);
    let cutter = {
        let proxy = Arc::clone(&proxy);
        tokio::spawn(async move {
            // Ends when it is aborted.
            loop {
                tokio::time::sleep(Duration::from_millis(40)).await;
                proxy.cut();
            }
        })
    };
    let mut sends = JoinSet::new();
    for number in 0..COUNT {
        let queue = queue.clone();
        sends.spawn(async move {
            let envelope = Envelope { key: Some(number.to_string()), ..Envelope::new(HANDLER, number.to_string()) };
            // Each try is bounded by its timeout; three copies of everything, as a careless producer sends them.
            for _ in 0..3 {
                while queue.send(&envelope, AT_ONCE, Entrance::OncePerKey).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        });
    }
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let began = Instant::now();
    while (seen.len() < COUNT || !sends.is_empty()) && began.elapsed() < 4 * PATIENCE {
        while sends.try_join_next().is_some() {}
        let wants = [Want { handler: HANDLER.into(), max: 20 }];
        let Ok(held) = queue.receive(&wants, 20, Duration::from_millis(100)).await else { continue };
        for delivery in held {
            *seen.entry(payloads(std::slice::from_ref(&delivery)).remove(0)).or_default() += 1;
            // An answer that was lost is asked for again: gone is gone.
            while queue.acknowledge(&delivery.receipt).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    cutter.abort();
    assert_eq!(seen.len(), COUNT, "nothing is lost");
    // A copy that was sent when the one before it had been settled is there by itself.
    for delivery in receive(&queue, 1000, AT_ONCE).await {
        done(queue.acknowledge(&delivery.receipt).await.unwrap());
    }
    assert_eq!(total(&queue).await, Depth::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_under_load_keeps_what_it_acknowledged() {
    let mut server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let queue = open_with(&server, "timeout=500ms&visibility=1s");
    let mut accepted = Vec::new();
    for round in 0..3 {
        let (sender, stop) = (queue.clone(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let sending = tokio::spawn(async move {
            let mut accepted = Vec::new();
            for number in 0..100_000 {
                if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
                let name = format!("{round}-{number}");
                if sender.send(&Envelope::new(HANDLER, name.clone()), AT_ONCE, Entrance::Open).await.is_ok() {
                    accepted.push(name);
                }
            }
            accepted
        });
        // sleeps: the load has to be there when the server is killed
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(|| server.kill());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        accepted.extend(sending.await.unwrap());
        server.restart().unwrap();
    }
    assert!(accepted.len() > 30, "{}", accepted.len());
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    // Each round receives something, so that the loop ends.
    loop {
        let held = receive(&queue, 100, Duration::from_secs(2)).await;
        if held.is_empty() {
            break;
        }
        for delivery in held {
            *seen.entry(payloads(std::slice::from_ref(&delivery)).remove(0)).or_default() += 1;
            done(queue.acknowledge(&delivery.receipt).await.unwrap());
        }
    }
    let lost: Vec<_> = accepted.iter().filter(|name| !seen.contains_key(*name)).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

#[tokio::test]
async fn a_server_that_hangs_is_told_in_time_and_goes_on_where_it_was() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open_with(&server, "timeout=500ms");
    send(&queue, *b"a").await;
    let waiting = {
        let queue = queue.clone();
        tokio::spawn(async move { queue.receive(&[Want { handler: "mail@1".into(), max: 1 }], 1, PATIENCE).await })
    };
    // sleeps: the receive has to be waiting, which nothing shows from outside.
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.stop().unwrap();
    let began = Instant::now();
    let error = queue.send(&Envelope::new(HANDLER, *b"b"), AT_ONCE, Entrance::Open).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    // sleeps: what waits has to find out, too.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.cont().unwrap();
    let began = Instant::now();
    // A receive that waited has failed by now, or goes on.
    let _sent = open(&server).send(&Envelope::new("mail@1", *b"m"), AT_ONCE, Entrance::Open).await.unwrap();
    let mut held = waiting.await.unwrap().unwrap_or_default();
    while held.is_empty() && began.elapsed() < PATIENCE {
        let wants = [Want { handler: "mail@1".into(), max: 1 }];
        held = queue.receive(&wants, 1, PATIENCE).await.unwrap_or_default();
    }
    assert_eq!(payloads(&held), ["m"]);
    assert!(payloads(&receive(&queue, 10, AT_ONCE).await).contains(&"a".to_owned()));
}

#[tokio::test]
async fn a_flush_forgets_everything_and_the_queue_goes_on() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    send(&queue, *b"a").await;
    let held = receive(&queue, 1, AT_ONCE).await;
    let waiting = {
        let queue = queue.clone();
        tokio::spawn(async move { receive(&queue, 1, PATIENCE).await })
    };
    // sleeps: the receive has to be waiting, which nothing shows from outside.
    tokio::time::sleep(Duration::from_millis(60)).await;
    server.command(&["FLUSHALL"]).unwrap();
    server.command(&["SCRIPT", "FLUSH"]).unwrap();
    assert_eq!(queue.acknowledge(&held[0].receipt).await.unwrap(), taskonce_worker::source::Settled::Gone);
    send(&queue, *b"b").await;
    assert_eq!(payloads(&waiting.await.unwrap()), ["b"]);
    assert_eq!(total(&queue).await.in_flight, 1, "its handler is listed again");
}

#[tokio::test]
async fn a_group_that_was_destroyed_loses_nothing_and_hands_out_nothing_twice() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    for payload in ["held", "deferred", "waiting"] {
        send(&queue, payload).await;
    }
    let held = receive(&queue, 2, AT_ONCE).await;
    done(queue.defer(&held[1].receipt, Duration::from_millis(200)).await.unwrap());
    server.command(&["XGROUP", "DESTROY", STREAM, "taskonce"]).unwrap();
    assert_eq!(payloads(&receive(&queue, 10, AT_ONCE).await), ["waiting"]);
    assert_eq!(payloads(&receive(&queue, 10, PATIENCE).await), ["deferred"]);
    done(queue.acknowledge(&held[0].receipt).await.unwrap());
    assert_eq!(total(&queue).await.in_flight, 2);
}

#[tokio::test]
async fn what_others_add_is_delivered_and_wakes_who_waits() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    let waiting = {
        let queue = queue.clone();
        tokio::spawn(async move { (receive(&queue, 1, PATIENCE).await, Instant::now()) })
    };
    // sleeps: the receive has to be waiting, which nothing shows from outside.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let added = Instant::now();
    let fields = ["payload", "{}", "Idempotency-Key", "shop/charge@2/7", "content-type", "application/json"];
    let add = |stream: &str, fields: &[&str]| {
        server.command(&[["XADD", stream, "*"].as_slice(), fields].concat()).unwrap();
    };
    add(STREAM, &[fields.as_slice(), &["traceparent", "00-1", "sent-at", "1764500000123"]].concat());
    let (held, woke) = waiting.await.unwrap();
    assert!(woke - added < Duration::from_millis(800), "{:?}", woke - added);
    let envelope = &held[0].envelope;
    assert_eq!((envelope.key.as_deref(), envelope.payload.as_slice()), (Some("shop/charge@2/7"), b"{}".as_slice()));
    assert_eq!(envelope.header("traceparent"), Some("00-1"));
    assert_eq!((envelope.sent_at.map(|at| at.0), envelope.priority), (Some(1_764_500_000_123), Priority::Normal));
    done(queue.defer(&held[0].receipt, AT_ONCE).await.unwrap());
    let again = receive(&queue, 1, AT_ONCE).await;
    assert_eq!((&again[0].coordinates, again[0].number), (&held[0].coordinates, 2));
    done(queue.acknowledge(&again[0].receipt).await.unwrap());
    // What cannot be read holds up nobody.
    add(STREAM, &["body", "no payload"]);
    add(&STREAM.replace("normal", "high"), &["payload", "urgent"]);
    add(STREAM, &["payload", "good"]);
    assert_eq!(payloads(&receive(&queue, 10, AT_ONCE).await), ["urgent", "good"]);
    let page = queue.dead_letters(&DeadFilter::default(), None).await.unwrap();
    assert_eq!(page.lines[0].death.reason, "unreadable");
    assert!(page.lines[0].death.message.contains("payload"), "{:?}", page.lines[0].death);
    assert_eq!(queue.dead_one(&page.lines[0].death.id).await.unwrap_err().kind(), ErrorKind::Corrupt);
}

/// Once who had seen that nothing was due for long slept through what another had deferred for a moment.
#[tokio::test]
async fn who_waits_wakes_for_what_another_gives_back_sooner() {
    let server = RedisServer::start(&[]).unwrap();
    let (one, other) = (open(&server), open(&server));
    send(&one, *b"a").await;
    for delay in [Duration::from_millis(300), AT_ONCE] {
        let held = receive(&one, 1, AT_ONCE).await.remove(0);
        let waiting = {
            let other = other.clone();
            tokio::spawn(async move { (receive(&other, 1, PATIENCE).await, Instant::now()) })
        };
        // sleeps: the receive has to be waiting, which nothing shows from outside.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let deferred = Instant::now();
        done(one.defer(&held.receipt, delay).await.unwrap());
        let (again, woke) = waiting.await.unwrap();
        assert_eq!(payloads(&again), ["a"]);
        let took = woke - deferred;
        assert!(took + Duration::from_millis(1) >= delay && took < delay + Duration::from_millis(700), "{took:?}");
        done(other.defer(&again[0].receipt, AT_ONCE).await.unwrap());
    }
}

#[tokio::test]
async fn a_receive_ends_when_its_wait_is_over_also_while_something_comes_due_later() {
    let server = RedisServer::start(&[]).unwrap();
    let (one, other) = (open(&server), open(&server));
    send(&one, *b"a").await;
    assert_eq!(receive(&one, 1, AT_ONCE).await.len(), 1);
    let wait = Duration::from_millis(700);
    for _ in 0..3 {
        let began = Instant::now();
        assert!(receive(&other, 1, wait).await.is_empty());
        let took = began.elapsed();
        assert!(took >= wait && took < wait + Duration::from_secs(2), "{took:?}");
    }
}

#[tokio::test]
async fn who_waits_sends_at_most_two_commands_a_second() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    let accepted = queue.send(&Envelope::new(HANDLER, *b"later"), Duration::from_secs(60), Entrance::Open).await;
    assert!(accepted.is_ok());
    let wants: Vec<Want> = (0..20).map(|n| Want { handler: format!("charge@{n}").into(), max: 5 }).collect();
    let none = queue.receive(&wants, 5, Duration::from_millis(200)).await.unwrap();
    assert!(none.is_empty());
    let processed = || {
        let info = server.command(&["INFO", "stats"]).unwrap().text();
        let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:")).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    let before = processed();
    // As a worker asks: again and again.
    for _ in 0..8 {
        assert!(queue.receive(&wants, 5, Duration::from_millis(500)).await.unwrap().is_empty());
    }
    // One of them is this test's own.
    let sent = processed() - before - 1;
    assert!(sent <= 8, "{sent} commands in 4 s");
}

#[tokio::test]
async fn a_clock_that_goes_back_makes_nothing_wait_longer_than_it_was_told() {
    let server = RedisServer::start(&[]).unwrap();
    let queue = open(&server);
    let clock = "taskonce-queue:{queue:charge@2}:clock";
    // The server's clock is an hour ahead, as far as the queue can tell, and then it is set right.
    send(&queue, *b"first").await;
    server.command(&["HINCRBY", clock, "ahead", "3600000"]).unwrap();
    let held = receive(&queue, 1, AT_ONCE).await;
    done(queue.defer(&held[0].receipt, Duration::from_millis(300)).await.unwrap());
    server.command(&["HSET", clock, "ahead", "0"]).unwrap();
    let began = Instant::now();
    assert_eq!(payloads(&receive(&queue, 1, PATIENCE).await), ["first"]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
