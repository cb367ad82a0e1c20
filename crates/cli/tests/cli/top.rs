//! `top`: what runs, where, and what is queued.

use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{Desk, PATIENCE, Started, lives};

/// A task that runs until the file `stop` is there.
fn running(desk: &Desk, key: &str) -> Started {
    let task = "echo x >> started; while [ ! -e stop ]; do sleep 0.02; done";
    let started = desk.start(&["run", "--key", key, "--lease", "2s", "--", "sh", "-c", task]);
    desk.await_lines("started", 1);
    fs::remove_file(desk.path("started")).unwrap();
    started
}

#[test]
fn what_runs_is_shown_with_who_runs_it_and_what_is_queued_beside() {
    let desk = Desk::new();
    let source = format!("sqlite:{}", desk.path("queue.db").display());
    for key in ["a", "b"] {
        assert_eq!(desk.say(&["send", "charge@2", "--source", &source, "--key", key, "--payload", "{}"]).code, 0);
    }
    let (first, second) = (running(&desk, "one"), running(&desk, "two"));
    let top = ["top", "--source", &source];
    let seen = desk.say(&[&top[..], &["--json", "--times", "2", "--every", "200ms"]].concat());
    assert_eq!(seen.code, 0, "{seen:?}");
    let views: Vec<Value> = seen.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(views.len(), 2);
    for (view, grows) in views.iter().zip([Value::Null, json!(0.0)]) {
        let queue = &view["queues"][0];
        let told = ["source", "handler", "ready", "in_flight", "grows_per_second"].map(|name| queue[name].clone());
        assert_eq!(told, [json!("queue"), json!("charge@2"), json!(2), json!(0), grows]);
        let keys: Vec<&str> =
            view["running"].as_array().unwrap().iter().map(|task| task["key"].as_str().unwrap()).collect();
        assert_eq!(keys, ["default/run@1/one", "default/run@1/two"], "the longest first");
        assert_eq!(view["workers"].as_array().unwrap().len(), 2);
        assert_eq!((&view["workers"][0]["running"], &view["workers"][0]["leases_passed"]), (&json!(1), &json!(0)));
    }
    let text = desk.say(&top).text();
    assert!(text.starts_with("2 ready, the oldest for ") && text.contains("2 running in 2 processes"), "{text}");
    fs::write(desk.path("stop"), "").unwrap();
    assert_eq!((first.end().code, second.end().code), (0, 0));
    let after = desk.say(&[&top[..], &["--json"]].concat()).json();
    assert_eq!((&after["running"], &after["workers"]), (&json!([]), &json!([])));
}

#[test]
fn a_killed_worker_is_shown_as_silent_when_its_lease_has_passed() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["send", "charge@2", "--source", "sqlite:queue.db", "--payload", "{}"]).code, 0);
    let started = running(&desk, "one");
    let pid = started.pid();
    started.signal(Signal::KILL);
    let _killed = started.end();
    assert!(taskonce_testkit::eventually(PATIENCE, || !lives(pid)));
    let silent =
        || desk.say(&["top", "--source", "sqlite:queue.db", "--json"]).json()["workers"][0]["leases_passed"] == 1;
    assert!(taskonce_testkit::eventually(PATIENCE, silent));
    let text = desk.say(&["top", "--source", "sqlite:queue.db"]).text();
    assert!(text.contains("silent: 1 of its leases passed"), "{text}");
}

#[test]
fn what_cannot_be_seen_is_said_and_the_rest_is_shown() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["send", "charge@2", "--source", "sqlite:queue.db", "--payload", "{}"]).code, 0);
    let seen = desk.say(&["top", "--source", "sqlite:queue.db", "--json"]);
    assert_eq!((seen.code, &seen.json()["queues"][0]["ready"]), (69, &json!(1)), "{seen:?}");
    assert!(seen.json()["not_seen"][0].as_str().unwrap().contains("tasks.db"), "{seen:?}");
}

/// `work` says of itself how it stands, and takes that back when it ends.
#[test]
fn a_worker_is_shown_while_it_lives_with_what_it_says_of_itself() {
    let desk = Desk::new();
    let table = r#"
        [sources.orders]
        url = "sqlite:orders.db"
        [handlers."charge@2"]
        effect = "keyed"
        command = ["cat"]
        [routes.orders."charge@2"]
    "#;
    fs::write(desk.path("taskonce.toml"), table).unwrap();
    assert_eq!(desk.say(&["send", "charge@2", "--key", "a", "--payload", "{}"]).code, 0);
    let worker = desk.start(&["work"]);
    let look = || desk.say(&["top", "--json"]);
    let says = || look().json()["workers"][0]["says"].clone();
    let is_shown = || {
        let says = says();
        says["store_away"] == false && says["age_ms"].is_u64()
    };
    let is_done = || desk.say(&["show", "default/charge@2/a", "--json"]).json()["state"] == "done";
    assert!(taskonce_testkit::eventually(PATIENCE, is_done));
    assert!(taskonce_testkit::eventually(PATIENCE, is_shown), "{:?}", look());
    assert!(
        desk.say(&["list", "--all"]).text().contains("charge@2/a") && !desk.say(&["list"]).text().contains("process")
    );
    worker.signal(Signal::TERM);
    assert_eq!(worker.end().code, 0);
    assert_eq!(look().json()["workers"], json!([]));
}
