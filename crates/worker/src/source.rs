//! The port of brokers: `Source`, where deliveries come from and go back to. What a delivery carries is in `envelope`.
//!
//! A source knows nothing of records. It hands out deliveries, and forgets each when it is told that the record is final.

mod dead;
mod envelope;
mod memory;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::error::Result;
use taskonce_core::record::WallTime;
use taskonce_core::store::{Cursor, Finding, Level, Memory};

pub use dead::{
    DEATH_ID_MAX, DEATH_MESSAGE_MAX, DEATH_REASON_MAX, DeadFilter, DeadLetter, DeadLine, DeadPage, Death, Left,
};
pub use envelope::{
    CONTENT_TYPE_MAX, DUE_HEADER, Envelope, FINGERPRINT_HEADER, HANDLER_MAX, HEADER_BYTES_MAX, HEADERS_MAX, KEY_HEADER,
    KEY_MAX, Priority, TRACE_HEADER,
};
pub use memory::MemorySource;

/// The most deliveries of one receive.
pub const RECEIVE_MAX: usize = 1000;
/// The longest that one receive waits.
pub const WAIT_MAX: Duration = Duration::from_secs(60);
/// The longest delay of a send or a deferral, and the longest visibility: 366 days.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 86_400);

/// Delivers tasks, at least once each.
///
/// # Contract
///
/// * **At least once.** What was `Accepted` is delivered until it is acknowledged, dead-lettered, or its holder's time is
///   extended. A delivery that is not settled comes again when its visibility timeout has passed.
/// * **One holder.** A delivery that was handed out is handed to nobody else before its visibility timeout has passed.
/// * **By receipt.** A receipt settles the delivery it came with, and only until that delivery is handed out again: then, and
///   once it has settled it, it answers [`Settled::Gone`] and changes nothing. So a settlement can be sent again. Until then
///   it is good, also after the visibility timeout.
/// * **As sent.** Payload, headers, key and content type come back byte for byte, also from a dead letter.
/// * **In order.** Of one handler's deliverable deliveries those of the higher priority come first, then those that were sent
///   first. Handlers are served in turn: none waits because another has much.
/// * **Left in place.** A delivery of a handler that nobody asks for stays where it is.
/// * **Left to newer ones.** What a newer program sent in a form that this one does not know is put off, and no dead letter.
/// * **Durable.** `Accepted` and `Done` survive a crash of the caller, and whatever the source's own page promises.
/// * **Honest.** An error means that the outcome is unknown, never that nothing happened.
/// * **Bounded.** What is settled leaves nothing behind. Every call ends within the source's own deadline, a receive within
///   that and its wait; it waits without asking again and again.
/// * **Shared trips.** Many calls at once share round trips (pipelining, group commit): there is no batch verb but `receive`.
///
/// Dropping a future is allowed at any time; what it had asked for may still happen. What a dropped receive had been given
/// comes again at the latest after its visibility timeout.
///
/// The count of deliveries is never a count of attempts: it counts those of a task that was busy, too.
#[async_trait]
pub trait Source: Send + Sync {
    /// What it is and what it can.
    fn describe(&self) -> &Description;

    /// Queues a task, to be delivered after the delay.
    ///
    /// # Errors
    /// [`BadEnvelope`](taskonce_core::ErrorKind::BadEnvelope) with everything that breaks a limit; then nothing was queued.
    async fn send(&self, envelope: &Envelope, delay: Duration, entrance: Entrance) -> Result<Sent>;

    /// Up to `total_max` deliveries of these handlers, of each at most as many as is wanted. Answers as soon as there is one,
    /// and with none when the wait is over. May hold fewer than there are, when they are large.
    async fn receive(&self, wants: &[Want], total_max: usize, wait: Duration) -> Result<Vec<Delivery>>;

    /// Forgets the delivery: its record is final or parked.
    async fn acknowledge(&self, receipt: &Receipt) -> Result<Settled>;

    /// Gives the delivery back, to come again after the delay; at once if that is zero.
    async fn defer(&self, receipt: &Receipt, delay: Duration) -> Result<Settled>;

    /// Holds the delivery for so long from now on. The only call after which the receipt is good for another.
    async fn extend(&self, receipt: &Receipt, visibility: Duration) -> Result<Settled>;

    /// Moves the delivery to the dead letters. Where there is a dead letter of that id already, it stays as it is, and the
    /// delivery is forgotten.
    async fn dead_letter(&self, receipt: &Receipt, death: &Death) -> Result<Settled>;

    /// One page of the dead letters that match, without their payloads. One that is there during the whole walk is seen
    /// once. A page may hold fewer than `page_max`, also none, while there is a cursor: only `None` ends the walk.
    async fn dead_letters(&self, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage>;

    /// The dead letter of this id, whole.
    async fn dead_one(&self, id: &str) -> Result<Option<DeadLetter>>;

    /// Publishes a dead letter again, at once deliverable and counted from the beginning. It is a dead letter no more.
    async fn redrive(&self, id: &str) -> Result<Left>;

    /// Forgets a dead letter.
    async fn drop_dead(&self, id: &str) -> Result<Left>;

    /// What there is, of each handler that has something: at most [`DEPTHS_MAX`] handlers.
    async fn depth(&self) -> Result<Vec<Depth>>;

    /// Looks at the source's own health: reachability, settings that endanger deliveries, its clock, what nobody takes. For people.
    async fn examine(&self) -> Vec<Finding>;

    /// Ends this handle's use: receives that wait end, and every later call is refused as
    /// [`Closed`](taskonce_core::ErrorKind::Closed). What is in flight comes again after its visibility timeout, unless it
    /// was deferred before. Other handles and processes go on.
    async fn close(&self);
}

/// The most handlers that one question for the depth tells of.
pub const DEPTHS_MAX: usize = 10_000;

/// What is deliverable for longer than this is taken by nobody, it seems: worth knowing of.
pub const UNTAKEN_MAX: Duration = Duration::from_secs(300);

/// What an examination finds of what there is: how much, and the handlers of which nothing has been taken for long.
#[must_use]
pub fn examine_depth(depths: &[Depth]) -> Finding {
    let total = Depth::total(depths);
    let text = format!(
        "{} ready, {} deferred, {} in flight, {} dead letters",
        total.ready, total.deferred, total.in_flight, total.dead
    );
    let is_untaken = |depth: &&Depth| depth.oldest.is_some_and(|oldest| oldest > UNTAKEN_MAX);
    let untaken: Vec<&str> =
        depths.iter().filter(is_untaken).map(|depth| &*depth.handler).take(UNTAKEN_SHOWN).collect();
    let subject = "deliveries".to_owned();
    if untaken.is_empty() {
        return Finding { level: Level::Fine, subject, text, hint: String::new() };
    }
    let oldest = total.oldest.unwrap_or_default().as_secs();
    Finding {
        level: Level::Warning,
        subject,
        text: format!("{text}; the oldest has been ready for {oldest} s, of {}", untaken.join(", ")),
        hint: "see that a worker runs that has a route for it, and keeps up".to_owned(),
    }
}

/// The most handlers that a finding names.
const UNTAKEN_SHOWN: usize = 5;

/// What a source is and what it can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name, one half of a route.
    pub name: Arc<str>,
    /// How long a delivery is its receiver's alone, unless extended.
    pub visibility: Duration,
    /// The largest payload, in bytes.
    pub payload_max: usize,
    /// How much later than its delay a deferred delivery may come, while somebody waits for it and the source is not busy.
    pub delay_step: Duration,
    /// How long after a send of another process a receive that waits may wake.
    pub wake_max: Duration,
    /// What it promises of what it acknowledged.
    pub memory: Memory,
}

/// What to receive of one handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// The handler, as senders name it.
    pub handler: Arc<str>,
    /// The most of its deliveries; zero while it is to be left alone.
    pub max: usize,
}

/// One arrival of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The source's name, one half of the route; the other is the envelope's handler.
    pub source: Arc<str>,
    /// What was sent.
    pub envelope: Envelope,
    /// How often it was handed out, this time included, since it was sent or redriven. Never a count of attempts.
    pub number: u32,
    /// Names it among all that the source ever delivers, the same at each arrival: a key for what was sent without one.
    pub coordinates: Arc<str>,
    /// When a person last took it back from the dead letters: from then on it counts as new, whatever it says of when it was sent.
    pub redriven_at: Option<WallTime>,
    /// Settles it.
    pub receipt: Receipt,
}

impl Delivery {
    /// How old it is at this time of day, where its producer's time is known. A delayed one counts from when it was due first, a
    /// redriven one from its redrive: before, no copy of it can have come.
    #[must_use]
    pub fn age(&self, now: WallTime) -> Option<Duration> {
        let sent_at =
            self.envelope.sent_at.map(|sent_at| self.envelope.due_at().map_or(sent_at, |due| due.max(sent_at)));
        let since = self.redriven_at.or(sent_at)?;
        Some(Duration::from_millis(now.0.saturating_sub(since.0)))
    }
}

/// What settles a delivery: opaque, and only good for its source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receipt(pub Arc<str>);

/// What became of a settlement.
#[must_use = "a receipt that is gone settled nothing now"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is so, and stays so.
    Done,
    /// The receipt holds nothing (any more): it settled its delivery before, or another holds that now. Nothing was changed.
    Gone,
}

/// Whether a key may be queued twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entrance {
    /// Everything is accepted; the ledger tells duplicates when they are delivered.
    #[default]
    Open,
    /// Accepted unless the same handler's same key, sent so or redriven, is queued: waiting, deferred or in flight. Dead letters
    /// do not count. What is sent without a key is refused.
    OncePerKey,
}

/// What became of a send.
#[must_use = "a task that is queued already was not queued again"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is queued, and has these coordinates.
    Accepted(Arc<str>),
    /// It was queued already, with these coordinates. Nothing was changed.
    AlreadyQueued(Arc<str>),
}

/// What a source holds of one handler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// The handler, as senders name it.
    pub handler: Arc<str>,
    /// Deliverable now.
    pub ready: u64,
    /// Waiting for a delay.
    pub deferred: u64,
    /// Handed out, and within the visibility timeout.
    pub in_flight: u64,
    /// Dead letters.
    pub dead: u64,
    /// How long the oldest of the deliverable ones has been deliverable.
    pub oldest: Option<Duration>,
}

impl Depth {
    /// All of them together, of no handler.
    #[must_use]
    pub fn total(depths: &[Depth]) -> Depth {
        depths.iter().fold(Depth::default(), |sum, one| Depth {
            handler: sum.handler,
            ready: sum.ready + one.ready,
            deferred: sum.deferred + one.deferred,
            in_flight: sum.in_flight + one.in_flight,
            dead: sum.dead + one.dead,
            oldest: sum.oldest.max(one.oldest),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_counts_from_the_sending_the_end_of_its_delay_or_the_redrive() {
        let sent = Delivery {
            source: "queue".into(),
            envelope: Envelope { sent_at: Some(WallTime(1000)), ..Envelope::new("charge@2", *b"x") },
            number: 1,
            coordinates: "a-1".into(),
            redriven_at: None,
            receipt: Receipt("1".into()),
        };
        assert_eq!(sent.age(WallTime(4000)), Some(Duration::from_secs(3)));
        assert_eq!(sent.age(WallTime(10)), Some(Duration::ZERO), "a producer's clock may be ahead");
        let redriven = Delivery { redriven_at: Some(WallTime(3500)), ..sent.clone() };
        assert_eq!(redriven.age(WallTime(4000)), Some(Duration::from_millis(500)));
        let delayed = Envelope { headers: vec![(DUE_HEADER.into(), "3900".into())], ..sent.envelope.clone() };
        assert_eq!(
            Delivery { envelope: delayed, ..sent.clone() }.age(WallTime(4000)),
            Some(Duration::from_millis(100))
        );
        let unknown = Delivery { envelope: Envelope { sent_at: None, ..sent.envelope.clone() }, ..sent };
        assert_eq!(unknown.age(WallTime(4000)), None);
    }

    #[test]
    fn what_nobody_takes_is_found_with_its_handler() {
        let one = |handler: &str, oldest: Duration| Depth {
            handler: handler.into(),
            ready: 3,
            oldest: Some(oldest),
            ..Depth::default()
        };
        let found = examine_depth(&[one("charge@2", UNTAKEN_MAX)]);
        assert_eq!(
            (found.level, found.text.as_str()),
            (Level::Fine, "3 ready, 0 deferred, 0 in flight, 0 dead letters")
        );
        let found = examine_depth(&[one("charge@2", UNTAKEN_MAX), one("mail@1", 2 * UNTAKEN_MAX)]);
        assert_eq!(found.level, Level::Warning);
        assert!(found.text.ends_with("the oldest has been ready for 600 s, of mail@1"), "{}", found.text);
        assert!(found.hint.contains("route"), "{}", found.hint);
    }

    #[test]
    fn a_total_adds_up_and_keeps_the_oldest_age() {
        let one = |ready, oldest: Option<u64>| Depth {
            handler: "a".into(),
            ready,
            deferred: 2,
            in_flight: 3,
            dead: 4,
            oldest: oldest.map(Duration::from_secs),
        };
        let total = Depth::total(&[one(1, None), one(5, Some(9)), one(0, Some(3))]);
        assert_eq!(
            total,
            Depth { handler: "".into(), ready: 6, deferred: 6, in_flight: 9, dead: 12, ..one(0, Some(9)) }
        );
    }
}
