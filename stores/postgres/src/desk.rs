//! Calls of one kind that wait at the same time, joined into one statement: a desk.
//!
//! While one statement is on its way the next ones gather, and go together when it has been answered, or when they are
//! many. Small statements side by side would cost the server more than one for all.

use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::store::Swap;
use tokio::runtime::Handle;
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
/// How many calls that wait go without waiting longer for the statements that are on their way: where the server is far, many
/// calls must not take turns.
const GATHERED_MIN: usize = 8;
/// The most statements of one desk that are on their way at once.
const UNDER_WAY_MAX: usize = 4;

/// What stands in one line of a statement.
pub(crate) trait Line: Send + Sized + 'static {
    /// Whether they go by the statement of many only: one that is the only one, too, and the second of a key after the first.
    /// Else such a one is to be asked alone.
    const SHARED: bool;

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
pub(crate) enum Asked<L: Line> {
    /// This.
    Answered(Swap),
    /// Nothing can be said of it: it is to be asked alone, having been sent so often.
    Alone(Sent),
    /// No other waited: it is to be asked alone, and others gather until then.
    First(Turn<L>),
}

/// The calls of one process and runtime that wait.
pub(crate) struct Desk<L: Line> {
    queue: Mutex<Queue<L>>,
}

struct Queue<L: Line> {
    waiting: VecDeque<Waiting<L>>,
    /// Turns that were taken; who ends one sees to those who came meanwhile.
    under_way: usize,
}

/// One call, and where its answer goes.
struct Waiting<L: Line> {
    key: Key,
    line: L,
    reply: oneshot::Sender<Result<Asked<L>>>,
}

impl<L: Line> Default for Desk<L> {
    fn default() -> Desk<L> {
        Desk { queue: Mutex::new(Queue { waiting: VecDeque::new(), under_way: 0 }) }
    }
}

/// The right to send alone, if nothing of this kind is on its way.
pub(crate) fn first<L: Line>(here: &Arc<Here>, inner: &Arc<Inner>) -> Option<Turn<L>> {
    let mut queue = lock(&L::desk(here).queue);
    let is_first = queue.under_way == 0 && queue.waiting.is_empty();
    is_first.then(|| {
        queue.under_way = 1;
        Turn { inner: Arc::clone(inner), here: Arc::clone(here), is: Is::Alone, kind: PhantomData }
    })
}

/// Asks for one line, together with those that wait at the same time.
pub(crate) async fn ask<L: Line>(
    inner: &Arc<Inner>,
    here: &Arc<Here>,
    key: &Key,
    line: L,
    deadline: Instant,
) -> Result<Asked<L>> {
    let (reply, answer) = oneshot::channel();
    let is_sender = {
        let mut queue = lock(&L::desk(here).queue);
        if queue.waiting.len() >= QUEUE_MAX {
            let fault = Fault::new(ErrorKind::TimedOut, format!("{QUEUE_MAX} calls wait already"));
            return Err(inner.error(fault));
        }
        queue.waiting.push_back(Waiting { key: key.clone(), line, reply });
        queue.admit_sender()
    };
    if is_sender {
        Turn::<L> { inner: Arc::clone(inner), here: Arc::clone(here), is: Is::Sending, kind: PhantomData }.begin();
    }
    let late = timeout_at(deadline, answer).await;
    match late {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(inner.error(Fault::new(ErrorKind::Unreachable, "the runtime that asked has ended"))),
        Err(_) => Err(inner.error(Fault::late(inner.settings.timeout))),
    }
}

impl<L: Line> Queue<L> {
    /// Whether one more is to send those that wait.
    fn admit_sender(&mut self) -> bool {
        let are_many = !L::SHARED && self.waiting.len() >= GATHERED_MIN && self.under_way < UNDER_WAY_MAX;
        let is_admitted = self.under_way == 0 || are_many;
        self.under_way += usize::from(is_admitted);
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
            self.waiting.push_front(waiting);
        }
        batch
    }
}

/// One of the few who may send. Those who come meanwhile are seen to when it ends, in whichever way.
pub(crate) struct Turn<L: Line> {
    inner: Arc<Inner>,
    here: Arc<Here>,
    is: Is,
    kind: PhantomData<fn() -> L>,
}

/// Who has a turn.
#[derive(PartialEq, Eq)]
enum Is {
    /// A call that sends its own line.
    Alone,
    /// The task that sends those of others.
    Sending,
    /// Nobody any more.
    Over,
}

impl<L: Line> Turn<L> {
    /// Sends in a task of its own: callers may stop waiting, and the others must not.
    fn begin(self) {
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(self.send_all())),
            Err(_) => drop(self),
        }
    }

    /// Sends batches until nobody waits.
    async fn send_all(mut self) {
        // Those who ask in the same turn of the runtime come along.
        tokio::task::yield_now().await;
        loop {
            let mut batch = self.take();
            if !L::SHARED
                && batch.len() == 1
                && let Some((_, only)) = batch.pop_first()
            {
                self.is = Is::Alone;
                // Where it waits no longer, the turn comes back and goes on.
                drop(only.reply.send(Ok(Asked::First(self))));
                return;
            }
            if batch.is_empty() {
                return;
            }
            send(&self.inner, &self.here, batch).await;
        }
    }

    /// What waits. An empty batch ends the turn.
    fn take(&mut self) -> BTreeMap<Key, Waiting<L>> {
        let mut queue = lock(&L::desk(&self.here).queue);
        let batch = queue.take();
        if batch.is_empty() {
            queue.under_way -= 1;
            self.is = Is::Over;
        }
        batch
    }
}

impl<L: Line> Drop for Turn<L> {
    fn drop(&mut self) {
        match self.is {
            Is::Over => {}
            Is::Alone => {
                let others_wait = {
                    let mut queue = lock(&L::desk(&self.here).queue);
                    let others_wait = !queue.waiting.is_empty();
                    queue.under_way -= usize::from(!others_wait);
                    others_wait
                };
                if others_wait {
                    let (inner, here) = (Arc::clone(&self.inner), Arc::clone(&self.here));
                    Turn::<L> { inner, here, is: Is::Sending, kind: PhantomData }.begin();
                }
            }
            // The runtime has ended. The callers are told that nobody answers.
            Is::Sending => {
                let mut queue = lock(&L::desk(&self.here).queue);
                queue.under_way -= 1;
                queue.waiting.clear();
            }
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
        let taken: Vec<usize> = std::iter::repeat_with(|| lock(&desk.queue).take().len()).take(4).collect();
        assert_eq!(taken, [1, 2, 2, 0], "of {} calls", answers.len());
    }

    #[test]
    fn few_wait_for_what_is_on_its_way_and_many_do_not() {
        let desk = Desk::<Load>::default();
        let mut queue = lock(&desk.queue);
        let key = Handler::new("h", "1").unwrap().key("a").unwrap();
        let mut starts = Vec::new();
        for number in 1..=UNDER_WAY_MAX + GATHERED_MIN {
            let (reply, _) = oneshot::channel();
            queue.waiting.push_back(Waiting { key: key.clone(), line: Load(1), reply });
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
            lock(&desk.queue).waiting.push_back(Waiting { key: key.clone(), line: Load(1), reply });
            answers.push(answer);
        }
        assert_eq!(lock(&desk.queue).take().len(), 1);
        for mut answer in answers.drain(1..) {
            assert!(matches!(answer.try_recv(), Ok(Ok(Asked::Alone(Sent::Once)))));
        }
        assert!(lock(&desk.queue).take().is_empty());
    }
}
