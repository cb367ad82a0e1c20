//! Which bed plants which fault: a row of all faults, which two beds empty from its two ends.
//!
//! Faults of one test binary stand together, so that going on to the next compiles little; and since the beds meet
//! wherever they meet, both are busy to the end, however much longer some faults take than others.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::list::{Fault, Test};

/// More beds than the row has ends would need another queue; their gain is small, as one compiler uses more than one core.
pub(crate) const BEDS_MAX: usize = 2;
/// A bed does not begin with the binary that the other bed works at for fewer faults than this: compiling it takes longer.
const SHARED_MIN: usize = 4;

/// A test binary: the package and the target of the first test that is to catch a fault.
type Binary<'a> = (&'a str, &'a str);

/// The row.
pub(crate) struct Queue<'a> {
    row: Mutex<Row<'a>>,
}

struct Row<'a> {
    left: VecDeque<&'a Fault>,
    /// The binary that each bed works at.
    at: Vec<Option<Binary<'a>>>,
    /// Tests of which nobody has shown yet that they pass without a fault.
    unproven: HashMap<Binary<'a>, Vec<&'a Test>>,
}

/// What a bed does next.
pub(crate) struct Turn<'a> {
    /// Plant this,
    pub(crate) fault: &'a Fault,
    /// but first show that these pass without it, which also compiles the binary; `None` where the bed has it already.
    pub(crate) first: Option<Vec<&'a Test>>,
}

/// How many beds are worth their compiling.
pub(crate) fn beds_for(faults: usize, cores: usize) -> usize {
    BEDS_MAX.min(cores).min(faults / SHARED_MIN).max(1)
}

impl<'a> Queue<'a> {
    /// Puts the faults into a row, for so many beds.
    pub(crate) fn new(faults: &'a [Fault], beds: usize) -> Queue<'a> {
        let mut of_package: HashMap<&str, usize> = HashMap::new();
        for fault in faults {
            *of_package.entry(binary(fault).0).or_default() += 1;
        }
        let mut left: Vec<&Fault> = faults.iter().collect();
        // The package with the most faults stands first, so that the beds meet in it and not in a binary for few. Faults
        // of one file stand together, as the file taken back is compiled again with the next fault.
        left.sort_by_key(|fault| {
            let (package, target) = binary(fault);
            (usize::MAX - of_package[package], package, target, fault.file.as_str())
        });
        let mut seen = HashSet::new();
        let mut unproven: HashMap<Binary<'a>, Vec<&'a Test>> = HashMap::new();
        for fault in &left {
            let new = fault.caught.iter().filter(|test| seen.insert(*test));
            unproven.entry(binary(fault)).or_default().extend(new);
        }
        Queue { row: Mutex::new(Row { left: left.into(), at: vec![None; beds], unproven }) }
    }

    /// The next fault for a bed, of which 0 takes from the front and 1 from the back; `None` when its work is done.
    pub(crate) fn next(&self, bed: usize) -> Option<Turn<'a>> {
        let mut row = self.row();
        let fault = *if bed == 0 { row.left.front() } else { row.left.back() }?;
        let binary = binary(fault);
        let is_known = row.at[bed] == Some(binary);
        let is_with_another = row.at.iter().enumerate().any(|(other, at)| other != bed && *at == Some(binary));
        if !is_known && is_with_another && row.left.len() < SHARED_MIN {
            row.at[bed] = None;
            return None;
        }
        if bed == 0 {
            row.left.pop_front()
        } else {
            row.left.pop_back()
        };
        row.at[bed] = Some(binary);
        let first = (!is_known).then(|| row.unproven.remove(&binary).unwrap_or_default());
        Some(Turn { fault, first })
    }

    /// Leaves nothing to do, as something went wrong.
    pub(crate) fn stop(&self) {
        self.row().left.clear();
    }

    fn row(&self) -> MutexGuard<'_, Row<'a>> {
        self.row.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn binary(fault: &Fault) -> Binary<'_> {
    // A fault without a test is refused when the list is read.
    fault.caught.first().map_or(("", ""), |test| (test.package.as_str(), test.target.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults `a b c …`, each with a test of its own in the binary `PACKAGE/TARGET`.
    fn faults(binaries: &[&str]) -> Vec<Fault> {
        let name = |index: usize| char::from(b'a' + u8::try_from(index).unwrap()).to_string();
        let fault = |(index, binary): (usize, &&str)| {
            let (package, target) = binary.split_once('/').unwrap();
            let test = Test { package: package.into(), target: target.into(), name: name(index) };
            Fault { name: name(index), caught: vec![test], ..Fault::default() }
        };
        binaries.iter().enumerate().map(fault).collect()
    }

    /// The fault and the tests to prove first: `a(ab)`; `a` where the binary is there already.
    fn next(queue: &Queue<'_>, bed: usize) -> String {
        let Some(turn) = queue.next(bed) else { return "-".into() };
        let names =
            |tests: Vec<&Test>| format!("({})", tests.iter().map(|test| test.name.as_str()).collect::<String>());
        format!("{}{}", turn.fault.name, turn.first.map(names).unwrap_or_default())
    }

    #[test]
    fn one_bed_goes_through_each_binary_once_the_largest_package_first() {
        let faults = faults(&["x/1", "y/1", "z/1", "y/2", "y/1"]);
        let queue = Queue::new(&faults, 1);
        let turns: Vec<String> = std::iter::repeat_with(|| next(&queue, 0)).take(6).collect();
        assert_eq!(turns, ["b(be)", "e", "d(d)", "a(a)", "c(c)", "-"]);
    }

    #[test]
    fn two_beds_meet_and_each_test_is_proved_by_one_of_them() {
        let faults = faults(&["x/1", "x/1", "x/1", "x/1", "x/1", "x/1", "y/1"]);
        let queue = Queue::new(&faults, 2);
        assert_eq!([next(&queue, 0), next(&queue, 1)], ["a(abcdef)", "g(g)"]);
        assert_eq!([next(&queue, 1), next(&queue, 1)], ["f()", "e"]);
        assert_eq!([next(&queue, 0), next(&queue, 0), next(&queue, 0)], ["b", "c", "d"]);
        assert_eq!([next(&queue, 0), next(&queue, 1)], ["-", "-"]);
    }

    #[test]
    fn the_last_faults_of_a_binary_stay_with_the_bed_that_has_it() {
        let faults = faults(&["x/1", "x/1", "x/1", "x/1", "y/1"]);
        let queue = Queue::new(&faults, 2);
        assert_eq!([next(&queue, 0), next(&queue, 1)], ["a(abcd)", "e(e)"]);
        assert_eq!([next(&queue, 1), next(&queue, 0)], ["-", "b"]);
        assert_eq!([next(&queue, 0), next(&queue, 0), next(&queue, 0)], ["c", "d", "-"]);
    }

    #[test]
    fn after_a_stop_nobody_plants_more() {
        let faults = faults(&["x/1", "y/1"]);
        let queue = Queue::new(&faults, 2);
        queue.stop();
        assert_eq!([next(&queue, 0), next(&queue, 1)], ["-", "-"]);
    }

    #[test]
    fn a_second_bed_is_made_only_for_many_faults_and_cores() {
        assert_eq!([beds_for(1, 8), beds_for(7, 8), beds_for(8, 8), beds_for(200, 8)], [1, 1, 2, 2]);
        assert_eq!([beds_for(200, 1), beds_for(0, 8)], [1, 1]);
    }
}
