//! From a queue: each task was sent twice and takes effect once, and one that cannot succeed goes to the dead letters.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::time::Duration;

use taskonce::source::{DeadFilter, Death, Delivery, Depth, Entrance, Envelope, Want};
use taskonce::{Effect, Failure, Handler, Input, Key, Outcome, Policy, Run, Settlement, Task};

const HANDLER: &str = "charge@2";

#[tokio::main]
async fn main() -> taskonce::Result<()> {
    let ledger = taskonce::open("sqlite:tasks.db")?;
    let queue = taskonce::source::open("sqlite:queue.db")?;
    let charge = Handler::within("shop", "charge", "2")?;
    let policy = Policy::new(Effect::Keyed);

    // The key is made when the task is made, and travels with it.
    for (invoice, amount) in [("invoice-1", 1200), ("invoice-2", 0)] {
        let key = charge.key(invoice)?.to_string();
        let task = Envelope { key: Some(key), ..Envelope::new(HANDLER, format!("{{\"amount\": {amount}}}")) };
        for _copy in 0..2 {
            let _sent = queue.send(&task, Duration::ZERO, Entrance::Open).await?;
        }
    }

    let wants = [Want { handler: HANDLER.into(), max: 10 }];
    for delivery in queue.receive(&wants, 10, Duration::from_secs(1)).await? {
        let task = task_of(&delivery)?;
        let is_free = delivery.envelope.payload.ends_with(b": 0}");
        let outcome = ledger
            .run(&task, &policy, |_context| async move {
                if is_free { Err(Failure::permanent("the amount is zero")) } else { Ok("charged".to_owned()) }
            })
            .await?;
        println!("{}: {}", task.key.id(), outcome.name());
        // Its record is written by now, so that the delivery can be settled.
        let _settled = match outcome.settlement() {
            Settlement::Acknowledge => queue.acknowledge(&delivery.receipt).await?,
            Settlement::Defer(delay) => queue.defer(&delivery.receipt, delay).await?,
            Settlement::DeadLetter(reason) => {
                let message = match &outcome {
                    Outcome::Failed { failure, .. } => failure.message.clone(),
                    _ => String::new(),
                };
                let death = Death { id: format!("{reason}/{}", task.key), reason: reason.into(), message };
                queue.dead_letter(&delivery.receipt, &death).await?
            }
        };
    }

    for dead in queue.dead_letters(&DeadFilter::default(), None).await?.lines {
        println!("dead letter {}: {}, {}", dead.death.id, dead.death.reason, dead.death.message);
    }
    let depth = Depth::total(&queue.depth().await?);
    println!("{} ready, {} in flight, {} dead", depth.ready, depth.in_flight, depth.dead);
    Ok(())
}

/// The task that a delivery brings: its key, and the fingerprint of its payload.
fn task_of(delivery: &Delivery) -> taskonce::Result<Task> {
    let key = Key::parse(delivery.envelope.key.as_deref().unwrap_or_default())?;
    Handler::within(key.namespace(), key.handler(), key.version())?
        .task(key.id(), &Input::from_json(&delivery.envelope.payload)?)
}

// Output:
// invoice-1: ran
// invoice-1: replayed
// invoice-2: failed
// invoice-2: dead
// dead letter dead/shop/charge@2/invoice-2: dead, the amount is zero
// 0 ready, 0 in flight, 1 dead
