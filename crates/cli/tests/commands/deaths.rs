//! Workers and commands that die, hang, or do not want to end.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use taskonce::{FailureClass, State};
use taskonce_testkit::eventually;

use crate::floor::{Floor, LEASE, VISIBILITY};
use crate::harness::{PATIENCE, lives};

/// What a busy machine may add.
const SLACK: Duration = Duration::from_secs(2);

#[test]
fn the_commands_of_a_killed_worker_die_and_another_worker_takes_over() {
    let floor = Floor::new("command = ['sh', 'charge.sh']");
    // The first attempt hangs, with a child of its own.
    floor.desk.script(
        "charge.sh",
        "echo $$ >>pids\n[ $TASKONCE_ATTEMPT = 1 ] || { echo effect >>effects; exit 0; }\nsleep 600 & echo $! >>pids\nwait\n",
    );
    floor.send("a", "{}");
    let first = floor.work(&[]);
    floor.desk.await_lines("pids", 2);
    first.signal(Signal::KILL);
    let killed = Instant::now();
    let pids = floor.desk.pids();
    assert!(eventually(PATIENCE, || !pids.iter().any(|pid| lives(*pid))), "{pids:?}");
    let second = floor.work(&[]);
    floor.desk.await_lines("effects", 1);
    // One of both has to pass: they were renewed at different moments.
    assert!(killed.elapsed() < LEASE.max(VISIBILITY) + Duration::from_secs(1) + SLACK, "{:?}", killed.elapsed());
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!((done.attempt, done.crashes), (2, 1));
    floor.await_worked_off(PATIENCE);
    assert_eq!(second.stop().0, Some(0), "{}", floor.log());
    assert_eq!(floor.desk.lines("effects"), 1);
}

#[test]
fn a_command_that_kills_its_worker_every_time_is_parked_and_the_others_go_on() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\ncrashes_max = 2");
    floor.desk.script(
        "charge.sh",
        "case $TASKONCE_KEY in */poison) kill -9 $PPID; sleep 600 ;; *) echo $TASKONCE_KEY >>effects ;; esac\n",
    );
    floor.send("poison", "{}");
    let mut starts = 0;
    let mut worker = floor.work(&[]);
    let parked = eventually(PATIENCE, || {
        if worker.has_ended() {
            starts += 1;
            worker = floor.work(&[]);
        }
        floor.record("poison").is_some_and(|record| record.state == State::Parked)
    });
    assert!(parked, "{:?}\n{}", floor.record("poison"), floor.log());
    assert_eq!(starts, 2, "{}", floor.log());
    floor.send("b", "{}");
    floor.await_record("b", |record| record.state == State::Done);
    assert!(eventually(PATIENCE, || floor.dead().len() == 1), "{:?}", floor.dead());
    assert_eq!(&*floor.dead()[0].death.reason, "parked");
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_command_that_hangs_and_ignores_sigterm_is_killed_and_its_attempt_has_failed() {
    let floor =
        Floor::new("command = ['sh', 'charge.sh']\nrun_max = '1500ms'\nkill_after = '500ms'\npoison_attempts_max = 2");
    floor.desk.script("charge.sh", "trap '' TERM\necho $$ >>pids\nwhile :; do sleep 600; done\n");
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    let dead = floor.await_record("a", |record| record.state == State::Dead);
    assert_eq!(dead.failure.as_ref().unwrap().class, FailureClass::RanTooLong);
    assert_eq!(dead.attempt, 2);
    let pids = floor.desk.pids();
    assert_eq!(pids.len(), 2);
    assert!(eventually(PATIENCE, || !pids.iter().any(|pid| lives(*pid))), "{pids:?}");
    floor.await_log("did not end when it was asked to, and is killed");
    // The second was started when the first was gone.
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_command_is_asked_to_end_before_it_is_killed() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\nrun_max = '500ms'\nattempts_max = 1");
    floor.desk.script("charge.sh", "trap 'echo asked >>asked; exit 1' TERM\nsleep 600 &\nwait\n");
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    floor.desk.await_lines("asked", 1);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    assert!(!floor.log().contains("is killed"), "{}", floor.log());
}
