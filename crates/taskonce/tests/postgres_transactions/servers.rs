//! Servers that are restarted and killed under load, and a standby that is promoted without the last commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use taskonce::postgres::tokio_postgres::{self, Client, NoTls};
use taskonce::postgres::{CommitIn as _, CompleteIn as _, RunInTransaction as _};
use taskonce::{Admission, ErrorKind, Ledger, Outcome, Output, Policy, Settlement, State, Task};
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

/// In which order the deliveries come, of which each of so many tasks has two.
#[derive(Clone, Copy)]
enum Copies {
    /// Behind the first ones of all.
    Later(usize),
    /// Right behind the first.
    Together(usize),
}

impl Copies {
    fn tasks(self) -> usize {
        match self {
            Copies::Later(tasks) | Copies::Together(tasks) => tasks,
        }
    }

    /// The task of this delivery.
    fn task(self, number: usize) -> Task {
        match self {
            Copies::Later(tasks) => task(&format!("t-{}", number % tasks)),
            Copies::Together(_) => task(&format!("t-{}", number / 2)),
        }
    }
}

/// Delivers each task until it is acknowledged, and a copy of each.
async fn consume(place: Place, next: Arc<AtomicUsize>, copies: Copies) {
    let ledger = taskonce::open(&place.url_with("timeout=1s")).unwrap();
    let policy = Policy { lease: Duration::from_secs(2), attempts_max: 1000, crashes_max: 1000, ..policy() };
    let url = place.client_url();
    loop {
        let number = next.fetch_add(1, Ordering::SeqCst);
        if number >= 2 * copies.tasks() {
            return;
        }
        let task = copies.task(number);
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
        consumers.spawn(consume(place.clone(), Arc::clone(&next), Copies::Later(TASKS)));
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
    each_task_took_effect_once(&place, TASKS).await;
}

async fn each_task_took_effect_once(place: &Place, tasks: usize) {
    let sql = "select count(*), count(distinct key) from effect";
    let row = &place.beside(sql, &[]).await[0];
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (tasks as i64, tasks as i64), "each once");
    let done: i64 = place.beside("select count(*) from {schema}.task where state = 3", &[]).await[0].get(0);
    let counted: i64 = place.beside("select sum(n) from counter", &[]).await[0].get(0);
    assert_eq!((done, counted), (tasks as i64, tasks as i64));
}

/// What the server's clock does, one after the other, in seconds beside the machine's; `None` stands still.
const CLOCK: [Option<i64>; 6] = [Some(3600), Some(0), None, Some(-3600), Some(0), Some(3600)];
/// How long it does each: shorter than a lease, so that claims live through several.
const CLOCK_STAYS: Duration = Duration::from_millis(60);
/// The tasks that are delivered meanwhile.
const CLOCK_TASKS: usize = 100;

/// Leases pass at once, or not at all; who is succeeded while it holds its claim cannot commit.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_clock_jumps_and_stands_still_neither_doubles_nor_loses_an_effect() {
    let server = PostgresServer::start_with_clock(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap());
    let next = Arc::new(AtomicUsize::new(0));
    let mut consumers = tokio::task::JoinSet::new();
    for _ in 0..CONSUMERS {
        consumers.spawn(consume(place.clone(), Arc::clone(&next), Copies::Together(CLOCK_TASKS)));
    }
    let (is_over, mut changes) = (AtomicBool::new(false), 0);
    let working = async {
        while let Some(consumer) = consumers.join_next().await {
            consumer.unwrap();
        }
        is_over.store(true, Ordering::SeqCst);
    };
    let changing = async {
        while !is_over.load(Ordering::SeqCst) {
            match CLOCK[changes % CLOCK.len()] {
                Some(seconds) => server.shift_clock(seconds).unwrap(),
                None => server.freeze_clock().unwrap(),
            }
            changes += 1;
            tokio::time::sleep(CLOCK_STAYS).await; // sleeps: work goes on by that time
        }
    };
    tokio::join!(working, changing);
    assert!(changes > CLOCK.len(), "it did all of them: {changes}");
    each_task_took_effect_once(&place, CLOCK_TASKS).await;
}

/// The hour in which a worker was busy never was: another takes the task over, and the first one cannot commit. Who holds the
/// record in its transaction, though, is not succeeded whatever the clock says.
#[tokio::test(flavor = "multi_thread")]
async fn a_jump_of_the_servers_clock_frees_a_claim_but_no_record_that_a_transaction_holds() {
    let server = PostgresServer::start_with_clock(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap());
    let (ledger, other, mut client) = (place.ledger(), place.ledger(), place.client().await);
    let policy = Policy { crashes_max: 10, ..policy() };
    for (id, seconds) in [("forward", 3600), ("back", -3600)] {
        server.shift_clock(0).unwrap();
        let task = task(id);
        let Admission::Run(claim) = ledger.claim(&task, &policy).await.unwrap() else { panic!("it is free") };
        server.shift_clock(seconds).unwrap();
        let Admission::Run(second) = other.claim(&task, &policy).await.unwrap() else { panic!("its lease has passed") };
        let tx = client.transaction().await.unwrap();
        assert_eq!(claim.lock_in(&tx).await.unwrap_err().kind(), ErrorKind::ClaimLost);
        tx.rollback().await.unwrap();
        let tx = client.transaction().await.unwrap();
        second.lock_in(&tx).await.unwrap();
        tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
        server.shift_clock(2 * seconds).unwrap();
        let third = ledger.claim(&task, &policy).await.unwrap();
        assert!(matches!(third, Admission::Busy(_)), "{third:?}");
        second.complete_in(&tx, Output::Nothing).await.unwrap().commit_in(tx).await.unwrap();
        let after = other.claim(&task, &policy).await.unwrap();
        assert!(matches!(after, Admission::Replay(_)), "{after:?}");
        assert_eq!(place.effects(&task.key).await, 1, "{id}");
    }
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
