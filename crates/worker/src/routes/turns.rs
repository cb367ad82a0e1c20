//! Whose turn it is: `Turns`, the order among routes that have deliveries waiting. None starves, however much another has.

use std::collections::VecDeque;

use super::{RouteId, Routes};

/// Serves routes in turn, each as often in a round as its weight says.
///
/// A route that may not start anything now loses its turn, not its place. A look for the next one asks each waiting
/// route once at most.
///
/// Source: M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", 1996; each start costs 1.
#[derive(Clone, Debug)]
pub struct Turns {
    places: Vec<Place>,
    /// Those that have something waiting, from the one whose turn it is on.
    ring: VecDeque<RouteId>,
}

#[derive(Clone, Debug)]
struct Place {
    weight: u32,
    waiting: usize,
    /// How many more turns it has in this round.
    left: u32,
}

impl Turns {
    /// The order among the routes of a table, of which nothing waits.
    #[must_use]
    pub fn new(routes: &Routes) -> Turns {
        Turns::of_weights(routes.iter().map(|route| route.weight))
    }

    fn of_weights(weights: impl Iterator<Item = u32>) -> Turns {
        let places = weights.map(|weight| Place { weight, waiting: 0, left: weight }).collect();
        Turns { places, ring: VecDeque::new() }
    }

    /// So many deliveries more wait for this route.
    pub fn add(&mut self, route: RouteId, count: usize) {
        let place = &mut self.places[route.0 as usize];
        if place.waiting == 0 && count > 0 {
            place.left = place.weight;
            self.ring.push_back(route);
        }
        place.waiting += count;
    }

    /// The route whose turn it is, of those that may start one: one of its deliveries waits no more.
    pub fn next(&mut self, mut may_start: impl FnMut(RouteId) -> bool) -> Option<RouteId> {
        for _ in 0..self.ring.len() {
            let route = *self.ring.front()?;
            let place = &mut self.places[route.0 as usize];
            if !may_start(route) {
                self.pass_on(route);
                continue;
            }
            place.waiting -= 1;
            place.left = place.left.saturating_sub(1);
            if place.waiting == 0 {
                self.ring.pop_front();
            } else if place.left == 0 {
                self.pass_on(route);
            }
            return Some(route);
        }
        None
    }

    /// Takes away what waits for a route: it was given back. Says how many those were.
    pub fn clear(&mut self, route: RouteId) -> usize {
        let taken = std::mem::take(&mut self.places[route.0 as usize].waiting);
        if taken > 0 {
            self.ring.retain(|other| *other != route);
        }
        taken
    }

    /// How many deliveries wait for a route.
    #[must_use]
    pub fn waiting(&self, route: RouteId) -> usize {
        self.places[route.0 as usize].waiting
    }

    fn pass_on(&mut self, route: RouteId) {
        let place = &mut self.places[route.0 as usize];
        place.left = place.weight;
        self.ring.rotate_left(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns(weights: &[u32], waiting: &[usize]) -> Turns {
        let mut turns = Turns::of_weights(weights.iter().copied());
        for (route, count) in waiting.iter().enumerate() {
            turns.add(RouteId(route as u32), *count);
        }
        turns
    }

    fn order(turns: &mut Turns, may_start: impl Fn(u32) -> bool) -> Vec<u32> {
        std::iter::from_fn(|| turns.next(|route| may_start(route.0))).map(|route| route.0).collect()
    }

    #[test]
    fn routes_are_served_in_turn_each_by_its_weight() {
        for (weights, waiting, served) in [
            (&[1, 1, 1][..], &[4, 1, 2][..], &[0, 1, 2, 0, 2, 0, 0][..]),
            (&[2, 1], &[5, 3], &[0, 0, 1, 0, 0, 1, 0, 1]),
            (&[1, 3], &[2, 4], &[0, 1, 1, 1, 0, 1]),
            (&[1, 1], &[0, 2], &[1, 1]),
        ] {
            assert_eq!(order(&mut turns(weights, waiting), |_| true), served, "{weights:?} {waiting:?}");
        }
    }

    #[test]
    fn one_that_may_not_start_holds_up_nobody_and_keeps_what_waits_for_it() {
        let mut turns = turns(&[1, 1, 1], &[2, 2, 2]);
        assert_eq!(order(&mut turns, |route| route != 1), [0, 2, 0, 2]);
        assert_eq!(turns.waiting(RouteId(1)), 2);
        assert_eq!(order(&mut turns, |_| true), [1, 1]);
    }

    #[test]
    fn what_is_given_back_waits_no_more_and_has_its_turn_when_it_comes_again() {
        let mut turns = turns(&[1, 1], &[3, 2]);
        assert_eq!((turns.clear(RouteId(0)), turns.clear(RouteId(0))), (3, 0));
        turns.add(RouteId(0), 1);
        assert_eq!(order(&mut turns, |_| true), [1, 0, 1]);
    }

    proptest! {
        #[test]
        fn everything_is_served_and_none_falls_back_by_more_than_a_round(
            routes in prop::collection::vec((1_u32..5, 0_usize..40), 1..12),
        ) {
            let weights: Vec<u32> = routes.iter().map(|(weight, _)| *weight).collect();
            let waiting: Vec<usize> = routes.iter().map(|(_, waiting)| *waiting).collect();
            let mut turns = turns(&weights, &waiting);
            let served = order(&mut turns, |_| true);
            prop_assert_eq!(served.len(), waiting.iter().sum::<usize>());
            // While two routes both have something waiting, their shares by weight differ by a round at most.
            let mut counts = vec![0_usize; routes.len()];
            for route in served {
                counts[route as usize] += 1;
                for a in 0..routes.len() {
                    for b in 0..routes.len() {
                        if counts[a] < waiting[a] && counts[b] < waiting[b] {
                            let rounds = |at: usize| counts[at] as f64 / f64::from(weights[at]);
                            prop_assert!((rounds(a) - rounds(b)).abs() <= 1.0, "{a} {b}: {counts:?}");
                        }
                    }
                }
            }
        }
    }
}
