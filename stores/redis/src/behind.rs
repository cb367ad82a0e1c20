//! Changes of lists that go on behind the calls that they belong to: where a list's server is slow, and, again after a
//! while, where it was away.
//!
//! Only on a Cluster can the server of a list be away while that of the record is not. Then a process tries it once in a
//! while, however many of its calls change the list. What a heartbeat adds is added by the next one; what became Waiting,
//! Dead or Parked is announced once, and so it is kept for some time.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Context;
use std::time::Duration;

use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::shared::{join, lock};
use tokio::time::{Instant, sleep};

use crate::lists::{self, Entry, List};
use crate::script::{Change, Verb};

/// How many calls have changes of lists that go on behind them.
const BEHIND_MAX: usize = 256;
/// How many entries are kept to be added again. What is more is left for a walk over all records.
const KEPT_MAX: usize = 4096;
/// How many entries of one list are added again at once.
const TOGETHER_MAX: usize = 256;
/// How often an entry is added again, and the first and the longest pause before that: some two minutes together, which
/// is longer than a failover takes.
const TRIES_MAX: u32 = 24;
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long no call changes a list whose server did not answer, before one tries again.
const AWAY_PAUSE: Duration = Duration::from_secs(2);

/// What goes on behind the calls of one runtime.
#[derive(Default)]
pub(crate) struct Behind {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Behind how many calls something goes on.
    count: usize,
    /// Lists whose server does not answer, and when it is tried again.
    away: BTreeMap<List, Instant>,
    /// What is to be added again.
    kept: BTreeMap<(List, Vec<u8>), Kept>,
    /// Whether there is a task that does it.
    is_adding: bool,
}

/// An entry to be added again.
#[derive(Clone)]
struct Kept {
    entry: Entry,
    ends: Instant,
    tries: u32,
}

/// A change of one entry, made beside a record.
pub(crate) struct Leg {
    pub(crate) list: List,
    pub(crate) verb: Verb,
    entry: Entry,
    /// When the entry ends, if it is added.
    ends: Instant,
    stand: Stand,
}

/// How far a change has come.
enum Stand {
    /// It is on its way, once it was polled.
    Going(Pin<Box<dyn Future<Output = Result<(), Refusal>> + Send>>),
    /// It was not begun.
    HeldBack,
    /// It has ended so.
    Ended(Result<(), Refusal>),
}

impl Leg {
    /// A change that begins when it is polled.
    pub(crate) fn new(links: &Arc<Links>, deadline: Instant, entry: &Entry, verb: Verb, number: u64) -> Leg {
        let (links, list, changes) = (Arc::clone(links), entry.list, [entry.change(verb, number)]);
        let ends = Instant::now() + Duration::from_millis(number);
        let going = Box::pin(async move { lists::change(&links, deadline, list, &changes).await });
        Leg { list, verb, entry: entry.clone(), ends, stand: Stand::Going(going) }
    }

    /// The same, which does not begin.
    pub(crate) fn held_back(self) -> Leg {
        Leg { stand: Stand::HeldBack, ..self }
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) {
        if let Stand::Going(going) = &mut self.stand
            && let std::task::Poll::Ready(outcome) = going.as_mut().poll(context)
        {
            self.stand = Stand::Ended(outcome);
        }
    }

    pub(crate) fn is_going(&self) -> bool {
        matches!(self.stand, Stand::Going(_))
    }

    /// Waits until it has ended.
    pub(crate) async fn end(&mut self) {
        if let Stand::Going(going) = &mut self.stand {
            let outcome = going.as_mut().await;
            self.stand = Stand::Ended(outcome);
        }
    }
}

impl Behind {
    /// Whether a call may change a list that lies on another server than its record: one that does not answer is tried
    /// by one call at a time.
    pub(crate) fn may_try(&self, list: List) -> bool {
        let mut state = lock(&self.state);
        let Some(next) = state.away.get_mut(&list) else { return true };
        let now = Instant::now();
        let is_due = *next <= now;
        if is_due {
            *next = now + AWAY_PAUSE;
        }
        is_due
    }

    /// Whether the server of a list did not answer when it was asked last.
    pub(crate) fn is_away(&self, list: List) -> bool {
        lock(&self.state).away.contains_key(&list)
    }

    /// The server of a list does not answer.
    pub(crate) fn mark_away(&self, list: List) {
        lock(&self.state).away.insert(list, Instant::now() + AWAY_PAUSE);
    }

    /// What is left is no longer to be added.
    pub(crate) fn forget(&self, entry: &Entry) {
        let mut state = lock(&self.state);
        if !state.kept.is_empty() {
            state.kept.remove(&(entry.list, entry.member.clone()));
        }
    }

    /// Lets changes end, and then makes others. Of what fails and may be made later, entries are added again if they are
    /// `wanted`, and those of the others always.
    pub(crate) fn go_on(
        self: &Arc<Behind>,
        links: &Arc<Links>,
        mut legs: Vec<Leg>,
        wanted: bool,
        mut others: Vec<Leg>,
    ) {
        if (legs.iter().any(Leg::is_going) || !others.is_empty())
            && let Some(room) = self.room()
        {
            let links = Arc::clone(links);
            tokio::spawn(async move {
                let Room(behind) = &room;
                join(legs.iter_mut().map(Leg::end)).await;
                behind.settle(&links, legs, wanted);
                join(others.iter_mut().map(Leg::end)).await;
                behind.settle(&links, others, true);
            });
            return;
        }
        self.settle(links, legs, wanted);
        self.settle(links, others, true);
    }

    fn room(self: &Arc<Behind>) -> Option<Room> {
        let mut state = lock(&self.state);
        if state.count >= BEHIND_MAX {
            return None;
        }
        state.count += 1;
        Some(Room(Arc::clone(self)))
    }

    /// Learns from what became of changes, and keeps what is to be added again.
    fn settle(self: &Arc<Behind>, links: &Arc<Links>, legs: Vec<Leg>, wanted: bool) {
        for leg in legs {
            match &leg.stand {
                Stand::Ended(outcome) => {
                    if self.hears(leg.list, outcome) {
                        continue;
                    }
                }
                Stand::Going(_) | Stand::HeldBack => {}
            }
            let is_added = matches!(leg.verb, Verb::Add | Verb::Keep);
            if wanted && is_added && leg.list != List::Running {
                self.keep(links, leg.entry, leg.ends);
            }
        }
    }

    /// Learns whether the server of a list answers. Says whether it did: then nothing is to be made later.
    fn hears(&self, list: List, outcome: &Result<(), Refusal>) -> bool {
        match outcome {
            Err(refusal) if refusal.may_pass() => {
                self.mark_away(list);
                false
            }
            Ok(()) | Err(_) => {
                lock(&self.state).away.remove(&list);
                true
            }
        }
    }

    fn keep(self: &Arc<Behind>, links: &Arc<Links>, entry: Entry, ends: Instant) {
        let name = (entry.list, entry.member.clone());
        let mut state = lock(&self.state);
        if state.kept.len() >= KEPT_MAX && !state.kept.contains_key(&name) {
            return;
        }
        state.kept.insert(name, Kept { entry, ends, tries: 0 });
        if !std::mem::replace(&mut state.is_adding, true) {
            let (behind, links) = (Arc::clone(self), Arc::clone(links));
            tokio::spawn(async move { behind.add_again(&links).await });
        }
    }

    /// Adds what is kept, until there is nothing left.
    async fn add_again(&self, links: &Arc<Links>) {
        let mut pause = PAUSE;
        loop {
            sleep(pause).await;
            let outcomes = join(self.first().into_iter().map(async |(list, some)| {
                let now = Instant::now();
                let add = |kept: &Kept| {
                    let left = kept.ends.saturating_duration_since(now).as_millis();
                    kept.entry.change(Verb::Add, u64::try_from(left).unwrap_or(u64::MAX))
                };
                let changes: Vec<Change> = some.iter().map(add).collect();
                let outcome = lists::change(links, links.deadline(), list, &changes).await;
                (list, some, outcome)
            }))
            .await;
            let mut is_over = true;
            for (list, some, outcome) in outcomes {
                let is_made = self.hears(list, &outcome);
                is_over &= is_made;
                let mut state = lock(&self.state);
                for kept in some {
                    let name = (list, kept.entry.member);
                    if is_made || kept.tries + 1 >= TRIES_MAX {
                        state.kept.remove(&name);
                    } else if let Some(kept) = state.kept.get_mut(&name) {
                        kept.tries += 1;
                    }
                }
            }
            pause = if is_over { PAUSE } else { PAUSE_MAX.min(pause * 2) };
            let mut state = lock(&self.state);
            if state.kept.is_empty() {
                state.is_adding = false;
                return;
            }
        }
    }

    /// The first entries of each list that are to be added. Those that have ended are forgotten.
    fn first(&self) -> BTreeMap<List, Vec<Kept>> {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.kept.retain(|_, kept| kept.ends > now);
        let mut first: BTreeMap<List, Vec<Kept>> = BTreeMap::new();
        for ((list, _), kept) in &state.kept {
            let some = first.entry(*list).or_default();
            if some.len() < TOGETHER_MAX {
                some.push(kept.clone());
            }
        }
        first
    }
}

/// A place among those behind whom something goes on.
struct Room(Arc<Behind>);

impl Drop for Room {
    fn drop(&mut self) {
        lock(&self.0.state).count -= 1;
    }
}
