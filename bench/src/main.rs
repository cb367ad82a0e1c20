//! Figures of taskonce, each beside a floor measured in the same run.
//!
//! `cargo run --release -p taskonce-bench`. It starts its own Redis and makes its SQLite files in a temporary folder on
//! disk. What each floor is, and what is not measured, is in `docs/bench.md`.

mod bare;
mod child;
mod cores;
mod figure;
mod front;
mod idle;
mod lists;
mod local;
mod measure;
mod pipeline;
mod postgres;
mod postgres_stage;
mod redis_away;
mod redis_calls;
mod redis_failover;
mod redis_large;
mod redis_loss;
mod redis_memory;
mod redis_stage;
mod redis_trips;
mod redis_wait;
mod setup;
mod soak;
mod sqlite;
mod sqlite_processes;

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;

use crate::figure::Figure;
use crate::setup::Setup;

/// Figures of taskonce, each beside a floor measured in the same run.
#[derive(Parser)]
#[command(name = "taskonce-bench")]
struct Args {
    /// Only benches whose name contains this. Long ones run only under their whole name: redis-10m, postgres-10m, soak.
    filter: Option<String>,
    /// One JSON object on standard output instead of the table.
    #[arg(long)]
    json: bool,
    /// Few and short rounds: shows that everything runs; its figures are not to be quoted.
    #[arg(long)]
    quick: bool,
    /// Exits with 1 when a figure misses its bound.
    #[arg(long)]
    check: bool,
}

/// One bench: what to filter it by, and what measures it.
struct Bench {
    name: &'static str,
    run: fn(&Setup) -> Result<Vec<Figure>>,
}

const BENCHES: &[Bench] = &[
    Bench { name: "redis-fresh", run: redis_calls::fresh },
    Bench { name: "redis-duplicate", run: redis_calls::duplicate },
    Bench { name: "valkey-fresh", run: redis_calls::fresh_valkey },
    Bench { name: "valkey-duplicate", run: redis_calls::duplicate_valkey },
    Bench { name: "redis-trips", run: redis_trips::trips },
    Bench { name: "sqlite-rate", run: sqlite::rate },
    Bench { name: "sqlite-processes", run: sqlite_processes::processes },
    Bench { name: "sqlite-duplicate", run: sqlite::duplicate },
    Bench { name: "cache-duplicate", run: local::cache },
    Bench { name: "key", run: local::key },
    Bench { name: "redis-memory", run: redis_memory::memory },
    Bench { name: "redis-away", run: redis_away::away },
    Bench { name: "redis-loss", run: redis_loss::loss },
    Bench { name: "redis-lists", run: lists::redis },
    Bench { name: "sqlite-lists", run: lists::sqlite },
    Bench { name: "redis-wait", run: redis_wait::wait },
    Bench { name: "cluster-fresh", run: redis_calls::fresh_cluster },
    Bench { name: "failover", run: redis_failover::failover },
    Bench { name: "postgres-fresh", run: postgres::fresh },
    Bench { name: "postgres-duplicate", run: postgres::duplicate },
    Bench { name: "postgres-transaction", run: postgres::transaction },
    Bench { name: "postgres-heartbeats", run: postgres::heartbeats },
    Bench { name: "front-reads", run: front::reads },
    Bench { name: "front-away", run: front::away },
    Bench { name: "idle", run: idle::idle },
    Bench { name: "pipeline-sqlite", run: pipeline::sqlite },
    Bench { name: "pipeline-redis", run: pipeline::redis },
    Bench { name: "pipeline-takeover", run: pipeline::takeover },
    Bench { name: "pipeline-idle", run: pipeline::idle },
];

/// Those that take minutes and gigabytes: they run only when they are named.
const LONG: &[Bench] = &[
    Bench { name: "redis-10m", run: redis_large::large },
    Bench { name: "postgres-10m", run: postgres::large },
    Bench { name: "soak", run: soak::soak },
];

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        // This program again, as one of several processes.
        Some(child::COMMAND) => child::main().map(|()| ExitCode::SUCCESS),
        Some(_) | None => bench(&Args::parse()),
    };
    result.unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::from(2)
    })
}

fn bench(args: &Args) -> Result<ExitCode> {
    let named = |bench: &&Bench| args.filter.as_deref() == Some(bench.name);
    let chosen: Vec<&Bench> = match LONG.iter().find(named) {
        Some(long) => vec![long],
        None => {
            BENCHES.iter().filter(|bench| args.filter.as_ref().is_none_or(|part| bench.name.contains(part))).collect()
        }
    };
    let names: Vec<&str> = BENCHES.iter().chain(LONG).map(|bench| bench.name).collect();
    ensure!(!chosen.is_empty(), "no bench has that in its name; there are {}", names.join(", "));
    if cfg!(debug_assertions) && !args.quick {
        say("warning: a build without optimisation; its figures say nothing. Use `cargo run --release`");
    }
    let setup = Setup::new(args.quick)?;
    let machine = setup.machine()?;
    if !args.json {
        print(&machine.line());
        print(&figure::head());
    }
    let mut figures = Vec::new();
    for bench in chosen {
        say(&format!("… {}", bench.name));
        for figure in (bench.run)(&setup).with_context(|| format!("bench {}", bench.name))? {
            if !args.json {
                print(&figure.lines());
            }
            figures.push((bench.name, figure));
        }
    }
    let missed = figures.iter().filter(|(_, figure)| !figure.is_reached()).count();
    if args.json {
        let figures: Vec<_> = figures.iter().map(|(bench, figure)| figure.json(bench)).collect();
        let report =
            serde_json::json!({ "machine": machine.json(), "quick": args.quick, "missed": missed, "figures": figures });
        print(&serde_json::to_string_pretty(&report)?);
    } else {
        print(&format!("\n{} figures, {missed} missed", figures.len()));
    }
    Ok(if args.check && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[expect(clippy::print_stdout, reason = "the table is what the program is for")]
fn print(line: &str) {
    println!("{line}");
}

fn say(line: &str) {
    eprintln!("{line}");
}
