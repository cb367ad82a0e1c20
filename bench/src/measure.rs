//! Rounds in which the sides take turns, and the medians of them.

use std::time::Duration;

/// What the sides of a bench reached, round by round. Side 0 is ours, side 1 the floor; more are for information.
pub(crate) struct Rounds {
    sides: Vec<Vec<f64>>,
}

impl Rounds {
    pub(crate) fn new(sides: usize) -> Rounds {
        Rounds { sides: vec![Vec::new(); sides] }
    }

    /// The order of the sides in a round: each comes first in turn, so that none is favoured by what ran before it.
    pub(crate) fn order(&self, round: usize) -> impl Iterator<Item = usize> + use<> {
        let sides = self.sides.len();
        (0..sides).map(move |place| (round + place) % sides)
    }

    pub(crate) fn push(&mut self, side: usize, number: f64) {
        self.sides[side].push(number);
    }

    pub(crate) fn ours(&self) -> f64 {
        self.of(0)
    }

    pub(crate) fn floor(&self) -> f64 {
        self.of(1)
    }

    /// The median of a side's rounds.
    pub(crate) fn of(&self, side: usize) -> f64 {
        median(&self.sides[side])
    }

    /// The median of ours by the floor, round by round.
    pub(crate) fn ratio(&self) -> f64 {
        self.ratio_to(1)
    }

    /// The median of ours by another side, round by round.
    pub(crate) fn ratio_to(&self, side: usize) -> f64 {
        median(&self.ratios(side))
    }

    /// How far the rounds lie apart.
    pub(crate) fn spread(&self) -> String {
        let mut ratios = self.ratios(1);
        ratios.sort_by(f64::total_cmp);
        let at = |share: f64| ratios[((ratios.len() - 1) as f64 * share) as usize];
        format!("{} rounds, half of them between {:.2} and {:.2}", ratios.len(), at(0.25), at(0.75))
    }

    fn ratios(&self, side: usize) -> Vec<f64> {
        self.sides[0].iter().zip(&self.sides[side]).map(|(ours, other)| ours / other).collect()
    }
}

/// The middle of some numbers, of which there is at least one.
pub(crate) fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// The time that a share of the samples keeps, in nanoseconds: 0.5 for the median. There is at least one sample.
pub(crate) fn quantile(samples: &mut [Duration], share: f64) -> f64 {
    samples.sort_unstable();
    let place = (samples.len() as f64 * share).ceil() as usize;
    samples[place.clamp(1, samples.len()) - 1].as_nanos() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_taken_round_by_round() {
        let mut rounds = Rounds::new(2);
        for (ours, floor) in [(2.0, 1.0), (30.0, 10.0), (400.0, 100.0)] {
            rounds.push(0, ours);
            rounds.push(1, floor);
        }
        assert_eq!((rounds.ours(), rounds.floor(), rounds.ratio()), (30.0, 10.0, 3.0));
    }

    #[test]
    fn each_side_comes_first_in_turn() {
        let rounds = Rounds::new(3);
        assert_eq!(rounds.order(0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(rounds.order(4).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[test]
    fn a_quantile_is_a_sample_that_so_many_keep() {
        let mut samples: Vec<Duration> = (1..=1000).rev().map(Duration::from_nanos).collect();
        assert_eq!(quantile(&mut samples, 0.5), 500.0);
        assert_eq!(quantile(&mut samples, 0.999), 999.0);
        assert_eq!(quantile(&mut samples[..1], 0.999), 1.0);
    }
}
