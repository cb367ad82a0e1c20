//! Steps whose effect is in another PostgreSQL database than the ledger's records, by tokio-postgres: `Beside`.

use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::key::Key;
use taskonce_core::record::{Failure, Output};
use taskonce_postgres::joint::Meaning;
use taskonce_postgres::tokio_postgres::{self, Client, Transaction};
use taskonce_postgres::tx::met;
use taskonce_postgres::tx::steps::{
    StepEntry, check_no_transaction, end_step, enter_step, step_not_answered, step_not_begun, step_not_ended,
    step_overtaken,
};
use taskonce_worker::StepContext;
use taskonce_worker::beside::{StepBeside, Turn};
use taskonce_worker::steps::StepOf;
use taskonce_worker::transaction::{NotRun, Tries};

use super::steps::{refused, stopped};
use super::{CancelOnDrop, Handled, Tx, roll_back};

/// Runs a step whose effect is in another database than the ledger's records, with its row in a table beside the effect.
///
/// ```no_run
/// # use taskonce::postgres::{Beside as _, tokio_postgres::Client};
/// # use taskonce::{Context, Effect, Failure};
/// # async fn handler(context: Context, mut shop: Client) -> Result<(), Failure> {
/// let seat: i64 = context
///     .step_of("book", Effect::Transactional)
///     .input(&context.key().id())
///     .beside(&mut shop, |tx, _step| Box::pin(async move {
///         Ok(tx.query_one("insert into seat (number) values (7) returning id", &[]).await?.get(0))
///     }))
///     .await?;
/// # drop(seat); Ok(()) }
/// ```
///
/// The table is made by `taskonce migrate --steps --store URL`, or from [`step_table_sql`](super::step_table_sql).
pub trait Beside: Sized {
    /// Runs the step in a transaction of this connection, unless its row is there: then the row's value is returned, and
    /// nothing runs. The ledger may be on any store.
    ///
    /// The row is inserted first of all, which waits while another run of the same step is under way; then the step's code
    /// runs, what it returned is written into the row, and all is committed. After that the step is recorded in the task's record,
    /// too. So the effect happens once, also when the claim was lost meanwhile: the row decides. `lock_timeout` and
    /// `idle_in_transaction_session_timeout` are one lease (at least 5 s) within the transaction, unless the session's are
    /// shorter. Heartbeats go on.
    ///
    /// A serialisation failure or a deadlock, of a statement or at the commit, rolls back and runs the step's code again, at most 20
    /// times and only while the lease lasts; no attempt is counted.
    ///
    /// The step's kind is [`Transactional`](crate::Effect::Transactional). `run` cannot end the transaction, and may use
    /// savepoints. A connection on which a transaction is open is refused, and left as it was: the step could not commit by itself
    /// there. When the future is dropped the transaction is rolled back; a commit that was under way decides for itself,
    /// and the next run finds the row, or does not.
    ///
    /// # Errors
    /// To be returned by the handler: the step's own failure; a lost connection; a table that is missing (the message has the
    /// command that makes it). What is in the row for another input parks the task. A commit without an answer is a failure that may be retried.
    fn beside<'h, T, H>(self, client: &mut Client, run: H) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send + 'h;
}

impl Beside for StepOf<'_> {
    async fn beside<'h, T, H>(self, client: &mut Client, mut run: H) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t, 'c> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    {
        let step = match self.begin_beside().await? {
            Turn::Replay(value) => return Ok(value),
            Turn::Ask(step) => step,
        };
        let (key, lease) = (step.context().key().clone(), step.context().held().policy().lease);
        check_no_transaction(client, &key, step.name()).await.map_err(|met| step_not_begun(&met))?;
        let mut tries = Tries::default();
        loop {
            let cancel = CancelOnDrop(Some(client.cancel_token()));
            let mut tx = match client.transaction().await {
                Ok(tx) => tx,
                Err(error) => {
                    cancel.disarm();
                    return Err(step_not_begun(&met(&key, &error)));
                }
            };
            match enter_step(&tx, &key, step.name(), step.input(), step.attempt(), lease).await {
                Ok(StepEntry::Run) => {
                    let committed = match ran(&step, &mut tx, &mut run).await {
                        Ok(ran) => {
                            // A commit decides for itself.
                            cancel.disarm();
                            let failed = |error| refused(error, |error| not_committed(step.name(), error, &key));
                            tx.commit().await.map(|()| ran).map_err(failed)
                        }
                        Err(not_run) => {
                            roll_back(tx, cancel).await;
                            Err(not_run)
                        }
                    };
                    match committed {
                        Ok((value, output)) => {
                            step.committed(output).await?;
                            return Ok(value);
                        }
                        Err(NotRun::Conflict(_)) if tries.again(step.context()).await => {}
                        Err(not_run) => return Err(not_run.into_failure()),
                    }
                }
                Ok(StepEntry::Done(row)) => {
                    roll_back(tx, cancel).await;
                    return step.found(row).await;
                }
                Ok(StepEntry::Anew) => {
                    roll_back(tx, cancel).await;
                    if !tries.again(step.context()).await {
                        return Err(step_overtaken(step.name()));
                    }
                }
                Err(met) => {
                    roll_back(tx, cancel).await;
                    return Err(step_not_begun(&met));
                }
            }
        }
    }
}

/// Runs the step's code, and writes what it returned.
async fn ran<'c, 'h: 'c, T, H>(
    step: &StepBeside<'_>,
    tx: &mut Transaction<'c>,
    run: &mut H,
) -> Result<(T, Output), NotRun>
where
    T: Serialize + Send,
    H: for<'t> FnMut(Tx<'t, 'c, 'h>, StepContext) -> Handled<'t, T> + Send,
{
    let given = step.given().map_err(NotRun::Failed)?;
    let value = step.within(run(Tx { tx, scope: PhantomData }, given)).await.map_err(stopped)?;
    let output = step.output(&value).map_err(NotRun::Failed)?;
    end_step(tx, step.context().key(), step.name(), &output).await.map_err(|met| {
        let failure = step_not_ended(&met, step.name());
        if met.meaning == Meaning::Again { NotRun::Conflict(failure) } else { NotRun::Failed(failure) }
    })?;
    Ok((value, output))
}

fn not_committed(name: &str, error: tokio_postgres::Error, key: &Key) -> Failure {
    if error.as_db_error().is_some() {
        return Failure::from(error);
    }
    step_not_answered(&met(key, &error), name)
}
