//! The driver of a connection: writes what calls have queued, proves what comes back, and hands it out.
//!
//! One timer serves all calls: it looks for late ones every few milliseconds while there are calls, and rests when there
//! are none. A timer for each call would cost as much as the rest of it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::fault::Refusal;
use crate::pipe::{Call, Replicas, Shared, Trouble, WAIT_SLACK, Wire, closed, next_mark, too_late};
use crate::wire::{Commands, Digits, Reply, parse};

/// How many answers are handed out before the connection is looked after again: so the server works on the next
/// requests of the first callers while the last ones get their answers.
const ANSWERS_MAX: usize = 16;
/// How often late calls are looked for.
const TICK: Duration = Duration::from_millis(5);
/// How much is read at once.
const CHUNK: usize = 32 << 10;
/// A buffer that has grown beyond this is given back.
const BUFFER_KEEP: usize = 1 << 20;

/// What was written and is not answered.
enum Sent {
    /// `alone` if nothing else was unanswered when it was written.
    Call {
        call: Call,
        alone: bool,
    },
    Mark([u8; 8]),
    /// The question how many replicas have the writes before it.
    Wait,
}

/// Writes what is queued and hands out what is read, until the connection ends.
pub(crate) struct Driver {
    wire: Box<dyn Wire>,
    shared: Arc<Shared>,
    chunk: Box<[u8]>,
    unread: Vec<u8>,
    unwritten: Commands,
    written: usize,
    flushed: bool,
    sent: VecDeque<Sent>,
    /// Calls whose replies have come and wait for the mark behind them.
    unproven: Vec<Call>,
    /// Calls that can be answered.
    proven: VecDeque<Call>,
    replicas: Option<Replicas>,
    /// Whether the server was asked to wait, and has not answered.
    waits: bool,
    /// Writes that are done here, and are to reach replicas.
    waiting: Vec<Call>,
    /// What the server said of that, until it is proven.
    reached: Option<Result<(), Refusal>>,
    clock: Pin<Box<Sleep>>,
    ticking: bool,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let driver = &mut *self;
        let refusal = match ready!(driver.turn(context)) {
            Ok(()) => return Poll::Ready(()),
            Err(refusal) => refusal,
        };
        driver.shared.end(refusal);
        Poll::Ready(())
    }
}

impl Drop for Driver {
    /// The connection is over, also when its runtime is shut down. Callers see their senders dropped after this.
    fn drop(&mut self) {
        self.shared.end(closed());
    }
}

impl Driver {
    pub(crate) fn new(wire: Box<dyn Wire>, shared: Arc<Shared>, replicas: Option<Replicas>) -> Driver {
        Driver {
            wire,
            shared,
            chunk: vec![0; CHUNK].into_boxed_slice(),
            unread: Vec::new(),
            unwritten: Commands::default(),
            written: 0,
            flushed: true,
            sent: VecDeque::new(),
            unproven: Vec::new(),
            proven: VecDeque::new(),
            replicas,
            waits: false,
            waiting: Vec::new(),
            reached: None,
            clock: Box::pin(sleep_until(Instant::now())),
            ticking: false,
        }
    }

    /// Everything that can be done now. Ready with `Ok` when the connection is no longer wanted.
    fn turn(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Refusal>> {
        loop {
            let Some(took) = self.take(context) else { return Poll::Ready(Ok(())) };
            self.write(context)?;
            if self.answer() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            // Reading goes on while a write waits, or both sides could wait for each other for ever.
            if !self.read(context)? && !took {
                self.tick(context);
                return Poll::Pending;
            }
        }
    }

    /// Tells late callers, now and then, while there are any callers.
    fn tick(&mut self, context: &mut Context<'_>) {
        loop {
            if !self.ticking {
                if self.sent.is_empty() && self.unproven.is_empty() {
                    return;
                }
                self.clock.as_mut().reset(Instant::now() + TICK);
                self.ticking = true;
            }
            if self.clock.as_mut().poll(context).is_pending() {
                return;
            }
            self.ticking = false;
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        let (now, silence) = (Instant::now(), self.shared.silence());
        let mut queue = self.shared.queue();
        let sent = self.sent.iter_mut().filter_map(|sent| match sent {
            Sent::Call { call, .. } => Some(call),
            Sent::Mark(_) | Sent::Wait => None,
        });
        for call in sent.chain(&mut self.unproven).chain(&mut self.waiting).chain(&mut queue.calls) {
            let silent = silence >= call.limits.silence;
            if (now >= call.limits.deadline || (silent && now >= call.limits.patience))
                && let Some(caller) = call.caller.take()
            {
                let trouble = if silent { Trouble::Broken(too_late()) } else { Trouble::Slow(too_late()) };
                let _ = caller.send(Err(trouble));
            }
        }
        if queue.calls.iter().any(|call| call.caller.is_none()) {
            queue.drop_late();
        }
    }

    /// Takes what is queued if there is nothing left to write, else leaves word to be woken: whether it took something.
    /// `None` when the connection is no longer wanted.
    fn take(&mut self, context: &Context<'_>) -> Option<bool> {
        let mut queue = self.shared.queue();
        if queue.ended.is_some() {
            return None;
        }
        if queue.calls.is_empty() || self.written < self.unwritten.bytes.len() || self.waits {
            if !queue.driver.as_ref().is_some_and(|driver| driver.will_wake(context.waker())) {
                queue.driver = Some(context.waker().clone());
            }
            return Some(false);
        }
        self.unwritten.clear(BUFFER_KEEP);
        self.written = 0;
        std::mem::swap(&mut self.unwritten, &mut queue.commands);
        let replicas = self.replicas.filter(|_| queue.calls.iter().any(|call| call.wrote.is_some()));
        let alone = self.sent.is_empty() && queue.calls.len() == 1 && replicas.is_none();
        self.sent.extend(queue.calls.drain(..).map(|call| Sent::Call { call, alone }));
        drop(queue);
        if !alone {
            self.mark();
        }
        if let Some(Replicas { count, at_most }) = replicas {
            // Zero would be without an end.
            let at_most = u64::try_from(at_most.as_millis()).unwrap_or(u64::MAX).max(1);
            self.unwritten.add(&[b"WAIT", Digits::of(count.into()).as_bytes(), Digits::of(at_most).as_bytes()]);
            self.sent.push_back(Sent::Wait);
            self.waits = true;
            self.mark();
        }
        let _ = self.shared.silent_since.compare_exchange(0, self.shared.now(), Ordering::Relaxed, Ordering::Relaxed);
        Some(true)
    }

    fn mark(&mut self) {
        let mark = next_mark();
        self.unwritten.add(&[b"ECHO", &mark]);
        self.sent.push_back(Sent::Mark(mark));
    }

    fn write(&mut self, context: &mut Context<'_>) -> Result<(), Refusal> {
        while self.written < self.unwritten.bytes.len() {
            match Pin::new(&mut self.wire).poll_write(context, &self.unwritten.bytes[self.written..]) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(0)) => return Err(closed()),
                Poll::Ready(Ok(written)) => {
                    self.written += written;
                    self.flushed = false;
                }
                Poll::Ready(Err(error)) => return Err(Refusal::of_io(&error)),
            }
        }
        if !self.flushed
            && let Poll::Ready(flushed) = Pin::new(&mut self.wire).poll_flush(context)
        {
            flushed.map_err(|error| Refusal::of_io(&error))?;
            self.flushed = true;
        }
        Ok(())
    }

    /// Answers the next callers; true if there may be more of them.
    fn answer(&mut self) -> bool {
        let count = self.proven.len().min(ANSWERS_MAX);
        for call in self.proven.drain(..count) {
            if let Some(caller) = call.caller {
                // A caller that has gone needs no answer.
                let _ = caller.send(Ok(call.replies));
            }
        }
        count == ANSWERS_MAX
    }

    /// Reads what has arrived; false if that was nothing.
    fn read(&mut self, context: &mut Context<'_>) -> Result<bool, Refusal> {
        let mut buffer = ReadBuf::new(&mut self.chunk);
        match Pin::new(&mut self.wire).poll_read(context, &mut buffer) {
            Poll::Pending => return Ok(false),
            Poll::Ready(Err(error)) => return Err(Refusal::of_io(&error)),
            Poll::Ready(Ok(())) if buffer.filled().is_empty() => return Err(closed()),
            Poll::Ready(Ok(())) => {}
        }
        let mut unread = std::mem::take(&mut self.unread);
        unread.extend_from_slice(buffer.filled());
        let mut taken = 0;
        while let Some((reply, length)) = parse(&unread[taken..]).map_err(|_| Refusal::garbled())? {
            taken += length;
            self.hand_out(reply)?;
        }
        unread.drain(..taken);
        unread.shrink_to(BUFFER_KEEP);
        self.unread = unread;
        let since = match (self.sent.front(), self.replicas) {
            (None, _) => 0,
            // The server is silent until then because it was asked to wait.
            (Some(Sent::Wait), Some(Replicas { at_most, .. })) => {
                let waits = at_most + WAIT_SLACK;
                self.shared.now().saturating_add(u64::try_from(waits.as_millis()).unwrap_or(u64::MAX))
            }
            (Some(Sent::Wait | Sent::Call { .. } | Sent::Mark(_)), _) => self.shared.now(),
        };
        self.shared.silent_since.store(since, Ordering::Relaxed);
        Ok(true)
    }

    /// A mark has come back: what came before it is in step.
    fn prove(&mut self) {
        match self.reached.take() {
            None => {}
            Some(Ok(())) => self.proven.extend(self.waiting.drain(..)),
            Some(Err(refusal)) => {
                for caller in self.waiting.drain(..).filter_map(|call| call.caller) {
                    // A caller that has gone needs no answer.
                    let _ = caller.send(Err(Trouble::Slow(refusal.clone())));
                }
            }
        }
        let waits = matches!(self.sent.front(), Some(Sent::Wait));
        for call in self.unproven.drain(..) {
            if waits && call.wrote.is_some_and(|wrote| wrote(&call.replies)) {
                self.waiting.push(call);
            } else {
                self.proven.push_back(call);
            }
        }
    }

    /// Whether enough replicas have the writes, by the answer to `WAIT`. An error if the connection is of no more use.
    fn judge(&self, reply: &Reply) -> Result<Result<(), Refusal>, Refusal> {
        let asked = self.replicas.map_or(0, |replicas| replicas.count);
        match reply {
            Reply::Int(reached) if *reached >= i64::from(asked) => Ok(Ok(())),
            Reply::Int(reached) => Ok(Err(Refusal::unreplicated(*reached, asked))),
            // The primary has become a replica.
            Reply::Error(text) if text.starts_with("UNBLOCKED") => Err(Refusal::of_reply(text)),
            Reply::Error(text) => Ok(Err(Refusal::of_reply(text))),
            Reply::Status(_) | Reply::Bulk(_) | Reply::Nil | Reply::List(_) => Err(Refusal::out_of_step()),
        }
    }

    fn hand_out(&mut self, reply: Reply) -> Result<(), Refusal> {
        match self.sent.front_mut() {
            None => Err(match reply {
                // Such as: too many clients.
                Reply::Error(text) => Refusal::of_reply(&text),
                _ => Refusal::out_of_step(),
            }),
            Some(Sent::Mark(mark)) => {
                let fits = match &reply {
                    Reply::Bulk(bytes) => bytes == mark,
                    Reply::Error(text) => return Err(Refusal::of_reply(text)),
                    Reply::Status(_) | Reply::Int(_) | Reply::Nil | Reply::List(_) => false,
                };
                if !fits {
                    return Err(Refusal::out_of_step());
                }
                self.sent.pop_front();
                self.prove();
                Ok(())
            }
            Some(Sent::Wait) => {
                self.reached = Some(self.judge(&reply)?);
                self.waits = false;
                self.sent.pop_front();
                Ok(())
            }
            Some(Sent::Call { call, alone }) => {
                call.replies.push(reply);
                if call.replies.len() < call.expected {
                    return Ok(());
                }
                let alone = *alone;
                if let Some(Sent::Call { call, .. }) = self.sent.pop_front() {
                    // What was sent after it carries the mark that proves it.
                    if alone && self.sent.is_empty() {
                        self.proven.push_back(call);
                    } else {
                        self.unproven.push(call);
                    }
                }
                Ok(())
            }
        }
    }
}
