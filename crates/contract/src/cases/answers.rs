//! What a claim that does not run is told: enough to act upon, and never more than is true.

use taskonce_core::ErrorKind;
use taskonce_core::ledger::Admission;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Output, State};
use taskonce_core::store::Memory;

use super::{load, recorded, run, seen};
use crate::host::Delays;
use crate::stage::{LEASE, Stage, minutes, policy};

/// "In progress" was answered without saying who, or as a success without a result.
pub(super) async fn a_busy_answer_shows_the_holder_and_what_is_left(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let _claim = run(stage.actor("host-1/worker-7").claim(&task, &policy).await);
    stage.pass(minutes(10)).await;
    let busy = seen(stage.actor("b").claim(&task, &policy).await, "busy");
    assert_eq!((busy.owner(), busy.attempt(), busy.cached), ("host-1/worker-7", 1, false));
    assert_eq!(busy.output(), &Output::Nothing);
    assert!(busy.defer_for() <= minutes(20) && busy.defer_for() > minutes(15), "{:?}", busy.defer_for());
    assert!(busy.age() >= minutes(10) && busy.age() < minutes(15), "{:?}", busy.age());
}

pub(super) async fn a_waiting_answer_shows_the_reason_and_what_is_left(stage: Stage) {
    let task = stage.task("a");
    let backoff = Backoff { delay_min: minutes(60), delay_max: minutes(60), factor: 1.0 };
    let policy = Policy { backoff, ..policy(Effect::Keyed) };
    let claim = run(stage.actor_with("a", Delays::Full).claim(&task, &policy).await);
    recorded(claim.fail(Failure::new(FailureClass::RanTooLong, "took 3 h")).await);
    stage.pass(minutes(15)).await;
    let waiting = seen(stage.actor("b").claim(&task, &policy).await, "waiting");
    let failure = waiting.failure().expect("the reason is shown");
    assert_eq!((failure.class, failure.message.as_str()), (FailureClass::RanTooLong, "took 3 h"));
    assert_eq!((waiting.owner(), waiting.attempt()), ("a", 1));
    assert!(waiting.defer_for() <= minutes(45) && waiting.defer_for() > minutes(40), "{:?}", waiting.defer_for());
}

/// A replay could not be told from a run.
pub(super) async fn a_replay_tells_attempt_age_and_owner_of_the_run(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    recorded(run(stage.actor("first").claim(&task, &policy).await).fail(Failure::retryable("no")).await);
    let claim = run(stage.actor("second").claim(&task, &policy).await);
    stage.pass(minutes(7)).await;
    recorded(claim.complete(Output::kept("text/plain", "result")).await);
    stage.pass(minutes(60)).await;
    for _ in 0..2 {
        let replay = seen(stage.actor("third").claim(&task, &policy).await, "replay");
        assert_eq!((replay.owner(), replay.attempt(), replay.cached), ("second", 2, false));
        assert_eq!(replay.output(), &Output::kept("text/plain", "result"));
        assert!(replay.age() >= minutes(60) && replay.age() < minutes(65), "{:?}", replay.age());
        let ran_for = replay.found.record.ran_for;
        assert!(ran_for >= minutes(7) && ran_for < minutes(8), "{ran_for:?}");
        assert_eq!(replay.failure(), None, "the failure of an earlier attempt is history");
        assert_eq!(replay.found.record.history.len(), 1);
    }
}

/// The payload's digest was dropped at completion, and each identical retry was refused.
pub(super) async fn the_fingerprint_outlives_completion(stage: Stage) {
    let policy = Policy { attempts_max: 1, ..policy(Effect::Keyed) };
    let actor = stage.actor("a");
    for state in [State::Done, State::Dead, State::Waiting, State::Parked, State::Running] {
        let (same, other) = (stage.task_with(state.name(), 1), stage.task_with(state.name(), 2));
        let claim = run(actor.claim(&same, &policy).await);
        let (held, word) = match state {
            State::Done => (recorded(claim.complete(Output::Nothing).await), "replay"),
            State::Dead => (recorded(claim.fail(Failure::permanent("no")).await), "dead"),
            State::Waiting => (recorded(claim.release().await), "run"),
            State::Parked => {
                stage.pass(LEASE + minutes(1)).await;
                let unrepeatable = Policy { effect: Effect::Unrepeatable, ..policy.clone() };
                (seen(actor.claim(&same, &unrepeatable).await, "parked").found.record, "parked")
            }
            State::Running => {
                // Dropped at the end of this round; the keeper is not told to do its work.
                std::mem::forget(claim);
                (load(&stage, &same.key).await.record, "busy")
            }
        };
        assert_eq!((held.state, held.fingerprint), (state, same.fingerprint));
        seen(actor.claim(&other, &policy).await, "mismatch");
        assert_eq!(super::word(&actor.claim(&same, &policy).await), word, "{state}");
    }
}

pub(super) async fn a_mismatch_never_runs_and_never_replays(stage: Stage) {
    let (one, two) = (stage.task_with("a", 1), stage.task_with("a", 2));
    let policy = policy(Effect::Keyed);
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let claim = run(a.claim(&one, &policy).await);
    seen(b.claim(&two, &policy).await, "mismatch");
    stage.pass(LEASE + minutes(1)).await;
    seen(b.claim(&two, &policy).await, "mismatch");
    let before = load(&stage, &one.key).await.record;
    recorded(claim.complete(Output::kept("text/plain", "of the first payload")).await);
    assert_eq!((before.crashes, before.attempt), (0, 1), "a mismatch takes nothing over");
    match b.claim(&two, &policy).await {
        Admission::Mismatch { seen, given } => {
            assert_eq!((seen.found.record.fingerprint, given), (one.fingerprint, two.fingerprint));
        }
        other => panic!("both fingerprints are shown; it was {other:?}"),
    }
}

pub(super) async fn a_dead_task_is_answered_as_dead_with_its_reason(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    recorded(run(stage.actor("a").claim(&task, &policy).await).fail(Failure::permanent("no such account")).await);
    for _ in 0..3 {
        let dead = seen(stage.actor("b").claim(&task, &policy).await, "dead");
        assert_eq!(dead.failure().map(|failure| failure.message.as_str()), Some("no such account"));
        assert_eq!((dead.owner(), dead.found.record.state), ("a", State::Dead));
    }
}

pub(super) async fn a_parked_task_is_answered_as_parked(stage: Stage) {
    let task = stage.task("a");
    let claim = run(stage.actor("a").claim(&task, &policy(Effect::Unrepeatable)).await);
    recorded(claim.fail(Failure::retryable("timed out")).await);
    stage.pass(minutes(300 * 24 * 60)).await;
    for effect in [Effect::Unrepeatable, Effect::Repeatable] {
        let parked = seen(stage.actor("b").claim(&task, &policy(effect)).await, "parked");
        assert_eq!(parked.failure().map(|failure| failure.message.as_str()), Some("timed out"));
    }
}

pub(super) async fn contradictory_policies_are_refused_before_anything_is_asked(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { attempts_max: 0, heartbeat: Some(LEASE), ..policy(Effect::Keyed) };
    let error = actor.ledger.claim(&task, &policy).await.expect_err("it contradicts itself");
    assert_eq!(error.kind(), ErrorKind::BadPolicy);
    assert!(error.to_string().contains("attempts_max") && error.to_string().contains("heartbeat"), "{error}");
    assert_eq!((actor.store.take_calls(), actor.keeper.releases()), (0, 0));
}

pub(super) async fn an_effect_that_needs_memory_is_refused_on_a_store_that_may_forget(stage: Stage) {
    for effect in [Effect::Unrepeatable, Effect::Fenced] {
        let task = stage.task(effect.name());
        let actor = stage.actor("a");
        let policy = Policy { store_may_forget: false, ..policy(effect) };
        let wanted = match stage.store().memory() {
            Memory::Keeps => None,
            Memory::MayForget => Some(ErrorKind::ForgetfulStore),
        };
        let refused = actor.ledger.claim(&task, &policy).await.err().map(|error| error.kind());
        assert_eq!(refused, wanted, "{}", effect.name());
        assert_eq!(actor.store.take_calls(), usize::from(wanted.is_none()));
    }
}
