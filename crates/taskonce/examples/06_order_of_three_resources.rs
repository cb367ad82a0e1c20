//! An order that changes three resources, a step each: a seat in the database, a charge over HTTP with a key that the provider
//! deduplicates on, and a mail that must not be sent twice. One worker is killed when the money is taken and that is not recorded
//! yet, another inside the sending of the mail.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use taskonce::sqlite::StepIn;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::{By, Context, Effect, Failure, Handler, Input, Ledger, Outcome, Policy, Run, Task};

/// The ledger's file, which holds the shop's own tables too: so a seat is booked and recorded in one transaction.
const FILE: &str = "shop.db";
/// The mails that were sent, a line each.
const OUTBOX: &str = "outbox.txt";
/// How long a claim holds. A second, so that the example need not wait for long; the default is 30 s.
const LEASE: Duration = Duration::from_secs(1);
/// How long a worker waits for a task that another holds, and a statement for the file's write lock.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Connections that the provider serves before the example ends.
const CALLS_MAX: usize = 16;

/// Where a worker is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dies {
    Not,
    Charged,
    Mailed,
}

type Anything<T> = Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Anything<()> {
    let ledger = taskonce::open(&format!("sqlite:{FILE}"))?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [provider, number, dies] = &args[..] {
        let dies = if dies == "charged" { Dies::Charged } else { Dies::Mailed };
        let survived = work(&ledger, number, provider.parse()?, dies).await?;
        return Err(format!("it should have been killed: {}", survived.name()).into());
    }
    shop()?.execute_batch("CREATE TABLE seat (place INTEGER PRIMARY KEY, order_number TEXT NOT NULL)")?;
    let provider = provider()?;

    println!("order 17, a worker is killed when the money was taken:");
    doomed(provider, "17", "charged")?;
    println!("the next worker:");
    println!("  {}", told(work(&ledger, "17", provider, Dies::Not).await?)?);

    println!("order 18, a worker is killed when the mail was sent:");
    doomed(provider, "18", "mailed")?;
    println!("the next worker:");
    println!("  {}", told(work(&ledger, "18", provider, Dies::Not).await?)?);
    println!("a person finds the mail in the outbox, and says so");
    let by = By { who: "eva", why: "it is in the outbox" };
    ledger.resolve_step_done(&task("18")?.key, by, Some("mail"), None).await?;
    println!("the next worker:");
    println!("  {}", told(work(&ledger, "18", provider, Dies::Not).await?)?);

    let seats: i64 = shop()?.query_row("SELECT count(*) FROM seat", [], |row| row.get(0))?;
    println!("seats: {seats}, mails: {}", fs::read_to_string(OUTBOX)?.lines().count());
    Ok(())
}

/// The handler: every run takes the same steps, and what ended in a run before is not done again.
async fn order(context: Context, number: String, provider: SocketAddr, dies: Dies) -> Result<String, Failure> {
    let seat: i64 = tokio::task::block_in_place(|| {
        let mut shop = shop()?;
        let tx = shop.transaction()?;
        let seat = context.step_in(&tx, "seat", |_| {
            println!("  books a seat");
            tx.execute("INSERT INTO seat (order_number) VALUES (?1)", [&number])?;
            Ok(tx.last_insert_rowid())
        })?;
        tx.commit()?;
        Ok::<_, Failure>(seat)
    })?;
    let charge: String = context
        .step_of("charge", Effect::Keyed)
        .input(&1200)
        .run(async |step| {
            println!("  asks the provider for the money");
            let charge = tokio::task::block_in_place(|| post(provider, &step.downstream_key().to_string()))?;
            die_if(dies == Dies::Charged)?;
            Ok(charge)
        })
        .await?;
    let mail = context.step("mail", Effect::Unrepeatable, async |_| {
        println!("  sends the mail");
        writeln!(OpenOptions::new().create(true).append(true).open(OUTBOX)?, "order {number}: {charge}")?;
        die_if(dies == Dies::Mailed)
    });
    mail.await?;
    Ok(format!("seat {seat}, {charge}"))
}

async fn work(ledger: &Ledger, number: &str, provider: SocketAddr, dies: Dies) -> Anything<Outcome<String>> {
    // Nothing has an effect outside of the steps, so that the task itself may run again.
    let policy = Policy { lease: LEASE, ..Policy::new(Effect::Repeatable) };
    let handler = |context| order(context, number.to_owned(), provider, dies);
    Ok(ledger.run_or_wait(&task(number)?, &policy, WAIT_MAX, handler).await?)
}

fn task(number: &str) -> taskonce::Result<Task> {
    Handler::new("order", "1")?.task(number, &Input::from_json(br#"{"cents": 1200}"#)?)
}

fn told(outcome: Outcome<String>) -> Anything<String> {
    match outcome {
        Outcome::Ran { value, record } => Ok(format!("done: {value}, with {} steps", record.steps.len())),
        Outcome::Failed { failure, record: Some(record) } => Ok(format!("{}: {}", record.state, failure.message)),
        other => Err(other.name().into()),
    }
}

fn shop() -> Result<Connection, taskonce::sqlite::rusqlite::Error> {
    let shop = Connection::open(FILE)?;
    shop.busy_timeout(WAIT_MAX)?;
    Ok(shop)
}

/// A worker of its own, which does not live to see the end of its task.
fn doomed(provider: SocketAddr, number: &str, dies: &str) -> Anything<()> {
    let ended = Command::new(std::env::current_exe()?).args([&provider.to_string(), number, dies]).status()?;
    println!("  killed: {}", ended.code().is_none());
    Ok(())
}

/// As `kill -9` does it: no destructor runs.
fn die_if(dies: bool) -> Result<(), Failure> {
    if dies {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    Ok(())
}

/// A provider of payments: one charge for each key, however often it is asked for.
fn provider() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        let mut charges: HashMap<String, usize> = HashMap::new();
        for mut stream in listener.incoming().take(CALLS_MAX).flatten() {
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let Some(key) = head.iter().find_map(|line| line.strip_prefix("Idempotency-Key: ")) else { continue };
            let next = charges.len() + 1;
            let charge = *charges.entry(key.to_owned()).or_insert(next);
            println!("    provider: {}", if charge == next { "takes the money" } else { "took it before" });
            // A client that was killed needs no answer.
            let _gone = write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ncharge {charge}");
        }
    });
    Ok(address)
}

fn post(provider: SocketAddr, key: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(provider)?;
    write!(
        stream,
        "POST /charges HTTP/1.1\r\nHost: {provider}\r\nContent-Length: 0\r\nIdempotency-Key: {key}\r\n\r\n"
    )?;
    let answer = std::io::read_to_string(stream)?;
    Ok(answer.lines().last().unwrap_or_default().to_owned())
}

// Output:
// order 17, a worker is killed when the money was taken:
//   books a seat
//   asks the provider for the money
//     provider: takes the money
//   killed: true
// the next worker:
//   asks the provider for the money
//     provider: took it before
//   sends the mail
//   done: seat 1, charge 1, with 3 steps
// order 18, a worker is killed when the mail was sent:
//   books a seat
//   asks the provider for the money
//     provider: takes the money
//   sends the mail
//   killed: true
// the next worker:
//   parked: step `mail` began and must not be repeated; whether it took effect is not known
// a person finds the mail in the outbox, and says so
// the next worker:
//   done: seat 2, charge 2, with 3 steps
// seats: 2, mails: 2
