//! In the foreground of a terminal: the command can read it, and ctrl-C reaches the command once.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::harness::{Desk, PROGRAM, Said};

/// Runs the program on a terminal of its own, which `script` makes, and types. `script` starts a shell; that one becomes the
/// program, so that no shell stands between them whose own answer to ctrl-C could be taken for the program's.
fn on_terminal(desk: &Desk, task: &str, type_when: &str, typed: &[u8]) -> Said {
    desk.script("task.sh", task);
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--flush", "--command"])
        .arg(format!("exec {PROGRAM} run --key a -- sh task.sh"))
        .arg("/dev/null")
        .env("SHELL", "/bin/sh")
        .current_dir(desk.folder())
        .env("TASKONCE_STORE", desk.store())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    desk.await_lines(type_when, 1);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(typed).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    Said { code: output.status.code().unwrap(), stdout: output.stdout, stderr: String::new() }
}

#[test]
fn the_command_can_read_the_terminal() {
    let desk = Desk::new();
    let said = on_terminal(&desk, "echo ready > ready; read line; echo \"read $line\"", "ready", b"hello\n");
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.text().contains("read hello"), "{}", said.text());
}

#[test]
fn ctrl_c_reaches_the_command_once_and_its_end_decides() {
    let desk = Desk::new();
    let task = "trap 'echo int >> ints; [ $(wc -l < ints) = 2 ] && exit 9' INT; echo ready > ready\n\
                while [ ! -e ints ]; do sleep 0.01; done; sleep 0.3; exit 4";
    let said = on_terminal(&desk, task, "ready", b"\x03");
    assert_eq!((said.code, desk.lines("ints")), (4, 1), "{said:?}");
    assert_eq!(desk.say(&["show", "--json", "a"]).json()["failure"]["message"], "exit code 4");
}

#[test]
fn ctrl_c_ends_a_command_that_does_not_heed_it() {
    let desk = Desk::new();
    let said = on_terminal(&desk, "echo ready > ready; exec sleep 600", "ready", b"\x03");
    assert_eq!(said.code, 130, "{said:?}");
}

/// What the program writes to a terminal of so many columns, of its own.
fn at_width(desk: &Desk, columns: u16, args: &str) -> String {
    let output = Command::new("script")
        .args(["--quiet", "--return", "--flush", "--command"])
        .arg(format!("stty cols {columns} rows 24; exec {PROGRAM} {args}"))
        .arg("/dev/null")
        .env("SHELL", "/bin/sh")
        .current_dir(desk.folder())
        .env("TASKONCE_STORE", desk.store())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_replay_that_ends_within_a_line_gets_its_message_on_a_line_of_its_own() {
    let desk = Desk::new();
    for (key, text) in [("a", "charged"), ("b", "charged\\n")] {
        let args = format!("run --key {key} -- printf '{text}'");
        assert_eq!(at_width(&desk, 80, &args).trim_end(), "charged");
        let replayed = at_width(&desk, 80, &args);
        assert!(replayed.starts_with("charged\r\nreplayed: done "), "{replayed:?}");
    }
}

#[test]
fn a_list_keeps_to_the_width_of_its_terminal() {
    let desk = Desk::new();
    let fails = "run --key a --attempts 1 -- no-such-command-with-a-name-that-is-quite-long-for-a-terminal";
    assert!(at_width(&desk, 80, fails).contains("dead: "));
    let listed = at_width(&desk, 100, "list");
    let longest = listed.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 100 && listed.trim_end().ends_with('…'), "{longest} in {listed}");
    let whole = desk.say(&["list"]).text();
    assert!(whole.lines().any(|line| line.chars().count() > 100), "a file gets more: {whole}");
}

#[test]
fn routes_keep_to_the_width_of_their_terminal() {
    let desk = Desk::new();
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/routes.md")).unwrap();
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let long = "a-name-that-is-quite-long-for-a-terminal-of-eighty-columns";
    let text = format!("{example}[handlers.{long}]\neffect = 'keyed'\nlease = '1s'\n[routes.orders.{long}]\n");
    std::fs::write(desk.path("taskonce.toml"), text).unwrap();
    for columns in [80, 120] {
        let told = at_width(&desk, columns, "routes");
        let longest = told.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= usize::from(columns) && told.contains('…'), "{longest} in {told}");
    }
}

/// Types an answer to the question whether to change dead letters.
fn answered(desk: &Desk, args: &str, answer: &[u8]) -> String {
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--flush", "--command"])
        .arg(format!("touch ready; exec {PROGRAM} {args}"))
        .arg("/dev/null")
        .env("SHELL", "/bin/sh")
        .current_dir(desk.folder())
        .env("TASKONCE_STORE", desk.store())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(answer).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_person_is_asked_before_dead_letters_are_dropped() {
    let desk = Desk::new();
    let send = "send charge@2 --source sqlite:queue.db --key a --payload {}";
    assert!(at_width(&desk, 80, send).contains("accepted"));
    let queue = rusqlite::Connection::open(desk.path("queue.db")).unwrap();
    queue.execute("UPDATE delivery SET state = 3, death_id = 'unreadable/x', reason = 'unreadable'", []).unwrap();
    let count = || desk.say(&["queue", "--source", "sqlite:queue.db", "--json"]).json()["sources"][0]["dead"].clone();
    let drop = "dead drop --all --source sqlite:queue.db";
    let declined = answered(&desk, drop, b"n\n");
    assert!(declined.contains("drop 1 dead letter, with their payloads? [y/N]"), "{declined}");
    assert_eq!(count(), 1);
    let told = answered(&desk, drop, b"y\n");
    assert!(told.contains("dropped: 1 dead letter"), "{told}");
    assert_eq!(count(), 0);
}

#[test]
fn a_live_view_keeps_to_its_terminal() {
    let desk = Desk::new();
    for number in 0..30 {
        let handler = format!("a-name-that-is-quite-long-for-a-terminal-{number}@1");
        assert_eq!(desk.say(&["send", &handler, "--source", "sqlite:queue.db", "--payload", "{}"]).code, 0);
    }
    let drawn = at_width(&desk, 80, "top --source sqlite:queue.db --times 1");
    let view = drawn.rsplit("\u{1b}[H").next().unwrap();
    let lines: Vec<&str> =
        view.trim_end_matches("\u{1b}[J").lines().map(|line| line.trim_end_matches("\u{1b}[K")).collect();
    assert!(lines.len() <= 24, "{} lines: {view}", lines.len());
    let longest = lines.iter().map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 80 && view.contains("30 ready") && view.contains('…'), "{longest} in {view}");
}
