//! Something that many use and one attempt at a time makes: a connection, the map of a Cluster.

use std::future::{Future, poll_fn};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use taskonce_core::ErrorKind;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::fault::Refusal;
use crate::pipe::too_late;

/// The longest pause after failures.
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// How often a pause doubles.
const DOUBLINGS_MAX: u32 = 8;
/// Into how many parts a pause is divided, up to half of which chance takes off.
const PARTS: u32 = 16;

/// The thing, if it is there, and the attempt to make it, if one is under way.
pub(crate) struct Shared<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Option<Arc<T>>,
    /// Everybody waits for the same one.
    attempt: Option<Attempt<T>>,
    /// When the last attempt began.
    began: Option<Instant>,
    /// How many attempts have failed since one succeeded.
    failures: u32,
}

/// Where the outcome of an attempt will be.
pub(crate) type Attempt<T> = watch::Receiver<Option<Result<Arc<T>, Refusal>>>;

impl<T> Default for Shared<T> {
    fn default() -> Shared<T> {
        Shared { state: Mutex::new(State { value: None, attempt: None, began: None, failures: 0 }) }
    }
}

impl<T: Send + Sync + 'static> Shared<T> {
    /// What is there now.
    pub(crate) fn get(&self) -> Option<Arc<T>> {
        lock(&self.state).value.clone()
    }

    /// What is there if it will do, or else the attempt to make another, which begins no sooner than `pause` after the
    /// one before, and after failures later, up to `most` and [`PAUSE_MAX`]. What is there stays until then. An attempt belongs to nobody: a call that is given up, or not polled
    /// any more, holds nobody up.
    pub(crate) fn now<F>(
        self: &Arc<Shared<T>>,
        will_do: impl FnOnce(&Arc<T>) -> bool,
        pause: Duration,
        most: Duration,
        make: impl FnOnce() -> F,
    ) -> Result<Arc<T>, Attempt<T>>
    where
        F: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        let mut state = lock(&self.state);
        if let Some(value) = &state.value
            && will_do(value)
        {
            return Ok(Arc::clone(value));
        }
        // An attempt without a sender ended with its runtime.
        if let Some(attempt) = &state.attempt
            && attempt.has_changed().is_ok()
        {
            return Err(attempt.clone());
        }
        let (outcome, attempt) = watch::channel(None);
        let now = Instant::now();
        let pause = longer(pause, most, state.failures);
        let earliest = state.began.map_or(now, |began| (began + pause).max(now));
        state.began = Some(earliest);
        state.attempt = Some(attempt.clone());
        let (shared, making) = (Arc::clone(self), make());
        tokio::spawn(async move {
            sleep_until(earliest).await;
            let made = making.await.map(Arc::new);
            let mut state = lock(&shared.state);
            match &made {
                Ok(value) => {
                    state.value = Some(Arc::clone(value));
                    state.failures = 0;
                }
                Err(_) => state.failures = state.failures.saturating_add(1),
            }
            state.attempt = None;
            drop(state);
            outcome.send_replace(Some(made));
        });
        Err(attempt)
    }

    /// Drops what is there if it is so.
    pub(crate) fn drop_if(&self, is_so: impl FnOnce(&Arc<T>) -> bool) {
        let mut state = lock(&self.state);
        if state.value.as_ref().is_some_and(is_so) {
            state.value = None;
        }
    }
}

/// The pause after so many failures: twice as long with each, less a part by chance, so that many processes do not
/// come all at once.
fn longer(pause: Duration, most: Duration, failures: u32) -> Duration {
    let full = pause.saturating_mul(1 << failures.min(DOUBLINGS_MAX)).min(most.min(PAUSE_MAX).max(pause));
    let chance = RandomState::new().hash_one(failures) % u64::from(PARTS);
    (full - full / PARTS / 2 * u32::try_from(chance).unwrap_or(0)).max(pause)
}

/// What comes of an attempt, until some time.
pub(crate) async fn outcome<T>(mut attempt: Attempt<T>, until: Instant) -> Result<Arc<T>, Refusal> {
    match timeout_at(until, attempt.wait_for(Option::is_some)).await {
        Err(_) => Err(too_late()),
        // The runtime of the attempt was shut down.
        Ok(Err(_)) => Err(Refusal::new(ErrorKind::Unreachable, "the connection was closed")),
        Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(|| Err(too_late())),
    }
}

/// Locks, also when somebody who held it panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The outcomes of futures that run side by side, in their order.
pub async fn join<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    poll_fn(|context| {
        let mut ended = true;
        for (future, outcome) in running.iter_mut().filter(|(_, outcome)| outcome.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(value) => *outcome = Some(value),
                Poll::Pending => ended = false,
            }
        }
        if ended { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    running.into_iter().filter_map(|(_, outcome)| outcome).collect()
}
