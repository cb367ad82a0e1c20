//! The port itself: atomic, repeatable, guarded by tokens, with fences that grow.

use std::sync::Arc;
use std::task::Poll;
use std::{future::Future, future::poll_fn, pin::pin};

use taskonce_core::record::{ClaimId, Fence, Output, Record, State, Token};
use taskonce_core::store::{Expected, Memory, Next, Store, Swap};
use tokio::task::JoinSet;

use super::{conflict, load, stored};
use crate::records::plain;
use crate::stage::Stage;

/// How many callers "at once" means.
const AT_ONCE: usize = 32;

pub(super) async fn an_unknown_key_holds_nothing(stage: Stage) {
    let key = stage.key("a");
    assert_eq!(stage.store().load(&key).await.unwrap(), None);
    assert_eq!(stage.other().load(&key).await.unwrap(), None);
}

pub(super) async fn a_swap_that_expects_nothing_is_refused_where_something_is(stage: Stage) {
    let key = stage.key("a");
    let (first, second) = (plain(State::Running, 1), plain(State::Running, 2));
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    for next in [Next::Keep(&second), Next::Claim(&second)] {
        let found = conflict(stage.other().swap(&key, Expected::Nothing, next).await.unwrap()).expect("it is shown");
        assert_eq!(*found.record, first);
    }
    assert_eq!(*load(&stage, &key).await.record, first);
}

pub(super) async fn a_swap_that_expects_something_is_refused_where_nothing_is(stage: Stage) {
    let key = stage.key("a");
    let record = plain(State::Running, 1);
    let before = plain(State::Running, 9);
    for next in [Next::Keep(&record), Next::Claim(&record), Next::Erase] {
        assert_eq!(conflict(stage.store().swap(&key, Expected::Token(before.token), next).await.unwrap()), None);
        assert_eq!(conflict(stage.store().swap(&key, Expected::Record(&before), next).await.unwrap()), None);
    }
    assert_eq!(stage.store().load(&key).await.unwrap(), None, "a refused swap creates nothing");
}

pub(super) async fn a_stale_token_is_refused_and_shown_what_is_there(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let (first, second, third) = (plain(State::Running, 1), plain(State::Waiting, 2), plain(State::Done, 3));
    stored(store.swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    stored(store.swap(&key, Expected::Record(&first), Next::Keep(&second)).await.unwrap());
    for next in [Next::Keep(&third), Next::Claim(&third), Next::Erase] {
        let found = conflict(store.swap(&key, Expected::Record(&first), next).await.unwrap()).expect("it is shown");
        assert_eq!(*found.record, second);
    }
}

pub(super) async fn a_refused_swap_changes_nothing(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let (first, second) = (plain(State::Running, 1), plain(State::Done, 2));
    stored(store.swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    stage.shift_age(&key, 600_000).await;
    conflict(store.swap(&key, Expected::Token(Token::from(7)), Next::Keep(&second)).await.unwrap());
    conflict(store.swap(&key, Expected::Nothing, Next::Claim(&second)).await.unwrap());
    let found = load(&stage, &key).await;
    assert_eq!(*found.record, first);
    assert!(found.age.millis >= 600_000, "its age goes on: {:?}", found.age);
}

pub(super) async fn a_swap_can_be_sent_again(stage: Stage) {
    let key = stage.key("a");
    let (first, second) = (plain(State::Running, 1), plain(State::Done, 2));
    for _ in 0..3 {
        assert_eq!(stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap()), first.fence);
    }
    for store in [stage.store(), stage.other(), stage.store()] {
        assert_eq!(
            stored(store.swap(&key, Expected::Record(&first), Next::Keep(&second)).await.unwrap()),
            second.fence
        );
    }
    assert_eq!(*load(&stage, &key).await.record, second);
}

pub(super) async fn a_claim_sent_again_keeps_its_fence(stage: Stage) {
    let key = stage.key("a");
    let first = plain(State::Running, 1);
    let fence = stored(stage.store().swap(&key, Expected::Nothing, Next::Claim(&first)).await.unwrap());
    assert_eq!(stored(stage.store().swap(&key, Expected::Nothing, Next::Claim(&first)).await.unwrap()), fence);
    let second = Record { fence: Fence(fence.0 + 1), ..plain(State::Running, 2) };
    let next = stored(stage.store().swap(&key, Expected::Record(&first), Next::Claim(&second)).await.unwrap());
    assert_eq!(stored(stage.other().swap(&key, Expected::Record(&first), Next::Claim(&second)).await.unwrap()), next);
    assert_eq!(load(&stage, &key).await.record.fence, next);
}

/// The answer to the first sending was lost, and the second sending arrives late. It must not undo what came after.
pub(super) async fn a_swap_sent_again_is_refused_once_another_wrote_after_it(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let (first, second, third) = (plain(State::Running, 1), plain(State::Waiting, 2), plain(State::Running, 3));
    stored(store.swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    stored(store.swap(&key, Expected::Record(&first), Next::Keep(&second)).await.unwrap());
    stored(store.swap(&key, Expected::Record(&second), Next::Keep(&third)).await.unwrap());
    conflict(store.swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    conflict(store.swap(&key, Expected::Record(&first), Next::Keep(&second)).await.unwrap());
    assert_eq!(*load(&stage, &key).await.record, third);
}

pub(super) async fn of_many_first_swaps_exactly_one_is_stored(stage: Stage) {
    race(&stage, None).await;
}

pub(super) async fn of_many_swaps_of_one_token_exactly_one_is_stored(stage: Stage) {
    for round in 0..4_u32 {
        let key = stage.key(&format!("round-{round}"));
        let first = plain(State::Running, 1);
        stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
        race_on(&stage, &key, Some(&first)).await;
    }
}

async fn race(stage: &Stage, expected: Option<&Record>) {
    for round in 0..4_u32 {
        race_on(stage, &stage.key(&format!("round-{round}")), expected).await;
    }
}

async fn race_on(stage: &Stage, key: &taskonce_core::key::Key, expected: Option<&Record>) {
    let mut calls = JoinSet::new();
    for number in 0..AT_ONCE {
        let (stage, key, expected) = (stage.clone(), key.clone(), expected.cloned());
        calls.spawn(async move {
            let record = plain(State::Running, 100 + number as u128);
            let store: &dyn Store = if number % 2 == 0 { stage.store() } else { stage.other() };
            (record.token, store.swap(&key, Expected::record(expected.as_ref()), Next::Claim(&record)).await.unwrap())
        });
    }
    let (mut winners, mut shown) = (Vec::new(), Vec::new());
    while let Some(call) = calls.join_next().await {
        match call.unwrap() {
            (token, Swap::Stored(_)) => winners.push(token),
            (_, Swap::Locked(found)) => panic!("no transaction is open, and {found:?} is locked"),
            (_, Swap::Conflict(found)) => shown.push(found.expect("losers are shown a record").record.token),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    assert!(shown.iter().all(|token| token == &winners[0]), "losers are shown the winner");
    assert_eq!(load(stage, key).await.record.token, winners[0]);
}

pub(super) async fn swaps_of_many_keys_at_once_do_not_mix(stage: Stage) {
    let mut calls = JoinSet::new();
    for number in 0..AT_ONCE * 2 {
        let stage = stage.clone();
        calls.spawn(async move {
            let key = stage.key(&format!("key-{number}"));
            let mark = Output::kept("text/plain", format!("{number}"));
            let base = (number as u128 + 1) << 32;
            let store: &dyn Store = if number % 2 == 0 { stage.store() } else { stage.other() };
            let mut before = None;
            for step in 0..8 {
                let record = Record { output: mark.clone(), ..plain(State::Done, base + step) };
                stored(store.swap(&key, Expected::record(before.as_ref()), Next::Keep(&record)).await.unwrap());
                let found =
                    conflict(store.swap(&key, Expected::Nothing, Next::Keep(&plain(State::Dead, 5))).await.unwrap());
                assert_eq!(found.expect("it is shown").record.output, mark);
                assert_eq!(store.load(&key).await.unwrap().expect("it is there").record.output, mark);
                before = Some(record);
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap();
    }
}

pub(super) async fn two_handles_see_one_record(stage: Stage) {
    let key = stage.key("a");
    let (first, second) = (plain(State::Running, 1), plain(State::Done, 2));
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&first)).await.unwrap());
    assert_eq!(*stage.other().load(&key).await.unwrap().expect("it is there").record, first);
    stored(stage.other().swap(&key, Expected::Record(&first), Next::Keep(&second)).await.unwrap());
    assert_eq!(*stage.store().load(&key).await.unwrap().expect("it is there").record, second);
    stored(stage.store().swap(&key, Expected::Record(&second), Next::Erase).await.unwrap());
    assert_eq!(stage.other().load(&key).await.unwrap(), None);
}

pub(super) async fn every_claim_of_a_key_raises_its_fence(stage: Stage) {
    let key = stage.key("a");
    let mut before = Fence(0);
    let mut last = None;
    for step in 1..=8 {
        let record = Record { fence: Fence(before.0 + 1), ..plain(State::Running, step) };
        let store = if step % 2 == 0 { stage.store() } else { stage.other() };
        let fence = stored(store.swap(&key, Expected::record(last.as_ref()), Next::Claim(&record)).await.unwrap());
        assert!(fence > before, "{fence} follows {before}");
        assert_eq!(
            load(&stage, &key).await.record.fence,
            fence,
            "the stored record carries the fence that was answered"
        );
        // Claims of other keys in between must not disturb.
        let other = stage.key(&format!("other-{step}"));
        stored(store.swap(&other, Expected::Nothing, Next::Claim(&plain(State::Running, 77))).await.unwrap());
        (before, last) = (fence, Some(Record { fence, ..record }));
    }
}

pub(super) async fn a_write_that_is_no_claim_keeps_the_fence(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let fence = stored(store.swap(&key, Expected::Nothing, Next::Claim(&plain(State::Running, 1))).await.unwrap());
    stored(store.swap(&stage.key("b"), Expected::Nothing, Next::Claim(&plain(State::Running, 2))).await.unwrap());
    let done = Record { fence, ..plain(State::Done, 3) };
    assert_eq!(stored(store.swap(&key, Expected::Token(Token::from(1)), Next::Keep(&done)).await.unwrap()), fence);
    assert_eq!(load(&stage, &key).await.record.fence, fence);
}

/// A store that says that it keeps what it acknowledged has fences that only grow, whatever becomes of the record.
pub(super) async fn fences_of_a_store_that_keeps_survive_erasure(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let before = stored(store.swap(&key, Expected::Nothing, Next::Claim(&plain(State::Running, 1))).await.unwrap());
    stored(store.swap(&key, Expected::Token(Token::from(1)), Next::Erase).await.unwrap());
    let after =
        stored(stage.other().swap(&key, Expected::Nothing, Next::Claim(&plain(State::Running, 2))).await.unwrap());
    assert!(after > before || store.memory() == Memory::MayForget, "{after} follows {before}");
}

pub(super) async fn erasing_needs_the_token(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let record = plain(State::Parked, 1);
    stored(store.swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
    let other = plain(State::Parked, 2);
    for expected in [Expected::Nothing, Expected::Token(other.token), Expected::Record(&other)] {
        let found = conflict(store.swap(&key, expected, Next::Erase).await.unwrap()).expect("it is shown");
        assert_eq!(*found.record, record);
    }
    assert_eq!(*load(&stage, &key).await.record, record);
    stored(store.swap(&key, Expected::Record(&record), Next::Erase).await.unwrap());
    assert_eq!(store.load(&key).await.unwrap(), None);
}

pub(super) async fn an_erased_key_can_be_claimed_again(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    for token in 1..4 {
        let record = plain(State::Running, token);
        stored(store.swap(&key, Expected::Nothing, Next::Claim(&record)).await.unwrap());
        stored(store.swap(&key, Expected::Record(&record), Next::Erase).await.unwrap());
    }
    let last = plain(State::Running, 9);
    stored(store.swap(&key, Expected::Nothing, Next::Claim(&last)).await.unwrap());
    assert_eq!(load(&stage, &key).await.record.token, last.token);
}

pub(super) async fn an_erasure_sent_again_finds_nothing(stage: Stage) {
    let key = stage.key("a");
    let record = plain(State::Done, 1);
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
    stored(stage.store().swap(&key, Expected::Record(&record), Next::Erase).await.unwrap());
    assert_eq!(conflict(stage.store().swap(&key, Expected::Record(&record), Next::Erase).await.unwrap()), None);
}

pub(super) async fn erased_keys_never_accept_an_old_token(stage: Stage) {
    let key = stage.key("a");
    let store = stage.store();
    let (old, new) = (plain(State::Running, 1), plain(State::Running, 2));
    stored(store.swap(&key, Expected::Nothing, Next::Claim(&old)).await.unwrap());
    stored(store.swap(&key, Expected::Record(&old), Next::Erase).await.unwrap());
    let stale = plain(State::Done, 3);
    assert_eq!(conflict(store.swap(&key, Expected::Record(&old), Next::Keep(&stale)).await.unwrap()), None);
    stored(store.swap(&key, Expected::Nothing, Next::Claim(&new)).await.unwrap());
    conflict(store.swap(&key, Expected::Record(&old), Next::Keep(&stale)).await.unwrap());
    assert_eq!(load(&stage, &key).await.record.claim, new.claim);
}

/// Futures are dropped at any moment while others go on. An answer that comes too late must reach nobody: whoever asks
/// for a key is shown that key's record.
pub(super) async fn calls_dropped_midway_never_answer_another(stage: Stage) {
    const KEYS: usize = 16;
    let keys: Arc<Vec<_>> = Arc::new((0..KEYS).map(|number| stage.key(&format!("key-{number}"))).collect());
    for (number, key) in keys.iter().enumerate() {
        let record = Record { claim: ClaimId::from(number as u128), ..plain(State::Running, 1) };
        stored(stage.store().swap(key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
    }
    let mut calls = JoinSet::new();
    for caller in 0..8_usize {
        let (stage, keys) = (stage.clone(), Arc::clone(&keys));
        calls.spawn(async move {
            for step in 0..60_usize {
                let number = (caller * 7 + step * 5) % KEYS;
                let owner = ClaimId::from(number as u128);
                let intruder = plain(State::Dead, 9);
                // Polled a few times, then dropped.
                if step % 3 != 0 {
                    let mut call = pin!(stage.store().swap(&keys[number], Expected::Nothing, Next::Keep(&intruder)));
                    let mut polls = (caller + step) % 4;
                    poll_fn(|context| {
                        if polls == 0 || call.as_mut().poll(context).is_ready() {
                            return Poll::Ready(());
                        }
                        polls -= 1;
                        context.waker().wake_by_ref();
                        Poll::Pending
                    })
                    .await;
                }
                let number = (number + 3) % KEYS;
                let found = stage.store().load(&keys[number]).await.unwrap().expect("it is there");
                assert_eq!(found.record.claim, ClaimId::from(number as u128), "not the record of {owner}");
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap();
    }
}

/// A caller that polls its call once and then looks at something else, as `select!` makes easy, must not hold a lock that
/// other callers wait for: not while it connects, and not later.
pub(super) async fn a_call_that_is_not_polled_holds_nobody_up(stage: Stage) {
    let record = plain(State::Running, 1);
    let end = Record { state: State::Done, token: Token::from(2), ..record.clone() };
    for number in 0..8 {
        let (stuck, free) = (stage.key(&format!("stuck-{number}")), stage.key(&format!("free-{number}")));
        for (expected, next) in [
            (Expected::Nothing, Next::Keep(&record)),
            (Expected::Nothing, Next::Claim(&record)),
            (Expected::Token(record.token), Next::Keep(&end)),
        ] {
            let mut call = pin!(stage.store().swap(&stuck, expected, next));
            let first = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await;
            for _ in 0..3 {
                stored(stage.store().swap(&free, expected, next).await.unwrap());
                assert!(stage.store().load(&free).await.unwrap().is_some());
            }
            if !first {
                stored(call.await.unwrap());
            }
        }
    }
}
