//! A payment on PostgreSQL, booked in the transaction that completes its task. The first worker is killed in the middle of it:
//! nothing of it is left, the next one books it, and a late copy of the delivery gets its receipt.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::process::Command;
use std::time::Duration;

use taskonce::postgres::RunInTransaction as _;
use taskonce::postgres::tokio_postgres::{Client, NoTls, connect};
use taskonce::{Effect, Handler, Input, Ledger, Outcome, Policy, Task};
use taskonce_testkit::PostgresServer;

/// How long a claim holds. A second, so that the example need not wait for long; the default is 30 s.
const LEASE: Duration = Duration::from_secs(1);
/// How long a worker waits for a task that another holds.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Where the worker finds the database that is to be killed.
const DOOMED: &str = "EXAMPLE_DATABASE";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let task = Handler::within("billing", "pay", "1")?.task("invoice-42", &Input::from_json(br#"{"cents": 1200}"#)?)?;
    if let Ok(url) = std::env::var(DOOMED) {
        let survived = pay(&taskonce::open(&url)?, &mut client(&url).await?, &task, Luck::Killed).await?;
        return Err(format!("it should have been killed, and {}", survived.name()).into());
    }
    // A server of this example's own; yours is there already.
    let server = PostgresServer::start(&[])?;
    let url = server.url("postgres");
    taskonce::migrate(&url).await?;
    let mut client = client(&url).await?;
    client.batch_execute("create table payment (invoice text not null, cents int not null)").await?;
    let ledger = taskonce::open(&url)?;

    let ended = Command::new(std::env::current_exe()?).env(DOOMED, &url).status()?;
    let found = ledger.show(&task.key).await?.ok_or("the first worker claimed the task")?;
    println!("first worker: killed in its transaction: {}", ended.code().is_none());
    println!("  payments: {}, the task is {}", payments(&client).await?, found.record.state);

    for delivery in ["second worker", "late copy"] {
        match pay(&ledger, &mut client, &task, Luck::Good).await? {
            Outcome::Ran { value, record } => println!("{delivery}: ran as attempt {}: {value}", record.attempt),
            Outcome::Replayed(first) => println!("{delivery}: replayed: {}", first.value.unwrap_or_default()),
            other => return Err(format!("{delivery}: {}", other.name()).into()),
        }
        println!("  payments: {}", payments(&client).await?);
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Luck {
    Good,
    Killed,
}

/// Handles one delivery.
async fn pay(ledger: &Ledger, client: &mut Client, task: &Task, luck: Luck) -> taskonce::Result<Outcome<String>> {
    let policy = Policy { lease: LEASE, ..Policy::new(Effect::Transactional) };
    ledger
        .run_in_transaction_or_wait(client, task, &policy, WAIT_MAX, |tx, context| {
            Box::pin(async move {
                let invoice = context.key().id();
                tx.execute("insert into payment (invoice, cents) values ($1, 1200)", &[&invoice]).await?;
                if luck == Luck::Killed {
                    // As `kill -9` does it: no destructor runs.
                    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                }
                Ok(format!("receipt for {invoice}"))
            })
        })
        .await
}

async fn client(url: &str) -> Result<Client, Box<dyn std::error::Error>> {
    let (client, connection) = connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn payments(client: &Client) -> Result<i64, Box<dyn std::error::Error>> {
    Ok(client.query_one("select count(*) from payment", &[]).await?.get(0))
}

// Output:
// first worker: killed in its transaction: true
//   payments: 0, the task is running
// second worker: ran as attempt 2: receipt for invoice-42
//   payments: 1
// late copy: replayed: receipt for invoice-42
//   payments: 1
