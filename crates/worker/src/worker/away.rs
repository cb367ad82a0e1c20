//! Whether the store is away, and when it is tried again. The clock is an argument.

use std::time::Duration;

/// The first pause after an error of the store; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What a worker knows of its store.
#[derive(Debug, Default)]
pub(super) struct Away {
    /// None while it answers.
    pause: Option<Pause>,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    length: Duration,
    until: Duration,
}

impl Away {
    /// It answered.
    pub(super) fn answered(&mut self) {
        self.pause = None;
    }

    /// It did not. Says how long to leave it alone. Those of one pause count once, however many there are.
    pub(super) fn failed(&mut self, now: Duration) -> Duration {
        let pause = match self.pause {
            Some(pause) if now < pause.until => pause,
            Some(Pause { length, .. }) => {
                let length = (length * 2).min(PAUSE_MAX);
                Pause { length, until: now + length }
            }
            None => Pause { length: PAUSE_MIN, until: now + PAUSE_MIN },
        };
        self.pause = Some(pause);
        pause.until.saturating_sub(now)
    }

    /// Whether it is away.
    pub(super) fn is_away(&self) -> bool {
        self.pause.is_some()
    }

    /// Whether it may be tried by one delivery, where it is away.
    pub(super) fn may_try(&self, now: Duration) -> bool {
        self.pause.is_none_or(|pause| now >= pause.until)
    }

    /// One delivery is about to try it: the next not before it could have answered.
    pub(super) fn tries(&mut self, now: Duration) {
        if let Some(pause) = &mut self.pause {
            pause.until = now + pause.length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn pauses_double_and_end_with_the_first_answer() {
        let mut away = Away::default();
        assert!(!away.is_away() && away.may_try(ms(0)));
        assert_eq!(away.failed(ms(1000)), ms(100));
        assert_eq!(away.failed(ms(1040)), ms(60), "another of the same pause");
        assert!(away.is_away() && !away.may_try(ms(1099)) && away.may_try(ms(1100)));
        away.tries(ms(1100));
        assert!(!away.may_try(ms(1150)), "one at a time");
        assert_eq!(away.failed(ms(1200)), ms(200));
        let mut now = ms(2000);
        for _ in 0..20 {
            now += away.failed(now);
        }
        assert_eq!(away.failed(now), PAUSE_MAX);
        away.answered();
        assert!(!away.is_away());
        assert_eq!(away.failed(now), PAUSE_MIN);
    }
}
