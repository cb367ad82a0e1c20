//! Python's own installer, with which what only the checks need is fetched from PyPI: by version and hash, without running
//! anything of it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::process::{self, Show};
use crate::programs;

/// Fetches or installs archives, as the arguments say, each by its name, version and hash.
pub(crate) fn run(verb: &str, wanted: &[&str], arguments: &[&str], to: (&str, &Path)) -> Result<()> {
    if !is_there() {
        programs::install_packages(&["python3-pip"])?;
    }
    ensure!(is_there(), "`python3 -m pip` does not run");
    let work = tempfile::tempdir()?;
    let list = work.path().join("wanted.txt");
    fs::write(&list, wanted.iter().map(|archive| format!("{archive}\n")).collect::<String>())
        .with_context(|| format!("cannot write {}", list.display()))?;
    let mut command = pip();
    command.args([verb, "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]);
    command.args(["--only-binary", ":all:"]).args(arguments).arg(to.0).arg(to.1).arg("--requirement").arg(&list);
    ensure!(process::run(command, Show::Live, None)?.succeeded(), "pip could not fetch it");
    Ok(())
}

fn pip() -> Command {
    let mut command = Command::new("python3");
    command.args(["-m", "pip"]);
    command
}

fn is_there() -> bool {
    let mut command = pip();
    command.arg("--version");
    process::answers(command)
}
