//! What is read without the writer: one record, a page of records, what a purge would find. In the caller's thread.

use rusqlite::types::ValueRef;
use rusqlite::{OptionalExtension as _, params};
use taskonce_core::codec;
use taskonce_core::error::Result;
use taskonce_core::key::Key;
use taskonce_core::record::{Age, Found, Output, State};
use taskonce_core::store::{Cursor, Filter, Page, Row};

use std::sync::Arc;

use crate::judge::{output_after, state_code};
use crate::schema::Live;

/// The most rows that one page looks at, so that a narrow filter over a large store does not hold up the caller.
const EXAMINED_MAX: usize = 10_000;
/// The most bytes of records that one page gathers; outputs may be long.
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Above every key, whose first character is ASCII.
const KEY_END: &str = "\u{7f}";

const LOAD: &str = "SELECT written_at, body FROM task WHERE key = ?1";

/// What the key holds.
pub(crate) fn load(live: &Live, key: &Key) -> Result<Option<Found>> {
    live.with_reader("reading a record", |conn| {
        let mut statement = conn.prepare_cached(LOAD)?;
        statement
            .query_row([key.as_str()], |row| {
                let written_at: i64 = row.get(0)?;
                // The clock is read after the row, so that an age is never below the true one.
                Ok(found(key, written_at, blob(row.get_ref(1)?), live.now()))
            })
            .optional()
    })?
    .transpose()
}

/// A record as the port returns it. An output past its own retention is answered as dropped, purged or not.
pub(crate) fn found(key: &Key, written_at: i64, body: &[u8], now: i64) -> Result<Found> {
    let mut record = codec::decode(key, body)?;
    let age = Age::from_millis(now.saturating_sub(written_at));
    if output_after(&record).is_some_and(|after| age.millis >= after) {
        record.output = Output::Dropped(taskonce_core::record::DropReason::Expired);
    }
    Ok(Found { record: Arc::new(record), age })
}

/// The bytes of a column; none when it holds something else, which no codec takes for a record.
pub(crate) fn blob(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => &[],
    }
}

/// One page, in the order of the keys.
pub(crate) fn scan(live: &Live, filter: &Filter, cursor: Option<&Cursor>) -> Result<Page> {
    let (first, end) = key_range(filter);
    // A cursor stands behind the last key that a page looked at.
    let after = cursor.map(Cursor::key).transpose()?;
    let after = after.as_ref().map_or("", Key::as_str);
    let sql = if !filter.states.is_empty() && !filter.states.contains(&State::Done) {
        "SELECT key, state, written_at, body FROM task INDEXED BY task_open
         WHERE state <> 3 AND key > ?1 AND key >= ?2 AND key < ?3 ORDER BY key"
    } else {
        "SELECT key, state, written_at, body FROM task
         WHERE key > ?1 AND key >= ?2 AND key < ?3 ORDER BY key"
    };
    let states: Vec<i64> = filter.states.iter().map(|state| state_code(*state)).collect();
    live.with_reader("listing records", |conn| {
        let mut statement = conn.prepare_cached(sql)?;
        let mut rows = statement.query(params![after, first, end])?;
        let now = live.now();
        let (mut page, mut bytes, mut examined, mut last) = (Page::default(), 0, 0, None);
        while let Some(row) = rows.next()? {
            if page.rows.len() >= filter.page() || bytes >= PAGE_BYTES_MAX || examined >= EXAMINED_MAX {
                page.next = last.as_ref().map(Cursor::behind);
                return Ok(page);
            }
            // A key of no task cannot be named by anyone, nor by a cursor; it is not ours to list.
            let Ok(key) = Key::parse(row.get_ref(0)?.as_str()?) else { continue };
            examined += 1;
            last = Some(key.clone());
            let (state, written_at): (i64, i64) = (row.get(1)?, row.get(2)?);
            if !filter.admits_key(&key) || !(states.is_empty() || states.contains(&state)) {
                continue;
            }
            let body = blob(row.get_ref(3)?);
            bytes += body.len();
            let found = found(&key, written_at, body, now);
            if found.as_ref().is_ok_and(|found| found.in_state_for() < filter.age_min) {
                continue;
            }
            page.rows.push(Row { key, found });
        }
        Ok(page)
    })
}

/// The keys whose records are past their retention, and those whose outputs are past theirs: at most a page of each.
pub(crate) fn expired(live: &Live, filter: &Filter) -> Result<(Vec<Key>, Vec<Key>)> {
    let now = live.now();
    let mut lists = live.with_reader("looking for what has expired", |conn| {
        let mut lists = [Vec::new(), Vec::new()];
        for (list, sql) in lists.iter_mut().zip([
            "SELECT key, state, written_at FROM task WHERE expires_at <= ?1 ORDER BY expires_at",
            "SELECT key, state, written_at FROM task
             WHERE output_until <= ?1 AND (expires_at IS NULL OR expires_at > ?1) ORDER BY output_until",
        ]) {
            let mut statement = conn.prepare_cached(sql)?;
            let mut rows = statement.query([now])?;
            while list.len() < filter.page() {
                let Some(row) = rows.next()? else { break };
                let Ok(key) = Key::parse(row.get_ref(0)?.as_str()?) else { continue };
                let (state, written_at): (i64, i64) = (row.get(1)?, row.get(2)?);
                let aged = now.saturating_sub(written_at).max(0) as u128 >= filter.age_min.as_millis();
                let stated =
                    filter.states.is_empty() || filter.states.iter().any(|wanted| state_code(*wanted) == state);
                if filter.admits_key(&key) && aged && stated {
                    list.push(key);
                }
            }
        }
        Ok(lists)
    })?;
    Ok((std::mem::take(&mut lists[0]), std::mem::take(&mut lists[1])))
}

/// The range of keys that a filter can admit, end excluded. Namespace and handler are how keys begin.
fn key_range(filter: &Filter) -> (String, String) {
    match (&filter.namespace, &filter.handler) {
        // `0` and `A` follow `/` and `@`.
        (Some(namespace), Some(handler)) => (format!("{namespace}/{handler}@"), format!("{namespace}/{handler}A")),
        (Some(namespace), None) => (format!("{namespace}/"), format!("{namespace}0")),
        (None, Some(_) | None) => (String::new(), KEY_END.to_owned()),
    }
}
