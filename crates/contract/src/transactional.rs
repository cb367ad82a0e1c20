//! What a driver of transactions promises, as tests that every driver runs: the effect commits with its record.
//!
//! A driver lets a transaction of the user's own complete a claim. Say how a test opens the store, runs a task through the
//! driver, and holds a transaction by hand, and hand that to [`transaction_suite!`](crate::transaction_suite). Effects are
//! rows of a table of the driver's own that is only appended to and has no unique index, so that one that happened twice
//! is counted twice.

mod cases;
mod hand;
mod script;
mod steps;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::Result;
use taskonce_core::key::{Key, Task};
use taskonce_core::ledger::{Claim, Completion, Ledger, Refused};
use taskonce_core::policy::Policy;
use taskonce_core::record::{Failure, Output};
use taskonce_core::store::Store;
use taskonce_worker::{Context, Outcome};

use crate::stage::{Stage, StoreUnderTest};
use crate::suite::play_within_bounds;

pub(crate) use cases::{failed, ran, returns, waits_then_returns};
pub use script::{Act, Gate, Script};

/// What a driver's author says to have the suite run, beside how the store is opened.
#[async_trait]
pub trait TransactionsUnderTest: StoreUnderTest {
    /// A store of the same kind that the transactions of this one do not reach: another file, another schema.
    async fn open_elsewhere(&self) -> Arc<dyn Store>;

    /// How many effects of this key are committed: rows of the table that is only appended to.
    async fn effects(&self, key: &Key) -> usize;

    /// Runs a task by the driver's `run_in_transaction` (its `…_or_wait`, where `wait_max` is not zero). The handler first adds
    /// an effect of its task's key in the transaction that it is given, then does what [`Script::play`] (or
    /// [`Script::play_blocking`]) says, and returns that.
    async fn run(
        &self,
        ledger: &Ledger,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        script: Arc<Script>,
    ) -> Result<Outcome<String>>;

    /// Begins a transaction by hand, as a user does, on a connection of its own.
    async fn begin(&self) -> Box<dyn ByHand>;

    /// One step of a plain handler: begins a transaction on a connection of its own, calls the driver's `step_in` with this
    /// name and input, whose code adds an effect of the task's key and then does what the script says, and commits; where
    /// `step_in` fails, it rolls back and returns the failure. `end` says what else becomes of the transaction.
    async fn step(
        &self,
        context: &Context,
        name: &str,
        input: u32,
        script: Arc<Script>,
        end: StepEnd,
    ) -> Result<String, Failure>;
}

/// What becomes of the transaction of a step whose code has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEnd {
    /// It commits.
    Commit,
    /// It is rolled back, and the handler goes on as if it had committed.
    RollBack,
}

/// A transaction that a test holds. Dropped, it is rolled back, at the latest when the test looks next.
#[async_trait]
pub trait ByHand: Send {
    /// `claim.lock_in(tx)`, and the claim back.
    async fn lock(&mut self, claim: Claim) -> (Claim, Result<()>);

    /// Adds an effect of this key.
    async fn add_effect(&mut self, key: &Key);

    /// `claim.complete_in(tx, output)`.
    async fn complete(&mut self, claim: Claim, output: Output) -> Result<Completion, Refused>;

    /// Commits.
    async fn commit(self: Box<Self>);

    /// Rolls back.
    async fn roll_back(self: Box<Self>);
}

/// Where a case plays.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) driver: Arc<dyn TransactionsUnderTest>,
}

/// One case: a sentence about what a driver promises.
pub struct TransactionCase {
    /// The sentence.
    pub name: &'static str,
    /// What it is about: a module of this crate.
    pub topic: &'static str,
    play: fn(Scene) -> Pin<Box<dyn Future<Output = ()>>>,
}

/// Runs one case. [`transaction_suite!`](crate::transaction_suite) calls it.
///
/// # Panics
/// When the case fails, takes too long, or is not in the list.
pub fn run_transaction_case<S, F>(name: &'static str, open: impl FnOnce(&'static str) -> F)
where
    S: TransactionsUnderTest + 'static,
    F: Future<Output = S>,
{
    let case = TRANSACTION_CASES.iter().find(|case| case.name == name).expect("the case is in the list");
    play_within_bounds(name, async {
        let driver = Arc::new(open(name).await);
        let stage = Stage::new(Arc::clone(&driver)).await;
        (case.play)(Scene { stage, driver }).await;
    });
}

/// The one list. Calls the macro that it is given with all of it.
#[macro_export]
#[doc(hidden)]
macro_rules! __each_transaction_case {
    ($then:ident $($with:tt)*) => {
        $crate::$then! { ($($with)*)
            cases {
                a_committed_effect_and_its_completion_are_seen_together
                a_duplicate_gets_the_committed_output
                a_handler_that_fails_leaves_no_effect_and_is_retried_after_its_backoff
                a_handler_that_fails_for_good_is_dead_and_takes_effect_when_it_is_redriven
                a_handler_that_panics_leaves_nothing
                a_handler_that_hangs_is_given_up_and_can_never_commit
                a_run_that_is_dropped_inside_its_handler_can_never_commit
                an_output_that_is_too_large_rolls_the_effect_back
                of_many_runs_at_once_exactly_one_takes_effect
                who_waits_for_a_run_gets_what_it_committed
                a_plain_run_of_a_transactional_effect_is_refused
                a_run_in_a_transaction_is_refused_to_every_other_effect
                a_ledger_of_another_store_is_refused
            }
            hand {
                a_rolled_back_effect_leaves_no_completion
                a_lost_claim_never_runs_the_callers_statements
                a_lost_claim_can_never_commit
                a_completion_without_the_lock_is_refused
                a_task_that_was_cleared_before_the_lock_is_lost
                a_task_that_is_cleared_while_its_transaction_runs_keeps_its_one_effect
                while_a_transaction_holds_the_record_others_are_busy_beyond_the_lease
                no_heartbeat_is_under_way_when_the_record_is_locked
                a_heartbeat_before_the_lock_does_not_lose_the_claim
                a_locked_record_gets_no_heartbeat
                a_refused_output_gives_the_claim_back
                a_dropped_transaction_is_a_failed_attempt_and_leaves_no_effect
                a_completion_that_was_never_confirmed_is_found_out
                a_commit_whose_answer_is_lost_is_resolved
                a_transaction_that_is_still_open_is_not_resolved
                a_claim_that_was_given_up_completes_nothing
            }
            steps {
                a_second_run_replays_the_steps_of_the_first
                a_transactional_step_is_recorded_with_its_effect_or_not_at_all
                a_step_whose_transaction_was_rolled_back_is_not_taken_for_done
                a_failure_right_after_a_step_keeps_it_recorded
                a_step_of_a_lost_claim_never_runs
                a_heartbeat_beside_a_step_loses_neither
                another_step_in_its_place_parks_the_task
            }
        }
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __transaction_list {
    (() $($topic:ident { $($name:ident)+ })+) => {
        /// Every case.
        pub const TRANSACTION_CASES: &[TransactionCase] = &[
            $($(TransactionCase {
                name: stringify!($name),
                topic: stringify!($topic),
                play: |scene| Box::pin($topic::$name(scene)),
            },)+)+
        ];
    };
}

crate::__each_transaction_case!(__transaction_list);

/// Makes one `#[test]` of each case of the suite for drivers of transactions.
///
/// Takes a function (or closure) from the case's name to a future of a
/// [`TransactionsUnderTest`](crate::transactional::TransactionsUnderTest). Each test opens an empty store of its own.
#[macro_export]
macro_rules! transaction_suite {
    ($open:expr) => {
        $crate::__each_transaction_case!(__transaction_tests $open);
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __transaction_tests {
    (($open:expr) $($topic:ident { $($name:ident)+ })+) => {
        $($(
            #[test]
            fn $name() {
                $crate::transactional::run_transaction_case(stringify!($name), $open);
            }
        )+)+
    };
}
