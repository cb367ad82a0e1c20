//! What the tests of the SQLite store share: records, keys, a clock that is moved by hand, files of their own.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rusqlite::Connection;
use taskonce_core::error::{Error, ErrorKind};
use taskonce_core::key::{Fingerprint, Handler, Key};
use taskonce_core::policy::Effect;
use taskonce_core::record::{ClaimId, Fence, Found, Output, Record, State, Token};
use taskonce_core::store::{Expected, Next, Store as _, Swap};
use taskonce_sqlite::{Options, SqliteStore};

/// A folder of the test's own, and a store's file in it.
pub(crate) struct Place {
    /// Removed with the place.
    pub(crate) folder: tempfile::TempDir,
    /// The file, not made yet.
    pub(crate) path: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.db");
        Place { folder, path }
    }

    pub(crate) fn open(&self) -> SqliteStore {
        SqliteStore::open(&self.path, Options::default()).unwrap()
    }

    pub(crate) fn open_with(&self, options: Options) -> SqliteStore {
        SqliteStore::open(&self.path, options).unwrap()
    }

    /// A connection beside the store, as another process has it.
    pub(crate) fn beside(&self) -> Connection {
        Connection::open(&self.path).unwrap()
    }
}

/// A clock that stands until it is moved.
#[derive(Clone, Default)]
pub(crate) struct Hand(Arc<AtomicI64>);

impl Hand {
    pub(crate) fn at(millis: i64) -> Hand {
        Hand(Arc::new(AtomicI64::new(millis)))
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as i64, Ordering::SeqCst);
    }

    pub(crate) fn set(&self, millis: i64) {
        self.0.store(millis, Ordering::SeqCst);
    }

    pub(crate) fn options(&self) -> Options {
        let hand = Arc::clone(&self.0);
        Options { clock: Arc::new(move || hand.load(Ordering::SeqCst)), ..Options::default() }
    }
}

static TOKENS: AtomicU64 = AtomicU64::new(1);

/// A record with a token that no other one has.
pub(crate) fn record(state: State) -> Record {
    let number = TOKENS.fetch_add(1, Ordering::Relaxed);
    Record {
        state,
        token: Token::from((u128::from(std::process::id()) << 64) | u128::from(number)),
        fence: Fence(1),
        claim: ClaimId::from(7),
        owner: "host/1/a".into(),
        attempt: 1,
        crashes: 0,
        effect: Effect::Repeatable,
        lease: Duration::from_secs(30),
        delay: Duration::ZERO,
        retention: Duration::from_secs(14 * 86_400),
        output_retention: Duration::from_secs(86_400),
        state_age: Duration::ZERO,
        ran_for: Duration::ZERO,
        fingerprint: Fingerprint([7; 16]),
        output: Output::Nothing,
        failure: None,
        steps: Vec::new(),
        history: Vec::new(),
        history_dropped: 0,
    }
}

pub(crate) fn key(id: &str) -> Key {
    Handler::within("billing", "charge", "2").unwrap().key(id).unwrap()
}

/// Claims a key that holds nothing, and answers the record as it is held now.
pub(crate) async fn claim(store: &SqliteStore, key: &Key) -> Record {
    let next = record(State::Running);
    let fence = stored(store.swap(key, Expected::Nothing, Next::Claim(&next)).await.unwrap());
    Record { fence, ..next }
}

/// Replaces what is held by a record of another state.
pub(crate) async fn keep(store: &SqliteStore, key: &Key, held: &Record, next: Record) -> Record {
    let next = Record { fence: held.fence, ..next };
    stored(store.swap(key, Expected::Record(held), Next::Keep(&next)).await.unwrap());
    next
}

pub(crate) async fn held(store: &SqliteStore, key: &Key) -> Found {
    store.load(key).await.unwrap().expect("the key holds a record")
}

pub(crate) fn stored(swap: Swap) -> Fence {
    match swap {
        Swap::Stored(fence) => fence,
        Swap::Conflict(found) | Swap::Locked(found) => panic!("a conflict with {found:?}"),
    }
}

/// The error of opening a file.
pub(crate) fn refusal(path: &Path) -> Error {
    match SqliteStore::open(path, Options::default()) {
        Ok(_) => panic!("{} must be refused", path.display()),
        Err(error) => error,
    }
}

/// Checks an error's kind and that it names what it is about.
pub(crate) fn names(error: &Error, kind: ErrorKind, subject: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.subject().is_some_and(|named| named.contains(subject)), "{error:?} does not name {subject}");
    assert!(!error.hint().is_empty());
}

/// How many commits lie in the write-ahead log: frames that carry the size of the file, of the log's current salt.
pub(crate) fn commits_in_log(path: &Path) -> usize {
    let mut log_path = path.as_os_str().to_owned();
    log_path.push("-wal");
    let log = std::fs::read(log_path).unwrap();
    let number = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().unwrap());
    if log.len() < 32 {
        return 0;
    }
    let frame = 24 + number(8) as usize;
    (32..=log.len() - frame)
        .step_by(frame)
        .filter(|at| log[at + 8..at + 16] == log[16..24] && number(at + 4) != 0)
        .count()
}
