//! A claim that a transaction of the caller's locks and completes, by hand.

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::decide::By;
use taskonce_core::held::{Joined, Phase, Renewal, Settled};
use taskonce_core::ledger::Admission;
use taskonce_core::policy::Policy;
use taskonce_core::record::{Failure, FailureClass, Output, State};

use super::Scene;
use super::cases::transactional;
use crate::cases::{recorded, run, seen, word};
use crate::faulty::Fault;
use crate::stage::{LEASE, minutes};

/// How long a case watches that something does not happen.
const WATCHED_FOR: Duration = Duration::from_millis(100);

fn receipt() -> Output {
    Output::kept("text/plain", "receipt")
}

pub(super) async fn a_rolled_back_effect_leaves_no_completion(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.roll_back().await;
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (0, State::Running));
    let (joined, claim) = completion.find_out().await.unwrap();
    assert_eq!(joined, Joined::RolledBack);
    // The claim goes on, in another transaction.
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (1, State::Done));
    assert_eq!(seen(scene.stage.actor("b").claim(&task, &transactional()).await, "replay").output(), &receipt());
    assert_eq!((actor.keeper.kept(), actor.keeper.settles()), (0, 0));
}

pub(super) async fn a_lost_claim_never_runs_the_callers_statements(scene: Scene) {
    let task = scene.stage.task("a");
    let stale = run(scene.stage.actor("a").claim(&task, &transactional()).await);
    scene.stage.pass(LEASE + minutes(1)).await;
    let successor = run(scene.stage.actor("b").claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (stale, locked) = by_hand.lock(stale).await;
    let error = locked.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ClaimLost, "{error:?}");
    assert!(error.to_string().contains(task.key.as_str()), "{error}");
    by_hand.roll_back().await;
    assert_eq!(stale.held().phase(), Phase::Lost, "its handler is told");
    drop(stale);
    recorded(successor.complete(receipt()).await);
    // Done by another is lost, too.
    let late = scene.stage.task("late");
    let stale = run(scene.stage.actor("a").claim(&late, &transactional()).await);
    scene.stage.pass(LEASE + minutes(1)).await;
    recorded(run(scene.stage.actor("b").claim(&late, &transactional()).await).complete(receipt()).await);
    let mut by_hand = scene.driver.begin().await;
    let (_stale, locked) = by_hand.lock(stale).await;
    assert_eq!(locked.unwrap_err().kind(), ErrorKind::ClaimLost);
}

/// One that did not ask, or did not listen, is refused where it would complete.
pub(super) async fn a_lost_claim_can_never_commit(scene: Scene) {
    let task = scene.stage.task("a");
    let stale = run(scene.stage.actor("a").claim(&task, &transactional()).await);
    scene.stage.pass(LEASE + minutes(1)).await;
    let successor = run(scene.stage.actor("b").claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (stale, locked) = by_hand.lock(stale).await;
    assert!(locked.is_err());
    by_hand.add_effect(&task.key).await;
    let refused = by_hand.complete(stale, receipt()).await.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::ClaimLost, "{:?}", refused.error);
    by_hand.roll_back().await;
    drop(refused);
    assert_eq!(scene.found(&task.key).await.record.claim, successor.held().claim_id());
    let mut by_hand = scene.driver.begin().await;
    let (successor, locked) = by_hand.lock(successor).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(successor, receipt()).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (1, State::Done));
}

pub(super) async fn a_completion_without_the_lock_is_refused(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let refused = by_hand.complete(claim, receipt()).await.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::WrongState, "{:?}", refused.error);
    assert!(refused.error.hint().contains("lock"), "{:?}", refused.error);
    by_hand.roll_back().await;
    recorded(refused.claim.release().await);
}

pub(super) async fn a_task_that_was_cleared_before_the_lock_is_lost(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    scene.stage.actor("b").ledger.clear(&task.key, By { who: "ann", why: "not wanted" }).await.unwrap();
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    assert_eq!(locked.unwrap_err().kind(), ErrorKind::ClaimLost);
    by_hand.roll_back().await;
    drop(claim);
    scene.work(&actor).await;
    assert_eq!(scene.stage.store().load(&task.key).await.unwrap(), None, "nothing writes it again");
}

/// Who clears it waits, or is told to come again: the record is never gone under the transaction.
pub(super) async fn a_task_that_is_cleared_while_its_transaction_runs_keeps_its_one_effect(scene: Scene) {
    let (task, actor, person) = (scene.stage.task("a"), scene.stage.actor("a"), scene.stage.actor("b"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let key = task.key.clone();
    let clearing = tokio::spawn(async move {
        person.ledger.clear(&key, By { who: "ann", why: "not wanted" }).await.map(|_removed| ())
    });
    assert!(scene.stage.store().load(&task.key).await.unwrap().is_some(), "gone under the transaction that holds it");
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    let found = match clearing.await.unwrap() {
        Ok(()) => None,
        Err(error) => {
            assert!([ErrorKind::Locked, ErrorKind::Changed, ErrorKind::TimedOut].contains(&error.kind()), "{error:?}");
            Some(State::Done)
        }
    };
    let there = scene.stage.other().load(&task.key).await.unwrap().map(|found| found.record.state);
    assert_eq!((there, scene.driver.effects(&task.key).await), (found, 1));
}

/// The lease has passed already, and nobody can take over before the transaction ends.
pub(super) async fn while_a_transaction_holds_the_record_others_are_busy_beyond_the_lease(scene: Scene) {
    let (task, other) = (scene.stage.task("a"), scene.stage.actor("b"));
    let claim = run(scene.stage.actor("a").claim(&task, &transactional()).await);
    scene.stage.pass(LEASE + minutes(1)).await;
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.expect("a claim that nobody took over still holds");
    by_hand.add_effect(&task.key).await;
    // A store may know only that it is locked.
    match other.ledger.claim(&task, &transactional()).await {
        Ok(Admission::Busy(seen)) => assert!(!seen.defer_for().is_zero(), "{seen:?}"),
        Err(error) if error.kind() == ErrorKind::Locked => {}
        told => panic!("the task is held; the answer was {told:?}"),
    }
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    scene.work(&other).await;
    assert_eq!(seen(other.claim(&task, &transactional()).await, "replay").output(), &receipt());
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

pub(super) async fn no_heartbeat_is_under_way_when_the_record_is_locked(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let (held, store, host) = (Arc::clone(claim.held()), Arc::clone(&actor.store), Arc::clone(&actor.host));
    store.take_calls();
    store.plan([Fault::SilentBefore]);
    let heartbeat = tokio::spawn({
        let (held, store) = (Arc::clone(&held), Arc::clone(&store));
        async move { held.renew(&*store, &*host).await }
    });
    while store.take_calls() == 0 {
        tokio::task::yield_now().await;
    }
    let mut by_hand = scene.driver.begin().await;
    let locking = tokio::spawn(async move {
        let (claim, locked) = by_hand.lock(claim).await;
        (by_hand, claim, locked)
    });
    // sleeps: a lock that does not wait for the heartbeat has time to be taken
    tokio::time::sleep(WATCHED_FOR).await;
    assert!(!locking.is_finished(), "the record is locked beside a heartbeat that is under way");
    heartbeat.abort();
    let (by_hand, claim, locked) = locking.await.unwrap();
    locked.unwrap();
    by_hand.roll_back().await;
    recorded(claim.fail(Failure::permanent("over")).await);
}

/// The token moved, and the process does not know it: the record is found by its claim.
pub(super) async fn a_heartbeat_before_the_lock_does_not_lose_the_claim(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    actor.store.plan([Fault::After]);
    claim.heartbeat().await.unwrap_err();
    assert_ne!(scene.found(&task.key).await.record.token, claim.held().record().token);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (1, State::Done));
}

/// It would wait for the caller's own transaction, and move the token under it.
pub(super) async fn a_locked_record_gets_no_heartbeat(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    actor.store.take_calls();
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Held);
    assert_eq!(actor.store.take_calls(), 0);
    by_hand.roll_back().await;
    recorded(claim.fail(Failure::permanent("over")).await);
}

pub(super) async fn a_refused_output_gives_the_claim_back(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &Policy { output_max: 4, ..transactional() }).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let refused = by_hand.complete(claim, receipt()).await.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::BadOutput, "{:?}", refused.error);
    // A shorter one is taken, in the same transaction.
    let completion = by_hand.complete(refused.claim, Output::kept("text/plain", "ok")).await.unwrap();
    by_hand.commit().await;
    completion.committed();
    let record = scene.found(&task.key).await.record;
    assert_eq!((record.state, &record.output), (State::Done, &Output::kept("text/plain", "ok")));
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

pub(super) async fn a_dropped_transaction_is_a_failed_attempt_and_leaves_no_effect(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    drop(by_hand);
    drop(claim);
    scene.work(&actor).await;
    let record = scene.found(&task.key).await.record;
    assert_eq!((record.state, record.attempt, scene.driver.effects(&task.key).await), (State::Waiting, 1, 0));
    assert_eq!(record.failure.as_ref().map(|failure| failure.class), Some(FailureClass::Dropped));
}

/// The process was cancelled between the commit and the word about it.
pub(super) async fn a_completion_that_was_never_confirmed_is_found_out(scene: Scene) {
    for (id, commits, wanted) in [("kept", true, State::Done), ("gone", false, State::Waiting)] {
        let (task, actor) = (scene.stage.task(id), scene.stage.actor(id));
        let claim = run(actor.claim(&task, &transactional()).await);
        let mut by_hand = scene.driver.begin().await;
        let (claim, locked) = by_hand.lock(claim).await;
        locked.unwrap();
        by_hand.add_effect(&task.key).await;
        let completion = by_hand.complete(claim, receipt()).await.unwrap();
        if commits {
            by_hand.commit().await;
        } else {
            by_hand.roll_back().await;
        }
        drop(completion);
        assert_eq!(actor.keeper.settles(), 1);
        scene.work(&actor).await;
        let record = scene.found(&task.key).await.record;
        assert_eq!((record.state, record.attempt), (wanted, 1), "{id}");
        assert_eq!(scene.driver.effects(&task.key).await, usize::from(commits), "{id}");
        let output = if commits { receipt() } else { Output::Nothing };
        assert_eq!(record.output, output, "{id}");
    }
}

pub(super) async fn a_commit_whose_answer_is_lost_is_resolved(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.commit().await;
    // The first question gets no answer either.
    actor.store.plan([Fault::After]);
    let open = completion.find_out().await.unwrap_err();
    let (joined, claim) = open.completion.find_out().await.unwrap();
    let Joined::Committed(record) = joined else { panic!("it committed; it was {joined:?}") };
    assert_eq!((record.state, &record.output), (State::Done, &receipt()));
    drop(claim);
    assert_eq!((actor.keeper.kept(), actor.keeper.settles()), (0, 0), "nothing is left to do");
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (1, State::Done));

    let task = scene.stage.task("b");
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.roll_back().await;
    actor.store.plan([Fault::After]);
    let open = completion.find_out().await.unwrap_err();
    let (joined, claim) = open.completion.find_out().await.unwrap();
    assert_eq!(joined, Joined::RolledBack);
    assert_eq!((scene.driver.effects(&task.key).await, scene.state(&task.key).await), (0, State::Running));
    assert_eq!(claim.heartbeat().await.unwrap(), Renewal::Held, "the claim goes on");
    recorded(claim.fail(Failure::retryable("not today")).await);

    // Another took over after the transaction was rolled back.
    let task = scene.stage.task("c");
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    by_hand.roll_back().await;
    scene.stage.pass(LEASE + minutes(1)).await;
    let successor = run(scene.stage.actor("c").claim(&task, &transactional()).await);
    let (joined, _claim) = completion.find_out().await.unwrap();
    assert!(matches!(joined, Joined::Lost(Some(_))), "{joined:?}");
    recorded(successor.fail(Failure::retryable("not today")).await);
}

pub(super) async fn a_transaction_that_is_still_open_is_not_resolved(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    let completion = by_hand.complete(claim, receipt()).await.unwrap();
    let open = completion.find_out().await.unwrap_err();
    assert_eq!(open.error.kind(), ErrorKind::Locked, "{:?}", open.error);
    by_hand.commit().await;
    let (joined, _claim) = open.completion.find_out().await.unwrap();
    assert!(matches!(joined, Joined::Committed(_)), "{joined:?}");
    assert_eq!(scene.driver.effects(&task.key).await, 1);
}

/// What was decided first is written: the failure.
pub(super) async fn a_claim_that_was_given_up_completes_nothing(scene: Scene) {
    let (task, actor) = (scene.stage.task("a"), scene.stage.actor("a"));
    let claim = run(actor.claim(&task, &transactional()).await);
    let mut by_hand = scene.driver.begin().await;
    let (claim, locked) = by_hand.lock(claim).await;
    locked.unwrap();
    by_hand.add_effect(&task.key).await;
    claim.held().intend_fail(&*actor.host, &Failure::retryable("given up"));
    let refused = by_hand.complete(claim, receipt()).await.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::WrongState, "{:?}", refused.error);
    by_hand.roll_back().await;
    let settled = refused.claim.fail(Failure::permanent("decided too late")).await;
    assert!(matches!(&settled, Ok(Settled::Recorded(record)) if record.state == State::Waiting), "{settled:?}");
    let again = actor.claim(&task, &transactional()).await;
    assert_eq!((word(&again), scene.driver.effects(&task.key).await), ("run", 0));
}
