//! Steps that are recorded in the transaction of their effect.

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

use std::sync::Arc;

use taskonce_core::Result;
use taskonce_core::key::Task;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, State};
use taskonce_worker::{Context, Outcome, Run as _};

use super::cases::{failed, ran, returns, waits_then_returns};
use super::{Act, Scene, Script, StepEnd};
use crate::faulty::Fault;
use crate::stage::{Actor, LEASE, minutes, policy};

/// A task whose handler names steps; itself it is keyed, since a failure in between runs it again.
fn of_steps() -> Policy {
    policy(Effect::Keyed)
}

/// Runs a plain handler.
async fn play<F>(actor: &Actor, task: &Task, handler: impl FnOnce(Context) -> F + Send) -> Result<Outcome<String>>
where
    F: Future<Output = Result<String, Failure>> + Send,
{
    actor.ledger.run(task, &of_steps(), handler).await
}

pub(super) async fn a_second_run_replays_the_steps_of_the_first(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let (first, second) = (Script::new([returns("booked")]), Script::new([returns("noted")]));
    let driver = &*scene.driver;
    let cut_off = play(&actor, &task, |context| {
        let first = &first;
        async move {
            driver.step(&context, "book", 1, Arc::clone(first), StepEnd::Commit).await?;
            Err(Failure::retryable("cut off"))
        }
    });
    assert_eq!(failed(cut_off.await).1.state, State::Waiting);
    let whole = play(&actor, &task, |context| {
        let (first, second) = (&first, &second);
        async move {
            let booked = driver.step(&context, "book", 1, Arc::clone(first), StepEnd::Commit).await?;
            let noted = driver.step(&context, "note", 2, Arc::clone(second), StepEnd::Commit).await?;
            Ok(format!("{booked}, {noted}"))
        }
    });
    let (value, record) = ran(whole.await);
    assert_eq!((value.as_str(), record.attempt), ("booked, noted", 2));
    assert_eq!((first.calls(), second.calls(), scene.driver.effects(&task.key).await), (1, 1, 2));
    let steps: Vec<_> = record.steps.iter().map(|step| (step.name.as_str(), step.effect, step.attempt)).collect();
    assert_eq!(steps, [("book", Effect::Transactional, 1), ("note", Effect::Transactional, 2)]);
    assert_eq!(scene.found(&task.key).await.record.steps.len(), 2);
}

pub(super) async fn a_transactional_step_is_recorded_with_its_effect_or_not_at_all(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([Act::Fail(Failure::retryable("no seat")), returns("booked")]);
    for (attempt, effects) in [(1, 0), (2, 1)] {
        let outcome = play(&actor, &task, |context| {
            let script = &script;
            let driver = &*scene.driver;
            async move { driver.step(&context, "book", 1, Arc::clone(script), StepEnd::Commit).await }
        });
        let outcome = outcome.await.unwrap();
        let record = scene.found(&task.key).await.record;
        assert_eq!(record.steps.len(), effects, "{outcome:?}");
        assert_eq!((record.attempt, scene.driver.effects(&task.key).await), (attempt, effects), "{outcome:?}");
    }
}

/// The handler went on as if it had committed: what it returns is not recorded.
pub(super) async fn a_step_whose_transaction_was_rolled_back_is_not_taken_for_done(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([returns("booked"), returns("booked again")]);
    for (end, effects) in [(StepEnd::RollBack, 0), (StepEnd::Commit, 1)] {
        let outcome = play(&actor, &task, |context| {
            let script = &script;
            let driver = &*scene.driver;
            async move { driver.step(&context, "book", 1, Arc::clone(script), end).await }
        });
        let outcome = outcome.await;
        match end {
            StepEnd::RollBack => {
                let (failure, record) = failed(outcome);
                assert!(failure.message.contains("did not commit"), "{failure:?}");
                assert_eq!((record.state, record.steps.len()), (State::Waiting, 0));
            }
            StepEnd::Commit => assert_eq!(ran(outcome).0, "booked again"),
        }
        assert_eq!(scene.driver.effects(&task.key).await, effects);
    }
}

/// The process had not seen the step that its own transaction recorded, and wrote the failure over it: the step ran again.
pub(super) async fn a_failure_right_after_a_step_keeps_it_recorded(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([returns("booked")]);
    for _ in 0..3 {
        let outcome = play(&actor, &task, |context| {
            let script = &script;
            let driver = &*scene.driver;
            async move {
                driver.step(&context, "book", 1, Arc::clone(script), StepEnd::Commit).await?;
                Err(Failure::retryable("cut off"))
            }
        });
        failed(outcome.await);
        assert_eq!(scene.found(&task.key).await.record.steps.len(), 1);
    }
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (1, 1));
}

pub(super) async fn a_step_of_a_lost_claim_never_runs(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([]);
    let outcome = play(&actor, &task, |context| {
        let (scene, task, script) = (&scene, &task, &script);
        async move {
            scene.stage.pass(LEASE + minutes(1)).await;
            let successor = crate::cases::run(scene.stage.actor("b").claim(task, &of_steps()).await);
            let step = scene.driver.step(&context, "book", 1, Arc::clone(script), StepEnd::Commit).await;
            assert_eq!(scene.found(&task.key).await.record.claim, successor.held().claim_id());
            step
        }
    });
    let outcome = outcome.await.unwrap();
    assert!(matches!(outcome, Outcome::ClaimLost { .. }), "{outcome:?}");
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (0, 0));
}

pub(super) async fn a_heartbeat_beside_a_step_loses_neither(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let script = Script::new([waits_then_returns("booked")]);
    let outcome = play(&actor, &task, |context| {
        let (scene, script, actor) = (&scene, &script, &actor);
        async move {
            // A token that this process does not know, and then a renewal that meets the transaction's lock.
            actor.store.plan([Fault::After]);
            context.held().renew(&*actor.store, &*actor.host).await.unwrap_err();
            let step = scene.driver.step(&context, "book", 1, Arc::clone(script), StepEnd::Commit);
            let beat = async {
                script.entered.pass().await;
                let beside = context.held().renew(&*actor.store, &*actor.host);
                let (_beaten, ()) = tokio::join!(beside, async { script.go.open() });
            };
            let (booked, ()) = tokio::join!(step, beat);
            context.held().renew(&*actor.store, &*actor.host).await.unwrap();
            booked
        }
    });
    let (value, record) = ran(outcome.await);
    assert_eq!((value.as_str(), record.steps.len()), ("booked", 1));
    assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (1, 1));
}

pub(super) async fn another_step_in_its_place_parks_the_task(scene: Scene) {
    for (id, name, input) in [("renamed", "reserve", 1), ("other input", "book", 2)] {
        let (task, actor) = (scene.stage.task(id), scene.stage.actor(id));
        let script = Script::new([returns("booked")]);
        for (name, input) in [("book", 1), (name, input)] {
            let outcome = play(&actor, &task, |context| {
                let script = &script;
                let driver = &*scene.driver;
                async move {
                    driver.step(&context, name, input, Arc::clone(script), StepEnd::Commit).await?;
                    Err(Failure::retryable("cut off"))
                }
            });
            failed(outcome.await);
        }
        let record = scene.found(&task.key).await.record;
        assert_eq!(record.state, State::Parked, "{id}");
        assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::StepChanged));
        assert_eq!((script.calls(), scene.driver.effects(&task.key).await), (1, 1), "{id}");
    }
}
