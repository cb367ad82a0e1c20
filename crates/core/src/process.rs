//! What processes say of themselves: a short summary each, which expires unless it is said again.
//!
//! A summary is kept as a record in a namespace of our own, like the note of a clear, so that every store keeps it: it waits, so
//! that it is listed, and has one step, whose output it is. It is no task: nothing claims it, and it leaves by itself.

use std::sync::Arc;
use std::time::Duration;

use crate::decide::{self, Ask};
use crate::error::{Error, ErrorKind, Result};
use crate::held::stamp;
use crate::key::{Fingerprint, Handler, ID_MAX, Key, Name};
use crate::ledger::Ledger;
use crate::policy::{Effect, Policy};
use crate::record::{ClaimId, Found, Output, Record, State};
use crate::step::{Step, StepState};
use crate::store::{Expected, Filter, Next, Swap};

/// The longest summary, in bytes.
pub const SUMMARY_MAX: usize = 16 * 1024;
/// How long a summary may stay, at least and at most.
pub const LIFE_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// The most processes that one look tells of.
pub const PROCESSES_MAX: usize = 1000;
/// The namespace and the handler of their records.
const NAMESPACE: &str = "taskonce";
const HANDLER: &str = "process";
/// The name of the one step.
const SUMMARY: &str = "summary";
/// How often one publication looks again, where what is there is not what was written last.
const TRIES_MAX: usize = 4;
/// At each so many-th publication those of processes that ended without a word are removed,
const SWEEP_EVERY: u64 = 64;
/// at most so many.
const SWEPT_MAX: usize = 100;
const CONTENT_TYPE: &str = "application/json";

/// A process, and what it said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its label: host, process, worker.
    pub name: Arc<str>,
    /// How long ago it said it, by the store's clock.
    pub age: Duration,
    /// What it said.
    pub summary: Vec<u8>,
}

/// Publishes the summaries of one process.
pub struct Publisher {
    ledger: Ledger,
    key: Key,
    life: Duration,
    /// The same for all that it says, so that its place in the lists stays.
    claim: ClaimId,
    /// What was written last.
    held: Option<Arc<Record>>,
    published: u64,
}

impl Ledger {
    /// What says of this process how it stands. Each summary is gone so long after it was said.
    ///
    /// # Errors
    /// [`ErrorKind::BadPolicy`] for a life outside of [`LIFE_RANGE`].
    pub fn publisher(&self, life: Duration) -> Result<Publisher> {
        if !LIFE_RANGE.contains(&life) {
            let text = format!("a summary stays for 1 s to 1 h, not for {life:?}");
            return Err(Error::new(ErrorKind::BadPolicy, text).about("publisher"));
        }
        let owner: String = self.host().owner().chars().filter(|c| !c.is_control()).collect();
        let id = &owner[..owner.floor_char_boundary(ID_MAX)];
        let key = Handler::within(NAMESPACE, HANDLER, "1")?.key(id)?;
        let claim = ClaimId::from(self.host().random());
        Ok(Publisher { ledger: self.clone(), key, life, claim, held: None, published: 0 })
    }

    /// The processes that have published lately, in the order of their names; at most [`PROCESSES_MAX`].
    ///
    /// # Errors
    /// The store's.
    pub async fn processes(&self) -> Result<Vec<Process>> {
        let mut processes = Vec::new();
        let mut walk = self.walk(filter()?);
        while let Some(page) = walk.next_page().await? {
            let living = page.into_iter().filter_map(|row| Some((row.key, row.found.ok().filter(is_living)?)));
            processes.extend(living.filter_map(|(key, found)| said(&key, &found)));
            if processes.len() >= PROCESSES_MAX {
                break;
            }
        }
        processes.truncate(PROCESSES_MAX);
        processes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(processes)
    }
}

impl Publisher {
    /// Says this, in place of what was said before. One round trip.
    ///
    /// # Errors
    /// [`ErrorKind::BadOutput`] for more than [`SUMMARY_MAX`] bytes; the store's, and then it is said again by the next.
    pub async fn publish(&mut self, summary: &[u8]) -> Result<()> {
        if summary.len() > SUMMARY_MAX {
            let text = format!("the summary has {} bytes; at most {SUMMARY_MAX} are published", summary.len());
            return Err(Error::new(ErrorKind::BadOutput, text).about(format!("process `{}`", self.key.id())));
        }
        if self.published.is_multiple_of(SWEEP_EVERY) {
            self.sweep().await?;
        }
        for _ in 0..TRIES_MAX {
            let next = self.next(summary);
            let expected = Expected::record(self.held.as_deref());
            match self.ledger.store().swap(&self.key, expected, Next::Keep(&next)).await? {
                Swap::Stored(_) => {
                    (self.held, self.published) = (Some(Arc::new(next)), self.published + 1);
                    return Ok(());
                }
                // It has expired, or an earlier write of this process was stored after all. A store may take this one's place in
                // its lists back meanwhile, so it is not taken again.
                Swap::Conflict(found) => {
                    self.held = found.map(|found| found.record);
                    let random = || ClaimId::from(self.ledger.host().random());
                    self.claim = self.held.as_ref().map_or_else(random, |held| held.claim);
                }
                Swap::Locked(_) => break,
            }
        }
        Err(Error::new(ErrorKind::Changed, "the summary keeps changing").about(format!("process `{}`", self.key.id())))
    }

    /// Takes back what was said: the process ends.
    ///
    /// # Errors
    /// The store's; then it expires.
    pub async fn withdraw(self) -> Result<()> {
        let Some(held) = &self.held else { return Ok(()) };
        // Where something else is there by now, it is not this process's.
        let _swap = self.ledger.store().swap(&self.key, Expected::Record(held), Next::Erase).await?;
        Ok(())
    }

    fn next(&self, summary: &[u8]) -> Record {
        let host = &**self.ledger.host();
        let policy = Policy { retention: self.life, output_retention: self.life, ..Policy::new(Effect::Repeatable) };
        let (owner, fingerprint) = (host.owner(), Fingerprint([0; 16]));
        let ask = Ask { claim: self.claim, owner: &owner, fingerprint, policy: &policy };
        let step = Step {
            name: SUMMARY.to_owned(),
            effect: Effect::Repeatable,
            input: fingerprint,
            state: StepState::Done,
            attempt: 0,
            ran_for: Duration::ZERO,
            output: Output::kept(CONTENT_TYPE, summary.to_vec()),
        };
        let first = decide::first(&ask, stamp(host));
        Record { state: State::Waiting, attempt: 0, delay: self.life, steps: vec![step], ..first }
    }

    /// Removes what processes said that ended without a word, where the store does not by itself.
    async fn sweep(&self) -> Result<()> {
        let mut swept = 0;
        let mut walk = self.ledger.walk(filter()?);
        while let Some(page) = walk.next_page().await? {
            let gone =
                page.into_iter().filter_map(|row| Some((row.key, row.found.ok().filter(|found| !is_living(found))?)));
            for (key, found) in gone {
                if swept == SWEPT_MAX {
                    return Ok(());
                }
                swept += 1;
                // Whoever said it may live after all, and say it again.
                let _swap = self.ledger.store().swap(&key, Expected::Record(&found.record), Next::Erase).await?;
            }
        }
        Ok(())
    }
}

fn filter() -> Result<Filter> {
    let (namespace, handler) = (Some(Name::new(NAMESPACE)?), Some(Name::new(HANDLER)?));
    Ok(Filter { states: vec![State::Waiting], namespace, handler, ..Filter::default() }.listed())
}

fn is_living(found: &Found) -> bool {
    !found.age.has_passed(found.record.retention)
}

fn said(key: &Key, found: &Found) -> Option<Process> {
    let step = found.record.steps.first().filter(|step| step.name == SUMMARY)?;
    let Output::Kept { bytes, .. } = &step.output else { return None };
    Some(Process { name: key.id().into(), age: found.age.as_duration(), summary: bytes.to_vec() })
}
