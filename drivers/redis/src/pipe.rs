//! One connection that many calls share: their commands travel together, and every answer is proven to be its own.
//!
//! Redis answers in order and says nothing of what it answers. If a single answer were lost on the way, everyone behind
//! it would get a neighbour's. So an answer counts only when it is proven to be in step: either its request was alone on
//! the wire from its sending to its answer, or a later mark (an `ECHO` of a number used once) came back in its place. A
//! batch of requests carries one mark. When anything does not fit, the connection ends, and all that was on it is unknown.
//!
//! Where a write counts only when replicas have it, each batch with a write in it ends with one `WAIT`, between two marks:
//! reads are answered at the first, writes at the second. The server answers nothing else on this connection meanwhile,
//! so what comes in is kept back and goes out together when it has answered.
//!
//! Here is the calls' end of it; `driver` is the other.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use taskonce_core::ErrorKind;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::driver::Driver;
use crate::fault::Refusal;
use crate::wire::{Commands, Reply};

/// How many calls may be on a connection at once; more wait.
const CALLS_MAX: usize = 4096;

/// How much later than it was asked to a server may end a wait for replicas: it looks ten times a second.
pub(crate) const WAIT_SLACK: Duration = Duration::from_millis(100);

/// What the connection runs over.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// How long a call waits.
#[derive(Clone, Copy)]
pub struct Limits {
    /// From here on it waits only if the server has answered others.
    pub patience: Instant,
    /// For so long.
    pub silence: Duration,
    /// Here it ends.
    pub deadline: Instant,
}

/// Which replicas must have a write before it counts.
#[derive(Clone, Copy)]
pub struct Replicas {
    /// So many.
    pub count: u32,
    /// How long they are waited for.
    pub at_most: Duration,
}

/// Says of a call's replies whether they tell of a write.
pub type Wrote = fn(&[Reply]) -> bool;

/// Why a call has no answer.
#[derive(Debug)]
pub enum Trouble {
    /// Nothing more must be sent on this connection.
    Broken(Refusal),
    /// The connection works, and is slow.
    Slow(Refusal),
}

/// The calls' end of a connection. When it is dropped, the connection closes.
pub struct Pipe {
    shared: Arc<Shared>,
    room: Arc<Semaphore>,
}

/// What both ends share.
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    made: Instant,
    /// Since when something is unanswered and nothing has come back, in milliseconds since `made`; 0 if not.
    pub(crate) silent_since: AtomicU64,
}

/// What waits to be written.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) commands: Commands,
    pub(crate) calls: Vec<Call>,
    /// Wakes the driver; empty while it is awake anyway.
    pub(crate) driver: Option<Waker>,
    pub(crate) ended: Option<Refusal>,
}

/// A call on its way.
pub(crate) struct Call {
    /// How many commands it has, of so many bytes.
    pub(crate) expected: usize,
    size: usize,
    pub(crate) replies: Vec<Reply>,
    pub(crate) limits: Limits,
    /// Of a call that may write.
    pub(crate) wrote: Option<Wrote>,
    /// It is on the connection until it is answered, also when nobody waits for it any more.
    _room: OwnedSemaphorePermit,
    /// Nobody, when it was too late.
    pub(crate) caller: Option<oneshot::Sender<Result<Vec<Reply>, Trouble>>>,
}

impl Pipe {
    /// A connection over this wire. The future drives it, and ends with it.
    ///
    /// With `replicas` a write on it counts only when they have it.
    pub fn new(wire: Box<dyn Wire>, replicas: Option<Replicas>) -> (Pipe, impl Future<Output = ()> + Send + 'static) {
        let shared =
            Arc::new(Shared { queue: Mutex::default(), made: Instant::now(), silent_since: AtomicU64::new(0) });
        let driver = Driver::new(wire, Arc::clone(&shared), replicas);
        (Pipe { shared, room: Arc::new(Semaphore::new(CALLS_MAX)) }, driver)
    }

    /// Sends the commands that `write` adds, and returns one reply to each. An error that the server answers is a reply.
    ///
    /// With `wrote` the commands may write; where writes must reach replicas, it fails when one did not.
    pub async fn call(
        &self,
        limits: Limits,
        wrote: Option<Wrote>,
        write: impl FnOnce(&mut Commands),
    ) -> Result<Vec<Reply>, Trouble> {
        let room = match Arc::clone(&self.room).try_acquire_owned() {
            Ok(room) => room,
            Err(_) => Box::pin(self.room(limits)).await?,
        };
        let (caller, answer) = oneshot::channel();
        let waker = {
            let mut queue = self.shared.queue();
            if let Some(refusal) = &queue.ended {
                return Err(Trouble::Broken(refusal.clone()));
            }
            let (count, length) = (queue.commands.count, queue.commands.bytes.len());
            write(&mut queue.commands);
            let expected = queue.commands.count - count;
            let size = queue.commands.bytes.len() - length;
            queue.calls.push(Call {
                expected,
                size,
                replies: Vec::with_capacity(expected),
                limits,
                wrote,
                _room: room,
                caller: Some(caller),
            });
            queue.driver.take()
        };
        if let Some(driver) = waker {
            driver.wake();
        }
        answer.await.unwrap_or_else(|_| {
            let ended = self.shared.queue().ended.clone();
            Err(Trouble::Broken(ended.unwrap_or_else(closed)))
        })
    }

    /// Room for one call more, where there is none. Who waits for it goes by the same limits as those who have it.
    async fn room(&self, limits: Limits) -> Result<OwnedSemaphorePermit, Trouble> {
        for until in [limits.patience.min(limits.deadline), limits.deadline] {
            if let Ok(room) = timeout_at(until, Arc::clone(&self.room).acquire_owned()).await {
                return room.map_err(|_| Trouble::Broken(closed()));
            }
            if self.is_silent(limits.silence) {
                return Err(Trouble::Broken(too_late()));
            }
        }
        Err(Trouble::Slow(too_late()))
    }

    /// Whether something has been unanswered so long while nothing came back.
    pub(crate) fn is_silent(&self, limit: Duration) -> bool {
        self.shared.silence() >= limit
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.shared.end(closed());
    }
}

impl Queue {
    /// Takes out the calls that were told that it is too late: what was not written by then never is.
    pub(crate) fn drop_late(&mut self) {
        let all = std::mem::take(&mut self.commands);
        let mut rest = all.bytes.as_slice();
        let Queue { commands, calls, .. } = self;
        calls.retain(|call| {
            let (own, others) = rest.split_at(call.size);
            rest = others;
            if call.caller.is_some() {
                commands.bytes.extend_from_slice(own);
                commands.count += call.expected;
            }
            call.caller.is_some()
        });
    }
}

impl Shared {
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.made.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    /// For how long something has been unanswered while nothing came back; zero if not.
    pub(crate) fn silence(&self) -> Duration {
        match self.silent_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Duration::from_millis(self.now().saturating_sub(since)),
        }
    }

    pub(crate) fn end(&self, refusal: Refusal) {
        let mut queue = self.queue();
        queue.ended.get_or_insert(refusal);
        queue.calls.clear();
        let driver = queue.driver.take();
        drop(queue);
        if let Some(driver) = driver {
            driver.wake();
        }
    }
}

/// A number that this process has not used before.
pub fn next_mark() -> [u8; 8] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes()
}

/// There is no answer in time.
pub fn too_late() -> Refusal {
    Refusal::new(ErrorKind::TimedOut, "the server did not answer in time")
}

/// There is no connection any more.
pub fn closed() -> Refusal {
    Refusal::new(ErrorKind::Unreachable, "the connection was closed")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;
    use crate::wire::parse;

    /// More than the wire holds, so that what comes after it is not written.
    const HUGE: usize = 64 << 10;

    fn pipe(replicas: Option<Replicas>) -> (Arc<Pipe>, DuplexStream) {
        let (ours, theirs) = duplex(4 << 10);
        let (pipe, driver) = Pipe::new(Box::new(ours), replicas);
        tokio::spawn(driver);
        (Arc::new(pipe), theirs)
    }

    fn limits(patience: u64, silence: u64, deadline: u64) -> Limits {
        let (now, millis) = (Instant::now(), Duration::from_millis);
        Limits { patience: now + millis(patience), silence: millis(silence), deadline: now + millis(deadline) }
    }

    /// The next commands that the calls' end wrote, at least so many.
    async fn commands(wire: &mut DuplexStream, count: usize) -> Vec<Vec<Vec<u8>>> {
        let (mut bytes, mut found) = (Vec::new(), Vec::new());
        while found.len() < count {
            // Commands have the form of replies.
            while let Some((Reply::List(words), length)) = parse(&bytes).unwrap() {
                let words = words.into_iter().map(|word| match word {
                    Reply::Bulk(bytes) => bytes,
                    other => panic!("{other:?}"),
                });
                found.push(words.collect());
                bytes.drain(..length);
            }
            if found.len() < count {
                wire.read_buf(&mut bytes).await.unwrap();
            }
        }
        found
    }

    fn set(commands: &mut Commands) {
        commands.add(&[b"SET", b"key", b"value"]);
    }

    fn always(_: &[Reply]) -> bool {
        true
    }

    /// A server answers `WAIT` up to 100 ms late; a connection on which it does so is not a dead one.
    #[tokio::test(start_paused = true)]
    async fn a_wait_that_the_server_ends_late_is_told_as_what_it_is() {
        for timeout in [300, 500, 2_000] {
            let at_most = Duration::from_millis(timeout / 4);
            let (pipe, mut wire) = pipe(Some(Replicas { count: 1, at_most }));
            let call = {
                let pipe = Arc::clone(&pipe);
                let limits = limits(timeout / 2, timeout / 4, timeout);
                tokio::spawn(async move { pipe.call(limits, Some(always), set).await })
            };
            let sent = commands(&mut wire, 4).await;
            let [first, second] = [&sent[1][1], &sent[3][1]];
            assert_eq!(sent[2], [b"WAIT".to_vec(), b"1".to_vec(), at_most.as_millis().to_string().into_bytes()]);
            wire.write_all(&[b"+OK\r\n$8\r\n", &first[..], b"\r\n"].concat()).await.unwrap();
            // sleeps: the time is not real
            sleep(at_most + WAIT_SLACK - Duration::from_millis(1)).await;
            wire.write_all(&[b":0\r\n$8\r\n", &second[..], b"\r\n"].concat()).await.unwrap();
            match call.await.unwrap() {
                Err(Trouble::Slow(refusal)) => assert_eq!(refusal.kind(), ErrorKind::Unreplicated, "{timeout} ms"),
                other => panic!("{timeout} ms: {other:?}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_was_given_up_before_it_was_written_is_never_sent() {
        let (pipe, mut wire) = pipe(None);
        let mut calls = JoinSet::new();
        let mut call = |name: &'static str, deadline| {
            let pipe = Arc::clone(&pipe);
            calls.spawn(async move {
                let value = vec![b'x'; if name == "huge" { HUGE } else { 8 }];
                let answer = pipe.call(limits(deadline, deadline, deadline), None, |commands| {
                    commands.add(&[b"SET", name.as_bytes(), &value]);
                });
                (name, answer.await.is_ok())
            })
        };
        call("huge", 10_000);
        tokio::task::yield_now().await;
        call("late", 100);
        call("patient", 10_000);
        call("later", 200);
        // sleeps: the time is not real
        sleep(Duration::from_millis(500)).await;
        assert_eq!(pipe.shared.queue().calls.len(), 1, "two were given up");
        let sent = commands(&mut wire, 3).await;
        let names: Vec<&[u8]> = sent.iter().map(|words| &words[1][..]).collect();
        assert!(matches!(names[..], [b"huge", b"patient", _mark]), "{names:?}");
        wire.write_all(&[b"+OK\r\n+OK\r\n$8\r\n", names[2], b"\r\n"].concat()).await.unwrap();
        let mut ends = calls.join_all().await;
        ends.sort_unstable();
        assert_eq!(ends, [("huge", true), ("late", false), ("later", false), ("patient", true)]);
        assert_eq!(pipe.room.available_permits(), CALLS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_unanswered_keeps_its_room_and_who_finds_none_is_told_in_time() {
        let (pipe, mut wire) = pipe(None);
        let mut calls = JoinSet::new();
        for _ in 0..CALLS_MAX {
            let pipe = Arc::clone(&pipe);
            calls.spawn(async move { pipe.call(limits(100, 50, 200), None, set).await.is_err() });
        }
        let reader = tokio::spawn(async move {
            let mut read = Vec::new();
            let _until_closed = wire.read_to_end(&mut read).await;
        });
        assert!(calls.join_all().await.into_iter().all(|failed| failed));
        assert_eq!(pipe.room.available_permits(), 0, "all were written, and the server may still work on them");
        let start = Instant::now();
        let answer = pipe.call(limits(100, 50, 200), None, set).await;
        assert!(matches!(answer, Err(Trouble::Broken(_))), "{answer:?}");
        assert!(start.elapsed() < Duration::from_millis(150), "{:?}", start.elapsed());
        drop(pipe);
        reader.await.unwrap();
    }
}
