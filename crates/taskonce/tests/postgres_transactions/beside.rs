//! Steps whose effect is in another database than the ledger's: the row beside the effect decides, whoever is killed, stopped
//! or cut off when.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::postgres::{Beside as _, step_table_sql};
use taskonce::{
    Backoff, By, Context, Effect, ErrorKind, Failure, FailureClass, Migration, Outcome, Policy, Record, Run as _,
    State, Task,
};
use taskonce_contract::transactional::Gate;
use taskonce_testkit::postgres::Database;
use taskonce_testkit::{PostgresProxy, shared};

use crate::place::{EFFECT, PATIENCE, Place, ROLE, WORKER, connect, found, task, until};
use crate::process::{Worker, hear, tell};

const STORE: &str = "TASKONCE_TEST_STORE";
const SHOP: &str = "TASKONCE_TEST_SHOP";
const POINT: &str = "TASKONCE_TEST_POINT";
/// The point inside of the step's transaction, behind its effect.
const INSIDE: &str = "inside";
/// How long the claim of a worker that is killed holds.
const SHORT: Duration = Duration::from_secs(1);

/// The database of the effects: another one than the ledger's.
struct Shop(Database);

impl Shop {
    /// With the table of steps, made from its SQL by somebody else than the worker.
    fn new() -> Shop {
        let shop = Shop::without_table();
        let table = step_table_sql(None).unwrap();
        shop.0.psql(&format!("{table} grant select, insert, update on taskonce_step to {WORKER}")).unwrap();
        shop
    }

    fn without_table() -> Shop {
        let database = shared::database().unwrap();
        // Only appended to, and no unique index: an effect that happened twice is counted twice.
        let effects = format!("create table effect (key text not null); grant all on effect to {WORKER}");
        database.psql(&format!("{ROLE} {effects}")).unwrap();
        Shop(database)
    }

    fn url_at(&self, port: u16) -> String {
        format!("postgres://{WORKER}@127.0.0.1:{port}/{}", self.0.name())
    }

    fn url(&self) -> String {
        self.url_at(self.0.port())
    }

    async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    fn effects(&self) -> u32 {
        self.0.psql("select count(*) from effect").unwrap().parse().unwrap()
    }

    fn rows(&self) -> u32 {
        self.0.psql("select count(*) from taskonce_step").unwrap().parse().unwrap()
    }
}

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::new(Effect::Keyed) }
}

/// One step with an effect, that counts how often its code runs.
async fn book(context: &Context, shop: &mut Client, input: u32, calls: &AtomicU32) -> Result<String, Failure> {
    let key = context.key().as_str();
    let step = context.step_of("book", Effect::Transactional).input(&input);
    step.beside(shop, |tx, step| {
        Box::pin(async move {
            calls.fetch_add(1, Ordering::SeqCst);
            tx.execute(EFFECT, &[&key]).await?;
            Ok(format!("booked in attempt {}", step.attempt()))
        })
    })
    .await
}

/// Runs a handler, behind whoever holds its task.
async fn play<T, F>(
    place: &Place,
    task: &Task,
    handler: impl FnOnce(Context) -> F + Send,
) -> taskonce::Result<Outcome<T>>
where
    T: Serialize + DeserializeOwned + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    place.ledger().run_or_wait(task, &policy(), PATIENCE, handler).await
}

/// Runs a task of that one step.
async fn run(
    place: &Place,
    task: &Task,
    shop: &mut Client,
    input: u32,
    calls: &AtomicU32,
) -> taskonce::Result<Outcome<String>> {
    play(place, task, |context| async move { book(&context, shop, input, calls).await }).await
}

fn ran(outcome: taskonce::Result<Outcome<String>>) -> (String, Arc<Record>) {
    match outcome.unwrap() {
        Outcome::Ran { value, record } => (value, record),
        other => panic!("it ran; it was {other:?}"),
    }
}

fn failed<T: std::fmt::Debug>(outcome: taskonce::Result<Outcome<T>>) -> (Failure, Arc<Record>) {
    match outcome.unwrap() {
        Outcome::Failed { failure, record: Some(record) } => (failure, record),
        other => panic!("it failed; it was {other:?}"),
    }
}

#[tokio::test]
async fn a_step_in_another_database_is_recorded_in_both_and_a_later_run_replays_it() {
    let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
    let calls = AtomicU32::new(0);
    let mut client = shop.client().await;
    let outcome = play(&place, &task, |context| {
        let (client, calls) = (&mut client, &calls);
        async move {
            book(&context, client, 1, calls).await?;
            Err::<String, _>(Failure::retryable("cut off behind the step"))
        }
    });
    let (_, record) = failed(outcome.await);
    let steps: Vec<_> = record.steps.iter().map(|step| (step.name.as_str(), step.effect, step.attempt)).collect();
    assert_eq!(steps, [("book", Effect::Transactional, 1)]);
    let (value, record) = ran(run(&place, &task, &mut client, 1, &calls).await);
    assert_eq!((value.as_str(), record.attempt), ("booked in attempt 1", 2));
    assert_eq!((calls.into_inner(), shop.effects(), shop.rows()), (1, 1, 1));
    let row = "select operation, step, octet_length(input), output_type, attempt from taskonce_step";
    assert_eq!(shop.0.psql(row).unwrap(), "billing/pay@1/a|book|16|application/msgpack|1");
}

/// The server has committed; the worker never heard of it, and is gone.
#[tokio::test]
async fn a_worker_killed_between_its_commit_and_the_record_is_followed_by_a_short_run() {
    let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
    let proxy = PostgresProxy::start(shop.0.port()).unwrap();
    proxy.hold_commit_replies();
    let worker = start(&place, &shop.url_at(proxy.port()), "");
    until("the commit is not answered", async || proxy.held() == 1).await;
    let before = found(&place.ledger(), &task).await.record;
    assert_eq!((shop.effects(), before.steps.len(), before.state), (1, 0, State::Running));
    worker.kill();
    proxy.release();

    let calls = AtomicU32::new(0);
    let mut client = shop.client().await;
    let outcome = play(&place, &task, |context| {
        let (client, calls) = (&mut client, &calls);
        async move { book(&context, client, 1, calls).await }
    });
    let (value, record) = ran(outcome.await);
    assert_eq!((value.as_str(), record.attempt, record.steps[0].attempt), ("booked in attempt 1", 2, 1));
    assert_eq!((calls.into_inner(), shop.effects()), (0, 1));
}

/// Its transaction holds the row for as long as the server is patient with it: 5 s here, its lease being short.
#[tokio::test]
async fn a_worker_stopped_inside_its_step_past_its_lease_cannot_commit_behind_its_successor() {
    let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
    let mut stopped = start(&place, &shop.url(), INSIDE);
    assert_eq!(stopped.answer(), "at the point");
    stopped.stop();
    stopped.say("go on");
    let calls = AtomicU32::new(0);
    let mut client = shop.client().await;
    let outcome = play(&place, &task, |context| {
        let (client, calls) = (&mut client, &calls);
        async move { book(&context, client, 1, calls).await }
    });
    let (value, _) = ran(outcome.await);
    assert_eq!((value.as_str(), calls.into_inner(), shop.effects()), ("booked in attempt 2", 1, 1));
    stopped.signal(Signal::CONT);
    assert_ne!(stopped.answer(), "ran");
    assert_eq!((shop.effects(), shop.rows()), (1, 1));
}

/// A person cleared the task while its worker was in the step: another runs it, and waits for the end of the first.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_worker_that_lost_its_claim_and_a_new_one_only_the_first_takes_effect() {
    let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
    let (entered, go) = (Gate::default(), Gate::default());
    let (mut stale_client, mut new_client) = (shop.client().await, shop.client().await);
    let stale = play(&place, &task, |context| {
        let (client, entered, go) = (&mut stale_client, &entered, &go);
        async move {
            let key = context.key().as_str();
            let step = context.step_of("book", Effect::Transactional).input(&1);
            step.beside(client, |tx, _step| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&key]).await?;
                    entered.open();
                    go.pass().await;
                    Ok("booked by the first".to_owned())
                })
            })
            .await
        }
    });
    let calls = AtomicU32::new(0);
    let other = async {
        entered.pass().await;
        place.ledger().clear(&task.key, By { who: "ada", why: "it must run anew" }).await.unwrap();
        let new = run(&place, &task, &mut new_client, 1, &calls);
        let release = async {
            until("the second waits for the first", async || {
                let waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
                shop.0.psql(waiting).unwrap() == "1"
            })
            .await;
            go.open();
        };
        tokio::join!(new, release).0
    };
    let (stale, new) = tokio::join!(stale, other);
    assert_eq!(ran(new).0, "booked by the first");
    assert!(matches!(stale.unwrap(), Outcome::ClaimLost { .. }));
    assert_eq!((calls.into_inner(), shop.effects(), shop.rows()), (0, 1, 1));
}

#[tokio::test]
async fn a_step_whose_row_has_another_input_parks_the_task() {
    let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
    let calls = AtomicU32::new(0);
    let mut client = shop.client().await;
    ran(run(&place, &task, &mut client, 1, &calls).await);
    // The record goes, the row stays: it decides.
    place.ledger().clear(&task.key, By { who: "ada", why: "to see what follows" }).await.unwrap();
    let (failure, record) = failed(run(&place, &task, &mut client, 2, &calls).await);
    assert_eq!((failure.class, record.state), (FailureClass::StepChanged, State::Parked));
    assert!(failure.message.contains("`book` took effect with input"), "{failure:?}");
    assert_eq!((calls.into_inner(), shop.effects()), (1, 1));
}

#[tokio::test]
async fn a_step_without_its_table_runs_nothing_and_says_which_command_makes_it() {
    let (place, shop, task) = (Place::new(), Shop::without_table(), task("a"));
    let calls = AtomicU32::new(0);
    let mut client = shop.client().await;
    let (failure, _) = failed(run(&place, &task, &mut client, 1, &calls).await);
    for part in ["no table `taskonce_step`", "`taskonce migrate --steps --store URL`"] {
        assert!(failure.message.contains(part), "{failure:?}");
    }
    assert_eq!((calls.load(Ordering::SeqCst), shop.effects()), (0, 0));
    let made = taskonce::migrate_steps(&shop.0.url()).await.unwrap();
    assert_eq!(made, Migration::Migrated { schema: "public.taskonce_step".into(), from: 0, to: 1 });
    shop.0.psql(&format!("grant select, insert, update on taskonce_step to {WORKER}")).unwrap();
    ran(run(&place, &task, &mut client, 1, &calls).await);
    assert_eq!((calls.into_inner(), shop.effects()), (1, 1));
}

/// The step took effect and nobody was told, or it did not: the next run finds the row, or runs it.
#[tokio::test]
async fn a_commit_without_an_answer_is_a_failed_attempt_and_the_next_run_finds_out() {
    for (id, is_cut_after, calls_wanted) in [("after", true, 1), ("before", false, 2)] {
        let (place, shop, task) = (Place::new(), Shop::new(), task(id));
        let proxy = PostgresProxy::start(shop.0.port()).unwrap();
        let url = shop.url_at(proxy.port());
        if is_cut_after {
            proxy.cut_after_commits(1);
        } else {
            proxy.cut_before_commits(1);
        }
        let calls = AtomicU32::new(0);
        let (failure, record) = failed(run(&place, &task, &mut connect(&url).await, 1, &calls).await);
        assert!(failure.message.contains("was not answered"), "{id}: {failure:?}");
        assert_eq!((proxy.cuts_left(), record.state, record.steps.len()), (0, State::Waiting, 0), "{id}");
        ran(run(&place, &task, &mut connect(&url).await, 1, &calls).await);
        assert_eq!((calls.into_inner(), shop.effects(), shop.rows()), (calls_wanted, 1, 1), "{id}");
    }
}

/// Each leaves neither effect nor row, and a later run takes effect.
#[tokio::test]
async fn a_step_that_fails_leaves_neither_its_effect_nor_its_row() {
    #[derive(Clone, Copy, Debug)]
    enum Way {
        Fails,
        PassesOverAnError,
        TooLarge,
        RollsBack,
        Nests,
    }
    let (place, shop) = (Place::new(), Shop::new());
    for (way, said) in [
        (Way::Fails, "no seat"),
        (Way::PassesOverAnError, "its code went on"),
        (Way::TooLarge, "bytes of output"),
        (Way::RollsBack, "was over before its code returned"),
        (Way::Nests, "inside another step"),
    ] {
        let (task, mut client) = (task(&format!("{way:?}")), shop.client().await);
        let outcome = play(&place, &task, |context| {
            let client = &mut client;
            async move {
                let inner = &context;
                let step = context.step_of("book", Effect::Transactional);
                step.beside(client, |tx, _step| {
                    Box::pin(async move {
                        tx.execute(EFFECT, &[&inner.key().as_str()]).await?;
                        match way {
                            Way::Fails => return Err(Failure::retryable("no seat").into()),
                            Way::PassesOverAnError => drop(tx.batch_execute("select 1/0").await),
                            Way::TooLarge => return Ok("x".repeat(2 * 1024 * 1024)),
                            Way::RollsBack => tx.batch_execute("rollback").await?,
                            Way::Nests => inner.step("inner", Effect::Repeatable, |_| async { Ok(()) }).await?,
                        }
                        Ok(String::new())
                    })
                })
                .await
            }
        });
        let (failure, record) = failed(outcome.await);
        assert!(failure.message.contains(said), "{way:?}: {failure:?}");
        assert_eq!((shop.effects(), shop.rows(), record.steps.len()), (0, 0, 0), "{way:?}");
    }
    let (calls, task) = (AtomicU32::new(0), task("Fails"));
    ran(run(&place, &task, &mut shop.client().await, 1, &calls).await);
    assert_eq!((calls.into_inner(), shop.effects(), shop.rows()), (1, 1, 1));
}

/// Its snapshot is older than the other's commit, so that the row is there and cannot be seen.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_at_any_isolation_level_finds_a_row_that_was_written_meanwhile() {
    for level in ["repeatable read", "serializable"] {
        let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
        let held = shop.client().await;
        let row = format!(
            "begin; insert into taskonce_step (operation, step, input, output, output_type, attempt)
             values ('{}', 'book', '\\x00000000000000000000000000000000', '\\xa568656c6c6f', 'application/msgpack', 7)",
            task.key
        );
        held.batch_execute(&row).await.unwrap();
        let mut client = shop.client().await;
        client.batch_execute(&format!("set default_transaction_isolation = '{level}'")).await.unwrap();
        let outcome = play(&place, &task, |context| {
            let client = &mut client;
            async move {
                let step = context.step_of("book", Effect::Transactional);
                step.beside(client, |_tx, _step| Box::pin(async { Ok("it ran".to_owned()) })).await
            }
        });
        let release = async {
            until("the step waits for the other", async || {
                let waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
                shop.0.psql(waiting).unwrap() == "1"
            })
            .await;
            held.batch_execute("commit").await.unwrap();
        };
        let (outcome, ()) = tokio::join!(outcome, release);
        let (value, record) = ran(outcome);
        assert_eq!((value.as_str(), record.attempt, record.steps[0].attempt), ("hello", 1, 7), "{level}");
    }
}

#[tokio::test]
async fn within_a_step_the_servers_patience_is_a_lease_unless_the_session_has_less_and_its_commit_is_kept() {
    let (place, shop) = (Place::new(), Shop::new());
    for (id, session, lease, wanted) in [
        ("defaults", "", 30, "30s|30s|on"),
        ("short lease", "", 1, "5s|5s|on"),
        (
            "less",
            "set synchronous_commit = local; set lock_timeout = '70ms'; set idle_in_transaction_session_timeout = '2s'",
            30,
            "70ms|2s|local",
        ),
        (
            "more",
            "set synchronous_commit = off; set lock_timeout = '1h'; set idle_in_transaction_session_timeout = '1h'",
            30,
            "30s|30s|on",
        ),
    ] {
        let mut client = shop.client().await;
        client.batch_execute(session).await.unwrap();
        let policy = Policy { lease: Duration::from_secs(lease), ..policy() };
        let (ledger, task) = (place.ledger(), task(id));
        let outcome = ledger.run(&task, &policy, |context| {
            let client = &mut client;
            async move {
                let step = context.step_of("book", Effect::Transactional);
                step.beside(client, |tx, _step| {
                    Box::pin(async move {
                        let ask = "select current_setting('lock_timeout') || '|' ||
                                   current_setting('idle_in_transaction_session_timeout') || '|' ||
                                   current_setting('synchronous_commit')";
                        Ok(tx.query_one(ask, &[]).await?.get::<_, String>(0))
                    })
                })
                .await
            }
        });
        assert_eq!(ran(outcome.await).0, wanted, "{id}");
        let after: String =
            client.query_one("select current_setting('taskonce.step', true)", &[]).await.unwrap().get(0);
        assert_eq!(after, "", "nothing stays on the connection");
    }
}

#[tokio::test]
async fn a_step_that_meets_a_serialisation_failure_runs_again_in_the_same_attempt() {
    let (place, shop) = (Place::new(), Shop::new());
    shop.0.psql("create table seat (n int); insert into seat values (0); grant all on seat to public").unwrap();
    let mut client = shop.client().await;
    client.batch_execute("set default_transaction_isolation = 'repeatable read'").await.unwrap();
    let (task, calls) = (task("a"), AtomicU32::new(0));
    let outcome = play(&place, &task, |context| {
        let (client, calls, shop, key) = (&mut client, &calls, &shop, task.key.as_str());
        async move {
            let step = context.step_of("book", Effect::Transactional);
            let booked = step.beside(client, |tx, step| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&key]).await?;
                    if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                        // Another's write comes in between what this transaction sees and what it writes.
                        shop.0.psql("update seat set n = n + 1").unwrap();
                    }
                    tx.execute("update seat set n = n + 1", &[]).await?;
                    Ok(format!("in attempt {}", step.attempt()))
                })
            });
            booked.await
        }
    });
    let (value, record) = ran(outcome.await);
    assert_eq!((value.as_str(), record.history.len(), calls.into_inner()), ("in attempt 1", 0, 2));
    assert_eq!((shop.effects(), shop.rows()), (1, 1));
}

#[tokio::test]
async fn a_step_of_another_kind_has_no_row() {
    let (place, shop) = (Place::new(), Shop::new());
    let mut client = shop.client().await;
    let task = task("a");
    let outcome = play(&place, &task, |context| {
        let client = &mut client;
        async move {
            let step = context.step_of("book", Effect::Keyed);
            step.beside(client, |_tx, _step| Box::pin(async { Ok(()) })).await
        }
    });
    assert!(failed(outcome.await).0.message.contains("is keyed"));
    assert_eq!(shop.rows(), 0);
}

#[tokio::test]
async fn a_purge_removes_old_rows_in_batches_and_leaves_young_ones() {
    let shop = Shop::new();
    let rows = "insert into taskonce_step (operation, step, input, attempt, done_at)
                select 'n/h@1/' || i, 's', '', 1, clock_timestamp() - i * interval '1 day' from generate_series(1, 2500) i";
    shop.0.psql(rows).unwrap();
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(taskonce::purge_steps(&shop.0.url(), day * 10 - Duration::from_secs(3600)).await.unwrap(), 2491);
    assert_eq!((shop.rows(), taskonce::purge_steps(&shop.0.url(), Duration::MAX).await.unwrap()), (9, 0));
    let missing = Shop::without_table();
    let error = taskonce::purge_steps(&missing.0.url(), day).await.unwrap_err();
    assert_eq!((error.kind(), error.hint().contains("--steps")), (ErrorKind::NoSchema, true), "{error:?}");
}

#[tokio::test]
async fn the_table_is_made_once_in_the_named_schema_and_a_newer_one_is_refused() {
    let shop = Shop::without_table();
    let url = format!("{}?schema=shop", shop.0.url());
    let table = "shop.taskonce_step".to_owned();
    for made in [
        Migration::Migrated { schema: table.clone(), from: 0, to: 1 },
        Migration::UpToDate { schema: table.clone(), version: 1 },
    ] {
        assert_eq!(taskonce::migrate_steps(&url).await.unwrap(), made);
    }
    shop.0.psql("comment on table shop.taskonce_step is 'taskonce steps, version 2'").unwrap();
    assert_eq!(taskonce::migrate_steps(&url).await.unwrap_err().kind(), ErrorKind::NewerSchema);
    assert_eq!(taskonce::migrate_steps("redis://127.0.0.1:1").await.unwrap_err().kind(), ErrorKind::Unsupported);
    // The printed SQL may be run again, by hand.
    for _ in 0..2 {
        shop.0.psql(&step_table_sql(Some("public")).unwrap()).unwrap();
    }
    assert_eq!(shop.rows(), 0);
}

/// Runs the task of one step, as a process of its own of the tests above; by itself, twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_books_once() {
    let calls = AtomicU32::new(0);
    let (Ok(store), Ok(shop)) = (std::env::var(STORE), std::env::var(SHOP)) else {
        let (place, shop, task) = (Place::new(), Shop::new(), task("a"));
        let mut client = shop.client().await;
        ran(run(&place, &task, &mut client, 1, &calls).await);
        assert!(matches!(run(&place, &task, &mut client, 1, &calls).await.unwrap(), Outcome::Replayed(_)));
        assert_eq!((calls.into_inner(), shop.effects()), (1, 1));
        return;
    };
    let stands = std::env::var(POINT).unwrap() == INSIDE;
    let mut client = connect(&shop).await;
    let policy = Policy { lease: SHORT, ..policy() };
    let (ledger, task) = (taskonce::open(&store).unwrap(), task("a"));
    let outcome = ledger.run(&task, &policy, |context| {
        let client = &mut client;
        async move {
            let key = context.key().as_str();
            let step = context.step_of("book", Effect::Transactional).input(&1_u32);
            step.beside(client, |tx, step| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&key]).await?;
                    if stands {
                        tell("at the point");
                        assert_eq!(hear(), "go on");
                    }
                    Ok(format!("booked in attempt {}", step.attempt()))
                })
            })
            .await
        }
    });
    tell(outcome.await.map_or("an error", |outcome: Outcome<String>| outcome.name()));
}

fn start(place: &Place, shop: &str, point: &str) -> Worker {
    let store = place.url_with("timeout=20s");
    Worker::start("beside::a_worker_books_once", &[(STORE, &store), (SHOP, shop), (POINT, point)])
}
