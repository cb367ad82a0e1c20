//! What every driver of PostgreSQL transactions shares: the statements that lock and complete a claim in a transaction of the
//! caller's, and what their answers mean.
//!
//! For adapters of drivers; users call the driver's own functions. Each statement is sent unnamed, so that a pooler that
//! lends connections by the transaction is no matter.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::held::{Held, Phase};
use taskonce_core::key::Key;
use taskonce_core::ledger::Ledger;
use taskonce_core::record::{Failure, Found, Output, Record};
use taskonce_core::transaction::Attempted;
use tokio_postgres::error::SqlState;

use crate::fault::{Cause, Fault, lower};
use crate::row::{self, COLUMNS};
use crate::sql::replace;

pub use crate::row::{Cells, Line};

/// How long the lock of the record is waited for: another's transaction that holds it is waited for elsewhere.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// A transaction that says nothing for the lease is ended by its server, but none that is silent for less than this.
pub(crate) const SILENCE_MIN: Duration = Duration::from_secs(5);
/// Names the transaction in which a record was locked, and is gone with it: a later one, or none, is told from it.
const SAME_TRANSACTION: &str = "current_setting('taskonce.transaction', true) = pg_current_xact_id()::text";

/// Names a session and its transaction: its process id, and when the transaction began, in microseconds since 1970.
pub(crate) const SESSION: &str = "pg_backend_pid(), (date_part('epoch', now()) * 1000000)::bigint";

/// What is said of a transaction that was open on a connection.
const LEFT_OPEN: &str = "somebody left a transaction open on the connection; it was rolled back";

/// A claim that a transaction on PostgreSQL is to lock and complete.
pub struct Joint<'a> {
    ledger: &'a Ledger,
    held: &'a Held,
    schema: String,
    needs_new: bool,
}

/// Why a statement of a transaction has no good answer, and what that means for the transaction.
#[derive(Debug)]
pub struct Met {
    /// What it means.
    pub meaning: Meaning,
    /// The error.
    pub error: Error,
}

/// What an error means for the transaction that met it. The transaction is to be rolled back in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The database refused it for what others did at the same time: the same may be tried again.
    Again,
    /// The connection is of no use any more. A commit that was sent may have taken effect.
    Broken,
    /// The claim is lost: nothing may be done in its name.
    Lost,
    /// An earlier statement of the transaction had failed, so that nothing of it can commit.
    Aborted,
    /// What was asked was refused: the output, or what the transaction did.
    Refused,
    /// The commit was refused for what the transaction's own statements did: a constraint or a trigger of the user's that is
    /// checked at the commit. Nothing of it is kept.
    RolledBack,
    /// The database cannot be used so, and trying again at once cannot help.
    Unusable,
}

/// What a server said no with.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    /// Its code.
    pub code: &'a str,
    /// Its words.
    pub message: &'a str,
    /// The table that it is about and the schema of that, schema first, where it names them.
    pub table: Option<(&'a str, &'a str)>,
}

/// Whether this code says that the database refused a statement or a commit for what others did at the same time.
#[must_use]
pub fn is_conflict(code: &str) -> bool {
    ["40001", "40P01"].contains(&code)
}

impl Met {
    fn new(meaning: Meaning, error: Error) -> Met {
        Met { meaning, error }
    }

    /// An error without a code of the server's: the connection's.
    #[must_use]
    pub fn without_answer(key: &Key, what: &str) -> Met {
        let fault = Fault::new(ErrorKind::Unreachable, format!("the transaction's connection broke: {what}"));
        Met::new(Meaning::Broken, fault.about(format!("task `{key}`")))
    }

    /// What the server answered: the code of an error, and what it says.
    #[must_use]
    pub fn answered(key: &Key, code: &str, message: &str) -> Met {
        Met::of(Fault::of_code(&SqlState::from_code(code), message), code, key)
    }

    /// What the server answered to the commit of a transaction that completes this task. The completion broke no rule when it
    /// was written, so that a refusal is for what the user's own statements did, unless it names the ledger's table.
    #[must_use]
    pub fn at_commit(ledger: &Ledger, key: &Key, said: Said<'_>) -> Met {
        let met = Met::answered(key, said.code, said.message);
        let is_ours = said.table.is_some_and(|(schema, table)| {
            table == "task" && ledger.store().ground().is_some_and(|ground| ground.place == schema)
        });
        match met.meaning {
            Meaning::Again if is_conflict(said.code) => met,
            Meaning::Broken => met,
            Meaning::Unusable if is_ours => met,
            Meaning::Again
            | Meaning::Lost
            | Meaning::Aborted
            | Meaning::Refused
            | Meaning::RolledBack
            | Meaning::Unusable => {
                let what = format!(
                    "the commit was refused, and all of it rolled back: {} (SQLSTATE {})",
                    lower(said.message),
                    said.code
                );
                Met::new(Meaning::RolledBack, Error::new(ErrorKind::RolledBack, what).about(format!("task `{key}`")))
            }
        }
    }

    /// How an attempt ends that met this before its commit, in a statement of ours.
    #[must_use]
    pub fn before_commit<T>(self) -> Attempted<T> {
        match self.meaning {
            Meaning::Again => Attempted::Again(self.error),
            Meaning::Broken => Attempted::Unknown(None, self.error),
            Meaning::Lost => Attempted::Lost,
            Meaning::Aborted => Attempted::Failed(Failure::retryable(
                "a statement of the handler's failed, and it went on: its transaction could not commit",
            )),
            Meaning::RolledBack => Attempted::Failed(Failure::retryable(self.error.to_string())),
            Meaning::Refused => Attempted::Failed(Failure::permanent(format!("{}: {}", self.error, self.error.hint()))),
            Meaning::Unusable => Attempted::Refused(self.error),
        }
    }

    /// How an attempt ends whose handler met this in a statement of its own: of this code, and by this failure where it is one.
    #[must_use]
    pub fn in_handler<T>(self, code: Option<&str>, failure: Failure) -> Attempted<T> {
        match self.meaning {
            // A statement of the handler's that took too long is its own matter.
            Meaning::Again if code.is_some_and(is_conflict) => Attempted::Again(self.error),
            Meaning::Broken => Attempted::Unknown(None, self.error),
            Meaning::Again
            | Meaning::Lost
            | Meaning::Aborted
            | Meaning::Refused
            | Meaning::RolledBack
            | Meaning::Unusable => Attempted::Failed(failure),
        }
    }

    /// How an attempt ends that met this in answer to its commit, as [`at_commit`](Met::at_commit) says.
    #[must_use]
    pub fn in_answer_to_commit<T>(self, value: T, failure: Failure) -> Attempted<T> {
        match self.meaning {
            Meaning::Again => Attempted::Again(self.error),
            // The server said no, and said why: a constraint that is checked at the commit.
            Meaning::RolledBack | Meaning::Unusable => Attempted::Failed(failure),
            Meaning::Broken | Meaning::Lost | Meaning::Aborted | Meaning::Refused => {
                Attempted::Unknown(Some(value), self.error)
            }
        }
    }

    /// The same where it met this as it began: in the transaction of somebody else, one that has failed already. It is to be
    /// rolled back, or its connection to be closed.
    #[must_use]
    pub fn as_it_began(self) -> Met {
        match self.meaning {
            Meaning::Aborted => Met::new(Meaning::Again, self.error.with_hint(LEFT_OPEN)),
            Meaning::Again
            | Meaning::Broken
            | Meaning::Lost
            | Meaning::Refused
            | Meaning::RolledBack
            | Meaning::Unusable => self,
        }
    }

    fn of(fault: Fault, code: &str, key: &Key) -> Met {
        let fault = match code {
            "40001" => fault.hint(
                "roll back and begin anew: above READ COMMITTED a transaction has to lock the record before it reads anything",
            ),
            _ => fault,
        };
        let meaning = match (code, fault.cause) {
            // The sessions that the server ended: idle in a transaction, a transaction that took too long, idle. And what
            // the server itself does not know.
            ("25P03" | "25P04" | "57P05" | "40003", _) | (_, Cause::Broken) => Meaning::Broken,
            ("25P02", _) => Meaning::Aborted,
            // A statement that was ended for its time, or for a lock.
            ("57014", _) | (_, Cause::Again | Cause::Locked) => Meaning::Again,
            // Whether it took effect is not said by these: resources, the server's own faults.
            (code, _) if ["53", "57", "58", "XX"].iter().any(|class| code.starts_with(class)) => Meaning::Broken,
            (_, Cause::ReadOnly | Cause::Pooler | Cause::Refused | Cause::Lasting) => Meaning::Unusable,
        };
        Met::new(meaning, fault.about(format!("task `{key}`")))
    }
}

impl<'a> Joint<'a> {
    /// A claim of a ledger.
    ///
    /// # Errors
    /// [`Meaning::Unusable`] where the ledger's records are not where a transaction on PostgreSQL reaches them.
    pub fn of(ledger: &'a Ledger, held: &'a Held) -> Result<Joint<'a>, Met> {
        match ledger.store().ground() {
            Some(ground) if ground.system == "postgres" => {
                Ok(Joint { ledger, held, schema: ground.place, needs_new: false })
            }
            other => {
                let place = other.map_or("where no transaction reaches them", |ground| ground.system);
                let what = format!("the ledger's records are not in PostgreSQL, but {place}");
                let error = Error::new(ErrorKind::Unsupported, what)
                    .about(format!("task `{}`", held.key()))
                    .with_hint("open the ledger on the database that the transaction writes to: `postgres://…`");
                Err(Met::new(Meaning::Unusable, error))
            }
        }
    }

    /// Demands that the transaction began after the claim was made: one that began before is somebody else's, left open on a
    /// connection of a pool.
    #[must_use]
    pub fn in_a_new_transaction(self) -> Joint<'a> {
        Joint { needs_new: true, ..self }
    }

    /// The claim as the process holds it.
    #[must_use]
    pub fn held(&self) -> &'a Held {
        self.held
    }

    /// Lets heartbeats stand back: to be awaited before anything is sent.
    ///
    /// # Errors
    /// [`Meaning::Lost`].
    pub async fn join(&self) -> Result<(), Met> {
        if self.held.join().await {
            return Ok(());
        }
        Err(self.lost("the claim is lost, or its end was decided already"))
    }

    /// The first statement of the three that are sent together: marks the transaction, and bounds how long it waits for the
    /// record and how long it may be silent. Its row has in column 0 whether the transaction has written nothing yet, in column 5
    /// the session's process id (`int4`), and in column 6 when the transaction began, in microseconds since 1970 (`int8`): both
    /// name what may have to be cancelled.
    #[must_use]
    pub fn enter_sql(&self) -> String {
        let (wait, silence) = (LOCK_WAIT.as_millis(), self.held.policy().lease.max(SILENCE_MIN).as_millis());
        format!(
            "select pg_current_xact_id_if_assigned() is null,
                    set_config('taskonce.transaction', pg_current_xact_id()::text, true),
                    set_config('taskonce.lock_timeout', current_setting('lock_timeout'), true),
                    set_config('lock_timeout', '{wait}ms', true),
                    set_config('idle_in_transaction_session_timeout', {}, true),
                    {SESSION}",
            at_most("current_setting('idle_in_transaction_session_timeout')", silence)
        )
    }

    /// Judges that row: a transaction that has to be new, and has written something, is somebody else's, and what it wrote must
    /// neither be committed with the task nor be thrown away unsaid.
    ///
    /// # Errors
    /// [`Meaning::Unusable`].
    pub fn entered(&self, has_written_nothing: bool) -> Result<(), Met> {
        if has_written_nothing || !self.needs_new {
            return Ok(());
        }
        let error = Error::new(
            ErrorKind::WrongState,
            "the connection was inside of a transaction that had written something",
        )
        .about(format!("task `{}`", self.held.key()))
        .with_hint(
            "somebody left it open, and it was rolled back; commit before the run, or lend it another connection",
        );
        Err(Met::new(Meaning::Unusable, error))
    }

    /// The second: locks the record. `$1` is the key as text, `$2` the claim as a UUID. Its row has the columns of [`Cells`],
    /// and behind them whether the transaction is the one that the first statement marked, and whether it began after the
    /// record was written last.
    #[must_use]
    pub fn lock_sql(&self) -> String {
        format!(
            "select {COLUMNS}, coalesce({SAME_TRANSACTION}, false) as is_same, now() >= t.written_at as is_new
             from \"{}\".task t where t.key = $1 and t.claim = $2 and t.state = 1 for update",
            self.schema
        )
    }

    /// The third: the user's own statements wait for locks as they would, and at most for a lease.
    #[must_use]
    pub fn leave_sql(&self) -> String {
        let lease = self.held.policy().lease.max(SILENCE_MIN).as_millis();
        format!(
            "select set_config('lock_timeout', {}, true)",
            at_most("coalesce(nullif(current_setting('taskonce.lock_timeout', true), ''), '0')", lease)
        )
    }

    /// What it means that [`lock_sql`](Joint::lock_sql) has no row: the claim is lost, unless the ledger itself still finds
    /// it. Then the transaction looks elsewhere.
    pub async fn not_locked(&self) -> Met {
        if let Ok(Some(found)) = self.ledger.store().load(self.held.key()).await
            && self.held.check_found(Some(&found.record)).is_ok()
        {
            return self.elsewhere("the ledger has this claim, and the transaction does not see it");
        }
        self.held.lose();
        self.lost("the claim is lost: another took over, or the record is gone")
    }

    fn elsewhere(&self, what: &str) -> Met {
        let error = Error::new(ErrorKind::Unsupported, what)
            .about(format!("task `{}`", self.held.key()))
            .with_hint("begin the transaction on the ledger's own database, and after the claim was made");
        Met::new(Meaning::Unusable, error)
    }

    /// An error of the three statements that lock.
    #[must_use]
    pub fn met_at_lock(&self, met: Met) -> Met {
        if met.error.kind() == ErrorKind::NoSchema {
            return self.elsewhere(&format!("the transaction's database has no schema `{}` of taskonce", self.schema));
        }
        met
    }

    /// Judges the row of [`lock_sql`](Joint::lock_sql).
    ///
    /// # Errors
    /// [`Meaning::Unusable`] where there is no transaction, or the record cannot be read; [`Meaning::Again`] where the
    /// transaction had to be new, and is not.
    pub fn locked(&self, cells: &Cells<'_>, is_same: bool, is_new: bool) -> Result<Found, Met> {
        if self.needs_new && !is_new {
            let what = "the connection was inside of a transaction that began before the claim was made";
            let error =
                Error::new(ErrorKind::Locked, what).about(format!("task `{}`", self.held.key())).with_hint(LEFT_OPEN);
            return Err(Met::new(Meaning::Again, error));
        }
        if !is_same {
            let error = Error::new(ErrorKind::WrongState, "the connection is not in a transaction")
                .about(format!("task `{}`", self.held.key()))
                .with_hint("begin a transaction on it first; one that was cut off half way is of no use");
            return Err(Met::new(Meaning::Unusable, error));
        }
        self.found(cells)
    }

    /// Takes over what was locked as what this process holds: from now on the transaction is to complete the claim.
    ///
    /// # Errors
    /// [`Meaning::Lost`].
    pub fn take(&self, locked: &Found) -> Result<(), Met> {
        self.held.join_found(locked).map_err(|error| {
            self.held.lose();
            Met::new(Meaning::Lost, error)
        })
    }

    fn found(&self, cells: &Cells<'_>) -> Result<Found, Met> {
        row::found_in(self.held.key(), cells).map_err(|error| Met::new(Meaning::Unusable, error))
    }

    /// The end to write in the place of the record that was locked: first that record, then the end.
    ///
    /// # Errors
    /// [`Meaning::Refused`] for the output, [`Meaning::Lost`] where the claim was given up meanwhile.
    pub fn end(&self, output: Output) -> Result<(Arc<Record>, Arc<Record>), Met> {
        if self.held.phase() == Phase::Lost {
            return Err(self.lost("the claim is lost, and was not locked"));
        }
        let before = self.held.record();
        match self.held.join_end(&**self.ledger.host(), &before, output) {
            Ok(end) => Ok((before, end)),
            Err(error) if error.kind() == ErrorKind::ClaimLost => Err(Met::new(Meaning::Lost, error)),
            Err(error) => Err(Met::new(Meaning::Refused, error)),
        }
    }

    /// The columns of a record that is to be written.
    ///
    /// # Errors
    /// [`Meaning::Refused`] for what PostgreSQL cannot hold.
    pub fn line<'r>(&self, record: &'r Record) -> Result<Line<'r>, Met> {
        Line::of(record).map_err(|error| Met::new(Meaning::Refused, error.about(format!("task `{}`", self.held.key()))))
    }

    /// Replaces the record that was locked: the store's own statement, in the marked transaction only. Its parameters are
    /// those of [`Line`], behind the key and the token before; its row has the fence if it was written, and behind it the
    /// columns of [`Cells`] if it was not.
    #[must_use]
    pub fn replace_sql(&self) -> String {
        replace(&format!("\"{}\".task", self.schema), "", "$5", &format!("and {SAME_TRANSACTION}"))
    }

    /// Judges that row: what stands there instead of what was written.
    ///
    /// # Errors
    /// [`Meaning::Lost`], and [`Meaning::Refused`] where the transaction in which the record was locked has ended.
    pub fn not_replaced(&self, before: &Record, there: Option<Cells<'_>>) -> Met {
        let Some(cells) = there else {
            return self.lost("the record is gone");
        };
        match self.found(&cells) {
            Err(met) => met,
            Ok(found) if found.record.token == before.token => {
                let what = "the transaction in which the record was locked has ended";
                let error =
                    Error::new(ErrorKind::WrongState, what).about(format!("task `{}`", self.held.key())).with_hint(
                        "neither commit nor roll back by a statement of your own: return from the handler instead",
                    );
                Met::new(Meaning::Refused, error)
            }
            Ok(found) => match self.held.check_found(Some(&found.record)) {
                Err(error) => Met::new(Meaning::Lost, error),
                Ok(()) => self.lost("the record changed under the transaction that had locked it"),
            },
        }
    }

    fn lost(&self, what: &str) -> Met {
        let error = Error::new(ErrorKind::ClaimLost, what).about(format!("task `{}`", self.held.key()));
        Met::new(Meaning::Lost, error)
    }

    /// An error of the server's or the connection's, by its code if it has one.
    #[must_use]
    pub fn met(&self, code: Option<&str>, message: &str) -> Met {
        match code {
            Some(code) => Met::answered(self.held.key(), code, message),
            None => Met::without_answer(self.held.key(), message),
        }
    }
}

/// A setting that is a duration, at most so many milliseconds; zero means without limit.
pub(crate) fn at_most(setting: &str, millis: u128) -> String {
    format!(
        "case when {setting}::interval between interval '1 ms' and interval '{millis} ms' then {setting} else '{millis}ms' end"
    )
}
