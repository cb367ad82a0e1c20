//! Stops: by a signal, by two, by a supervisor that replaces workers one after the other.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use taskonce::State;
use taskonce_testkit::eventually;

use crate::floor::Floor;
use crate::harness::{PATIENCE, lives};

/// For what a busy machine takes long for.
const LONG: Duration = Duration::from_secs(120);

#[test]
fn a_handler_that_no_worker_has_is_left_in_place() {
    let floor = Floor::new("command = ['true']");
    floor.send_to("mail@1", "a", "{}");
    floor.send("b", "{}");
    let worker = floor.work(&[]);
    floor.await_record("b", |record| record.state == State::Done);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    assert!(floor.record_of("mail", "a").is_none());
    assert_eq!((floor.depth().ready, floor.dead().len()), (1, 0));
}

#[test]
fn a_store_that_nothing_listens_at_is_told_before_there_is_a_task() {
    let floor = Floor::new("command = ['true']");
    let worker = floor.work(&["--store", "redis://127.0.0.1:1/0"]);
    floor.await_log("the store does not take how this worker stands");
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_stop_under_load_loses_no_task_and_counts_no_attempt_of_what_was_not_entered() {
    const ALL: usize = 1064;
    const AT_ONCE: usize = 64;
    let floor = Floor::new("command = ['sh', 'charge.sh']\nconcurrency_max = 64");
    // As long as `hold` is there each waits, then says what it did.
    floor.desk.script(
        "charge.sh",
        "echo $TASKONCE_KEY $TASKONCE_ATTEMPT >>begun\nwhile [ -e hold ]; do sleep 0.05; done\necho $TASKONCE_KEY >>effects\n",
    );
    floor.desk.script("hold", "");
    floor.send_many(ALL);
    let worker = floor.work(&[]);
    floor.desk.await_lines("begun", AT_ONCE);
    worker.signal(Signal::TERM);
    floor.await_log("stopping: nothing more is received");
    std::fs::remove_file(floor.desk.path("hold")).unwrap();
    assert_eq!(worker.end().code(), Some(0), "{}", floor.log());
    let begun = floor.desk.lines("begun");
    assert_eq!(begun, AT_ONCE);
    assert_eq!(floor.desk.lines("effects"), begun);
    // A pool is fast enough for the rest.
    std::fs::write(
        floor.desk.path("taskonce.toml"),
        floor.desk.read("taskonce.toml").replace("'charge.sh']", "'pool.sh']\nmode = 'pool'"),
    )
    .unwrap();
    floor.desk.script(
        "pool.sh",
        "while read -r line; do\n\
         id=${line#*:}; id=${id%%,*}; key=${line#*\\\"key\\\":\\\"}; key=${key%%\\\"*}\n\
         attempt=${line#*\\\"attempt\\\":}; attempt=${attempt%%,*}\n\
         echo $key $attempt >>begun; echo $key >>effects\n\
         echo \"{\\\"id\\\":$id,\\\"outcome\\\":\\\"done\\\"}\"\ndone\n",
    );
    let worker = floor.work(&[]);
    floor.await_worked_off(LONG);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    let effects = floor.desk.read("effects");
    let mut keys: Vec<&str> = effects.lines().collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((effects.lines().count(), keys.len()), (ALL, ALL));
    assert!(floor.desk.read("begun").lines().all(|line| line.ends_with(" 1")), "an attempt was counted");
}

#[test]
fn what_outlasts_the_grace_period_is_cut_off_and_told() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\nkill_after = '200ms'");
    floor.desk.script("charge.sh", "trap '' TERM\necho $$ >>pids\nwhile :; do sleep 600; done\n");
    floor.send("a", "{}");
    let worker = floor.work(&["--grace", "100ms", "--json"]);
    floor.desk.await_lines("pids", 1);
    let (code, _took) = worker.stop();
    assert_eq!(code, Some(75), "{}", floor.log());
    assert!(!floor.desk.pids().into_iter().any(lives));
    let report: serde_json::Value = serde_json::from_str(&floor.desk.read("out")).unwrap();
    assert_eq!((&report["cut_off"], &report["drained"]), (&1.into(), &0.into()));
    assert!(floor.log().lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{}", floor.log());
    let failed = floor.await_record("a", |record| record.state == State::Waiting);
    assert_eq!((failed.attempt, failed.crashes), (1, 0));
}

#[test]
fn a_second_signal_ends_a_worker_at_once_with_its_commands() {
    let floor = Floor::new("command = ['sh', 'charge.sh']");
    floor.desk.script("charge.sh", "trap '' TERM\necho $$ >>pids\nwhile :; do sleep 600; done\n");
    floor.send("a", "{}");
    let worker = floor.work(&["--grace", "10m"]);
    floor.desk.await_lines("pids", 1);
    worker.signal(Signal::TERM);
    floor.await_log("a second signal ends it at once");
    let start = Instant::now();
    worker.signal(Signal::INT);
    assert_eq!(worker.end().code(), Some(130), "{}", floor.log());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(!floor.desk.pids().into_iter().any(lives));
    // The attempt has failed, and was told: nobody has to wait for the lease.
    assert!(eventually(PATIENCE, || floor.record("a").is_some_and(|record| record.state == State::Waiting)));
}

#[test]
fn four_workers_that_are_replaced_one_after_the_other_under_load_do_each_task_once() {
    const ALL: usize = 600;
    let floor = Floor::new("command = ['sh', 'pool.sh']\nmode = 'pool'\nconcurrency_max = 4");
    floor.desk.script(
        "pool.sh",
        "while read -r line; do\n\
         id=${line#*:}; id=${id%%,*}; key=${line#*\\\"key\\\":\\\"}; key=${key%%\\\"*}\n\
         sleep 0.02; echo $key >>effects\n\
         echo \"{\\\"id\\\":$id,\\\"outcome\\\":\\\"done\\\"}\"\ndone\n",
    );
    floor.send_many(ALL);
    let mut workers: Vec<_> = (0..4).map(|_| floor.work(&[])).collect();
    for round in 0..4 {
        let done = (round + 1) * 20;
        floor.desk.await_lines("effects", done);
        let old = workers.remove(0);
        old.signal(Signal::TERM);
        workers.push(floor.work(&[]));
        assert_eq!(old.end().code(), Some(0), "{}", floor.log());
    }
    floor.await_worked_off(LONG);
    for worker in workers {
        assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    }
    let effects = floor.desk.read("effects");
    let mut keys: Vec<&str> = effects.lines().collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((effects.lines().count(), keys.len()), (ALL, ALL));
}
