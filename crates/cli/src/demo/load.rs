//! What arrives: tasks, how much work each is, and which are delivered twice. Made from a seed.

use std::time::Duration;

/// Of a hundred tasks, so many are delivered twice.
const TWICE_OF_100: u32 = 30;
/// One task arrives about this often.
const ARRIVES_EVERY: Duration = Duration::from_millis(11);
/// The second delivery comes at most so much later.
const TWICE_WITHIN_MS: u64 = 1_500;
/// The work before the effect and after it, in milliseconds each: a call to somebody else's service takes as long.
const WORK_MS: std::ops::RangeInclusive<u64> = 10..=70;

/// One task: its work, with the effect in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) before: Duration,
    pub(crate) after: Duration,
}

/// One delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    /// Which task, counted from 0.
    pub(crate) task: usize,
}

/// The same for every column.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) work: Vec<Work>,
    /// In the order in which they arrive.
    pub(crate) arrivals: Vec<Arrival>,
}

impl Load {
    pub(crate) fn new(tasks: usize, seed: u64) -> Load {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut load = Load { work: Vec::with_capacity(tasks), arrivals: Vec::new() };
        for task in 0..tasks {
            let mut ms = || Duration::from_millis(random.u64(WORK_MS));
            load.work.push(Work { before: ms(), after: ms() });
            let at = ARRIVES_EVERY * u32::try_from(task).unwrap_or(u32::MAX);
            load.arrivals.push(Arrival { at, task });
            if random.u32(0..100) < TWICE_OF_100 {
                let later = Duration::from_millis(random.u64(0..=TWICE_WITHIN_MS));
                load.arrivals.push(Arrival { at: at + later, task });
            }
        }
        load.arrivals.sort_by_key(|arrival| arrival.at);
        load
    }

    pub(crate) fn tasks(&self) -> usize {
        self.work.len()
    }

    /// When the last delivery arrives.
    pub(crate) fn ends(&self) -> Duration {
        self.arrivals.last().map_or(Duration::ZERO, |last| last.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_load() {
        assert_eq!(Load::new(50, 7), Load::new(50, 7));
        assert_ne!(Load::new(50, 7), Load::new(50, 8));
    }

    #[test]
    fn every_task_arrives_and_about_three_in_ten_arrive_twice() {
        let load = Load::new(2_000, 1);
        let mut arrived = vec![0; load.tasks()];
        for arrival in &load.arrivals {
            arrived[arrival.task] += 1;
        }
        let twice = arrived.iter().filter(|count| **count == 2).count();
        assert!(arrived.iter().all(|count| (1..=2).contains(count)));
        assert!((500..700).contains(&twice), "{twice}");
        assert!(load.arrivals.is_sorted_by_key(|arrival| arrival.at));
    }
}
