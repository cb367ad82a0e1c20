//! `routes`: the table of the page on routes, and a table that is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::harness::Desk;

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/routes.md")
}

fn page() -> String {
    fs::read_to_string(path()).unwrap()
}

/// The first block of code of a language behind some words.
fn block<'a>(page: &'a str, after: &str, language: &str) -> &'a str {
    let (_, rest) = page.split_once(after).unwrap();
    let (_, rest) = rest.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

/// Holds what the page shows behind `after` against what was said. `TASKONCE_BLESS=1` writes the page anew.
fn hold(after: &str, said: &str) {
    let page = page();
    let shown = block(&page, after, "text");
    if std::env::var_os("TASKONCE_BLESS").is_some() {
        let (before, behind) = page.split_once(after).unwrap();
        let behind = behind.replacen(&format!("```text\n{shown}"), &format!("```text\n{said}"), 1);
        return fs::write(path(), format!("{before}{after}{behind}")).unwrap();
    }
    assert!(said == shown, "the page differs; this was said:\n{said}");
}

#[test]
fn the_page_on_routes_says_what_the_command_says() {
    let page = page();
    let desk = Desk::new();
    fs::write(desk.path("taskonce.toml"), block(&page, "## A table that is wrong", "toml")).unwrap();
    let said = desk.say(&["routes"]);
    assert_eq!((said.code, said.text().as_str()), (78, ""));
    hold("(exit code 78):", &said.stderr);
    fs::write(desk.path("taskonce.toml"), block(&page, "## An example", "toml")).unwrap();
    let said = desk.say(&["routes"]);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    hold("says of it:", &said.text());
    let planned = &desk.say(&["routes", "--json"]).json()["routes"];
    let of = |source: &str, handler: &str| {
        let routes = planned.as_array().unwrap();
        routes.iter().find(|route| route["source"] == source && route["handler"] == handler).unwrap().clone()
    };
    assert_eq!(
        of("orders", "charge@2")["planned"][1],
        json!({ "attempt": 3, "earliest_ms": 0, "mean_ms": 3000, "latest_ms": 6000 })
    );
    assert_eq!(of("imports", "stock@1")["attempts_max"], 12);
}

#[test]
fn every_setting_stands_on_the_page() {
    let page = page();
    let of_source =
        ["url", "visibility", "redelivery_max", "dead_letters_for", "deliveries_max", "retry_share", "retry_floor"];
    for name in taskonce::routes::Settings::NAMES.iter().chain(&of_source).chain(taskonce::routes::COMMAND_NAMES) {
        assert!(page.lines().any(|line| line.starts_with(&format!("| `{name}` |"))), "{name}");
    }
}

#[test]
fn a_table_that_is_wrong_is_refused_with_every_fault_and_a_hint() {
    let desk = Desk::new();
    fs::write(desk.path("a.toml"), "[sources.orders]\nvisibility = 30\n[handlers.charge]\nlease = '1ms'\n").unwrap();
    let said = desk.say(&["routes", "--config", "a.toml"]);
    assert_eq!((said.code, said.text().as_str()), (78, ""));
    assert_eq!(
        said.stderr,
        "error: a.toml cannot be used, for 2 reasons\n  \
           line 2: source orders: `visibility` is 30: the unit is missing\n    \
             hint: write a whole number and a unit, such as `500ms`, `30s`, `5m`, `2h` or `14d`\n  \
           line 4: handler charge: `lease` is 1ms; at least 500ms is needed\n    \
             hint: raise it: it has to outlast every pause of a worker, 30s is usual\n\
         hint: change the lines and routes named above\n"
    );
    let faults = &desk.say(&["routes", "--config", "a.toml", "--json"]).json()["error"]["faults"];
    assert_eq!((&faults[0]["line"], &faults[1]["line"]), (&json!(2), &json!(4)));
    let said = desk.say(&["routes"]);
    assert_eq!(said.code, 64, "{said:?}");
    assert!(said.stderr.contains("taskonce.toml") && said.stderr.contains("hint: "), "{said:?}");
}

#[test]
fn the_commands_of_handlers_are_printed_without_the_values_of_their_variables() {
    let desk = Desk::new();
    let table = "[sources.a]\nurl = 'sqlite:queue.db'\n[handlers.charge]\neffect = 'keyed'\ncommand = ['./charge.sh', '--fast']\n\
                 mode = 'pool'\nenvironment = { TOKEN = 'hunter2' }\n[routes.a.charge]\n";
    fs::write(desk.path("taskonce.toml"), table).unwrap();
    let said = desk.say(&["routes"]);
    assert!(
        said.text().contains("HANDLER   MODE  KILL AFTER  COMMAND\ncharge@1  pool  5s          ./charge.sh --fast\n"),
        "{said:?}"
    );
    let said = desk.say(&["routes", "--json"]);
    assert_eq!(said.json()["commands"][0]["command"], json!(["./charge.sh", "--fast"]));
    assert!(said.text().contains("TOKEN") && !said.text().contains("hunter2"), "{said:?}");
}
