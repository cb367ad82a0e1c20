//! PostgreSQL: how long calls take and how many there are a second, beside bare statements on rows as wide as ours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use taskonce::postgres::RunInTransaction as _;
use taskonce::{Admission, Effect, Ledger, Outcome, Policy, Task};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::{Rounds, quantile};
use crate::postgres_stage::{Bare, Stage};
use crate::setup::{self, Setup, run_once};

/// Clients at once, each on a connection of its own.
const MANY: usize = 16;
/// Done tasks among which duplicates are looked up.
const KNOWN: usize = 256;

/// Fresh claims and completions: how long one client waits, and how many there are a second of 16.
pub(crate) fn fresh(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, calls, each) = (setup.pick(2, 40), setup.pick(20, 200), setup.pick(5, 40));
    let (medians, width) = setup::run_apart(|cores| async move {
        let stage = Stage::open_apart(1, cores).await?;
        let mut medians = Rounds::new(2);
        for round in 0..round_count {
            for side in medians.order(round) {
                let tasks = setup::tasks(calls)?;
                let mut samples = fresh_calls(Arc::clone(&stage), side, 0, tasks).await?;
                medians.push(side, quantile(&mut samples, 0.5));
            }
        }
        Ok((medians, stage.width()))
    })?;
    setup::run(async move {
        let stage = Stage::open(MANY).await?;
        let mut rates = Rounds::new(2);
        for round in 0..round_count {
            for side in rates.order(round) {
                let shares = (0..MANY).map(|_| setup::tasks(each)).collect::<Result<Vec<_>>>()?;
                let mut running = JoinSet::new();
                let start = Instant::now();
                for (client, tasks) in shares.into_iter().enumerate() {
                    running.spawn(fresh_calls(Arc::clone(&stage), side, client, tasks));
                }
                while let Some(ended) = running.join_next().await {
                    ended??;
                }
                rates.push(side, (MANY * each) as f64 / start.elapsed().as_secs_f64());
            }
        }
        let width = format!("rows of {width} bytes on both sides, synchronous_commit on, two commits each");
        Ok(vec![
            Figure {
                name: "PostgreSQL, one client: fresh claim + complete, p50".into(),
                unit: Unit::Nanos,
                ours: medians.ours(),
                floor: Some(medians.floor()),
                judged: Judged::Ratio(medians.ratio()),
                bound: Bound::AtMost(1.15),
                notes: vec![width, medians.spread()],
            },
            Figure {
                name: format!("PostgreSQL, {MANY} clients: fresh claim + complete per second"),
                unit: Unit::PerSecond,
                ours: rates.ours(),
                floor: Some(rates.floor()),
                judged: Judged::Ratio(rates.ratio()),
                bound: Bound::AtLeast(0.85),
                notes: vec![rates.spread()],
            },
        ])
    })
}

/// One task after the other: how long each took.
async fn fresh_calls(stage: Arc<Stage>, side: usize, client: usize, tasks: Vec<Task>) -> Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(tasks.len());
    for task in &tasks {
        let start = Instant::now();
        match side {
            0 => run_once(&stage.ledger, task, &stage.policy).await?,
            _ => stage.bare[client].pair(task.key.as_str()).await?,
        }
        samples.push(start.elapsed());
    }
    Ok(samples)
}

/// Duplicates of done tasks: one client that asks for one after the other, and 16 that ask for the same one.
pub(crate) fn duplicate(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, calls, each) = (setup.pick(2, 60), setup.pick(50, 500), setup.pick(20, 300));
    let (medians, firsts) = setup::run_apart(|cores| async move {
        let stage = Stage::open_apart(1, cores).await?;
        let known = Arc::new(stage.done(KNOWN).await?);
        let (mut medians, mut firsts) = (Rounds::new(2), Rounds::new(2));
        for round in 0..round_count {
            for side in medians.order(round) {
                let asker = if side == 0 { Asker::Ours(stage.ledger.clone()) } else { Asker::Bare(0) };
                let mut samples = duplicates(Arc::clone(&stage), asker, Arc::clone(&known), calls).await?;
                medians.push(side, quantile(&mut samples, 0.5));
            }
            for side in firsts.order(round) {
                let asker = match side {
                    0 => Asker::Ours(stage.another_process().await?),
                    _ => Asker::BareOfItsOwn(stage.another_bare().await?),
                };
                let mut samples = duplicates(Arc::clone(&stage), asker, Arc::clone(&known), KNOWN).await?;
                firsts.push(side, quantile(&mut samples, 0.5));
            }
        }
        Ok((medians, firsts))
    })?;
    setup::run(async move {
        let stage = Stage::open(MANY).await?;
        let known = stage.done(1).await?;
        let hot = Arc::new(vec![known[0].clone()]);
        let mut rates = Rounds::new(2);
        for round in 0..round_count {
            for side in rates.order(round) {
                let mut running = JoinSet::new();
                let start = Instant::now();
                for client in 0..MANY {
                    let asker = if side == 0 { Asker::Ours(stage.ledger.clone()) } else { Asker::Bare(client) };
                    running.spawn(duplicates(Arc::clone(&stage), asker, Arc::clone(&hot), each));
                }
                while let Some(ended) = running.join_next().await {
                    ended??;
                }
                rates.push(side, (MANY * each) as f64 / start.elapsed().as_secs_f64());
            }
        }
        let floor = "the floor is a prepared SELECT by primary key of a row as wide";
        let median = |name: &str, rounds: &Rounds| Figure {
            name: format!("PostgreSQL, one client: duplicate of a done task, {name}, p50"),
            unit: Unit::Nanos,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtMost(1.3),
            notes: vec![floor.into(), rounds.spread()],
        };
        Ok(vec![
            median("which the process has met before", &medians),
            median("which it meets for the first time", &firsts),
            Figure {
                name: format!("PostgreSQL, {MANY} clients ask for one done key, per second"),
                unit: Unit::PerSecond,
                ours: rates.ours(),
                floor: Some(rates.floor()),
                judged: Judged::Ratio(rates.ratio()),
                bound: Bound::AtLeast(0.7),
                notes: vec![rates.spread()],
            },
        ])
    })
}

/// Who asks for duplicates.
enum Asker {
    Ours(Ledger),
    /// The bare connection with this number.
    Bare(usize),
    /// A bare connection that was made for this.
    BareOfItsOwn(Bare),
}

async fn duplicates(stage: Arc<Stage>, asker: Asker, known: Arc<Vec<Task>>, calls: usize) -> Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(calls);
    for task in known.iter().cycle().take(calls) {
        let start = Instant::now();
        match &asker {
            Asker::Ours(ledger) => {
                let admission = ledger.claim(task, &stage.policy).await?;
                ensure!(matches!(admission, Admission::Replay(_)), "not a duplicate: {admission:?}");
            }
            Asker::Bare(client) => stage.bare[*client].read(task.key.as_str()).await?,
            Asker::BareOfItsOwn(bare) => bare.read(task.key.as_str()).await?,
        }
        samples.push(start.elapsed());
    }
    Ok(samples)
}

/// The commits of a task whose effect is a row in the transaction that completes it, beside a transaction with that row.
pub(crate) fn transaction(setup: &Setup) -> Result<Vec<Figure>> {
    let count = setup.pick(50, 1_000);
    setup::run(async move {
        let stage = Stage::open(1).await?;
        stage.psql("create table effect (id bigint generated always as identity, task text not null)")?;
        let mut client = Bare::connect(&stage.url()).await?;
        let policy = Policy::new(Effect::Transactional);
        // Connections are made and statements prepared before anything is counted.
        for task in &setup::tasks(8)? {
            pay(&stage, &mut client, task, &policy).await?;
            bare_pay(&mut client, task).await?;
        }
        let (mut commits, mut spent) = ([0_i64; 2], [Duration::ZERO; 2]);
        for side in [0, 1] {
            let tasks = setup::tasks(count)?;
            let before = stage.transactions()?;
            for task in &tasks {
                let start = Instant::now();
                match side {
                    0 => pay(&stage, &mut client, task, &policy).await?,
                    _ => bare_pay(&mut client, task).await?,
                }
                spent[side] += start.elapsed();
            }
            // Asking for the number takes one.
            commits[side] = stage.transactions()? - before - 1;
        }
        let effects = stage.number("select count(*) from effect")?;
        ensure!(effects == 2 * (count as i64 + 8), "{effects} effects of {count} tasks on each side");
        let each = |side: usize| Unit::Nanos.show(spent[side].as_nanos() as f64 / count as f64);
        Ok(vec![Figure {
            name: "PostgreSQL, transactional task: commits more than its bare transaction".into(),
            unit: Unit::Count,
            ours: (commits[0] - commits[1]) as f64 / count as f64,
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtMost(1.0),
            notes: vec![format!(
                "{count} tasks one after the other, by the server's count of transactions that wrote: {} against {}; {} against {} each",
                commits[0],
                commits[1],
                each(0),
                each(1)
            )],
        }])
    })
}

/// A task whose effect commits with its record.
async fn pay(stage: &Stage, client: &mut Client, task: &Task, policy: &Policy) -> Result<()> {
    let outcome = stage
        .ledger
        .run_in_transaction(client, task, policy, |tx, context| {
            Box::pin(async move {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(())
            })
        })
        .await?;
    ensure!(matches!(outcome, Outcome::Ran { .. }), "not run: {outcome:?}");
    Ok(())
}

/// The same effect in a transaction of its own.
async fn bare_pay(client: &mut Client, task: &Task) -> Result<()> {
    let tx = client.transaction().await?;
    tx.execute(EFFECT, &[&task.key.as_str()]).await?;
    Ok(tx.commit().await?)
}

const EFFECT: &str = "insert into effect (task) values ($1)";

/// How many held claims are renewed while the share of heap-only updates is counted.
const HELD: usize = 100;
/// A short lease, so that there are many heartbeats.
const LEASE: Duration = Duration::from_secs(1);
/// What a server takes at most to count what its connections did.
const COUNTED_WITHIN: Duration = Duration::from_millis(1500);

/// The share of heartbeats that touch no index.
pub(crate) fn heartbeats(setup: &Setup) -> Result<Vec<Figure>> {
    let long = setup.pick(Duration::from_secs(2), Duration::from_secs(15));
    setup::run(async move {
        let stage = Stage::open(1).await?;
        let policy = Policy { lease: LEASE, ..setup::policy() };
        let mut held = Vec::with_capacity(HELD);
        for task in &setup::tasks(HELD)? {
            let Admission::Run(claim) = stage.ledger.claim(task, &policy).await? else { anyhow::bail!("not fresh") };
            held.push(claim);
        }
        tokio::time::sleep(COUNTED_WITHIN).await;
        let before = stage.updates()?;
        tokio::time::sleep(long).await;
        let lost = held.iter().filter(|claim| !claim.may_start_effect()).count();
        ensure!(lost == 0, "{lost} of {HELD} claims were lost");
        tokio::time::sleep(COUNTED_WITHIN).await;
        let after = stage.updates()?;
        let (all, hot) = (after.0 - before.0, after.1 - before.1);
        for claim in held {
            claim.release().await.map_err(|unsettled| unsettled.into_error())?;
        }
        Ok(vec![Figure {
            name: "PostgreSQL, heartbeats that touch no index (HOT), share".into(),
            unit: Unit::Share,
            ours: hot as f64 / (all as f64).max(1.0),
            floor: None,
            judged: Judged::Ours,
            bound: Bound::AtLeast(0.95),
            notes: vec![format!(
                "{all} heartbeats of {HELD} claims with a lease of {LEASE:?}, by the server's own count"
            )],
        }])
    })
}

/// Calls in a table that holds ten million done records, beside the same calls in an empty one.
pub(crate) fn large(setup: &Setup) -> Result<Vec<Figure>> {
    let (records, round_count, calls) = (setup.pick(5_000, 10_000_000), setup.pick(2, 40), setup.pick(20, 200));
    setup::run_apart(move |cores| async move {
        let (full, empty) = (Stage::open_apart(1, cores).await?, Stage::open_apart(1, cores).await?);
        full.fill(records).await?;
        let mut medians = Rounds::new(2);
        for round in 0..round_count {
            for side in medians.order(round) {
                let stage = [&full, &empty][side];
                let mut samples = fresh_calls(Arc::clone(stage), 0, 0, setup::tasks(calls)?).await?;
                medians.push(side, quantile(&mut samples, 0.5));
            }
        }
        let held = full.count().context("no count")?;
        Ok(vec![Figure {
            name: format!("PostgreSQL with {} million done records: fresh claim + complete, p50", records / 1_000_000),
            unit: Unit::Nanos,
            ours: medians.ours(),
            floor: Some(medians.floor()),
            judged: Judged::Ratio(medians.ratio()),
            bound: Bound::AtMost(1.3),
            notes: vec![format!("the floor is the same in an empty table; {held} records"), medians.spread()],
        }])
    })
}

/// What stands beside ours in most figures.
impl Bare {
    pub(crate) async fn pair(&self, key: &str) -> Result<()> {
        self.insert(key).await?;
        self.update(key).await
    }
}
