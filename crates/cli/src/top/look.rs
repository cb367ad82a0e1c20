//! One look: what queues hold and by how much that changes, and who runs what.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use taskonce::source::Depth;
use taskonce::{Filter, Ledger, Process, State};

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
    spoken: HashMap<Arc<str>, Before>,
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

/// A process that holds claims, or says of itself how it stands.
#[derive(Default)]
pub(super) struct Worker {
    pub(super) owner: String,
    /// What it says of itself, if it does.
    pub(super) said: Option<Said>,
    pub(super) running: usize,
    pub(super) longest: Duration,
    /// How many of its claims have leases that passed: it is silent.
    pub(super) silent: usize,
}

/// What a process says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Said {
    /// How long ago.
    pub(super) age: Duration,
    /// Tasks that took effect in a second; not known at its first word.
    pub(super) done: Option<f64>,
    /// Attempts that failed in a second.
    pub(super) failed: Option<f64>,
    /// Whether the store did not answer it.
    pub(super) store_away: bool,
    /// Routes that its breakers have paused.
    pub(super) paused: Vec<String>,
}

/// What a process had said when it was looked at before.
#[derive(Clone)]
struct Before {
    /// About when it was said.
    at: Instant,
    done: u64,
    failed: u64,
    said: Said,
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
        Looker { sources, ledger, before: HashMap::new(), looked_at: None, spoken: HashMap::new(), failed: false }
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
        let mut said = HashMap::new();
        match &self.ledger {
            Ok(ledger) => {
                if let Err(trouble) = running(ledger, &mut view).await {
                    view.troubles.push(trouble.text().to_owned());
                }
                match ledger.processes().await {
                    Ok(processes) => said = heard(&mut self.spoken, &processes, now),
                    Err(error) => view.troubles.push(error.to_string()),
                }
            }
            Err(trouble) => view.troubles.push(trouble.text().to_owned()),
        }
        view.workers = workers(&view.running, said);
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

/// Two words of one process lie further apart than this: what is nearer is the same word, looked at again.
const APART: Duration = Duration::from_millis(500);

/// What processes say, with rates between their last two words.
fn heard(spoken: &mut HashMap<Arc<str>, Before>, processes: &[Process], now: Instant) -> HashMap<String, Said> {
    let mut latest = HashMap::new();
    for process in processes {
        let Ok(told) = serde_json::from_slice::<Value>(&process.summary) else { continue };
        let count = |names: &[&str]| names.iter().filter_map(|name| told["counts"][name].as_u64()).sum::<u64>();
        let (done, failed) = (count(&["completed"]), count(&["failed", "dead", "parked"]));
        let at = now.checked_sub(process.age).unwrap_or(now);
        let before = spoken.get(&process.name);
        let is_new = before.is_none_or(|before| at.saturating_duration_since(before.at) > APART);
        let (rate_done, rate_failed) = match before {
            Some(before) if is_new => {
                let since = at.saturating_duration_since(before.at);
                (Some(rate(before.done, done, since)), Some(rate(before.failed, failed, since)))
            }
            Some(before) => (before.said.done, before.said.failed),
            None => (None, None),
        };
        let paused = told["routes"].as_array().into_iter().flatten().filter(|route| route["breaker"] == "open");
        let said = Said {
            age: process.age,
            done: rate_done,
            failed: rate_failed,
            store_away: told["store_away"] == true,
            paused: paused.filter_map(|route| Some(route["route"].as_str()?.to_owned())).collect(),
        };
        let kept = match before {
            Some(before) if !is_new => Before { said, ..before.clone() },
            Some(_) | None => Before { at, done, failed, said },
        };
        latest.insert(Arc::clone(&process.name), kept);
    }
    *spoken = latest;
    spoken.iter().map(|(name, before)| (name.to_string(), before.said.clone())).collect()
}

fn workers(running: &[Running], said: HashMap<String, Said>) -> Vec<Worker> {
    let mut workers: BTreeMap<String, Worker> = BTreeMap::new();
    for (owner, said) in said {
        workers.insert(owner.clone(), Worker { owner, said: Some(said), ..Worker::default() });
    }
    for task in running {
        let new = || Worker { owner: task.owner.clone(), ..Worker::default() };
        let worker = workers.entry(task.owner.clone()).or_insert_with(new);
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
        let workers =
            workers(&[task("a", "one", 3, 9), task("b", "two", 40, 0), task("c", "one", 5, 9)], HashMap::new());
        let told: Vec<_> = workers
            .iter()
            .map(|worker| (&*worker.owner, worker.running, worker.longest.as_secs(), worker.silent))
            .collect();
        assert_eq!(told, [("one", 2, 5, 0), ("two", 1, 40, 1)]);
    }

    #[test]
    fn rates_of_a_process_are_those_between_its_last_two_words() {
        let began = Instant::now();
        let at = |millis: u64| began + Duration::from_millis(10_000 + millis);
        let process = |age: u64, done: u64| {
            Process {
            name: "one".into(),
            age: Duration::from_millis(age),
            summary: format!(
                "{{\"counts\": {{\"completed\": {done}, \"failed\": 1, \"dead\": 1}}, \"routes\": [{{\"route\": \"a\", \"breaker\": \"open\"}}]}}"
            )
            .into_bytes(),
        }
        };
        let mut spoken = HashMap::new();
        let mut look = |process: Process, now: Instant| heard(&mut spoken, &[process], now).remove("one").unwrap();
        let first = look(process(0, 100), at(0));
        assert_eq!((first.done, first.failed, &first.paused[..]), (None, None, &["a".to_owned()][..]));
        assert_eq!(look(process(1000, 100), at(1000)).done, None, "the same word");
        let second = look(process(0, 300), at(2000));
        assert_eq!((second.done, second.failed), (Some(100.0), Some(0.0)));
        assert_eq!(look(process(1000, 300), at(3000)).done, Some(100.0), "the same word");
        let unreadable = Process { name: "two".into(), age: Duration::ZERO, summary: b"?".to_vec() };
        assert_eq!(heard(&mut HashMap::new(), &[unreadable], began), HashMap::new());
        let workers = workers(&[], HashMap::from([("one".to_owned(), second)]));
        assert_eq!((&*workers[0].owner, workers[0].running), ("one", 0));
    }

    #[test]
    fn what_grows_and_what_shrinks_is_told_by_the_second() {
        assert_eq!(rate(100, 50, Duration::from_secs(5)), -10.0);
        assert_eq!(rate(0, 3, Duration::from_millis(500)), 6.0);
        assert!(rate(0, 1, Duration::ZERO).is_finite());
    }
}
