//! How a claim ends: completed, failed, released or dropped; once, by its holder, and not forgotten.

use taskonce_core::decide::{self, Ask, ClaimStep, Stamp};
use taskonce_core::held::Renewal;
use taskonce_core::ledger::Claim;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{ClaimId, Failure, FailureClass, HISTORY_MAX, Output, State, Token, WallTime};
use taskonce_core::store::{Expected, Next};

use super::{abandon, conflict, load, recorded, refused, run, seen, unsettled};
use crate::faulty::Fault;
use crate::host::Delays;
use crate::stage::{Actor, LEASE, Stage, minutes, policy};

fn output(text: &str) -> Output {
    Output::kept("text/plain", text)
}

/// A claim that another has taken over, and the claim of the successor.
async fn overtaken(stage: &Stage, id: &str) -> (Claim, Claim) {
    let policy = policy(Effect::Keyed);
    let stale = run(stage.actor("stale").claim(&stage.task(id), &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    (stale, run(stage.actor("successor").claim(&stage.task(id), &policy).await))
}

pub(super) async fn a_duplicate_never_sees_done_before_completion(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    claim.enter();
    for _ in 0..3 {
        seen(b.claim(&task, &policy).await, "busy");
        claim.heartbeat().await.unwrap();
    }
    a.store.plan([Fault::Before]);
    let open = unsettled(claim.complete(output("result")).await);
    seen(b.claim(&task, &policy).await, "busy");
    recorded(open.again().await);
    assert_eq!(seen(b.claim(&task, &policy).await, "replay").output(), &output("result"));
}

pub(super) async fn a_completion_whose_answer_was_lost_is_recognised(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    a.store.plan([Fault::None, Fault::After]);
    let open = unsettled(run(a.claim(&task, &policy).await).complete(output("result")).await);
    seen(b.claim(&task, &policy).await, "replay");
    assert_eq!(recorded(open.again().await).state, State::Done);
    assert_eq!(seen(b.claim(&task, &policy).await, "replay").output(), &output("result"));
    a.work().await;
    assert_eq!(load(&stage, &task.key).await.record.state, State::Done);
}

/// A duplicate renewed the retention of the record meanwhile, and with it the token moved. It is still the same end.
pub(super) async fn a_completion_is_recognised_after_its_retention_was_extended(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = Policy { retention: minutes(60), output_retention: minutes(60), ..policy(Effect::Keyed) };
    a.store.plan([Fault::None, Fault::After]);
    let open = unsettled(run(a.claim(&task, &policy).await).complete(output("result")).await);
    stage.pass(minutes(40)).await;
    let token = load(&stage, &task.key).await.record.token;
    seen(b.claim(&task, &policy).await, "replay");
    assert_ne!(load(&stage, &task.key).await.record.token, token, "the retention was extended");
    assert_eq!(recorded(open.again().await).state, State::Done);
}

pub(super) async fn a_completion_is_tried_again_until_it_is_stored(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    actor.store.plan([Fault::Before, Fault::Before, Fault::After]);
    let mut open = unsettled(claim.complete(output("result")).await);
    for _ in 0..2 {
        open = unsettled(open.again().await);
    }
    assert_eq!(recorded(open.again().await).output, output("result"));
    // One that is given up is finished in the background.
    let task = stage.task("b");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    actor.store.plan([Fault::Before]);
    drop(unsettled(claim.complete(output("result")).await));
    assert_eq!(actor.keeper.settles(), 1);
    actor.work().await;
    assert_eq!(load(&stage, &task.key).await.record.output, output("result"));
}

pub(super) async fn a_completion_adopts_the_token_of_its_own_heartbeat(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    actor.store.plan([Fault::After]);
    claim.heartbeat().await.expect_err("the answer was lost");
    assert_eq!(recorded(claim.complete(output("result")).await).state, State::Done);
}

/// A request was cancelled while its completion was under way; the retry wrote everything twice.
pub(super) async fn a_completion_that_has_begun_is_finished(stage: Stage) {
    for (id, fault) in [("not stored", Fault::SilentBefore), ("stored", Fault::SilentAfter)] {
        let task = stage.task(id);
        let actor = stage.actor("a");
        let claim = run(actor.claim(&task, &policy(Effect::Unrepeatable)).await);
        claim.enter();
        actor.store.plan([fault]);
        let is_done = async || load(&stage, &task.key).await.record.state == State::Done;
        abandon(claim.complete(output("result")), async || fault == Fault::SilentBefore || is_done().await).await;
        assert_eq!(actor.keeper.settles(), 1);
        actor.work().await;
        let record = load(&stage, &task.key).await.record;
        assert_eq!((record.state, &record.output), (State::Done, &output("result")));
    }
}

pub(super) async fn what_was_decided_first_is_written(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    claim.enter();
    actor.store.plan([Fault::Before]);
    let open = unsettled(claim.complete(output("first")).await);
    open.held().intend_fail(&*actor.host, &Failure::permanent("second"));
    open.held().intend_complete(&*actor.host, output("third"));
    assert_eq!(open.held().renew(&*actor.store, &*actor.host).await.unwrap(), Renewal::Over);
    assert_eq!(recorded(open.again().await).output, output("first"));
}

pub(super) async fn a_late_completion_is_accepted_when_unchallenged(stage: Stage) {
    for id in ["unaware", "told that it is lost"] {
        let task = stage.task(id);
        let claim = run(stage.actor("a").claim(&task, &policy(Effect::Unrepeatable)).await);
        claim.enter();
        stage.pass(LEASE * 3).await;
        if id != "unaware" {
            claim.held().lose();
        }
        recorded(claim.complete(output("late")).await);
        let seen = seen(stage.actor("b").claim(&task, &policy(Effect::Unrepeatable)).await, "replay");
        assert_eq!(seen.output(), &output("late"));
    }
}

pub(super) async fn a_late_completion_is_refused_after_a_takeover(stage: Stage) {
    let (stale, claim) = overtaken(&stage, "a").await;
    refused(stale.complete(output("late")).await);
    recorded(claim.complete(output("successor")).await);
    let seen = seen(stage.actor("c").claim(&stage.task("a"), &policy(Effect::Keyed)).await, "replay");
    assert_eq!((seen.output(), seen.owner()), (&output("successor"), "successor"));
    // Also after the successor has completed.
    let (stale, claim) = overtaken(&stage, "b").await;
    let done = recorded(claim.complete(output("successor")).await);
    refused(stale.complete(output("late")).await);
    assert_eq!(*load(&stage, &stage.key("b")).await.record, *done);
}

/// A stale worker's completion overwrote the newer result; its failure deleted it; its release freed a live claim.
pub(super) async fn every_end_of_a_stale_claim_is_refused(stage: Stage) {
    for end in ["complete", "fail", "fail for good", "release", "drop", "drop inside", "heartbeat"] {
        let (stale, claim) = overtaken(&stage, end).await;
        let key = stage.key(end);
        let before = load(&stage, &key).await.record;
        match end {
            "complete" => refused(stale.complete(output("stale")).await),
            "fail" => refused(stale.fail(Failure::retryable("stale")).await),
            "fail for good" => refused(stale.fail(Failure::permanent("stale")).await),
            "release" => refused(stale.release().await),
            "heartbeat" => assert_eq!(stale.heartbeat().await.unwrap(), Renewal::Lost),
            _ => {
                if end == "drop inside" {
                    stale.enter();
                }
                stale.held().intend_drop(&*stage.actor("anybody").host, "stale");
                let settled = stale.held().settle(stage.store()).await.unwrap();
                assert!(matches!(settled, taskonce_core::held::Settled::Lost(_)), "{settled:?}");
            }
        }
        assert_eq!(load(&stage, &key).await.record, before, "`{end}` has changed the record");
        recorded(claim.complete(output("successor")).await);
    }
}

/// A reaper read a passed lease, the holder completed, and the reaper put the task back.
pub(super) async fn a_takeover_never_reopens_a_task_that_completed_meanwhile(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let claim = run(stage.actor("a").claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let found = load(&stage, &task.key).await;
    let owner = "b".into();
    let ask = Ask { claim: ClaimId::from(5), owner: &owner, fingerprint: task.fingerprint, policy: &policy };
    let stamp = Stamp { token: Token::from(5), at: WallTime(0) };
    let ClaimStep::Run(takeover) = decide::claim(Some(&found), &ask, stamp) else { panic!("the lease has passed") };
    let done = recorded(claim.complete(output("result")).await);
    let swap = stage.other().swap(&task.key, Expected::Record(&found.record), Next::Claim(&takeover)).await.unwrap();
    let shown = conflict(swap).expect("it is shown");
    assert_eq!(*shown.record, *done);
    assert!(matches!(decide::claim(Some(&shown), &ask, stamp), ClaimStep::Answer(decide::Answer::Replay)));
}

/// A key was marked as seen, the handler failed, and the redelivery was dropped as a duplicate.
pub(super) async fn claimed_is_not_done(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let claim = run(stage.actor("a").claim(&task, &policy).await);
    claim.enter();
    recorded(claim.fail(Failure::retryable("no")).await);
    let claim = run(stage.actor("b").claim(&task, &policy).await);
    recorded(claim.complete(output("result")).await);
    assert_eq!(seen(stage.actor("c").claim(&task, &policy).await, "replay").attempt(), 2);
}

fn patient() -> Policy {
    let backoff = Backoff { delay_min: minutes(10), delay_max: minutes(25), factor: 2.0 };
    Policy { backoff, ..policy(Effect::Keyed) }
}

async fn fail_on(actor: &Actor, stage: &Stage, id: &str, message: &str) {
    let claim = run(actor.claim(&stage.task(id), &patient()).await);
    recorded(claim.fail(Failure::retryable(message)).await);
}

/// A task failed, and silently did not run again for an hour.
pub(super) async fn a_failed_attempt_waits_for_its_backoff(stage: Stage) {
    let actor = stage.actor_with("a", Delays::Full);
    let task = stage.task("a");
    for (attempt, delay) in [(1, 10), (2, 20), (3, 25), (4, 25)] {
        fail_on(&actor, &stage, "a", &format!("reason {attempt}")).await;
        let waiting = seen(actor.claim(&task, &patient()).await, "waiting");
        assert!(waiting.defer_for() <= minutes(delay) && waiting.defer_for() > minutes(delay - 5));
        assert_eq!(waiting.failure().map(|failure| failure.message.clone()), Some(format!("reason {attempt}")));
        stage.pass(minutes(delay - 1)).await;
        seen(actor.claim(&task, &patient()).await, "waiting");
        stage.pass(minutes(1)).await;
    }
    assert_eq!(run(actor.claim(&task, &patient()).await).attempt(), 5);
}

/// A retried task ran before its delay, since another copy of it was delivered.
pub(super) async fn the_delay_is_judged_inside_the_claim(stage: Stage) {
    let actor = stage.actor_with("a", Delays::Full);
    let task = stage.task("a");
    fail_on(&actor, &stage, "a", "no").await;
    stage.pass_for_processes(minutes(600));
    for _ in 0..3 {
        seen(stage.actor("copy").claim(&task, &patient()).await, "waiting");
    }
    stage.shift_age(&task.key, 11 * 60_000).await;
    assert_eq!(run(stage.actor("copy").claim(&task, &patient()).await).attempt(), 2);
}

pub(super) async fn a_permanent_failure_is_dead_at_once(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    assert_eq!(recorded(claim.fail(Failure::permanent("no such account")).await).state, State::Dead);
    let seen = seen(actor.claim(&task, &policy(Effect::Keyed)).await, "dead");
    assert_eq!(seen.failure().map(|failure| failure.message.as_str()), Some("no such account"));
}

pub(super) async fn the_last_failed_attempt_is_dead(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { attempts_max: 3, ..policy(Effect::Keyed) };
    for wanted in [State::Waiting, State::Waiting, State::Dead] {
        let claim = run(actor.claim(&task, &policy).await);
        assert_eq!(recorded(claim.fail(Failure::retryable("no")).await).state, wanted);
    }
    seen(actor.claim(&task, &policy).await, "dead");
}

pub(super) async fn a_class_of_failure_has_its_own_last_attempt(stage: Stage) {
    let actor = stage.actor("a");
    let policy =
        Policy { attempts_max: 4, permanent_attempts_max: 2, poison_attempts_max: Some(3), ..policy(Effect::Keyed) };
    for (class, last) in [
        (FailureClass::Permanent, 2),
        (FailureClass::RanTooLong, 3),
        (FailureClass::Retryable, 4),
        (FailureClass::Dropped, 4),
    ] {
        let task = stage.task(class.name());
        for attempt in 1..=last {
            let claim = run(actor.claim(&task, &policy).await);
            let wanted = if attempt < last { State::Waiting } else { State::Dead };
            assert_eq!(recorded(claim.fail(Failure::new(class, "no")).await).state, wanted, "{class:?} {attempt}");
        }
    }
}

/// The retry lost its claim, or was refused by its own key.
pub(super) async fn a_retry_keeps_its_record(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let first = run(a.claim(&task, &policy).await);
    let fence = first.fence();
    recorded(first.fail(Failure::retryable("first reason")).await);
    let second = run(b.claim(&task, &policy).await);
    assert!(second.fence() > fence);
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.state, record.attempt, record.fingerprint), (State::Running, 2, task.fingerprint));
    let told: Vec<_> = record.history.iter().map(|event| (event.note.as_str(), event.who.as_str())).collect();
    assert_eq!(told, [("first reason", "a")]);
    seen(a.claim(&task, &policy).await, "busy");
}

pub(super) async fn an_unrepeatable_failure_is_parked_unless_nothing_happened(stage: Stage) {
    let actor = stage.actor("a");
    let policy = policy(Effect::Unrepeatable);
    for class in [FailureClass::Retryable, FailureClass::Permanent, FailureClass::RanTooLong, FailureClass::Dropped] {
        let task = stage.task(&format!("doubt-{}", class.name()));
        let claim = run(actor.claim(&task, &policy).await);
        assert_eq!(recorded(claim.fail(Failure::new(class, "no")).await).state, State::Parked);
        seen(actor.claim(&task, &policy).await, "parked");
    }
    let task = stage.task("nothing happened");
    let claim = run(actor.claim(&task, &policy).await);
    let failure = Failure::retryable("refused").nothing_happened();
    assert_eq!(recorded(claim.fail(failure).await).state, State::Waiting);
    let claim = run(actor.claim(&task, &policy).await);
    let failure = Failure::permanent("refused for good").nothing_happened();
    assert_eq!(recorded(claim.fail(failure).await).state, State::Dead);
}

pub(super) async fn a_release_does_not_count_the_attempt(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { attempts_max: 2, ..policy(Effect::Unrepeatable) };
    for _ in 0..5 {
        let claim = run(actor.claim(&task, &policy).await);
        assert_eq!(claim.attempt(), 1);
        let released = recorded(claim.release().await);
        assert_eq!((released.state, released.attempt, released.crashes), (State::Waiting, 0, 0));
        assert!(released.history.is_empty() && released.failure.is_none());
    }
}

pub(super) async fn a_release_after_entering_is_a_failed_attempt(stage: Stage) {
    let actor = stage.actor("a");
    for (effect, wanted) in [(Effect::Keyed, State::Waiting), (Effect::Unrepeatable, State::Parked)] {
        let claim = run(actor.claim(&stage.task(effect.name()), &policy(effect)).await);
        claim.enter();
        let record = recorded(claim.release().await);
        assert_eq!((record.state, record.attempt), (wanted, 1));
        assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::Dropped));
    }
}

pub(super) async fn a_claim_dropped_before_its_handler_is_released(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = policy(Effect::Unrepeatable);
    drop(run(actor.claim(&task, &policy).await));
    assert_eq!(actor.keeper.settles(), 1);
    actor.work().await;
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.state, record.attempt, record.history.len()), (State::Waiting, 0, 0));
    assert_eq!(run(actor.claim(&task, &policy).await).attempt(), 1);
}

/// The lease passed before the handler was entered, so nothing happened: an unrepeatable task need not be parked.
pub(super) async fn a_claim_lost_before_its_handler_is_released_when_dropped(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Unrepeatable)).await);
    stage.pass(LEASE + minutes(1)).await;
    claim.held().lose();
    drop(claim);
    actor.work().await;
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.state, record.attempt, record.history.len()), (State::Waiting, 0, 0));
}

pub(super) async fn a_claim_dropped_inside_its_handler_is_a_failed_attempt(stage: Stage) {
    let actor = stage.actor("a");
    for (effect, wanted) in [(Effect::Keyed, State::Waiting), (Effect::Unrepeatable, State::Parked)] {
        for lost in [false, true] {
            let task = stage.task(&format!("{}-{lost}", effect.name()));
            let claim = run(actor.claim(&task, &policy(effect)).await);
            claim.enter();
            if lost {
                claim.held().lose();
            }
            drop(claim);
            actor.work().await;
            let record = load(&stage, &task.key).await.record;
            assert_eq!((record.state, record.attempt), (wanted, 1));
            assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::Dropped));
        }
    }
}

pub(super) async fn a_refused_end_leaves_nothing_to_do(stage: Stage) {
    let actor = stage.actor("a");
    let policy = policy(Effect::Keyed);
    let stale = run(actor.claim(&stage.task("a"), &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(stage.actor("b").claim(&stage.task("a"), &policy).await);
    refused(stale.complete(Output::Nothing).await);
    recorded(claim.complete(Output::Nothing).await);
    recorded(run(actor.claim(&stage.task("b"), &policy).await).complete(Output::Nothing).await);
    assert_eq!((actor.keeper.settles(), actor.keeper.releases()), (0, 0));
    let claim = run(actor.claim(&stage.task("c"), &policy).await);
    assert_eq!(actor.keeper.kept(), 1, "a claim that runs is kept alive, and one that is over is not");
    recorded(claim.release().await);
    assert_eq!(actor.keeper.kept(), 0);
}

pub(super) async fn history_is_bounded_and_counts_what_it_dropped(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { attempts_max: 100, ..policy(Effect::Keyed) };
    let failures = HISTORY_MAX + 5;
    for number in 1..=failures {
        let claim = run(actor.claim(&task, &policy).await);
        recorded(claim.fail(Failure::retryable(format!("{number} {}", "long ".repeat(1000)))).await);
    }
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.history.len(), record.history_dropped), (HISTORY_MAX, 5));
    assert_eq!(record.history[0].attempt, 6, "the oldest go first");
    assert_eq!(record.history[HISTORY_MAX - 1].attempt, failures as u32);
    assert!(record.history.iter().all(|event| event.note.len() <= taskonce_core::record::MESSAGE_MAX));
}
