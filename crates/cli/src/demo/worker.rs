//! A worker process: takes deliveries until its input ends, and handles them in its column's way.
//!
//! It talks to the supervisor over its own stdin and stdout, a line to ask and a line to answer. So it ends by itself
//! when the supervisor is gone.

use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use taskonce::blocking::Ledger;
use taskonce::sqlite::CompleteIn as _;
use taskonce::sqlite::rusqlite::{self, Connection};
use taskonce::{
    Admission, Claim, Context, Effect, Error, ErrorKind, Failure, Handler, Input, Outcome, Output, Policy, State, Task,
};

use super::column::Column;
use super::{LEASE, room};
use crate::report;

/// The first argument of a worker process.
pub(crate) const WORD: &str = "__demo-worker";

/// Kills are the weather of the demo, not the fault of a task: none is given up for them.
const GIVEN_UP_AFTER: u32 = 1_000;
/// A busy delivery comes back a little after the lease, each at another moment.
const JITTER_MS: u64 = 60;
/// How long a transaction stays open between the effect and the completion, so that kills fall there too.
const INSIDE: Duration = Duration::from_millis(3);
/// When the store could not be asked.
const AGAIN: Duration = Duration::from_millis(200);

/// Runs a worker: its column, the file of effects, the file of runs, and the store's URL.
pub(crate) fn main(args: &[OsString]) -> ExitCode {
    match Worker::new(args).and_then(|mut worker| worker.work()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::say(format_args!("demo worker {}: {error}", std::process::id()));
            ExitCode::FAILURE
        }
    }
}

struct Worker {
    column: Column,
    effects: PathBuf,
    runs: PathBuf,
    ledger: Option<Ledger>,
    handler: Handler,
    /// The mark's time to live, in milliseconds.
    mark_ttl: String,
}

/// One delivery in hand.
struct Delivery<'a> {
    receipt: &'a str,
    task: &'a str,
    before: Duration,
    after: Duration,
}

/// What becomes of a delivery.
enum Settling {
    Acknowledge,
    Defer(Duration),
    /// No delivery helps any more: a person has to look.
    Stuck,
}

impl Worker {
    fn new(args: &[OsString]) -> io::Result<Worker> {
        let bad = || io::Error::other("this is only for the demo's own use");
        let [column, effects, runs, store, mark_ttl] = args else { return Err(bad()) };
        let column = column.to_str().and_then(Column::from_name).ok_or_else(bad)?;
        let ledger = match column {
            Column::Recipe => None,
            Column::Repeatable | Column::Keyed | Column::Transactional => {
                Some(taskonce::blocking::open(store.to_str().ok_or_else(bad)?).map_err(io::Error::other)?)
            }
        };
        Ok(Worker {
            column,
            effects: effects.into(),
            runs: runs.into(),
            ledger,
            handler: Handler::within("demo", "charge", "1").map_err(io::Error::other)?,
            mark_ttl: mark_ttl.to_str().ok_or_else(bad)?.to_owned(),
        })
    }

    fn work(&mut self) -> io::Result<()> {
        let conn = match self.column {
            Column::Recipe | Column::Repeatable | Column::Keyed => None,
            Column::Transactional => Some(room::connect(&self.effects.with_file_name(room::STORE))?),
        };
        loop {
            let line = ask("next")?;
            let words: Vec<&str> = line.split(' ').collect();
            let delivery = match words[..] {
                ["task", receipt, task, before, after] => {
                    Delivery { receipt, task, before: millis(before)?, after: millis(after)? }
                }
                _ => return Ok(()),
            };
            let settling = match (&self.ledger, &conn) {
                (None, _) => self.by_recipe(&delivery)?,
                (Some(ledger), None) => self.by_taskonce(ledger, &delivery)?,
                (Some(ledger), Some(conn)) => self.by_transaction(ledger, conn, &delivery)?,
            };
            let Delivery { receipt, task, .. } = delivery;
            match settling {
                Settling::Acknowledge => ask(&format!("ack {receipt}"))?,
                Settling::Defer(delay) => ask(&format!("defer {receipt} {}", delay.as_millis()))?,
                Settling::Stuck => ask(&format!("stuck {receipt} {task}"))?,
            };
        }
    }

    /// The usual recipe: mark before the work, drop what is marked, acknowledge when done.
    fn by_recipe(&self, delivery: &Delivery<'_>) -> io::Result<Settling> {
        if ask(&format!("mark {} {}", delivery.task, self.mark_ttl))? == "new" {
            self.begin(delivery)?;
            sleep(delivery.before);
            self.append_effect(delivery)?;
            sleep(delivery.after);
        }
        Ok(Settling::Acknowledge)
    }

    /// taskonce: claim, work, complete; then settle the delivery by what became of it.
    fn by_taskonce(&self, ledger: &Ledger, delivery: &Delivery<'_>) -> io::Result<Settling> {
        let effect = match self.column {
            Column::Keyed => Effect::Keyed,
            Column::Recipe | Column::Repeatable | Column::Transactional => Effect::Repeatable,
        };
        let task = self.task(delivery)?;
        let outcome = ledger.run(&task, &policy(effect), |context| {
            self.begin(delivery)?;
            sleep(delivery.before);
            if !context.may_start_effect() {
                return Err(Failure::retryable("the lease passed before the effect").nothing_happened());
            }
            self.take_effect(delivery, &context)?;
            sleep(delivery.after);
            Ok(())
        });
        Ok(match outcome {
            Ok(Outcome::Ran { .. } | Outcome::Replayed(_)) => Settling::Acknowledge,
            Ok(Outcome::Busy(seen) | Outcome::Waiting(seen)) => Settling::Defer(seen.defer_for() + jitter()),
            Ok(Outcome::Failed { record: Some(record), .. }) => match record.state {
                State::Waiting => Settling::Defer(record.delay + jitter()),
                State::Running | State::Done | State::Dead | State::Parked => Settling::Stuck,
            },
            Ok(Outcome::Dead(_) | Outcome::Parked(_) | Outcome::Mismatch { .. }) => Settling::Stuck,
            Ok(Outcome::Failed { record: None, .. } | Outcome::ClaimLost { .. } | Outcome::DoneNotRecorded { .. }) => {
                Settling::Defer(LEASE)
            }
            Err(error) => refused(&error)?,
        })
    }

    fn begin(&self, delivery: &Delivery<'_>) -> io::Result<()> {
        room::append(&self.runs, &format!("{} {}", delivery.task, std::process::id()))
    }

    fn append_effect(&self, delivery: &Delivery<'_>) -> io::Result<()> {
        room::append(&self.effects, &format!("{} {}", delivery.task, std::process::id()))
    }

    fn take_effect(&self, delivery: &Delivery<'_>, context: &Context) -> io::Result<()> {
        match self.column {
            Column::Keyed => {
                // The provider answers `charged` or `charged before`; both are a success.
                ask(&format!("charge {} {}", delivery.task, context.downstream_key("")))?;
                Ok(())
            }
            Column::Recipe | Column::Repeatable | Column::Transactional => self.append_effect(delivery),
        }
    }

    fn task(&self, delivery: &Delivery<'_>) -> io::Result<Task> {
        let nothing = Input::from_json(b"null").map_err(io::Error::other)?;
        self.handler.task(delivery.task, &nothing).map_err(io::Error::other)
    }

    /// taskonce with a transaction of the worker's own: claim, work, then effect and completion in one commit. The work is
    /// done before the transaction, which holds the store's one write lock.
    fn by_transaction(&self, ledger: &Ledger, conn: &Connection, delivery: &Delivery<'_>) -> io::Result<Settling> {
        let task = self.task(delivery)?;
        let claim = match ledger.block_on(ledger.inner().claim(&task, &policy(Effect::Transactional))) {
            Ok(Admission::Run(claim)) => claim,
            Ok(Admission::Replay(_)) => return Ok(Settling::Acknowledge),
            Ok(Admission::Busy(seen) | Admission::Waiting(seen)) => {
                return Ok(Settling::Defer(seen.defer_for() + jitter()));
            }
            Ok(Admission::Dead(_) | Admission::Parked(_) | Admission::Mismatch { .. }) => return Ok(Settling::Stuck),
            Err(error) => return refused(&error),
        };
        self.begin(delivery)?;
        sleep(delivery.before);
        match take_effect_in(conn, claim, delivery) {
            Ok(()) => {}
            // The transaction was rolled back, and with it the effect.
            Err(error) => return refused(&error),
        }
        sleep(delivery.after);
        Ok(Settling::Acknowledge)
    }
}

/// Locks the record, writes the effect, completes, commits: all of it is kept, or nothing.
fn take_effect_in(conn: &Connection, claim: Claim, delivery: &Delivery<'_>) -> taskonce::Result<()> {
    let failed = |error: rusqlite::Error| Error::new(ErrorKind::Locked, format!("the transaction failed: {error}"));
    let tx = conn.unchecked_transaction().map_err(failed)?;
    claim.lock_in(&tx)?;
    tx.execute("INSERT INTO charge (task) VALUES (?1)", [delivery.task]).map_err(failed)?;
    sleep(INSIDE);
    let completion = claim.complete_in(&tx, Output::Nothing)?;
    tx.commit().map_err(failed)?;
    completion.committed();
    Ok(())
}

fn policy(effect: Effect) -> Policy {
    Policy { lease: LEASE, attempts_max: GIVEN_UP_AFTER, crashes_max: GIVEN_UP_AFTER, ..Policy::new(effect) }
}

/// The store could not be asked: the delivery comes again.
fn refused(error: &Error) -> io::Result<Settling> {
    ask(&format!("refused {}", error.to_string().replace('\n', " ")))?;
    Ok(Settling::Defer(AGAIN))
}

/// Asks the supervisor, and waits for its answer.
fn ask(question: &str) -> io::Result<String> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(format!("{question}\n").as_bytes())?;
    stdout.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim_end().to_owned())
}

fn jitter() -> Duration {
    Duration::from_millis(fastrand::u64(0..JITTER_MS))
}

fn millis(word: &str) -> io::Result<Duration> {
    word.parse().map(Duration::from_millis).map_err(io::Error::other)
}
