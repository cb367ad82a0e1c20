//! Test binaries: which there are, which tests each holds, and how many a run says it ran.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::process::{self, Show};
use crate::programs::Program;
use crate::workspace::{list, text};

/// How long a test binary may take to list its tests.
const LIST_MAX: Duration = Duration::from_secs(60);

/// One test binary.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Suite {
    /// The package.
    pub(crate) package: String,
    /// The library's, program's or file's name.
    pub(crate) target: String,
    /// `lib`, `bin` or `test`.
    pub(crate) kind: String,
    /// The folder of the package, where its tests run.
    pub(crate) folder: PathBuf,
    /// The binary.
    pub(crate) program: PathBuf,
}

/// What to give cargo to get the tests that are wanted, and what is left out by it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Arguments for `cargo test` and `cargo nextest run` alike.
    pub(crate) arguments: Vec<String>,
    /// Tests whose names hold one of these are skipped: they stand in a module that is left out.
    pub(crate) skipped: Vec<String>,
    /// What is left out, for people.
    pub(crate) left_out: Vec<String>,
}

impl Selection {
    /// Every test but doc tests.
    pub(crate) fn all() -> Selection {
        Selection { arguments: vec!["--workspace".into(), "--tests".into()], ..Selection::default() }
    }

    /// Every test that does without these programs.
    pub(crate) fn without(programs: &[Program], metadata: &Value) -> Selection {
        let mut selection = Selection { arguments: vec!["--workspace".into()], ..Selection::default() };
        let mut kept = Vec::new();
        for package in members(metadata) {
            let name = text(&package["name"]);
            if let Some(program) = programs.iter().find(|program| program.packages.contains(&name)) {
                selection.arguments.extend(["--exclude".into(), name.into()]);
                selection.left_out.push(format!("every test of {name} (needs {})", program.name));
                continue;
            }
            for target in list(&package["targets"]).iter().filter(|target| text(&target["kind"][0]) == "test") {
                let file = text(&target["name"]);
                if let Some(program) = programs.iter().find(|program| file.starts_with(program.test_prefix)) {
                    selection.left_out.push(format!("{name} tests/{file}.rs (needs {})", program.name));
                    continue;
                }
                kept.push(file.to_owned());
                let modules = modules(Path::new(text(&target["src_path"])));
                for module in &modules {
                    if let Some(program) = programs.iter().find(|program| module.starts_with(program.test_prefix)) {
                        selection.left_out.push(format!("{name} tests/{file}/{module}.rs (needs {})", program.name));
                        selection.skipped.push(format!("{module}::"));
                    }
                }
            }
        }
        kept.sort();
        kept.dedup();
        selection.arguments.extend(["--lib".into(), "--bins".into()]);
        selection.arguments.extend(kept.into_iter().flat_map(|file| ["--test".into(), file]));
        selection.skipped.sort();
        selection.skipped.dedup();
        selection
    }

    /// Arguments for the runner, after `--`.
    pub(crate) fn filters(&self) -> Vec<&str> {
        let skips = self.skipped.iter().flat_map(|name| ["--skip", name.as_str()]);
        if self.skipped.is_empty() { Vec::new() } else { std::iter::once("--").chain(skips).collect() }
    }

    /// Whether the runner skips a test.
    pub(crate) fn skips(&self, test: &str) -> bool {
        self.skipped.iter().any(|name| test.contains(name))
    }
}

/// The modules of an integration test that has a folder of its own (`tests/NAME/main.rs`), by the names of their files.
fn modules(main: &Path) -> Vec<String> {
    let folder = main.parent().filter(|_| main.file_name().is_some_and(|name| name == "main.rs"));
    let files = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let stem = |file: PathBuf| Some(file.file_stem()?.to_str()?.to_owned());
    let mut modules: Vec<String> = files.filter_map(|file| stem(file.path())).filter(|stem| stem != "main").collect();
    modules.sort();
    modules
}

/// The packages of the workspace.
pub(crate) fn members(metadata: &Value) -> impl Iterator<Item = &Value> {
    let ids = list(&metadata["workspace_members"]);
    list(&metadata["packages"]).iter().filter(move |package| ids.contains(&package["id"]))
}

/// The test binaries and examples in the messages of `cargo … --message-format=json`.
pub(crate) fn binaries(messages: &str) -> Result<Vec<Suite>> {
    let mut suites = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("a message of cargo is not JSON")?;
        if text(&message["reason"]) != "compiler-artifact" {
            continue;
        }
        let Some(program) = message["executable"].as_str() else { continue };
        // Integration tests bring the programs that they start, which hold no tests.
        if message["profile"]["test"] != true && text(&message["target"]["kind"][0]) != "example" {
            continue;
        }
        let manifest = Path::new(text(&message["manifest_path"]));
        let folder = manifest.parent().unwrap_or(manifest).to_path_buf();
        suites.push(Suite {
            package: package_name(text(&message["package_id"])),
            target: text(&message["target"]["name"]).to_owned(),
            kind: text(&message["target"]["kind"][0]).to_owned(),
            folder,
            program: program.into(),
        });
    }
    Ok(suites)
}

/// The name in a package id: after `#` and before `@`, or the last folder where the name is left out.
fn package_name(id: &str) -> String {
    let (address, fragment) = id.split_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => address.rsplit('/').next().unwrap_or(address).to_owned(),
    }
}

impl Suite {
    /// A person's name for it.
    pub(crate) fn label(&self) -> String {
        format!("{} {} {}", self.package, self.kind, self.target)
    }

    /// The command that runs the binary where cargo would run it.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// The names of its tests, and of those that are ignored.
    pub(crate) fn tests(&self) -> Result<(Vec<String>, Vec<String>)> {
        Ok((
            self.listed(&["--list", "--format", "terse"])?,
            self.listed(&["--list", "--format", "terse", "--ignored"])?,
        ))
    }

    fn listed(&self, arguments: &[&str]) -> Result<Vec<String>> {
        let mut command = self.command();
        command.args(arguments);
        let ended = process::run(command, Show::Nothing, Some(LIST_MAX))?;
        if !ended.succeeded() {
            bail!("{} does not list its tests:\n{}", self.label(), ended.output);
        }
        Ok(ended.output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// Cases of the contract that one store runs and another does not: stores run the suite, and nothing else, in
/// `tests/contract.rs`, and the memory store runs it in the contract's own package. A store that is used in several ways
/// runs it in a module for each, and each has to run every case.
pub(crate) fn contract_gaps(suites: &[(Suite, Vec<String>)]) -> Vec<String> {
    let of_store = |suite: &Suite| {
        let parent = suite.folder.parent().and_then(Path::file_name);
        suite.kind == "test" && suite.target == "contract" && parent.is_some_and(|name| name == "stores")
    };
    let stores = || suites.iter().filter(|(suite, _)| of_store(suite));
    let memory = suites.iter().filter(|(suite, _)| suite.package == "taskonce-contract" && suite.target == "memory");
    let cases: BTreeSet<&str> = stores().flat_map(|(_, tests)| tests).map(|test| way_and_case(test).1).collect();
    let mut gaps = Vec::new();
    for (suite, tests) in stores() {
        let mut ways: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (way, case) in tests.iter().map(|test| way_and_case(test)) {
            ways.entry(way).or_default().insert(case);
        }
        if ways.is_empty() {
            ways.insert("", BTreeSet::new());
        }
        for (way, run) in &ways {
            let of = if way.is_empty() { suite.label() } else { format!("{} {way}", suite.label()) };
            let missing = cases.iter().filter(|case| !run.contains(*case));
            gaps.extend(missing.map(|case| format!("{of}: does not run the contract's case {case}")));
        }
    }
    for (suite, tests) in memory {
        let missing = cases.iter().filter(|case| !tests.iter().any(|test| test == *case));
        gaps.extend(missing.map(|case| format!("{}: does not run the contract's case {case}", suite.label())));
    }
    if stores().next().is_some() && cases.is_empty() {
        gaps.push("no store runs a case of the contract".into());
    }
    gaps
}

/// The module and the name of a test: `cluster` and `a_case` of `cluster::a_case`.
fn way_and_case(test: &str) -> (&str, &str) {
    test.rsplit_once("::").unwrap_or(("", test))
}

/// How many tests a run says it ran, passed or not, and how many it skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// Tests that ran.
    pub(crate) ran: usize,
    /// Tests that did not.
    pub(crate) skipped: usize,
}

/// Counts in the output of `cargo test`: all its lines `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
pub(crate) fn count_of_cargo_test(output: &str) -> Count {
    let mut count = Count::default();
    for line in output.lines().filter_map(|line| line.strip_prefix("test result: ")) {
        count.ran += before(line, " passed") + before(line, " failed");
        count.skipped += before(line, " ignored") + before(line, " filtered out");
    }
    count
}

/// Counts in the output of `cargo nextest run`: `Summary [ 0.1s] 12 tests run: 12 passed, 0 skipped`.
pub(crate) fn count_of_nextest(output: &str) -> Count {
    let summary = output.lines().rev().find(|line| line.trim_start().starts_with("Summary [")).unwrap_or_default();
    // `1 test run`, `12 tests run`, and `7/12 tests run` where the run was cut short.
    let ran = before(summary, " tests run").max(before(summary, " test run"));
    Count { ran, skipped: before(summary, " skipped") }
}

/// Tests that passed only when they were tried again, in the output of `cargo nextest run`: its last lines, below the
/// summary, such as `FLAKY 2/2 [ 0.029s] (2/3) taskonce-core keys::a_key_is_long`.
pub(crate) fn second_tries_of_nextest(output: &str) -> Vec<String> {
    let lines = output.lines().skip_while(|line| !line.trim_start().starts_with("Summary ["));
    let flaky = lines.filter_map(|line| line.trim_start().strip_prefix("FLAKY "));
    let name = |line: &str| {
        let (_, rest) = line.split_once("] ")?;
        Some(rest.trim_start().split_once(") ").map_or(rest, |(_, name)| name).trim().to_owned())
    };
    flaky.filter_map(name).collect()
}

/// The number that stands right before `word`; zero where there is none.
fn before(line: &str, word: &str) -> usize {
    let Some(end) = line.find(word) else { return 0 };
    let digits = line[..end].rfind(|character: char| !character.is_ascii_digit()).map_or(0, |start| start + 1);
    // More digits than a `usize` holds are no count.
    line[digits..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::programs::SERVICES;

    #[test]
    fn counts_of_cargo_test_add_up_over_binaries() {
        let output = "running 2 tests\ntest a ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
                      test result: FAILED. 10 passed; 1 failed; 3 ignored; 0 measured; 4 filtered out; finished in 1.00s\n";
        assert_eq!(count_of_cargo_test(output), Count { ran: 13, skipped: 7 });
        assert_eq!(count_of_cargo_test("error: could not compile"), Count::default());
    }

    #[test]
    fn counts_of_nextest_come_from_its_summary() {
        let output = "        PASS [   0.004s] ( 1/12) a b\n────\n     Summary [   0.1s] 12 tests run: 11 passed, 1 failed, 2 skipped\n";
        assert_eq!(count_of_nextest(output), Count { ran: 12, skipped: 2 });
        assert_eq!(
            count_of_nextest("     Summary [   0.1s] 1 test run: 1 passed, 0 skipped"),
            Count { ran: 1, skipped: 0 }
        );
        assert_eq!(count_of_nextest("error: no tests to run"), Count::default());
    }

    #[test]
    fn binaries_are_read_from_messages_of_cargo() {
        let message = |kind: &str, is_test: bool| {
            json!({
                "reason": "compiler-artifact", "package_id": "path+file:///w/crates/core#taskonce-core@0.1.0",
                "manifest_path": "/w/crates/core/Cargo.toml", "executable": "/w/target/debug/deps/core-1",
                "target": {"name": "taskonce_core", "kind": [kind]}, "profile": {"test": is_test},
            })
        };
        let (test, program) = (message("lib", true), message("bin", false));
        let library = json!({"reason": "compiler-artifact", "executable": null});
        let suites = binaries(&format!("{test}\n{library}\n{program}\nnoise\n")).unwrap();
        assert_eq!(suites.len(), 1);
        assert_eq!(suites[0].label(), "taskonce-core lib taskonce_core");
        assert_eq!(suites[0].folder, Path::new("/w/crates/core"));
        assert_eq!(package_name("path+file:///w/crates/taskonce#0.1.0"), "taskonce");
    }

    #[test]
    fn tests_that_passed_at_their_second_try_are_named() {
        let output = "  TRY 1 FAIL [   0.457s] (───) plot::more other
  stdout ───

    FLAKY 1/1 [   0.001s] (1/1) what a test printed

  TRY 2 PASS [   0.013s] (3/3) plot::more other
────────────
     Summary [   0.489s] 3 tests run: 3 passed (2 flaky), 0 skipped
   FLAKY 2/2 [   0.029s] (2/3) plot tests::late
   FLAKY 2/2 [   0.013s] (3/3) plot::more other
";
        assert_eq!(second_tries_of_nextest(output), ["plot tests::late", "plot::more other"]);
        assert_eq!(count_of_nextest(output), Count { ran: 3, skipped: 0 });
        let steady = "     Summary [   0.489s] 3 tests run: 3 passed, 0 skipped\n";
        assert!(second_tries_of_nextest(steady).is_empty());
    }

    #[test]
    fn a_case_that_one_store_leaves_out_is_found() {
        let suite = |package: &str, folder: &str, target: &str, tests: &[&str]| {
            let suite = Suite {
                package: package.into(),
                target: target.into(),
                kind: "test".into(),
                folder: folder.into(),
                program: PathBuf::new(),
            };
            (suite, tests.iter().map(|test| (*test).to_owned()).collect::<Vec<_>>())
        };
        let a = suite("a", "/w/stores/a", "contract", &["x", "y"]);
        let b = suite("b", "/w/stores/b", "contract", &["x"]);
        let own = suite("b", "/w/stores/b", "own", &["z"]);
        let memory = suite("taskonce-contract", "/w/crates/contract", "memory", &["x", "y", "m"]);
        assert_eq!(contract_gaps(&[a, b, own, memory]), ["b test contract: does not run the contract's case y"]);
        let ways = suite("c", "/w/stores/c", "contract", &["one::x", "one::y", "two::y"]);
        let a = suite("a", "/w/stores/a", "contract", &["x", "y"]);
        assert_eq!(contract_gaps(&[a, ways]), ["c test contract two: does not run the contract's case x"]);
        assert_eq!(
            contract_gaps(&[suite("a", "/w/stores/a", "contract", &[])]),
            ["no store runs a case of the contract"]
        );
    }

    #[test]
    fn what_needs_a_server_is_left_out_and_named() {
        let folder = std::env::temp_dir().join(format!("taskonce-xtask-{}-modules", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["main.rs", "redis.rs", "local.rs"] {
            std::fs::write(folder.join(file), "").unwrap();
        }
        let target = |name: &str| json!({"name": name, "kind": ["test"], "src_path": folder.join("main.rs")});
        let metadata = json!({
            "workspace_members": ["1", "2"],
            "packages": [
                {"id": "1", "name": "taskonce-redis", "targets": [target("contract")]},
                {"id": "2", "name": "taskonce-cli", "targets": [target("redis_faults"), target("run"), {"name": "taskonce", "kind": ["bin"]}]},
                {"id": "3", "name": "serde", "targets": [target("outside")]},
            ],
        });
        let selection = Selection::without(SERVICES, &metadata);
        assert_eq!(
            selection.arguments,
            ["--workspace", "--exclude", "taskonce-redis", "--lib", "--bins", "--test", "run"]
        );
        assert_eq!(
            selection.left_out,
            [
                "every test of taskonce-redis (needs redis-server)",
                "taskonce-cli tests/redis_faults.rs (needs redis-server)",
                "taskonce-cli tests/run/redis.rs (needs redis-server)",
            ]
        );
        assert_eq!(selection.filters(), ["--", "--skip", "redis::"]);
        assert!(selection.skips("redis::a_case") && !selection.skips("local::a_redis_case"));
        assert_eq!(Selection::all().filters(), Vec::<&str>::new());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
