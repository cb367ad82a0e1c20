//! What a worker does when it is told to stop.

use std::sync::Arc;
use std::time::Duration;

use taskonce::State;
use tokio::sync::Semaphore;

use crate::stage::{CHARGE, Gauge, Order, Stage, on_both, start, until};

on_both!(mod memory and mod sqlite:
    a_stop_lets_what_runs_end_and_counts_no_attempt_for_what_waits,
    what_runs_beyond_the_grace_period_is_cut_off_and_counted,
    a_handler_that_panics_has_failed_an_attempt,
);

pub(crate) async fn a_stop_lets_what_runs_end_and_counts_no_attempt_for_what_waits(stage: Stage) {
    const QUEUED: usize = 1000;
    const RUNNING: usize = 64;
    stage.send_many(QUEUED, 1).await;
    let (effects, gate, gauge) = (stage.effects.clone(), Arc::new(Semaphore::new(0)), Arc::new(Gauge::default()));
    let (held, entered) = (Arc::clone(&gate), Arc::clone(&gauge));
    let worker = stage
        .worker(Stage::settings())
        .concurrency_max(RUNNING)
        .handler(CHARGE, move |_context, order: Order| {
            let (effects, held, entered) = (effects.clone(), Arc::clone(&held), Arc::clone(&entered));
            async move {
                entered.up();
                held.acquire().await.unwrap().forget();
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("all that may run do", || gauge.now() == RUNNING).await;
    let report = running.stop();
    gate.add_permits(QUEUED);
    let report = report.await.unwrap();
    assert!(report.is_clean(), "{report}");
    stage.effects.are_once(stage.effects.count());
    let (ran, depth) = (stage.effects.count(), stage.depth().await);
    // One that was received in the moment of the stop may come back only after its visibility timeout.
    assert_eq!((ran >= RUNNING, depth.ready + depth.in_flight), (true, (QUEUED - ran) as u64), "{depth:?}");
    let mut records = 0;
    for number in 0..QUEUED {
        if let Some(found) = stage.record(&format!("order-{number}")).await {
            assert_eq!((found.record.state, found.record.attempt), (State::Done, 1));
            records += 1;
        }
    }
    assert_eq!(records, ran, "nothing is recorded of what was not entered");
    // The next worker has all the others.
    let next = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    stage.effects.are_once(QUEUED);
    next.end().await;
}

pub(crate) async fn what_runs_beyond_the_grace_period_is_cut_off_and_counted(stage: Stage) {
    stage.send("quick").await;
    stage.send("endless").await;
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Stage::settings())
        .grace(Duration::from_millis(100))
        .handler(CHARGE, move |_context, order: Order| {
            let effects = effects.clone();
            async move {
                effects.happen(&order.id);
                if order.id == "endless" {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("both are entered", || stage.effects.count() == 2).await;
    until("the quick one is done", || running.count("completed") == 1).await;
    let report = running.end().await;
    assert_eq!((report.cut_off, report.is_finished, report.is_clean()), (1, true, false), "{report}");
    let record = stage.record("endless").await.unwrap().record;
    assert_eq!((record.state, record.attempt), (State::Waiting, 1), "a failed attempt, to be followed by another");
    let next = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    assert_eq!(stage.effects.of("endless"), 2);
    next.end().await;
}

async fn a_handler_that_panics_has_failed_an_attempt(stage: Stage) {
    stage.send("a").await;
    stage.send("b").await;
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Stage::settings())
        .handler(CHARGE, move |context, order: Order| {
            let effects = effects.clone();
            async move {
                assert!(order.id == "b" || context.attempt() > 1, "planted");
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    stage.effects.are_once(2);
    let report = running.end().await;
    assert!(report.is_clean(), "{report}");
    assert_eq!(stage.record("a").await.unwrap().record.attempt, 2);
}
