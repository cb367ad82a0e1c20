//! Steps whose effect is on the ledger's own PostgreSQL database, by tokio-postgres: recorded in the transaction of their effect.

use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::record::{Failure, Found};
use taskonce_postgres::joint::{Joint, Meaning, Met};
use taskonce_postgres::tokio_postgres::{self, Client, Transaction};
use taskonce_postgres::tx::{lock_record, met, replace_record};
use taskonce_worker::step_in::{self, Turn};
use taskonce_worker::steps::StepOf;
use taskonce_worker::transaction::{NotRun, Tries};
use taskonce_worker::{Context, StepContext};

use super::{CancelOnDrop, Handled, Stop, Tx, is_conflict, roll_back};

/// Records a step in a transaction of the handler's own on the ledger's database, so that the step's effect commits with it.
///
/// For handlers of several steps, run by [`Run::run`](crate::Run::run). A handler that is one transaction as a whole needs no
/// steps: [`RunInTransaction`](super::RunInTransaction) runs it.
///
/// ```no_run
/// # use taskonce::postgres::{StepIn as _, tokio_postgres::Client};
/// # use taskonce::{Context, Failure};
/// # async fn handler(context: Context, mut client: Client) -> Result<(), Failure> {
/// let tx = client.transaction().await?;
/// let order: i64 = context
///     .step_in(&tx, "reserve", |_step| async {
///         Ok(tx.query_one("insert into reservation (seat) values (7) returning id", &[]).await?.get(0))
///     })
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
    fn step_in<T, F>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Stop>> + Send;

    /// The same with what the step works on. A later run with another input does not get its value, but parks the task.
    ///
    /// # Errors
    /// As for [`step_in`](StepIn::step_in).
    fn step_in_with<T, F>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        input: &(impl Serialize + Sync),
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Stop>> + Send;
}

impl StepIn for Context {
    async fn step_in<T, F>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Stop>> + Send,
    {
        step_in(self, tx, self.begin_step_in(name)?, run).await
    }

    async fn step_in_with<T, F>(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        input: &(impl Serialize + Sync),
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Stop>> + Send,
    {
        step_in(self, tx, self.begin_step_in(name)?.input(input)?, run).await
    }
}

async fn step_in<T, F>(
    context: &Context,
    tx: &Transaction<'_>,
    step: step_in::StepIn<'_>,
    run: impl FnOnce(StepContext) -> F + Send,
) -> Result<T, Failure>
where
    T: Serialize + DeserializeOwned + Send,
    F: Future<Output = Result<T, Stop>> + Send,
{
    // Nothing of the step has run where this fails.
    let not_begun = |met: Met| told(&met).nothing_happened();
    let joint = Joint::of(context.ledger(), context.held()).map_err(not_begun)?;
    let found = found_in(&joint, tx).await.map_err(not_begun)?;
    let value = match step.turn(found.as_ref().map(|found| &*found.record))? {
        Turn::Replay(value) => value,
        Turn::Run(given) => {
            let value = run(given).await.map_err(|stop| stopped(stop).into_failure())?;
            write_end(&joint, &step, tx, found.as_ref(), value).await.map_err(NotRun::into_failure)?
        }
    };
    step.ended();
    Ok(value)
}

/// Runs a step in a transaction of its own on the ledger's database, which is begun and committed for it.
///
/// ```no_run
/// # use taskonce::postgres::{StepInTransaction as _, tokio_postgres::Client};
/// # use taskonce::{Context, Effect, Failure};
/// # async fn handler(context: Context, mut client: Client) -> Result<(), Failure> {
/// let seat: i64 = context
///     .step_of("reserve", Effect::Transactional)
///     .in_transaction(&mut client, |tx, _step| Box::pin(async move {
///         Ok(tx.query_one("insert into reservation (seat) values (7) returning id", &[]).await?.get(0))
///     }))
///     .await?;
/// # drop(seat); Ok(()) }
/// ```
pub trait StepInTransaction: Sized {
    /// Runs the step, unless a run before has ended it: then its recorded value is returned, and nothing runs.
    ///
    /// A serialisation failure or a deadlock, of a statement or at the commit, rolls back and runs the step's code again, at most 20
    /// times and only while the lease lasts; no attempt is counted. `run` cannot end the transaction, and may use savepoints.
    /// A transaction that is open on the connection already is rolled back, and where it had written something the step is refused.
    /// When the future is dropped the transaction is rolled back; a commit that was under way decides for itself.
    ///
    /// # Errors
    /// To be returned by the handler: the step's own failure, or why it could not be run or recorded. A commit without an
    /// answer is a failure that may be retried: the next run finds the step recorded, or runs it.
    fn in_transaction<'h, T, H>(self, client: &mut Client, run: H) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send + 'h;
}

impl StepInTransaction for StepOf<'_> {
    async fn in_transaction<'h, T, H>(self, client: &mut Client, mut run: H) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    {
        let mut tries = Tries::default();
        loop {
            match try_once(&self, client, &mut run).await {
                Err(NotRun::Conflict(_)) if tries.again(self.context()).await => {}
                ran => return ran.map_err(NotRun::into_failure),
            }
        }
    }
}

/// One try: begins, locks, runs the step's code, records it and commits.
async fn try_once<'h, T, H>(of: &StepOf<'_>, client: &mut Client, run: &mut H) -> Result<T, NotRun>
where
    T: Serialize + DeserializeOwned + Send,
    H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
{
    let context = of.context();
    let step = of.begin_in().map_err(NotRun::Failed)?;
    let joint = Joint::of(context.ledger(), context.held()).map_err(not_begun)?.in_a_new_transaction();
    let cancel = CancelOnDrop(Some(client.cancel_token()));
    let met = match client.transaction().await {
        Ok(tx) => return try_in(tx, cancel, &joint, of, step, run).await,
        Err(error) => met(context.key(), &error),
    };
    Err(not_begun(super::not_begun(client, cancel, met).await))
}

async fn try_in<'c, 'h: 'c, T, H>(
    mut tx: Transaction<'c>,
    cancel: CancelOnDrop,
    joint: &Joint<'_>,
    of: &StepOf<'_>,
    step: step_in::StepIn<'_>,
    run: &mut H,
) -> Result<T, NotRun>
where
    T: Serialize + DeserializeOwned + Send,
    H: for<'t> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send,
{
    let value = match locked(joint, &step, &mut tx, run).await {
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

async fn locked<'c, 'h: 'c, T, H>(
    joint: &Joint<'_>,
    step: &step_in::StepIn<'_>,
    tx: &mut Transaction<'c>,
    run: &mut H,
) -> Result<T, NotRun>
where
    T: Serialize + DeserializeOwned + Send,
    H: for<'t> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send,
{
    let found = found_in(joint, tx).await.map_err(not_begun)?;
    match step.turn(found.as_ref().map(|found| &*found.record)).map_err(NotRun::Failed)? {
        Turn::Replay(value) => Ok(value),
        Turn::Run(given) => {
            let value = run(Tx { tx, scope: PhantomData }, given).await.map_err(stopped)?;
            write_end(joint, step, tx, found.as_ref(), value).await
        }
    }
}

/// What the transaction has locked of the task; nothing where the claim is lost.
async fn found_in(joint: &Joint<'_>, tx: &Transaction<'_>) -> Result<Option<Found>, Met> {
    match lock_record(joint, tx).await {
        Ok(found) => Ok(Some(found)),
        Err(met) if met.meaning == Meaning::Lost => Ok(None),
        Err(met) => Err(met),
    }
}

/// Writes that the step has ended with this value.
async fn write_end<T: Serialize + Send>(
    joint: &Joint<'_>,
    step: &step_in::StepIn<'_>,
    tx: &Transaction<'_>,
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

fn not_committed(of: &StepOf<'_>, error: tokio_postgres::Error) -> Failure {
    if error.as_db_error().is_some() {
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
pub(super) fn stopped(stop: Stop) -> NotRun {
    match stop {
        Stop::Failure(failure) => NotRun::Failed(failure),
        Stop::Database(error) => refused(error, Failure::from),
    }
}

/// A statement or the commit met this.
pub(super) fn refused(error: tokio_postgres::Error, failure: impl FnOnce(tokio_postgres::Error) -> Failure) -> NotRun {
    let is_conflict = is_conflict(&error);
    let failure = failure(error);
    if is_conflict { NotRun::Conflict(failure) } else { NotRun::Failed(failure) }
}
