//! A step that is recorded in the transaction of its effect, by sqlx.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Transaction};
use taskonce_core::record::{Failure, Found};
use taskonce_postgres::joint::{Joint, Meaning, Met};
use taskonce_worker::step_in::{self, Turn};
use taskonce_worker::steps::StepOf;
use taskonce_worker::transaction::{NotRun, Tries};
use taskonce_worker::{Context, StepContext};
use tokio::time::timeout;

use crate::cancel::{CancelOnDrop, Session};
use crate::hand::{lock_record, met, replace_record};
use crate::run::{Handled, ROLLBACK_WAIT, Stop, Tx, is_conflict, roll_back};

/// Records a step in a transaction of the handler's own on the ledger's database, so that the step's effect commits with it.
///
/// For handlers of several steps, run by the worker's `run`. A handler that is one transaction as a whole needs no steps.
///
/// ```no_run
/// # use taskonce_core::record::Failure;
/// # use taskonce_worker::Context;
/// use taskonce_sqlx::StepIn as _;
///
/// # async fn handler(context: Context, pool: sqlx::PgPool) -> Result<(), Failure> {
/// let mut tx = pool.begin().await?;
/// let order: i64 = context
///     .step_in(&mut tx, "reserve", |mut tx, _step| Box::pin(async move {
///         let sql = "insert into reservation (seat) values (7) returning id";
///         Ok(sqlx::query_scalar(sql).fetch_one(&mut *tx).await?)
///     }))
///     .await?;
/// tx.commit().await?;
/// # drop(order); Ok(()) }
/// ```
pub trait StepIn {
    /// Runs a step in this transaction, unless a run before has ended it: then its recorded value is returned, and nothing
    /// runs. Commit then, also after a replay.
    ///
    /// The task's record is locked until the transaction ends; heartbeats pass it over, so a transaction is shorter than the
    /// lease. Where it is rolled back the step is not recorded, and the attempt fails before its next step, or when the
    /// handler returns.
    ///
    /// Above READ COMMITTED call it before the transaction has read anything: else a heartbeat that came in between refuses it
    /// (`40001`). The handler may then roll back, begin anew and ask for the same step again; where it returns the failure, the
    /// attempt has failed. [`StepInTransaction`] begins anew by itself.
    ///
    /// # Errors
    /// The step's own failure, or why it could not be run or recorded: roll back, and return it from the handler.
    fn step_in<'h, T>(
        &self,
        tx: &mut PgConnection,
        name: &str,
        run: impl for<'t> FnOnce(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    ) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send;

    /// The same with what the step works on. A later run with another input does not get its value, but parks the task.
    ///
    /// # Errors
    /// As for [`step_in`](StepIn::step_in).
    fn step_in_with<'h, T>(
        &self,
        tx: &mut PgConnection,
        name: &str,
        input: &(impl Serialize + Sync),
        run: impl for<'t> FnOnce(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    ) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send;
}

impl StepIn for Context {
    async fn step_in<'h, T>(
        &self,
        tx: &mut PgConnection,
        name: &str,
        run: impl for<'t> FnOnce(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
    {
        step_in(self, tx, self.begin_step_in(name)?, run).await
    }

    async fn step_in_with<'h, T>(
        &self,
        tx: &mut PgConnection,
        name: &str,
        input: &(impl Serialize + Sync),
        run: impl for<'t> FnOnce(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
    {
        step_in(self, tx, self.begin_step_in(name)?.input(input)?, run).await
    }
}

async fn step_in<'h, T>(
    context: &Context,
    tx: &mut PgConnection,
    step: step_in::StepIn<'_>,
    run: impl for<'t> FnOnce(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
) -> Result<T, Failure>
where
    T: Serialize + DeserializeOwned + Send,
{
    // Nothing of the step has run where this fails.
    let failed = |met: Met| told(&met).nothing_happened();
    let joint = Joint::of(context.ledger(), context.held()).map_err(failed)?;
    let found = found_in(&joint, tx).await.map_err(failed)?.map(|(found, _session)| found);
    let value = match step.turn(found.as_ref().map(|found| &*found.record))? {
        Turn::Replay(value) => value,
        Turn::Run(given) => {
            let value = run(Tx::of(tx), given).await.map_err(|stop| stopped(stop).into_failure())?;
            write_end(&joint, &step, tx, found.as_ref(), value).await.map_err(NotRun::into_failure)?
        }
    };
    step.ended();
    Ok(value)
}

/// Runs a step in a transaction of its own on the ledger's database, which is begun and committed for it.
///
/// ```no_run
/// # use taskonce_core::policy::Effect;
/// # use taskonce_core::record::Failure;
/// # use taskonce_worker::Context;
/// use taskonce_sqlx::StepInTransaction as _;
///
/// # async fn handler(context: Context, pool: sqlx::PgPool) -> Result<(), Failure> {
/// let seat: i64 = context
///     .step_of("reserve", Effect::Transactional)
///     .in_transaction(&pool, |mut tx, _step| Box::pin(async move {
///         let sql = "insert into reservation (seat) values (7) returning id";
///         Ok(sqlx::query_scalar(sql).fetch_one(&mut *tx).await?)
///     }))
///     .await?;
/// # drop(seat); Ok(()) }
/// ```
pub trait StepInTransaction: Sized {
    /// Runs the step, unless a run before has ended it: then its recorded value is returned, and nothing runs.
    ///
    /// A serialisation failure or a deadlock, of a statement or at the commit, rolls back and runs the step's code again, at most 20
    /// times and only while the lease lasts; no attempt is counted. A transaction that somebody left open on a connection of the
    /// pool is rolled back, and the step begins its own.
    ///
    /// # Errors
    /// To be returned by the handler: the step's own failure, or why it could not be run or recorded. A commit without an
    /// answer is a failure that may be retried: the next run finds the step recorded, or runs it.
    fn in_transaction<'h, T, H>(self, pool: &PgPool, run: H) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h;
}

impl StepInTransaction for StepOf<'_> {
    async fn in_transaction<'h, T, H>(self, pool: &PgPool, mut run: H) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    {
        let mut tries = Tries::default();
        loop {
            match try_once(&self, pool, &mut run).await {
                Err(NotRun::Conflict(_)) if tries.again(self.context()).await => {}
                ran => return ran.map_err(NotRun::into_failure),
            }
        }
    }
}

/// One try: begins, locks, runs the step's code, records it and commits.
async fn try_once<'h, T, H>(of: &StepOf<'_>, pool: &PgPool, run: &mut H) -> Result<T, NotRun>
where
    T: Serialize + DeserializeOwned + Send,
    H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
{
    let context = of.context();
    let step = of.begin_in().map_err(NotRun::Failed)?;
    let joint = Joint::of(context.ledger(), context.held()).map_err(not_begun)?.in_a_new_transaction();
    let mut connection = pool.acquire().await.map_err(|error| not_begun(met(context.key(), &error)))?;
    let met = match connection.begin().await {
        Ok(tx) => return try_in(tx, pool, &joint, of, step, run).await,
        Err(error) => met(context.key(), &error),
    };
    // Its server may be in a transaction that somebody left open, and that has failed.
    connection.close_on_drop();
    Err(not_begun(met.as_it_began()))
}

async fn try_in<'h, T, H>(
    mut tx: Transaction<'_, Postgres>,
    pool: &PgPool,
    joint: &Joint<'_>,
    of: &StepOf<'_>,
    step: step_in::StepIn<'_>,
    run: &mut H,
) -> Result<T, NotRun>
where
    T: Serialize + DeserializeOwned + Send,
    H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
{
    let locked = match found_in(joint, &mut tx).await {
        Ok(locked) => locked,
        Err(met) => {
            let _rolled_back = timeout(ROLLBACK_WAIT, tx.rollback()).await;
            return Err(not_begun(met));
        }
    };
    let Some((found, session)) = locked else {
        let lost = Failure::retryable("the claim is lost: another took over, or the record is gone").nothing_happened();
        return Err(NotRun::Failed(lost));
    };
    // Behind the transaction, and so dropped before it.
    let cancel = CancelOnDrop::armed(pool, session);
    let ran = match step.turn(Some(&found.record)) {
        Ok(Turn::Replay(value)) => Ok(value),
        Ok(Turn::Run(given)) => match run(Tx::of(&mut tx), given).await {
            Ok(value) => write_end(joint, &step, &mut tx, Some(&found), value).await,
            Err(stop) => Err(stopped(stop)),
        },
        Err(failure) => Err(NotRun::Failed(failure)),
    };
    let value = match ran {
        Ok(value) => value,
        Err(not_run) => {
            roll_back(tx, cancel).await;
            return Err(not_run);
        }
    };
    // A commit decides for itself.
    cancel.disarm();
    tx.commit().await.map_err(|error| refused(error, |error| not_committed(of, error)))?;
    step.ended();
    Ok(value)
}

/// What the transaction has locked of the task, and in which session; nothing where the claim is lost.
async fn found_in(joint: &Joint<'_>, tx: &mut PgConnection) -> Result<Option<(Found, Session)>, Met> {
    match lock_record(joint, tx).await {
        Ok(locked) => Ok(Some(locked)),
        Err(met) if met.meaning == Meaning::Lost => Ok(None),
        Err(met) => Err(met),
    }
}

/// Writes that the step has ended with this value.
async fn write_end<T: Serialize + Send>(
    joint: &Joint<'_>,
    step: &step_in::StepIn<'_>,
    tx: &mut PgConnection,
    found: Option<&Found>,
    value: T,
) -> Result<T, NotRun> {
    let Some(Found { record, .. }) = found else {
        return Err(NotRun::Failed(Failure::retryable("the claim is lost: the record is gone")));
    };
    let next = step.end(record, &value).map_err(NotRun::Failed)?;
    replace_record(joint, tx, record, &next).await.map(|()| value).map_err(|met| match met.meaning {
        Meaning::Again => NotRun::Conflict(told(&met)),
        Meaning::Aborted => NotRun::Failed(Failure::retryable(
            "a statement of the step failed, and its code went on: the transaction could not commit",
        )),
        Meaning::Broken | Meaning::Lost | Meaning::Refused | Meaning::RolledBack | Meaning::Unusable => {
            NotRun::Failed(told(&met))
        }
    })
}

fn told(met: &Met) -> Failure {
    Failure::retryable(format!("{}: {}", met.error, met.error.hint()))
}

fn not_committed(of: &StepOf<'_>, error: sqlx::Error) -> Failure {
    if error.as_database_error().is_some() {
        return Failure::from(error);
    }
    let met = met(of.context().key(), &error);
    Failure::retryable(format!(
        "the commit of step `{}` was not answered, and the next run finds it recorded or runs it: {}",
        of.name(),
        met.error
    ))
}

/// The record could not be locked.
fn not_begun(met: Met) -> NotRun {
    match met.meaning {
        Meaning::Again => NotRun::Conflict(told(&met)),
        Meaning::Broken
        | Meaning::Lost
        | Meaning::Aborted
        | Meaning::Refused
        | Meaning::RolledBack
        | Meaning::Unusable => NotRun::Failed(told(&met).nothing_happened()),
    }
}

/// The step's code did not go on.
pub(crate) fn stopped(stop: Stop) -> NotRun {
    match stop {
        Stop::Failure(failure) => NotRun::Failed(failure),
        Stop::Database(error) => refused(error, Failure::from),
    }
}

/// A statement or the commit met this.
pub(crate) fn refused(error: sqlx::Error, failure: impl FnOnce(sqlx::Error) -> Failure) -> NotRun {
    let is_conflict = is_conflict(&error);
    let failure = failure(error);
    if is_conflict { NotRun::Conflict(failure) } else { NotRun::Failed(failure) }
}
