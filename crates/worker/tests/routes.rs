//! The table of routes, as users make it: in code and from a file.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use taskonce_core::ErrorKind;
use taskonce_core::json::Fields;
use taskonce_core::policy::{Effect, Policy};
use taskonce_worker::routes::{
    BreakerRules, CommandRules, Fault, Mode, Rate, RateRules, RouteId, Routes, Settings, SourceRules, StoreAway,
    WithoutKey,
};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The faults of a file, one a line, as `FAULT | HINT`.
fn refused(text: &str) -> Vec<String> {
    let Err(refused) = Routes::from_toml(text) else { panic!("accepted: {text}") };
    refused.faults.iter().map(|fault| format!("{fault} | {}", fault.hint)).collect()
}

fn warned(text: &str) -> Vec<String> {
    let routes = Routes::from_toml(text).unwrap_or_else(|refused| panic!("{refused}"));
    routes.warnings().iter().map(Fault::to_string).collect()
}

#[test]
fn what_a_route_does_not_say_is_inherited_from_handler_source_and_defaults() {
    let text = r#"
        [defaults]
        namespace = "shop"
        effect = "keyed"
        attempts_max = 4
        weight = 2
        run_max = "1m"

        [sources.orders]
        weight = 3
        lease = "10s"

        [sources.imports]
        retry_share = 0.5
        retry_floor = "6/m"

        [handlers.charge]
        versions = ["1", "2"]
        lease = "20s"
        concurrency_max = 7

        [handlers."charge@2"]
        effect = "transactional"
        concurrency_max = 8

        [routes.orders.charge]
        concurrency_max = 9
        [routes.orders."charge@2"]
        run_max = "none"
        [routes.imports."charge@2"]
    "#;
    let routes = Routes::from_toml(text).unwrap();
    let of = |source, handler| routes.find(source, handler).unwrap();
    let told: Vec<_> = routes
        .iter()
        .map(|route| {
            let policy = &route.policy;
            let lease = policy.lease.as_secs();
            let run_max = policy.run_max.map(|run_max| run_max.as_secs());
            (route.name(), policy.effect.name(), route.weight, lease, route.concurrency_max, run_max)
        })
        .collect();
    assert_eq!(
        told,
        [
            ("orders × charge@1".to_owned(), "keyed", 3, 20, 9, Some(60)),
            ("orders × charge@2".to_owned(), "transactional", 3, 20, 9, None),
            ("imports × charge@2".to_owned(), "transactional", 2, 20, 8, Some(60)),
        ]
    );
    assert!(routes.iter().all(|route| route.policy.attempts_max == 4 && route.keys.namespace() == "shop"));
    assert_eq!(of("imports", "charge@2").keys.to_string(), "shop/charge@2");
    assert!(routes.find("imports", "charge@1").is_none() && routes.find("orders", "charge").is_none());
    let imports = routes.source("imports").unwrap();
    assert_eq!((imports.retry_share, imports.retry_floor.to_string()), (0.5, "6/m".to_owned()));
    assert_eq!(routes.of_source("orders").map(|route| route.id).collect::<Vec<_>>(), [RouteId(0), RouteId(1)]);
}

#[test]
fn every_setting_of_a_file_arrives() {
    let text = r#"
        [sources.orders]
        visibility = "40s"
        redelivery_max = "4d"
        dead_letters_for = "7d"
        deliveries_max = 1000
        retry_share = 0.25
        retry_floor = "2/s"
        [handlers.charge]
        namespace = "shop"
        effect = "unrepeatable"
        lease = "31s"
        run_max = "5m"
        retention = "20d"
        output_retention = "2d"
        output_max = "2MiB"
        store_may_forget = true
        attempts_max = 9
        permanent_attempts_max = 2
        poison_attempts_max = 3
        crashes_max = 4
        backoff_min = "2s"
        backoff_max = "3m"
        backoff_factor = 1.5
        concurrency_max = 0x10
        rate = "600/m"
        rate_burst = 30
        breaker_failures = 5
        breaker_pause = "7s"
        weight = 6
        store_away = "closed"
        without_key = { derive = ["/id"], optional = ["/line"] }
        [routes.orders.charge]
    "#;
    let routes = Routes::from_toml(text).unwrap();
    let route = routes.find("orders", "charge@1").unwrap();
    let said = Settings {
        namespace: Some(taskonce_core::key::Name::new("shop").unwrap()),
        effect: Some(Effect::Unrepeatable),
        lease: Some(seconds(31)),
        run_max: Some(Some(seconds(300))),
        retention: Some(seconds(20 * 86_400)),
        output_retention: Some(seconds(2 * 86_400)),
        output_max: Some(2 * 1024 * 1024),
        store_may_forget: Some(true),
        attempts_max: Some(9),
        permanent_attempts_max: Some(2),
        poison_attempts_max: Some(Some(3)),
        crashes_max: Some(4),
        backoff_min: Some(seconds(2)),
        backoff_max: Some(seconds(180)),
        backoff_factor: Some(1.5),
        concurrency_max: Some(16),
        rate: Some(Some(Rate { starts: 600, per: seconds(60) })),
        rate_burst: Some(30),
        breaker_failures: Some(Some(5)),
        breaker_pause: Some(seconds(7)),
        weight: Some(6),
        store_away: Some(StoreAway::Closed),
        without_key: Some(WithoutKey::Derive(Fields::new(["/id"]).unwrap().optional(["/line"]).unwrap())),
    };
    assert_eq!(said.names(), Settings::NAMES, "this test says every setting");
    assert!(Settings::NAMES.iter().all(|name| text.contains(&format!("        {name} = "))));
    let rules = SourceRules {
        visibility: Some(seconds(40)),
        redelivery_max: Some(seconds(4 * 86_400)),
        dead_letters_for: Some(seconds(7 * 86_400)),
        deliveries_max: Some(1000),
        retry_share: 0.25,
        retry_floor: Rate::per_second(2),
        ..SourceRules::new("orders")
    };
    let in_code = Routes::builder()
        .source(rules.clone(), Settings::default())
        .handler("charge", said)
        .route("orders", "charge", Settings::default())
        .build()
        .unwrap();
    assert_eq!(route, in_code.find("orders", "charge@1").unwrap());
    assert_eq!(routes.source("orders"), Some(&rules));
    assert_eq!(route.rate, Some(RateRules { rate: Rate { starts: 600, per: seconds(60) }, burst: 30 }));
    assert_eq!(route.breaker, Some(BreakerRules { failures: 5, pause: seconds(7) }));
    assert_eq!((route.policy.attempts_max, route.policy.output_max), (9, 2 * 1024 * 1024));
    assert_eq!(routes.warnings(), []);
}

#[test]
fn a_route_of_defaults_is_a_policy_of_defaults() {
    let text = "[sources.orders]\n[handlers.charge]\neffect = 'keyed'\n[routes.orders.charge]";
    let routes = Routes::from_toml(text).unwrap();
    let route = routes.find("orders", "charge@1").unwrap();
    assert_eq!(route.policy, Policy::new(Effect::Keyed));
    assert_eq!((route.concurrency_max, route.rate, route.weight), (16, None, 1));
    assert_eq!(route.breaker, Some(BreakerRules { failures: 20, pause: seconds(30) }));
    assert_eq!((route.store_away, &route.without_key), (StoreAway::Closed, &WithoutKey::Refuse));
    assert_eq!((routes.get(route.id), routes.warnings()), (route, &[][..]));
}

#[test]
fn everything_wrong_with_a_file_is_told_at_once_with_its_line_and_what_to_do() {
    let text = r#"[defaults]
lease = 30
leese = "30s"
backoff_factor = 0.5
[sources.orders]
retry_share = 1.5
retry_floor = "0/s"
visibility = "0s"
visability = "1s"
[handlers.charge]
effect = "exactly-once"
attempts_max = 0
rate = "0/s"
output_max = "1MB"
store_may_forget = "yes"
without_key = "guess"
[handlers."mail@2"]
versions = ["1"]
effect = "keyed"
run_max = "0s"
[routes.ordres.charge]
[routes.orders.chargee]
[routes.orders.mail]
lease = "1ms"
[other]
"#;
    assert_eq!(
        refused(text),
        [
            "line 2: defaults: `lease` is 30: the unit is missing | write a whole number and a unit, such as `500ms`, `30s`, `5m`, `2h` or `14d`",
            "line 3: defaults: there is no setting `leese` | did you mean `lease`?",
            "line 4: defaults: `backoff_factor` is 0.5; at least 1 is needed | say 2 to double the delay each time, 1 to keep it",
            "line 6: source orders: `retry_share` is 1.5; it is more than 0 and at most 1 | say 0.2 for one retry among five starts, 1 for no limit",
            "line 7: source orders: `retry_floor` is 0/s: where nothing new comes no retry would ever start | say at least `1/h`",
            "line 8: source orders: `visibility` is zero: every delivery would come again at once | say what the broker is set to",
            "line 9: source orders: there is no setting `visability` | did you mean `visibility`?",
            "line 11: handler charge: `effect` is \"exactly-once\": there is no such choice | write one of `\"transactional\"`, `\"keyed\"`, `\"fenced\"`, `\"unrepeatable\"`, `\"repeatable\"`",
            "line 12: handler charge: `attempts_max` is 0 | say 1 for a single attempt: the first run is one",
            "line 13: handler charge: `rate` is 0/s: nothing would ever start | raise it, or say `\"none\"` for no limit",
            "line 14: handler charge: `output_max` is \"1MB\": this is no size | write a whole number and a unit, such as `1024B`, `64KiB` or `1MiB`",
            "line 15: handler charge: `store_may_forget` is \"yes\": this is neither true nor false | write `true` or `false`, without quotes",
            "line 16: handler charge: `without_key` is \"guess\": there is no such choice | write `\"refuse\"`, `\"coordinates\"` or `{ derive = [\"/order/id\"] }`",
            "line 18: handler mail@2: it is one version already | put `versions` where the handler stands without `@`",
            "line 20: handler mail@2: `run_max` is zero: no handler could run | raise it, or say `\"none\"` for no limit",
            "line 21: route ordres × charge: there is no source `ordres` | there is a source `orders`; else add `[sources.NAME]`",
            "line 22: route orders × chargee: there is no handler `chargee` | there is a handler `charge`; else add `[handlers.NAME]`",
            "line 24: route orders × mail: `lease` is 1ms; at least 500ms is needed | raise it: it has to outlast every pause of a worker, 30s is usual",
            "line 25: there is no setting `other` | known here: store, defaults, sources, handlers, routes",
        ]
    );
}

#[test]
fn settings_that_contradict_each_other_name_the_route_and_both_places() {
    let text = r#"[defaults]
retention = "1h"
[sources.orders]
visibility = "2h"
redelivery_max = "4d"
dead_letters_for = "7d"
deliveries_max = 3
[handlers.charge]
effect = "fenced"
run_max = "3h"
poison_attempts_max = 6
[handlers.mail]
effect = "keyed"
backoff_max = "100ms"
[handlers.ping]
[routes.orders.charge]
store_away = "open"
[routes.orders.mail]
[routes.orders.ping]
"#;
    let told = refused(text);
    for expected in [
        "route orders × charge@1: `retention` 1h (line 2) is below `redelivery_max` 4d of source orders: a copy could come when the record is gone, and run again | raise `retention` to at least 12d",
        "route orders × mail@1: `retention` 1h (line 2) is below `redelivery_max` 4d of source orders: a copy could come when the record is gone, and run again | raise `retention` to at least 11d",
        "route orders × charge@1: `retention` 1h (line 2) is below `run_max` 3h (line 10): a record would go while its handler runs | raise `retention`, or lower `run_max`",
        "route orders × charge@1: `poison_attempts_max` 6 (line 11) is above `attempts_max` 5 (the default), and never reached | lower `poison_attempts_max`, or raise `attempts_max`",
        "routes orders × charge@1, orders × mail@1: source orders gives up after 3 deliveries, before `attempts_max` 5 (the default) are made; deliveries of a busy task count too | raise the broker's limit to 50 or more, and say so in `deliveries_max`",
        "route orders × charge@1: `store_away` open (line 17) cannot be with `effect` fenced (line 9): the fencing token comes from the record | say `store_away = \"closed\"`: its deliveries wait until the store is back",
        "route orders × mail@1: `backoff_min` 1s (the default) is above `backoff_max` 100ms (line 14) | set both, the first delay's bound and that of every delay",
        "route orders × ping@1: nothing says what kind of effect it has | set `effect` of the handler to one of `transactional`, `keyed`, `fenced`, `unrepeatable`, `repeatable`: it decides what can be promised",
    ] {
        assert!(told.iter().any(|line| line == expected), "{expected}\nis not in\n{}", told.join("\n"));
    }
}

#[test]
fn numbers_that_do_not_fit_together_are_warned_about() {
    let text = r#"[sources.orders]
visibility = "10s"
redelivery_max = "10d"
dead_letters_for = "7d"
deliveries_max = 20
[sources.imports]
visibility = "1h"
redelivery_max = "1h"
[sources.idle]
[handlers.charge]
effect = "keyed"
rate_burst = 5
poison_attempts_max = 2
attempts_max = 40
deliveries_max = 1
[handlers.left]
[routes.orders.charge]
attempts_max = 3
[routes.imports.charge]
lease = "2s"
run_max = "1s"
"#;
    let told = refused(text);
    assert!(told[0].starts_with("line 15: handler charge: there is no setting `deliveries_max`"), "{told:?}");
    let told = warned(&text.replace("deliveries_max = 1\n", ""));
    for expected in [
        "route orders × charge@1: `poison_attempts_max` 2 (line 13) says nothing without `run_max`: no handler ever runs too long",
        "routes orders × charge@1, imports × charge@1: `rate_burst` (line 12) says nothing without `rate`",
        "route orders × charge@1: `visibility` 10s of source orders is below half of `lease` 30s (the default): a pause that the lease outlasts brings running tasks again",
        "route orders × charge@1: `retention` 14d (the default) is below 17d: copies, dead letters and the longest run together",
        "route orders × charge@1: source orders gives up after 20 deliveries; deliveries of a busy task count too, and `attempts_max` 3 (line 17) are made",
        "route imports × charge@1: `lease` 2s (line 19) is below 5s: a pause of the machine may lose it",
        "route imports × charge@1: `visibility` 1h of source imports is far above `lease` 2s (line 19): a killed worker's task waits for it",
        "route imports × charge@1: its attempts may take 5 h 7 min in all, and source imports forgets what was sent after 1h",
        "line 9: source idle: no handler serves it",
        "line 15: handler left: it serves no source",
    ] {
        assert!(told.iter().any(|line| line == expected), "{expected}\nis not in\n{}", told.join("\n"));
    }
    assert_eq!(told.len(), 10, "{}", told.join("\n"));
}

#[test]
fn a_lease_above_run_max_is_warned_about_and_allowed() {
    let text = "[sources.a]\n[handlers.b]\neffect = 'keyed'\nrun_max = '10s'\n[routes.a.b]";
    let says = "route a × b@1: `lease` 30s (the default) is above `run_max` 10s (line 4): a killed worker's task waits longer than any run lasts";
    assert_eq!(warned(text), [says]);
}

#[test]
fn what_no_toml_is_says_where() {
    for (text, line) in
        [("[defaults\n", 1), ("[a]\nb = \n", 2), ("[sources.a]\n[sources.a]\n", 2), ("x = 1\n\nx = 2\n", 3)]
    {
        let told = Routes::from_toml(text).unwrap_err();
        assert_eq!(told.faults[0].line, Some(line), "{told}");
        assert!(told.faults[0].text.starts_with("this is no TOML"), "{told}");
    }
    assert_eq!(refused("").len(), 1, "an empty table routes nothing");
}

#[test]
fn a_table_that_is_none_or_that_a_dot_has_made_is_told_how_to_be_written() {
    for (text, says) in [
        ("sources = 3", "line 1: this is 3; a table is needed | write `[sources]` and below it what is in it"),
        (
            "[routes.a]\nb = true",
            "line 2: route a × b: this is true; a table is needed | write `[routes.a.b]` and below it what is in it",
        ),
        (
            "[handlers]\n'c@1' = 1",
            "line 2: handler c@1: this is 1; a table is needed | write `[handlers.\"c@1\"]` and below it what is in it",
        ),
        (
            "[handlers.a.b]\neffect = 'keyed'",
            "line 1: handler a: there is no setting `b` | no setting is a table; put a name that has a dot in quotes: `[handlers.\"a.b\"]`",
        ),
        (
            "[defaults]\nweight = 1001",
            "line 2: defaults: `weight` is above 1000: others would wait for long rounds | lower all weights; only their ratio counts",
        ),
    ] {
        let told = refused(text);
        assert!(told.iter().any(|line| line == says), "{says}\nis not in\n{}", told.join("\n"));
    }
    assert!(refused("[routes.a.b@2]")[0].contains("`\"charge@2\"`"), "an unquoted `@` is no TOML");
}

#[test]
fn a_name_twice_in_code_is_refused_and_every_fault_becomes_an_error_with_a_hint() {
    let keyed = Settings { effect: Some(Effect::Keyed), ..Settings::default() };
    let refused = Routes::builder()
        .source(SourceRules::new("orders"), Settings::default())
        .source(SourceRules::new("orders"), Settings::default())
        .handler("charge@2", keyed.clone())
        .handler("charge@2", keyed)
        .handler("a b", Settings::default())
        .route("orders", "charge", Settings::default())
        .route("orders", "charge", Settings::default())
        .build()
        .unwrap_err();
    let told: Vec<String> = refused.faults.iter().map(Fault::to_string).collect();
    for twice in ["source orders", "handler charge@2", "route orders × charge"] {
        assert!(told.contains(&format!("{twice}: it is there twice")), "{told:?}");
    }
    assert_eq!(told.len(), 4, "{told:?}");
    let error = taskonce_core::Error::from(refused);
    assert_eq!(error.kind(), ErrorKind::BadRoutes);
    assert!(error.hint().contains("keep one of them"), "{error:?}");
}

#[test]
fn a_source_that_was_opened_is_held_against_what_was_said_of_it() {
    let text = "[sources.a]\nvisibility = '30s'\n[handlers.b]\neffect = 'keyed'\n[routes.a.b]";
    let routes = Routes::from_toml(text).unwrap();
    assert_eq!(routes.warnings_for("a", seconds(30)), []);
    let told: Vec<String> = routes.warnings_for("a", seconds(600)).iter().map(Fault::to_string).collect();
    assert_eq!(
        told,
        [
            "source a: `visibility` is said to be 30s, and is 10m",
            "route a × b@1: `visibility` 10m of source a is far above `lease` 30s: a killed worker's task waits for it",
        ]
    );
}

fn many(count: usize) -> Routes {
    let keyed = Settings { effect: Some(Effect::Keyed), ..Settings::default() };
    let sources = (count / 1000).max(1);
    let mut table = Routes::builder().defaults(keyed);
    for source in 0..sources {
        table = table.source(SourceRules::new(format!("source-{source}")), Settings::default());
    }
    for handler in 0..count / sources {
        table = table.handler(&format!("handler-{handler}@1"), Settings::default());
        for source in 0..sources {
            table = table.route(&format!("source-{source}"), &format!("handler-{handler}"), Settings::default());
        }
    }
    table.build().unwrap_or_else(|refused| panic!("{refused}"))
}

#[test]
fn a_route_is_found_among_ten_thousand_without_a_scan() {
    /// A scan would take some thousand times as long; a cache that is missed and a busy machine some times.
    const SLOWER_MAX: u32 = 100;
    let time = |routes: &Routes| {
        let last = routes.iter().last().unwrap();
        let (source, handler) = (last.source.clone(), last.handler.clone());
        let rounds = (0..5).map(|_| {
            let begun = Instant::now();
            for _ in 0..2_000 {
                assert_eq!(routes.find(&source, &handler).unwrap().id, last.id);
                assert!(routes.find(&source, "nobody@1").is_none());
            }
            begun.elapsed()
        });
        rounds.min().unwrap()
    };
    let (few, ten_thousand) = (many(2), many(10_000));
    assert_eq!(ten_thousand.iter().len(), 10_000);
    let (of_few, of_many) = (time(&few), time(&ten_thousand));
    assert!(of_many < of_few * SLOWER_MAX, "{of_few:?} among two, {of_many:?} among ten thousand");
}

proptest! {
    #[test]
    fn every_table_that_is_accepted_has_policies_that_are(
        lease in 0_u64..200,
        run_max in prop::option::of(prop::option::of(0_u64..200)),
        retention in 0_u64..200,
        backoff in (0_u64..100, 0_u64..100, 0.0_f64..3.0),
        attempts in (0_u32..6, 0_u32..6, prop::option::of(prop::option::of(0_u32..6)), 0_u32..4),
    ) {
        let settings = Settings {
            effect: Some(Effect::Keyed),
            lease: Some(seconds(lease)),
            run_max: run_max.map(|run_max| run_max.map(seconds)),
            retention: Some(seconds(retention)),
            backoff_min: Some(seconds(backoff.0)),
            backoff_max: Some(seconds(backoff.1)),
            backoff_factor: Some(backoff.2),
            attempts_max: Some(attempts.0),
            permanent_attempts_max: Some(attempts.1),
            poison_attempts_max: attempts.2,
            crashes_max: Some(attempts.3),
            ..Settings::default()
        };
        let built = Routes::builder()
            .source(SourceRules::new("a"), Settings::default())
            .handler("b", settings.clone())
            .route("a", "b", Settings::default())
            .build();
        let policy = Policy {
            lease: seconds(lease),
            run_max: run_max.flatten().map(seconds),
            retention: seconds(retention),
            backoff: taskonce_core::policy::Backoff {
                delay_min: seconds(backoff.0),
                delay_max: seconds(backoff.1),
                factor: backoff.2,
            },
            attempts_max: attempts.0,
            permanent_attempts_max: attempts.1,
            poison_attempts_max: attempts.2.flatten(),
            crashes_max: attempts.3,
            ..Policy::new(Effect::Keyed)
        };
        prop_assert_eq!(built.is_ok(), policy.check().is_ok(), "{:?} {:?}", built.map(|_| ()), policy.check());
    }

    #[test]
    fn no_text_makes_reading_a_table_panic(text in "(\\[|\\]|\"|=|\\.|\n|#|[a-z]{1,6}|none|sources|routes|[0-9]){0,40}") {
        let _read = Routes::from_toml(&text);
    }
}

#[test]
fn a_file_names_its_store_its_sources_and_the_commands_of_its_handlers() {
    let routes = Routes::from_toml(
        r#"
        store = "sqlite:tasks.db"
        [sources.orders]
        url = "sqlite:queue.db?visibility=10s"
        [sources.imports]
        [handlers.charge]
        versions = ["1", "2"]
        effect = "keyed"
        command = ["./charge.sh", "--fast"]
        kill_after = "2s"
        environment = { REGION = "eu" }
        [handlers."charge@2"]
        command = ["python3", "charge.py"]
        mode = "pool"
        tasks_max = 1000
        directory = "/srv/charge"
        [handlers.mail]
        effect = "repeatable"
        [routes.orders.charge]
        [routes.imports.mail]
        "#,
    )
    .unwrap_or_else(|refused| panic!("{refused}"));
    assert_eq!(routes.store(), Some("sqlite:tasks.db"));
    assert_eq!(routes.source("orders").unwrap().url.as_deref(), Some("sqlite:queue.db?visibility=10s"));
    assert_eq!(routes.source("imports").unwrap().url, None);
    let environment = vec![("REGION".to_owned(), "eu".to_owned())];
    let first = CommandRules {
        kill_after: seconds(2),
        environment: environment.clone(),
        ..CommandRules::new(["./charge.sh", "--fast"])
    };
    let second = CommandRules {
        mode: Mode::Pool,
        kill_after: seconds(2),
        tasks_max: Some(1000),
        directory: Some("/srv/charge".into()),
        environment,
        ..CommandRules::new(["python3", "charge.py"])
    };
    assert_eq!(routes.command("charge@1").map(|rules| &**rules), Some(&first));
    assert_eq!(routes.command("charge@2").map(|rules| &**rules), Some(&second));
    assert_eq!(routes.command("mail@1"), None);
    assert!(routes.warnings().is_empty(), "{:?}", routes.warnings());
}

#[test]
fn what_is_wrong_with_a_command_or_a_url_is_told_when_it_is_loaded() {
    let refused = refused(
        "store = 'tasks.db'\n\
         [sources.a]\n\
         url = 'sqlite:queue.db?name=b'\n\
         [sources.b]\n\
         url = 7\n\
         [sources.c]\n\
         url = 'sqlite:queue.db?name=b'\n\
         [handlers.charge]\n\
         effect = 'keyed'\n\
         command = 'charge.sh'\n\
         mode = 'pol'\n\
         kill_after = '2h'\n\
         environment = { TASKONCE_KEY = 'x', 'A=B' = 'y' }\n\
         [handlers.mail]\n\
         effect = 'keyed'\n\
         command = ['']\n\
         tasks_max = 0\n\
         directory = ''\n\
         comand = ['x']\n\
         [routes.a.charge]\n\
         [routes.b.mail]\n",
    );
    let want = [
        "line 1: `store` is no URL",
        "line 3: source a: `url` names it `b`",
        "line 5: source b: `url` is 7: a text is needed",
        "line 7: source c: `url` names it `b`",
        "line 7: source c: `url` is that of source a",
        "line 10: handler charge: `command` is \"charge.sh\": a list of texts is needed",
        "line 11: handler charge: `mode` is \"pol\": there is no such choice",
        "line 12: handler charge: `kill_after` is above 1h",
        "line 13: handler charge: `environment` sets `TASKONCE_KEY`, and those of `TASKONCE_` are the worker's",
        "line 13: handler charge: `environment` has no variable `A=B`",
        "line 16: handler mail: `command` names no program",
        "line 17: handler mail: `tasks_max` is 0",
        "line 18: handler mail: `directory` names no folder",
        "line 19: handler mail: there is no setting `comand` | did you mean `command`?",
    ];
    for (found, want) in refused.iter().zip(want) {
        assert!(found.starts_with(want), "{found}\n{want}");
    }
    assert_eq!(refused.len(), want.len(), "{refused:#?}");
}

#[test]
fn what_is_said_of_a_command_that_is_none_is_warned_about() {
    let table = |of_handler: &str| {
        format!(
            "[sources.a]\n[handlers.charge]\neffect = 'keyed'\n{of_handler}\nversions = ['1', '2']\n[routes.a.charge]"
        )
    };
    assert_eq!(warned(&table("mode = 'pool'")), ["line 4: handler charge: `mode` says nothing without `command`"]);
    assert_eq!(
        warned(&table("command = ['x']\ntasks_max = 5")),
        ["line 5: handler charge: `tasks_max` says nothing where each task has a process of its own"]
    );
    assert_eq!(
        warned(&table("command = ['x']\nlease = '5s'\nrun_max = '5s'")),
        [
            "routes a × charge@1, a × charge@2: `kill_after` 5s is not below `run_max` 5s (line 6): an attempt may spend its time \
          waiting for the end of the one before"
        ]
    );
}
