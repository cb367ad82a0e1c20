//! The port, kept by a PostgreSQL database: `PostgresStore`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::{Fence, Found, Record, State, Token};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use tokio::time::{Instant, sleep_until};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::connect::Dial;
use crate::desk::{self, Asked, Line as _};
use crate::examine;
use crate::fault::{Cause, Fault};
use crate::known::Known;
use crate::lines::{Desks, End, NewClaim, Renewal};
use crate::pool::{Pool, Sent};
use crate::process::Process;
use crate::row::{self, Line};
use crate::scan;
use crate::sql::Verb;
use crate::url::Settings;

/// How often a swap is sent again where another transaction came in between and left nothing to show.
const ROUNDS_MAX: usize = 8;
/// The shortest pause between two looks at a record that a transaction holds: about a statement's time. It doubles.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// The longest, where the whole wait is short: looking costs little then.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// The most looks of one call whose pauses are the longest ones; where the wait is long, so are they. Before these the pause
/// doubles, so that a call looks some 30 times at most, however long it waits.
const LONGEST_PAUSES_MAX: u32 = 20;

/// A store in a PostgreSQL database. Clones share its connections.
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) settings: Settings,
    dial: Arc<Dial>,
    here: Process<Here>,
}

/// What one process and runtime has of a store.
pub(crate) struct Here {
    pub(crate) pool: Pool,
    pub(crate) desks: Desks,
    known: Known,
}

impl PostgresStore {
    /// A store at `postgres://user:password@host:5432/database?schema=taskonce`. Nothing is connected to before the first
    /// call. The options are in `docs/postgres.md`.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`] with everything that is wrong with the URL.
    pub fn from_url(url: &str) -> Result<PostgresStore> {
        let settings = Settings::read(url)?;
        let dial = Dial::new(&settings).map_err(|fault| fault.about(format!("store `{}`", settings.label)))?;
        Ok(PostgresStore {
            inner: Arc::new(Inner { settings, dial: Arc::new(dial), here: Process::new(std::process::id()) }),
        })
    }
}

impl Inner {
    /// An error about the store.
    pub(crate) fn error(&self, fault: Fault) -> Error {
        fault.about(format!("store `{}`", self.settings.label))
    }

    /// What this process and runtime has.
    pub(crate) fn here(&self) -> Result<Arc<Here>> {
        let made = self.here.here(|| Here {
            pool: Pool::new(Arc::clone(&self.dial), self.settings.connections, self.settings.timeout),
            desks: Desks::default(),
            known: Known::new(),
        });
        made.map_err(|fault| self.error(fault))
    }

    /// What a key holds.
    async fn load(&self, here: &Here, key: &Key, deadline: Instant) -> Result<Option<Found>> {
        let rows = here.pool.ask(Verb::Load, &[&key.as_str()], deadline).await.map_err(|fault| self.error(fault))?;
        rows.first().map(|row| row::found(key, row, 0)).transpose()
    }

    /// A swap that begins with a look where a record is to be expected all the same: a duplicate then costs a bare read.
    async fn swap(
        self: &Arc<Self>,
        here: &Arc<Here>,
        key: &Key,
        expected: Option<Token>,
        write: Write<'_>,
    ) -> Result<Swap> {
        let deadline = here.pool.deadline();
        let is_known = expected.is_none() && here.known.knows(key);
        let is_new = !is_known && expected.is_none() && matches!(write, Write::Claim(_));
        if is_known || is_new && here.known.expects_duplicate() {
            match self.load(here, key, deadline).await? {
                Some(found) => {
                    here.known.note(key);
                    let is_own = Some(found.record.token) == write.token();
                    return Ok(if is_own { Swap::Stored(found.record.fence) } else { Swap::Conflict(Some(found)) });
                }
                None => here.known.forget(key),
            }
        }
        let erases = write.token().is_none();
        let swapped = self.send_or_join(here, key, expected, write, deadline).await?;
        match &swapped {
            Swap::Stored(_) if is_new => here.known.met_fresh(),
            Swap::Conflict(Some(_)) if is_new => here.known.met_duplicate(),
            Swap::Stored(_) | Swap::Conflict(_) | Swap::Locked(_) => {}
        }
        match &swapped {
            Swap::Stored(_) if erases => here.known.forget(key),
            Swap::Stored(_) | Swap::Conflict(Some(_)) | Swap::Locked(_) => here.known.note(key),
            Swap::Conflict(None) => here.known.forget(key),
        }
        Ok(swapped)
    }

    /// Sends a swap by itself where none is under way, and with others where some are: then one commit serves all.
    async fn send_or_join(
        self: &Arc<Self>,
        here: &Arc<Here>,
        key: &Key,
        expected: Option<Token>,
        write: Write<'_>,
        deadline: Instant,
    ) -> Result<Swap> {
        match (&write, expected) {
            (Write::Claim(line), None) => {
                let claim = || NewClaim(line.clone().kept());
                self.join(here, key, expected, &write, claim, deadline).await
            }
            (Write::Keep(line, columns), Some(token)) => {
                let end = || End { expected: token, columns: *columns, record: line.clone().kept() };
                self.join(here, key, expected, &write, end, deadline).await
            }
            (Write::Claim(_) | Write::Keep(..) | Write::Erase, _) => {
                self.send(here, key, expected, &write, (Sent::Once, None::<()>), deadline).await
            }
        }
    }

    async fn join<L: desk::Line>(
        self: &Arc<Self>,
        here: &Arc<Here>,
        key: &Key,
        expected: Option<Token>,
        write: &Write<'_>,
        line: impl FnOnce() -> L + Send,
        deadline: Instant,
    ) -> Result<Swap> {
        let begin = match desk::first::<L>(self, here) {
            Some(turn) => (Sent::Once, Some(turn)),
            None => match desk::ask(self, here, key, line(), deadline).await? {
                Asked::Answered(swap) => return Ok(swap),
                Asked::Alone(sent) => (sent, None),
            },
        };
        self.send(here, key, expected, write, begin, deadline).await
    }

    /// Renews a claim by a statement of its own.
    async fn renew_alone(&self, here: &Here, key: &Key, renewal: Renewal) -> Result<Swap> {
        let batch = BTreeMap::from([(key.clone(), renewal)]);
        let rows = match Renewal::ask(here, &batch, &mut Sent::Once).await {
            Ok(rows) => rows,
            // Somebody holds the table.
            Err(fault) if fault.cause == Cause::Locked => return Ok(Swap::Locked(None)),
            Err(fault) => return Err(self.error(fault)),
        };
        let judged = match (rows.first(), batch.get(key)) {
            (Some(row), Some(renewal)) => renewal.judge(key, row)?,
            (None, _) | (_, None) => None,
        };
        Ok(judged.unwrap_or(Swap::Locked(None)))
    }

    /// Sends a swap, which was sent so often before, until it was stored or there is something to show for it. A turn ends with
    /// the first answer.
    async fn send<T>(
        &self,
        here: &Here,
        key: &Key,
        expected: Option<Token>,
        write: &Write<'_>,
        (mut sent, mut turn): (Sent, Option<T>),
        deadline: Instant,
    ) -> Result<Swap> {
        let (began, mut pause) = (Instant::now(), PAUSE_MIN);
        let mut rounds = 0;
        while rounds < ROUNDS_MAX {
            let asked = write.ask(here, &mut sent, key, expected, deadline).await;
            drop(turn.take());
            let held = match asked {
                Ok(rows) => {
                    let judged = if rows.is_empty() && write.looks_after(expected) {
                        judge_found(expected, write.token(), self.load(here, key, deadline).await?)
                    } else {
                        judge(key, expected, write.token(), &rows)?
                    };
                    match judged {
                        Judged::Swap(swap) => return Ok(swap),
                        // A transaction holds it, and it was passed over.
                        Judged::Unclear(Some(found)) if write.passes_over(expected) => Some(found),
                        // Who came in between committed after this statement began to look, or rolled back.
                        Judged::Unclear(_) => {
                            rounds += 1;
                            continue;
                        }
                    }
                }
                Err(fault) if fault.cause == Cause::Locked => None,
                Err(fault) => return Err(self.error(fault)),
            };
            // What holds it may be the first sending of this very write, whose connection was cut: it may be stored any moment.
            let patience = match sent {
                Sent::Once => began + self.settings.lock_timeout,
                Sent::Again => deadline,
            };
            if Instant::now() >= patience {
                return match (sent, held) {
                    (Sent::Once, Some(held)) => Ok(Swap::Locked(Some(held))),
                    (Sent::Once, None) => {
                        Ok(judge_locked(expected, write.token(), self.load(here, key, deadline).await?))
                    }
                    (Sent::Again, _) => Err(self.error(Fault::held_by_whom())),
                };
            }
            // It is waited for without a connection.
            sleep_until(patience.min(Instant::now() + pause)).await;
            pause = longer(pause, patience.saturating_duration_since(began));
        }
        Err(self.error(Fault::new(ErrorKind::Locked, "other transactions came in between each time")))
    }
}

/// The pause after this one, in a wait of so long.
fn longer(pause: Duration, wait: Duration) -> Duration {
    (pause * 2).min(PAUSE_MAX.max(wait / LONGEST_PAUSES_MAX))
}

/// What one sending of a swap came to.
pub(crate) enum Judged {
    Swap(Swap),
    /// Nothing was written, and what was read does not say why.
    Unclear(Option<Found>),
}

/// Reads the answer to a swap: the fence of what was written, or what is there.
pub(crate) fn judge(key: &Key, expected: Option<Token>, next: Option<Token>, rows: &[Row]) -> Result<Judged> {
    let Some(row) = rows.first() else {
        // The row that was expected is not there. Where none was, one that is not to be seen yet was met.
        return Ok(if expected.is_some() { Judged::Swap(Swap::Conflict(None)) } else { Judged::Unclear(None) });
    };
    if let Some(fence) = row.try_get::<_, Option<i64>>(0).map_err(|error| misread(key, &error))? {
        return Ok(Judged::Swap(Swap::Stored(Fence(u64::try_from(fence).unwrap_or(0)))));
    }
    Ok(judge_found(expected, next, Some(row::found(key, row, 1)?)))
}

/// Nothing was written by this sending; this is what is there.
fn judge_found(expected: Option<Token>, next: Option<Token>, found: Option<Found>) -> Judged {
    let token = found.as_ref().map(|found| found.record.token);
    match found {
        Some(found) if token == next => Judged::Swap(Swap::Stored(found.record.fence)),
        Some(found) if token == expected => Judged::Unclear(Some(found)),
        found => Judged::Swap(Swap::Conflict(found)),
    }
}

/// What a swap came to that waited for another's transaction in vain, by a look after that: the transaction may have ended
/// between the two.
fn judge_locked(expected: Option<Token>, next: Option<Token>, found: Option<Found>) -> Swap {
    let token = found.as_ref().map(|found| found.record.token);
    match found {
        Some(found) if token == next => Swap::Stored(found.record.fence),
        found if token == expected => Swap::Locked(found),
        found => Swap::Conflict(found),
    }
}

pub(crate) fn misread(key: &Key, error: &tokio_postgres::Error) -> Error {
    Error::new(ErrorKind::Protocol, format!("the server's answer cannot be read: {error}"))
        .about(format!("task `{key}`"))
}

/// Which columns a record changes of the version that it replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    /// Any.
    All,
    /// Those that the end of an attempt changes, which is nearly every write: the others cost the server time for nothing.
    Ends,
}

impl Columns {
    fn of(expected: Expected<'_>, next: &Record) -> Columns {
        let ends = |held: &Record| {
            (held.claim, held.fence, held.attempt, held.effect) == (next.claim, next.fence, next.attempt, next.effect)
                && (held.retention, held.output_retention) == (next.retention, next.output_retention)
                && held.owner == next.owner
        };
        match expected {
            Expected::Record(held) if ends(held) => Columns::Ends,
            Expected::Record(_) | Expected::Token(_) | Expected::Nothing => Columns::All,
        }
    }
}

/// What a swap writes.
pub(crate) enum Write<'a> {
    Keep(Line<'a>, Columns),
    Claim(Line<'a>),
    Erase,
}

impl<'a> Write<'a> {
    fn of(expected: Expected<'_>, next: Next<'a>) -> Result<Write<'a>> {
        Ok(match next {
            Next::Keep(record) => Write::Keep(Line::of(record)?, Columns::of(expected, record)),
            Next::Claim(record) => Write::Claim(Line::of(record)?),
            Next::Erase => Write::Erase,
        })
    }

    pub(crate) fn token(&self) -> Option<Token> {
        match self {
            Write::Keep(line, _) | Write::Claim(line) => Some(Token(line.token.into_bytes())),
            Write::Erase => None,
        }
    }

    /// Whether its statement does not wait for a transaction that holds the record, but passes it over.
    fn passes_over(&self, expected: Option<Token>) -> bool {
        match self {
            Write::Claim(_) => expected.is_some(),
            Write::Keep(..) | Write::Erase => false,
        }
    }

    /// Whether its statement says only that it wrote nothing, and not what is there.
    fn looks_after(&self, expected: Option<Token>) -> bool {
        match self {
            Write::Keep(..) => expected.is_some(),
            Write::Claim(_) | Write::Erase => false,
        }
    }

    pub(crate) async fn ask(
        &self,
        here: &Here,
        sent: &mut Sent,
        key: &Key,
        expected: Option<Token>,
        deadline: Instant,
    ) -> Result<Vec<Row>, Fault> {
        let expected_id = expected.map(|token| Uuid::from_bytes(token.0));
        let key = key.as_str();
        let (verb, line) = match self {
            Write::Erase => return here.pool.ask_noting(sent, Verb::Erase, &[&key, &expected_id], deadline).await,
            Write::Claim(line) if expected.is_none() => {
                let parameters: [&(dyn ToSql + Sync); 10] = [
                    &key,
                    &line.token,
                    &line.claim,
                    &line.state,
                    &line.attempt,
                    &line.owner,
                    &line.effect,
                    &line.retention,
                    &line.output_retention,
                    &line.body,
                ];
                return here.pool.ask_noting(sent, Verb::TryClaim, &parameters, deadline).await;
            }
            Write::Keep(line, Columns::Ends) => {
                let parameters: [&(dyn ToSql + Sync); 9] = [
                    &key,
                    &expected_id,
                    &line.token,
                    &line.state,
                    &line.expires_after,
                    &line.output_after,
                    &line.output_type,
                    &line.output,
                    &line.body,
                ];
                return here.pool.ask_noting(sent, Verb::ReplaceEnd, &parameters, deadline).await;
            }
            Write::Keep(line, Columns::All) if expected.is_none() => (Verb::InsertKeep, line),
            Write::Keep(line, Columns::All) => (Verb::ReplaceKeep, line),
            Write::Claim(line) => (Verb::ReplaceClaim, line),
        };
        let parameters: [&(dyn ToSql + Sync); 16] = [
            &key,
            &expected_id,
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
        here.pool.ask_noting(sent, verb, &parameters, deadline).await
    }
}

/// Whether a swap renews a claim and changes nothing else: those that wait at the same time go together.
fn is_renewal(expected: Expected<'_>, next: Next<'_>) -> bool {
    match (expected, next) {
        (Expected::Record(held), Next::Keep(next)) => {
            let both_run = held.state == State::Running && next.state == State::Running;
            both_run && held.claim == next.claim && held.fence == next.fence && held.attempt == next.attempt
        }
        (Expected::Nothing | Expected::Token(_), _) | (Expected::Record(_), Next::Claim(_) | Next::Erase) => false,
    }
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PostgresStore").field(&self.inner.settings.label).finish()
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        let here = self.inner.here()?;
        self.inner.load(&here, key, here.pool.deadline()).await
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        let here = self.inner.here()?;
        if let (Expected::Record(held), Next::Keep(next)) = (expected, next)
            && is_renewal(Expected::Record(held), Next::Keep(next))
        {
            let body = Line::of(next)?.body;
            let renewal = || Renewal { expected: held.token, token: next.token, body: body.clone() };
            return match desk::ask(&self.inner, &here, key, renewal(), here.pool.deadline()).await? {
                Asked::Answered(swap) => Ok(swap),
                // What the database refuses of one must not cost the others their claims.
                Asked::Alone(_) => self.inner.renew_alone(&here, key, renewal()).await,
            };
        }
        if let (None, Next::Erase) = (expected.token(), next) {
            let found = self.inner.load(&here, key, here.pool.deadline()).await?;
            return Ok(found.map_or(Swap::Stored(Fence::default()), |found| Swap::Conflict(Some(found))));
        }
        self.inner.swap(&here, key, expected.token(), Write::of(expected, next)?).await
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        scan::scan(&self.inner, filter, cursor.as_ref()).await
    }

    async fn purge(&self, filter: &Filter) -> Result<Purged> {
        scan::purge(&self.inner, filter).await
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        let here = self.inner.here()?;
        let deadline = here.pool.deadline();
        let ask = |fault| self.inner.error(fault);
        let rows = here.pool.ask(Verb::Load, &[&key.as_str()], deadline).await.map_err(ask)?;
        let Some(row) = rows.first() else { return Ok(false) };
        match row::found(key, row, 0) {
            Ok(_) => return Ok(false),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Ok(false),
            Err(_) => {}
        }
        let token: Uuid = row.try_get(1).map_err(|error| misread(key, &error))?;
        let body: &[u8] = row.try_get(5).map_err(|error| misread(key, &error))?;
        let gone = here.pool.ask(Verb::Discard, &[&key.as_str(), &token, &body], deadline).await.map_err(ask)?;
        if !gone.is_empty() {
            return Ok(true);
        }
        // Another has written meanwhile, or removed it.
        let rows = here.pool.ask(Verb::Load, &[&key.as_str()], deadline).await.map_err(ask)?;
        Ok(rows.is_empty())
    }

    /// It cannot tell: a notification in each write would cost most of the throughput.
    async fn changed(&self, _key: &Key, _seen: &Record) -> Result<bool> {
        Ok(false)
    }

    async fn examine(&self) -> Vec<Finding> {
        examine::examine(&self.inner).await
    }

    /// It keeps what it acknowledged, as far as its own disk does: a standby that is promoted without the last commits is
    /// told of by [`generation`](Store::generation).
    fn told(&self, _key: &Key, _end: &Arc<Record>) {}

    fn memory(&self) -> Memory {
        Memory::Keeps
    }

    fn ground(&self) -> Option<Ground> {
        let settings = &self.inner.settings;
        Some(Ground { system: "postgres", place: settings.schema.clone(), timeout: settings.timeout })
    }

    /// The timeline of the write-ahead log, which moves when a standby is promoted or a backup is restored, with an id that
    /// the migration drew.
    async fn generation(&self) -> Result<Option<Generation>> {
        let here = self.inner.here()?;
        let ask = |fault| self.inner.error(fault);
        let rows = here.pool.ask(Verb::Generation, &[], here.pool.deadline()).await.map_err(ask)?;
        let row = rows.first().ok_or_else(|| ask(Fault::no_schema(&self.inner.settings.schema)))?;
        let get = |error: tokio_postgres::Error| ask(Fault::of(&error));
        if row.try_get(0).map_err(get)? {
            let fault = Fault::new(ErrorKind::ReadOnly, "the server is a standby, and follows another's timeline")
                .hint("name the primary in the store's URL");
            return Err(ask(fault));
        }
        let (timeline, born): (&str, &str) = (row.try_get(1).map_err(get)?, row.try_get(2).map_err(get)?);
        Ok(Some(Generation(format!("{timeline}-{born}"))))
    }
}

#[cfg(test)]
mod tests {
    use taskonce_contract::records::plain;
    use taskonce_core::record::Age;

    use super::*;

    /// A takeover looked every 100 ms, 600 times a minute.
    #[test]
    fn a_wait_looks_seldom_however_long_it_is() {
        for (wait, looks_max) in [(50, 6), (500, 12), (2_000, 28), (15_000, 30), (59_000, 32)] {
            let wait = Duration::from_millis(wait);
            let (mut waited, mut pause, mut looks) = (Duration::ZERO, PAUSE_MIN, 1);
            while waited < wait {
                waited += pause;
                pause = longer(pause, wait);
                looks += 1;
            }
            assert!((looks_max / 2..=looks_max).contains(&looks), "{looks} looks in {wait:?}");
        }
    }

    /// It was told as Locked with what the transaction had just committed: a done task counted as busy.
    #[test]
    fn what_changed_while_a_lock_was_waited_for_is_a_conflict() {
        let found = |number| {
            let record = plain(State::Running, number);
            Some(Found { record: Arc::new(record), age: Age::default() })
        };
        let (expected, next) = (Some(Token::from(1)), Some(Token::from(2)));
        assert_eq!(judge_locked(expected, next, found(1)), Swap::Locked(found(1)));
        assert_eq!(judge_locked(expected, next, found(3)), Swap::Conflict(found(3)));
        assert_eq!(judge_locked(expected, next, None), Swap::Conflict(None));
        assert!(matches!(judge_locked(expected, next, found(2)), Swap::Stored(_)));
        assert_eq!(judge_locked(None, next, None), Swap::Locked(None));
        assert_eq!(judge_locked(None, next, found(3)), Swap::Conflict(found(3)));
    }
}
