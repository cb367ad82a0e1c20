//! Redis and Valkey: how long calls take and how many there are a second, of 1 to 256 tasks at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::task::JoinSet;

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::{Rounds, quantile};
use crate::redis_stage::{Item, Side, Stage, Stand, Work, items};
use crate::setup::{self, Setup};

/// How many tasks run at once: one client, and more of them over one connection.
const AT_ONCE: &[usize] = &[1, 4, 16, MANY, 256];
/// The same for a Cluster, where fewer numbers say as much.
const AT_ONCE_CLUSTER: &[usize] = &[1, MANY];
/// The number of tasks at once for which there is a bound.
const MANY: usize = 64;
/// What is left of the bare pair in a Cluster.
const CLUSTER_SHARE: f64 = 0.6;
/// Done tasks among which duplicates are looked up.
const KNOWN: usize = 256;
/// Percentiles that are told beside the median, with their names.
const TAILS: [(&str, f64); 2] = [("p99", 0.99), ("p99.9", 0.999)];

/// Fresh claims and completions on Redis.
pub(crate) fn fresh(setup: &Setup) -> Result<Vec<Figure>> {
    measure(setup, Stand::Redis, Work::Fresh)
}

/// Duplicates of done tasks on Redis.
pub(crate) fn duplicate(setup: &Setup) -> Result<Vec<Figure>> {
    measure(setup, Stand::Redis, Work::Duplicate)
}

/// Fresh claims and completions on a server that compares by itself.
pub(crate) fn fresh_valkey(setup: &Setup) -> Result<Vec<Figure>> {
    measure(setup, Stand::Valkey, Work::Fresh)
}

/// Duplicates of done tasks on such a server.
pub(crate) fn duplicate_valkey(setup: &Setup) -> Result<Vec<Figure>> {
    measure(setup, Stand::Valkey, Work::Duplicate)
}

/// Fresh claims and completions in a Cluster of three masters.
pub(crate) fn fresh_cluster(setup: &Setup) -> Result<Vec<Figure>> {
    measure(setup, Stand::Cluster, Work::Fresh)
}

/// What must be reached with so many at once: of one client the median, of 64 the rate.
fn bound(stand: Stand, work: Work, at_once: usize) -> Bound {
    match (stand, work, at_once) {
        (Stand::Cluster, Work::Fresh, 1) => Bound::AtMost(1.0 / CLUSTER_SHARE),
        (Stand::Cluster, Work::Fresh, MANY) => Bound::AtLeast(CLUSTER_SHARE),
        (_, Work::Fresh, 1) => Bound::AtMost(1.20),
        (_, Work::Duplicate, 1) => Bound::AtMost(1.15),
        (Stand::Redis, Work::Fresh, MANY) => Bound::AtLeast(0.70),
        (Stand::Valkey, Work::Fresh, MANY) => Bound::AtLeast(0.85),
        _ => Bound::Shown,
    }
}

/// One figure for each number of tasks at once.
fn measure(setup: &Setup, stand: Stand, work: Work) -> Result<Vec<Figure>> {
    let quick = setup.quick;
    setup::run(async move {
        let stage = Arc::new(Stage::open(stand).await?);
        let mut figures = Vec::new();
        for &at_once in if stand == Stand::Cluster { AT_ONCE_CLUSTER } else { AT_ONCE } {
            let judged = !matches!(bound(stand, work, at_once), Bound::Shown);
            let extent = Extent::of(quick, judged, at_once);
            let measured = alternate(&stage, work, at_once, extent).await?;
            figures.push(figure(&stage, stand, work, at_once, measured));
        }
        Ok(figures)
    })
}

/// How much is measured.
#[derive(Clone, Copy)]
struct Extent {
    rounds: usize,
    /// Calls of each task in a round.
    each: usize,
}

impl Extent {
    fn of(quick: bool, judged: bool, at_once: usize) -> Extent {
        let (rounds, calls) = match (quick, judged) {
            (true, _) => (3, 200),
            (false, true) => (60, 9_600),
            (false, false) => (20, 9_600),
        };
        // A single client is slow: it waits for each answer.
        let calls = if at_once == 1 { calls.min(400) } else { calls };
        Extent { rounds, each: (calls / at_once).max(1) }
    }
}

/// What the sides reached: the rate and the median of each round, and all calls together.
struct Measured {
    rates: Rounds,
    medians: Rounds,
    calls: Vec<Vec<Duration>>,
}

/// The sides take turns, round by round. Each begins a round of fresh work with an empty server.
async fn alternate(stage: &Arc<Stage>, work: Work, at_once: usize, extent: Extent) -> Result<Measured> {
    let mut measured = Measured {
        rates: Rounds::new(stage.sides().len()),
        medians: Rounds::new(stage.sides().len()),
        calls: vec![Vec::new(); stage.sides().len()],
    };
    stage.flush()?;
    let known = match work {
        Work::Fresh => Vec::new(),
        Work::Duplicate => items(KNOWN)?,
    };
    for item in &known {
        stage.prepare(item).await?;
    }
    for round in 0..extent.rounds {
        for at in measured.rates.order(round) {
            if work == Work::Fresh {
                stage.flush()?;
            }
            let shares = (0..at_once).map(|first| match work {
                Work::Fresh => items(extent.each),
                // Those who run at once begin at different tasks.
                Work::Duplicate => Ok(known.iter().cycle().skip(first % KNOWN).take(extent.each).cloned().collect()),
            });
            let shares = shares.collect::<Result<Vec<_>>>()?;
            let mut running = JoinSet::new();
            let start = Instant::now();
            for items in shares {
                running.spawn(calls(Arc::clone(stage), work, stage.sides()[at], items));
            }
            let mut samples = Vec::with_capacity(at_once * extent.each);
            while let Some(ended) = running.join_next().await {
                samples.extend(ended??);
            }
            measured.rates.push(at, samples.len() as f64 / start.elapsed().as_secs_f64());
            measured.medians.push(at, quantile(&mut samples, 0.5));
            measured.calls[at].extend(samples);
        }
    }
    Ok(measured)
}

/// One task after the other: how long each took.
async fn calls(stage: Arc<Stage>, work: Work, side: Side, items: Vec<Item>) -> Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(items.len());
    for item in &items {
        let start = Instant::now();
        stage.call(work, side, item).await?;
        samples.push(start.elapsed());
    }
    Ok(samples)
}

fn figure(stage: &Stage, stand: Stand, work: Work, at_once: usize, measured: Measured) -> Figure {
    let Measured { rates, medians, mut calls } = measured;
    let what = match work {
        Work::Fresh => "fresh claim + complete",
        Work::Duplicate => "duplicate of a done task",
    };
    let (name, unit, rounds) = match at_once {
        1 => (format!("{}, one client: {what}, p50", stand.name()), Unit::Nanos, &medians),
        many => (format!("{}, {many} tasks at once: {what} per second", stand.name()), Unit::PerSecond, &rates),
    };
    let mut tails = Vec::new();
    if at_once > 1 {
        tails.push(tail("p50", medians.ours(), medians.floor(), medians.ratio()));
    }
    for (name, share) in TAILS {
        let (ours, floor) = (quantile(&mut calls[0], share), quantile(&mut calls[1], share));
        tails.push(tail(name, ours, floor, ours / floor));
    }
    let mut beside =
        format!("beside a value of {} bytes, as many as our record has: {:.2}", stage.large.len(), rounds.ratio_to(2));
    if stage.sides().contains(&Side::OwnClient) {
        let (own, ratio) = (unit.show(rounds.of(3)), rounds.ratio_to(3));
        beside.push_str(&format!("; beside the store's own client, bare: {own}, {ratio:.2}"));
    }
    let notes = vec![format!("a task: {}", tails.join(", ")), beside, rounds.spread()];
    Figure {
        name,
        unit,
        ours: rounds.ours(),
        floor: Some(rounds.floor()),
        judged: Judged::Ratio(rounds.ratio()),
        bound: bound(stand, work, at_once),
        notes,
    }
}

fn tail(name: &str, ours: f64, floor: f64, ratio: f64) -> String {
    format!("{name} {} against {} ({ratio:.2})", Unit::Nanos.show(ours), Unit::Nanos.show(floor))
}
