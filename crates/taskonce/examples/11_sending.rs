//! Sending: a key that is made once, and what a sender is told of a task that is queued, done, or another one under its key.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::time::Duration;

use taskonce::send::{Entered, Id, NewTask, Sender, tick_before};
use taskonce::source::Want;
use taskonce::store::record::WallTime;
use taskonce::{Effect, Failure, Fields, Handler, Name, Policy, Run};

#[tokio::main]
async fn main() -> taskonce::Result<()> {
    let ledger = taskonce::open("sqlite:tasks.db")?;
    let queue = taskonce::source::open("sqlite:queue.db")?;
    let sender = Sender::new(queue.clone()).once().asking(ledger.clone());
    let charge = Handler::within("shop", "charge", "2")?;

    // Only the invoice makes the key: a retry of the producer is the same task, whenever it is sent.
    let fields = Fields::new(["/invoice"])?;
    let invoice =
        |sent: u32| NewTask::json(&charge, Id::Derived(&fields), format!(r#"{{"invoice": 42, "sent": {sent}}}"#));
    for sent in 1..=2 {
        println!("sent {sent}: {}", sender.send(&invoice(sent)?).await?.name());
    }

    // A worker does this: docs/worker.md.
    for delivery in queue.receive(&[Want { handler: "charge@2".into(), max: 10 }], 10, Duration::from_secs(1)).await? {
        let run = async |_context| Ok::<_, Failure>(());
        let _outcome = ledger.run(invoice(3)?.task(), &Policy::new(Effect::Keyed), run).await?;
        let _settled = queue.acknowledge(&delivery.receipt).await?;
    }
    match sender.send(&invoice(4)?).await? {
        Entered::AlreadyDone { known, .. } => println!("sent 4: {}, in attempt {}", known.state, known.attempt),
        other => println!("sent 4: {}", other.name()),
    }

    // Each tick of a schedule is one task, however many hosts send it.
    let (nightly, hour) = (Name::new("nightly")?, Duration::from_secs(3600));
    for minute in [0, 1] {
        let tick = tick_before(WallTime(1_796_004_000_000 + minute * 60_000), hour);
        let report = NewTask::json(&charge, Id::Tick { schedule: &nightly, tick }, "{}")?;
        println!("{}: {}", report.key().id(), sender.send(&report).await?.name());
    }

    // An id of one's own stands for its whole payload.
    let own = |amount: u32| NewTask::json(&charge, Id::Given("invoice-7"), format!(r#"{{"amount": {amount}}}"#));
    let _outcome =
        ledger.run(own(12)?.task(), &Policy::new(Effect::Keyed), async |_context| Ok::<_, Failure>(())).await?;
    println!("another amount: {}", sender.send(&own(13)?).await?.name());
    Ok(())
}

// Output:
// sent 1: accepted
// sent 2: already_queued
// sent 4: done, in attempt 1
// nightly/2026-11-30T02:00:00Z: accepted
// nightly/2026-11-30T02:00:00Z: already_queued
// another amount: mismatch
