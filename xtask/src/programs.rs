//! Programs that the checks need beside the Rust toolchain, and how to get them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, anyhow, bail};
use taskonce_testkit as testkit;

use crate::process::{self, Show};

/// A program that some tests start.
pub(crate) struct Program {
    /// Its name on the path.
    pub(crate) name: &'static str,
    /// The Debian and Ubuntu package that has it.
    pub(crate) package: &'static str,
    /// What needs it, for people.
    pub(crate) needed_by: &'static str,
    /// Packages of ours all of whose tests are left out without it.
    pub(crate) packages: &'static [&'static str],
    /// Integration tests of any package, and modules of them, are left out without it when their file name begins so.
    pub(crate) test_prefix: &'static str,
    /// Where it is, if it is there: distributions put some where no path leads.
    pub(crate) place: fn() -> Option<PathBuf>,
}

/// Servers: what `--no-services` does without.
pub(crate) const SERVICES: &[Program] = &[
    Program {
        name: "redis-server",
        package: "redis-server",
        needed_by: "tests of the Redis store, of the command line on it, of the test servers and of the bench",
        packages: &["taskonce-redis", "taskonce-queue-redis", "taskonce-testkit", "taskonce-bench"],
        test_prefix: "redis",
        place: || found("redis-server"),
    },
    // The library beside it is what is needed; the program tells that it is there.
    Program {
        name: "faketime",
        package: "faketime",
        needed_by: "tests with a Redis or a PostgreSQL whose clock stands still or jumps, and of the test servers",
        packages: &["taskonce-testkit"],
        test_prefix: "redis",
        place: || found("faketime"),
    },
    Program {
        name: "postgres",
        package: "postgresql",
        needed_by: "tests of the PostgreSQL store and of the command line on it",
        packages: &["taskonce-postgres"],
        test_prefix: "postgres",
        place: || testkit::Program::Postgres.path().ok(),
    },
    Program {
        name: "pgbouncer",
        package: "pgbouncer",
        needed_by: "tests of the PostgreSQL store behind a pooler",
        packages: &["taskonce-postgres"],
        test_prefix: "pgbouncer",
        place: || testkit::Program::PgBouncer.path().ok(),
    },
];

/// Makes sure that every program is there: installs what is missing where that is allowed, else says what to do.
pub(crate) fn ensure(programs: &[Program]) -> Result<String> {
    let missing: Vec<&Program> = programs.iter().filter(|program| (program.place)().is_none()).collect();
    if !missing.is_empty() {
        install(&missing)?;
    }
    if let Some(program) = missing.iter().find(|program| (program.place)().is_none()) {
        bail!("package {} was installed, but {} is not where it is looked for", program.package, program.name);
    }
    let names: Vec<String> = programs
        .iter()
        .map(|program| {
            let how = if missing.iter().any(|other| other.name == program.name) { "installed" } else { "found" };
            format!("{} {how}", program.name)
        })
        .collect();
    Ok(names.join(", "))
}

/// Where a program is on the path.
fn found(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// What a person has to do when nothing may be installed for them.
fn advice(missing: &[&Program]) -> String {
    let mut text = String::from("programs are missing:\n");
    for program in missing {
        text.push_str(&format!("  {}, needed by {}\n", program.name, program.needed_by));
    }
    let packages: Vec<&str> = missing.iter().map(|program| program.package).collect();
    text.push_str(&format!(
        "hint: on Debian or Ubuntu run `sudo apt-get install {}`; elsewhere install them so that they are on the path;\n      \
         `cargo xtask test --no-services` does without them, and says what it leaves out",
        packages.join(" ")
    ));
    text
}

fn install(missing: &[&Program]) -> Result<()> {
    let packages: Vec<&str> = missing.iter().map(|program| program.package).collect();
    install_packages(&packages).map_err(|error| anyhow!("{error:#}\n{}", advice(missing)))
}

/// Installs packages of Debian or Ubuntu where that is allowed.
pub(crate) fn install_packages(packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    let Some(prefix) = administrator().filter(|_| found("apt-get").is_some()) else {
        bail!("{names} cannot be installed from here: that takes apt-get, and root or a sudo without a password");
    };
    println!("installing {names} with apt-get");
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(packages);
    let installed = apt(prefix, &arguments)? || (apt(prefix, &["update"])? && apt(prefix, &arguments)?);
    if !installed {
        bail!("apt-get could not install {names}");
    }
    Ok(())
}

/// What to write before a command to run it as the administrator without being asked; `None` where that is not allowed.
fn administrator() -> Option<&'static [&'static str]> {
    let mut id = Command::new("id");
    id.arg("-u");
    if process::stdout_of(id).is_ok_and(|user| user.trim() == "0") {
        return Some(&[]);
    }
    let mut sudo = Command::new("sudo");
    sudo.args(["-n", "true"]);
    process::answers(sudo).then_some(&["sudo", "-n"])
}

fn apt(prefix: &[&str], arguments: &[&str]) -> Result<bool> {
    let mut words = prefix.to_vec();
    // Run level 1 asks the package's scripts not to start its service: the tests start servers of their own. One that
    // starts all the same is harmless, as nothing here uses its port.
    words.extend(["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "apt-get"]);
    words.extend(arguments);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    Ok(process::run(command, Show::Live, None)?.succeeded())
}

/// Makes sure that a component of the Rust toolchain is there.
pub(crate) fn ensure_component(name: &str, subcommand: &str) -> Result<()> {
    let there = || {
        let mut command = process::cargo();
        command.args([subcommand, "--version"]);
        process::answers(command)
    };
    if there() {
        return Ok(());
    }
    if found("rustup").is_some() {
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", name]);
        println!("adding {name} with rustup");
        process::run(rustup, Show::Live, None)?;
    }
    if !there() {
        bail!(
            "`cargo {subcommand}` is missing\nhint: run `rustup component add {name}`, or install it with your toolchain"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package_and_who_needs_it() {
        let text = advice(&[&SERVICES[0]]);
        for part in
            ["redis-server, needed by tests of the Redis store,", "apt-get install redis-server", "--no-services"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_program_is_found_on_the_path_by_its_whole_name() {
        assert!(found("sh").is_some());
        assert!(found("no-such-program-of-taskonce").is_none());
    }
}
