//! Tasks whose effect is written in the transaction that completes them, on SQLite: `RunInTransaction`.
//!
//! Your tables lie in the ledger's own file, so that effect and record commit together: both, or neither, whatever is killed
//! when. [`CompleteIn`] is the same by hand, on a connection of your own.

mod beside;

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::key::Task;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::Policy;
use taskonce_core::record::Failure;
use taskonce_core::transaction::Attempted;
use taskonce_core::{Error, ErrorKind, Result, Retry};
use taskonce_sqlite::rusqlite::{ErrorCode, InterruptHandle, Transaction, TransactionBehavior};
use taskonce_sqlite::tx::{complete_held, connect_beside, fault_in, lock_held, lock_record, replace_record};
use taskonce_worker::outcome::encode;
use taskonce_worker::step_in::Turn;
use taskonce_worker::transaction::{Attempt, run_in_transaction};
use taskonce_worker::{Context, Outcome, StepContext};

pub use beside::Beside;
pub use taskonce_core::held::Joined;
pub use taskonce_core::ledger::{Completion, Refused, Unresolved};
pub use taskonce_sqlite::steps::step_table_sql;
pub use taskonce_sqlite::{CompleteIn, rusqlite};

/// Runs a task in a transaction of its own on the ledger's file.
///
/// ```
/// use taskonce::sqlite::RunInTransaction;
/// use taskonce::{Effect, Failure, Handler, Input, Policy};
///
/// # #[tokio::main] async fn main() -> taskonce::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let url = format!("sqlite:{}", folder.path().join("shop.db").display());
/// let ledger = taskonce::open(&url)?;
/// # let conn = taskonce::sqlite::rusqlite::Connection::open(folder.path().join("shop.db")).unwrap();
/// # conn.execute_batch("CREATE TABLE payment (invoice TEXT, amount INTEGER)").unwrap();
/// let task = Handler::new("pay", "1")?.task("invoice-42", &Input::from_json(b"1200")?)?;
/// let policy = Policy::new(Effect::Transactional);
///
/// let outcome = ledger
///     .run_in_transaction(&task, &policy, |tx, _context| {
///         tx.execute("INSERT INTO payment (invoice, amount) VALUES ('invoice-42', 1200)", ())?;
///         Ok::<_, Failure>("paid".to_owned())
///     })
///     .await?;
/// assert_eq!(outcome.into_value().as_deref(), Some("paid"));
/// # Ok(()) }
/// ```
///
/// # The rules
///
/// * The policy's effect is [`Transactional`](crate::Effect::Transactional), and any other is refused: the handler may run again
///   after its transaction was rolled back.
/// * The handler blocks, and runs on a thread for such. Its transaction is open already and holds the file's one write lock:
///   until it ends nobody else writes to the file, no task of any process is claimed, completed or renewed. So call other
///   services before, in a task or step of their own, and stay well below the shortest lease in use (default 30 s, renewed
///   every 10 s). Others who come for the task meanwhile are told that it is busy, or that the store is locked; both
///   mean: come again.
/// * It may be called again within one attempt, where SQLite refused the transaction for what others did. Nothing of the
///   call before is left then in the file.
/// * What it returns is encoded before the commit. One that cannot be encoded, or is larger than `output_max`, fails the
///   task for good, and nothing of it is left.
/// * It cannot commit or begin a transaction itself; savepoints are its own.
/// * When the future is dropped, or `run_max` has passed, the statement that runs is interrupted, and the transaction can
///   not commit any more, though the handler may go on until it returns. A commit that has begun is finished, and found
///   out by the ledger in the background.
pub trait RunInTransaction {
    /// Runs the handler if the task is free, and commits what it wrote together with the task's completion. A duplicate gets
    /// the first run's value.
    ///
    /// # Errors
    /// Those of [`Ledger::claim`]; [`ErrorKind::Unsupported`] where the ledger is not over SQLite; those of the file.
    fn run_in_transaction<T, H>(
        &self,
        task: &Task,
        policy: &Policy,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        H: FnMut(&Transaction<'_>, &Context) -> Result<T, Failure> + Send + 'static;

    /// The same, but a busy or waiting task is waited for, at most `wait_max`; see [`crate::Run::run_or_wait`].
    ///
    /// # Errors
    /// As for [`run_in_transaction`](RunInTransaction::run_in_transaction).
    fn run_in_transaction_or_wait<T, H>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> impl Future<Output = Result<Outcome<T>>> + Send
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        H: FnMut(&Transaction<'_>, &Context) -> Result<T, Failure> + Send + 'static;
}

impl RunInTransaction for Ledger {
    async fn run_in_transaction<T, H>(&self, task: &Task, policy: &Policy, handler: H) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        H: FnMut(&Transaction<'_>, &Context) -> Result<T, Failure> + Send + 'static,
    {
        self.run_in_transaction_or_wait(task, policy, Duration::ZERO, handler).await
    }

    async fn run_in_transaction_or_wait<T, H>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        H: FnMut(&Transaction<'_>, &Context) -> Result<T, Failure> + Send + 'static,
    {
        let handler = Arc::new(Mutex::new(handler));
        run_in_transaction(self, task, policy, wait_max, |context| -> Attempt<'static, T> {
            let handler = Arc::clone(&handler);
            Box::pin(async move {
                let fate = Arc::new(Fate::default());
                let _caller = Caller(Arc::clone(&fate));
                let attempt = tokio::task::spawn_blocking(move || {
                    let mut handler = handler.lock().unwrap_or_else(PoisonError::into_inner);
                    attempt(&context, &fate, &mut *handler)
                });
                match attempt.await {
                    Ok(attempted) => attempted,
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(error) => Attempted::Again(
                            Error::new(ErrorKind::Unreachable, "the runtime runs nothing more").with_source(error),
                        ),
                    },
                }
            })
        })
        .await
    }
}

/// The same in the calling thread, for the blocking ledger.
pub(crate) async fn run_here<T, H>(
    ledger: &Ledger,
    task: &Task,
    policy: &Policy,
    wait_max: Duration,
    handler: H,
) -> Result<Outcome<T>>
where
    T: Serialize + DeserializeOwned + Send,
    H: FnMut(&Transaction<'_>, &Context) -> Result<T, Failure> + Send,
{
    let handler = Arc::new(Mutex::new(handler));
    run_in_transaction(ledger, task, policy, wait_max, |context| -> Attempt<'_, T> {
        let handler = Arc::clone(&handler);
        Box::pin(async move {
            let mut handler = handler.lock().unwrap_or_else(PoisonError::into_inner);
            attempt(&context, &Arc::new(Fate::default()), &mut *handler)
        })
    })
    .await
}

/// Records a step in a transaction of the handler's own on the ledger's file, so that the step's effect commits with it.
///
/// For handlers of several steps, run by [`Run::run`](crate::Run::run). A handler that is one transaction as a whole needs no
/// steps: [`RunInTransaction`] runs it.
pub trait StepIn {
    /// Runs a step in this transaction, unless a run before has ended it: then its recorded value is returned, and nothing
    /// runs. To be called before the transaction has read anything; then commit, also after a replay.
    ///
    /// It blocks; call it on a thread for such, or where blocking is no harm. It takes the file's write lock, which is held until
    /// the transaction ends: see [`CompleteIn`] for what that means for others. Heartbeats go on, and wait for it.
    ///
    /// Where the transaction is rolled back the step is not recorded, and the attempt fails before its next step, or
    /// when the handler returns.
    ///
    /// # Errors
    /// The step's own failure, or why it could not be run or recorded: roll back, and return it from the handler.
    fn step_in<T: Serialize + DeserializeOwned>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        run: impl FnOnce(StepContext) -> Result<T, Failure>,
    ) -> Result<T, Failure>;

    /// The same with what the step works on. A later run with another input does not get its value, but parks the task.
    ///
    /// # Errors
    /// As for [`step_in`](StepIn::step_in).
    fn step_in_with<T: Serialize + DeserializeOwned>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        input: &impl Serialize,
        run: impl FnOnce(StepContext) -> Result<T, Failure>,
    ) -> Result<T, Failure>;
}

impl StepIn for Context {
    fn step_in<T: Serialize + DeserializeOwned>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        run: impl FnOnce(StepContext) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        step_in(self, tx, self.begin_step_in(name)?, run)
    }

    fn step_in_with<T: Serialize + DeserializeOwned>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        input: &impl Serialize,
        run: impl FnOnce(StepContext) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        step_in(self, tx, self.begin_step_in(name)?.input(input)?, run)
    }
}

fn step_in<T: Serialize + DeserializeOwned>(
    context: &Context,
    tx: &Transaction<'_>,
    step: taskonce_worker::step_in::StepIn<'_>,
    run: impl FnOnce(StepContext) -> Result<T, Failure>,
) -> Result<T, Failure> {
    // Nothing of the step has run where this fails.
    let not_locked = |error: Error| Failure::retryable(format!("{error}: {}", error.hint())).nothing_happened();
    let found = lock_record(context.ledger(), context.key(), tx).map_err(not_locked)?;
    let found = found.as_ref().map(|found| &*found.record);
    let value = match (step.turn(found)?, found) {
        (Turn::Replay(value), _) => value,
        (Turn::Run(given), Some(found)) => {
            let value = run(given)?;
            if tx.is_autocommit() {
                return Err(Failure::retryable("the transaction of the step was over before its code returned"));
            }
            let next = step.end(found, &value)?;
            replace_record(context.key(), tx, found, &next)?;
            value
        }
        (Turn::Run(_), None) => return Err(Failure::retryable("the claim is lost: the record is gone")),
    };
    step.ended();
    Ok(value)
}

/// One attempt: begin, lock, handler, complete, commit. What goes wrong before the commit is rolled back.
fn attempt<T: Serialize>(
    context: &Context,
    fate: &Arc<Fate>,
    handler: &mut impl FnMut(&Transaction<'_>, &Context) -> Result<T, Failure>,
) -> Attempted<T> {
    let (ledger, held) = (context.ledger(), context.held());
    let mut conn = match connect_beside(ledger) {
        Ok(conn) => conn,
        Err(error) => return Attempted::Refused(error),
    };
    fate.can_interrupt(conn.get_interrupt_handle());
    let hook = Arc::clone(fate);
    // True turns a commit into a rollback.
    if let Err(error) = conn.commit_hook(Some(move || !hook.commits())) {
        return Attempted::Refused(fault_in(ledger, "opening", error));
    }
    let tx = match conn.transaction_with_behavior(TransactionBehavior::Immediate) {
        Ok(tx) => tx,
        Err(error) => return not_begun(fault_in(ledger, "waiting for the turn to write", error)),
    };
    match lock_held(ledger, held, &tx) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::ClaimLost => return Attempted::Lost,
        Err(error) => return not_begun(error),
    }
    if !fate.is_open() {
        return given_up();
    }
    held.enter();
    let value = match handler(&tx, context) {
        Ok(value) => value,
        Err(failure) => return Attempted::Failed(failure),
    };
    if tx.is_autocommit() {
        let what = "the transaction was over before its handler returned: an error of SQLite's that the handler passed over, \
                    or a statement of its own, rolled it back";
        return Attempted::Failed(Failure::retryable(what));
    }
    if let Err(error) = complete_held(ledger, held, &tx, encode(&value)) {
        return match error.kind().retry() {
            Retry::Later => Attempted::Again(error),
            Retry::Elsewhere | Retry::Never => {
                Attempted::Failed(Failure::permanent(format!("{error}: {}", error.hint())))
            }
        };
    }
    if !fate.is_ready() {
        return given_up();
    }
    match tx.commit() {
        Ok(()) => Attempted::Committed(value),
        // What the handler wrote breaks a constraint that is checked at the commit: dropped, it is rolled back.
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
            Attempted::Failed(Failure::from(error))
        }
        Err(_) if !fate.is_committing() => given_up(),
        Err(error) => Attempted::Unknown(Some(value), fault_in(ledger, "committing", error)),
    }
}

/// Nothing of the caller's ran.
fn not_begun<T>(error: Error) -> Attempted<T> {
    if matches!(error.kind(), ErrorKind::Locked | ErrorKind::TimedOut) {
        return Attempted::Again(error);
    }
    Attempted::Refused(error)
}

/// Nobody listens: the caller has decided another end.
fn given_up<T>() -> Attempted<T> {
    Attempted::Failed(Failure::retryable("given up before the commit"))
}

/// Whether an attempt may commit: decided once, by whoever comes first, its caller who gives up or its commit.
#[derive(Default)]
struct Fate {
    stage: AtomicU8,
    interrupt: Mutex<Option<InterruptHandle>>,
}

/// The handler runs: nothing may commit.
const OPEN: u8 = 0;
/// The completion is written: the next commit is the one.
const READY: u8 = 1;
/// The commit has begun.
const COMMITTING: u8 = 2;
/// The caller has gone: nothing may commit any more.
const GIVEN_UP: u8 = 3;

impl Fate {
    fn moves(&self, from: u8, to: u8) -> bool {
        self.stage.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn is_open(&self) -> bool {
        self.stage.load(Ordering::SeqCst) == OPEN
    }

    fn is_committing(&self) -> bool {
        self.stage.load(Ordering::SeqCst) == COMMITTING
    }

    /// The completion is written. Says whether it may still be committed.
    fn is_ready(&self) -> bool {
        self.moves(OPEN, READY)
    }

    /// Asked by SQLite at each commit on the connection: says whether it is the one.
    fn commits(&self) -> bool {
        self.moves(READY, COMMITTING)
    }

    fn can_interrupt(&self, handle: InterruptHandle) {
        *self.interrupt.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
    }

    fn give_up(&self) {
        if (self.moves(OPEN, GIVEN_UP) || self.moves(READY, GIVEN_UP))
            && let Some(handle) = &*self.interrupt.lock().unwrap_or_else(PoisonError::into_inner)
        {
            handle.interrupt();
        }
    }
}

/// Who waits for the attempt. Dropped before its commit has begun, it can not commit any more.
struct Caller(Arc<Fate>);

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.give_up();
    }
}
