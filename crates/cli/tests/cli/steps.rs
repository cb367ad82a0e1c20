//! Steps as people see them, and what they say of one that is in doubt.

use std::fs;

use taskonce::{Context, Effect, Failure, Handler, Input, Key, Outcome, Policy, Run};

use crate::harness::Desk;

/// A task of a library's handler: it charges, and sends a mail that must not be sent twice.
struct Order {
    runtime: tokio::runtime::Runtime,
    ledger: taskonce::Ledger,
    task: taskonce::Task,
}

const KEY: &str = "default/order@1/17";

impl Order {
    fn of(desk: &Desk) -> Order {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let task = Handler::new("order", "1").unwrap().task("17", &Input::from_json(b"{}").unwrap()).unwrap();
        assert_eq!(task.key.as_str(), KEY);
        Order { runtime, ledger: taskonce::open(desk.store()).unwrap(), task }
    }

    /// Runs it; `mail` is what becomes of the mail.
    fn run(&self, mail: Result<&str, Failure>) -> Outcome<String> {
        let policy = Policy { backoff: taskonce::Backoff::NONE, ..Policy::new(Effect::Repeatable) };
        let handler = |context: Context| async move {
            context.step_of("charge", Effect::Keyed).input(&1200).run(async |_| Ok("charged".to_owned())).await?;
            context.step("mail", Effect::Unrepeatable, async |_| mail.map(str::to_owned)).await
        };
        self.runtime.block_on(self.ledger.run(&self.task, &policy, handler)).unwrap()
    }

    fn parked(desk: &Desk) -> Order {
        let order = Order::of(desk);
        assert_eq!(order.run(Err(Failure::retryable("connection cut"))).name(), "failed");
        order
    }
}

#[test]
fn show_lists_the_steps_and_what_to_do_about_one_in_doubt() {
    let desk = Desk::new();
    let _order = Order::parked(&desk);
    let text = desk.say(&["show", KEY]).text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].contains("whether its step `mail` took effect is in doubt"), "{text}");
    let at = lines.iter().position(|line| *line == "  steps").unwrap();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (charge, mail) = (words(lines[at + 1]), words(lines[at + 2]));
    assert_eq!(charge[..6], ["1", "charge", "keyed", "done", "attempt", "1"], "{text}");
    assert_eq!(mail[..7], ["2", "mail", "unrepeatable", "begun", "attempt", "1", "-"], "{text}");
    assert!(lines[at + 1].contains("output 8 B"), "{text}");
    assert!(
        text.contains(&format!("hint: look at the effect of the step, then `taskonce resolve {KEY} --step-done")),
        "{text}"
    );

    let steps = desk.say(&["show", "--json", KEY]).json()["steps"].clone();
    assert_eq!(
        (&steps[0]["name"], &steps[0]["effect"], &steps[0]["state"]),
        (&"charge".into(), &"keyed".into(), &"done".into())
    );
    assert_eq!(
        (&steps[1]["state"], &steps[1]["attempt"], &steps[1]["output"]["kept"]),
        (&"begun".into(), &1.into(), &false.into())
    );
    assert!(steps[0]["ran_for_ms"].is_u64() && steps[0]["input"].as_str().is_some_and(|digest| digest.len() == 32));
    assert_ne!(steps[0]["input"], steps[1]["input"]);
}

#[test]
fn a_step_that_took_effect_is_resolved_and_its_task_goes_on_behind_it() {
    let desk = Desk::new();
    let order = Order::parked(&desk);
    fs::write(desk.path("value"), "\"message-17\"\n").unwrap();
    let said =
        desk.say(&["resolve", KEY, "--step-done=mail", "--output", "value", "--reason", "in the provider's log"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.text().contains("resolved: step `mail` of task `default/order@1/17` took effect"), "{}", said.text());
    let shown = desk.say(&["show", "--json", KEY]).json();
    assert_eq!((&shown["state"], &shown["steps"][1]["state"]), (&"waiting".into(), &"done".into()));
    let line = shown["history"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&line["kind"], &line["note"]), (&"resolved_done".into(), &"step `mail`: in the provider's log".into()));
    assert!(line["who"].as_str().unwrap().starts_with("ada@"), "{line}");
    assert_eq!(
        order.run(Err(Failure::permanent("it must not be sent again"))).into_value().as_deref(),
        Some("message-17")
    );
}

#[test]
fn a_step_that_had_no_effect_is_resolved_and_runs_again() {
    let desk = Desk::new();
    let order = Order::parked(&desk);
    let redriven = desk.say(&["redrive", KEY]).text();
    assert!(redriven.contains("its step `mail` is still in doubt, and parks it again"), "{redriven}");
    assert_eq!(order.run(Ok("sent")).name(), "failed", "a redrive says nothing about the step");
    let said = desk.say(&["resolve", KEY, "--not-done", "--reason", "not in the provider's log"]).text();
    assert!(said.contains("resolved: step `mail` of task `default/order@1/17` had no effect"), "{said}");
    assert_eq!(order.run(Ok("sent")).into_value().as_deref(), Some("sent"));
    let steps = desk.say(&["show", "--json", KEY]).json()["steps"].clone();
    assert_eq!(steps[1]["output"]["reason"], "not_kept", "a done task needs no values of its steps");
}

#[test]
fn only_the_step_in_doubt_is_resolved() {
    let desk = Desk::new();
    let order = Order::parked(&desk);
    let other = desk.say(&["resolve", KEY, "--step-done=charge", "--reason", "x"]);
    assert_eq!(other.code, 1);
    assert!(
        other.stderr.contains("error: step `mail` of task `default/order@1/17` is in doubt, not `charge`"),
        "{other:?}"
    );
    assert_eq!(desk.say(&["resolve", KEY, "--not-done", "--reason", "x"]).code, 0);
    assert_eq!(desk.say(&["resolve", KEY, "--step-done", "--reason", "x"]).code, 1, "it waits");
    order.run(Ok("sent")).into_value().unwrap();

    assert_eq!(desk.say(&["run", "--key", "a", "--effect", "unrepeatable", "--", "false"]).code, 1);
    let none = desk.say(&["resolve", "a", "--step-done", "--reason", "x"]);
    assert!(none.code == 1 && none.stderr.contains("no step of it is in doubt"), "{none:?}");
    assert!(none.stderr.lines().last().unwrap().starts_with("hint: look at the effect"), "{none:?}");
}

#[test]
fn an_output_that_a_person_gives_is_replayed_by_run() {
    let desk = Desk::new();
    let cases: [(&str, &[u8], &[&str], &str); 4] = [
        ("json", b"{\"id\": 17}\n", &[], "application/json"),
        ("text", b"invoice 17\n", &[], "text/plain; charset=utf-8"),
        ("bytes", &[0, 159, 255], &[], "application/octet-stream"),
        ("named", b"a,b\n", &["--content-type", "text/csv"], "text/csv"),
    ];
    for (id, bytes, more, content_type) in cases {
        let call = ["run", "--key", id, "--effect", "unrepeatable", "--", "false"];
        assert_eq!(desk.say(&call).code, 1);
        let args = [&["resolve", id, "--done", "--output", "-", "--reason", "seen"][..], more].concat();
        let said = desk.say_with(&args, bytes);
        assert_eq!(said.code, 0, "{said:?}");
        assert!(said.text().contains(&format!("of {content_type}")), "{}", said.text());
        let again = desk.say(&call);
        assert_eq!((again.code, &again.stdout[..]), (0, bytes), "{id}");
        assert_eq!(desk.say(&["show", "--output", id]).stdout, bytes);
        let output = desk.say(&["show", "--json", id]).json()["output"].clone();
        assert_eq!(output, serde_json::json!({ "kept": true, "content_type": content_type, "bytes": bytes.len() }));
        let json = desk.say(&["run", "--json", "--key", id, "--effect", "unrepeatable", "--", "false"]).json();
        assert_eq!((&json["outcome"], &json["content_type"]), (&"replayed".into(), &content_type.into()));
    }
}

#[test]
fn an_output_that_cannot_be_given_is_an_error_of_its_own() {
    let desk = Desk::new();
    let _order = Order::parked(&desk);
    fs::write(desk.path("text"), "message-17").unwrap();
    fs::File::create(desk.path("large")).unwrap().set_len(64 * 1024 * 1024 + 1).unwrap();
    fs::write(desk.path("much"), format!("\"{}\"", "x".repeat(1024 * 1024))).unwrap();
    let cases: [(&[&str], i32, &str, &str); 8] = [
        (&["--done", "--output", "missing"], 64, "no_such_file", "file `missing`: "),
        (&["--done", "--output", "."], 64, "unreadable_file", "file `.`: "),
        (&["--done", "--output", "large"], 64, "too_large", "file `large` is larger than 64 MiB"),
        (
            &["--step-done", "--output", "text"],
            64,
            "not_json",
            "file `text` is not JSON, which the value of a step is read as",
        ),
        (
            &["--done", "--output", "text", "--content-type", "application/json"],
            64,
            "not_json",
            "which it was said to be",
        ),
        (&["--step-done", "--output", "much"], 69, "bad_output", "the output has 1048578 bytes"),
        (&["--done", "--output", "text", "--content-type", "nonsense"], 64, "", "write `type/subtype`"),
        (&["--not-done", "--output", "text"], 64, "", "cannot be used with"),
    ];
    for (args, code, kind, text) in cases {
        let said = desk.say(&[&["resolve", KEY, "--reason", "x"][..], args].concat());
        assert_eq!(said.code, code, "{said:?}");
        assert!(said.stderr.contains(text), "`{text}` in {}", said.stderr);
        assert!(said.stderr.lines().any(|line| line.starts_with("hint: ") || kind.is_empty()), "{}", said.stderr);
        if !kind.is_empty() {
            let json = desk.say(&[&["resolve", KEY, "--json", "--reason", "x"][..], args].concat());
            let told: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap_or_default();
            let error = if told["error"].is_object() { told["error"].clone() } else { told };
            assert_eq!(error["kind"], kind, "{json:?}");
        }
    }
    let key = Key::parse(KEY).unwrap();
    assert_eq!(desk.say(&["show", "--json", key.as_str()]).json()["state"], "parked", "nothing was changed");
}

#[test]
fn a_table_for_steps_is_made_and_purged_in_the_file_of_their_effects() {
    let desk = Desk::new();
    let shop = desk.path("shop.db");
    let url = format!("sqlite:{}", shop.display());
    let steps = |words: &[&str]| desk.say(&[words, &["--steps", "--store", url.as_str()]].concat());
    let missing = steps(&["migrate"]);
    assert_eq!((missing.code, shop.exists()), (69, false), "{missing:?}");
    let conn = taskonce::sqlite::rusqlite::Connection::open(&shop).unwrap();
    conn.execute_batch("CREATE TABLE seat (number INTEGER)").unwrap();
    for said in ["made table `taskonce_step`, version 1\n", "table `taskonce_step` is up to date: version 1\n"] {
        assert_eq!(steps(&["migrate"]).text(), said);
    }
    // Its printed SQL may be run again.
    conn.execute_batch(&steps(&["migrate", "--print"]).text()).unwrap();
    conn.execute_batch("INSERT INTO taskonce_step VALUES ('n/h@1/a', 's', x'00', NULL, NULL, 1, 0)").unwrap();
    assert_eq!(steps(&["purge", "--older-than", "1d"]).text(), "removed 1 step row\n");
}
