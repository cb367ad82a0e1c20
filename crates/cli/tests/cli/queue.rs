//! `queue`: what is there, for people and for programs.

use rusqlite::Connection;
use serde_json::json;

use crate::harness::Desk;

#[test]
fn a_queue_tells_what_it_holds_of_each_handler() {
    let desk = Desk::new();
    let source = format!("sqlite:{}", desk.path("queue.db").display());
    let send = |handler: &str, more: &[&str]| {
        let mut args = vec!["send", handler, "--source", &source, "--payload", "{}"];
        args.extend(more);
        assert_eq!(desk.say(&args).code, 0);
    };
    for key in ["a", "b", "c"] {
        send("charge@2", &["--key", key]);
    }
    send("charge@2", &["--key", "d", "--delay", "1h"]);
    send("mail@1", &[]);
    let queue = Connection::open(desk.path("queue.db")).unwrap();
    queue
        .execute_batch(
            "UPDATE delivery SET due_at = due_at - 90000 WHERE id = 1;
             UPDATE delivery SET state = 2, receipt = 1, due_at = due_at + 60000 WHERE id = 2;
             UPDATE delivery SET state = 3, death_id = 'dead/x', reason = 'dead' WHERE id = 3",
        )
        .unwrap();
    let said = desk.say(&["queue", "--source", &source, "--json"]);
    let held = &said.json()["sources"][0];
    let of = |at: usize| {
        let handler = &held["handlers"][at];
        ["handler", "ready", "in_flight", "deferred", "dead"].map(|name| handler[name].clone())
    };
    assert_eq!(of(0), [json!("charge@2"), json!(1), json!(1), json!(1), json!(1)]);
    assert_eq!(of(1), [json!("mail@1"), json!(1), json!(0), json!(0), json!(0)]);
    assert_eq!((&held["ready"], &held["visibility_ms"]), (&json!(2), &json!(30_000)));
    let oldest = held["oldest_ready_ms"].as_u64().unwrap();
    assert!((90_000..150_000).contains(&oldest), "{oldest}");
    let text = desk.say(&["queue", "--source", &source]).text();
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(
        line("HANDLER").split_whitespace().collect::<Vec<_>>().join(" "),
        "HANDLER READY OLDEST IN FLIGHT DEFERRED DEAD"
    );
    assert!(
        line("all").split_whitespace().eq([
            "all",
            "2",
            "1",
            "min",
            line("all").split_whitespace().nth(4).unwrap(),
            "s",
            "1",
            "1",
            "1"
        ]),
        "{text}"
    );
    assert!(text.ends_with(&format!("`taskonce dead list --source {source}` shows the dead letters\n")), "{text}");
}

#[test]
fn a_mistyped_path_is_no_empty_queue() {
    let desk = Desk::new();
    let said = desk.say(&["queue", "--source", "sqlite:nowhere.db"]);
    assert!(said.code == 69 && said.stderr.contains("nowhere.db") && said.stderr.contains("hint: "), "{said:?}");
    assert!(!desk.path("nowhere.db").exists());
    let said = desk.say(&["queue"]);
    assert!(said.code == 64 && said.stderr.contains("no queue is named"), "{said:?}");
}
