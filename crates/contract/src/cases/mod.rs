//! The list of cases. A store passes all of them.
//!
//! Each is an async function of a [`Stage`](crate::Stage) that panics where the store, or the ledger over it, does not
//! behave as the function's name says.

#![allow(clippy::unwrap_used, reason = "a case is a test: a panic is how it fails")]

mod answers;
mod claims;
mod clock;
mod ends;
mod histories;
mod listed;
mod outputs;
mod people;
mod port;
mod processes;
mod purge;
mod scan;
mod steps;
mod stories;
mod values;
mod waiting;

use std::future::Future;
use std::sync::Arc;

use taskonce_core::held::Settled;
use taskonce_core::key::Key;
use taskonce_core::ledger::{Admission, Claim, Seen, Unsettled};
use taskonce_core::record::{Fence, Found, Record};
use taskonce_core::store::Swap;

use crate::stage::Stage;
use crate::suite::Case;

/// The one list. Calls the macro that it is given with all of it.
#[macro_export]
#[doc(hidden)]
macro_rules! __each_case {
    ($then:ident $($with:tt)*) => {
        $crate::$then! { ($($with)*)
            port {
                an_unknown_key_holds_nothing
                a_swap_that_expects_nothing_is_refused_where_something_is
                a_swap_that_expects_something_is_refused_where_nothing_is
                a_stale_token_is_refused_and_shown_what_is_there
                a_refused_swap_changes_nothing
                a_swap_can_be_sent_again
                a_claim_sent_again_keeps_its_fence
                a_swap_sent_again_is_refused_once_another_wrote_after_it
                of_many_swaps_of_one_token_exactly_one_is_stored
                of_many_first_swaps_exactly_one_is_stored
                swaps_of_many_keys_at_once_do_not_mix
                two_handles_see_one_record
                every_claim_of_a_key_raises_its_fence
                a_write_that_is_no_claim_keeps_the_fence
                fences_of_a_store_that_keeps_survive_erasure
                erasing_needs_the_token
                an_erased_key_can_be_claimed_again
                an_erasure_sent_again_finds_nothing
                erased_keys_never_accept_an_old_token
                calls_dropped_midway_never_answer_another
                a_call_that_is_not_polled_holds_nobody_up
            }
            waiting {
                no_end_is_missed_by_those_who_wait
                a_wait_for_what_is_no_longer_so_ends_at_once
                a_heartbeat_calls_nobody_who_waits
                an_erased_key_ends_the_wait
                waits_that_are_given_up_take_nothing_from_others
            }
            values {
                every_field_of_a_record_is_kept
                random_records_are_kept
                empty_output_is_not_absent
                an_output_of_a_mebibyte_is_kept_byte_for_byte
                odd_keys_are_kept_apart
                keys_are_compared_byte_by_byte
                an_unreadable_record_is_an_error_that_names_its_key
                a_record_of_a_newer_format_is_an_error_of_its_own
                what_cannot_be_read_is_never_overwritten
            }
            scan {
                an_empty_store_is_walked_to_an_end
                a_walk_sees_every_record_once
                a_walk_misses_nothing_while_others_write
                a_page_is_bounded
                a_walk_goes_on_from_its_cursor
                a_cursor_is_short_and_of_one_line
                a_foreign_cursor_is_refused
                a_walk_keeps_to_namespace_and_handler
                a_walk_keeps_to_its_states
                a_prefix_of_ids_is_taken_literally
                a_walk_keeps_to_an_age
                an_unreadable_record_is_a_row_with_its_error
            }
            listed {
                what_failed_died_or_was_parked_is_listed
                a_running_task_is_listed_from_its_heartbeat_on
                what_is_no_longer_so_is_not_listed
                what_a_takeover_made_of_a_task_is_listed
                a_listed_walk_keeps_to_its_filter
                a_listed_walk_is_paged
                a_listed_walk_misses_nothing_while_others_write
                an_unreadable_record_is_listed_with_its_error
                a_listed_walk_that_admits_done_sees_everything
            }
            processes {
                what_a_process_publishes_is_read_by_others
                what_a_process_says_takes_the_place_of_what_it_said
                what_a_process_said_expires_unless_it_is_said_again
                what_processes_said_that_ended_is_removed_by_others
                a_summary_has_bounds
            }
            purge {
                final_records_are_purged_past_their_retention
                final_records_stay_for_their_retention
                purge_never_touches_running_waiting_or_parked
                purge_works_in_bounded_batches
                an_expired_output_leaves_the_task_done
                purged_keys_never_reuse_a_token
                a_purged_task_runs_again_from_the_beginning
                a_clock_that_went_back_purges_nothing
                retention_is_extended_when_less_than_half_is_left
                an_extended_record_keeps_its_age
            }
            clock {
                the_age_grows_by_the_clock_of_the_store
                the_age_begins_again_with_every_write
                a_lease_frees_its_key_when_it_has_passed_and_not_before
                a_small_step_back_of_the_clock_keeps_the_claim
                a_clock_that_went_back_by_more_than_a_lease_frees_the_claim
                the_clock_of_a_worker_frees_nothing
                a_worker_starts_no_effect_past_its_own_deadline
                a_clock_that_goes_wrong_never_completes_a_task_twice
            }
            claims {
                of_many_claims_at_once_exactly_one_runs
                of_many_takeovers_at_once_exactly_one_runs
                a_takeover_supersedes_the_stale_claim
                a_repeated_claim_recognises_itself
                a_claim_whose_answer_was_lost_is_released_by_its_id
                a_claim_whose_future_is_dropped_is_released_by_its_id
                a_release_by_claim_id_leaves_other_claims_alone
                a_failed_claim_call_counts_no_attempt
                a_heartbeat_keeps_the_claim_however_long_it_runs
                a_late_heartbeat_cannot_reopen_a_completed_task
                a_heartbeat_never_recreates_a_record
                one_failed_heartbeat_does_not_lose_the_claim
                a_heartbeat_whose_answer_was_lost_is_adopted
                a_lost_claim_is_told_to_its_handler
                attempts_are_counted_in_the_record_across_copies
                a_silent_last_attempt_is_recorded
                a_crash_is_a_counted_attempt_retried_by_the_same_rules
                crashes_used_up_park_the_task
                an_unrepeatable_crash_is_parked
                calls_of_the_store_are_counted_and_few
                settings_belong_to_the_operation
            }
            ends {
                a_duplicate_never_sees_done_before_completion
                a_completion_whose_answer_was_lost_is_recognised
                a_completion_is_recognised_after_its_retention_was_extended
                a_completion_is_tried_again_until_it_is_stored
                a_completion_adopts_the_token_of_its_own_heartbeat
                a_completion_that_has_begun_is_finished
                what_was_decided_first_is_written
                a_late_completion_is_accepted_when_unchallenged
                a_late_completion_is_refused_after_a_takeover
                every_end_of_a_stale_claim_is_refused
                a_takeover_never_reopens_a_task_that_completed_meanwhile
                claimed_is_not_done
                a_failed_attempt_waits_for_its_backoff
                the_delay_is_judged_inside_the_claim
                a_permanent_failure_is_dead_at_once
                the_last_failed_attempt_is_dead
                a_class_of_failure_has_its_own_last_attempt
                a_retry_keeps_its_record
                an_unrepeatable_failure_is_parked_unless_nothing_happened
                a_release_does_not_count_the_attempt
                a_release_after_entering_is_a_failed_attempt
                a_claim_dropped_before_its_handler_is_released
                a_claim_lost_before_its_handler_is_released_when_dropped
                a_claim_dropped_inside_its_handler_is_a_failed_attempt
                a_refused_end_leaves_nothing_to_do
                history_is_bounded_and_counts_what_it_dropped
            }
            steps {
                a_step_is_kept_for_the_next_attempt
                a_takeover_carries_the_steps
                a_release_carries_the_steps
                a_lost_claim_cannot_record_a_step
                a_claim_whose_end_is_under_way_records_no_step
                a_step_renews_the_lease
                a_step_takes_one_call_of_the_store
                heartbeats_beside_steps_lose_neither
                a_step_whose_answer_was_lost_is_recorded_once
                a_step_that_was_stored_unanswered_outlives_the_end_of_its_claim
                a_late_answer_to_a_heartbeat_brings_back_no_older_step
                a_step_in_doubt_parks_where_no_attempt_is_left
                a_done_task_keeps_its_steps_without_what_they_returned
                a_redrive_keeps_the_steps
                a_person_says_of_a_step_in_doubt_that_nothing_happened
                a_person_says_of_a_step_in_doubt_that_it_took_effect
                only_a_step_in_doubt_is_resolved_as_done
                only_the_step_that_a_person_names_is_resolved
                a_cleared_task_has_no_steps
                a_mebibyte_of_steps_is_kept
            }
            answers {
                a_busy_answer_shows_the_holder_and_what_is_left
                a_waiting_answer_shows_the_reason_and_what_is_left
                a_replay_tells_attempt_age_and_owner_of_the_run
                the_fingerprint_outlives_completion
                a_mismatch_never_runs_and_never_replays
                a_dead_task_is_answered_as_dead_with_its_reason
                a_parked_task_is_answered_as_parked
                contradictory_policies_are_refused_before_anything_is_asked
                an_effect_that_needs_memory_is_refused_on_a_store_that_may_forget
            }
            outputs {
                falsy_outputs_replay_faithfully
                an_output_that_is_too_large_leaves_the_task_done_without_it
                an_unwanted_output_is_dropped_and_said_so
                the_cache_answers_without_the_store
                a_cached_answer_lives_no_longer_than_its_record
                a_cached_answer_lives_no_longer_than_its_output
                only_done_is_cached
                a_cached_record_answers_no_other_payload
                a_cleared_task_runs_again_for_the_process_that_cleared_it
            }
            people {
                a_redrive_resets_counters_and_keeps_history
                a_redriven_task_is_not_completed_by_its_old_holder
                a_running_task_is_redriven_only_after_its_lease
                a_redrive_of_an_unrepeatable_crash_parks_it
                a_waiting_task_can_be_redriven_at_once
                a_record_that_went_while_it_was_cleared_is_cleared
                a_done_task_cannot_be_redriven
                a_parked_task_can_be_resolved_as_done
                a_parked_task_can_be_resolved_as_not_done
                only_a_parked_task_can_be_resolved
                clearing_leaves_a_note
                a_damaged_record_can_be_cleared
                only_what_is_damaged_is_discarded
                a_clear_whose_answer_was_lost_is_recognised
                a_clear_of_what_is_damaged_whose_answer_was_lost_leaves_its_note
                a_cleared_holder_learns_that_its_claim_is_lost
                a_change_of_what_is_not_there_is_an_error
            }
            stories {
                a_lease_ends_and_another_takes_over
                a_heartbeat_keeps_others_out
                a_failure_waits_and_is_tried_again
                a_task_runs_out_of_attempts
                a_task_kills_its_workers_and_is_parked
                an_unrepeatable_effect_ends_in_doubt
                a_stopped_worker_comes_back_too_late
                a_stopped_worker_comes_back_unchallenged
                a_lost_answer_is_asked_again
                a_dropped_claim_is_cleaned_up
                a_dead_task_is_redriven
                a_parked_task_is_resolved
                a_record_is_cleared_under_its_holder
                one_key_comes_with_two_payloads
                copies_share_one_count_of_attempts
                a_release_costs_nothing
            }
            histories {
                random_histories_agree_with_the_model
                random_histories_with_lost_answers_agree_with_the_model
                random_histories_of_unrepeatable_effects_agree_with_the_model
            }
        }
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __list {
    (() $($topic:ident { $($name:ident)+ })+) => {
        /// Every case, in the order in which a store's author meets them.
        pub const CASES: &[Case] = &[
            $($(Case {
                name: stringify!($name),
                topic: stringify!($topic),
                play: |stage| Box::pin($topic::$name(stage)),
            },)+)+
        ];
    };
}

crate::__each_case!(__list);

/// How often a case looks whether a call under way has reached the store.
const LOOKS_MAX: usize = 10_000;

/// Polls a call that never ends until it was begun and, if `reached` says so, the store has done what it was asked. Then
/// the call is dropped.
async fn abandon<T>(call: impl Future<Output = T>, reached: impl AsyncFn() -> bool) {
    tokio::select! {
        biased;
        _ = call => panic!("the call never ends"),
        () = async {
            for _ in 0..LOOKS_MAX {
                if reached().await {
                    return;
                }
            }
            panic!("the call does not reach the store");
        } => {}
    }
}

/// The claim of an admission that runs.
#[track_caller]
pub(crate) fn run(admission: Admission) -> Claim {
    match admission {
        Admission::Run(claim) => claim,
        other => panic!("the task runs; the answer was {other:?}"),
    }
}

/// What was seen by a claim that does not run.
#[track_caller]
pub(crate) fn seen(admission: Admission, wanted: &str) -> Seen {
    assert_eq!(word(&admission), wanted, "{admission:?}");
    match admission {
        Admission::Run(_) => panic!("a claim that runs has seen nothing"),
        Admission::Replay(seen)
        | Admission::Busy(seen)
        | Admission::Waiting(seen)
        | Admission::Dead(seen)
        | Admission::Parked(seen)
        | Admission::Mismatch { seen, .. } => seen,
    }
}

/// The word for an admission.
pub(crate) fn word(admission: &Admission) -> &'static str {
    match admission {
        Admission::Run(_) => "run",
        Admission::Replay(_) => "replay",
        Admission::Busy(_) => "busy",
        Admission::Waiting(_) => "waiting",
        Admission::Dead(_) => "dead",
        Admission::Parked(_) => "parked",
        Admission::Mismatch { .. } => "mismatch",
    }
}

/// The record that the end of a claim stored.
#[track_caller]
pub(crate) fn recorded(settled: Result<Settled, Unsettled>) -> Arc<Record> {
    match settled {
        Ok(Settled::Recorded(record)) => record,
        other => panic!("the end is recorded; it was {other:?}"),
    }
}

/// Demands that the end of a claim was refused.
#[track_caller]
fn refused(settled: Result<Settled, Unsettled>) {
    assert!(matches!(settled, Ok(Settled::Lost(_))), "the end is refused; it was {settled:?}");
}

/// The error of an end whose outcome is unknown.
#[track_caller]
fn unsettled(settled: Result<Settled, Unsettled>) -> Unsettled {
    match settled {
        Err(unsettled) => unsettled,
        Ok(settled) => panic!("the outcome is unknown; it was {settled:?}"),
    }
}

/// Demands that a swap was stored, and returns its fence.
#[track_caller]
fn stored(swap: Swap) -> Fence {
    match swap {
        Swap::Stored(fence) => fence,
        Swap::Conflict(found) | Swap::Locked(found) => panic!("the swap is stored; there was {found:?}"),
    }
}

/// What a refused swap was shown.
#[track_caller]
fn conflict(swap: Swap) -> Option<Found> {
    match &swap {
        Swap::Conflict(found) => found.clone(),
        Swap::Stored(_) | Swap::Locked(_) => panic!("the swap is refused; it was {swap:?}"),
    }
}

/// What a key holds.
async fn load(stage: &Stage, key: &Key) -> Found {
    stage.store().load(key).await.unwrap().unwrap_or_else(|| panic!("`{key}` holds a record"))
}
