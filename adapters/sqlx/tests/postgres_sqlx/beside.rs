//! Steps whose effect is in another database than the ledger's, by sqlx: what every driver promises, and what is sqlx's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::PgPool;
use taskonce_contract::beside::BesideUnderTest;
use taskonce_contract::transactional::{Act, Script};
use taskonce_core::key::Task;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, State};
use taskonce_core::store::Store;
use taskonce_postgres::tx::steps::step_table_sql;
use taskonce_sqlx::{Beside as _, Handled, Tx};
use taskonce_testkit::PostgresProxy;
use taskonce_worker::steps::StepOf;
use taskonce_worker::{Outcome, Run as _, StepContext};

use crate::place::{Place, WORKER, policy, says, state, task, until};

/// A statement that is an effect.
const BOOK: &str = "insert into effect values ('booked')";

/// The driver, whose effects are in one database, and the ledger in another.
struct BySqlx {
    shop: Place,
    ledger: Place,
    /// Settings of each session.
    settings: &'static str,
}

impl BySqlx {
    fn new(settings: &'static str) -> BySqlx {
        BySqlx { shop: Place::new(), ledger: Place::new(), settings }
    }

    /// Of one connection, and its own of each step.
    async fn pool(&self) -> PgPool {
        self.shop.pool_at(self.shop.database.port(), 1, self.settings).await
    }
}

fn make_table(shop: &Place) {
    let table = step_table_sql(None).unwrap();
    shop.beside(&format!("{table} grant select, insert, update on taskonce_step to {WORKER}"));
}

async fn book(step: StepOf<'_>, pool: &PgPool, script: Arc<Script>) -> Result<String, Failure> {
    let booked = step.beside(pool, |mut tx, _step| {
        let script = Arc::clone(&script);
        Box::pin(async move {
            sqlx::query(BOOK).execute(&mut *tx).await?;
            Ok(script.play().await?)
        })
    });
    booked.await
}

#[async_trait]
impl BesideUnderTest for BySqlx {
    async fn ledger(&self) -> Arc<dyn Store> {
        self.ledger.store()
    }

    async fn make_table(&self) {
        make_table(&self.shop);
    }

    async fn effects(&self) -> usize {
        self.shop.count("select count(*) from effect")
    }

    async fn rows(&self) -> usize {
        self.shop.count("select count(*) from taskonce_step")
    }

    async fn is_waited_for(&self) -> bool {
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        self.shop.count(waiting) > 0
    }

    async fn step(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        book(step, &self.pool().await, script).await
    }

    async fn step_in_an_open_transaction(&self, step: StepOf<'_>, script: Arc<Script>) -> Result<String, Failure> {
        let pool = self.pool().await;
        let mut left_open = pool.acquire().await.unwrap();
        sqlx::raw_sql("begin; insert into effect values ('stray')").execute(&mut *left_open).await.unwrap();
        drop(left_open);
        let booked = book(step, &pool, script).await;
        pool.close().await;
        booked
    }
}

/// At the isolation that servers have by default.
mod direct {
    taskonce_contract::beside_suite!(|_| async { super::BySqlx::new("") });
}

/// As if one transaction followed another: a snapshot from before another's commit cannot see its row.
mod serializable {
    const SETTINGS: &str = "set default_transaction_isolation = 'serializable'";

    taskonce_contract::beside_suite!(|_| async { super::BySqlx::new(SETTINGS) });
}

/// A run of a task of one step.
async fn run<H>(ledger: &Ledger, task: &Task, pool: &PgPool, code: H) -> Outcome<String>
where
    H: for<'t> FnMut(Tx<'t, 'static>, StepContext) -> Handled<'t, String> + Send + 'static,
{
    let policy = Policy { effect: Effect::Keyed, ..policy() };
    let outcome = ledger.run(task, &policy, |context| async move {
        context.step_of("book", Effect::Transactional).beside(pool, code).await
    });
    outcome.await.unwrap()
}

fn shop() -> Place {
    let shop = Place::new();
    make_table(&shop);
    shop
}

fn left(shop: &Place) -> (usize, usize) {
    (shop.count("select count(*) from effect"), shop.count("select count(*) from taskonce_step"))
}

/// The step took effect and nobody was told, or it did not: the next run finds the row, or runs it.
#[tokio::test]
async fn a_commit_without_an_answer_is_a_failed_attempt_and_the_next_run_finds_out() {
    for (id, is_cut_after, calls_wanted) in [("after", true, 1), ("before", false, 2)] {
        let (place, shop, task) = (Place::new(), shop(), task(id));
        let proxy = PostgresProxy::start(shop.database.port()).unwrap();
        let (ledger, pool) = (place.ledger(), shop.pool_at(proxy.port(), 1, "").await);
        if is_cut_after {
            proxy.cut_after_commits(1);
        } else {
            proxy.cut_before_commits(1);
        }
        let script = Script::new([Act::Return("booked".to_owned()), Act::Return("booked".to_owned())]);
        let run = async || {
            let policy = Policy { effect: Effect::Keyed, ..policy() };
            let outcome = ledger.run(&task, &policy, |context| {
                let (pool, script) = (&pool, Arc::clone(&script));
                async move { book(context.step_of("book", Effect::Transactional), pool, script).await }
            });
            outcome.await.unwrap()
        };
        let outcome = run().await;
        assert!(
            matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains("was not answered")),
            "{id}: {outcome:?}"
        );
        assert_eq!((proxy.cuts_left(), state(&ledger, &task).await), (0, State::Waiting), "{id}");
        let outcome = run().await;
        assert!(matches!(outcome, Outcome::Ran { .. }), "{id}: {outcome:?}");
        assert_eq!((script.calls(), left(&shop)), (calls_wanted, (1, 1)), "{id}");
    }
}

/// It was a failed attempt. The pool has no other connection for the second try.
#[tokio::test]
async fn a_step_that_meets_a_serialisation_failure_runs_again_in_the_same_attempt() {
    let (place, shop, task) = (Place::new(), shop(), task("a"));
    let settings = "set default_transaction_isolation = 'repeatable read'";
    let (ledger, pool) = (place.ledger(), shop.pool_at(shop.database.port(), 1, settings).await);
    let (policy, calls) = (Policy { effect: Effect::Keyed, ..policy() }, AtomicU32::new(0));
    let outcome = ledger.run(&task, &policy, |context| {
        let (pool, shop, calls) = (&pool, &shop, &calls);
        async move {
            let step = context.step_of("book", Effect::Transactional);
            let booked = step.beside(pool, |mut tx, step| {
                Box::pin(async move {
                    sqlx::query(BOOK).execute(&mut *tx).await?;
                    if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                        // Another's write comes in between what this transaction sees and what it writes.
                        shop.beside("update counter set n = n + 1 where id = 1");
                    }
                    sqlx::query("update counter set n = n + 1 where id = 1").execute(&mut *tx).await?;
                    Ok(step.attempt())
                })
            });
            booked.await
        }
    });
    let outcome = outcome.await.unwrap();
    let Outcome::Ran { value, record } = outcome else { panic!("{outcome:?}") };
    assert_eq!((value, record.history.len(), calls.into_inner(), left(&shop)), (1, 0, 2, (1, 1)));
}

#[tokio::test]
async fn a_step_whose_code_spoils_its_transaction_leaves_neither_its_effect_nor_its_row() {
    let (place, shop) = (Place::new(), shop());
    let (ledger, pool) = (place.ledger(), shop.pool().await);
    for (spoils, said) in [("select 1 / 0", "its code went on"), ("rollback", "was over before its code returned")] {
        let task = task(spoils);
        let outcome = run(&ledger, &task, &pool, move |mut tx, _| {
            Box::pin(async move {
                sqlx::query(BOOK).execute(&mut *tx).await?;
                let _passed_over = sqlx::raw_sql(spoils).execute(&mut *tx).await;
                Ok(String::new())
            })
        });
        let outcome = outcome.await;
        assert!(
            matches!(&outcome, Outcome::Failed { failure, .. } if failure.message.contains(said)),
            "{spoils}: {outcome:?}"
        );
        assert_eq!(left(&shop), (0, 0), "{spoils}");
    }
}

#[tokio::test]
async fn within_a_step_the_servers_patience_is_a_lease_and_its_commit_is_kept() {
    let (place, shop, task) = (Place::new(), shop(), task("a"));
    let ledger = place.ledger();
    let settings =
        "set synchronous_commit = off; set lock_timeout = '1h'; set idle_in_transaction_session_timeout = '2s'";
    let pool = shop.pool_at(shop.database.port(), 1, settings).await;
    let outcome = run(&ledger, &task, &pool, |mut tx, _| {
        Box::pin(async move {
            let ask = "select current_setting('lock_timeout') || '|' ||
                       current_setting('idle_in_transaction_session_timeout') || '|' || current_setting('synchronous_commit')";
            Ok(says(&mut tx, ask).await)
        })
    });
    assert_eq!(outcome.await.into_value().as_deref(), Some("30s|2s|on"));
    let mut after = pool.acquire().await.unwrap();
    assert_eq!(says(&mut after, "select current_setting('taskonce.step', true)").await, "", "nothing stays there");
}

/// Its server went on with the statement, and held the row until that ended. The pool has no other connection to ask on.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_is_dropped_ends_the_statement_that_its_server_is_at() {
    let (place, shop, task) = (Place::new(), shop(), task("a"));
    let (ledger, pool) = (place.ledger(), shop.pool_at(shop.database.port(), 1, "").await);
    let is_at_it = "select count(*) from pg_stat_activity
        where query = 'select pg_sleep(30)' and state = 'active' and datname = current_database()";
    let dropped = run(&ledger, &task, &pool, |mut tx, _| {
        Box::pin(async move {
            sqlx::query(BOOK).execute(&mut *tx).await?;
            sqlx::query("select pg_sleep(30)").execute(&mut *tx).await?;
            Ok(String::new())
        })
    });
    tokio::select! {
        outcome = dropped => panic!("{outcome:?}"),
        () = until("its server is at it", async || shop.count(is_at_it) == 1) => {}
    }
    let start = Instant::now();
    until("another runs it", async || {
        let outcome = run(&ledger, &task, &pool, |mut tx, _| {
            Box::pin(async move {
                sqlx::query(BOOK).execute(&mut *tx).await?;
                Ok(String::new())
            })
        });
        matches!(outcome.await, Outcome::Ran { .. })
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(10), "long before it would have ended: {:?}", start.elapsed());
    assert_eq!(left(&shop), (1, 1));
}
