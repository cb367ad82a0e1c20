//! Where a case plays: a store under test, actors with processes of their own, and time that a case lets pass.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::host::Host;
use taskonce_core::key::{Fingerprint, Handler, Key, Task};
use taskonce_core::ledger::{Admission, Ledger};
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::store::Store;

use crate::faulty::Faulty;
use crate::host::{Delays, RecordingKeeper, VirtualHost};

/// What a store's author says to have the suite run: how to open it, and how to move its clock.
///
/// Each value stands for an empty store of its own; dropping it may remove the data.
#[async_trait]
pub trait StoreUnderTest: Send + Sync {
    /// A handle on the data, with connections of its own: each call makes another, as another process would have.
    async fn open(&self) -> Arc<dyn Store>;

    /// Makes what the key holds older by so many milliseconds (or younger, if negative) by the store's own clock, as if
    /// that clock had gone on (or back) since the last write. A record that this makes older than the store keeps it
    /// may vanish. Does nothing for a key that holds nothing.
    async fn shift_age(&self, key: &Key, millis: i64);

    /// Puts bytes where the store keeps the record of this key, as another program or a newer version might.
    async fn put_raw(&self, key: &Key, bytes: &[u8]);
}

#[async_trait]
impl<S: StoreUnderTest + ?Sized> StoreUnderTest for Arc<S> {
    async fn open(&self) -> Arc<dyn Store> {
        (**self).open().await
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        (**self).shift_age(key, millis).await;
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        (**self).put_raw(key, bytes).await;
    }
}

/// A store under test with two handles, and the keys and actors of a case. Clones share it.
#[derive(Clone)]
pub struct Stage {
    inner: Arc<Inner>,
}

struct Inner {
    subject: Box<dyn StoreUnderTest>,
    handles: [Arc<dyn Store>; 2],
    clock: Arc<AtomicU64>,
    actors: AtomicU64,
    keys: Mutex<Vec<Key>>,
}

/// A process that takes part in a case: a ledger of its own, with the parts in it that a case holds.
pub struct Actor {
    /// The ledger, over the faulty store.
    pub ledger: Ledger,
    /// What stands between the ledger and the store.
    pub store: Arc<Faulty>,
    /// The process's clock and random numbers.
    pub host: Arc<VirtualHost>,
    /// What the process was handed to do in the background.
    pub keeper: Arc<RecordingKeeper>,
}

impl Actor {
    /// A process over this store, with this clock.
    pub(crate) fn new(name: &str, delays: Delays, store: Arc<dyn Store>, clock: Arc<AtomicU64>, number: u64) -> Actor {
        let store = Arc::new(Faulty::new(store));
        let host = Arc::new(VirtualHost::new(name, clock, number, delays));
        let keeper = Arc::new(RecordingKeeper::default());
        let ledger = Ledger::new(
            Arc::clone(&store) as Arc<dyn Store>,
            Arc::clone(&host) as Arc<dyn Host>,
            Arc::clone(&keeper) as Arc<_>,
        );
        Actor { ledger, store, host, keeper }
    }

    /// Asks for a task, where the store is expected to answer.
    ///
    /// # Panics
    /// If it does not.
    pub async fn claim(&self, task: &Task, policy: &Policy) -> Admission {
        self.ledger.claim(task, policy).await.expect("the store answers a claim")
    }

    /// Does what was handed over to the background.
    ///
    /// # Panics
    /// If the store fails.
    pub async fn work(&self) {
        let host: &dyn Host = &*self.host;
        self.keeper.work(&*self.store, host).await.expect("the store answers what was handed over");
    }
}

impl Stage {
    /// A stage over an empty store.
    pub async fn new(subject: impl StoreUnderTest + 'static) -> Stage {
        let handles = [subject.open().await, subject.open().await];
        Stage {
            inner: Arc::new(Inner {
                subject: Box::new(subject),
                handles,
                clock: Arc::new(AtomicU64::new(0)),
                actors: AtomicU64::new(0),
                keys: Mutex::default(),
            }),
        }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.inner.handles[0]
    }

    /// Another handle on the same data.
    #[must_use]
    pub fn other(&self) -> &dyn Store {
        &*self.inner.handles[1]
    }

    /// The key of an id, of the handler that all cases use.
    ///
    /// # Panics
    /// If the id is none.
    #[must_use]
    pub fn key(&self, id: &str) -> Key {
        self.key_of("contract", "case", id)
    }

    /// The key of an id of another namespace or handler.
    ///
    /// # Panics
    /// If the names or the id are none.
    #[must_use]
    pub fn key_of(&self, namespace: &str, handler: &str, id: &str) -> Key {
        let key = Handler::within(namespace, handler, "1").and_then(|handler| handler.key(id)).expect("a valid key");
        let mut keys = self.inner.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(&key) {
            keys.push(key.clone());
        }
        key
    }

    /// A task with an ordinary payload.
    #[must_use]
    pub fn task(&self, id: &str) -> Task {
        self.task_with(id, 1)
    }

    /// A task with one of several payloads.
    #[must_use]
    pub fn task_with(&self, id: &str, payload: u8) -> Task {
        Task { key: self.key(id), fingerprint: Fingerprint([payload; 16]) }
    }

    /// A process that takes part. The second, fourth, … use the other handle.
    #[must_use]
    pub fn actor(&self, name: &str) -> Actor {
        self.actor_with(name, Delays::Drawn)
    }

    /// A process that takes part, and draws its delays so.
    #[must_use]
    pub fn actor_with(&self, name: &str, delays: Delays) -> Actor {
        let number = self.inner.actors.fetch_add(1, Ordering::SeqCst);
        let handle = &self.inner.handles[usize::from(number % 2 == 1)];
        self.actor_numbered(name, delays, Arc::clone(handle), number)
    }

    /// A process that takes part over another store.
    #[must_use]
    pub fn actor_over(&self, name: &str, store: Arc<dyn Store>) -> Actor {
        let number = self.inner.actors.fetch_add(1, Ordering::SeqCst);
        self.actor_numbered(name, Delays::Drawn, store, number)
    }

    fn actor_numbered(&self, name: &str, delays: Delays, store: Arc<dyn Store>, number: u64) -> Actor {
        Actor::new(name, delays, store, Arc::clone(&self.inner.clock), number)
    }

    /// Lets time pass: for every process, and for every record under a key that the case has named.
    pub async fn pass(&self, time: Duration) {
        let millis = time.as_millis() as u64;
        self.inner.clock.fetch_add(millis, Ordering::SeqCst);
        let keys = self.inner.keys.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for key in &keys {
            self.shift_age(key, i64::try_from(millis).unwrap_or(i64::MAX)).await;
        }
    }

    /// Lets time pass for every process, but not for the store.
    pub fn pass_for_processes(&self, time: Duration) {
        self.inner.clock.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    /// Makes one record older, or younger if negative, by the store's clock.
    pub async fn shift_age(&self, key: &Key, millis: i64) {
        self.inner.subject.shift_age(key, millis).await;
    }

    /// Puts bytes in the place of a record.
    pub async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        self.inner.subject.put_raw(key, bytes).await;
    }

    /// Forgets the keys that were named, so that time passes no more for their records.
    pub fn forget_keys(&self) {
        self.inner.keys.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// The policy of most cases: a lease of 30 min, so that no case depends on how fast it runs, and no backoff.
#[must_use]
pub(crate) fn policy(effect: Effect) -> Policy {
    Policy { lease: LEASE, backoff: Backoff::NONE, store_may_forget: true, ..Policy::new(effect) }
}

/// The lease of most cases.
pub(crate) const LEASE: Duration = minutes(30);

/// So many minutes.
pub(crate) const fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}
