//! What a duplicate gets: the first run's output, byte for byte.

use std::fs;

use taskonce_testkit::eventually;

use crate::harness::{Desk, PATIENCE};

#[test]
fn a_duplicate_gets_stdout_and_stderr_byte_for_byte_and_the_command_does_not_run() {
    let desk = Desk::new();
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    fs::write(desk.path("out.bin"), &bytes).unwrap();
    desk.script("task.sh", "echo ran >> runs; cat out.bin; printf 'to stderr\\r\\n' >&2");
    let args = ["run", "--key", "a", "--", "sh", "task.sh"];
    let first = desk.say(&args);
    assert_eq!((first.code, &first.stdout, first.stderr.as_str()), (0, &bytes, "to stderr\r\n"));
    let second = desk.say(&args);
    assert_eq!((second.code, &second.stdout), (0, &bytes));
    let rest = second.stderr.strip_prefix("to stderr\r\n").unwrap();
    assert!(rest.starts_with("replayed: done "), "{rest}");
    assert!(rest.trim_end().ends_with(", attempt 1"), "{rest}");
    assert_eq!(desk.lines("runs"), 1);
}

#[test]
fn empty_output_is_replayed_as_empty() {
    let desk = Desk::new();
    for _ in 0..2 {
        let said = desk.say(&["run", "--key", "a", "--", "true"]);
        assert_eq!((said.code, said.stdout.len()), (0, 0));
    }
}

#[test]
fn output_is_seen_while_the_command_runs() {
    let desk = Desk::new();
    desk.script("task.sh", "echo early; while [ ! -e go ]; do sleep 0.01; done; echo late");
    let out = fs::File::create(desk.path("seen")).unwrap();
    let mut child = desk.command(&["run", "--key", "a", "--", "sh", "task.sh"]).stdout(out).spawn().unwrap();
    assert!(eventually(PATIENCE, || desk.read("seen") == "early\n"), "{:?}", desk.read("seen"));
    fs::write(desk.path("go"), "").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(desk.read("seen"), "early\nlate\n");
}

#[test]
fn output_above_the_limit_is_cut_and_both_the_run_and_the_replay_say_so() {
    let desk = Desk::new();
    let args = ["run", "--key", "a", "--output-max", "1KiB", "--", "head", "-c", "5000", "/dev/zero"];
    let first = desk.say(&args);
    assert_eq!((first.code, first.stdout.len()), (0, 5000));
    assert!(first.stderr.contains("only the first 1 KiB of 4.9 KiB of stdout are kept"), "{}", first.stderr);
    let second = desk.say(&args);
    assert_eq!((second.code, second.stdout.len()), (0, 1024));
    assert!(second.stderr.contains("only the first 1 KiB of 4.9 KiB of stdout are kept"), "{}", second.stderr);
}

#[test]
fn without_output_only_the_fact_is_kept() {
    let desk = Desk::new();
    let args = ["run", "--key", "a", "--no-output", "--", "sh", "-c", "echo ran >> runs; echo hello"];
    assert_eq!(desk.say(&args).text(), "hello\n");
    let second = desk.say(&args);
    assert_eq!((second.code, second.text().as_str(), desk.lines("runs")), (0, "", 1));
    assert!(second.stderr.contains("its output is not kept: as the first run asked"), "{}", second.stderr);
}

#[test]
fn a_reader_that_goes_away_does_not_end_the_command() {
    let desk = Desk::new();
    desk.script("task.sh", "head -c 300000 /dev/zero; echo ran >> runs");
    let mut child = desk.command(&["run", "--key", "a", "--", "sh", "task.sh"]).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(desk.lines("runs"), 1);
    assert_eq!(desk.say(&["run", "--key", "a", "--", "sh", "task.sh"]).stdout.len(), 300_000);
}

#[test]
fn a_process_left_behind_does_not_hold_the_call() {
    let desk = Desk::new();
    desk.script("task.sh", "sleep 600 & echo $! > pids; echo done");
    let said = desk.say(&["run", "--key", "a", "--", "sh", "task.sh"]);
    assert_eq!((said.code, said.text().as_str()), (0, "done\n"));
    let [left] = desk.pids()[..] else { panic!("one process was left") };
    assert!(crate::harness::lives(left), "what a successful command leaves behind is let be");
    rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn the_command_gets_its_key_fence_attempt_and_downstream_key() {
    let desk = Desk::new();
    let command = "echo $TASKONCE_KEY $TASKONCE_ATTEMPT $TASKONCE_FENCE; echo $TASKONCE_DOWNSTREAM_KEY > down; [ $TASKONCE_ATTEMPT = 2 ]";
    let args =
        ["run", "--key", "a b", "--handler", "h", "--namespace", "n", "--version", "7", "--", "sh", "-c", command];
    assert_eq!(desk.say(&args).text(), "n/h@7/a b 1 1\n");
    let first = desk.read("down");
    assert_eq!(desk.say(&args).text(), "n/h@7/a b 2 2\n");
    assert_eq!(desk.read("down"), first, "the downstream key is the same in every attempt");
    let key =
        desk.say(&["key", "--json", "--key", "a b", "--handler", "h", "--namespace", "n", "--version", "7"]).json();
    assert_eq!(key["downstream_key"], first.trim());
}

#[test]
fn an_input_names_the_task_by_its_chosen_fields_and_goes_to_the_command() {
    let desk = Desk::new();
    let args = ["run", "--input", "-", "--include", "/order/id", "--optional", "/part", "--", "cat"];
    let one = br#"{"order": {"id": 9007199254740993}, "sent_at": 1}"#;
    let again = br#"{"sent_at": 2, "order": {"id": 9007199254740993}}"#;
    let other = br#"{"order": {"id": 9007199254740992}, "sent_at": 1}"#;
    assert_eq!(desk.say_with(&args, one).stdout, one);
    let replayed = desk.say_with(&args, again);
    assert_eq!(replayed.stdout, one);
    assert!(replayed.stderr.contains("replayed: "), "{}", replayed.stderr);
    assert_eq!(desk.say_with(&args, other).stdout, other, "64-bit ids do not collapse");

    fs::write(desk.path("in.json"), one).unwrap();
    let file = ["run", "--input", "in.json", "--include", "/order/id", "--optional", "/part", "--", "cat"];
    assert!(desk.say(&file).stderr.contains("replayed: "));
}

#[test]
fn a_large_input_reaches_a_command_that_reads_it_and_harms_none_that_does_not() {
    let desk = Desk::new();
    let input = format!("\"{}\"", "x".repeat(1_000_000));
    assert_eq!(desk.say_with(&["run", "--input", "-", "--", "wc", "-c"], input.as_bytes()).text().trim(), "1000002");
    let said = desk.say_with(&["run", "--handler", "b", "--input", "-", "--", "true"], input.as_bytes());
    assert_eq!(said.code, 0, "{said:?}");
}

#[test]
fn without_an_input_the_command_reads_the_callers_stdin() {
    let desk = Desk::new();
    assert_eq!(desk.say_with(&["run", "--key", "a", "--", "cat"], b"from the caller").text(), "from the caller");
}

#[test]
fn json_holds_text_as_text_and_bytes_as_base64() {
    let desk = Desk::new();
    let args = ["run", "--json", "--key", "a", "--", "sh", "-c", r"printf 'a\377'; echo text >&2"];
    for outcome in ["ran", "replayed"] {
        let said = desk.say(&args);
        let json = said.json();
        assert_eq!((&json["outcome"], &json["exit_code"]), (&outcome.into(), &0.into()));
        assert_eq!((&json["stdout_base64"], &json["stderr"]), (&"Yf8=".into(), &"text\n".into()));
        assert!(json["stdout"].is_null());
        assert!(said.stderr.starts_with("text\n"), "stderr is live");
    }
}

#[test]
fn show_writes_the_kept_output_byte_for_byte_or_says_why_there_is_none() {
    let desk = Desk::new();
    let args = ["run", "--key", "a", "--", "sh", "-c", r"printf 'a\000\377\033b'; echo err >&2"];
    assert_eq!(desk.say(&args).code, 0);
    let shown = desk.say(&["show", "a", "--output"]);
    assert_eq!((shown.code, shown.stdout.as_slice(), shown.stderr.as_str()), (0, &b"a\0\xff\x1bb"[..], ""));

    assert_eq!(desk.say(&["run", "--key", "b", "--no-output", "--", "echo", "x"]).code, 0);
    assert_eq!(desk.say(&["run", "--key", "c", "--", "sh", "-c", "echo x; exit 3"]).code, 3);
    for (key, text) in [("b", "as the first run asked"), ("c", "it is waiting"), ("none", "there is no record of it")] {
        let said = desk.say(&["show", key, "--output"]);
        assert_eq!((said.code, said.stdout.len()), (1, 0), "{said:?}");
        assert!(said.stderr.contains(text) && said.stderr.lines().last().unwrap().starts_with("hint: "), "{said:?}");
    }
    let cut = ["run", "--key", "d", "--output-max", "2B", "--", "printf", "abcd"];
    assert_eq!(desk.say(&cut).code, 0);
    let said = desk.say(&["show", "d", "--output"]);
    assert!(said.text() == "ab" && said.stderr.contains("2 B of stdout are not kept"), "{said:?}");
    assert_eq!(desk.say(&["show", "a", "--output", "--json"]).code, 64);
}

/// The output of one folder's `./charge.sh` was replayed for another's.
#[test]
fn a_relative_program_is_the_one_of_its_folder() {
    let desk = Desk::new();
    for folder in ["one", "two"] {
        fs::create_dir(desk.path(folder)).unwrap();
        let path = desk.path(folder).join("charge.sh");
        fs::write(&path, format!("#!/bin/sh\necho {folder}\n")).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let run = |folder: &str, program: &str| {
        let output =
            desk.command(&["run", "--key", "a", "--", program, "42"]).current_dir(desk.path(folder)).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(run("one", "./charge.sh"), (0, "one\n".to_owned()));
    assert_eq!(run("two", "./charge.sh"), (65, String::new()));
    let absolute = desk.path("one").canonicalize().unwrap().join("charge.sh");
    assert_eq!(run("two", absolute.to_str().unwrap()), (0, "one\n".to_owned()));
}
