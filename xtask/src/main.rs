//! The checks of this repository, as one program: `cargo xtask test`, `tidy` and `mutants`.

#![allow(clippy::print_stdout, reason = "a program that reports to a person")]

mod examples;
mod mutants;
mod process;
mod programs;
mod suites;
mod test;
mod tidy;
mod pip;
mod valkey;
mod psycopg;
mod scripts;
mod workspace;

use std::process::ExitCode;

use anyhow::{Result, bail};

const HELP: &str = "\
cargo xtask COMMAND

  test [--no-services] [--only STEP,…]
            every check: format, tidy, clippy, features, docs, tests, doc tests, examples, mutants.
            Missing programs are installed with apt where that is allowed, and named where it is not;
            a Valkey server and psycopg are fetched with pip into the user's cache.
            --no-services leaves out what needs a server, and says so at the start and at the end.
            --only runs these steps only, and says what it leaves out.
  tidy      rules of the source tree: dependencies between crates, module headers, links, sizes
  mutants [NAME …]
            plants each fault of xtask/faults.txt in a copy of the tree and demands that its test fails
  programs  installs or fetches what the tests and the bench start, and nothing else
  help      this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match command(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; `false` means that a check failed and has said so.
fn command(arguments: &[String]) -> Result<bool> {
    match arguments.split_first().map(|(name, rest)| (name.as_str(), rest)) {
        Some(("test", rest)) => test::run(&test::Choice::parse(rest)?),
        Some(("tidy", [])) => tidy::run(),
        Some(("mutants", names)) => mutants::run(names),
        Some(("programs", [])) => {
            println!("{}, {}, {}", programs::ensure(programs::SERVICES)?, valkey::ensure()?, psycopg::ensure()?);
            Ok(true)
        }
        None | Some(("help" | "--help" | "-h", _)) => {
            print!("{HELP}");
            Ok(true)
        }
        Some((name, _)) => {
            bail!("`cargo xtask {name}` does not exist in this form\n{HELP}");
        }
    }
}
