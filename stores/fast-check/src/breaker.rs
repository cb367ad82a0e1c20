//! The circuit breaker: whether the front is asked at all. Pure; the time is an argument.
//!
//! Closed, calls pass. After a few failures it opens: calls do without the front at once. From time to time one probe in
//! the background asks the front, and its success closes the breaker.

use std::time::Duration;

use tokio::time::Instant;

/// What one failure counts; one success takes 1 back. So a front of which a third fails opens the breaker as well.
const FAILURE: u32 = 4;
/// How much makes the breaker open: three failures in a row.
const OPEN_AT: u32 = 3 * FAILURE;
/// The pause before the first probe, and between two.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause, where the breaker opens again and again. Closed for so long, it begins anew with the shortest.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A probe that was begun so long ago has got lost, and another may go.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// Whether the front is asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    pause: Duration,
    closed_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { score: u32 },
    Open { probe_at: Instant },
    Probing { since: Instant },
}

/// What a caller does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// Asks the front.
    Pass,
    /// Does without it.
    Refuse,
    /// Does without it, and has a probe sent in the background.
    RefuseAndProbe,
}

/// A change that people are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Opened,
    Closed,
}

impl Breaker {
    pub(crate) fn new() -> Breaker {
        Breaker { state: State::Closed { score: 0 }, pause: PAUSE_MIN, closed_at: None }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    pub(crate) fn gate(&mut self, now: Instant) -> Gate {
        let due = match self.state {
            State::Closed { .. } => return Gate::Pass,
            State::Open { probe_at } => now >= probe_at,
            State::Probing { since } => now >= since + PROBE_MAX,
        };
        if due {
            self.state = State::Probing { since: now };
            return Gate::RefuseAndProbe;
        }
        Gate::Refuse
    }

    /// A call of a user's has ended. One that was begun before the breaker opened changes nothing any more.
    pub(crate) fn ended(&mut self, succeeded: bool, now: Instant) -> Option<Change> {
        let State::Closed { score } = &mut self.state else { return None };
        *score = if succeeded { score.saturating_sub(1) } else { *score + FAILURE };
        if *score < OPEN_AT {
            return None;
        }
        let is_calm = self.closed_at.is_none_or(|closed_at| now >= closed_at + PAUSE_MAX);
        self.pause = if is_calm { PAUSE_MIN } else { (self.pause * 2).min(PAUSE_MAX) };
        self.state = State::Open { probe_at: now + self.pause };
        Some(Change::Opened)
    }

    /// The probe has ended.
    pub(crate) fn probed(&mut self, succeeded: bool, now: Instant) -> Option<Change> {
        if self.is_closed() {
            return None;
        }
        if succeeded {
            self.state = State::Closed { score: 0 };
            self.closed_at = Some(now);
            return Some(Change::Closed);
        }
        self.state = State::Open { probe_at: now + self.pause };
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(breaker: &mut Breaker, now: Instant) {
        for _ in 0..2 {
            assert_eq!(breaker.ended(false, now), None);
        }
        assert_eq!(breaker.ended(false, now), Some(Change::Opened));
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_one_probe_at_a_time_closes_it() {
        let (mut breaker, start) = (Breaker::new(), Instant::now());
        assert_eq!(breaker.gate(start), Gate::Pass);
        opened(&mut breaker, start);
        assert_eq!(breaker.gate(start), Gate::Refuse);
        let later = start + PAUSE_MIN;
        assert_eq!([breaker.gate(later), breaker.gate(later)], [Gate::RefuseAndProbe, Gate::Refuse]);
        assert_eq!(breaker.probed(false, later), None);
        assert_eq!(breaker.gate(later), Gate::Refuse);
        let later = later + PAUSE_MIN;
        assert_eq!(breaker.gate(later), Gate::RefuseAndProbe);
        assert_eq!(breaker.probed(true, later), Some(Change::Closed));
        assert_eq!(breaker.gate(later), Gate::Pass);
    }

    #[test]
    fn now_and_then_a_failure_keeps_it_closed_and_a_third_of_them_opens_it() {
        let (mut breaker, now) = (Breaker::new(), Instant::now());
        for call in 0..1000 {
            assert_eq!(breaker.ended(call % 10 != 0, now), None);
        }
        assert!((0..100).any(|call| breaker.ended(call % 3 != 0, now) == Some(Change::Opened)));
    }

    #[test]
    fn one_that_opens_again_and_again_pauses_longer_up_to_a_bound() {
        let (mut breaker, mut now) = (Breaker::new(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            opened(&mut breaker, now);
            pauses.push(breaker.pause);
            now += breaker.pause;
            assert_eq!(breaker.gate(now), Gate::RefuseAndProbe);
            assert_eq!(breaker.probed(true, now), Some(Change::Closed));
        }
        assert_eq!((pauses[0], pauses[1], pauses[7]), (PAUSE_MIN, PAUSE_MIN * 2, PAUSE_MAX));
        opened(&mut breaker, now + PAUSE_MAX);
        assert_eq!(breaker.pause, PAUSE_MIN);
    }

    #[test]
    fn a_probe_that_got_lost_is_sent_again() {
        let (mut breaker, start) = (Breaker::new(), Instant::now());
        opened(&mut breaker, start);
        let later = start + PAUSE_MIN;
        assert_eq!(breaker.gate(later), Gate::RefuseAndProbe);
        assert_eq!(breaker.gate(later + PROBE_MAX), Gate::RefuseAndProbe);
    }

    #[test]
    fn late_answers_neither_close_it_nor_open_it_twice() {
        let (mut breaker, now) = (Breaker::new(), Instant::now());
        opened(&mut breaker, now);
        assert_eq!([breaker.ended(true, now), breaker.ended(false, now)], [None, None]);
        assert!(!breaker.is_closed());
    }
}
