//! What the program says: data on stdout, errors and notes on stderr, and errors that end with a hint.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use taskonce::ErrorKind;

use crate::exit::Code;
use crate::plain;

/// Why the program cannot do what it was asked to.
pub(crate) struct Trouble {
    pub(crate) code: Code,
    kind: &'static str,
    text: String,
    hint: String,
    /// What the JSON says beyond that.
    detail: Option<(&'static str, Value)>,
}

/// A result of this program.
pub(crate) type Result<T, E = Trouble> = std::result::Result<T, E>;

impl Trouble {
    pub(crate) fn new(code: Code, kind: &'static str, text: impl Into<String>, hint: impl Into<String>) -> Trouble {
        Trouble { code, kind, text: text.into(), hint: hint.into(), detail: None }
    }

    /// Says this in the JSON too.
    pub(crate) fn with(self, name: &'static str, value: Value) -> Trouble {
        Trouble { detail: Some((name, value)), ..self }
    }

    /// Arguments or input that cannot be used.
    pub(crate) fn usage(text: impl Into<String>, hint: impl Into<String>) -> Trouble {
        Trouble::new(Code::Usage, "usage", text, hint)
    }

    /// What is wrong, without the hint.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut object =
            json!({ "kind": self.kind, "message": self.text, "hint": self.hint, "exit_code": self.code.number() });
        if let Some((name, value)) = &self.detail {
            object[*name] = value.clone();
        }
        object
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}\nhint: {}", self.text, self.hint)
    }
}

impl From<taskonce::Error> for Trouble {
    fn from(error: taskonce::Error) -> Trouble {
        let hint = match error.kind() {
            // The kind's advice is for people who write programs.
            ErrorKind::ForgetfulStore => "use a SQLite store, or accept that with `--store-may-forget`",
            _ => error.hint(),
        };
        Trouble::new(Code::of(error.kind()), error.kind().name(), error.to_string(), hint)
    }
}

/// The name of the stream that data goes to.
pub(crate) const STDOUT: &str = "stdout";

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// Writes text for people to stdout, safe to show. A reader that has gone away is no error: the work is done.
pub(crate) fn data(text: &str) {
    data_bytes(plain::lines(text).as_bytes());
}

/// Writes data to stdout byte for byte.
pub(crate) fn data_bytes(bytes: &[u8]) {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => cannot_write(STDOUT, &error),
        Ok(()) | Err(_) => {}
    }
}

/// Whether stdout could not be written.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);
/// Whether it was said that a stream could not be written.
static SAID: AtomicBool = AtomicBool::new(false);

/// Says that data could not be written; of stdout it is remembered for the exit code.
pub(crate) fn cannot_write(stream: &str, error: &io::Error) {
    if stream == STDOUT {
        UNWRITTEN.store(true, Ordering::Relaxed);
    }
    if !SAID.swap(true, Ordering::Relaxed) {
        say(format_args!(
            "error: {stream} cannot be written: {error}\n\
             hint: make room where it goes, then ask again; what was done stays done"
        ));
    }
}

/// Whether stdout could not be written.
pub(crate) fn is_unwritten() -> bool {
    UNWRITTEN.load(Ordering::Relaxed)
}

/// Writes a JSON value and a line end to stdout.
pub(crate) fn data_json(value: &Value) {
    data_bytes(json_line(value).as_bytes());
}

/// A JSON value and a line end.
pub(crate) fn json_line(value: &Value) -> String {
    format!("{}\n", plain::json(&value.to_string()))
}

/// Says something to people, on stderr, safe to show.
pub(crate) fn say(text: impl fmt::Display) {
    // Nobody may be there to read it; the exit code says it too.
    let _gone = writeln!(io::stderr().lock(), "{}", plain::lines(&text.to_string()));
}

/// Reports a trouble: on stderr, and with `--json` as an object on stdout.
pub(crate) fn trouble(form: Form, trouble: &Trouble) {
    say(trouble);
    match form {
        Form::Text => {}
        Form::Json => data_json(&json!({ "error": trouble.to_json() })),
    }
}
