//! What a worker has in hand: deliveries that wait for their start, how much runs, and what may start next. The clock is an
//! argument, and nothing waits here.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::away::Away;
use super::monitor::{RouteSnapshot, Snapshot};
use crate::routes::{Ended, Gate, Pass, RetryBudget, Route, RouteId, Routes, Start, StoreAway, Turn, Turns};
use crate::source::{Delivery, Want};

/// Tasks that take longer than this on average are not received before they can be started: another worker may be idle.
const PREFETCH_BELOW: Duration = Duration::from_millis(50);
/// What is received ahead should start within this time.
const PREFETCH_FOR: Duration = Duration::from_millis(250);
/// Where tasks take less, in seconds, they count as taking this.
const AVERAGE_MIN: f64 = 0.001;
/// The share of the last task in the average.
const NEWEST_SHARE: f64 = 0.05;
/// A delivery that has waited here for so long, or for a third of its visibility timeout, is given back.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(1);

/// A delivery in hand.
pub(super) struct Arrived {
    pub(super) delivery: Delivery,
    /// Its source, by number.
    pub(super) source: usize,
    pub(super) route: RouteId,
    /// When it was received, on the host's clock.
    pub(super) at: Duration,
    /// When it is given back, unless it has started.
    pub(super) back_at: Duration,
}

pub(super) struct Desk {
    gates: Vec<Gate>,
    /// By route: how many run at once, and whether it runs while the store is away.
    rules: Vec<(usize, bool)>,
    turns: Turns,
    waiting: HashMap<RouteId, VecDeque<Arrived>>,
    waiting_count: usize,
    running: usize,
    concurrency_max: usize,
    /// How long tasks take on average, in seconds.
    average: f64,
    budgets: HashMap<String, RetryBudget>,
    pub(super) away: Away,
}

/// What may be started next.
pub(super) enum Next {
    Start(Box<Arrived>, Pass),
    /// Nothing, before this moment or another end.
    Nothing(Option<Duration>),
}

impl Desk {
    pub(super) fn new(routes: &Routes, concurrency_max: usize) -> Desk {
        Desk {
            gates: routes.iter().map(Gate::new).collect(),
            rules: routes
                .iter()
                .map(|route| (route.concurrency_max as usize, route.store_away == StoreAway::Open))
                .collect(),
            turns: Turns::new(routes),
            waiting: HashMap::new(),
            waiting_count: 0,
            running: 0,
            concurrency_max,
            average: PREFETCH_BELOW.as_secs_f64(),
            budgets: routes
                .sources()
                .iter()
                .map(|source| (source.name.to_string(), RetryBudget::new(source)))
                .collect(),
            away: Away::default(),
        }
    }

    /// How it stands, with these routes.
    pub(super) fn snapshot<'r>(&self, routes: impl Iterator<Item = &'r Route>, now: Duration) -> Snapshot {
        let routes = routes.map(|route| RouteSnapshot {
            id: route.id,
            name: route.name(),
            waiting: self.turns.waiting(route.id),
            gate: self.gates[route.id.0 as usize].snapshot(now),
        });
        let mut budgets: Vec<_> =
            self.budgets.iter().map(|(source, budget)| (source.clone(), budget.snapshot())).collect();
        budgets.sort_by(|(one, _), (other, _)| one.cmp(other));
        Snapshot {
            running: self.running,
            waiting: self.waiting_count,
            is_store_away: self.away.is_away(),
            routes: routes.collect(),
            budgets,
        }
    }

    /// Whether nothing runs or waits here, and the store answers: whatever is ready could be received.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting_count == 0 && !self.away.is_away()
    }

    /// Says what is worth receiving of these routes, and how much of all. What is not all that is ever worth it is told too.
    pub(super) fn wants(&mut self, routes: &[RouteId], wants: &mut [Want], now: Duration) -> Worth {
        let (prefetch, rounds) = if self.average < PREFETCH_BELOW.as_secs_f64() {
            (self.concurrency_max, (PREFETCH_FOR.as_secs_f64() / self.average.max(AVERAGE_MIN)) as usize)
        } else {
            (0, 0)
        };
        let mut total = (self.concurrency_max + prefetch).saturating_sub(self.running + self.waiting_count);
        let is_away = self.away.is_away();
        let may_try = self.away.may_try(now);
        let mut is_short = false;
        let mut worth_any = false;
        for (route, want) in routes.iter().zip(wants) {
            let (concurrency_max, is_open) = self.rules[route.0 as usize];
            let is_closed = is_away && !is_open;
            let room = self.gates[route.0 as usize].room(now) as usize;
            want.max = match room {
                0 => 0,
                _ if is_closed && !may_try => 0,
                _ if is_closed => 1,
                room => (room + prefetch.min(concurrency_max.saturating_mul(rounds)))
                    .saturating_sub(self.turns.waiting(*route)),
            };
            is_short |= want.max == 0 || is_closed;
            worth_any |= want.max > 0;
        }
        if is_away && may_try && worth_any {
            // One delivery tries the store; where an open route waits too, that one may.
            total = total.min(1);
            self.away.tries(now);
        }
        if !worth_any {
            total = 0;
        }
        Worth { total, is_short }
    }

    /// These have arrived.
    pub(super) fn arrive(&mut self, arrived: Vec<Arrived>) {
        self.waiting_count += arrived.len();
        for one in arrived {
            self.turns.add(one.route, 1);
            self.waiting.entry(one.route).or_default().push_back(one);
        }
    }

    /// The delivery whose turn it is, if one may start now.
    pub(super) fn next(&mut self, now: Duration) -> Next {
        if self.running >= self.concurrency_max {
            return Next::Nothing(None);
        }
        let (mut passed, mut earliest) = (None, None::<Duration>);
        let gates = &mut self.gates;
        let turn = self.turns.next(|route| match gates[route.0 as usize].may_start(now) {
            Turn::Start(pass) => {
                passed = Some(pass);
                true
            }
            Turn::WaitUntil(moment) => {
                earliest = Some(earliest.map_or(moment, |earliest| earliest.min(moment)));
                false
            }
            Turn::WaitForNote => false,
        });
        let Some((route, pass)) = turn.zip(passed) else { return Next::Nothing(earliest) };
        let Some(arrived) = self.waiting.get_mut(&route).and_then(VecDeque::pop_front) else {
            self.gates[route.0 as usize].note(pass, Ended::NotStarted, now);
            return Next::Nothing(earliest);
        };
        self.waiting_count -= 1;
        self.running += 1;
        Next::Start(Box::new(arrived), pass)
    }

    /// One that ran has ended.
    pub(super) fn end(&mut self, route: RouteId, pass: Pass, ended: Ended, took: Duration, now: Duration) {
        self.running = self.running.saturating_sub(1);
        self.average += (took.as_secs_f64() - self.average) * NEWEST_SHARE;
        self.gates[route.0 as usize].note(pass, ended, now);
    }

    /// Takes away those that have waited for too long, or all.
    pub(super) fn give_back(&mut self, now: Duration, which: Which) -> Vec<Arrived> {
        let is_due = |arrived: &Arrived| match which {
            Which::Overdue => now >= arrived.back_at,
            Which::All => true,
        };
        let mut given = Vec::new();
        if self.waiting_count == 0 {
            return given;
        }
        for (route, waiting) in &mut self.waiting {
            if !waiting.front().is_some_and(is_due) {
                continue;
            }
            self.turns.clear(*route);
            while waiting.front().is_some_and(is_due) {
                given.extend(waiting.pop_front());
            }
            self.turns.add(*route, waiting.len());
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
        self.waiting_count -= given.len();
        given
    }

    /// Whether this attempt may start by its source's budget; then it is counted.
    pub(super) fn may_attempt(&mut self, source: &str, attempt: u32, now: Duration) -> Start {
        let Some(budget) = self.budgets.get_mut(source) else { return Start::Now };
        if attempt > 1 {
            return budget.may_retry(now);
        }
        budget.note_first();
        Start::Now
    }
}

/// What is worth receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Worth {
    /// The most of all; zero: nothing.
    pub(super) total: usize,
    /// Whether there may soon be more: then a receive should not wait for long.
    pub(super) is_short: bool,
}

/// Which of those that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Overdue,
    All,
}
