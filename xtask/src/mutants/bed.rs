//! A copy of the tree in which faults are planted, with a build folder of its own.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};

use super::list::{Fault, Test};
use super::seed;
use crate::process::{self, Show};
use crate::suites::{self, Suite};
use crate::workspace;

/// How long a named test may run, with or without a fault.
const TEST_MAX: Duration = Duration::from_secs(60);
/// The folder of a build folder that tests are compiled into.
const PROFILE: &str = "debug";

/// What became of a planted fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every named test failed.
    Caught,
    /// The same, but these did so only when they were tried again.
    CaughtAtSecondTry(Vec<String>),
    /// These tests passed all the same, twice.
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

/// What all copies are made of.
pub(crate) struct Ground {
    root: PathBuf,
    files: Vec<PathBuf>,
    /// Where the tree itself is built.
    target: PathBuf,
    /// Our packages, and what may hold tests in each: `lib`, and the files in its `tests/`. With each the features that
    /// the manifest says it needs, as cargo takes them: with commas.
    packages: BTreeMap<String, BTreeMap<String, String>>,
    /// Names the servers that many tests share to them.
    environment: Vec<(&'static str, String)>,
}

impl Ground {
    /// Reads the tree at `root`, which is built in `target`.
    pub(crate) fn survey(
        root: &Path,
        files: Vec<PathBuf>,
        target: &Path,
        environment: &[(&'static str, String)],
    ) -> Result<Ground> {
        let metadata = workspace::packages(root)?;
        let mut packages = BTreeMap::new();
        for package in suites::members(&metadata) {
            let mut targets = BTreeMap::new();
            for target in workspace::list(&package["targets"]) {
                let name = match workspace::text(&target["kind"][0]) {
                    "test" => workspace::text(&target["name"]),
                    "lib" => "lib",
                    _ => continue,
                };
                let features = workspace::list(&target["required-features"]).iter().map(workspace::text);
                let features = features.map(|feature| format!("{}/{feature}", workspace::text(&package["name"])));
                targets.insert(name.to_owned(), features.collect::<Vec<_>>().join(","));
            }
            packages.insert(workspace::text(&package["name"]).to_owned(), targets);
        }
        let environment = environment.to_vec();
        Ok(Ground { root: root.to_path_buf(), files, target: target.to_path_buf(), packages, environment })
    }

    /// What selects a test's binary.
    ///
    /// Packages that have no such target add nothing but their demands on the packages of others. With these, others are
    /// compiled as they are for the tree itself, and need not be compiled again.
    fn selection<'t>(&'t self, test: &'t Test) -> Vec<&'t str> {
        let mut arguments = vec!["--package", &test.package];
        let others = self.packages.iter().filter(|(_, targets)| !targets.contains_key(&test.target));
        arguments.extend(others.flat_map(|(name, _)| ["--package", name]));
        // Cargo demands these, also where another package switches them on.
        let features = self.packages.get(&test.package).and_then(|targets| targets.get(&test.target));
        arguments.extend(features.into_iter().flat_map(|features| ["--features", features]));
        match test.target.as_str() {
            "lib" => arguments.push("--lib"),
            file => arguments.extend(["--test", file]),
        }
        arguments
    }
}

/// The copy.
pub(crate) struct Bed<'a> {
    ground: &'a Ground,
    tree: PathBuf,
    build: PathBuf,
}

impl<'a> Bed<'a> {
    /// Makes the copy in `place`, or brings an earlier one up to date.
    ///
    /// A file is written only where it differs, so that cargo builds again only what changed, and always with a new
    /// time, so that it does build that.
    pub(crate) fn prepare(ground: &'a Ground, place: &Path) -> Result<Bed<'a>> {
        let bed = Bed { ground, tree: place.join("tree"), build: place.join("build") };
        std::fs::create_dir_all(&bed.tree)?;
        let wanted: HashSet<&Path> = ground.files.iter().map(PathBuf::as_path).collect();
        remove_others(&bed.tree, &bed.tree, &wanted)?;
        for file in &ground.files {
            let bytes =
                std::fs::read(ground.root.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
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

    /// Takes what was compiled of other people's packages for the tree itself, or for another bed.
    pub(crate) fn take_from_others(&self, beds: &[Bed<'_>]) -> Result<()> {
        let others = beds.iter().map(|bed| &bed.build).filter(|build| **build != self.build);
        let ours = self.ground.packages.keys().map(String::as_str).collect();
        for build in others.chain([&self.ground.target]) {
            seed::take(&build.join(PROFILE), &self.build.join(PROFILE), &ours)?;
        }
        Ok(())
    }

    /// Demands that these tests are there and pass as long as no fault is planted. Says which did so only at their
    /// second try.
    pub(crate) fn demand_success_unmutated(&self, tests: &[&Test]) -> Result<Vec<String>> {
        let mut late = Vec::new();
        let mut suites = BTreeMap::new();
        for test in tests {
            let suite = match suites.entry((&test.package, &test.target)) {
                Entry::Occupied(there) => there.into_mut(),
                Entry::Vacant(place) => {
                    place.insert(self.compile(test)?.map_err(|errors| anyhow!("the tree does not compile:\n{errors}"))?)
                }
            };
            let mut trial = self.try_test(suite, test)?;
            if matches!(trial, Trial::Failed) {
                trial = self.try_test(suite, test)?;
                late.push(test.name.clone());
            }
            match trial {
                Trial::Passed => {}
                Trial::Failed => bail!("{} of {} fails without any fault", test.name, test.package),
                Trial::Neither(reason) => bail!("{} of {}: {reason}", test.name, test.package),
            }
        }
        Ok(late)
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

    /// A test that passes is tried again before that counts: another bed, or the machine, may have been in its way.
    fn judge(&self, fault: &Fault) -> Result<Verdict> {
        let (mut passed, mut late) = (Vec::new(), Vec::new());
        for test in &fault.caught {
            let suite = match self.compile(test)? {
                Ok(suite) => suite,
                Err(errors) => return Ok(Verdict::Unusable(format!("it does not compile:\n{errors}"))),
            };
            match self.try_test(&suite, test)? {
                Trial::Failed => {}
                Trial::Neither(reason) => return Ok(Verdict::Unusable(reason)),
                Trial::Passed => match self.try_test(&suite, test)? {
                    Trial::Passed => passed.push(test.name.as_str()),
                    Trial::Failed => late.push(test.name.clone()),
                    Trial::Neither(reason) => return Ok(Verdict::Unusable(reason)),
                },
            }
        }
        Ok(match (passed.is_empty(), late.is_empty()) {
            (true, true) => Verdict::Caught,
            (true, false) => Verdict::CaughtAtSecondTry(late),
            (false, _) => Verdict::Missed(passed.join(", ")),
        })
    }

    /// The test's binary; what the compiler said where it does not compile.
    fn compile(&self, test: &Test) -> Result<Result<Suite, String>> {
        let mut command = process::cargo();
        command.current_dir(&self.tree).stdin(Stdio::null());
        // A fault changes a line or two.
        command.env("CARGO_TARGET_DIR", &self.build).env("CARGO_INCREMENTAL", "1");
        command.args(["test", "--quiet", "--locked", "--no-run", "--message-format=json-render-diagnostics"]);
        command.args(self.ground.selection(test));
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

    fn try_test(&self, suite: &Suite, test: &Test) -> Result<Trial> {
        let (tests, ignored) = suite.tests()?;
        if !tests.contains(&test.name) || ignored.contains(&test.name) {
            return Ok(Trial::Neither(format!("there is no test `{}` in {}", test.name, suite.label())));
        }
        let mut command = suite.command();
        command.args(["--exact", &test.name]);
        command.envs(self.ground.environment.iter().map(|(name, value)| (name, value)));
        let ended = process::run(command, Show::Nothing, Some(TEST_MAX))?;
        Ok(match ended.status {
            None => Trial::Neither(format!("{} still ran after {TEST_MAX:?}; give it a bound of its own", test.name)),
            Some(status) if status.success() => Trial::Passed,
            Some(_) => Trial::Failed,
        })
    }
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
