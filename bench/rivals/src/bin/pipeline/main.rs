//! Workers of taskonce and of its rivals work off a queue of empty tasks, each on one private Redis of its own, in one run.
//!
//! `cargo run --release --manifest-path bench/rivals/Cargo.toml --bin pipeline`. It installs Celery with pip and BullMQ with
//! npm below `bench/rivals/target`. With `--check` it exits with 1 where taskonce misses its bound. A tenth of the tasks
//! is run before the clock starts, so that no start of a process or connection is counted.

#[path = "../../../../src/measure.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod measure;
mod apalis;
mod foreign;
mod ours;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use taskonce_testkit::RedisServer;

use crate::foreign::Tools;
use crate::measure::Rounds;

/// Tasks that run at once, where a side runs them in one process.
const AT_ONCE: usize = 64;
/// How long a side may take for a round.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between two looks at how many tasks are done.
const LOOK: Duration = Duration::from_millis(5);

/// Who does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Apalis,
    BullMq,
    Celery,
}

const SIDES: [Side; 4] = [Side::Ours, Side::Apalis, Side::BullMq, Side::Celery];

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Ours => "taskonce",
            Side::Apalis => "apalis 1.0 (Redis)",
            Side::BullMq => "BullMQ 6.7",
            Side::Celery => "Celery 5.7",
        }
    }

    /// How often ours must be as fast.
    fn bound(self) -> f64 {
        match self {
            Side::Ours | Side::Apalis | Side::BullMq => 1.0,
            Side::Celery => 3.0,
        }
    }

    /// How it was set, and what taskonce promises and this side does not.
    fn terms(self) -> &'static [&'static str] {
        match self {
            Side::Ours => {
                &["Redis Streams and the ledger on the same Redis; 64 at once; claimed, completed, then acknowledged"]
            }
            Side::Apalis => &[
                "64 at once by `parallelize`, batches of 64, tasks locked, results kept: its own defaults else",
                "with some 8,000 tasks in its queue a worker does not start: a script of its own gets too many results",
                "its idempotency key drops a second send only: a task that comes twice from the queue runs twice",
            ],
            Side::BullMq => &[
                "64 at once, the key as job id, finished jobs kept",
                "a job whose worker stalls is started again, whether or not it took effect; the lock's token guards no effect",
            ],
            Side::Celery => &[
                "two children (one a core), acknowledged late, given back when a child dies, results kept",
                "a redelivered task runs again: nothing remembers that it was done",
            ],
        }
    }
}

/// How much is measured.
struct Extent {
    rounds: usize,
    tasks: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode> {
    let (mut extent, mut check) = (Extent { rounds: 5, tasks: 7_500 }, false);
    for word in std::env::args().skip(1) {
        match word.as_str() {
            "--quick" => extent = Extent { rounds: 1, tasks: 1000 },
            "--check" => check = true,
            other => {
                eprintln!("error: `{other}` is no option\nhint: there are `--quick` and `--check`");
                return Ok(ExitCode::from(2));
            }
        }
    }
    if cfg!(debug_assertions) {
        eprintln!("warning: a build without optimisation; its figures say nothing. Use `cargo run --release`");
    }
    let tools = Tools::install()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut rounds = Rounds::new(SIDES.len());
    for round in 0..extent.rounds {
        for at in rounds.order(round) {
            let server = RedisServer::start(&[])?;
            let rate = match SIDES[at] {
                Side::Ours => runtime.block_on(ours::rate(&server, extent.tasks))?,
                Side::Apalis => runtime.block_on(apalis::rate(&server, extent.tasks))?,
                Side::BullMq => foreign::bullmq(&tools, &server, extent.tasks)?,
                Side::Celery => foreign::celery(&tools, &server, extent.tasks)?,
            };
            eprintln!("round {}: {} {rate:.0} a second", round + 1, SIDES[at].name());
            rounds.push(at, rate);
        }
    }
    println!("\n{:<22}{:>16}{:>16}{:>10}", "", "tasks a second", "ours by theirs", "bound");
    let mut missed = 0;
    for (at, side) in SIDES.into_iter().enumerate() {
        let ratio = rounds.ratio_to(at);
        let verdict = if ratio < side.bound() { "  MISSED" } else { "" };
        missed += usize::from(ratio < side.bound());
        println!(
            "{:<22}{:>16.0}{ratio:>16.2}{:>10}{verdict}",
            side.name(),
            rounds.of(at),
            format!("≥ {}", side.bound())
        );
    }
    println!("\n{} rounds of {} empty tasks; medians", extent.rounds, extent.tasks);
    for side in SIDES {
        println!("\n{}:", side.name());
        side.terms().iter().for_each(|term| println!("  * {term}"));
    }
    Ok(if check && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Tasks a second, from when a tenth of them is done until all are. `done` says how many are.
async fn clock(tasks: usize, mut done: impl FnMut() -> Result<usize>) -> Result<f64> {
    let (begun, first) = (Instant::now(), tasks / 10);
    let mut start = None;
    loop {
        let now = done()?;
        if now >= tasks {
            let (at, before) = start.unwrap_or((begun, 0));
            return Ok((tasks - before) as f64 / at.elapsed().as_secs_f64());
        }
        if now >= first && start.is_none() {
            start = Some((Instant::now(), now));
        }
        ensure!(begun.elapsed() < PATIENCE, "{now} of {tasks} tasks are done after {PATIENCE:?}");
        tokio::time::sleep(LOOK).await;
    }
}
