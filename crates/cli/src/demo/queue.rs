//! A queue that delivers at least once, as real ones do. It knows the time only as an argument.

use std::collections::HashMap;
use std::time::Duration;

use super::load::Arrival;

/// Names one handing out of a delivery. A later handing out of the same delivery has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Receipt(pub(crate) u64);

/// Deliveries that are not acknowledged yet.
pub(crate) struct Queue {
    visibility: Duration,
    waiting: Vec<Arrival>,
    in_hand: HashMap<Receipt, (Arrival, Duration)>,
    next: u64,
}

impl Queue {
    /// A queue into which these deliveries come, each in its time.
    pub(crate) fn new(arrivals: &[Arrival], visibility: Duration) -> Queue {
        Queue { visibility, waiting: arrivals.to_vec(), in_hand: HashMap::new(), next: 0 }
    }

    /// Hands out the delivery that has waited longest, if one has come. What was handed out and neither acknowledged nor
    /// deferred within the visibility timeout has come again.
    pub(crate) fn take(&mut self, now: Duration) -> Option<(Receipt, usize)> {
        let overdue: Vec<Receipt> =
            self.in_hand.iter().filter(|(_, (_, until))| *until <= now).map(|(receipt, _)| *receipt).collect();
        for receipt in overdue {
            if let Some((arrival, until)) = self.in_hand.remove(&receipt) {
                self.waiting.push(Arrival { at: until, ..arrival });
            }
        }
        let first = (0..self.waiting.len()).min_by_key(|at| self.waiting[*at].at)?;
        if self.waiting[first].at > now {
            return None;
        }
        let arrival = self.waiting.swap_remove(first);
        let receipt = Receipt(self.next);
        self.next += 1;
        self.in_hand.insert(receipt, (arrival, now + self.visibility));
        Some((receipt, arrival.task))
    }

    /// The delivery is settled. Too late, and it comes again.
    pub(crate) fn acknowledge(&mut self, receipt: Receipt) {
        self.in_hand.remove(&receipt);
    }

    /// The delivery comes again after a while.
    pub(crate) fn defer(&mut self, receipt: Receipt, now: Duration, delay: Duration) {
        if let Some((arrival, _)) = self.in_hand.remove(&receipt) {
            self.waiting.push(Arrival { at: now + delay, ..arrival });
        }
    }

    /// Deliveries that are not acknowledged.
    pub(crate) fn left(&self) -> usize {
        self.waiting.len() + self.in_hand.len()
    }

    /// The tasks that they are of.
    pub(crate) fn tasks_left(&self) -> impl Iterator<Item = usize> {
        self.waiting.iter().chain(self.in_hand.values().map(|(arrival, _)| arrival)).map(|arrival| arrival.task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn queue(arrivals: &[(u32, usize)]) -> Queue {
        let arrivals: Vec<Arrival> = arrivals.iter().map(|(at, task)| Arrival { at: MS * *at, task: *task }).collect();
        Queue::new(&arrivals, MS * 100)
    }

    #[test]
    fn deliveries_come_in_their_time_and_order() {
        let mut queue = queue(&[(20, 2), (10, 1)]);
        assert_eq!(queue.take(MS * 9), None);
        assert_eq!(queue.take(MS * 20).unwrap().1, 1);
        assert_eq!(queue.take(MS * 20).unwrap().1, 2);
        assert_eq!(queue.take(MS * 20), None);
    }

    #[test]
    fn what_is_not_acknowledged_comes_again() {
        let mut queue = queue(&[(0, 1)]);
        let (first, _) = queue.take(MS).unwrap();
        assert_eq!(queue.take(MS * 100), None);
        let (second, task) = queue.take(MS * 101).unwrap();
        assert_eq!(task, 1);
        queue.acknowledge(first);
        assert_eq!(queue.left(), 1, "the first receipt is stale");
        queue.acknowledge(second);
        assert_eq!(queue.left(), 0);
    }

    #[test]
    fn what_is_deferred_comes_after_its_delay() {
        let mut queue = queue(&[(0, 1)]);
        let (receipt, _) = queue.take(MS).unwrap();
        queue.defer(receipt, MS * 2, MS * 50);
        assert_eq!(queue.take(MS * 51), None);
        assert_eq!(queue.tasks_left().collect::<Vec<_>>(), [1]);
        assert_eq!(queue.take(MS * 52).unwrap().1, 1);
    }
}
