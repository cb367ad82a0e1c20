//! Outputs come back as they were, or say why they do not; a process's own cache is never ahead of the record.

use taskonce_core::CacheLimits;
use taskonce_core::decide::By;
use taskonce_core::ledger::{Admission, Ledger};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{DropReason, Failure, Output};
use taskonce_core::store::Filter;

use super::{recorded, run, seen};
use crate::stage::{Actor, Stage, minutes, policy};

const LIMITS: CacheLimits = CacheLimits { records_max: 100, bytes_max: 1024 * 1024, life_max: minutes(100_000) };

fn output(text: &str) -> Output {
    Output::kept("application/json", text)
}

fn cached(admission: &Admission) -> bool {
    matches!(admission, Admission::Replay(seen) if seen.cached)
}

/// An actor whose ledger has a cache.
fn caching(stage: &Stage, name: &str) -> (Ledger, Actor) {
    let actor = stage.actor(name);
    (actor.ledger.with_cache(LIMITS), actor)
}

/// 0, "", [] and {} came back as nothing.
pub(super) async fn falsy_outputs_replay_faithfully(stage: Stage) {
    let actor = stage.actor("a");
    let mut outputs: Vec<Output> = ["0", "\"\"", "null", "false", "[]", "{}", "", "\0", " "].map(output).to_vec();
    outputs.push(Output::Nothing);
    outputs.push(Output::kept("", ""));
    for (number, output) in outputs.into_iter().enumerate() {
        let task = stage.task(&format!("output-{number}"));
        let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
        recorded(claim.complete(output.clone()).await);
        assert_eq!(seen(actor.claim(&task, &policy(Effect::Keyed)).await, "replay").output(), &output);
    }
}

/// A result that was too large broke after the effect, and blocked the key or ran the task again.
pub(super) async fn an_output_that_is_too_large_leaves_the_task_done_without_it(stage: Stage) {
    let actor = stage.actor("a");
    let policy = Policy { output_max: 10, ..policy(Effect::Keyed) };
    let task = stage.task("too large");
    recorded(run(actor.claim(&task, &policy).await).complete(output("12345678901")).await);
    let dropped = Output::Dropped(DropReason::TooLarge { bytes: 11 });
    assert_eq!(seen(actor.claim(&task, &policy).await, "replay").output(), &dropped);
    let task = stage.task("just fits");
    recorded(run(actor.claim(&task, &policy).await).complete(output("1234567890")).await);
    assert_eq!(seen(actor.claim(&task, &policy).await, "replay").output(), &output("1234567890"));
    let task = stage.task("not encodable");
    recorded(run(actor.claim(&task, &policy).await).complete(Output::Dropped(DropReason::NotEncodable)).await);
    let dropped = Output::Dropped(DropReason::NotEncodable);
    assert_eq!(seen(actor.claim(&task, &policy).await, "replay").output(), &dropped);
}

pub(super) async fn an_unwanted_output_is_dropped_and_said_so(stage: Stage) {
    let actor = stage.actor("a");
    let policy = Policy { output_max: 0, ..policy(Effect::Keyed) };
    for (id, given, wanted) in [
        ("some", output("result"), Output::Dropped(DropReason::NotKept)),
        ("empty", output(""), Output::Dropped(DropReason::NotKept)),
        ("none", Output::Nothing, Output::Nothing),
    ] {
        let task = stage.task(id);
        recorded(run(actor.claim(&task, &policy).await).complete(given).await);
        assert_eq!(seen(actor.claim(&task, &policy).await, "replay").output(), &wanted);
    }
}

pub(super) async fn the_cache_answers_without_the_store(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let (a, actor_a) = caching(&stage, "a");
    let (b, actor_b) = caching(&stage, "b");
    recorded(run(a.claim(&task, &policy).await.unwrap()).complete(output("result")).await);
    actor_a.store.take_calls();
    stage.pass(minutes(10)).await;
    let replay = seen(a.claim(&task, &policy).await.unwrap(), "replay");
    assert!(replay.cached && replay.age() >= minutes(10), "{replay:?}");
    assert_eq!((replay.output(), actor_a.store.take_calls()), (&output("result"), 0));
    // Who did not run it asks once.
    assert!(!cached(&b.claim(&task, &policy).await.unwrap()));
    assert!(cached(&b.claim(&task, &policy).await.unwrap()));
    assert_eq!(actor_b.store.take_calls(), 1);
}

/// The local cache served a result whose record was gone.
pub(super) async fn a_cached_answer_lives_no_longer_than_its_record(stage: Stage) {
    let task = stage.task("a");
    let policy = Policy { retention: minutes(60), output_retention: minutes(60), ..policy(Effect::Keyed) };
    let (a, _actor) = caching(&stage, "a");
    recorded(run(a.claim(&task, &policy).await.unwrap()).complete(Output::Nothing).await);
    stage.pass(minutes(59)).await;
    assert!(cached(&a.claim(&task, &policy).await.unwrap()));
    stage.pass(minutes(2)).await;
    a.purge(&Filter::default()).await.unwrap();
    assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
    recorded(run(a.claim(&task, &policy).await.unwrap()).complete(Output::Nothing).await);
}

pub(super) async fn a_cached_answer_lives_no_longer_than_its_output(stage: Stage) {
    let policy = Policy { output_retention: minutes(60), ..policy(Effect::Keyed) };
    let (a, actor) = caching(&stage, "a");
    for (id, output) in [("full", output("result")), ("empty", output(""))] {
        let task = stage.task(id);
        recorded(run(a.claim(&task, &policy).await.unwrap()).complete(output.clone()).await);
        stage.pass(minutes(59)).await;
        assert!(cached(&a.claim(&task, &policy).await.unwrap()));
        stage.pass(minutes(2)).await;
        actor.store.take_calls();
        let replay = seen(a.claim(&task, &policy).await.unwrap(), "replay");
        assert!(!replay.cached, "the store is asked what has become of the output");
        assert_eq!(actor.store.take_calls(), 1);
    }
}

pub(super) async fn only_done_is_cached(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let (a, actor) = caching(&stage, "a");
    recorded(run(a.claim(&task, &policy).await.unwrap()).fail(Failure::permanent("no")).await);
    seen(a.claim(&task, &policy).await.unwrap(), "dead");
    actor.store.take_calls();
    seen(a.claim(&task, &policy).await.unwrap(), "dead");
    assert!(actor.store.take_calls() > 0);
    stage.actor("operator").ledger.redrive(&task.key, By { who: "eva", why: "fixed" }).await.unwrap();
    let claim = run(a.claim(&task, &policy).await.unwrap());
    seen(a.claim(&task, &policy).await.unwrap(), "busy");
    recorded(claim.release().await);
    drop(run(a.claim(&task, &policy).await.unwrap()));
}

pub(super) async fn a_cached_record_answers_no_other_payload(stage: Stage) {
    let policy = policy(Effect::Keyed);
    let (a, _actor) = caching(&stage, "a");
    let task = stage.task_with("a", 1);
    recorded(run(a.claim(&task, &policy).await.unwrap()).complete(output("result")).await);
    seen(a.claim(&stage.task_with("a", 2), &policy).await.unwrap(), "mismatch");
    assert!(cached(&a.claim(&task, &policy).await.unwrap()));
}

pub(super) async fn a_cleared_task_runs_again_for_the_process_that_cleared_it(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let (a, _actor) = caching(&stage, "a");
    recorded(run(a.claim(&task, &policy).await.unwrap()).complete(output("result")).await);
    assert!(cached(&a.claim(&task, &policy).await.unwrap()));
    a.clear(&task.key, By { who: "eva", why: "wrong input" }).await.unwrap();
    assert_eq!(run(a.claim(&task, &policy).await.unwrap()).attempt(), 1);
}
