//! Examples in Python, with checked output like those in Rust: each gets a PostgreSQL server with the schema of taskonce, and the
//! program `taskonce`.
//!
//! ```text
//! # Output:
//! # order-1: ran, attempt 1
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use taskonce_testkit::PostgresServer;

use crate::process::{self, Show};
use crate::{examples, psycopg, workspace};

/// Where they are, from the root.
const FOLDER: &str = "crates/taskonce/examples/python/";
/// How long one may run.
const RUN_MAX: Duration = Duration::from_secs(60);

/// The scripts of the tree, relative to its root.
pub(crate) fn find(root: &Path) -> Result<Vec<PathBuf>> {
    let mut scripts = workspace::files(root)?;
    scripts.retain(|file| file.starts_with(FOLDER) && file.extension().is_some_and(|end| end == "py"));
    Ok(scripts)
}

/// Runs each with this program `taskonce`, and says what was wrong with which.
pub(crate) fn run(root: &Path, target: &Path, taskonce: &Path, scripts: &[PathBuf]) -> Result<Vec<String>> {
    let packages = psycopg::path()?;
    let mut faults = Vec::new();
    for script in scripts {
        let source = root.join(script);
        let code = std::fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
        let name = script.display();
        let Some(expected) = examples::expected(&code, "#") else {
            faults.push(format!("{name}: no comment `# Output:` at its end says what it prints"));
            continue;
        };
        let folder =
            examples::empty_folder(target, &format!("python-{}", script.file_stem().unwrap_or_default().display()))?;
        // Each has a server of its own, which ends with this value.
        let server = PostgresServer::start(&["-c", "fsync=off"])?;
        let url = server.url("postgres");
        let mut migrate = Command::new(taskonce);
        migrate.args(["migrate", "--store", &url]);
        process::stdout_of(migrate)?;
        let mut command = Command::new("python3");
        command.arg(&source).current_dir(&folder);
        command.env("TASKONCE", taskonce).env("TASKONCE_STORE", &url).env("DATABASE_URL", &url);
        command.envs(packages.as_ref().map(|packages| ("PYTHONPATH", packages)));
        let ended = process::run(command, Show::Nothing, Some(RUN_MAX))?;
        println!("example {name}: {}", if ended.succeeded() { "ended well" } else { "failed" });
        faults.extend(examples::fault(&name.to_string(), &ended, &expected, RUN_MAX));
    }
    Ok(faults)
}
