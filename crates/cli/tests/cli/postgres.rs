//! The same over PostgreSQL, whose schema is made by a command of its own.

use taskonce_testkit::shared;

use crate::harness::Desk;

#[test]
fn a_schema_is_made_by_migrate_and_then_a_command_runs_once() {
    let database = shared::database().unwrap();
    let desk = Desk::over(&format!("{}?schema=jobs", database.url()));
    let refused = desk.say(&["run", "--key", "a", "--", "true"]);
    assert_eq!(refused.code, 78, "{}", refused.stderr);
    assert!(refused.stderr.contains("hint: run `taskonce migrate`"), "{}", refused.stderr);
    assert_eq!(desk.say(&["migrate"]).text(), "made schema `jobs`, version 1\n");
    assert_eq!(desk.say(&["migrate"]).text(), "schema `jobs` is up to date: version 1\n");
    assert_eq!(desk.say(&["migrate", "--json"]).json()["migrated"], false);
    desk.script("task.sh", "echo run >> runs; printf 'a\\000b'");
    for _ in 0..2 {
        assert_eq!(desk.say(&["run", "--key", "a", "--", "sh", "task.sh"]).stdout, b"a\0b");
    }
    assert_eq!(desk.lines("runs"), 1);
    assert!(desk.say(&["list", "--state", "done"]).text().contains("default/run@1/a"));
    let doctor = desk.say(&["doctor", "--json"]).json();
    let findings = doctor["findings"].as_array().unwrap();
    assert!(findings.iter().any(|finding| finding["subject"] == "rights" && finding["level"] == "fine"), "{doctor}");
    assert_eq!(desk.say(&["purge", "--json"]).json()["records"], 0);
    assert_eq!(database.psql("select state from jobs.tasks").unwrap(), "done");
}

#[test]
fn the_migration_is_printed_with_the_grants_of_a_role() {
    let database = shared::database().unwrap();
    let desk = Desk::over(&database.url());
    let role = "cli_of_tests";
    let printed = desk.say(&["migrate", "--print", "--grant-to", role]).text();
    database
        .psql("do $$ begin create role cli_of_tests login; exception when duplicate_object or unique_violation then null; end $$")
        .unwrap();
    database.psql(&printed).unwrap();
    let worker = Desk::over(&database.url_of(role));
    assert_eq!(worker.say(&["run", "--key", "a", "--", "true"]).code, 0);
    assert_eq!(worker.say(&["clear", "a", "--reason", "test"]).code, 0);
    assert_eq!(desk.say(&["migrate", "--grant-to", role]).code, 64, "it only prints grants");
}

#[test]
fn a_table_for_steps_is_made_and_purged_in_the_database_of_their_effects() {
    let shop = shared::database().unwrap();
    let (desk, url) = (Desk::new(), shop.url());
    let steps = |words: &[&str]| desk.say(&[words, &["--steps", "--store", url.as_str()]].concat());
    for said in
        ["made table `public.taskonce_step`, version 1\n", "table `public.taskonce_step` is up to date: version 1\n"]
    {
        assert_eq!(steps(&["migrate"]).text(), said);
    }
    assert_eq!(steps(&["migrate", "--json"]).json()["table"], "public.taskonce_step");
    // Made by its printed SQL, it is the same.
    let printed = steps(&["migrate", "--print"]).text();
    let columns =
        "select string_agg(column_name || ' ' || data_type || ' ' || is_nullable, ', ' order by ordinal_position)
                   from information_schema.columns where table_name = 'taskonce_step'";
    let made = shop.psql(columns).unwrap();
    shop.psql(&format!("drop table taskonce_step; {printed}")).unwrap();
    assert_eq!((shop.psql(columns).unwrap(), made.split(", ").count()), (made.clone(), 7));

    shop.psql("insert into taskonce_step select 'n/h@1/' || i, 's', '', null, null, 1, now() - i * interval '1 day' from generate_series(1, 3) i")
        .unwrap();
    assert_eq!(steps(&["purge", "--older-than", "36h"]).text(), "removed 2 step rows\n");
    assert_eq!(steps(&["purge", "--older-than", "36h", "--json"]).json()["steps"], 0);
    assert_eq!(steps(&["purge"]).code, 64, "it needs an age");
    let unnamed = Desk::over(&url).say(&["migrate", "--steps"]);
    assert_eq!(unnamed.code, 64, "the variable names the ledger: {unnamed:?}");
    assert!(unnamed.stderr.contains("`--steps` needs `--store`"), "{unnamed:?}");
}

#[test]
fn the_table_for_steps_is_printed_with_the_grants_of_a_role() {
    let shop = shared::database().unwrap();
    let role = "cli_of_tests";
    shop.psql("do $$ begin create role cli_of_tests login; exception when duplicate_object or unique_violation then null; end $$")
        .unwrap();
    let url = format!("{}?schema=shop", shop.url());
    let printed = Desk::new().say(&["migrate", "--steps", "--print", "--grant-to", role, "--store", &url]).text();
    // The schema has to be there: the rest is the printed SQL's.
    shop.psql(&format!("create schema shop; {printed}")).unwrap();
    let may = |what: &str| shop.psql(&format!("select has_table_privilege('{role}', 'shop.taskonce_step', '{what}')"));
    let rights = ["select", "insert", "update", "delete", "truncate"].map(|what| may(what).unwrap());
    assert_eq!(rights, ["t", "t", "t", "f", "f"]);
    let as_worker = "set role cli_of_tests; insert into shop.taskonce_step values ('n/h@1/a', 's', '', null, null, 1);
                     update shop.taskonce_step set output = '' returning attempt";
    assert_eq!(shop.psql(as_worker).unwrap().lines().last(), Some("1"));
    let file = Desk::new().say(&["migrate", "--steps", "--print", "--grant-to", role, "--store", "sqlite:shop.db"]);
    assert!(file.code != 0 && file.stderr.contains("a SQLite file has no roles"), "{file:?}");
}

#[test]
fn grants_are_refused_where_no_role_could_have_them() {
    for store in [&[][..], &["--store", "redis://127.0.0.1:1"]] {
        let refused = Desk::new().say(&[&["migrate", "--print", "--grant-to", "worker"], store].concat());
        assert_eq!((refused.code, &*refused.stdout), (78, &b""[..]), "{}", refused.stderr);
        assert!(
            refused.stderr.contains("hint: name the PostgreSQL store, `--store postgres://…`"),
            "{}",
            refused.stderr
        );
    }
}

#[test]
fn stores_that_make_what_they_need_have_nothing_to_migrate() {
    let desk = Desk::new();
    assert!(desk.say(&["migrate"]).text().contains("nothing is to be done"));
    assert_eq!(desk.say(&["migrate", "--json"]).json()["needed"], false);
    let redis = Desk::over("redis://127.0.0.1:1");
    assert!(redis.say(&["migrate"]).text().contains("nothing is to be done"));
    assert_eq!(redis.say(&["migrate", "--print", "--json"]).json()["sql"], serde_json::Value::Null);
}
