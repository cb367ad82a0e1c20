//! Calls of one kind that wait at the same time, joined into one statement: a desk.
//!
//! While one batch is on its way the next one gathers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::store::Swap;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use crate::fault::{Cause, Fault};
use crate::pool::Sent;
use crate::process::lock;
use crate::store::{Here, Inner};

/// The most calls that one statement carries.
const BATCH_MAX: usize = 1000;
/// The most bytes of records that one statement carries, but for its first: they are in memory several times while it is
/// made, and a batch that takes longer than a call's time does nothing.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// The most calls that may wait.
const QUEUE_MAX: usize = 100_000;

/// What stands in one line of a statement.
pub(crate) trait Line: Send + Sized + 'static {
    /// Whether the second of a key waits for the first. Else it is to be asked alone.
    const WAITS: bool;

    /// Where those of this kind gather.
    fn desk(here: &Here) -> &Desk<Self>;

    /// How many bytes it carries.
    fn bytes(&self) -> usize;

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
pub(crate) struct Desk<L> {
    queue: Mutex<Queue<L>>,
}

struct Queue<L> {
    waiting: VecDeque<Waiting<L>>,
    /// Whether a batch is on its way; who sends it sees to those who came meanwhile.
    is_sending: bool,
}

/// One call, and where its answer goes.
struct Waiting<L> {
    key: Key,
    line: L,
    reply: oneshot::Sender<Result<Asked>>,
}

impl<L> Default for Desk<L> {
    fn default() -> Desk<L> {
        Desk { queue: Mutex::new(Queue { waiting: VecDeque::new(), is_sending: false }) }
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
    let is_first = {
        let mut queue = lock(&L::desk(here).queue);
        if queue.waiting.len() >= QUEUE_MAX {
            let fault = Fault::new(ErrorKind::TimedOut, format!("{QUEUE_MAX} calls wait already"));
            return Err(inner.error(fault));
        }
        queue.waiting.push_back(Waiting { key: key.clone(), line, reply });
        !std::mem::replace(&mut queue.is_sending, true)
    };
    if is_first {
        // In a task of its own: the caller may stop waiting, and the others must not.
        let (inner, here) = (Arc::clone(inner), Arc::clone(here));
        tokio::spawn(async move { send_all::<L>(&inner, &here).await });
    }
    let late = timeout_at(deadline, answer).await;
    match late {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(inner.error(Fault::new(ErrorKind::Unreachable, "the runtime that asked has ended"))),
        Err(_) => Err(inner.error(Fault::late(inner.settings.timeout))),
    }
}

/// Sends batches until nobody waits.
async fn send_all<L: Line>(inner: &Inner, here: &Here) {
    // Those who ask in the same turn of the runtime come along.
    tokio::task::yield_now().await;
    let mut turn = Turn { desk: L::desk(here), is_over: false };
    loop {
        let batch = turn.take();
        if batch.is_empty() {
            return;
        }
        send(inner, here, batch).await;
    }
}

/// Who sends. If it ends in any other way than by an empty desk, the next call begins anew.
struct Turn<'desk, L> {
    desk: &'desk Desk<L>,
    is_over: bool,
}

impl<L: Line> Turn<'_, L> {
    /// What waits, each key once and in the order of the keys. An empty batch ends the turn.
    fn take(&mut self) -> BTreeMap<Key, Waiting<L>> {
        let mut queue = lock(&self.desk.queue);
        let mut batch = BTreeMap::new();
        let mut later = VecDeque::new();
        let mut bytes = 0;
        while batch.len() < BATCH_MAX
            && let Some(waiting) =
                queue.waiting.pop_front_if(|next| batch.is_empty() || bytes + next.line.bytes() <= BATCH_BYTES_MAX)
        {
            if waiting.reply.is_closed() {
                continue;
            }
            // One statement changes a key once.
            if batch.contains_key(&waiting.key) {
                if L::WAITS {
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
            queue.waiting.push_front(waiting);
        }
        if batch.is_empty() {
            queue.is_sending = false;
            self.is_over = true;
        }
        batch
    }
}

impl<L> Drop for Turn<'_, L> {
    fn drop(&mut self) {
        if !self.is_over {
            let mut queue = lock(&self.desk.queue);
            queue.is_sending = false;
            // Their callers are told that nobody answers.
            queue.waiting.clear();
        }
    }
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
        // One of them waited in vain, and nothing of this sending was stored: the others must not wait with it.
        Err(fault) if fault.cause == Cause::Locked => Vec::new(),
        Err(fault) => {
            let error = inner.error(fault);
            for reply in replies.into_values() {
                // A dropped future wants no answer.
                let _ = reply.send(Err(again(&error)));
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

/// The same error for another caller of the same batch.
fn again(error: &Error) -> Error {
    let text = error.to_string();
    let message = match error.subject() {
        Some(subject) => text.strip_prefix(subject).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&text),
        None => &text,
    };
    let copy = Error::new(error.kind(), message).with_hint(error.hint());
    match error.subject() {
        Some(subject) => copy.about(subject),
        None => copy,
    }
}

#[cfg(test)]
mod tests {
    use taskonce_core::key::Handler;

    use super::*;

    struct Load(usize);

    impl Line for Load {
        const WAITS: bool = false;

        fn desk(_: &Here) -> &Desk<Load> {
            unreachable!("nothing is sent")
        }

        fn bytes(&self) -> usize {
            self.0
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
            lock(&desk.queue).waiting.push_back(Waiting { key, line: Load(size), reply });
            answers.push(answer);
        }
        let mut turn = Turn { desk: &desk, is_over: false };
        let taken: Vec<usize> = std::iter::repeat_with(|| turn.take().len()).take(4).collect();
        assert_eq!(taken, [1, 2, 2, 0], "of {} calls", answers.len());
    }

    /// Ten thousand duplicates of one new task went one statement after the other, and each looked through all the others.
    #[test]
    fn those_of_one_key_do_not_wait_for_each_other() {
        let key = Handler::new("h", "1").unwrap().key("a").unwrap();
        let desk = Desk::default();
        let mut answers = Vec::new();
        for _ in 0..5 {
            let (reply, answer) = oneshot::channel();
            lock(&desk.queue).waiting.push_back(Waiting { key: key.clone(), line: Load(1), reply });
            answers.push(answer);
        }
        let mut turn = Turn { desk: &desk, is_over: false };
        assert_eq!(turn.take().len(), 1);
        for mut answer in answers.drain(1..) {
            assert!(matches!(answer.try_recv(), Ok(Ok(Asked::Alone(Sent::Once)))));
        }
        assert!(turn.take().is_empty());
    }
}
