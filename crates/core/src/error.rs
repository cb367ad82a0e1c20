//! What went wrong, what it was about, and what to do: `Error` and its closed list of kinds.
//!
//! An `Err` means that the caller could not know the outcome, or broke a rule. Expected answers (busy, replay, dead, …)
//! are variants of what a move returns and never stand here.

use std::fmt;

/// A result of this system.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $retry:ident, hint $hint:literal;)+) => {
        /// The kind of an error. The list is closed; every kind says what to do.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl ErrorKind {
            /// Every kind, in the order of the documentation.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$variant,)+];

            /// The stable name, as printed in JSON and held in the published vectors.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(ErrorKind::$variant => $name,)+ }
            }

            /// Whether asking again can help.
            #[must_use]
            pub fn retry(self) -> Retry {
                match self { $(ErrorKind::$variant => Retry::$retry,)+ }
            }

            /// What to do, where the error itself has no better advice.
            #[must_use]
            pub fn hint(self) -> &'static str {
                match self { $(ErrorKind::$variant => $hint,)+ }
            }
        }
    };
}

/// Whether asking again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The outcome is unknown and the cause may pass: defer, ask again with the same claim, count no attempt.
    Later,
    /// A newer worker, or a person's repair of the store, is needed first.
    Elsewhere,
    /// The same call gives the same error.
    Never,
}

kinds! {
    // The store.
    /// No connection to the store, or it broke: the outcome of the call is unknown.
    Unreachable = "unreachable", Later, hint "check that the store runs and that its address is right";
    /// No answer within the deadline: the outcome of the call is unknown.
    TimedOut = "timed_out", Later, hint "the store is slow or stopped; raise `timeout` in its URL if that is normal here";
    /// Another process kept the store locked until the deadline.
    Locked = "locked", Later, hint "another process holds the store; raise `timeout` in its URL if that is normal here";
    /// The store has no room: disk or memory is full.
    Full = "full", Later, hint "free space in the store, or shorten retention, then try again";
    /// The store refuses writes (read-only file, replica).
    ReadOnly = "read_only", Later, hint "point the URL at a writable primary, or repair the file's permissions";
    /// The write is on the primary, and too few replicas acknowledged it in time: whether it stays is unknown.
    Unreplicated = "unreplicated", Later, hint "see that the replicas run and keep up (`taskonce doctor`), or ask for fewer in `wait_replicas`";
    /// The store refused the user or password, or lacks a permission.
    Denied = "denied", Elsewhere, hint "check user, password and permissions in the store's URL";
    /// The bytes under the key are not a whole record. Nothing is run, nothing is overwritten.
    Corrupt = "corrupt", Elsewhere, hint "look at the key with the store's own tools; `taskonce clear` removes it";
    /// The record was written by a newer version.
    NewerFormat = "newer_format", Elsewhere, hint "a newer worker wrote this record; update this one";
    /// The store's schema is newer than this program.
    NewerSchema = "newer_schema", Elsewhere, hint "a newer taskonce made this store; update this one";
    /// The database has no schema of taskonce, or one of an older version: it is made by an explicit step.
    NoSchema = "no_schema", Elsewhere, hint "run `taskonce migrate` with the same store URL";
    /// The store may evict records when its memory is full, which would silently forget tasks.
    Evicting = "evicting", Elsewhere, hint "set `maxmemory-policy noeviction`, or accept the loss with `?eviction=accept`";
    /// The server or library is too old, or lacks something needed.
    Unsupported = "unsupported", Elsewhere, hint "update the store's server";
    /// The store answered something that its protocol does not allow here.
    Protocol = "protocol", Later, hint "look at what listens at the store's address";
    // Settings.
    /// The store's URL cannot be used.
    BadUrl = "bad_url", Never, hint "write it as `sqlite:tasks.db`, `postgres://host/database`, `redis://host:6379/0` (or `redis+sentinel://`, `redis+cluster://`), or `memory:`";
    /// Settings contradict each other; all contradictions are named at once.
    BadPolicy = "bad_policy", Never, hint "change the settings named above";
    /// The table of routes cannot be used; everything that is wrong with it is named at once.
    BadRoutes = "bad_routes", Never, hint "change the lines and routes named above";
    /// The effect needs a store that keeps what it acknowledged, and this store may forget.
    ForgetfulStore = "forgetful_store", Never, hint "use SQLite, or accept it with `store_may_forget = true`";
    // Identity.
    /// A namespace, handler or version is empty, too long, or has other characters than `[A-Za-z0-9._-]`.
    BadName = "bad_name", Never, hint "use letters, digits, `.`, `_` and `-`";
    /// An id is empty, longer than 256 bytes, or has control characters.
    BadId = "bad_id", Never, hint "pass 1 to 256 bytes of UTF-8 without control characters";
    /// Two pieces of code of one process registered the same handler.
    DuplicateHandler = "duplicate_handler", Never, hint "give each its own name, or its own version";
    /// A cursor that no page of this store gave.
    BadCursor = "bad_cursor", Never, hint "pass the cursor of the page before, with the same filter, or begin anew without one";
    /// A text form of a key that does not read `namespace/handler@version/id`.
    BadKey = "bad_key", Never, hint "write it as `namespace/handler@version/id`";
    /// The input is not JSON.
    BadJson = "bad_json", Never, hint "pass one JSON document in UTF-8";
    /// An object names one member twice, so the input has two readings.
    DuplicateName = "duplicate_name", Never, hint "name each member once";
    /// A string holds half of a UTF-16 pair, which has no UTF-8 form.
    LoneSurrogate = "lone_surrogate", Never, hint "escape characters beyond U+FFFF as a whole pair, or write them as UTF-8";
    /// An integer literal lies outside of the i64 and u64 range, where digits would be lost.
    IntegerRange = "integer_range", Never, hint "pass it as a string";
    /// NaN or an infinity, or a number too large for a double.
    NotFinite = "not_finite", Never, hint "pass a finite number, or a string";
    /// The input is nested deeper than the limit.
    TooDeep = "too_deep", Never, hint "nest less deeply, or derive the key from chosen fields of a flatter document";
    /// A map key is not a string.
    KeyNotString = "key_not_string", Never, hint "use strings as map keys";
    /// The value has no JSON form.
    NoJsonForm = "no_json_form", Never, hint "pass it as a string, a number, a list or a map";
    /// A JSON Pointer is malformed or given twice.
    BadPointer = "bad_pointer", Never, hint "write it as in RFC 6901: `/order/id`, `~1` for `/`, `~0` for `~`";
    /// A required JSON Pointer finds nothing.
    PointerMissing = "pointer_missing", Never, hint "correct the pointer or the input, or declare the pointer optional";
    /// No chosen field is present, so that all such inputs would be one task.
    NothingChosen = "nothing_chosen", Never, hint "choose at least one field that is always present";
    // Values.
    /// The output cannot be encoded or decoded.
    BadOutput = "bad_output", Never, hint "return a value that serde can encode, and read it back as the same type";
    // A transaction of the caller's.
    /// The record is not this claim's any more: another took over, or a person changed it. Nothing of it was locked.
    ClaimLost = "claim_lost", Never, hint "roll the transaction back; whoever holds the task now runs it";
    /// The database refused the commit for what the transaction's own statements did, and nothing of it is kept.
    RolledBack = "rolled_back", Never, hint "fail the claim, or lock it again and write something else: the words are your database's";
    // Sources.
    /// What was to be sent, or why something died, breaks a limit. Nothing was queued or moved.
    BadEnvelope = "bad_envelope", Never, hint "keep within the limits named above";
    /// This handle of a source was closed.
    Closed = "closed", Never, hint "open the source again";
    // What a person asked for.
    /// There is no record of the task.
    NotFound = "not_found", Never, hint "check the key; `taskonce list` shows what there is";
    /// The record's state does not allow the move.
    WrongState = "wrong_state", Never, hint "look at the task with `taskonce show`";
    /// The record changed while a person's change was being written.
    Changed = "changed", Later, hint "look at the task with `taskonce show`, then try again";
}

/// An error: its kind, what was being done, to what, and why.
pub struct Error {
    kind: ErrorKind,
    message: String,
    subject: Option<String>,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error with a message in lower case, without a full stop.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), subject: None, hint: None, source: None }
    }

    /// Names the thing it is about: a key, a path, a URL without its password.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Error {
        self.subject = Some(subject.into());
        self
    }

    /// Replaces the kind's advice with a better one.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// The same error for another caller, where one answer was for several. The cause stays with the first.
    #[must_use]
    pub fn again(&self) -> Error {
        let (message, subject, hint) = (self.message.clone(), self.subject.clone(), self.hint.clone());
        Error { kind: self.kind, message, subject, hint, source: None }
    }

    /// The kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What it is about, if it is about one thing.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        self.subject.as_deref()
    }

    /// What to do.
    #[must_use]
    pub fn hint(&self) -> &str {
        self.hint.as_deref().unwrap_or_else(|| self.kind.hint())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(subject) = &self.subject {
            write!(f, "{subject}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({}; hint: {})", self.kind.name(), self.hint())?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source.as_ref() as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kinds_are_unique_and_hints_are_given() {
        let mut names: Vec<_> = ErrorKind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ErrorKind::ALL.len());
        assert!(ErrorKind::ALL.iter().all(|kind| !kind.hint().is_empty()));
    }

    #[test]
    fn an_error_for_another_caller_says_the_same() {
        let first = Error::new(ErrorKind::Full, "a: no room").about("file `a`").with_hint("make some");
        let plain = Error::new(ErrorKind::Full, "no room");
        for error in [first, plain] {
            assert_eq!(format!("{:?}", error.again()), format!("{error:?}"));
            assert_eq!(error.again().subject(), error.subject());
        }
    }
}
