//! A payment that is booked in the transaction that completes its task. The first worker is killed in the middle of it: nothing
//! of it is left, the next one books it, and a late copy of the delivery gets its receipt.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::process::Command;
use std::time::Duration;

use taskonce::sqlite::RunInTransaction;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::{Effect, Failure, Handler, Input, Ledger, Outcome, Policy, Task};

/// The ledger's file, which holds the shop's own tables too: that is why both commit together.
const FILE: &str = "shop.db";
/// How long a claim holds. A second, so that the example need not wait for long; the default is 30 s.
const LEASE: Duration = Duration::from_secs(1);
/// How long a worker waits for a task that another holds.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// What tells this program that it is the worker which is killed.
const DOOMED: &str = "doomed";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ledger = taskonce::open(&format!("sqlite:{FILE}"))?;
    let task = Handler::new("pay", "1")?.task("invoice-42", &Input::from_json(br#"{"cents": 1200}"#)?)?;
    if std::env::args().nth(1).as_deref() == Some(DOOMED) {
        let survived = pay(&ledger, &task, Luck::Killed).await?;
        return Err(format!("it should have been killed: {}", survived.name()).into());
    }
    Connection::open(FILE)?.execute_batch("CREATE TABLE payment (invoice TEXT NOT NULL, cents INTEGER NOT NULL)")?;

    let ended = Command::new(std::env::current_exe()?).arg(DOOMED).status()?;
    let found = ledger.show(&task.key).await?.ok_or("the first worker claimed the task")?;
    println!("first worker: killed in its transaction: {}", ended.code().is_none());
    println!("  payments: {}, the task is {}", payments()?, found.record.state);

    for delivery in ["second worker", "late copy"] {
        match pay(&ledger, &task, Luck::Good).await? {
            Outcome::Ran { value, record } => println!("{delivery}: ran as attempt {}: {value}", record.attempt),
            Outcome::Replayed(first) => println!("{delivery}: replayed: {}", first.value.unwrap_or_default()),
            other => return Err(format!("{delivery}: {}", other.name()).into()),
        }
        println!("  payments: {}", payments()?);
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Luck {
    Good,
    Killed,
}

/// Handles one delivery.
async fn pay(ledger: &Ledger, task: &Task, luck: Luck) -> taskonce::Result<Outcome<String>> {
    let policy = Policy { lease: LEASE, ..Policy::new(Effect::Transactional) };
    ledger
        .run_in_transaction_or_wait(task, &policy, WAIT_MAX, move |tx, _context| {
            tx.execute("INSERT INTO payment (invoice, cents) VALUES ('invoice-42', 1200)", ())?;
            if luck == Luck::Killed {
                // As `kill -9` does it: no destructor runs.
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
            }
            Ok::<_, Failure>("receipt for invoice-42".to_owned())
        })
        .await
}

fn payments() -> Result<i64, Box<dyn std::error::Error>> {
    Ok(Connection::open(FILE)?.query_row("SELECT count(*) FROM payment", [], |row| row.get(0))?)
}

// Output:
// first worker: killed in its transaction: true
//   payments: 0, the task is running
// second worker: ran as attempt 2: receipt for invoice-42
//   payments: 1
// late copy: replayed: receipt for invoice-42
//   payments: 1
