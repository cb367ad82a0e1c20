//! At most so many starts in a time: `Limiter`. It keeps one moment, however many starts it has let through.

use std::time::Duration;

use super::Rate;

/// A rate, and how many starts may come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateRules {
    /// The rate.
    pub rate: Rate,
    /// How many starts may come at once after a pause, at least 1.
    pub burst: u32,
}

/// Whether something may start.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Now; it is counted.
    Now,
    /// Not before this moment, on the caller's clock. Nothing is counted.
    WaitUntil(Duration),
}

/// Lets through at most `burst` starts at once, and in any time at most that and what the rate gives in it.
///
/// Moments are times on a clock that never goes back, from any start.
///
/// Source: the generic cell rate algorithm, ITU-T I.371, 2004: equal to a bucket of tokens, and exact in integers.
#[derive(Clone, Debug)]
pub struct Limiter {
    /// Between two starts.
    interval: Duration,
    /// How far ahead of the clock `next` may be.
    ahead_max: Duration,
    /// When the next start would be due, if they came evenly.
    next: Duration,
}

impl Limiter {
    /// A limiter that nothing has gone through.
    #[must_use]
    pub fn new(rules: RateRules) -> Limiter {
        // Rounded up, so that the rate is never exceeded.
        let nanos = rules.rate.per.as_nanos().div_ceil(u128::from(rules.rate.starts.max(1)));
        let interval = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        Limiter { interval, ahead_max: interval.saturating_mul(rules.burst.max(1) - 1), next: Duration::ZERO }
    }

    /// Whether one may start now.
    pub fn may_start(&mut self, now: Duration) -> Start {
        match self.when(now) {
            Some(moment) => Start::WaitUntil(moment),
            None => {
                self.next = self.next.max(now).saturating_add(self.interval);
                Start::Now
            }
        }
    }

    /// When the next may start; `None`: now. Counts nothing.
    #[must_use]
    pub fn when(&self, now: Duration) -> Option<Duration> {
        let moment = self.next.saturating_sub(self.ahead_max);
        (moment > now).then_some(moment)
    }

    /// What was counted did not start after all.
    pub fn give_back(&mut self) {
        self.next = self.next.saturating_sub(self.interval);
    }

    /// How many may start now.
    #[must_use]
    pub fn room(&self, now: Duration) -> u32 {
        let Some(left) = now.saturating_add(self.ahead_max).checked_sub(self.next.max(now)) else { return 0 };
        u32::try_from(left.as_nanos() / self.interval.as_nanos().max(1)).unwrap_or(u32::MAX).saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_burst_goes_through_at_once_and_then_the_rate() {
        let mut limiter = Limiter::new(RateRules { rate: Rate::per_second(10), burst: 3 });
        for (now, answer, room) in [
            (ms(5000), Start::Now, 2),
            (ms(5000), Start::Now, 1),
            (ms(5000), Start::Now, 0),
            (ms(5000), Start::WaitUntil(ms(5100)), 0),
            (ms(5099), Start::WaitUntil(ms(5100)), 0),
            (ms(5100), Start::Now, 0),
            (ms(5350), Start::Now, 1),
            (ms(9000), Start::Now, 2),
        ] {
            assert_eq!((limiter.may_start(now), limiter.room(now)), (answer, room), "{now:?}");
        }
    }

    #[test]
    fn what_did_not_start_is_given_back() {
        let mut limiter = Limiter::new(RateRules { rate: Rate::per_second(1), burst: 1 });
        assert_eq!(limiter.may_start(ms(0)), Start::Now);
        limiter.give_back();
        assert_eq!(limiter.may_start(ms(0)), Start::Now);
        assert_eq!(limiter.may_start(ms(0)), Start::WaitUntil(ms(1000)));
    }

    proptest! {
        #[test]
        fn no_window_has_more_starts_than_the_burst_and_the_rate(
            starts in 1_u32..50,
            burst in 1_u32..20,
            steps in prop::collection::vec(0_u64..300, 1..200),
        ) {
            let mut limiter = Limiter::new(RateRules { rate: Rate::per_second(starts), burst });
            let mut now = Duration::ZERO;
            let mut let_through = Vec::new();
            for step in steps {
                now += ms(step);
                let room = limiter.room(now);
                let may = limiter.may_start(now);
                prop_assert_eq!(may == Start::Now, room > 0);
                match may {
                    Start::Now => let_through.push(now),
                    Start::WaitUntil(moment) => {
                        prop_assert!(moment > now);
                        prop_assert!(limiter.clone().may_start(moment) == Start::Now, "the moment that was named holds");
                    }
                }
            }
            for (at, from) in let_through.iter().enumerate() {
                for (count, to) in let_through[at..].iter().enumerate() {
                    let allowed = f64::from(burst) + (*to - *from).as_secs_f64() * f64::from(starts);
                    prop_assert!((count + 1) as f64 <= allowed + 1e-6, "{} in {:?}", count + 1, *to - *from);
                }
            }
        }
    }
}
