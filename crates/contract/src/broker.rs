//! What a source promises, as tests that every broker runs: at least once, one holder at a time, nothing left behind.
//!
//! Say how a test opens your source and lets time pass in it, and hand that to [`broker_suite!`](crate::broker_suite). It
//! makes one `#[test]` of each case. No case has a branch for a broker, and a broker needs none for a case.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use std::time::{Duration, Instant};
//! use async_trait::async_trait;
//! use taskonce_contract::broker::{SourceUnderTest, VISIBILITY};
//! use taskonce_contract::broker_suite;
//! use taskonce_worker::source::{MemorySource, Source};
//!
//! struct InMemory(MemorySource, Arc<Mutex<Duration>>);
//!
//! /// An empty queue of its own for each case.
//! async fn open(_case: &str) -> InMemory {
//!     let (began, passed) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
//!     let clock = Arc::clone(&passed);
//!     let clock = move || began.elapsed() + *clock.lock().unwrap();
//!     InMemory(MemorySource::new("queue", VISIBILITY, clock), passed)
//! }
//!
//! #[async_trait]
//! impl SourceUnderTest for InMemory {
//!     async fn open(&self) -> Arc<dyn Source> {
//!         Arc::new(self.0.beside())
//!     }
//!     async fn pass(&self, time: Duration) {
//!         *self.1.lock().unwrap() += time;
//!     }
//!     async fn kept(&self) -> usize {
//!         self.0.kept()
//!     }
//! }
//!
//! broker_suite!(open);
//! # fn main() {}
//! ```

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

mod dead;
mod receiving;
mod sending;
mod settling;
mod whole;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_worker::source::{Death, Delivery, Depth, Entrance, Envelope, RECEIVE_MAX, Sent, Settled, Source, Want};

use crate::suite::play_within_bounds;

/// The visibility timeout of a source under test: far above what a case takes, so that none depends on how fast it runs.
pub const VISIBILITY: Duration = Duration::from_secs(30);

/// What a broker's author says to have the suite run.
///
/// Each value stands for an empty queue of its own; dropping it may remove the data.
#[async_trait]
pub trait SourceUnderTest: Send + Sync {
    /// A handle on the queue, with connections of its own: each call makes another, as another process would have. Its
    /// visibility timeout is [`VISIBILITY`], and it takes payloads of a mebibyte.
    async fn open(&self) -> Arc<dyn Source>;

    /// Lets time pass for everything in the queue, by the broker's own clock, which goes on by itself as well.
    async fn pass(&self, time: Duration);

    /// How many deliveries and dead letters the broker keeps, in any form: also what waits to be trimmed.
    async fn kept(&self) -> usize;
}

/// Where a case plays: a queue, and two handles on it.
pub(crate) struct Yard {
    subject: Box<dyn SourceUnderTest>,
    /// A handle.
    pub(crate) source: Arc<dyn Source>,
    /// Another handle, as another process has it.
    pub(crate) other: Arc<dyn Source>,
}

/// The handler that most cases use.
const HANDLER: &str = "charge@2";
/// As long as nobody waits for.
const AT_ONCE: Duration = Duration::ZERO;
/// The longest that a case waits for what has to come.
const PATIENCE: Duration = Duration::from_secs(20);

impl Yard {
    /// Another handle.
    pub(crate) async fn open(&self) -> Arc<dyn Source> {
        self.subject.open().await
    }

    pub(crate) async fn pass(&self, time: Duration) {
        self.subject.pass(time).await;
    }

    pub(crate) async fn kept(&self) -> usize {
        self.subject.kept().await
    }

    /// Sends a payload to the usual handler.
    pub(crate) async fn send(&self, payload: &str) -> Arc<str> {
        accepted(self.source.send(&task(payload), AT_ONCE, Entrance::Open).await.unwrap())
    }

    /// All that can be received now.
    pub(crate) async fn receive(&self) -> Vec<Delivery> {
        all(&*self.source, AT_ONCE).await
    }

    /// The one delivery that can be received now.
    #[track_caller]
    pub(crate) fn one(&self) -> impl Future<Output = Delivery> {
        let at = std::panic::Location::caller();
        async move {
            let mut deliveries = self.receive().await;
            assert_eq!(payloads(&deliveries).len(), 1, "one delivery is there, at {at}: {:?}", payloads(&deliveries));
            deliveries.remove(0)
        }
    }

    /// Demands that nothing can be received now, by any handle.
    #[track_caller]
    pub(crate) fn nothing(&self) -> impl Future<Output = ()> {
        let at = std::panic::Location::caller();
        async move {
            for source in [&self.source, &self.other] {
                let there = all(&**source, AT_ONCE).await;
                assert!(there.is_empty(), "nothing is deliverable, at {at}: {:?}", payloads(&there));
            }
        }
    }

    /// What there is of all handlers together.
    pub(crate) async fn depth(&self) -> Depth {
        Depth::total(&self.other.depth().await.unwrap())
    }
}

/// A task of the usual handler.
pub(crate) fn task(payload: &str) -> Envelope {
    Envelope::new(HANDLER, payload)
}

/// Wants all of these handlers.
pub(crate) fn wants(handlers: &[&str]) -> Vec<Want> {
    handlers.iter().map(|handler| Want { handler: (*handler).into(), max: RECEIVE_MAX }).collect()
}

/// All of the usual handler that a source gives now, or as soon as there is something.
pub(crate) async fn all(source: &dyn Source, wait: Duration) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    // A receive may answer with a part. Each round adds something, so that the loop ends.
    loop {
        let wait = if deliveries.is_empty() { wait } else { AT_ONCE };
        let more = source.receive(&wants(&[HANDLER]), RECEIVE_MAX, wait).await.unwrap();
        if more.is_empty() {
            return deliveries;
        }
        deliveries.extend(more);
    }
}

/// The payloads of deliveries, in their order.
pub(crate) fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8_lossy(&delivery.envelope.payload).into_owned()).collect()
}

/// Why something died.
pub(crate) fn death(id: &str) -> Death {
    Death { id: id.into(), reason: "dead".into(), message: format!("the card of {id} was declined") }
}

#[track_caller]
pub(crate) fn accepted(sent: Sent) -> Arc<str> {
    match sent {
        Sent::Accepted(coordinates) => coordinates,
        Sent::AlreadyQueued(coordinates) => panic!("the task is accepted; it was queued as {coordinates}"),
    }
}

#[track_caller]
pub(crate) fn done(settled: Settled) {
    assert_eq!(settled, Settled::Done);
}

#[track_caller]
pub(crate) fn gone(settled: Settled) {
    assert_eq!(settled, Settled::Gone);
}

/// One case: a sentence about what a source promises.
pub struct BrokerCase {
    /// The sentence.
    pub name: &'static str,
    /// What it is about: a module of this crate.
    pub topic: &'static str,
    play: fn(Yard) -> Pin<Box<dyn Future<Output = ()>>>,
}

/// Runs one case. [`broker_suite!`](crate::broker_suite) calls it.
///
/// # Panics
/// When the case fails, takes too long, or is not in the list.
pub fn run_broker_case<S, F>(name: &'static str, open: impl FnOnce(&'static str) -> F)
where
    S: SourceUnderTest + 'static,
    F: Future<Output = S>,
{
    let case = BROKER_CASES.iter().find(|case| case.name == name).expect("the case is in the list");
    play_within_bounds(name, async {
        let subject: Box<dyn SourceUnderTest> = Box::new(open(name).await);
        let (source, other) = (subject.open().await, subject.open().await);
        (case.play)(Yard { subject, source, other }).await;
    });
}

/// The one list. Calls the macro that it is given with all of it.
#[macro_export]
#[doc(hidden)]
macro_rules! __each_broker_case {
    ($then:ident $($with:tt)*) => {
        $crate::$then! { ($($with)*)
            sending {
                what_is_sent_is_delivered_as_it_was_sent
                empty_binary_and_large_payloads_come_back_byte_for_byte
                a_delayed_send_comes_not_before_its_delay
                one_key_is_queued_once_where_that_is_asked
                a_key_can_be_queued_again_once_it_is_settled
                of_many_sends_of_one_key_at_once_one_is_accepted
                what_breaks_a_limit_is_refused_and_not_queued
                many_sends_at_once_are_neither_lost_nor_doubled
            }
            receiving {
                an_empty_source_answers_nothing_when_the_wait_is_over
                a_delivery_that_is_held_is_given_to_nobody_else
                of_many_consumers_at_once_each_delivery_has_one
                deliveries_come_by_priority_then_by_age
                a_receive_keeps_to_its_bounds
                no_handler_waits_because_another_has_much
                a_handler_that_nobody_asks_for_is_left_in_place
                a_receive_that_waits_wakes_soon_after_a_send
                a_receive_that_waits_wakes_when_a_delay_ends
                a_receive_that_is_given_up_keeps_nothing_from_others
                coordinates_name_one_delivery_at_each_arrival
            }
            settling {
                what_is_not_settled_comes_again_after_its_visibility
                what_is_extended_does_not_come_again
                what_is_deferred_comes_not_before_its_delay
                what_is_deferred_by_nothing_comes_at_once
                what_is_acknowledged_never_comes_again
                a_stale_receipt_settles_nothing
                a_settlement_sent_again_changes_nothing
                a_late_settlement_counts_while_nobody_else_has_it
                a_receipt_of_nothing_settles_nothing
                a_killed_consumers_deliveries_come_back
                a_drain_leaves_nothing_in_flight
                many_settlements_at_once_do_not_mix
            }
            dead {
                a_dead_letter_keeps_what_was_sent_and_why
                a_dead_letter_is_delivered_no_more
                two_deaths_of_one_id_are_one_dead_letter
                a_dead_letter_is_redriven_once
                what_was_redriven_can_die_again
                what_was_redriven_is_queued_once
                a_dropped_dead_letter_is_gone
                dead_letters_are_paged_without_gaps_or_repeats
                a_foreign_cursor_of_dead_letters_is_refused
            }
            whole {
                depth_counts_what_is_there
                the_oldest_deliverable_tells_its_age
                what_is_settled_leaves_nothing_behind
                an_examination_finds_what_nobody_takes
                a_closed_source_refuses_with_an_error_of_its_own
                closing_ends_a_receive_that_waits
            }
        }
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __broker_list {
    (() $($topic:ident { $($name:ident)+ })+) => {
        /// Every case.
        pub const BROKER_CASES: &[BrokerCase] = &[
            $($(BrokerCase {
                name: stringify!($name),
                topic: stringify!($topic),
                play: |yard| Box::pin($topic::$name(yard)),
            },)+)+
        ];
    };
}

crate::__each_broker_case!(__broker_list);

/// Makes one `#[test]` of each case of the suite for sources.
///
/// Takes a function (or closure) from the case's name to a future of a
/// [`SourceUnderTest`](crate::broker::SourceUnderTest). Each test opens an empty queue of its own.
#[macro_export]
macro_rules! broker_suite {
    ($open:expr) => {
        $crate::__each_broker_case!(__broker_tests $open);
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __broker_tests {
    (($open:expr) $($topic:ident { $($name:ident)+ })+) => {
        $($(
            #[test]
            fn $name() {
                $crate::broker::run_broker_case(stringify!($name), $open);
            }
        )+)+
    };
}
