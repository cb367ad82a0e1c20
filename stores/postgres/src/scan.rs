//! Walks over records, and purges: pages in the order of the keys, batches in the order of what is due.

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::record::State;
use taskonce_core::store::{Cursor, Filter, Page, Purged, Row};
use tokio_postgres::types::ToSql;

use crate::row::{self, state_code};
use crate::sql::Verb;
use crate::store::Inner;

/// The fewest rows that a page looks at where the filter may leave out most of them.
const LOOKED_AT: usize = 1000;
/// The most bytes of records that one page gathers; outputs may be long.
const PAGE_BYTES_MAX: i64 = 16 * 1024 * 1024;
/// Above every key, whose first character is ASCII.
const KEY_END: &str = "\u{7f}";

/// A filter as the statements take it.
struct Among {
    first: String,
    end: String,
    handler: Option<String>,
    id: String,
    states: Option<Vec<i16>>,
    age_min: i64,
}

impl Among {
    fn of(filter: &Filter) -> Among {
        // `0` and `A` follow `/` and `@`.
        let (first, end) = match (&filter.namespace, &filter.handler) {
            (Some(namespace), Some(handler)) => (format!("{namespace}/{handler}@"), format!("{namespace}/{handler}A")),
            (Some(namespace), None) => (format!("{namespace}/"), format!("{namespace}0")),
            (None, Some(_) | None) => (String::new(), KEY_END.to_owned()),
        };
        Among {
            first,
            end,
            handler: filter.handler.as_ref().map(|handler| handler.as_str().to_owned()),
            id: filter.id_prefix.replace('\0', "\u{fffd}"),
            states: (!filter.states.is_empty()).then(|| filter.states.iter().map(|state| state_code(*state)).collect()),
            age_min: row::millis(filter.age_min),
        }
    }
}

/// One page, in the order of the keys.
pub(crate) async fn scan(inner: &Inner, filter: &Filter, cursor: Option<&Cursor>) -> Result<Page> {
    // A cursor stands behind the last key that a page looked at.
    let after = cursor.map(Cursor::key).transpose()?;
    let after = after.as_ref().map_or("", Key::as_str);
    let among = Among::of(filter);
    let verb =
        if !filter.states.is_empty() && !filter.states.contains(&State::Done) { Verb::ScanOpen } else { Verb::Scan };
    let is_narrow = filter.namespace.is_none() && filter.handler.is_some()
        || !filter.id_prefix.is_empty()
        || !filter.states.is_empty()
        || !filter.age_min.is_zero();
    let looked_at = if is_narrow { filter.page().max(LOOKED_AT) } else { filter.page() };
    let limit = i64::try_from(looked_at).unwrap_or(i64::MAX);
    // How long a task has been in its state stands in the body.
    let no_age = 0_i64;
    let parameters: [&(dyn ToSql + Sync); 9] =
        [&limit, &among.first, &among.end, &among.handler, &among.id, &among.states, &no_age, &after, &PAGE_BYTES_MAX];
    let here = inner.here()?;
    let rows = here.pool.ask(verb, &parameters, here.pool.deadline()).await.map_err(|fault| inner.error(fault))?;
    let misread = |error: tokio_postgres::Error| {
        Error::new(ErrorKind::Protocol, format!("the server's answer cannot be read: {error}"))
            .about(format!("store `{}`", inner.settings.label))
    };
    let is_full = rows.len() >= looked_at;
    let (mut page, mut last) = (Page::default(), None);
    for row in &rows {
        let is_here: bool = row.try_get(2).map_err(misread)?;
        if page.rows.len() >= filter.page() || !is_here {
            page.next = last.as_ref().map(Cursor::behind);
            return Ok(page);
        }
        // A key of no task cannot be named by anyone, nor by a cursor; it is not ours to list.
        let Ok(key) = Key::parse(row.try_get(0).map_err(misread)?) else { continue };
        last = Some(key.clone());
        // One that was removed since the window was laid has no columns.
        let is_match = row.try_get(1).map_err(misread)? && row.try_get::<_, Option<i16>>(3).map_err(misread)?.is_some();
        if !is_match {
            continue;
        }
        let found = row::found(&key, row, 3);
        if found.as_ref().is_ok_and(|found| found.in_state_for() < filter.age_min) {
            continue;
        }
        page.rows.push(Row { key, found });
    }
    page.next = last.as_ref().map(Cursor::behind).filter(|_| is_full);
    Ok(page)
}

/// One batch of what is past its retention.
pub(crate) async fn purge(inner: &Inner, filter: &Filter) -> Result<Purged> {
    let among = Among::of(filter);
    let limit = i64::try_from(filter.page()).unwrap_or(i64::MAX);
    let parameters: [&(dyn ToSql + Sync); 7] =
        [&limit, &among.first, &among.end, &among.handler, &among.id, &among.states, &among.age_min];
    let here = inner.here()?;
    let mut counts = [0, 0];
    for (count, verb) in counts.iter_mut().zip([Verb::PurgeRecords, Verb::PurgeOutputs]) {
        let rows = here.pool.ask(verb, &parameters, here.pool.deadline()).await.map_err(|fault| inner.error(fault))?;
        *count = rows.len();
    }
    Ok(Purged { records: counts[0], outputs: counts[1] })
}
