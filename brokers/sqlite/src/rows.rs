//! Deliveries as rows of the file: the numbers of states and priorities, headers as JSON, receipts and coordinates.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension as _, Row};
use taskonce_core::record::WallTime;
use taskonce_worker::source::{Envelope, Priority, Receipt};

/// The largest payload that lies in the row itself, in bytes. A row is written again whenever its delivery is handed out,
/// extended or deferred; what is larger lies beside it.
pub(crate) const INLINE_MAX: usize = 2048;

/// The newest format of a row that this program knows, and writes.
pub(crate) const FORMAT: i64 = 1;

/// The columns of an envelope, in the order in which [`envelope`] reads them.
pub(crate) const ENVELOPE: &str = "id, handler, priority, sent_at, key, content_type, headers, size, payload";

/// A row that holds something else than the schema says.
pub(crate) fn damaged(column: usize, what: &str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, what.to_owned().into())
}

/// The number of a priority, as the schema has it: ascending in the order of delivery.
pub(crate) fn priority_code(priority: Priority) -> i64 {
    match priority {
        Priority::High => 0,
        Priority::Normal => 1,
        Priority::Low => 2,
    }
}

fn priority_of(code: i64) -> Priority {
    Priority::ALL.into_iter().find(|priority| priority_code(*priority) == code).unwrap_or_default()
}

/// Headers as JSON; none where there are none.
pub(crate) fn headers_text(headers: &[(String, String)]) -> Option<String> {
    (!headers.is_empty())
        .then(|| serde_json::Value::from_iter(headers.iter().map(|(name, value)| [&**name, &**value])).to_string())
}

fn headers_of(text: Option<String>) -> rusqlite::Result<Vec<(String, String)>> {
    text.map_or(Ok(Vec::new()), |text| {
        serde_json::from_str(&text).map_err(|_| damaged(6, "headers that are no list of pairs"))
    })
}

/// The envelope of a row that begins with the columns [`ENVELOPE`].
pub(crate) fn envelope(conn: &Connection, row: &Row<'_>) -> rusqlite::Result<Envelope> {
    let (id, size): (i64, i64) = (row.get(0)?, row.get(7)?);
    let payload: Vec<u8> = match row.get(8)? {
        Some(payload) => payload,
        None => conn
            .prepare_cached("SELECT payload FROM large WHERE id = ?1")?
            .query_row([id], |row| row.get(0))
            .optional()?
            .ok_or_else(|| damaged(8, "a payload that is not where large ones are"))?,
    };
    if i64::try_from(payload.len()) != Ok(size) {
        return Err(damaged(8, "a payload of another length"));
    }
    Ok(Envelope {
        handler: row.get(1)?,
        key: row.get(4)?,
        payload,
        content_type: row.get(5)?,
        headers: headers_of(row.get(6)?)?,
        sent_at: wall_time(row.get(3)?),
        priority: priority_of(row.get(2)?),
    })
}

/// How often a delivery was handed out, whatever a hand or damage has left there.
pub(crate) fn number(held: i64) -> u32 {
    u32::try_from(held.max(0)).unwrap_or(u32::MAX)
}

/// A text for people, also where a hand or damage has left none, or no UTF-8.
pub(crate) fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(match row.get_ref(column)? {
        ValueRef::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => String::new(),
    })
}

/// A time of day from the file.
pub(crate) fn wall_time(millis: Option<i64>) -> Option<WallTime> {
    millis.map(|millis| WallTime(u64::try_from(millis).unwrap_or(0)))
}

/// Whole milliseconds of a duration, the begun one included: a delay never ends early.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

/// How many milliseconds lie between two times of the file.
pub(crate) fn between(from: i64, to: i64) -> Duration {
    Duration::from_millis(u64::try_from(to.saturating_sub(from)).unwrap_or(0))
}

/// Names a delivery among all that any file ever held.
pub(crate) fn coordinates(life: &str, id: i64) -> Arc<str> {
    format!("{life}-{id}").into()
}

/// What a receipt says: the row, and the number that it must still have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The row.
    pub(crate) id: i64,
    /// Random, new at each handing out.
    pub(crate) number: i64,
}

impl Holder {
    /// The receipt.
    pub(crate) fn receipt(self) -> Receipt {
        Receipt(format!("{}-{:016x}", self.id, self.number).into())
    }

    /// What a receipt says; `None` if no queue of ours gave it.
    pub(crate) fn of(receipt: &Receipt) -> Option<Holder> {
        let (id, number) = receipt.0.split_once('-')?;
        let holder = Holder { id: id.parse().ok()?, number: u64::from_str_radix(number, 16).ok()?.cast_signed() };
        (holder.receipt() == *receipt).then_some(holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_reads_back_and_nothing_else_does() {
        for holder in
            [Holder { id: 1, number: 0 }, Holder { id: i64::MAX, number: -1 }, Holder { id: 7, number: i64::MIN }]
        {
            assert_eq!(Holder::of(&holder.receipt()), Some(holder));
        }
        for text in [
            "",
            "-",
            "1",
            "1-",
            "-1",
            "1-0",
            "01-0000000000000000",
            "1-00000000000000000",
            "1-000000000000000G",
            "+1-0000000000000000",
        ] {
            assert_eq!(Holder::of(&Receipt(text.into())), None, "{text}");
        }
    }

    #[test]
    fn headers_read_back_in_their_order() {
        let headers = vec![
            ("b".to_owned(), "naïve \"1\"\t".to_owned()),
            ("a".to_owned(), String::new()),
            ("b".to_owned(), "2".to_owned()),
        ];
        assert_eq!(headers_of(headers_text(&headers)).unwrap(), headers);
        assert_eq!(headers_text(&[]), None);
        headers_of(Some("{\"a\": 1}".into())).unwrap_err();
    }

    #[test]
    fn a_delay_never_ends_early() {
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(5)), 5);
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::MAX), i64::MAX);
    }
}
