//! A task of one step, whose effect is in another database than the ledger's.

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce_core::Result;
use taskonce_core::decide::By;
use taskonce_core::key::{Fingerprint, Handler, Task};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, State};
use taskonce_worker::{Outcome, Run as _};
use tokio::task::JoinHandle;

use super::{BesideUnderTest, Scene};
use crate::faulty::Fault;
use crate::stage::{Actor, LEASE, policy};
use crate::transactional::{Act, Script, failed, ran, returns, waits_then_returns};

/// The longest that a case waits for what another thread is about to do, and how long it waits in between.
const LOOK_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// More than the steps of a task may return together.
const TOO_LARGE: usize = 2 * 1024 * 1024;

fn task(id: &str) -> Task {
    let key = Handler::within("contract", "beside", "1").and_then(|handler| handler.key(id)).unwrap();
    Task { key, fingerprint: Fingerprint([1; 16]) }
}

/// Itself the task is keyed, since a failure in between runs it again.
fn of_steps() -> Policy {
    policy(Effect::Keyed)
}

/// A run of a task with one step, in the background.
fn start(
    scene: &Scene,
    actor: &Actor,
    task: &Task,
    input: u32,
    script: &Arc<Script>,
) -> JoinHandle<Result<Outcome<String>>> {
    let (driver, script) = (Arc::clone(&scene.driver), Arc::clone(script));
    let (ledger, task) = (actor.ledger.clone(), task.clone());
    tokio::spawn(async move {
        let policy = of_steps();
        let run = ledger.run(&task, &policy, |context| async move {
            driver.step(context.step_of("book", Effect::Transactional).input(&input), script).await
        });
        run.await
    })
}

async fn run(scene: &Scene, actor: &Actor, task: &Task, input: u32, script: &Arc<Script>) -> Result<Outcome<String>> {
    start(scene, actor, task, input, script).await.unwrap()
}

async fn clear(actor: &Actor, task: &Task) {
    actor.ledger.clear(&task.key, By { who: "ada", why: "to see what follows" }).await.unwrap();
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < LOOK_MAX, "not within {LOOK_MAX:?}: {what}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn counts(driver: &dyn BesideUnderTest) -> (usize, usize) {
    (driver.effects().await, driver.rows().await)
}

pub(super) async fn a_step_in_another_database_is_recorded_in_both_and_a_later_run_replays_it(scene: Scene) {
    scene.driver.make_table().await;
    let (task, actor) = (task("a"), scene.actor("a").await);
    let script = Script::new([returns("booked")]);
    let policy = of_steps();
    let cut_off = actor.ledger.run(&task, &policy, |context| {
        let (driver, script) = (&scene.driver, Arc::clone(&script));
        async move {
            driver.step(context.step_of("book", Effect::Transactional).input(&1), script).await?;
            Err::<String, _>(Failure::retryable("cut off behind the step"))
        }
    });
    let (_, record) = failed(cut_off.await);
    let steps: Vec<_> = record.steps.iter().map(|step| (step.name.as_str(), step.effect, step.attempt)).collect();
    assert_eq!(steps, [("book", Effect::Transactional, 1)]);
    let (value, record) = ran(run(&scene, &actor, &task, 1, &script).await);
    assert_eq!((value.as_str(), record.attempt), ("booked", 2));
    assert_eq!((script.calls(), counts(&*scene.driver).await), (1, (1, 1)));
}

/// Nobody has told the ledger of the step; its row has.
pub(super) async fn a_run_that_ends_between_the_commit_and_the_record_is_followed_by_a_short_one(scene: Scene) {
    scene.driver.make_table().await;
    let (task, actor) = (task("a"), scene.actor("a").await);
    let script = Script::new([waits_then_returns("booked")]);
    let cut_off = start(&scene, &actor, &task, 1, &script);
    script.entered.pass().await;
    // The next call is the one that records the step.
    actor.store.plan([Fault::SilentBefore]);
    script.go.open();
    until("the step has committed", async || scene.driver.rows().await == 1).await;
    cut_off.abort();
    assert!(cut_off.await.unwrap_err().is_cancelled());
    actor.store.plan([]);
    actor.work().await;
    let successor = scene.actor("b").await;
    let before = successor.ledger.show(&task.key).await.unwrap().unwrap().record;
    assert_eq!((before.state, before.steps.len()), (State::Waiting, 0));
    let (value, record) = ran(run(&scene, &successor, &task, 1, &script).await);
    assert_eq!((value.as_str(), record.attempt, record.steps[0].attempt), ("booked", 2, 1));
    assert_eq!((script.calls(), counts(&*scene.driver).await), (1, (1, 1)));
}

/// A person cleared the task while its worker was in the step: another runs it, and waits for the end of the first.
pub(super) async fn of_a_worker_that_lost_its_claim_and_a_new_one_only_the_first_takes_effect(scene: Scene) {
    scene.driver.make_table().await;
    let (task, stale, new) = (task("a"), scene.actor("stale").await, scene.actor("new").await);
    let (first, second) = (Script::new([waits_then_returns("booked by the first")]), Script::new([]));
    let stale = start(&scene, &stale, &task, 1, &first);
    first.entered.pass().await;
    clear(&new, &task).await;
    let new = start(&scene, &new, &task, 1, &second);
    until("the second waits for the first", async || scene.driver.is_waited_for().await).await;
    first.go.open();
    assert_eq!(ran(new.await.unwrap()).0, "booked by the first");
    let stale = stale.await.unwrap().unwrap();
    assert!(matches!(stale, Outcome::ClaimLost { .. }), "{stale:?}");
    assert_eq!((second.calls(), counts(&*scene.driver).await), (0, (1, 1)));
}

/// It was asked before the wait only whether the lease suffices.
pub(super) async fn a_lease_that_passes_while_a_step_waits_for_another_starts_no_effect(scene: Scene) {
    scene.driver.make_table().await;
    let (task, stale, new) = (task("a"), scene.actor("stale").await, scene.actor("new").await);
    // Its transaction is rolled back, so that the other's row can be inserted.
    let (first, second) = (Script::new([waits_then_returns(&"x".repeat(TOO_LARGE))]), Script::new([returns("late")]));
    let stale = start(&scene, &stale, &task, 1, &first);
    first.entered.pass().await;
    clear(&new, &task).await;
    let new = start(&scene, &new, &task, 1, &second);
    until("the second waits for the first", async || scene.driver.is_waited_for().await).await;
    scene.pass_for_processes(LEASE);
    first.go.open();
    let (failure, _) = failed(new.await.unwrap());
    assert!(failure.message.contains("what is left of the lease does not suffice"), "{failure:?}");
    drop(stale.await.unwrap());
    assert_eq!((second.calls(), counts(&*scene.driver).await), (0, (0, 0)));
}

pub(super) async fn a_step_whose_row_has_another_input_parks_the_task(scene: Scene) {
    scene.driver.make_table().await;
    let (task, actor) = (task("a"), scene.actor("a").await);
    let script = Script::new([returns("booked")]);
    ran(run(&scene, &actor, &task, 1, &script).await);
    // The record goes, the row stays: it decides.
    clear(&actor, &task).await;
    let (failure, record) = failed(run(&scene, &actor, &task, 2, &script).await);
    assert_eq!((failure.class, record.state), (FailureClass::StepChanged, State::Parked));
    assert!(failure.message.contains("`book` took effect with input"), "{failure:?}");
    assert_eq!((script.calls(), counts(&*scene.driver).await), (1, (1, 1)));
}

pub(super) async fn a_step_without_its_table_runs_nothing_and_says_which_command_makes_it(scene: Scene) {
    let (task, actor) = (task("a"), scene.actor("a").await);
    let script = Script::new([returns("booked")]);
    let (failure, _) = failed(run(&scene, &actor, &task, 1, &script).await);
    for part in ["no table `taskonce_step`", "`taskonce migrate --steps --store "] {
        assert!(failure.message.contains(part), "{failure:?}");
    }
    assert_eq!((script.calls(), scene.driver.effects().await), (0, 0));
    scene.driver.make_table().await;
    ran(run(&scene, &actor, &task, 1, &script).await);
    assert_eq!((script.calls(), counts(&*scene.driver).await), (1, (1, 1)));
}

/// Each leaves neither, and a later run takes effect.
pub(super) async fn a_step_that_fails_leaves_neither_its_effect_nor_its_row(scene: Scene) {
    scene.driver.make_table().await;
    let actor = scene.actor("a").await;
    for (id, act, said) in [
        ("fails", Act::Fail(Failure::retryable("no seat")), "no seat"),
        ("too large", returns(&"x".repeat(TOO_LARGE)), "bytes of output"),
    ] {
        let (failure, record) = failed(run(&scene, &actor, &task(id), 1, &Script::new([act])).await);
        assert!(failure.message.contains(said), "{id}: {failure:?}");
        assert_eq!((counts(&*scene.driver).await, record.steps.len()), ((0, 0), 0), "{id}");
    }
    ran(run(&scene, &actor, &task("fails"), 1, &Script::new([returns("booked")])).await);
    assert_eq!(counts(&*scene.driver).await, (1, 1));
}

pub(super) async fn a_step_of_another_kind_has_no_row(scene: Scene) {
    scene.driver.make_table().await;
    let (task, actor, script) = (task("a"), scene.actor("a").await, Script::new([]));
    let policy = of_steps();
    let outcome = actor.ledger.run(&task, &policy, |context| {
        let (driver, script) = (&scene.driver, Arc::clone(&script));
        async move { driver.step(context.step_of("book", Effect::Keyed), script).await }
    });
    let (failure, _) = failed(outcome.await);
    assert!(failure.message.contains("is keyed"), "{failure:?}");
    assert_eq!((script.calls(), counts(&*scene.driver).await), (0, (0, 0)));
}

/// It would be committed with somebody's half work, or by nobody. What was written there is never kept; the step runs in a
/// transaction of its own, or does not run.
pub(super) async fn a_step_never_joins_a_transaction_that_was_left_open(scene: Scene) {
    scene.driver.make_table().await;
    let (task, actor, script) = (task("a"), scene.actor("a").await, Script::new([returns("booked")]));
    let policy = of_steps();
    let outcome = actor.ledger.run(&task, &policy, |context| {
        let (driver, script) = (&scene.driver, Arc::clone(&script));
        async move {
            let step = context.step_of("book", Effect::Transactional);
            driver.step_in_an_open_transaction(step, script).await
        }
    });
    let ran = match outcome.await.unwrap() {
        Outcome::Ran { .. } => 1,
        Outcome::Failed { failure, .. } => {
            assert!(failure.message.contains("a transaction is open"), "{failure:?}");
            0
        }
        other => panic!("it ran in a transaction of its own, or was refused; it was {other:?}"),
    };
    assert_eq!((script.calls(), counts(&*scene.driver).await), (ran, (ran, ran)));
}
