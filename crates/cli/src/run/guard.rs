//! The guardian: a process of its own between taskonce and the command, which outlives taskonce for as long as it takes
//! to kill the command.
//!
//! It starts the command, tells how it ended, and kills it with all its descendants as soon as taskonce is gone, or the
//! claim's deadline has passed without news. It is this same program, started again with a word that nobody else uses.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, set_child_subreaper, waitid, waitpid};
use rustix::time::{ClockId, clock_gettime};

use super::exec;
use super::signals::Signals;
use super::tree::{Family, zombie_children};
use super::wire::{News, Order};

/// The word that starts a guardian: no subcommand, since nobody else is to call it.
pub(crate) const WORD: &str = "__guard";
/// The longest sleep: the timer stands still while the machine is suspended, the deadline does not.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The group that the command joins: `0` for one of its own.
pub(crate) type GroupNumber = i32;

/// The guardian's whole life. Its stdin is the socket to taskonce; `argv` is the group's number, then the command.
pub(crate) fn main(argv: &[OsString]) -> ExitCode {
    match guard(argv) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody reads it: taskonce sees the end of the socket.
        Err(_) => ExitCode::FAILURE,
    }
}

fn guard(argv: &[OsString]) -> io::Result<()> {
    let [group, command @ ..] = argv else { return Err(io::ErrorKind::InvalidInput.into()) };
    let group: GroupNumber = group.to_str().and_then(|group| group.parse().ok()).ok_or(io::ErrorKind::InvalidInput)?;
    // Signals to a whole service reach the guardian too; it must outlive them. Handlers do not pass on to the command.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _signals = {
        let _entered = runtime.enter();
        Signals::heed()?
    };
    let socket = Arc::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
    let (Order::Deadline(deadline), streams) = Order::receive_with(&socket)? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    set_child_subreaper(Some(getpid()))?;
    if uptime() >= deadline {
        return News::LeasePassed.send(&socket);
    }
    let child = match exec::start(&exec::Start::new(command, group), streams, |_number| {}) {
        Ok(child) => child,
        Err(error) => return News::NotStarted(error.raw_os_error().unwrap_or(0)).send(&socket),
    };
    let family = if group == 0 { Family::Group(child) } else { Family::Process(child) };
    if News::Started(child.as_raw_nonzero().get()).send(&socket).is_err() {
        family.kill();
        return Ok(());
    }
    let state = Arc::new(State::default());
    {
        let (socket, state) = (Arc::clone(&socket), Arc::clone(&state));
        let waiter = std::thread::Builder::new().spawn(move || tell_end(child, &socket, &state));
        if waiter.is_err() {
            family.kill();
            return Ok(());
        }
    }
    watch(&socket, family, child, deadline, &state);
    Ok(())
}

/// What the guardian's two threads know.
#[derive(Default)]
struct State {
    /// The command has ended.
    ended: AtomicBool,
    /// The lease has passed: that is told, not the end that follows from it.
    lapsed: AtomicBool,
}

/// Waits for the command's end and tells it. The command stays a zombie, so that its number is nobody else's.
fn tell_end(child: Pid, socket: &UnixStream, state: &State) {
    let news = loop {
        match waitid(WaitId::Pid(child), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => {
                break match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => News::Exited(code),
                    (None, Some(signal)) => News::Killed(signal),
                    (None, None) => continue,
                };
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    };
    state.ended.store(true, Ordering::Release);
    if state.lapsed.load(Ordering::Acquire) {
        return;
    }
    // If taskonce is gone, the guardian's other thread sees it.
    let _gone = news.send(socket);
}

/// Until all is over: obeys orders, and kills the command when there are none any more.
fn watch(socket: &UnixStream, family: Family, child: Pid, mut deadline: Duration, state: &State) {
    loop {
        let over = state.ended.load(Ordering::Acquire);
        let left = deadline.saturating_sub(uptime());
        if left.is_zero() && !over {
            state.lapsed.store(true, Ordering::Release);
            family.kill();
            let _gone = News::LeasePassed.send(socket);
            return;
        }
        let sleep = if over { SLEEP_MAX } else { left.min(SLEEP_MAX) };
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(sleep).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return family.kill(),
        }
        match Order::receive(socket) {
            Ok(Order::Deadline(later)) => {
                deadline = deadline.max(later);
                reap_orphans(child);
            }
            Ok(Order::Signal(number)) => {
                if let Some(signal) = Signal::from_named_raw(number) {
                    family.signal(signal);
                }
            }
            Ok(Order::Over) => return,
            Err(_) => return family.kill(),
        }
    }
}

/// Descendants whose parents died become the guardian's children: those that ended are let go.
fn reap_orphans(child: Pid) {
    for zombie in zombie_children() {
        if zombie != child {
            let _ended = waitpid(Some(zombie), WaitOptions::NOHANG);
        }
    }
}

/// The clock of deadlines, the same as the ledger's: it counts suspend where the system has such a clock.
fn uptime() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let now = clock_gettime(ClockId::Boottime);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}
