//! What an examination finds.

use taskonce_core::store::{Finding, Level, Store};
use taskonce_testkit::{RedisServer, port};

use crate::support::{Pair, open};

async fn find(url: &str, subject: &str) -> Finding {
    let findings = open(url).examine().await;
    let found = findings.iter().find(|finding| finding.subject == subject).cloned();
    found.unwrap_or_else(|| panic!("nothing about {subject} in {findings:?}"))
}

#[tokio::test]
async fn a_sound_server_has_no_faults() {
    let server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let user = "ACL SETUSER sound on >secret ~* &* +@all -flushall -flushdb";
    server.command(&user.split(' ').collect::<Vec<_>>()).unwrap();
    let findings = open(&server.url().replace("redis://", "redis://sound:secret@")).examine().await;
    assert!(findings.iter().all(|finding| finding.level == Level::Fine && finding.hint.is_empty()), "{findings:#?}");
    for subject in [
        "round trip",
        "version",
        "role",
        "writing",
        "eviction policy",
        "memory",
        "persistence",
        "clock",
        "replication",
        "failover",
        "flush",
        "waiting",
        "lists",
    ] {
        assert!(findings.iter().any(|finding| finding.subject == subject), "{subject}");
    }
}

#[tokio::test]
async fn an_absent_server_is_a_fault() {
    let finding = find(&format!("redis://127.0.0.1:{}", port::free().unwrap()), "reachability").await;
    assert_eq!(finding.level, Level::Fault);
    assert!(finding.text.contains("refused") && !finding.hint.is_empty(), "{finding:?}");
}

#[tokio::test]
async fn what_a_server_may_forget_is_said() {
    let volatile = RedisServer::start(&[]).unwrap();
    let finding = find(&volatile.url(), "persistence").await;
    assert!(finding.level == Level::Warning && finding.text.contains("every task"), "{finding:?}");
    let each_second = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "everysec"]).unwrap();
    let finding = find(&each_second.url(), "persistence").await;
    assert!(finding.level == Level::Warning && finding.text.contains("two seconds"), "{finding:?}");
    let snapshots = RedisServer::start(&["--save", "3600", "1"]).unwrap();
    let finding = find(&snapshots.url(), "persistence").await;
    assert!(finding.level == Level::Warning && finding.text.contains("snapshots"), "{finding:?}");
}

#[tokio::test]
async fn an_evicting_policy_is_found_also_when_it_changed_later() {
    let server = RedisServer::start(&["--maxmemory", "64mb", "--maxmemory-policy", "noeviction"]).unwrap();
    let store = open(&server.url());
    let level = async || {
        let findings = store.examine().await;
        findings.into_iter().find(|finding| finding.subject == "eviction policy").unwrap().level
    };
    assert_eq!(level().await, Level::Fine);
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    assert_eq!(level().await, Level::Fault);
    let accepted = find(&format!("{}?eviction=accept", server.url()), "eviction policy").await;
    assert_eq!(accepted.level, Level::Warning);
}

#[tokio::test]
async fn a_replica_is_a_fault() {
    let primary = RedisServer::start(&[]).unwrap();
    let port = primary.port().to_string();
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &port]).unwrap();
    assert_eq!(find(&replica.url(), "role").await.level, Level::Fault);
}

#[tokio::test]
async fn replicas_are_counted_and_what_a_failover_to_them_forgets_is_said() {
    let pair = Pair::start();
    let url = pair.primary.url();
    let finding = find(&url, "replication").await;
    assert!(finding.level == Level::Warning && finding.hint.contains("wait_replicas"), "{finding:?}");
    let finding = find(&format!("{url}?wait_replicas=1"), "replication").await;
    assert!(finding.level == Level::Fine && finding.text.contains("1 replica follows"), "{finding:?}");
    let finding = find(&format!("{url}?wait_replicas=2"), "replication").await;
    assert!(finding.level == Level::Fault && finding.text.contains("wait_replicas=2"), "{finding:?}");
    assert_eq!(find(&url, "split brain").await.level, Level::Warning);
    pair.primary.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).unwrap();
    assert_eq!(find(&url, "split brain").await.level, Level::Fine);
}

#[tokio::test]
async fn a_user_who_may_flush_is_a_warning() {
    let server = RedisServer::start(&[]).unwrap();
    // Before 7.0 it cannot be asked.
    let level = if server.version().unwrap() >= (7, 0) { Level::Warning } else { Level::Fine };
    let finding = find(&server.url(), "flush").await;
    assert_eq!(finding.level, level, "{finding:?}");
}

/// Once `doctor` said that all was well where no task could be claimed.
#[tokio::test]
async fn a_server_that_takes_no_record_is_a_fault() {
    let server = RedisServer::start(&[]).unwrap();
    let reader = "ACL SETUSER reader on >secret ~* &* +@all -set -eval -evalsha";
    server.command(&reader.split(' ').collect::<Vec<_>>()).unwrap();
    let finding = find(&server.url().replace("redis://", "redis://reader:secret@"), "writing").await;
    assert!(finding.level == Level::Fault && finding.hint.contains("ACL SETUSER"), "{finding:?}");

    for (setting, value, said) in [("min-replicas-to-write", "1", "replicas"), ("maxmemory", "1", "memory is full")] {
        assert_eq!(find(&server.url(), "writing").await.level, Level::Fine);
        server.command(&["CONFIG", "SET", setting, value]).unwrap();
        let finding = find(&server.url(), "writing").await;
        assert!(finding.level == Level::Fault && finding.text.contains(said), "{setting}: {finding:?}");
        server.command(&["CONFIG", "SET", setting, "0"]).unwrap();
    }
    assert_eq!(server.command(&["DBSIZE"]).unwrap().int(), Some(0), "the probe is removed");
}

#[tokio::test]
async fn a_server_that_does_not_call_those_who_wait_is_a_warning() {
    let server = RedisServer::start(&[]).unwrap();
    assert_eq!(find(&server.url(), "waiting").await.level, Level::Fine);
    let user = "ACL SETUSER mute on >secret ~* &* +@all -client|tracking";
    server.command(&user.split(' ').collect::<Vec<_>>()).unwrap();
    let finding = find(&server.url().replace("redis://", "redis://mute:secret@"), "waiting").await;
    assert!(finding.level == Level::Warning && finding.hint.contains("client|tracking"), "{finding:?}");
}
