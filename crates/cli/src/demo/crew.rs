//! The supervisor: starts workers, answers them, kills them, and counts in the end.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::column::Column;
use super::count::Count;
use super::load::{Load, Work};
use super::queue::{Queue, Receipt};
use super::room::{self, Room};
use super::show::Progress;
use super::{DRAIN_MAX, KILL_EVERY, Ran, VISIBILITY, WORKERS, worker};

/// How often the supervisor looks whether the column is through.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What all workers of a column share.
struct Desk {
    began: Instant,
    work: Vec<Work>,
    queue: Mutex<Queue>,
    /// The recipe's marks, each with the moment until which it stands. They never fail and are never lost.
    marks: Mutex<HashMap<usize, Instant>>,
    provider: Mutex<Provider>,
    /// Tasks that a person would have to look at.
    stuck: Mutex<HashSet<usize>>,
    refusals: Mutex<Vec<String>>,
    over: AtomicBool,
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
    post: Arc<Post>,
}

/// What supervisor and answering thread know of one worker.
#[derive(Default)]
struct Post {
    /// It has a delivery in hand.
    at_work: AtomicBool,
    /// It is killed: nothing more is handed to it.
    gone: AtomicBool,
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
        began: Instant::now(),
        work: load.work.clone(),
        queue: Mutex::new(Queue::new(&load.arrivals, VISIBILITY)),
        marks: Mutex::default(),
        provider: Mutex::new(Provider { charged: HashSet::new(), ledger: room.effects() }),
        stuck: Mutex::default(),
        refusals: Mutex::default(),
        over: AtomicBool::new(false),
    });
    if column == Column::Transactional {
        room.make_table()?;
    }
    let start = || Worker::start(column, room, mark_ttl, &desk);
    let mut workers = (0..WORKERS).map(|_| start()).collect::<io::Result<Vec<Worker>>>()?;
    progress.begin(column, load.arrivals.len());

    let (mut kills, mut kills_at_work) = (0, 0);
    let mut next_kill = desk.now() + pause(random);
    let until = load.ends() + DRAIN_MAX;
    loop {
        let (now, left) = (desk.now(), lock(&desk.queue).left());
        progress.show(load.arrivals.len() - left.min(load.arrivals.len()), kills);
        if left == 0 || now >= until {
            break;
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
    }
    let took = desk.now();
    desk.over.store(true, Ordering::SeqCst);
    drop(workers);

    let mut stuck = std::mem::take(&mut *lock(&desk.stuck));
    stuck.extend(lock(&desk.queue).tasks_left());
    let effects = match column {
        Column::Recipe | Column::Repeatable | Column::Keyed => std::fs::read_to_string(room.effects())?,
        Column::Transactional => room.charges()?,
    };
    let count = Count::new(load.tasks(), &effects, &std::fs::read_to_string(room.runs())?, &stuck);
    let refusals = std::mem::take(&mut *lock(&desk.refusals));
    Ok(Some(Ran { column, count, kills, kills_at_work, deliveries: load.arrivals.len(), took, refusals }))
}

/// The time until the next kill: about [`KILL_EVERY`], never the same.
fn pause(random: &mut fastrand::Rng) -> Duration {
    KILL_EVERY.mul_f64(0.5 + random.f64())
}

impl Worker {
    fn start(column: Column, room: &Room, mark_ttl: Duration, desk: &Arc<Desk>) -> io::Result<Worker> {
        // By this name also a program that was replaced meanwhile starts itself.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let mut process = Command::new(program)
            .args([worker::WORD, column.name()])
            .args([room.effects(), room.runs()])
            .arg(room.store_url())
            .arg(mark_ttl.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(answers), Some(questions)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::other("a worker without pipes"));
        };
        let post = Arc::new(Post::default());
        let (desk, shared) = (Arc::clone(desk), Arc::clone(&post));
        let answering = std::thread::Builder::new().name("demo-desk".into()).spawn(move || {
            let mut answers = answers;
            for question in BufReader::new(questions).lines().map_while(io::Result::ok) {
                let Some(answer) = desk.answer(&question, &shared) else { return };
                if answers.write_all(format!("{answer}\n").as_bytes()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Worker { process, answering: Some(answering), post })
    }

    /// Ends it with SIGKILL. Says whether it had a delivery in hand.
    fn kill(&mut self) -> io::Result<bool> {
        let at_work = self.post.at_work.load(Ordering::SeqCst);
        self.process.kill()?;
        self.process.wait()?;
        Ok(at_work)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
        self.post.gone.store(true, Ordering::SeqCst);
        if let Some(answering) = self.answering.take() {
            // It ends with the worker's pipe.
            let _panicked = answering.join();
        }
    }
}

impl Desk {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Answers a worker's question. `None` for one that makes no sense, which is how a cut line reads.
    fn answer(&self, question: &str, post: &Post) -> Option<String> {
        if let Some(why) = question.strip_prefix("refused ") {
            lock(&self.refusals).push(why.to_owned());
            return Some("ok".into());
        }
        let words: Vec<&str> = question.split(' ').collect();
        let receipt = |word: &str| word.parse().ok().map(Receipt);
        match words[..] {
            ["next"] => {
                post.at_work.store(false, Ordering::SeqCst);
                Some(self.next(post))
            }
            ["ack", number] => {
                lock(&self.queue).acknowledge(receipt(number)?);
                Some("ok".into())
            }
            ["defer", number, millis] => {
                let delay = Duration::from_millis(millis.parse().ok()?);
                lock(&self.queue).defer(receipt(number)?, self.now(), delay);
                Some("ok".into())
            }
            ["stuck", number, task] => {
                lock(&self.stuck).insert(task.parse().ok()?);
                lock(&self.queue).acknowledge(receipt(number)?);
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

    /// Waits for a delivery.
    fn next(&self, post: &Post) -> String {
        while !self.over.load(Ordering::SeqCst) && !post.gone.load(Ordering::SeqCst) {
            if let Some((receipt, task)) = lock(&self.queue).take(self.now()) {
                post.at_work.store(true, Ordering::SeqCst);
                let Work { before, after } = self.work[task];
                return format!("task {} {task} {} {}", receipt.0, before.as_millis(), after.as_millis());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        "over".into()
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
