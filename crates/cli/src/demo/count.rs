//! What really happened, counted from the files that workers and provider append to.

use std::collections::HashSet;

/// A column's counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) tasks: usize,
    /// Effects, doubled ones with all of theirs.
    pub(crate) effects: usize,
    /// Tasks that took effect more than once.
    pub(crate) doubled: usize,
    /// Tasks without an effect, though all their deliveries were acknowledged.
    pub(crate) lost: usize,
    /// Tasks without an effect that wait for something that does not come: parked, dead, or never let through.
    pub(crate) blocked: usize,
    /// How often a worker began the work of a task.
    pub(crate) runs: usize,
}

impl Count {
    /// Counts. `effects` and `runs` hold a line each, which begins with the task's number; a last line that was cut by a
    /// kill does not count. `stuck` are the tasks with a delivery left, and those that are parked or dead.
    pub(crate) fn new(tasks: usize, effects: &str, runs: &str, stuck: &HashSet<usize>) -> Count {
        let mut of_task = vec![0_usize; tasks];
        for task in lines(effects).filter(|task| *task < tasks) {
            of_task[task] += 1;
        }
        let without = |is_stuck: bool| {
            let none = |task: &usize| of_task[*task] == 0 && stuck.contains(task) == is_stuck;
            (0..tasks).filter(none).count()
        };
        Count {
            tasks,
            effects: of_task.iter().sum(),
            doubled: of_task.iter().filter(|count| **count > 1).count(),
            lost: without(false),
            blocked: without(true),
            runs: lines(runs).count(),
        }
    }

    pub(crate) fn runs_per_task(&self) -> f64 {
        self.runs as f64 / self.tasks.max(1) as f64
    }
}

fn lines(text: &str) -> impl Iterator<Item = usize> {
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_are_counted_by_task() {
        let stuck = HashSet::from([3]);
        let count = Count::new(5, "0 a\n1 a\n1 b\n1 c\n", "0 a\n1 a\n1 b\n1 c\n2 a\n", &stuck);
        // Task 1 took effect three times; 2 and 4 are gone for good; 3 is still waited for.
        assert_eq!(count, Count { tasks: 5, effects: 4, doubled: 1, lost: 2, blocked: 1, runs: 5 });
        assert_eq!(count.runs_per_task(), 1.0);
    }

    #[test]
    fn a_stuck_task_that_took_effect_is_not_blocked() {
        assert_eq!(Count::new(1, "0 a\n", "0 a\n", &HashSet::from([0])).blocked, 0);
    }

    #[test]
    fn a_line_that_was_cut_is_no_effect() {
        assert_eq!(Count::new(12, "1 a\n1", "1 a\n11", &HashSet::new()).effects, 1);
        assert_eq!(Count::new(12, "", "", &HashSet::new()).lost, 12);
    }
}
