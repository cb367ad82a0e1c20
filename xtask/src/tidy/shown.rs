//! Checks of the tables of documents that say which test shows what: each test that is named is there.

use std::collections::{BTreeSet, HashSet};

use super::Finding;
use crate::workspace::Texts;

/// What the last column of such a table is called.
const SHOWN_BY: &str = "shown by";
/// Where each fault of the failure matrix has a row, by its number.
const MATRIX: &str = "docs/guarantees.md";
/// How many faults the matrix has.
const FAULTS: u32 = 21;

/// A row of such a table: its line, its first cell, and the tests that its last cell names.
struct Row<'a> {
    number: usize,
    first: &'a str,
    tests: Vec<&'a str>,
}

/// The rows of all such tables of a document.
fn rows(text: &str) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    let mut is_inside = false;
    for (index, line) in text.lines().enumerate() {
        let Some(cells) = line.strip_prefix("| ").and_then(|rest| rest.strip_suffix(" |")) else {
            is_inside &= line.starts_with("|--");
            continue;
        };
        let (first, last) = (cells.split(" | ").next(), cells.split(" | ").last());
        let (Some(first), Some(last)) = (first, last) else { continue };
        if last.starts_with(SHOWN_BY) {
            is_inside = true;
        } else if is_inside {
            let tests = last.split('`').skip(1).step_by(2).filter(|word| is_test_name(word)).collect();
            rows.push(Row { number: index + 1, first, tests });
        }
    }
    rows
}

/// A test's name is a sentence; one word names a module.
fn is_test_name(word: &str) -> bool {
    word.contains('_')
        && word.chars().all(|letter| letter == '_' || letter.is_ascii_lowercase() || letter.is_ascii_digit())
}

/// Every test that a table names is a function, or a trace of the contract.
pub(super) fn tests_that_are_named_are_there(texts: &Texts) -> Vec<Finding> {
    let mut there = HashSet::new();
    for (file, text) in texts {
        if let Some(trace) = file.strip_suffix(".trace") {
            there.extend(trace.rsplit('/').next());
        } else if file.ends_with(".rs") {
            there.extend(text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next()));
        }
    }
    let mut findings = Vec::new();
    for (file, text) in texts.iter().filter(|(file, _)| file.ends_with(".md")) {
        for row in rows(text) {
            for test in row.tests.iter().filter(|test| !there.contains(**test)) {
                findings.push(Finding::new(file, row.number, format!("there is no test `{test}`")));
            }
        }
    }
    findings
}

/// Each fault of the matrix has a row that names a test.
pub(super) fn each_fault_of_the_matrix_is_shown(texts: &Texts) -> Vec<Finding> {
    let Some(text) = texts.get(MATRIX) else { return Vec::new() };
    let shown: BTreeSet<u32> = rows(text)
        .into_iter()
        .filter(|row| !row.tests.is_empty())
        .flat_map(|row| row.first.split(", ").filter_map(|number| number.parse().ok()))
        .collect();
    (1..=FAULTS)
        .filter(|fault| !shown.contains(fault))
        .map(|fault| Finding::new(MATRIX, 0, format!("names no test for fault {fault} of the matrix")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(check: fn(&Texts) -> Vec<Finding>, document: &str) -> Vec<String> {
        let files = [
            (MATRIX, document),
            ("a/tests/a.rs", "fn one_is_run() {}\nasync fn two_are_run<T>() {}\n"),
            ("a/traces/three_are_run.trace", ""),
        ];
        let texts: Texts = files.map(|(file, text)| (file.to_owned(), text.to_owned())).into();
        check(&texts).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_test_that_a_table_names_and_nobody_wrote_is_found() {
        let table = "| # | fault | shown by (`a`) |\n|---|---|---|\n| 1 | `no_test_here` | `one_is_run`, cli `two_are_run` |\n\
                     | 2 | x | `three_are_run`, `a`, `x y_z` |\n| 3 | x | `four_are_run` |\n\n| 4 | x | `five_are_run` |\n";
        assert_eq!(
            found(tests_that_are_named_are_there, table),
            ["docs/guarantees.md:5: there is no test `four_are_run`"]
        );
    }

    #[test]
    fn a_fault_of_the_matrix_without_a_test_is_found() {
        let mut table =
            "| # | fault | shown by |\n|---|---|---|\n| 1, 2 | x | `one_is_run` |\n| 3 | x | `a` |\n".to_owned();
        for number in 5..=FAULTS {
            table.push_str(&format!("| {number} | x | `one_is_run` |\n"));
        }
        let missing = |fault| format!("docs/guarantees.md: names no test for fault {fault} of the matrix");
        assert_eq!(found(each_fault_of_the_matrix_is_shown, &table), [missing(3), missing(4)]);
    }
}
