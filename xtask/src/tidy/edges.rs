//! Which package may depend on which: the table, and the check of cargo's metadata against it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::Finding;
use crate::suites::members;
use crate::workspace::{list, text};

/// What the packages of one folder may depend on.
struct Row {
    /// A folder, or `parent/*` for each folder below one.
    folder: &'static str,
    /// Folders of ours that it may depend on.
    ours: &'static [&'static str],
    /// Further folders of ours that its tests may depend on.
    tests: &'static [&'static str],
    /// Outside packages, or beginnings of their names (`name*`), that it never depends on itself.
    never: &'static [&'static [&'static str]],
    /// The same, and neither does anything that it depends on.
    never_reached: &'static [&'static [&'static str]],
}

/// Runtimes: what waits or starts threads on its own.
const RUNTIMES: &[&str] = &["tokio*", "async-std*", "smol*", "mio"];
/// Drivers: what talks to a database or a broker.
const DRIVERS: &[&str] = &[
    "redis*",
    "fred*",
    "rusqlite*",
    "libsqlite3-sys",
    "sqlx*",
    "postgres*",
    "tokio-postgres*",
    "deadpool*",
    "lapin*",
    "async-nats*",
    "rdkafka*",
];
/// Sources of randomness and of the time of day.
const WORLD: &[&str] = &["getrandom*", "rand*", "fastrand*", "uuid*", "jiff*", "chrono*", "time", "rustix*", "nix*"];

/// The table. A package without a row is a violation, so a new crate brings its row.
const TABLE: &[Row] = &[
    // No I/O, no clock, no randomness of its own.
    Row { folder: "crates/core", ours: &[], tests: &[], never: &[WORLD], never_reached: &[RUNTIMES, DRIVERS] },
    Row {
        folder: "crates/worker",
        ours: &["crates/core"],
        tests: &["crates/contract", "crates/testkit"],
        never: &[],
        never_reached: &[DRIVERS],
    },
    Row {
        folder: "crates/contract",
        ours: &["crates/core", "crates/worker"],
        tests: &["crates/testkit"],
        never: &[],
        never_reached: &[DRIVERS],
    },
    // What a store and a broker of the same system share. Of ours it knows the errors only.
    Row { folder: "drivers/*", ours: &["crates/core"], tests: &["crates/testkit"], never: &[], never_reached: &[] },
    // A store over two others, which it knows by the port only.
    Row {
        folder: "stores/fast-check",
        ours: &["crates/core"],
        tests: &["crates/contract", "crates/testkit", "stores/*"],
        never: &[DRIVERS],
        never_reached: &[DRIVERS],
    },
    Row {
        folder: "stores/*",
        ours: &["crates/core", "drivers/*"],
        tests: &["crates/contract", "crates/testkit"],
        never: &[],
        never_reached: &[],
    },
    Row {
        folder: "brokers/*",
        ours: &["crates/core", "crates/worker", "drivers/*"],
        tests: &["crates/contract", "crates/testkit"],
        never: &[],
        never_reached: &[],
    },
    // The user's own transaction in another driver. What runs a task in it is the worker's, what is written is the store's.
    Row {
        folder: "adapters/sqlx",
        ours: &["crates/core", "crates/worker", "stores/postgres"],
        tests: &["crates/contract", "crates/testkit"],
        never: &[],
        never_reached: &[&["libsqlite3-sys"]],
    },
    Row {
        folder: "crates/taskonce",
        ours: &["crates/core", "crates/worker", "stores/*", "brokers/*"],
        tests: &["crates/contract", "crates/testkit"],
        never: &[DRIVERS],
        never_reached: &[],
    },
    Row {
        folder: "crates/cli",
        ours: &["crates/taskonce"],
        tests: &["crates/testkit"],
        never: &[DRIVERS],
        never_reached: &[],
    },
    Row { folder: "crates/testkit", ours: &["*"], tests: &["*"], never: &[], never_reached: &[] },
    Row { folder: "bench", ours: &["*"], tests: &["*"], never: &[], never_reached: &[] },
    Row { folder: "xtask", ours: &["*"], tests: &["*"], never: &[], never_reached: &[] },
];

/// Folders whose packages are for the checks only: nothing that users add depends on them, tests excepted.
const FOR_CHECKS: &[&str] = &["crates/testkit", "bench", "xtask"];

/// Every dependency between our packages is in the table, and none on the outside is forbidden by it.
pub(super) fn edges_are_in_the_table(metadata: &Value) -> Vec<Finding> {
    let root = Path::new(text(&metadata["workspace_root"]));
    let folder_of = |package: &Value| {
        let manifest = Path::new(text(&package["manifest_path"]));
        let folder = manifest.parent().unwrap_or(manifest);
        folder.strip_prefix(root).unwrap_or(folder).to_string_lossy().replace('\\', "/")
    };
    let ours: BTreeMap<&str, String> =
        members(metadata).map(|package| (text(&package["name"]), folder_of(package))).collect();
    let mut findings = Vec::new();
    for package in members(metadata) {
        let folder = folder_of(package);
        let manifest = format!("{folder}/Cargo.toml");
        let Some(row) = TABLE.iter().find(|row| covers(row.folder, &folder)) else {
            findings.push(Finding::new(
                &manifest,
                0,
                "the dependency table (xtask/src/tidy/edges.rs) has no row for it",
            ));
            continue;
        };
        for dependency in list(&package["dependencies"]) {
            let name = text(&dependency["name"]);
            let for_tests = dependency["kind"] == "dev";
            let fault = match ours.get(name) {
                Some(target) => inside_fault(row, &folder, target, for_tests),
                None => (!for_tests && matches(row.never, name)).then(|| "never depends on it".to_owned()),
            };
            if let Some(fault) = fault {
                findings.push(Finding::new(&manifest, 0, format!("depends on {name}: {folder} {fault}")));
            }
        }
        for name in reached(metadata, text(&package["id"])) {
            if !ours.contains_key(name) && matches(row.never_reached, name) {
                let message = format!("reaches {name}: {folder} never depends on it, nor through another package");
                findings.push(Finding::new(&manifest, 0, message));
            }
        }
    }
    findings
}

/// What is wrong with an edge between two folders of ours.
fn inside_fault(row: &Row, from: &str, to: &str, for_tests: bool) -> Option<String> {
    let mut allowed = row.ours.iter().chain(if for_tests { row.tests } else { &[] });
    if FOR_CHECKS.contains(&to) && !for_tests && !FOR_CHECKS.contains(&from) {
        return Some(format!("is a product, and {to} is for the checks only"));
    }
    (!allowed.any(|pattern| covers(pattern, to))).then(|| {
        let both = if for_tests { [row.ours, row.tests].concat() } else { row.ours.to_vec() };
        format!("may depend on [{}] of ours", both.join(", "))
    })
}

/// Whether a name is in one of these lists.
fn matches(lists: &[&[&str]], name: &str) -> bool {
    lists.iter().flat_map(|names| names.iter()).any(|pattern| match pattern.strip_suffix('*') {
        Some(beginning) => name == beginning || name.strip_prefix(beginning).is_some_and(|rest| rest.starts_with('-')),
        None => name == *pattern,
    })
}

/// Whether a pattern of the table covers a folder.
fn covers(pattern: &str, folder: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(parent) => folder.strip_prefix(parent).is_some_and(|name| parent.is_empty() || !name.contains('/')),
        None => pattern == folder,
    }
}

/// Names of all packages that one depends on, tests excepted.
fn reached<'a>(metadata: &'a Value, from: &str) -> BTreeSet<&'a str> {
    let nodes: BTreeMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).iter().map(|node| (text(&node["id"]), node)).collect();
    let names: BTreeMap<&str, &str> =
        list(&metadata["packages"]).iter().map(|package| (text(&package["id"]), text(&package["name"]))).collect();
    let mut seen = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    // Each package is opened once, so the walk ends.
    while let Some(id) = open.pop() {
        let Some(node) = nodes.get(id.as_str()) else { continue };
        for edge in list(&node["deps"]) {
            let in_product = list(&edge["dep_kinds"]).iter().any(|kind| kind["kind"] != "dev");
            if in_product && seen.insert(text(&edge["pkg"])) {
                open.push(text(&edge["pkg"]).to_owned());
            }
        }
    }
    seen.into_iter().filter_map(|id| names.get(id).copied()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A package: folder, name, and dependencies as name and kind.
    type Package<'a> = (&'a str, &'a str, &'a [(&'a str, Option<&'a str>)]);

    /// A workspace with these packages; those in `outside` are not its members.
    fn workspace(packages: &[Package<'_>]) -> Value {
        let one = |(folder, name, dependencies): &Package<'_>| {
            let dependencies: Vec<Value> =
                dependencies.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
            json!({"id": name, "name": name, "manifest_path": format!("/w/{folder}/Cargo.toml"), "dependencies": dependencies})
        };
        let nodes: Vec<Value> = packages
            .iter()
            .map(|(_, name, dependencies)| {
                let deps: Vec<Value> = dependencies
                    .iter()
                    .map(|(name, kind)| json!({"pkg": name, "dep_kinds": [{"kind": kind}]}))
                    .collect();
                json!({"id": name, "deps": deps})
            })
            .collect();
        let ids: Vec<&str> =
            packages.iter().filter(|(folder, ..)| !folder.starts_with("outside")).map(|(_, name, _)| *name).collect();
        json!({
            "workspace_root": "/w", "workspace_members": ids, "resolve": {"nodes": nodes},
            "packages": packages.iter().map(one).collect::<Vec<_>>(),
        })
    }

    fn messages(metadata: &Value) -> Vec<String> {
        edges_are_in_the_table(metadata).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn edges_of_the_table_are_accepted() {
        let tree = workspace(&[
            ("crates/core", "taskonce-core", &[("serde", None), ("tokio", Some("dev"))]),
            (
                "stores/redis",
                "taskonce-redis",
                &[("taskonce-core", None), ("redis", None), ("taskonce-testkit", Some("dev"))],
            ),
            ("crates/testkit", "taskonce-testkit", &[("taskonce-core", None)]),
            ("crates/taskonce", "taskonce", &[("taskonce-redis", None)]),
            ("bench", "taskonce-bench", &[("taskonce", None), ("taskonce-testkit", None)]),
        ]);
        assert_eq!(messages(&tree), Vec::<String>::new());
    }

    #[test]
    fn an_edge_outside_of_the_table_is_found() {
        let tree = workspace(&[
            ("crates/core", "taskonce-core", &[]),
            ("crates/worker", "taskonce-worker", &[("taskonce-core", None)]),
            ("stores/sqlite", "taskonce-sqlite", &[]),
            ("stores/redis", "taskonce-redis", &[("taskonce-worker", None), ("taskonce-sqlite", Some("dev"))]),
        ]);
        assert_eq!(
            messages(&tree),
            [
                "stores/redis/Cargo.toml: depends on taskonce-worker: stores/redis may depend on [crates/core, drivers/*] of ours",
                "stores/redis/Cargo.toml: depends on taskonce-sqlite: stores/redis may depend on [crates/core, drivers/*, crates/contract, crates/testkit] of ours",
            ]
        );
    }

    #[test]
    fn what_is_for_the_checks_stays_out_of_products() {
        let tree = workspace(&[
            ("crates/testkit", "taskonce-testkit", &[]),
            ("crates/cli", "taskonce-cli", &[("taskonce-testkit", None)]),
        ]);
        assert!(messages(&tree)[0].contains("crates/cli is a product, and crates/testkit is for the checks only"));
    }

    #[test]
    fn forbidden_outside_packages_are_found_also_behind_others() {
        let tree = workspace(&[
            ("crates/core", "taskonce-core", &[("tokio-util", None), ("getrandom", None)]),
            ("crates/worker", "taskonce-worker", &[("pool", None)]),
            ("crates/cli", "taskonce-cli", &[("rusqlite", None), ("redistribution", None)]),
            ("outside/pool", "pool", &[("deadpool-redis", None), ("sqlx", Some("dev"))]),
            ("outside/deadpool", "deadpool-redis", &[]),
            ("outside/tokio", "tokio-util", &[]),
        ]);
        let found = messages(&tree);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("crates/core/Cargo.toml: depends on getrandom"));
        assert!(found[1].contains("crates/core/Cargo.toml: reaches tokio-util"));
        assert!(found[2].contains("crates/worker/Cargo.toml: reaches deadpool-redis"));
        assert!(found[3].contains("crates/cli/Cargo.toml: depends on rusqlite"));
    }

    #[test]
    fn a_package_without_a_row_is_found() {
        let tree = workspace(&[("crates/extra", "taskonce-extra", &[])]);
        assert!(messages(&tree)[0].contains("has no row for it"));
    }
}
