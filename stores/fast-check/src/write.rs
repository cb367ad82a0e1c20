//! Hints on their way to the front, each after the database: what was written there, what was read, what was removed.
//!
//! None of it can fail the caller, and none is needed: without a hint the database is asked.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::key::Key;
use taskonce_core::ledger::LOCKED_DEFER;
use taskonce_core::record::{Age, Fence, Found, Record, State, Token};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::board::Turn;
use crate::front::{Laid, Put, There};
use crate::generation::Mark;
use crate::hint::{Detail, Hint, Rank};
use crate::options::DoneHint;
use crate::store::Inner;

/// How often one hint looks again when others change what lies there.
const PUT_TRIES_MAX: usize = 4;
/// A write to the database that was begun so long ago is not told of any more: others may have gone on since, and what
/// keeps late hints away does not stay for ever.
const LATE_MAX: Duration = Duration::from_secs(30);

/// How long a hint is good for that was read while a transaction held the record: what is told to those who ask then.
const LOCKED_BELIEVED: Duration = LOCKED_DEFER;

/// The right to ask the database alone, until the hint of its answer is written. Dropping it lets the next one ask.
pub(crate) struct Asker {
    pub(crate) inner: Arc<Inner>,
    pub(crate) key: Key,
    pub(crate) turn: Turn,
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.inner.here().board().asked(&self.key, self.turn);
    }
}

impl Inner {
    /// How much of a done record its hint holds.
    pub(crate) fn detail(&self) -> Detail {
        match self.options.done {
            DoneHint::Verified => Detail::Outline,
            DoneHint::Trusted => Detail::Whole,
        }
    }

    /// What this process has written to the database, at the latest since `sent`. `before`: what was seen in the front
    /// before that.
    pub(crate) async fn tell_written(
        self: &Arc<Inner>,
        key: &Key,
        hint: &Hint,
        before: Option<Arc<Record>>,
        sent: Instant,
    ) {
        let is_running = hint.rank() == Rank::Running;
        let mut before = before.or_else(|| self.here().written.get(key));
        if !is_running {
            self.here().written.remove(key);
        }
        let Some(laid) = hint.lay(self.options.hint_life, fresh_token()) else { return self.tally.dropped.add() };
        for _ in 0..PUT_TRIES_MAX {
            if sent.elapsed() > LATE_MAX {
                break;
            }
            before = match self.put(key, before.as_deref(), &laid).await {
                Put::Stored => {
                    self.tally.written.add();
                    if is_running {
                        self.here().written.insert(key.clone(), Arc::new(laid));
                    }
                    return;
                }
                Put::Conflict(There::Nothing) => None,
                Put::Conflict(There::Old(record)) => Some(record),
                Put::Conflict(There::Hint(there)) if hint.follows(&there.hint) => Some(there.record),
                // What came later stays.
                Put::Conflict(There::Hint(_)) => return,
                Put::Conflict(There::Other | There::Unknown) | Put::Unknown => break,
            };
        }
        self.tally.dropped.add();
    }

    /// What a duplicate has read in the database after it saw `there` in the front. It takes that place and no other: what
    /// lies there by now may tell of something later.
    async fn tell_read(self: &Arc<Inner>, key: &Key, hint: &Hint, there: Option<Arc<Record>>) {
        let Some(laid) = hint.lay(self.options.hint_life, fresh_token()) else { return self.tally.dropped.add() };
        match self.put(key, there.as_deref(), &laid).await {
            Put::Stored => self.tally.written.add(),
            Put::Conflict(_) => {}
            Put::Unknown => self.tally.dropped.add(),
        }
    }

    /// The record of this fence is removed from the database.
    pub(crate) async fn tell_erased(self: &Arc<Inner>, key: &Key, fence: Option<Fence>, mark: &Mark) {
        match fence {
            Some(fence) => self.tell_written(key, &Hint::erased(fence, mark), None, Instant::now()).await,
            None => self.forget(key, mark).await,
        }
    }

    /// Whatever the front says of this task counts no more.
    pub(crate) async fn forget(self: &Arc<Inner>, key: &Key, mark: &Mark) {
        if let There::Hint(there) = self.look(key).await {
            self.tell_read(key, &Hint::erased(there.hint.fence, mark), Some(there.record)).await;
        }
    }

    /// A claim is in the database: its hint is written in the background.
    pub(crate) fn tell_claimed(self: &Arc<Inner>, key: &Key, record: &Record, fence: Fence, there: There, mark: &Mark) {
        let before = match there {
            There::Unknown => None,
            There::Other => return,
            There::Nothing => None,
            There::Old(record) | There::Hint(Laid { record, .. }) => Some(record),
        };
        let hint = Hint::of(record, fence, Age::default(), mark, self.detail());
        let (inner, key, sent) = (Arc::clone(self), key.clone(), Instant::now());
        self.in_background(async move { inner.tell_written(&key, &hint, before, sent).await });
    }

    /// A duplicate was answered by the database: its hint is written anew in the background, where that is of use.
    pub(crate) fn tell_found(
        self: &Arc<Inner>,
        key: &Key,
        found: &Found,
        there: There,
        mark: &Mark,
        asker: Option<Asker>,
    ) {
        let record = &found.record;
        let of_use = match record.state {
            // A lease that has passed lets somebody take over, who writes the next hint.
            State::Running => !found.age.has_passed(record.lease),
            State::Done | State::Dead => true,
            // Nothing is answered from it, so it is only to end what another hint says.
            State::Waiting | State::Parked => matches!(there, There::Hint(_)),
        };
        let hint = Hint::of(record, record.fence, found.age, mark, self.detail());
        let before = match there {
            There::Unknown | There::Other => return,
            There::Nothing => None,
            There::Old(record) => Some(record),
            There::Hint(laid) if says_the_same(&laid.hint, &hint) => return,
            There::Hint(laid) => Some(laid.record),
        };
        if of_use {
            let (inner, key) = (Arc::clone(self), key.clone());
            self.in_background(async move {
                inner.tell_read(&key, &hint, before).await;
                drop(asker);
            });
        }
    }

    /// A transaction holds the record of a running task, whatever its lease: the duplicates of the next moment need not ask
    /// as well.
    pub(crate) fn tell_locked(
        self: &Arc<Inner>,
        key: &Key,
        found: &Found,
        there: There,
        mark: &Mark,
        asker: Option<Asker>,
    ) {
        let lease = found.record.lease;
        let left = found.age.left_of(lease).max(LOCKED_BELIEVED.min(lease));
        let age = Age::from_millis(i64::try_from((lease - left).as_millis()).unwrap_or(i64::MAX));
        if found.record.state == State::Running {
            self.tell_found(key, &Found { age, ..found.clone() }, there, mark, asker);
        }
    }

    /// A transaction of the caller's has committed an end. When the commit was sent is not known here, nor the generation of
    /// that moment; so the hint holds nothing that could be trusted.
    pub(crate) fn tell_committed(self: &Arc<Inner>, key: &Key, end: &Record) {
        let Some(mark) = self.here().generation.mark() else { return self.tally.dropped.add() };
        let hint = Hint::of(end, end.fence, Age::default(), &mark, Detail::Outline);
        let (inner, key, sent) = (Arc::clone(self), key.clone(), Instant::now());
        self.in_background(async move { inner.tell_written(&key, &hint, None, sent).await });
    }

    fn in_background(&self, work: impl Future<Output = ()> + Send + 'static) {
        let permit = Arc::clone(&self.here().writes).try_acquire_owned();
        let (Ok(permit), Ok(runtime)) = (permit, Handle::try_current()) else { return self.tally.dropped.add() };
        runtime.spawn(async move {
            work.await;
            drop(permit);
        });
    }
}

/// Whether a task that is over has this hint already. One of a running task is always written anew: it was asked about
/// because it was not believed any more.
fn says_the_same(there: &Hint, hint: &Hint) -> bool {
    let token = |hint: &Hint| hint.record().map(|record| record.token);
    hint.rank() == Rank::Ended
        && there.generation == hint.generation
        && there.fence == hint.fence
        && token(there) == token(hint)
        && std::mem::discriminant(&there.tells) == std::mem::discriminant(&hint.tells)
}

/// The token of a hint's record in the front: the same record of the database may be hinted at more than once.
fn fresh_token() -> Token {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system gives random numbers");
    Token(bytes)
}
