//! Whole sessions of the command line against files: `$` lines are run, and what they say is compared.
//!
//! stdout comes as it is, stderr behind `| `, an exit code other than 0 as `= CODE`. What differs from run to run is
//! replaced (see [`steady`]). `TASKONCE_BLESS=1` writes the files anew.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{Desk, PROGRAM};

fn replay(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/transcripts").join(name);
    let expected = fs::read_to_string(&path).unwrap();
    let desk = Desk::new();
    let bin = desk.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(PROGRAM, bin.join("taskonce")).unwrap();
    let mut actual = String::new();
    for line in expected.lines().filter(|line| line.starts_with("$ ") || line.starts_with('#')) {
        actual.push_str(line);
        actual.push('\n');
        if let Some(command) = line.strip_prefix("$ ") {
            actual.push_str(&say(&desk, &bin, command));
        }
    }
    if std::env::var_os("TASKONCE_BLESS").is_some() {
        return fs::write(&path, &actual).unwrap();
    }
    assert!(actual == expected, "{name} differs; this was said:\n{actual}");
}

fn say(desk: &Desk, bin: &Path, command: &str) -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let search = std::env::join_paths([bin.to_owned()].into_iter().chain(std::env::split_paths(&path))).unwrap();
    let output = Command::new("setsid")
        .args(["--wait", "sh", "-c", command])
        .current_dir(desk.folder())
        .env_clear()
        .envs([("PATH", search.as_os_str()), ("TZ", "UTC".as_ref()), ("USER", "ada".as_ref())])
        .env("TASKONCE_STORE", desk.store())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let mut text = String::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        text.push_str(&format!("{}\n", steady(line)));
    }
    for line in String::from_utf8(output.stderr).unwrap().lines() {
        text.push_str(&format!("| {}\n", steady(line)));
    }
    match output.status.code() {
        Some(0) => {}
        code => text.push_str(&format!("= {code:?}\n").replace("Some(", "").replace(')', "")),
    }
    text
}

/// Replaces owners (`OWNER`), hosts (`HOST`), durations (`TIME`) and times of day (`DATE`), and runs of blanks.
fn steady(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let blanks = line.len() - line.trim_start().len();
    for word in line.split_whitespace() {
        let end = word.trim_end_matches([',', ';', ':', ')', '.']).len();
        let (core, tail) = word.split_at(end);
        let units = ["ms", "s", "min", "h", "d"];
        let after_number = words.last().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
        if units.contains(&core) && after_number {
            let _number = words.pop();
            // `2 min 5 s` is one duration.
            if words.last().is_some_and(|last| last == "TIME") {
                words.pop();
            }
            words.push(format!("TIME{tail}"));
        } else if is_owner(core) {
            words.push(format!("OWNER{tail}"));
        } else if let Some((who, _)) = core.split_once('@').filter(|(who, _)| *who == "ada") {
            words.push(format!("{who}@HOST{tail}"));
        } else if is_shaped(core, "0000-00-00") {
            words.push("DATE".to_owned());
        } else if is_shaped(core, "00:00:00") || core == "+00:00" {
            // Part of the date before it.
        } else {
            words.push(word.to_owned());
        }
    }
    format!("{}{}", " ".repeat(blanks), words.join(" "))
}

fn is_owner(word: &str) -> bool {
    let parts: Vec<&str> = word.split('/').collect();
    matches!(parts[..], [_, pid, random] if random.len() == 4
        && !pid.is_empty()
        && pid.bytes().all(|byte| byte.is_ascii_digit())
        && random.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn is_shaped(word: &str, shape: &str) -> bool {
    word.len() == shape.len()
        && word.bytes().zip(shape.bytes()).all(|(byte, shape)| match shape {
            b'0' => byte.is_ascii_digit(),
            other => byte == other,
        })
}

#[test]
fn what_differs_from_run_to_run_is_replaced() {
    assert_eq!(steady("  done   2 min 5 s ago by my-host/123/ab12, attempt 1"), "  done TIME ago by OWNER, attempt 1");
    assert_eq!(steady("2026-01-02 03:04:05 +00:00  redriven, ada@my-host: why"), "DATE redriven, ada@HOST: why");
}

#[test]
fn a_first_session() {
    replay("first_session.txt");
}

#[test]
fn a_failing_task_is_shown_redriven_and_done() {
    replay("redrive.txt");
}

#[test]
fn a_parked_task_is_resolved_by_a_person() {
    replay("resolve.txt");
}

#[test]
fn a_record_is_cleared_with_a_reason() {
    replay("clear.txt");
}

#[test]
fn keys_are_derived_and_explained() {
    replay("key.txt");
}

#[test]
fn tasks_are_listed_by_state_and_prefix() {
    replay("list.txt");
}
