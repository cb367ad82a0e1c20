//! The front door: the decision table applied to a store.
//!
//! [`Ledger::claim`] answers with an [`Admission`]; [`Admission::Run`] carries a [`Claim`], which is consumed by its end.
//! What people ask of it is in `people`; heartbeats and the running of handlers are in the worker crate.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::{Cache, CacheLimits};
use crate::decide::{self, Answer, Ask, ClaimStep};
use crate::error::{Error, ErrorKind, Result};
use crate::held::{Held, Joined, Phase, Renewal, Settled, stamp};
use crate::host::{Host, Keeper};
use crate::key::{DownstreamKey, Fingerprint, Key, Task};
use crate::policy::Policy;
use crate::record::{Age, ClaimId, Failure, Fence, Found, Output, Record, State, Token};
use crate::store::{Expected, Filter, Finding, Next, Purged, Store, Swap};

/// How often one claim call looks again when others change the record between its look and its write.
const CLAIM_TRIES_MAX: usize = 16;

/// The decision table over a store. Cheap to clone.
#[derive(Clone)]
pub struct Ledger {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Store>,
    host: Arc<dyn Host>,
    keeper: Arc<dyn Keeper>,
    cache: Option<Cache>,
}

/// What a claim call answers. Each is an outcome to be acted upon; none is an error.
#[must_use = "a claim that is dropped is released, and a busy or waiting task must be deferred, never acknowledged"]
#[derive(Debug)]
pub enum Admission {
    /// The task is the caller's to run.
    Run(Claim),
    /// Done before: replay the output.
    Replay(Seen),
    /// Another claim holds: defer by what is left of its lease.
    Busy(Seen),
    /// Failed or released before: defer by what is left of its delay.
    Waiting(Seen),
    /// Out of attempts, or failed for good.
    Dead(Seen),
    /// In doubt; waits for a person.
    Parked(Seen),
    /// The key is in use for another payload: never run, never replayed.
    Mismatch {
        /// What the key holds.
        seen: Seen,
        /// The fingerprint that was asked with.
        given: Fingerprint,
    },
}

/// How long to defer a task that somebody's open transaction holds. Such a transaction is short, or its server ends it.
pub const LOCKED_DEFER: Duration = Duration::from_secs(1);

/// A task as somebody found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its record, with the age by the store's clock.
    pub found: Found,
    /// Whether it came from the process's own cache of final records.
    pub cached: bool,
}

impl Seen {
    /// The output, of a done task.
    #[must_use]
    pub fn output(&self) -> &Output {
        &self.found.record.output
    }

    /// The attempt that is running, or ran last.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.found.record.attempt
    }

    /// Who runs it, or ran it last.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.found.record.owner
    }

    /// How long the task has been in its state.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.found.in_state_for()
    }

    /// How long to defer: what is left of the lease of a running task, or of the delay of a waiting one. Where
    /// nothing is left, a transaction that is open holds the record: [`LOCKED_DEFER`].
    #[must_use]
    pub fn defer_for(&self) -> Duration {
        match self.found.record.state {
            State::Running if self.found.lease_left().is_zero() => LOCKED_DEFER,
            State::Running => self.found.lease_left(),
            State::Waiting if self.found.delay_left().is_zero() => LOCKED_DEFER,
            State::Waiting => self.found.delay_left(),
            State::Done | State::Dead | State::Parked => Duration::ZERO,
        }
    }

    /// The last failure.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.found.record.failure.as_ref()
    }
}

impl Ledger {
    /// A ledger over a store.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, host: Arc<dyn Host>, keeper: Arc<dyn Keeper>) -> Ledger {
        Ledger { inner: Arc::new(Inner { store, host, keeper, cache: None }) }
    }

    /// The same ledger with a cache of done records in this process.
    ///
    /// A cached record answers duplicates without the store, for at most [`CacheLimits::life_max`] and never beyond its
    /// own life. A record that a person clears meanwhile is replayed for as long.
    #[must_use]
    pub fn with_cache(&self, limits: CacheLimits) -> Ledger {
        Ledger {
            inner: Arc::new(Inner {
                store: Arc::clone(&self.inner.store),
                host: Arc::clone(&self.inner.host),
                keeper: Arc::clone(&self.inner.keeper),
                cache: Some(Cache::new(limits)),
            }),
        }
    }

    /// The store beneath.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// The process's clock, random numbers and label.
    #[must_use]
    pub fn host(&self) -> &Arc<dyn Host> {
        &self.inner.host
    }

    /// Asks for the right to run one attempt of a task.
    ///
    /// A fresh claim and a duplicate of a done task take one round trip, a takeover two. When the future is dropped, or
    /// ends in an error, a claim that may have been stored is released in the background.
    ///
    /// # Errors
    /// [`ErrorKind::BadPolicy`] and [`ErrorKind::ForgetfulStore`] before anything is asked; else the store's.
    pub async fn claim(&self, task: &Task, policy: &Policy) -> Result<Admission> {
        let host = &*self.inner.host;
        if let Some(found) = self.inner.cache.as_ref().and_then(|cache| cache.get(task, host.uptime())) {
            return Ok(Admission::Replay(Seen { found, cached: true }));
        }
        policy.check()?;
        policy.check_store(&*self.inner.store)?;
        let owner = host.owner();
        let ask = Ask { claim: ClaimId::from(host.random()), owner: &owner, fingerprint: task.fingerprint, policy };
        let mut asked = Asked { ledger: self, key: &task.key, claim: ask.claim, lease: policy.lease, open: true };
        let admission = self.claim_as(task, &ask).await?;
        asked.open = false;
        Ok(admission)
    }

    async fn claim_as(&self, task: &Task, ask: &Ask<'_>) -> Result<Admission> {
        let host = &*self.inner.host;
        let mut found: Option<Found> = None;
        // When what was found was asked for: what is kept of it must not outlive it.
        let mut asked_at = host.uptime();
        for _ in 0..CLAIM_TRIES_MAX {
            let sent = host.uptime();
            let step = decide::claim(found.as_ref(), ask, stamp(host));
            let next = match &step {
                ClaimStep::Run(record) => Next::Claim(record),
                ClaimStep::Resume(record) | ClaimStep::End(record) => Next::Keep(record),
                ClaimStep::Answer(answer) => match found {
                    Some(found) => return Ok(self.answer(task, *answer, found, asked_at).await),
                    None => return Err(Error::new(ErrorKind::Protocol, "an answer without a record")),
                },
            };
            match self.inner.store.swap(&task.key, Expected::found(found.as_ref()), next).await? {
                Swap::Stored(fence) => match step {
                    ClaimStep::Run(record) | ClaimStep::Resume(record) => {
                        let held = Held::new(task.key.clone(), ask.policy.clone(), Record { fence, ..record }, sent);
                        return Ok(Admission::Run(Claim::new(self.clone(), held)));
                    }
                    ClaimStep::End(record) => {
                        let answer = match record.state {
                            State::Parked => Answer::Parked,
                            State::Running | State::Waiting | State::Done | State::Dead => Answer::Dead,
                        };
                        let found = Found { record: Arc::new(record), age: Age::default() };
                        return Ok(self.answer(task, answer, found, sent).await);
                    }
                    ClaimStep::Answer(_) => {}
                },
                Swap::Conflict(now) => (found, asked_at) = (now, sent),
                // The holder is completing it right now, or the transaction in which it did is about to end.
                Swap::Locked(Some(found)) => return Ok(Admission::Busy(Seen { found, cached: false })),
                Swap::Locked(None) => {
                    return Err(Error::new(ErrorKind::Locked, "a transaction that is open makes the record")
                        .about(format!("task `{}`", task.key)));
                }
            }
        }
        Err(Error::new(
            ErrorKind::Changed,
            format!("others changed the record {CLAIM_TRIES_MAX} times while it was claimed"),
        )
        .about(format!("task `{}`", task.key)))
    }

    async fn answer(&self, task: &Task, answer: Answer, found: Found, asked_at: Duration) -> Admission {
        let seen = Seen { found, cached: false };
        match answer {
            Answer::Replay => {
                self.keep_final(&task.key, &seen.found, asked_at).await;
                Admission::Replay(seen)
            }
            Answer::Busy => Admission::Busy(seen),
            Answer::Waiting => Admission::Waiting(seen),
            Answer::Dead => {
                self.keep_final(&task.key, &seen.found, asked_at).await;
                Admission::Dead(seen)
            }
            Answer::Parked => Admission::Parked(seen),
            Answer::Mismatch => Admission::Mismatch { seen, given: task.fingerprint },
        }
    }

    /// A duplicate of a final task still arrives: renews its retention when due, and caches it when it is done.
    async fn keep_final(&self, key: &Key, found: &Found, asked_at: Duration) {
        let host = &*self.inner.host;
        if let Some(next) = decide::extend(found, Token::from(host.random())) {
            // Best effort: the answer is right without it, and the next duplicate tries again.
            let _outcome = self.inner.store.swap(key, Expected::Record(&found.record), Next::Keep(&next)).await;
        }
        if let Some(cache) = &self.inner.cache {
            cache.put(key, found, asked_at);
        }
    }

    /// Nothing is answered from the cache for this key any more.
    pub(crate) fn forget(&self, key: &Key) {
        if let Some(cache) = &self.inner.cache {
            cache.remove(key);
        }
    }

    /// Removes final records past their retention, one bounded batch.
    ///
    /// # Errors
    /// The store's.
    pub async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.inner.store.purge(filter).await
    }

    /// Waits until no claim of this process is held and every end is written, at most so long. Says whether it is so.
    ///
    /// To be called before the process ends, after it has stopped taking tasks: running handlers go on meanwhile, and
    /// what dropped futures left unfinished is written. Handlers still running when it says `false` are taken over
    /// after their lease, or can be ended by dropping their futures and calling this once more.
    pub async fn finish(&self, within: Duration) -> bool {
        self.inner.keeper.finish(within).await
    }

    /// Looks at the store's own health.
    pub async fn examine(&self) -> Vec<Finding> {
        self.inner.store.examine().await
    }
}

/// A claim call under way. Dropped while open (an error, or the caller gave up), it releases what may have been stored;
/// else that would count as a crash.
struct Asked<'a> {
    ledger: &'a Ledger,
    key: &'a Key,
    claim: ClaimId,
    lease: Duration,
    open: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.open {
            self.ledger.inner.keeper.release(self.key.clone(), self.claim, self.lease);
        }
    }
}

/// The right to run one attempt of a task. Consumed by its end; kept alive by heartbeats until then.
///
/// Dropped before [`Claim::enter`], it is released and the attempt does not count. Dropped later it is a failed attempt,
/// and an unrepeatable effect is parked. A completion that has begun is finished in the background.
#[must_use = "a claim that is dropped is released, or counted as a failed attempt once its handler was entered"]
pub struct Claim {
    ledger: Ledger,
    held: Arc<Held>,
}

impl Claim {
    fn new(ledger: Ledger, held: Held) -> Claim {
        let held = Arc::new(held);
        ledger.inner.keeper.keep(&held);
        Claim { ledger, held }
    }

    /// The claim as the process holds it.
    #[must_use]
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// The ledger that gave it.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The number of this attempt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.held.attempt()
    }

    /// The fencing token: a resource that refuses a smaller one than it has seen refuses stale writes.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.held.fence()
    }

    /// The key for a provider that deduplicates; see [`Key::downstream`].
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> DownstreamKey {
        self.held.key().downstream(step)
    }

    /// Whether an effect may still be started: the lease, less its margin, has not passed on this process's clock.
    #[must_use]
    pub fn may_start_effect(&self) -> bool {
        self.held.may_start_effect(self.ledger.inner.host.uptime())
    }

    /// The handler is entered: from now on a dropped claim is a failed attempt.
    pub fn enter(&self) {
        self.held.enter();
    }

    /// Renews the lease by hand. With a keeper there is no need to.
    ///
    /// # Errors
    /// The store's; the claim still holds until its lease passes.
    pub async fn heartbeat(&self) -> Result<Renewal> {
        self.held.renew(&*self.ledger.inner.store, &*self.ledger.inner.host).await
    }

    /// Records that the task took effect. Tried also when the lease has passed: it is accepted unless another took over.
    ///
    /// # Errors
    /// The store's, with the claim, so that it can be tried again: "done, not recorded" is known from "failed".
    pub async fn complete(self, output: Output) -> Result<Settled, Unsettled> {
        self.held.intend_complete(&*self.ledger.inner.host, output);
        let (ledger, key) = (self.ledger.clone(), self.held.key().clone());
        let sent = ledger.inner.host.uptime();
        let settled = self.settle().await?;
        if let (Settled::Recorded(record), Some(cache)) = (&settled, &ledger.inner.cache) {
            let found = Found { record: Arc::clone(record), age: Age::default() };
            cache.put(&key, &found, sent);
        }
        Ok(settled)
    }

    /// Records that the attempt failed: the task waits for its backoff, or is dead, or is parked.
    ///
    /// # Errors
    /// The store's, with the claim.
    pub async fn fail(self, failure: Failure) -> Result<Settled, Unsettled> {
        self.held.intend_fail(&*self.ledger.inner.host, &failure);
        self.settle().await
    }

    /// Gives the claim back; the attempt does not count. After [`Claim::enter`] it is a failed attempt.
    ///
    /// # Errors
    /// The store's, with the claim.
    pub async fn release(self) -> Result<Settled, Unsettled> {
        self.held.intend_drop(&*self.ledger.inner.host, "released after the handler was entered");
        self.settle().await
    }

    /// The claim as something that the caller's transaction completes: see [`Completion`]. For drivers, when they have
    /// written the end of [`Held::join_end`] into that transaction.
    pub fn into_completion(self) -> Completion {
        Completion { claim: self }
    }

    async fn settle(self) -> Result<Settled, Unsettled> {
        match self.held.settle(&*self.ledger.inner.store).await {
            Ok(settled) => Ok(settled),
            Err(error) => Err(Unsettled { claim: self, error }),
        }
    }
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claim({}, {:?})", self.held.key(), self.held.phase())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "the handler panicked" } else { "the handler was cancelled" };
        let refused = self.held.phase() == Phase::Lost && self.held.is_decided();
        self.ledger.inner.keeper.forget(&self.held);
        if !refused && self.held.intend_drop(&*self.ledger.inner.host, why) {
            self.ledger.inner.keeper.settle(Arc::clone(&self.held));
        }
    }
}

/// A completion that is written in a transaction of the caller's, and is true once that has committed.
///
/// Dropped without a word, the ledger's keeper finds out what became of the transaction; a claim whose transaction was
/// rolled back is a failed attempt then.
#[must_use = "say with `committed` that the transaction has committed, or ask with `find_out` what became of it"]
#[derive(Debug)]
pub struct Completion {
    claim: Claim,
}

impl Completion {
    /// The transaction has committed: its server has said so.
    pub fn committed(self) {
        if let Some(end) = self.claim.held.join_committed() {
            self.claim.ledger.inner.store.told(self.claim.held.key(), &end);
        }
    }

    /// What became of the transaction whose commit failed or was not answered. With [`Joined::RolledBack`] the claim goes
    /// on, and comes back.
    ///
    /// # Errors
    /// The store's with the completion, [`ErrorKind::Locked`] while the transaction is still open: ask again.
    pub async fn find_out(self) -> Result<(Joined, Claim), Unresolved> {
        let inner = &self.claim.ledger.inner;
        match self.claim.held.resolve(&*inner.store, &*inner.host).await {
            Ok(joined) => {
                if let Joined::Committed(end) = &joined {
                    inner.store.told(self.claim.held.key(), end);
                }
                Ok((joined, self.claim))
            }
            Err(error) => Err(Unresolved { completion: self, error }),
        }
    }

    /// The claim as the process holds it.
    #[must_use]
    pub fn held(&self) -> &Arc<Held> {
        &self.claim.held
    }

    /// The ledger that gave the claim.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.claim.ledger
    }
}

/// Nobody could say yet what became of a transaction.
#[must_use = "what became of the transaction is not known; ask again"]
#[derive(Debug)]
pub struct Unresolved {
    /// To ask again with.
    pub completion: Completion,
    /// Why.
    pub error: Error,
}

/// A completion that was not written into the caller's transaction, which is to be rolled back: the claim was lost, or the
/// output cannot be kept. Turned into its [`Error`], it drops the claim: a failed attempt, if the claim still holds.
#[must_use = "the transaction is to be rolled back, and the claim ended by `fail`, or locked again"]
#[derive(Debug)]
pub struct Refused {
    /// The claim, as it was.
    pub claim: Claim,
    /// Why.
    pub error: Error,
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        refused.error
    }
}

/// The end of a claim that could not be written: whether it is stored is unknown.
#[must_use = "the end of the claim is not known to be stored; ask again"]
#[derive(Debug)]
pub struct Unsettled {
    claim: Claim,
    /// Why.
    pub error: Error,
}

impl Unsettled {
    /// Writes the same end again. One that was stored is recognised.
    ///
    /// # Errors
    /// The store's, with the claim.
    pub async fn again(self) -> Result<Settled, Unsettled> {
        self.claim.settle().await
    }

    /// The claim.
    #[must_use]
    pub fn held(&self) -> &Arc<Held> {
        &self.claim.held
    }

    /// Gives up; the ledger's keeper goes on in the background.
    #[must_use]
    pub fn into_error(self) -> Error {
        self.error
    }
}

/// What came back with a claim or a completion says what its error says, so that `?` takes it as an error too.
macro_rules! says_its_error {
    ($($kind:ident),+) => {
        $(
            impl std::fmt::Display for $kind {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    write!(f, "{}", self.error)
                }
            }

            impl std::error::Error for $kind {
                fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                    Some(&self.error)
                }
            }
        )+
    };
}

says_its_error!(Unsettled, Unresolved, Refused);
