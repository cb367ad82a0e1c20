//! The demo runs from the command line, kills its workers, and keeps what it promises.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn demo() -> Command {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_taskonce"));
    demo.arg("demo").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    demo
}

#[test]
fn a_small_demo_shows_four_columns_and_keeps_its_promises() {
    let run = demo().args(["--tasks", "40", "--seed", "7", "--json"]).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    let shown = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}{shown}");
    let report: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(report["seed"], 7);
    let columns = report["columns"].as_array().unwrap();
    let names: Vec<_> = columns.iter().map(|column| column["column"].as_str().unwrap()).collect();
    assert_eq!(names, ["recipe", "repeatable", "keyed", "transactional"]);
    for column in columns {
        assert_eq!(column["tasks"], 40, "{column}");
        assert_eq!(column["deliveries"], columns[0]["deliveries"], "all columns get the same load");
        assert!(column["kills"].as_u64().unwrap() > 0, "{column}");
    }
    for ours in &columns[1..] {
        assert_eq!((&ours["lost"], &ours["blocked"]), (&0.into(), &0.into()), "{ours}");
        assert!(ours["effects"].as_u64().unwrap() >= 40, "{ours}");
    }
    for once in &columns[2..] {
        assert_eq!((&once["effects"], &once["doubled"]), (&40.into(), &0.into()), "{once}");
    }
}

#[test]
fn an_interrupted_demo_ends_its_workers_and_removes_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut demo = demo().env("TMPDIR", folder.path()).spawn().unwrap();
    let workers_of = |pid: u32| {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let begun = Instant::now();
    while workers_of(demo.id()).len() < 8 {
        assert!(begun.elapsed() < Duration::from_secs(10), "the workers did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    let workers = workers_of(demo.id());
    let pid = rustix::process::Pid::from_raw(demo.id().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = demo.wait().unwrap();
    let mut said = String::new();
    demo.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(130), "{said}");
    for worker in workers {
        assert!(!std::path::Path::new(&format!("/proc/{worker}")).exists(), "worker {worker} is left");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the folder is left");
}

#[test]
fn the_demo_takes_a_store_and_a_queue_that_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let url = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
    let (store, source) = (url("tasks.db"), url("queue.db") + "?visibility=600ms");
    let run = demo().args(["--tasks", "20", "--json", "--store", &store, "--source", &source]).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    let names: Vec<_> = report["columns"].as_array().unwrap().iter().map(|column| &column["column"]).collect();
    assert_eq!(names, ["recipe", "repeatable", "keyed"]);
    assert!(said.contains("The transactional effect is left out"), "{said}");
    assert!(folder.path().join("tasks.db").exists() && folder.path().join("queue.db").exists());
}
