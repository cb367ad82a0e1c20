//! The last step before the command: this same program, started by the guardian, which binds its life to the guardian's
//! and then becomes the command.
//!
//! So a command is killed by the kernel when its guardian is, even if taskonce is killed at the same instant. (Linux. The
//! bond holds for the command itself, not for what it starts, and not for a program that changes its user when started.)

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::process::{Pid, getpid};

use super::guard::GroupNumber;
use super::wire::Order;

/// The word that starts this step: no subcommand, since nobody else is to call it.
pub(crate) const WORD: &str = "__exec";

/// The variable that tells a command where it may write its result.
const RESULT_VARIABLE: &str = "TASKONCE_RESULT_FD";

/// This program, to be started again.
pub(crate) fn this_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// What to start, and where.
pub(crate) struct Start<'a> {
    /// The program and its arguments.
    pub(crate) command: &'a [OsString],
    /// The group that it joins.
    pub(crate) group: GroupNumber,
    /// The folder that it starts in; `None`: this process's.
    pub(crate) directory: Option<&'a Path>,
    /// Variables that are added to this process's.
    pub(crate) variables: &'a [(String, String)],
}

impl<'a> Start<'a> {
    /// A command as it is.
    pub(crate) fn new(command: &'a [OsString], group: GroupNumber) -> Start<'a> {
        Start { command, group, directory: None, variables: &[] }
    }
}

/// Starts a command with these as its stdin, stdout and stderr, and a fourth for its result. To be called by a thread that
/// lives for as long as this process does: the kernel binds the command to the thread. `known` is told its number before the
/// command itself begins.
pub(crate) fn start(what: &Start<'_>, streams: Vec<OwnedFd>, known: impl FnOnce(Pid)) -> io::Result<Pid> {
    let (mut here, there) = UnixStream::pair()?;
    let mut step = Command::new(this_program()?);
    step.arg0("taskonce")
        .arg(WORD)
        .arg(getpid().as_raw_nonzero().to_string())
        .args(what.command)
        .envs(what.variables.iter().map(|(name, value)| (name, value)))
        .process_group(what.group)
        .stdin(OwnedFd::from(there))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if let Some(directory) = what.directory {
        step.current_dir(directory);
    }
    let mut spawned = step.spawn()?;
    let child = Pid::from_child(&spawned);
    known(child);
    // Its copy of the other end would keep the socket open.
    step.stdin(Stdio::null());
    let handed: Vec<_> = streams.iter().map(AsFd::as_fd).collect();
    Order::Deadline(Duration::ZERO).send_with(&here, &handed)?;
    drop(streams);
    // The socket closes when the step becomes the command; before that it can only tell an error's number.
    let mut number = [0; 4];
    match here.read_exact(&mut number) {
        Ok(()) => {
            let _ended = spawned.wait();
            Err(io::Error::from_raw_os_error(i32::from_be_bytes(number)))
        }
        Err(_) => Ok(child),
    }
}

/// The step. Its stdin is the socket to the guardian; `argv` is the guardian's number, then the command.
pub(crate) fn main(argv: &[OsString]) -> ExitCode {
    if let Err(error) = become_command(argv)
        && let Ok(socket) = io::stdin().as_fd().try_clone_to_owned()
    {
        // A guardian that is gone needs no answer.
        let _gone = UnixStream::from(socket).write_all(&error.raw_os_error().unwrap_or(0).to_be_bytes());
    }
    ExitCode::FAILURE
}

fn become_command(argv: &[OsString]) -> io::Result<()> {
    let [guardian, program, words @ ..] = argv else { return Err(io::ErrorKind::InvalidInput.into()) };
    let guardian: Option<i32> = guardian.to_str().and_then(|number| number.parse().ok());
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // From here on its death is noticed by the kernel; before that it is noticed here.
    if rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get()) != guardian {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    // The lowest number that is free: 3, unless this program was started with an open 3.
    let mut result = io::stdin().as_fd().try_clone_to_owned()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (_, streams) = Order::receive_with(&socket)?;
    let mut streams = streams.into_iter();
    let (Some(stdin), Some(stdout), Some(stderr)) = (streams.next(), streams.next(), streams.next()) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let mut command = Command::new(program);
    command.args(words).stdin(stdin).stdout(stdout).stderr(stderr);
    if let Some(given) = streams.next() {
        // It stays open in the command.
        rustix::io::dup2(given, &mut result)?;
        command.env(RESULT_VARIABLE, result.as_raw_fd().to_string());
    }
    let error = command.exec();
    // Stdin may be the command's by now.
    let _gone = (&socket).write_all(&error.raw_os_error().unwrap_or(0).to_be_bytes());
    Ok(())
}
