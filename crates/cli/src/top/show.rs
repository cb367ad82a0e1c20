//! What was seen, as text that fits a terminal, and for programs.

use serde_json::{Value, json};
use taskonce::source::Depth;

use super::look::{Queue, Running, View, Worker};
use crate::units::{spell, spell_left};
use crate::width::Shrinks;
use crate::{plain, view, width};

/// The lines of heads and blanks between the three tables.
const FRAME_LINES: usize = 8;
/// The most lines of each table where there is no terminal to fit.
const LINES_MAX: usize = 50;

/// The view in at most so many lines, if there is such a bound: queues have half of them at most, workers a quarter, tasks the rest.
pub(super) fn text(view: &View, columns: Option<usize>, lines: Option<usize>) -> String {
    let room = lines.map(|lines| lines.saturating_sub(FRAME_LINES + view.troubles.len()).max(4));
    let share = |of: usize| room.map_or(LINES_MAX, |room| (room / of).max(1));
    let queues = view.queues.len().min(share(2));
    let workers = view.workers.len().min(share(4));
    let tasks = room.map_or(LINES_MAX, |room| room.saturating_sub(queues.max(1) + workers.max(1)).max(1));
    let mut text = totals(view);
    for trouble in &view.troubles {
        text.push_str(&format!("{}\n", cut(&format!("not seen: {}", plain::line(trouble)), columns)));
    }
    text.push('\n');
    let rows = view.queues.iter().take(queues).map(queue_cells).collect();
    let heads = ["QUEUE", "READY", "OLDEST", "IN FLIGHT", "DEFERRED", "DEAD", "GROWS"];
    text.push_str(&width::table(heads, rows, Shrinks { column: 0, min: 12 }, columns));
    text.push('\n');
    let rows = view.workers.iter().take(workers).map(worker_cells).collect();
    let heads = ["WORKER", "RUNNING", "LONGEST", "DONE", "FAILED", "NOTE"];
    text.push_str(&width::table(heads, rows, Shrinks { column: 5, min: 8 }, columns));
    text.push('\n');
    let rows = view.running.iter().take(tasks).map(task_cells).collect();
    text.push_str(&width::table(["RUNNING", "FOR", "ATTEMPT", "LEASE"], rows, Shrinks { column: 0, min: 12 }, columns));
    text
}

fn cut(text: &str, columns: Option<usize>) -> String {
    columns.map_or_else(|| text.to_owned(), |columns| width::cut(text, columns))
}

fn totals(view: &View) -> String {
    let depths: Vec<Depth> = view.queues.iter().map(|queue| queue.depth.clone()).collect();
    let total = Depth::total(&depths);
    let oldest = total.oldest.map_or_else(String::new, |oldest| format!(", the oldest for {}", spell(oldest)));
    let more = if view.is_cut { " or more" } else { "" };
    format!(
        "{} ready{oldest}, {} dead; {} running{more} in {}\n",
        total.ready,
        total.dead,
        view.running.len(),
        match view.workers.len() {
            1 => "1 process".to_owned(),
            count => format!("{count} processes"),
        }
    )
}

fn queue_cells(queue: &Queue) -> [String; 7] {
    let depth = &queue.depth;
    [
        format!("{} × {}", plain::line(&queue.source), plain::line(&depth.handler)),
        depth.ready.to_string(),
        depth.oldest.map_or_else(|| "-".to_owned(), spell),
        depth.in_flight.to_string(),
        depth.deferred.to_string(),
        depth.dead.to_string(),
        queue.grows.map_or_else(
            || "-".to_owned(),
            |grows| if grows == 0.0 { "0/s".to_owned() } else { format!("{grows:+.0}/s") },
        ),
    ]
}

fn worker_cells(worker: &Worker) -> [String; 6] {
    let said = worker.said.as_ref();
    let rate = |of: Option<f64>| of.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}/s"));
    let mut notes = Vec::new();
    if worker.silent > 0 {
        notes.push(format!("silent: {} of its leases passed", worker.silent));
    }
    if said.is_some_and(|said| said.store_away) {
        notes.push("the store is away".to_owned());
    }
    if let Some(said) = said.filter(|said| !said.paused.is_empty()) {
        notes.push(format!("paused: {}", plain::line(&said.paused.join(", "))));
    }
    [
        plain::line(&worker.owner).into_owned(),
        worker.running.to_string(),
        spell(worker.longest),
        rate(said.and_then(|said| said.done)),
        rate(said.and_then(|said| said.failed)),
        notes.join("; "),
    ]
}

fn task_cells(task: &Running) -> [String; 4] {
    let lease = if task.lease_left.is_zero() { "passed".to_owned() } else { spell_left(task.lease_left) };
    [plain::line(&task.key).into_owned(), spell(task.age), task.attempt.to_string(), lease]
}

/// The view for programs, whole.
pub(super) fn json(view: &View) -> Value {
    let queues = view.queues.iter().map(|queue| {
        json!({
            "source": queue.source,
            "handler": &*queue.depth.handler,
            "ready": queue.depth.ready,
            "oldest_ready_ms": queue.depth.oldest.map(view::millis),
            "in_flight": queue.depth.in_flight,
            "deferred": queue.depth.deferred,
            "dead": queue.depth.dead,
            "grows_per_second": queue.grows,
        })
    });
    let workers = view.workers.iter().map(|worker| {
        json!({
            "owner": worker.owner,
            "running": worker.running,
            "longest_ms": view::millis(worker.longest),
            "leases_passed": worker.silent,
            "says": worker.said.as_ref().map(|said| json!({
                "age_ms": view::millis(said.age),
                "done_per_second": said.done,
                "failed_per_second": said.failed,
                "store_away": said.store_away,
                "paused": said.paused,
            })),
        })
    });
    let running = view.running.iter().map(|task| {
        json!({
            "key": task.key,
            "owner": task.owner,
            "attempt": task.attempt,
            "age_ms": view::millis(task.age),
            "lease_left_ms": view::millis(task.lease_left),
        })
    });
    json!({
        "queues": queues.collect::<Vec<_>>(),
        "workers": workers.collect::<Vec<_>>(),
        "running": running.collect::<Vec<_>>(),
        "more_running": view.is_cut,
        "not_seen": view.troubles,
    })
}
