//! Tasks that are claimed and completed all the time, whatever happens to the servers meanwhile.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use taskonce_core::key::Key;
use taskonce_core::record::Record;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_core::{ErrorKind, Result, Retry};
use taskonce_redis::RedisStore;
use taskonce_testkit::eventually;
use taskonce_testkit::resp::Connection;
use tokio::task::JoinSet;

use crate::support::{done, key, running};

/// How long anything may take on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A load that goes on until it is ended.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    seen: Arc<Seen>,
    workers: JoinSet<Vec<Completed>>,
}

/// A task whose completion was acknowledged, and what was written for it.
pub(crate) struct Completed {
    pub(crate) key: Key,
    pub(crate) claim: Record,
    pub(crate) last: Record,
}

/// What the workers have seen.
#[derive(Default)]
struct Seen {
    completed: AtomicUsize,
    failed: AtomicUsize,
    lost: AtomicUsize,
    longest: Mutex<Duration>,
}

/// What became of a load.
pub(crate) struct Report {
    pub(crate) completed: Vec<Completed>,
    /// Calls with an error.
    pub(crate) failed: usize,
    /// Acknowledged claims that were gone.
    pub(crate) lost: usize,
    /// The longest call.
    pub(crate) longest: Duration,
}

impl Load {
    /// So many workers, each with keys of its own that begin with `name`.
    pub(crate) fn start(redis: &RedisStore, name: &'static str, workers: usize) -> Load {
        let mut load = Load { stop: Arc::default(), seen: Arc::default(), workers: JoinSet::new() };
        for worker in 0..workers {
            let (redis, stop, seen) = (redis.clone(), Arc::clone(&load.stop), Arc::clone(&load.seen));
            load.workers.spawn(async move {
                let mut completed = Vec::new();
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    let key = key(&format!("{name}-{worker}-{number}"));
                    completed.extend(seen.run(&redis, key, &stop).await);
                }
                completed
            });
        }
        load
    }

    /// Waits until so many more tasks are completed.
    pub(crate) fn await_more(&self, count: usize) {
        let wanted = self.seen.completed.load(Ordering::Relaxed) + count;
        let enough = || self.seen.completed.load(Ordering::Relaxed) >= wanted;
        assert!(eventually(SOON, enough), "tasks stand still");
    }

    pub(crate) async fn end(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        let completed = self.workers.join_all().await.into_iter().flatten().collect();
        Report {
            completed,
            failed: self.seen.failed.load(Ordering::Relaxed),
            lost: self.seen.lost.load(Ordering::Relaxed),
            longest: *self.seen.longest.lock().unwrap(),
        }
    }
}

impl Seen {
    /// One task, asked again after errors. `None` when the load ends first, or the claim is lost.
    async fn run(&self, redis: &RedisStore, key: Key, stop: &AtomicBool) -> Option<Completed> {
        let (claim, last) = (running(), done());
        let mut current: Option<&Record> = None;
        let mut was_claimed = false;
        while !stop.load(Ordering::Relaxed) {
            let next = if current.is_none() { &claim } else { &last };
            let swap = self.time(redis.swap(&key, Expected::record(current), Next::Keep(next))).await;
            match swap {
                // The outcome is unknown: the same is asked again.
                Err(error) => {
                    let kind = error.kind();
                    let may_be = [ErrorKind::Unreachable, ErrorKind::TimedOut, ErrorKind::ReadOnly].contains(&kind);
                    assert!(may_be, "{key}: {error:?}");
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Swap::Stored(_)) if current.is_some() => {
                    self.completed.fetch_add(1, Ordering::Relaxed);
                    return Some(Completed { key, claim, last });
                }
                Ok(Swap::Stored(_)) => {
                    was_claimed = true;
                    current = Some(&claim);
                }
                Ok(Swap::Locked(found)) => panic!("no transaction is open, and {found:?} is locked"),
                // The claim was forgotten, which a failover may do: nobody else has such a key.
                Ok(Swap::Conflict(None)) => {
                    assert!(was_claimed, "{key}: nothing is no conflict for a first claim");
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    return None;
                }
                Ok(Swap::Conflict(Some(found))) => panic!("{key}: nobody else writes it, and it holds {found:?}"),
            }
        }
        None
    }

    async fn time<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        let start = Instant::now();
        let answer = call.await;
        let mut longest = self.longest.lock().unwrap();
        *longest = start.elapsed().max(*longest);
        answer
    }
}

impl Report {
    /// How many completions are there. Of the others, which a failover forgot, there is an earlier state or nothing.
    pub(crate) async fn kept(&self, redis: &RedisStore) -> usize {
        let mut kept = 0;
        for Completed { key, claim, last } in &self.completed {
            match redis.load(key).await.unwrap() {
                Some(found) if *found.record == *last => kept += 1,
                Some(found) => assert_eq!(*found.record, *claim, "{key}"),
                None => {}
            }
        }
        kept
    }
}

/// How many connections a server has accepted, by its own statistics, asked on one connection.
pub(crate) fn accepted(connection: &mut Connection) -> i64 {
    let stats = connection.ask(&["INFO", "stats"]).unwrap().text();
    let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.unwrap().trim().parse().unwrap()
}

/// Claims new keys of this form until it works: how long that took.
pub(crate) async fn until_claimed(redis: &RedisStore, form: impl Fn(u32) -> Key) -> Duration {
    let start = Instant::now();
    for number in 0.. {
        let key = form(number);
        match redis.swap(&key, Expected::Nothing, Next::Claim(&running())).await {
            Ok(Swap::Stored(_)) => break,
            Ok(Swap::Conflict(found) | Swap::Locked(found)) => panic!("a new key held {found:?}"),
            Err(error) => {
                // With any other the end of a task would be given up.
                assert_eq!(error.kind().retry(), Retry::Later, "{error:?}");
                assert!(start.elapsed() < SOON, "not back: {error:?}");
            }
        }
    }
    start.elapsed()
}
