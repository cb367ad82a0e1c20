//! What happens to the command when taskonce is killed, stopped or signalled, or its guardian is.

use std::fs;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use taskonce_testkit::eventually;

use crate::harness::{Desk, PATIENCE, Started, children, lives};

/// The command must be gone within this time.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// On its first run it hangs with three processes: itself, a child, and one in a session of its own. Then it succeeds.
const HANGS_ONCE: &str = "\
if [ -e hung ]; then echo result; exit 0; fi
touch hung
sleep 600 & one=$!
setsid sh -c 'echo $$ >> pids; exec sleep 600' &
trap '' TERM INT HUP
printf '%s\\n%s\\n' $$ $one >> pids
while :; do wait; done
";

fn hang(desk: &Desk, more: &[&str]) -> Started {
    desk.script("task.sh", HANGS_ONCE);
    let call = desk.start(&[&["run", "--key", "a", "--lease", "1s"], more, &["--", "sh", "task.sh"]].concat());
    desk.await_lines("pids", 3);
    assert!(desk.pids().iter().all(|pid| lives(*pid)));
    call
}

fn assert_gone(pids: &[Pid], within: Duration) {
    assert!(eventually(within, || !pids.iter().any(|pid| lives(*pid))), "still there: {pids:?}");
}

#[test]
fn when_taskonce_is_killed_the_command_is_gone_within_a_second_and_the_next_call_takes_over_after_the_lease() {
    let desk = Desk::new();
    let call = hang(&desk, &[]);
    call.signal(Signal::KILL);
    assert_gone(&desk.pids(), GONE_WITHIN);
    assert_eq!(call.end().code, -9);
    let busy = desk.say(&["run", "--key", "a", "--lease", "1s", "--", "sh", "task.sh"]);
    assert!(matches!(busy.code, 75 | 0), "{busy:?}");
    let next = desk.say(&["run", "--key", "a", "--lease", "1s", "--wait", "30s", "--", "sh", "task.sh"]);
    assert_eq!((next.code, next.text().as_str()), (0, "result\n"), "{next:?}");
    let said = [busy.stderr, next.stderr].concat();
    assert!(said.contains("attempt 2 takes over; the run before ended without a word"), "{said}");
    assert!(said.contains("since its effect is `repeatable`"), "{said}");
}

#[test]
fn when_its_whole_process_group_is_killed_the_command_is_gone_too() {
    let desk = Desk::new();
    let call = hang(&desk, &[]);
    rustix::process::kill_process_group(call.pid(), Signal::KILL).unwrap();
    assert_gone(&desk.pids(), GONE_WITHIN);
}

#[test]
fn an_unrepeatable_task_whose_run_was_killed_is_parked() {
    let desk = Desk::new();
    let call = hang(&desk, &["--effect", "unrepeatable"]);
    call.signal(Signal::KILL);
    assert_gone(&desk.pids(), GONE_WITHIN);
    let args =
        ["run", "--key", "a", "--lease", "1s", "--effect", "unrepeatable", "--wait", "30s", "--", "sh", "task.sh"];
    let next = desk.say(&args);
    assert_eq!((next.code, next.stdout.len()), (77, 0), "{next:?}");
    assert!(next.stderr.contains("no heartbeat for the lease"), "{}", next.stderr);
    assert_eq!(desk.say(&["resolve", "a", "--not-done", "--reason", "looked"]).code, 0);
    assert_eq!(desk.say(&args).text(), "result\n");
}

#[test]
fn a_keyed_task_whose_run_was_killed_after_its_call_calls_again_with_the_same_key() {
    let desk = Desk::new();
    // The call, before the first run hangs.
    desk.script("task.sh", &format!("echo $TASKONCE_DOWNSTREAM_KEY >> calls\n{HANGS_ONCE}"));
    let args = ["run", "--key", "a", "--lease", "1s", "--effect", "keyed", "--wait", "30s", "--", "sh", "task.sh"];
    let call = desk.start(&args);
    desk.await_lines("pids", 3);
    call.signal(Signal::KILL);
    assert_gone(&desk.pids(), GONE_WITHIN);
    assert_eq!(desk.say(&args).text(), "result\n");
    let calls = fs::read_to_string(desk.path("calls")).unwrap();
    let [first, second] = calls.lines().collect::<Vec<_>>()[..] else { panic!("called twice: {calls}") };
    assert!(first == second && first.len() == 36, "{calls}");
}

#[test]
fn when_taskonce_is_stopped_past_its_lease_the_command_is_killed_and_the_claim_is_reported_lost() {
    let desk = Desk::new();
    let call = hang(&desk, &[]);
    call.signal(Signal::STOP);
    assert_gone(&desk.pids(), Duration::from_secs(1) + GONE_WITHIN);
    call.signal(Signal::CONT);
    let said = call.end();
    assert_eq!(said.code, 75, "{said:?}");
    assert!(said.stderr.contains("the claim on task `default/run@1/a` was lost while its command ran"), "{said:?}");
}

#[test]
fn a_stopped_taskonce_whose_task_was_taken_over_does_not_overwrite_it() {
    let desk = Desk::new();
    let call = hang(&desk, &[]);
    call.signal(Signal::STOP);
    let next = desk.say(&["run", "--key", "a", "--lease", "1s", "--wait", "30s", "--", "sh", "task.sh"]);
    assert_eq!((next.code, next.text().as_str()), (0, "result\n"), "{next:?}");
    assert_gone(&desk.pids(), GONE_WITHIN);
    call.signal(Signal::CONT);
    let said = call.end();
    assert_eq!(said.code, 75, "{said:?}");
    assert!(said.stderr.contains("it is now: done "), "{said:?}");
    assert_eq!(desk.say(&["run", "--key", "a", "--", "sh", "task.sh"]).text(), "result\n");
}

#[test]
fn a_run_longer_than_its_lease_keeps_its_claim() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; while [ ! -e go ]; do sleep 0.01; done");
    let args = ["run", "--key", "a", "--lease", "1500ms", "--", "sh", "task.sh"];
    let call = desk.start(&args);
    desk.await_lines("runs", 1);
    let age = || desk.say(&["show", "--json", "a"]).json()["in_state_ms"].as_u64().unwrap();
    assert!(eventually(PATIENCE, || age() > 3500));
    assert_eq!(desk.say(&args).code, 75, "it is held still");
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(call.end().code, 0);
    assert_eq!(desk.lines("runs"), 1);
}

#[test]
fn when_the_guardian_is_killed_the_command_is_killed_and_that_is_recorded() {
    let desk = Desk::new();
    let call = hang(&desk, &[]);
    let guards = children(call.pid());
    let [guard] = guards[..] else { panic!("one guardian: {guards:?}") };
    kill_process(guard, Signal::KILL).unwrap();
    assert_gone(&desk.pids(), GONE_WITHIN);
    let said = call.end();
    assert_eq!(said.code, 137, "{said:?}");
    assert!(said.stderr.contains("killed together with its guardian"), "{said:?}");
    assert_eq!(desk.say(&["show", "--json", "a"]).json()["failure"]["class"], "dropped");
}

#[test]
fn signals_are_passed_on_and_the_end_of_the_command_decides() {
    for (signal, name) in [
        (Signal::TERM, "TERM"),
        (Signal::INT, "INT"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
        (Signal::USR1, "USR1"),
    ] {
        let desk = Desk::new();
        desk.script(
            "task.sh",
            &format!("trap 'echo got {name}; exit 7' {name}; echo $$ > pids; while :; do sleep 0.01; done"),
        );
        let call = desk.start(&["run", "--key", "a", "--", "sh", "task.sh"]);
        desk.await_lines("pids", 1);
        call.signal(signal);
        let said = call.end();
        assert_eq!((said.code, said.text()), (7, format!("got {name}\n")), "{said:?}");
    }
}

#[test]
fn a_command_that_dies_of_a_signal_passed_on_failed_and_one_that_ignores_it_goes_on() {
    let desk = Desk::new();
    let dies = desk.start(&["run", "--key", "a", "--", "sh", "-c", "echo $$ > pids; exec sleep 600"]);
    desk.await_lines("pids", 1);
    dies.signal(Signal::TERM);
    let said = dies.end();
    assert_eq!(said.code, 143, "{said:?}");
    assert_eq!(desk.say(&["show", "--json", "a"]).json()["failure"]["message"], "ended by SIGTERM");

    let desk = Desk::new();
    desk.script("task.sh", "trap '' TERM; echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let ignores = desk.start(&["run", "--key", "a", "--", "sh", "task.sh"]);
    desk.await_lines("pids", 1);
    ignores.signal(Signal::TERM);
    fs::write(desk.path("go"), "").unwrap();
    let said = ignores.end();
    assert_eq!((said.code, said.text().as_str()), (0, "result\n"), "{said:?}");
}

#[test]
fn a_signal_that_taskonce_was_started_to_ignore_stays_ignored_for_the_command() {
    let desk = Desk::new();
    desk.script("task.sh", "grep SigIgn /proc/self/status");
    desk.script("outer.sh", "trap '' HUP; exec \"$1\" run --key a -- sh task.sh");
    let output = std::process::Command::new("sh")
        .args(["outer.sh", crate::harness::PROGRAM])
        .current_dir(desk.folder())
        .env("TASKONCE_STORE", desk.store())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mask = u64::from_str_radix(text.split_whitespace().nth(1).unwrap(), 16).unwrap();
    assert_eq!(mask & 1, 1, "{text}");
}

#[test]
fn a_task_that_kills_its_runner_every_time_is_parked() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; kill -9 $(cut -d' ' -f4 /proc/$PPID/stat); sleep 600");
    let args = ["run", "--key", "a", "--lease", "500ms", "--wait", "30s", "--", "sh", "task.sh"];
    for _ in 0..3 {
        assert_eq!(desk.say(&args).code, -9);
    }
    let said = desk.say(&args);
    assert_eq!(said.code, 77, "{said:?}");
    assert_eq!(desk.lines("runs"), 3);
}

/// The command went on, without anybody to record it, when both were killed at once.
#[test]
#[cfg(target_os = "linux")]
fn when_taskonce_and_its_guardian_are_killed_at_the_same_instant_the_command_is_gone_too() {
    for _ in 0..3 {
        let desk = Desk::new();
        let args =
            ["run", "--key", "a", "--lease", "1s", "--", "sh", "-c", "trap '' TERM; echo $$ > pids; exec sleep 600"];
        let call = desk.start(&args);
        desk.await_lines("pids", 1);
        let guards = children(call.pid());
        let [guard] = guards[..] else { panic!("one guardian: {guards:?}") };
        // Stopped first, so that neither sees the other's end.
        for pid in [call.pid(), guard] {
            kill_process(pid, Signal::STOP).unwrap();
        }
        for pid in [guard, call.pid()] {
            kill_process(pid, Signal::KILL).unwrap();
        }
        assert_gone(&desk.pids(), GONE_WITHIN);
    }
}

#[test]
fn a_command_has_its_own_name_and_no_descriptor_of_taskonces() {
    let desk = Desk::new();
    let script = "tr '\\0' ' ' < /proc/$$/cmdline; ls /proc/$$/fd";
    let bare =
        std::process::Command::new("sh").args(["-c", script]).stdin(std::process::Stdio::null()).output().unwrap();
    let said = desk.say(&["run", "--key", "a", "--", "sh", "-c", script]);
    assert!(said.text().starts_with("sh -c tr "), "{said:?}");
    assert_eq!(said.text(), String::from_utf8(bare.stdout).unwrap());
}

/// A redrive returned it to work, and the next call charged the card again.
#[test]
fn redrive_of_an_unrepeatable_task_whose_run_was_killed_parks_it_and_says_so() {
    let desk = Desk::new();
    let call = hang(&desk, &["--effect", "unrepeatable"]);
    call.signal(Signal::KILL);
    assert_gone(&desk.pids(), GONE_WITHIN);
    let sees = |text: &str| desk.say(&["show", "a"]).text().contains(text);
    assert!(eventually(PATIENCE, || sees("the lease of attempt 1 has passed, the next call parks it for a person")));
    let said = desk.say(&["redrive", "a", "--after-lease"]);
    assert_eq!((said.code, said.stdout.len()), (77, 0), "{said:?}");
    assert!(said.stderr.contains("parked: attempt 1 ended without a word"), "{}", said.stderr);
    assert!(said.stderr.contains("whether it took effect is in doubt"), "{}", said.stderr);
    assert!(said.stderr.contains("`taskonce resolve default/run@1/a --done"), "{}", said.stderr);
    let next = desk.say(&["run", "--key", "a", "--effect", "unrepeatable", "--", "sh", "task.sh"]);
    assert_eq!((next.code, next.stdout.len()), (77, 0), "{next:?}");
    assert!(next.stderr.contains("was parked "), "{}", next.stderr);
}
