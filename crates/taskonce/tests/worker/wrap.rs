//! A source that counts, fails and loses answers on request, around a real one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use taskonce::source::{
    DeadFilter, DeadLetter, DeadPage, Death, Delivery, Depth, Description, Entrance, Envelope, Left, Receipt, Sent,
    Settled, Source, Want,
};
use taskonce::store::{Cursor, Finding};
use taskonce::{Error, ErrorKind, Result};

fn planted() -> Error {
    Error::new(ErrorKind::Unreachable, "planted")
}

/// A source that counts.
pub(crate) struct Meter {
    pub(crate) inner: Arc<dyn Source>,
    pub(crate) receives: AtomicUsize,
    /// The most that one receive brought.
    pub(crate) most: AtomicUsize,
    /// Of each of so many settlements the answer is lost, after it was made.
    pub(crate) lose_answers: AtomicUsize,
    /// It cannot be reached.
    pub(crate) is_away: AtomicBool,
    /// It takes no acknowledgement before this is over.
    pub(crate) is_slow: AtomicBool,
    /// It answers a receive with nothing, whatever there is.
    pub(crate) is_mute: AtomicBool,
}

impl Meter {
    pub(crate) fn new(inner: Arc<dyn Source>) -> Meter {
        Meter {
            inner,
            receives: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            lose_answers: AtomicUsize::new(0),
            is_away: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            is_mute: AtomicBool::new(false),
        }
    }

    fn reach(&self) -> Result<()> {
        if self.is_away.load(Ordering::SeqCst) { Err(planted()) } else { Ok(()) }
    }

    fn answer(&self, settled: Settled) -> Result<Settled> {
        let is_lost = self.lose_answers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if is_lost.is_ok() { Err(planted()) } else { Ok(settled) }
    }
}

#[async_trait]
impl Source for Meter {
    fn describe(&self) -> &Description {
        self.inner.describe()
    }

    async fn send(&self, envelope: &Envelope, delay: Duration, entrance: Entrance) -> Result<Sent> {
        self.inner.send(envelope, delay, entrance).await
    }

    async fn receive(&self, wants: &[Want], total_max: usize, wait: Duration) -> Result<Vec<Delivery>> {
        self.receives.fetch_add(1, Ordering::SeqCst);
        self.reach()?;
        if self.is_mute.load(Ordering::SeqCst) {
            // sleeps: as a source does that has nothing
            tokio::time::sleep(wait).await;
            return Ok(Vec::new());
        }
        let deliveries = self.inner.receive(wants, total_max, wait).await?;
        self.most.fetch_max(deliveries.len(), Ordering::SeqCst);
        Ok(deliveries)
    }

    async fn acknowledge(&self, receipt: &Receipt) -> Result<Settled> {
        self.reach()?;
        while self.is_slow.load(Ordering::SeqCst) {
            // sleeps: until the test lets it go on
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.answer(self.inner.acknowledge(receipt).await?)
    }

    async fn defer(&self, receipt: &Receipt, delay: Duration) -> Result<Settled> {
        self.reach()?;
        self.answer(self.inner.defer(receipt, delay).await?)
    }

    async fn extend(&self, receipt: &Receipt, visibility: Duration) -> Result<Settled> {
        self.reach()?;
        self.inner.extend(receipt, visibility).await
    }

    async fn dead_letter(&self, receipt: &Receipt, death: &Death) -> Result<Settled> {
        self.reach()?;
        self.answer(self.inner.dead_letter(receipt, death).await?)
    }

    async fn dead_letters(&self, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage> {
        self.inner.dead_letters(filter, cursor).await
    }

    async fn dead_one(&self, id: &str) -> Result<Option<DeadLetter>> {
        self.inner.dead_one(id).await
    }

    async fn redrive(&self, id: &str) -> Result<Left> {
        self.inner.redrive(id).await
    }

    async fn drop_dead(&self, id: &str) -> Result<Left> {
        self.inner.drop_dead(id).await
    }

    async fn depth(&self) -> Result<Vec<Depth>> {
        self.inner.depth().await
    }

    async fn examine(&self) -> Vec<Finding> {
        self.inner.examine().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
