//! Steps whose effect is in another PostgreSQL database than the ledger's records, by sqlx: `Beside`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Row as _};
use taskonce_core::key::Key;
use taskonce_core::record::{Failure, Output};
use taskonce_core::step::StepRow;
use taskonce_postgres::joint::{Meaning, Met};
use taskonce_postgres::tx::steps::{
    OPEN_MARK, OPEN_READ, STEP_INSERT, STEP_READ, STEP_WRITE, StepEntry, is_overtaken, met_at_step, step_is_over,
    step_limits_sql, step_not_answered, step_not_begun, step_not_ended, step_output, step_overtaken,
    transaction_is_open,
};
use taskonce_worker::StepContext;
use taskonce_worker::beside::{StepBeside, Turn};
use taskonce_worker::steps::StepOf;
use taskonce_worker::transaction::{NotRun, Tries};

use crate::cancel::{CancelOnDrop, Session};
use crate::hand::{met, unnamed};
use crate::run::{Handled, Tx, code_of, roll_back};
use crate::steps::{refused, stopped};

/// How many connections of the pool are looked at for one on which nobody's transaction is open.
const CONNECTIONS_MAX: usize = 10;

/// Runs a step whose effect is in another database than the ledger's records, with its row in a table beside the effect.
///
/// ```no_run
/// # use taskonce_core::policy::Effect;
/// # use taskonce_core::record::Failure;
/// # use taskonce_worker::Context;
/// use taskonce_sqlx::Beside as _;
///
/// # async fn handler(context: Context, shop: sqlx::PgPool) -> Result<(), Failure> {
/// let seat: i64 = context
///     .step_of("book", Effect::Transactional)
///     .input(&context.key().id())
///     .beside(&shop, |mut tx, _step| Box::pin(async move {
///         let sql = "insert into seat (number) values (7) returning id";
///         Ok(sqlx::query_scalar(sql).fetch_one(&mut *tx).await?)
///     }))
///     .await?;
/// # drop(seat); Ok(()) }
/// ```
///
/// The table is made by `taskonce migrate --steps --store URL`.
pub trait Beside: Sized {
    /// Runs the step in a transaction on a connection of this pool, unless its row is there: then the row's value is returned, and
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
    /// The step's kind is [`Transactional`](taskonce_core::policy::Effect::Transactional). `run` cannot end the transaction, and may
    /// use savepoints. A connection on which somebody left a transaction open is closed, and another taken. When the future is
    /// dropped the transaction is rolled back, and the server asked on a connection of its own to end the statement that it is at; a
    /// commit that was under way decides for itself, and the next run finds the row, or does not.
    ///
    /// # Errors
    /// To be returned by the handler: the step's own failure; a lost connection; a table that is missing (the message has the
    /// command that makes it). What is in the row for another input parks the task. A commit without an answer is a failure that may be retried.
    fn beside<'h, T, H>(self, pool: &PgPool, run: H) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h;
}

impl Beside for StepOf<'_> {
    async fn beside<'h, T, H>(self, pool: &PgPool, mut run: H) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
    {
        let step = match self.begin_beside().await? {
            Turn::Replay(value) => return Ok(value),
            Turn::Ask(step) => step,
        };
        let key = step.context().key();
        let mut tries = Tries::default();
        loop {
            let mut connection = connection_of(pool, key, step.name()).await.map_err(|met| step_not_begun(&met))?;
            let mut tx = connection.begin().await.map_err(|error| step_not_begun(&met(key, &error)))?;
            // Where it fails here, the transaction is dropped, and so rolled back.
            let session = limit(&step, &mut tx).await.map_err(|met| step_not_begun(&met))?;
            // Behind the transaction, and so dropped before it.
            let cancel = CancelOnDrop::armed(pool, session);
            match enter(&step, &mut tx).await {
                Ok(StepEntry::Run) => {
                    let committed = match ran(&step, &mut tx, &mut run).await {
                        Ok(ran) => {
                            // A commit decides for itself.
                            cancel.disarm();
                            let failed = |error| refused(error, |error| not_committed(step.name(), error, key));
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

/// A connection of the pool on which no transaction is open. One that has one is closed: sqlx does not know of it, or takes it for the
/// outer one of a savepoint.
async fn connection_of(pool: &PgPool, key: &Key, name: &str) -> Result<PoolConnection<Postgres>, Met> {
    for _ in 0..CONNECTIONS_MAX {
        let mut connection = pool.acquire().await.map_err(|error| met(key, &error))?;
        if !is_open(&mut connection, key).await? {
            return Ok(connection);
        }
        connection.close_on_drop();
    }
    Err(transaction_is_open(key, name))
}

async fn is_open(connection: &mut PgConnection, key: &Key) -> Result<bool, Met> {
    let asked = async {
        sqlx::query(OPEN_MARK).persistent(false).execute(&mut *connection).await?;
        sqlx::query_scalar(OPEN_READ).persistent(false).fetch_one(&mut *connection).await
    };
    match asked.await.map_err(|error| met(key, &error)) {
        Ok(is_open) => Ok(is_open),
        // One that has failed refuses every statement but its end.
        Err(met) if met.meaning == Meaning::Aborted => Ok(true),
        Err(met) => Err(met),
    }
}

/// The first statement of all in the transaction, and what names it.
async fn limit(step: &StepBeside<'_>, tx: &mut PgConnection) -> Result<Session, Met> {
    let sql = step_limits_sql(step.context().held().policy().lease);
    let met = |error| met(step.context().key(), &error);
    let row = unnamed(sql).fetch_one(tx).await.map_err(met)?;
    Session::in_row(&row, SESSION).map_err(met)
}

/// Where the row of [`step_limits_sql`] names the session and its transaction.
const SESSION: usize = 4;

/// Inserts a step's row, or reads the one that is there.
async fn enter(step: &StepBeside<'_>, tx: &mut PgConnection) -> Result<StepEntry, Met> {
    let key = step.context().key();
    let met = |error| met_at_step(key, met(key, &error));
    let insert = sqlx::query(STEP_INSERT)
        .persistent(false)
        .bind(key.as_str())
        .bind(step.name())
        .bind(step.input())
        .bind(i32::try_from(step.attempt()).unwrap_or(i32::MAX));
    match insert.fetch_optional(&mut *tx).await {
        Ok(Some(_mine)) => return Ok(StepEntry::Run),
        Ok(None) => {}
        Err(error) if code_of(&error).is_some_and(|code| is_overtaken(&code)) => return Ok(StepEntry::Anew),
        Err(error) => return Err(met(error)),
    }
    let read = sqlx::query(STEP_READ).persistent(false).bind(key.as_str()).bind(step.name());
    match read.fetch_optional(&mut *tx).await.map_err(met)? {
        None => Ok(StepEntry::Anew),
        Some(row) => step_row(&row).map(StepEntry::Done).map_err(met),
    }
}

fn step_row(row: &PgRow) -> Result<StepRow, sqlx::Error> {
    let (output, output_type): (Option<Vec<u8>>, Option<String>) = (row.try_get(1)?, row.try_get(2)?);
    let attempt: i32 = row.try_get(3)?;
    Ok(StepRow { input: row.try_get(0)?, output: output_type.zip(output), attempt: attempt.unsigned_abs() })
}

/// Runs the step's code, and writes what it returned.
async fn ran<'h, T, H>(step: &StepBeside<'_>, tx: &mut PgConnection, run: &mut H) -> Result<(T, Output), NotRun>
where
    T: Serialize + Send,
    H: for<'t> FnMut(Tx<'t, 'h>, StepContext) -> Handled<'t, T> + Send + 'h,
{
    let given = step.given().map_err(NotRun::Failed)?;
    let value = step.within(run(Tx::of(&mut *tx), given)).await.map_err(stopped)?;
    let output = step.output(&value).map_err(NotRun::Failed)?;
    end(step, tx, &output).await.map_err(|met| {
        let failure = step_not_ended(&met, step.name());
        if met.meaning == Meaning::Again { NotRun::Conflict(failure) } else { NotRun::Failed(failure) }
    })?;
    Ok((value, output))
}

async fn end(step: &StepBeside<'_>, tx: &mut PgConnection, output: &Output) -> Result<(), Met> {
    let (key, name) = (step.context().key(), step.name());
    let (bytes, content_type) = step_output(output);
    let write = sqlx::query(STEP_WRITE).persistent(false).bind(key.as_str()).bind(name).bind(bytes).bind(content_type);
    let written = write.execute(tx).await.map_err(|error| met_at_step(key, met(key, &error)))?;
    if written.rows_affected() == 1 { Ok(()) } else { Err(step_is_over(key, name)) }
}

fn not_committed(name: &str, error: sqlx::Error, key: &Key) -> Failure {
    if error.as_database_error().is_some() {
        return Failure::from(error);
    }
    step_not_answered(&met(key, &error), name)
}
