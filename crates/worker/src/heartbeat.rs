//! Keeps the claims of this process alive on a thread of its own, and finishes what dropped futures left unfinished.
//!
//! The thread has its own runtime and its own handle of the store, so that a blocked event loop or a busy handler does
//! not lose claims. It starts with the first claim, and sleeps without a timer while no claim is held.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use taskonce_core::held::{Held, Joined, Phase, Renewal, Settled, release_by_claim};
use taskonce_core::host::{Host, Keeper};
use taskonce_core::key::Key;
use taskonce_core::record::ClaimId;
use taskonce_core::store::Store;
use taskonce_core::{ErrorKind, Retry};
use tokio::sync::{Notify, Semaphore};

use crate::events::Event;

/// The longest sleep while claims are held: the timer stands still while the machine is suspended, the lease does not.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// The first delay after a write that failed; it doubles.
pub(crate) const AGAIN_MIN: Duration = Duration::from_millis(20);
/// The longest delay between two tries of a write.
pub(crate) const AGAIN_MAX: Duration = Duration::from_secs(1);

/// How many releases of claims that nobody waited for are asked of the store at once. There may be many after an outage,
/// and heartbeats and ends must not queue behind them.
const RELEASES_MAX: usize = 16;
/// How long after the first claim the thread reaches for the store: what leads there (Sentinels, the first nodes of a
/// Cluster) may be gone when the first renewal is due.
const REACH_AFTER: Duration = Duration::from_millis(100);

/// How long after the first look a claim that nobody waited for is looked for once more. The pause doubles from then on.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(700);
/// The longest pause between two of these looks is this part of the lease.
const LOOKS_A_LEASE: u32 = 8;

/// Renews claims and finishes ends of claims, on a thread of its own. Clones share it.
#[derive(Clone)]
pub struct Heart {
    shared: Arc<Shared>,
    /// Ends the thread when the last clone goes.
    _pulse: Arc<Pulse>,
}

struct Shared {
    store: Arc<dyn Store>,
    host: Arc<dyn Host>,
    book: Mutex<Book>,
    /// Wakes the thread.
    wake: Notify,
    /// Tells those who wait in `finish` that something is over.
    done: Notify,
    /// One permit for each release that may be asked of the store.
    releases: Semaphore,
}

#[derive(Default)]
struct Book {
    /// The process whose thread runs; another one after a fork.
    pid: Option<u32>,
    claims: HashMap<ClaimId, Beat>,
    handed: Vec<Handed>,
    /// Things handed over that are not done.
    open: usize,
    /// When the thread wakes by itself, on the host's clock.
    wakes_at: Option<Duration>,
    /// When this thread reaches for the store, and whether it has.
    reach_at: Option<Duration>,
    reached: bool,
    closed: bool,
}

struct Beat {
    held: Arc<Held>,
    due: Duration,
    in_flight: bool,
}

enum Handed {
    Settle(Arc<Held>),
    Release(Key, ClaimId, Duration),
}

struct Pulse {
    shared: Arc<Shared>,
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.shared.book().closed = true;
        self.shared.wake.notify_one();
    }
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heart {
    /// A heart that writes through `store`: a handle of its own, whose connections live on the heart's thread.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, host: Arc<dyn Host>) -> Heart {
        let shared = Arc::new(Shared {
            store,
            host,
            book: Mutex::default(),
            wake: Notify::new(),
            done: Notify::new(),
            releases: Semaphore::new(RELEASES_MAX),
        });
        Heart { _pulse: Arc::new(Pulse { shared: Arc::clone(&shared) }), shared }
    }

    /// How many claims are renewed now.
    #[must_use]
    pub fn claims(&self) -> usize {
        self.shared.book().claims.len()
    }

    /// The book, with the thread of this process running.
    fn book(&self) -> MutexGuard<'_, Book> {
        let mut book = self.shared.book();
        let pid = std::process::id();
        if book.pid != Some(pid) {
            if book.pid.is_some() {
                // After a fork, what the book held belongs to the parent.
                *book = Book::default();
            }
            match self.start() {
                Ok(()) => book.pid = Some(pid),
                Err(error) => tracing::error!(%error, "no thread for heartbeats: claims end with their lease"),
            }
        }
        book
    }

    fn start(&self) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name("taskonce-heart".into()).spawn(move || beat(&shared)).map(drop)
    }

    fn hand_over(&self, handed: Handed) {
        let mut book = self.book();
        book.handed.push(handed);
        book.open += 1;
        drop(book);
        self.shared.wake.notify_one();
    }
}

impl Keeper for Heart {
    fn keep(&self, held: &Arc<Held>) {
        let due = self.shared.due_after(held, held.started());
        let mut book = self.book();
        book.claims.insert(held.claim_id(), Beat { held: Arc::clone(held), due, in_flight: false });
        let reach_at = *book.reach_at.get_or_insert(held.started() + REACH_AFTER);
        let due = if book.reached { due } else { due.min(reach_at) };
        if book.wakes_at.is_none_or(|at| due < at) {
            book.wakes_at = Some(due);
            drop(book);
            self.shared.wake.notify_one();
        }
    }

    fn forget(&self, held: &Arc<Held>) {
        self.shared.drop_beat(held);
    }

    fn settle(&self, held: Arc<Held>) {
        self.hand_over(Handed::Settle(held));
    }

    fn release(&self, key: Key, claim: ClaimId, lease: Duration) {
        self.hand_over(Handed::Release(key, claim, lease));
    }

    fn finish(&self, within: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async move {
            let all_done = async {
                loop {
                    let done = self.shared.done.notified();
                    tokio::pin!(done);
                    // Enrolled before the look, so that what ends between the two is not missed.
                    done.as_mut().enable();
                    let is_over = {
                        let book = self.shared.book();
                        book.open == 0 && book.claims.is_empty()
                    };
                    if is_over {
                        return;
                    }
                    done.await;
                }
            };
            tokio::time::timeout(within, all_done).await.is_ok()
        })
    }
}

/// The thread.
fn beat(shared: &Arc<Shared>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime for heartbeats: claims end with their lease");
            // The next claim tries again.
            shared.book().pid = None;
            return;
        }
    };
    runtime.block_on(async {
        loop {
            let sleep = shared.turn();
            match sleep {
                Sleep::Over => return,
                Sleep::UntilWoken => shared.wake.notified().await,
                Sleep::For(duration) => {
                    // Whether time or a new claim ends the sleep, the next turn looks at everything.
                    let _elapsed = tokio::time::timeout(duration, shared.wake.notified()).await;
                }
            }
        }
    });
}

enum Sleep {
    For(Duration),
    UntilWoken,
    Over,
}

impl Shared {
    /// When the next renewal is due: a third of the lease, less up to 15 % at random, so that processes spread.
    fn due_after(&self, held: &Held, from: Duration) -> Duration {
        let every = held.policy().heartbeat_every();
        // The claim id is random already.
        let share = f64::from(held.claim_id().0[0]) / 255.0;
        from + every.mul_f64(1.0 - 0.15 * share)
    }

    /// One look at everything: starts what is due, tells the handlers of lost claims, says how long to sleep.
    fn turn(self: &Arc<Shared>) -> Sleep {
        let now = self.host.uptime();
        let mut book = self.book();
        for handed in std::mem::take(&mut book.handed) {
            tokio::spawn(Arc::clone(self).finish_handed(handed));
        }
        let reach_at = book.reach_at.filter(|_| !book.reached);
        if reach_at.is_some_and(|at| at <= now)
            && let Some(key) = book.claims.values().next().map(|beat| beat.held.key().clone())
        {
            book.reached = true;
            let shared = Arc::clone(self);
            tokio::spawn(async move {
                // Only the connection is wanted; a renewal makes its own where this one fails.
                let _found = shared.store.load(&key).await;
            });
        }
        let is_due =
            book.claims.values().any(|beat| !beat.in_flight && beat.due <= now && beat.held.phase() != Phase::Joined);
        let mut wakes_at: Option<Duration> = reach_at.filter(|at| *at > now && !book.claims.is_empty());
        book.claims.retain(|_, beat| {
            match beat.held.phase() {
                Phase::Claimed | Phase::Entered => {}
                Phase::Joined => {
                    // The caller's transaction holds the record in the lease's place. Past the lease is looked whether it
                    // still does: it may have ended without a word.
                    if now >= beat.held.deadline() && now >= beat.due && !beat.in_flight {
                        beat.in_flight = true;
                        tokio::spawn(Arc::clone(self).look(Arc::clone(&beat.held)));
                    }
                    let next = now + SLEEP_MAX.min(beat.held.policy().heartbeat_every());
                    wakes_at = Some(wakes_at.map_or(next, |at| at.min(next)));
                    return true;
                }
                Phase::Settling | Phase::Settled | Phase::Lost => return false,
            }
            let deadline = beat.held.deadline();
            if now >= deadline {
                Event::LeaseLost { attempt: beat.held.attempt() }.tell(beat.held.key());
                beat.held.lose();
                return false;
            }
            let policy = beat.held.policy();
            let hung = policy.run_max.is_some_and(|run_max| now >= beat.held.started() + run_max);
            // Those due within half a period go with one that is due now, so that one batch renews them all from then on.
            let soon = if is_due { now + policy.heartbeat_every() / 2 } else { now };
            if !hung && !beat.in_flight && soon >= beat.due {
                beat.in_flight = true;
                tokio::spawn(Arc::clone(self).renew(Arc::clone(&beat.held)));
            }
            let next = if hung || beat.in_flight { deadline } else { beat.due.min(deadline) };
            wakes_at = Some(wakes_at.map_or(next, |at| at.min(next)));
            true
        });
        book.wakes_at = wakes_at;
        match wakes_at {
            Some(at) => Sleep::For(at.saturating_sub(now).min(SLEEP_MAX)),
            None if book.closed && book.open == 0 => Sleep::Over,
            None => Sleep::UntilWoken,
        }
    }

    async fn renew(self: Arc<Shared>, held: Arc<Held>) {
        let outcome = held.renew(&*self.store, &*self.host).await;
        let now = self.host.uptime();
        let due = match outcome {
            Ok(Renewal::Held) => self.due_after(&held, now),
            Ok(Renewal::Over) => return self.drop_beat(&held),
            Ok(Renewal::Lost) => {
                Event::LeaseLost { attempt: held.attempt() }.tell(held.key());
                return self.drop_beat(&held);
            }
            Err(error) => {
                // One failed renewal is not a lost claim: it is tried until the lease has really passed.
                Event::HeartbeatLate { attempt: held.attempt(), error: error.to_string() }.tell(held.key());
                now + AGAIN_MAX.min(held.policy().heartbeat_every() / 4).max(AGAIN_MIN)
            }
        };
        self.put_off(&held, due);
    }

    /// What became of a transaction that holds a claim beyond its lease.
    async fn look(self: Arc<Shared>, held: Arc<Held>) {
        match held.resolve(&*self.store, &*self.host).await {
            Ok(Joined::RolledBack) => {
                tracing::warn!(key = %held.key(), "a transaction has ended without the claim's end: heartbeats go on");
            }
            Ok(Joined::Committed(record)) => {
                self.store.told(held.key(), &record);
                return self.drop_beat(&held);
            }
            Ok(Joined::Lost(_)) => {
                Event::LeaseLost { attempt: held.attempt() }.tell(held.key());
                return self.drop_beat(&held);
            }
            Err(error) if error.kind() == ErrorKind::Locked => {}
            Err(error) => tracing::warn!(key = %held.key(), %error, "what became of a transaction is not known yet"),
        }
        let due = self.due_after(&held, self.host.uptime());
        self.put_off(&held, due);
    }

    fn put_off(&self, held: &Held, due: Duration) {
        let mut book = self.book();
        if let Some(beat) = book.claims.get_mut(&held.claim_id()) {
            beat.in_flight = false;
            beat.due = due;
        }
        if book.wakes_at.is_none_or(|at| due < at) {
            book.wakes_at = Some(due);
            self.wake.notify_one();
        }
    }

    fn drop_beat(&self, held: &Held) {
        let mut book = self.book();
        book.claims.remove(&held.claim_id());
        let is_last = book.claims.is_empty();
        drop(book);
        if is_last {
            self.done.notify_waiters();
        }
    }

    /// Releases what may have been stored, and says whether it was there. A request that was held up on its way may arrive
    /// after the first look.
    async fn release_twice(&self, key: &Key, claim: ClaimId) -> taskonce_core::Result<bool> {
        if self.release(key, claim).await? {
            return Ok(true);
        }
        tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        self.release(key, claim).await
    }

    /// Looks on for what was not there, for as long as a lease: a commit that waits for a standby is not seen before it has
    /// waited. Past its lease the claim would count as a crash.
    async fn release_late(&self, key: &Key, claim: ClaimId, lease: Duration) {
        let until = self.host.uptime() + lease;
        let mut pause = LOOK_AGAIN_AFTER;
        while self.host.uptime() < until {
            pause = (pause * 2).min(lease / LOOKS_A_LEASE);
            tokio::time::sleep(pause).await;
            if let Ok(true) = self.release(key, claim).await {
                tracing::debug!(%key, "a claim that came in late was released");
                return;
            }
        }
    }

    async fn release(&self, key: &Key, claim: ClaimId) -> taskonce_core::Result<bool> {
        // It is never closed.
        let _permit = self.releases.acquire().await;
        release_by_claim(&*self.store, &*self.host, key, claim).await
    }

    /// Tries until it is done, or a lease has passed since it was handed over: then the store's own rules decide.
    async fn finish_handed(self: Arc<Shared>, handed: Handed) {
        let (key, lease) = match &handed {
            Handed::Settle(held) => (held.key().clone(), held.policy().lease),
            Handed::Release(key, _, lease) => (key.clone(), *lease),
        };
        let until = self.host.uptime() + lease;
        let mut delay = AGAIN_MIN;
        let mut late = None;
        loop {
            let tried = match &handed {
                Handed::Settle(held) => held.settle(&*self.store).await.map(|settled| match settled {
                    Settled::Recorded(record) => tracing::debug!(%key, state = %record.state, "settled after a drop"),
                    Settled::Lost(_) => tracing::warn!(%key, "the claim was lost before its end was written"),
                }),
                Handed::Release(key, claim, _) => self.release_twice(key, *claim).await.map(|is_released| {
                    late = (!is_released).then_some(*claim);
                }),
            };
            let Err(error) = tried else { break };
            if let (Handed::Settle(held), ErrorKind::BadOutput) = (&handed, error.kind())
                && held.shed_output()
            {
                continue;
            }
            if error.kind().retry() == Retry::Never || self.host.uptime() >= until {
                tracing::error!(%key, %error, "the end of a claim could not be written; its lease decides");
                break;
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(AGAIN_MAX);
        }
        let closed = {
            let mut book = self.book();
            book.open = book.open.saturating_sub(1);
            book.closed
        };
        self.done.notify_waiters();
        if closed {
            self.wake.notify_one();
        }
        // Nobody waits for this when the process ends.
        if let Some(claim) = late {
            self.release_late(&key, claim, lease).await;
        }
    }
}
