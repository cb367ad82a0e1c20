//! Servers that compare a whole record before they replace it, and what the comparison leaves to the script.

use taskonce_core::ErrorKind;
use taskonce_core::codec;
use taskonce_core::record::{Event, EventKind, Output, Record, WallTime};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_testkit::{Proxy, RedisServer};

use crate::support::{claim_error, done, key, load, of_each_way, open, running, store};

/// How often the server ran the script.
fn scripts(server: &RedisServer) -> u64 {
    server.calls("evalsha").unwrap() + server.calls("eval").unwrap()
}

/// Puts bytes under the key of a task, past the store.
fn put(server: &RedisServer, id: &str, record: &Record) {
    let name = format!("taskonce:{}", key(id));
    server.command(&[b"SET", name.as_bytes(), &codec::encode(record), b"PX", b"3600000"]).unwrap();
}

#[tokio::test]
async fn a_task_takes_no_script_where_the_server_compares_and_one_for_each_change_where_it_does_not() {
    for server in of_each_way() {
        let redis = open(&server.url());
        let before = scripts(&server);
        for number in 0..10 {
            let (claim, beat, last) = (running(), running(), done());
            let key = key(&format!("t-{number}"));
            store(&redis, &key, None, &claim).await;
            store(&redis, &key, Some(&claim), &beat).await;
            store(&redis, &key, Some(&beat), &last).await;
            assert_eq!(*load(&redis, &key).await.record, last);
        }
        let run = scripts(&server) - before;
        assert_eq!(run > 0, !server.compares().unwrap(), "{run} scripts");
    }
}

#[tokio::test]
async fn what_a_server_can_is_asked_once_a_connection() {
    for server in of_each_way() {
        let proxy = Proxy::start(server.address()).unwrap();
        let redis = open(&proxy.url());
        for number in 0..50 {
            let (claim, key) = (running(), key(&format!("t-{number}")));
            store(&redis, &key, None, &claim).await;
            store(&redis, &key, Some(&claim), &done()).await;
        }
        assert_eq!(server.calls("hello").unwrap(), proxy.connections());
    }
}

#[tokio::test]
async fn a_record_that_another_version_wrote_otherwise_is_replaced_by_its_token() {
    for server in of_each_way() {
        let redis = open(&server.url());
        let (claim, last) = (running(), done());
        store(&redis, &key("a"), None, &claim).await;
        put(&server, "a", &Record { owner: "written/otherwise".into(), ..claim.clone() });
        store(&redis, &key("a"), Some(&claim), &last).await;
        assert_eq!(*load(&redis, &key("a")).await.record, last);

        // Another token is another record, whatever else is the same.
        put(&server, "a", &Record { token: done().token, ..claim.clone() });
        let late = redis.swap(&key("a"), Expected::Record(&claim), Next::Keep(&last)).await.unwrap();
        assert!(matches!(&late, Swap::Conflict(Some(found)) if found.record.owner == claim.owner), "{late:?}");
    }
}

#[tokio::test]
async fn a_comparison_that_fails_finds_the_script_again_after_it_was_flushed() {
    for server in of_each_way() {
        let redis = open(&server.url());
        for number in 0..3 {
            let (id, claim, last) = (format!("t-{number}"), running(), done());
            store(&redis, &key(&id), None, &claim).await;
            put(&server, &id, &Record { owner: "written/otherwise".into(), ..claim.clone() });
            server.command(&["SCRIPT", "FLUSH"]).unwrap();
            store(&redis, &key(&id), Some(&claim), &last).await;
            assert_eq!(*load(&redis, &key(&id)).await.record, last);
        }
    }
}

#[tokio::test]
async fn a_full_memory_refuses_claims_and_still_takes_completions_where_the_server_compares() {
    let server = RedisServer::start_valkey(&["--maxmemory-policy", "noeviction"]).unwrap();
    let redis = open(&server.url());
    let (claim, beat, last) = (running(), running(), done());
    store(&redis, &key("held"), None, &claim).await;
    // Less than the empty server takes.
    server.command(&["CONFIG", "SET", "maxmemory", "100kb"]).unwrap();
    let error = claim_error(&redis, "new").await;
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    let before = scripts(&server);
    store(&redis, &key("held"), Some(&claim), &beat).await;
    store(&redis, &key("held"), Some(&beat), &last).await;
    assert_eq!(*load(&redis, &key("held")).await.record, last);
    assert!(scripts(&server) > before, "the server took the comparison although its memory was full");
}

#[tokio::test]
async fn a_long_record_is_not_sent_to_be_compared() {
    const LONG: usize = 64 << 10;
    let (mut output, mut history) = (done(), running());
    output.output = Output::kept("text/plain", vec![7; LONG]);
    let note = "n".repeat(1024);
    for attempt in 1..=16 {
        let who = "worker-host-01".to_owned();
        history.remember(Event { kind: EventKind::Redriven, at: WallTime(1), who, attempt, note: note.clone() });
    }
    for server in of_each_way() {
        let redis = open(&server.url());
        let received = || {
            let info = server.command(&["INFO", "stats"]).unwrap().text();
            let line = info.lines().find_map(|line| line.strip_prefix("total_net_input_bytes:"));
            line.unwrap().trim().parse::<usize>().unwrap()
        };
        for (id, long) in [("output", &output), ("history", &history)] {
            let next = done();
            let size = codec::encode(long).len();
            assert!(size >= 16 << 10, "{size} bytes are not long");
            store(&redis, &key(id), None, long).await;
            // The script is known to the server from here on.
            store(&redis, &key(id), Some(long), &next).await;
            store(&redis, &key(id), Some(&next), long).await;
            let before = received();
            store(&redis, &key(id), Some(long), &next).await;
            let sent = received() - before;
            assert!(sent < size / 4, "{sent} bytes were sent");
            assert_eq!(*load(&redis, &key(id)).await.record, next);
        }
    }
}
