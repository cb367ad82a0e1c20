//! Only the clock of the store judges a lease, and tokens decide who wins where clocks are wrong.

use taskonce_core::policy::Effect;
use taskonce_core::record::{Output, State};
use taskonce_core::store::{Expected, Next};

use super::{load, recorded, refused, run, seen, stored};
use crate::records::plain;
use crate::stage::{LEASE, Stage, minutes, policy};

const MINUTE: i64 = 60_000;

pub(super) async fn the_age_grows_by_the_clock_of_the_store(stage: Stage) {
    let key = stage.key("a");
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&plain(State::Running, 1))).await.unwrap());
    let young = load(&stage, &key).await.age;
    assert!((0..5 * MINUTE).contains(&young.millis), "{young:?}");
    stage.shift_age(&key, 60 * MINUTE).await;
    let found = stage.other().load(&key).await.unwrap().expect("it is there");
    assert!((60 * MINUTE..65 * MINUTE).contains(&found.age.millis), "{:?}", found.age);
    let swap = stage.store().swap(&key, Expected::Nothing, Next::Keep(&plain(State::Done, 2))).await.unwrap();
    let shown = super::conflict(swap).expect("it is shown").age;
    assert!((60 * MINUTE..65 * MINUTE).contains(&shown.millis), "a conflict shows the age too: {shown:?}");
}

pub(super) async fn the_age_begins_again_with_every_write(stage: Stage) {
    let key = stage.key("a");
    let mut before = None;
    for token in 1..4 {
        let record = plain(State::Running, token);
        stored(stage.store().swap(&key, Expected::record(before.as_ref()), Next::Keep(&record)).await.unwrap());
        let age = load(&stage, &key).await.age;
        assert!((0..5 * MINUTE).contains(&age.millis), "{age:?}");
        stage.shift_age(&key, 60 * MINUTE).await;
        before = Some(record);
    }
}

/// A worker was killed. Its key is free after the lease: not for a day, and not never.
pub(super) async fn a_lease_frees_its_key_when_it_has_passed_and_not_before(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let _killed = run(a.claim(&task, &policy).await);
    seen(b.claim(&task, &policy).await, "busy");
    stage.pass(LEASE - minutes(1)).await;
    let left = seen(b.claim(&task, &policy).await, "busy").defer_for();
    assert!(left <= minutes(1), "{left:?}");
    stage.pass(minutes(1)).await;
    assert_eq!(run(b.claim(&task, &policy).await).attempt(), 2);
}

pub(super) async fn a_small_step_back_of_the_clock_keeps_the_claim(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    stage.shift_age(&task.key, -29 * MINUTE).await;
    let found = load(&stage, &task.key).await;
    assert!(found.age.millis < 0, "the store says that its clock went back: {:?}", found.age);
    let left = seen(b.claim(&task, &policy).await, "busy").defer_for();
    assert!(left <= LEASE, "what is left is never more than the lease: {left:?}");
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn a_clock_that_went_back_by_more_than_a_lease_frees_the_claim(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let _killed = run(a.claim(&task, &policy).await);
    stage.shift_age(&task.key, -60 * 24 * 365 * MINUTE).await;
    assert_eq!(run(b.claim(&task, &policy).await).attempt(), 2);
}

/// Processes whose clocks run hours ahead take nobody's claim: no time of theirs reaches the store.
pub(super) async fn the_clock_of_a_worker_frees_nothing(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    stage.pass_for_processes(minutes(600));
    seen(b.claim(&task, &policy).await, "busy");
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn a_worker_starts_no_effect_past_its_own_deadline(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    assert!(claim.may_start_effect());
    // A tenth of the lease is kept off as margin.
    stage.pass_for_processes(minutes(26));
    assert!(claim.may_start_effect());
    stage.pass_for_processes(minutes(2));
    assert!(!claim.may_start_effect(), "the store may let another in before this effect ends");
    claim.heartbeat().await.unwrap();
    assert!(claim.may_start_effect(), "a renewed lease moves the deadline");
    claim.held().lose();
    assert!(!claim.may_start_effect());
    recorded(claim.release().await);
}

/// The clock jumps there and back, claims overlap, and each of them believes that it holds the task.
pub(super) async fn a_clock_that_goes_wrong_never_completes_a_task_twice(stage: Stage) {
    let task = stage.task("a");
    let policy = taskonce_core::policy::Policy { crashes_max: 100, attempts_max: 100, ..policy(Effect::Keyed) };
    let mut claims = Vec::new();
    for (number, step) in [31, -500, 31, -31, 45, -90, 1000].into_iter().enumerate() {
        claims.push(run(stage.actor(&format!("worker-{number}")).claim(&task, &policy).await));
        stage.shift_age(&task.key, step * MINUTE).await;
    }
    let last = claims.pop().expect("there are some");
    for (number, claim) in claims.into_iter().enumerate() {
        if number % 2 == 0 {
            refused(claim.complete(Output::kept("text/plain", "stale")).await);
        } else {
            refused(claim.fail(taskonce_core::record::Failure::permanent("stale")).await);
        }
    }
    recorded(last.complete(Output::kept("text/plain", "last")).await);
    let replay = seen(stage.actor("duplicate").claim(&task, &policy).await, "replay");
    assert_eq!(replay.output(), &Output::kept("text/plain", "last"));
}
