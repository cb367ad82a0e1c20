//! Starts the program in a temporary folder, and looks at processes.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use taskonce_testkit::eventually;
use tempfile::TempDir;

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_taskonce");
/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a store of its own.
pub(crate) struct Desk {
    folder: TempDir,
    store: String,
}

/// What a call of the program said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Said {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Desk {
    pub(crate) fn new() -> Desk {
        let folder = tempfile::Builder::new().prefix("taskonce-cli-").tempdir().unwrap();
        let store = format!("sqlite:{}", folder.path().join("tasks.db").display());
        Desk { folder, store }
    }

    pub(crate) fn over(store: &str) -> Desk {
        Desk { store: store.to_owned(), ..Desk::new() }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn store(&self) -> &str {
        &self.store
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a script that runs as `sh NAME`.
    pub(crate) fn script(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// What a file holds; nothing when it is not there.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub(crate) fn lines(&self, name: &str) -> usize {
        self.read(name).lines().count()
    }

    /// Waits until a file has so many lines.
    pub(crate) fn await_lines(&self, name: &str, lines: usize) {
        assert!(eventually(PATIENCE, || self.lines(name) >= lines), "{name}: {:?}", self.read(name));
    }

    /// The process ids that a script wrote into `pids`, one a line.
    pub(crate) fn pids(&self) -> Vec<Pid> {
        let text = self.read("pids");
        text.lines().filter_map(|line| Pid::from_raw(line.trim().parse().unwrap())).collect()
    }

    /// The program, in a process group of its own, so that it is in no terminal's foreground.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .current_dir(self.folder())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.folder())
            .env("TZ", "UTC")
            .env("USER", "ada")
            .env("TASKONCE_STORE", &self.store)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        command
    }

    pub(crate) fn say(&self, args: &[&str]) -> Said {
        said(self.command(args).output().unwrap())
    }

    /// The same, with something on stdin.
    pub(crate) fn say_with(&self, args: &[&str], input: &[u8]) -> Said {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A program that does not read its input closes it.
        let _closed = stdin.write_all(input);
        drop(stdin);
        said(child.wait_with_output().unwrap())
    }

    /// Starts the program and lets it run.
    pub(crate) fn start(&self, args: &[&str]) -> Started {
        Started { child: Some(self.command(args).spawn().unwrap()) }
    }
}

fn said(output: std::process::Output) -> Said {
    use std::os::unix::process::ExitStatusExt;
    Said {
        code: output.status.code().unwrap_or_else(|| -output.status.signal().unwrap_or(0)),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A program that runs. It is killed when a test fails.
pub(crate) struct Started {
    child: Option<Child>,
}

impl Started {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Said {
        said(self.child.take().unwrap().wait_with_output().unwrap())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ended = child.kill();
            let _ended = child.wait();
        }
    }
}

/// Whether a process lives; a zombie does not.
pub(crate) fn lives(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rfind(')').and_then(|end| stat[end + 1..].trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The living children of a process.
pub(crate) fn children(of: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let Some(end) = stat.rfind(')') else { continue };
        let parent = stat[end + 1..].split_whitespace().nth(1).and_then(|parent| parent.parse::<i32>().ok());
        if parent == Some(of.as_raw_nonzero().get()) {
            found.extend(Pid::from_raw(pid).filter(|pid| lives(*pid)));
        }
    }
    found
}
