//! Tasks whose effect is written to PostgreSQL in the transaction that completes them, by tokio-postgres.
//!
//! The transaction is on the ledger's own database: what commits, commits together with the record, and what is rolled back
//! leaves none. See [`RunInTransaction`] for the one-call form and [`CompleteIn`] for a claim held by hand.
//!
//! ```no_run
//! use taskonce::postgres::{RunInTransaction as _, tokio_postgres};
//! use taskonce::{Effect, Handler, Input, Policy};
//!
//! # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
//! let url = "postgres://ada@db.example/app";
//! let ledger = taskonce::open(url)?;
//! let (mut client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
//! tokio::spawn(connection);
//!
//! let task = Handler::within("billing", "pay", "1")?.task("invoice-7", &Input::from_json(br#"{"amount": 1200}"#)?)?;
//! let policy = Policy::new(Effect::Transactional);
//! let outcome = ledger
//!     .run_in_transaction(&mut client, &task, &policy, |tx, context| Box::pin(async move {
//!         let sql = "insert into payment (invoice, amount) values ($1, 1200)";
//!         tx.execute(sql, &[&context.key().id()]).await?;
//!         Ok(format!("paid in attempt {}", context.attempt()))
//!     }))
//!     .await?;
//! # drop(outcome); Ok(()) }
//! ```

mod beside;
mod steps;

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::key::Task;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::Policy;
use taskonce_core::record::Failure;
use taskonce_core::transaction::Attempted;
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_postgres::joint::{self, Joint, Meaning, Met};
use taskonce_postgres::tokio_postgres::{CancelToken, Client, NoTls, Transaction};
use taskonce_postgres::tx::{complete_held, lock_held, met, met_at_commit};
use taskonce_worker::outcome::encode;
use taskonce_worker::{Context, Outcome};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

pub use beside::Beside;
pub use steps::{StepIn, StepInTransaction};
pub use taskonce_core::held::Joined;
pub use taskonce_core::ledger::{Completion, Refused, Unresolved};
pub use taskonce_postgres::tx::steps::step_table_sql;
pub use taskonce_postgres::{CommitIn, CompleteIn, tokio_postgres};

/// How long a rollback is waited for before the claim's end is written: the record is held until then.
const ROLLBACK_WAIT: Duration = Duration::from_secs(1);
/// The longest that the server is asked to end a statement that nobody waits for, with the wait for one's turn.
const CANCEL_WAIT: Duration = Duration::from_secs(5);
/// How many connections of this process ask servers so at once. Where many runs are dropped together the others wait for their turn.
const CANCELS_MAX: usize = 4;
/// The turns.
static CANCELS: Semaphore = Semaphore::const_new(CANCELS_MAX);

/// What a handler returns, in a box.
pub type Handled<'t, T> = Pin<Box<dyn Future<Output = Result<T, Stop>> + Send + 't>>;

/// Why a handler does not go on: for a reason of its own, or an error of the database. `?` makes it of either.
#[derive(Debug)]
pub enum Stop {
    /// The attempt failed.
    Failure(Failure),
    /// A statement failed. A serialisation failure or a deadlock is tried again while the claim holds, and is not counted
    /// as a failed attempt; any other error is a failure that may be retried.
    Database(tokio_postgres::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failure(failure)
    }
}

impl From<tokio_postgres::Error> for Stop {
    fn from(error: tokio_postgres::Error) -> Stop {
        Stop::Database(error)
    }
}

/// Runs tasks whose effect is written in a PostgreSQL transaction: once, as long as delivery goes on and the record lives.
///
/// The policy's effect is [`Transactional`](crate::Effect::Transactional), and any other is refused. For each attempt a transaction is begun, the claim's
/// record locked in it, the handler run, the completion written with the handler's value, and all committed. A handler
/// that fails, panics or is cancelled leaves nothing. Heartbeats stand back meanwhile, and the server ends a transaction
/// that says nothing for a lease: calls to other services do not belong into it (see [`Context::step`]).
///
/// A serialisation failure or deadlock, the handler's own or at the commit, runs the handler again at once: at most 20 times a
/// claim, not counted as attempts. What became of a commit whose answer was lost is found out through the ledger's own
/// connections. The isolation level is the session's default (`default_transaction_isolation`); each is supported.
///
/// A handler that goes on after an error of a statement, and returns a value, has failed: its transaction cannot commit. It must
/// not end the transaction by a statement of its own.
pub trait RunInTransaction {
    /// Runs the task on this connection if it is free, and records what the handler returns in the handler's own
    /// transaction. A duplicate gets the first run's value.
    ///
    /// `client` is a [`Client`], or what derefs to one, such as an object of a pool. When the run is dropped
    /// half way the transaction is rolled back and the attempt has failed; a commit that was under way decides for itself. The
    /// server is asked to end the statement that it is at, unless the connection insists on TLS; one that the same client
    /// sends within that moment may be ended in its place, so such a client is better closed than used on.
    ///
    /// A transaction that is open on the connection already is never joined: one in which something was written is rolled back and
    /// refused ([`ErrorKind::WrongState`], nothing was run), one that has written nothing or has failed is rolled back, and the
    /// run's own begun.
    ///
    /// # Errors
    /// Those of [`Ledger::claim`]. [`ErrorKind::Unsupported`] for a ledger on another store, and for a connection to another
    /// database than the ledger's: then nothing was run. Those of the store when nobody can say what
    /// became of a commit: effect and record are stored both or neither, and the next delivery finds out.
    fn run_in_transaction<'h, T, H>(
        &self,
        client: &mut Client,
        task: &Task,
        policy: &Policy,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h;

    /// The same, but a busy or waiting task is waited for, at most `wait_max`; see [`Run::run_or_wait`](crate::Run).
    ///
    /// # Errors
    /// As for [`RunInTransaction::run_in_transaction`].
    fn run_in_transaction_or_wait<'h, T, H>(
        &self,
        client: &mut Client,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h;

    /// The same, with a connection for each try, so that one that broke is replaced: `lend` gets a connection and hands it to
    /// [`Try::on`], and returns what that returns. It is not called for a duplicate.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use taskonce::postgres::{RunInTransaction as _, tokio_postgres::{self, NoTls}};
    /// # async fn f(ledger: taskonce::Ledger, task: taskonce::Task, policy: taskonce::Policy) -> taskonce::Result<()> {
    /// let outcome = ledger
    ///     .run_in_transaction_on(
    ///         |attempt| Box::pin(async move {
    ///             // Or `let mut client = pool.get().await?;`
    ///             let (mut client, connection) = tokio_postgres::connect("postgres://ada@db.example/app", NoTls).await?;
    ///             tokio::spawn(connection);
    ///             Ok(attempt.on(&mut client).await)
    ///         }),
    ///         &task,
    ///         &policy,
    ///         Duration::ZERO,
    ///         |tx, _context| Box::pin(async move { Ok(tx.execute("insert into a values (1)", &[]).await?) }),
    ///     )
    ///     .await?;
    /// # drop(outcome); Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As for [`RunInTransaction::run_in_transaction`]. Where `lend` cannot get a connection, it is asked again while the claim holds.
    fn run_in_transaction_on<'h, T, L, H>(
        &self,
        lend: L,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        L: for<'t> FnMut(Try<'t, 'h, T>) -> Lent<'t, T> + Send + 'h,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h;
}

/// What a function that lends a connection returns, in a box: what became of the try, or why there is no connection.
pub type Lent<'t, T> =
    Pin<Box<dyn Future<Output = Result<Tried<T>, Box<dyn std::error::Error + Send + Sync>>> + Send + 't>>;

/// One try of a task's transaction, which needs a connection.
#[must_use = "the try needs a connection: call `on`"]
pub struct Try<'t, 'h, T> {
    context: Context,
    handler: &'t mut Handler<'h, T>,
}

type Handler<'h, T> = dyn for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h;

/// The transaction, as a handler is given it: a [`Transaction`] that the handler cannot end.
///
/// The lifetimes say that the handler may borrow what outlives the call that runs it.
pub struct Tx<'t, 'c, 'h> {
    tx: &'t mut Transaction<'c>,
    scope: PhantomData<&'c &'h ()>,
}

impl<'c> Deref for Tx<'_, 'c, '_> {
    type Target = Transaction<'c>;

    fn deref(&self) -> &Transaction<'c> {
        self.tx
    }
}

impl DerefMut for Tx<'_, '_, '_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.tx
    }
}

/// What became of a try: for the ledger.
#[must_use = "to be returned by the function that lent the connection"]
pub struct Tried<T>(Attempted<T>);

impl<T: Serialize + Send> Try<'_, '_, T> {
    /// Runs it on this connection.
    pub async fn on(self, client: &mut Client) -> Tried<T> {
        Tried(attempt(client, &self.context, self.handler).await)
    }
}

impl RunInTransaction for Ledger {
    async fn run_in_transaction<'h, T, H>(
        &self,
        client: &mut Client,
        task: &Task,
        policy: &Policy,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h,
    {
        self.run_in_transaction_or_wait(client, task, policy, Duration::ZERO, handler).await
    }

    async fn run_in_transaction_or_wait<'h, T, H>(
        &self,
        client: &mut Client,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h,
    {
        let parts = Mutex::new((client, handler));
        taskonce_worker::transaction::run_in_transaction(self, task, policy, wait_max, |context| {
            let parts = &parts;
            Box::pin(async move {
                // One try follows another, so nobody waits here.
                let mut parts = parts.lock().await;
                let (client, handler) = &mut *parts;
                if client.is_closed() {
                    return Attempted::Refused(closed(&context));
                }
                attempt(client, &context, handler).await
            })
        })
        .await
    }

    async fn run_in_transaction_on<'h, T, L, H>(
        &self,
        lend: L,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        L: for<'t> FnMut(Try<'t, 'h, T>) -> Lent<'t, T> + Send + 'h,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, Context) -> Handled<'t, T> + Send + 'h,
    {
        let parts = Mutex::new((lend, handler));
        taskonce_worker::transaction::run_in_transaction(self, task, policy, wait_max, |context| {
            let parts = &parts;
            Box::pin(async move {
                let mut parts = parts.lock().await;
                let (lend, handler) = &mut *parts;
                match lend(Try { context: context.clone(), handler }).await {
                    Ok(Tried(attempted)) => attempted,
                    Err(error) => {
                        let what = format!("no connection for the transaction: {error}");
                        Attempted::Unknown(None, Error::new(ErrorKind::Unreachable, what).about(about(&context)))
                    }
                }
            })
        })
        .await
    }
}

fn about(context: &Context) -> String {
    format!("task `{}`", context.key())
}

fn closed(context: &Context) -> Error {
    Error::new(ErrorKind::Unreachable, "the connection for the transaction is closed")
        .about(about(context))
        .with_hint("connect again, or lend a connection for each try: `run_in_transaction_on`")
}

/// One attempt: begins, locks, runs the handler, completes and commits.
async fn attempt<T: Serialize + Send>(
    client: &mut Client,
    context: &Context,
    handler: &mut Handler<'_, T>,
) -> Attempted<T> {
    let joint = match Joint::of(context.ledger(), context.held()) {
        Ok(joint) => joint.in_a_new_transaction(),
        Err(met) => return met.before_commit(),
    };
    let cancel = CancelOnDrop(Some(client.cancel_token()));
    let met = match client.transaction().await {
        Ok(tx) => return attempt_in(tx, cancel, &joint, context, handler).await,
        Err(error) => met(context.key(), &error),
    };
    not_begun(client, cancel, met).await.before_commit()
}

/// What it means that no transaction could be begun on a connection. One that has failed, and that somebody left open there, refuses
/// all but its end: it is rolled back.
async fn not_begun(client: &Client, cancel: CancelOnDrop, met: Met) -> Met {
    if met.meaning == Meaning::Aborted {
        let _rolled_back = timeout(ROLLBACK_WAIT, client.batch_execute("rollback")).await;
    }
    cancel.disarm();
    met.as_it_began()
}

async fn attempt_in<'c, T: Serialize + Send>(
    mut tx: Transaction<'c>,
    cancel: CancelOnDrop,
    joint: &Joint<'_>,
    context: &Context,
    handler: &mut Handler<'_, T>,
) -> Attempted<T> {
    let (ledger, held) = (context.ledger(), context.held());
    if let Err(met) = lock_held(joint, &tx).await {
        roll_back(tx, cancel).await;
        return met.before_commit();
    }
    held.enter();
    let value = match handler(Tx { tx: &mut tx, scope: PhantomData }, context.clone()).await {
        Ok(value) => value,
        Err(Stop::Failure(failure)) => {
            roll_back(tx, cancel).await;
            return Attempted::Failed(failure);
        }
        Err(Stop::Database(error)) => {
            let met = met(context.key(), &error);
            roll_back(tx, cancel).await;
            let code = error.code().map(|code| code.code().to_owned());
            return met.in_handler(code.as_deref(), Failure::from(error));
        }
    };
    if let Err(met) = complete_held(ledger, held, &tx, encode(&value)).await {
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
fn is_conflict(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| joint::is_conflict(code.code()))
}

/// Rolls back, and waits for it a little: the record is held until then.
async fn roll_back(tx: Transaction<'_>, cancel: CancelOnDrop) {
    // Where it cannot be said, the end of the connection does it.
    if timeout(ROLLBACK_WAIT, tx.rollback()).await.is_ok() {
        cancel.disarm();
    }
}

/// Asks the server to end what it runs for a transaction that nobody waits for any more: a statement that goes on would
/// hold the record for as long as it takes.
struct CancelOnDrop(Option<CancelToken>);

impl CancelOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        let Some(token) = self.0.take() else { return };
        // Without a runtime nothing is left that drives the connection, either.
        let Ok(runtime) = Handle::try_current() else { return };
        // The request has a connection of its own. Servers take it without TLS from everybody who knows the session's secret;
        // a client that insists on TLS does not send it so, and its statement runs to its end.
        runtime.spawn(async move {
            let ask = async {
                let _turn = CANCELS.acquire().await;
                token.cancel_query(NoTls).await
            };
            let _asked = timeout(CANCEL_WAIT, ask).await;
        });
    }
}
