//! The last step before the command: this same program, started by the guardian, which binds its life to the guardian's
//! and then becomes the command.
//!
//! So a command is killed by the kernel when its guardian is, even if taskonce is killed at the same instant. (Linux. The
//! bond holds for the command itself, not for what it starts, and not for a program that changes its user when started.)

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::process::{Pid, getpid};

use super::guard::GroupNumber;
use super::wire::Order;

/// The word that starts this step: no subcommand, since nobody else is to call it.
pub(crate) const WORD: &str = "__exec";

/// This program, to be started again.
pub(crate) fn this_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// Starts the command in the group with these as its stdin, stdout and stderr. To be called by a thread that lives for
/// as long as the guardian does: the kernel binds the command to the thread.
pub(crate) fn start(command: &[OsString], group: GroupNumber, streams: [OwnedFd; 3]) -> io::Result<Pid> {
    let (mut here, there) = UnixStream::pair()?;
    let mut step = Command::new(this_program()?);
    step.arg0("taskonce")
        .arg(WORD)
        .arg(getpid().as_raw_nonzero().to_string())
        .args(command)
        .process_group(group)
        .stdin(OwnedFd::from(there))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = Pid::from_child(&step.spawn()?);
    // Its copy of the other end would keep the socket open.
    step.stdin(Stdio::null());
    let [stdin, stdout, stderr] = &streams;
    Order::Deadline(Duration::ZERO).send_with(&here, [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
    drop(streams);
    // The socket closes when the step becomes the command; before that it can only tell an error's number.
    let mut number = [0; 4];
    match here.read_exact(&mut number) {
        Ok(()) => Err(io::Error::from_raw_os_error(i32::from_be_bytes(number))),
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
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (_, [stdin, stdout, stderr]) = Order::receive_with(&socket)?;
    let error = Command::new(program).args(words).stdin(stdin).stdout(stdout).stderr(stderr).exec();
    // Stdin may be the command's by now.
    let _gone = (&socket).write_all(&error.raw_os_error().unwrap_or(0).to_be_bytes());
    Ok(())
}
