//! A worker process: takes deliveries from the queue until its input ends, and handles them in its column's way.
//!
//! The columns of taskonce run the worker of the library, one task at a time. What is no part of either way, the recipe's marks
//! and the provider of the keyed effect, is the supervisor's: it is asked over this process's stdin and stdout, a line to ask and
//! a line to answer. So the process ends by itself when the supervisor is gone.

use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use taskonce::routes::{Routes, Settings, SourceRules};
use taskonce::source::{self, Source, Want};
use taskonce::sqlite::CompleteIn as _;
use taskonce::sqlite::rusqlite::{self, Connection};
use taskonce::worker::{Job, Worker};
use taskonce::{
    Admission, Claim, Context, Effect, Error, ErrorKind, Failure, Ledger, Name, Outcome, Output, Replayed, Retry,
};
use tokio::time::sleep;

use super::column::Column;
use super::{LEASE, NAMESPACE, SOURCE, room};
use crate::report;

/// The first argument of a worker process.
pub(crate) const WORD: &str = "__demo-worker";

/// Kills are the weather of the demo, not the fault of a task: none is given up for them.
const GIVEN_UP_AFTER: u32 = 1_000;
/// How long a transaction stays open between the effect and the completion, so that kills fall there too.
const INSIDE: Duration = Duration::from_millis(3);
/// How long the recipe waits for a delivery before it asks again.
const WAIT: Duration = Duration::from_secs(1);
/// How long it leaves a queue alone that did not answer.
const AGAIN: Duration = Duration::from_millis(200);
/// The first delay after a failed attempt.
const BACKOFF: Duration = Duration::from_millis(100);
/// How long records stay that the demo leaves in a server.
const RETENTION: Duration = Duration::from_secs(3_600);

/// What a worker process is told by its arguments.
pub(crate) struct Orders {
    pub(crate) column: Column,
    pub(crate) effects: PathBuf,
    pub(crate) runs: PathBuf,
    pub(crate) store: String,
    pub(crate) source: String,
    /// The handler, as senders name it.
    pub(crate) handler: String,
    /// The mark's time to live, in milliseconds.
    pub(crate) mark_ttl: String,
}

/// What a delivery says.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Payload {
    /// The task's number.
    pub(crate) task: usize,
    pub(crate) before_ms: u64,
    pub(crate) after_ms: u64,
}

impl Orders {
    /// The arguments that tell them.
    pub(crate) fn args(&self) -> [OsString; 8] {
        [
            WORD.into(),
            self.column.name().into(),
            self.effects.clone().into(),
            self.runs.clone().into(),
            self.store.clone().into(),
            self.source.clone().into(),
            self.handler.clone().into(),
            self.mark_ttl.clone().into(),
        ]
    }

    fn read(args: &[OsString]) -> io::Result<Orders> {
        let bad = || io::Error::other("this is only for the demo's own use");
        let [column, effects, runs, store, source, handler, mark_ttl] = args else { return Err(bad()) };
        let text = |arg: &OsString| arg.to_str().map(str::to_owned).ok_or_else(bad);
        Ok(Orders {
            column: Column::from_name(&text(column)?).ok_or_else(bad)?,
            effects: effects.into(),
            runs: runs.into(),
            store: text(store)?,
            source: text(source)?,
            handler: text(handler)?,
            mark_ttl: text(mark_ttl)?,
        })
    }
}

/// Runs a worker.
pub(crate) fn main(args: &[OsString]) -> ExitCode {
    match Orders::read(args).and_then(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::say(format_args!("demo worker {}: {error}", std::process::id()));
            ExitCode::FAILURE
        }
    }
}

fn work(orders: Orders) -> io::Result<()> {
    // Two threads: what blocks one must not keep a delivery from being held.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let queue = source::open_named(&orders.source, SOURCE).map_err(io::Error::other)?;
        let desk = Arc::new(Desk { orders, line: Line::open()? });
        match desk.orders.column {
            Column::Recipe => desk.by_recipe(&*queue).await,
            Column::Repeatable | Column::Keyed | Column::Transactional => desk.by_taskonce(queue).await,
        }
    })
}

/// The line to the supervisor.
struct Line(Mutex<mpsc::Receiver<String>>);

impl Line {
    fn open() -> io::Result<Line> {
        let (tell, told) = mpsc::channel();
        std::thread::Builder::new().spawn(move || {
            for answer in io::stdin().lock().lines().map_while(io::Result::ok) {
                if tell.send(answer).is_err() {
                    break;
                }
            }
            // The supervisor is gone, and with it all that this process is for.
            std::process::exit(0);
        })?;
        Ok(Line(Mutex::new(told)))
    }

    /// Asks the supervisor, and waits for its answer.
    fn ask(&self, question: &str) -> io::Result<String> {
        let answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stdout = io::stdout().lock();
        stdout.write_all(format!("{question}\n").as_bytes())?;
        stdout.flush()?;
        answers.recv().map_err(io::Error::other)
    }
}

/// What all tasks of this process share.
struct Desk {
    orders: Orders,
    line: Line,
}

impl Desk {
    /// The usual recipe: mark before the work, drop what is marked, acknowledge when done.
    async fn by_recipe(&self, queue: &dyn Source) -> io::Result<()> {
        let wants = [Want { handler: self.orders.handler.as_str().into(), max: 1 }];
        loop {
            let Ok(deliveries) = queue.receive(&wants, 1, WAIT).await else {
                // sleeps: a queue that is away is not asked again at once
                sleep(AGAIN).await;
                continue;
            };
            for delivery in deliveries {
                let payload: Payload = serde_json::from_slice(&delivery.envelope.payload)?;
                if self.line.ask(&format!("mark {} {}", payload.task, self.orders.mark_ttl))? == "new" {
                    self.begin(payload)?;
                    sleep(Duration::from_millis(payload.before_ms)).await;
                    self.append_effect(payload)?;
                    sleep(Duration::from_millis(payload.after_ms)).await;
                }
                // One that cannot be told is delivered again, and finds its mark, or not.
                let _settled = queue.acknowledge(&delivery.receipt).await;
                self.line.ask("idle")?;
            }
        }
    }

    /// taskonce: the worker of the library, for as long as the supervisor lets it live.
    async fn by_taskonce(self: Arc<Desk>, queue: Arc<dyn Source>) -> io::Result<()> {
        let ledger = taskonce::open(&self.orders.store).map_err(io::Error::other)?;
        let handler = self.orders.handler.clone();
        let settings = Settings {
            namespace: Some(Name::new(NAMESPACE).map_err(io::Error::other)?),
            effect: Some(self.effect()),
            lease: Some(LEASE),
            attempts_max: Some(GIVEN_UP_AFTER),
            crashes_max: Some(GIVEN_UP_AFTER),
            backoff_min: Some(BACKOFF),
            backoff_max: Some(BACKOFF),
            breaker_failures: Some(None),
            retention: Some(RETENTION),
            ..Settings::default()
        };
        // A load of kills is not a broken downstream: retries are not held up.
        let rules = SourceRules { retry_share: 1.0, ..SourceRules::new(SOURCE) };
        let routes = Routes::builder()
            .source(rules, Settings::default())
            .handler(&handler, settings)
            .route(SOURCE, &handler, Settings::default())
            .build()
            .map_err(io::Error::other)?;
        let builder = Worker::builder(ledger, routes).source(queue).concurrency_max(1);
        let builder = match self.orders.column {
            Column::Transactional => {
                let file = self.orders.effects.with_file_name(room::STORE);
                let conn = Arc::new(Mutex::new(room::connect(&file)?));
                builder.handler_in_transaction(&handler, move |job| {
                    let (desk, conn) = (Arc::clone(&self), Arc::clone(&conn));
                    async move { desk.in_transaction(job, &conn).await }
                })
            }
            Column::Recipe | Column::Repeatable | Column::Keyed => {
                builder.handler(&handler, move |context, payload: Payload| {
                    let desk = Arc::clone(&self);
                    async move { desk.run(context, payload).await }
                })
            }
        };
        let worker = builder.build().map_err(io::Error::other)?;
        let _report = worker.run_until(std::future::pending()).await;
        Ok(())
    }

    fn effect(&self) -> Effect {
        match self.orders.column {
            Column::Keyed => Effect::Keyed,
            Column::Transactional => Effect::Transactional,
            Column::Recipe | Column::Repeatable => Effect::Repeatable,
        }
    }

    /// The handler: some work, the effect in its middle.
    async fn run(&self, context: Context, payload: Payload) -> Result<(), Failure> {
        self.begin(payload)?;
        sleep(Duration::from_millis(payload.before_ms)).await;
        if !context.may_start_effect() {
            return Err(Failure::retryable("the lease passed before the effect").nothing_happened());
        }
        match self.orders.column {
            Column::Keyed => {
                // The provider answers `charged` or `charged before`; both are a success.
                self.line.ask(&format!("charge {} {}", payload.task, context.downstream_key("")))?;
            }
            Column::Recipe | Column::Repeatable | Column::Transactional => self.append_effect(payload)?,
        }
        sleep(Duration::from_millis(payload.after_ms)).await;
        self.line.ask("idle")?;
        Ok(())
    }

    fn begin(&self, payload: Payload) -> io::Result<()> {
        self.line.ask("at work")?;
        room::append(&self.orders.runs, &format!("{} {}", payload.task, std::process::id()))
    }

    fn append_effect(&self, payload: Payload) -> io::Result<()> {
        room::append(&self.orders.effects, &format!("{} {}", payload.task, std::process::id()))
    }

    /// The same with a transaction of the handler's own: claim, work, then effect and completion in one commit. The work is done
    /// before the transaction, which holds the store's one write lock.
    async fn in_transaction(&self, job: Job, conn: &Mutex<Connection>) -> taskonce::Result<Outcome<()>> {
        let Job { ledger, task, policy, delivery } = job;
        let claim = match ledger.claim(&task, &policy).await? {
            Admission::Run(claim) => claim,
            Admission::Replay(seen) => {
                let (owner, age) = (Arc::clone(&seen.found.record.owner), seen.age());
                let (attempt, cached) = (seen.attempt(), seen.cached);
                return Ok(Outcome::Replayed(Replayed { value: Some(()), dropped: None, attempt, owner, age, cached }));
            }
            Admission::Busy(seen) => return Ok(Outcome::Busy(seen)),
            Admission::Waiting(seen) => return Ok(Outcome::Waiting(seen)),
            Admission::Dead(seen) => return Ok(Outcome::Dead(seen)),
            Admission::Parked(seen) => return Ok(Outcome::Parked(seen)),
            Admission::Mismatch { seen, given } => return Ok(Outcome::Mismatch { seen, given }),
        };
        let payload: Payload = serde_json::from_slice(&delivery.envelope.payload)
            .map_err(|error| Error::new(ErrorKind::BadJson, error.to_string()))?;
        let here = |error: io::Error| Error::new(ErrorKind::Locked, error.to_string());
        self.begin(payload).map_err(here)?;
        sleep(Duration::from_millis(payload.before_ms)).await;
        take_effect_in(&conn.lock().unwrap_or_else(PoisonError::into_inner), claim, payload)?;
        sleep(Duration::from_millis(payload.after_ms)).await;
        self.line.ask("idle").map_err(here)?;
        done(&ledger, &task.key).await
    }
}

/// What has committed, as the store has it now.
async fn done(ledger: &Ledger, key: &taskonce::Key) -> taskonce::Result<Outcome<()>> {
    loop {
        match ledger.store().load(key).await {
            Ok(Some(found)) => return Ok(Outcome::Ran { value: (), record: found.record }),
            Ok(None) => return Ok(Outcome::ClaimLost { found: None }),
            // A kill ends this at the latest.
            Err(error) if error.kind().retry() == Retry::Later => sleep(AGAIN).await,
            Err(error) => return Err(error),
        }
    }
}

/// Locks the record, writes the effect, completes, commits: all of it is kept, or nothing.
fn take_effect_in(conn: &Connection, claim: Claim, payload: Payload) -> taskonce::Result<()> {
    let failed = |error: rusqlite::Error| Error::new(ErrorKind::Locked, format!("the transaction failed: {error}"));
    let tx = conn.unchecked_transaction().map_err(failed)?;
    claim.lock_in(&tx)?;
    let number = i64::try_from(payload.task).unwrap_or(i64::MAX);
    tx.execute("INSERT INTO charge (task) VALUES (?1)", [number]).map_err(failed)?;
    std::thread::sleep(INSIDE);
    let completion = claim.complete_in(&tx, Output::Nothing)?;
    tx.commit().map_err(failed)?;
    completion.committed();
    Ok(())
}
