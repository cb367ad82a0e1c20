//! The demo: one load, four ways to handle it, and workers that are killed all the time. All processes are real.
//!
//! A real queue delivers at least once: what a worker did not acknowledge comes again after a visibility timeout, and some
//! deliveries come twice from the start. Eight worker processes take deliveries and are killed with SIGKILL at random; those of
//! taskonce run its worker. What they did is counted from files that they (or the provider of the keyed effect)
//! append to, or from the rows of a table that is only inserted into, never from what taskonce says.

mod column;
mod count;
mod crew;
mod load;
mod room;
mod show;
pub(crate) mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::units;

use column::Column;
use count::Count;
use load::Load;
use room::Room;

/// How long a claim holds, and so how long a killed worker's task is held up.
const LEASE: Duration = Duration::from_secs(1);
/// After this a delivery that was not acknowledged comes again.
const VISIBILITY: Duration = Duration::from_millis(600);
/// The name of the queue, one half of each route.
const SOURCE: &str = "demo";
/// The namespace of its tasks.
const NAMESPACE: &str = "demo";
/// Worker processes.
const WORKERS: usize = 8;
/// A worker is killed about this often.
const KILL_EVERY: Duration = Duration::from_millis(150);
/// A column that is not through so long after its last arrival, and three visibility timeouts more, is stopped. Two seconds do; a
/// disk may hang for longer.
const DRAIN_MAX: Duration = Duration::from_secs(15);
/// The most tasks: the demo ends within minutes whatever it is asked.
const TASKS_MAX: i64 = 10_000;
/// What the shell expects of a program that ctrl-C ended: 128 and the signal's number.
const INTERRUPTED: u8 = 130;

/// The arguments of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Tasks of each run
    #[arg(long, value_name = "COUNT", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=TASKS_MAX))]
    tasks: u32,
    /// Make this load: which deliveries come twice, how long each task works, when kills come. The kills themselves are
    /// real, so that no two runs are alike
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// How long the usual recipe's mark stands: longer loses more tasks, shorter doubles more
    #[arg(long, value_name = "DURATION", value_parser = units::duration, default_value = "1s")]
    mark_ttl: Duration,
    /// Take the deliveries from this queue, by its URL; without it from a SQLite file that goes with the demo. What a killed
    /// worker held comes again after the queue's visibility timeout: give it a short one, `?visibility=600ms`
    #[arg(long, value_name = "URL")]
    source: Option<String>,
}

/// What a column did.
pub(crate) struct Ran {
    pub(crate) column: Column,
    pub(crate) count: Count,
    /// Workers that were killed.
    pub(crate) kills: usize,
    /// Those of them that had a delivery in hand.
    pub(crate) kills_at_work: usize,
    pub(crate) deliveries: usize,
    pub(crate) took: Duration,
}

/// Runs the demo. Exits with 1 if a keyed or transactional effect doubled, or if taskonce lost or blocked a task.
pub(crate) fn demo(args: &DemoArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(0..1_000_000));
    let tasks = usize::try_from(args.tasks).unwrap_or(usize::MAX);
    let load = Load::new(tasks, seed);
    let stop = room::on_signal()?;
    let columns = columns(common.store.as_deref());
    let visibility = visibility(args.source.as_deref())?;
    report::say(show::introduction(&load, seed, args.mark_ttl, visibility, columns.len()));
    if !columns.contains(&Column::Transactional) {
        report::say("The transactional effect is left out: the demo writes it into a store of its own, a SQLite file.");
    }
    let progress = show::Progress::new();
    let mut ran = Vec::with_capacity(columns.len());
    for column in columns {
        let room = Room::new(column, common.store.as_deref(), args.source.as_deref())?;
        let mut random = fastrand::Rng::with_seed(seed);
        match crew::run(column, &load, &room, args.mark_ttl, &mut random, &progress, &stop).map_err(trouble)? {
            Some(done) => ran.push(done),
            None => {
                progress.end();
                report::say("interrupted");
                return Ok(ExitCode::from(INTERRUPTED));
            }
        }
    }
    progress.end();
    match form {
        Form::Json => report::data_json(&show::json(&ran, seed)),
        Form::Text => {
            report::data(&show::table(&ran));
            report::data(&show::conclusion(&ran));
        }
    }
    Ok(if ran.iter().all(Ran::keeps_its_promise) { ExitCode::SUCCESS } else { Code::NotSo.exit() })
}

/// How long the queue leaves a delivery to its receiver.
fn visibility(source: Option<&str>) -> Result<Duration> {
    let Some(url) = source else { return Ok(VISIBILITY) };
    // A queue may want an event loop to be opened in.
    let opened = crate::block_on(async { taskonce::source::open_named(url, SOURCE) })??;
    Ok(opened.describe().visibility)
}

/// Those that this store can have. A worker's own transaction is in its SQLite file here.
fn columns(store: Option<&str>) -> Vec<Column> {
    Column::ALL.into_iter().filter(|column| *column != Column::Transactional || store.is_none()).collect()
}

impl Ran {
    /// Whether the column did what it promises. The usual recipe promises nothing here.
    fn keeps_its_promise(&self) -> bool {
        let nothing_missing = self.count.lost == 0 && self.count.blocked == 0;
        match self.column {
            Column::Recipe => true,
            Column::Repeatable => nothing_missing,
            Column::Keyed | Column::Transactional => nothing_missing && self.count.doubled == 0,
        }
    }
}

/// What keeps the demo itself from running.
fn trouble(error: std::io::Error) -> Trouble {
    Trouble::new(
        Code::Configuration,
        "demo",
        format!("the demo cannot run here: {error}"),
        "it needs to start processes, and a writable folder in TMPDIR",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(column: Column, doubled: usize, lost: usize, blocked: usize) -> Ran {
        let count = Count { tasks: 10, effects: 10, doubled, lost, blocked, runs: 10 };
        Ran { column, count, kills: 1, kills_at_work: 1, deliveries: 13, took: Duration::from_secs(1) }
    }

    #[test]
    fn each_column_is_held_to_its_own_promise() {
        assert!(ran(Column::Recipe, 3, 3, 3).keeps_its_promise());
        assert!(ran(Column::Repeatable, 3, 0, 0).keeps_its_promise());
        assert!(!ran(Column::Repeatable, 0, 1, 0).keeps_its_promise());
        assert!(!ran(Column::Repeatable, 0, 0, 1).keeps_its_promise());
        assert!(ran(Column::Keyed, 0, 0, 0).keeps_its_promise());
        assert!(!ran(Column::Keyed, 1, 0, 0).keeps_its_promise());
        assert!(!ran(Column::Keyed, 0, 0, 1).keeps_its_promise());
        assert!(ran(Column::Transactional, 0, 0, 0).keeps_its_promise());
        assert!(!ran(Column::Transactional, 1, 0, 0).keeps_its_promise());
        assert!(!ran(Column::Transactional, 0, 1, 0).keeps_its_promise());
    }
}
