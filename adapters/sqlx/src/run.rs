//! Runs tasks in transactions of a pool of sqlx: begins, locks, runs the handler, completes and commits.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Transaction};
use taskonce_core::error::Result;
use taskonce_core::key::Task;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::Policy;
use taskonce_core::record::Failure;
use taskonce_core::transaction::Attempted;
use taskonce_postgres::joint::{self, Joint};
use taskonce_worker::outcome::encode;
use taskonce_worker::{Context, Outcome};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::cancel::CancelOnDrop;
use crate::hand::{complete_held, lock_held, met, met_at_commit};

/// How long a rollback is waited for before the claim's end is written: the record is held until then.
pub(crate) const ROLLBACK_WAIT: Duration = Duration::from_secs(1);

/// What a handler returns, in a box.
pub type Handled<'t, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + Send + 't>>;

/// Why a handler does not go on: for a reason of its own, or an error of sqlx. `?` makes it of either.
#[derive(Debug)]
pub enum Stop {
    /// The attempt failed.
    Failure(Failure),
    /// A statement failed. A serialisation failure or a deadlock is tried again while the claim holds, and is not counted as
    /// a failed attempt; any other error is a failure that may be retried.
    Database(sqlx::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failure(failure)
    }
}

impl From<sqlx::Error> for Stop {
    fn from(error: sqlx::Error) -> Stop {
        Stop::Database(error)
    }
}

/// The connection inside its transaction, as a handler is given it: statements run on `&mut *tx`. The handler cannot end it.
///
/// The lifetimes say that the handler may borrow what outlives the call that runs it.
pub struct Tx<'t, 'h> {
    connection: &'t mut PgConnection,
    scope: PhantomData<&'t &'h ()>,
}

impl<'t> Tx<'t, '_> {
    pub(crate) fn of(connection: &'t mut PgConnection) -> Self {
        Tx { connection, scope: PhantomData }
    }
}

impl Deref for Tx<'_, '_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection
    }
}

impl DerefMut for Tx<'_, '_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection
    }
}

/// Runs tasks whose effect is written in a PostgreSQL transaction: once, as long as delivery goes on and the record lives.
///
/// The policy's effect is [`Transactional`](taskonce_core::policy::Effect::Transactional), and any other is refused. For each try a connection is taken
/// from the pool and a transaction begun, the claim's record locked in it, the handler run, the completion written with the
/// handler's value, and all committed. A handler that fails, panics or is cancelled leaves nothing. A serialisation failure or a
/// deadlock runs the handler again at once: at most 20 times a claim, not counted as attempts. What became of a commit whose
/// answer was lost is found out through the ledger's own connections.
///
/// When a run is dropped half way, the server is asked on a connection of its own to end the statement that it is at.
pub trait RunInTransaction {
    /// Runs the task if it is free, and records what the handler returns in the handler's own transaction. A duplicate gets
    /// the first run's value, and takes no connection of the pool.
    ///
    /// # Errors
    /// Those of [`Ledger::claim`]; [`Unsupported`](taskonce_core::ErrorKind::Unsupported) for a ledger on another store and for
    /// a pool on another database than the ledger's: then nothing was run. Those of the store when nobody can say what became
    /// of a commit: effect and record are stored both or neither, and the next delivery finds out.
    fn run_in_transaction<'h, T, H>(
        &self,
        pool: &PgPool,
        task: &Task,
        policy: &Policy,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h;

    /// The same, but a busy or waiting task is waited for, at most `wait_max`.
    ///
    /// # Errors
    /// As for [`RunInTransaction::run_in_transaction`].
    fn run_in_transaction_or_wait<'h, T, H>(
        &self,
        pool: &PgPool,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h;
}

impl RunInTransaction for Ledger {
    async fn run_in_transaction<'h, T, H>(
        &self,
        pool: &PgPool,
        task: &Task,
        policy: &Policy,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h,
    {
        self.run_in_transaction_or_wait(pool, task, policy, Duration::ZERO, handler).await
    }

    async fn run_in_transaction_or_wait<'h, T, H>(
        &self,
        pool: &PgPool,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h,
    {
        let handler = Mutex::new(handler);
        taskonce_worker::transaction::run_in_transaction(self, task, policy, wait_max, |context| {
            let handler = &handler;
            Box::pin(async move {
                // One try follows another, so nobody waits here.
                let mut handler = handler.lock().await;
                attempt(pool, &context, &mut *handler).await
            })
        })
        .await
    }
}

/// One attempt: begins, locks, runs the handler, completes and commits.
async fn attempt<'h, T, H>(pool: &PgPool, context: &Context, handler: &mut H) -> Attempted<T>
where
    T: Serialize + Send,
    H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h,
{
    let joint = match Joint::of(context.ledger(), context.held()) {
        Ok(joint) => joint.in_a_new_transaction(),
        Err(met) => return met.before_commit(),
    };
    let mut connection = match pool.acquire().await {
        Ok(connection) => connection,
        Err(error) => return met(context.key(), &error).before_commit(),
    };
    let met = match connection.begin().await {
        Ok(tx) => return attempt_in(tx, pool, &joint, context, handler).await,
        Err(error) => met(context.key(), &error),
    };
    // Its server may be in a transaction that somebody left open, and that has failed.
    connection.close_on_drop();
    met.as_it_began().before_commit()
}

async fn attempt_in<'h, T, H>(
    mut tx: Transaction<'_, Postgres>,
    pool: &PgPool,
    joint: &Joint<'_>,
    context: &Context,
    handler: &mut H,
) -> Attempted<T>
where
    T: Serialize + Send,
    H: for<'t> FnMut(Tx<'t, 'h>, Context) -> Handled<'t, T> + Send + 'h,
{
    let (ledger, held) = (context.ledger(), context.held());
    let session = match lock_held(joint, &mut tx).await {
        Ok(session) => session,
        Err(met) => {
            let _rolled_back = timeout(ROLLBACK_WAIT, tx.rollback()).await;
            return met.before_commit();
        }
    };
    // Behind the transaction, and so dropped before it.
    let cancel = CancelOnDrop::armed(pool, session);
    held.enter();
    let value = match handler(Tx::of(&mut tx), context.clone()).await {
        Ok(value) => value,
        Err(Stop::Failure(failure)) => {
            roll_back(tx, cancel).await;
            return Attempted::Failed(failure);
        }
        Err(Stop::Database(error)) => {
            let met = met(context.key(), &error);
            roll_back(tx, cancel).await;
            return met.in_handler(code_of(&error).as_deref(), Failure::from(error));
        }
    };
    if let Err(met) = complete_held(joint, &mut tx, encode(&value)).await {
        roll_back(tx, cancel).await;
        return met.before_commit();
    }
    // A commit decides for itself.
    cancel.disarm();
    match tx.commit().await {
        Ok(()) => Attempted::Committed(value),
        Err(error) => met_at_commit(ledger, context.key(), &error).in_answer_to_commit(value, Failure::from(error)),
    }
}

/// Whether the database refused a statement for what others did at the same time.
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| joint::is_conflict(&code))
}

/// The code that a server gave for an error, if it is a server's.
pub(crate) fn code_of(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|said| said.code()).map(Cow::into_owned)
}

/// Rolls back, and waits for it a little: the record is held until then.
pub(crate) async fn roll_back(tx: Transaction<'_, Postgres>, cancel: CancelOnDrop<'_>) {
    // Where it cannot be said, the end of the connection does it.
    if timeout(ROLLBACK_WAIT, tx.rollback()).await.is_ok() {
        cancel.disarm();
    }
}
