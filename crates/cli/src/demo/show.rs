//! What the demo shows: a progress bar, a table, and what the table says.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use taskonce::source::Depth;

use super::column::Column;
use super::count::Count;
use super::load::Load;
use super::{KILL_EVERY, LEASE, Ran, WORKERS};
use crate::{view, width};

/// What is going to happen.
pub(crate) fn introduction(load: &Load, seed: u64, mark_ttl: Duration, visibility: Duration, runs: usize) -> String {
    let tasks = count(load.tasks(), "task");
    let deliveries = match load.arrivals.len() {
        1 => "1 delivery".to_owned(),
        more => format!("{more} deliveries"),
    };
    let text = format!(
        "{tasks} in {deliveries}, {WORKERS} worker processes, one killed with SIGKILL about every {KILL_EVERY:?}. \
         Lease {LEASE:?}, the recipe's mark {mark_ttl:?}; what is not acknowledged comes again after {visibility:?}. \
         {}, seed {seed}.",
        count(runs, "run")
    );
    width::wrap(&text, columns(io::stderr()))
}

/// The most columns that text is wide.
const COLUMNS_MAX: usize = 100;

fn columns(stream: impl AsFd) -> usize {
    width::of(stream).unwrap_or(COLUMNS_MAX).min(COLUMNS_MAX)
}

/// `1 task`, `2 tasks`.
fn count(number: usize, what: &str) -> String {
    view::count(number as u64, what)
}

/// The view: at most 79 columns with five digits of deliveries and of kills.
const VIEW: &str = "{prefix:20} {bar:20} {pos:>3}/{len} settled {msg}";

/// A live view on stderr, where that is a terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
}

/// A column at a moment.
pub(crate) struct Live {
    pub(crate) settled: usize,
    pub(crate) depth: Depth,
    /// Workers that run a task.
    pub(crate) at_work: usize,
    pub(crate) kills: usize,
    /// Counted outside.
    pub(crate) count: Count,
}

impl Live {
    /// What stands behind the bar, and below it.
    fn text(&self) -> String {
        let Live { depth, at_work, kills, count: counts, .. } = self;
        let oldest =
            depth.oldest.map_or_else(String::new, |age| format!(", the oldest for {:.1} s", age.as_secs_f64()));
        format!(
            "{}\n  queue    {} ready{oldest}, {} in flight, {} deferred\n  workers  {at_work} of {WORKERS} run a task\n  \
             effects  {} of {} tasks, {} doubled, in {}",
            count(*kills, "kill"),
            depth.ready,
            depth.in_flight,
            depth.deferred,
            counts.tasks - counts.lost,
            counts.tasks,
            counts.doubled,
            count(counts.runs, "run"),
        )
    }
}

impl Progress {
    pub(crate) fn new() -> Progress {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(VIEW) {
            bar.set_style(style);
        }
        Progress { bar }
    }

    pub(crate) fn begin(&self, column: Column, deliveries: usize) {
        self.bar.set_length(deliveries as u64);
        self.bar.set_prefix(column.short());
        self.bar.reset();
    }

    pub(crate) fn show(&self, live: &Live) {
        self.bar.set_position(live.settled as u64);
        self.bar.set_message(live.text());
    }

    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// A row of the table: its name, and what it shows of a column.
type Row = (&'static str, fn(&Ran) -> String);

const ROWS: [Row; 9] = [
    ("tasks", |ran| ran.count.tasks.to_string()),
    ("effects", |ran| ran.count.effects.to_string()),
    ("doubled", |ran| ran.count.doubled.to_string()),
    ("lost", |ran| ran.count.lost.to_string()),
    ("blocked", |ran| ran.count.blocked.to_string()),
    ("runs per task", |ran| format!("{:.2}", ran.count.runs_per_task())),
    ("seconds", |ran| format!("{:.1}", ran.took.as_secs_f64())),
    ("workers killed", |ran| ran.kills.to_string()),
    ("… in a task", |ran| ran.kills_at_work.to_string()),
];

pub(crate) fn table(ran: &[Ran]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(std::iter::once("").chain(ran.iter().map(|ran| ran.column.title())));
    for (name, show) in ROWS {
        table.add_row(std::iter::once(name.to_owned()).chain(ran.iter().map(show)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

/// What the table says, in sentences. Each is about what was counted in this run.
pub(crate) fn conclusion(ran: &[Ran]) -> String {
    let mut text = String::new();
    for ran in ran {
        text.push_str(&match ran.column {
            Column::Recipe => of_recipe(&ran.count),
            Column::Repeatable => of_repeatable(&ran.count),
            Column::Keyed => of_keyed(&ran.count),
            Column::Transactional => of_transactional(&ran.count),
        });
        text.push('\n');
    }
    width::wrap(&text, columns(io::stdout()))
}

fn of_recipe(counts: &Count) -> String {
    let (missing, doubled) = (counts.lost + counts.blocked, counts.doubled);
    let tasks = count(counts.tasks, "task");
    let why = "its mark says that work was begun, not that it was done";
    match (missing, doubled) {
        (0, 0) => "The usual recipe was lucky: no kill hit between its mark and its effect. Run it again.".to_owned(),
        (_, 0) => format!("The usual recipe lost {missing} of {tasks}: {why}."),
        (0, _) => format!("The usual recipe doubled {doubled} of {tasks}: {why}."),
        _ => format!(
            "The usual recipe lost {missing} and doubled {doubled} of {tasks}: {why}, and no lifetime of a mark is right \
             both for a dead worker and for a late duplicate."
        ),
    }
}

fn of_repeatable(counts: &Count) -> String {
    let missing = counts.lost + counts.blocked;
    if missing > 0 {
        return format!(
            "taskonce LOST OR BLOCKED {} with a repeatable effect: this is a fault, please report it.",
            count(missing, "task")
        );
    }
    if counts.doubled == 0 {
        return "taskonce lost none, and this time the repeatable effect doubled none.".to_owned();
    }
    // Every task has its first effect here.
    let more = counts.effects.saturating_sub(counts.tasks);
    format!(
        "taskonce lost none; {} took effect more than once, {} too many, where a kill fell between an effect and its \
         record. Nothing can prevent that from outside of the effect.",
        count(counts.doubled, "task"),
        count(more, "effect")
    )
}

fn of_keyed(counts: &Count) -> String {
    let (missing, doubled) = (counts.lost + counts.blocked, counts.doubled);
    if missing + doubled > 0 {
        return format!(
            "taskonce DOUBLED {doubled} AND LOST OR BLOCKED {} with a keyed effect: this is a fault, please report it.",
            count(missing, "task")
        );
    }
    let of = match counts.tasks {
        1 => "the one task".to_owned(),
        tasks => format!("each of {tasks} tasks"),
    };
    let again = if counts.runs > counts.tasks { ": the provider knows the key again" } else { "" };
    format!("The keyed effect happened once for {of}, in {}{again}.", count(counts.runs, "run"))
}

fn of_transactional(counts: &Count) -> String {
    let (missing, doubled) = (counts.lost + counts.blocked, counts.doubled);
    if missing + doubled > 0 {
        return format!(
            "taskonce DOUBLED {doubled} AND LOST OR BLOCKED {} with a transactional effect: this is a fault, please report it.",
            count(missing, "task")
        );
    }
    let of = match counts.tasks {
        1 => "the one task".to_owned(),
        tasks => format!("each of {tasks} tasks"),
    };
    let why = "it commits together with its record";
    format!(
        "The transactional effect happened once for {of}, in {}, without a provider: {why}.",
        count(counts.runs, "run")
    )
}

pub(crate) fn json(ran: &[Ran], seed: u64) -> Value {
    let columns: Vec<Value> = ran
        .iter()
        .map(|ran| {
            let count = &ran.count;
            json!({
                "column": ran.column.name(),
                "tasks": count.tasks,
                "deliveries": ran.deliveries,
                "effects": count.effects,
                "doubled": count.doubled,
                "lost": count.lost,
                "blocked": count.blocked,
                "runs": count.runs,
                "runs_per_task": count.runs_per_task(),
                "seconds": ran.took.as_secs_f64(),
                "kills": ran.kills,
                "kills_in_a_task": ran.kills_at_work,
                "kept": ran.keeps_its_promise(),
            })
        })
        .collect();
    json!({ "seed": seed, "columns": columns })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(column: Column, doubled: usize, lost: usize) -> Ran {
        let count = Count { tasks: 200, effects: 200 + doubled - lost, doubled, lost, blocked: 0, runs: 214 };
        Ran { column, count, kills: 30, kills_at_work: 15, deliveries: 260, took: Duration::from_millis(4_321) }
    }

    #[test]
    fn the_table_shows_every_count_of_every_column() {
        let table = table(&[ran(Column::Recipe, 13, 17), ran(Column::Keyed, 0, 0)]);
        for part in ["usual recipe", "keyed", "196", "13", "17", "1.07", "4.3", "30", "15"] {
            assert!(table.contains(part), "{part} in\n{table}");
        }
    }

    #[test]
    fn the_table_fits_a_terminal_of_80_columns() {
        let table = table(&Column::ALL.map(|column| ran(column, 99_000, 0)));
        let widest = table.lines().map(|line| line.chars().count()).max();
        assert!(widest.is_some_and(|columns| columns <= 80), "{widest:?}\n{table}");
    }

    /// The sentences, whatever the width.
    fn said(ran: &[Ran]) -> String {
        conclusion(ran).replace('\n', " ")
    }

    #[test]
    fn the_live_view_says_what_is_queued_who_works_and_what_was_counted() {
        let counts = Count { tasks: 200, effects: 71, doubled: 1, lost: 130, blocked: 0, runs: 75 };
        let oldest = Some(Duration::from_millis(420));
        let depth = Depth { ready: 3, deferred: 40, in_flight: 8, oldest, ..Depth::default() };
        let text = Live { settled: 90, depth, at_work: 7, kills: 12, count: counts }.text();
        assert_eq!(
            text,
            "12 kills\n  queue    3 ready, the oldest for 0.4 s, 8 in flight, 40 deferred\n  workers  7 of 8 run a task\n  \
             effects  70 of 200 tasks, 1 doubled, in 75 runs"
        );
        assert!(text.lines().all(|line| line.chars().count() <= 79), "{text}");
    }

    #[test]
    fn the_conclusion_follows_the_counts() {
        let said = |ran: &[Ran]| said(ran);
        let all = said(&[
            ran(Column::Recipe, 3, 7),
            ran(Column::Repeatable, 5, 0),
            ran(Column::Keyed, 0, 0),
            ran(Column::Transactional, 0, 0),
        ]);
        for part in [
            "lost 7 and doubled 3 of 200 tasks",
            "no lifetime of a mark is right",
            "5 tasks took effect more than once, 5 effects too many, where a kill fell",
            "once for each of 200 tasks, in 214 runs: the provider knows the key again.",
            "once for each of 200 tasks, in 214 runs, without a provider: it commits together with its record.",
        ] {
            assert!(all.contains(part), "{part} in {all}");
        }
        let all = said(&[
            ran(Column::Recipe, 0, 0),
            ran(Column::Repeatable, 0, 1),
            ran(Column::Keyed, 1, 0),
            ran(Column::Transactional, 1, 0),
        ]);
        assert!(all.contains("lucky") && all.matches("this is a fault").count() == 3, "{all}");
        assert!(all.contains("BLOCKED 1 task with a repeatable"), "{all}");
    }

    #[test]
    fn nothing_is_explained_that_did_not_happen() {
        for (column, doubled, lost) in [(Column::Recipe, 1, 0), (Column::Recipe, 0, 1), (Column::Repeatable, 0, 0)] {
            let said = said(&[ran(column, doubled, lost)]);
            assert!(!said.contains("no lifetime") && !said.contains("kill fell"), "{said}");
        }
        let one = Count { tasks: 1, effects: 1, doubled: 0, lost: 0, blocked: 0, runs: 1 };
        assert_eq!(of_keyed(&one), "The keyed effect happened once for the one task, in 1 run.");
        let twice = Count { effects: 2, doubled: 1, ..one };
        assert!(of_repeatable(&twice).contains("1 task took effect more than once, 1 effect too many,"));
    }
}
