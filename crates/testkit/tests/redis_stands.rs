//! The Clusters and Sentinels that tests start do what tests want to see of them.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use taskonce_testkit::resp::{Connection, Reply};
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisCluster, RedisServer, Sentinels, eventually};

/// Tells this program that it is the one to be killed.
const VICTIM: &str = "TASKONCE_TESTKIT_VICTIM";
/// Opens the line on which it names its server.
const MARK: &str = "server: ";

/// How long a failover may take on a busy machine.
const FAILOVER_WAIT: Duration = Duration::from_secs(60);

#[test]
fn a_cluster_forms_moves_slots_and_fails_over() {
    let mut cluster =
        RedisCluster::start(3, 1, &["--cluster-node-timeout", "2000", "--requirepass", "secret"]).unwrap();
    assert_eq!(cluster.size(), 6);
    assert_eq!((cluster.masters().unwrap(), cluster.replicas_of(0).unwrap()), (vec![0, 1, 2], vec![3]));
    assert!(cluster.url().starts_with("redis+cluster://:secret@127.0.0.1:"), "{}", cluster.url());
    for key in ["a", "b", "c", "{a}1", "{a}2"] {
        assert_eq!(cluster.command(&["SET", key, "1"]).unwrap().text(), "OK");
    }

    // Half moved: what is there is answered, what is not is answered with ASK.
    let (slot, from) = (cluster.slot_of("a").unwrap(), cluster.server_of("a").unwrap());
    let to = (from + 1) % 3;
    cluster.begin_move(slot, to).unwrap();
    cluster.migrate_key("{a}1", to).unwrap();
    let at_old = |key: &str| cluster.server(from).command(&["GET", key]).unwrap().text();
    assert_eq!(at_old("a"), "1");
    assert!(at_old("{a}1").starts_with("ASK "), "{}", at_old("{a}1"));
    cluster.end_move(slot, to).unwrap();
    assert!(at_old("a").starts_with("MOVED "), "{}", at_old("a"));
    assert_eq!(cluster.server_of("a").unwrap(), to);
    cluster.move_slot(slot, from).unwrap();
    assert_eq!(cluster.server_of("a").unwrap(), from);

    let replica = cluster.replicas_of(from).unwrap()[0];
    cluster.failover(replica).unwrap();
    assert_eq!(cluster.server_of("a").unwrap(), replica);
    assert_eq!(cluster.command(&["GET", "a"]).unwrap(), Reply::Bulk(b"1".to_vec()));
    cluster.await_whole().unwrap();

    cluster.kill(replica);
    cluster.await_master(from).unwrap();
    assert!(eventually(FAILOVER_WAIT, || cluster.command(&["SET", "a", "2"]).is_ok_and(|reply| reply.text() == "OK")));
    cluster.restart(replica).unwrap();
    cluster.await_whole().unwrap();
    // Of all nodes the one that is asked may hear last of what a returned one is.
    assert!(eventually(FAILOVER_WAIT, || cluster.replicas_of(from).is_ok_and(|found| found == [replica])));
}

#[test]
fn sentinels_find_one_another_and_replace_a_primary() {
    let options = SentinelOptions {
        args: ["--requirepass", "secret"].map(str::to_owned).to_vec(),
        sentinel_password: Some("watcher".to_owned()),
        ..SentinelOptions::quick()
    };
    let mut stand = Sentinels::start(&options).unwrap();
    assert!(stand.url().starts_with("redis+sentinel://:secret@127.0.0.1:"), "{}", stand.url());
    assert!(stand.url().ends_with("/tasks?sentinel_password=watcher"), "{}", stand.url());

    // On a busy machine the Sentinels may have replaced a primary by themselves: no number is taken for granted.
    let (first, second) = (stand.primary().unwrap(), stand.failover().unwrap());
    assert_ne!(first, second);
    // A server that becomes a replica cuts its connections.
    let role = |n: usize| {
        stand.server(n).command(&["INFO", "replication"]).map_or_else(|error| error.to_string(), |reply| reply.text())
    };
    assert!(eventually(FAILOVER_WAIT, || role(first).contains("master_link_status:up")), "{}", role(first));
    assert_eq!(stand.command(&["SET", "a", "1"]).unwrap().text(), "OK");

    let killed = stand.kill_primary().unwrap();
    assert_ne!(stand.await_failover(killed).unwrap(), killed);
    stand.server_mut(killed).restart().unwrap();
    stand.await_whole().unwrap();
}

#[test]
fn a_server_and_its_folder_go_with_a_process_that_is_killed() {
    const OWN_NAME: &str = "a_server_and_its_folder_go_with_a_process_that_is_killed";
    if std::env::var_os(VICTIM).is_some() {
        let server = RedisServer::start(&[]).unwrap();
        let line = format!("\n{MARK}{} {}\n", server.address(), server.folder().display());
        std::io::stdout().write_all(line.as_bytes()).unwrap();
        std::io::stdout().flush().unwrap();
        // Until it is killed, or its parent is gone.
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", OWN_NAME, "--nocapture"])
        .env(VICTIM, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find_map(|line| line.strip_prefix(MARK).map(str::to_owned)).unwrap();
    let (address, folder) = line.split_once(' ').unwrap();
    let address: SocketAddr = address.parse().unwrap();
    assert!(Connection::open(address).is_ok() && Path::new(folder).is_dir());
    victim.kill().unwrap();
    victim.wait().unwrap();
    let gone = || Connection::open(address).is_err() && !Path::new(folder).exists();
    assert!(eventually(Duration::from_secs(30), gone), "{line}");
}
