//! Heartbeats that wait at the same time, joined into one statement.
//!
//! While one batch is on its way the next one gathers. What another transaction holds is passed over, so that a claim whose
//! completion is under way costs the others nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::{Fence, Token};
use taskonce_core::store::Swap;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::fault::Fault;
use crate::process::lock;
use crate::row;
use crate::sql::Verb;
use crate::store::{Here, Inner, misread};

/// The most claims that one statement renews.
const BATCH_MAX: usize = 1000;
/// The most bytes of records that one statement carries, but for its first: they are in memory several times while it is
/// made, and a batch that takes longer than a call's time renews nothing.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// The most renewals that may wait.
const QUEUE_MAX: usize = 100_000;

/// The renewals of one process and runtime.
#[derive(Default)]
pub(crate) struct Renewals {
    desk: Mutex<Desk>,
}

#[derive(Default)]
struct Desk {
    waiting: VecDeque<Renewal>,
    /// Whether a batch is on its way; who sends it sees to those who came meanwhile.
    is_sending: bool,
}

/// One claim to renew.
struct Renewal {
    key: Key,
    expected: Token,
    token: Token,
    body: Vec<u8>,
    reply: oneshot::Sender<Result<Swap>>,
}

impl Renewals {
    /// Renews one claim, together with those that wait at the same time.
    pub(crate) async fn renew(
        &self,
        inner: &Arc<Inner>,
        here: &Arc<Here>,
        key: &Key,
        expected: Token,
        body: Vec<u8>,
        token: Token,
    ) -> Result<Swap> {
        let (reply, answer) = oneshot::channel();
        let is_first = {
            let mut desk = lock(&self.desk);
            if desk.waiting.len() >= QUEUE_MAX {
                let fault = Fault::new(ErrorKind::TimedOut, format!("{QUEUE_MAX} renewals wait already"));
                return Err(inner.error(fault));
            }
            desk.waiting.push_back(Renewal { key: key.clone(), expected, token, body, reply });
            !std::mem::replace(&mut desk.is_sending, true)
        };
        if is_first {
            // In a task of its own: the caller may stop waiting, and the others must not.
            let (inner, here) = (Arc::clone(inner), Arc::clone(here));
            tokio::spawn(async move { here.renewals.send_all(&inner, &here).await });
        }
        let late = tokio::time::timeout(inner.settings.timeout, answer).await;
        match late {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(inner.error(Fault::new(ErrorKind::Unreachable, "the runtime that renewed has ended"))),
            Err(_) => Err(inner.error(Fault::late(inner.settings.timeout))),
        }
    }

    /// Sends batches until nobody waits.
    async fn send_all(&self, inner: &Inner, here: &Here) {
        // Those who are asked for in the same turn of the runtime come along.
        tokio::task::yield_now().await;
        let mut turn = Turn { desk: &self.desk, is_over: false };
        loop {
            let batch = turn.take();
            if batch.is_empty() {
                return;
            }
            send(inner, here, batch).await;
        }
    }
}

/// Who sends. If it ends in any other way than by an empty desk, the next renewal begins anew.
struct Turn<'desk> {
    desk: &'desk Mutex<Desk>,
    is_over: bool,
}

impl Turn<'_> {
    /// What waits, each key once and in the order of the keys. An empty batch ends the turn.
    fn take(&mut self) -> BTreeMap<Key, Renewal> {
        let mut desk = lock(self.desk);
        let mut batch = BTreeMap::new();
        let mut later = VecDeque::new();
        let mut bytes = 0;
        while batch.len() < BATCH_MAX
            && let Some(renewal) =
                desk.waiting.pop_front_if(|next| batch.is_empty() || bytes + next.body.len() <= BATCH_BYTES_MAX)
        {
            if renewal.reply.is_closed() {
                continue;
            }
            // Two tokens of one key cannot both be there.
            if batch.contains_key(&renewal.key) {
                later.push_back(renewal);
            } else {
                bytes += renewal.body.len();
                batch.insert(renewal.key.clone(), renewal);
            }
        }
        while let Some(renewal) = later.pop_back() {
            desk.waiting.push_front(renewal);
        }
        if batch.is_empty() {
            desk.is_sending = false;
            self.is_over = true;
        }
        batch
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let mut desk = lock(self.desk);
            desk.is_sending = false;
            // Their callers are told that nobody answers.
            desk.waiting.clear();
        }
    }
}

async fn send(inner: &Inner, here: &Here, mut batch: BTreeMap<Key, Renewal>) {
    let keys: Vec<&str> = batch.keys().map(Key::as_str).collect();
    let expected: Vec<Uuid> = batch.values().map(|renewal| Uuid::from_bytes(renewal.expected.0)).collect();
    let tokens: Vec<Uuid> = batch.values().map(|renewal| Uuid::from_bytes(renewal.token.0)).collect();
    let bodies: Vec<&[u8]> = batch.values().map(|renewal| renewal.body.as_slice()).collect();
    let asked = here.pool.ask(Verb::Renew, &[&keys, &expected, &tokens, &bodies], here.pool.deadline()).await;
    let rows = match asked {
        Ok(rows) => rows,
        Err(fault) => {
            let error = inner.error(fault);
            for renewal in batch.into_values() {
                // A dropped future wants no answer.
                let _ = renewal.reply.send(Err(again(&error)));
            }
            return;
        }
    };
    for row in rows {
        let Ok(Some(renewal)) =
            row.try_get::<_, &str>(0).map(|name| Key::parse(name).ok().and_then(|key| batch.remove(&key)))
        else {
            continue;
        };
        let answer = judge(&renewal, &row);
        let _ = renewal.reply.send(answer);
    }
    // Each key that was asked for has a row; what has none is told that nobody answered.
}

fn judge(renewal: &Renewal, row: &tokio_postgres::Row) -> Result<Swap> {
    let misread = |error: tokio_postgres::Error| misread(&renewal.key, &error);
    if let Some(fence) = row.try_get::<_, Option<i64>>(1).map_err(misread)? {
        return Ok(Swap::Stored(Fence(u64::try_from(fence).unwrap_or(0))));
    }
    if row.try_get::<_, Option<i16>>(2).map_err(misread)?.is_none() {
        return Ok(Swap::Conflict(None));
    }
    let found = row::found(&renewal.key, row, 2)?;
    Ok(if found.record.token == renewal.token {
        Swap::Stored(found.record.fence)
    } else if found.record.token == renewal.expected {
        // It was passed over: a transaction holds it, and may be completing it.
        Swap::Locked(Some(found))
    } else {
        Swap::Conflict(Some(found))
    })
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

    #[test]
    fn a_batch_ends_at_its_most_bytes_and_its_first_always_goes() {
        let handler = Handler::new("h", "1").unwrap();
        let desk = Mutex::new(Desk::default());
        let sizes = [2 * BATCH_BYTES_MAX, BATCH_BYTES_MAX / 2, BATCH_BYTES_MAX / 2, 1, 1];
        let mut answers = Vec::new();
        for (number, size) in sizes.into_iter().enumerate() {
            let (reply, answer) = oneshot::channel();
            let key = handler.key(&number.to_string()).unwrap();
            let (expected, token) = (Token::from(1), Token::from(2));
            lock(&desk).waiting.push_back(Renewal { key, expected, token, body: vec![0; size], reply });
            answers.push(answer);
        }
        let mut turn = Turn { desk: &desk, is_over: false };
        let taken: Vec<usize> = std::iter::repeat_with(|| turn.take().len()).take(4).collect();
        assert_eq!(taken, [1, 2, 2, 0], "of {} renewals", answers.len());
    }
}
