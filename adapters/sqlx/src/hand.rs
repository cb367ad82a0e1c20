//! A claim in a transaction of sqlx, held by hand: locked first, completed in the transaction that has the effect.

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgDatabaseError, PgRow, PgTypeInfo};
use sqlx::{AssertSqlSafe, Encode, PgConnection, Postgres, Row as _, Transaction, Type};
use taskonce_core::ErrorKind;
use taskonce_core::error::{Error, Result};
use taskonce_core::key::Key;
use taskonce_core::ledger::{Claim, Completion, Ledger, Refused, Unresolved};
use taskonce_core::record::{Found, Output, Record};
use taskonce_postgres::joint::{Cells, Joint, Meaning, Met, Said};
use uuid::Uuid;

use crate::cancel::Session;

/// Lets a claim be completed by a transaction of the caller's own, so that its effect and its record commit together.
///
/// The transaction is on the ledger's database, in any isolation level, directly or through a pooler that lends connections by
/// the transaction. It is the outermost one, not a savepoint.
///
/// ```no_run
/// # use taskonce_core::ledger::Claim;
/// # use taskonce_core::record::Output;
/// use taskonce_sqlx::{CommitIn as _, CompleteIn as _};
///
/// # async fn pay(claim: Claim, pool: &sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// claim.lock_in(&mut tx).await?;
/// sqlx::query("insert into payment (amount) values (1200)").execute(&mut *tx).await?;
/// let completion = claim.complete_in(&mut tx, Output::kept("text/plain", "receipt 7")).await.map_err(|refused| refused.error)?;
/// completion.commit_in(tx).await.map_err(|unresolved| unresolved.error)?;
/// # Ok(()) }
/// ```
pub trait CompleteIn: Sized {
    /// Locks the claim's record, before any statement of the caller's own: as long as the transaction is open nobody can take
    /// the task over, and no heartbeats are sent. For the rest of the transaction its server ends it when it says nothing
    /// for a lease (at least 5 s), and no statement waits longer for a lock. The claim counts as entered from then on:
    /// dropped, it is a failed attempt.
    ///
    /// # Errors
    /// [`ClaimLost`](ErrorKind::ClaimLost): the caller's statements must not run. [`Unsupported`](ErrorKind::Unsupported) for
    /// a ledger on another store or database; [`WrongState`](ErrorKind::WrongState) where the connection is in no
    /// transaction; [`Locked`](ErrorKind::Locked) where another transaction holds the record for more than 500 ms, or came
    /// in between. After an error the transaction is to be rolled back.
    fn lock_in(&self, tx: &mut Transaction<'_, Postgres>) -> impl Future<Output = Result<()>> + Send;

    /// Writes the completion into the transaction in which the record was locked. It is true once that has committed.
    ///
    /// # Errors
    /// With the claim. [`BadOutput`](ErrorKind::BadOutput) for an output that cannot be kept; [`ClaimLost`](ErrorKind::ClaimLost);
    /// [`WrongState`](ErrorKind::WrongState) where the record was not locked, or that transaction has ended.
    fn complete_in(
        self,
        tx: &mut Transaction<'_, Postgres>,
        output: Output,
    ) -> impl Future<Output = Result<Completion, Refused>> + Send;
}

impl CompleteIn for Claim {
    async fn lock_in(&self, tx: &mut Transaction<'_, Postgres>) -> Result<()> {
        let joint = Joint::of(self.ledger(), self.held()).map_err(|met| met.error)?;
        let _session = lock_held(&joint, tx).await.map_err(|met| met.error)?;
        self.held().enter();
        Ok(())
    }

    async fn complete_in(self, tx: &mut Transaction<'_, Postgres>, output: Output) -> Result<Completion, Refused> {
        let completed = match Joint::of(self.ledger(), self.held()) {
            Ok(joint) => complete_held(&joint, tx, output).await,
            Err(met) => Err(met),
        };
        match completed {
            Ok(()) => Ok(self.into_completion()),
            Err(met) => Err(Refused { claim: self, error: met.error }),
        }
    }
}

/// Commits the transaction that a completion was written into.
pub trait CommitIn: Sized {
    /// Commits, and confirms the completion. A transaction in which a statement failed after the completion was written is
    /// rolled back: sqlx's own `commit` says nothing of that, since the server answers such a commit with a rollback and no
    /// error.
    ///
    /// # Errors
    /// With the completion: [`Completion::find_out`] says what became of it. [`RolledBack`](ErrorKind::RolledBack) where the
    /// server refused it for what the transaction's own statements did, such as a constraint that is checked at the commit.
    fn commit_in(self, tx: Transaction<'_, Postgres>) -> impl Future<Output = Result<(), Unresolved>> + Send;
}

impl CommitIn for Completion {
    async fn commit_in(self, mut tx: Transaction<'_, Postgres>) -> Result<(), Unresolved> {
        // An aborted transaction refuses any statement but its end.
        let tried = match sqlx::query("select 1").execute(&mut *tx).await {
            Ok(_) => tx.commit().await,
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

pub(crate) async fn lock_held(joint: &Joint<'_>, tx: &mut PgConnection) -> Result<Session, Met> {
    joint.join().await?;
    let locked = lock_record(joint, tx).await.and_then(|(found, session)| joint.take(&found).map(|()| session));
    if let Err(met) = &locked
        && met.meaning != Meaning::Lost
    {
        // Nothing holds the record, so that heartbeats have to.
        joint.held().part();
    }
    locked
}

pub(crate) async fn complete_held(joint: &Joint<'_>, tx: &mut PgConnection, output: Output) -> Result<(), Met> {
    let (before, end) = joint.end(output)?;
    replace_record(joint, tx, &before, &end).await
}

/// Locks the record of a claim, and answers what is there, and in which transaction it is locked.
pub(crate) async fn lock_record(joint: &Joint<'_>, tx: &mut PgConnection) -> Result<(Found, Session), Met> {
    let key = joint.held().key();
    let met = |error| joint.met_at_lock(self::met(key, &error));
    let claim = Id(joint.held().claim_id().0);
    let entered = unnamed(joint.enter_sql()).fetch_one(&mut *tx).await.map_err(met)?;
    let session = Session::in_row(&entered, SESSION).map_err(met)?;
    let lock = unnamed(joint.lock_sql()).bind(key.as_str()).bind(claim);
    let Some(row) = lock.fetch_optional(&mut *tx).await.map_err(met)? else { return Err(joint.not_locked().await) };
    unnamed(joint.leave_sql()).execute(&mut *tx).await.map_err(met)?;
    let (is_same, is_new) = (row.try_get(CELLS).map_err(met)?, row.try_get(CELLS + 1).map_err(met)?);
    let found = joint.locked(&cells(&row, 0).map_err(met)?, is_same, is_new)?;
    Ok((found, session))
}

/// Writes a record in the place of the one that the transaction has locked.
pub(crate) async fn replace_record(
    joint: &Joint<'_>,
    tx: &mut PgConnection,
    before: &Record,
    next: &Record,
) -> Result<(), Met> {
    let key = joint.held().key();
    let line = joint.line(next)?;
    let replace = unnamed(joint.replace_sql())
        .bind(key.as_str())
        .bind(Id(before.token.0))
        .bind(Id(line.token.into_bytes()))
        .bind(Id(line.claim.into_bytes()))
        .bind(line.fence)
        .bind(line.state)
        .bind(line.attempt)
        .bind(&line.owner)
        .bind(line.effect)
        .bind(line.retention)
        .bind(line.output_retention)
        .bind(line.expires_after)
        .bind(line.output_after)
        .bind(line.output_type)
        .bind(line.output)
        .bind(&line.body);
    let met = |error| self::met(key, &error);
    let Some(row) = replace.fetch_optional(&mut *tx).await.map_err(met)? else {
        return Err(joint.not_replaced(before, None));
    };
    match row.try_get::<Option<i64>, _>(0).map_err(met)? {
        Some(_written) => Ok(()),
        None => Err(joint.not_replaced(before, Some(cells(&row, 1).map_err(met)?))),
    }
}

/// A statement of ours, which leaves nothing on the connection.
pub(crate) fn unnamed<'q>(sql: String) -> sqlx::query::Query<'q, Postgres, sqlx::postgres::PgArguments> {
    sqlx::query(AssertSqlSafe(sql)).persistent(false)
}

/// How many columns [`Cells`] has.
const CELLS: usize = 8;
/// Where the row of [`Joint::enter_sql`] names the session and its transaction.
const SESSION: usize = 5;

fn cells(row: &PgRow, at: usize) -> Result<Cells<'_>, sqlx::Error> {
    Ok(Cells {
        state: row.try_get(at)?,
        token: id(row, at + 1)?,
        claim: id(row, at + 2)?,
        fence: row.try_get(at + 3)?,
        age: row.try_get(at + 4)?,
        body: row.try_get(at + 5)?,
        output_type: row.try_get(at + 6)?,
        output: row.try_get(at + 7)?,
    })
}

/// The type of an id on the server, `uuid`.
const UUID: Oid = Oid(2950);

/// An id as the server's `uuid`. Of our own: with sqlx's feature for them no lock file resolves beside another SQLite.
struct Id([u8; 16]);

impl Type<Postgres> for Id {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(UUID)
    }
}

impl Encode<'_, Postgres> for Id {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }
}

fn id(row: &PgRow, at: usize) -> Result<Uuid, sqlx::Error> {
    let bytes = row.try_get_raw(at)?.as_bytes().map_err(sqlx::Error::Decode)?;
    Uuid::from_slice(bytes).map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

/// What an error of sqlx means that came in answer to the commit.
pub(crate) fn met_at_commit(ledger: &Ledger, key: &Key, error: &sqlx::Error) -> Met {
    let said = error.as_database_error().and_then(|said| said.try_downcast_ref::<PgDatabaseError>());
    match said {
        Some(said) => {
            let table = said.schema().zip(said.table());
            Met::at_commit(ledger, key, Said { code: said.code(), message: said.message(), table })
        }
        None => met(key, error),
    }
}

/// What an error of sqlx means for a transaction that was to complete this task.
pub(crate) fn met(key: &Key, error: &sqlx::Error) -> Met {
    match error {
        sqlx::Error::Database(said) => match said.code() {
            Some(code) => Met::answered(key, &code, said.message()),
            None => Met::without_answer(key, said.message()),
        },
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. }
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::Encode(_)
        | sqlx::Error::Decode(_)
        | sqlx::Error::RowNotFound => {
            let what = format!("the driver could not ask or read: {error}");
            let error = Error::new(ErrorKind::Protocol, what).about(format!("task `{key}`"));
            Met { meaning: Meaning::Refused, error }
        }
        // The way to the server, or the pool: its enumeration may grow.
        error => Met::without_answer(key, &error.to_string()),
    }
}
