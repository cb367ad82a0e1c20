//! Asks the server to end what it runs for a transaction that nobody waits for any more: a statement that goes on would hold
//! the record for as long as it takes.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{Connection as _, PgConnection, PgPool, Row as _};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// The longest that the server is asked for, with the wait for one's turn.
const CANCEL_WAIT: Duration = Duration::from_secs(5);
/// How many connections of this process ask servers so at once, beside those of its pools. Where many runs are dropped together the
/// others wait for their turn: each takes about as long as a connection takes to be made.
const CANCELS_MAX: usize = 4;
/// The turns.
static CANCELS: Semaphore = Semaphore::const_new(CANCELS_MAX);
/// Ends the statement of a session, only while that is in the transaction that is meant: its connection may have been lent to
/// somebody else meanwhile.
const CANCEL: &str = "select pg_cancel_backend(pid) from pg_stat_activity
    where pid = $1 and (date_part('epoch', xact_start) * 1000000)::bigint = $2 and state = 'active'";

/// A session in one of its transactions, as the server names the two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Session {
    /// The session's process.
    pid: i32,
    /// When the transaction began, in microseconds since 1970 by the server's clock.
    began: i64,
}

impl Session {
    /// As a row names it from this column on.
    pub(crate) fn in_row(row: &PgRow, at: usize) -> Result<Session, sqlx::Error> {
        Ok(Session { pid: row.try_get(at)?, began: row.try_get(at + 1)? })
    }
}

/// Dropped while armed, it has the statement ended.
pub(crate) struct CancelOnDrop<'a> {
    pool: &'a PgPool,
    session: Option<Session>,
}

impl<'a> CancelOnDrop<'a> {
    pub(crate) fn armed(pool: &'a PgPool, session: Session) -> CancelOnDrop<'a> {
        CancelOnDrop { pool, session: Some(session) }
    }

    pub(crate) fn disarm(mut self) {
        self.session = None;
    }
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        // Without a runtime nothing is left that drives the connection, either.
        let Ok(runtime) = Handle::try_current() else { return };
        // On a connection of its own: the pool may have no other than the one that is at the statement.
        let options = self.pool.connect_options();
        runtime.spawn(async move {
            let ask = async {
                let _turn = CANCELS.acquire().await.map_err(|_| sqlx::Error::PoolClosed)?;
                let mut connection = PgConnection::connect_with(&options).await?;
                let cancel = sqlx::query(CANCEL).persistent(false).bind(session.pid).bind(session.began);
                cancel.execute(&mut connection).await?;
                connection.close().await
            };
            // Where the server cannot be asked, the statement runs to its end.
            let _asked: Result<Result<(), sqlx::Error>, _> = timeout(CANCEL_WAIT, ask).await;
        });
    }
}
