//! Walks over what a store lists: tasks in rare states, found without looking at the others.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::decide::By;
use taskonce_core::key::{Key, Name};
use taskonce_core::policy::Effect;
use taskonce_core::record::{Failure, Output, Record, State};
use taskonce_core::store::{Expected, Filter, Next, Walk};

use super::{recorded, run, stored};
use crate::records::plain;
use crate::stage::{Actor, LEASE, Stage, minutes, policy};

/// The most pages that a walk of these cases may take.
const PAGES_MAX: usize = 10_000;
const BY: By<'static> = By { who: "eva", why: "to see the lists follow" };
const RARE: [State; 4] = [State::Running, State::Waiting, State::Dead, State::Parked];

/// A walk over what is listed in some states.
fn listed(states: &[State]) -> Filter {
    Filter { states: states.to_vec(), walk: Walk::Listed, ..Filter::default() }
}

/// The ids of a walk to its end, each with its state.
async fn ids(actor: &Actor, filter: Filter) -> BTreeSet<(String, State)> {
    let mut walk = actor.ledger.walk(filter);
    let mut ids = BTreeSet::new();
    for _ in 0..PAGES_MAX {
        match walk.next_page().await.unwrap() {
            None => return ids,
            Some(rows) => {
                for row in rows {
                    let state = row.found.unwrap().record.state;
                    assert!(ids.insert((row.key.id().to_owned(), state)), "{} comes twice", row.key);
                }
            }
        }
    }
    panic!("the walk has no end");
}

fn set(wanted: &[(&str, State)]) -> BTreeSet<(String, State)> {
    wanted.iter().map(|(id, state)| ((*id).to_owned(), *state)).collect()
}

/// Demands that each list, and all of them together, show just these.
async fn demand(actor: &Actor, wanted: &[(&str, State)]) {
    for state in RARE {
        let of_state: Vec<_> = wanted.iter().filter(|(_, other)| *other == state).copied().collect();
        assert_eq!(ids(actor, listed(&[state])).await, set(&of_state), "listed as {state}");
    }
    assert_eq!(ids(actor, listed(&RARE)).await, set(wanted), "listed at all");
}

/// A record that is listed: a running one was renewed.
fn renewed(state: State, token: u128) -> Record {
    Record { state_age: minutes(1), ..plain(state, token) }
}

async fn put(stage: &Stage, key: &Key, record: &Record) {
    stored(stage.store().swap(key, Expected::Nothing, Next::Keep(record)).await.unwrap());
}

pub(super) async fn what_failed_died_or_was_parked_is_listed(stage: Stage) {
    let (actor, keyed, once) = (stage.actor("a"), policy(Effect::Keyed), policy(Effect::Unrepeatable));
    demand(&actor, &[]).await;
    let failed = run(actor.claim(&stage.task("failed"), &keyed).await);
    recorded(failed.fail(Failure::retryable("not now")).await);
    let released = run(actor.claim(&stage.task("released"), &keyed).await);
    recorded(released.release().await);
    let died = run(actor.claim(&stage.task("died"), &keyed).await);
    recorded(died.fail(Failure::permanent("never")).await);
    let doubted = run(actor.claim(&stage.task("doubted"), &once).await);
    recorded(doubted.fail(Failure::retryable("timed out")).await);
    let done = run(actor.claim(&stage.task("done"), &keyed).await);
    recorded(done.complete(Output::Nothing).await);
    let wanted =
        [("failed", State::Waiting), ("released", State::Waiting), ("died", State::Dead), ("doubted", State::Parked)];
    demand(&stage.actor("b"), &wanted).await;
}

/// And stays listed when its process dies: nobody renews it, and nobody takes it off.
pub(super) async fn a_running_task_is_listed_from_its_heartbeat_on(stage: Stage) {
    let actor = stage.actor("a");
    let claim = run(actor.claim(&stage.task("long"), &policy(Effect::Keyed)).await);
    for _ in 0..3 {
        stage.pass(minutes(1)).await;
        claim.held().renew(&*actor.store, &*actor.host).await.unwrap();
        demand(&stage.actor("b"), &[("long", State::Running)]).await;
    }
    std::mem::forget(claim);
    stage.pass(LEASE).await;
    demand(&stage.actor("b"), &[("long", State::Running)]).await;
}

pub(super) async fn what_is_no_longer_so_is_not_listed(stage: Stage) {
    let (actor, keyed, once) = (stage.actor("a"), policy(Effect::Keyed), policy(Effect::Unrepeatable));
    // Waiting, running, waiting, running and renewed, done.
    let task = stage.task("a");
    for _ in 0..2 {
        recorded(run(actor.claim(&task, &keyed).await).fail(Failure::retryable("not now")).await);
        demand(&actor, &[("a", State::Waiting)]).await;
    }
    let claim = run(actor.claim(&task, &keyed).await);
    assert_eq!(ids(&actor, listed(&[State::Waiting])).await, set(&[]));
    stage.pass(minutes(1)).await;
    claim.held().renew(&*actor.store, &*actor.host).await.unwrap();
    demand(&actor, &[("a", State::Running)]).await;
    recorded(claim.complete(Output::Nothing).await);
    demand(&actor, &[]).await;

    // Renewed and failed, dead, redriven, cleared.
    let task = stage.task("b");
    let claim = run(actor.claim(&task, &keyed).await);
    stage.pass(minutes(1)).await;
    claim.held().renew(&*actor.store, &*actor.host).await.unwrap();
    recorded(claim.fail(Failure::permanent("never")).await);
    demand(&actor, &[("b", State::Dead)]).await;
    actor.ledger.redrive(&task.key, BY).await.unwrap();
    demand(&actor, &[("b", State::Waiting)]).await;
    actor.ledger.redrive(&task.key, BY).await.unwrap();
    demand(&actor, &[("b", State::Waiting)]).await;
    actor.ledger.clear(&task.key, BY).await.unwrap();
    demand(&actor, &[]).await;

    // Parked and resolved, both ways.
    for (id, is_done) in [("c", true), ("d", false)] {
        let task = stage.task(id);
        recorded(run(actor.claim(&task, &once).await).fail(Failure::retryable("timed out")).await);
        demand(&actor, &[(id, State::Parked)]).await;
        if is_done {
            actor.ledger.resolve_done(&task.key, BY, None).await.unwrap();
            demand(&actor, &[]).await;
        } else {
            actor.ledger.resolve_not_done(&task.key, BY).await.unwrap();
            demand(&actor, &[(id, State::Waiting)]).await;
        }
    }
}

pub(super) async fn what_a_takeover_made_of_a_task_is_listed(stage: Stage) {
    let (stopped, other) = (stage.actor("a"), stage.actor("b"));
    for (id, effect, end) in [("again", Effect::Keyed, None), ("doubted", Effect::Unrepeatable, Some(State::Parked))] {
        let (task, policy) = (stage.task(id), policy(effect));
        let claim = run(stopped.claim(&task, &policy).await);
        stage.pass(minutes(1)).await;
        claim.held().renew(&*stopped.store, &*stopped.host).await.unwrap();
        stage.pass(LEASE).await;
        let taken = other.claim(&task, &policy).await;
        match end {
            Some(state) => demand(&other, &[(id, state)]).await,
            None => {
                let taken = run(taken);
                stage.pass(minutes(1)).await;
                taken.held().renew(&*other.store, &*other.host).await.unwrap();
                demand(&other, &[(id, State::Running)]).await;
                // The first one comes back too late, and takes nothing off but its own.
                super::refused(claim.complete(Output::Nothing).await);
                demand(&other, &[(id, State::Running)]).await;
                recorded(taken.complete(Output::Nothing).await);
                demand(&other, &[]).await;
                continue;
            }
        }
        super::refused(claim.complete(Output::Nothing).await);
        demand(&other, &[(id, State::Parked)]).await;
    }
}

pub(super) async fn a_listed_walk_keeps_to_its_filter(stage: Stage) {
    let keys = [
        stage.key_of("a", "x", "one"),
        stage.key_of("a", "y", "one"),
        stage.key_of("b", "x", "one"),
        stage.key_of("a", "x", "[two]*"),
        stage.key_of("ab", "x", "one"),
        stage.key_of("c", "z", "a/x@1/one"),
    ];
    for state in RARE {
        for key in &keys {
            put(&stage, key, &renewed(state, 1)).await;
        }
        stage.shift_age(&keys[0], 3_600_000).await;
        let actor = stage.actor("walker");
        let name = |name: &str| Some(Name::new(name).unwrap());
        let count = async |filter: Filter| {
            let mut walk = actor.ledger.walk(Filter { page_max: 2, ..filter });
            let mut seen = BTreeSet::new();
            while let Some(rows) = walk.next_page().await.unwrap() {
                seen.extend(rows.into_iter().map(|row| keys.iter().position(|key| *key == row.key).unwrap()));
            }
            seen.into_iter().collect::<Vec<_>>()
        };
        let all = listed(&[state]);
        assert_eq!(count(all.clone()).await, [0, 1, 2, 3, 4, 5], "{state}");
        assert_eq!(count(Filter { namespace: name("a"), ..all.clone() }).await, [0, 1, 3], "{state}");
        assert_eq!(count(Filter { handler: name("x"), ..all.clone() }).await, [0, 2, 3, 4], "{state}");
        assert_eq!(count(Filter { id_prefix: "[two]*".into(), ..all.clone() }).await, [3], "{state}");
        assert_eq!(count(Filter { id_prefix: "[".into(), ..all.clone() }).await, [3], "{state}");
        assert_eq!(count(Filter { age_min: minutes(30), ..all.clone() }).await, [0], "{state}");
        for other in RARE.into_iter().filter(|other| *other != state) {
            assert_eq!(count(listed(&[other])).await, [] as [usize; 0], "{other}, not {state}");
        }
        for key in &keys {
            let found = super::load(&stage, key).await;
            stored(stage.store().swap(key, Expected::Record(&found.record), Next::Erase).await.unwrap());
        }
    }
}

pub(super) async fn a_listed_walk_is_paged(stage: Stage) {
    let mut wanted = BTreeSet::new();
    for number in 0..60_usize {
        let state = RARE[number % 4];
        let key = stage.key(&format!("id-{number}"));
        put(&stage, &key, &renewed(state, 1)).await;
        put(&stage, &stage.key(&format!("done-{number}")), &plain(State::Done, 1)).await;
        wanted.insert((key.id().to_owned(), state));
    }
    for page_max in [1, 7, 1000] {
        let filter = Filter { page_max, ..listed(&RARE) };
        let (mut seen, mut cursor) = (BTreeSet::new(), None);
        for pages in 0.. {
            assert!(pages < PAGES_MAX, "the walk has no end");
            // Another process goes on each time: a cursor is all that a walk needs.
            let store = if pages % 2 == 0 { stage.store() } else { stage.other() };
            let page = store.scan(&filter, cursor).await.unwrap();
            assert!(page.rows.len() <= page_max, "{} rows on a page of {page_max}", page.rows.len());
            seen.extend(page.rows.into_iter().map(|row| (row.key.id().to_owned(), row.found.unwrap().record.state)));
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen, wanted, "pages of {page_max}");
    }
}

pub(super) async fn a_listed_walk_misses_nothing_while_others_write(stage: Stage) {
    let keys: Vec<Key> = (0..80).map(|number| stage.key(&format!("id-{number}"))).collect();
    for key in &keys {
        put(&stage, key, &renewed(State::Waiting, 1)).await;
    }
    let mut walk = stage.actor("walker").ledger.walk(Filter { page_max: 5, ..listed(&[State::Waiting]) });
    let mut seen = BTreeSet::new();
    for round in 0..PAGES_MAX {
        let Some(rows) = walk.next_page().await.unwrap() else { break };
        seen.extend(rows.into_iter().map(|row| row.key));
        if round < 80 {
            // Of those that stay, some are written again; others come, and others go.
            let again = &keys[(round * 31) % keys.len()];
            let found = super::load(&stage, again).await;
            let next = renewed(State::Waiting, 1000 + round as u128);
            stored(stage.other().swap(again, Expected::Record(&found.record), Next::Keep(&next)).await.unwrap());
            let passing = stage.key(&format!("passing-{round}"));
            let record = renewed(State::Waiting, 1);
            put(&stage, &passing, &record).await;
            stored(stage.other().swap(&passing, Expected::Record(&record), Next::Erase).await.unwrap());
            put(&stage, &stage.key(&format!("late-{round}")), &record).await;
        }
    }
    assert!(walk.next_page().await.unwrap().is_none(), "the walk has ended");
    assert!(keys.iter().all(|key| seen.contains(key)), "no record that was there all the time is missed");
}

pub(super) async fn an_unreadable_record_is_listed_with_its_error(stage: Stage) {
    let (fine, broken) = (stage.key("fine"), stage.key("broken"));
    for key in [&fine, &broken] {
        put(&stage, key, &plain(State::Dead, 1)).await;
    }
    stage.put_raw(&broken, b"garbage").await;
    let page = stage.store().scan(&listed(&[State::Dead]), None).await.unwrap();
    assert!(page.next.is_none());
    let mut seen: Vec<_> =
        page.rows.into_iter().map(|row| (row.key, row.found.map(drop).map_err(|error| error.kind()))).collect();
    seen.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(seen, [(broken, Err(ErrorKind::Corrupt)), (fine, Ok(()))]);
}

pub(super) async fn a_listed_walk_that_admits_done_sees_everything(stage: Stage) {
    for state in State::ALL {
        put(&stage, &stage.key(state.name()), &plain(state, 1)).await;
    }
    let actor = stage.actor("walker");
    assert_eq!(ids(&actor, listed(&[])).await.len(), State::ALL.len());
    let wanted = set(&[("done", State::Done), ("running", State::Running)]);
    assert_eq!(ids(&actor, listed(&[State::Done, State::Running])).await, wanted);
    // And a walk over all sees, by its states, what no list has.
    let all = Filter { states: vec![State::Running], age_min: Duration::ZERO, ..Filter::default() };
    assert_eq!(ids(&actor, all).await, set(&[("running", State::Running)]));
}
