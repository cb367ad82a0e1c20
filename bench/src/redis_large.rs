//! Calls in a server that holds ten million done records, beside the same calls in an empty one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use taskonce::{Admission, Ledger, Policy, Task};
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::{Rounds, quantile};
use crate::redis_memory::used;
use crate::setup::{self, Setup, run_once};

/// How many records one call of the script writes.
const WRITTEN_AT_ONCE: u64 = 50_000;
/// Duplicates are looked up among so many of the records, spread over all of them.
const KNOWN: u64 = 100_000;

/// Writes copies of a record under numbered keys.
const FILL: &str = "for number = ARGV[3], ARGV[4] do \
     redis.call('SET', KEYS[1] .. string.format('%0' .. ARGV[2] .. '.0f', number), ARGV[1], 'PX', ARGV[5]) end \
     return redis.call('DBSIZE')";

/// A server and a ledger over it.
struct Stage {
    server: RedisServer,
    ledger: Ledger,
    policy: Policy,
}

impl Stage {
    async fn open() -> Result<Stage> {
        let server = RedisServer::start(&[])?;
        let ledger = setup::ledger(&server.url())?;
        let stage = Stage { server, ledger, policy: setup::policy() };
        run_once(&stage.ledger, &setup::tasks(1)?[0], &stage.policy).await?;
        Ok(stage)
    }

    /// Fills the server with copies of a done record that the ledger wrote.
    async fn fill(&self, count: u64) -> Result<()> {
        let example = setup::numbered_task(count)?;
        run_once(&self.ledger, &example, &self.policy).await?;
        let key = setup::redis_key(&example);
        let Reply::Bulk(record) = self.server.command(&["GET", &key])? else { anyhow::bail!("no record `{key}`") };
        let life = self.server.command(&["PTTL", &key])?.int().context("no life")?.to_string();
        let width = setup::id_width();
        let (beginning, width) = (key[..key.len() - width].to_owned(), width.to_string());
        let mut connection = self.server.connect()?;
        let mut first = 0;
        while first < count {
            let last = (first + WRITTEN_AT_ONCE).min(count) - 1;
            let (from, to) = (first.to_string(), last.to_string());
            let words: [&[u8]; 9] = [
                b"EVAL",
                FILL.as_bytes(),
                b"1",
                beginning.as_bytes(),
                &record,
                width.as_bytes(),
                from.as_bytes(),
                to.as_bytes(),
                life.as_bytes(),
            ];
            let reply = connection.ask(&words)?;
            ensure!(reply.int().is_some(), "the records were not written: {reply:?}");
            first = last + 1;
        }
        Ok(())
    }

    async fn fresh(&self, tasks: &[Task]) -> Result<Vec<Duration>> {
        let mut samples = Vec::with_capacity(tasks.len());
        for task in tasks {
            let start = Instant::now();
            run_once(&self.ledger, task, &self.policy).await?;
            samples.push(start.elapsed());
        }
        Ok(samples)
    }

    async fn duplicates(&self, tasks: &[Task]) -> Result<Vec<Duration>> {
        let mut samples = Vec::with_capacity(tasks.len());
        for task in tasks {
            let start = Instant::now();
            let admission = self.ledger.claim(task, &self.policy).await?;
            samples.push(start.elapsed());
            ensure!(matches!(admission, Admission::Replay(_)), "not a duplicate: {admission:?}");
        }
        Ok(samples)
    }
}

/// Fresh claims with completion, and duplicates, with ten million records and with none.
pub(crate) fn large(setup: &Setup) -> Result<Vec<Figure>> {
    let (records, round_count, calls) = (setup.pick(20_000, 10_000_000), setup.pick(3, 60), setup.pick(50, 400));
    setup::run(async move {
        let (full, empty) = (Stage::open().await?, Stage::open().await?);
        let before = used(&full.server)?;
        full.fill(records).await?;
        let each = (used(&full.server)? - before) / records as f64;
        // In the full server those that are looked up lie far from each other, as those of a busy day do.
        let spread = |at: u64| setup::numbered_task(at.wrapping_mul(0x9E37_79B9_7F4A_7C15) % records);
        let known = (0..KNOWN.min(records)).map(spread).collect::<Result<Vec<_>>>()?;
        let few = setup::tasks(256)?;
        empty.fresh(&few).await?;
        let (mut fresh, mut duplicates) = (Rounds::new(2), Rounds::new(2));
        let mut looked_up = 0;
        for round in 0..round_count {
            for side in fresh.order(round) {
                let tasks = setup::tasks(calls)?;
                let stage = [&full, &empty][side];
                fresh.push(side, quantile(&mut stage.fresh(&tasks).await?, 0.5));
                let among = [&known, &few][side];
                // Copied, so that the caller's own memory is as warm on both sides.
                let tasks: Vec<Task> =
                    among.iter().cycle().skip(looked_up % among.len()).take(calls).cloned().collect();
                duplicates.push(side, quantile(&mut stage.duplicates(&tasks).await?, 0.5));
            }
            looked_up = (looked_up + calls) % known.len();
        }
        let millions = records as f64 / 1e6;
        let figure = |what: &str, rounds: &Rounds, notes| Figure {
            name: format!("Redis with {millions:.0} million records: {what}, p50"),
            unit: Unit::Nanos,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtMost(1.2),
            notes,
        };
        let held = full.server.command(&["DBSIZE"])?.int().context("no DBSIZE")?;
        let notes = vec![
            format!("the floor is the same in an empty server; {held} keys, {each:.0} bytes of used_memory each"),
            fresh.spread(),
        ];
        Ok(vec![
            figure("fresh claim + complete", &fresh, notes),
            figure("duplicate of a done task", &duplicates, vec![duplicates.spread()]),
        ])
    })
}
