//! A copy of the tree in which faults are planted, with a build folder of its own.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::list::{Fault, Test};
use crate::process::{self, Show};
use crate::suites::{self, Suite};
use crate::workspace;

/// How long a named test may run, with or without a fault.
const TEST_MAX: Duration = Duration::from_secs(60);

/// What became of a planted fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every named test failed.
    Caught,
    /// These tests passed all the same.
    Missed(String),
    /// Nothing can be said: the entry is wrong.
    Unusable(String),
}

/// How one test ended.
enum Trial {
    Passed,
    Failed,
    /// Not judged, and why.
    Neither(String),
}

/// The copy.
pub(crate) struct Bed {
    tree: PathBuf,
    build: PathBuf,
}

impl Bed {
    /// Makes the copy in `place`, or brings an earlier one up to date.
    ///
    /// A file is written only where it differs, so that cargo builds again only what changed, and always with a new
    /// time, so that it does build that.
    pub(crate) fn prepare(root: &Path, files: &[PathBuf], place: &Path) -> Result<Bed> {
        let bed = Bed { tree: place.join("tree"), build: place.join("build") };
        std::fs::create_dir_all(&bed.tree)?;
        let wanted: HashSet<&Path> = files.iter().map(PathBuf::as_path).collect();
        remove_others(&bed.tree, &bed.tree, &wanted)?;
        for file in files {
            let bytes = std::fs::read(root.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
            let copy = bed.tree.join(file);
            if std::fs::read(&copy).is_ok_and(|old| old == bytes) {
                continue;
            }
            if let Some(folder) = copy.parent() {
                std::fs::create_dir_all(folder)?;
            }
            std::fs::write(&copy, bytes).with_context(|| format!("cannot write {}", copy.display()))?;
        }
        Ok(bed)
    }

    /// Demands that every named test is there and passes as long as no fault is planted.
    pub(crate) fn demand_success_unmutated(&self, faults: &[Fault]) -> Result<()> {
        let mut seen = HashSet::new();
        for test in faults.iter().flat_map(|fault| &fault.caught).filter(|test| seen.insert(*test)) {
            let suite =
                self.compile(test)?.map_err(|errors| anyhow::anyhow!("the tree does not compile:\n{errors}"))?;
            match try_test(&suite, test)? {
                Trial::Passed => {}
                Trial::Failed => bail!("{} of {} fails without any fault", test.name, test.package),
                Trial::Neither(reason) => bail!("{} of {}: {reason}", test.name, test.package),
            }
        }
        Ok(())
    }

    /// Plants a fault, runs its tests, and takes it out again.
    pub(crate) fn plant(&self, fault: &Fault) -> Result<Verdict> {
        let file = self.tree.join(&fault.file);
        let Ok(original) = std::fs::read_to_string(&file) else {
            return Ok(Verdict::Unusable(format!("there is no file {}", fault.file)));
        };
        let count = original.matches(&fault.find).count();
        if count != 1 {
            return Ok(Verdict::Unusable(format!("its text to find occurs {count} times in {}, not once", fault.file)));
        }
        std::fs::write(&file, original.replacen(&fault.find, &fault.replace, 1))?;
        let verdict = self.judge(fault);
        std::fs::write(&file, original)?;
        verdict
    }

    fn judge(&self, fault: &Fault) -> Result<Verdict> {
        let mut passed = Vec::new();
        for test in &fault.caught {
            let suite = match self.compile(test)? {
                Ok(suite) => suite,
                Err(errors) => return Ok(Verdict::Unusable(format!("it does not compile:\n{errors}"))),
            };
            match try_test(&suite, test)? {
                Trial::Passed => passed.push(test.name.as_str()),
                Trial::Failed => {}
                Trial::Neither(reason) => return Ok(Verdict::Unusable(reason)),
            }
        }
        Ok(if passed.is_empty() { Verdict::Caught } else { Verdict::Missed(passed.join(", ")) })
    }

    /// The test's binary; what the compiler said where it does not compile.
    fn compile(&self, test: &Test) -> Result<Result<Suite, String>> {
        let mut command = process::cargo();
        command.current_dir(&self.tree).stdin(Stdio::null());
        command.env("CARGO_TARGET_DIR", &self.build);
        // Nobody debugs these; they link faster without.
        command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_TEST_DEBUG", "0");
        command.args(["test", "--quiet", "--locked", "--no-run", "--message-format=json-render-diagnostics"]);
        command.args(["--package", &test.package]);
        match test.target.as_str() {
            "lib" => command.arg("--lib"),
            file => command.args(["--test", file, "--features", &self.features_of(test)?]),
        };
        let output = command.output().context("cannot start cargo")?;
        if !output.status.success() {
            return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let messages = String::from_utf8(output.stdout).context("cargo printed something else than UTF-8")?;
        let kind = if test.target == "lib" { "lib" } else { "test" };
        suites::binaries(&messages)?
            .into_iter()
            .find(|suite| suite.package == test.package && suite.kind == kind)
            .map(Ok)
            .with_context(|| format!("cargo named no binary for {} {}", test.package, test.target))
    }
}

impl Bed {
    /// What the manifest says that this test needs, as cargo takes it: with commas. Cargo demands it, and no more compiles faster.
    fn features_of(&self, test: &Test) -> Result<String> {
        let metadata = workspace::metadata(&self.tree)?;
        let package = suites::members(&metadata).find(|package| package["name"] == *test.package);
        let targets = package.map(|package| workspace::list(&package["targets"])).unwrap_or_default();
        let target = targets.iter().find(|target| target["name"] == *test.target);
        let features = target.map(|target| workspace::list(&target["required-features"])).unwrap_or_default();
        Ok(features.iter().map(workspace::text).collect::<Vec<_>>().join(","))
    }
}

fn try_test(suite: &Suite, test: &Test) -> Result<Trial> {
    let (tests, ignored) = suite.tests()?;
    if !tests.contains(&test.name) || ignored.contains(&test.name) {
        return Ok(Trial::Neither(format!("there is no test `{}` in {}", test.name, suite.label())));
    }
    let mut command = suite.command();
    command.args(["--exact", &test.name]);
    let ended = process::run(command, Show::Nothing, Some(TEST_MAX))?;
    Ok(match ended.status {
        None => Trial::Neither(format!("{} still ran after {TEST_MAX:?}; give it a bound of its own", test.name)),
        Some(status) if status.success() => Trial::Passed,
        Some(_) => Trial::Failed,
    })
}

/// Removes files of an earlier copy that are not wanted any more.
fn remove_others(tree: &Path, folder: &Path, wanted: &HashSet<&Path>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(tree, &path, wanted)?;
        } else if !path.strip_prefix(tree).is_ok_and(|file| wanted.contains(file)) {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}
