//! What people ask of a ledger: what happened to a key, which tasks there are, and changes by hand.
//!
//! Every change names the version of the record that it saw, and is kept in its history.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::decide::{self, Ask, By};
use crate::error::{Error, ErrorKind, Result};
use crate::held::stamp;
use crate::key::{Fingerprint, Handler, Key};
use crate::ledger::Ledger;
use crate::policy::{Effect, OUTPUT_LIMIT, Policy};
use crate::record::{ClaimId, Event, EventKind, Found, Output, Record, State};
use crate::step::{self, STEPS_BYTES_MAX};
use crate::store::{Cursor, Expected, Filter, Next, Row, Store, Swap};

/// How often one change looks again when others change the record between its look and its write.
const CHANGE_TRIES_MAX: usize = 16;

impl Ledger {
    /// What is remembered of a task.
    ///
    /// # Errors
    /// The store's.
    pub async fn show(&self, key: &Key) -> Result<Option<Found>> {
        self.store().load(key).await
    }

    /// The note that a person left who cleared this task, if one did and it is still kept.
    ///
    /// # Errors
    /// The store's.
    pub async fn cleared(&self, key: &Key) -> Result<Option<Found>> {
        self.store().load(&clear_note_key(key)?).await
    }

    /// Walks over the records that match, page by page: over all that there are, or with
    /// [`Filter::listed`](crate::store::Filter::listed) over those in rare states, without looking at the others.
    #[must_use]
    pub fn walk(&self, filter: Filter) -> Walk {
        Walk {
            store: Arc::clone(self.store()),
            filter,
            cursor: None,
            ended: false,
            hasher: RandomState::new(),
            seen: HashSet::new(),
        }
    }

    /// Returns a dead or parked task to work, or ends the delay of a waiting one; the counters begin again, the history
    /// stays. A running task whose lease has passed has crashed, and is redriven too; with an unrepeatable effect it is
    /// parked instead, as the answer's state says: whether it took effect must be resolved first.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::WrongState`], or the store's.
    pub async fn redrive(&self, key: &Key, by: By<'_>) -> Result<Arc<Record>> {
        self.change(key, "redriven", |found| Ok(decide::redrive(found, by, stamp(&**self.host())))).await
    }

    /// Says of a parked task that it was done, and what it returned, if that is known: duplicates are answered with it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::WrongState`], [`ErrorKind::BadOutput`] for more than a record can hold, or the
    /// store's.
    pub async fn resolve_done(&self, key: &Key, by: By<'_>, output: Option<Output>) -> Result<Arc<Record>> {
        check_size(key, &output, OUTPUT_LIMIT)?;
        let next = |found: &Found| Ok(decide::resolve_done(found, by, output.clone(), stamp(&**self.host())));
        self.change(key, "resolved", next).await
    }

    /// Says of the step of a parked task that is in doubt that it took effect, and what it returned, if that is known. The
    /// task returns to work and goes on behind it. `step` is the name that the person knows it by: the record that is
    /// changed has a step of that name in doubt, or nothing is. `None` means whichever is.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::WrongState`] also where no step is in doubt, or another one,
    /// [`ErrorKind::BadOutput`] for more than the outputs of steps may have together, or the store's.
    pub async fn resolve_step_done(
        &self,
        key: &Key,
        by: By<'_>,
        step: Option<&str>,
        output: Option<Output>,
    ) -> Result<Arc<Record>> {
        let next = |found: &Found| {
            let record = &found.record;
            check_size(key, &output, STEPS_BYTES_MAX.saturating_sub(step::output_bytes(record)))?;
            let next = decide::resolve_step_done(found, by, step, output.clone(), stamp(&**self.host()));
            match (next, step, decide::resolve_step_done(found, by, None, None, stamp(&**self.host()))) {
                (None, Some(name), Some(_)) => Err(another_step(key, name, record)),
                (next, _, _) => Ok(next),
            }
        };
        self.change(key, "resolved", next).await
    }

    /// Says of a parked task that it had no effect, and returns it to work.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::WrongState`], or the store's.
    pub async fn resolve_not_done(&self, key: &Key, by: By<'_>) -> Result<Arc<Record>> {
        self.change(key, "resolved", |found| Ok(decide::resolve_not_done(found, by, stamp(&**self.host())))).await
    }

    async fn change(
        &self,
        key: &Key,
        what: &str,
        next: impl Fn(&Found) -> Result<Option<Record>>,
    ) -> Result<Arc<Record>> {
        for _ in 0..CHANGE_TRIES_MAX {
            let found = self.store().load(key).await?.ok_or_else(|| not_found(key))?;
            let Some(next) = next(&found)? else { return Err(wrong_state(key, &found, what)) };
            // A person's change moves the fence like a claim does, so that hints of the time before are stale.
            match self.store().swap(key, Expected::Record(&found.record), Next::Claim(&next)).await? {
                Swap::Stored(fence) => {
                    self.forget(key);
                    return Ok(Arc::new(Record { fence, ..next }));
                }
                Swap::Conflict(_) => {}
                Swap::Locked(_) => return Err(locked(key)),
            }
        }
        Err(unsteady(key))
    }

    /// Removes a task's record, in any state, and leaves a note of who did it and why. Answers what was removed; nothing
    /// where it was damaged, so that nobody can say what it was.
    ///
    /// A holder of the task learns at its next heartbeat that its claim is lost. The task may then run again. A record of
    /// a newer format is left as it is.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or the store's.
    pub async fn clear(&self, key: &Key, by: By<'_>) -> Result<Option<Found>> {
        let removed = self.remove(key).await?;
        self.forget(key);
        let what = removed.as_ref().map_or("damaged", |found| found.record.state.name());
        self.note_clear(key, what, by).await?;
        Ok(removed)
    }

    async fn remove(&self, key: &Key) -> Result<Option<Found>> {
        let store = self.store();
        for _ in 0..CHANGE_TRIES_MAX {
            let found = match store.load(key).await {
                Ok(found) => found.ok_or_else(|| not_found(key))?,
                Err(error) if error.kind() == ErrorKind::Corrupt => match store.discard(key).await {
                    Ok(true) => return Ok(None),
                    // Something under the key that the store itself cannot remove, or it changed meanwhile.
                    Ok(false) => match store.load(key).await {
                        Ok(_) => continue,
                        Err(error) => return Err(error),
                    },
                    // As with an erasure: whether it is gone is unknown, so look.
                    Err(error) => match store.load(key).await {
                        Ok(None) => return Ok(None),
                        Ok(Some(_)) | Err(_) => return Err(error),
                    },
                },
                Err(error) => return Err(error),
            };
            match store.swap(key, Expected::Record(&found.record), Next::Erase).await {
                // Nothing is there any more where this record was: erased by this call, whose answer was lost, or by
                // another's just now.
                Ok(Swap::Stored(_) | Swap::Conflict(None)) => return Ok(Some(found)),
                Ok(Swap::Conflict(Some(_))) => {}
                Ok(Swap::Locked(_)) => return Err(locked(key)),
                // Whether it is gone is unknown: look. An erasure has no token to be recognised by.
                Err(error) => match store.load(key).await {
                    Ok(None) => return Ok(Some(found)),
                    Ok(Some(_)) | Err(_) => return Err(error),
                },
            }
        }
        Err(unsteady(key))
    }

    async fn note_clear(&self, key: &Key, what: &str, by: By<'_>) -> Result<()> {
        let host = &**self.host();
        let note_key = clear_note_key(key)?;
        let stamp = stamp(host);
        let policy = Policy::new(Effect::Repeatable);
        let fingerprint = Fingerprint([0; 16]);
        let ask = Ask { claim: ClaimId::from(host.random()), owner: &host.owner(), fingerprint, policy: &policy };
        for _ in 0..CHANGE_TRIES_MAX {
            let before = self.store().load(&note_key).await?;
            let mut note = match &before {
                Some(before) => Record { token: stamp.token, ..(*before.record).clone() },
                None => decide::complete(&decide::first(&ask, stamp), Output::Nothing, &policy, Duration::ZERO, stamp),
            };
            note.remember(Event {
                kind: EventKind::Cleared,
                at: stamp.at,
                who: by.who.to_owned(),
                attempt: 0,
                note: format!("{key} ({what}): {}", by.why),
            });
            let expected = Expected::found(before.as_ref());
            match self.store().swap(&note_key, expected, Next::Keep(&note)).await? {
                Swap::Stored(_) => return Ok(()),
                Swap::Conflict(_) | Swap::Locked(_) => {}
            }
        }
        Err(Error::new(ErrorKind::Changed, "the record is removed, but the note of it was not stored")
            .about(format!("task `{key}`")))
    }
}

/// The key under which the note of a clear is kept: `taskonce/clear@1/<digest of the cleared key>`.
fn clear_note_key(key: &Key) -> Result<Key> {
    let digest: [u8; 32] = Sha256::digest(key.as_str().as_bytes()).into();
    let id: String = digest[..20].iter().map(|byte| format!("{byte:02x}")).collect();
    Handler::within("taskonce", "clear", "1")?.key(&id)
}

fn check_size(key: &Key, output: &Option<Output>, max: usize) -> Result<()> {
    match output.as_ref().map_or(0, Output::len) {
        bytes if bytes > max => {
            Err(Error::new(ErrorKind::BadOutput, format!("the output has {bytes} bytes; at most {max} can be kept"))
                .about(format!("task `{key}`"))
                .with_hint("give a smaller one, or none"))
        }
        _ => Ok(()),
    }
}

fn not_found(key: &Key) -> Error {
    Error::new(ErrorKind::NotFound, "there is no record of it").about(format!("task `{key}`"))
}

fn wrong_state(key: &Key, found: &Found, what: &str) -> Error {
    let record = &found.record;
    let (text, hint) = match record.state {
        State::Running => (
            format!(
                "is running and cannot be {what}\n  held by  {}, attempt {}, lease ends in {} ms",
                record.owner,
                record.attempt,
                found.lease_left().as_millis()
            ),
            "wait for the lease to end",
        ),
        State::Waiting => (
            format!(
                "is waiting and cannot be {what}; its next attempt may start in {} ms",
                found.delay_left().as_millis()
            ),
            "it is in work: the next delivery or call after the delay runs it; `taskonce redrive` ends the delay",
        ),
        State::Done => (
            format!("is done and cannot be {what}"),
            "nothing is left to do: it took effect; only if it must happen again, `taskonce clear` removes the record",
        ),
        State::Dead => (format!("is dead and cannot be {what}"), "`taskonce redrive` returns it to work"),
        State::Parked => (format!("is parked and cannot be {what}"), "`taskonce resolve` says what became of it"),
    };
    Error::new(ErrorKind::WrongState, text).about(format!("task `{key}`")).with_hint(hint)
}

fn another_step(key: &Key, name: &str, record: &Record) -> Error {
    let there = record.steps.last().map_or("", |step| &step.name);
    Error::new(ErrorKind::WrongState, format!("its step `{there}` is in doubt, not `{name}`"))
        .about(format!("task `{key}`"))
        .with_hint("look at its steps with `taskonce show`")
}

fn locked(key: &Key) -> Error {
    Error::new(ErrorKind::Locked, "a transaction that is open holds the record")
        .about(format!("task `{key}`"))
        .with_hint("its worker is completing the task right now; look again in a moment")
}

fn unsteady(key: &Key) -> Error {
    Error::new(ErrorKind::Changed, "the record keeps changing").about(format!("task `{key}`"))
}

/// A walk over records. A record that the store repeats is dropped.
pub struct Walk {
    store: Arc<dyn Store>,
    filter: Filter,
    cursor: Option<Cursor>,
    ended: bool,
    hasher: RandomState,
    seen: HashSet<u64>,
}

impl Walk {
    /// Goes on where an earlier walk of the same filter stopped.
    #[must_use]
    pub fn from(mut self, cursor: Option<Cursor>) -> Walk {
        self.cursor = cursor;
        self
    }

    /// The next page, maybe empty; `None` at the end.
    ///
    /// # Errors
    /// The store's; the same page can be asked for again.
    pub async fn next_page(&mut self) -> Result<Option<Vec<Row>>> {
        if self.ended {
            return Ok(None);
        }
        let mut page = self.store.scan(&self.filter, self.cursor.clone()).await?;
        self.ended = page.next.is_none();
        self.cursor = page.next;
        page.rows.retain(|row| self.seen.insert(self.hasher.hash_one(row.key.as_str())));
        Ok(Some(page.rows))
    }

    /// Where to go on after the last page; `None` at the end.
    #[must_use]
    pub fn cursor(&self) -> Option<&Cursor> {
        self.cursor.as_ref()
    }
}
