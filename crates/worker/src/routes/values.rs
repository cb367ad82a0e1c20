//! The values of a file: `Reader` makes of each what is meant, or a fault with its line.

use std::time::Duration;

use taskonce_core::json::Fields;
use taskonce_core::key::Name;
use taskonce_core::units;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::nearest;
use super::{Fault, Rate, WithoutKey};

/// What takes an inherited limit away.
const NONE: &str = "none";

pub(super) type Value<'i> = Spanned<DeValue<'i>>;

/// The members of a table, as they stand in the text.
pub(super) fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a str, &'a Value<'i>)> {
    let mut members: Vec<_> = table.iter().collect();
    members.sort_by_key(|(key, _)| key.span().start);
    members.into_iter().map(|(key, value)| (key.get_ref().as_ref(), value)).collect()
}

/// Reads values and gathers what is wrong.
pub(super) struct Reader {
    /// Where each line begins.
    lines: Vec<usize>,
    pub(super) faults: Vec<Fault>,
}

impl Reader {
    pub(super) fn new(text: &str) -> Reader {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Reader { lines: std::iter::once(0).chain(ends).collect(), faults: Vec::new() }
    }

    /// The line of a byte, counted from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|begin| *begin <= at)
    }

    pub(super) fn line_of(&self, value: &Value<'_>) -> usize {
        self.line(value.span().start)
    }

    pub(super) fn fault(&mut self, value: &Value<'_>, subject: &str, text: impl Into<String>, hint: impl Into<String>) {
        let line = Some(self.line_of(value));
        self.faults.push(Fault { line, subject: subject.to_owned(), text: text.into(), hint: hint.into() });
    }

    pub(super) fn unknown(&mut self, name: &str, value: &Value<'_>, subject: &str, known: &[&str]) {
        let hint = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None if value.get_ref().is_table() && !subject.is_empty() => {
                "no setting is a table; put a name that has a dot in quotes: `[handlers.\"a.b\"]`".to_owned()
            }
            None => format!("known here: {}", known.join(", ")),
        };
        self.fault(value, subject, format!("there is no setting `{name}`"), hint);
    }

    /// The members of what must be a table, `[head]` in the text.
    pub(super) fn members<'a, 'i>(
        &mut self,
        value: &'a Value<'i>,
        subject: &str,
        head: &str,
    ) -> Vec<(&'a str, &'a Value<'i>)> {
        match value.get_ref() {
            DeValue::Table(table) => in_order(table),
            _ => {
                let text = format!("this is {}; a table is needed", shown(value.get_ref()));
                self.fault(value, subject, text, format!("write `[{head}]` and below it what is in it"));
                Vec::new()
            }
        }
    }

    fn wrong(&mut self, subject: &str, name: &str, value: &Value<'_>, why: &str, hint: &str) {
        self.fault(value, subject, format!("`{name}` is {}: {why}", shown(value.get_ref())), hint);
    }

    pub(super) fn or_none<T>(
        &mut self,
        value: &Value<'_>,
        read: impl FnOnce(&mut Reader) -> Option<T>,
    ) -> Option<Option<T>> {
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

    pub(super) fn duration(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Duration> {
        self.parsed(subject, name, value, units::duration)
    }

    pub(super) fn size(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<usize> {
        self.parsed(subject, name, value, units::size)
    }

    pub(super) fn rate(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Rate> {
        self.parsed(subject, name, value, Rate::parse)
    }

    pub(super) fn namespace(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Name> {
        self.parsed(subject, name, value, |text| Name::new(text).map_err(|error| format!("{error}; {}", error.hint())))
    }

    pub(super) fn word<T: Copy>(
        &mut self,
        subject: &str,
        name: &str,
        value: &Value<'_>,
        words: &[(&str, T)],
    ) -> Option<T> {
        let text = value.get_ref().as_str();
        let found = words.iter().find(|(word, _)| Some(*word) == text);
        if found.is_none() {
            let all = words.iter().map(|(word, _)| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", ");
            self.wrong(subject, name, value, "there is no such choice", &format!("write one of {all}"));
        }
        found.map(|(_, meaning)| *meaning)
    }

    pub(super) fn count(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<u32> {
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

    pub(super) fn number(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<f64> {
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

    pub(super) fn flag(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<bool> {
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

    pub(super) fn text(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<String> {
        let text = value.get_ref().as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong(subject, name, value, "a text is needed", "put it in quotes");
        }
        text
    }

    pub(super) fn variables(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<Vec<(String, String)>> {
        let DeValue::Table(table) = value.get_ref() else {
            self.wrong(subject, name, value, "a table is needed", &format!("write `{name} = {{ NAME = \"value\" }}`"));
            return None;
        };
        let mut variables = Vec::new();
        for (variable, value) in in_order(table) {
            let text = self.text(subject, &format!("{name}.{variable}"), value)?;
            variables.push((variable.to_owned(), text));
        }
        Some(variables)
    }

    pub(super) fn texts(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Vec<String> {
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

    pub(super) fn without_key(&mut self, subject: &str, name: &str, value: &Value<'_>) -> Option<WithoutKey> {
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
