//! What is read without the writer: whether something is deliverable, dead letters, and what there is.

use std::collections::BTreeMap;
use std::time::Duration;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::store::{Cursor, Finding, Level};
use taskonce_sqlite_file::examine::finding;
use taskonce_sqlite_file::fault::about;
use taskonce_sqlite_file::live::Live;
use taskonce_worker::source::{DEPTHS_MAX, DeadFilter, DeadLetter, DeadLine, DeadPage, Death, Depth};

use crate::rows::{ENVELOPE, FORMAT, between, coordinates, envelope, number, text, wall_time};
use crate::take::Wanted;
use crate::write::{BACK_MAX, Queue};

/// The most dead letters that one page looks at, so that a narrow filter does not hold up the caller.
const EXAMINED_MAX: usize = 10_000;

/// What a receive sees before it asks the writer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// There may be something to hand out.
    Something,
    /// Nothing, and nothing comes by itself before so long.
    Nothing(Option<Duration>),
}

/// Looks for what can be handed out.
pub(crate) fn look(live: &Live<Queue>, wanted: &Wanted) -> Result<Sight> {
    live.with_reader("looking for deliveries", |conn| {
        if !wanted.ready(conn, 1)?.is_empty() {
            return Ok(Sight::Something);
        }
        let (clock_at, due_at): (i64, Option<i64>) = conn
            .prepare_cached("SELECT clock_at, (SELECT min(due_at) FROM delivery WHERE state = 2) FROM queue")?
            .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let now = live.now();
        Ok(match due_at {
            // Where the clock went back, the writer puts the times right.
            Some(due_at) if due_at <= now || now < clock_at.saturating_sub(BACK_MAX) => Sight::Something,
            Some(due_at) => Sight::Nothing(Some(between(now, due_at))),
            None => Sight::Nothing(None),
        })
    })
}

/// One page of dead letters, in the order in which they were sent.
pub(crate) fn dead_letters(live: &Live<Queue>, filter: &DeadFilter, cursor: Option<&Cursor>) -> Result<DeadPage> {
    let after = cursor.map_or(Ok(0), |cursor| {
        let number = cursor.0.parse::<i64>().ok().filter(|number| *number > 0 && number.to_string() == cursor.0);
        number.ok_or_else(|| cursor.refused())
    })?;
    live.with_reader("listing dead letters", |conn| {
        let mut statement = conn.prepare_cached(
            "SELECT id, death_id, reason, message, due_at, handler, key, number, size FROM delivery
             WHERE state = 3 AND id > ?1 ORDER BY id",
        )?;
        let mut rows = statement.query([after])?;
        let now = live.now();
        let (mut page, mut examined, mut last) = (DeadPage::default(), 0, after);
        while let Some(row) = rows.next()? {
            if page.lines.len() >= filter.page() || examined >= EXAMINED_MAX {
                page.next = Some(Cursor(last.to_string()));
                return Ok(page);
            }
            examined += 1;
            last = row.get(0)?;
            let line = DeadLine {
                death: death(row)?,
                age: between(row.get(4)?, now),
                handler: text(row, 5)?,
                key: key(row, 6)?,
                number: number(row.get(7)?),
                payload_len: usize::try_from(row.get::<_, i64>(8)?).unwrap_or(0),
            };
            let is_wanted = filter.handler.as_ref().is_none_or(|handler| *handler == line.handler)
                && filter.reason.as_ref().is_none_or(|reason| *reason == line.death.reason);
            if is_wanted {
                page.lines.push(line);
            }
        }
        Ok(page)
    })
}

/// From the columns `death_id, reason, message` behind the first.
fn death(row: &Row<'_>) -> rusqlite::Result<Death> {
    Ok(Death { id: text(row, 1)?, reason: text(row, 2)?, message: text(row, 3)? })
}

fn key(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    let is_there = row.get_ref(column)? != ValueRef::Null;
    is_there.then(|| text(row, column)).transpose()
}

/// One dead letter, whole.
pub(crate) fn dead_one(live: &Live<Queue>, id: &str) -> Result<Option<DeadLetter>> {
    let is_newer = live.with_reader("reading a dead letter", |conn| {
        conn.prepare_cached("SELECT 1 FROM delivery WHERE death_id = ?1 AND format > ?2")?.exists(params![id, FORMAT])
    })?;
    if is_newer {
        return Err(about(
            live.path(),
            ErrorKind::NewerFormat,
            format!("a newer program wrote the dead letter `{id}`"),
        ));
    }
    live.with_reader("reading a dead letter", |conn| {
        let now = live.now();
        let sql = format!(
            "SELECT {ENVELOPE}, number, redriven_at, due_at, reason, message, (SELECT life FROM queue)
             FROM delivery WHERE death_id = ?1"
        );
        conn.prepare_cached(&sql)?
            .query_row(params![id], |row| {
                Ok(DeadLetter {
                    death: Death { id: id.to_owned(), reason: text(row, 12)?, message: text(row, 13)? },
                    age: between(row.get(11)?, now),
                    envelope: envelope(conn, row)?,
                    number: number(row.get(9)?),
                    coordinates: coordinates(&row.get::<_, String>(14)?, row.get(0)?),
                    redriven_at: wall_time(row.get(10)?),
                })
            })
            .optional()
    })
}

/// What there is, of each handler. Looks at every row.
pub(crate) fn depth(live: &Live<Queue>) -> Result<Vec<Depth>> {
    live.with_reader("counting deliveries", |conn| {
        let now = live.now();
        let mut statement = conn.prepare_cached(
            "SELECT handler, CASE WHEN state = 3 THEN 3 WHEN state = 1 OR due_at <= ?1 THEN 1 WHEN receipt IS NULL THEN 2
                                  ELSE 4 END AS place, count(*), min(due_at)
             FROM delivery GROUP BY handler, place",
        )?;
        let mut rows = statement.query([now])?;
        let mut depths: BTreeMap<String, Depth> = BTreeMap::new();
        while let Some(row) = rows.next()? {
            let handler: String = row.get(0)?;
            if depths.len() >= DEPTHS_MAX && !depths.contains_key(&handler) {
                break;
            }
            let depth = depths
                .entry(handler)
                .or_insert_with_key(|handler| Depth { handler: handler.as_str().into(), ..Depth::default() });
            let count = u64::try_from(row.get::<_, i64>(2)?).unwrap_or(0);
            match row.get(1)? {
                1_i64 => {
                    depth.ready = count;
                    depth.oldest = Some(between(row.get(3)?, now));
                }
                2 => depth.deferred = count,
                3 => depth.dead = count,
                _ => depth.in_flight = count,
            }
        }
        Ok(depths.into_values().collect())
    })
}

/// Whether the clock went back since the queue was last written to.
pub(crate) fn clock(conn: &Connection, now: i64) -> rusqlite::Result<Finding> {
    let clock_at: i64 = conn.query_row("SELECT clock_at FROM queue", [], |row| row.get(0))?;
    let ahead = clock_at.saturating_sub(now);
    Ok(if ahead > BACK_MAX {
        finding(
            Level::Warning,
            "clock",
            format!("the last write is {:.1} s in the future: the host's clock went back", ahead as f64 / 1000.0),
            "the next write moves all times of the queue back by as much; see that the clock is slewed, not stepped",
        )
    } else {
        finding(Level::Fine, "clock", "the last write does not lie in the future", "")
    })
}
