//! A server process that ends with the value that holds it, or with the process that started it, however that ends.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// How long a server may take to start.
const START_WAIT: Duration = Duration::from_secs(60);
/// How often a starting server is looked at.
const PAUSE: Duration = Duration::from_millis(2);

/// The server, and the shell that ends it when this process is gone.
pub(crate) struct Running {
    server: Child,
    warden: Child,
}

impl Running {
    /// Starts a program and waits until its log says `ready`. A connection would not do: another process's server could
    /// answer it.
    pub(crate) fn start(program: &Path, args: &[OsString], folder: &Path, ready: &str) -> Result<Running> {
        let mut command = Command::new(program);
        command.args(args);
        Running::start_command(command, folder, ready, "KILL")
    }

    /// The same of a command, which the warden ends with this signal before it kills it.
    pub(crate) fn start_command(mut command: Command, folder: &Path, ready: &str, end: &str) -> Result<Running> {
        let log = folder.join("log");
        let program = command.get_program().to_owned();
        let server = command
            .stdin(Stdio::null())
            .stdout(File::create(&log)?)
            .stderr(File::options().append(true).open(&log)?)
            // A ctrl-C at the terminal is for the tests; the warden ends the server after them.
            .process_group(0)
            .spawn()
            .with_context(|| format!("start `{}`", program.display()))?;
        let mut running = Running { warden: warden(server.id(), folder, end)?, server };
        let start = Instant::now();
        loop {
            let said = fs::read_to_string(&log).unwrap_or_default();
            if said.contains(ready) {
                return Ok(running);
            }
            if let Some(status) = running.server.try_wait()? {
                bail!("the server ended with {status}: {said}");
            }
            ensure!(start.elapsed() < START_WAIT, "the server did not start within {START_WAIT:?}: {said}");
            std::thread::sleep(PAUSE);
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Whether it has ended, waiting for that at most so long.
    pub(crate) fn ends_within(&mut self, within: Duration) -> Result<bool> {
        let start = Instant::now();
        while self.server.try_wait()?.is_none() {
            if start.elapsed() > within {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(true)
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.server.id())?).context("a process id of 0")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The warden first: it must not be left holding a process id that another process may get.
        let _ = self.warden.kill();
        let _ = self.warden.wait();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A shell that waits until its input closes, which happens when this process ends in whatever way, and then ends the
/// server and removes its folder.
fn warden(server: u32, folder: &Path, end: &str) -> Result<Child> {
    // A server that ends itself ends its own processes too, and gives back what it shares with them.
    let script = match end {
        "KILL" => "read -r never; kill -9 \"$1\"; rm -rf \"$2\"",
        _ => "read -r never; kill -s \"$3\" \"$1\"; sleep 1; kill -9 \"$1\"; rm -rf \"$2\"",
    };
    Command::new("sh")
        .args(["-c", script, "sh", &server.to_string()])
        .arg(folder)
        .arg(end)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("start `sh`")
}
