//! What a driver promises that runs steps beside their effects, in another database than the ledger's, as tests that every
//! driver runs: the row beside the effect decides.
//!
//! Say how a test opens the ledger's store and runs a step through the driver, and hand that to
//! [`beside_suite!`](crate::beside_suite). Effects are rows of a table that is only appended to and has no unique index, so that one
//! that happened twice is counted twice.

mod cases;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::record::Failure;
use taskonce_core::store::Store;
use taskonce_worker::steps::StepOf;

use crate::host::Delays;
use crate::stage::Actor;
use crate::suite::play_within_bounds;
use crate::transactional::Script;

/// What a driver's author says to have the suite run. Each value stands for an empty database of effects, without the table of
/// steps, and an empty store of the ledger's elsewhere.
#[async_trait]
pub trait BesideUnderTest: Send + Sync {
    /// A handle on the ledger's store, which no transaction of the driver's reaches: each call makes another.
    async fn ledger(&self) -> Arc<dyn Store>;

    /// Makes the table of steps.
    async fn make_table(&self);

    /// How many effects are committed.
    async fn effects(&self) -> usize;

    /// How many rows of steps are committed.
    async fn rows(&self) -> usize;

    /// Whether somebody waits for the end of another's transaction.
    async fn is_waited_for(&self) -> bool;

    /// Runs a step by the driver's `beside`, on a connection of its own. Its code adds an effect, then does what
    /// [`Script::play`] (or [`Script::play_blocking`]) says, and returns that.
    async fn step(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure>;

    /// The same on a connection, or by a pool of one connection, on which somebody has begun a transaction, added an effect, and
    /// neither committed nor rolled back. Whatever becomes of the step, the connection is closed then.
    async fn step_in_an_open_transaction(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure>;
}

/// Where a case plays.
pub(crate) struct Scene {
    pub(crate) driver: Arc<dyn BesideUnderTest>,
    clock: Arc<AtomicU64>,
    actors: AtomicU64,
}

impl Scene {
    /// A process that takes part.
    pub(crate) async fn actor(&self, name: &str) -> Actor {
        let number = self.actors.fetch_add(1, Ordering::SeqCst);
        Actor::new(name, Delays::Drawn, self.driver.ledger().await, Arc::clone(&self.clock), number)
    }

    /// Lets time pass for every process, but not for the store.
    pub(crate) fn pass_for_processes(&self, time: Duration) {
        self.clock.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }
}

/// One case: a sentence about what a driver promises.
pub struct BesideCase {
    /// The sentence.
    pub name: &'static str,
    play: fn(Scene) -> Pin<Box<dyn Future<Output = ()>>>,
}

/// Runs one case. [`beside_suite!`](crate::beside_suite) calls it.
///
/// # Panics
/// When the case fails, takes too long, or is not in the list.
pub fn run_beside_case<D, F>(name: &'static str, open: impl FnOnce(&'static str) -> F)
where
    D: BesideUnderTest + 'static,
    F: Future<Output = D>,
{
    let case = BESIDE_CASES.iter().find(|case| case.name == name).expect("the case is in the list");
    play_within_bounds(name, async {
        let driver = Arc::new(open(name).await);
        (case.play)(Scene { driver, clock: Arc::default(), actors: AtomicU64::new(0) }).await;
    });
}

/// The one list. Calls the macro that it is given with all of it.
#[macro_export]
#[doc(hidden)]
macro_rules! __each_beside_case {
    ($then:ident $($with:tt)*) => {
        $crate::$then! { ($($with)*)
            a_step_in_another_database_is_recorded_in_both_and_a_later_run_replays_it
            a_run_that_ends_between_the_commit_and_the_record_is_followed_by_a_short_one
            of_a_worker_that_lost_its_claim_and_a_new_one_only_the_first_takes_effect
            a_lease_that_passes_while_a_step_waits_for_another_starts_no_effect
            a_step_whose_row_has_another_input_parks_the_task
            a_step_without_its_table_runs_nothing_and_says_which_command_makes_it
            a_step_that_fails_leaves_neither_its_effect_nor_its_row
            a_step_of_another_kind_has_no_row
            a_step_never_joins_a_transaction_that_was_left_open
        }
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __beside_list {
    (() $($name:ident)+) => {
        /// Every case.
        pub const BESIDE_CASES: &[BesideCase] = &[
            $(BesideCase { name: stringify!($name), play: |scene| Box::pin(cases::$name(scene)) },)+
        ];
    };
}

crate::__each_beside_case!(__beside_list);

/// Makes one `#[test]` of each case of the suite for drivers of steps beside their effects.
///
/// Takes a function (or closure) from the case's name to a future of a
/// [`BesideUnderTest`](crate::beside::BesideUnderTest). Each test opens empty databases of its own.
#[macro_export]
macro_rules! beside_suite {
    ($open:expr) => {
        $crate::__each_beside_case!(__beside_tests $open);
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __beside_tests {
    (($open:expr) $($name:ident)+) => {
        $(
            #[test]
            fn $name() {
                $crate::beside::run_beside_case(stringify!($name), $open);
            }
        )+
    };
}
