//! The log of a worker: every event is one line on stderr, for people or as JSON.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::plain;
use crate::report::Form;

/// Whose events are shown: those of libraries below are noise.
const OURS: &str = "taskonce";

/// Writes the lines.
pub(crate) struct Log {
    form: Form,
    level: Level,
}

impl Log {
    /// From now on this process's events become lines, up to this level.
    pub(crate) fn begin(form: Form, level: Level) {
        // A second one in one process would be a fault of this program; the first goes on.
        let _again = tracing::subscriber::set_global_default(Log { form, level });
    }
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // Writing into a string cannot fail.
            let _ = write!(self.message, "{value:?}");
        } else {
            self.others.insert(field.name().to_owned(), Value::String(format!("{value:?}")));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
        } else {
            self.others.insert(field.name().to_owned(), Value::String(value.to_owned()));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.others.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.others.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.others.insert(field.name().to_owned(), value.into());
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level && metadata.target().starts_with(OURS)
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(now.as_millis()).ok().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
        let time = now.map_or_else(String::new, |now| format!("{now:.3}"));
        let level = event.metadata().level().as_str();
        let line = match self.form {
            Form::Text => text(&time, level, &fields),
            Form::Json => json(&time, level, fields),
        };
        // Nobody may be there to read it.
        let _gone = writeln!(std::io::stderr().lock(), "{line}");
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

fn text(time: &str, level: &str, fields: &Fields) -> String {
    let mut line = format!("{time} {level:5}");
    let mut shown = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = write!(line, " {text}");
    };
    for name in ["event", "key"] {
        if let Some(value) = fields.others.get(name) {
            shown(value);
        }
    }
    let mut line = format!("{line}{} {}", if fields.others.contains_key("key") { ":" } else { "" }, fields.message);
    for (name, value) in &fields.others {
        // The reason says what these say.
        if !matches!(name.as_str(), "event" | "key" | "attempt" | "owner" | "age_ms") {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let _ = write!(line, " {name}={text}");
        }
    }
    plain::line(&line).into_owned()
}

fn json(time: &str, level: &str, fields: Fields) -> String {
    let mut object = Map::new();
    object.insert("time".to_owned(), time.into());
    object.insert("level".to_owned(), level.to_ascii_lowercase().into());
    object.insert("message".to_owned(), fields.message.into());
    object.extend(fields.others);
    plain::json(&Value::Object(object).to_string()).into_owned()
}
