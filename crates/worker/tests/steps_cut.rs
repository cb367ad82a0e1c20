//! Runs of several steps, cut off anywhere and run again: each effect of a step happens once, or with one key.

#![allow(clippy::unwrap_used)] // test helpers outside of `#[test]` functions

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use proptest::prelude::*;
use taskonce_core::host::{Host, NoKeeper};
use taskonce_core::json::Input;
use taskonce_core::key::{DownstreamKey, Handler, Key};
use taskonce_core::ledger::Ledger;
use taskonce_core::memory::MemoryStore;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Found, Record};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_worker::{Outcome, Run, SystemHost};
use tokio::sync::Notify;

/// The most steps of a random handler.
const STEPS: usize = 5;
/// The most times that it is cut off.
const CUTS: usize = 4;

/// The life of one process: so many more points that it passes, then nothing of it happens any more.
#[derive(Clone)]
struct Life {
    left: Arc<Mutex<usize>>,
    ended: Arc<Notify>,
}

impl Life {
    fn of(points: usize) -> Life {
        Life { left: Arc::new(Mutex::new(points)), ended: Arc::default() }
    }

    /// A point at which the process may be cut off.
    async fn point(&self) {
        let over = {
            let mut left = self.left.lock().unwrap();
            let over = *left == 0;
            *left = left.saturating_sub(1);
            over
        };
        if over {
            self.ended.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

/// A store that a process reaches as long as it lives, and whose answers are lost now and then.
struct Reached {
    store: MemoryStore,
    life: Life,
    /// Calls until an answer is lost.
    lose: Mutex<usize>,
}

#[async_trait]
impl Store for Reached {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.store.load(key).await
    }
    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        self.life.point().await;
        let answer = self.store.swap(key, expected, next).await?;
        self.life.point().await;
        let mut lose = self.lose.lock().unwrap();
        *lose = lose.wrapping_sub(1);
        if *lose == 0 { Err(Error::new(ErrorKind::TimedOut, "planted: the answer is lost")) } else { Ok(answer) }
    }
    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        self.store.scan(filter, cursor).await
    }
    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        self.store.purge(filter).await
    }
    async fn discard(&self, key: &Key) -> Result<bool> {
        self.store.discard(key).await
    }
    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        self.store.changed(key, seen).await
    }
    async fn examine(&self) -> Vec<Finding> {
        self.store.examine().await
    }
    fn told(&self, key: &Key, end: &Arc<Record>) {
        self.store.told(key, end);
    }
    fn memory(&self) -> Memory {
        self.store.memory()
    }
    fn ground(&self) -> Option<Ground> {
        self.store.ground()
    }
    async fn generation(&self) -> Result<Option<Generation>> {
        self.store.generation().await
    }
}

type Effects = Arc<Mutex<Vec<(usize, DownstreamKey)>>>;

/// One process runs the handler, as far as it comes.
async fn live(
    store: &MemoryStore,
    kinds: &[Effect],
    points: usize,
    lose: usize,
    effects: &Effects,
) -> Option<Outcome<usize>> {
    let life = Life::of(points);
    let reached = Reached { store: store.clone(), life: life.clone(), lose: Mutex::new(lose) };
    let ledger = Ledger::new(Arc::new(reached), Arc::new(SystemHost::new()), Arc::new(NoKeeper));
    let task = Handler::new("cut", "1").unwrap().task("a", &Input::from_json(b"{}").unwrap()).unwrap();
    let policy = Policy {
        lease: Duration::from_secs(3600),
        attempts_max: 100,
        crashes_max: 100,
        backoff: Backoff::NONE,
        store_may_forget: true,
        ..Policy::new(Effect::Repeatable)
    };
    let run = ledger.run(&task, &policy, |context| {
        let life = life.clone();
        async move {
            let mut sum = 0;
            for (place, kind) in kinds.iter().enumerate() {
                sum += context
                    .step_of(&format!("step {place}"), *kind)
                    .input(&sum)
                    .run(async |step| {
                        life.point().await;
                        effects.lock().unwrap().push((place, step.downstream_key()));
                        life.point().await;
                        Ok(place)
                    })
                    .await?;
            }
            Ok(sum)
        }
    });
    let outcome = tokio::select! {
        biased;
        outcome = run => outcome.ok(),
        () = life.ended.notified() => None,
    };
    // A claim of it, if there is one, has passed.
    store.age_by(&task.key, 3_600_000);
    outcome
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_run_cut_off_anywhere_repeats_no_step(
        kinds in prop::collection::vec(prop::sample::select(vec![Effect::Keyed, Effect::Unrepeatable]), 1..=STEPS),
        cuts in prop::collection::vec((0..40_usize, 0..12_usize), 0..=CUTS),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let host = SystemHost::new();
            let store = MemoryStore::new(move || host.uptime());
            let effects = Effects::default();
            let mut outcome = None;
            for (points, lose) in cuts.iter().copied().chain([(usize::MAX, 0)]) {
                outcome = live(&store, &kinds, points, lose, &effects).await;
            }
            let effects = effects.lock().unwrap().clone();
            for (place, kind) in kinds.iter().enumerate() {
                let of: Vec<DownstreamKey> = effects.iter().filter(|(of, _)| *of == place).map(|(_, key)| *key).collect();
                prop_assert!(*kind != Effect::Unrepeatable || of.len() <= 1, "step {place} ran {} times", of.len());
                prop_assert!(of.iter().all(|key| *key == of[0]), "one key");
            }
            let all = |ran: &dyn Fn(usize) -> bool| (0..kinds.len()).all(ran);
            match outcome {
                Some(Outcome::Ran { value, .. }) => {
                    prop_assert_eq!(value, (0..kinds.len()).sum::<usize>());
                    prop_assert!(all(&|place| effects.iter().any(|(of, _)| *of == place)), "each step ran");
                }
                Some(Outcome::Replayed(first)) => prop_assert_eq!(first.value, Some((0..kinds.len()).sum::<usize>())),
                Some(Outcome::Failed { failure, .. }) => {
                    prop_assert_eq!(failure.class, FailureClass::StepInDoubt);
                    prop_assert!(kinds.contains(&Effect::Unrepeatable));
                }
                Some(Outcome::Parked(seen)) => {
                    let class = seen.failure().map(|failure: &Failure| failure.class);
                    prop_assert_eq!(class, Some(FailureClass::StepInDoubt));
                }
                other => prop_assert!(false, "{other:?}"),
            }
            Ok(())
        })?;
    }
}
