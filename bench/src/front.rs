//! A fast check in front of PostgreSQL: what it spares the database, and what it costs while it is away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use taskonce::{Admission, Ledger};
use taskonce_testkit::RedisServer;
use tokio::task::{JoinSet, block_in_place};

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::median;
use crate::postgres_stage::Stage;
use crate::setup::{self, Setup, run_once};

/// How many ask at once.
const AT_ONCE: usize = 64;
/// What a server takes at most to count what its connections did: a connection at rest tells it after ten seconds.
const COUNTED_WITHIN: Duration = Duration::from_secs(11);
/// How long a ledger takes to learn that its database is the same as before.
const SETTLED_WITHIN: Duration = Duration::from_millis(300);

/// A database, a Redis in front of it, and a ledger over both.
struct Fronted {
    stage: Arc<Stage>,
    redis: RedisServer,
}

impl Fronted {
    async fn open() -> Result<Fronted> {
        let redis = block_in_place(|| RedisServer::start(&[]))?;
        Ok(Fronted { stage: Stage::open(0).await?, redis })
    }

    /// A ledger of its own, as another process would have.
    fn ledger(&self, more: &str) -> Result<Ledger> {
        let front = self.redis.url().replace(':', "%3A").replace('/', "%2F");
        setup::ledger(&format!("{}?front={front}{more}", self.stage.url()))
    }

    /// How often the database's table was looked at during some work, by its own count; a claim makes ready for it.
    async fn reads(
        &self,
        counted_within: Duration,
        ready: impl Future<Output = Result<Admission>>,
        work: impl Future<Output = Result<()>>,
    ) -> Result<i64> {
        tokio::time::sleep(counted_within).await;
        // At rest a ledger does not ask for the life of its database, and the first that asks again reads.
        let _admission = ready.await?;
        tokio::time::sleep(SETTLED_WITHIN).await;
        let before = self.stage.reads()?;
        work.await?;
        tokio::time::sleep(counted_within).await;
        Ok(self.stage.reads()? - before)
    }
}

/// Reads of the database for a duplicate of a done task, verified and trusted, and for a storm of busy duplicates.
pub(crate) fn reads(setup: &Setup) -> Result<Vec<Figure>> {
    let (duplicates, storm) = (setup.pick(100, 2_000), setup.pick(1_000, 10_000));
    let counted_within = setup.pick(Duration::from_millis(1500), COUNTED_WITHIN);
    setup::run(async move {
        let fronted = Fronted::open().await?;
        let policy = setup::policy();
        let mut figures = Vec::new();
        for (name, more, most) in [("verified", "", 1.0), ("trusted", "&trust_done=yes", 0.0)] {
            let ledger = fronted.ledger(more)?;
            let task = setup::tasks(1)?.remove(0);
            run_once(&ledger, &task, &policy).await?;
            // One before they are counted: connections are made, and what is read now and then was.
            let _first = ledger.claim(&task, &policy).await?;
            let mut samples = Vec::with_capacity(duplicates);
            let reads = fronted
                .reads(counted_within, async { Ok(ledger.claim(&task, &policy).await?) }, async {
                    for _ in 0..duplicates {
                        let start = Instant::now();
                        let admission = ledger.claim(&task, &policy).await?;
                        samples.push(start.elapsed().as_nanos() as f64);
                        ensure!(matches!(admission, Admission::Replay(_)), "not a duplicate: {admission:?}");
                    }
                    Ok(())
                })
                .await?;
            figures.push(Figure {
                name: format!("fast check, duplicate of a done task, {name}: reads of the database"),
                unit: Unit::Count,
                ours: reads as f64 / duplicates as f64,
                floor: None,
                judged: Judged::Ours,
                bound: Bound::AtMost(most),
                notes: vec![format!("{duplicates} of them, p50 {}", Unit::Nanos.show(median(&samples)))],
            });
        }
        let (holder, other) = (fronted.ledger("")?, fronted.ledger("")?);
        let task = Arc::new(setup::tasks(1)?.remove(0));
        let Admission::Run(claim) = holder.claim(&task, &policy).await? else { anyhow::bail!("not fresh") };
        let reads = fronted
            .reads(counted_within, async { Ok(other.claim(&task, &policy).await?) }, async {
                let mut running = JoinSet::new();
                for _ in 0..AT_ONCE {
                    let (other, task, policy) = (other.clone(), Arc::clone(&task), policy.clone());
                    running.spawn(async move {
                        for _ in 0..storm / AT_ONCE {
                            let admission = other.claim(&task, &policy).await?;
                            ensure!(matches!(admission, Admission::Busy(_)), "not busy: {admission:?}");
                        }
                        Ok(())
                    });
                }
                while let Some(ended) = running.join_next().await {
                    ended??;
                }
                Ok(())
            })
            .await?;
        claim.release().await.map_err(|unsettled| unsettled.into_error())?;
        figures.push(Figure {
            name: format!("fast check, a storm of {storm} busy duplicates: reads of the database"),
            unit: Unit::Count,
            ours: reads as f64,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(100.0),
            notes: vec![format!("{AT_ONCE} at once, by the database's own count, heartbeats of the holder among them")],
        });
        Ok(figures)
    })
}

/// What a Redis that hangs in front of the database adds to a task, beside the database alone.
pub(crate) fn away(setup: &Setup) -> Result<Vec<Figure>> {
    let tasks = setup.pick(100, 2_000);
    setup::run(async move {
        let fronted = Fronted::open().await?;
        let policy = setup::policy();
        let (with, without) = (fronted.ledger("")?, setup::ledger(&fronted.stage.url())?);
        for ledger in [&with, &without] {
            for task in &setup::tasks(50)? {
                run_once(ledger, task, &policy).await?;
            }
        }
        block_in_place(|| fronted.redis.stop())?;
        let mut spent = [Duration::ZERO; 2];
        for pair in setup::tasks(tasks * 2)?.chunks(2) {
            for (side, (ledger, task)) in [&with, &without].into_iter().zip(pair).enumerate() {
                let start = Instant::now();
                run_once(ledger, task, &policy).await?;
                spent[side] += start.elapsed();
            }
        }
        block_in_place(|| fronted.redis.cont())?;
        let each = |side: usize| spent[side].as_nanos() as f64 / tasks as f64;
        Ok(vec![Figure {
            name: "fast check stopped (SIGSTOP): added to a task, mean".into(),
            unit: Unit::Nanos,
            ours: (each(0) - each(1)).max(0.0),
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(5e6),
            notes: vec![format!(
                "{tasks} tasks one after the other from the moment it stops: {} each, {} without a fast check",
                Unit::Nanos.show(each(0)),
                Unit::Nanos.show(each(1))
            )],
        }])
    })
}
