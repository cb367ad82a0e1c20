//! What people do with tasks beside running them: pages, changes, purge, doctor.

use std::fs;

use taskonce::{By, Effect, Failure, Handler, Input, Policy, Run};
use taskonce_testkit::eventually;

use crate::harness::{Desk, PATIENCE};

#[test]
fn a_list_goes_on_where_the_page_before_stopped_without_gaps_or_repeats() {
    let desk = Desk::new();
    for number in 0..7 {
        assert_eq!(desk.say(&["run", "--key", &format!("k{number}"), "--", "true"]).code, 0);
    }
    let mut keys = Vec::new();
    let mut cursor: Option<String> = None;
    for _ in 0..10 {
        let mut args = vec!["list", "--json", "--limit", "3"];
        args.extend(cursor.as_deref().map(|cursor| ["--cursor", cursor]).into_iter().flatten());
        let page = desk.say(&args).json();
        let tasks = page["tasks"].as_array().unwrap();
        assert!(tasks.len() <= 3);
        keys.extend(tasks.iter().map(|task| task["key"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    keys.sort_unstable();
    assert_eq!(keys, (0..7).map(|number| format!("default/run@1/k{number}")).collect::<Vec<_>>());
}

#[test]
fn a_running_task_cannot_be_redriven_and_the_refusal_says_who_holds_it() {
    let desk = Desk::new();
    desk.script("task.sh", "echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done");
    let call = desk.start(&["run", "--key", "a", "--", "sh", "task.sh"]);
    desk.await_lines("pids", 1);
    let said = desk.say(&["redrive", "a"]);
    assert_eq!(said.code, 1);
    let lines: Vec<&str> = said.stderr.lines().collect();
    assert_eq!(lines[0], "error: task `default/run@1/a` is running and cannot be redriven");
    assert!(lines[1].starts_with("  held by  ") && lines[1].contains(", attempt 1, lease ends in "), "{}", lines[1]);
    assert_eq!(lines[2], "hint: wait for the lease to end, or pass `--after-lease` to wait for it here");

    let shown = desk.say(&["show", "a"]).text();
    assert!(shown.contains("running for ") && shown.contains("lease ") && shown.contains("last beat "), "{shown}");
    let resolved = desk.say(&["resolve", "a", "--done", "--reason", "x"]);
    assert!(resolved.code == 1 && resolved.stderr.contains("is running and cannot be resolved"), "{resolved:?}");
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(call.end().code, 0);
}

#[test]
fn redrive_after_lease_waits_until_a_dead_holders_lease_has_passed() {
    let desk = Desk::new();
    desk.script("task.sh", "[ -e go ] && exit 0; echo $$ > pids; exec sleep 600");
    let call = desk.start(&["run", "--key", "a", "--lease", "2s", "--", "sh", "task.sh"]);
    desk.await_lines("pids", 1);
    call.signal(rustix::process::Signal::KILL);
    call.end();
    fs::write(desk.path("go"), "").unwrap();
    let said = desk.say(&["redrive", "a", "--after-lease", "--reason", "its host is gone"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.stderr.contains("waiting for the lease to end"), "{}", said.stderr);
    let record = desk.say(&["show", "--json", "a"]).json();
    assert_eq!((&record["state"], &record["attempt"]), (&"waiting".into(), &0.into()));
    let event = record["history"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&event["kind"], &event["note"]), (&"redriven".into(), &"its host is gone".into()));
    assert!(event["who"].as_str().unwrap().starts_with("ada@"), "{event}");
    assert_eq!(desk.say(&["run", "--key", "a", "--lease", "2s", "--", "sh", "task.sh"]).code, 0);
}

#[test]
fn purge_removes_what_is_past_its_retention_and_counts_it_first() {
    let desk = Desk::new();
    for key in ["a", "b"] {
        let args = ["run", "--key", key, "--lease", "500ms", "--retain", "500ms", "--attempts", "1", "--", "true"];
        assert_eq!(desk.say(&args).code, 0);
    }
    assert_eq!(desk.say(&["run", "--key", "c", "--", "true"]).code, 0);
    let due = || desk.say(&["purge", "--dry-run", "--json"]).json()["would_remove_records"].as_u64();
    assert!(eventually(PATIENCE, || due() == Some(2)));
    assert_eq!(desk.say(&["purge", "--json", "--prefix", "b"]).json()["records"], 1);
    assert_eq!(desk.say(&["purge", "--json"]).json()["records"], 1);
    assert_eq!(desk.say(&["purge", "--json"]).json()["records"], 0);
    assert_eq!(desk.say(&["show", "c"]).code, 0);
    assert_eq!(desk.say(&["show", "a"]).code, 1);
}

#[test]
fn the_fence_is_a_string_in_json_and_grows_in_the_store() {
    let desk = Desk::new();
    let fence = |key: &str| {
        assert_eq!(desk.say(&["run", "--key", key, "--", "true"]).code, 0);
        let record = desk.say(&["show", "--json", key]).json();
        record["fence"].as_str().unwrap().parse::<u64>().unwrap()
    };
    assert!(fence("a") < fence("b"));
}

#[test]
fn doctor_finds_a_sound_store_sound_and_a_damaged_one_not() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--", "true"]).code, 0);
    let sound = desk.say(&["doctor"]);
    assert_eq!(sound.code, 0, "{sound:?}");
    assert!(sound.text().contains("store sqlite:") && sound.text().contains("journal"), "{}", sound.text());
    let json = desk.say(&["doctor", "--json"]).json();
    assert!(json["findings"].as_array().is_some_and(|findings| findings.len() > 3));
    assert!(json["healthy"].is_boolean());

    fs::write(desk.path("tasks.db"), vec![b'x'; 9000]).unwrap();
    for aside in ["tasks.db-wal", "tasks.db-shm"] {
        let _missing = fs::remove_file(desk.path(aside));
    }
    let damaged = desk.say(&["doctor"]);
    assert_eq!(damaged.code, 69, "{damaged:?}");
    let run = desk.say(&["run", "--key", "a", "--", "true"]);
    assert!(run.code == 69 && run.stderr.lines().last().unwrap().starts_with("hint: "), "{run:?}");
}

/// Texts from other programs could clear the screen of whoever looked at a task, or add lines to its history.
#[test]
fn text_from_outside_cannot_move_the_terminal_or_forge_lines() {
    let desk = Desk::new();
    let evil = "x\n  forged line\u{1b}[2J\u{9b}2J\u{202e}\r";
    let id = "i\u{202e}d";
    let handler = Handler::new("run", "1").unwrap();
    let task = handler.task(id, &Input::from_json(br#"["true"]"#).unwrap()).unwrap();
    let policy = Policy { attempts_max: 1, ..Policy::new(Effect::Repeatable) };
    let ledger = taskonce::open(desk.store()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let fails = || runtime.block_on(ledger.run(&task, &policy, |_| async { Err::<(), _>(Failure::retryable(evil)) }));
    assert_eq!(fails().unwrap().name(), "failed");
    runtime.block_on(ledger.redrive(&task.key, By { who: evil, why: evil })).unwrap();
    assert_eq!(fails().unwrap().name(), "failed");

    for args in [
        &["show", id][..],
        &["show", "--json", id],
        &["list"],
        &["list", "--json"],
        &["run", "--key", id, "--", "true"],
        &["run", "--key", id, "--", "false"],
        &["resolve", id, "--done", "--reason", "x"],
        &["show", "other\u{202e}"],
        &["clear", id, "--reason", "x"],
        &["show", id],
    ] {
        let said = desk.say(args);
        let all = said.text() + &said.stderr;
        let bad = all.chars().find(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}');
        assert!(bad.is_none() && !all.contains("\n  forged"), "{args:?}: {bad:?} in {all:?}");
    }
}

/// It was told that its process had been stopped or the store was away.
#[test]
fn a_run_whose_record_is_cleared_is_told_who_removed_it() {
    let desk = Desk::new();
    let call = desk.start(&["run", "--key", "a", "--lease", "1s", "--", "sh", "-c", "echo $$ > pids; exec sleep 600"]);
    desk.await_lines("pids", 1);
    assert_eq!(desk.say(&["clear", "a", "--reason", "wrong invoice"]).code, 0);
    let said = call.end();
    assert_eq!(said.code, 75, "{said:?}");
    assert!(said.stderr.contains("was lost while its command ran; the command was killed"), "{}", said.stderr);
    assert!(
        said.stderr.contains("its record was removed:\n") && said.stderr.contains(": wrong invoice"),
        "{}",
        said.stderr
    );
    assert!(!said.stderr.contains("was stopped"), "{}", said.stderr);
}

#[test]
fn what_is_not_found_hints_at_where_else_it_may_be() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--handler", "send", "--", "true"]).code, 0);
    let absent = desk.say(&["show", "a"]);
    assert_eq!(absent.code, 1);
    for hint in ["`--handler`", "`taskonce list --prefix a`"] {
        assert!(absent.text().contains(hint), "{absent:?}");
        assert!(desk.say(&["redrive", "a"]).stderr.contains(hint));
    }
    let short = desk.say(&["show", "default/send/a"]);
    assert!(short.text().contains("a key in full is `namespace/handler@version/id`"), "{short:?}");
    let clear = desk.say(&["clear", "default/send/a", "--reason", "x"]);
    assert!(clear.code == 1 && clear.stderr.contains("a key in full is "), "{clear:?}");
}

#[test]
fn notes_of_clears_are_listed_only_when_they_are_asked_for() {
    let desk = Desk::new();
    for key in ["a", "b"] {
        assert_eq!(desk.say(&["run", "--key", key, "--", "true"]).code, 0);
    }
    assert_eq!(desk.say(&["clear", "a", "--reason", "x"]).code, 0);
    let keys = |args: &[&str]| -> Vec<String> {
        let json = desk.say(args).json();
        json["tasks"].as_array().unwrap().iter().map(|task| task["key"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(keys(&["list", "--json"]), ["default/run@1/b"]);
    assert_eq!(keys(&["list", "--json", "--limit", "1"]), ["default/run@1/b"]);
    let notes = keys(&["list", "--json", "--namespace", "taskonce"]);
    assert!(notes.len() == 1 && notes[0].starts_with("taskonce/clear@1/"), "{notes:?}");
}

#[test]
fn a_cursor_that_no_page_gave_is_wrong_usage() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--", "true"]).code, 0);
    let said = desk.say(&["list", "--cursor", "\u{7f}x"]);
    assert_eq!(said.code, 64, "{said:?}");
    assert!(said.stderr.lines().last().unwrap().starts_with("hint: "), "{}", said.stderr);
}
