//! Waiting for another's run over Redis: what it costs, who wakes, and who inherits. Each ledger stands for a process:
//! it has its own heart and its own connections, and those who wait on it are in a room of their own.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use taskonce::{Backoff, Effect, Failure, Handler, Input, Ledger, Outcome, Policy, Run, Task, open};
use taskonce_testkit::RedisServer;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn task(id: &str) -> Task {
    Handler::new("waiting", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap()
}

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::new(Effect::Keyed) }
}

/// The commands that the server has run, without those that ask for them.
fn commands(server: &RedisServer) -> u64 {
    let info = server.command(&["INFO", "commandstats"]).unwrap().text();
    let counted = info.lines().filter(|line| !line.starts_with("cmdstat_info:"));
    counted.filter_map(|line| line.split_once(":calls=")?.1.split(',').next()?.parse::<u64>().ok()).sum()
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until nothing was asked of the server for a while: those who wait have all begun to.
async fn until_quiet(server: &RedisServer) {
    let (mut last, mut since) = (commands(server), Instant::now());
    until("the server has nothing to do", || {
        let now = commands(server);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        since.elapsed() > Duration::from_millis(500)
    })
    .await;
}

/// A run that ends as it is told to.
struct Leader {
    end: Arc<Semaphore>,
    run: tokio::task::JoinHandle<taskonce::Result<Outcome<u8>>>,
}

impl Leader {
    /// Starts it; when it is let go it returns `result`.
    async fn start(url: &str, task: &Task, policy: &Policy, result: Result<u8, Failure>) -> Leader {
        let (begun, end) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let (ledger, task, policy) = (open(url).unwrap(), task.clone(), policy.clone());
        let (enters, ends) = (Arc::clone(&begun), Arc::clone(&end));
        let run = tokio::spawn(async move {
            let handler = |_| async move {
                enters.add_permits(1);
                ends.acquire().await.unwrap().forget();
                result
            };
            ledger.run(&task, &policy, handler).await
        });
        tokio::time::timeout(PATIENCE, begun.acquire()).await.expect("the leader runs").unwrap().forget();
        Leader { end, run }
    }

    async fn let_go(self) -> Outcome<u8> {
        self.end.add_permits(1);
        self.run.await.unwrap().unwrap()
    }
}

/// So many who wait on one ledger, and run the task if it falls to them.
fn wait_on(ledger: &Ledger, task: &Task, policy: &Policy, count: usize, runs: &Arc<AtomicU32>) -> JoinSet<Outcome<u8>> {
    let mut waiting = JoinSet::new();
    for _ in 0..count {
        let (ledger, task, policy, runs) = (ledger.clone(), task.clone(), policy.clone(), Arc::clone(runs));
        waiting.spawn(async move {
            let handler = |_| async move {
                runs.fetch_add(1, Ordering::SeqCst);
                Ok(2)
            };
            ledger.run_or_wait(&task, &policy, PATIENCE, handler).await.unwrap()
        });
    }
    waiting
}

async fn values(waiting: JoinSet<Outcome<u8>>) -> Vec<Option<u8>> {
    let all = tokio::time::timeout(PATIENCE, waiting.join_all()).await.expect("all who wait go on");
    all.into_iter().map(Outcome::into_value).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_who_wait_ask_next_to_nothing_and_go_on_by_one_look() {
    let server = RedisServer::start(&[]).unwrap();
    let (task, policy, runs) = (task("a"), policy(), Arc::default());
    let leader = Leader::start(&server.url(), &task, &policy, Ok(1)).await;
    let waiting = wait_on(&open(&server.url()).unwrap(), &task, &policy, 1000, &runs);
    until_quiet(&server).await;
    let before = commands(&server);
    // sleeps: nothing must be asked while nothing happens
    tokio::time::sleep(Duration::from_secs(2)).await;
    let asked = commands(&server) - before;
    assert!(asked <= 10, "{asked} commands in 2 s for 1,000 who wait");
    let before = commands(&server);
    assert!(matches!(leader.let_go().await, Outcome::Ran { .. }));
    assert_eq!(values(waiting).await, vec![Some(1); 1000]);
    let asked = commands(&server) - before;
    assert!(asked <= 30, "{asked} commands to complete and to wake 1,000");
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_of_the_shortest_lease_wake_nobody_and_cost_each_process_a_read() {
    let server = RedisServer::start(&[]).unwrap();
    let (task, runs) = (task("a"), Arc::default());
    let policy = Policy { lease: Duration::from_millis(500), ..policy() };
    let leader = Leader::start(&server.url(), &task, &policy, Ok(1)).await;
    let waiting = wait_on(&open(&server.url()).unwrap(), &task, &policy, 100, &runs);
    until("they wait", || server.command(&["CLIENT", "LIST"]).unwrap().text().contains("taskonce-watch")).await;
    let (before, start) = (commands(&server), Instant::now());
    // sleeps: many leases pass, each renewed
    tokio::time::sleep(Duration::from_secs(3)).await;
    let each = (commands(&server) - before) as f64 / start.elapsed().as_secs_f64() / 100.0;
    assert!(each < 1.0, "{each} commands a second for each of 100, heartbeats among them");
    assert!(matches!(leader.let_go().await, Outcome::Ran { .. }));
    assert_eq!(values(waiting).await, vec![Some(1); 100]);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_those_who_wait_in_several_processes_one_inherits_from_a_leader_that_fails() {
    let server = RedisServer::start(&[]).unwrap();
    for delay in [Duration::ZERO, Duration::from_millis(700)] {
        let (task, policy, runs) = (task(&format!("{delay:?}")), policy(), Arc::default());
        let failure = Failure::retryable("no").retry_after(delay);
        let leader = Leader::start(&server.url(), &task, &policy, Err(failure)).await;
        let ledgers: Vec<_> = (0..4).map(|_| open(&server.url()).unwrap()).collect();
        let waiting: Vec<_> = ledgers.iter().map(|ledger| wait_on(ledger, &task, &policy, 25, &runs)).collect();
        until_quiet(&server).await;
        assert!(matches!(leader.let_go().await, Outcome::Failed { .. }));
        for waiting in waiting {
            assert_eq!(values(waiting).await, vec![Some(2); 25]);
        }
        assert_eq!(runs.load(Ordering::SeqCst), 1, "after a delay of {delay:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_outlast_a_server_that_is_killed_and_comes_back() {
    let mut server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let (task, policy, runs) = (task("a"), policy(), Arc::default());
    let leader = Leader::start(&server.url(), &task, &policy, Ok(1)).await;
    let ledgers: Vec<_> = (0..2).map(|_| open(&server.url()).unwrap()).collect();
    let waiting: Vec<_> = ledgers.iter().map(|ledger| wait_on(ledger, &task, &policy, 50, &runs)).collect();
    until_quiet(&server).await;
    server.kill();
    // sleeps: those who wait find the server away, more than once
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.restart().unwrap();
    assert!(matches!(leader.let_go().await, Outcome::Ran { .. }));
    for waiting in waiting {
        assert_eq!(values(waiting).await, vec![Some(1); 50]);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_and_a_killed_watcher_lose_no_wake_up() {
    let server = RedisServer::start(&[]).unwrap();
    for trouble in ["stopped", "watcher killed"] {
        let (task, policy, runs) = (task(trouble), policy(), Arc::default());
        let leader = Leader::start(&server.url(), &task, &policy, Ok(1)).await;
        let waiting = wait_on(&open(&server.url()).unwrap(), &task, &policy, 100, &runs);
        until_quiet(&server).await;
        if trouble == "stopped" {
            server.stop().unwrap();
            // sleeps: longer than a call takes
            tokio::time::sleep(Duration::from_millis(1200)).await;
            server.cont().unwrap();
        } else {
            let list = server.command(&["CLIENT", "LIST"]).unwrap().text();
            for line in list.lines().filter(|line| line.contains("name=taskonce-watch")) {
                let id = line.split_once("id=").unwrap().1.split(' ').next().unwrap();
                server.command(&["CLIENT", "KILL", "ID", id]).unwrap();
            }
        }
        assert!(matches!(leader.let_go().await, Outcome::Ran { .. }));
        assert_eq!(values(waiting).await, vec![Some(1); 100], "{trouble}");
        assert_eq!(runs.load(Ordering::SeqCst), 0, "{trouble}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_flush_one_of_those_who_wait_runs() {
    let server = RedisServer::start(&[]).unwrap();
    let (task, policy, runs) = (task("a"), policy(), Arc::default());
    let leader = Leader::start(&server.url(), &task, &policy, Ok(1)).await;
    let ledgers: Vec<_> = (0..2).map(|_| open(&server.url()).unwrap()).collect();
    let waiting: Vec<_> = ledgers.iter().map(|ledger| wait_on(ledger, &task, &policy, 50, &runs)).collect();
    until_quiet(&server).await;
    server.command(&["FLUSHALL"]).unwrap();
    for waiting in waiting {
        assert_eq!(values(waiting).await, vec![Some(2); 50]);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    // What the first run did is not recorded: the second one's end stands.
    assert!(matches!(leader.let_go().await, Outcome::ClaimLost { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_user_may_not_track_those_who_wait_look_for_themselves() {
    let server = RedisServer::start(&[]).unwrap();
    let denied = if server.version().unwrap() >= (7, 0) { "-client|tracking" } else { "-client" };
    server.command(&["ACL", "SETUSER", "ada", "on", ">secret", "~*", "+@all", denied]).unwrap();
    let url = server.url().replace("redis://", "redis://ada:secret@");
    let (task, policy, runs) = (task("a"), policy(), Arc::default());
    let leader = Leader::start(&url, &task, &policy, Ok(1)).await;
    let waiting = wait_on(&open(&url).unwrap(), &task, &policy, 100, &runs);
    let sets = server.calls("set").unwrap() + server.calls("evalsha").unwrap();
    until("all have asked, and one of them again", || {
        server.calls("set").unwrap() + server.calls("evalsha").unwrap() > sets + 105
    })
    .await;
    assert!(matches!(leader.let_go().await, Outcome::Ran { .. }));
    assert_eq!(values(waiting).await, vec![Some(1); 100]);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}
