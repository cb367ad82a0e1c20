//! A step that is recorded in the transaction of its effect, by sqlx.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use taskonce_core::record::Failure;
use taskonce_postgres::joint::{Joint, Meaning, Met};
use taskonce_worker::step_in::{self, Turn};
use taskonce_worker::{Context, StepContext};

use crate::hand::{lock_record, replace_record};
use crate::run::{Handled, Stop, Tx};

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
    /// attempt has failed. [`RunInTransaction`](crate::RunInTransaction) begins anew by itself.
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
    let failed = |met: Met| Failure::retryable(format!("{}: {}", met.error, met.error.hint()));
    // Nothing of the step has run where this fails.
    let joint = Joint::of(context.ledger(), context.held()).map_err(|met| failed(met).nothing_happened())?;
    let found = match lock_record(&joint, tx).await {
        Ok((found, _session)) => Some(found),
        Err(met) if met.meaning == Meaning::Lost => None,
        Err(met) => return Err(failed(met).nothing_happened()),
    };
    let found = found.as_ref().map(|found| &*found.record);
    let value = match (step.turn(found)?, found) {
        (Turn::Replay(value), _) => value,
        (Turn::Run(given), Some(found)) => {
            let value = run(Tx::of(tx), given).await.map_err(|stop| match stop {
                Stop::Failure(failure) => failure,
                Stop::Database(error) => Failure::from(error),
            })?;
            let next = step.end(found, &value)?;
            replace_record(&joint, tx, found, &next).await.map_err(failed)?;
            value
        }
        (Turn::Run(_), None) => return Err(Failure::retryable("the claim is lost: the record is gone")),
    };
    step.ended();
    Ok(value)
}
