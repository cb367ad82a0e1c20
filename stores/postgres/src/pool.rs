//! The connections of one process and runtime: made when needed, lent to one call at a time, few.
//!
//! A pool of our own, as a connection comes with what its greeting found out (see `connect`), and as one that was cut, or
//! on which a statement may still run, must not be lent again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::connect::{Connection, Dial, Schema, Session};
use crate::fault::{Cause, Fault};
use crate::process::lock;
use crate::sql::Verb;

/// A connection that was not used for so long is closed rather than lent: something on the way may have forgotten it.
const IDLE_MAX: Duration = Duration::from_secs(10 * 60);
/// How often a call asks again where its connection had been cut, or another transaction came in between.
const TRIES_MAX: usize = 4;

/// The connections of one process and runtime.
pub(crate) struct Pool {
    dial: Arc<Dial>,
    connections: usize,
    timeout: Duration,
    free: Semaphore,
    idle: Mutex<Vec<Connection>>,
}

/// How often a statement may have reached the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Once at most.
    Once,
    /// Again after its connection was cut: the server may still be at the first sending, or have ended it.
    Again,
}

/// A connection on loan. It goes back when this is dropped, unless it is of no use any more.
pub(crate) struct Lent<'pool> {
    pool: &'pool Pool,
    connection: Option<Connection>,
    /// Whether it was made for this call.
    is_new: bool,
    /// Whether a statement of this call is at the server.
    is_asking: bool,
    _permit: SemaphorePermit<'pool>,
}

impl Pool {
    pub(crate) fn new(dial: Arc<Dial>, connections: usize, timeout: Duration) -> Pool {
        Pool { dial, connections, timeout, free: Semaphore::new(connections), idle: Mutex::default() }
    }

    /// When a call that begins now has to end.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// The rows of a statement. It must be one that may be sent again.
    pub(crate) async fn ask(
        &self,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
        deadline: Instant,
    ) -> Result<Vec<Row>, Fault> {
        self.ask_noting(&mut Sent::Once, verb, parameters, deadline).await
    }

    /// The same, and notes when it was sent again: what the answer says may then be the first sending's doing.
    pub(crate) async fn ask_noting(
        &self,
        sent: &mut Sent,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
        deadline: Instant,
    ) -> Result<Vec<Row>, Fault> {
        let mut tries = 0;
        loop {
            tries += 1;
            let mut lent = self.lend(deadline).await?;
            lent.is_asking = true;
            let asked = timeout_at(deadline, self.dial.ask(lent.connection(), verb, parameters)).await;
            if asked.is_ok() {
                lent.answered();
            } else if is_claim(verb) {
                lent.cancel();
            }
            let fault = match asked {
                Ok(Ok(rows)) => return Ok(rows),
                Ok(Err(fault)) => fault,
                Err(_) => Fault::late(self.timeout),
            };
            let is_new = lent.is_new;
            let may_try_again = match fault.cause {
                // The server was restarted while the connection was idle: the others have been cut as well.
                Cause::Broken => {
                    lent.discard();
                    !is_new
                }
                Cause::Pooler => {
                    lent.discard();
                    true
                }
                // Perhaps a standby since: of several servers another one may be the primary.
                Cause::ReadOnly => {
                    lent.discard();
                    lock(&self.idle).clear();
                    false
                }
                Cause::Again => true,
                Cause::Locked | Cause::Refused | Cause::Lasting => false,
            };
            if !may_try_again || tries >= TRIES_MAX || Instant::now() >= deadline {
                return Err(fault);
            }
            if fault.cause == Cause::Broken {
                *sent = Sent::Again;
            }
        }
    }

    /// A connection, one that is idle or a new one.
    pub(crate) async fn lend(&self, deadline: Instant) -> Result<Lent<'_>, Fault> {
        let permit = match timeout_at(deadline, self.free.acquire()).await {
            Ok(Ok(permit)) => permit,
            // It is never closed.
            Ok(Err(_)) | Err(_) => return Err(Fault::exhausted(self.connections, self.timeout)),
        };
        if let Some(connection) = self.take_idle() {
            return Ok(Lent {
                pool: self,
                connection: Some(connection),
                is_new: false,
                is_asking: false,
                _permit: permit,
            });
        }
        let made = timeout_at(deadline, self.dial.connect(Schema::Needed)).await;
        let connection = made.unwrap_or_else(|_| Err(Fault::late(self.timeout)))?;
        Ok(Lent { pool: self, connection: Some(connection), is_new: true, is_asking: false, _permit: permit })
    }

    /// How the servers are reached.
    pub(crate) fn dial(&self) -> &Dial {
        &self.dial
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = lock(&self.idle);
        while let Some(connection) = idle.pop() {
            // One that has not answered for so long leads nowhere.
            let is_dead = connection.is_behind && connection.used.elapsed() >= self.timeout;
            if is_dead {
                connection.task.abort();
            } else if !connection.client.is_closed() && connection.used.elapsed() < IDLE_MAX {
                return Some(connection);
            }
        }
        None
    }
}

/// Whether it is a claim that the statement stores.
fn is_claim(verb: Verb) -> bool {
    [Verb::InsertClaim, Verb::TryClaim, Verb::InsertClaims, Verb::ReplaceClaim].contains(&verb)
}

impl Lent<'_> {
    pub(crate) fn connection(&self) -> &Connection {
        self.connection.as_ref().expect("a loan has its connection until it is discarded")
    }

    /// The server has answered, and with that all that was asked on the connection before.
    fn answered(&mut self) {
        self.is_asking = false;
        if let Some(connection) = &mut self.connection {
            connection.is_behind = false;
        }
    }

    /// Ends the connection, and with it what the server is at: a claim that nobody waits for any more. One whose commit waits
    /// for a standby is seen from then on, so that it can be released; else it may come to light when its lease has passed.
    /// Never an end: that must not be seen before it is on the standby.
    fn cancel(&mut self) {
        let is_at_it = |connection: &mut Connection| connection.session == Session::Own && !connection.is_behind;
        let Some(connection) = self.connection.take_if(is_at_it) else { return };
        let dial = Arc::clone(&self.pool.dial);
        tokio::spawn(async move {
            dial.cancel(&connection.client).await;
            connection.task.abort();
        });
    }

    /// Ends the connection at once, whatever is under way on it.
    fn discard(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.task.abort();
        }
    }
}

impl Drop for Lent<'_> {
    /// A call whose future was dropped may leave a statement behind: its answer is thrown away by the driver, which keeps
    /// questions and answers in step, and the server bounds how long it runs.
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take()
            && !connection.client.is_closed()
        {
            let mut idle = lock(&self.pool.idle);
            // One that may not answer is lent when all others are in use, and not for long.
            if connection.is_behind || self.is_asking {
                if !connection.is_behind {
                    connection.used = Instant::now();
                }
                connection.is_behind = true;
                idle.insert(0, connection);
                return;
            }
            connection.used = Instant::now();
            idle.push(connection);
            // The last one that came back is lent first, so that those of a busy hour come to lie at the front.
            if idle[0].used.elapsed() >= IDLE_MAX {
                idle.remove(0);
            }
        }
    }
}
