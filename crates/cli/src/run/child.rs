//! The command under its guardian, as taskonce holds it: started, listened to, killed when dropped.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, getpgrp, getpid, set_child_subreaper};
use rustix::termios::tcgetpgrp;
use tokio::sync::{mpsc, oneshot};

use super::capture::{Capture, Stream};
use super::copy;
use super::exec;
use super::guard::{self, GroupNumber};
use super::show::{self, Queue};
use super::tree::{self, Family};
use super::wire::{News, Order};

/// How long the guardian may take to kill the command and end.
const GUARD_END_MAX: Duration = Duration::from_secs(2);
/// The pause between two looks at the guardian.
const GUARD_PAUSE: Duration = Duration::from_millis(1);

/// What to start.
pub(crate) struct Spec {
    pub(crate) command: Vec<OsString>,
    /// The command's stdin; `None`: that of taskonce.
    pub(crate) input: Option<Arc<[u8]>>,
    pub(crate) streams: Streams,
}

/// Where the command's stdout and stderr go.
#[derive(Clone)]
pub(crate) enum Streams {
    /// To taskonce, which keeps them and writes them on; stdout only if `stdout` says so.
    Kept { capture: Arc<Capture>, stdout: bool },
    /// To taskonce's own.
    Own,
    /// Both to taskonce's stderr.
    OwnStderr,
}

/// A command that runs. Dropped, or ended by [`Running::kill`], it is killed; after [`Running::over`] it is left alone.
pub(crate) struct Running {
    socket: UnixStream,
    guard: Mutex<Child>,
    group: GroupNumber,
    child: Mutex<Option<Pid>>,
}

/// What the running command tells.
pub(crate) struct Ears {
    pub(crate) news: mpsc::UnboundedReceiver<News>,
    copies: Vec<oneshot::Receiver<()>>,
    queues: Vec<Arc<Queue>>,
    /// Dropped when the command has ended: then the copiers take what is there and stop.
    wake: UnixStream,
}

/// What is still being written on to taskonce's stdout and stderr.
pub(crate) type Shows = Vec<(Stream, oneshot::Receiver<io::Result<()>>)>;

impl Ears {
    /// The command has ended: waits until what it has written is in memory, whether or not anybody reads it from here.
    pub(crate) async fn drain(self) {
        self.queues.iter().for_each(|queue| queue.unbind());
        drop(self.wake);
        for copy in self.copies {
            // A copier that is gone has copied all it could.
            let _gone = copy.await;
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The group that the command joins. In the foreground of a terminal it stays in the terminal's job: so it can read the
/// terminal, and ctrl-C and ctrl-Z reach it as they reach any command. Elsewhere it has a group of its own.
fn group() -> GroupNumber {
    let Ok(terminal) = File::open("/dev/tty") else { return 0 };
    match tcgetpgrp(&terminal) {
        Ok(foreground) if foreground == getpgrp() => foreground.as_raw_nonzero().get(),
        Ok(_) | Err(_) => 0,
    }
}

/// Starts the command under a guardian. The variables are added to its environment.
pub(crate) fn start(
    spec: &Spec,
    variables: &[(&str, String)],
    deadline: Duration,
) -> io::Result<(Running, Ears, Shows)> {
    let group = group();
    let mut shows = Shows::new();
    let (socket, theirs) = UnixStream::pair()?;
    // If the guardian is killed, what it leaves becomes a descendant of this process, and can be killed from here.
    set_child_subreaper(Some(getpid()))?;
    let guard = Command::new(exec::this_program()?)
        .arg0("taskonce")
        .arg(guard::WORD)
        .arg(group.to_string())
        .args(&spec.command)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Signals to taskonce's group must not end it.
        .process_group(0)
        .spawn()?;
    let running = Running { socket, guard: Mutex::new(guard), group, child: Mutex::new(None) };

    let (wake, slept) = UnixStream::pair()?;
    let mut ears = Ears { news: listen(running.socket.try_clone()?)?, copies: Vec::new(), queues: Vec::new(), wake };
    let stdin = match &spec.input {
        Some(input) => feed(Arc::clone(input))?,
        None => io::stdin().as_fd().try_clone_to_owned()?,
    };
    let (stdout, stderr) = match &spec.streams {
        Streams::Own => (io::stdout().as_fd().try_clone_to_owned()?, io::stderr().as_fd().try_clone_to_owned()?),
        Streams::OwnStderr => (io::stderr().as_fd().try_clone_to_owned()?, io::stderr().as_fd().try_clone_to_owned()?),
        Streams::Kept { capture, stdout } => {
            let to = if *stdout { Some(io::stdout().as_fd().try_clone_to_owned()?) } else { None };
            let out = ears.copy(Stream::Stdout, to, capture, &slept, &mut shows)?;
            let to = io::stderr().as_fd().try_clone_to_owned()?;
            (out, ears.copy(Stream::Stderr, Some(to), capture, &slept, &mut shows)?)
        }
    };
    Order::Deadline(deadline).send_with(&running.socket, &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
    Ok((running, ears, shows))
}

impl Ears {
    /// Starts a copier; gives the end that the command writes to.
    fn copy(
        &mut self,
        stream: Stream,
        to: Option<OwnedFd>,
        capture: &Arc<Capture>,
        slept: &UnixStream,
        shows: &mut Shows,
    ) -> io::Result<OwnedFd> {
        let (reader, writer): (PipeReader, _) = io::pipe()?;
        let (done, copied) = oneshot::channel();
        let (capture, slept) = (Arc::clone(capture), slept.try_clone()?);
        let queue = match to {
            Some(to) => {
                let queue = Arc::new(Queue::default());
                shows.push((stream, show::start(Arc::clone(&queue), File::from(to))?));
                self.queues.push(Arc::clone(&queue));
                Some(queue)
            }
            None => None,
        };
        thread::Builder::new().spawn(move || {
            copy::copy(&reader, &slept, |bytes| {
                capture.add(stream, bytes);
                if let Some(queue) = &queue {
                    queue.add(bytes);
                }
            });
            if let Some(queue) = &queue {
                queue.close();
            }
            // Nobody waits when the claim was lost.
            let _gone = done.send(());
        })?;
        self.copies.push(copied);
        Ok(writer.into())
    }
}

/// Receives news on a thread of its own, until the guardian is gone.
fn listen(socket: UnixStream) -> io::Result<mpsc::UnboundedReceiver<News>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    thread::Builder::new().spawn(move || {
        while let Ok(news) = News::receive(&socket) {
            if sender.send(news).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// A pipe that a thread fills with the input.
fn feed(input: Arc<[u8]>) -> io::Result<OwnedFd> {
    let (reader, mut writer) = io::pipe()?;
    thread::Builder::new().spawn(move || {
        // A command that does not read its input is free to do so.
        let _closed = writer.write_all(&input);
    })?;
    Ok(reader.into())
}

impl Running {
    /// Whether the command shares the terminal's job, which gets the terminal's signals by itself.
    pub(crate) fn shares_terminal(&self) -> bool {
        self.group != 0
    }

    /// The command runs as this process.
    pub(crate) fn started(&self, pid: i32) {
        *locked(&self.child) = Pid::from_raw(pid);
    }

    /// Tells the guardian something. If it is gone, its news end, which is noticed there.
    pub(crate) fn order(&self, order: Order) {
        let _gone = order.send(&self.socket);
    }

    /// All is recorded: the guardian ends, what the command left behind goes on.
    pub(crate) fn over(&self) {
        self.order(Order::Over);
        self.await_guard();
    }

    /// Kills the command with its descendants, and returns when they are gone.
    pub(crate) fn kill(&self) {
        let _closed = self.socket.shutdown(Shutdown::Both);
        if !self.await_guard() {
            let _ended = locked(&self.guard).kill();
            self.guard_is_gone();
        }
    }

    /// The guardian was killed: kills what it guarded.
    pub(crate) fn guard_is_gone(&self) {
        match *locked(&self.child) {
            Some(child) if self.group == 0 => Family::Group(child).kill(),
            Some(child) => Family::Process(child).kill(),
            None => tree::kill_descendants(),
        }
    }

    fn await_guard(&self) -> bool {
        let start = Instant::now();
        while start.elapsed() < GUARD_END_MAX {
            match locked(&self.guard).try_wait() {
                Ok(None) => thread::sleep(GUARD_PAUSE),
                Ok(Some(_)) | Err(_) => return true,
            }
        }
        false
    }
}
