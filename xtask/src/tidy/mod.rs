//! Rules of the source tree that the compiler does not know.
//!
//! Each check is a function from texts, or from cargo's metadata, to what it found, and has a test with a planted
//! violation.

mod documents;
mod edges;
mod faults;
mod shown;
mod sources;

use std::fmt;
use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace::{self, Texts};

/// One violation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    file: String,
    /// Counted from 1; zero where it is about the whole file.
    line: usize,
    message: String,
}

impl Finding {
    fn new(file: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { file: file.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.message),
            line => write!(f, "{}:{line}: {}", self.file, self.message),
        }
    }
}

/// Checks that need the texts only, in the order in which they report.
const CHECKS: &[fn(&Texts) -> Vec<Finding>] = &[
    sources::modules_open_with_a_sentence,
    sources::no_test_is_ignored,
    sources::files_are_short,
    sources::tests_do_not_sleep,
    sources::packages_take_the_lints,
    sources::stores_run_the_contract,
    sources::locked_packages_are_allowed,
    documents::links_lead_somewhere,
    documents::no_path_of_one_machine,
    documents::every_error_kind_is_explained,
    documents::documents_are_short,
    shown::tests_that_are_named_are_there,
    shown::each_fault_of_the_matrix_is_shown,
    faults::faults_point_at_what_is_there,
];

/// The command.
pub(crate) fn run() -> Result<bool> {
    println!("{}", check(&workspace::root())?);
    Ok(true)
}

/// Runs all checks, and prints what they find; an error when they find anything.
pub(crate) fn check(root: &Path) -> Result<String> {
    let texts = workspace::texts(root)?;
    let mut findings = edges::edges_are_in_the_table(&workspace::metadata(root)?);
    findings.extend(CHECKS.iter().flat_map(|check| check(&texts)));
    findings.sort();
    findings.dedup();
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("{} violations of the rules of the tree", findings.len());
    }
    Ok(format!("{} checks over {} files", CHECKS.len() + 1, texts.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_file_and_line() {
        assert_eq!(Finding::new("a.rs", 3, "is wrong").to_string(), "a.rs:3: is wrong");
        assert_eq!(Finding::new("a.rs", 0, "is wrong").to_string(), "a.rs: is wrong");
    }
}
