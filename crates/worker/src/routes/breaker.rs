//! Pauses a route whose tasks fail one after another: `Breaker`. After the pause one task at a time is tried.
//!
//! It judges what is downstream of a handler, not a task: what a failure does to its task is decided in the record.

use std::time::Duration;

use super::gate::Ended;

/// When a route is paused, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// After so many failures in a row, at least 1.
    pub failures: u32,
    /// For so long.
    pub pause: Duration,
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Everything may start.
    Closed {
        /// How many failed in a row.
        failures: u32,
    },
    /// Nothing may start.
    Open {
        /// Until this moment, on the caller's clock. Then one is tried.
        until: Duration,
    },
    /// One is being tried; nothing else may start before it ends.
    Probing,
}

impl BreakerState {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            BreakerState::Closed { .. } => "closed",
            BreakerState::Open { .. } => "open",
            BreakerState::Probing => "probing",
        }
    }
}

/// Closed until so many failures in a row, then open for the pause, then one probe at a time: its success closes, its failure
/// opens again.
///
/// What was started before it opened says nothing any more: neither its late failures nor its late successes move it.
#[derive(Clone, Debug)]
pub struct Breaker {
    rules: BreakerRules,
    state: BreakerState,
    /// How often it opened: what started in an earlier era is not heard.
    era: u64,
}

/// What a breaker let through; it is told of its end.
#[derive(Debug)]
pub(super) struct Through {
    era: u64,
    is_probe: bool,
}

/// Whether a breaker lets something through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    Nothing,
    Until(Duration),
    Probe,
}

impl Breaker {
    /// A closed one.
    #[must_use]
    pub fn new(rules: BreakerRules) -> Breaker {
        Breaker { rules, state: BreakerState::Closed { failures: 0 }, era: 0 }
    }

    /// Where it stands. One that is open and whose pause is over is still open: nothing was tried yet.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        self.state
    }

    /// How often it opened.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.era
    }

    pub(super) fn block(&self, now: Duration) -> Block {
        match self.state {
            BreakerState::Closed { .. } => Block::Nothing,
            BreakerState::Open { until } if until > now => Block::Until(until),
            BreakerState::Open { .. } => Block::Nothing,
            BreakerState::Probing => Block::Probe,
        }
    }

    /// Something starts that nothing blocks.
    pub(super) fn start(&mut self) -> Through {
        let is_probe = match self.state {
            BreakerState::Closed { .. } => false,
            BreakerState::Open { .. } | BreakerState::Probing => true,
        };
        if is_probe {
            self.state = BreakerState::Probing;
        }
        Through { era: self.era, is_probe }
    }

    pub(super) fn note(&mut self, through: &Through, ended: Ended, now: Duration) {
        if through.era != self.era {
            return;
        }
        match (self.state, ended) {
            (BreakerState::Closed { .. }, Ended::Succeeded) => self.state = BreakerState::Closed { failures: 0 },
            (BreakerState::Closed { failures }, Ended::Failed) => {
                let failures = failures.saturating_add(1);
                if failures >= self.rules.failures {
                    self.open(now);
                } else {
                    self.state = BreakerState::Closed { failures };
                }
            }
            (BreakerState::Probing, Ended::Succeeded) if through.is_probe => {
                self.state = BreakerState::Closed { failures: 0 };
            }
            (BreakerState::Probing, Ended::Failed) if through.is_probe => self.open(now),
            // It tells nothing of what is downstream: the next one is tried at once.
            (BreakerState::Probing, Ended::NotStarted | Ended::Neither) if through.is_probe => {
                self.state = BreakerState::Open { until: now };
            }
            (
                BreakerState::Closed { .. } | BreakerState::Open { .. } | BreakerState::Probing,
                Ended::NotStarted | Ended::Neither | Ended::Succeeded | Ended::Failed,
            ) => {}
        }
    }

    /// Whether this is the one that it tries now.
    #[cfg(test)]
    pub(super) fn is_probe(&self, through: &Through) -> bool {
        through.is_probe && through.era == self.era && self.state == BreakerState::Probing
    }

    fn open(&mut self, now: Duration) {
        self.era += 1;
        self.state = BreakerState::Open { until: now.saturating_add(self.rules.pause) };
    }
}
