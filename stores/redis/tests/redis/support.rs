//! Records, keys and stores for the tests of this folder.

use std::time::{Duration, Instant};

use taskonce_core::key::{Fingerprint, Handler, Key};
use taskonce_core::policy::Effect;
use taskonce_core::record::{ClaimId, Fence, Found, Output, Record, State, Token};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_core::{Error, ErrorKind};
use taskonce_redis::RedisStore;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{RedisServer, eventually};

/// How long a replica may take to catch up, on a machine under load.
pub(crate) const CATCH_UP: Duration = Duration::from_secs(30);
/// How long the records of tests live.
pub(crate) const RETENTION: Duration = Duration::from_secs(3600);

/// A server of each way to replace a record: by the script, and by a comparison of its own.
pub(crate) fn of_each_way() -> [RedisServer; 2] {
    let both = [RedisServer::start(&[]).unwrap(), RedisServer::start_valkey(&[]).unwrap()];
    assert!(both[1].compares().unwrap());
    both
}

/// The command by which a record is replaced at this server.
pub(crate) fn replacing(server: &RedisServer) -> &'static str {
    if server.compares().unwrap() { "SET" } else { "EVALSHA" }
}

pub(crate) fn key(id: &str) -> Key {
    Handler::new("charge", "1").unwrap().key(id).unwrap()
}

/// A record with a token of its own.
pub(crate) fn record(state: State) -> Record {
    Record {
        state,
        token: Token::from(fastrand::u128(..)),
        fence: Fence(1),
        claim: ClaimId::from(fastrand::u128(..)),
        owner: "worker-host-01/1234/ab12".into(),
        attempt: 1,
        crashes: 0,
        effect: Effect::Keyed,
        lease: Duration::from_secs(30),
        delay: Duration::ZERO,
        retention: RETENTION,
        output_retention: RETENTION,
        state_age: Duration::ZERO,
        ran_for: Duration::from_millis(1200),
        fingerprint: Fingerprint([7; 16]),
        output: Output::Nothing,
        failure: None,
        steps: Vec::new(),
        history: Vec::new(),
        history_dropped: 0,
    }
}

pub(crate) fn running() -> Record {
    record(State::Running)
}

pub(crate) fn done() -> Record {
    record(State::Done)
}

pub(crate) fn open(url: &str) -> RedisStore {
    RedisStore::from_url(url).unwrap()
}

/// Writes a record; panics unless it is stored.
pub(crate) async fn store(store: &RedisStore, key: &Key, expected: Option<&Record>, record: &Record) {
    let swap = store.swap(key, Expected::record(expected), Next::Keep(record)).await.unwrap();
    assert_eq!(swap, Swap::Stored(record.fence), "{key}");
}

pub(crate) async fn load(store: &RedisStore, key: &Key) -> Found {
    store.load(key).await.unwrap().unwrap()
}

pub(crate) async fn claim_error(store: &RedisStore, id: &str) -> Error {
    store.swap(&key(id), Expected::Nothing, Next::Claim(&running())).await.unwrap_err()
}

/// Claims until it works, within `at_most`: how long that took.
pub(crate) async fn until_claimed(store: &RedisStore, at_most: Duration) -> Duration {
    let start = Instant::now();
    loop {
        let id = format!("again-{}", fastrand::u64(..));
        match store.swap(&key(&id), Expected::Nothing, Next::Claim(&running())).await {
            Ok(Swap::Stored(_)) => return start.elapsed(),
            Ok(Swap::Conflict(found) | Swap::Locked(found)) => panic!("a new key held {found:?}"),
            Err(error) => {
                let kind = error.kind();
                assert!(matches!(kind, ErrorKind::Unreachable | ErrorKind::TimedOut), "{error:?}");
                assert!(start.elapsed() < at_most, "not back after {at_most:?}: {error:?}");
            }
        }
    }
}

/// A primary and its replica.
pub(crate) struct Pair {
    pub(crate) primary: RedisServer,
    pub(crate) replica: RedisServer,
}

impl Pair {
    pub(crate) fn start() -> Pair {
        Pair::of(|args| RedisServer::start(args).unwrap())
    }

    /// Of servers that are started like this.
    pub(crate) fn of(start: impl Fn(&[&str]) -> RedisServer) -> Pair {
        let primary = start(&["--repl-diskless-sync-delay", "0"]);
        let port = primary.port().to_string();
        let replica = start(&["--replicaof", "127.0.0.1", &port]);
        let pair = Pair { primary, replica };
        pair.await_link();
        pair
    }

    pub(crate) fn await_link(&self) {
        // `WAIT` counts what its own connection wrote. The first write may have been part of the copy that the replica
        // began with; what came after that copy it gets only after its first sign of life, which it gives each second.
        let mut connection = self.primary.connect().unwrap();
        let mut reached = || {
            connection.ask(&["SET", "linked", "1"]).unwrap();
            connection.ask(&["WAIT", "1", "5000"]).unwrap() == Reply::Int(1)
        };
        let linked = || reached() && reached();
        assert!(eventually(CATCH_UP, linked), "the replica never caught up");
    }
}
