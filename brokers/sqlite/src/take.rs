//! Handing out: what is deliverable, of the handlers that are wanted, in turn, by priority and age.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use rusqlite::{Connection, OptionalExtension as _, params};
use taskonce_sqlite_file::live::Live;
use taskonce_worker::source::{Delivery, Want};

use crate::rows::{ENVELOPE, FORMAT, Holder, coordinates, envelope, number, wall_time};
use crate::write::{Ask, Job, Queue, Settle, Writing};

/// The most deliveries whose time has come that one handing out makes deliverable.
const DUE_MAX: i64 = 1000;
/// Up to so many wanted handlers are asked for one by one; beyond, those that have something are looked for.
const DIRECT_MAX: usize = 32;
/// Up to so many handlers with something give all that is wanted; beyond, each gives its share only.
const FULL_MAX: usize = 16;
/// The most handlers that one look steps over. Each step costs some microseconds.
const STEPS_MAX: usize = 20_000;
/// After so many bytes of payloads a receive is full.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// For how many milliseconds a row is left alone that only a newer program can read.
const NEWER_DELAY: i64 = 5000;

/// Makes deliverable what has come due.
const DUE: &str = "UPDATE delivery SET state = 1
    WHERE id IN (SELECT id FROM delivery WHERE state = 2 AND due_at <= ?1 ORDER BY due_at LIMIT ?2)";
/// Whether a handler has something deliverable.
const READY: &str = "SELECT 1 FROM delivery WHERE state = 1 AND handler = ?1 LIMIT 1";
/// The next handler that has something deliverable.
const NEXT: &str = "SELECT handler FROM delivery WHERE state = 1 AND handler > ?1 ORDER BY handler LIMIT 1";
/// What a handler has to hand out, in its order.
const CHOSEN: &str = "SELECT id FROM delivery WHERE state = 1 AND handler = ?1 ORDER BY priority, id LIMIT ?2";

/// What a receive wants, found by name.
pub(crate) struct Wanted {
    list: Vec<Want>,
    by_name: HashMap<Arc<str>, usize>,
}

impl Wanted {
    /// What is wanted at all. Of a handler that is named twice the last counts.
    pub(crate) fn of(wants: &[Want]) -> Wanted {
        let by_name: HashMap<_, _> = wants.iter().map(|want| (Arc::clone(&want.handler), want.max)).collect();
        let mut list: Vec<Want> = by_name.into_iter().map(|(handler, max)| Want { handler, max }).collect();
        list.retain(|want| want.max > 0);
        // An order of their own, so that turns go round.
        list.sort_by(|one, other| one.handler.cmp(&other.handler));
        let by_name = list.iter().enumerate().map(|(at, want)| (Arc::clone(&want.handler), at)).collect();
        Wanted { list, by_name }
    }

    /// Whether nothing is wanted.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The wanted handlers that have something deliverable, at most so many.
    pub(crate) fn ready(&self, conn: &Connection, max: usize) -> rusqlite::Result<Vec<&Want>> {
        let mut ready = Vec::new();
        if self.list.len() <= DIRECT_MAX {
            let mut look = conn.prepare_cached(READY)?;
            for want in &self.list {
                if ready.len() < max && look.exists([&*want.handler])? {
                    ready.push(want);
                }
            }
            return Ok(ready);
        }
        let mut next = conn.prepare_cached(NEXT)?;
        let mut at = String::new();
        for _ in 0..STEPS_MAX {
            let mut rows = next.query([&at])?;
            let Some(row) = rows.next()? else { break };
            at = row.get(0)?;
            if let Some(number) = self.by_name.get(at.as_str()) {
                ready.push(&self.list[*number]);
                if ready.len() >= max {
                    break;
                }
            }
        }
        Ok(ready)
    }
}

/// What was handed out. What is dropped without [`Taken::keep`] is given back.
pub(crate) struct Taken {
    deliveries: Vec<Delivery>,
    home: Weak<Live<Queue>>,
}

impl Taken {
    /// Somebody has them.
    pub(crate) fn keep(mut self) -> Vec<Delivery> {
        std::mem::take(&mut self.deliveries)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.deliveries.is_empty() {
            return;
        }
        let Some(live) = self.home.upgrade() else { return };
        for delivery in &self.deliveries {
            if let Some(holder) = Holder::of(&delivery.receipt) {
                live.tell(Job::Settle(holder, Settle::Defer(0)));
            }
        }
    }
}

/// Hands out what is asked for, as far as it is there.
pub(crate) fn take(writing: &Writing<'_>, ask: &Ask) -> rusqlite::Result<Taken> {
    let conn = writing.conn;
    conn.prepare_cached(DUE)?.execute([writing.now, DUE_MAX])?;
    let mut taken = Taken { deliveries: Vec::new(), home: ask.home.clone() };
    let mut bytes = 0;
    for id in chosen(conn, ask)? {
        if bytes >= BYTES_MAX {
            break;
        }
        let at = taken.deliveries.len() as u64;
        let holder = Holder { id, number: ask.salt.wrapping_add(at).cast_signed() };
        match hand_out(writing, ask, holder) {
            Ok(None) => put_off(writing, id)?,
            Ok(Some(delivery)) => {
                bytes += delivery.envelope.payload.len();
                taken.deliveries.push(delivery);
            }
            Err(error) if is_damage(&error) => set_aside(writing, id, &error)?,
            Err(error) => return Err(error),
        }
    }
    Ok(taken)
}

/// The rows to hand out, in the order of their delivery.
fn chosen(conn: &Connection, ask: &Ask) -> rusqlite::Result<Vec<i64>> {
    let mut ready = ask.wanted.ready(conn, STEPS_MAX)?;
    if ready.is_empty() || ask.total_max == 0 {
        return Ok(Vec::new());
    }
    let count = ready.len();
    ready.rotate_left(ask.turn % count);
    ready.truncate(ask.total_max);
    let share = if count <= FULL_MAX { ask.total_max } else { ask.total_max.div_ceil(ready.len()) };
    let mut statement = conn.prepare_cached(CHOSEN)?;
    let mut lists = Vec::with_capacity(ready.len());
    for want in &ready {
        let max = i64::try_from(want.max.min(share)).unwrap_or(i64::MAX);
        let ids = statement.query_map(params![&*want.handler, max], |row| row.get(0))?;
        lists.push(ids.collect::<rusqlite::Result<Vec<i64>>>()?);
    }
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let rounds = (0..longest).flat_map(|round| lists.iter().filter_map(move |list| list.get(round).copied()));
    Ok(rounds.take(ask.total_max).collect())
}

/// Hands out one row; nothing where a newer program wrote it in a form that this one does not know.
fn hand_out(writing: &Writing<'_>, ask: &Ask, holder: Holder) -> rusqlite::Result<Option<Delivery>> {
    let sql = hand_out_sql();
    writing
        .conn
        .prepare_cached(&sql)?
        .query_row(params![holder.id, writing.now.saturating_add(ask.visibility), holder.number, FORMAT], |row| {
            Ok(Delivery {
                source: Arc::clone(&ask.source),
                envelope: envelope(writing.conn, row)?,
                number: number(row.get(9)?),
                coordinates: coordinates(&writing.life, holder.id),
                redriven_at: wall_time(row.get(10)?),
                receipt: holder.receipt(),
            })
        })
        .optional()
}

/// Leaves a row to a newer program, and looks at it again only later, so that what this one knows is not held up.
fn put_off(writing: &Writing<'_>, id: i64) -> rusqlite::Result<()> {
    writing
        .conn
        .prepare_cached("UPDATE delivery SET state = 2, due_at = ?2 WHERE id = ?1")?
        .execute([id, writing.now.saturating_add(NEWER_DELAY)])
        .map(drop)
}

/// The statement that hands out one row.
fn hand_out_sql() -> String {
    format!(
        "UPDATE delivery SET state = 2, due_at = ?2, receipt = ?3, number = min(max(number, 0), {}) + 1
         WHERE id = ?1 AND format <= ?4 RETURNING {ENVELOPE}, number, redriven_at",
        u32::MAX - 1
    )
}

/// Whether a row holds something else than the schema says: a person's hand, or damage.
fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error,
        rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
    )
}

/// Moves a row that cannot be read to the dead letters, so that it holds up nobody.
fn set_aside(writing: &Writing<'_>, id: i64, error: &rusqlite::Error) -> rusqlite::Result<()> {
    let name = coordinates(&writing.life, id);
    writing
        .conn
        .prepare_cached(
            "UPDATE delivery SET state = 3, due_at = ?2, receipt = NULL, entrance = NULL, death_id = ?3,
                                 reason = 'unreadable', message = ?4
             WHERE id = ?1",
        )?
        .execute(params![id, writing.now, format!("unreadable/{name}"), format!("the row cannot be read: {error}")])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue may hold a hundred thousand deliveries that wait for their time, and hands out at once all the same.
    #[test]
    fn no_statement_of_a_receive_looks_at_every_row() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(include_str!("../schema.sql")).unwrap();
        for (sql, index) in
            [(DUE, "delivery_due"), (READY, "delivery_ready"), (NEXT, "delivery_ready"), (CHOSEN, "delivery_ready")]
        {
            let plan: Vec<String> = conn
                .prepare(&format!("EXPLAIN QUERY PLAN {}", sql.replace("?1", "'a'").replace("?2", "7")))
                .unwrap()
                .query_map([], |row| row.get(3))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            assert!(plan.iter().any(|line| line.contains(&format!("INDEX {index} ("))), "{sql}: {plan:?}");
            assert!(
                plan.iter().all(|line| !line.starts_with("SCAN delivery") && !line.contains("TEMP B-TREE")),
                "{sql}: {plan:?}"
            );
        }
    }

    #[test]
    fn what_is_wanted_twice_is_wanted_as_the_last_says() {
        let want = |handler: &str, max| Want { handler: handler.into(), max };
        let wanted = Wanted::of(&[want("b", 1), want("a", 2), want("b", 3), want("c", 0)]);
        assert_eq!(wanted.list, [want("a", 2), want("b", 3)]);
        assert!(Wanted::of(&[want("a", 0)]).is_empty());
    }
}
