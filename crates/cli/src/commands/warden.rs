//! The warden: a process beside the worker that kills what the worker's commands have started, once the worker is gone.
//!
//! The commands themselves are killed by the kernel then (Linux); this is for their groups. It is this same program, started
//! again with a word that nobody else uses.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::run::exec;
use crate::run::signals::Signals;

/// The word that starts a warden: no subcommand, since nobody else is to call it.
pub(crate) const WORD: &str = "__warden";
/// The length of a message: what it is, and a group's number.
const LENGTH: usize = 5;

/// What the worker holds of its warden. Dropped, the warden kills the groups that it knows.
pub(crate) struct Warden {
    socket: Mutex<UnixStream>,
}

impl Warden {
    /// Starts it.
    pub(crate) fn start() -> io::Result<Warden> {
        let (socket, theirs) = UnixStream::pair()?;
        Command::new(exec::this_program()?)
            .arg0("taskonce")
            .arg(WORD)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals to the worker's group must not end it.
            .process_group(0)
            .spawn()?;
        Ok(Warden { socket: Mutex::new(socket) })
    }

    /// A command leads this group.
    pub(crate) fn begun(&self, group: Pid) {
        self.tell(b'+', group);
    }

    /// Nothing of it is left.
    pub(crate) fn ended(&self, group: Pid) {
        self.tell(b'-', group);
    }

    fn tell(&self, what: u8, group: Pid) {
        let mut message = [what; LENGTH];
        message[1..].copy_from_slice(&group.as_raw_nonzero().get().to_be_bytes());
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        // Without a warden the kernel's bond is left.
        let _gone = socket.write_all(&message);
    }
}

/// The warden's whole life. Its stdin is the socket to the worker.
pub(crate) fn main(_argv: &[OsString]) -> ExitCode {
    match watch() {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody reads it.
        Err(_) => ExitCode::FAILURE,
    }
}

fn watch() -> io::Result<()> {
    // Signals to a whole service reach it too; it must outlive them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _signals = {
        let _entered = runtime.enter();
        Signals::heed()?
    };
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut groups = HashSet::new();
    let mut message = [0; LENGTH];
    while socket.read_exact(&mut message).is_ok() {
        let [what, number @ ..] = message;
        let number = i32::from_be_bytes(number);
        match what {
            b'+' => groups.insert(number),
            _ => groups.remove(&number),
        };
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        // It may have ended just now.
        let _ended = kill_process_group(group, Signal::KILL);
    }
    Ok(())
}
