//! What happens in the process alone: a duplicate that the cache answers, and the making of a key.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use quick_cache::sync::Cache;
use sha2::{Digest as _, Sha256};
use taskonce::{Admission, CacheLimits, Fields, Input, Key, Record};

use crate::figure::{Bound, Figure, Judged, Unit};
use crate::measure::Rounds;
use crate::setup::{self, Setup, run_once};

/// Tasks that are looked up in turn.
const KNOWN: usize = 1_000;

/// A duplicate that the in-process cache answers, beside a bare lookup of the same key in the same cache library.
pub(crate) fn cache(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, turns) = (setup.pick(3, 101), setup.pick(2, 20));
    setup::run(async move {
        let ledger = setup::ledger("memory:")?.with_cache(CacheLimits::default());
        let policy = setup::policy();
        let tasks = setup::tasks(KNOWN)?;
        let bare: Cache<Key, Arc<Record>> = Cache::new(CacheLimits::default().records_max);
        for task in &tasks {
            run_once(&ledger, task, &policy).await?;
            let found = ledger.show(&task.key).await?.context("no record")?;
            bare.insert(task.key.clone(), found.record);
        }
        let mut rounds = Rounds::new(2);
        for round in 0..round_count {
            for side in rounds.order(round) {
                let start = Instant::now();
                for _ in 0..turns {
                    for task in &tasks {
                        if side == 0 {
                            let admission = ledger.claim(black_box(task), &policy).await?;
                            let Admission::Replay(seen) = admission else { anyhow::bail!("not a duplicate") };
                            ensure!(seen.cached, "not from the cache");
                            black_box(seen);
                        } else {
                            black_box(bare.get(black_box(&task.key)).context("not in the bare cache")?);
                        }
                    }
                }
                rounds.push(side, start.elapsed().as_nanos() as f64 / (turns * KNOWN) as f64);
            }
        }
        Ok(vec![Figure {
            name: "duplicate answered by the in-process cache, p50".into(),
            unit: Unit::Nanos,
            ours: rounds.ours(),
            floor: Some(rounds.floor()),
            judged: Judged::Ratio(rounds.ratio()),
            bound: Bound::AtMost(3.0),
            notes: vec![format!("medians of rounds of {} calls each, key prepared", turns * KNOWN), rounds.spread()],
        }])
    })
}

/// A key from 1 KiB of JSON, beside `serde_json` to a `Value` plus one SHA-256 of the same bytes.
pub(crate) fn key(setup: &Setup) -> Result<Vec<Figure>> {
    let (round_count, keys) = (setup.pick(3, 101), setup.pick(200, 2_000));
    let document = order();
    let bytes = document.as_bytes();
    let fields = Fields::all();
    let mut rounds = Rounds::new(2);
    for round in 0..round_count {
        for side in rounds.order(round) {
            let start = Instant::now();
            for _ in 0..keys {
                if side == 0 {
                    let input = Input::from_json(black_box(bytes))?;
                    black_box(input.digest(&fields)?);
                } else {
                    let value: serde_json::Value = serde_json::from_slice(black_box(bytes))?;
                    black_box((value, Sha256::digest(bytes)));
                }
            }
            rounds.push(side, f64::from(keys) / start.elapsed().as_secs_f64());
        }
    }
    Ok(vec![Figure {
        name: "key from 1 KiB of JSON: parse, refuse, canonical form, hash".into(),
        unit: Unit::PerSecond,
        ours: rounds.ours(),
        floor: Some(rounds.floor()),
        judged: Judged::Ratio(rounds.ratio()),
        bound: Bound::AtLeast(0.5),
        notes: vec![format!("an order of {} bytes", bytes.len()), rounds.spread()],
    }])
}

/// An order as shops send it: nested, with 64-bit ids, decimals and some letters beyond ASCII.
fn order() -> String {
    let line = |number: u32| {
        format!(
            r#"{{"sku": "SKU-{number:05}", "title": "A thing of some use, no. {number}, dark blue", "quantity": {}, "price": {}.{:02}, "taxed": true}}"#,
            number % 7 + 1,
            number * 3,
            number % 100
        )
    };
    let lines: Vec<_> = (1..=7).map(line).collect();
    format!(
        r#"{{"order_id": 7205759403792793601, "customer": {{"name": "Zoë Müller", "mail": "zoey@example.org", "since": "2019-04-01"}}, "currency": "EUR", "note": null, "lines": [{}], "sent_at": "2026-01-01T00:00:00Z"}}"#,
        lines.join(", ")
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_order_has_one_kibibyte() {
        assert_eq!(super::order().len(), 1024);
    }
}
