//! `cargo xtask mutants`: plants the faults of `xtask/faults.txt`, one at a time, and demands that a named test fails.

mod bed;
mod list;

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::workspace;
use bed::{Bed, Verdict};
use list::Fault;
pub(crate) use list::parse;

/// Where the faults are listed.
pub(crate) const LIST: &str = "xtask/faults.txt";
/// Fewer faults than this mean that the list was lost.
const FAULTS_MIN: usize = 12;

/// The command: all faults, or those named.
pub(crate) fn run(names: &[String]) -> Result<bool> {
    let root = workspace::root();
    let target = workspace::target_folder(&root)?;
    let note = check(&root, &target, names, &[])?;
    println!("{note}");
    Ok(true)
}

/// Plants the faults of the list, without those that need a test of an excluded package.
pub(crate) fn check(root: &Path, target: &Path, names: &[String], excluded: &[&str]) -> Result<String> {
    let text = std::fs::read_to_string(root.join(LIST)).with_context(|| format!("cannot read {LIST}"))?;
    let mut faults = list::parse(&text).with_context(|| format!("{LIST} is not a list of faults"))?;
    if faults.len() < FAULTS_MIN {
        bail!("{LIST} has {} faults; at least {FAULTS_MIN} are needed", faults.len());
    }
    if let Some(unknown) = names.iter().find(|name| !faults.iter().any(|fault| fault.name == **name)) {
        bail!("{LIST} has no fault `{unknown}`");
    }
    faults.retain(|fault| names.is_empty() || names.contains(&fault.name));
    faults.retain(|fault| {
        let wanted = !fault.caught.iter().any(|test| excluded.contains(&test.package.as_str()));
        if !wanted {
            println!("left out: {}, as its test needs a server", fault.name);
        }
        wanted
    });

    let place = target.join("mutants");
    std::fs::create_dir_all(&place)?;
    let lock = File::create(place.join("lock"))?;
    if lock.try_lock().is_err() {
        println!("another `cargo xtask mutants` uses {}; waiting for it", place.display());
        lock.lock()?;
    }
    let bed = Bed::prepare(root, &workspace::files(root)?, &place)?;
    report(&bed, &faults)
}

/// Runs the faults and prints a line each; an error when one is not caught.
fn report(bed: &Bed, faults: &[Fault]) -> Result<String> {
    let start = Instant::now();
    bed.demand_success_unmutated(faults)?;
    println!("every named test passes without a fault ({:.1} s)", start.elapsed().as_secs_f64());
    let mut bad = Vec::new();
    let mut longest = 0.0_f64;
    for fault in faults {
        let start = Instant::now();
        let verdict = bed.plant(fault)?;
        let seconds = start.elapsed().as_secs_f64();
        longest = longest.max(seconds);
        let (word, detail) = match &verdict {
            Verdict::Caught => ("caught", fault.tests()),
            Verdict::Missed(tests) => ("MISSED", format!("{tests} passed all the same; {}", fault.why)),
            Verdict::Unusable(reason) => ("ERROR", reason.clone()),
        };
        println!("{word:<7} {seconds:>5.1} s  {}: {detail}", fault.name);
        if verdict != Verdict::Caught {
            bad.push(fault.name.as_str());
        }
    }
    if !bad.is_empty() {
        bail!("{} of {} planted faults are not caught: {}", bad.len(), faults.len(), bad.join(", "));
    }
    Ok(format!("{} planted faults are caught; the longest took {longest:.1} s", faults.len()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A package with one rule and one test, in a folder that goes with it.
    struct Plot {
        folder: PathBuf,
    }

    const RULE: &str = "//! A rule.\npub fn older(age: u32, limit: u32) -> bool {\n    age >= limit\n}\n\n\
        #[cfg(test)]\nmod tests {\n    use super::*;\n    #[test]\n    fn a_limit_reached_has_passed() {\n        assert!(older(3, 3));\n    }\n\
        #[test]\n    fn nothing_much() {}\n}\n";

    impl Plot {
        fn new(name: &str, rule: &str) -> Plot {
            let folder = std::env::temp_dir().join(format!("taskonce-xtask-{}-{name}", std::process::id()));
            std::fs::create_dir_all(folder.join("root/src")).unwrap();
            let write = |file: &str, text: &str| std::fs::write(folder.join("root").join(file), text).unwrap();
            write("Cargo.toml", "[workspace]\n[package]\nname = \"plot\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
            write("Cargo.lock", "version = 4\n\n[[package]]\nname = \"plot\"\nversion = \"0.1.0\"\n");
            write("src/lib.rs", rule);
            Plot { folder }
        }

        fn bed(&self) -> Bed {
            let files = ["Cargo.toml", "Cargo.lock", "src/lib.rs"].map(PathBuf::from);
            Bed::prepare(&self.folder.join("root"), &files, &self.folder.join("place")).unwrap()
        }
    }

    impl Drop for Plot {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    fn fault(find: &str, replace: &str, test: &str) -> Vec<Fault> {
        list::parse(&format!(
            "fault planted\nwhy It matters.\nfile src/lib.rs\nfind\n  | {find}\nreplace\n  | {replace}\ncaught plot lib tests::{test}\n"
        ))
        .unwrap()
    }

    #[test]
    fn a_fault_whose_test_fails_is_caught_and_the_tree_is_whole_again() {
        let plot = Plot::new("caught", RULE);
        let bed = plot.bed();
        let faults = fault("age >= limit", "age > limit", "a_limit_reached_has_passed");
        for _ in 0..2 {
            assert!(report(&bed, &faults).unwrap().contains("1 planted faults are caught"));
            assert_eq!(std::fs::read_to_string(plot.folder.join("place/tree/src/lib.rs")).unwrap(), RULE);
        }
        assert_eq!(std::fs::read_to_string(plot.folder.join("root/src/lib.rs")).unwrap(), RULE);
    }

    #[test]
    fn a_fault_whose_test_passes_is_missed() {
        let plot = Plot::new("missed", RULE);
        let faults = fault("age >= limit", "age > limit", "nothing_much");
        assert!(matches!(plot.bed().plant(&faults[0]).unwrap(), Verdict::Missed(_)));
        assert!(report(&plot.bed(), &faults).unwrap_err().to_string().contains("not caught: planted"));
    }

    #[test]
    fn a_fault_that_cannot_be_judged_is_an_error_and_not_caught() {
        let plot = Plot::new("unusable", RULE);
        let bed = plot.bed();
        let reason = |faults: Vec<Fault>| match bed.plant(&faults[0]).unwrap() {
            Verdict::Unusable(reason) => reason,
            Verdict::Caught | Verdict::Missed(_) => panic!("judged"),
        };
        let test = "a_limit_reached_has_passed";
        assert!(reason(fault("age >= limit", "age >=", test)).contains("does not compile"));
        assert!(reason(fault("age <= limit", "true", test)).contains("occurs 0 times"));
        assert!(reason(fault("age", "limit", test)).contains("occurs 2 times"));
        assert!(reason(fault("age >= limit", "age > limit", "no_such")).contains("no test `tests::no_such`"));
        assert_eq!(std::fs::read_to_string(plot.folder.join("place/tree/src/lib.rs")).unwrap(), RULE);
    }

    #[test]
    fn a_test_that_fails_or_is_not_there_without_a_fault_stops_all() {
        let plot = Plot::new("baseline", &RULE.replace("older(3, 3)", "older(2, 3)"));
        let bed = plot.bed();
        let demand = |test| bed.demand_success_unmutated(&fault("age >= limit", "true", test)).unwrap_err().to_string();
        assert!(demand("a_limit_reached_has_passed").contains("fails without any fault"));
        assert!(demand("no_such").contains("no test `tests::no_such`"));
    }

    #[test]
    fn the_copy_follows_the_tree() {
        let plot = Plot::new("copy", RULE);
        plot.bed();
        let tree = plot.folder.join("place/tree");
        std::fs::write(tree.join("src/left_over.rs"), "").unwrap();
        std::fs::write(tree.join("src/lib.rs"), "a fault that a killed run left").unwrap();
        plot.bed();
        assert!(!tree.join("src/left_over.rs").exists());
        assert_eq!(std::fs::read_to_string(tree.join("src/lib.rs")).unwrap(), RULE);
    }
}
