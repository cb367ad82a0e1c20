//! Examples with checked output: each prints what the comment at its end says.
//!
//! ```text
//! // Output:
//! // ran: receipt 1
//! // replayed: receipt 1
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::process::{self, Ended, Show};
use crate::programs::Program;
use crate::workspace::text;
use crate::{scripts, suites};

/// How long an example may run.
const RUN_MAX: Duration = Duration::from_secs(60);

/// Builds every example, runs all but those on a server of these programs, and says how many there are.
pub(crate) fn run(root: &Path, target: &Path, without: &[Program]) -> Result<String> {
    let mut build = process::cargo();
    build.current_dir(root);
    // The examples in Python start the program; built with the others it shares what they are built of.
    build.args(["build", "--locked", "--workspace", "--examples", "--bin", "taskonce"]);
    build.arg("--message-format=json-render-diagnostics");
    let messages = process::stdout_of(build)?;
    let sources = sources(&messages)?;
    let mut faults = Vec::new();
    let mut count = 0;
    for example in suites::binaries(&messages)?.into_iter().filter(|suite| suite.kind == "example") {
        // `07_payment_on_postgres` starts a server.
        if let Some(program) =
            without.iter().find(|program| example.target.ends_with(&format!("_on_{}", program.test_prefix)))
        {
            println!("left out by --no-services: example {} (needs {})", example.target, program.name);
            continue;
        }
        count += 1;
        let source = sources.iter().find(|(name, _, _)| *name == example.target).map_or("", |(_, path, _)| path);
        let code = std::fs::read_to_string(source).with_context(|| format!("cannot read {source}"))?;
        let Some(expected) = expected(&code, "//") else {
            faults.push(format!("{source}: no comment `// Output:` at its end says what it prints"));
            continue;
        };
        let folder = empty_folder(target, &example.target)?;
        let mut command = std::process::Command::new(&example.program);
        command.current_dir(&folder).env_remove("TASKONCE_STORE");
        let ended = process::run(command, Show::Nothing, Some(RUN_MAX))?;
        println!("example {}: {}", example.target, if ended.succeeded() { "ended well" } else { "failed" });
        faults.extend(fault(source, &ended, &expected, RUN_MAX));
    }
    let in_python = scripts::find(root)?;
    if let Some(program) = without.iter().find(|program| program.test_prefix == "postgres") {
        for script in &in_python {
            println!("left out by --no-services: example {} (needs {} and psycopg)", script.display(), program.name);
        }
    } else {
        count += in_python.len();
        let program =
            sources.iter().find(|(name, _, _)| name == "taskonce").context("cargo did not build `taskonce`")?;
        faults.extend(scripts::run(root, target, Path::new(&program.2), &in_python)?);
    }
    if !faults.is_empty() {
        bail!(faults.join("\n"));
    }
    if count == 0 {
        bail!("there are no examples");
    }
    Ok(format!("{count} examples print what they say"))
}

/// Each has an empty folder of its own, so that what it writes stays out of the tree.
pub(crate) fn empty_folder(target: &Path, name: &str) -> Result<PathBuf> {
    let folder = target.join("xtask/examples").join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// What is wrong with how an example ended.
pub(crate) fn fault(source: &str, ended: &Ended, expected: &str, run_max: Duration) -> Option<String> {
    match ended.status {
        None => Some(format!("{source}: still running after {run_max:?}\n{}", ended.output)),
        Some(status) if !status.success() => Some(format!("{source}: {status}\n{}", ended.output)),
        Some(_) if ended.output != expected => {
            Some(format!("{source}: printed\n{}but its comment says\n{expected}", ended.output))
        }
        Some(_) => None,
    }
}

/// Names of examples and programs with the paths of their sources, and of what was built.
fn sources(messages: &str) -> Result<Vec<(String, String, String)>> {
    let mut sources = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line)?;
        if let Some(built) = message["executable"].as_str() {
            let target = &message["target"];
            sources.push((text(&target["name"]).to_owned(), text(&target["src_path"]).to_owned(), built.to_owned()));
        }
    }
    Ok(sources)
}

/// What the comment at the end of an example says it prints; `mark` begins a comment in its language.
pub(crate) fn expected(code: &str, mark: &str) -> Option<String> {
    let (_, comment) = code.rsplit_once(&format!("\n{mark} Output:\n"))?;
    let mut expected = String::new();
    for line in comment.lines() {
        let line = line.strip_prefix(mark)?;
        expected.push_str(line.strip_prefix(' ').unwrap_or(line));
        expected.push('\n');
    }
    Some(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_comment_at_the_end_is_the_expected_output() {
        assert_eq!(expected("fn main() {}\n\n// Output:\n// a\n//\n//   b\n", "//").unwrap(), "a\n\n  b\n");
        assert_eq!(expected("fn main() {}\n\n// Output:\n", "//").unwrap(), "");
        assert_eq!(expected("main()\n\n# Output:\n# a\n", "#").unwrap(), "a\n");
    }

    #[test]
    fn code_after_the_comment_means_that_it_is_not_the_end() {
        assert!(expected("//! x\n// Output:\n// a\nfn main() {}\n", "//").is_none());
        assert!(expected("fn main() {}\n", "//").is_none());
    }
}
