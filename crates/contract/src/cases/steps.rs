//! The steps of a task: recorded by the holder alone, kept over attempts, takeovers and people, and lost with no answer.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::decide::By;
use taskonce_core::held::{Phase, Renewal};
use taskonce_core::key::Fingerprint;
use taskonce_core::ledger::Claim;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{DropReason, EventKind, Failure, FailureClass, Output, Record, State};
use taskonce_core::step::{self, STEPS_BYTES_MAX, STEPS_MAX, StepAsk, StepState};

use super::{load, recorded, refused, run, seen, unsettled};
use crate::faulty::Fault;
use crate::stage::{Actor, LEASE, Stage, minutes, policy};

const EVA: By<'static> = By { who: "eva", why: "the provider says so" };

fn ask(name: &str) -> StepAsk {
    StepAsk { name: name.to_owned(), effect: Effect::Unrepeatable, input: Fingerprint([3; 16]) }
}

fn begun(record: &Record, place: usize, name: &str) -> Record {
    step::begin(record, place, &ask(name))
}

fn ended(record: &Record, place: usize, name: &str) -> Record {
    step::end(record, place, &ask(name), Output::kept("text/plain", name), Duration::from_millis(7))
}

async fn begin(actor: &Actor, claim: &Claim, place: usize, name: &str) -> taskonce_core::Result<Option<Arc<Record>>> {
    claim.held().advance(&*actor.store, &*actor.host, |record| begun(record, place, name)).await
}

async fn end(actor: &Actor, claim: &Claim, place: usize, name: &str) -> taskonce_core::Result<Option<Arc<Record>>> {
    claim.held().advance(&*actor.store, &*actor.host, |record| ended(record, place, name)).await
}

/// The steps of a record: their names, and whether they ended.
fn told(record: &Record) -> Vec<(&str, StepState)> {
    record.steps.iter().map(|step| (step.name.as_str(), step.state)).collect()
}

pub(super) async fn a_step_is_kept_for_the_next_attempt(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    let record = end(&actor, &claim, 0, "charge").await.unwrap().expect("the claim holds");
    assert_eq!(*load(&stage, &task.key).await.record, *record);
    recorded(claim.fail(Failure::retryable("no")).await);
    let again = run(stage.actor("b").claim(&task, &policy).await);
    let kept = again.held().record();
    assert_eq!(kept.steps, record.steps);
    let charge = &kept.steps[0];
    assert_eq!((charge.attempt, charge.ran_for, charge.input), (1, Duration::from_millis(7), Fingerprint([3; 16])));
    assert_eq!((charge.effect, &charge.output), (Effect::Unrepeatable, &Output::kept("text/plain", "charge")));
}

pub(super) async fn a_takeover_carries_the_steps(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let stale = run(actor.claim(&task, &policy).await);
    end(&actor, &stale, 0, "charge").await.unwrap();
    begin(&actor, &stale, 1, "mail").await.unwrap();
    stage.pass(LEASE + minutes(1)).await;
    let successor = run(stage.actor("b").claim(&task, &policy).await);
    let record = successor.held().record();
    assert_eq!(told(&record), [("charge", StepState::Done), ("mail", StepState::Begun)]);
    assert_eq!((record.attempt, record.crashes), (2, 1));
}

pub(super) async fn a_release_carries_the_steps(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    end(&actor, &claim, 0, "charge").await.unwrap();
    recorded(claim.fail(Failure::retryable("no")).await);
    recorded(run(actor.claim(&task, &policy).await).release().await);
    let again = run(actor.claim(&task, &policy).await);
    assert_eq!(told(&again.held().record()), [("charge", StepState::Done)]);
}

pub(super) async fn a_lost_claim_cannot_record_a_step(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let stale = run(actor.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let successor = run(stage.actor("b").claim(&task, &policy).await);
    let before = load(&stage, &task.key).await.record;
    assert_eq!(end(&actor, &stale, 0, "charge").await.unwrap(), None);
    assert_eq!(stale.held().phase(), Phase::Lost);
    assert_eq!(end(&actor, &stale, 0, "charge").await.unwrap(), None, "nor when it is asked again");
    assert_eq!(load(&stage, &task.key).await.record, before);
    recorded(successor.complete(Output::Nothing).await);
    refused(stale.complete(Output::Nothing).await);
}

pub(super) async fn a_claim_whose_end_is_under_way_records_no_step(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    let held = Arc::clone(claim.held());
    actor.store.plan([Fault::Before]);
    let open = unsettled(claim.complete(Output::Nothing).await);
    let late = held.advance(&*actor.store, &*actor.host, |record| ended(record, 0, "charge")).await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::WrongState);
    assert_eq!(told(&recorded(open.again().await)), []);
}

pub(super) async fn a_step_renews_the_lease(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    for place in 0..3 {
        stage.pass(minutes(20)).await;
        end(&actor, &claim, place, &format!("step {place}")).await.unwrap().expect("the claim holds");
        assert!(claim.may_start_effect());
        seen(stage.actor("b").claim(&task, &policy).await, "busy");
    }
    let runs_for = load(&stage, &task.key).await.in_state_for();
    assert!((minutes(60)..minutes(70)).contains(&runs_for), "it runs since it was claimed: {runs_for:?}");
}

pub(super) async fn a_step_takes_one_call_of_the_store(stage: Stage) {
    let actor = stage.actor("a");
    let claim = run(actor.claim(&stage.task("a"), &policy(Effect::Keyed)).await);
    actor.store.take_calls();
    end(&actor, &claim, 0, "charge").await.unwrap();
    assert_eq!(actor.store.take_calls(), 1);
}

/// Both write the record of one claim at the same time; one of them finds another token than it knows.
pub(super) async fn heartbeats_beside_steps_lose_neither(stage: Stage) {
    const ROUNDS: usize = 24;
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    for round in 0..ROUNDS {
        let name = format!("step {round}");
        let (one, stored, other) =
            tokio::join!(claim.heartbeat(), end(&actor, &claim, round, &name), claim.heartbeat());
        assert_eq!((one.unwrap(), other.unwrap()), (Renewal::Held, Renewal::Held));
        assert_eq!(stored.unwrap().expect("the claim holds").steps.len(), round + 1);
        let (known, there) = (claim.held().record(), load(&stage, &task.key).await.record);
        assert_eq!((known.steps.len(), there.steps.len()), (round + 1, round + 1));
    }
    assert_eq!(recorded(claim.complete(Output::Nothing).await).steps.len(), ROUNDS);
}

pub(super) async fn a_step_whose_answer_was_lost_is_recorded_once(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    for fault in [Fault::Before, Fault::After] {
        for (write, state) in [("begun", StepState::Begun), ("ended", StepState::Done)] {
            actor.store.plan([fault]);
            for is_last in [false, true] {
                let stored = match state {
                    StepState::Begun => begin(&actor, &claim, 0, "charge").await,
                    StepState::Done => end(&actor, &claim, 0, "charge").await,
                };
                assert_eq!(stored.is_ok(), is_last, "{fault:?}, {write}");
            }
            assert_eq!(told(&load(&stage, &task.key).await.record), [("charge", state)], "{fault:?}, {write}");
        }
    }
}

/// The claim failed on what it knew, which was the record before the step; the step would have run again.
pub(super) async fn a_step_that_was_stored_unanswered_outlives_the_end_of_its_claim(stage: Stage) {
    let policy = policy(Effect::Keyed);
    for id in ["failed", "completed", "dropped"] {
        let task = stage.task(id);
        let actor = stage.actor("a");
        let claim = run(actor.claim(&task, &policy).await);
        claim.enter();
        actor.store.plan([Fault::After]);
        end(&actor, &claim, 0, "charge").await.expect_err("the answer is lost");
        match id {
            "failed" => drop(recorded(claim.fail(Failure::retryable("no")).await)),
            "completed" => drop(recorded(claim.complete(Output::Nothing).await)),
            _ => drop(claim),
        }
        actor.work().await;
        let record = load(&stage, &task.key).await.record;
        assert_eq!(told(&record), [("charge", StepState::Done)], "{id}");
        assert_ne!(record.state, State::Running);
    }
    let task = stage.task("for good");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    actor.store.plan([Fault::After]);
    begin(&actor, &claim, 0, "charge").await.expect_err("the answer is lost");
    let failed = recorded(claim.fail(Failure::permanent("no")).await);
    assert_eq!((failed.state, told(&failed)), (State::Parked, vec![("charge", StepState::Begun)]), "it is in doubt");
    let claim = run(actor.claim(&stage.task("ended unheard"), &policy).await);
    begin(&actor, &claim, 0, "charge").await.unwrap();
    actor.store.plan([Fault::After]);
    end(&actor, &claim, 0, "charge").await.expect_err("the answer is lost");
    let failed = recorded(claim.fail(Failure::permanent("no")).await);
    assert_eq!((failed.state, told(&failed)), (State::Dead, vec![("charge", StepState::Done)]), "nothing is in doubt");
    let claim = run(actor.claim(&stage.task("not begun"), &policy).await);
    begin(&actor, &claim, 0, "charge").await.unwrap();
    claim.held().did_not_begin(0);
    let failed = recorded(claim.fail(Failure::permanent("no")).await);
    assert_eq!((failed.state, told(&failed)), (State::Dead, vec![]), "it did not begin");
}

/// A heartbeat was answered after the step that followed it was stored, and the process held the record from before the
/// step for the newest: a failure of that moment wrote it, and the step was forgotten.
pub(super) async fn a_late_answer_to_a_heartbeat_brings_back_no_older_step(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    actor.store.plan([Fault::Late]);
    let step = async {
        begin(&actor, &claim, 0, "charge").await.unwrap().expect("the claim holds");
        actor.store.let_answer();
    };
    let (renewal, ()) = tokio::join!(claim.heartbeat(), step);
    assert_eq!(renewal.unwrap(), Renewal::Held);
    assert_eq!(told(&claim.held().record()), [("charge", StepState::Begun)]);
    let failed = recorded(claim.fail(Failure::retryable("cut off")).await);
    assert_eq!(told(&failed), [("charge", StepState::Begun)]);
}

/// Else a person who redrives the dead task is not told that a step of it may have taken effect.
pub(super) async fn a_step_in_doubt_parks_where_no_attempt_is_left(stage: Stage) {
    let policy = Policy { attempts_max: 1, ..policy(Effect::Repeatable) };
    let actor = stage.actor("a");
    let claim = async |id: &str| {
        let claim = run(actor.claim(&stage.task(id), &policy).await);
        begin(&actor, &claim, 0, "mail").await.unwrap();
        claim
    };
    let state = async |id: &str| load(&stage, &stage.key(id)).await.record.state;
    recorded(claim("failed").await.fail(Failure::retryable("no")).await);
    recorded(claim("for good").await.fail(Failure::permanent("no")).await);
    let silent = claim("silent").await;
    stage.pass(LEASE + minutes(1)).await;
    seen(stage.actor("b").claim(&stage.task("silent"), &policy).await, "parked");
    refused(silent.complete(Output::Nothing).await);
    for id in ["failed", "for good", "silent"] {
        assert_eq!(state(id).await, State::Parked, "{id}");
    }
    let claim = run(actor.claim(&stage.task("ended"), &policy).await);
    end(&actor, &claim, 0, "mail").await.unwrap();
    recorded(claim.fail(Failure::permanent("no")).await);
    assert_eq!(state("ended").await, State::Dead, "nothing is in doubt");
}

pub(super) async fn a_done_task_keeps_its_steps_without_what_they_returned(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    end(&actor, &claim, 0, "charge").await.unwrap();
    recorded(claim.complete(Output::kept("text/plain", "all")).await);
    let seen = seen(stage.actor("b").claim(&task, &policy).await, "replay");
    assert_eq!(seen.output(), &Output::kept("text/plain", "all"));
    let charge = &seen.found.record.steps[0];
    assert_eq!((charge.name.as_str(), charge.state), ("charge", StepState::Done));
    assert_eq!(charge.output, Output::Dropped(DropReason::NotKept));
}

pub(super) async fn a_redrive_keeps_the_steps(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    end(&actor, &claim, 0, "charge").await.unwrap();
    recorded(claim.fail(Failure::permanent("no")).await);
    stage.actor("operator").ledger.redrive(&task.key, EVA).await.unwrap();
    let again = run(actor.claim(&task, &policy).await);
    let record = again.held().record();
    assert_eq!((again.attempt(), told(&record)), (1, vec![("charge", StepState::Done)]));
    assert_eq!(record.steps[0].output, Output::kept("text/plain", "charge"));
}

/// A task that ended its first step and is parked in doubt about its second.
async fn in_doubt(stage: &Stage, id: &str) -> Actor {
    let actor = stage.actor("a");
    let claim = run(actor.claim(&stage.task(id), &policy(Effect::Keyed)).await);
    end(&actor, &claim, 0, "charge").await.unwrap();
    begin(&actor, &claim, 1, "mail").await.unwrap();
    let parked = recorded(claim.fail(Failure::new(FailureClass::StepInDoubt, "mail: cut off")).await);
    assert_eq!(parked.state, State::Parked);
    actor
}

pub(super) async fn a_person_says_of_a_step_in_doubt_that_nothing_happened(stage: Stage) {
    let task = stage.task("a");
    let actor = in_doubt(&stage, "a").await;
    let resolved = stage.actor("operator").ledger.resolve_not_done(&task.key, EVA).await.unwrap();
    assert_eq!((resolved.state, told(&resolved)), (State::Waiting, vec![("charge", StepState::Done)]));
    let again = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    assert_eq!(again.held().record().steps, resolved.steps);
}

pub(super) async fn a_person_says_of_a_step_in_doubt_that_it_took_effect(stage: Stage) {
    let task = stage.task("a");
    let actor = in_doubt(&stage, "a").await;
    let sent = Output::kept("application/json", "\"sent\"");
    let operator = stage.actor("operator");
    let resolved = operator.ledger.resolve_step_done(&task.key, EVA, None, Some(sent.clone())).await.unwrap();
    assert_eq!(resolved.state, State::Waiting);
    assert_eq!(told(&resolved), [("charge", StepState::Done), ("mail", StepState::Done)]);
    assert_eq!(resolved.steps[1].output, sent);
    let line = resolved.history.last().unwrap();
    assert_eq!((line.kind, line.who.as_str()), (EventKind::ResolvedDone, "eva"));
    assert_eq!(line.note, "step `mail`: the provider says so");
    let again = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    assert_eq!((again.attempt(), &again.held().record().steps), (1, &resolved.steps));
}

pub(super) async fn only_a_step_in_doubt_is_resolved_as_done(stage: Stage) {
    let ledger = stage.actor("operator").ledger;
    let claim = run(stage.actor("a").claim(&stage.task("no steps"), &policy(Effect::Unrepeatable)).await);
    recorded(claim.fail(Failure::retryable("timed out")).await);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&stage.task("running"), &policy(Effect::Keyed)).await);
    begin(&actor, &claim, 0, "mail").await.unwrap();
    for id in ["no steps", "running"] {
        let before = load(&stage, &stage.key(id)).await.record;
        let refused = ledger.resolve_step_done(&stage.key(id), EVA, None, None).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WrongState, "{id}");
        assert_eq!(load(&stage, &stage.key(id)).await.record, before);
    }
    let absent = ledger.resolve_step_done(&stage.key("absent"), EVA, None, None).await.unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::NotFound);
}

/// A person looked at one step; by the time the change was written another was in doubt, and counted as done.
pub(super) async fn only_the_step_that_a_person_names_is_resolved(stage: Stage) {
    let task = stage.task("a");
    let actor = in_doubt(&stage, "a").await;
    let ledger = stage.actor("operator").ledger;
    for other in ["charge", "Mail", ""] {
        let before = load(&stage, &task.key).await.record;
        let refused = ledger.resolve_step_done(&task.key, EVA, Some(other), None).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WrongState, "{refused:?}");
        assert!(refused.to_string().contains("step `mail` is in doubt, not"), "{refused:?}");
        assert_eq!(load(&stage, &task.key).await.record, before);
    }
    let resolved = ledger.resolve_step_done(&task.key, EVA, Some("mail"), None).await.unwrap();
    assert_eq!(told(&resolved), [("charge", StepState::Done), ("mail", StepState::Done)]);
    // The task went on meanwhile, to the next step, which is in doubt now.
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    begin(&actor, &claim, 2, "invoice").await.unwrap();
    recorded(claim.fail(Failure::new(FailureClass::StepInDoubt, "invoice: cut off")).await);
    let late = ledger.resolve_step_done(&task.key, EVA, Some("mail"), None).await.unwrap_err();
    assert!(late.to_string().contains("step `invoice` is in doubt, not `mail`"), "{late:?}");
    ledger.resolve_step_done(&task.key, EVA, Some("invoice"), None).await.unwrap();
}

pub(super) async fn a_cleared_task_has_no_steps(stage: Stage) {
    let task = stage.task("a");
    in_doubt(&stage, "a").await;
    stage.actor("operator").ledger.clear(&task.key, EVA).await.unwrap();
    let again = run(stage.actor("b").claim(&task, &policy(Effect::Keyed)).await);
    assert_eq!(told(&again.held().record()), []);
}

pub(super) async fn a_mebibyte_of_steps_is_kept(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy).await);
    let part = STEPS_BYTES_MAX / STEPS_MAX;
    for place in 0..STEPS_MAX {
        let bytes: Vec<u8> = (0..part).map(|at| (at * 31 + place) as u8).collect();
        let change = |record: &Record| {
            let output = Output::kept("application/octet-stream", bytes.clone());
            step::end(record, place, &ask(&format!("step {place}")), output, Duration::ZERO)
        };
        claim.held().advance(&*actor.store, &*actor.host, change).await.unwrap().expect("the claim holds");
    }
    let known = claim.held().record();
    assert_eq!(step::output_bytes(&known), STEPS_BYTES_MAX);
    recorded(claim.fail(Failure::retryable("no")).await);
    assert_eq!(run(stage.actor("b").claim(&task, &policy).await).held().record().steps, known.steps);
}
