//! `routes`: checks a table of routes, and prints it with the planned times of its retries and what does not fit.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use taskonce::routes::{BreakerRules, CommandRules, Fault, Planned, Refused, Route, Routes, SourceRules};

use crate::args::RoutesArgs;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::units::{spell_left, written};
use crate::width::Shrinks;
use crate::{plain, width};

/// The longest file that is read: 16 MiB.
const FILE_MAX: u64 = 16 * 1024 * 1024;

/// Prints the table. Warnings do not change the exit code.
pub(crate) fn routes(args: &RoutesArgs, form: Form) -> Result<ExitCode> {
    let name = args.config.display().to_string();
    let routes = load(&args.config)?;
    match form {
        Form::Json => report::data_json(&json!({
            "config": name,
            "sources": routes.sources().iter().map(source_json).collect::<Vec<_>>(),
            "routes": routes.iter().map(route_json).collect::<Vec<_>>(),
            "commands": commands(&routes).iter().map(command_json).collect::<Vec<_>>(),
            "warnings": routes.warnings().iter().map(fault_json).collect::<Vec<_>>(),
        })),
        Form::Text => report::data(&whole(&routes, width::of(io::stdout()))),
    }
    Ok(Code::Fine.exit())
}

/// Reads a table.
pub(crate) fn load(path: &Path) -> Result<Routes> {
    let text = read(path)?;
    Routes::from_toml(&text).map_err(|refused| trouble(&path.display().to_string(), &refused))
}

fn read(path: &Path) -> Result<String> {
    let failed = |why: String| {
        let text = format!("file `{}`: {why}", path.display());
        Trouble::usage(text, "name the table of routes with `--config`; docs/routes.md shows one")
    };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let read = file.take(FILE_MAX + 1).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    if read as u64 > FILE_MAX {
        return Err(failed(format!("it is larger than {} MiB", FILE_MAX / 1024 / 1024)));
    }
    Ok(text)
}

/// A table that cannot be used, with everything that is wrong with it.
pub(crate) fn trouble(name: &str, refused: &Refused) -> Trouble {
    let mut text = match refused.faults.len() {
        1 => format!("{name} cannot be used"),
        count => format!("{name} cannot be used, for {count} reasons"),
    };
    for fault in &refused.faults {
        // Writing into a string cannot fail.
        let fault_line = plain::line(&fault.to_string()).into_owned();
        let _ = write!(text, "\n  {fault_line}\n    hint: {}", fault.hint);
    }
    let faults = refused.faults.iter().map(fault_json).collect();
    Trouble::new(Code::Configuration, "bad_routes", text, "change the lines and routes named above")
        .with("faults", Value::Array(faults))
}

/// The text for people: the tables, the planned retries, the warnings. On a terminal no line is wider, but for a table whose
/// other columns are already.
fn whole(routes: &Routes, columns: Option<usize>) -> String {
    let note = |text: String| columns.map_or(text.clone(), |columns| width::wrap(&text, columns));
    let mut text = width::table(
        ["ROUTE", "EFFECT", "ATTEMPTS", "BACKOFF", "LEASE", "RUN MAX"],
        routes.iter().map(treatment).collect(),
        SHRINKS,
        columns,
    );
    text.push('\n');
    text.push_str(&width::table(
        ["ROUTE", "RETENTION", "AT ONCE", "RATE", "BREAKER", "STORE AWAY"],
        routes.iter().map(limits).collect(),
        SHRINKS,
        columns,
    ));
    text.push_str(&note(format!("\n{RETRIES}\n")));
    for route in routes.iter() {
        text.push_str(&fill(&plain::line(&route.name()), retries(route), columns));
    }
    text.push('\n');
    text.push_str(&width::table(
        ["SOURCE", "VISIBILITY", "REDELIVERY", "DEAD LETTERS", "DELIVERIES", "RETRIES"],
        routes.sources().iter().map(source_cells).collect(),
        SHRINKS,
        columns,
    ));
    let commands = commands(routes);
    if !commands.is_empty() {
        text.push('\n');
        text.push_str(&width::table(
            ["HANDLER", "MODE", "KILL AFTER", "COMMAND"],
            commands.iter().map(command_cells).collect(),
            Shrinks { column: 3, min: 12 },
            columns,
        ));
    }
    if !routes.warnings().is_empty() {
        text.push('\n');
    }
    for warning in routes.warnings() {
        text.push_str(&note(format!("warning: {}\n  hint: {}\n", plain::line(&warning.to_string()), warning.hint)));
    }
    text
}

/// What stands above the planned retries.
const RETRIES: &str = "Retries at the latest, after the first failure; with full jitter each may come at once, and on average at half of \
    it. A task is over, dead or parked, at the latest so long after its first start.";
/// Names give way on a narrow terminal.
const SHRINKS: Shrinks = Shrinks { column: 0, min: 12 };

fn treatment(route: &Route) -> [String; 6] {
    let policy = &route.policy;
    let backoff = &policy.backoff;
    [
        plain::line(&route.name()).into_owned(),
        policy.effect.name().to_owned(),
        policy.attempts_max.to_string(),
        format!("{} to {}", written(backoff.delay_min), written(backoff.delay_max)),
        written(policy.lease),
        or_dash(policy.run_max.map(written)),
    ]
}

fn limits(route: &Route) -> [String; 6] {
    let breaker = |rules: BreakerRules| format!("{} then {}", rules.failures, written(rules.pause));
    [
        plain::line(&route.name()).into_owned(),
        written(route.policy.retention),
        route.concurrency_max.to_string(),
        or_dash(route.rate.map(|rules| rules.rate.to_string())),
        or_dash(route.breaker.map(breaker)),
        route.store_away.name().to_owned(),
    ]
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn source_cells(source: &SourceRules) -> [String; 6] {
    let share = format!("{:.0} % and {}", source.retry_share * 100.0, source.retry_floor);
    [
        plain::line(&source.name).into_owned(),
        or_dash(source.visibility.map(written)),
        or_dash(source.redelivery_max.map(written)),
        or_dash(source.dead_letters_for.map(written)),
        or_dash(source.deliveries_max.map(|max| max.to_string())),
        or_dash((source.retry_share < 1.0).then_some(share)),
    ]
}

/// The handlers that are commands, each once, in the order of the routes.
fn commands(routes: &Routes) -> Vec<(&str, &CommandRules)> {
    let mut seen = HashSet::new();
    let of = |route: &Route| routes.command(&route.handler).map(|rules| &**rules);
    let first = routes.iter().filter(|route| seen.insert(&*route.handler));
    first.filter_map(|route| Some((&*route.handler, of(route)?))).collect()
}

fn command_cells((handler, rules): &(&str, &CommandRules)) -> [String; 4] {
    let command = rules.command.join(" ");
    [
        plain::line(handler).into_owned(),
        rules.mode.name().to_owned(),
        written(rules.kill_after),
        plain::line(&command).into_owned(),
    ]
}

fn command_json((handler, rules): &(&str, &CommandRules)) -> Value {
    json!({
        "handler": handler,
        "command": rules.command,
        "mode": rules.mode.name(),
        "kill_after_ms": millis(rules.kill_after),
        "tasks_max": rules.tasks_max,
        "directory": rules.directory.as_ref().map(|folder| folder.display().to_string()),
        // What they are may be a secret.
        "environment": rules.environment.iter().map(|(name, _)| name).collect::<Vec<_>>(),
    })
}

/// When the attempts come, in words: `2nd 1 s`, `3rd 3 s`, `over 3 min`.
fn retries(route: &Route) -> Vec<String> {
    let times = route.times();
    let one = |planned: &Planned| format!("{} {}", ordinal(planned.attempt), spell_left(planned.latest));
    let mut words: Vec<String> = times.planned.iter().map(one).collect();
    if times.attempts_max as usize > words.len() + 1 {
        words.push(format!("… {} {}", ordinal(times.attempts_max), spell_left(times.delays_max)));
    }
    words.extend(times.settled_max.map(|settled| format!("over {}", spell_left(settled))));
    if words.is_empty() {
        words.push("none".to_owned());
    }
    words
}

/// A line of a name and words; on a terminal it goes on, indented, before a word that has no room.
fn fill(name: &str, words: Vec<String>, columns: Option<usize>) -> String {
    let mut text = format!("  {name}:");
    let mut used = text.chars().count();
    let last = words.len().saturating_sub(1);
    for (at, word) in words.into_iter().enumerate() {
        let word = if at < last { word + "," } else { word };
        let width = 1 + word.chars().count();
        if columns.is_some_and(|columns| used + width > columns) {
            text.push_str("\n   ");
            used = 3;
        }
        text.push(' ');
        text.push_str(&word);
        used += width;
    }
    text + "\n"
}

fn ordinal(number: u32) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn source_json(source: &SourceRules) -> Value {
    json!({
        "name": &*source.name,
        "visibility_ms": source.visibility.map(millis),
        "redelivery_max_ms": source.redelivery_max.map(millis),
        "dead_letters_for_ms": source.dead_letters_for.map(millis),
        "deliveries_max": source.deliveries_max,
        "retry_share": source.retry_share,
        "retry_floor": source.retry_floor.to_string(),
    })
}

fn route_json(route: &Route) -> Value {
    let policy = &route.policy;
    let times = route.times();
    let planned = |one: &Planned| {
        json!({
            "attempt": one.attempt,
            "earliest_ms": millis(one.earliest),
            "mean_ms": millis(one.mean),
            "latest_ms": millis(one.latest),
        })
    };
    json!({
        "source": &*route.source,
        "handler": &*route.handler,
        "namespace": route.keys.namespace(),
        "effect": policy.effect.name(),
        "lease_ms": millis(policy.lease),
        "run_max_ms": policy.run_max.map(millis),
        "retention_ms": millis(policy.retention),
        "output_retention_ms": millis(policy.output_retention.min(policy.retention)),
        "output_max": policy.output_max,
        "store_may_forget": policy.store_may_forget,
        "attempts_max": policy.attempts_max,
        "permanent_attempts_max": policy.permanent_attempts_max.min(policy.attempts_max),
        "poison_attempts_max": policy.poison_attempts_max.unwrap_or(policy.attempts_max),
        "crashes_max": policy.crashes_max,
        "backoff_min_ms": millis(policy.backoff.delay_min),
        "backoff_max_ms": millis(policy.backoff.delay_max),
        "backoff_factor": policy.backoff.factor,
        "concurrency_max": route.concurrency_max,
        "rate": route.rate.map(|rules| rules.rate.to_string()),
        "rate_burst": route.rate.map(|rules| rules.burst),
        "breaker_failures": route.breaker.map(|breaker| breaker.failures),
        "breaker_pause_ms": route.breaker.map(|breaker| millis(breaker.pause)),
        "weight": route.weight,
        "store_away": route.store_away.name(),
        "without_key": route.without_key.name(),
        "planned": times.planned.iter().map(planned).collect::<Vec<_>>(),
        "delays_max_ms": millis(times.delays_max),
        "settled_max_ms": times.settled_max.map(millis),
    })
}

fn fault_json(fault: &Fault) -> Value {
    json!({ "line": fault.line, "subject": fault.subject, "text": fault.text, "hint": fault.hint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_on_before_a_word_that_has_no_room() {
        let words = || ["2nd 1 s", "3rd 3 s", "over 9 min"].map(str::to_owned).to_vec();
        assert_eq!(fill("a × b@1", words(), None), "  a × b@1: 2nd 1 s, 3rd 3 s, over 9 min\n");
        assert_eq!(fill("a × b@1", words(), Some(20)), "  a × b@1: 2nd 1 s,\n    3rd 3 s,\n    over 9 min\n");
    }

    #[test]
    fn attempts_are_counted_in_words() {
        let told: Vec<String> = [2, 3, 4, 11, 12, 13, 21, 22, 112].into_iter().map(ordinal).collect();
        assert_eq!(told, ["2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "112th"]);
    }
}
