//! Four processes that write to one SQLite file in a loop: the worst wait of one write, and the shares.

use anyhow::Result;

use crate::child::{Child, Wrote};
use crate::figure::{Bound, Figure, Judged, Unit};
use crate::setup::Setup;

/// Processes that write.
const PROCESSES: usize = 4;

/// How four processes share a file, beside the same four with bare connections and SQLite's stock busy handler.
pub(crate) fn processes(setup: &Setup) -> Result<Vec<Figure>> {
    let seconds = setup.pick(0.7, 6.0);
    let ours = together("sqlite-writes", setup, seconds)?;
    let floor = together("sqlite-bare-writes", setup, seconds)?;
    let rates = |wrote: &[Wrote]| {
        let rates: Vec<String> = wrote.iter().map(|wrote| format!("{:.0}", wrote.writes as f64 / seconds)).collect();
        rates.join(", ")
    };
    let note = format!("writes per second of each: {}; of the floor: {}", rates(&ours), rates(&floor));
    let floor_is = "the floor is bare connections with SQLite's stock busy handler".to_owned();
    Ok(vec![
        Figure {
            name: format!("SQLite FULL, {PROCESSES} processes: worst wait of one write"),
            unit: Unit::Nanos,
            ours: worst(&ours),
            floor: Some(worst(&floor)),
            judged: Judged::Ours,
            bound: Bound::AtMost(0.5e9),
            notes: vec![format!("each writes in a loop for {seconds} s; {floor_is}")],
        },
        Figure {
            name: format!("SQLite FULL, {PROCESSES} processes: smallest share, of an equal one"),
            unit: Unit::Share,
            ours: smallest_share(&ours),
            floor: Some(smallest_share(&floor)),
            judged: Judged::Ours,
            bound: Bound::AtLeast(0.5),
            notes: vec![note],
        },
    ])
}

fn together(work: &str, setup: &Setup, seconds: f64) -> Result<Vec<Wrote>> {
    let file = setup.sqlite_file();
    let file = file.to_string_lossy();
    let mut children = Vec::with_capacity(PROCESSES);
    for _ in 0..PROCESSES {
        // One after the other, so that the first makes the file; all begin together below.
        children.push(Child::start(&[work, &file, &seconds.to_string()])?);
    }
    for child in &mut children {
        child.begin()?;
    }
    children.into_iter().map(|child| Ok(serde_json::from_str(&child.report()?)?)).collect()
}

fn worst(wrote: &[Wrote]) -> f64 {
    wrote.iter().map(|wrote| wrote.worst_ns).max().unwrap_or(0) as f64
}

fn smallest_share(wrote: &[Wrote]) -> f64 {
    let all: u64 = wrote.iter().map(|wrote| wrote.writes).sum();
    let least = wrote.iter().map(|wrote| wrote.writes).min().unwrap_or(0);
    (least * wrote.len() as u64) as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_one_is_an_equal_one() {
        let wrote = |writes| Wrote { writes, worst_ns: writes };
        assert_eq!(smallest_share(&[wrote(5), wrote(5)]), 1.0);
        assert_eq!(smallest_share(&[wrote(1), wrote(3), wrote(4), wrote(0)]), 0.0);
        assert_eq!(worst(&[wrote(1), wrote(3)]), 3.0);
    }
}
