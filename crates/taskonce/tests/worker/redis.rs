//! What the worker promises, with queue and records in one Redis server.

use crate::stage::{Kind, Stage};

macro_rules! on_redis {
    ($($module:ident::$name:ident),+ $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            crate::$module::$name(Stage::new(Kind::Redis)).await;
        })+
    };
}

on_redis!(
    settling::each_of_many_duplicates_takes_effect_once,
    settling::a_failed_task_comes_again_after_its_backoff,
    settling::a_task_without_further_attempts_is_one_dead_letter_and_a_person_takes_it_back,
    settling::what_cannot_be_read_goes_to_the_dead_letters_with_its_reason,
    draining::a_stop_lets_what_runs_end_and_counts_no_attempt_for_what_waits,
    draining::what_runs_beyond_the_grace_period_is_cut_off_and_counted,
    load::a_rolling_restart_of_four_workers_loses_and_doubles_nothing,
    load::a_source_that_goes_away_while_tasks_run_doubles_and_loses_nothing,
    bounds::a_route_with_a_backlog_holds_up_no_other,
    bounds::an_idle_worker_asks_twice_a_second_at_most,
    sending::a_sender_is_told_what_is_queued_and_what_is_done,
    sending::a_sender_is_told_what_is_dead_and_what_a_redrive_makes_of_it,
    sending::a_retry_keeps_its_record_and_its_place_in_the_queue,
);
