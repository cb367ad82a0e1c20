//! Workers under load: restarted in turn, cut off from their source, with large payloads and with many routes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use taskonce::Output;
use taskonce::routes::Settings;
use taskonce::source::{Entrance, Envelope, Source as _};

use crate::stage::{AT_ONCE, CHARGE, Order, Stage, on_both, start, until};

on_both!(mod memory and mod sqlite:
    a_rolling_restart_of_four_workers_loses_and_doubles_nothing,
    a_source_that_goes_away_while_tasks_run_doubles_and_loses_nothing,
    a_payload_of_fifty_megabytes_arrives_whole,
);

pub(crate) async fn a_rolling_restart_of_four_workers_loses_and_doubles_nothing(stage: Stage) {
    const COUNT: usize = 400;
    stage.send_many(COUNT, 2).await;
    let worker = || {
        let effects = stage.effects.clone();
        let worker = stage
            .worker(Stage::settings())
            .concurrency_max(4)
            .handler(CHARGE, move |_context, order: Order| {
                let effects = effects.clone();
                async move {
                    // sleeps: so that some run when their worker is stopped
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    effects.happen(&order.id);
                    Ok(())
                }
            })
            .build()
            .unwrap();
        start(worker)
    };
    let mut workers: Vec<_> = (0..4).map(|_| worker()).collect();
    for round in 1..=4 {
        until("tasks are done", || stage.effects.count() >= round * COUNT / 8).await;
        let report = workers.remove(0).end().await;
        assert!(report.is_clean(), "{report}");
        workers.push(worker());
    }
    stage.is_worked_off().await;
    stage.effects.are_once(COUNT);
    assert_eq!(stage.dead().await, []);
    for worker in workers {
        worker.end().await;
    }
}

pub(crate) async fn a_source_that_goes_away_while_tasks_run_doubles_and_loses_nothing(stage: Stage) {
    const COUNT: usize = 200;
    stage.send_many(COUNT, 1).await;
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Settings { lease: Some(Duration::from_secs(8)), ..Stage::settings() })
        .concurrency_max(8)
        .handler(CHARGE, move |_context, order: Order| {
            let effects = effects.clone();
            async move {
                effects.happen(&order.id);
                // sleeps: so that some run when the source goes away
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    for round in 1..4 {
        until("tasks run", || stage.effects.count() >= round * 20).await;
        stage.source.is_away.store(true, Ordering::SeqCst);
        // sleeps: the source is away for so long
        tokio::time::sleep(Duration::from_millis(150)).await;
        stage.source.is_away.store(false, Ordering::SeqCst);
    }
    stage.is_worked_off().await;
    stage.effects.are_once(COUNT);
    let report = running.end().await;
    assert!(report.is_clean(), "{report}");
}

async fn a_payload_of_fifty_megabytes_arrives_whole(stage: Stage) {
    const BYTES: usize = 50_000_000;
    let envelope = Envelope {
        key: Some(Stage::key("large").to_string()),
        content_type: Some("application/octet-stream".into()),
        ..Envelope::new(CHARGE, vec![7; BYTES])
    };
    stage.source.send(&envelope, AT_ONCE, Entrance::Open).await.map(drop).unwrap();
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Stage::settings())
        .handler_of_bytes(CHARGE, move |context, envelope| {
            let effects = effects.clone();
            async move {
                assert!(envelope.payload.len() == BYTES && envelope.payload.iter().all(|byte| *byte == 7));
                effects.happen(context.key().id());
                Ok(Output::Nothing)
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    assert_eq!(stage.effects.of("large"), 1);
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_routes_are_served() {
    let stage = Stage::new(crate::stage::Kind::Memory);
    let names: Vec<String> = (0..10_000).map(|number| format!("h{number}@1")).collect();
    let handlers: Vec<_> = names.iter().map(|name| (name.as_str(), Stage::settings())).collect();
    let mut builder = stage.worker_of(&handlers);
    for name in &names {
        let effects = stage.effects.clone();
        builder = builder.handler(name, move |context, _order: Order| {
            effects.happen(context.key().handler());
            async { Ok(()) }
        });
    }
    let served = ["h0", "h7", "h4711", "h9999"];
    for name in served {
        for number in 0..5 {
            stage.send_raw(&format!("{name}@1"), Some(&number.to_string()), "{\"id\": \"a\"}").await;
        }
    }
    let running = start(builder.build().unwrap());
    stage.is_worked_off().await;
    running.end().await;
    assert_eq!(served.map(|name| stage.effects.of(name)), [5; 4]);
}
