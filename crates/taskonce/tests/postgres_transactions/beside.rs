//! Steps whose effect is in another database than the ledger's, by tokio-postgres: what every driver promises, and the row that
//! decides, whoever is killed, stopped or cut off when.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::postgres::{Beside as _, step_table_sql};
use taskonce::{
    Backoff, Context, Effect, ErrorKind, Failure, Migration, Outcome, Policy, Record, Run as _, State, Task,
};
use taskonce_testkit::PostgresProxy;

use crate::contract::store_at;
use crate::place::{EFFECT, PATIENCE, Place, connect, found, task, until};
use crate::process::{Worker, hear, tell};
use crate::shop::{ByTokioPostgres, Shop};

const STORE: &str = "TASKONCE_TEST_STORE";
const SHOP: &str = "TASKONCE_TEST_SHOP";
const POINT: &str = "TASKONCE_TEST_POINT";
/// The point inside of the step's transaction, behind its effect.
const INSIDE: &str = "inside";
/// How long the claim of a worker that is killed holds.
const SHORT: Duration = Duration::from_secs(1);

fn driver(settings: &'static str) -> ByTokioPostgres {
    let place = Place::new();
    ByTokioPostgres::new(settings, move || store_at(&place.url_with("timeout=20s")))
}

/// At the isolation that servers have by default.
mod direct {
    taskonce_contract::beside_suite!(|_| async { super::driver("") });
}

/// As if one transaction followed another: a snapshot from before another's commit cannot see its row.
mod serializable {
    const SETTINGS: &str = "set default_transaction_isolation = 'serializable'";

    taskonce_contract::beside_suite!(|_| async { super::driver(SETTINGS) });
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

#[tokio::test]
async fn a_step_whose_code_spoils_its_transaction_leaves_neither_its_effect_nor_its_row() {
    #[derive(Clone, Copy, Debug)]
    enum Way {
        PassesOverAnError,
        RollsBack,
        Nests,
    }
    let (place, shop) = (Place::new(), Shop::new());
    for (way, said) in [
        (Way::PassesOverAnError, "its code went on"),
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
                            Way::PassesOverAnError => drop(tx.batch_execute("select 1/0").await),
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
