//! Hints of two processes over one database: what they spare it, and what they never decide. Time is the test's own: both
//! stores and the processes go by the paused clock of its runtime.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_contract::{Delays, RecordingKeeper, VirtualHost};
use taskonce_core::decide::By;
use taskonce_core::key::{Fingerprint, Handler, Key, Task};
use taskonce_core::ledger::{Admission, Claim, Ledger, Seen};
use taskonce_core::memory::MemoryStore;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Found, Output, Record, State};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Level, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{ErrorKind, Result};
use taskonce_fast_check::{DoneHint, FastCheck, Options};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance};

mod common;

use common::Watched;

const LEASE: Duration = Duration::from_secs(30);
const EVA: By<'static> = By { who: "eva", why: "it is right now" };

/// A store that goes by the runtime's clock, or by one that stands still.
fn memory(is_frozen: bool) -> MemoryStore {
    let start = Instant::now();
    MemoryStore::new(move || if is_frozen { Duration::ZERO } else { start.elapsed() })
}

/// A front that can be told to hang, and to hold its writes back.
struct Front {
    inner: MemoryStore,
    hangs: AtomicBool,
    /// A write takes a permit, where there is a gate.
    gate: Mutex<Option<Arc<Semaphore>>>,
    loads: AtomicUsize,
}

impl Front {
    fn over(inner: MemoryStore) -> Arc<Front> {
        Arc::new(Front { inner, hangs: AtomicBool::new(false), gate: Mutex::default(), loads: AtomicUsize::new(0) })
    }

    async fn reach(&self) {
        if self.hangs.load(Ordering::SeqCst) {
            pending::<()>().await;
        }
    }
}

#[async_trait]
impl Store for Front {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        self.reach().await;
        self.inner.load(key).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        self.reach().await;
        let gate = self.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
        self.inner.swap(key, expected, next).await
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.inner.scan(filter, cursor).await
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.inner.purge(filter).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        self.inner.discard(key).await
    }

    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        self.inner.changed(key, seen).await
    }

    async fn examine(&self) -> Vec<Finding> {
        self.inner.examine().await
    }

    fn told(&self, key: &Key, end: &Arc<Record>) {
        self.inner.told(key, end);
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn ground(&self) -> Option<Ground> {
        self.inner.ground()
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        self.inner.generation().await
    }
}

/// One database and one front, and the processes over them.
struct Scene {
    database: Arc<Watched>,
    records: MemoryStore,
    front: Arc<Front>,
    options: Options,
}

/// A process.
struct Process {
    ledger: Ledger,
    fast: FastCheck,
}

impl Scene {
    fn new() -> Scene {
        Scene::with(Options::default(), memory(false))
    }

    fn trusting() -> Scene {
        Scene::with(Options { done: DoneHint::Trusted, ..Options::default() }, memory(false))
    }

    fn with(options: Options, front: MemoryStore) -> Scene {
        let records = memory(false);
        let database = Watched::new(Arc::new(records.clone()), Some("1"));
        Scene { database, records, front: Front::over(front), options }
    }

    fn process(&self, name: &str) -> Process {
        let front = Arc::clone(&self.front) as Arc<dyn Store>;
        let database = Arc::clone(&self.database) as Arc<dyn Store>;
        let fast = FastCheck::new(front, database, self.options.clone());
        let host = VirtualHost::new(name, Arc::default(), u64::from(name.as_bytes()[0]), Delays::Drawn);
        let keeper = Arc::new(RecordingKeeper::default());
        Process { ledger: Ledger::new(Arc::new(fast.clone()), Arc::new(host), keeper), fast }
    }
}

impl Process {
    async fn ask(&self, id: &str) -> Admission {
        let admission = self.ledger.claim(&task(id), &policy()).await.unwrap();
        self.fast.hints_written().await;
        admission
    }

    async fn run(&self, id: &str) -> Claim {
        run(self.ask(id).await)
    }

    async fn complete(&self, id: &str) -> Arc<Record> {
        let claim = self.run(id).await;
        match claim.complete(output()).await.unwrap() {
            taskonce_core::held::Settled::Recorded(record) => record,
            other => panic!("it is recorded; it was {other:?}"),
        }
    }
}

fn output() -> Output {
    Output::kept("text/plain", "result")
}

fn key(id: &str) -> Key {
    Handler::new("hints", "1").unwrap().key(id).unwrap()
}

fn task(id: &str) -> Task {
    Task { key: key(id), fingerprint: Fingerprint([1; 16]) }
}

fn policy() -> Policy {
    Policy { lease: LEASE, backoff: Backoff::NONE, store_may_forget: true, ..Policy::new(Effect::Keyed) }
}

#[track_caller]
fn run(admission: Admission) -> Claim {
    match admission {
        Admission::Run(claim) => claim,
        other => panic!("the task runs; the answer was {other:?}"),
    }
}

#[track_caller]
fn busy(admission: Admission) -> Seen {
    match admission {
        Admission::Busy(seen) => seen,
        other => panic!("the task is busy; the answer was {other:?}"),
    }
}

#[track_caller]
fn replay(admission: Admission) -> Seen {
    match admission {
        Admission::Replay(seen) => seen,
        other => panic!("the task is done; the answer was {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_running_task_is_answered_without_the_database() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let claim = a.run("x").await;
    scene.database.take_questions();
    advance(Duration::from_secs(4)).await;
    let seen = busy(b.ask("x").await);
    assert_eq!((seen.owner(), seen.attempt(), scene.database.take_questions()), ("a", 1, 0));
    assert_eq!(seen.defer_for(), LEASE - Duration::from_secs(4));
    assert_eq!((b.fast.counts().answered, b.fast.counts().database_reads), (1, 0));
    drop(claim);
}

#[tokio::test(start_paused = true)]
async fn a_fresh_claim_costs_one_read_of_the_front_and_one_write_of_the_database() {
    let scene = Scene::new();
    let a = scene.process("a");
    drop(a.run("warm").await);
    scene.database.take_questions();
    let before = scene.front.loads.load(Ordering::SeqCst);
    drop(a.run("x").await);
    assert_eq!(scene.database.take_questions(), 1);
    assert_eq!(scene.front.loads.load(Ordering::SeqCst) - before, 1);
}

/// A queue went mad and delivered one task ten thousand times while it ran.
#[tokio::test(start_paused = true)]
async fn a_storm_of_busy_duplicates_costs_the_database_next_to_nothing() {
    const DUPLICATES: usize = 10_000;
    const AT_ONCE: usize = 100;
    let scene = Scene::new();
    let a = scene.process("a");
    let claim = a.run("x").await;
    let others = [Arc::new(scene.process("b")), Arc::new(scene.process("c"))];
    scene.database.take_questions();
    for round in 0..DUPLICATES / AT_ONCE {
        let mut all = JoinSet::new();
        for number in 0..AT_ONCE {
            let process = Arc::clone(&others[number % others.len()]);
            all.spawn(async move { drop(busy(process.ask("x").await)) });
        }
        all.join_all().await;
        // Two minutes in all, with a heartbeat now and then: hints grow old and are written anew.
        advance(Duration::from_millis(1200)).await;
        if round % 8 == 0 {
            claim.heartbeat().await.unwrap();
        }
    }
    let questions = scene.database.take_questions();
    assert!((1..=100).contains(&questions), "{questions} questions of {DUPLICATES} duplicates");
    drop(claim);
}

#[tokio::test(start_paused = true)]
async fn a_hint_that_is_older_than_the_lease_lets_one_ask_for_all() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), Arc::new(scene.process("b")));
    let claim = a.run("x").await;
    for _ in 0..4 {
        advance(LEASE / 3).await;
        claim.heartbeat().await.unwrap();
    }
    scene.database.take_questions();
    let mut all = JoinSet::new();
    for _ in 0..64 {
        let b = Arc::clone(&b);
        all.spawn(async move { drop(busy(b.ask("x").await)) });
    }
    all.join_all().await;
    let questions = scene.database.take_questions();
    assert!((1..=2).contains(&questions), "{questions} questions");
    drop(claim);
}

/// The front's clock stands still, or the holder is dead and its hint stays: it delays, and does not decide.
#[tokio::test(start_paused = true)]
async fn a_front_whose_clock_stands_still_blocks_no_task_beyond_its_lease() {
    let scene = Scene::with(Options::default(), memory(true));
    let (a, b) = (scene.process("a"), scene.process("b"));
    let dead = a.run("x").await;
    scene.database.take_questions();
    let start = Instant::now();
    let claim = loop {
        match b.ask("x").await {
            Admission::Run(claim) => break claim,
            other => drop(busy(other)),
        }
        assert!(start.elapsed() < LEASE * 2, "it is blocked");
        advance(Duration::from_secs(1)).await;
    };
    let (waited, questions) = (start.elapsed(), scene.database.take_questions());
    assert!(waited >= LEASE && waited <= LEASE + LEASE / 3, "{waited:?}");
    assert!(questions <= 6, "{questions} questions in {waited:?}");
    assert_eq!((claim.attempt(), claim.held().crashes()), (2, 1));
    drop((dead, claim));
}

#[tokio::test(start_paused = true)]
async fn an_end_whose_hint_was_lost_is_seen_after_a_third_of_the_lease() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let claim = a.run("x").await;
    scene.front.hangs.store(true, Ordering::SeqCst);
    claim.complete(output()).await.unwrap();
    scene.front.hangs.store(false, Ordering::SeqCst);
    busy(b.ask("x").await);
    advance(LEASE / 3).await;
    assert_eq!(replay(b.ask("x").await).output(), &output());
}

#[tokio::test(start_paused = true)]
async fn a_done_task_costs_one_read_and_a_trusted_one_none() {
    for (scene, wanted) in [(Scene::new(), 1), (Scene::trusting(), 0)] {
        let (a, b) = (scene.process("a"), scene.process("b"));
        a.complete("x").await;
        drop(b.run("warm").await);
        scene.database.take_questions();
        advance(Duration::from_secs(3)).await;
        for _ in 0..5 {
            let seen = replay(b.ask("x").await);
            assert_eq!((seen.output(), seen.owner(), seen.age()), (&output(), "a", Duration::from_secs(3)));
            assert_eq!(scene.database.take_questions(), wanted);
        }
        let counts = b.fast.counts();
        assert_eq!((counts.verified, counts.trusted), if wanted == 1 { (5, 0) } else { (0, 5) });
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_trusted_of_a_database_that_names_no_generation() {
    let scene = Scene { database: Watched::new(Arc::new(memory(false)), None), ..Scene::trusting() };
    let (a, b) = (scene.process("a"), scene.process("b"));
    a.complete("x").await;
    replay(b.ask("x").await);
    assert_eq!((b.fast.counts().trusted, b.fast.counts().verified), (0, 1));
    let findings = b.fast.examine().await;
    assert!(findings.iter().any(|found| found.level == Level::Warning && found.text.contains("`trust_done`")));
}

/// An asynchronous standby was promoted, and lacks the last commits. What it forgot must run again.
#[tokio::test(start_paused = true)]
async fn a_stale_hint_of_a_database_that_forgot_is_never_replayed() {
    for scene in [Scene::trusting(), Scene::new()] {
        let (a, b) = (scene.process("a"), scene.process("b"));
        let done = a.complete("x").await;
        replay(b.ask("x").await);
        let gone = scene.records.swap(&key("x"), Expected::Record(&done), Next::Erase).await.unwrap();
        assert!(matches!(gone, Swap::Stored(_)));
        scene.database.set_generation("2");
        // It is noticed late, as the generation is read on a timer; a call has it read.
        advance(scene.options.generation_every).await;
        drop(b.ask("other").await);
        tokio::task::yield_now().await;
        assert_eq!(b.run("x").await.attempt(), 1);
        assert!(b.fast.counts().stale >= 1);
        // Who has not noticed is one who has not read it for long, and then no hint counts.
        advance(scene.options.generation_every * 2).await;
        assert_eq!(a.fast.counts().trusted, 0);
        busy(a.ask("x").await);
    }
}

#[tokio::test(start_paused = true)]
async fn another_payload_is_judged_by_the_database() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let other = |id: &str| Task { fingerprint: Fingerprint([2; 16]), ..task(id) };
    let claim = a.run("x").await;
    a.complete("y").await;
    drop(b.run("warm").await);
    scene.database.take_questions();
    for id in ["x", "y"] {
        let answer = b.ledger.claim(&other(id), &policy()).await.unwrap();
        assert!(matches!(answer, Admission::Mismatch { .. }), "{answer:?}");
        assert_eq!(scene.database.take_questions(), 1);
    }
    drop(claim);
}

/// The hint of a claim arrives when the task has long ended.
#[tokio::test(start_paused = true)]
async fn a_late_busy_overwrites_no_end() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    drop(a.run("warm").await);
    let gate = Arc::new(Semaphore::new(0));
    *scene.front.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let claim = run(a.ledger.claim(&task("x"), &policy()).await.unwrap());
    tokio::task::yield_now().await;
    // The end passes it on the way.
    *scene.front.gate.lock().unwrap() = None;
    claim.complete(output()).await.unwrap();
    let end = scene.front.inner.load(&key("x")).await.unwrap().unwrap().record;
    gate.add_permits(1);
    a.fast.hints_written().await;
    assert_eq!(scene.front.inner.load(&key("x")).await.unwrap().unwrap().record, end);
    replay(b.ask("x").await);
}

/// Only what the database holds is hinted at: a hint before it would answer for what never was.
#[tokio::test(start_paused = true)]
async fn what_the_database_did_not_store_is_not_hinted_at() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    drop((a.run("warm").await, b.run("warm too").await));
    let hints = scene.front.inner.len();
    scene.database.set_away(true);
    a.ledger.claim(&task("x"), &policy()).await.expect_err("the database is away");
    a.fast.hints_written().await;
    assert_eq!(scene.front.inner.len(), hints);
    scene.database.set_away(false);
    let claim = a.run("x").await;
    let hint = scene.front.inner.load(&key("x")).await.unwrap().unwrap().record;
    scene.database.set_away(true);
    let open = claim.complete(output()).await.expect_err("the database is away");
    assert_eq!(scene.front.inner.load(&key("x")).await.unwrap().unwrap().record, hint);
    scene.database.set_away(false);
    busy(b.ask("x").await);
    drop(open);
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_away_is_not_hidden() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    a.complete("done").await;
    let failed = a.run("dead").await;
    failed.fail(Failure::permanent("no")).await.unwrap();
    let claim = a.run("running").await;
    drop(b.run("warm").await);
    scene.database.set_away(true);
    for id in ["done", "dead", "new"] {
        let error = b.ledger.claim(&task(id), &policy()).await.expect_err("the database is away");
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{id}");
    }
    busy(b.ask("running").await);
    advance(LEASE / 3).await;
    let error = b.ledger.claim(&task("running"), &policy()).await.expect_err("it is asked at last");
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    drop(claim);
}

#[tokio::test(start_paused = true)]
async fn a_takeover_and_a_late_completion_leave_the_hint_of_who_won() {
    let scene = Scene::trusting();
    let (a, b, c) = (scene.process("a"), scene.process("b"), scene.process("c"));
    let stale = a.run("x").await;
    advance(LEASE).await;
    let claim = b.run("x").await;
    assert_eq!(claim.attempt(), 2);
    assert_eq!(busy(c.ask("x").await).owner(), "b");
    let refused = stale.complete(Output::Nothing).await.unwrap();
    assert!(matches!(refused, taskonce_core::held::Settled::Lost(_)));
    assert_eq!(busy(c.ask("x").await).owner(), "b");
    claim.complete(output()).await.unwrap();
    assert_eq!(replay(c.ask("x").await).output(), &output());

    let late = a.run("y").await;
    advance(LEASE * 3).await;
    late.complete(output()).await.unwrap();
    assert_eq!(replay(c.ask("y").await).output(), &output());
}

#[tokio::test(start_paused = true)]
async fn what_a_person_changes_ends_what_was_hinted_at() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    a.run("x").await.fail(Failure::permanent("no")).await.unwrap();
    assert!(matches!(b.ask("x").await, Admission::Dead(_)));
    let redriven = b.ledger.redrive(&key("x"), EVA).await.unwrap();
    let claim = a.run("x").await;
    assert!(claim.fence() > redriven.fence || claim.attempt() == 1);
    claim.complete(output()).await.unwrap();
    replay(b.ask("x").await);
    b.ledger.clear(&key("x"), EVA).await.unwrap();
    scene.database.take_questions();
    let again = a.run("x").await;
    assert_eq!((again.attempt(), scene.database.take_questions()), (1, 1));
    assert_eq!(busy(b.ask("x").await).owner(), "a");
    drop(again);
}

/// The end was written by a transaction of the caller's, past the store's swap.
#[tokio::test(start_paused = true)]
async fn what_a_transaction_of_the_callers_committed_is_hinted_at() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let claim = a.run("x").await;
    assert!(claim.held().join().await);
    let found = scene.records.load(&key("x")).await.unwrap().unwrap().record;
    let host = VirtualHost::new("a", Arc::default(), 9, Delays::Drawn);
    let end = claim.held().join_end(&host, &found, output()).unwrap();
    let swap = scene.records.swap(&key("x"), Expected::Record(&found), Next::Keep(&end)).await.unwrap();
    assert!(matches!(swap, Swap::Stored(_)));
    claim.into_completion().committed();
    a.fast.hints_written().await;
    scene.database.take_questions();
    // When it committed is not known, and so the first duplicate verifies it, also where hints are trusted.
    for wanted in [1, 0] {
        assert_eq!(replay(b.ask("x").await).output(), &output());
        assert_eq!(scene.database.take_questions(), wanted);
    }
}

/// A transaction that is longer than its lease holds the record, and a storm of duplicates comes meanwhile.
#[tokio::test(start_paused = true)]
async fn duplicates_of_what_a_transaction_holds_are_spared_the_database_too() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let claim = a.run("x").await;
    drop(b.run("warm").await);
    scene.database.set_locked(true);
    advance(LEASE * 2).await;
    scene.database.take_questions();
    for _ in 0..100 {
        busy(b.ask("x").await);
        advance(Duration::from_millis(50)).await;
    }
    let questions = scene.database.take_questions();
    assert!((4..=8).contains(&questions), "{questions} questions in 5 s");
    scene.database.set_locked(false);
    advance(Duration::from_secs(1)).await;
    assert_eq!(b.run("x").await.attempt(), 2);
    drop(claim);
}

/// The front is away when a person clears: the clear succeeds, and the hint is stale. Verified, it is harmless.
#[tokio::test(start_paused = true)]
async fn a_person_needs_no_front() {
    let scene = Scene::new();
    let (a, b) = (scene.process("a"), scene.process("b"));
    a.complete("x").await;
    a.run("y").await.fail(Failure::permanent("no")).await.unwrap();
    scene.front.hangs.store(true, Ordering::SeqCst);
    b.ledger.clear(&key("x"), EVA).await.unwrap();
    b.ledger.redrive(&key("y"), EVA).await.unwrap();
    scene.front.hangs.store(false, Ordering::SeqCst);
    for id in ["x", "y"] {
        assert_eq!(a.run(id).await.attempt(), 1);
    }
}

/// Only Done is trusted, and of a person's changes a `clear` alone undoes it.
#[tokio::test(start_paused = true)]
async fn of_what_a_person_changes_past_the_front_only_a_clear_is_not_noticed() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    let host = VirtualHost::new("eva", Arc::default(), 9, Delays::Drawn);
    let records: Arc<dyn Store> = Arc::new(scene.records.clone());
    let past_the_front = Ledger::new(records, Arc::new(host), Arc::new(RecordingKeeper::default()));

    a.run("dead").await.fail(Failure::permanent("no")).await.unwrap();
    assert!(matches!(b.ask("dead").await, Admission::Dead(_)));
    past_the_front.redrive(&key("dead"), EVA).await.unwrap();
    assert_eq!(b.run("dead").await.attempt(), 1);
    for id in ["was done", "was not done"] {
        a.run(id).await.fail(Failure::new(FailureClass::StepInDoubt, "cut off")).await.unwrap();
        assert!(matches!(b.ask(id).await, Admission::Parked(_)));
    }
    past_the_front.resolve_done(&key("was done"), EVA, Some(output())).await.unwrap();
    assert_eq!(replay(b.ask("was done").await).output(), &output());
    past_the_front.resolve_not_done(&key("was not done"), EVA).await.unwrap();
    assert_eq!(b.run("was not done").await.attempt(), 1);

    a.complete("cleared").await;
    past_the_front.clear(&key("cleared"), EVA).await.unwrap();
    assert_eq!(replay(b.ask("cleared").await).output(), &output(), "what the page tells of");
    advance(scene.options.hint_life + Duration::from_secs(1)).await;
    assert_eq!(b.run("cleared").await.attempt(), 1);
}

/// The write of an end is slow on its way to the front, and a person has cleared the task meanwhile.
#[tokio::test(start_paused = true)]
async fn a_late_done_does_not_come_back_after_a_clear() {
    let scene = Scene::trusting();
    let (a, b) = (scene.process("a"), scene.process("b"));
    drop(b.run("warm").await);
    let claim = a.run("x").await;
    let gate = Arc::new(Semaphore::new(0));
    *scene.front.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let completing = tokio::spawn(async move { claim.complete(output()).await });
    while scene.records.load(&key("x")).await.unwrap().unwrap().record.state != State::Done {
        tokio::task::yield_now().await;
    }
    *scene.front.gate.lock().unwrap() = None;
    b.ledger.clear(&key("x"), EVA).await.unwrap();
    gate.add_permits(8);
    completing.await.unwrap().unwrap();
    assert_eq!(b.run("x").await.attempt(), 1);
}

/// The claim's hint had the fence that the database gave, the removal's that of the caller's record: it was refused, and the key
/// was busy until the hint's life ended.
#[tokio::test(start_paused = true)]
async fn a_removed_key_can_be_claimed_again_whatever_fence_its_remover_knew() {
    let scene = Scene::new();
    let a = scene.process("a");
    drop(a.run("warm").await);
    for token in 1..8 {
        let record = Record {
            fence: taskonce_core::record::Fence(0),
            ..taskonce_contract::records::plain(State::Running, token)
        };
        let swap = a.fast.swap(&key("x"), Expected::Nothing, Next::Claim(&record)).await.unwrap();
        assert!(matches!(swap, Swap::Stored(_)), "claim {token}: {swap:?}");
        // Each second one is removed before its claim's hint is written.
        if token % 2 == 0 {
            a.fast.hints_written().await;
        }
        let expected = if token % 3 == 0 { Expected::Token(record.token) } else { Expected::Record(&record) };
        let swap = a.fast.swap(&key("x"), expected, Next::Erase).await.unwrap();
        assert!(matches!(swap, Swap::Stored(_)), "removal {token}: {swap:?}");
        a.fast.hints_written().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_no_hint_is_left_alone() {
    let scene = Scene::new();
    let a = scene.process("a");
    let foreign = taskonce_contract::records::plain(State::Done, 7);
    scene.front.inner.swap(&key("x"), Expected::Nothing, Next::Keep(&foreign)).await.unwrap();
    a.complete("x").await;
    replay(a.ask("x").await);
    assert_eq!(*scene.front.inner.load(&key("x")).await.unwrap().unwrap().record, foreign);
    // And what is broken makes room.
    scene.front.inner.put_raw(&key("y"), b"garbage".to_vec());
    a.complete("y").await;
    replay(a.ask("y").await);
    assert!(scene.front.inner.load(&key("y")).await.unwrap().is_some());
}

/// A front that hangs: each of its calls would cost 50 ms.
#[tokio::test(start_paused = true)]
async fn a_front_that_hangs_costs_a_task_less_than_five_milliseconds() {
    const TASKS: u32 = 100;
    let scene = Scene::new();
    let a = scene.process("a");
    drop(a.run("warm").await);
    scene.front.hangs.store(true, Ordering::SeqCst);
    let start = Instant::now();
    for number in 0..TASKS {
        let claim = run(a.ledger.claim(&task(&number.to_string()), &policy()).await.unwrap());
        claim.complete(output()).await.unwrap();
    }
    let added = start.elapsed() / TASKS;
    assert!(added < Duration::from_millis(5), "{added:?} a task");
    let counts = a.fast.counts();
    assert!(counts.degraded >= u64::from(TASKS) && counts.openings == 1, "{counts:?}");
    let findings = a.fast.examine().await;
    assert!(findings.iter().any(|found| found.subject == "fast check" && found.level == Level::Warning));

    // It comes back, which a probe finds out in the background.
    scene.front.hangs.store(false, Ordering::SeqCst);
    let mut tries = 0;
    while a.fast.examine().await.iter().any(|found| found.subject == "fast check" && found.level == Level::Warning) {
        advance(Duration::from_millis(100)).await;
        drop(a.ask("probe").await);
        tries += 1;
        assert!(tries < 100, "it is not found");
    }
    let before = a.fast.counts();
    a.complete("after").await;
    assert_eq!(a.fast.counts().degraded, before.degraded);
}

/// A front that fails at once, with half of its calls.
#[tokio::test(start_paused = true)]
async fn the_faults_of_a_front_are_no_faults() {
    let scene = Scene::new();
    let findings = scene.process("a").fast.examine().await;
    let front: Vec<_> = findings.iter().filter(|found| found.subject.starts_with("front: ")).collect();
    assert!(!front.is_empty() && front.iter().all(|found| found.level == Level::Fine), "{front:?}");
    assert!(front.iter().any(|found| found.text.contains("no task: the database decides")), "{front:?}");
}
