//! A process whose clock, random numbers and background work a test holds in its hand.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use taskonce_core::Result;
use taskonce_core::held::{Held, Settled, release_by_claim};
use taskonce_core::host::{Host, Keeper};
use taskonce_core::key::Key;
use taskonce_core::record::{ClaimId, WallTime};
use taskonce_core::store::Store;

/// How a virtual host draws the random part of a delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delays {
    /// At random.
    Drawn,
    /// The whole upper bound, so that a test can foretell it.
    Full,
}

/// A process with a clock that a test moves, and random numbers from a seed.
pub struct VirtualHost {
    owner: Arc<str>,
    clock: Arc<AtomicU64>,
    start: Duration,
    seed: AtomicU64,
    delays: Delays,
}

impl VirtualHost {
    /// A process of that label. `clock` counts milliseconds and may be shared; each seed gives another sequence of
    /// random numbers, and another start of the process's own clock.
    #[must_use]
    pub fn new(owner: &str, clock: Arc<AtomicU64>, seed: u64, delays: Delays) -> VirtualHost {
        let start = Duration::from_secs(3600).saturating_mul(u32::try_from(seed % 1000).unwrap_or(0));
        VirtualHost { owner: owner.into(), clock, start, seed: AtomicU64::new(mix(seed)), delays }
    }

    /// Lets the process's clock go on.
    pub fn pass(&self, time: Duration) {
        self.clock.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    fn draw(&self) -> u64 {
        mix(self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst))
    }
}

/// The output function of SplitMix64.
///
/// Source: Guy Steele, Doug Lea, Christine Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Host for VirtualHost {
    fn random(&self) -> u128 {
        let low = match self.delays {
            Delays::Drawn => self.draw(),
            // The ledger draws delays from the lower half; the upper half alone keeps tokens apart.
            Delays::Full => u64::MAX,
        };
        u128::from(self.draw()) << 64 | u128::from(low)
    }

    fn uptime(&self) -> Duration {
        self.start + Duration::from_millis(self.clock.load(Ordering::SeqCst))
    }

    fn wall_time(&self) -> WallTime {
        WallTime(1_700_000_000_000 + self.clock.load(Ordering::SeqCst))
    }

    fn owner(&self) -> Arc<str> {
        Arc::clone(&self.owner)
    }
}

/// A keeper that notes what it is handed and does it when it is told to. It sends no heartbeats.
#[derive(Default)]
pub struct RecordingKeeper {
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    kept: Vec<Arc<Held>>,
    settles: Vec<Arc<Held>>,
    releases: Vec<(Key, ClaimId)>,
}

impl RecordingKeeper {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many claims it keeps alive.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.lock().kept.len()
    }

    /// Ends to be written that are not done yet.
    #[must_use]
    pub fn settles(&self) -> usize {
        self.lock().settles.len()
    }

    /// Takes the ends to be written, for who writes them in a way of its own.
    #[must_use]
    pub fn take_settles(&self) -> Vec<Arc<Held>> {
        std::mem::take(&mut self.lock().settles)
    }

    /// Releases by claim id that are not done yet.
    #[must_use]
    pub fn releases(&self) -> usize {
        self.lock().releases.len()
    }

    /// Does what it was handed, once, and says what became of the ends.
    ///
    /// # Errors
    /// The store's, at the first failure; what was not done is forgotten.
    pub async fn work(&self, store: &dyn Store, host: &dyn Host) -> Result<Vec<Settled>> {
        let (settles, releases) = {
            let mut noted = self.lock();
            (std::mem::take(&mut noted.settles), std::mem::take(&mut noted.releases))
        };
        let mut settled = Vec::with_capacity(settles.len());
        for held in settles {
            settled.push(held.settle(store).await?);
        }
        for (key, claim) in releases {
            release_by_claim(store, host, &key, claim).await?;
        }
        Ok(settled)
    }
}

impl Keeper for RecordingKeeper {
    fn keep(&self, held: &Arc<Held>) {
        self.lock().kept.push(Arc::clone(held));
    }

    fn forget(&self, held: &Arc<Held>) {
        self.lock().kept.retain(|kept| !Arc::ptr_eq(kept, held));
    }

    fn settle(&self, held: Arc<Held>) {
        self.lock().settles.push(held);
    }

    fn release(&self, key: Key, claim: ClaimId, _lease: Duration) {
        self.lock().releases.push((key, claim));
    }

    fn finish(&self, _within: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        let noted = self.lock();
        Box::pin(ready(noted.settles.is_empty() && noted.releases.is_empty()))
    }
}
