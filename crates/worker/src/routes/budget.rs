//! Bounds the share of retries among the starts of a source: `RetryBudget`. A broken downstream is not flooded by repeats.

use std::time::Duration;

use super::SourceRules;
use super::rate::{Limiter, RateRules, Start};

/// The most retries that a quiet time saves up for a bad one.
pub const RETRIES_SAVED_MAX: u32 = 100;

/// A part of a retry, in which what is saved is counted: whole numbers, so that nothing is lost by rounding.
const PART: u64 = 1_000_000;

/// Each first start saves a part of a retry, and each retry uses one up; a floor lets some through where nothing is saved.
///
/// With a share `s`, of `n` first starts in a time `t` at most `100 + n × s / (1 - s)` retries start, and beyond them what the
/// floor gives in `t` and at once. It is asked when a claim has told which attempt it is, before the handler is entered: one
/// that must wait is released, which counts no attempt, and deferred. Retries wait; first starts never do.
///
/// Source: `RetryBudget` in Finagle, 2016.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    /// What one first start saves, in parts; `None`: no limit.
    saving: Option<u64>,
    saved: u64,
    floor: Limiter,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    first: u64,
    retries: u64,
    refused: u64,
}

/// A budget at a moment, for people. Counts are since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetSnapshot {
    /// First starts.
    pub first: u64,
    /// Retries that started.
    pub retries: u64,
    /// How often a retry had to wait.
    pub refused: u64,
    /// Whole retries that are saved.
    pub saved: u32,
}

impl RetryBudget {
    /// The budget of a source, with nothing saved.
    #[must_use]
    pub fn new(rules: &SourceRules) -> RetryBudget {
        let floor = RateRules { rate: rules.retry_floor, burst: rules.retry_floor.burst() };
        RetryBudget {
            saving: saving(rules.retry_share),
            saved: 0,
            floor: Limiter::new(floor),
            counts: Counts::default(),
        }
    }

    /// A task starts for the first time.
    pub fn note_first(&mut self) {
        self.counts.first += 1;
        let saving = self.saving.unwrap_or(0);
        self.saved = self.saved.saturating_add(saving).min(u64::from(RETRIES_SAVED_MAX) * PART);
    }

    /// Whether a later attempt may start now; then it is counted.
    pub fn may_retry(&mut self, now: Duration) -> Start {
        let start = if self.saving.is_none() {
            Start::Now
        } else if self.saved >= PART {
            self.saved -= PART;
            Start::Now
        } else {
            self.floor.may_start(now)
        };
        match start {
            Start::Now => self.counts.retries += 1,
            Start::WaitUntil(_) => self.counts.refused += 1,
        }
        start
    }

    /// How it stands, for people.
    #[must_use]
    pub fn snapshot(&self) -> BudgetSnapshot {
        let Counts { first, retries, refused } = self.counts;
        let saved = u32::try_from(self.saved / PART).unwrap_or(RETRIES_SAVED_MAX);
        BudgetSnapshot { first, retries, refused, saved }
    }
}

/// What a first start saves, so that retries are at most this share of all starts; rounded down.
fn saving(share: f64) -> Option<u64> {
    (share < 1.0).then(|| (share.max(0.0) / (1.0 - share) * PART as f64) as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::routes::Rate;

    fn budget(retry_share: f64, per_second: u32) -> RetryBudget {
        let retry_floor = Rate::per_second(per_second);
        RetryBudget::new(&SourceRules { retry_share, retry_floor, ..SourceRules::new("orders") })
    }

    fn retries_at(budget: &mut RetryBudget, now: Duration) -> u32 {
        (0..1000).map_while(|_| (budget.may_retry(now) == Start::Now).then_some(1)).sum()
    }

    #[test]
    fn retries_are_a_share_of_all_starts_and_a_floor() {
        for (share, first, floor, expected) in
            [(0.2, 40, 1, 10 + 1), (0.5, 40, 1, 40 + 1), (0.0, 40, 3, 3), (0.2, 0, 7, 7)]
        {
            let mut budget = budget(share, floor);
            (0..first).for_each(|_| budget.note_first());
            assert_eq!(retries_at(&mut budget, Duration::ZERO), expected, "{share} of {first}");
        }
    }

    #[test]
    fn a_quiet_time_saves_no_more_than_its_bound() {
        let mut budget = budget(0.5, 1);
        (0..10_000).for_each(|_| budget.note_first());
        assert_eq!(budget.snapshot().saved, RETRIES_SAVED_MAX);
        assert_eq!(retries_at(&mut budget, Duration::ZERO), RETRIES_SAVED_MAX + 1);
        let BudgetSnapshot { first, retries, refused, saved } = budget.snapshot();
        assert_eq!((first, retries, refused, saved), (10_000, u64::from(RETRIES_SAVED_MAX) + 1, 1, 0));
    }

    #[test]
    fn where_nothing_new_comes_the_floor_lets_retries_through() {
        let mut budget = budget(0.2, 2);
        let now = Duration::from_secs(5);
        assert_eq!(retries_at(&mut budget, now), 2);
        let Start::WaitUntil(moment) = budget.may_retry(now) else { panic!("the floor is used up") };
        assert_eq!(moment, now + Duration::from_millis(500));
        assert_eq!(budget.may_retry(moment), Start::Now);
    }

    #[test]
    fn a_share_of_one_is_no_limit() {
        assert_eq!(retries_at(&mut budget(1.0, 1), Duration::ZERO), 1000);
    }

    proptest! {
        #[test]
        fn retries_never_exceed_what_the_share_and_the_floor_allow(
            share in 0.0_f64..0.95,
            floor in 1_u32..5,
            moves in prop::collection::vec((any::<bool>(), 0_u64..200), 1..400),
        ) {
            let mut budget = budget(share, floor);
            let mut now = Duration::ZERO;
            for (is_first, step) in moves {
                now += Duration::from_millis(step);
                if is_first {
                    budget.note_first();
                } else if let Start::WaitUntil(moment) = budget.may_retry(now) {
                    prop_assert!(moment > now);
                }
                let told = budget.snapshot();
                let by_floor = f64::from(floor) * (1.0 + now.as_secs_f64());
                let by_share = told.first as f64 * share / (1.0 - share);
                prop_assert!(told.retries as f64 <= by_share + by_floor + 1e-6, "{told:?} after {now:?}");
            }
        }
    }
}
