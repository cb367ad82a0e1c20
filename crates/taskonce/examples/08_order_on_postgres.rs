//! An order that changes three resources: a seat in PostgreSQL, booked in one transaction with its step; a payment by HTTP,
//! whose provider deduplicates on the step's own key; and a mail, which must not be sent twice. The first worker is killed
//! behind the payment. The second run is short: it asks for each step, and only the mail is left to do.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use taskonce::postgres::StepIn as _;
use taskonce::postgres::tokio_postgres::{self, Client, NoTls, connect};
use taskonce::{Context, Effect, Failure, Handler, Input, Ledger, Outcome, Policy, Run as _, Task};
use taskonce_testkit::PostgresServer;

/// How long a claim holds. A second, so that the example need not wait for long; the default is 30 s.
const LEASE: Duration = Duration::from_secs(1);
/// How long a worker waits for a task that another holds.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Where the worker that is to be killed finds the database and the provider.
const DOOMED: &str = "EXAMPLE_DATABASE";
const PROVIDER: &str = "EXAMPLE_PROVIDER";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let task = Handler::within("shop", "order", "1")?.task("order-7", &Input::from_json(br#"{"seat": 12}"#)?)?;
    if let (Ok(url), Ok(provider)) = (std::env::var(DOOMED), std::env::var(PROVIDER)) {
        let survived = order(&taskonce::open(&url)?, &url, &provider, &task, Luck::Killed).await?;
        return Err(format!("it should have been killed, and {}", survived.name()).into());
    }
    // A server of this example's own; yours is there already.
    let server = PostgresServer::start(&[])?;
    let url = server.url("postgres");
    taskonce::migrate(&url).await?;
    let database = client(&url).await?;
    database.batch_execute("create table seat (number int not null); create table mail (text text not null)").await?;
    let provider = Provider::start()?;
    let ledger = taskonce::open(&url)?;

    let ended = Command::new(std::env::current_exe()?).env(DOOMED, &url).env(PROVIDER, &provider.address).status()?;
    println!("first worker: killed behind the payment: {}", ended.code().is_none());
    tell(&database, &provider).await?;
    for delivery in ["second worker", "late copy"] {
        match order(&ledger, &url, &provider.address, &task, Luck::Good).await? {
            Outcome::Ran { value, record } => println!("{delivery}: ran as attempt {}: {value}", record.attempt),
            Outcome::Replayed(first) => println!("{delivery}: replayed: {}", first.value.unwrap_or_default()),
            other => return Err(format!("{delivery}: {}", other.name()).into()),
        }
        tell(&database, &provider).await?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Luck {
    Good,
    Killed,
}

/// Handles one delivery.
async fn order(
    ledger: &Ledger,
    url: &str,
    provider: &str,
    task: &Task,
    luck: Luck,
) -> taskonce::Result<Outcome<String>> {
    // Each step says for itself what may be repeated; between them nothing happens.
    let policy = Policy { lease: LEASE, ..Policy::new(Effect::Keyed) };
    ledger.run_or_wait(task, &policy, WAIT_MAX, |context| handle(context, url, provider, luck)).await
}

async fn handle(context: Context, url: &str, provider: &str, luck: Luck) -> Result<String, Failure> {
    let mut database = client(url).await?;
    let tx = database.transaction().await?;
    let seat: i32 = context
        .step_in(&tx, "reserve", |_step| async {
            println!("  reserve: runs");
            Ok(tx.query_one("insert into seat (number) values (12) returning number", &[]).await?.get(0))
        })
        .await?;
    tx.commit().await?;

    let payment = context
        .step("pay", Effect::Keyed, |step| async move {
            println!("  pay: runs");
            post(provider, &step.downstream_key().to_string()).map_err(Failure::from)
        })
        .await?;
    if luck == Luck::Killed {
        // As `kill -9` does it: no destructor runs.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }

    let database = &database;
    context
        .step("mail", Effect::Unrepeatable, |_step| async move {
            println!("  mail: runs");
            // Stands for a mail server: no key, no transaction with anything.
            database.execute("insert into mail (text) values ('seat 12 is yours')", &[]).await?;
            Ok(())
        })
        .await?;
    Ok(format!("seat {seat}, {payment}"))
}

async fn client(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn tell(database: &Client, provider: &Provider) -> Result<(), Box<dyn std::error::Error>> {
    let row = database.query_one("select (select count(*) from seat), (select count(*) from mail)", &[]).await?;
    println!("  seats {}, payments {}, mails {}", row.get::<_, i64>(0), provider.payments(), row.get::<_, i64>(1));
    Ok(())
}

/// A payment provider that deduplicates on the header `Idempotency-Key`.
struct Provider {
    address: String,
    keys: Arc<Mutex<HashSet<String>>>,
}

impl Provider {
    fn start() -> std::io::Result<Provider> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, keys) = (listener.local_addr()?.to_string(), Arc::new(Mutex::new(HashSet::new())));
        let seen = Arc::clone(&keys);
        std::thread::spawn(move || {
            for request in listener.incoming().flatten() {
                // A client that went away has nothing to be told.
                let _ = answer(request, &seen);
            }
        });
        Ok(Provider { address, keys })
    }

    fn payments(&self) -> usize {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

fn answer(mut request: TcpStream, seen: &Mutex<HashSet<String>>) -> std::io::Result<()> {
    for line in BufReader::new(request.try_clone()?).lines() {
        let line = line?;
        if let Some(key) = line.strip_prefix("Idempotency-Key: ") {
            seen.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
        }
        if line.is_empty() {
            break;
        }
    }
    request.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\npaid")
}

fn post(provider: &str, key: &str) -> std::io::Result<String> {
    let mut connection = TcpStream::connect(provider)?;
    write!(connection, "POST /payments HTTP/1.1\r\nHost: {provider}\r\nIdempotency-Key: {key}\r\n\r\n")?;
    let mut said = String::new();
    connection.read_to_string(&mut said)?;
    Ok(said.rsplit("\r\n").next().unwrap_or_default().to_owned())
}

// Output:
//   reserve: runs
//   pay: runs
// first worker: killed behind the payment: true
//   seats 1, payments 1, mails 0
//   mail: runs
// second worker: ran as attempt 2: seat 12, paid
//   seats 1, payments 1, mails 1
// late copy: replayed: seat 12, paid
//   seats 1, payments 1, mails 1
