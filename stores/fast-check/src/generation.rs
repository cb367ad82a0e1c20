//! The database's generation, as this process knows it: read at the first call, and anew from time to time.
//!
//! Nothing runs while nobody calls. A call that finds the name old has it read in the background and goes on; only the
//! first one waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use taskonce_core::Result;
use taskonce_core::store::Generation;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

/// The longest that the first call waits for the first answer. Without it hints do not count, and nothing else is lost.
const FIRST_WAIT_MAX: Duration = Duration::from_secs(1);
/// Hints count while the generation was read within so many of its intervals.
const FRESH_INTERVALS: u32 = 2;
/// A reading that was begun so long ago has got lost, with its runtime or in a fork.
const READING_MAX: Duration = Duration::from_secs(10);
/// The pause after a reading that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// What a hint is marked with: the generation of the database, by its name. A database that names none has only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark(Option<Arc<str>>);

impl Mark {
    pub(crate) fn named(name: &str) -> Mark {
        Mark(Some(name.into()))
    }

    pub(crate) fn unnamed() -> Mark {
        Mark(None)
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// What is known of it.
pub(crate) struct Known {
    every: Duration,
    inner: Mutex<Inner>,
    /// A reading has ended.
    read: Notify,
}

#[derive(Default)]
struct Inner {
    generation: Option<(Mark, Instant)>,
    reading: Option<Instant>,
    next_at: Option<Instant>,
    /// Whether any reading has ended.
    tried: bool,
}

impl Known {
    pub(crate) fn new(every: Duration) -> Known {
        Known { every, inner: Mutex::default(), read: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller has to have it read: one at a time.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let mut inner = self.lock();
        let is_due = inner.next_at.is_none_or(|next_at| now >= next_at)
            && inner.reading.is_none_or(|since| now >= since + READING_MAX);
        if is_due {
            inner.reading = Some(now);
        }
        is_due
    }

    /// What a reading that was begun then has found. It says whether another generation was known before.
    pub(crate) fn learn(&self, asked_at: Instant, answer: &Result<Option<Generation>>) -> bool {
        let mut inner = self.lock();
        inner.tried = true;
        inner.reading = None;
        let mut moved = false;
        match answer {
            Ok(name) => {
                let generation = name.as_ref().map_or_else(Mark::unnamed, |name| Mark::named(&name.0));
                moved = inner.generation.as_ref().is_some_and(|(before, _)| *before != generation);
                inner.generation = Some((generation, asked_at));
                inner.next_at = Some(asked_at + self.every);
            }
            Err(_) => inner.next_at = Some(Instant::now() + RETRY_PAUSE.min(self.every)),
        }
        drop(inner);
        self.read.notify_waiters();
        moved
    }

    /// The generation whose hints count now. Only the first call waits, for the first reading.
    pub(crate) async fn fresh(&self) -> Option<Mark> {
        let read = self.read.notified();
        if !self.lock().tried {
            let _first = timeout(FIRST_WAIT_MAX, read).await;
        }
        let bound = self.every * FRESH_INTERVALS;
        let inner = self.lock();
        let (generation, read_at) = inner.generation.as_ref()?;
        (read_at.elapsed() <= bound).then(|| generation.clone())
    }

    /// The generation to mark a hint with. It must be asked for before the database is, so that no hint of what one
    /// generation held is marked with a later one; an old mark is harmless, as it does not count.
    pub(crate) fn mark(&self) -> Option<Mark> {
        self.lock().generation.as_ref().map(|(generation, _)| generation.clone())
    }
}

#[cfg(test)]
mod tests {
    use taskonce_core::{Error, ErrorKind};

    use super::*;

    const EVERY: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn a_generation_counts_only_while_it_was_read_lately() {
        let known = Known::new(EVERY);
        assert!(known.is_due(Instant::now()) && !known.is_due(Instant::now()), "one reads at a time");
        assert!(!known.learn(Instant::now(), &Ok(Some(Generation("1".into())))));
        assert_eq!(known.fresh().await, Some(Mark::named("1")));
        tokio::time::advance(EVERY * FRESH_INTERVALS).await;
        assert!(known.fresh().await.is_some() && known.is_due(Instant::now()));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(known.fresh().await, None);
        assert_eq!(known.mark(), Some(Mark::named("1")), "a mark may be old");
        assert!(known.learn(Instant::now(), &Ok(Some(Generation("2".into())))), "it moved");
        assert_eq!(known.fresh().await, Some(Mark::named("2")));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_call_waits_for_the_first_reading_and_not_for_ever() {
        let known = Arc::new(Known::new(EVERY));
        let start = Instant::now();
        assert_eq!(known.fresh().await, None);
        assert_eq!(start.elapsed(), FIRST_WAIT_MAX);
        let other = Arc::clone(&known);
        let reader = tokio::spawn(async move { other.learn(Instant::now(), &Ok(None)) });
        assert_eq!(known.fresh().await, Some(Mark::unnamed()));
        reader.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_that_fails_is_tried_again_and_one_that_got_lost_too() {
        let known = Known::new(EVERY);
        assert!(known.is_due(Instant::now()));
        known.learn(Instant::now(), &Err(Error::new(ErrorKind::Unreachable, "away")));
        assert_eq!(known.fresh().await, None);
        assert!(!known.is_due(Instant::now()));
        tokio::time::advance(RETRY_PAUSE).await;
        assert!(known.is_due(Instant::now()));
        tokio::time::advance(READING_MAX).await;
        assert!(known.is_due(Instant::now()));
    }
}
