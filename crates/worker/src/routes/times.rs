//! When the attempts of a task come after its first failure: `Times`, from its policy.

use std::time::Duration;

use taskonce_core::policy::{Backoff, Policy};

/// The most attempts that a plan lists one by one.
pub const PLANNED_MAX: usize = 20;
/// After so many attempts a delay that still grows is taken for the longest: the sum stays an upper bound.
const GROWING_MAX: u32 = 10_000;

/// When one attempt comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Which, counted from 1: the first of a plan is 2.
    pub attempt: u32,
    /// The earliest moment after the first failure. With full jitter each delay may be none.
    pub earliest: Duration,
    /// The moment on average.
    pub mean: Duration,
    /// The latest moment.
    pub latest: Duration,
}

/// The plan of a route's attempts. Moments count from the first failure and leave out how long the attempts in between run.
///
/// A handler that names a delay itself, a rate, a paused route, a retry budget and a broker that is late make it longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    /// The attempts after the first, of failures that may pass: at most [`PLANNED_MAX`].
    pub planned: Vec<Planned>,
    /// How many attempts there are in all.
    pub attempts_max: u32,
    /// All delays together, at most.
    pub delays_max: Duration,
    /// From the first start until the task is dead or parked, at most: every attempt runs for `run_max`, every delay is the
    /// longest, and after `crashes_max` of them lease and visibility timeout have to pass. `None`: there is no `run_max`.
    pub settled_max: Option<Duration>,
}

impl Times {
    /// The plan of a policy, of deliveries with this visibility timeout where it is known.
    #[must_use]
    pub fn of(policy: &Policy, visibility: Option<Duration>) -> Times {
        let attempts_max = policy.attempts_max;
        let mut latest = Duration::ZERO;
        let planned = (2..=attempts_max)
            .take(PLANNED_MAX)
            .map(|attempt| {
                latest = latest.saturating_add(policy.backoff.bound(attempt - 1));
                Planned { attempt, earliest: Duration::ZERO, mean: latest / 2, latest }
            })
            .collect();
        let delays_max = sum(&policy.backoff, attempts_max.saturating_sub(1));
        let settled_max = policy.run_max.map(|run_max| {
            let runs = run_max.saturating_mul(attempts_max);
            // The next worker needs the delivery and the claim.
            let crash = policy.lease.max(visibility.unwrap_or_default());
            let crashes = crash.saturating_mul(policy.crashes_max.min(attempts_max));
            delays_max.saturating_add(runs).saturating_add(crashes)
        });
        Times { planned, attempts_max, delays_max, settled_max }
    }
}

/// The first so many delays together, at most.
fn sum(backoff: &Backoff, count: u32) -> Duration {
    let mut sum = Duration::ZERO;
    for attempt in 1..=count.min(GROWING_MAX) {
        let bound = backoff.bound(attempt);
        if bound == backoff.delay_max {
            return sum.saturating_add(bound.saturating_mul(count - attempt + 1));
        }
        sum = sum.saturating_add(bound);
    }
    sum.saturating_add(backoff.delay_max.saturating_mul(count.saturating_sub(GROWING_MAX)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use taskonce_core::policy::Effect;

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn attempts_are_planned_from_the_first_failure_on() {
        let backoff = Backoff { delay_min: seconds(2), delay_max: seconds(10), factor: 2.0 };
        let policy = Policy { attempts_max: 6, backoff, ..Policy::new(Effect::Keyed) };
        let times = Times::of(&policy, None);
        let latest: Vec<_> = times.planned.iter().map(|one| (one.attempt, one.latest.as_secs())).collect();
        assert_eq!(latest, [(2, 2), (3, 6), (4, 14), (5, 24), (6, 34)]);
        assert!(times.planned.iter().all(|one| one.earliest.is_zero() && one.mean * 2 == one.latest));
        assert_eq!((times.delays_max, times.settled_max), (seconds(34), None));
    }

    #[test]
    fn the_end_is_bounded_by_runs_delays_and_passed_leases() {
        let policy = Policy {
            attempts_max: 2,
            crashes_max: 3,
            lease: seconds(30),
            run_max: Some(seconds(100)),
            backoff: Backoff { delay_min: seconds(7), delay_max: seconds(7), factor: 1.0 },
            ..Policy::new(Effect::Keyed)
        };
        let settled_max = |visibility| Times::of(&policy, visibility).settled_max;
        assert_eq!(settled_max(None), Some(seconds(2 * 100 + 7 + 2 * 30)));
        assert_eq!(settled_max(Some(seconds(20))), settled_max(None));
        assert_eq!(settled_max(Some(seconds(50))), Some(seconds(2 * 100 + 7 + 2 * 50)));
        let once = Times::of(&Policy { attempts_max: 1, ..policy }, None);
        assert_eq!((once.planned.len(), once.delays_max, once.settled_max), (0, seconds(0), Some(seconds(130))));
    }

    #[test]
    fn a_plan_without_an_end_is_bounded_and_soon_made() {
        let policy = Policy { attempts_max: u32::MAX, ..Policy::new(Effect::Keyed) };
        let times = Times::of(&policy, None);
        assert_eq!(times.planned.len(), PLANNED_MAX);
        // 1 + 2 + … + 512 s, and then 10 min each.
        assert_eq!(times.delays_max, seconds(1023 + 600 * u64::from(u32::MAX - 11)));
        let slow = Backoff { factor: 1.0, ..Backoff::default() };
        assert!(Times::of(&Policy { backoff: slow, ..policy }, None).delays_max >= seconds(u64::from(u32::MAX) - 1));
    }

    proptest! {
        #[test]
        fn no_drawn_delays_are_later_than_planned(
            delay_min in 0_u64..5000,
            more in 0_u64..50_000,
            factor in 1.0_f64..4.0,
            draws in prop::collection::vec(any::<u64>(), 0..15),
        ) {
            let delay_min = Duration::from_millis(delay_min);
            let backoff = Backoff { delay_min, delay_max: delay_min + Duration::from_millis(more), factor };
            let attempts_max = draws.len() as u32 + 1;
            let times = Times::of(&Policy { attempts_max, backoff, ..Policy::new(Effect::Keyed) }, None);
            let mut after = Duration::ZERO;
            for (attempt, random) in (1..).zip(draws) {
                after += backoff.delay(attempt, random);
                prop_assert!(after <= times.planned[attempt as usize - 1].latest);
            }
            prop_assert_eq!(times.delays_max, times.planned.last().map_or(Duration::ZERO, |last| last.latest));
        }
    }
}
