//! A claim as the process holds it: the record it wrote, how long it may rely on it, and the news that it is lost.
//!
//! The handle that users consume is `ledger::Claim`; a keeper works on this.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::decide::{self, Stamp};
use crate::error::{Error, ErrorKind, Result};
use crate::host::Host;
use crate::key::Key;
use crate::policy::Policy;
use crate::record::{ClaimId, DropReason, Failure, FailureClass, Fence, Found, Output, Record, State, Token};
use crate::step;
use crate::store::{Expected, Next, Store, Swap};

mod join;

pub use join::Joined;

/// How often one write may adopt a token that a heartbeat of the same claim moved meanwhile.
const ADOPT_MAX: usize = 8;

/// A claim as the process holds it.
pub struct Held {
    key: Key,
    policy: Policy,
    claim: ClaimId,
    started: Duration,
    inner: Mutex<Inner>,
}

struct Inner {
    record: Arc<Record>,
    deadline: Duration,
    phase: Phase,
    entered: bool,
    intent: Option<Arc<Record>>,
    /// The end that a transaction of the caller's was to write.
    joined: Option<Arc<Record>>,
    /// The place of a step whose intent may be stored, and that this process did not begin.
    not_begun: Option<usize>,
    /// Renewals that are not answered yet.
    renewals: usize,
    wakers: Vec<Waker>,
}

/// Where a held claim stands in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Claimed; the handler was not entered.
    Claimed,
    /// The handler was entered.
    Entered,
    /// A transaction of the caller's holds the record, and may write the claim's end: nothing is renewed meanwhile.
    Joined,
    /// Its end is being written.
    Settling,
    /// Its end is stored.
    Settled,
    /// Another took over, or the record is gone, or the lease passed without a renewal.
    Lost,
}

/// What became of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease begins again.
    Held,
    /// The claim is lost: no effect may be started any more.
    Lost,
    /// The claim is being settled or is settled; there was nothing to renew.
    Over,
}

/// What became of the end of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is stored.
    Recorded(Arc<Record>),
    /// Another took over, or the record is gone: nothing was written. Holds what is there now.
    Lost(Option<Found>),
}

impl Held {
    pub(crate) fn new(key: Key, policy: Policy, record: Record, sent: Duration) -> Held {
        Held {
            key,
            claim: record.claim,
            started: sent,
            inner: Mutex::new(Inner {
                deadline: deadline(sent, &policy),
                record: Arc::new(record),
                phase: Phase::Claimed,
                entered: false,
                intent: None,
                joined: None,
                not_begun: None,
                renewals: 0,
                wakers: Vec::new(),
            }),
            policy,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The task's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// How the task is treated.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Names the claim.
    #[must_use]
    pub fn claim_id(&self) -> ClaimId {
        self.claim
    }

    /// The fencing token.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.lock().record.fence
    }

    /// The number of this attempt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.lock().record.attempt
    }

    /// Claims of this task that ended by a passed lease.
    #[must_use]
    pub fn crashes(&self) -> u32 {
        self.lock().record.crashes
    }

    /// The failure of the attempt before, if there was one.
    #[must_use]
    pub fn last_failure(&self) -> Option<Failure> {
        self.lock().record.failure.clone()
    }

    /// The moment on the host's own clock past which no effect may be started.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.lock().deadline
    }

    /// When the claim was asked for, on the host's own clock.
    #[must_use]
    pub fn started(&self) -> Duration {
        self.started
    }

    /// Where the claim stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// Whether its handler was entered.
    #[must_use]
    pub fn is_entered(&self) -> bool {
        self.lock().entered
    }

    /// The step in this place did not begin, whatever became of the write that said it would: when the claim ends, it is
    /// not recorded as in doubt.
    pub fn did_not_begin(&self, place: usize) {
        self.lock().not_begun = Some(place);
    }

    /// The step whose intent was stored last begins now: from here on it is in doubt until it has ended.
    pub fn begins(&self) {
        self.lock().not_begun = None;
    }

    /// Whether its end was decided: then only that end is ever written.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.lock().intent.is_some()
    }

    /// Whether an effect may be started at this moment of the host's clock. A transaction that holds the record needs no
    /// lease: nobody can take over before it ends.
    #[must_use]
    pub fn may_start_effect(&self, now: Duration) -> bool {
        let too_long = self.policy.run_max.is_some_and(|run_max| now >= self.started.saturating_add(run_max));
        let inner = self.lock();
        let holds = match inner.phase {
            Phase::Claimed | Phase::Entered => now < inner.deadline,
            Phase::Joined => true,
            Phase::Settling | Phase::Settled | Phase::Lost => false,
        };
        holds && !too_long
    }

    /// The record as this process wrote or saw it last.
    #[must_use]
    pub fn record(&self) -> Arc<Record> {
        Arc::clone(&self.lock().record)
    }

    /// The handler is entered: from now on a claim that is dropped is a failed attempt.
    pub fn enter(&self) {
        let mut inner = self.lock();
        inner.entered = true;
        if inner.phase == Phase::Claimed {
            inner.phase = Phase::Entered;
        }
    }

    /// Completes when the claim is lost. Never completes for a claim that is settled.
    pub async fn lost(&self) {
        poll_fn(|context| {
            let mut inner = self.lock();
            if inner.phase == Phase::Lost {
                return Poll::Ready(());
            }
            if !inner.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                inner.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Tells the handler that the claim is lost, unless its end is already being written.
    pub fn lose(&self) {
        let mut inner = self.lock();
        match inner.phase {
            Phase::Claimed | Phase::Entered | Phase::Joined => self.enter_phase(&mut inner, Phase::Lost),
            Phase::Settling | Phase::Settled | Phase::Lost => {}
        }
    }

    fn enter_phase(&self, inner: &mut Inner, phase: Phase) {
        inner.phase = phase;
        for waker in inner.wakers.drain(..) {
            waker.wake();
        }
    }

    /// Renews the lease: one heartbeat.
    ///
    /// # Errors
    /// The store's. The claim still holds until its deadline; ask again.
    pub async fn renew(&self, store: &dyn Store, host: &dyn Host) -> Result<Renewal> {
        let _under_way = self.begin_renewal();
        for _ in 0..ADOPT_MAX {
            let before = {
                let inner = self.lock();
                match inner.phase {
                    Phase::Claimed | Phase::Entered => {}
                    // The transaction holds it.
                    Phase::Joined => return Ok(Renewal::Held),
                    Phase::Settling | Phase::Settled => return Ok(Renewal::Over),
                    Phase::Lost => return Ok(Renewal::Lost),
                }
                Arc::clone(&inner.record)
            };
            match self.write(store, host, &before, &before).await? {
                Written::Stored(_) => return Ok(Renewal::Held),
                Written::Again => {}
                Written::Refused(_) => {
                    self.lose();
                    return Ok(match self.phase() {
                        Phase::Settling | Phase::Settled => Renewal::Over,
                        Phase::Claimed | Phase::Entered | Phase::Joined | Phase::Lost => Renewal::Lost,
                    });
                }
            }
        }
        Err(self.unsteady())
    }

    fn begin_renewal(&self) -> UnderWay<'_> {
        self.lock().renewals += 1;
        UnderWay(self)
    }

    /// Changes the record of the running claim, which renews its lease too: a step that began or ended. `change` may be
    /// applied more than once, each time to what is stored. Answers the record that is stored; `None` when the claim is
    /// lost.
    ///
    /// # Errors
    /// The store's: whether it is stored is unknown; ask again.
    pub async fn advance(
        &self,
        store: &dyn Store,
        host: &dyn Host,
        change: impl Fn(&Record) -> Record + Send,
    ) -> Result<Option<Arc<Record>>> {
        for _ in 0..ADOPT_MAX {
            let before = {
                let inner = self.lock();
                match inner.phase {
                    Phase::Claimed | Phase::Entered => {}
                    Phase::Joined | Phase::Settling | Phase::Settled => return Err(self.over()),
                    Phase::Lost => return Ok(None),
                }
                Arc::clone(&inner.record)
            };
            match self.write(store, host, &before, &change(&before)).await? {
                Written::Stored(next) => return Ok(Some(next)),
                Written::Again => {}
                Written::Refused(_) => {
                    self.lose();
                    return Ok(None);
                }
            }
        }
        Err(self.unsteady())
    }

    /// Writes the running claim's record once, its lease begun again, where the store still holds `before`.
    async fn write(
        &self,
        store: &dyn Store,
        host: &dyn Host,
        before: &Arc<Record>,
        changed: &Record,
    ) -> Result<Written> {
        let sent = host.uptime();
        let next = decide::heartbeat(changed, Token::from(host.random()), sent.saturating_sub(self.started));
        match store.swap(&self.key, Expected::Record(before), Next::Keep(&next)).await? {
            Swap::Stored(_) => {
                let next = Arc::new(next);
                self.follow(before, &next);
                let mut inner = self.lock();
                inner.deadline = inner.deadline.max(deadline(sent, &self.policy));
                Ok(Written::Stored(next))
            }
            Swap::Conflict(Some(found)) if self.is_mine(&found) => {
                self.follow(before, &found.record);
                Ok(Written::Again)
            }
            Swap::Conflict(found) => Ok(Written::Refused(found)),
            Swap::Locked(_) => Err(self.locked()),
        }
    }

    /// Takes over what came after `before`, unless another write of this claim has done so meanwhile: an answer that was
    /// long under way must not bring back a record without its latest step.
    fn follow(&self, before: &Arc<Record>, next: &Arc<Record>) {
        let mut inner = self.lock();
        if Arc::ptr_eq(&inner.record, before) {
            inner.record = Arc::clone(next);
        }
    }

    fn is_mine(&self, found: &Found) -> bool {
        found.record.state == State::Running && found.record.claim == self.claim
    }

    fn locked(&self) -> Error {
        Error::new(ErrorKind::Locked, "a transaction that is open holds the record")
            .about(format!("task `{}`", self.key))
    }

    fn over(&self) -> Error {
        Error::new(ErrorKind::WrongState, "the end of the claim is being written, so nothing of it can change any more")
            .about(format!("task `{}`", self.key))
    }

    fn unsteady(&self) -> Error {
        Error::new(ErrorKind::Changed, format!("the record changed {ADOPT_MAX} times under this claim"))
            .about(format!("task `{}`", self.key))
    }

    /// Decides to complete. What is decided first is written; a later decision changes nothing.
    pub fn intend_complete(&self, host: &dyn Host, output: Output) {
        let ran_for = host.uptime().saturating_sub(self.started);
        self.intend(|held| decide::complete(held, output, &self.policy, ran_for, stamp(host)));
    }

    /// Decides to fail.
    pub fn intend_fail(&self, host: &dyn Host, failure: &Failure) {
        let ran_for = host.uptime().saturating_sub(self.started);
        let random = host.random() as u64;
        self.intend(|held| decide::fail(held, failure, &self.policy, ran_for, random, stamp(host)));
    }

    /// Decides to release, where the handler was not entered.
    pub fn intend_release(&self, host: &dyn Host) {
        self.intend(|held| decide::release(held, stamp(host)));
    }

    /// Decides what follows from dropping the claim: released before the handler was entered, failed after. Says
    /// whether anything is left to be written.
    pub fn intend_drop(&self, host: &dyn Host, why: &str) -> bool {
        let (phase, entered) = {
            let inner = self.lock();
            (inner.phase, inner.entered)
        };
        match phase {
            Phase::Claimed | Phase::Entered | Phase::Joined | Phase::Lost if entered => {
                self.intend_fail(host, &Failure::new(FailureClass::Dropped, why));
            }
            Phase::Claimed | Phase::Entered | Phase::Joined | Phase::Lost => self.intend_release(host),
            Phase::Settling => {}
            Phase::Settled => return false,
        }
        true
    }

    fn intend(&self, next: impl FnOnce(&Record) -> Record) {
        let mut inner = self.lock();
        if inner.intent.is_none() {
            inner.intent = Some(Arc::new(next(&inner.without_unbegun(&inner.record))));
            inner.phase = Phase::Settling;
        }
    }

    /// Takes the output out of the end that was decided, where the store cannot hold it: the task is done all the same.
    /// Says whether there was one.
    pub fn shed_output(&self) -> bool {
        let mut inner = self.lock();
        let Some(intent) = &mut inner.intent else { return false };
        let Output::Kept { bytes, .. } = &intent.output else { return false };
        let dropped = Output::Dropped(DropReason::TooLarge { bytes: bytes.len() as u64 });
        // The token stays, so that this end and the one before are recognised as one.
        *intent = Arc::new(Record { output: dropped, ..(**intent).clone() });
        true
    }

    /// The end that was decided, over the record that is there. It may know of a step more: one that a transaction of the
    /// handler's recorded, or whose answer was lost. It stays recorded, or it would run again.
    fn carry(&self, intent: &Record, found: Arc<Record>) -> (Arc<Record>, Arc<Record>) {
        let mut inner = self.lock();
        let carried = Arc::new(decide::carry(intent, &inner.without_unbegun(&found)));
        inner.intent = Some(Arc::clone(&carried));
        (found, carried)
    }

    /// Writes what was decided. May be repeated after an error: a write that was stored is recognised.
    ///
    /// # Errors
    /// The store's: whether it is stored is unknown.
    pub async fn settle(&self, store: &dyn Store) -> Result<Settled> {
        let (mut before, mut intent, joined) = {
            let inner = self.lock();
            match &inner.intent {
                Some(intent) => (Arc::clone(&inner.record), Arc::clone(intent), inner.joined.clone()),
                None => return Err(Error::new(ErrorKind::WrongState, "nothing was decided for this claim")),
            }
        };
        for _ in 0..ADOPT_MAX {
            match store.swap(&self.key, Expected::Record(&before), Next::Keep(&intent)).await? {
                Swap::Stored(_) => {
                    self.enter_phase(&mut self.lock(), Phase::Settled);
                    return Ok(Settled::Recorded(intent));
                }
                Swap::Conflict(Some(found)) if self.is_mine(&found) => {
                    (before, intent) = self.carry(&intent, found.record)
                }
                Swap::Conflict(Some(found)) if is_end(&found.record, &intent) => {
                    self.enter_phase(&mut self.lock(), Phase::Settled);
                    return Ok(Settled::Recorded(intent));
                }
                // The caller's transaction had committed after all.
                Swap::Conflict(Some(found)) if joined.as_ref().is_some_and(|end| is_end(&found.record, end)) => {
                    self.enter_phase(&mut self.lock(), Phase::Settled);
                    return Ok(Settled::Recorded(found.record));
                }
                Swap::Conflict(found) => {
                    self.enter_phase(&mut self.lock(), Phase::Lost);
                    return Ok(Settled::Lost(found));
                }
                Swap::Locked(_) => return Err(self.locked()),
            }
        }
        Err(self.unsteady())
    }
}

impl Inner {
    /// The running record without the intent of the step that did not begin: what an end is decided from.
    fn without_unbegun(&self, record: &Record) -> Record {
        match self.not_begun {
            Some(place) => step::undo(record, place),
            None => record.clone(),
        }
    }
}

/// What became of one write of a running claim's record.
enum Written {
    /// It is stored.
    Stored(Arc<Record>),
    /// Another write of this claim came first: look at the record again.
    Again,
    /// The claim does not hold any more. Holds what is there.
    Refused(Option<Found>),
}

/// A renewal under way; those who wait for it to be answered learn that it is.
struct UnderWay<'a>(&'a Held);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.renewals -= 1;
        if inner.renewals == 0 {
            for waker in inner.wakers.drain(..) {
                waker.wake();
            }
        }
    }
}

/// Whether a record is the end that was stored by an earlier sending, its token moved by a renewed retention since. The
/// history tells it from the end that a takeover or a person gave to the same claim.
fn is_end(record: &Record, intent: &Record) -> bool {
    (record.state, record.claim, record.fence, record.attempt)
        == (intent.state, intent.claim, intent.fence, intent.attempt)
        && (&record.history, record.history_dropped) == (&intent.history, intent.history_dropped)
}

/// Releases a claim by its id, where nobody knows whether it was stored. Says whether that is settled: it is released, or the task
/// has ended by another's claim, and this one can replace that no more. Where neither is so, it may still come.
///
/// # Errors
/// The store's; ask again.
pub async fn release_by_claim(store: &dyn Store, host: &dyn Host, key: &Key, claim: ClaimId) -> Result<bool> {
    let mut found = store.load(key).await?;
    for _ in 0..ADOPT_MAX {
        let Some(held) = found else { return Ok(false) };
        if held.record.state != State::Running || held.record.claim != claim {
            return Ok(held.record.state.is_final());
        }
        let next = decide::release(&held.record, stamp(host));
        match store.swap(key, Expected::Record(&held.record), Next::Keep(&next)).await? {
            Swap::Stored(_) => return Ok(true),
            Swap::Conflict(now) => found = now,
            Swap::Locked(_) => {
                return Err(Error::new(ErrorKind::Locked, "a transaction that is open holds the record")
                    .about(format!("task `{key}`")));
            }
        }
    }
    Ok(false)
}

fn deadline(sent: Duration, policy: &Policy) -> Duration {
    sent + policy.lease.saturating_sub(policy.margin())
}

pub(crate) fn stamp(host: &dyn Host) -> Stamp {
    Stamp { token: Token::from(host.random()), at: host.wall_time() }
}
