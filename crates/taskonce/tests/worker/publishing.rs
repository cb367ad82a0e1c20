//! How a worker stands, as others read it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use taskonce::{Failure, Process};

use crate::stage::{CHARGE, Order, PATIENCE, Stage, on_both, start};

on_both!(mod memory and mod sqlite: a_worker_says_how_it_stands_until_it_ends);

/// Waits until what is said is so.
async fn said(stage: &Stage, what: &str, is_so: impl Fn(&Value) -> bool) -> Process {
    let began = Instant::now();
    loop {
        let processes = stage.ledger.processes().await.unwrap();
        let found = processes
            .into_iter()
            .find(|process| serde_json::from_slice(&process.summary).is_ok_and(|said| is_so(&said)));
        if let Some(process) = found {
            return process;
        }
        assert!(began.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn a_worker_says_how_it_stands_until_it_ends(stage: Stage) {
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let waits = Arc::clone(&gate);
    let worker =
        stage.worker(Stage::settings()).publish_every(Duration::ZERO).handler(CHARGE, move |_context, order: Order| {
            let waits = Arc::clone(&waits);
            async move {
                if order.id == "held" {
                    waits.acquire().await.map_err(|_| Failure::retryable("the test has ended"))?.forget();
                }
                Ok(())
            }
        });
    let running = start(worker.build().unwrap());
    for id in ["a", "b", "held"] {
        stage.send(id).await;
    }
    let process =
        said(&stage, "two are done and one runs", |said| said["running"] == 1 && said["counts"]["completed"] == 2)
            .await;
    assert_eq!(*process.name, *stage.ledger.host().owner());
    let text = String::from_utf8(process.summary).unwrap();
    let told: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&told["routes"][0]["route"], &told["store_away"]), (&json!("queue × charge@2"), &json!(false)));
    assert!(!text.contains("held"), "no key is told: {text}");
    gate.add_permits(1);
    said(&stage, "nothing runs", |said| said["running"] == 0 && said["counts"]["completed"] == 3).await;
    let report = running.end().await;
    assert!(report.is_clean(), "{report}");
    assert_eq!(stage.ledger.processes().await.unwrap(), [], "who ended is not shown");
}
