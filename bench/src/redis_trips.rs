//! Round trips to Redis, counted by a proxy between the ledger and the server.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use taskonce::{Admission, Claim, Policy};
use taskonce_testkit::{Proxy, RedisServer};

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::{self, Setup, run_once};

/// Claims that are held while heartbeats are counted.
const HELD: usize = 100;
/// The lease of held claims: a heartbeat is due about every 300 ms.
const LEASE: Duration = Duration::from_secs(1);
/// How long the proxy holds replies back, so that what is sent together counts once.
const HOLD: Duration = Duration::from_millis(50);
/// The longest that heartbeats are waited for.
const BEATS_WAIT: Duration = Duration::from_secs(20);

/// Round trips of a fresh claim with its completion, of a duplicate, and of one heartbeat of 100 held claims.
pub(crate) fn trips(setup: &Setup) -> Result<Vec<Figure>> {
    let (calls, beats) = (setup.pick(20, 200), setup.pick(3, 10));
    setup::run(async move {
        let server = RedisServer::start(&[])?;
        let proxy = Proxy::start(server.address())?;
        let ledger = setup::ledger(&proxy.url())?;
        let policy = setup::policy();
        let tasks = setup::tasks(calls)?;
        run_once(&ledger, &setup::tasks(1)?[0], &policy).await?;

        let before = proxy.round_trips();
        for task in &tasks {
            run_once(&ledger, task, &policy).await?;
        }
        let fresh = (proxy.round_trips() - before) as f64 / calls as f64;

        let before = proxy.round_trips();
        for task in &tasks {
            ensure!(matches!(ledger.claim(task, &policy).await?, Admission::Replay(_)), "not a duplicate");
        }
        let duplicate = (proxy.round_trips() - before) as f64 / calls as f64;

        let policy = Policy { lease: LEASE, ..policy };
        let mut held: Vec<Claim> = Vec::with_capacity(HELD);
        for task in &setup::tasks(HELD)? {
            match ledger.claim(task, &policy).await? {
                Admission::Run(claim) => held.push(claim),
                other => bail!("not fresh: {other:?}"),
            }
        }
        // The first heartbeat also connects, and those of claims made apart come together with it.
        await_beats(&server, HELD as u64 * 2).await?;
        proxy.set_delay(HOLD);
        let (trips_before, writes_before) = (proxy.round_trips(), server.calls("zadd")?);
        await_beats(&server, HELD as u64 * beats).await?;
        let renewals = (server.calls("zadd")? - writes_before) as f64 / HELD as f64;
        let heartbeat = (proxy.round_trips() - trips_before) as f64 / renewals.max(1.0);
        for claim in held {
            ensure!(claim.may_start_effect(), "a held claim was lost under the heartbeats");
            claim.release().await.map_err(taskonce::Unsettled::into_error)?;
        }
        let note =
            format!("{renewals:.1} heartbeats of all claims by the heart's thread, every {:?} or so", LEASE * 3 / 10);
        Ok(vec![
            count("Redis round trips: fresh claim + complete", fresh, 2.0, vec![]),
            count("Redis round trips: duplicate of a done task", duplicate, 1.0, vec![]),
            count("Redis round trips: heartbeat of 100 held claims", heartbeat, 1.0, vec![note]),
        ])
    })
}

/// Waits until so many renewals more have been answered. Each adds its claim to the list of running tasks.
async fn await_beats(server: &RedisServer, renewals: u64) -> Result<()> {
    let (until, start) = (server.calls("zadd")? + renewals, Instant::now());
    while server.calls("zadd")? < until {
        ensure!(start.elapsed() < BEATS_WAIT, "no {renewals} renewals within {BEATS_WAIT:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn count(name: &str, ours: f64, most: f64, notes: Vec<String>) -> Figure {
    let (unit, judged) = (Unit::Count, Judged::Ours);
    Figure { name: name.into(), unit, ours, floor: None, judged, bound: Bound::AtMost(most), notes }
}
