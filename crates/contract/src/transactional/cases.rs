//! A task that is run by the driver: handler, effect and completion in one transaction.

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::decide::By;
use taskonce_core::key::{Key, Task};
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Found, Record, State};
use taskonce_core::{ErrorKind, Result};
use taskonce_worker::{Outcome, Run as _};
use tokio::task::JoinHandle;

use super::{Act, Scene, Script};
use crate::host::Delays;
use crate::stage::{Actor, minutes, policy};

/// How many runs of one task are begun at once.
const AT_ONCE: usize = 8;
/// The longest that a case waits for another's run.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// What a run may take at most in the case of a handler that hangs.
const RUN_MAX: Duration = Duration::from_millis(200);
/// How often a case looks again for what another thread is about to do, and how long it waits in between.
const LOOKS_MAX: usize = 3000;
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Scene {
    /// Runs a task as this process.
    pub(super) async fn run(
        &self,
        actor: &Actor,
        task: &Task,
        policy: &Policy,
        script: &Arc<Script>,
    ) -> Result<Outcome<String>> {
        self.driver.run(&actor.ledger, task, policy, Duration::ZERO, Arc::clone(script)).await
    }

    /// The same in the background.
    pub(super) fn start(
        &self,
        actor: &Actor,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        script: &Arc<Script>,
    ) -> JoinHandle<Result<Outcome<String>>> {
        let (driver, ledger) = (Arc::clone(&self.driver), actor.ledger.clone());
        let (task, policy, script) = (task.clone(), policy.clone(), Arc::clone(script));
        tokio::spawn(async move { driver.run(&ledger, &task, &policy, wait_max, script).await })
    }

    /// What the key holds.
    pub(super) async fn found(&self, key: &Key) -> Found {
        self.stage.other().load(key).await.unwrap().unwrap_or_else(|| panic!("`{key}` holds a record"))
    }

    /// The state of what the key holds.
    pub(super) async fn state(&self, key: &Key) -> State {
        self.found(key).await.record.state
    }

    /// Does what the process was handed over, as its keeper does: again while the store is locked.
    pub(super) async fn work(&self, actor: &Actor) {
        let held: Vec<_> = actor.keeper.take_settles();
        for held in held {
            for look in 0.. {
                match held.settle(&*actor.store).await {
                    Ok(_settled) => break,
                    Err(error) => assert!(error.kind() == ErrorKind::Locked && look < LOOKS_MAX, "{error:?}"),
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        actor.work().await;
    }
}

pub(super) fn transactional() -> Policy {
    policy(Effect::Transactional)
}

pub(crate) fn returns(value: &str) -> Act {
    Act::Return(value.into())
}

pub(crate) fn waits_then_returns(value: &str) -> Act {
    Act::WaitThenReturn(value.into())
}

#[track_caller]
pub(crate) fn ran(outcome: Result<Outcome<String>>) -> (String, Arc<Record>) {
    match outcome {
        Ok(Outcome::Ran { value, record }) => (value, record),
        other => panic!("the task ran; it was {other:?}"),
    }
}

#[track_caller]
pub(super) fn replayed(outcome: Result<Outcome<String>>) -> String {
    match outcome {
        Ok(Outcome::Replayed(first)) => first.value.expect("the output was kept"),
        other => panic!("the first run is replayed; it was {other:?}"),
    }
}

#[track_caller]
pub(crate) fn failed(outcome: Result<Outcome<String>>) -> (Failure, Arc<Record>) {
    match outcome {
        Ok(Outcome::Failed { failure, record: Some(record) }) => (failure, record),
        other => panic!("the attempt failed, and that is recorded; it was {other:?}"),
    }
}

pub(super) async fn a_committed_effect_and_its_completion_are_seen_together(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([waits_then_returns("receipt")]);
    let run = scene.start(&actor, &task, &transactional(), Duration::ZERO, &script);
    script.entered.pass().await;
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (0, State::Running));
    script.go.open();
    let (value, record) = ran(run.await.unwrap());
    assert_eq!(value, "receipt");
    assert_eq!(scene.driver.effects(&task.key).await, 1);
    let found = scene.found(&task.key).await.record;
    assert_eq!((found.state, found.attempt, &found.output), (State::Done, 1, &record.output));
    assert_eq!((actor.keeper.kept(), actor.keeper.settles(), actor.keeper.releases()), (0, 0, 0));
}

pub(super) async fn a_duplicate_gets_the_committed_output(scene: Scene) {
    let task = scene.stage.task("a");
    let script = Script::new([returns("receipt")]);
    let first = scene.run(&scene.stage.actor("a"), &task, &transactional(), &script).await;
    assert_eq!(ran(first).0, "receipt");
    for name in ["b", "c"] {
        let again = scene.run(&scene.stage.actor(name), &task, &transactional(), &script).await;
        assert_eq!(replayed(again), "receipt");
    }
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (1, 1));
}

pub(super) async fn a_handler_that_fails_leaves_no_effect_and_is_retried_after_its_backoff(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor_with("a", Delays::Full));
    let backoff = Backoff { delay_min: minutes(10), delay_max: minutes(10), ..Backoff::NONE };
    let policy = Policy { backoff, ..transactional() };
    let script = Script::new([Act::Fail(Failure::retryable("no funds")), returns("receipt")]);
    let (failure, record) = failed(scene.run(&actor, &task, &policy, &script).await);
    assert_eq!((failure.message.as_str(), record.state), ("no funds", State::Waiting));
    assert_eq!(scene.driver.effects(&task.key).await, 0);
    let early = scene.run(&actor, &task, &policy, &script).await.unwrap();
    assert!(matches!(early, Outcome::Waiting(_)), "{early:?}");
    scene.stage.pass(minutes(11)).await;
    let (_, record) = ran(scene.run(&actor, &task, &policy, &script).await);
    assert_eq!((record.attempt, script.calls(), scene.driver.effects(&task.key).await), (2, 2, 1));
}

pub(super) async fn a_handler_that_fails_for_good_is_dead_and_takes_effect_when_it_is_redriven(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([Act::Fail(Failure::permanent("closed account")), returns("receipt")]);
    let (_, record) = failed(scene.run(&actor, &task, &transactional(), &script).await);
    assert_eq!((record.state, scene.driver.effects(&task.key).await), (State::Dead, 0));
    let dead = scene.run(&actor, &task, &transactional(), &script).await.unwrap();
    assert!(matches!(dead, Outcome::Dead(_)), "{dead:?}");
    actor.ledger.redrive(&task.key, By { who: "ann", why: "opened again" }).await.unwrap();
    let (_, record) = ran(scene.run(&actor, &task, &transactional(), &script).await);
    assert_eq!((record.attempt, scene.driver.effects(&task.key).await), (1, 1));
    assert_eq!(replayed(scene.run(&actor, &task, &transactional(), &script).await), "receipt");
}

pub(super) async fn a_handler_that_panics_leaves_nothing(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([Act::Panic, returns("receipt")]);
    let run = scene.start(&actor, &task, &transactional(), Duration::ZERO, &script);
    let panicked = run.await.expect_err("the panic goes on to the caller");
    assert!(panicked.is_panic(), "{panicked:?}");
    scene.work(&actor).await;
    let record = scene.found(&task.key).await.record;
    assert_eq!((record.state, record.attempt, scene.driver.effects(&task.key).await), (State::Waiting, 1, 0));
    assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::Dropped));
    ran(scene.run(&actor, &task, &transactional(), &script).await);
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

/// The handler blocks its thread, so that it cannot be cancelled, and returns at last.
pub(super) async fn a_handler_that_hangs_is_given_up_and_can_never_commit(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let policy = Policy { run_max: Some(RUN_MAX), ..transactional() };
    let script = Script::new([waits_then_returns("too late"), returns("receipt")]);
    let run = scene.start(&actor, &task, &policy, Duration::ZERO, &script);
    script.entered.pass().await;
    // sleeps: the handler has to hang for longer than it may
    tokio::time::sleep(RUN_MAX * 2).await;
    script.go.open();
    let (failure, record) = failed(run.await.unwrap());
    assert_eq!((failure.class, record.state), (FailureClass::RanTooLong, State::Waiting));
    assert_eq!(scene.driver.effects(&task.key).await, 0);
    let (value, record) = ran(scene.run(&actor, &task, &policy, &script).await);
    assert_eq!((value.as_str(), record.attempt, scene.driver.effects(&task.key).await), ("receipt", 2, 1));
}

pub(super) async fn a_run_that_is_dropped_inside_its_handler_can_never_commit(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([waits_then_returns("too late"), returns("receipt")]);
    let run = scene.start(&actor, &task, &transactional(), Duration::ZERO, &script);
    script.entered.pass().await;
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    script.go.open();
    scene.work(&actor).await;
    let record = scene.found(&task.key).await.record;
    assert_eq!((record.state, record.attempt, scene.driver.effects(&task.key).await), (State::Waiting, 1, 0));
    ran(scene.run(&actor, &task, &transactional(), &script).await);
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

pub(super) async fn an_output_that_is_too_large_rolls_the_effect_back(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let policy = Policy { output_max: 100, ..transactional() };
    let script = Script::new([returns(&"long ".repeat(100)), returns("short")]);
    let (failure, record) = failed(scene.run(&actor, &task, &policy, &script).await);
    assert!(failure.message.contains("output_max"), "{failure:?}");
    assert_eq!((record.state, scene.driver.effects(&task.key).await), (State::Dead, 0));
    actor.ledger.redrive(&task.key, By { who: "ann", why: "returns less now" }).await.unwrap();
    assert_eq!(ran(scene.run(&actor, &task, &policy, &script).await).0, "short");
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

pub(super) async fn of_many_runs_at_once_exactly_one_takes_effect(scene: Scene) {
    let task = scene.stage.task("a");
    let script = Script::new([waits_then_returns("receipt")]);
    let actors: Vec<_> = (0..AT_ONCE).map(|number| scene.stage.actor(&format!("actor-{number}"))).collect();
    let runs: Vec<_> =
        actors.iter().map(|actor| scene.start(actor, &task, &transactional(), Duration::ZERO, &script)).collect();
    script.entered.pass().await;
    script.go.open();
    let mut ran = 0;
    for run in runs {
        match run.await.unwrap() {
            Ok(Outcome::Ran { .. }) => ran += 1,
            Ok(Outcome::Busy(_) | Outcome::Replayed(_)) => {}
            other => panic!("the others come again, or get the first run's output; this was {other:?}"),
        }
    }
    assert_eq!((ran, script.calls(), scene.driver.effects(&task.key).await), (1, 1, 1));
}

pub(super) async fn who_waits_for_a_run_gets_what_it_committed(scene: Scene) {
    let (task, script) = (scene.stage.task("a"), Script::new([waits_then_returns("receipt")]));
    let (a, b) = (scene.stage.actor("a"), scene.stage.actor("b"));
    let first = scene.start(&a, &task, &transactional(), Duration::ZERO, &script);
    script.entered.pass().await;
    let second = scene.start(&b, &task, &transactional(), WAIT_MAX, &script);
    script.go.open();
    ran(first.await.unwrap());
    assert_eq!(replayed(second.await.unwrap()), "receipt");
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (1, 1));
}

/// The handler's success would be recorded without the transaction of its effect.
pub(super) async fn a_plain_run_of_a_transactional_effect_is_refused(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    actor.store.take_calls();
    let refused = actor.ledger.run(&task, &transactional(), |_| async { Ok::<u8, Failure>(1) }).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused:?}");
    assert!(refused.hint().contains("run_in_transaction"), "{refused:?}");
    assert_eq!(actor.store.take_calls(), 0, "nothing is claimed");
}

/// After a serialisation failure the handler is called again at once: what it sent outside of its transaction was sent twice.
pub(super) async fn a_run_in_a_transaction_is_refused_to_every_other_effect(scene: Scene) {
    let (task, actor, script) = (scene.stage.task("a"), scene.stage.actor("a"), Script::new([]));
    for effect in [Effect::Keyed, Effect::Fenced, Effect::Unrepeatable, Effect::Repeatable] {
        actor.store.take_calls();
        let refused = scene.run(&actor, &task, &policy(effect), &script).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused:?}");
        assert!(refused.to_string().contains(effect.name()) && refused.hint().contains("transactional"), "{refused:?}");
        assert_eq!((actor.store.take_calls(), script.calls()), (0, 0), "nothing is claimed");
    }
}

/// The caller's transaction would commit, and the record would stand elsewhere.
pub(super) async fn a_ledger_of_another_store_is_refused(scene: Scene) {
    let (task, script) = (scene.stage.task("a"), Script::new([]));
    let elsewhere = scene.driver.open_elsewhere().await;
    let actor = scene.stage.actor_over("a", Arc::clone(&elsewhere));
    let claim = crate::cases::run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    assert_eq!(locked.unwrap_err().kind(), ErrorKind::Unsupported);
    by_hand.roll_back().await;
    // The claim is as it was.
    assert!(matches!(claim.fail(Failure::permanent("the wrong database")).await, Ok(_settled)));
    let forgetful = scene.stage.actor_over("b", Arc::new(taskonce_core::memory::MemoryStore::new(|| Duration::ZERO)));
    let refused = scene.run(&forgetful, &task, &transactional(), &script).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (0, 0));
}
