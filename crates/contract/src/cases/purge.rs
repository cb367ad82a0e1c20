//! What goes when its time has come, and what never goes. A store whose keys expire may be ahead of a purge: the cases
//! say what must be there, and what must be gone after a purge.

use std::time::Duration;

use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{DropReason, Failure, Output, Record, State};
use taskonce_core::store::{Expected, Filter, Next};

use super::{conflict, load, recorded, run, seen, stored};
use crate::records::plain;
use crate::stage::{Stage, minutes, policy};

const DAY: i64 = 24 * 3_600_000;
/// The most batches that these cases purge in.
const BATCHES_MAX: usize = 100;

async fn purge_all(stage: &Stage, filter: &Filter) {
    for _ in 0..BATCHES_MAX {
        let purged = stage.store().purge(filter).await.unwrap();
        assert!(purged.records <= filter.page() && purged.outputs <= filter.page(), "{purged:?}");
        if purged.records == 0 && purged.outputs == 0 {
            return;
        }
    }
    panic!("purging has no end");
}

async fn put(stage: &Stage, id: &str, record: &Record) -> taskonce_core::key::Key {
    let key = stage.key(id);
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(record)).await.unwrap());
    key
}

pub(super) async fn final_records_are_purged_past_their_retention(stage: Stage) {
    for state in [State::Done, State::Dead] {
        let key = put(&stage, state.name(), &plain(state, 1)).await;
        stage.shift_age(&key, 15 * DAY).await;
        purge_all(&stage, &Filter::default()).await;
        assert_eq!(stage.store().load(&key).await.unwrap(), None, "{state}");
    }
}

pub(super) async fn final_records_stay_for_their_retention(stage: Stage) {
    for state in [State::Done, State::Dead] {
        let key = put(&stage, state.name(), &plain(state, 1)).await;
        stage.shift_age(&key, 13 * DAY).await;
        purge_all(&stage, &Filter::default()).await;
        assert_eq!(load(&stage, &key).await.record.state, state);
    }
}

/// A parked task stays until a person resolves it, however old. A running or waiting one stays for its retention at
/// least, whatever has become of its lease or delay.
pub(super) async fn purge_never_touches_running_waiting_or_parked(stage: Stage) {
    let waiting = Record { delay: Duration::from_secs(60), ..plain(State::Waiting, 2) };
    for (record, age) in [(plain(State::Running, 1), 13), (waiting, 13), (plain(State::Parked, 3), 500)] {
        let key = put(&stage, record.state.name(), &record).await;
        stage.shift_age(&key, age * DAY).await;
        purge_all(&stage, &Filter::default()).await;
        assert_eq!(*load(&stage, &key).await.record, record);
    }
}

pub(super) async fn purge_works_in_bounded_batches(stage: Stage) {
    let mut keys = Vec::new();
    for number in 0..25 {
        let key = put(&stage, &format!("old-{number}"), &plain(State::Done, 1)).await;
        stage.shift_age(&key, 15 * DAY).await;
        keys.push(key);
    }
    let young = put(&stage, "young", &plain(State::Done, 1)).await;
    purge_all(&stage, &Filter { page_max: 4, ..Filter::default() }).await;
    for key in keys {
        assert_eq!(stage.store().load(&key).await.unwrap(), None);
    }
    load(&stage, &young).await;
}

/// Whether a store drops outputs by themselves or keeps them as long as the record, the task stays done, and nobody
/// takes a dropped output for an absent one.
pub(super) async fn an_expired_output_leaves_the_task_done(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { output_retention: minutes(60), ..policy(Effect::Keyed) };
    let output = Output::kept("text/plain", "result");
    recorded(run(actor.claim(&task, &policy).await).complete(output.clone()).await);
    for minutes_more in [61, 60] {
        stage.pass(minutes(minutes_more)).await;
        purge_all(&stage, &Filter::default()).await;
        let seen = seen(actor.claim(&task, &policy).await, "replay");
        let now = seen.output();
        assert!(now == &output || now == &Output::Dropped(DropReason::Expired), "{now:?}");
        assert!(seen.age() >= minutes(61), "the task has been done since its completion: {:?}", seen.age());
    }
}

pub(super) async fn purged_keys_never_reuse_a_token(stage: Stage) {
    let old = plain(State::Done, 1);
    let key = put(&stage, "a", &old).await;
    stage.shift_age(&key, 15 * DAY).await;
    purge_all(&stage, &Filter::default()).await;
    let stale = plain(State::Dead, 2);
    assert_eq!(conflict(stage.store().swap(&key, Expected::Record(&old), Next::Keep(&stale)).await.unwrap()), None);
    let new = plain(State::Running, 3);
    stored(stage.store().swap(&key, Expected::Nothing, Next::Claim(&new)).await.unwrap());
    conflict(stage.store().swap(&key, Expected::Record(&old), Next::Keep(&stale)).await.unwrap());
    assert_eq!(load(&stage, &key).await.record.token, new.token);
}

pub(super) async fn a_purged_task_runs_again_from_the_beginning(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = policy(Effect::Keyed);
    recorded(run(actor.claim(&task, &policy).await).fail(Failure::permanent("no")).await);
    stage.pass(minutes(15 * 24 * 60)).await;
    purge_all(&stage, &Filter::default()).await;
    let claim = run(actor.claim(&task, &policy).await);
    assert_eq!((claim.attempt(), claim.held().last_failure()), (1, None));
}

/// For a lease, a clock that went back counts as passed: the task is tried, and tokens decide. A purge has no second
/// line of defence: what it removes is forgotten, so it waits.
pub(super) async fn a_clock_that_went_back_purges_nothing(stage: Stage) {
    for state in [State::Done, State::Dead] {
        let record = Record { output: Output::kept("text/plain", "result"), ..plain(state, 1) };
        let key = put(&stage, state.name(), &record).await;
        stage.shift_age(&key, -400 * DAY).await;
        purge_all(&stage, &Filter::default()).await;
        assert_eq!(*load(&stage, &key).await.record, record);
    }
}

pub(super) async fn retention_is_extended_when_less_than_half_is_left(stage: Stage) {
    let policy = Policy { retention: minutes(1000), output_retention: minutes(1000), ..policy(Effect::Keyed) };
    for (id, failure) in [("done", None), ("dead", Some(Failure::permanent("no")))] {
        let task = stage.task(id);
        let actor = stage.actor("a");
        let claim = run(actor.claim(&task, &policy).await);
        let (end, word) = match failure {
            None => (claim.complete(Output::kept("text/plain", "result")).await, "replay"),
            Some(failure) => (claim.fail(failure).await, "dead"),
        };
        let first = recorded(end);
        stage.pass(minutes(400)).await;
        seen(actor.claim(&task, &policy).await, word);
        assert!(load(&stage, &task.key).await.age.as_duration() >= minutes(400), "more than half is left: no write");
        stage.pass(minutes(200)).await;
        seen(actor.claim(&task, &policy).await, word);
        let extended = load(&stage, &task.key).await;
        assert!(extended.age.as_duration() < minutes(100), "it begins again: {:?}", extended.age);
        let same = Record { token: first.token, state_age: first.state_age, ..(*extended.record).clone() };
        assert_eq!(same, *first, "nothing else has changed");
        stage.pass(minutes(900)).await;
        purge_all(&stage, &Filter::default()).await;
        seen(actor.claim(&task, &policy).await, word);
    }
}

pub(super) async fn an_extended_record_keeps_its_age(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    let policy = Policy { retention: minutes(1000), output_retention: minutes(1000), ..policy(Effect::Keyed) };
    recorded(run(actor.claim(&task, &policy).await).complete(Output::Nothing).await);
    for round in 1..=4 {
        stage.pass(minutes(600)).await;
        let age = seen(actor.claim(&task, &policy).await, "replay").age();
        assert!(age >= minutes(600 * round) && age < minutes(600 * round + 100), "{age:?} in round {round}");
    }
}
