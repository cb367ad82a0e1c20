//! What an examination finds on several servers, and writes that wait for replicas there.

use std::time::Duration;

use taskonce_core::store::{Finding, Level, Store};
use taskonce_testkit::resp::Reply;
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisCluster, Sentinels, eventually};

use crate::support::{done, key, open, running, store};

async fn find(url: &str, subject: &str) -> Vec<Finding> {
    let findings = open(url).examine().await;
    let found: Vec<_> = findings.iter().filter(|finding| finding.subject == subject).cloned().collect();
    assert!(!found.is_empty(), "nothing about {subject} in {findings:#?}");
    found
}

#[tokio::test]
async fn every_primary_of_a_cluster_is_looked_at_and_slots_without_a_server_are_a_fault() {
    let mut cluster = RedisCluster::start(3, 0, &["--cluster-require-full-coverage", "no"]).unwrap();
    let url = format!("{}?timeout=5s", cluster.url_of(&[0]));
    let whole = &find(&url, "cluster").await[0];
    assert!(whole.level == Level::Fine && whole.text.contains("16384 of 16384"), "{whole:?}");
    // They agree that nobody has a replica, and differ in one setting.
    assert_eq!(find(&url, "replication").await.len(), 1);
    cluster.server(1).command(&["CONFIG", "SET", "save", "3600 1"]).unwrap();
    let persistence = find(&url, "persistence").await;
    let port = cluster.ports()[1].to_string();
    assert_eq!(persistence.len(), 3, "{persistence:#?}");
    let differs = |finding: &&Finding| finding.text.contains(&port) && finding.text.contains("snapshots");
    assert_eq!(persistence.iter().filter(differs).count(), 1, "{persistence:#?}");

    cluster.kill(2);
    let says_so = || cluster.server(0).command(&["CLUSTER", "INFO"]).unwrap().text().contains("cluster_slots_fail:54");
    assert!(eventually(Duration::from_secs(60), says_so), "the others never saw that a node is gone");
    let lacking = &find(&url, "cluster").await[0];
    assert!(lacking.level == Level::Fault && lacking.text.contains("lost their server"), "{lacking:?}");
    let away = &find(&url, "reachability").await[0];
    assert_eq!(away.level, Level::Fault, "{away:?}");
}

#[tokio::test]
async fn sentinel_is_named_and_its_replica_is_waited_for() {
    let sentinels = Sentinels::start(&SentinelOptions::default()).unwrap();
    let url = format!("{}?wait_replicas=1&timeout=20s", sentinels.url());
    let failover = &find(&url, "failover").await[0];
    assert!(failover.level == Level::Fine && failover.text.contains("Sentinel"), "{failover:?}");
    let replication = &find(&url, "replication").await[0];
    assert!(replication.level == Level::Fine && replication.text.contains("1 replica"), "{replication:?}");
    let redis = open(&url);
    let (claim, last) = (running(), done());
    store(&redis, &key("a"), None, &claim).await;
    store(&redis, &key("a"), Some(&claim), &last).await;
    let replica = sentinels.server(sentinels.replica().unwrap());
    let there = replica.command(&["GET", &format!("taskonce:{}", key("a"))]).unwrap();
    assert!(matches!(&there, Reply::Bulk(bytes) if bytes[2..18] == last.token.0), "{there:?}");
}

#[tokio::test]
async fn a_write_to_a_cluster_waits_for_the_replica_of_its_own_slot() {
    let cluster = RedisCluster::start(3, 1, &[]).unwrap();
    let redis = open(&format!("{}?wait_replicas=1&timeout=20s", cluster.url_of(&[0])));
    for number in 0..20 {
        let key = key(&format!("w-{number}"));
        store(&redis, &key, None, &running()).await;
        let name = format!("taskonce:{key}");
        let primary = cluster.server_of(&name).unwrap();
        let replica = cluster.replicas_of(primary).unwrap()[0];
        let mut connection = cluster.server(replica).connect().unwrap();
        connection.ask(&["READONLY"]).unwrap();
        assert_eq!(connection.ask(&["EXISTS", &name]).unwrap(), Reply::Int(1), "{key}");
    }
}
