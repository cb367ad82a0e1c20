//! `send`: one task, many, and what becomes of a task that is there already.

use std::fs;

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::harness::{Desk, Said};

const CHARGE: &str = "shop/charge@2";

fn source(desk: &Desk) -> String {
    format!("sqlite:{}", desk.path("queue.db").display())
}

fn send(desk: &Desk, args: &[&str]) -> Said {
    let source = source(desk);
    let mut all = vec!["send", CHARGE, "--source", &source, "--json"];
    all.extend(args);
    desk.say(&all)
}

/// A column of all that is queued, in the order of sending.
fn queued(desk: &Desk, column: &str) -> Vec<String> {
    let queue = Connection::open(desk.path("queue.db")).unwrap();
    let mut rows =
        queue.prepare(&format!("SELECT coalesce(CAST({column} AS TEXT), '') FROM delivery ORDER BY id")).unwrap();
    let rows = rows.query_map([], |row| row.get(0)).unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn a_sent_task_has_its_key_and_is_queued_once_where_that_is_asked() {
    let desk = Desk::new();
    let args = [
        "--key",
        "invoice-42",
        "--payload",
        r#"{"amount": 12}"#,
        "--once",
        "--priority",
        "high",
        "--header",
        "x-a=b=c",
    ];
    let first = send(&desk, &args);
    let said = first.json();
    assert_eq!(
        (first.code, &said["outcome"], &said["key"]),
        (0, &json!("accepted"), &json!("shop/charge@2/invoice-42"))
    );
    let again = send(&desk, &args).json();
    assert_eq!((&again["outcome"], &again["coordinates"]), (&json!("already_queued"), &said["coordinates"]));
    assert_eq!(queued(&desk, "key"), ["shop/charge@2/invoice-42"]);
    assert_eq!(
        (queued(&desk, "handler"), queued(&desk, "priority")),
        (vec!["charge@2".to_owned()], vec!["0".to_owned()])
    );
    assert_eq!(queued(&desk, "payload"), [r#"{"amount": 12}"#]);
    assert_eq!(queued(&desk, "headers"), [r#"[["x-a","b=c"]]"#]);
    let full = desk.say(&["send", CHARGE, "--source", &source(&desk), "--key", "shop/charge@2/b", "--payload", "{}"]);
    assert!(full.text().starts_with("accepted: task `shop/charge@2/b` is queued as "), "{full:?}");
}

#[test]
fn what_the_ledger_has_done_is_not_queued_and_another_payload_is_refused() {
    let desk = Desk::new();
    let input = r#"{"amount":12}"#;
    fs::write(desk.path("input"), input).unwrap();
    let run = desk.say(&[
        "run",
        "--handler",
        "charge",
        "--version",
        "2",
        "--namespace",
        "shop",
        "--input",
        "input",
        "--",
        "true",
    ]);
    assert_eq!(run.code, 0, "{run:?}");
    let done = send(&desk, &["--input", "input", "--once"]);
    let said = done.json();
    assert_eq!(
        (done.code, &said["outcome"], &said["state"], &said["attempt"]),
        (0, &json!("already_done"), &json!("done"), &json!(1))
    );
    assert!(said["age_ms"].is_u64(), "{said}");
    let key = said["key"].as_str().unwrap();
    let other = send(&desk, &["--key", key, "--payload", r#"{"amount":13}"#, "--once"]);
    assert_eq!((other.code, &other.json()["outcome"]), (65, &json!("mismatch")));
    assert_eq!(queued(&desk, "key"), Vec::<String>::new());
    // Without `--once` nobody is asked, and the worker replays it.
    assert_eq!(send(&desk, &["--input", "input"]).json()["outcome"], "accepted");
}

#[test]
fn one_tick_of_a_schedule_is_one_task_from_whichever_host() {
    let desk = Desk::new();
    let ticks = ["2026-11-30T02:00Z", "2026-11-30T03:00:00+01:00", "2026-11-29 21:00-05:00"];
    let outcomes: Vec<Value> =
        ticks.iter().map(|tick| send(&desk, &["--schedule", "nightly", "--tick", tick, "--once"]).json()).collect();
    assert_eq!(outcomes[0]["key"], "shop/charge@2/nightly/2026-11-30T02:00:00Z");
    let words: Vec<&Value> = outcomes.iter().map(|outcome| &outcome["outcome"]).collect();
    assert_eq!(words, ["accepted", "already_queued", "already_queued"]);
    assert_eq!(queued(&desk, "payload"), [r#"{"schedule":"nightly","tick":"2026-11-30T02:00:00Z"}"#]);
    let every = send(&desk, &["--schedule", "often", "--every", "1h", "--once"]).json();
    let key = every["key"].as_str().unwrap();
    assert!(key.starts_with("shop/charge@2/often/20") && key.ends_with(":00:00Z"), "{key}");
    let local = send(&desk, &["--schedule", "nightly", "--tick", "2026-11-30T02:00"]);
    assert!(local.code == 64 && local.stderr.contains("offset"), "{local:?}");
    let half = send(&desk, &["--schedule", "nightly"]);
    assert_eq!(half.code, 64, "{half:?}");
}

#[test]
fn a_delayed_task_says_when_it_is_due() {
    let desk = Desk::new();
    assert_eq!(send(&desk, &["--key", "a", "--payload", "1", "--delay", "20d"]).code, 0);
    assert_eq!(send(&desk, &["--key", "b", "--payload", "1", "--at", "2001-01-01T00:00Z"]).code, 0);
    let (due, sent) = (queued(&desk, "due_at"), queued(&desk, "sent_at"));
    let ahead = due[0].parse::<i64>().unwrap() - sent[0].parse::<i64>().unwrap();
    assert!((20 * 86_400_000..20 * 86_400_000 + 60_000).contains(&ahead), "{ahead}");
    assert!(queued(&desk, "headers")[0].contains("Taskonce-Due-At"));
    assert_eq!(queued(&desk, "state"), ["2", "1"], "what is past is due now");
    let late = send(&desk, &["--key", "c", "--payload", "1", "--delay", "400d"]);
    assert!(late.code == 64 && late.stderr.contains("366"), "{late:?}");
}

#[test]
fn of_many_lines_the_bad_ones_are_told_and_the_others_sent() {
    let desk = Desk::new();
    let lines =
        "{\"id\": 1, \"sent\": 1}\n{\"id\": 1, \"sent\": 2}\nno json\n\n{\"id\": 2}\n{\"other\": 3}\n{\"id\":3}";
    fs::write(desk.path("lines"), lines).unwrap();
    let said = send(&desk, &["--lines", "lines", "--include", "/id", "--once"]);
    assert_eq!(said.code, 64, "{said:?}");
    let told: Vec<Value> = said.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let summary = &told.last().unwrap()["summary"];
    assert_eq!(
        *summary,
        json!({
            "accepted": 3, "already_queued": 1, "already_done": 0, "dead_or_parked": 0, "refused": 2,
            "refused_lines": [[3, 3], [6, 6]], "stopped_at_line": null,
        })
    );
    assert_eq!(told.len(), 7, "a line each, and the summary");
    assert_eq!(queued(&desk, "key").len(), 3);
    let text = desk.say_with(
        &["send", CHARGE, "--source", &source(&desk), "--lines", "-", "--include", "/id", "--once", "--from-line", "2"],
        lines.as_bytes(),
    );
    assert_eq!(
        text.text(),
        "6 tasks: 4 already queued, 2 refused\nrefused: line 3, 6\n".replace("6 tasks: 4", "5 tasks: 3")
    );
    assert!(text.stderr.contains("line 6 is refused: /id: the input has no \"id\""), "{text:?}");
}

/// The queue is full in the middle: what was accepted is told from what was not, and going on there sends each once.
#[test]
fn a_bulk_that_has_to_stop_says_at_which_line_and_loses_none() {
    const LINES: usize = 3000;
    let desk = Desk::new();
    assert_eq!(send(&desk, &["--key", "first", "--payload", "0"]).code, 0);
    let lines: String = (0..LINES).map(|number| format!("{{\"id\": {number}}}\n")).collect();
    fs::write(desk.path("lines"), lines).unwrap();
    // A trigger stands for a disk that is full.
    let queue = Connection::open(desk.path("queue.db")).unwrap();
    queue
        .execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON delivery WHEN (SELECT count(*) FROM delivery) >= 1000
             BEGIN SELECT RAISE(ABORT, 'planted'); END",
        )
        .unwrap();
    let args = ["--lines", "lines", "--include", "/id", "--once"];
    let said = send(&desk, &args);
    assert_ne!(said.code, 0);
    let stopped = said.stderr.split("stopped at line ").nth(1).unwrap_or_else(|| panic!("{}", said.stderr));
    let line: usize = stopped.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap();
    assert!(
        (2..=1000).contains(&line) && said.stderr.contains(&format!("`--from-line {line}` goes on there")),
        "{line}"
    );
    queue.execute_batch("DROP TRIGGER full").unwrap();
    let mut more = args.to_vec();
    let from = line.to_string();
    more.extend(["--from-line", &from]);
    assert_eq!(send(&desk, &more).code, 0);
    let mut keys = queued(&desk, "key");
    assert_eq!(keys.len(), LINES + 1);
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), LINES + 1, "none is lost, none is doubled");
}

#[test]
fn what_cannot_be_sent_says_why() {
    let desk = Desk::new();
    for (args, says) in [
        (&["send", "charge", "--source", "memory:", "--payload", "1"][..], "names no version"),
        (&["send", "charge@2", "--payload", "1"], "no queue is named"),
        (&["send", "charge@2", "--source", "memory:"], "there is no payload"),
        (&["send", "charge@2", "--source", "memory:", "--payload", "{"], "JSON"),
        (
            &["send", "charge@2", "--source", "memory:", "--payload", "1", "--key", "shop/mail@2/a"],
            "not of `default/charge@2`",
        ),
        (&["send", "charge@2", "--source", "memory:", "--payload", "1", "--header", "a"], "NAME=VALUE"),
        (
            &["send", "a/charge@2", "--namespace", "b", "--source", "memory:", "--payload", "1"],
            "leave out `--namespace`",
        ),
        (&["send", "charge@2", "--source", "kafka://a", "--payload", "1"], "no source has the scheme"),
    ] {
        let said = desk.say(args);
        assert!(said.code != 0 && said.stderr.contains(says) && said.stderr.contains("hint: "), "{args:?}: {said:?}");
    }
}

/// The table says which queue, which namespace, and what makes the id: a task that is sent is the one that its worker sees.
#[test]
fn a_table_of_routes_says_where_a_task_goes_and_what_its_key_is() {
    let desk = Desk::new();
    let table = r#"
        [sources.orders]
        url = "sqlite:orders.db"
        [sources.mails]
        url = "sqlite:mails.db"
        [handlers."charge@2"]
        effect = "keyed"
        namespace = "shop"
        without_key = { derive = ["/id"] }
        [routes.orders."charge@2"]
        [routes.mails."charge@2"]
    "#;
    fs::write(desk.path("taskonce.toml"), table).unwrap();
    let payload = r#"{"id": 7, "sent": 1}"#;
    let said = desk.say(&["send", "charge@2", "--to", "orders", "--payload", payload, "--json"]);
    let derived = desk.say(&[
        "send",
        "shop/charge@2",
        "--source",
        "sqlite:other.db",
        "--payload",
        r#"{"id":7}"#,
        "--include",
        "/id",
        "--json",
    ]);
    assert_eq!((said.code, &said.json()["key"]), (0, &derived.json()["key"]), "{said:?}");
    for (args, says) in [
        (&["send", "charge@2", "--payload", "{}"][..], "name one with `--to`; its sources with a URL: orders, mails"),
        (&["send", "charge@2", "--to", "none", "--payload", "{}"], "has no source `none`"),
        (&["send", "charge@3", "--to", "orders", "--payload", "{}"], "no worker would take it"),
        (&["send", "bank/charge@2", "--to", "orders", "--payload", r#"{"id": 1}"#], "of namespace `shop`, not `bank`"),
    ] {
        let said = desk.say(args);
        assert!(said.code == 64 && said.stderr.contains(says), "{args:?}: {said:?}");
    }
    // Who looks makes no file.
    let said = desk.say(&["queue", "--json"]);
    assert!(said.code == 69 && said.stderr.contains("mails.db"), "{said:?}");
    assert_eq!(desk.say(&["send", "charge@2", "--to", "mails", "--payload", payload]).code, 0);
    let queue = desk.say(&["queue", "--json"]).json();
    assert_eq!(
        queue["sources"]
            .as_array()
            .unwrap()
            .iter()
            .map(|source| (&source["source"], &source["ready"]))
            .collect::<Vec<_>>(),
        [(&json!("orders"), &json!(1))].into_iter().chain([(&json!("mails"), &json!(1))]).collect::<Vec<_>>()
    );
}

/// Ended by a signal it says where; what was read from a pipe that goes on is no reason to wait.
#[test]
fn a_bulk_that_is_told_to_stop_says_where_to_go_on() {
    let desk = Desk::new();
    let source = source(&desk);
    let mut child = desk
        .command(&["send", CHARGE, "--source", &source, "--lines", "-", "--include", "/id", "--once"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    for number in 0..10 {
        std::io::Write::write_all(&mut input, format!("{{\"id\": {number}}}\n").as_bytes()).unwrap();
    }
    let is_sent = || {
        desk.path("queue.db").exists()
            && desk.say(&["queue", "--source", &source, "--json"]).json()["sources"][0]["ready"] == 10
    };
    assert!(taskonce_testkit::eventually(crate::harness::PATIENCE, is_sent));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(input);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{said}");
    assert!(
        said.contains("stopped at line 11: a signal came") && said.contains("`--from-line 11` goes on there"),
        "{said}"
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "10 tasks: 10 accepted\n");
}
