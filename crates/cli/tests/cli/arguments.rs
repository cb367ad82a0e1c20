//! Wrong usage, help, completions, the man page, and where the store is.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::Desk;

#[test]
fn wrong_usage_is_64_and_ends_with_a_hint() {
    let desk = Desk::new();
    for args in [
        &["nonsense"][..],
        &["run"],
        &["run", "--key", "a"],
        &["run", "--key", "a", "true"],
        &["run", "--", "true"],
        &["run", "--key", "a", "--input", "-", "--", "true"],
        &["run", "--key", "a", "--include", "/x", "--", "true"],
        &["run", "--key", "a", "--wait", "5", "--", "true"],
        &["run", "--key", "a", "--output-max", "1MB", "--", "true"],
        &["run", "--key", "a", "--no-output", "--output-max", "1MiB", "--", "true"],
        &["run", "--key", "a", "--attempts", "0", "--", "true"],
        &["run", "--key", "a", "--effect", "fenced", "--", "true"],
        &["run", "--key", "", "--", "true"],
        &["run", "--key", "a\nb", "--", "true"],
        &["run", "--key", "a", "--handler", "a b", "--", "true"],
        &["run", "--input", "no-such-file", "--", "true"],
        &["clear", "a"],
        &["clear", "a", "--reason", ""],
        &["clear", "a", "--reason", " "],
        &["clear", "a", "--reason", "x\n  2026-01-01 00:00:00  resolved as done by root: forged"],
        &["redrive", "a", "--reason", "\u{1b}[2J"],
        &["resolve", "a", "--done", "--reason", "turned \u{202e} around"],
        &["resolve", "a", "--reason", "x"],
        &["resolve", "a", "--done", "--not-done", "--reason", "x"],
        &["list", "--state", "lost"],
        &["list", "--limit", "0"],
        &["list", "--namespace", "a b"],
        &["key"],
        &["man", "nonsense"],
        &["completions", "nonsense"],
    ] {
        let said = desk.say(args);
        assert_eq!(said.code, 64, "{args:?}: {said:?}");
        let last = said.stderr.lines().last().unwrap_or_default();
        assert!(said.stderr.starts_with("error: ") && last.starts_with("hint: "), "{args:?}: {}", said.stderr);
        assert!(said.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn inputs_that_cannot_be_used_are_64_and_name_the_place() {
    let desk = Desk::new();
    for (input, text) in [
        (&br#"{"a": 1, "a": 2}"#[..], "stdin: "),
        (br#"{"a": NaN}"#, "stdin: "),
        (br#"{"a": 123456789012345678901234567890}"#, "/a"),
        (br#"{"b": 1}"#, "/a"),
        (b"", "stdin: "),
        (b"\xff", "UTF-8"),
    ] {
        let said = desk.say_with(&["run", "--input", "-", "--include", "/a", "--", "true"], input);
        assert_eq!(said.code, 64, "{said:?}");
        assert!(said.stderr.contains(text), "{text} in {}", said.stderr);
    }
}

#[test]
fn help_and_version_are_data() {
    let desk = Desk::new();
    for args in [&["--help"][..], &["run", "--help"], &["-h"], &["help", "run"]] {
        let said = desk.say(args);
        assert_eq!((said.code, said.stderr.as_str()), (0, ""), "{args:?}");
        assert!(said.text().contains("75   busy"), "{args:?}: the exit codes are in the help");
    }
    for args in [["--version"], ["-V"]] {
        assert_eq!(desk.say(&args).text(), format!("taskonce {}\n", env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn completions_and_man_pages_are_printed() {
    let desk = Desk::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = desk.say(&["completions", shell]);
        assert!(said.code == 0 && said.text().contains("redrive"), "{shell}");
    }
    assert!(desk.say(&["man"]).text().contains(".TH taskonce"));
    assert!(desk.say(&["man", "run"]).text().contains("TASKONCE_DOWNSTREAM_KEY"));
    assert!(desk.say(&["man", "--json"]).json()["page"].is_string());
}

#[test]
fn the_default_store_is_made_in_the_state_folder_for_this_user_only() {
    let desk = Desk::new();
    let state = desk.path("odd state?");
    let run = |name: &str, home: &std::path::Path| {
        desk.command(&["run", "--key", "a", "--", "true"])
            .env_remove("TASKONCE_STORE")
            .env(name, home)
            .output()
            .unwrap()
    };
    assert!(run("XDG_STATE_HOME", &state).status.success());
    assert!(state.join("taskonce/tasks.db").is_file());
    assert_eq!(fs::metadata(state.join("taskonce")).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(run("HOME", &desk.path("home")).status.success());
    assert!(desk.path("home/.local/state/taskonce/tasks.db").is_file());
}

#[test]
fn the_option_wins_over_the_environment() {
    let desk = Desk::new();
    let url = format!("sqlite:{}", desk.path("other.db").display());
    assert_eq!(desk.say(&["run", "--store", &url, "--key", "a", "--", "true"]).code, 0);
    assert_eq!(desk.say(&["run", "--key", "b", "--", "true"]).code, 0);
    assert_eq!(desk.say(&["show", "a"]).code, 1);
    assert_eq!(desk.say(&["show", "a", "--store", &url]).code, 0);
}

/// `show` of a mistyped path made an empty file and answered that the task never ran.
#[test]
fn a_missing_file_is_refused_by_all_that_does_not_run_tasks_and_is_not_made() {
    let desk = Desk::new();
    for args in [
        &["show", "a"][..],
        &["list"],
        &["redrive", "a", "--reason", "x"],
        &["clear", "a", "--reason", "x"],
        &["resolve", "a", "--done", "--reason", "x"],
        &["purge"],
        &["purge", "--dry-run"],
        &["doctor"],
    ] {
        let said = desk.say(args);
        assert_eq!((said.code, said.stdout.as_slice()), (69, &b""[..]), "{args:?}: {said:?}");
        let hint = said.stderr.lines().last().unwrap_or_default();
        assert!(hint.starts_with("hint: ") && hint.contains(desk.store()), "{args:?}: {}", said.stderr);
        assert!(!desk.path("tasks.db").exists(), "{args:?}");
        let output = desk.command(args).env_remove("TASKONCE_STORE").output().unwrap();
        assert_eq!(output.status.code(), Some(69), "{args:?}");
        assert!(!desk.path(".local").exists(), "no folder is made: {args:?}");
    }
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let desk = Desk::new();
    let run = desk.command(&["run", "--key", "a", "--", "true"]).env("TASKONCE_STORE", "").output().unwrap();
    assert!(run.status.success(), "{run:?}");
    assert!(desk.path(".local/state/taskonce/tasks.db").is_file());
    assert_eq!(desk.say(&["show", "--store", "", "a"]).code, 78, "an empty option is a mistake");
}

#[test]
fn without_any_place_for_a_store_the_call_is_refused() {
    let desk = Desk::new();
    let output =
        desk.command(&["run", "--key", "a", "--", "true"]).env_remove("TASKONCE_STORE").env_remove("HOME").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(String::from_utf8_lossy(&output.stderr).contains("hint: pass `--store"));
}

#[test]
fn key_explains_how_it_was_derived() {
    let desk = Desk::new();
    let said = desk.say_with(&["key", "--json", "--input", "-", "--include", "/b"], br#"{"b": 1.0, "a": 2}"#);
    let json = said.json();
    assert_eq!(json["canonical"], r#"{"/b":1}"#);
    let id = json["id"].as_str().unwrap();
    assert_eq!(json["key"], format!("default/run@1/{id}"));
    assert!(json["digest"].as_str().unwrap().starts_with(id) && id.len() == 40);
    assert!(id.starts_with(json["fingerprint"].as_str().unwrap()));
    let given = desk.say_with(&["key", "--json", "--key", "x", "--input", "-"], br#"{"b": 1.0, "a": 2}"#).json();
    assert_eq!((&given["key"], &given["canonical"]), (&"default/run@1/x".into(), &r#"{"a":2,"b":1}"#.into()));
    let step = desk.say(&["key", "--json", "--key", "x", "--step", "mail"]).json();
    assert_ne!(step["downstream_key"], given["downstream_key"]);
    assert!(step["fingerprint"].is_null());
}

/// `--lease -5s` was told as an unexpected argument `-5`.
#[test]
fn negative_numbers_are_told_as_what_they_are() {
    let desk = Desk::new();
    for (args, text) in [
        (&["run", "--key", "a", "--lease", "-5s", "--", "true"][..], "'--lease <DURATION>'"),
        (&["run", "--key", "a", "--wait", "-5s", "--", "true"], "this is no duration"),
        (&["run", "--key", "a", "--output-max", "-1MiB", "--", "true"], "this is no size"),
        (&["run", "--key", "a", "--attempts", "-1", "--", "true"], "'--attempts <COUNT>'"),
        (&["list", "--older-than", "-1h"], "this is no duration"),
        (&["list", "--limit", "-1"], "'--limit <COUNT>'"),
    ] {
        let said = desk.say(args);
        assert!(said.code == 64 && said.stderr.contains(text), "{args:?}: {said:?}");
        assert!(!said.stderr.contains("unexpected argument"), "{args:?}: {said:?}");
    }
}

#[test]
fn without_arguments_the_help_is_said_and_it_is_no_error() {
    let desk = Desk::new();
    let said = desk.say(&[]);
    assert_eq!((said.code, said.stdout.len()), (64, 0), "{said:?}");
    assert!(!said.stderr.contains("error:") && said.stderr.contains("Usage: taskonce"), "{}", said.stderr);
}

#[test]
fn output_is_kept_up_to_64_mib_and_a_larger_limit_is_refused_in_its_own_words() {
    let desk = Desk::new();
    let run = |size| desk.say(&["run", "--key", "a", "--output-max", size, "--", "true"]);
    let large = run("65MiB");
    assert_eq!(large.code, 64, "{large:?}");
    assert!(large.stderr.contains("'65MiB'") && large.stderr.contains("64MiB"), "{}", large.stderr);
    assert_eq!(run("64MiB").code, 0);
}

/// A key in full became the id of another task, `default/run@1/default/charge@1/invoice-42`.
#[test]
fn a_key_in_full_is_one_for_run_and_key_as_for_show() {
    let desk = Desk::new();
    let run = |args: &[&str]| desk.say(&[&["run", "--json"], args, &["--", "true"]].concat());
    let first = run(&["--key", "default/charge@1/invoice-42"]).json();
    assert_eq!((&first["key"], &first["outcome"]), (&"default/charge@1/invoice-42".into(), &"ran".into()));
    let again = run(&["--key", "invoice-42", "--handler", "charge"]).json();
    assert_eq!((&again["key"], &again["outcome"]), (&first["key"], &"replayed".into()));
    let both = run(&["--key", "default/charge@1/invoice-42", "--handler", "charge", "--version", "1"]).json();
    assert_eq!(both["outcome"], "replayed");
    let key = desk.say(&["key", "--json", "--key", "default/charge@1/invoice-42"]).json();
    assert_eq!(key["key"], first["key"]);
    for differs in [["--handler", "run"], ["--version", "2"], ["--namespace", "other"]] {
        let said = run(&[&["--key", "default/charge@1/invoice-42"][..], &differs].concat());
        assert_eq!(said.code, 64, "{said:?}");
        assert!(said.stderr.contains(&format!("`{}`", differs.join(" "))), "{}", said.stderr);
        assert!(said.stderr.lines().last().unwrap().starts_with("hint: leave out "), "{}", said.stderr);
    }
    let full = run(&["--key", "default/run@1/default/charge@1/invoice-42"]).json();
    assert_eq!(full["outcome"], "ran", "an id that reads like a key");
}
