//! A table from the text of a `taskonce.toml`. Every value knows its line, and a wrong one does not hide the next.
//!
//! What is wrong with the values together is found by `check`.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use taskonce_core::json::Fields;
use taskonce_core::key::Name;
use taskonce_core::policy::Effect;
use taskonce_core::units;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::builder::{Layer, RouteLayer, RoutesBuilder};
use super::check::nearest;
use super::{Fault, Rate, Refused, Routes, Settings, SourceRules, StoreAway, WithoutKey, resolve};

/// The longest text of a table: 16 MiB.
const TEXT_MAX: usize = 16 * 1024 * 1024;
/// What takes an inherited limit away.
const NONE: &str = "none";
/// What only a source has.
const OF_SOURCE: &[&str] =
    &["visibility", "redelivery_max", "dead_letters_for", "deliveries_max", "retry_share", "retry_floor"];
/// What only a handler has.
const OF_HANDLER: &[&str] = &["versions"];
const SECTIONS: &[&str] = &["defaults", "sources", "handlers", "routes"];

type Value<'i> = Spanned<DeValue<'i>>;

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
        let hint = "see toml.io for how a table, a string and a number are written".to_owned();
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
            "defaults" => {
                table.defaults = reader.layer("defaults".to_owned(), value, &[], |_, _, _, _| {});
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

/// The members of a table, as they stand in the text.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a str, &'a Value<'i>)> {
    let mut members: Vec<_> = table.iter().collect();
    members.sort_by_key(|(key, _)| key.span().start);
    members.into_iter().map(|(key, value)| (key.get_ref().as_ref(), value)).collect()
}

struct Reader {
    /// Where each line begins.
    lines: Vec<usize>,
    faults: Vec<Fault>,
}

impl Reader {
    fn new(text: &str) -> Reader {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Reader { lines: std::iter::once(0).chain(ends).collect(), faults: Vec::new() }
    }

    /// The line of a byte, counted from 1.
    fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|begin| *begin <= at)
    }

    fn line_of(&self, value: &Value<'_>) -> usize {
        self.line(value.span().start)
    }

    fn fault(&mut self, value: &Value<'_>, subject: &str, text: impl Into<String>, hint: impl Into<String>) {
        let line = Some(self.line_of(value));
        self.faults.push(Fault { line, subject: subject.to_owned(), text: text.into(), hint: hint.into() });
    }

    fn unknown(&mut self, name: &str, value: &Value<'_>, subject: &str, known: &[&str]) {
        let hint = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known here: {}", known.join(", ")),
        };
        self.fault(value, subject, format!("there is no setting `{name}`"), hint);
    }

    /// The members of what must be a table.
    fn members<'a, 'i>(&mut self, value: &'a Value<'i>, subject: &str) -> Vec<(&'a str, &'a Value<'i>)> {
        match value.get_ref() {
            DeValue::Table(table) => in_order(table),
            _ => {
                let text = format!("this is {}; a table is needed", shown(value.get_ref()));
                self.fault(value, subject, text, format!("write `[{subject}]` and its settings below"));
                Vec::new()
            }
        }
    }

    /// A layer, and with `further` what is more than settings in it.
    fn layer(
        &mut self,
        subject: String,
        value: &Value<'_>,
        further: &[&str],
        mut take: impl FnMut(&mut Reader, &str, &str, &Value<'_>),
    ) -> Layer {
        let mut layer = Layer::new(subject.clone(), Settings::default());
        layer.line = Some(self.line_of(value));
        for (name, value) in self.members(value, &subject) {
            if let Some(name) = Settings::NAMES.iter().find(|known| **known == name) {
                layer.lines.insert(name, self.line_of(value));
                self.setting(&mut layer.settings, &subject, name, value);
            } else if let Some(name) = further.iter().find(|known| **known == name) {
                take(self, &subject, name, value);
            } else {
                self.unknown(name, value, &subject, &[further, Settings::NAMES].concat());
            }
        }
        layer
    }

    fn sources(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        for (name, value) in self.members(value, "sources") {
            let mut rules = SourceRules::new(name);
            let mut lines = HashMap::new();
            let mut layer = self.layer(format!("source {name}"), value, OF_SOURCE, |reader, subject, name, value| {
                if let Some(name) = OF_SOURCE.iter().find(|known| **known == name) {
                    lines.insert(*name, reader.line_of(value));
                }
                match name {
                    "visibility" => rules.visibility = reader.duration(subject, name, value),
                    "redelivery_max" => rules.redelivery_max = reader.duration(subject, name, value),
                    "dead_letters_for" => rules.dead_letters_for = reader.duration(subject, name, value),
                    "deliveries_max" => rules.deliveries_max = reader.count(subject, name, value),
                    "retry_share" => {
                        rules.retry_share = reader.number(subject, name, value).unwrap_or(rules.retry_share)
                    }
                    _ => rules.retry_floor = reader.rate(subject, name, value).unwrap_or(rules.retry_floor),
                }
            });
            layer.lines.extend(lines);
            table.sources.push((rules, layer));
        }
    }

    fn handlers(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        let members = self.members(value, "handlers");
        let said: HashSet<&str> = members.iter().map(|(name, _)| *name).collect();
        for (name, value) in members {
            // What is said of one version stands in a table of its own, or nowhere: then this names it.
            let mut named = Vec::new();
            let layer = self.layer(format!("handler {name}"), value, OF_HANDLER, |reader, subject, setting, value| {
                if name.contains('@') {
                    let hint = "put `versions` where the handler stands without `@`";
                    return reader.fault(value, subject, "it is one version already", hint);
                }
                let line = Some(reader.line_of(value));
                let versions = reader.texts(subject, setting, value).into_iter();
                named.extend(versions.map(|version| (format!("{name}@{version}"), line)));
            });
            table.handlers.push((name.to_owned(), layer));
            for (name, line) in named.into_iter().filter(|(name, _)| !said.contains(name.as_str())) {
                let layer = Layer::new(format!("handler {name}"), Settings::default());
                table.handlers.push((name, Layer { line, ..layer }));
            }
        }
    }

    fn routes(&mut self, value: &Value<'_>, table: &mut RoutesBuilder) {
        for (source, value) in self.members(value, "routes") {
            for (handler, value) in self.members(value, &format!("routes.{source}")) {
                let layer = self.layer(format!("route {source} × {handler}"), value, &[], |_, _, _, _| {});
                table.routes.push(RouteLayer { source: source.to_owned(), handler: handler.to_owned(), layer });
            }
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

    fn wrong(&mut self, subject: &str, name: &str, value: &Value<'_>, why: &str, hint: &str) {
        self.fault(value, subject, format!("`{name}` is {}: {why}", shown(value.get_ref())), hint);
    }

    fn or_none<T>(&mut self, value: &Value<'_>, read: impl FnOnce(&mut Reader) -> Option<T>) -> Option<Option<T>> {
        if value.get_ref().as_str() == Some(NONE) {
            return Some(None);
        }
        read(self).map(Some)
    }

    /// What a parser of text makes of it. Its message is the fault, `; ` and what to write.
    fn parsed<T>(
        &mut self,
        subject: &str,
        name: &str,
        value: &Value<'_>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            // A number without its unit is told as one.
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => String::new(),
        };
        match parse(&text) {
            Ok(parsed) if value.get_ref().is_str() => return Some(parsed),
            Ok(_) => self.wrong(subject, name, value, "a text is needed", "put it in quotes"),
            Err(message) => {
                let (why, hint) = message.split_once("; ").unwrap_or((&message, "correct it"));
                self.wrong(subject, name, value, why, hint);
            }
        }
        None
    }

    fn duration(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Duration> {
        self.parsed(subject, name, value, units::duration)
    }

    fn size(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<usize> {
        self.parsed(subject, name, value, units::size)
    }

    fn rate(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Rate> {
        self.parsed(subject, name, value, Rate::parse)
    }

    fn namespace(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Name> {
        self.parsed(subject, name, value, |text| Name::new(text).map_err(|error| format!("{error}; {}", error.hint())))
    }

    fn word<T: Copy>(&mut self, subject: &str, name: &str, value: &Value<'_>, words: &[(&str, T)]) -> Option<T> {
        let text = value.get_ref().as_str();
        let found = words.iter().find(|(word, _)| Some(*word) == text);
        if found.is_none() {
            let all = words.iter().map(|(word, _)| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", ");
            self.wrong(subject, name, value, "there is no such choice", &format!("write one of {all}"));
        }
        found.map(|(_, meaning)| *meaning)
    }

    fn count(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<u32> {
        let count = match value.get_ref() {
            DeValue::Integer(number) => u32::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        if count.is_none() {
            let hint = format!("write a whole number up to {}, without quotes", u32::MAX);
            self.wrong(subject, name, value, "this is no count", &hint);
        }
        count
    }

    fn number(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<f64> {
        let number = match value.get_ref() {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            DeValue::Float(number) => number.as_str().parse().ok(),
            _ => None,
        };
        if number.is_none() {
            self.wrong(subject, name, value, "this is no number", "write a number, such as `1.5`, without quotes");
        }
        number
    }

    fn flag(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<bool> {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            self.wrong(
                subject,
                name,
                value,
                "this is neither true nor false",
                "write `true` or `false`, without quotes",
            );
        }
        flag
    }

    fn texts(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Vec<String> {
        let texts: Option<Vec<String>> = value
            .get_ref()
            .as_array()
            .and_then(|array| array.iter().map(|one| one.get_ref().as_str().map(str::to_owned)).collect());
        match texts {
            Some(texts) if !texts.is_empty() => texts,
            Some(_) | None => {
                self.wrong(subject, name, value, "a list of texts is needed", &format!("write `{name} = [\"…\"]`"));
                Vec::new()
            }
        }
    }

    fn without_key(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<WithoutKey> {
        let DeValue::Table(table) = value.get_ref() else {
            return match value.get_ref().as_str() {
                Some("refuse") => Some(WithoutKey::Refuse),
                Some("coordinates") => Some(WithoutKey::Coordinates),
                Some(_) | None => {
                    let hint = "write `\"refuse\"`, `\"coordinates\"` or `{ derive = [\"/order/id\"] }`";
                    self.wrong(subject, name, value, "there is no such choice", hint);
                    None
                }
            };
        };
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for (member, value) in in_order(table) {
            match member {
                "derive" => required = self.texts(subject, "derive", value),
                "optional" => optional = self.texts(subject, "optional", value),
                unknown => self.unknown(unknown, value, subject, &["derive", "optional"]),
            }
        }
        match Fields::new(&required).and_then(|fields| fields.optional(&optional)) {
            Ok(_) if required.is_empty() && optional.is_empty() => {
                self.wrong(subject, name, value, "it chooses no field", "write `{ derive = [\"/order/id\"] }`");
                None
            }
            Ok(fields) => Some(WithoutKey::Derive(fields)),
            Err(error) => {
                self.fault(value, subject, format!("`{name}`: {error}"), error.hint());
                None
            }
        }
    }
}

/// A value as it was written, or what it is where it is long.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}
