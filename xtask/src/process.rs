//! Child processes: run one, show what it prints while it runs, and keep it.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// How long output is awaited after a child ended: a grandchild left behind may hold the pipe open for ever.
const TAIL_MAX: Duration = Duration::from_secs(5);
/// How often a child with a time limit is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Whether a child's output is shown while it runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    /// It is copied to our own standard output.
    Live,
    /// It is only kept.
    Nothing,
}

/// How a child ended.
pub(crate) struct Ended {
    /// Its status; `None` when it was killed for its time limit.
    pub(crate) status: Option<ExitStatus>,
    /// Standard output and standard error, in the order in which they were written.
    pub(crate) output: String,
}

impl Ended {
    /// Whether it ended by itself with code 0.
    pub(crate) fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// A cargo command, of the toolchain that runs us.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Whether a program starts and succeeds with these arguments. Shows nothing.
pub(crate) fn answers(mut command: Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a command to its end, or to its time limit.
pub(crate) fn run(mut command: Command, show: Show, limit: Option<Duration>) -> Result<Ended> {
    let (reader, writer) = std::io::pipe().context("no pipe for a child's output")?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", described(&command)))?;
    // The command holds the pipe's writing end; without this the reader would never see the end.
    drop(command);

    let kept = Arc::new(Mutex::new(Vec::new()));
    let (ended, end) = mpsc::channel();
    let keeper = Arc::clone(&kept);
    thread::spawn(move || {
        copy(reader, &keeper, show);
        // The receiver may have given up on a grandchild that holds the pipe.
        let _ = ended.send(());
    });
    let status = wait(&mut child, limit)?;
    let _ = end.recv_timeout(TAIL_MAX);
    let output = String::from_utf8_lossy(&kept.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
    Ok(Ended { status, output })
}

/// Runs a command that must succeed, and returns its standard output. Its standard error is shown.
pub(crate) fn stdout_of(mut command: Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", described(&command)))?;
    if !output.status.success() {
        bail!("{} failed ({})", described(&command), output.status);
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed something else than UTF-8", described(&command)))
}

/// A command as a person would type it.
pub(crate) fn described(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let mut text = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    format!("`{text}`")
}

fn wait(child: &mut Child, limit: Option<Duration>) -> Result<Option<ExitStatus>> {
    let Some(limit) = limit else {
        return Ok(Some(child.wait()?));
    };
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

fn copy(mut reader: impl Read, kept: &Mutex<Vec<u8>>, show: Show) {
    let mut buffer = [0; 8192];
    while let Ok(length @ 1..) = reader.read(&mut buffer) {
        let piece = &buffer[..length];
        if show == Show::Live {
            let mut screen = std::io::stdout().lock();
            // A closed screen is no reason to stop the checks.
            let _ = screen.write_all(piece).and_then(|()| screen.flush());
        }
        kept.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_outputs_are_kept_in_order_with_the_status() {
        let ended = run(shell("echo one; echo two >&2; echo three; exit 3"), Show::Nothing, None).unwrap();
        assert_eq!(ended.output, "one\ntwo\nthree\n");
        assert_eq!(ended.status.unwrap().code(), Some(3));
        assert!(!ended.succeeded());
    }

    #[test]
    fn a_child_past_its_limit_is_killed_and_told_apart() {
        let start = Instant::now();
        let ended = run(shell("echo begun; exec sleep 60"), Show::Nothing, Some(Duration::from_millis(300))).unwrap();
        assert!(ended.status.is_none());
        assert_eq!(ended.output, "begun\n");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_failing_command_is_named() {
        let error = stdout_of(shell("exit 4")).unwrap_err().to_string();
        assert!(error.contains("`sh -c exit 4` failed"), "{error}");
    }
}
