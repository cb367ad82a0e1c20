//! Whether a route may start another task: `Gate`, its concurrency, its rate and its breaker together, with a `Pass` for each start.

use std::time::Duration;

use taskonce_core::record::FailureClass;

use super::Route;
use super::breaker::{Block, Breaker, BreakerState, Through};
use super::rate::{Limiter, Start};

/// The state of one route in one process. Asked before a delivery's task is claimed, told when that came to an end.
///
/// ```
/// # use std::time::Duration;
/// # use taskonce_core::policy::Effect;
/// # use taskonce_worker::routes::{Ended, Gate, Routes, Settings, SourceRules, Turn};
/// # let one = Settings { effect: Some(Effect::Keyed), concurrency_max: Some(1), ..Settings::default() };
/// # let routes = Routes::builder().defaults(one).source(SourceRules::new("orders"), Settings::default())
/// #     .handler("charge@2", Settings::default()).route("orders", "charge", Settings::default()).build().unwrap();
/// let mut gate = Gate::new(routes.find("orders", "charge@2").unwrap());
/// let now = Duration::from_secs(7);
/// let Turn::Start(pass) = gate.may_start(now) else { panic!("nothing runs yet") };
/// assert!(matches!(gate.may_start(now), Turn::WaitForNote), "`concurrency_max` is 1");
/// gate.note(pass, Ended::Succeeded, now);
/// assert!(matches!(gate.may_start(now), Turn::Start(_)));
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    concurrency_max: u32,
    running: u32,
    limiter: Option<Limiter>,
    breaker: Option<Breaker>,
}

/// Whether a task may start.
#[must_use]
#[derive(Debug)]
pub enum Turn {
    /// Now. What becomes of it is told with this pass.
    Start(Pass),
    /// Not before this moment, on the caller's clock: its rate is used up, or its breaker is open.
    WaitUntil(Duration),
    /// Not before one that runs has ended: as many run as may, or its breaker waits for the one it tries.
    WaitForNote,
}

/// The right to start one task; [`Gate::note`] takes it back.
#[must_use = "a pass that is not noted holds its place for ever"]
#[derive(Debug)]
pub struct Pass {
    through: Option<Through>,
}

/// What became of a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No handler was entered: a replay, busy, waiting, dead, parked, a mismatch, released. It counts for nothing.
    NotStarted,
    /// The handler succeeded.
    Succeeded,
    /// The handler failed in a way that may be its surroundings' fault.
    Failed,
    /// It ran, and says nothing of its surroundings: it failed for good, or its claim was lost.
    Neither,
}

impl Ended {
    /// What a failure of this class says.
    #[must_use]
    pub fn of(class: FailureClass) -> Ended {
        match class {
            FailureClass::Retryable | FailureClass::RanTooLong | FailureClass::Crashed => Ended::Failed,
            FailureClass::Permanent | FailureClass::Dropped | FailureClass::StepChanged | FailureClass::StepInDoubt => {
                Ended::Neither
            }
        }
    }
}

/// A gate at a moment, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateSnapshot {
    /// How many run.
    pub running: u32,
    /// How many may start now.
    pub room: u32,
    /// Where its breaker stands; `None`: it has none.
    pub breaker: Option<BreakerState>,
    /// How often its breaker opened.
    pub opened: u64,
}

impl Gate {
    /// The gate of a route, of which nothing runs.
    #[must_use]
    pub fn new(route: &Route) -> Gate {
        Gate {
            concurrency_max: route.concurrency_max,
            running: 0,
            limiter: route.rate.map(Limiter::new),
            breaker: route.breaker.map(Breaker::new),
        }
    }

    /// Whether one may start now; then it is counted. Moments are times on a clock that never goes back, from any start.
    pub fn may_start(&mut self, now: Duration) -> Turn {
        match self.breaker.as_ref().map_or(Block::Nothing, |breaker| breaker.block(now)) {
            Block::Nothing => {}
            Block::Until(moment) => return Turn::WaitUntil(moment),
            Block::Probe => return Turn::WaitForNote,
        }
        if self.running >= self.concurrency_max {
            return Turn::WaitForNote;
        }
        if let Some(Start::WaitUntil(moment)) = self.limiter.as_mut().map(|limiter| limiter.may_start(now)) {
            return Turn::WaitUntil(moment);
        }
        self.running += 1;
        Turn::Start(Pass { through: self.breaker.as_mut().map(Breaker::start) })
    }

    /// What became of it.
    pub fn note(&mut self, pass: Pass, ended: Ended, now: Duration) {
        self.running = self.running.saturating_sub(1);
        if let (Ended::NotStarted, Some(limiter)) = (ended, &mut self.limiter) {
            limiter.give_back();
        }
        if let (Some(through), Some(breaker)) = (&pass.through, &mut self.breaker) {
            breaker.note(through, ended, now);
        }
    }

    /// How many may start now: what is worth receiving.
    #[must_use]
    pub fn room(&self, now: Duration) -> u32 {
        let by_breaker =
            self.breaker.as_ref().map_or(u32::MAX, |breaker| match (breaker.state(), breaker.block(now)) {
                (BreakerState::Closed { .. }, _) => u32::MAX,
                (BreakerState::Open { .. } | BreakerState::Probing, Block::Nothing) => 1,
                (BreakerState::Open { .. } | BreakerState::Probing, Block::Until(_) | Block::Probe) => 0,
            });
        let by_rate = self.limiter.as_ref().map_or(u32::MAX, |limiter| limiter.room(now));
        by_breaker.min(by_rate).min(self.concurrency_max.saturating_sub(self.running))
    }

    /// How it stands, for people.
    #[must_use]
    pub fn snapshot(&self, now: Duration) -> GateSnapshot {
        GateSnapshot {
            running: self.running,
            room: self.room(now),
            breaker: self.breaker.as_ref().map(Breaker::state),
            opened: self.breaker.as_ref().map_or(0, Breaker::opened),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::routes::{BreakerRules, Rate, RateRules};

    const PAUSE: u64 = 30;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn gate(concurrency_max: u32, failures: u32) -> Gate {
        let breaker = Breaker::new(BreakerRules { failures, pause: seconds(PAUSE) });
        Gate { concurrency_max, running: 0, limiter: None, breaker: Some(breaker) }
    }

    fn started(turn: Turn) -> Pass {
        match turn {
            Turn::Start(pass) => pass,
            Turn::WaitUntil(_) | Turn::WaitForNote => panic!("{turn:?}"),
        }
    }

    /// Plays `TIME start|ok|failed|neither|not [answer]` lines: an end is that of the oldest start.
    fn play(mut gate: Gate, story: &str) {
        let mut passes = VecDeque::new();
        for line in story.trim().lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let now = seconds(words[0].parse().unwrap());
            let answer = match words[1] {
                "start" => match gate.may_start(now) {
                    Turn::Start(pass) => {
                        passes.push_back(pass);
                        "now".to_owned()
                    }
                    Turn::WaitUntil(moment) => moment.as_secs().to_string(),
                    Turn::WaitForNote => "wait".to_owned(),
                },
                end => {
                    let ended = match end {
                        "ok" => Ended::Succeeded,
                        "failed" => Ended::Failed,
                        "neither" => Ended::Neither,
                        "not" => Ended::NotStarted,
                        _ => panic!("{line}"),
                    };
                    gate.note(passes.pop_front().unwrap(), ended, now);
                    gate.snapshot(now).breaker.unwrap().name().to_owned()
                }
            };
            assert_eq!(answer, words[2], "{line}");
        }
    }

    #[test]
    fn a_route_is_paused_after_failures_in_a_row_and_one_probe_at_a_time_reopens_it() {
        play(
            gate(9, 3),
            "
            0 start now
            0 failed closed
            1 start now
            1 failed closed
            2 start now
            2 ok closed
            3 start now
            3 failed closed
            4 start now
            4 failed closed
            5 start now
            5 failed open
            5 start 35
            34 start 35
            35 start now
            35 start wait
            36 failed open
            36 start 66
            66 start now
            67 ok closed
            67 start now
            67 start now",
        );
    }

    #[test]
    fn a_probe_that_tells_nothing_makes_room_for_the_next() {
        play(
            gate(9, 1),
            "
            0 start now
            0 failed open
            30 start now
            30 start wait
            31 not open
            31 start now
            32 neither open
            32 start now
            33 ok closed",
        );
    }

    #[test]
    fn what_started_before_the_pause_does_not_move_it() {
        play(
            gate(9, 1),
            "
            0 start now
            0 start now
            0 start now
            0 start now
            1 failed open
            2 ok open
            31 start now
            31 failed probing
            31 neither probing
            32 ok closed",
        );
    }

    #[test]
    fn as_many_run_as_may_and_a_note_makes_room() {
        let mut gate = gate(2, 9);
        let first = started(gate.may_start(seconds(0)));
        let _second = started(gate.may_start(seconds(0)));
        assert!(matches!(gate.may_start(seconds(9)), Turn::WaitForNote));
        gate.note(first, Ended::NotStarted, seconds(9));
        let snapshot = gate.snapshot(seconds(9));
        assert_eq!((snapshot.running, snapshot.room, snapshot.opened), (1, 1, 0));
        let _third = started(gate.may_start(seconds(9)));
    }

    #[test]
    fn a_duplicate_uses_up_no_rate() {
        let mut gate =
            Gate { limiter: Some(Limiter::new(RateRules { rate: Rate::per_second(1), burst: 1 })), ..gate(9, 9) };
        let pass = started(gate.may_start(seconds(1)));
        gate.note(pass, Ended::NotStarted, seconds(1));
        let pass = started(gate.may_start(seconds(1)));
        gate.note(pass, Ended::Succeeded, seconds(1));
        assert!(matches!(gate.may_start(seconds(1)), Turn::WaitUntil(moment) if moment == seconds(2)));
    }

    proptest! {
        #[test]
        fn no_more_run_than_may_one_probe_at_most_and_the_room_is_what_may_start(
            moves in prop::collection::vec((0_u8..8, 0_u64..12), 1..300),
        ) {
            let rate = RateRules { rate: Rate::per_second(1), burst: 4 };
            let mut gate = Gate { limiter: Some(Limiter::new(rate)), ..gate(3, 2) };
            let mut passes: VecDeque<Pass> = VecDeque::new();
            let mut now = Duration::ZERO;
            for (what, step) in moves {
                now += seconds(step);
                let before = gate.snapshot(now);
                if what < 4 {
                    let turn = gate.may_start(now);
                    prop_assert_eq!(matches!(turn, Turn::Start(_)), before.room > 0, "{:?}", before);
                    match turn {
                        Turn::Start(pass) => passes.push_back(pass),
                        Turn::WaitUntil(moment) => prop_assert!(moment > now),
                        Turn::WaitForNote => prop_assert!(!passes.is_empty(), "nobody would wake it"),
                    }
                } else if let Some(pass) = passes.pop_front() {
                    let ended = [Ended::NotStarted, Ended::Succeeded, Ended::Failed, Ended::Neither][what as usize - 4];
                    gate.note(pass, ended, now);
                }
                prop_assert!(passes.len() <= 3);
                let probes = passes.iter().filter(|pass| {
                    pass.through.as_ref().is_some_and(|through| gate.breaker.as_ref().unwrap().is_probe(through))
                });
                prop_assert!(probes.count() <= 1);
            }
        }
    }
}
