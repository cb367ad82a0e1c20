//! Steps whose effect is in another SQLite file than the ledger's records: `Beside`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::Error;
use taskonce_core::record::{Failure, Output};
use taskonce_core::step::StepRow;
use taskonce_core::store::Memory;
use taskonce_sqlite::rusqlite::{Connection, Transaction, TransactionBehavior};
use taskonce_sqlite::steps::{StepEntry, check_kept, end_step, enter_step};
use taskonce_worker::StepContext;
use taskonce_worker::beside::{StepBeside, Turn};
use taskonce_worker::steps::StepOf;

/// Runs a step whose effect is in another file than the ledger's records, with its row in a table beside the effect.
///
/// ```no_run
/// # use taskonce::sqlite::{Beside as _, rusqlite::Connection};
/// # use taskonce::{Context, Effect, Failure};
/// # async fn handler(context: Context, mut shop: Connection) -> Result<(), Failure> {
/// let seat: i64 = context
///     .step_of("book", Effect::Transactional)
///     .input(&context.key().id())
///     .beside(&mut shop, |tx, _step| {
///         Ok(tx.query_row("INSERT INTO seat (number) VALUES (7) RETURNING id", (), |row| row.get(0))?)
///     })
///     .await?;
/// # drop(seat); Ok(()) }
/// ```
///
/// The table is made by `taskonce migrate --steps --store sqlite:FILE`, or from [`step_table_sql`](super::step_table_sql).
pub trait Beside: Sized {
    /// Runs the step in a transaction of this connection, unless its row is there: then the row's value is returned, and
    /// nothing runs. The ledger may be on any store.
    ///
    /// The transaction takes the file's write lock first of all, and waits for it as long as the connection does (give it a
    /// busy timeout); then the row is inserted, the step's code runs, what it returned is written into the row, and all is
    /// committed. After that the step is recorded in the task's record, too. So the effect happens once, also when the claim was
    /// lost meanwhile: the row decides.
    ///
    /// The step's kind is [`Transactional`](crate::Effect::Transactional). The code blocks the thread that polls, from the lock
    /// to the commit; heartbeats have a thread of their own. It cannot be cut off half way. It must neither commit nor roll back;
    /// savepoints are its own. A connection on which a transaction is open is refused. The connection is of [`rusqlite`](super::rusqlite) as this crate has it, with `synchronous` at
    /// least `FULL` (its default) unless the ledger's store may forget, too.
    ///
    /// # Errors
    /// To be returned by the handler: the step's own failure; a file that is locked for too long; a table that is missing (the
    /// message has the command that makes it). What is in the row for another input parks the task.
    fn beside<T, H>(self, conn: &mut Connection, run: H) -> impl Future<Output = Result<T, Failure>> + Send
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(&Transaction<'_>, StepContext) -> Result<T, Failure> + Send;
}

impl Beside for StepOf<'_> {
    async fn beside<T, H>(self, conn: &mut Connection, run: H) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(&Transaction<'_>, StepContext) -> Result<T, Failure> + Send,
    {
        let step = match self.begin_beside().await? {
            Turn::Replay(value) => return Ok(value),
            Turn::Ask(step) => step,
        };
        match in_file(&step, conn, run)? {
            Ended::Committed(value, output) => {
                step.committed(output).await?;
                Ok(value)
            }
            Ended::Before(row) => step.found(row).await,
        }
    }
}

/// How the transaction has ended.
enum Ended<T> {
    Committed(T, Output),
    /// Another run's had, before.
    Before(StepRow),
}

fn in_file<T: Serialize>(
    step: &StepBeside<'_>,
    conn: &mut Connection,
    run: impl FnOnce(&Transaction<'_>, StepContext) -> Result<T, Failure>,
) -> Result<Ended<T>, Failure> {
    let told = |error: Error| Failure::retryable(format!("{error}: {}", error.hint()));
    let not_begun = |error: Error| told(error).nothing_happened();
    let key = step.context().key();
    if !conn.is_autocommit() {
        let what = format!(
            "a transaction is open on the connection of step `{}`, which would not commit by itself there: commit or roll back \
             before the step, or give it another connection",
            step.name()
        );
        return Err(Failure::retryable(what).nothing_happened());
    }
    if step.context().ledger().store().memory() == Memory::Keeps {
        check_kept(conn).map_err(not_begun)?;
    }
    let tx = match conn.transaction_with_behavior(TransactionBehavior::Immediate) {
        Ok(tx) => tx,
        Err(error) => {
            let what = format!("the file of step `{}` cannot be locked: {error}", step.name());
            return Err(Failure::retryable(what).nothing_happened());
        }
    };
    match enter_step(&tx, key, step.name(), step.input(), step.attempt()).map_err(not_begun)? {
        StepEntry::Done(row) => Ok(Ended::Before(row)),
        StepEntry::Run => {
            let given = step.given()?;
            let value = step.within_blocking(|| run(&tx, given))?;
            let output = step.output(&value)?;
            end_step(&tx, key, step.name(), &output).map_err(told)?;
            match tx.commit() {
                Ok(()) => Ok(Ended::Committed(value, output)),
                Err(error) => Err(Failure::from(error)),
            }
        }
    }
}
