//! The store's health, for people: what any file is examined for, and its clock.

use std::time::Duration;

use rusqlite::Connection;
use taskonce_core::error::Result;
use taskonce_core::store::{Finding, Level};
pub(crate) use taskonce_sqlite_file::examine::fault_of;
use taskonce_sqlite_file::examine::finding;

use crate::schema::Live;

/// A record that is further in the future was written before the clock went back, in milliseconds.
const AHEAD_MAX: i64 = 1000;

/// Every finding. `probe` is how long a write took, or why it failed.
pub(crate) fn examine(live: &Live, probe: Result<Duration>) -> Vec<Finding> {
    taskonce_sqlite_file::examine::examine(live, probe, &[("clock", clock)])
}

fn clock(conn: &Connection, now: i64) -> rusqlite::Result<Finding> {
    // The newest records, and the last claim of all.
    let newest: i64 = conn.query_row(
        "SELECT max(coalesce((SELECT max(written_at) FROM (SELECT written_at FROM task ORDER BY id DESC LIMIT 1000)), 0),
                    (SELECT claimed_at FROM store))",
        [],
        |row| row.get(0),
    )?;
    let ahead = newest.saturating_sub(now);
    Ok(if ahead > AHEAD_MAX {
        finding(
            Level::Warning,
            "clock",
            format!("a record was written {:.1} s in the future: the host's clock went back", ahead as f64 / 1000.0),
            "claims with a longer lease than that last that much longer, and those with a shorter one count as passed and \
             are taken over; see that the clock is slewed, not stepped",
        )
    } else {
        finding(Level::Fine, "clock", "no record lies in the future", "")
    })
}
