//! `cargo xtask mutants`: plants the faults of `xtask/faults.txt`, one at a time, and demands that a named test fails.
//!
//! Two beds, copies of the tree, stand side by side where there are cores for them; a queue says which plants what.

mod list;
mod queue;
mod bed;
mod seed;

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use taskonce_testkit::shared::Stands;

use crate::workspace;
use bed::{Bed, Ground, Verdict};
use list::Fault;
pub(crate) use list::parse;
use queue::{Queue, Turn};

/// Where the faults are listed.
pub(crate) const LIST: &str = "xtask/faults.txt";
/// Fewer faults than this mean that the list was lost.
const FAULTS_MIN: usize = 12;

/// The command: all faults, or those named.
pub(crate) fn run(names: &[String]) -> Result<bool> {
    let root = workspace::root();
    let target = workspace::target_folder(&root)?;
    // For a few faults their tests start what they need.
    let stands =
        if names.is_empty() { Some(Stands::start().context("the servers that many tests share")?) } else { None };
    let environment = stands.as_ref().map(|stands| stands.environment().to_vec()).unwrap_or_default();
    let note = check(&root, &target, names, &[], &environment)?;
    println!("{note}");
    Ok(true)
}

/// Plants the faults of the list, without those that need a test of an excluded package. The environment names servers
/// that tests share.
pub(crate) fn check(
    root: &Path,
    target: &Path,
    names: &[String],
    excluded: &[&str],
    environment: &[(&'static str, String)],
) -> Result<String> {
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
    let ground = Ground::survey(root, workspace::files(root)?, target, environment)?;
    let count = queue::beds_for(faults.len(), thread::available_parallelism()?.get());
    let beds = (1..=count).map(|number| Bed::prepare(&ground, &place.join(number.to_string())));
    report(&beds.collect::<Result<Vec<Bed<'_>>>>()?, &faults)
}

/// What a bed has found.
#[derive(Default)]
struct Tally<'a> {
    /// Faults that are not caught.
    bad: Vec<&'a str>,
    /// Tests that had to be tried twice, with or without a fault.
    late: Vec<String>,
    /// The seconds of the fault that took longest.
    longest: f64,
}

/// Runs the faults, a line each; an error when one is not caught.
fn report(beds: &[Bed<'_>], faults: &[Fault]) -> Result<String> {
    let queue = Queue::new(faults, beds.len());
    let tallies: Vec<Result<Tally<'_>>> = thread::scope(|scope| {
        let queue = &queue;
        let work = |number| move || work(beds, number, queue).inspect_err(|_| queue.stop());
        let workers: Vec<_> = (0..beds.len()).map(|number| scope.spawn(work(number))).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| worker.join().unwrap_or_else(|_| bail!("a bed panicked"));
        workers.into_iter().map(join).collect()
    });
    let tallies = tallies.into_iter().collect::<Result<Vec<Tally<'_>>>>()?;
    let is_bad = |name: &str| tallies.iter().any(|tally| tally.bad.contains(&name));
    let bad: Vec<&str> = faults.iter().map(|fault| fault.name.as_str()).filter(|name| is_bad(name)).collect();
    if !bad.is_empty() {
        bail!("{} of {} planted faults are not caught: {}", bad.len(), faults.len(), bad.join(", "));
    }
    let longest = tallies.iter().map(|tally| tally.longest).fold(0.0, f64::max);
    let late: Vec<&str> = tallies.iter().flat_map(|tally| &tally.late).map(String::as_str).collect();
    let late = if late.is_empty() { String::new() } else { format!("; tried twice: {}", late.join(", ")) };
    Ok(format!("{} planted faults are caught; the longest took {longest:.1} s{late}", faults.len()))
}

/// Plants faults in one bed until there are no more.
fn work<'a>(beds: &[Bed<'_>], number: usize, queue: &Queue<'a>) -> Result<Tally<'a>> {
    let bed = &beds[number];
    let mut tally = Tally::default();
    while let Some(Turn { fault, first }) = queue.next(number) {
        if let Some(tests) = first {
            let start = Instant::now();
            bed.take_from_others(beds)?;
            let late = bed.demand_success_unmutated(&tests)?;
            if let Some(test) = tests.first() {
                let of = format!("{} {}", test.package, test.target);
                println!(
                    "{} named tests of {of} pass without a fault{} ({:.1} s)",
                    tests.len(),
                    at_second_try(&late),
                    start.elapsed().as_secs_f64()
                );
            }
            tally.late.extend(late);
        }
        let start = Instant::now();
        let verdict = bed.plant(fault)?;
        let seconds = start.elapsed().as_secs_f64();
        tally.longest = tally.longest.max(seconds);
        let (word, detail) = match &verdict {
            Verdict::Caught => ("caught", fault.tests()),
            Verdict::CaughtAtSecondTry(late) => ("caught", format!("{}{}", fault.tests(), at_second_try(late))),
            Verdict::Missed(tests) => ("MISSED", format!("{tests} passed all the same, twice; {}", fault.why)),
            Verdict::Unusable(reason) => ("ERROR", reason.clone()),
        };
        println!("{word:<7} {seconds:>5.1} s  {}: {detail}", fault.name);
        match verdict {
            Verdict::Caught => {}
            Verdict::CaughtAtSecondTry(late) => tally.late.extend(late),
            Verdict::Missed(_) | Verdict::Unusable(_) => tally.bad.push(&fault.name),
        }
    }
    Ok(tally)
}

/// Says which tests were tried twice; nothing where none was.
fn at_second_try(late: &[String]) -> String {
    if late.is_empty() { String::new() } else { format!(", at the second try: {}", late.join(", ")) }
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

        fn ground(&self) -> Ground {
            let files = ["Cargo.toml", "Cargo.lock", "src/lib.rs"].map(PathBuf::from).to_vec();
            Ground::survey(&self.folder.join("root"), files, &self.folder.join("target"), &[]).unwrap()
        }

        fn bed<'a>(&self, ground: &'a Ground, name: &str) -> Bed<'a> {
            Bed::prepare(ground, &self.folder.join("place").join(name)).unwrap()
        }

        fn rule_in(&self, folder: &str) -> String {
            std::fs::read_to_string(self.folder.join(folder).join("src/lib.rs")).unwrap()
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
        let (ground, faults) = (plot.ground(), fault("age >= limit", "age > limit", "a_limit_reached_has_passed"));
        let beds = [plot.bed(&ground, "1")];
        for _ in 0..2 {
            assert!(report(&beds, &faults).unwrap().starts_with("1 planted faults are caught; the longest took"));
            assert_eq!(plot.rule_in("place/1/tree"), RULE);
        }
        assert_eq!(plot.rule_in("root"), RULE);
    }

    #[test]
    fn two_beds_share_the_faults_and_name_the_missed_ones_in_the_order_of_the_list() {
        let plot = Plot::new("two", RULE);
        let ground = plot.ground();
        let beds = ["1", "2"].map(|name| plot.bed(&ground, name));
        let mut faults = Vec::new();
        for (index, test) in ["nothing_much", "a_limit_reached_has_passed"].repeat(4).into_iter().enumerate() {
            faults.extend(fault("age >= limit", "age > limit", test));
            faults[index].name = index.to_string();
        }
        let error = report(&beds, &faults).unwrap_err().to_string();
        assert!(error.ends_with("4 of 8 planted faults are not caught: 0, 2, 4, 6"), "{error}");
        for place in ["place/1/tree", "place/2/tree"] {
            assert_eq!(plot.rule_in(place), RULE);
        }
        assert!(["1", "2"].iter().all(|name| plot.folder.join("place").join(name).join("build").is_dir()));
    }

    #[test]
    fn a_fault_whose_test_passes_twice_is_missed() {
        let plot = Plot::new("missed", RULE);
        let (ground, faults) = (plot.ground(), fault("age >= limit", "age > limit", "nothing_much"));
        let beds = [plot.bed(&ground, "1")];
        assert!(matches!(beds[0].plant(&faults[0]).unwrap(), Verdict::Missed(_)));
        assert!(report(&beds, &faults).unwrap_err().to_string().contains("not caught: planted"));
    }

    #[test]
    fn a_test_that_fails_only_at_its_second_try_catches_the_fault_and_is_named() {
        let again = "let again = std::path::Path::new(\"seen\").exists(); std::fs::write(\"seen\", \"\").unwrap(); ";
        let plot = Plot::new("late", &RULE.replace("assert!(older", &format!("{again}assert!(!again || older")));
        let (ground, faults) = (plot.ground(), fault("age >= limit", "age > limit", "a_limit_reached_has_passed"));
        let bed = plot.bed(&ground, "1");
        let late = vec!["tests::a_limit_reached_has_passed".to_owned()];
        assert_eq!(bed.plant(&faults[0]).unwrap(), Verdict::CaughtAtSecondTry(late));
    }

    #[test]
    fn a_test_that_passes_without_a_fault_only_at_its_second_try_is_named() {
        let again = "let again = std::path::Path::new(\"seen\").exists(); std::fs::write(\"seen\", \"\").unwrap(); ";
        let plot = Plot::new("again", &RULE.replace("assert!(older", &format!("{again}assert!(again && older")));
        let (ground, faults) = (plot.ground(), fault("age >= limit", "age > limit", "a_limit_reached_has_passed"));
        let note = report(&[plot.bed(&ground, "1")], &faults).unwrap();
        assert!(note.ends_with("; tried twice: tests::a_limit_reached_has_passed"), "{note}");
    }

    #[test]
    fn a_fault_that_cannot_be_judged_is_an_error_and_not_caught() {
        let plot = Plot::new("unusable", RULE);
        let ground = plot.ground();
        let bed = plot.bed(&ground, "1");
        let reason = |faults: Vec<Fault>| match bed.plant(&faults[0]).unwrap() {
            Verdict::Unusable(reason) => reason,
            Verdict::Caught | Verdict::CaughtAtSecondTry(_) | Verdict::Missed(_) => panic!("judged"),
        };
        let test = "a_limit_reached_has_passed";
        assert!(reason(fault("age >= limit", "age >=", test)).contains("does not compile"));
        assert!(reason(fault("age <= limit", "true", test)).contains("occurs 0 times"));
        assert!(reason(fault("age", "limit", test)).contains("occurs 2 times"));
        assert!(reason(fault("age >= limit", "age > limit", "no_such")).contains("no test `tests::no_such`"));
        assert_eq!(plot.rule_in("place/1/tree"), RULE);
    }

    #[test]
    fn a_test_that_fails_or_is_not_there_without_a_fault_stops_all() {
        let plot = Plot::new("baseline", &RULE.replace("older(3, 3)", "older(2, 3)"));
        let ground = plot.ground();
        let beds = [plot.bed(&ground, "1")];
        let error = |test| report(&beds, &fault("age >= limit", "true", test)).unwrap_err().to_string();
        assert!(error("a_limit_reached_has_passed").contains("fails without any fault"));
        assert!(error("no_such").contains("no test `tests::no_such`"));
    }

    #[test]
    fn the_copy_follows_the_tree() {
        let plot = Plot::new("copy", RULE);
        let ground = plot.ground();
        plot.bed(&ground, "1");
        let tree = plot.folder.join("place/1/tree");
        std::fs::write(tree.join("src/left_over.rs"), "").unwrap();
        std::fs::write(tree.join("src/lib.rs"), "a fault that a killed run left").unwrap();
        plot.bed(&ground, "1");
        assert!(!tree.join("src/left_over.rs").exists());
        assert_eq!(plot.rule_in("place/1/tree"), RULE);
    }
}
