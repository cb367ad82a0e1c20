//! What becomes of failures: retried with a delay, dead after the last attempt, parked when in doubt; and how a person
//! brings a task back.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use taskonce::{Backoff, By, Effect, Failure, Handler, Input, Outcome, Policy, Run};

#[tokio::main]
async fn main() -> taskonce::Result<()> {
    let ledger = taskonce::open("sqlite:tasks.db")?;
    let mail = Handler::new("mail", "1")?;
    let payload = Input::from_json(br#"{"to": "ann"}"#)?;

    // Repeating is harmless, so a failure is tried again, here without a delay and twice at most.
    let report = mail.task("report-1", &payload)?;
    let repeatable = Policy { attempts_max: 2, backoff: Backoff::NONE, ..Policy::new(Effect::Repeatable) };
    for _delivery in 0..3 {
        let outcome =
            ledger.run(&report, &repeatable, |_| async { Err::<(), _>(Failure::retryable("no route")) }).await?;
        match outcome {
            Outcome::Failed { record: Some(record), .. } => {
                println!("attempt {} failed: {}", record.attempt, record.state)
            }
            other => println!("{}", other.name()),
        }
    }

    // A mail must not be sent twice: a failure in doubt is parked for a person.
    let letter = mail.task("letter-1", &payload)?;
    let once = Policy::new(Effect::Unrepeatable);
    let outcome = ledger.run(&letter, &once, |_| async { Err::<(), _>(Failure::retryable("timed out")) }).await?;
    println!("in doubt: {}", state(outcome));

    // Ann has looked: the mail did not go out.
    let by = By { who: "ann", why: "not in the provider's log" };
    ledger.resolve_not_done(&letter.key, by).await?;
    let outcome = ledger.run(&letter, &once, |context| async move { Ok::<_, Failure>(context.attempt()) }).await?;
    println!("after a person resolved it: {}", outcome.name());

    let record = ledger.show(&letter.key).await?.map(|found| found.record);
    for event in record.iter().flat_map(|record| &record.history) {
        println!("{}: {}", event.kind.name(), event.note);
    }
    Ok(())
}

fn state(outcome: Outcome<()>) -> String {
    match outcome {
        Outcome::Failed { record: Some(record), .. } => record.state.to_string(),
        other => other.name().to_owned(),
    }
}

// Output:
// attempt 1 failed: waiting
// attempt 2 failed: dead
// dead
// in doubt: parked
// after a person resolved it: ran
// retryable: timed out
// resolved_not_done: not in the provider's log
