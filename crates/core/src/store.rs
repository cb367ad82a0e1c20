//! The port: what a store does. One verb moves a record, and it is a compare-and-swap.
//!
//! The rules of the protocol are not in a store. They are pure functions in `decide`; a store keeps what they return.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, Name};
use crate::record::{Fence, Found, Record, State, Token};

/// Remembers tasks.
///
/// # Contract
///
/// * **Atomic.** Of concurrent swaps of one key that expect the same token, at most one is `Stored`.
/// * **Durable.** `Stored` survives a crash of the caller, and whatever the store's own page promises.
/// * **Fresh tokens.** The store never invents a token. As callers make each token at random, tokens of one key never
///   repeat, also across a purge of that key.
/// * **Repeatable.** A swap to a record that the key holds already (the same token) answers `Stored`, so that a swap
///   whose answer was lost can be sent again.
/// * **Honest.** An error means that the outcome is unknown, never that nothing happened.
/// * **Closed.** A record that cannot be decoded is an error that names its key, never "absent".
/// * **One clock.** Ages are measured by one clock, the store's. Times of day are neither taken nor returned.
/// * **Bounded.** Every call ends within the store's own deadline.
///
/// Dropping a future is allowed at any time; what it had asked for may still happen.
#[async_trait]
pub trait Store: Send + Sync {
    /// What the key holds.
    async fn load(&self, key: &Key) -> Result<Option<Found>>;

    /// Writes `next` if the key still holds the version that is `expected`.
    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap>;

    /// One page of records that match, in an order of the store's own.
    ///
    /// A record that is there during the whole walk is seen at least once; one may be seen twice. A page may hold
    /// fewer than `filter.page_max` records, also none, while there is a cursor: only `None` ends the walk. A record
    /// that cannot be decoded is a row with its key and the error; so is, with [`Walk::Listed`], one whose server is away
    /// while those of others answer.
    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page>;

    /// Removes final records past their retention, and outputs past theirs, at most `filter.page_max` of each.
    ///
    /// Never touches Running, Waiting or Parked. A store whose keys expire by themselves answers zero.
    async fn purge(&self, filter: &Filter) -> Result<Purged>;

    /// Removes what the key holds if it cannot be decoded, and says whether that is gone: by this call, whose answer may
    /// have been lost on the way, or by another's just now.
    ///
    /// Never a record that can be decoded, nor one of a newer format: those have a token, and are erased by a swap.
    async fn discard(&self, key: &Key) -> Result<bool>;

    /// Waits until what the key holds may be in another state than `seen`, or of another claim, and answers `true`: at
    /// once when it is so already, within 100 ms of the write otherwise, and now and then for no reason. A heartbeat is no
    /// reason. However many callers wait, a process costs the store no more than one reader of that key.
    ///
    /// The only call without a deadline: the caller stops waiting by dropping it. Answers `false` at once where the store
    /// cannot tell: then the caller looks by itself.
    ///
    /// # Errors
    /// The store's, when nothing can be told for now: the caller looks by itself.
    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool>;

    /// Takes note that a transaction of the caller's own has committed this end of a claim. For stores that keep more of a
    /// task than its record, such as hints at it; any other has nothing to note. Nothing depends on it, and it never blocks.
    fn told(&self, key: &Key, end: &Arc<Record>);

    /// Looks at the store's own health: reachability, settings that endanger records, clock. For people.
    async fn examine(&self) -> Vec<Finding>;

    /// What the store promises of what it acknowledged.
    fn memory(&self) -> Memory;

    /// Where a transaction of the caller's own can reach the records, so that a completion commits with its effect; `None`
    /// where none can.
    fn ground(&self) -> Option<Ground>;

    /// Names the life of what the store holds. It moves when writes that were acknowledged may have been lost: at the
    /// promotion of a standby, at the return to a backup. `None` where the store cannot tell.
    ///
    /// # Errors
    /// The store's.
    async fn generation(&self) -> Result<Option<Generation>>;
}

/// Where a caller's own transaction finds the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ground {
    /// Whose transactions can join: `postgres` or `sqlite`.
    pub system: &'static str,
    /// Where in there: the schema of PostgreSQL, the file of SQLite.
    pub place: String,
    /// The longest that a call of the store takes, and so the longest that a connection of a driver's own waits for its turn.
    pub timeout: Duration,
}

/// A life of what a store holds; see [`Store::generation`]. Two that are equal are the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Generation(pub String);

/// The version that a swap replaces.
#[derive(Clone, Copy, Debug)]
pub enum Expected<'a> {
    /// The key must hold nothing.
    Nothing,
    /// The version with this token, whatever else it says.
    Token(Token),
    /// The version with this record's token. As a token names one version, a store may compare the whole record, and may
    /// conclude from the record what follows from leaving it.
    Record(&'a Record),
}

impl<'a> Expected<'a> {
    /// The version that was found.
    #[must_use]
    pub fn found(found: Option<&'a Found>) -> Expected<'a> {
        Expected::record(found.map(|found| &*found.record))
    }

    /// This version, or nothing.
    #[must_use]
    pub fn record(record: Option<&'a Record>) -> Expected<'a> {
        record.map_or(Expected::Nothing, Expected::Record)
    }

    /// The token that must be there; `None` if nothing must be.
    #[must_use]
    pub fn token(self) -> Option<Token> {
        match self {
            Expected::Nothing => None,
            Expected::Token(token) => Some(token),
            Expected::Record(record) => Some(record.token),
        }
    }
}

/// What to put in place of a record.
#[derive(Clone, Copy, Debug)]
pub enum Next<'a> {
    /// This record, with the fence it carries.
    Keep(&'a Record),
    /// This record, as a new claim. A store with a store-wide sequence raises its fence to the sequence's next value;
    /// any other store keeps the fence that the record carries.
    Claim(&'a Record),
    /// Nothing: the record is removed.
    Erase,
}

/// What a swap did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The write is stored (now, or by an earlier sending of the same swap), with this fence.
    Stored(Fence),
    /// Another version is there, or nothing. Nothing was written.
    Conflict(Option<Found>),
    /// A transaction that is open holds the record: nothing was written, and what will be there is not known before that
    /// transaction ends. What can be read until then, or nothing.
    Locked(Option<Found>),
}

/// What a store promises of what it acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// It keeps what it acknowledged, and its fences only grow.
    Keeps,
    /// It may forget after a crash, a failover or a flush, and its fences may go back.
    MayForget,
}

/// Which records to walk over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Only this namespace.
    pub namespace: Option<Name>,
    /// Only this handler.
    pub handler: Option<Name>,
    /// Only these states; empty means all.
    pub states: Vec<State>,
    /// Only ids that begin so.
    pub id_prefix: String,
    /// Only tasks that have been in their state at least so long. (A heartbeat writes a record and keeps its state.)
    pub age_min: Duration,
    /// The most records of one page, 1 to [`PAGE_MAX`].
    pub page_max: usize,
    /// Where to look for them.
    pub walk: Walk,
}

/// Where a walk looks for records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Walk {
    /// At every record. A store that keeps lists of records in rare states mends them on the way.
    #[default]
    All,
    /// Where the store lists records in rare states (all but Done), without looking at the others. It sees what became
    /// Waiting, Dead or Parked, and what is Running since its first heartbeat; not what a process wrote right before it
    /// was killed. What is listed and is no longer so is left out. A store that finds records by state anyway, and any
    /// store for a filter that admits Done (or names no state), walks over [`All`](Walk::All).
    Listed,
}

/// The largest page.
pub const PAGE_MAX: usize = 1000;

impl Default for Filter {
    fn default() -> Filter {
        Filter {
            namespace: None,
            handler: None,
            states: Vec::new(),
            id_prefix: String::new(),
            age_min: Duration::ZERO,
            page_max: 100,
            walk: Walk::All,
        }
    }
}

impl Filter {
    /// Whether a key matches what the filter says of keys.
    #[must_use]
    pub fn admits_key(&self, key: &Key) -> bool {
        self.namespace.as_ref().is_none_or(|wanted| wanted.as_str() == key.namespace())
            && self.handler.as_ref().is_none_or(|wanted| wanted.as_str() == key.handler())
            && key.id().starts_with(&self.id_prefix)
    }

    /// Whether a record matches what the filter says of records.
    #[must_use]
    pub fn admits_record(&self, found: &Found) -> bool {
        (self.states.is_empty() || self.states.contains(&found.record.state)) && found.in_state_for() >= self.age_min
    }

    /// The same, asked of what the store lists where it keeps lists: see [`Walk::Listed`].
    #[must_use]
    pub fn listed(self) -> Filter {
        Filter { walk: Walk::Listed, ..self }
    }

    /// Whether a walk over what the store lists answers it.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.walk == Walk::Listed && !self.states.is_empty() && !self.states.contains(&State::Done)
    }

    /// The page size, within its bounds.
    #[must_use]
    pub fn page(&self) -> usize {
        self.page_max.clamp(1, PAGE_MAX)
    }
}

/// Where a walk goes on; opaque, and valid for the store and filter that made it.
///
/// At most [`CURSOR_MAX`] bytes, all of them letters, digits or one of `-._~/@:`, so that it is one word on a command line
/// and in the query of a URL. A store refuses a cursor that none of its pages can have given
/// ([`BadCursor`](ErrorKind::BadCursor)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(pub String);

/// The longest cursor, in bytes. The longest key takes 931 of them.
pub const CURSOR_MAX: usize = 1024;
/// How much of a refused cursor its error shows, in characters.
const CURSOR_SHOWN: usize = 60;

impl Cursor {
    /// The cursor of a store that walks in the order of keys, right behind this one: the key, with each byte that a
    /// cursor may not have as `~` and two digits.
    #[must_use]
    pub fn behind(key: &Key) -> Cursor {
        let mut text = String::with_capacity(key.as_str().len());
        for byte in key.as_str().bytes() {
            if byte.is_ascii_alphanumeric() || b"-._/@:".contains(&byte) {
                text.push(char::from(byte));
            } else {
                text.push_str(&format!("~{byte:02X}"));
            }
        }
        Cursor(text)
    }

    /// The key that it stands behind.
    ///
    /// # Errors
    /// [`ErrorKind::BadCursor`] when [`behind`](Cursor::behind) made it of no key.
    pub fn key(&self) -> Result<Key> {
        let mut parts = self.0.split('~');
        let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
        for part in parts {
            let (digits, rest) = part.split_at_checked(2).ok_or_else(|| self.refused())?;
            bytes.push(u8::from_str_radix(digits, 16).map_err(|_| self.refused())?);
            bytes.extend_from_slice(rest.as_bytes());
        }
        let key = String::from_utf8(bytes).ok().and_then(|text| Key::parse(&text).ok());
        key.filter(|key| Cursor::behind(key) == *self).ok_or_else(|| self.refused())
    }

    /// The error of a store none of whose pages can have given this cursor.
    #[must_use]
    pub fn refused(&self) -> Error {
        let mut shown: String = self.0.chars().take(CURSOR_SHOWN).collect();
        if shown.len() < self.0.len() {
            shown.push('…');
        }
        Error::new(ErrorKind::BadCursor, "no page of this store gave it")
            .about(format!("cursor `{}`", shown.escape_debug()))
    }
}

/// One page of a walk.
#[derive(Debug, Default)]
pub struct Page {
    /// The records.
    pub rows: Vec<Row>,
    /// Where to go on; `None` at the end.
    pub next: Option<Cursor>,
}

/// One record of a walk.
#[derive(Debug)]
pub struct Row {
    /// Its key.
    pub key: Key,
    /// The record, or why it cannot be read.
    pub found: Result<Found>,
}

/// What a purge removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Records removed.
    pub records: usize,
    /// Outputs removed from records that stay.
    pub outputs: usize,
}

/// One thing that an examination found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How grave.
    pub level: Level,
    /// What was looked at, in a word or two: `eviction policy`.
    pub subject: String,
    /// What was seen.
    pub text: String,
    /// What to do; empty when all is well.
    pub hint: String,
}

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// Works, with a risk that should be known.
    Warning,
    /// Endangers what the system promises, or keeps it from working.
    Fault,
}

impl Level {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Level::Fine => "fine",
            Level::Warning => "warning",
            Level::Fault => "fault",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_of_any_key_is_short_and_reads_back() {
        let longest = format!("{}/{}@{}/{}", "n".repeat(64), "h".repeat(64), "1".repeat(32), "é".repeat(128));
        for text in ["a/b@1/c", "a/b@1/x y~7E%2F:@/&=?#'\"\\", "a/b@1/~", "a/b@1/é\u{2028}", &longest] {
            let key = Key::parse(text).unwrap();
            let cursor = Cursor::behind(&key);
            assert!(cursor.0.len() <= CURSOR_MAX, "{} bytes", cursor.0.len());
            assert!(
                cursor.0.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~/@:".contains(&byte)),
                "{cursor:?}"
            );
            assert_eq!(cursor.key().unwrap(), key);
        }
        assert_eq!(Cursor::behind(&Key::parse("a/b@1/c:7").unwrap()).0, "a/b@1/c:7");
    }

    #[test]
    fn a_cursor_of_no_key_is_refused_and_named() {
        let long = "x".repeat(10_000);
        for text in [
            "",
            "nonsense",
            "17:10",
            "a/b@1/",
            "a/b@1/~",
            "a/b@1/~7",
            "a/b@1/~7e",
            "a/b@1/~63",
            "a/b@1/~é",
            "a/b@1/x y",
            "a/b@1/~FF",
            &long,
        ] {
            let error = Cursor(text.into()).key().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadCursor, "{text}");
            assert!(error.to_string().contains(&text[..text.len().min(7)]) && error.to_string().len() < 200, "{error}");
        }
    }
}
