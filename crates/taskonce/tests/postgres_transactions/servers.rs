//! Servers that are restarted and killed under load, and a standby that is promoted without the last commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use taskonce::postgres::RunInTransaction as _;
use taskonce::postgres::tokio_postgres::{self, Client, NoTls};
use taskonce::{ErrorKind, Ledger, Outcome, Policy, Settlement, State};
use taskonce_testkit::PostgresServer;

use crate::place::{EFFECT, PATIENCE, Place, WORKER, connect, policy, task};

/// Tasks that are delivered while servers fail.
const TASKS: usize = 200;
/// Consumers that deliver them.
const CONSUMERS: usize = 6;
/// How often the server fails meanwhile.
const FAILURES: usize = 4;
/// How long it may run in between.
const RUNS_FOR: Duration = Duration::from_millis(400);

/// A connection, or none while the server is away.
async fn try_connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Delivers each task until it is acknowledged, and a copy of each.
async fn consume(place: Place, next: Arc<AtomicUsize>) {
    let ledger = taskonce::open(&place.url_with("timeout=1s")).unwrap();
    let policy = Policy { lease: Duration::from_secs(2), attempts_max: 1000, crashes_max: 1000, ..policy() };
    let url = place.client_url();
    loop {
        let number = next.fetch_add(1, Ordering::SeqCst);
        if number >= 2 * TASKS {
            return;
        }
        let task = task(&format!("t-{}", number % TASKS));
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < 2 * PATIENCE, "{} is not acknowledged", task.key);
            let outcome = ledger
                .run_in_transaction_on(
                    |attempt| {
                        let url = &url;
                        Box::pin(async move { Ok(attempt.on(&mut try_connect(url).await?).await) })
                    },
                    &task,
                    &policy,
                    Duration::ZERO,
                    |tx, context| {
                        Box::pin(async move {
                            tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                            tx.execute("update counter set n = n + 1 where id = 1 + $1 % 10", &[&(number as i32)])
                                .await?;
                            Ok(())
                        })
                    },
                )
                .await;
            match outcome.map(|outcome| outcome.settlement()) {
                Ok(Settlement::Acknowledge) => break,
                Ok(Settlement::DeadLetter(why)) => panic!("{}: {why}", task.key),
                // sleeps: the delivery is deferred so long
                Ok(Settlement::Defer(delay)) => tokio::time::sleep(delay.min(Duration::from_millis(500))).await,
                // sleeps: the store is away
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}

/// What a server under load does to itself.
#[derive(Clone, Copy)]
enum Failure {
    Restart,
    Kill,
}

async fn under_load(failure: Failure) {
    let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap());
    let next = Arc::new(AtomicUsize::new(0));
    let mut consumers = tokio::task::JoinSet::new();
    for _ in 0..CONSUMERS {
        consumers.spawn(consume(place.clone(), Arc::clone(&next)));
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let (stop, progress) = (Arc::clone(&is_over), Arc::clone(&next));
    let failing = tokio::task::spawn_blocking(move || {
        let mut failures = 0;
        while failures < FAILURES && !stop.load(Ordering::SeqCst) {
            std::thread::sleep(RUNS_FOR); // sleeps: work is under way when it fails
            match failure {
                Failure::Restart => server.restart().unwrap(),
                Failure::Kill => {
                    server.kill();
                    server.restart().unwrap();
                }
            }
            failures += 1;
        }
        (server, failures, progress.load(Ordering::SeqCst))
    });
    while let Some(consumer) = consumers.join_next().await {
        consumer.unwrap();
    }
    is_over.store(true, Ordering::SeqCst);
    let (_server, failures, _progress) = failing.await.unwrap();
    assert!(failures > 0, "it failed meanwhile");
    let sql = "select count(*), count(distinct key) from effect";
    let row = &place.beside(sql, &[]).await[0];
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (TASKS as i64, TASKS as i64), "each once");
    let done: i64 = place.beside("select count(*) from {schema}.task where state = 3", &[]).await[0].get(0);
    let counted: i64 = place.beside("select sum(n) from counter", &[]).await[0].get(0);
    assert_eq!((done, counted), (TASKS as i64, TASKS as i64));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_restarted_under_load_neither_doubles_nor_loses_an_effect() {
    under_load(Failure::Restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_under_load_neither_doubles_nor_loses_an_effect() {
    under_load(Failure::Kill).await;
}

async fn pay(ledger: &Ledger, url: &str, id: &str) -> taskonce::Result<Outcome<()>> {
    let mut client = connect(url).await;
    ledger
        .run_in_transaction(&mut client, &task(id), &policy(), |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(())
            })
        })
        .await
}

/// A commit that no standby has goes with its server: the effect goes with its record, and is made again with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_lacks_the_last_commits_lacks_effect_and_record_alike() {
    let mut primary = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(primary.database().unwrap());
    let mut standby = PostgresServer::prepare(&["-c", "fsync=off"]).unwrap();
    standby.follow(&primary).unwrap();
    let standby = standby.start_prepared().unwrap();
    let name = place.database.name().to_owned();
    let at = |port: u16| format!("postgres://{WORKER}@127.0.0.1:{port}/{name}");
    let ledger_at =
        |port: u16| taskonce::open(&format!("{}?schema={}&timeout=5s", at(port), crate::place::SCHEMA)).unwrap();
    let effects = |server: &PostgresServer, id: &str| {
        server.psql(&name, &format!("select count(*) from effect where key = '{}'", task(id).key)).unwrap()
    };

    let before = ledger_at(primary.port());
    assert!(matches!(pay(&before, &at(primary.port()), "kept").await.unwrap(), Outcome::Ran { .. }));
    let written = primary.psql(&name, "select pg_current_wal_lsn()").unwrap();
    let start = Instant::now();
    while standby.psql(&name, &format!("select pg_last_wal_replay_lsn() >= '{written}'")).unwrap() != "t" {
        assert!(start.elapsed() < PATIENCE, "the standby never caught up");
    }
    // A transaction on the standby can complete nothing.
    let error = pay(&before, &at(standby.port()), "elsewhere").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");

    standby.psql("postgres", "alter system set primary_conninfo = ''").unwrap();
    standby.psql("postgres", "select pg_reload_conf()").unwrap();
    while standby.psql("postgres", "select count(*) from pg_stat_wal_receiver").unwrap() != "0" {
        assert!(start.elapsed() < PATIENCE, "the standby still follows");
    }
    assert!(matches!(pay(&before, &at(primary.port()), "forgotten").await.unwrap(), Outcome::Ran { .. }));
    assert_eq!(effects(&primary, "forgotten"), "1");
    primary.kill();
    standby.promote().unwrap();

    let after = ledger_at(standby.port());
    assert_eq!((effects(&standby, "kept"), effects(&standby, "forgotten")), ("1".into(), "0".into()));
    assert_eq!(after.show(&task("forgotten").key).await.unwrap(), None);
    for _ in 0..2 {
        assert!(matches!(pay(&after, &at(standby.port()), "kept").await.unwrap(), Outcome::Replayed(_)));
    }
    assert!(matches!(pay(&after, &at(standby.port()), "forgotten").await.unwrap(), Outcome::Ran { .. }));
    assert!(matches!(pay(&after, &at(standby.port()), "forgotten").await.unwrap(), Outcome::Replayed(_)));
    assert_eq!((effects(&standby, "kept"), effects(&standby, "forgotten")), ("1".into(), "1".into()));
    assert_eq!(after.show(&task("forgotten").key).await.unwrap().unwrap().record.state, State::Done);
}

/// The database is away: nothing is run, and no attempt is counted.
#[tokio::test(flavor = "multi_thread")]
async fn while_the_server_is_away_tasks_are_deferred_and_no_attempt_is_counted() {
    let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap());
    let ledger = taskonce::open(&place.url_with("timeout=500ms")).unwrap();
    let mut client = place.client().await;
    server.kill();
    let task = task("a");
    for _ in 0..3 {
        let error = ledger.run_in_transaction(&mut client, &task, &policy(), |_, _| Box::pin(async { Ok(()) })).await;
        assert!(matches!(error.unwrap_err().kind(), ErrorKind::Unreachable | ErrorKind::TimedOut));
    }
    server.restart().unwrap();
    let outcome = pay(&ledger, &place.client_url(), "a").await.unwrap();
    assert!(matches!(&outcome, Outcome::Ran { record, .. } if record.attempt == 1), "{outcome:?}");
    assert_eq!(place.effects(&task.key).await, 1);
}
