//! Who runs: one claim at a time, found again by its claimer, lost to its successor, and counted in the record.

use std::sync::Arc;

use taskonce_core::decide::{self, Answer, Ask, ClaimStep, Stamp};
use taskonce_core::held::{Renewal, release_by_claim};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{ClaimId, EventKind, Failure, FailureClass, Output, State, Token, WallTime};
use taskonce_core::store::{Expected, Next};
use taskonce_core::{ErrorKind, ledger::Admission};
use tokio::task::JoinSet;

use super::{abandon, conflict, load, recorded, refused, run, seen, stored, word};
use crate::faulty::Fault;
use crate::stage::{LEASE, Stage, minutes, policy};

/// How many claimers "at once" means.
const AT_ONCE: usize = 24;
/// Of many claims at once one runs; what the others are answered is returned.
async fn race(stage: &Stage, id: &str) -> Vec<Admission> {
    let mut calls = JoinSet::new();
    for number in 0..AT_ONCE {
        let (task, actor) = (stage.task(id), stage.actor(&format!("worker-{number}")));
        calls.spawn(async move { actor.claim(&task, &policy(Effect::Keyed)).await });
    }
    let mut answers = Vec::new();
    while let Some(answer) = calls.join_next().await {
        answers.push(answer.unwrap());
    }
    answers
}

pub(super) async fn of_many_claims_at_once_exactly_one_runs(stage: Stage) {
    for round in 0..6 {
        let answers = race(&stage, &format!("round-{round}")).await;
        let words: Vec<_> = answers.iter().map(word).collect();
        assert_eq!(words.iter().filter(|word| **word == "run").count(), 1, "{words:?}");
        assert_eq!(words.iter().filter(|word| **word == "busy").count(), AT_ONCE - 1, "{words:?}");
    }
}

/// Many recoverers find the same passed lease: one of them takes over, and one crash is counted.
pub(super) async fn of_many_takeovers_at_once_exactly_one_runs(stage: Stage) {
    for round in 0..6 {
        let id = format!("round-{round}");
        let killed = run(stage.actor("killed").claim(&stage.task(&id), &policy(Effect::Keyed)).await);
        stage.shift_age(killed.held().key(), 31 * 60_000).await;
        let answers = race(&stage, &id).await;
        let words: Vec<_> = answers.iter().map(word).collect();
        assert_eq!(words.iter().filter(|word| **word == "run").count(), 1, "{words:?}");
        assert_eq!(words.iter().filter(|word| **word == "busy").count(), AT_ONCE - 1, "{words:?}");
        let record = load(&stage, killed.held().key()).await.record;
        assert_eq!((record.attempt, record.crashes), (2, 1));
    }
}

/// A job came back from its queue, and was refused by the claim of its own dead worker.
pub(super) async fn a_takeover_supersedes_the_stale_claim(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let stale = run(a.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(b.claim(&task, &policy).await);
    assert_eq!((claim.attempt(), claim.held().crashes()), (2, 1));
    assert!(claim.fence() > stale.fence(), "the fence of the successor is larger");
    assert_eq!(stale.heartbeat().await.unwrap(), Renewal::Lost);
    recorded(claim.complete(Output::Nothing).await);
}

fn stamp(number: u128) -> Stamp {
    Stamp { token: Token::from(number), at: WallTime(0) }
}

/// The answer to the claim was lost and the claimer asks again: it must not be told "in progress" by its own claim.
pub(super) async fn a_repeated_claim_recognises_itself(stage: Stage) {
    let policy = policy(Effect::Unrepeatable);
    for (id, minutes_between) in [("soon", 0), ("after the lease", 31)] {
        let task = stage.task(id);
        let owner: Arc<str> = "a".into();
        let ask = Ask { claim: ClaimId::from(7), owner: &owner, fingerprint: task.fingerprint, policy: &policy };
        let ClaimStep::Run(first) = decide::claim(None, &ask, stamp(1)) else { panic!("an absent task runs") };
        let fence = stored(stage.store().swap(&task.key, Expected::Nothing, Next::Claim(&first)).await.unwrap());
        stage.pass(minutes(minutes_between)).await;

        let ClaimStep::Run(again) = decide::claim(None, &ask, stamp(2)) else { panic!("an absent task runs") };
        let found = conflict(stage.other().swap(&task.key, Expected::Nothing, Next::Claim(&again)).await.unwrap());
        let found = found.expect("its own claim is shown");
        let ClaimStep::Resume(mine) = decide::claim(Some(&found), &ask, stamp(3)) else {
            panic!("a claim recognises itself")
        };
        let expected = Expected::Record(&found.record);
        assert_eq!(stored(stage.other().swap(&task.key, expected, Next::Keep(&mine)).await.unwrap()), fence);
        let record = load(&stage, &task.key).await.record;
        assert_eq!((record.state, record.attempt, record.crashes), (State::Running, 1, 0));

        let other = Ask { claim: ClaimId::from(8), ..ask };
        let found = load(&stage, &task.key).await;
        let answer = decide::claim(Some(&found), &other, stamp(4));
        assert_eq!(answer, ClaimStep::Answer(Answer::Busy), "another claim does not");
    }
}

pub(super) async fn a_claim_whose_answer_was_lost_is_released_by_its_id(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Unrepeatable);
    a.store.plan([Fault::After]);
    let error = a.ledger.claim(&task, &policy).await.expect_err("the answer was lost");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    seen(b.claim(&task, &policy).await, "busy");
    a.work().await;
    let claim = run(b.claim(&task, &policy).await);
    assert_eq!((claim.attempt(), claim.held().crashes()), (1, 0), "nothing ran, so nothing is counted");
    assert_eq!(claim.held().last_failure(), None);
}

pub(super) async fn a_claim_whose_future_is_dropped_is_released_by_its_id(stage: Stage) {
    let policy = policy(Effect::Unrepeatable);
    for (id, fault) in [("stored", Fault::SilentAfter), ("not stored", Fault::SilentBefore)] {
        let task = stage.task(id);
        let actor = stage.actor("a");
        actor.store.plan([fault]);
        let is_there = async || stage.store().load(&task.key).await.unwrap().is_some();
        abandon(actor.ledger.claim(&task, &policy), async || fault == Fault::SilentBefore || is_there().await).await;
        assert_eq!(actor.keeper.releases(), 1);
        actor.work().await;
        let claim = run(stage.actor("b").claim(&task, &policy).await);
        assert_eq!((claim.attempt(), claim.held().crashes()), (1, 0));
    }
}

pub(super) async fn a_release_by_claim_id_leaves_other_claims_alone(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    a.store.plan([Fault::After]);
    a.ledger.claim(&task, &policy).await.expect_err("the answer was lost");
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(b.claim(&task, &policy).await);
    a.work().await;
    assert_eq!(load(&stage, &task.key).await.record.claim, claim.held().claim_id());
    let late = async || release_by_claim(stage.store(), &*a.host, &task.key, ClaimId::from(77)).await.unwrap();
    assert!(!late().await, "one that is on its way may still take over");
    recorded(claim.complete(Output::Nothing).await);
    // Each dropped duplicate of a done task was looked for a dozen times.
    assert!(late().await, "nothing takes over what is done");
    a.work().await;
    seen(a.claim(&task, &policy).await, "replay");
}

pub(super) async fn a_failed_claim_call_counts_no_attempt(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = policy(Effect::Keyed);
    actor.store.plan([Fault::Before]);
    let error = actor.ledger.claim(&task, &policy).await.expect_err("the store is away");
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    actor.work().await;
    assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
    recorded(run(actor.claim(&task, &policy).await).fail(Failure::retryable("no")).await);
    for fault in [Fault::Before, Fault::After] {
        actor.store.plan([Fault::None, fault]);
        actor.ledger.claim(&task, &policy).await.expect_err("the store is away");
        actor.work().await;
        let record = load(&stage, &task.key).await.record;
        assert_eq!((record.state, record.attempt, record.crashes), (State::Waiting, 1, 0));
    }
    assert_eq!(run(actor.claim(&task, &policy).await).attempt(), 2);
}

/// A run of 47 minutes was "rescued" by its age every night. Only a passed lease frees, and a heartbeat keeps it.
pub(super) async fn a_heartbeat_keeps_the_claim_however_long_it_runs(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    for beat in 1..=12 {
        stage.pass(minutes(20)).await;
        assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Held);
        let running_for = seen(b.claim(&task, &policy).await, "busy").age();
        assert!(
            running_for >= minutes(20 * beat),
            "the age of the run is shown, not of its heartbeat: {running_for:?}"
        );
    }
    recorded(claim.complete(Output::Nothing).await);
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.attempt, record.crashes), (1, 0));
}

pub(super) async fn a_late_heartbeat_cannot_reopen_a_completed_task(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let late = run(a.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let done = recorded(run(b.claim(&task, &policy).await).complete(Output::Nothing).await);
    assert_eq!(late.heartbeat().await.unwrap(), Renewal::Lost);
    assert_eq!(*load(&stage, &task.key).await.record, *done);

    // The same for a heartbeat of the completed claim itself, sent before its completion and arriving after it.
    let task = stage.task("b");
    let claim = run(a.claim(&task, &policy).await);
    let before = load(&stage, &task.key).await.record;
    let done = recorded(claim.complete(Output::Nothing).await);
    let beat = decide::heartbeat(&before, Token::from(99), minutes(1));
    conflict(stage.store().swap(&task.key, Expected::Record(&before), Next::Keep(&beat)).await.unwrap());
    assert_eq!(*load(&stage, &task.key).await.record, *done);
}

pub(super) async fn a_heartbeat_never_recreates_a_record(stage: Stage) {
    let task = stage.task("a");
    let claim = run(stage.actor("a").claim(&task, &policy(Effect::Keyed)).await);
    let token = load(&stage, &task.key).await.record.token;
    stored(stage.store().swap(&task.key, Expected::Token(token), Next::Erase).await.unwrap());
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Lost);
    assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
    refused(claim.complete(Output::Nothing).await);
    assert_eq!(stage.store().load(&task.key).await.unwrap(), None);
}

pub(super) async fn one_failed_heartbeat_does_not_lose_the_claim(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    stage.pass(minutes(10)).await;
    a.store.plan([Fault::Before, Fault::Before]);
    for _ in 0..2 {
        claim.heartbeat().await.expect_err("the store is away");
        assert!(claim.may_start_effect(), "the lease has not passed");
    }
    stage.pass(minutes(10)).await;
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Held);
    stage.pass(minutes(20)).await;
    seen(b.claim(&task, &policy).await, "busy");
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn a_heartbeat_whose_answer_was_lost_is_adopted(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let claim = run(actor.claim(&task, &policy(Effect::Keyed)).await);
    for _ in 0..3 {
        actor.store.plan([Fault::After]);
        claim.heartbeat().await.expect_err("the answer was lost");
        assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Held);
    }
    recorded(claim.complete(Output::Nothing).await);
}

pub(super) async fn a_lost_claim_is_told_to_its_handler(stage: Stage) {
    let task = stage.task("a");
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let policy = policy(Effect::Keyed);
    let claim = run(a.claim(&task, &policy).await);
    claim.enter();
    let held = Arc::clone(claim.held());
    let told = tokio::spawn(async move { held.lost().await });
    assert!(claim.may_start_effect() && !told.is_finished());
    stage.pass(LEASE + minutes(1)).await;
    let _successor = run(b.claim(&task, &policy).await);
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Lost);
    told.await.unwrap();
    assert!(!claim.may_start_effect());
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Lost, "and stays lost");
}

/// Copies of one task came through several queues, and each counted its own retries.
pub(super) async fn attempts_are_counted_in_the_record_across_copies(stage: Stage) {
    let task = stage.task("a");
    let policy = Policy { attempts_max: 3, ..policy(Effect::Keyed) };
    for attempt in 1..=3 {
        let copy = stage.actor(&format!("queue-{attempt}"));
        let claim = run(copy.claim(&task, &policy).await);
        assert_eq!(claim.attempt(), attempt);
        recorded(claim.fail(Failure::retryable("no")).await);
    }
    for _ in 0..3 {
        let seen = seen(stage.actor("queue-4").claim(&task, &policy).await, "dead");
        assert_eq!(seen.attempt(), 3);
    }
}

/// The last attempt ended without a word. The task is dead, and its record says so and why.
pub(super) async fn a_silent_last_attempt_is_recorded(stage: Stage) {
    let task = stage.task("a");
    let policy = Policy { attempts_max: 2, crashes_max: 100, ..policy(Effect::Keyed) };
    let mut killed = Vec::new();
    for attempt in 1..=2 {
        let claim = run(stage.actor(&format!("worker-{attempt}")).claim(&task, &policy).await);
        assert_eq!(claim.attempt(), attempt);
        killed.push(claim);
        stage.pass(LEASE + minutes(1)).await;
    }
    let answered = seen(stage.actor("last").claim(&task, &policy).await, "dead");
    assert_eq!(answered.failure().map(|failure| failure.class), Some(FailureClass::Crashed));
    let record = load(&stage, &task.key).await.record;
    assert_eq!((record.state, record.attempt, record.crashes), (State::Dead, 2, 2));
    let told: Vec<_> = record.history.iter().map(|event| (event.kind, event.who.as_str(), event.attempt)).collect();
    let crashed = EventKind::Failed(FailureClass::Crashed);
    assert_eq!(told, [(crashed, "worker-1", 1), (crashed, "worker-2", 2)]);
    for claim in killed {
        refused(claim.complete(Output::Nothing).await);
    }
}

/// The tasks of a killed worker landed in "failed", where no rule for retries saw them.
pub(super) async fn a_crash_is_a_counted_attempt_retried_by_the_same_rules(stage: Stage) {
    let task = stage.task("a");
    let policy = Policy { attempts_max: 3, ..policy(Effect::Keyed) };
    let actor = stage.actor("a");
    let _killed = run(actor.claim(&task, &policy).await);
    stage.pass(LEASE + minutes(1)).await;
    let second = run(actor.claim(&task, &policy).await);
    assert_eq!(second.held().last_failure().map(|failure| failure.class), Some(FailureClass::Crashed));
    recorded(second.fail(Failure::retryable("no")).await);
    let third = run(actor.claim(&task, &policy).await);
    assert_eq!((third.attempt(), third.held().crashes()), (3, 1));
    recorded(third.fail(Failure::retryable("no")).await);
    seen(actor.claim(&task, &policy).await, "dead");
}

/// A task that kills whoever runs it took down one worker after another.
pub(super) async fn crashes_used_up_park_the_task(stage: Stage) {
    let task = stage.task("a");
    let policy = Policy { attempts_max: 100, crashes_max: 2, ..policy(Effect::Keyed) };
    let mut killed = Vec::new();
    for attempt in 1..=2 {
        let claim = run(stage.actor("worker").claim(&task, &policy).await);
        assert_eq!(claim.attempt(), attempt);
        killed.push(claim);
        stage.pass(LEASE + minutes(1)).await;
    }
    for _ in 0..2 {
        let seen = seen(stage.actor("worker").claim(&task, &policy).await, "parked");
        assert_eq!((seen.attempt(), seen.found.record.crashes), (2, 2));
    }
    for claim in killed {
        refused(claim.complete(Output::Nothing).await);
    }
}

pub(super) async fn an_unrepeatable_crash_is_parked(stage: Stage) {
    for (id, first, second) in [
        ("both", Effect::Unrepeatable, Effect::Unrepeatable),
        ("was", Effect::Unrepeatable, Effect::Repeatable),
        ("is", Effect::Repeatable, Effect::Unrepeatable),
    ] {
        let task = stage.task(id);
        let _killed = run(stage.actor("a").claim(&task, &policy(first)).await);
        seen(stage.actor("b").claim(&task, &policy(second)).await, "busy");
        stage.pass(LEASE + minutes(1)).await;
        let seen = seen(stage.actor("b").claim(&task, &policy(second)).await, "parked");
        assert_eq!(seen.failure().map(|failure| failure.class), Some(FailureClass::Crashed));
        assert_eq!(load(&stage, &task.key).await.record.state, State::Parked);
    }
}

pub(super) async fn calls_of_the_store_are_counted_and_few(stage: Stage) {
    let actor = stage.actor("a");
    let policy = policy(Effect::Keyed);
    let calls = |wanted: usize, what: &str| assert!(actor.store.take_calls() <= wanted, "{what}: at most {wanted}");
    let claim = run(actor.claim(&stage.task("a"), &policy).await);
    calls(1, "a fresh claim");
    claim.heartbeat().await.unwrap();
    calls(1, "a heartbeat");
    seen(actor.claim(&stage.task("a"), &policy).await, "busy");
    calls(1, "a duplicate of a running task");
    recorded(claim.complete(Output::Nothing).await);
    calls(1, "a completion");
    seen(actor.claim(&stage.task("a"), &policy).await, "replay");
    calls(1, "a duplicate of a done task");
    let killed = run(actor.claim(&stage.task("b"), &policy).await);
    calls(1, "a fresh claim");
    stage.pass(LEASE + minutes(1)).await;
    let claim = run(actor.claim(&stage.task("b"), &policy).await);
    calls(3, "a takeover");
    recorded(claim.fail(Failure::retryable("no")).await);
    calls(1, "a failure");
    recorded(run(actor.claim(&stage.task("b"), &policy).await).release().await);
    calls(3, "a claim of a waiting task and its release");
    drop(killed);
}

/// The second operation on a shared store used the settings of the first.
pub(super) async fn settings_belong_to_the_operation(stage: Stage) {
    let actor = stage.actor("a");
    let task = stage.task("a");
    let quick = taskonce_core::key::Task { key: stage.key_of("contract", "quick", "a"), ..task.clone() };
    let long = Policy { attempts_max: 1, ..policy(Effect::Keyed) };
    let short = Policy { lease: minutes(10), attempts_max: 4, ..policy(Effect::Repeatable) };
    let (_one, _two) = (run(actor.claim(&task, &long).await), run(actor.claim(&quick, &short).await));
    stage.pass(minutes(11)).await;
    seen(actor.claim(&task, &long).await, "busy");
    let second = run(actor.claim(&quick, &short).await);
    stage.pass(minutes(20)).await;
    seen(actor.claim(&task, &long).await, "dead");
    recorded(second.fail(Failure::retryable("no")).await);
    assert_eq!(run(actor.claim(&quick, &short).await).attempt(), 3);
}
