//! A claim in a transaction of the caller's, by tokio-postgres: the record is locked first, and completed in the transaction
//! that has the effect.
//!
//! The one-call form, which also begins, commits and tries again, is the facade's `run_in_transaction`.

pub mod steps;

use taskonce_core::error::{Error, Result};
use taskonce_core::held::Held;
use taskonce_core::key::Key;
use taskonce_core::ledger::{Claim, Completion, Ledger, Refused, Unresolved};
use taskonce_core::record::{Found, Output, Record};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::joint::{Cells, Joint, Meaning, Met, Said};
use crate::sql::Verb;

/// Lets a claim be completed by a transaction of the caller's own, so that its effect and its record commit together.
///
/// The transaction is one of tokio-postgres on the ledger's database, begun after the claim was made, in any isolation level,
/// directly or through a pooler that lends connections by the transaction. It is the outermost one, not a savepoint.
///
/// ```no_run
/// # use taskonce_core::ledger::Claim;
/// # use taskonce_core::record::Output;
/// # use taskonce_postgres::tokio_postgres::Client;
/// use taskonce_postgres::{CommitIn as _, CompleteIn as _};
///
/// # async fn pay(claim: Claim, client: &mut Client) -> Result<(), Box<dyn std::error::Error>> {
/// let tx = client.transaction().await?;
/// claim.lock_in(&tx).await?;
/// tx.execute("insert into payment (amount) values (1200)", &[]).await?;
/// let completion = claim.complete_in(&tx, Output::kept("text/plain", "receipt 7")).await?;
/// completion.commit_in(tx).await?;
/// # Ok(()) }
/// ```
pub trait CompleteIn: Sized {
    /// Locks the claim's record, before any statement of the caller's own: as long as the transaction is open nobody can take
    /// the task over, and no heartbeats are sent. It takes one round trip. For the rest of the transaction its server ends
    /// it when it says nothing for a lease (at least 5 s), and no statement waits longer for a lock. The claim counts as entered
    /// from then on: dropped, it is a failed attempt.
    ///
    /// # Errors
    /// [`ClaimLost`](taskonce_core::ErrorKind::ClaimLost): the caller's statements must not run.
    /// [`Unsupported`](taskonce_core::ErrorKind::Unsupported) for a ledger on another store, and in another database than the
    /// ledger's;
    /// [`Locked`](taskonce_core::ErrorKind::Locked) where another transaction holds the record for more than 500 ms, or came in
    /// between. After an error the transaction is to be rolled back, and the claim released, or locked in another one.
    fn lock_in(&self, tx: &Transaction<'_>) -> impl Future<Output = Result<()>> + Send;

    /// Writes the completion into the transaction in which the record was locked. It is true once that has committed.
    ///
    /// # Errors
    /// With the claim. [`BadOutput`](taskonce_core::ErrorKind::BadOutput) for an output that cannot be kept: other than a
    /// plain completion this one is refused with it. [`ClaimLost`](taskonce_core::ErrorKind::ClaimLost);
    /// [`WrongState`](taskonce_core::ErrorKind::WrongState) where the record was not locked, or that transaction has ended.
    fn complete_in(
        self,
        tx: &Transaction<'_>,
        output: Output,
    ) -> impl Future<Output = Result<Completion, Refused>> + Send;
}

impl CompleteIn for Claim {
    async fn lock_in(&self, tx: &Transaction<'_>) -> Result<()> {
        let joint = Joint::of(self.ledger(), self.held()).map_err(|met| met.error)?;
        lock_held(&joint, tx).await.map_err(|met| met.error)?;
        self.held().enter();
        Ok(())
    }

    async fn complete_in(self, tx: &Transaction<'_>, output: Output) -> Result<Completion, Refused> {
        match complete_held(self.ledger(), self.held(), tx, output).await {
            Ok(()) => Ok(self.into_completion()),
            Err(met) => Err(Refused { claim: self, error: met.error }),
        }
    }
}

/// Commits the transaction that a completion was written into.
pub trait CommitIn: Sized {
    /// Commits, and confirms the completion. A transaction in which a statement failed after the completion was written is
    /// rolled back: the driver's own `commit` says nothing of that, since the server answers such a commit with a rollback and
    /// no error.
    ///
    /// # Errors
    /// With the completion: [`Completion::find_out`] says what became of it. [`RolledBack`](taskonce_core::ErrorKind::RolledBack)
    /// where the server refused it for what the transaction's own statements did, such as a constraint that is checked at the commit;
    /// the driver's own error is its source.
    fn commit_in(self, tx: Transaction<'_>) -> impl Future<Output = Result<(), Unresolved>> + Send;
}

impl CommitIn for Completion {
    async fn commit_in(self, tx: Transaction<'_>) -> Result<(), Unresolved> {
        // An aborted transaction refuses any statement but its end.
        let tried = match tx.batch_execute("select 1").await {
            Ok(()) => tx.commit().await,
            Err(error) => Err(error),
        };
        match tried {
            Ok(()) => {
                self.committed();
                Ok(())
            }
            Err(error) => {
                let met = met_at_commit(self.ledger(), self.held().key(), &error);
                Err(Unresolved { completion: self, error: met.error.with_source(error) })
            }
        }
    }
}

/// Locks a claim's record in a transaction: what [`CompleteIn::lock_in`] does, for whoever runs tasks.
///
/// # Errors
/// As there, with what each means.
pub async fn lock_held(joint: &Joint<'_>, tx: &Transaction<'_>) -> Result<(), Met> {
    joint.join().await?;
    let locked = lock_record(joint, tx).await.and_then(|found| joint.take(&found));
    if let Err(met) = &locked
        && met.meaning != Meaning::Lost
    {
        // Nothing holds the record, so that heartbeats have to.
        joint.held().part();
    }
    locked
}

/// Writes a claim's completion into the transaction that has locked its record: what [`CompleteIn::complete_in`] does,
/// for whoever runs tasks.
///
/// # Errors
/// As there, with what each means.
pub async fn complete_held(ledger: &Ledger, held: &Held, tx: &Transaction<'_>, output: Output) -> Result<(), Met> {
    let joint = Joint::of(ledger, held)?;
    let (before, end) = joint.end(output)?;
    replace_record(&joint, tx, &before, &end).await
}

/// Locks the record of a claim, and answers what is there. For drivers.
///
/// # Errors
/// As [`CompleteIn::lock_in`], with what each means.
pub async fn lock_record(joint: &Joint<'_>, tx: &Transaction<'_>) -> Result<Found, Met> {
    let held = joint.held();
    let (enter, lock, leave) = (joint.enter_sql(), joint.lock_sql(), joint.leave_sql());
    let (key, claim) = (held.key().as_str(), Uuid::from_bytes(held.claim_id().0));
    let asked: [(&(dyn ToSql + Sync), Type); 2] = [(&key, Type::TEXT), (&claim, Type::UUID)];
    // Sent in this order, without waiting for one another: one round trip.
    let (entered, rows, left) =
        tokio::join!(biased; tx.query_typed(&enter, &[]), tx.query_typed(&lock, &asked), tx.query_typed(&leave, &[]));
    let met = |error| joint.met_at_lock(self::met(held.key(), &error));
    let entered = entered.map_err(met)?;
    let has_written_nothing = entered.first().map(|row| row.try_get(0)).transpose().map_err(met)?;
    joint.entered(has_written_nothing.unwrap_or(true))?;
    let rows = rows.map_err(met)?;
    left.map_err(met)?;
    match rows.first() {
        Some(row) => {
            let (is_same, is_new) = (row.try_get(CELLS).map_err(met)?, row.try_get(CELLS + 1).map_err(met)?);
            joint.locked(&cells(row, 0).map_err(met)?, is_same, is_new)
        }
        None => Err(joint.not_locked().await),
    }
}

/// Writes a record in the place of the one that the transaction has locked. For drivers.
///
/// # Errors
/// As [`CompleteIn::complete_in`], with what each means.
pub async fn replace_record(
    joint: &Joint<'_>,
    tx: &Transaction<'_>,
    before: &Record,
    next: &Record,
) -> Result<(), Met> {
    let line = joint.line(next)?;
    let (key, token) = (joint.held().key(), Uuid::from_bytes(before.token.0));
    let name = key.as_str();
    let values: [&(dyn ToSql + Sync); 16] = [
        &name,
        &token,
        &line.token,
        &line.claim,
        &line.fence,
        &line.state,
        &line.attempt,
        &line.owner,
        &line.effect,
        &line.retention,
        &line.output_retention,
        &line.expires_after,
        &line.output_after,
        &line.output_type,
        &line.output,
        &line.body,
    ];
    let typed: Vec<_> = values.into_iter().zip(Verb::ReplaceKeep.types().iter().cloned()).collect();
    let met = |error| self::met(key, &error);
    let rows = tx.query_typed(&joint.replace_sql(), &typed).await.map_err(met)?;
    let Some(row) = rows.first() else { return Err(joint.not_replaced(before, None)) };
    match row.try_get::<_, Option<i64>>(0).map_err(met)? {
        Some(_written) => Ok(()),
        None => Err(joint.not_replaced(before, Some(cells(row, 1).map_err(met)?))),
    }
}

/// How many columns [`Cells`] has.
const CELLS: usize = 8;

fn cells(row: &Row, at: usize) -> Result<Cells<'_>, tokio_postgres::Error> {
    Ok(Cells {
        state: row.try_get(at)?,
        token: row.try_get(at + 1)?,
        claim: row.try_get(at + 2)?,
        fence: row.try_get(at + 3)?,
        age: row.try_get(at + 4)?,
        body: row.try_get(at + 5)?,
        output_type: row.try_get(at + 6)?,
        output: row.try_get(at + 7)?,
    })
}

/// What an error of the driver's means for a transaction that was to complete this task.
#[must_use]
pub fn met(key: &Key, error: &tokio_postgres::Error) -> Met {
    match error.as_db_error() {
        Some(said) => Met::answered(key, said.code().code(), said.message()),
        None if error.is_closed() || has_io_cause(error) => Met::without_answer(key, &error.to_string()),
        // A value that the driver cannot send or read.
        None => {
            let what = format!("the driver could not ask or read: {error}");
            Met {
                meaning: Meaning::Refused,
                error: Error::new(taskonce_core::ErrorKind::Protocol, what).about(format!("task `{key}`")),
            }
        }
    }
}

/// What an error of the driver's means that came in answer to the commit.
#[must_use]
pub fn met_at_commit(ledger: &Ledger, key: &Key, error: &tokio_postgres::Error) -> Met {
    match error.as_db_error() {
        Some(said) => {
            let table = said.schema().zip(said.table());
            Met::at_commit(ledger, key, Said { code: said.code().code(), message: said.message(), table })
        }
        None => met(key, error),
    }
}

/// Whether the way to the server broke.
fn has_io_cause(error: &tokio_postgres::Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<std::io::Error>())
}
