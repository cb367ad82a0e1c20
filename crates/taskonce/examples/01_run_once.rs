//! One task, delivered three times: it runs once, and the duplicates get the first run's value.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use taskonce::{Effect, Failure, Handler, Input, Outcome, Policy, Run};

#[tokio::main]
async fn main() -> taskonce::Result<()> {
    let ledger = taskonce::open("sqlite:tasks.db")?;
    let charge = Handler::within("billing", "charge", "2")?;
    let task = charge.task("invoice-42", &Input::from_json(br#"{"amount": 1200}"#)?)?;
    let policy = Policy::new(Effect::Keyed);

    for _delivery in 0..3 {
        let outcome = ledger
            .run(&task, &policy, |context| async move {
                // A real handler gives this key to its provider, which deduplicates on it.
                let key = context.downstream_key("");
                Ok::<_, Failure>(format!("attempt {} charged with {key}", context.attempt()))
            })
            .await?;
        match outcome {
            Outcome::Ran { value, .. } => println!("ran: {value}"),
            Outcome::Replayed(first) => println!("replayed: {}", first.value.unwrap_or_default()),
            other => println!("come again: {}", other.name()),
        }
    }

    // Another payload under the same key is neither run nor replayed.
    let other = charge.task("invoice-42", &Input::from_json(br#"{"amount": 9999}"#)?)?;
    let outcome = ledger.run(&other, &policy, |_| async { Ok::<String, Failure>("never".into()) }).await?;
    println!("another payload: {}", outcome.name());
    Ok(())
}

// Output:
// ran: attempt 1 charged with 8a2a13e2-6953-8b06-85c1-96518828bfb8
// replayed: attempt 1 charged with 8a2a13e2-6953-8b06-85c1-96518828bfb8
// replayed: attempt 1 charged with 8a2a13e2-6953-8b06-85c1-96518828bfb8
// another payload: mismatch
