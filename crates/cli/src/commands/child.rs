//! A command's process as the worker holds it: started in a group of its own, watched, and ended politely, then by force.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, waitid, waitpid};
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::warden::Warden;
use crate::run::exec;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(i32),
    Killed(i32),
}

/// What to start.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) command: Vec<OsString>,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) variables: Vec<(String, String)>,
    /// Whether it may tell its result on a descriptor of its own.
    pub(crate) result: Telling,
}

/// How a command tells what became of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Telling {
    /// On a descriptor, before it ends.
    Descriptor,
    /// By lines on its stdout.
    Lines,
}

/// The ends of a command's streams.
pub(crate) struct Streams {
    pub(crate) stdin: pipe::Sender,
    pub(crate) stdout: pipe::Receiver,
    pub(crate) stderr: pipe::Receiver,
    pub(crate) result: Option<pipe::Receiver>,
}

/// All commands of this worker.
pub(crate) struct Crew {
    starts: mpsc::UnboundedSender<Asked>,
    warden: Arc<Warden>,
    living: Arc<Living>,
    /// Commands of tasks that were cancelled, by the task's key: the next attempt waits for their end.
    ending: Arc<Mutex<HashMap<String, Child>>>,
    runtime: Handle,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The processes that live.
#[derive(Default)]
struct Living {
    groups: Mutex<HashSet<i32>>,
    changed: Notify,
    /// No further one is started.
    closed: AtomicBool,
}

impl Living {
    fn lock(&self) -> MutexGuard<'_, HashSet<i32>> {
        locked(&self.groups)
    }

    fn forget(&self, pid: Pid) {
        self.lock().remove(&pid.as_raw_nonzero().get());
        self.changed.notify_waiters();
    }
}

/// A start that is asked for, and where its answer goes.
type Asked = (Order, Vec<OwnedFd>, oneshot::Sender<io::Result<Fresh>>);

impl Crew {
    /// Starts the warden, and the thread that starts commands: the kernel binds each to the life of that thread, which is
    /// this process's.
    pub(crate) fn new() -> io::Result<Arc<Crew>> {
        let warden = Arc::new(Warden::start()?);
        let living = Arc::new(Living::default());
        let (starts, mut orders) = mpsc::unbounded_channel::<Asked>();
        let (thread_warden, thread_living) = (Arc::clone(&warden), Arc::clone(&living));
        thread::Builder::new().name("starts".to_owned()).spawn(move || {
            while let Some((order, streams, answer)) = orders.blocking_recv() {
                // Nobody waits for it any more.
                if answer.is_closed() {
                    continue;
                }
                let started = start(&order, streams, &thread_warden, &thread_living);
                let (warden, living) = (Arc::clone(&thread_warden), Arc::clone(&thread_living));
                // Where nobody takes it, it is killed with the answer.
                let _untaken = answer.send(started.map(|pid| Fresh { pid: Some(pid), warden, living }));
            }
        })?;
        let (ending, runtime) = (Arc::default(), Handle::current());
        Ok(Arc::new(Crew { starts, warden, living, ending, runtime }))
    }

    /// Starts a command.
    pub(crate) async fn start(&self, order: Order) -> io::Result<(Child, Streams)> {
        let (stdin, stdin_theirs) = pipe_to()?;
        let (stdout_theirs, stdout) = pipe_from()?;
        let (stderr_theirs, stderr) = pipe_from()?;
        let mut theirs = vec![stdin_theirs, stdout_theirs, stderr_theirs];
        let result = match order.result {
            Telling::Descriptor => {
                let (result_theirs, result) = pipe_from()?;
                theirs.push(result_theirs);
                Some(result)
            }
            Telling::Lines => None,
        };
        let (answer, started) = oneshot::channel();
        let gone = || io::Error::other("the worker starts nothing more");
        self.starts.send((order, theirs, answer)).map_err(|_| gone())?;
        let pid = started.await.map_err(|_| gone())??.take();
        let (end, ended) = watch::channel(None);
        let (warden, living) = (Arc::clone(&self.warden), Arc::clone(&self.living));
        self.runtime.spawn_blocking(move || {
            let how = await_end(pid, &warden, &living);
            end.send_replace(Some(how));
        });
        Ok((Child { pid, ended }, Streams { stdin, stdout, stderr, result }))
    }

    /// A task was cancelled: asks its command to end, and kills it with its group when it has not after so long. Goes on
    /// without the caller; [`Crew::settled`] waits for it.
    pub(crate) fn cancel(&self, key: String, child: Child, kill_after: Duration) {
        locked(&self.ending).insert(key.clone(), child.clone());
        let ending = Arc::clone(&self.ending);
        self.runtime.spawn(async move {
            child.end(kill_after).await;
            let mut ending = locked(&ending);
            if ending.get(&key).is_some_and(|other| other.pid == child.pid) {
                ending.remove(&key);
            }
        });
    }

    /// Waits until no command of an earlier attempt of this task lives here.
    pub(crate) async fn settled(&self, key: &str) {
        let child = locked(&self.ending).get(key).cloned();
        if let Some(child) = child {
            child.wait().await;
        }
    }

    /// A command whose stdin was closed: it ends by itself, or is asked to, or killed, after so long each.
    pub(crate) fn dismiss(&self, child: Child, kill_after: Duration) {
        self.runtime.spawn(async move {
            if tokio::time::timeout(kill_after, child.wait()).await.is_err() {
                child.end(kill_after).await;
            }
        });
    }

    /// Runs something on this worker's runtime.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }

    /// Waits until no command lives; the number of those that do when the time is over.
    pub(crate) async fn gone(&self, within: Duration) -> usize {
        let all = async {
            loop {
                let changed = self.living.changed.notified();
                if self.living.lock().is_empty() {
                    return;
                }
                changed.await;
            }
        };
        let _late = tokio::time::timeout(within, all).await;
        self.living.lock().len()
    }

    /// Kills every command at once, and starts none any more.
    pub(crate) fn kill_all(&self) {
        self.living.closed.store(true, Ordering::SeqCst);
        for group in self.living.lock().iter().copied().filter_map(Pid::from_raw) {
            let _ended = kill_process_group(group, Signal::KILL);
        }
    }
}

fn pipe_to() -> io::Result<(pipe::Sender, OwnedFd)> {
    let (reader, writer) = io::pipe()?;
    Ok((pipe::Sender::from_owned_fd(writer.into())?, reader.into()))
}

fn pipe_from() -> io::Result<(OwnedFd, pipe::Receiver)> {
    let (reader, writer) = io::pipe()?;
    Ok((writer.into(), pipe::Receiver::from_owned_fd(reader.into())?))
}

fn start(order: &Order, streams: Vec<OwnedFd>, warden: &Warden, living: &Living) -> io::Result<Pid> {
    if living.closed.load(Ordering::SeqCst) {
        return Err(io::Error::other("the worker ends"));
    }
    let what = exec::Start {
        directory: order.directory.as_deref(),
        variables: &order.variables,
        ..exec::Start::new(&order.command, 0)
    };
    let mut begun = None;
    let started = exec::start(&what, streams, |pid| {
        begun = Some(pid);
        // Before it can have started anything that outlives it.
        warden.begun(pid);
        living.lock().insert(pid.as_raw_nonzero().get());
    });
    if let (Err(_), Some(pid)) = (&started, begun) {
        warden.ended(pid);
        living.forget(pid);
    }
    let pid = started?;
    if living.closed.load(Ordering::SeqCst) {
        // What kills all may not have seen it.
        let _ended = kill_process_group(pid, Signal::KILL);
    }
    Ok(pid)
}

/// A command that was started, and that nobody watches yet. Dropped, it is killed: whoever asked for it may have been
/// cancelled when it was on its way.
struct Fresh {
    pid: Option<Pid>,
    warden: Arc<Warden>,
    living: Arc<Living>,
}

impl Fresh {
    /// It, for who watches it from now on.
    fn take(mut self) -> Pid {
        self.pid.take().expect("it is taken once, and this consumes it")
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let Some(pid) = self.pid.take() else { return };
        let _ended = kill_process_group(pid, Signal::KILL);
        let (warden, living) = (Arc::clone(&self.warden), Arc::clone(&self.living));
        // Not here, which may be a thread of the runtime. Where no thread can be had, the warden kills the group at the end.
        let _unseen = thread::Builder::new().name("reap".to_owned()).spawn(move || await_end(pid, &warden, &living));
    }
}

/// Waits for a command's end, kills what is left of its group, and lets go of its number.
fn await_end(pid: Pid, warden: &Warden, living: &Living) -> End {
    let end = loop {
        // It stays a zombie, so that its number is nobody else's.
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => break End::Exited(code),
                (None, Some(signal)) => break End::Killed(signal),
                (None, None) => continue,
            },
            Ok(None) | Err(Errno::INTR) => {}
            // Somebody else has reaped it: nothing is known of its end.
            Err(_) => break End::Killed(Signal::KILL.as_raw()),
        }
    };
    let _ended = kill_process_group(pid, Signal::KILL);
    warden.ended(pid);
    let _reaped = waitpid(Some(pid), WaitOptions::empty());
    living.forget(pid);
    end
}

/// A command that runs, or has ended. Whoever drops it leaves it alone.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pid: Pid,
    ended: watch::Receiver<Option<End>>,
}

impl Child {
    /// Its number.
    pub(crate) fn number(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// How it ended, if it has.
    pub(crate) fn has_ended(&self) -> Option<End> {
        *self.ended.borrow()
    }

    /// Waits for its end.
    pub(crate) async fn wait(&self) -> End {
        let mut ended = self.ended.clone();
        let end = ended.wait_for(Option::is_some).await.ok().and_then(|end| *end);
        // Only a runtime that ends drops the one who tells.
        end.unwrap_or(End::Killed(Signal::KILL.as_raw()))
    }

    /// Kills it with its group.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        // After its end the number may be another's.
        if self.has_ended().is_none() {
            let _ended = kill_process_group(self.pid, signal);
        }
    }

    /// Asks it to end, and kills it when it has not after so long.
    pub(crate) async fn end(&self, kill_after: Duration) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(kill_after, self.wait()).await.is_err() {
            tracing::warn!(
                pid = self.number(),
                ?kill_after,
                "a command did not end when it was asked to, and is killed"
            );
            self.kill();
            self.wait().await;
        }
    }
}
