//! The port over two stores: `FastCheck`.

use std::sync::Arc;

use async_trait::async_trait;
use taskonce_core::Result;
use taskonce_core::key::Key;
use taskonce_core::record::{Age, Fence, Found, Output, Record, State};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::board::{ASKING_MAX, Belief};
use crate::counts::{Counts, Tally};
use crate::examine;
use crate::front::{Laid, There};
use crate::generation::Mark;
use crate::hint::{Hint, Tells};
use crate::options::{DoneHint, Options};
use crate::process::{Process, WRITES_MAX};
use crate::write::Asker;

/// How often one claim looks at the front: once, and once more when another caller has asked the database meanwhile.
const LOOKS_MAX: usize = 2;

/// A fast store in front of a transactional one. Cheap to clone; clones share what the process knows.
#[derive(Clone)]
pub struct FastCheck {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) front: Arc<dyn Store>,
    pub(crate) ledger: Arc<dyn Store>,
    pub(crate) options: Options,
    pub(crate) tally: Tally,
    opened: Process,
}

/// What a claim makes of what the front says.
enum Judgement {
    /// This is the answer.
    Answer(Found),
    /// The record is read in the database, and is the answer.
    Verify,
    /// The database is asked, in the normal way; by this one for all others of the process, if so.
    Ask(Option<Asker>),
    /// Another asks just now: when this is closed, the front is looked at again.
    Follow(Arc<Semaphore>),
}

impl FastCheck {
    /// Puts `front` in front of `ledger`. Needs a tokio runtime with its time driver.
    ///
    /// The front holds hints, and nothing is lost with it. It must not be a store that is used as a ledger by itself: what
    /// is no hint there is left alone, and its tasks go without.
    #[must_use]
    pub fn new(front: Arc<dyn Store>, ledger: Arc<dyn Store>, options: Options) -> FastCheck {
        let opened = Process::new(&options);
        FastCheck { inner: Arc::new(Inner { front, ledger, options, tally: Tally::default(), opened }) }
    }

    /// What it has done in this process.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner.tally.snapshot()
    }

    /// Waits until no hint of this process is being written in the background: before the process ends, or to see in a
    /// test what the front was told.
    pub async fn hints_written(&self) {
        let writes = Arc::clone(&self.inner.here().writes);
        // Fails only when it is closed, which it never is.
        let _all = writes.acquire_many(WRITES_MAX as u32).await;
    }
}

impl std::fmt::Debug for FastCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FastCheck({:?}, {:?})", self.inner.options, self.counts())
    }
}

impl Inner {
    /// What the current process knows.
    pub(crate) fn here(&self) -> &Process {
        self.opened.here(&self.options)
    }

    /// Has the database's generation read in the background when it is due.
    fn keep_generation(self: &Arc<Inner>) {
        let Ok(runtime) = Handle::try_current() else { return };
        if !self.here().generation.is_due(Instant::now()) {
            return;
        }
        let inner = Arc::clone(self);
        runtime.spawn(async move {
            let asked_at = Instant::now();
            let answer = inner.ledger.generation().await;
            if inner.here().generation.learn(asked_at, &answer) {
                tracing::warn!("the database has lost or may have lost writes: hints of before do not count any more");
            }
        });
    }

    /// A claim, as if nothing were there: most are of new tasks, or of duplicates.
    async fn claim(self: &Arc<Inner>, key: &Key, record: &Record) -> Result<Swap> {
        self.keep_generation();
        let Some(generation) = self.here().generation.fresh().await else {
            return self.ask_database(key, record, There::Unknown, self.here().generation.mark(), None).await;
        };
        let mut there = self.look(key).await;
        for _ in 0..LOOKS_MAX {
            match self.judge(key, record, &there, &generation) {
                Judgement::Answer(found) => return Ok(Swap::Conflict(Some(found))),
                Judgement::Verify => return self.verify(key, record, there, generation).await,
                Judgement::Ask(asker) => return self.ask_database(key, record, there, Some(generation), asker).await,
                Judgement::Follow(ended) => {
                    let _over = timeout(ASKING_MAX, ended.acquire()).await;
                    there = self.look(key).await;
                }
            }
        }
        self.ask_database(key, record, there, Some(generation), None).await
    }

    /// Busy may delay, never decide; and what decides is the database's, unless the user trusts what the front says.
    fn judge(self: &Arc<Inner>, key: &Key, asks: &Record, there: &There, generation: &Mark) -> Judgement {
        let laid = match there {
            There::Hint(laid) if laid.hint.generation == *generation => laid,
            There::Hint(_) => {
                self.tally.stale.add();
                return Judgement::Ask(None);
            }
            There::Unknown | There::Nothing | There::Old(_) | There::Other => return Judgement::Ask(None),
        };
        let (record, is_whole) = match &laid.hint.tells {
            Tells::Whole(record) => (record, true),
            Tells::Outline(record) => (record, false),
            Tells::Erased => return Judgement::Ask(None),
        };
        // A call that was sent before has to recognise itself, and another payload is a grave answer.
        let is_plain =
            asks.claim != record.claim && asks.token != record.token && asks.fingerprint == record.fingerprint;
        match record.state {
            State::Running if is_plain && is_whole => self.judge_running(key, record, laid),
            State::Done if is_plain && is_whole && self.trusts(generation) && is_kept(record, laid.age()) => {
                self.tally.trusted.add();
                Judgement::Answer(Found { record: Arc::clone(record), age: laid.age() })
            }
            State::Done | State::Dead => Judgement::Verify,
            State::Running | State::Waiting | State::Parked => Judgement::Ask(None),
        }
    }

    fn judge_running(self: &Arc<Inner>, key: &Key, record: &Arc<Record>, laid: &Laid) -> Judgement {
        let belief = self.here().board().look(key, laid.record.token, laid.age(), record.lease, Instant::now());
        match belief {
            Belief::Believe(age) => {
                self.tally.answered.add();
                Judgement::Answer(Found { record: Arc::clone(record), age })
            }
            Belief::Ask(turn) => Judgement::Ask(Some(Asker { inner: Arc::clone(self), key: key.clone(), turn })),
            Belief::Follow(ended) => Judgement::Follow(ended),
            Belief::AskAnyway => Judgement::Ask(None),
        }
    }

    /// Without a generation nothing would tell that the database forgot.
    fn trusts(&self, generation: &Mark) -> bool {
        match self.options.done {
            DoneHint::Verified => false,
            DoneHint::Trusted => generation.name().is_some(),
        }
    }

    /// Reads in the database what a hint says is over.
    async fn verify(self: &Arc<Inner>, key: &Key, asks: &Record, there: There, mark: Mark) -> Result<Swap> {
        self.tally.verified.add();
        self.tally.database_reads.add();
        let Some(found) = self.ledger.load(key).await? else {
            return self.ask_database(key, asks, there, Some(mark), None).await;
        };
        if found.record.token == asks.token {
            return Ok(Swap::Stored(found.record.fence));
        }
        self.tell_found(key, &found, there, &mark, None);
        Ok(Swap::Conflict(Some(found)))
    }

    /// Claims in the database. `mark` was known before.
    async fn ask_database(
        self: &Arc<Inner>,
        key: &Key,
        asks: &Record,
        there: There,
        mark: Option<Mark>,
        asker: Option<Asker>,
    ) -> Result<Swap> {
        let swap = self.ledger.swap(key, Expected::Nothing, Next::Claim(asks)).await?;
        match (&swap, &mark) {
            (Swap::Stored(fence), Some(mark)) => self.tell_claimed(key, asks, *fence, there, mark),
            (Swap::Stored(_), None) => {}
            (Swap::Conflict(found), mark) => {
                self.tally.database_reads.add();
                if let (Some(found), Some(mark)) = (found, mark) {
                    self.tell_found(key, found, there, mark, asker);
                }
            }
            // A transaction of somebody's is at it: what it will have done is not known.
            (Swap::Locked(found), mark) => {
                self.tally.database_reads.add();
                if let (Some(found), Some(mark)) = (found, mark) {
                    self.tell_locked(key, found, there, mark, asker);
                }
            }
        }
        Ok(swap)
    }

    /// The fence of the version that is about to be removed, as the database has it: who removes it may have made the record
    /// before the database gave it its fence, and a hint of a smaller one would not end what its claim's hint says.
    async fn fence_of(&self, key: &Key, expected: Expected<'_>) -> Result<Option<Fence>> {
        let found = self.ledger.load(key).await?;
        Ok(found.filter(|found| Some(found.record.token) == expected.token()).map(|found| found.record.fence))
    }

    /// Every other move: the database's, and then its hint.
    async fn change(self: &Arc<Inner>, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        self.keep_generation();
        let ends = match next {
            Next::Keep(record) | Next::Claim(record) => record.state != State::Running,
            Next::Erase => true,
        };
        if ends {
            // Only the very first call waits.
            let _fresh = self.here().generation.fresh().await;
        }
        let mark = self.here().generation.mark();
        let erased = match next {
            Next::Erase => self.fence_of(key, expected).await?,
            Next::Keep(_) | Next::Claim(_) => None,
        };
        let sent = Instant::now();
        let swap = self.ledger.swap(key, expected, next).await?;
        let (Swap::Stored(fence), Some(mark)) = (&swap, mark) else { return Ok(swap) };
        match next {
            // A heartbeat.
            Next::Keep(record) if record.state == State::Running => {}
            Next::Claim(record) if record.state == State::Running => {
                self.tell_claimed(key, record, *fence, There::Unknown, &mark);
            }
            Next::Keep(record) | Next::Claim(record) => {
                let hint = Hint::of(record, *fence, Age::default(), &mark, self.detail());
                self.tell_written(key, &hint, None, sent).await;
            }
            Next::Erase => self.tell_erased(key, erased, &mark).await,
        }
        Ok(swap)
    }
}

/// Whether a record and its output are within their retention.
fn is_kept(record: &Record, age: Age) -> bool {
    let output_is_kept = match record.output {
        Output::Kept { .. } => !age.has_passed(record.output_retention),
        Output::Nothing | Output::Dropped(_) => true,
    };
    output_is_kept && !age.has_passed(record.retention)
}

#[async_trait]
impl Store for FastCheck {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.inner.ledger.load(key).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        match (expected, next) {
            (Expected::Nothing, Next::Claim(record)) if record.state == State::Running => {
                self.inner.claim(key, record).await
            }
            (Expected::Nothing | Expected::Token(_) | Expected::Record(_), _) => {
                self.inner.change(key, expected, next).await
            }
        }
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.inner.ledger.scan(filter, cursor).await
    }

    /// The ledger's. No hint outlives the retention of its record, so none is left of what is purged.
    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.inner.ledger.purge(filter).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        self.inner.keep_generation();
        let discarded = self.inner.ledger.discard(key).await?;
        if let (true, Some(mark)) = (discarded, self.inner.here().generation.mark()) {
            self.inner.forget(key, &mark).await;
        }
        Ok(discarded)
    }

    /// The ledger's: a hint may get lost, and a wait must not.
    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        self.inner.ledger.changed(key, seen).await
    }

    fn told(&self, key: &Key, end: &Arc<Record>) {
        self.inner.tell_committed(key, end);
    }

    async fn examine(&self) -> Vec<Finding> {
        examine::findings(&self.inner).await
    }

    fn memory(&self) -> Memory {
        self.inner.ledger.memory()
    }

    fn ground(&self) -> Option<Ground> {
        self.inner.ledger.ground()
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        self.inner.ledger.generation().await
    }
}
