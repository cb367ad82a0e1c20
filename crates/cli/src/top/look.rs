//! One look: what queues hold and by how much that changes, and who runs what.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce::source::Depth;
use taskonce::{Filter, Ledger, State};

use crate::report::{Result, Trouble};
use crate::sources::Opened;

/// The most running tasks that are looked at; the view says when there are more.
const RUNNING_MAX: usize = 2000;
/// How many are asked for at once.
const PAGE: usize = 500;

/// Looks, and remembers the look before.
pub(super) struct Looker<'a> {
    sources: &'a [Opened],
    ledger: Result<Ledger>,
    before: HashMap<(usize, Arc<str>), u64>,
    looked_at: Option<Instant>,
    failed: bool,
}

/// What is seen.
pub(super) struct View {
    pub(super) queues: Vec<Queue>,
    pub(super) workers: Vec<Worker>,
    pub(super) running: Vec<Running>,
    /// Whether more run than were looked at.
    pub(super) is_cut: bool,
    /// What could not be looked at, and why.
    pub(super) troubles: Vec<String>,
}

/// What a source holds of a handler.
pub(super) struct Queue {
    pub(super) source: String,
    pub(super) depth: Depth,
    /// By how many deliveries it grows in a second; not known at the first look.
    pub(super) grows: Option<f64>,
}

/// A process that holds claims.
pub(super) struct Worker {
    pub(super) owner: String,
    pub(super) running: usize,
    pub(super) longest: Duration,
    /// How many of its claims have leases that passed: it is silent.
    pub(super) silent: usize,
}

/// A task that runs.
pub(super) struct Running {
    pub(super) key: String,
    pub(super) owner: String,
    pub(super) attempt: u32,
    pub(super) age: Duration,
    /// What is left of its lease; nothing where it has passed.
    pub(super) lease_left: Duration,
}

impl<'a> Looker<'a> {
    pub(super) fn new(sources: &'a [Opened], ledger: Result<Ledger>) -> Looker<'a> {
        Looker { sources, ledger, before: HashMap::new(), looked_at: None, failed: false }
    }

    /// Whether the last look could not see all.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) async fn look(&mut self, now: Instant) -> View {
        let mut view =
            View { queues: Vec::new(), workers: Vec::new(), running: Vec::new(), is_cut: false, troubles: Vec::new() };
        let since = self.looked_at.replace(now).map(|before| now.saturating_duration_since(before));
        let mut held = HashMap::new();
        for (at, opened) in self.sources.iter().enumerate() {
            match opened.source.depth().await {
                Ok(depths) => {
                    for depth in depths {
                        let is = depth.ready + depth.deferred + depth.in_flight;
                        let name = (at, Arc::clone(&depth.handler));
                        let was = self.before.get(&name).copied().unwrap_or(0);
                        let grows = since.map(|since| rate(was, is, since));
                        held.insert(name, is);
                        view.queues.push(Queue { source: opened.name().to_owned(), depth, grows });
                    }
                }
                Err(error) => view.troubles.push(format!("source {}: {error}", opened.name())),
            }
        }
        view.queues.sort_by(|a, b| (&a.source, &a.depth.handler).cmp(&(&b.source, &b.depth.handler)));
        self.before = held;
        match &self.ledger {
            Ok(ledger) => {
                if let Err(trouble) = running(ledger, &mut view).await {
                    view.troubles.push(trouble.text().to_owned());
                }
            }
            Err(trouble) => view.troubles.push(trouble.text().to_owned()),
        }
        view.workers = workers(&view.running);
        self.failed = !view.troubles.is_empty();
        view
    }
}

fn rate(was: u64, is: u64, since: Duration) -> f64 {
    (is as f64 - was as f64) / since.as_secs_f64().max(0.001)
}

async fn running(ledger: &Ledger, view: &mut View) -> Result<()> {
    let filter = Filter { states: vec![State::Running], page_max: PAGE, ..Filter::default() };
    let mut walk = ledger.walk(filter.listed());
    while let Some(page) = walk.next_page().await.map_err(Trouble::from)? {
        // A record that cannot be read is `taskonce list`'s to show.
        for (key, found) in page.into_iter().filter_map(|row| Some((row.key, row.found.ok()?))) {
            if view.running.len() == RUNNING_MAX {
                view.is_cut = true;
                return Ok(());
            }
            view.running.push(Running {
                key: key.as_str().to_owned(),
                owner: found.record.owner.to_string(),
                attempt: found.record.attempt,
                age: found.in_state_for(),
                lease_left: found.lease_left(),
            });
        }
    }
    view.running.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.key.cmp(&b.key)));
    Ok(())
}

fn workers(running: &[Running]) -> Vec<Worker> {
    let mut workers: BTreeMap<&str, Worker> = BTreeMap::new();
    for task in running {
        let worker = workers.entry(&task.owner).or_insert_with(|| Worker {
            owner: task.owner.clone(),
            running: 0,
            longest: Duration::ZERO,
            silent: 0,
        });
        worker.running += 1;
        worker.longest = worker.longest.max(task.age);
        worker.silent += usize::from(task.lease_left.is_zero());
    }
    let mut workers: Vec<Worker> = workers.into_values().collect();
    workers.sort_by(|a, b| b.running.cmp(&a.running).then_with(|| a.owner.cmp(&b.owner)));
    workers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_whose_leases_passed_is_told_as_silent() {
        let task = |key: &str, owner: &str, age: u64, left: u64| Running {
            key: key.to_owned(),
            owner: owner.to_owned(),
            attempt: 1,
            age: Duration::from_secs(age),
            lease_left: Duration::from_secs(left),
        };
        let workers = workers(&[task("a", "one", 3, 9), task("b", "two", 40, 0), task("c", "one", 5, 9)]);
        let told: Vec<_> = workers
            .iter()
            .map(|worker| (&*worker.owner, worker.running, worker.longest.as_secs(), worker.silent))
            .collect();
        assert_eq!(told, [("one", 2, 5, 0), ("two", 1, 40, 1)]);
    }

    #[test]
    fn what_grows_and_what_shrinks_is_told_by_the_second() {
        assert_eq!(rate(100, 50, Duration::from_secs(5)), -10.0);
        assert_eq!(rate(0, 3, Duration::from_millis(500)), 6.0);
        assert!(rate(0, 1, Duration::ZERO).is_finite());
    }
}
