//! What keeps a call from its answer: PostgreSQL's errors as ours, each with what to do.

use std::error::Error as _;
use std::time::Duration;

use taskonce_core::{Error, ErrorKind};
use tokio_postgres::error::{DbError, SqlState};

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) struct Fault {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    /// What it means for the call and its connection.
    pub(crate) cause: Cause,
}

/// What a fault means for the call and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The connection is of no use any more. Whether the statement took effect is unknown.
    Broken,
    /// A transaction holds what the statement needs. Nothing was written.
    Locked,
    /// Another transaction came in between. Nothing was written.
    Again,
    /// The server does not take writes now. Another one may.
    ReadOnly,
    /// A pooler is between, which takes no settings of a session, or has lent another connection.
    Pooler,
    /// The server refuses what the statement would write. Nothing was written; what else was to go with it may pass.
    Refused,
    /// The same call would meet the same.
    Lasting,
}

impl Fault {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Fault {
        Fault { kind, message: message.into(), hint: None, cause: Cause::Lasting }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Fault {
        Fault { hint: Some(hint.into()), ..self }
    }

    pub(crate) fn because(self, cause: Cause) -> Fault {
        Fault { cause, ..self }
    }

    /// As an error about a store or a key.
    pub(crate) fn about(self, subject: impl Into<String>) -> Error {
        let error = Error::new(self.kind, self.message).about(subject);
        match self.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// The time of a call is up, and its statement may still run.
    pub(crate) fn late(timeout: Duration) -> Fault {
        Fault::new(ErrorKind::TimedOut, format!("no answer within {timeout:?}")).because(Cause::Broken)
    }

    /// No connection of the pool came free in time.
    pub(crate) fn exhausted(connections: usize, timeout: Duration) -> Fault {
        Fault::new(
            ErrorKind::TimedOut,
            format!("all {connections} connections of this process are in use, for {timeout:?}"),
        )
        .hint("raise `connections` in the store's URL, or find what keeps the server slow")
    }

    /// A transaction holds the record of a write that was sent twice: maybe the first sending's own.
    pub(crate) fn held_by_whom() -> Fault {
        let what =
            "the connection was cut, and a transaction holds the record: whether the write took effect is unknown";
        Fault::new(ErrorKind::Locked, what).hint("ask again: what was stored is recognised")
    }

    /// The schema is not there.
    pub(crate) fn no_schema(schema: &str) -> Fault {
        Fault::new(ErrorKind::NoSchema, format!("the database has no schema `{schema}` of taskonce"))
            .hint("run `taskonce migrate` with the same store URL, as a user who may make a schema")
    }

    /// The schema is of another version.
    pub(crate) fn other_schema(schema: &str, found: i32, needed: i32) -> Fault {
        if found > needed {
            Fault::new(
                ErrorKind::NewerSchema,
                format!("schema `{schema}` has version {found}, this program knows up to {needed}"),
            )
        } else {
            Fault::new(
                ErrorKind::NoSchema,
                format!("schema `{schema}` has version {found}, this program needs {needed}"),
            )
            .hint("run `taskonce migrate` with the same store URL")
        }
    }

    /// What the driver met on a connection that was made.
    pub(crate) fn of(error: &tokio_postgres::Error) -> Fault {
        match error.as_db_error() {
            Some(error) => Fault::of_db(error),
            None => Fault::of_driver(error),
        }
    }

    fn of_driver(error: &tokio_postgres::Error) -> Fault {
        let text = chain(error);
        if error.is_closed() || text.contains("communicating with the server") {
            return Fault::new(ErrorKind::Unreachable, "the connection was closed by the server or on the way")
                .because(Cause::Broken);
        }
        if text.contains("TLS") || text.contains("certificate") {
            let hint = if text.contains("does not support TLS") {
                "the server takes no TLS: set it up there (`ssl = on`), or ask for less with `sslmode=prefer`"
            } else {
                "check the server's certificate, its name in the URL, `sslmode` and `sslrootcert`"
            };
            return Fault::new(ErrorKind::Unreachable, format!("no TLS connection: {text}")).hint(hint);
        }
        if text.contains("timeout") || text.contains("timed out") {
            return Fault::new(ErrorKind::TimedOut, text).because(Cause::Broken);
        }
        if text.contains("does not allow writes") {
            return Fault::new(ErrorKind::ReadOnly, "none of the servers takes writes")
                .hint("see which server is the primary, and name it too, or wait for the switch to end")
                .because(Cause::ReadOnly);
        }
        if text.contains("password missing") {
            return Fault::new(ErrorKind::Denied, "the server asks for a password and the URL has none");
        }
        if text.contains("connecting to server") {
            return Fault::new(ErrorKind::Unreachable, text)
                .hint("check that PostgreSQL runs, listens there, and that the URL names its host and port")
                .because(Cause::Broken);
        }
        if text.contains("authentication") {
            return Fault::new(ErrorKind::Denied, text);
        }
        Fault::new(ErrorKind::Protocol, text).because(Cause::Broken)
    }

    fn of_db(error: &DbError) -> Fault {
        Fault::of_code(error.code(), error.message())
    }

    /// What the server answered: the code of an error, and what it says.
    pub(crate) fn of_code(code: &SqlState, message: &str) -> Fault {
        let fault = Fault::of_code_alone(code, message);
        // Data, constraints, a policy of rows, whatever a trigger raises; but not what any statement would meet.
        let is_of_all = ["08", "0A", "25", "26", "28", "3D", "3F", "53", "57", "58", "XX"]
            .contains(&code.code().get(..2).unwrap_or(""))
            || [SqlState::UNDEFINED_TABLE, SqlState::UNDEFINED_COLUMN].contains(code);
        if fault.cause == Cause::Lasting && !is_of_all { fault.because(Cause::Refused) } else { fault }
    }

    fn of_code_alone(code: &SqlState, message: &str) -> Fault {
        let said = lower(message);
        let new = |kind, message: String| Fault::new(kind, message);
        if *code == SqlState::INVALID_PASSWORD {
            new(ErrorKind::Denied, format!("the server refused the user or the password: {said}"))
                .hint("check user and password in the store's URL; special characters are percent-encoded")
        } else if *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION {
            let (hint, what) = if said.contains("no encryption") {
                (
                    "let this user in from this host in the server's `pg_hba.conf`; where that has `hostssl` lines only, use \
                     `sslmode=require` or more",
                    "this user from here without TLS",
                )
            } else if said.contains("pg_hba.conf") {
                ("let this user in from this host in the server's `pg_hba.conf`", "this user from here")
            } else {
                ("check user and password in the store's URL", "this user")
            };
            new(ErrorKind::Denied, format!("the server does not let in {what}: {said}")).hint(hint)
        } else if *code == SqlState::INVALID_CATALOG_NAME {
            new(ErrorKind::BadUrl, format!("the server has no such database: {said}"))
                .hint("name another database in the store's URL, or make it with `createdb`")
        } else if [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME, SqlState::UNDEFINED_COLUMN].contains(code)
        {
            new(ErrorKind::NoSchema, format!("the schema of taskonce is not there, or not whole: {said}"))
                .hint("run `taskonce migrate` with the same store URL, as a user who may make a schema")
        } else if *code == SqlState::INSUFFICIENT_PRIVILEGE {
            new(ErrorKind::Denied, format!("the user lacks a right: {said}"))
                .hint("`taskonce migrate --store URL --print --grant-to ROLE` prints the grants that a user of the store needs")
        } else if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
            new(ErrorKind::ReadOnly, format!("the server takes no writes: {said}"))
                .hint("it is a standby, or this user or database is read-only: name the primary in the URL")
                .because(Cause::ReadOnly)
        } else if *code == SqlState::LOCK_NOT_AVAILABLE {
            new(ErrorKind::Locked, "a transaction holds the record".into())
                .hint("find it with `select * from pg_stat_activity where state like 'idle in transaction%'`")
                .because(Cause::Locked)
        } else if [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].contains(code) {
            new(ErrorKind::Locked, format!("another transaction came in between: {said}")).because(Cause::Again)
        } else if *code == SqlState::QUERY_CANCELED {
            new(ErrorKind::TimedOut, format!("the server ended the statement: {said}")).hint(
                "the server is slow, or a person ended it; raise `timeout` in the store's URL if that is normal here",
            )
        } else if *code == SqlState::DISK_FULL {
            new(ErrorKind::Full, format!("the server's disk is full: {said}"))
        } else if [SqlState::TOO_MANY_CONNECTIONS, SqlState::CONFIGURATION_LIMIT_EXCEEDED].contains(code) {
            new(ErrorKind::Unreachable, format!("the server has no connection left: {said}"))
                .hint("lower `connections` in the store's URL, raise `max_connections`, or put a pooler between")
        } else if [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW].contains(code) {
            new(ErrorKind::Unreachable, format!("the server is starting or stopping: {said}"))
                .hint("wait until it has started; a crash is recovered from before connections are taken")
                .because(Cause::Broken)
        } else if said.contains("unsupported startup parameter")
            || [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT].contains(code)
        {
            new(ErrorKind::Protocol, format!("a pooler stands between: {said}"))
                .hint("write `statements=unnamed` into the store's URL")
                .because(Cause::Pooler)
        } else if code.code().starts_with("08") {
            new(ErrorKind::Unreachable, format!("the connection failed: {said}")).because(Cause::Broken)
        } else if code.code().starts_with("53") {
            new(ErrorKind::Unreachable, format!("the server lacks resources: {said}"))
        } else if [SqlState::DATA_CORRUPTED, SqlState::INDEX_CORRUPTED].contains(code) {
            new(ErrorKind::Corrupt, format!("the database is damaged: {said}"))
                .hint("stop all workers, look at the server's log, and restore the database from a backup")
        } else if code.code().starts_with("23") {
            new(ErrorKind::Corrupt, format!("the database refuses a record that breaks its own rules: {said}"))
                .hint("the schema was changed by hand, or this is a fault of taskonce: please report it")
        } else {
            new(ErrorKind::Protocol, format!("the server answered {}: {said}", code.code()))
        }
    }
}

/// An error with what caused it.
fn chain(error: &tokio_postgres::Error) -> String {
    let mut text = lower(&error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            text.push_str(&format!(": {}", lower(&said)));
        }
        source = cause.source();
    }
    text
}

/// A message of another program in our style: it begins in lower case.
pub(crate) fn lower(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some(second)) if second.is_lowercase() => first.to_lowercase().chain(chars).collect(),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lookup in the catalog that failed beside a change of the schema is `XX000` too.
    #[test]
    fn only_what_the_server_calls_corrupted_is_corrupt() {
        let kind = |code| Fault::of_code(&SqlState::from_code(code), "something").about("store `s`").kind();
        assert_eq!((kind("XX001"), kind("XX002")), (ErrorKind::Corrupt, ErrorKind::Corrupt));
        assert_eq!(kind("XX000"), ErrorKind::Protocol);
    }
}
