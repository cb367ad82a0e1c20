//! The supervisor: fills the queue, starts workers, answers them, kills them, and counts in the end.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use taskonce::Handler;
use taskonce::source::{self, DeadFilter, Depth, Entrance, Envelope, Source};
use tokio::runtime::Runtime;

use super::column::Column;
use super::count::Count;
use super::load::Load;
use super::room::{self, Room};
use super::show::{Live, Progress};
use super::worker::{Orders, Payload};
use super::{DRAIN_MAX, KILL_EVERY, NAMESPACE, Ran, SOURCE, WORKERS};

/// How often the supervisor looks whether a kill is due.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How often it looks into the queue and counts, for the live view and for the end.
const COUNT_EVERY: Duration = Duration::from_millis(100);
/// The most sends at once.
const SENDS_MAX: usize = 256;

/// What all workers of a column share.
struct Desk {
    /// The recipe's marks, each with the moment until which it stands. They never fail and are never lost.
    marks: Mutex<HashMap<usize, Instant>>,
    provider: Mutex<Provider>,
}

/// The provider of the keyed effect: it charges once a key, and knows nothing of workers and leases.
struct Provider {
    charged: HashSet<String>,
    ledger: std::path::PathBuf,
}

/// One worker process and the thread that answers it.
struct Worker {
    process: Child,
    answering: Option<JoinHandle<()>>,
    /// It runs a task.
    at_work: Arc<AtomicBool>,
}

/// The queue, as the supervisor sees it.
struct Queue {
    runtime: Runtime,
    source: Arc<dyn Source>,
    handler: String,
}

impl Queue {
    fn open(room: &Room, handler: &str) -> io::Result<Queue> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let source = {
            let _entered = runtime.enter();
            source::open_named(&room.source_url(), SOURCE).map_err(io::Error::other)?
        };
        Ok(Queue { runtime, source, handler: handler.to_owned() })
    }

    /// Sends every delivery, to arrive in its time.
    fn fill(&self, load: &Load, began: Instant) -> io::Result<()> {
        let (name, version) = self.handler.split_once('@').unwrap_or((&self.handler, "1"));
        let handler = Handler::within(NAMESPACE, name, version).map_err(io::Error::other)?;
        for some in load.arrivals.chunks(SENDS_MAX) {
            let mut sends = tokio::task::JoinSet::new();
            for arrival in some {
                let work = load.work[arrival.task];
                let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
                let (before_ms, after_ms) = (millis(work.before), millis(work.after));
                let payload = serde_json::to_vec(&Payload { task: arrival.task, before_ms, after_ms })?;
                let key = handler.key(&arrival.task.to_string()).map_err(io::Error::other)?;
                let envelope = Envelope { key: Some(key.to_string()), ..Envelope::new(&self.handler, payload) };
                let (source, delay) = (Arc::clone(&self.source), arrival.at.saturating_sub(began.elapsed()));
                let send = async move { source.send(&envelope, delay, Entrance::Open).await.map(drop) };
                sends.spawn_on(send, self.runtime.handle());
            }
            while let Some(sent) = self.runtime.block_on(sends.join_next()) {
                sent.map_err(io::Error::other)?.map_err(io::Error::other)?;
            }
        }
        Ok(())
    }

    fn depth(&self) -> io::Result<Depth> {
        let depths = self.runtime.block_on(self.source.depth()).map_err(io::Error::other)?;
        Ok(depths.into_iter().find(|depth| *depth.handler == *self.handler).unwrap_or_default())
    }

    /// The tasks of its dead letters: a person would have to look at them.
    fn dead(&self) -> io::Result<HashSet<usize>> {
        let filter = DeadFilter { handler: Some(self.handler.clone()), ..DeadFilter::default() };
        let mut found = HashSet::new();
        let mut cursor = None;
        loop {
            let page = self.runtime.block_on(self.source.dead_letters(&filter, cursor)).map_err(io::Error::other)?;
            let ids =
                page.lines.iter().filter_map(|line| line.key.as_deref()?.rsplit('/').next()?.parse::<usize>().ok());
            found.extend(ids);
            cursor = page.next;
            if cursor.is_none() {
                return Ok(found);
            }
        }
    }
}

fn left(depth: &Depth) -> usize {
    usize::try_from(depth.ready + depth.deferred + depth.in_flight).unwrap_or(usize::MAX)
}

/// Runs the load through one column. `None` when a signal ended it.
pub(crate) fn run(
    column: Column,
    load: &Load,
    room: &Room,
    mark_ttl: Duration,
    random: &mut fastrand::Rng,
    progress: &Progress,
    stop: &AtomicBool,
) -> io::Result<Option<Ran>> {
    let desk = Arc::new(Desk {
        marks: Mutex::default(),
        provider: Mutex::new(Provider { charged: HashSet::new(), ledger: room.effects() }),
    });
    match column {
        Column::Transactional => room.make_table()?,
        // A store that cannot be opened is told here, once, and not by every worker.
        Column::Recipe | Column::Repeatable | Column::Keyed => {
            drop(taskonce::open(&room.store_url()).map_err(io::Error::other)?);
        }
    }
    // Of its own, so that what an earlier demo left in a server is nobody's business here.
    let handler = format!("{}@{:08x}", column.name(), fastrand::u32(..));
    let queue = Queue::open(room, &handler)?;
    let orders = Orders {
        column,
        effects: room.effects(),
        runs: room.runs(),
        store: room.store_url(),
        source: room.source_url(),
        handler,
        mark_ttl: mark_ttl.as_millis().to_string(),
    };
    let start = || Worker::start(&orders, &desk);
    let mut workers = (0..WORKERS).map(|_| start()).collect::<io::Result<Vec<Worker>>>()?;
    let began = Instant::now();
    queue.fill(load, began)?;
    progress.begin(column, load.arrivals.len());

    let (mut kills, mut kills_at_work) = (0, 0);
    let mut next_kill = began.elapsed() + pause(random);
    let mut next_count = Duration::ZERO;
    let until = load.ends() + DRAIN_MAX + queue.source.describe().visibility * 3;
    let in_the_end = loop {
        let now = began.elapsed();
        if now >= next_count {
            next_count = now + COUNT_EVERY;
            let depth = queue.depth()?;
            let left = left(&depth);
            if left == 0 || now >= until {
                break left;
            }
            let at_work = workers.iter().filter(|worker| worker.at_work.load(Ordering::SeqCst)).count();
            let count = count(column, load, room, &HashSet::new())?;
            progress.show(&Live { settled: load.arrivals.len().saturating_sub(left), depth, at_work, kills, count });
        }
        if stop.load(Ordering::SeqCst) {
            return Ok(None);
        }
        if now >= next_kill {
            next_kill = now + pause(random);
            let chosen = &mut workers[random.usize(..WORKERS)];
            kills += 1;
            kills_at_work += usize::from(chosen.kill()?);
            *chosen = start()?;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let took = began.elapsed();
    drop(workers);

    let mut stuck = queue.dead()?;
    if in_the_end > 0 {
        // What is still queued is not lost. Which tasks that are nobody can see from outside: all that have no effect yet.
        stuck.extend(0..load.tasks());
    }
    let count = count(column, load, room, &stuck)?;
    Ok(Some(Ran { column, count, kills, kills_at_work, deliveries: load.arrivals.len(), took }))
}

/// What happened so far, counted outside.
fn count(column: Column, load: &Load, room: &Room, stuck: &HashSet<usize>) -> io::Result<Count> {
    let effects = match column {
        Column::Recipe | Column::Repeatable | Column::Keyed => std::fs::read_to_string(room.effects())?,
        Column::Transactional => room.charges()?,
    };
    Ok(Count::new(load.tasks(), &effects, &std::fs::read_to_string(room.runs())?, stuck))
}

/// The time until the next kill: about [`KILL_EVERY`], never the same.
fn pause(random: &mut fastrand::Rng) -> Duration {
    KILL_EVERY.mul_f64(0.5 + random.f64())
}

impl Worker {
    fn start(orders: &Orders, desk: &Arc<Desk>) -> io::Result<Worker> {
        // By this name also a program that was replaced meanwhile starts itself.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let mut process =
            Command::new(program).args(orders.args()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(answers), Some(questions)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::other("a worker without pipes"));
        };
        let at_work = Arc::new(AtomicBool::new(false));
        let (desk, shared) = (Arc::clone(desk), Arc::clone(&at_work));
        let answering = std::thread::Builder::new().name("demo-desk".into()).spawn(move || {
            let mut answers = answers;
            for question in BufReader::new(questions).lines().map_while(io::Result::ok) {
                let Some(answer) = desk.answer(&question, &shared) else { return };
                if answers.write_all(format!("{answer}\n").as_bytes()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Worker { process, answering: Some(answering), at_work })
    }

    /// Ends it with SIGKILL. Says whether it ran a task.
    fn kill(&mut self) -> io::Result<bool> {
        let at_work = self.at_work.load(Ordering::SeqCst);
        self.process.kill()?;
        self.process.wait()?;
        Ok(at_work)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
        if let Some(answering) = self.answering.take() {
            // It ends with the worker's pipe.
            let _panicked = answering.join();
        }
    }
}

impl Desk {
    /// Answers a worker's question. `None` for one that makes no sense, which is how a cut line reads.
    fn answer(&self, question: &str, at_work: &AtomicBool) -> Option<String> {
        let words: Vec<&str> = question.split(' ').collect();
        match words[..] {
            ["at", "work"] => {
                at_work.store(true, Ordering::SeqCst);
                Some("ok".into())
            }
            ["idle"] => {
                at_work.store(false, Ordering::SeqCst);
                Some("ok".into())
            }
            ["mark", task, millis] => {
                let (task, ttl) = (task.parse().ok()?, Duration::from_millis(millis.parse().ok()?));
                Some(self.mark(task, ttl).into())
            }
            ["charge", task, key] => lock(&self.provider).charge(task, key).ok().map(Into::into),
            _ => None,
        }
    }

    /// Sets a mark, unless one stands: `SET key NX PX ttl`.
    fn mark(&self, task: usize, ttl: Duration) -> &'static str {
        let (mut marks, now) = (lock(&self.marks), Instant::now());
        match marks.get(&task) {
            Some(until) if *until > now => "there",
            Some(_) | None => {
                marks.insert(task, now + ttl);
                "new"
            }
        }
    }
}

impl Provider {
    fn charge(&mut self, task: &str, key: &str) -> io::Result<&'static str> {
        if !self.charged.insert(key.to_owned()) {
            return Ok("charged before");
        }
        room::append(&self.ledger, &format!("{task} {key}"))?;
        Ok("charged")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
