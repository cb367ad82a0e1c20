//! A table from the text of a `taskonce.toml`. Every value knows its line, and a wrong one does not hide the next.
//!
//! How a value is read is in `values`; what is wrong with the values together is found by `check`.

use std::collections::{HashMap, HashSet};

use taskonce_core::policy::Effect;
use toml::de::DeTable;

use super::builder::{Layer, RouteLayer, RoutesBuilder};
use super::command::{self, COMMAND_NAMES, Mode};
use super::values::{Reader, Value, in_order};
use super::{Fault, Refused, Routes, Settings, SourceRules, StoreAway, resolve};

/// The longest text of a table: 16 MiB.
const TEXT_MAX: usize = 16 * 1024 * 1024;
/// What only a source has.
const OF_SOURCE: &[&str] =
    &["url", "visibility", "redelivery_max", "dead_letters_for", "deliveries_max", "retry_share", "retry_floor"];
/// What only a handler has.
const VERSIONS: &str = "versions";
/// What stands above all tables: where records are kept.
const STORE: &str = "store";
const SECTIONS: &[&str] = &[STORE, "defaults", "sources", "handlers", "routes"];

pub(super) fn read(text: &str) -> Result<Routes, Refused> {
    if text.len() > TEXT_MAX {
        let text = format!("it has {} bytes; at most {TEXT_MAX} are read", text.len());
        let hint = "tell tasks of one handler apart by their payload".to_owned();
        return Err(Refused { faults: vec![Fault { line: None, subject: String::new(), text, hint }] });
    }
    let mut reader = Reader::new(text);
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = error.span().map_or(0, |span| span.start);
        let hint =
            "put names with other characters than letters, digits, `_` and `-` in quotes, such as `\"charge@2\"`; \
                    toml.io says how tables, texts and numbers are written"
                .to_owned();
        reader.faults.push(Fault {
            line: Some(reader.line(at)),
            subject: String::new(),
            text: format!("this is no TOML: {}", error.message()),
            hint,
        });
    }
    if !reader.faults.is_empty() {
        return Err(Refused { faults: reader.faults });
    }
    let mut table = RoutesBuilder::default();
    for (name, value) in in_order(root.get_ref()) {
        match name {
            STORE => {
                let line = Some(reader.line_of(value));
                table.store = reader.text("", STORE, value).map(|url| (url, line));
            }
            "defaults" => {
                table.defaults = reader.layer("defaults", "defaults", value, &[], |_, _, _, _| {});
            }
            "sources" => reader.sources(value, &mut table),
            "handlers" => reader.handlers(value, &mut table),
            "routes" => reader.routes(value, &mut table),
            unknown => reader.unknown(unknown, value, "", SECTIONS),
        }
    }
    table.faults = reader.faults;
    resolve::build(table)
}

impl Reader {
    /// A layer, and with `further` what is more than settings in it.
    fn layer(
        &mut self,
        subject: &str,
        head: &str,
        value: &Value<'_>,
        further: &[&str],
        mut take: impl FnMut(&mut Reader, &str, &str, &Value<'_>),
    ) -> Layer {
        let mut layer = Layer::new(subject.to_owned(), Settings::default());
        layer.line = Some(self.line_of(value));
        for (name, value) in self.members(value, subject, head) {
            if let Some(name) = Settings::NAMES.iter().find(|known| **known == name) {
                layer.lines.insert(name, self.line_of(value));
                self.setting(&mut layer.settings, subject, name, value);
            } else if let Some(name) = further.iter().find(|known| **known == name) {
                take(self, subject, name, value);
            } else {
                self.unknown(name, value, subject, &[further, Settings::NAMES].concat());
            }
        }
        layer
    }

    fn sources(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        for (name, value) in self.members(value, "", "sources") {
            let mut rules = SourceRules::new(name);
            let mut lines = HashMap::new();
            let mut layer = self.layer(
                &format!("source {name}"),
                &format!("sources.{}", key(name)),
                value,
                OF_SOURCE,
                |reader, subject, name, value| {
                    if let Some(name) = OF_SOURCE.iter().find(|known| **known == name) {
                        lines.insert(*name, reader.line_of(value));
                    }
                    match name {
                        "url" => rules.url = reader.text(subject, name, value),
                        "visibility" => rules.visibility = reader.duration(subject, name, value),
                        "redelivery_max" => rules.redelivery_max = reader.duration(subject, name, value),
                        "dead_letters_for" => rules.dead_letters_for = reader.duration(subject, name, value),
                        "deliveries_max" => rules.deliveries_max = reader.count(subject, name, value),
                        "retry_share" => {
                            rules.retry_share = reader.number(subject, name, value).unwrap_or(rules.retry_share)
                        }
                        _ => rules.retry_floor = reader.rate(subject, name, value).unwrap_or(rules.retry_floor),
                    }
                },
            );
            layer.lines.extend(lines);
            table.sources.push((rules, layer));
        }
    }

    fn handlers(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        let members = self.members(value, "", "handlers");
        let all: HashSet<&str> = members.iter().map(|(name, _)| *name).collect();
        for (name, value) in members {
            // What is said of one version stands in a table of its own, or nowhere: then this names it.
            let mut named = Vec::new();
            let (mut said, mut lines) = (command::Said::default(), HashMap::new());
            let mut layer = self.layer(
                &format!("handler {name}"),
                &format!("handlers.{}", key(name)),
                value,
                &[&[VERSIONS], COMMAND_NAMES].concat(),
                |reader, subject, setting, value| {
                    if let Some(name) = COMMAND_NAMES.iter().find(|known| **known == setting) {
                        lines.insert(*name, reader.line_of(value));
                        return reader.command(&mut said, subject, setting, value);
                    }
                    if name.contains('@') {
                        let hint = "put `versions` where the handler stands without `@`";
                        return reader.fault(value, subject, "it is one version already", hint);
                    }
                    let line = Some(reader.line_of(value));
                    let versions = reader.texts(subject, setting, value).into_iter();
                    named.extend(versions.map(|version| (format!("{name}@{version}"), line)));
                },
            );
            layer.command = said;
            layer.lines.extend(lines);
            table.handlers.push((name.to_owned(), layer));
            for (name, line) in named.into_iter().filter(|(name, _)| !all.contains(name.as_str())) {
                let layer = Layer::new(format!("handler {name}"), Settings::default());
                table.handlers.push((name, Layer { line, ..layer }));
            }
        }
    }

    fn routes(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        for (source, value) in self.members(value, "", "routes") {
            for (handler, value) in
                self.members(value, &format!("routes of {source}"), &format!("routes.{}", key(source)))
            {
                let (subject, head) =
                    (format!("route {source} × {handler}"), format!("routes.{}.{}", key(source), key(handler)));
                let layer = self.layer(&subject, &head, value, &[], |_, _, _, _| {});
                table.routes.push(RouteLayer { source: source.to_owned(), handler: handler.to_owned(), layer });
            }
        }
    }

    fn command(&mut self, said: &mut command::Said, subject: &str, name: &str, value: &Value<'_>) {
        match name {
            "command" => said.command = Some(self.texts(subject, name, value)).filter(|words| !words.is_empty()),
            "mode" => said.mode = self.word(subject, name, value, &Mode::ALL.map(|mode| (mode.name(), mode))),
            "kill_after" => said.kill_after = self.duration(subject, name, value),
            "tasks_max" => said.tasks_max = self.or_none(value, |reader| reader.count(subject, name, value)),
            "directory" => said.directory = self.text(subject, name, value),
            _ => said.environment = self.variables(subject, name, value),
        }
    }

    fn setting(&mut self, settings: &mut Settings, subject: &str, name: &str, value: &Value<'_>) {
        match name {
            "namespace" => settings.namespace = self.namespace(subject, name, value),
            "effect" => {
                let kinds = Effect::ALL.map(|effect| (effect.name(), effect));
                settings.effect = self.word(subject, name, value, &kinds);
            }
            "lease" => settings.lease = self.duration(subject, name, value),
            "run_max" => settings.run_max = self.or_none(value, |reader| reader.duration(subject, name, value)),
            "retention" => settings.retention = self.duration(subject, name, value),
            "output_retention" => settings.output_retention = self.duration(subject, name, value),
            "output_max" => settings.output_max = self.size(subject, name, value),
            "store_may_forget" => settings.store_may_forget = self.flag(subject, name, value),
            "attempts_max" => settings.attempts_max = self.count(subject, name, value),
            "permanent_attempts_max" => settings.permanent_attempts_max = self.count(subject, name, value),
            "poison_attempts_max" => {
                settings.poison_attempts_max = self.or_none(value, |reader| reader.count(subject, name, value));
            }
            "crashes_max" => settings.crashes_max = self.count(subject, name, value),
            "backoff_min" => settings.backoff_min = self.duration(subject, name, value),
            "backoff_max" => settings.backoff_max = self.duration(subject, name, value),
            "backoff_factor" => settings.backoff_factor = self.number(subject, name, value),
            "concurrency_max" => settings.concurrency_max = self.count(subject, name, value),
            "rate" => settings.rate = self.or_none(value, |reader| reader.rate(subject, name, value)),
            "rate_burst" => settings.rate_burst = self.count(subject, name, value),
            "breaker_failures" => {
                settings.breaker_failures = self.or_none(value, |reader| reader.count(subject, name, value));
            }
            "breaker_pause" => settings.breaker_pause = self.duration(subject, name, value),
            "weight" => settings.weight = self.count(subject, name, value),
            "store_away" => {
                let ways = StoreAway::ALL.map(|way| (way.name(), way));
                settings.store_away = self.word(subject, name, value, &ways);
            }
            "without_key" => settings.without_key = self.without_key(subject, name, value),
            _ => unreachable!("every name of `Settings` stands above, as a test shows"),
        }
    }
}

/// A name as a key of TOML.
pub(super) fn key(name: &str) -> String {
    let is_bare =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if is_bare { name.to_owned() } else { format!("{name:?}") }
}
