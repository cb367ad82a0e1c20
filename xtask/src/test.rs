//! `cargo xtask test`: the steps, their order, and the summary. What a step does is in the other modules.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use taskonce_testkit::shared::Stands;

use crate::process::{self, Show};
use crate::suites::{self, Count, Selection};
use crate::{examples, mutants, programs, psycopg, tidy, valkey, workspace};

/// What a person asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    services: Services,
    /// Steps to run; empty means all.
    only: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Services {
    #[default]
    Needed,
    LeftOut,
}

impl Choice {
    /// Reads the command's arguments.
    pub(crate) fn parse(arguments: &[String]) -> Result<Choice> {
        let mut choice = Choice::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--no-services" => choice.services = Services::LeftOut,
                "--only" => {
                    let Some(names) = rest.next() else { bail!("`--only` needs the names of steps") };
                    choice.only.extend(names.split(',').map(str::to_owned));
                }
                other => bail!("`{other}` is not an option of `cargo xtask test`"),
            }
        }
        let names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        if let Some(unknown) = choice.only.iter().find(|name| !names.contains(&name.as_str())) {
            bail!("there is no step `{unknown}`\nhint: the steps are {}", names.join(", "));
        }
        Ok(choice)
    }

    fn wants(&self, step: &Step) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == step.name)
    }
}

/// What every step knows.
struct Context {
    root: PathBuf,
    target: PathBuf,
    services: Services,
    selection: Selection,
}

struct Step {
    name: &'static str,
    /// Does it; says in a few words what was done, or why it failed.
    run: fn(&Context) -> Result<String>,
}

/// In this order, as cheap ones come first and later ones use what earlier ones have compiled.
const STEPS: &[Step] = &[
    Step { name: "format", run: format },
    Step { name: "tidy", run: |context| tidy::check(&context.root) },
    Step { name: "clippy", run: clippy },
    Step { name: "features", run: features },
    Step { name: "docs", run: docs },
    Step { name: "tests", run: tests },
    Step { name: "doctests", run: doctests },
    Step { name: "examples", run: run_examples },
    Step { name: "mutants", run: planted_faults },
];

fn run_examples(context: &Context) -> Result<String> {
    let without = match context.services {
        Services::Needed => &[],
        Services::LeftOut => programs::SERVICES,
    };
    examples::run(&context.root, &context.target, without)
}

struct Outcome {
    name: &'static str,
    took: Duration,
    /// What was done, or why it failed.
    result: Result<String>,
}

/// Runs all steps, also after one has failed, and says how each went. `false` means that one failed.
pub(crate) fn run(choice: &Choice) -> Result<bool> {
    let root = workspace::root();
    let (selection, first) = match choice.services {
        Services::Needed => (
            Selection::all(),
            [programs::ensure(programs::SERVICES)?, valkey::ensure()?, psycopg::ensure()?].join(", "),
        ),
        Services::LeftOut => (Selection::without(programs::SERVICES, &workspace::metadata(&root)?), String::new()),
    };
    if !first.is_empty() {
        println!("{first}");
    }
    let left_out = left_out(choice, &selection);
    print!("{left_out}");

    let target = workspace::target_folder(&root)?;
    let context = Context { root, target, services: choice.services, selection };
    let wanted: Vec<&Step> = STEPS.iter().filter(|step| choice.wants(step)).collect();
    let mut outcomes = Vec::new();
    for (index, step) in wanted.iter().enumerate() {
        println!("\n=== {} ({} of {})", step.name, index + 1, wanted.len());
        let start = Instant::now();
        let result = (step.run)(&context);
        let outcome = Outcome { name: step.name, took: start.elapsed(), result };
        match &outcome.result {
            Ok(note) => println!("--- {} passed in {:.1} s: {note}", outcome.name, outcome.took.as_secs_f64()),
            Err(error) => println!("--- {} FAILED in {:.1} s\n{error:#}", outcome.name, outcome.took.as_secs_f64()),
        }
        outcomes.push(outcome);
    }
    print!("{}{}", left_out_again(&left_out), summary(&outcomes));
    Ok(outcomes.iter().all(|outcome| outcome.result.is_ok()))
}

/// What these choices leave out, a line each; empty when nothing is.
fn left_out(choice: &Choice, selection: &Selection) -> String {
    let mut text = String::new();
    for step in STEPS.iter().filter(|step| !choice.wants(step)) {
        text.push_str(&format!("left out by --only: step {}\n", step.name));
    }
    for what in &selection.left_out {
        text.push_str(&format!("left out by --no-services: {what}\n"));
    }
    if choice.services == Services::LeftOut {
        text.push_str(
            "left out by --no-services: planted faults that only these tests catch, examples on these servers\n",
        );
    }
    text
}

fn left_out_again(left_out: &str) -> String {
    if left_out.is_empty() { String::new() } else { format!("\nThis was not everything:\n{left_out}") }
}

/// A line a step, and the closing line.
fn summary(outcomes: &[Outcome]) -> String {
    let mut text = format!("\n{:<10} {:<7} {:>8}  {}\n", "step", "result", "seconds", "what");
    for outcome in outcomes {
        let (word, what) = match &outcome.result {
            Ok(note) => ("passed", note.clone()),
            Err(error) => ("FAILED", format!("{error:#}")),
        };
        let what = what.lines().next().unwrap_or_default();
        text.push_str(&format!("{:<10} {word:<7} {:>8.1}  {what}\n", outcome.name, outcome.took.as_secs_f64()));
    }
    let failed = outcomes.iter().filter(|outcome| outcome.result.is_err()).count();
    let seconds: f64 = outcomes.iter().map(|outcome| outcome.took.as_secs_f64()).sum();
    text.push_str(&format!(
        "{:<10} {:<7} {seconds:>8.1}\n\n{} passed, {failed} failed\n",
        "all",
        "",
        outcomes.len() - failed
    ));
    text
}

/// Runs cargo at the root and shows its output; an unhappy end is an error.
fn cargo(context: &Context, arguments: &[&str], environment: &[(&str, &str)]) -> Result<String> {
    let mut command = process::cargo();
    command.current_dir(&context.root).args(arguments).envs(environment.iter().copied());
    let text = process::described(&command);
    println!("{text}");
    let ended = process::run(command, Show::Live, None)?;
    if !ended.succeeded() {
        bail!("{text} failed");
    }
    Ok(ended.output)
}

fn format(context: &Context) -> Result<String> {
    programs::ensure_component("rustfmt", "fmt")?;
    cargo(context, &["fmt", "--all", "--check"], &[])?;
    Ok("as rustfmt writes it".into())
}

fn clippy(context: &Context) -> Result<String> {
    programs::ensure_component("clippy", "clippy")?;
    cargo(context, &["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    Ok("no warnings in any target".into())
}

/// The facade compiles without a store and with each alone; a build of the whole workspace switches all of them on.
fn features(context: &Context) -> Result<String> {
    programs::ensure_component("clippy", "clippy")?;
    const FACADE: [&str; 5] = ["clippy", "--locked", "--package", "taskonce", "--no-default-features"];
    let metadata = workspace::metadata(&context.root)?;
    let facade = suites::members(&metadata).find(|package| package["name"] == "taskonce");
    let features: Vec<&String> = facade
        .and_then(|package| package["features"].as_object())
        .map(|features| features.keys().filter(|name| *name != "default").collect())
        .unwrap_or_default();
    if features.is_empty() {
        bail!("the facade has no features to check");
    }
    let mut faults = Vec::new();
    for choice in std::iter::once(None).chain(features.iter().map(Some)) {
        let feature = choice.map_or(Vec::new(), |feature| vec!["--features", feature.as_str()]);
        let run = [&FACADE[..], &feature, &["--", "-D", "warnings"]].concat();
        faults.extend(cargo(context, &run, &[]).err().map(|error| format!("{error:#}")));
    }
    if !faults.is_empty() {
        bail!(faults.join("\n"));
    }
    Ok(format!("the facade alone, and with each of {} features", features.len()))
}

fn docs(context: &Context) -> Result<String> {
    cargo(context, &["doc", "--locked", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    Ok("no warnings".into())
}

/// Unit, integration and contract tests. What the runner says it ran must be what the binaries hold.
fn tests(context: &Context) -> Result<String> {
    let selection: Vec<&str> = context.selection.arguments.iter().map(String::as_str).collect();
    let mut build = process::cargo();
    build.current_dir(&context.root).args(["test", "--locked", "--no-run", "--message-format=json-render-diagnostics"]);
    build.args(&selection);
    println!("{}", process::described(&build));
    let mut suites = Vec::new();
    let mut expected = Count::default();
    let mut faults = Vec::new();
    for suite in suites::binaries(&process::stdout_of(build)?)? {
        let (tests, ignored) = suite.tests()?;
        for test in &tests {
            if context.selection.skips(test) {
                println!("left out by --no-services: {} {test}", suite.label());
                expected.skipped += 1;
            } else {
                expected.ran += 1;
            }
        }
        faults.extend(ignored.iter().map(|test| format!("{}: {test} is ignored", suite.label())));
        if suite.kind == "test" && tests.is_empty() {
            faults.push(format!("{}: holds no test", suite.label()));
        }
        suites.push((suite, tests));
    }
    faults.extend(suites::contract_gaps(&suites));

    let stands = stands(context)?;
    let environment = environment(stands.as_ref());
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, url)| (*name, url.as_str())).collect();
    let filters = context.selection.filters();
    let mut nextest = process::cargo();
    nextest.args(["nextest", "--version"]);
    let mut late = Vec::new();
    let (runner, ran) = if process::answers(nextest) {
        let run = [&["nextest", "run", "--locked", "--no-fail-fast"], &selection[..], &filters].concat();
        let ended = cargo(context, &run, &environment);
        late.extend(ended.iter().flat_map(|output| suites::second_tries_of_nextest(output)));
        ("nextest", ended.map(|output| suites::count_of_nextest(&output)))
    } else {
        let run = [&["test", "--locked", "--no-fail-fast"], &selection[..], &filters].concat();
        ("cargo test", cargo(context, &run, &environment).map(|output| suites::count_of_cargo_test(&output)))
    };
    match ran {
        Err(error) => faults.insert(0, format!("{error:#}")),
        Ok(count) => faults.extend(miscount(count, expected)),
    }
    if faults.is_empty() {
        Ok(format!("{} tests in {} binaries, by {runner}{}", expected.ran, suites.len(), tried_twice(&late)))
    } else {
        bail!(faults.join("\n"))
    }
}

/// The servers that many tests share. They run as long as this value, and end with this program, however it ends.
fn stands(context: &Context) -> Result<Option<Stands>> {
    match context.services {
        Services::Needed => Stands::start().context("the servers that many tests share").map(Some),
        Services::LeftOut => Ok(None),
    }
}

fn environment(stands: Option<&Stands>) -> Vec<(&'static str, String)> {
    stands.map(|stands| stands.environment().to_vec()).unwrap_or_default()
}

/// Names the tests that needed a second try: each is a fault to look for.
fn tried_twice(late: &[String]) -> String {
    if late.is_empty() { String::new() } else { format!("; {} at the second try: {}", late.len(), late.join(", ")) }
}

/// Says so when not exactly the expected tests ran.
fn miscount(count: Count, expected: Count) -> Option<String> {
    if count.ran == 0 {
        return Some("no test ran".into());
    }
    (count != expected).then(|| {
        let Count { ran, skipped } = expected;
        format!(
            "{ran} tests should run and {skipped} be skipped, but {} ran and {} were skipped",
            count.ran, count.skipped
        )
    })
}

fn doctests(context: &Context) -> Result<String> {
    let output = cargo(context, &["test", "--locked", "--workspace", "--doc", "--no-fail-fast"], &[])?;
    let count = suites::count_of_cargo_test(&output);
    match miscount(count, Count { ran: count.ran, skipped: 0 }) {
        Some(fault) => bail!(fault),
        None => Ok(format!("{} doc tests", count.ran)),
    }
}

fn planted_faults(context: &Context) -> Result<String> {
    let excluded: Vec<&str> = match context.services {
        Services::Needed => Vec::new(),
        Services::LeftOut => programs::SERVICES.iter().flat_map(|program| program.packages).copied().collect(),
    };
    let stands = stands(context)?;
    mutants::check(&context.root, &context.target, &[], &excluded, &environment(stands.as_ref()))
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn parse(text: &str) -> Result<Choice> {
        Choice::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn unknown_options_and_steps_are_refused() {
        assert!(parse("--no-service").is_err());
        assert!(parse("--only").is_err());
        assert!(parse("--only tidy,formats").unwrap_err().to_string().contains("no step `formats`"));
        assert_eq!(parse("").unwrap(), Choice::default());
    }

    #[test]
    fn whatever_is_left_out_is_said() {
        let selection = Selection { left_out: vec!["every test of x".into()], ..Selection::default() };
        let text = left_out(&parse("--no-services --only tidy").unwrap(), &selection);
        assert!(text.contains("left out by --no-services: every test of x\n"), "{text}");
        assert!(text.contains("left out by --only: step clippy\n"), "{text}");
        assert!(!text.contains("step tidy"), "{text}");
        assert_eq!(left_out(&parse("").unwrap(), &Selection::all()), "");
    }

    #[test]
    fn the_closing_line_counts_steps() {
        let outcome = |name, result| Outcome { name, took: Duration::from_millis(1500), result };
        let text = summary(&[outcome("tidy", Ok("fine".into())), outcome("docs", Err(anyhow!("bad link\nmore")))]);
        assert!(text.contains("tidy       passed       1.5  fine\n"), "{text}");
        assert!(text.contains("docs       FAILED       1.5  bad link\n"), "{text}");
        assert!(text.ends_with("\n1 passed, 1 failed\n"), "{text}");
    }

    #[test]
    fn tests_that_needed_a_second_try_are_named_in_the_line_of_their_step() {
        assert_eq!(tried_twice(&[]), "");
        assert_eq!(tried_twice(&["a x".into(), "b y".into()]), "; 2 at the second try: a x, b y");
    }

    #[test]
    fn a_run_of_no_test_or_of_too_few_is_a_failure() {
        let count = |ran, skipped| Count { ran, skipped };
        assert!(miscount(count(0, 0), count(0, 0)).is_some());
        assert!(miscount(count(4, 0), count(5, 0)).is_some());
        assert!(miscount(count(5, 1), count(5, 0)).is_some());
        assert!(miscount(count(5, 2), count(5, 2)).is_none());
    }
}
