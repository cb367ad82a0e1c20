//! What a call answers, and its exit code.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use taskonce::{Backoff, Effect, Failure, Handler, Input, Policy, Run};
use taskonce_testkit::{eventually, port};

use crate::harness::{Desk, PATIENCE, Said};

/// Says what every refusal must have.
fn assert_refusal(said: &Said, code: i32, text: &str) {
    assert_eq!(said.code, code, "{said:?}");
    assert!(said.stderr.contains(text), "{text} in {}", said.stderr);
    let last = said.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("hint: ") && last.len() > 12, "it ends with a hint: {}", said.stderr);
    assert!(said.stdout.is_empty(), "data only on stdout: {said:?}");
}

#[test]
fn a_failure_passes_its_exit_code_on_and_the_next_call_tries_again() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; [ -e repaired ] || exit 3");
    let args = ["run", "--key", "a", "--", "sh", "task.sh"];
    for attempt in 1..=7 {
        assert_refusal(&desk.say(&args), 3, &format!("failed: attempt {attempt}: exit code 3"));
    }
    fs::write(desk.path("repaired"), "").unwrap();
    assert_eq!(desk.say(&args).code, 0);
    assert_eq!(desk.say(&args).code, 0);
    assert_eq!(desk.lines("runs"), 8);
}

#[test]
fn attempts_are_made_in_one_call_with_backoff_and_then_the_task_is_dead() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; exit 4");
    let args = ["run", "--key", "a", "--attempts", "2", "--", "sh", "task.sh"];
    let said = desk.say(&args);
    assert_refusal(&said, 4, "dead: attempt 2 of 2 failed: exit code 4");
    assert!(said.stderr.contains("failed: attempt 1 of 2: exit code 4; the next starts in "), "{}", said.stderr);
    assert_refusal(&desk.say(&args), 76, "is dead");
    assert_eq!(desk.lines("runs"), 2);
}

#[test]
fn an_attempt_that_succeeds_ends_the_retries() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; [ $TASKONCE_ATTEMPT = 2 ]");
    assert_eq!(desk.say(&["run", "--key", "a", "--attempts", "5", "--", "sh", "task.sh"]).code, 0);
    assert_eq!(desk.lines("runs"), 2);
}

#[test]
fn a_signal_ends_the_attempts_whenever_it_comes() {
    // It comes between two attempts, while the command runs, or while its end is written: each is right here.
    for _ in 0..3 {
        let desk = Desk::new();
        let args = ["run", "--key", "a", "--attempts", "99", "--", "sh", "-c", "echo x >> runs; exit 5"];
        let mut call = desk.start(&args);
        desk.await_lines("runs", 3);
        call.signal(Signal::TERM);
        assert!(eventually(PATIENCE, || call.has_ended()));
        let said = call.end();
        assert!(matches!(said.code, 5 | 143), "{said:?}");
    }
}

#[test]
fn another_payload_under_the_same_key_is_a_mismatch_with_both_fingerprints() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--", "echo", "1"]).code, 0);
    let said = desk.say(&["run", "--key", "a", "--", "echo", "2"]);
    assert_refusal(&said, 65, "is in use for another payload");
    let print = |word: &str| {
        desk.say(&["key", "--json", "--key", "a", "--", "echo", word]).json()["fingerprint"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(said.stderr.contains(&print("1")) && said.stderr.contains(&print("2")), "{}", said.stderr);
    assert_eq!(desk.say(&["run", "--key", "a", "--version", "2", "--", "echo", "2"]).text(), "2\n");
}

#[test]
fn a_busy_task_says_who_holds_it_and_for_how_long() {
    let desk = Desk::new();
    desk.script("task.sh", "echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let args = ["run", "--key", "a", "--", "sh", "task.sh"];
    let first = desk.start(&args);
    desk.await_lines("pids", 1);
    let said = desk.say(&args);
    assert_refusal(&said, 75, "is running elsewhere");
    assert!(said.stderr.contains(&format!("/{}/", first.pid().as_raw_nonzero())), "{}", said.stderr);
    assert!(said.stderr.contains("attempt 1, lease ends in 30 s") || said.stderr.contains("lease ends in 29 s"));

    let waited = desk.say(&["run", "--key", "a", "--wait", "50ms", "--", "sh", "task.sh"]);
    assert_refusal(&waited, 75, "it is still so after 50 ms");

    let waiter = desk.start(&["run", "--key", "a", "--wait", "30s", "--", "sh", "task.sh"]);
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(first.end().text(), "result\n");
    let replayed = waiter.end();
    assert_eq!((replayed.code, replayed.text().as_str()), (0, "result\n"));
    assert!(replayed.stderr.contains("replayed: done "), "{}", replayed.stderr);
}

#[test]
fn a_signal_while_it_waits_ends_the_call_and_leaves_no_claim() {
    let desk = Desk::new();
    desk.script("task.sh", "echo $$ >> pids; while [ ! -e go ]; do sleep 0.01; done");
    let first = desk.start(&["run", "--key", "a", "--", "sh", "task.sh"]);
    desk.await_lines("pids", 1);
    let waiter = desk.start(&["run", "--key", "a", "--wait", "1h", "--", "sh", "task.sh"]);
    // It is past its set-up when it has asked the store, which makes its handlers.
    assert!(eventually(PATIENCE, || handles(&waiter, Signal::TERM)));
    waiter.signal(Signal::TERM);
    let said = waiter.end();
    assert_eq!(said.code, 143, "{said:?}");
    assert!(said.stderr.contains("interrupted by SIGTERM while no command ran"), "{}", said.stderr);
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(first.end().code, 0);
}

fn handles(call: &crate::harness::Started, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", call.pid().as_raw_nonzero())).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << (signal.as_raw() - 1)) != 0
}

#[test]
fn a_waiting_task_says_how_long_and_why() {
    let desk = Desk::new();
    let task = Handler::new("run", "1").unwrap().task("a", &Input::from_json(br#"["true"]"#).unwrap()).unwrap();
    let delay = Duration::from_secs(3600);
    let policy = Policy {
        backoff: Backoff { delay_min: delay, delay_max: delay, factor: 1.0 },
        ..Policy::new(Effect::Repeatable)
    };
    let ledger = taskonce::open(desk.store()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcome =
        runtime.block_on(ledger.run(&task, &policy, |_| async { Err::<(), _>(Failure::retryable("no luck")) }));
    assert_eq!(outcome.unwrap().name(), "failed");
    let said = desk.say(&["run", "--key", "a", "--", "true"]);
    assert_refusal(&said, 75, "waits for its next attempt, which may start in ");
    assert!(said.stderr.contains("no luck"), "{}", said.stderr);

    let resolve = desk.say(&["resolve", "a", "--done", "--reason", "x"]);
    assert_refusal(&resolve, 1, "is waiting and cannot be resolved");
    assert!(resolve.stderr.contains("`taskonce redrive default/run@1/a` ends its delay"), "{}", resolve.stderr);
    assert_eq!(desk.say(&["redrive", "a", "--reason", "the cause is repaired"]).code, 0);
    assert_eq!(desk.say(&["run", "--key", "a", "--", "true"]).code, 0, "it need not wait any more");
}

#[test]
fn an_unrepeatable_effect_that_failed_is_parked_until_a_person_decides() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; exit 9");
    let args = ["run", "--key", "a", "--effect", "unrepeatable", "--", "sh", "task.sh"];
    assert_refusal(&desk.say(&args), 9, "parked: attempt 1 failed: exit code 9");
    let parked = desk.say(&args);
    assert_refusal(&parked, 77, "whether it took effect is in doubt");
    assert!(parked.stderr.contains("taskonce resolve") && parked.stderr.contains("taskonce redrive"));
    assert_eq!(desk.lines("runs"), 1);
}

#[test]
fn a_command_that_cannot_be_started_did_nothing_so_that_even_an_unrepeatable_task_waits() {
    let desk = Desk::new();
    let missing = ["run", "--key", "a", "--effect", "unrepeatable", "--", "no-such-command"];
    assert_refusal(&desk.say(&missing), 127, "command not found: no-such-command; nothing happened");
    fs::write(desk.path("data"), "").unwrap();
    let data = ["run", "--key", "b", "--effect", "unrepeatable", "--", "./data"];
    assert_refusal(&desk.say(&data), 126, "command cannot be started: ./data: Permission denied");
    for key in ["a", "b"] {
        assert_eq!(desk.say(&["show", "--json", key]).json()["state"], "waiting");
    }
}

#[test]
fn a_command_ended_by_a_signal_is_a_failure_with_a_shells_exit_code() {
    let desk = Desk::new();
    assert_refusal(&desk.say(&["run", "--key", "a", "--", "sh", "-c", "kill -SEGV $$"]), 139, "ended by SIGSEGV");
}

#[test]
fn a_store_that_is_away_is_69_and_nothing_runs() {
    let nobody = format!("redis://ada:hunter2@127.0.0.1:{}", port::free().unwrap());
    let desk = Desk::over(&nobody);
    let said = desk.say(&["run", "--key", "a", "--", "sh", "-c", "echo run >> runs"]);
    assert_refusal(&said, 69, "error: ");
    assert!(!said.stderr.contains("hunter2"), "{}", said.stderr);
    assert_eq!(desk.lines("runs"), 0);
    assert_refusal(&desk.say(&["show", "a"]), 69, "error: ");
    let doctor = desk.say(&["doctor"]);
    assert_eq!(doctor.code, 69);
    assert!(!doctor.text().contains("hunter2") && doctor.text().contains("fault"), "{}", doctor.text());
}

#[test]
fn wrong_settings_are_78() {
    for url in ["tasks.db", "mysql://h/x", "postgres://h/x?secret=hunter2", "sqlite:", "redis://h/x?secret=hunter2"] {
        let said = Desk::over(url).say(&["run", "--key", "a", "--", "true"]);
        assert_refusal(&said, 78, "error: ");
        assert!(!said.stderr.contains("hunter2"), "{}", said.stderr);
    }
    let desk = Desk::new();
    assert_refusal(&desk.say(&["run", "--key", "a", "--lease", "100ms", "--", "true"]), 78, "lease is 100ms");
    assert_refusal(&desk.say(&["run", "--key", "a", "--retain", "1s", "--", "true"]), 78, "is below the lease");
}

#[test]
fn of_many_calls_at_once_exactly_one_runs() {
    let desk = Desk::new();
    desk.script("task.sh", "echo run >> runs; sleep 0.2; echo result");
    let args = ["run", "--key", "a", "--wait", "30s", "--", "sh", "task.sh"];
    let calls: Vec<_> = (0..8).map(|_| desk.start(&args)).collect();
    let said: Vec<Said> = calls.into_iter().map(crate::harness::Started::end).collect();
    assert!(said.iter().all(|said| said.code == 0 && said.text() == "result\n"), "{said:?}");
    assert_eq!(said.iter().filter(|said| said.stderr.contains("replayed: ")).count(), 7);
    assert_eq!(desk.lines("runs"), 1);
}

#[test]
fn refusals_are_objects_too_where_json_is_asked_for() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--", "true"]).code, 0);
    let mismatch = desk.say(&["run", "--json", "--key", "a", "--", "false"]);
    let json = mismatch.json();
    assert_eq!((mismatch.code, &json["outcome"], &json["exit_code"]), (65, &"mismatch".into(), &65.into()));
    assert!(json["error"]["hint"].as_str().is_some_and(|hint| !hint.is_empty()));
    let failed = desk.say(&["run", "--json", "--key", "b", "--", "sh", "-c", "exit 3"]).json();
    assert_eq!(
        (&failed["outcome"], &failed["exit_code"], &failed["state"]),
        (&"failed".into(), &3.into(), &"waiting".into())
    );
    let usage = desk.say(&["run", "--json", "--key", "a"]);
    assert_eq!((usage.code, &usage.json()["error"]["exit_code"]), (64, &64.into()));
}

#[test]
fn a_field_of_the_fingerprint_that_changes_under_one_derived_key_is_a_mismatch() {
    let desk = Desk::new();
    let choice = ["--input", "-", "--include", "/order", "--fingerprint", "/cents"];
    let run = |input: &str| {
        desk.say_with(&[&["run"][..], &choice, &["--", "sh", "-c", "cat; echo run >> runs"]].concat(), input.as_bytes())
    };
    let first = r#"{"order": 7, "cents": 1200, "sent_at": "10:00"}"#;
    assert_eq!(run(first).code, 0);
    let again = run(r#"{"order": 7, "cents": 1200, "sent_at": "11:00"}"#);
    assert_eq!((again.code, again.text().as_str()), (0, first), "what is not chosen may change");
    assert_refusal(&run(r#"{"order": 7, "cents": 9900}"#), 65, "is in use for another payload");
    assert_refusal(&run(r#"{"order": 7}"#), 64, "/cents");
    assert_eq!(desk.lines("runs"), 1);

    let key = |input: &str| desk.say_with(&[&["key", "--json"][..], &choice].concat(), input.as_bytes()).json();
    let (one, other) = (key(first), key(r#"{"order": 7, "cents": 9900}"#));
    assert_eq!(one["key"], other["key"]);
    assert_ne!(one["fingerprint"], other["fingerprint"]);
    assert_eq!(desk.say(&["show", "--json", one["key"].as_str().unwrap()]).json()["fingerprint"], one["fingerprint"]);

    let whole = desk.say_with(&["run", "--input", "-", "--fingerprint", "/cents", "--", "true"], first.as_bytes());
    assert_refusal(&whole, 64, "the whole input makes the key");
    assert_refusal(&desk.say(&["run", "--key", "a", "--fingerprint", "/x", "--", "true"]), 64, "error: ");
}
