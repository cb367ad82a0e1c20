//! Calls of one kind that wait at the same time, joined into one statement: a desk.
//!
//! While one statement is on its way the next ones gather, and go together when it has been answered, or when they are
//! many. Small statements side by side would cost the server more than one for all.

use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::Token;
use taskonce_core::store::Swap;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use crate::fault::{Cause, Fault};
use crate::pool::Sent;
use crate::process::lock;
use crate::store::{Here, Inner, Judged, Write, judge};

/// The most calls that one statement carries.
const BATCH_MAX: usize = 1000;
/// The most bytes of records that one statement carries, but for its first: they are in memory several times while it is
/// made, and a batch that takes longer than a call's time does nothing.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// The most calls that may wait, and the most bytes that they may carry but for the first.
const QUEUE_MAX: usize = 100_000;
const QUEUE_BYTES_MAX: usize = 256 * 1024 * 1024;
/// How many calls that wait go without waiting longer for the statements that are on their way: where the server is far, many
/// calls must not take turns.
const GATHERED_MIN: usize = 8;
/// The most statements of one desk that are on their way at once.
const UNDER_WAY_MAX: usize = 4;
/// How long those that wait leave it to the senders that are under way: longer than a statement takes that is not held up.
const PATIENCE: Duration = Duration::from_millis(50);

/// What stands in one line of a statement.
pub(crate) trait Line: Send + Sized + 'static {
    /// Whether they go by the statement of many only: one that is the only one, too, and the second of a key after the first.
    /// Else such a one is to be asked alone.
    const SHARED: bool;

    /// Where those of this kind gather.
    fn desk(here: &Here) -> &Desk<Self>;

    /// How many bytes it carries.
    fn bytes(&self) -> usize;

    /// What it expects and writes, where a statement of one does it.
    fn alone(&self) -> Option<(Option<Token>, Write<'_>)>;

    /// The rows of the statement for these: the first column is the key. Notes when it was sent again.
    fn ask(
        here: &Here,
        batch: &BTreeMap<Key, Self>,
        sent: &mut Sent,
    ) -> impl Future<Output = Result<Vec<Row>, Fault>> + Send;

    /// What the row of its key says. `None`: it is to be asked alone.
    fn judge(&self, key: &Key, row: &Row) -> Result<Option<Swap>>;
}

/// What a call that waited with others came to.
pub(crate) enum Asked {
    /// This.
    Answered(Swap),
    /// Nothing can be said of it: it is to be asked alone, having been sent so often.
    Alone(Sent),
}

/// The calls of one process and runtime that wait.
pub(crate) struct Desk<L: Line> {
    queue: Mutex<Queue<L>>,
}

struct Queue<L: Line> {
    waiting: VecDeque<Waiting<L>>,
    /// What they carry.
    bytes: usize,
    /// Senders that are under way; each sees to those who came meanwhile.
    under_way: usize,
    /// When the last of them took what it sends.
    left: Instant,
}

/// One call, and where its answer goes.
struct Waiting<L: Line> {
    key: Key,
    line: L,
    reply: oneshot::Sender<Result<Asked>>,
}

impl<L: Line> Default for Desk<L> {
    fn default() -> Desk<L> {
        Desk { queue: Mutex::new(Queue { waiting: VecDeque::new(), bytes: 0, under_way: 0, left: Instant::now() }) }
    }
}

/// The right of a caller to send its own line, while others gather. Nothing of this kind is under way.
pub(crate) fn first<L: Line>(inner: &Arc<Inner>, here: &Arc<Here>) -> Option<Turn<L>> {
    let mut queue = lock(&L::desk(here).queue);
    let is_first = queue.under_way == 0 && queue.waiting.is_empty();
    is_first.then(|| {
        queue.under_way = 1;
        queue.left = Instant::now();
        Turn { inner: Arc::clone(inner), here: Arc::clone(here), kind: PhantomData }
    })
}

/// A caller that sends its own line. The others wait for it, but not long: it may be polled no more.
pub(crate) struct Turn<L: Line> {
    inner: Arc<Inner>,
    here: Arc<Here>,
    kind: PhantomData<fn() -> L>,
}

impl<L: Line> Drop for Turn<L> {
    fn drop(&mut self) {
        lock(&L::desk(&self.here).queue).under_way -= 1;
        // Outside of a runtime those who wait see to it themselves.
        if Handle::try_current().is_ok() {
            Sender::<L>::begin_if_needed(&self.inner, &self.here);
        }
    }
}

/// Asks for one line, together with those that wait at the same time.
pub(crate) async fn ask<L: Line>(
    inner: &Arc<Inner>,
    here: &Arc<Here>,
    key: &Key,
    line: L,
    deadline: Instant,
) -> Result<Asked> {
    let (reply, answer) = oneshot::channel();
    {
        let mut queue = lock(&L::desk(here).queue);
        if !queue.push(Waiting { key: key.clone(), line, reply }) {
            let what = format!("{} calls with {} bytes wait already", queue.waiting.len(), queue.bytes);
            return Err(inner.error(Fault::new(ErrorKind::TimedOut, what)));
        }
    }
    Sender::<L>::begin_if_needed(inner, here);
    let mut answer = pin!(answer);
    let answered = loop {
        let soon = deadline.min(Instant::now() + PATIENCE);
        match timeout_at(soon, &mut answer).await {
            // Those who are under way may be held up: a server that hangs, a call that nobody polls.
            Err(_) if soon < deadline => Sender::<L>::begin_if_needed(inner, here),
            answered => break answered,
        }
    };
    match answered {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(inner.error(Fault::new(ErrorKind::Unreachable, "the runtime that asked has ended"))),
        Err(_) => Err(inner.error(Fault::late(inner.settings.timeout))),
    }
}

impl<L: Line> Queue<L> {
    /// Lets one more wait, if there is room.
    fn push(&mut self, waiting: Waiting<L>) -> bool {
        let bytes = self.bytes + waiting.line.bytes();
        let has_room = self.waiting.is_empty() || (self.waiting.len() < QUEUE_MAX && bytes <= QUEUE_BYTES_MAX);
        if has_room {
            self.bytes = bytes;
            self.waiting.push_back(waiting);
        }
        has_room
    }

    /// Whether one more is to send those that wait.
    fn admit_sender(&mut self) -> bool {
        let are_many = !L::SHARED && self.waiting.len() >= GATHERED_MIN && self.under_way < UNDER_WAY_MAX;
        let is_needed = self.under_way == 0 || are_many || self.left.elapsed() >= PATIENCE;
        let is_admitted = !self.waiting.is_empty() && is_needed;
        if is_admitted {
            self.under_way += 1;
            self.left = Instant::now();
        }
        is_admitted
    }

    /// What waits, each key once and in the order of the keys.
    fn take(&mut self) -> BTreeMap<Key, Waiting<L>> {
        let mut batch = BTreeMap::new();
        let mut later = VecDeque::new();
        let mut bytes = 0;
        while batch.len() < BATCH_MAX
            && let Some(waiting) =
                self.waiting.pop_front_if(|next| batch.is_empty() || bytes + next.line.bytes() <= BATCH_BYTES_MAX)
        {
            self.bytes -= waiting.line.bytes();
            if waiting.reply.is_closed() {
                continue;
            }
            // One statement changes a key once.
            if batch.contains_key(&waiting.key) {
                if L::SHARED {
                    later.push_back(waiting);
                } else {
                    let _ = waiting.reply.send(Ok(Asked::Alone(Sent::Once)));
                }
            } else {
                bytes += waiting.line.bytes();
                batch.insert(waiting.key.clone(), waiting);
            }
        }
        while let Some(waiting) = later.pop_back() {
            self.bytes += waiting.line.bytes();
            self.waiting.push_front(waiting);
        }
        batch
    }
}

/// A task that sends what waits: callers may stop waiting, or be polled no more, and the others must not.
struct Sender<L: Line> {
    inner: Arc<Inner>,
    here: Arc<Here>,
    /// Whether it ended since nobody waited any more.
    is_over: bool,
    kind: PhantomData<fn() -> L>,
}

impl<L: Line> Sender<L> {
    fn begin_if_needed(inner: &Arc<Inner>, here: &Arc<Here>) {
        if lock(&L::desk(here).queue).admit_sender() {
            let (inner, here) = (Arc::clone(inner), Arc::clone(here));
            let sender = Sender::<L> { inner, here, is_over: false, kind: PhantomData };
            tokio::spawn(sender.send_all());
        }
    }

    /// Sends batches until nobody waits.
    async fn send_all(mut self) {
        loop {
            let mut batch = self.take();
            if batch.is_empty() {
                return;
            }
            match batch.pop_first() {
                Some((key, only)) if batch.is_empty() && !L::SHARED => {
                    send_one(&self.inner, &self.here, &key, only).await;
                }
                Some((key, first)) => {
                    batch.insert(key, first);
                    send(&self.inner, &self.here, batch).await;
                }
                None => {}
            }
        }
    }

    /// What waits. An empty batch is the end.
    fn take(&mut self) -> BTreeMap<Key, Waiting<L>> {
        let mut queue = lock(&L::desk(&self.here).queue);
        let batch = queue.take();
        if batch.is_empty() {
            queue.under_way -= 1;
            self.is_over = true;
        } else {
            queue.left = Instant::now();
        }
        batch
    }
}

impl<L: Line> Drop for Sender<L> {
    fn drop(&mut self) {
        if !self.is_over {
            // The runtime has ended. The callers are told that nobody answers.
            let mut queue = lock(&L::desk(&self.here).queue);
            queue.under_way -= 1;
            queue.bytes = 0;
            queue.waiting.clear();
        }
    }
}

/// Sends the only one that waits, by the statement of one.
async fn send_one<L: Line>(inner: &Inner, here: &Here, key: &Key, only: Waiting<L>) {
    let Some((expected, write)) = only.line.alone() else { return };
    let mut sent = Sent::Once;
    let asked = match write.ask(here, &mut sent, key, expected, here.pool.deadline()).await {
        Ok(rows) if rows.is_empty() => Ok(Asked::Alone(sent)),
        Ok(rows) => judge(key, expected, write.token(), &rows).map(|judged| match judged {
            Judged::Swap(swap) => Asked::Answered(swap),
            Judged::Unclear(_) => Asked::Alone(sent),
        }),
        Err(fault) if matches!(fault.cause, Cause::Locked | Cause::Refused) => Ok(Asked::Alone(sent)),
        Err(fault) => Err(inner.error(fault)),
    };
    // A dropped future wants no answer.
    let _ = only.reply.send(asked);
}

async fn send<L: Line>(inner: &Inner, here: &Here, batch: BTreeMap<Key, Waiting<L>>) {
    let mut replies = BTreeMap::new();
    let mut lines = BTreeMap::new();
    for (key, waiting) in batch {
        replies.insert(key.clone(), waiting.reply);
        lines.insert(key, waiting.line);
    }
    let mut sent = Sent::Once;
    let rows = match L::ask(here, &lines, &mut sent).await {
        Ok(rows) => rows,
        // One of them waited in vain or was refused, and nothing of this sending was stored: the others must not go with it.
        Err(fault) if matches!(fault.cause, Cause::Locked | Cause::Refused) => Vec::new(),
        Err(fault) => {
            let error = inner.error(fault);
            for reply in replies.into_values() {
                // A dropped future wants no answer.
                let _ = reply.send(Err(error.again()));
            }
            return;
        }
    };
    for row in rows {
        let Ok(Some(key)) = row.try_get::<_, &str>(0).map(|name| Key::parse(name).ok()) else { continue };
        if let (Some(reply), Some(line)) = (replies.remove(&key), lines.get(&key)) {
            let judged = line.judge(&key, &row);
            let _ = reply.send(judged.map(|swap| swap.map_or(Asked::Alone(sent), Asked::Answered)));
        }
    }
    // What has no row is asked for alone.
    for reply in replies.into_values() {
        let _ = reply.send(Ok(Asked::Alone(sent)));
    }
}

#[cfg(test)]
mod tests {
    use taskonce_core::key::Handler;

    use super::*;

    struct Load(usize);

    impl Line for Load {
        const SHARED: bool = false;

        fn desk(_: &Here) -> &Desk<Load> {
            unreachable!("nothing is sent")
        }

        fn bytes(&self) -> usize {
            self.0
        }

        fn alone(&self) -> Option<(Option<Token>, Write<'_>)> {
            None
        }

        async fn ask(_: &Here, _: &BTreeMap<Key, Load>, _: &mut Sent) -> Result<Vec<Row>, Fault> {
            Ok(Vec::new())
        }

        fn judge(&self, _: &Key, _: &Row) -> Result<Option<Swap>> {
            Ok(None)
        }
    }

    #[test]
    fn a_batch_ends_at_its_most_bytes_and_its_first_always_goes() {
        let handler = Handler::new("h", "1").unwrap();
        let desk = Desk::default();
        let sizes = [2 * BATCH_BYTES_MAX, BATCH_BYTES_MAX / 2, BATCH_BYTES_MAX / 2, 1, 1];
        let mut answers = Vec::new();
        for (number, size) in sizes.into_iter().enumerate() {
            let (reply, answer) = oneshot::channel();
            let key = handler.key(&number.to_string()).unwrap();
            lock(&desk.queue).push(Waiting { key, line: Load(size), reply });
            answers.push(answer);
        }
        let taken: Vec<usize> = std::iter::repeat_with(|| lock(&desk.queue).take().len()).take(4).collect();
        assert_eq!(taken, [1, 2, 2, 0], "of {} calls", answers.len());
    }

    #[test]
    fn calls_that_carry_too_much_are_refused_and_not_kept() {
        let key = Handler::new("h", "1").unwrap().key("a").unwrap();
        let desk = Desk::default();
        let mut queue = lock(&desk.queue);
        let mut push = |bytes| {
            let (reply, _) = oneshot::channel();
            queue.push(Waiting { key: key.clone(), line: Load(bytes), reply })
        };
        assert!(push(QUEUE_BYTES_MAX + 1), "the first always");
        assert!(!push(1));
        assert!(queue.take().is_empty() && queue.bytes == 0, "its caller has gone");
    }

    #[test]
    fn few_wait_for_what_is_on_its_way_and_many_do_not() {
        let desk = Desk::<Load>::default();
        let mut queue = lock(&desk.queue);
        let key = Handler::new("h", "1").unwrap().key("a").unwrap();
        let mut starts = Vec::new();
        for number in 1..=UNDER_WAY_MAX + GATHERED_MIN {
            let (reply, _) = oneshot::channel();
            queue.push(Waiting { key: key.clone(), line: Load(1), reply });
            if queue.admit_sender() {
                starts.push(number);
            }
        }
        assert_eq!(starts[..2], [1, GATHERED_MIN]);
        assert_eq!((starts.len(), queue.under_way), (UNDER_WAY_MAX, UNDER_WAY_MAX));
    }

    /// Ten thousand duplicates of one new task went one statement after the other, and each looked through all the others.
    #[test]
    fn those_of_one_key_do_not_wait_for_each_other() {
        let key = Handler::new("h", "1").unwrap().key("a").unwrap();
        let desk = Desk::default();
        let mut answers = Vec::new();
        for _ in 0..5 {
            let (reply, answer) = oneshot::channel();
            lock(&desk.queue).push(Waiting { key: key.clone(), line: Load(1), reply });
            answers.push(answer);
        }
        assert_eq!(lock(&desk.queue).take().len(), 1);
        for mut answer in answers.drain(1..) {
            assert!(matches!(answer.try_recv(), Ok(Ok(Asked::Alone(Sent::Once)))));
        }
        assert!(lock(&desk.queue).take().is_empty());
    }
}
