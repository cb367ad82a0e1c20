//! The same work by taskonce and by its rivals, in one run against one private Redis.
//!
//! `cargo run --release --manifest-path bench/rivals/Cargo.toml`. With `--check` it exits with 1 where taskonce is slower
//! than another crate. What each rival does not promise stands beside its figures: they do not do the same for it.

#[path = "../../src/measure.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod measure;
mod sides;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use crate::measure::{Rounds, quantile};
use crate::sides::{SIDES, Side, Stage};

/// Done tasks among which duplicates are looked up.
const KNOWN: usize = 200;
/// Tasks that run at once in the rate.
const AT_ONCE: usize = 64;

/// How much is measured.
#[derive(Clone, Copy)]
struct Extent {
    rounds: usize,
    calls: usize,
    each: usize,
}

const WHOLE: Extent = Extent { rounds: 40, calls: 300, each: 50 };
const QUICK: Extent = Extent { rounds: 4, calls: 50, each: 10 };

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode> {
    let (mut extent, mut check) = (WHOLE, false);
    for word in std::env::args().skip(1) {
        match word.as_str() {
            "--quick" => extent = QUICK,
            "--check" => check = true,
            other => {
                eprintln!("error: `{other}` is no option\nhint: there are `--quick` and `--check`");
                return Ok(ExitCode::from(2));
            }
        }
    }
    if cfg!(debug_assertions) {
        eprintln!("warning: a build without optimisation; its figures say nothing. Use `cargo run --release`");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // As a task of the runtime, as programs do, not on the thread that waits for it.
    let slower = runtime.block_on(async move { tokio::spawn(compare(extent)).await })??;
    Ok(if check && slower { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Measures everybody and prints the table. Says whether taskonce is slower than another crate in a p50.
async fn compare(extent: Extent) -> Result<bool> {
    let stage = Arc::new(Stage::open().await?);
    let (major, minor) = stage.server().version()?;
    println!("one Redis {major}.{minor} on loopback, one shared connection a side, the sides take turns\n");
    let fresh = fresh(&stage, extent).await?;
    let duplicate = duplicate(&stage, extent).await?;
    let rate = rate(&stage, extent).await?;
    println!(
        "{:<20}{:>12}{:>9}{:>15}{:>9}{:>14}{:>9}",
        "", "fresh, p50", "ours by", "duplicate, p50", "ours by", "64 at once", "ours by"
    );
    let micros = |nanos: f64| format!("{:.1} µs", nanos / 1e3);
    let mut slower = false;
    for (at, side) in SIDES.into_iter().enumerate() {
        let by = |rounds: &Rounds| format!("{:.2}", rounds.ratio_to(at));
        println!(
            "{:<20}{:>12}{:>9}{:>15}{:>9}{:>14}{:>9}",
            side.name(),
            micros(fresh.of(at)),
            by(&fresh),
            micros(duplicate.of(at)),
            by(&duplicate),
            format!("{:.1} k/s", rate.of(at) / 1e3),
            by(&rate)
        );
        // The recipe is no crate, and does less on purpose.
        let is_judged = matches!(side, Side::Idempotent | Side::Klauthed);
        slower |= is_judged && (fresh.ratio_to(at) > 1.0 || duplicate.ratio_to(at) > 1.0);
    }
    println!("\n{} rounds; `ours by` is the median of the rounds' own ratios", extent.rounds);
    for side in SIDES.into_iter().filter(|side| !side.lacks().is_empty()) {
        println!("\n{} does not promise:", side.name());
        for guarantee in side.lacks() {
            println!("  * {guarantee}");
        }
    }
    println!("\n{}", if slower { "taskonce is slower than another crate" } else { "no other crate is faster" });
    Ok(slower)
}

async fn fresh(stage: &Stage, extent: Extent) -> Result<Rounds> {
    let mut rounds = Rounds::new(SIDES.len());
    for round in 0..=extent.rounds {
        for at in rounds.order(round) {
            stage.flush()?;
            let ids = ids(extent.calls);
            let mut samples = Vec::with_capacity(ids.len());
            for id in &ids {
                let start = Instant::now();
                stage.fresh(SIDES[at], id).await?;
                samples.push(start.elapsed());
            }
            // The first round connects, and brings scripts to the server.
            if round > 0 {
                rounds.push(at, quantile(&mut samples, 0.5));
            }
        }
    }
    Ok(rounds)
}

async fn duplicate(stage: &Stage, extent: Extent) -> Result<Rounds> {
    stage.flush()?;
    let known = ids(KNOWN);
    for side in SIDES {
        for id in &known {
            stage.fresh(side, id).await?;
        }
    }
    let mut rounds = Rounds::new(SIDES.len());
    for round in 0..extent.rounds {
        for at in rounds.order(round) {
            let mut samples = Vec::with_capacity(extent.calls);
            for id in known.iter().cycle().take(extent.calls) {
                let start = Instant::now();
                stage.duplicate(SIDES[at], id).await?;
                samples.push(start.elapsed());
            }
            rounds.push(at, quantile(&mut samples, 0.5));
        }
    }
    Ok(rounds)
}

/// Fresh runs a second, by so many tasks at once.
async fn rate(stage: &Arc<Stage>, extent: Extent) -> Result<Rounds> {
    let mut rounds = Rounds::new(SIDES.len());
    for round in 0..extent.rounds {
        for at in rounds.order(round) {
            stage.flush()?;
            let work: Vec<_> = (0..AT_ONCE).map(|_| ids(extent.each)).collect();
            let mut running = JoinSet::new();
            let start = Instant::now();
            for ids in work {
                let stage = Arc::clone(stage);
                running.spawn(async move {
                    for id in &ids {
                        stage.fresh(SIDES[at], id).await?;
                    }
                    anyhow::Ok(())
                });
            }
            while let Some(ended) = running.join_next().await {
                ended?.context(SIDES[at].name())?;
            }
            rounds.push(at, (AT_ONCE * extent.each) as f64 / start.elapsed().as_secs_f64());
        }
    }
    Ok(rounds)
}

/// Ids that were not used before, all of one length.
fn ids(count: usize) -> Vec<String> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    (0..count).map(|_| format!("{:036}", NEXT.fetch_add(1, Ordering::Relaxed))).collect()
}
