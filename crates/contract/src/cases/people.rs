//! What a person changes: redrive, resolve, clear; guarded like every other write, and kept in the record.

use taskonce_core::ErrorKind;
use taskonce_core::codec;
use taskonce_core::decide::By;
use taskonce_core::held::Renewal;
use taskonce_core::key::Key;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{DropReason, EventKind, Failure, FailureClass, Output, Record, State};

use super::{load, recorded, refused, run, seen};
use crate::faulty::Fault;
use crate::records::{of_a_newer_format, plain};
use crate::stage::{LEASE, Stage, minutes, policy};

const EVA: By<'static> = By { who: "eva", why: "the provider is back" };

fn kinds(record: &Record) -> Vec<EventKind> {
    record.history.iter().map(|event| event.kind).collect()
}

async fn parked(stage: &Stage, id: &str) -> Key {
    let task = stage.task(id);
    let claim = run(stage.actor("a").claim(&task, &policy(Effect::Unrepeatable)).await);
    recorded(claim.fail(Failure::retryable("timed out")).await);
    task.key
}

/// An operator's retry failed at once, on an old counter.
pub(super) async fn a_redrive_resets_counters_and_keeps_history(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { attempts_max: 2, crashes_max: 2, ..policy(Effect::Keyed) };
    let _killed = run(actor.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(actor.claim(&task, &policy).await);
    let fence = claim.fence();
    recorded(claim.fail(Failure::retryable("no")).await);
    seen(actor.claim(&task, &policy).await, "dead");

    let redriven = stage.actor("operator").ledger.redrive(&task.key, EVA).await.unwrap();
    assert_eq!((redriven.state, redriven.attempt, redriven.crashes), (State::Waiting, 0, 0));
    assert!(redriven.fence > fence, "what was known of the time before is stale");
    let record = load(&stage, &task.key).await.record;
    assert_eq!(record, redriven);
    let wanted =
        [EventKind::Failed(FailureClass::Crashed), EventKind::Failed(FailureClass::Retryable), EventKind::Redriven];
    assert_eq!(kinds(&record), wanted);
    let last = &record.history[2];
    assert_eq!((last.who.as_str(), last.note.as_str(), last.attempt), ("eva", "the provider is back", 2));

    // All of the attempts and crashes are there again.
    let _killed = run(actor.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(actor.claim(&task, &policy).await);
    assert_eq!((claim.attempt(), claim.held().crashes()), (2, 1));
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn a_redriven_task_is_not_completed_by_its_old_holder(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Unrepeatable);
    let stale = run(stage.actor("a").claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    seen(stage.actor("b").claim(&task, &policy).await, "parked");
    stage.actor("operator").ledger.redrive(&task.key, EVA).await.unwrap();
    assert_eq!(stale.heartbeat().await.unwrap(), Renewal::Lost);
    refused(stale.complete(Output::Nothing).await);
    assert_eq!(run(stage.actor("b").claim(&task, &policy).await).attempt(), 1);
}

pub(super) async fn a_running_task_is_redriven_only_after_its_lease(stage: Stage) {
    let task = stage.task("a");
    let operator = stage.actor("operator");
    let claim = run(stage.actor("worker-7").claim(&task, &policy(Effect::Keyed)).await);
    stage.pass(minutes(10)).await;
    let error = operator.ledger.redrive(&task.key, EVA).await.expect_err("it is running");
    assert_eq!(error.kind(), ErrorKind::WrongState);
    assert!(error.to_string().contains("worker-7"), "the error says who holds it: {error}");
    stage.pass(minutes(21)).await;
    operator.ledger.redrive(&task.key, EVA).await.unwrap();
    refused(claim.complete(Output::Nothing).await);
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.state, record.attempt, record.crashes), (State::Waiting, 0, 0));
    assert_eq!(kinds(&record), [EventKind::Failed(FailureClass::Crashed), EventKind::Redriven], "the crash is told");
}

/// Else a redrive would be the way around a person's word on what became of it, and pay twice.
pub(super) async fn a_redrive_of_an_unrepeatable_crash_parks_it(stage: Stage) {
    let task = stage.task("a");
    let operator = stage.actor("operator");
    std::mem::forget(run(stage.actor("a").claim(&task, &policy(Effect::Unrepeatable)).await));
    stage.pass(LEASE + minutes(1)).await;
    let parked = operator.ledger.redrive(&task.key, EVA).await.unwrap();
    assert_eq!((parked.state, parked.attempt, parked.crashes), (State::Parked, 1, 1));
    assert_eq!(kinds(&parked), [EventKind::Failed(FailureClass::Crashed)]);
    seen(stage.actor("b").claim(&task, &policy(Effect::Unrepeatable)).await, "parked");
    operator.ledger.resolve_not_done(&task.key, EVA).await.unwrap();
    assert_eq!(run(stage.actor("b").claim(&task, &policy(Effect::Unrepeatable)).await).attempt(), 1);
}

/// Nobody has to sit out a backoff of ten minutes after the cause is repaired.
pub(super) async fn a_waiting_task_can_be_redriven_at_once(stage: Stage) {
    let task = stage.task("a");
    let slow = Backoff { delay_min: minutes(10), delay_max: minutes(10), factor: 1.0 };
    let policy = Policy { backoff: slow, ..policy(Effect::Keyed) };
    let claim = run(stage.actor("a").claim(&task, &policy).await);
    recorded(claim.fail(Failure::retryable("no").retry_after(minutes(10))).await);
    seen(stage.actor("b").claim(&task, &policy).await, "waiting");
    let redriven = stage.actor("operator").ledger.redrive(&task.key, EVA).await.unwrap();
    assert_eq!((redriven.state, redriven.attempt, redriven.history.len()), (State::Waiting, 0, 2));
    assert_eq!(run(stage.actor("b").claim(&task, &policy).await).attempt(), 1);
}

/// The store's client may send an erasure twice, and then finds nothing.
pub(super) async fn a_record_that_went_while_it_was_cleared_is_cleared(stage: Stage) {
    let task = stage.task("a");
    recorded(run(stage.actor("a").claim(&task, &policy(Effect::Keyed)).await).complete(Output::Nothing).await);
    let operator = stage.actor("operator");
    let (first, second) = (operator.ledger.clear(&task.key, EVA), operator.ledger.clear(&task.key, EVA));
    let (first, second) = tokio::join!(first, second);
    assert!(first.is_ok() || second.is_ok(), "one of them removed it");
    for error in [first.err(), second.err()].into_iter().flatten() {
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
    let note = operator.ledger.cleared(&task.key).await.unwrap().expect("there is a note").record;
    assert!(!note.history.is_empty());
}

pub(super) async fn a_done_task_cannot_be_redriven(stage: Stage) {
    let task = stage.task("a");
    let operator = stage.actor("operator");
    let claim = run(stage.actor("a").claim(&task, &policy(Effect::Keyed)).await);
    let done = recorded(claim.complete(Output::kept("text/plain", "result")).await);
    let error = operator.ledger.redrive(&task.key, EVA).await.expect_err("it is done");
    assert_eq!(error.kind(), ErrorKind::WrongState);
    assert_eq!(*load(&stage, &task.key).await.record, *done);
}

pub(super) async fn a_parked_task_can_be_resolved_as_done(stage: Stage) {
    let key = parked(&stage, "a").await;
    let resolved = stage.actor("operator").ledger.resolve_done(&key, EVA, None).await.unwrap();
    assert_eq!((resolved.state, &resolved.output), (State::Done, &Output::Dropped(DropReason::Resolved)));
    assert_eq!(kinds(&resolved), [EventKind::Failed(FailureClass::Retryable), EventKind::ResolvedDone]);
    assert_eq!(*load(&stage, &key).await.record, *resolved);
    seen(stage.actor("b").claim(&stage.task("a"), &policy(Effect::Unrepeatable)).await, "replay");
}

pub(super) async fn a_parked_task_can_be_resolved_as_not_done(stage: Stage) {
    let key = parked(&stage, "a").await;
    let resolved = stage.actor("operator").ledger.resolve_not_done(&key, EVA).await.unwrap();
    assert_eq!((resolved.state, resolved.attempt, resolved.crashes), (State::Waiting, 0, 0));
    assert_eq!(kinds(&resolved), [EventKind::Failed(FailureClass::Retryable), EventKind::ResolvedNotDone]);
    let claim = run(stage.actor("b").claim(&stage.task("a"), &policy(Effect::Unrepeatable)).await);
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn only_a_parked_task_can_be_resolved(stage: Stage) {
    let policy = policy(Effect::Keyed);
    let worker = stage.actor("a");
    let _running = run(worker.claim(&stage.task("running"), &policy).await);
    recorded(run(worker.claim(&stage.task("waiting"), &policy).await).release().await);
    recorded(run(worker.claim(&stage.task("done"), &policy).await).complete(Output::Nothing).await);
    recorded(run(worker.claim(&stage.task("dead"), &policy).await).fail(Failure::permanent("no")).await);
    let ledger = stage.actor("operator").ledger;
    for id in ["running", "waiting", "done", "dead"] {
        let key = stage.key(id);
        let before = load(&stage, &key).await.record;
        assert_eq!(ledger.resolve_done(&key, EVA, None).await.expect_err(id).kind(), ErrorKind::WrongState);
        assert_eq!(ledger.resolve_not_done(&key, EVA).await.expect_err(id).kind(), ErrorKind::WrongState);
        assert_eq!(load(&stage, &key).await.record, before);
    }
}

pub(super) async fn clearing_leaves_a_note(stage: Stage) {
    let operator = stage.actor("operator");
    let task = stage.task("a");
    for round in 1..=2 {
        let claim = run(stage.actor("a").claim(&task, &policy(Effect::Keyed)).await);
        assert_eq!(claim.attempt(), 1, "a cleared task runs from the beginning");
        recorded(claim.complete(Output::Nothing).await);
        assert_eq!(operator.ledger.clear(&task.key, EVA).await.unwrap().expect("readable").record.state, State::Done);
        assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
        let note = operator.ledger.cleared(&task.key).await.unwrap().expect("there is a note").record;
        assert_eq!(kinds(&note), vec![EventKind::Cleared; round]);
        let last = &note.history[round - 1];
        assert_eq!(last.who, "eva");
        for part in [task.key.as_str(), "done", "the provider is back"] {
            assert!(last.note.contains(part), "{}", last.note);
        }
    }
    assert_eq!(operator.ledger.cleared(&stage.key("b")).await.unwrap(), None);
}

/// Else a damaged record blocks its key for ever.
pub(super) async fn a_damaged_record_can_be_cleared(stage: Stage) {
    let operator = stage.actor("operator");
    let task = stage.task("a");
    let whole = codec::encode(&plain(State::Done, 5));
    let mut flipped = whole.clone();
    flipped[40] ^= 1;
    let damages: [&[u8]; 5] = [b"garbage that somebody put here", b"x", b"", &whole[..20], &flipped];
    for (index, damage) in damages.into_iter().enumerate() {
        stage.put_raw(&task.key, damage).await;
        operator.ledger.show(&task.key).await.expect_err("it cannot be read");
        assert_eq!(operator.ledger.clear(&task.key, EVA).await.unwrap(), None);
        assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
        let note = operator.ledger.cleared(&task.key).await.unwrap().expect("there is a note").record;
        assert!(note.history[index].note.contains("damaged"), "{:?}", note.history);
    }
    assert_eq!(run(stage.actor("b").claim(&task, &policy(Effect::Keyed)).await).attempt(), 1);
}

pub(super) async fn only_what_is_damaged_is_discarded(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    assert!(!store.discard(&key).await.unwrap(), "nothing is there");
    stage.put_raw(&key, &codec::encode(&plain(State::Done, 5))).await;
    assert!(!store.discard(&key).await.unwrap(), "it can be read");
    store.load(&key).await.unwrap().expect("it is still there");
    let newer = stage.key("b");
    stage.put_raw(&newer, &of_a_newer_format()).await;
    assert!(!store.discard(&newer).await.unwrap(), "a newer worker reads it");
    assert_eq!(store.load(&newer).await.unwrap_err().kind(), ErrorKind::NewerFormat);
    let operator = stage.actor("operator");
    assert_eq!(operator.ledger.clear(&newer, EVA).await.unwrap_err().kind(), ErrorKind::NewerFormat);
}

pub(super) async fn a_clear_whose_answer_was_lost_is_recognised(stage: Stage) {
    let operator = stage.actor("operator");
    let task = stage.task("a");
    recorded(run(stage.actor("a").claim(&task, &policy(Effect::Keyed)).await).complete(Output::Nothing).await);
    operator.store.plan([Fault::None, Fault::After]);
    assert!(operator.ledger.clear(&task.key, EVA).await.unwrap().is_some());
    assert!(operator.ledger.cleared(&task.key).await.unwrap().is_some());
}

pub(super) async fn a_clear_of_what_is_damaged_whose_answer_was_lost_leaves_its_note(stage: Stage) {
    let operator = stage.actor("operator");
    let key = stage.key("a");
    stage.put_raw(&key, b"garbage that somebody put here").await;
    operator.store.plan([Fault::None, Fault::After]);
    assert_eq!(operator.ledger.clear(&key, EVA).await.unwrap(), None);
    let note = operator.ledger.cleared(&key).await.unwrap().expect("there is a note").record;
    assert!(note.history[0].note.contains("damaged"), "{:?}", note.history);
}

pub(super) async fn a_cleared_holder_learns_that_its_claim_is_lost(stage: Stage) {
    let task = stage.task("a");
    let policy = policy(Effect::Keyed);
    let operator = stage.actor("operator");
    let one = run(stage.actor("a").claim(&task, &policy).await);
    operator.ledger.clear(&task.key, EVA).await.unwrap();
    let two = run(stage.actor("b").claim(&task, &policy).await);
    assert_eq!(one.heartbeat().await.unwrap(), Renewal::Lost);
    refused(one.complete(Output::Nothing).await);
    recorded(two.complete(Output::Nothing).await);
}

pub(super) async fn a_change_of_what_is_not_there_is_an_error(stage: Stage) {
    let ledger = stage.actor("operator").ledger;
    let key = stage.key("a");
    for error in [
        ledger.redrive(&key, EVA).await.expect_err("nothing to redrive"),
        ledger.resolve_done(&key, EVA, None).await.expect_err("nothing to resolve"),
        ledger.resolve_not_done(&key, EVA).await.expect_err("nothing to resolve"),
        ledger.clear(&key, EVA).await.expect_err("nothing to clear"),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains(key.as_str()), "{error}");
    }
    assert_eq!(ledger.show(&key).await.unwrap(), None);
}
