//! What a done record costs in Redis, beside a bare key.

use anyhow::{Context, Result};
use redis::cmd;
use taskonce_testkit::RedisServer;

use crate::bare::{self, LIFE_MS};
use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::{self, KEY_BYTES, Setup, run_once};

/// Memory per done record without output, beside a bare key of the same length with the value `x` and an expiry. Each in
/// a server of its own that holds nothing else.
pub(crate) fn memory(setup: &Setup) -> Result<Vec<Figure>> {
    let records = setup.pick(2_000, 50_000);
    setup::run(async move {
        let server = RedisServer::start(&[])?;
        let ledger = setup::ledger(&server.url())?;
        let policy = setup::policy();
        let first = &setup::tasks(1)?[0];
        run_once(&ledger, first, &policy).await?;
        setup::check_key_length(first, |words| server.command(words))?;
        let before = used(&server)?;
        for tasks in setup::tasks(records)?.chunks(100) {
            let mut running = tokio::task::JoinSet::new();
            for task in tasks {
                let (ledger, policy, task) = (ledger.clone(), policy.clone(), task.clone());
                running.spawn(async move { run_once(&ledger, &task, &policy).await });
            }
            while let Some(ended) = running.join_next().await {
                ended??;
            }
        }
        let ours = (used(&server)? - before) / records as f64;
        let one = usage(&server, &format!("taskonce:{}", first.key))?;

        let server = RedisServer::start(&[])?;
        let mut connection = bare::redis_rs(&server).await?;
        let keys = setup::bare_keys(records + 1)?;
        let set = |key: &str| cmd("SET").arg(key).arg("x").arg("NX").arg("PX").arg(LIFE_MS).to_owned();
        set(&keys[0]).exec_async(&mut connection).await?;
        let before = used(&server)?;
        for key in &keys[1..] {
            set(key).exec_async(&mut connection).await?;
        }
        let floor = (used(&server)? - before) / records as f64;
        let bare_one = usage(&server, &keys[0])?;
        Ok(vec![Figure {
            name: "Redis, memory per done record without output".into(),
            unit: Unit::Bytes,
            ours,
            floor: Some(floor),
            judged: Judged::Ratio(ours / floor),
            bound: Bound::AtMost(1.6),
            notes: vec![
                format!("used_memory over {records} records, keys of {KEY_BYTES} bytes"),
                format!("MEMORY USAGE of one: {one} against {bare_one}"),
            ],
        }])
    })
}

/// What the server's data takes, with its own structures.
pub(crate) fn used(server: &RedisServer) -> Result<f64> {
    let info = server.command(&["INFO", "memory"])?.text();
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).context("no used_memory")?;
    Ok(line.trim().parse()?)
}

fn usage(server: &RedisServer, key: &str) -> Result<i64> {
    server.command(&["MEMORY", "USAGE", key])?.int().with_context(|| format!("no key `{key}`"))
}
