//! The traces: each text of `traces/` played on the store.

use crate::stage::Stage;
use crate::trace::{Trace, play};

macro_rules! stories {
    ($($name:ident)+) => {
        $(pub(super) async fn $name(stage: Stage) {
            tell(stage, include_str!(concat!("../../traces/", stringify!($name), ".trace"))).await;
        })+
    };
}

stories! {
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

async fn tell(stage: Stage, text: &str) {
    let trace = Trace::parse(text).unwrap_or_else(|error| panic!("{error}"));
    play(&trace, &stage).await.unwrap_or_else(|message| panic!("{} {message}", trace.title));
}
