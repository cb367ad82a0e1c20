//! Records, keys and answers for the tests of this folder.

use std::time::{Duration, Instant};

use taskonce_contract::records::plain;
use taskonce_core::key::{Handler, Key};
use taskonce_core::record::{ClaimId, Fence, Found, Record, State, Token};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_core::{Error, ErrorKind};
use taskonce_postgres::PostgresStore;

/// How long something may take that ends by itself, on a machine under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn key(id: &str) -> Key {
    Handler::within("billing", "charge", "1").unwrap().key(id).unwrap()
}

/// A running record of a claim that has this number.
pub(crate) fn running(number: u128) -> Record {
    Record { claim: ClaimId::from(number), ..plain(State::Running, number << 32) }
}

/// The next version of a record, in this state.
pub(crate) fn next(record: &Record, state: State) -> Record {
    let number = u128::from_be_bytes(record.token.0) + 1;
    Record { state, token: Token::from(number), ..record.clone() }
}

/// Claims a key; panics unless it is free. The record as it is stored.
pub(crate) async fn claim(store: &PostgresStore, key: &Key, record: &Record) -> Record {
    match store.swap(key, Expected::Nothing, Next::Claim(record)).await.unwrap() {
        Swap::Stored(fence) => Record { fence, ..record.clone() },
        other => panic!("{key}: {other:?}"),
    }
}

/// Replaces a version; panics unless it is there.
pub(crate) async fn replace(store: &PostgresStore, key: &Key, before: &Record, after: &Record) -> Fence {
    match store.swap(key, Expected::Record(before), Next::Keep(after)).await.unwrap() {
        Swap::Stored(fence) => fence,
        other => panic!("{key}: {other:?}"),
    }
}

pub(crate) async fn load(store: &PostgresStore, key: &Key) -> Found {
    store.load(key).await.unwrap().unwrap()
}

/// The error of a claim.
pub(crate) async fn claim_error(store: &PostgresStore, id: &str) -> Error {
    match store.swap(&key(id), Expected::Nothing, Next::Claim(&running(7))).await {
        Err(error) => error,
        Ok(swap) => panic!("{id}: {swap:?}"),
    }
}

/// Claims new keys until it works.
pub(crate) async fn until_claimed(store: &PostgresStore, prefix: &str) -> Key {
    let start = Instant::now();
    for number in 0_u128.. {
        let key = key(&format!("{prefix}-{number}"));
        match store.swap(&key, Expected::Nothing, Next::Claim(&running(number + 1))).await {
            Ok(Swap::Stored(_)) => return key,
            Ok(other) => panic!("a new key held {other:?}"),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::TimedOut), "{error:?}");
                assert!(start.elapsed() < PATIENCE, "not back after {PATIENCE:?}: {error:?}");
            }
        }
    }
    unreachable!("numbers do not end")
}
