//! A front of real servers that are flushed, restarted, stopped, failed over, evicting, or whose clock stands still, while
//! processes that die now and then work on many tasks, each delivered several times: slower, and never wrong.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use taskonce_contract::{Delays, RecordingKeeper, VirtualHost};
use taskonce_core::held::Settled;
use taskonce_core::key::{Fingerprint, Handler, Task};
use taskonce_core::ledger::{Admission, Ledger};
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::Output;
use taskonce_core::store::Store;
use taskonce_fast_check::{Counts, DoneHint, FastCheck, Options};
use taskonce_redis::RedisStore;
use taskonce_sqlite::SqliteStore;
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisServer, Sentinels};
use tokio::task::JoinSet;
use tokio::time::sleep;

mod common;

use common::Watched;

const LEASE: Duration = Duration::from_secs(3);
/// Tasks of one run, and how often each is delivered.
const TASKS: usize = 300;
const COPIES: usize = 3;
/// Processes, and workers of each.
const PROCESSES: usize = 3;
const WORKERS: usize = 4;
/// Every so manieth task kills its first holder after the claim.
const DIES_EVERY: usize = 20;
/// The longest that a delivery that is busy is deferred.
const DEFER_MAX: Duration = Duration::from_millis(20);
/// How long one run of a handler takes, so that the run lasts longer than its faults.
const WORK: Duration = Duration::from_millis(10);
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(100);

/// One database, and what came to pass.
struct Scene {
    _folder: tempfile::TempDir,
    database: Arc<Watched>,
    front: String,
    done: DoneHint,
    /// Append-only: the task of each effect.
    effects: Mutex<Vec<usize>>,
    /// Completions that were recorded.
    recorded: Mutex<Vec<usize>>,
    queue: Mutex<VecDeque<usize>>,
    left: Mutex<usize>,
}

/// A process: a fast check and a ledger of its own.
struct Process {
    ledger: Ledger,
    fast: FastCheck,
}

fn policy() -> Policy {
    Policy { lease: LEASE, backoff: Backoff::NONE, attempts_max: 100, crashes_max: 100, ..Policy::new(Effect::Keyed) }
}

fn task(number: usize) -> Task {
    let key = Handler::new("faults", "1").unwrap().key(&number.to_string()).unwrap();
    Task { key, fingerprint: Fingerprint([1; 16]) }
}

impl Scene {
    fn new(front: &str, done: DoneHint) -> Arc<Scene> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tasks.db");
        let sqlite = SqliteStore::open(&file, taskonce_sqlite::Options::default()).unwrap();
        let copies = (0..COPIES).flat_map(|_| 0..TASKS).collect();
        Arc::new(Scene {
            _folder: folder,
            database: Watched::new(Arc::new(sqlite), Some("1")),
            front: format!("{front}?prefix=hint:&eviction=accept"),
            done,
            effects: Mutex::default(),
            recorded: Mutex::default(),
            queue: Mutex::new(copies),
            left: Mutex::new(TASKS * COPIES),
        })
    }

    fn process(&self, number: usize) -> Arc<Process> {
        let front = Arc::new(RedisStore::from_url(&self.front).unwrap());
        let options = Options { done: self.done, ..Options::default() };
        let fast = FastCheck::new(front, Arc::clone(&self.database) as Arc<dyn Store>, options);
        let host = VirtualHost::new(&format!("process-{number}"), Arc::default(), number as u64, Delays::Drawn);
        let keeper = Arc::new(RecordingKeeper::default());
        Arc::new(Process { ledger: Ledger::new(Arc::new(fast.clone()), Arc::new(host), keeper), fast })
    }

    fn is_over(&self) -> bool {
        *self.left.lock().unwrap() == 0
    }

    async fn work(self: Arc<Scene>, process: Arc<Process>) {
        while !self.is_over() {
            let Some(number) = self.queue.lock().unwrap().pop_front() else {
                // sleeps: a worker with an empty queue
                sleep(DEFER_MAX).await;
                continue;
            };
            match process.ledger.claim(&task(number), &policy()).await.unwrap() {
                Admission::Run(claim) => {
                    claim.enter();
                    if number % DIES_EVERY == 0 && claim.attempt() == 1 {
                        // Killed: nobody hears of it any more, and its delivery comes again.
                        std::mem::forget(claim);
                        self.queue.lock().unwrap().push_back(number);
                        continue;
                    }
                    // sleeps: a handler that works
                    sleep(WORK).await;
                    self.effects.lock().unwrap().push(number);
                    if let Settled::Recorded(_) = claim.complete(Output::kept("text/plain", "x")).await.unwrap() {
                        self.recorded.lock().unwrap().push(number);
                    }
                    *self.left.lock().unwrap() -= 1;
                }
                Admission::Replay(seen) => {
                    assert_eq!(seen.output(), &Output::kept("text/plain", "x"));
                    *self.left.lock().unwrap() -= 1;
                }
                Admission::Busy(seen) | Admission::Waiting(seen) => {
                    // sleeps: a deferred delivery
                    sleep(seen.defer_for().min(DEFER_MAX)).await;
                    self.queue.lock().unwrap().push_back(number);
                }
                other => panic!("task {number}: {other:?}"),
            }
        }
    }

    /// Works until every delivery is settled, with a fault meanwhile; then each task took effect once.
    async fn play(self: &Arc<Scene>, fault: impl AsyncFnOnce(&Scene)) -> Counts {
        let start = Instant::now();
        let processes: Vec<_> = (0..PROCESSES).map(|number| self.process(number)).collect();
        let mut workers = JoinSet::new();
        for process in &processes {
            for _ in 0..WORKERS {
                workers.spawn(Arc::clone(self).work(Arc::clone(process)));
            }
        }
        let all = async {
            tokio::join!(fault(self), async {
                while let Some(ended) = workers.join_next().await {
                    ended.unwrap();
                }
            })
        };
        tokio::time::timeout(PATIENCE, all).await.expect("none is blocked");
        let took = start.elapsed();
        let (effects, recorded) = (self.effects.lock().unwrap(), self.recorded.lock().unwrap());
        for (what, of) in [("effects", &*effects), ("completions", &*recorded)] {
            let mut counts: BTreeMap<usize, usize> = (0..TASKS).map(|number| (number, 0)).collect();
            of.iter().for_each(|number| *counts.entry(*number).or_default() += 1);
            counts.retain(|_, count| *count != 1);
            assert!(counts.is_empty(), "{what} of these tasks, once each wanted: {counts:?}");
        }
        let counts = processes.iter().map(|process| process.fast.counts()).reduce(added).unwrap();
        assert!(took < PATIENCE, "{took:?} {counts:?}");
        counts
    }
}

fn added(one: Counts, other: Counts) -> Counts {
    Counts {
        degraded: one.degraded + other.degraded,
        answered: one.answered + other.answered,
        trusted: one.trusted + other.trusted,
        verified: one.verified + other.verified,
        database_reads: one.database_reads + other.database_reads,
        stale: one.stale + other.stale,
        written: one.written + other.written,
        dropped: one.dropped + other.dropped,
        openings: one.openings + other.openings,
    }
}

/// Until so many effects have happened, or all is over.
async fn until_effects(scene: &Scene, count: usize) {
    while scene.effects.lock().unwrap().len() < count && !scene.is_over() {
        sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_is_flushed_again_and_again_forgets_no_task() {
    for done in [DoneHint::Verified, DoneHint::Trusted] {
        let server = RedisServer::start(&[]).unwrap();
        let scene = Scene::new(&server.url(), done);
        let counts = scene
            .play(async |scene| {
                for count in 1..10 {
                    until_effects(scene, count * TASKS / 10).await;
                    server.command(&["FLUSHALL"]).unwrap();
                }
            })
            .await;
        assert!(counts.answered > 0 && counts.written > 0, "{counts:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_is_killed_and_restarted_forgets_no_task() {
    let mut server = RedisServer::start(&[]).unwrap();
    let scene = Scene::new(&server.url(), DoneHint::Verified);
    let counts = scene
        .play(async |scene| {
            until_effects(scene, TASKS / 4).await;
            server.kill();
            until_effects(scene, TASKS / 2).await;
            server.restart().unwrap();
            until_effects(scene, TASKS * 3 / 4).await;
            server.restart().unwrap();
        })
        .await;
    assert!(counts.degraded > 0, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_is_stopped_and_goes_on_blocks_no_task() {
    let server = RedisServer::start(&[]).unwrap();
    let scene = Scene::new(&server.url(), DoneHint::Verified);
    let counts = scene
        .play(async |scene| {
            until_effects(scene, TASKS / 3).await;
            server.stop().unwrap();
            until_effects(scene, TASKS * 2 / 3).await;
            server.cont().unwrap();
        })
        .await;
    assert!(counts.degraded > 0 && counts.openings > 0, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_evicts_forgets_no_task() {
    let server = RedisServer::start(&["--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru"]).unwrap();
    let scene = Scene::new(&server.url(), DoneHint::Trusted);
    scene
        .play(async |scene| {
            // So full that hints go while they are needed.
            let filler = "x".repeat(20_000);
            for number in 0..3000 {
                server.command(&["SET", &format!("filler-{number}"), &filler]).unwrap();
                if scene.is_over() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    let info = server.command(&["INFO", "stats"]).unwrap().text();
    let evicted = info.lines().find_map(|line| line.strip_prefix("evicted_keys:")).unwrap();
    assert!(evicted.parse::<u64>().unwrap() > 0, "nothing was evicted");
}

/// Hints stay for ever young: a dead holder's would answer Busy without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_whose_clock_stands_still_blocks_no_task() {
    let server = RedisServer::start_with_clock(&[]).unwrap();
    let scene = Scene::new(&server.url(), DoneHint::Verified);
    let counts = scene
        .play(async |scene| {
            until_effects(scene, 5).await;
            server.freeze_clock().unwrap();
        })
        .await;
    assert!(counts.answered > 0, "{counts:?}");
}

/// Its time goes back as well, when it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_fails_over_without_the_last_hints_forgets_no_task() {
    let mut stand = Sentinels::start(&SentinelOptions::quick()).unwrap();
    let scene = Scene::new(&stand.url(), DoneHint::Verified);
    scene
        .play(async |scene| {
            until_effects(scene, TASKS / 4).await;
            // The replica gets nothing any more, and becomes the primary with what it had.
            let (primary, replica) = (stand.primary().unwrap(), stand.replica().unwrap());
            stand.server(replica).stop().unwrap();
            until_effects(scene, TASKS / 2).await;
            stand.server_mut(primary).kill();
            stand.server(replica).cont().unwrap();
            while !scene.is_over() && stand.primary().is_ok_and(|now| now == primary) {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
}

/// How long a task takes, claim and completion, one after another.
async fn a_task(process: &Process, first: usize, count: usize) -> Duration {
    let start = Instant::now();
    for number in first..first + count {
        let Admission::Run(claim) = process.ledger.claim(&task(number), &policy()).await.unwrap() else {
            panic!("task {number} runs")
        };
        claim.complete(Output::Nothing).await.unwrap();
    }
    start.elapsed() / count as u32
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_front_costs_a_task_less_than_five_milliseconds() {
    const COUNT: usize = 200;
    let server = RedisServer::start(&[]).unwrap();
    let scene = Scene::new(&server.url(), DoneHint::Verified);
    let process = scene.process(0);
    a_task(&process, 0, 10).await;
    let with_it = a_task(&process, 1000, COUNT).await;
    server.stop().unwrap();
    let without = a_task(&process, 2000, COUNT).await;
    let counts = process.fast.counts();
    assert!(without < with_it + Duration::from_millis(5), "{without:?} a task, and {with_it:?} with the front");
    assert!(counts.degraded >= COUNT as u64 && counts.openings >= 1, "{counts:?}");
}
