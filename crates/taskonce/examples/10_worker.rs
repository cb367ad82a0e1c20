//! A worker: it takes deliveries from a queue, retries what fails, settles what is over, and drains when it is told to stop.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use taskonce::Failure;
use taskonce::routes::Routes;
use taskonce::source::{DeadFilter, Depth, Entrance, Envelope, Source};
use taskonce::worker::Worker;

const ROUTES: &str = r#"
[sources.queue]
[handlers."charge@2"]
effect = "keyed"
run_max = "30s"
attempts_max = 3
backoff_min = "50ms"
[routes.queue."charge@2"]
"#;

#[derive(Deserialize)]
struct Charge {
    invoice: String,
    amount: u64,
}

#[tokio::main]
async fn main() -> taskonce::Result<()> {
    let ledger = taskonce::open("sqlite:tasks.db")?;
    let queue = taskonce::source::open("sqlite:queue.db")?;
    for (invoice, amount) in [("invoice-1", 1200), ("invoice-2", 0), ("invoice-3", 700)] {
        let payload = format!(r#"{{"invoice": "{invoice}", "amount": {amount}}}"#);
        let task = Envelope { key: Some(format!("default/charge@2/{invoice}")), ..Envelope::new("charge@2", payload) };
        // Senders send again, and brokers deliver again.
        for _copy in 0..2 {
            let _sent = queue.send(&task, Duration::ZERO, Entrance::Open).await?;
        }
    }

    let worker = Worker::builder(ledger, Routes::from_toml(ROUTES)?)
        .source(Arc::clone(&queue))
        // One at a time, so that this example prints the same each time; 64 unless said otherwise.
        .concurrency_max(1)
        .handler("charge@2", |context, charge: Charge| async move {
            if charge.amount == 0 {
                return Err(Failure::permanent("the amount is zero"));
            }
            if charge.invoice == "invoice-3" && context.attempt() == 1 {
                println!("{}: the provider is away", charge.invoice);
                return Err(Failure::retryable("the provider is away"));
            }
            // The provider deduplicates on `context.downstream_key("")`, the same in every attempt.
            println!("{}: charged {} in attempt {}", charge.invoice, charge.amount, context.attempt());
            Ok(charge.amount)
        })
        .build()?;
    let report = worker.run_until(is_worked_off(&*queue)).await;

    for dead in queue.dead_letters(&DeadFilter::default(), None).await?.lines {
        println!("dead letter {}: {}", dead.death.id, dead.death.message);
    }
    for name in ["completed", "replayed", "failed"] {
        println!("{name}: {}", report.counts.of(name));
    }
    println!("{report}");
    Ok(())
}

/// Completes when nothing is left in the queue. A service stops on a signal instead.
async fn is_worked_off(queue: &dyn Source) {
    loop {
        let depth = queue.depth().await.map(|depths| Depth::total(&depths)).unwrap_or_default();
        if depth.ready + depth.deferred + depth.in_flight == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// Output:
// invoice-1: charged 1200 in attempt 1
// invoice-3: the provider is away
// invoice-3: charged 700 in attempt 2
// dead letter dead/default/charge@2/invoice-2: the amount is zero
// completed: 2
// replayed: 2
// failed: 1
// 0 tasks ended, 0 deliveries given back, 0 tasks cut off, 0 deliveries not settled
