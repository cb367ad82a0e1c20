//! The bench runs, and prints every figure. What the figures are is not tested: it depends on the machine.

use std::process::Command;

#[test]
fn a_quick_run_prints_every_figure() {
    let run = Command::new(env!("CARGO_BIN_EXE_taskonce-bench")).args(["--json", "--quick"]).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let count = |bench: &str| figures.iter().filter(|figure| figure["bench"] == bench).count();
    for (bench, expected) in [
        ("redis-fresh", 5),
        ("redis-duplicate", 5),
        ("valkey-fresh", 5),
        ("valkey-duplicate", 5),
        ("redis-trips", 3),
        ("sqlite-rate", 1),
        ("sqlite-processes", 2),
        ("sqlite-duplicate", 1),
        ("cache-duplicate", 1),
        ("key", 1),
        ("redis-memory", 1),
        ("redis-away", 4),
        ("redis-loss", 11),
        ("cluster-fresh", 2),
        ("failover", 4),
        ("postgres-fresh", 2),
        ("postgres-duplicate", 3),
        ("postgres-transaction", 1),
        ("postgres-heartbeats", 1),
        ("front-reads", 3),
        ("front-away", 1),
        ("idle", 2),
        ("pipeline-sqlite", 1),
        ("pipeline-takeover", 1),
        ("pipeline-redis", 1),
        ("pipeline-idle", 3),
    ] {
        assert_eq!(count(bench), expected, "{bench}: {said}");
    }
    for figure in figures {
        assert!(figure["ours"].as_f64().is_some_and(f64::is_finite), "{figure}");
    }
    // These do not depend on how fast the machine is.
    for figure in figures.iter().filter(|figure| figure["bench"] == "redis-trips") {
        assert_eq!(figure["reached"], true, "{figure}");
    }
}

#[test]
fn a_long_bench_runs_when_it_is_named() {
    for (bench, expected) in [("redis-10m", 2), ("postgres-10m", 1), ("soak", 4)] {
        let run =
            Command::new(env!("CARGO_BIN_EXE_taskonce-bench")).args(["--json", "--quick", bench]).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        let figures = report["figures"].as_array().unwrap();
        assert_eq!(figures.len(), expected, "{bench}: {said}");
        // Whether anything is left does not depend on how fast the machine is.
        for figure in figures.iter().filter(|figure| figure["name"].as_str().is_some_and(|name| name.ends_with("left")))
        {
            assert_eq!(figure["reached"], true, "{figure}");
        }
    }
}

#[test]
fn an_unknown_bench_is_named_as_such_with_those_that_there_are() {
    let run = Command::new(env!("CARGO_BIN_EXE_taskonce-bench")).arg("no-such-bench").output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&run.stderr).contains("redis-fresh"));
}
