//! `dead`: what died and why, and its way back, interrupted and not.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use serde_json::{Value, json};
use taskonce::routes::Routes;
use taskonce::worker::Worker;
use taskonce::{Failure, source};

use crate::harness::{Desk, PATIENCE, Said};

const TABLE: &str = r#"
    store = "sqlite:tasks.db"
    [sources.orders]
    url = "sqlite:orders.db"
    [handlers."charge@2"]
    effect = "keyed"
    namespace = "shop"
    attempts_max = 2
    backoff_min = "0s"
    backoff_max = "0s"
    [routes.orders."charge@2"]
"#;

/// What the handler finds: a closed bank declines cards for good, and is else away.
#[derive(Clone, Copy)]
enum Bank {
    Open,
    Closed,
}

/// A queue and a ledger beside their table of routes.
struct Yard {
    desk: Desk,
}

impl Yard {
    fn new() -> Yard {
        let desk = Desk::new();
        fs::write(desk.path("taskonce.toml"), TABLE).unwrap();
        Yard { desk }
    }

    fn say(&self, args: &[&str]) -> Said {
        self.desk.say(args)
    }

    fn json(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        let said = self.say(&args);
        assert_eq!(said.code, 0, "{said:?}");
        said.json()
    }

    fn send(&self, id: &str, payload: &str) {
        let said = self.say(&["send", "charge@2", "--key", id, "--payload", payload]);
        assert_eq!(said.code, 0, "{said:?}");
    }

    /// Works until nothing is left but dead letters; how often the handler ran.
    fn work(&self, bank: Bank) -> usize {
        let ran = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&ran);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let ledger = taskonce::open(&format!("sqlite:{}", self.desk.path("tasks.db").display())).unwrap();
            let queue =
                source::open_named(&format!("sqlite:{}", self.desk.path("orders.db").display()), "orders").unwrap();
            let worker = Worker::builder(ledger, Routes::from_toml(TABLE).unwrap()).source(Arc::clone(&queue)).handler(
                "charge@2",
                move |_context, asked: Value| {
                    counted.fetch_add(1, Ordering::SeqCst);
                    async move {
                        match (bank, asked["card"].as_u64()) {
                            (Bank::Open, _) => Ok(()),
                            (Bank::Closed, Some(card)) => {
                                Err(Failure::permanent(format!("the card {card} was declined")))
                            }
                            (Bank::Closed, None) => Err(Failure::retryable("the bank is away")),
                        }
                    }
                },
            );
            let worked_off = async {
                let began = Instant::now();
                loop {
                    let depth = source::Depth::total(&queue.depth().await.unwrap());
                    if depth.ready + depth.deferred + depth.in_flight == 0 {
                        return;
                    }
                    assert!(began.elapsed() < PATIENCE, "{depth:?}");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            worker.build().unwrap().run_until(worked_off).await;
        });
        ran.load(Ordering::SeqCst)
    }

    fn history(&self, key: &str) -> Vec<String> {
        let shown = self.json(&["show", key]);
        let history = shown["history"].as_array().unwrap_or_else(|| panic!("{shown}"));
        history.iter().map(|event| event["kind"].as_str().unwrap_or_else(|| panic!("{event}")).to_owned()).collect()
    }
}

/// An operator's retry that counted on from the old attempts failed at once.
#[test]
fn an_operators_redrive_begins_the_counters_anew_and_the_task_runs_once() {
    let yard = Yard::new();
    yard.send("a", r#"{"order": 1}"#);
    assert_eq!(yard.work(Bank::Closed), 2, "two attempts");
    let listed = &yard.json(&["dead", "list"])["dead_letters"];
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    let letter = &listed[0];
    assert_eq!(
        (&letter["id"], &letter["reason"], &letter["key"]),
        (&json!("dead/shop/charge@2/a"), &json!("dead"), &json!("shop/charge@2/a"))
    );
    assert_eq!((&letter["source"], &letter["error"]), (&json!("orders"), &json!("the bank is away")));
    let shown = yard.say(&["dead", "show", "shop/charge@2/a"]).text();
    for part in [
        "it failed for good, or its attempts are used up",
        "{\"order\": 1}",
        "the bank is away",
        "dead: it failed for good",
        " ago, at delivery 2\n",
        "`taskonce dead redrive dead/shop/charge@2/a --config taskonce.toml`",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(yard.say(&["dead", "show", "dead/shop/charge@2/a", "--payload"]).stdout, br#"{"order": 1}"#);
    let redriven = yard.json(&["dead", "redrive", "shop/charge@2/a", "--why", "the bank is back"]);
    assert_eq!((&redriven["redriven"], &redriven["left"]), (&json!(1), &json!(0)));
    // Once more it fails once and is tried again: the attempts before do not count.
    assert_eq!(yard.work(Bank::Closed), 2);
    assert_eq!(yard.json(&["dead", "redrive", "dead/shop/charge@2/a"])["redriven"], 1);
    assert_eq!(yard.work(Bank::Open), 1);
    let record = yard.json(&["show", "shop/charge@2/a"]);
    assert_eq!((&record["state"], &record["attempt"]), (&json!("done"), &json!(1)));
    assert_eq!(yard.history("shop/charge@2/a").iter().filter(|event| *event == "redriven").count(), 2);
    // Another program names its dead letters otherwise: the key that was sent tells the record.
    yard.send("b", "{}");
    yard.work(Bank::Closed);
    let queue = Connection::open(yard.desk.path("orders.db")).unwrap();
    queue.execute("UPDATE delivery SET death_id = 'theirs-1' WHERE state = 3", []).unwrap();
    assert_eq!(yard.json(&["dead", "redrive", "theirs-1"])["redriven"], 1);
    assert_eq!(yard.work(Bank::Open), 1);
    let none = yard.say(&["dead", "redrive", "shop/charge@2/a"]);
    assert!(none.code == 1 && none.stderr.contains("there is no dead letter `shop/charge@2/a`"), "{none:?}");
}

/// The record is returned to work before the delivery is published; killed in between, the same call does the rest.
#[test]
fn a_redrive_that_was_interrupted_in_between_is_done_again() {
    let yard = Yard::new();
    for id in ["a", "b"] {
        yard.send(id, r#"{"card": 1}"#);
    }
    assert_eq!(yard.work(Bank::Closed), 2);
    let queue = Connection::open(yard.desk.path("orders.db")).unwrap();
    queue
        .execute_batch(
            "CREATE TRIGGER cut BEFORE UPDATE ON delivery WHEN old.state = 3 BEGIN SELECT RAISE(ABORT, 'planted'); END",
        )
        .unwrap();
    let cut = yard.say(&["dead", "redrive", "--all", "--yes"]);
    assert!(cut.code != 0 && cut.stderr.contains("stopped, 2 dead letters left"), "{cut:?}");
    queue.execute_batch("DROP TRIGGER cut").unwrap();
    assert_eq!(yard.json(&["show", "shop/charge@2/a"])["state"], "waiting");
    let plan = yard.json(&["dead", "redrive", "--all", "--dry-run"]);
    assert_eq!(plan["counts"], json!({ "in_work": 2 }));
    assert_eq!(yard.json(&["dead", "redrive", "--all", "--yes"])["redriven"], 2);
    for id in ["a", "b"] {
        let history = yard.history(&format!("shop/charge@2/{id}"));
        assert_eq!(history.iter().filter(|event| *event == "redriven").count(), 1, "{history:?}");
    }
    assert_eq!(yard.work(Bank::Open), 2);
    // The ledger's own redrive says where the rest is done.
    yard.send("c", r#"{"card": 1}"#);
    assert_eq!(yard.work(Bank::Closed), 1);
    let half = yard.say(&["redrive", "shop/charge@2/c"]);
    assert!(half.text().contains("`taskonce dead redrive shop/charge@2/c` publishes it again"), "{half:?}");
    assert_eq!(yard.json(&["dead", "redrive", "shop/charge@2/c"])["redriven"], 1);
    assert_eq!(yard.work(Bank::Open), 1);
}

#[test]
fn dead_letters_are_grouped_by_what_they_died_of_and_a_group_is_brought_back() {
    let yard = Yard::new();
    for number in 0..6 {
        yard.send(&format!("card-{number}"), &format!("{{\"card\": {number}}}"));
    }
    for number in 0..3 {
        yard.send(&format!("order-{number}"), "{}");
    }
    yard.work(Bank::Closed);
    let groups = &yard.json(&["dead", "list", "--group"])["groups"];
    let of = |at: usize| (groups[at]["count"].clone(), groups[at]["error"].clone());
    assert_eq!((of(0), of(1)), ((json!(6), json!("the card … was declined")), (json!(3), json!("the bank is away"))));
    let text = yard.say(&["dead", "list", "--group"]).text();
    assert!(text.lines().next().unwrap().starts_with("COUNT"), "{text}");
    assert_eq!(yard.json(&["dead", "list", "--limit", "4"])["more"], true);
    let group = ["--text", "was declined"];
    let plan = yard.say(&["dead", "redrive", group[0], group[1], "--dry-run"]);
    assert_eq!(
        plan.text(),
        "would redrive 6 dead letters\n       6 dead: the task returns to work, its counters at the beginning\n"
    );
    let nobody = yard.say(&["dead", "redrive", group[0], group[1]]);
    assert!(nobody.code == 64 && nobody.stderr.contains("nobody can be asked"), "{nobody:?}");
    let vague = yard.say(&["dead", "redrive", "--yes"]);
    assert!(vague.code == 64 && vague.stderr.contains("which dead letters is not said"), "{vague:?}");
    assert_eq!(yard.json(&["dead", "list"])["dead_letters"].as_array().unwrap().len(), 9, "nothing was changed");
    assert_eq!(yard.json(&["dead", "redrive", group[0], group[1], "--yes", "--limit", "2"])["redriven"], 2);
    assert_eq!(yard.json(&["dead", "redrive", group[0], group[1], "--yes"])["redriven"], 4);
    assert_eq!(yard.work(Bank::Open), 6);
    assert_eq!(
        yard.json(&["dead", "list", "--reason", "dead", "--handler", "charge@2"])["dead_letters"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(yard.json(&["dead", "list", "--reason", "parked"])["dead_letters"], json!([]));
    let one = yard.say(&["dead", "drop", "dead/shop/charge@2/order-0", "--yes"]);
    assert_eq!((one.code, one.text().as_str()), (0, "dropped: 1 dead letter\n"));
    assert_eq!(yard.json(&["dead", "drop", "--all", "--yes"])["dropped"], 2);
    assert_eq!(yard.json(&["show", "shop/charge@2/order-0"])["state"], "dead", "records stay");
    assert_eq!(yard.json(&["queue"])["sources"][0]["handlers"], json!([]));
}

/// What belongs to no record of its own touches none: a mismatch is about the task that has the key.
#[test]
fn a_mismatch_is_published_again_and_leaves_the_other_tasks_record_alone() {
    let yard = Yard::new();
    yard.send("a", r#"{"order": 1}"#);
    assert_eq!(yard.work(Bank::Closed), 2);
    yard.send("a", r#"{"order": 2}"#);
    assert_eq!(yard.work(Bank::Open), 0);
    let letters = &yard.json(&["dead", "list", "--reason", "mismatch"])["dead_letters"];
    let id = letters[0]["id"].as_str().unwrap();
    assert!(id.starts_with("mismatch/") && id.ends_with("/shop/charge@2/a"), "{id}");
    assert_eq!(yard.json(&["dead", "redrive", id, "--dry-run"])["counts"], json!({ "no_task": 1 }));
    assert_eq!(yard.json(&["dead", "redrive", id])["redriven"], 1);
    assert_eq!(yard.json(&["show", "shop/charge@2/a"])["state"], "dead");
    assert_eq!(yard.work(Bank::Open), 0, "it dies again");
    assert_eq!(yard.json(&["dead", "list"])["dead_letters"].as_array().unwrap().len(), 2);
}

#[test]
fn a_doctor_looks_at_queues_too() {
    let yard = Yard::new();
    yard.send("a", "{}");
    yard.work(Bank::Open);
    let found = yard.json(&["doctor", "--config", "taskonce.toml"]);
    assert_eq!((&found["healthy"], &found["sources"][0]["source"]), (&json!(true), &json!("orders")));
    assert!(
        !found["findings"].as_array().unwrap().is_empty()
            && !found["sources"][0]["findings"].as_array().unwrap().is_empty()
    );
    assert_eq!(
        yard.json(&["doctor"])["sources"][0]["source"],
        "orders",
        "the folder's table is the default, as its help says"
    );
    let text = yard.say(&["doctor", "--config", "taskonce.toml"]).text();
    assert!(text.contains("source orders, sqlite:orders.db\n") && text.contains("0 ready, 0 deferred"), "{text}");
    let missing = yard.say(&["doctor", "--source", "sqlite:none.db"]);
    fs::write(yard.desk.path("taskonce.toml"), TABLE.replace("url = \"sqlite:orders.db\"", "")).unwrap();
    let stored = yard.json(&["doctor", "--store", "sqlite:tasks.db"]);
    assert!(
        stored["sources"].as_array().is_none_or(Vec::is_empty),
        "a table that opens no queue is no fault: {stored}"
    );
    assert!(missing.code == 69 && missing.stderr.contains("none.db"), "{missing:?}");
}
