//! What a process costs that holds no claims.

use std::time::Duration;

use anyhow::Result;
use taskonce_testkit::RedisServer;

use crate::child::Child;
use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::{self, Setup};

/// What counts as no measurable processor time: a twentieth of a per cent.
const SPENT_MAX_SHARE: f64 = 0.0005;

/// Commands and processor time of an idle process that has a Redis and a SQLite ledger open, both used before, beside
/// those of a process without any.
pub(crate) fn idle(setup: &Setup) -> Result<Vec<Figure>> {
    let long: Duration = setup.pick(Duration::from_secs(1), Duration::from_secs(5));
    let millis = long.as_millis().to_string();
    let server = RedisServer::start(&[])?;
    let mut ours = Child::start(&["idle", &millis, &server.url(), &setup::sqlite_url(&setup.sqlite_file())])?;
    let before = commands(&server)?;
    ours.begin()?;
    let spent: u64 = ours.report()?.parse()?;
    let asked = commands(&server)? - before;
    let mut floor = Child::start(&["idle", &millis])?;
    floor.begin()?;
    let floor: u64 = floor.report()?.parse()?;
    Ok(vec![
        Figure {
            name: "idle process without claims: commands to Redis".into(),
            unit: Unit::Count,
            ours: asked as f64,
            floor: Some(0.0),
            judged: Judged::Ours,
            bound: Bound::AtMost(0.0),
            notes: vec![format!("in {long:?}, by the server's own count")],
        },
        Figure {
            name: "idle process without claims: processor time".into(),
            unit: Unit::Nanos,
            ours: spent as f64,
            floor: Some(floor as f64),
            judged: Judged::Ours,
            bound: Bound::AtMost(long.as_nanos() as f64 * SPENT_MAX_SHARE),
            notes: vec![format!("of all its threads, in {long:?}; Redis and SQLite open, both used before")],
        },
    ])
}

/// Every command that the server has run, but the questions about it.
pub(crate) fn commands(server: &RedisServer) -> Result<u64> {
    let info = server.command(&["INFO", "commandstats"])?.text();
    let mut all = 0;
    for line in info.lines().filter(|line| !line.starts_with("cmdstat_info:")) {
        if let Some(calls) = line.split_once(":calls=").and_then(|(_, rest)| rest.split(',').next()) {
            all += calls.parse::<u64>()?;
        }
    }
    Ok(all)
}
