//! What is told of a run, as it is gathered, and its writing to streams that may be slow, gone or full.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Map, Value, json};
use taskonce::Seen;

use super::Call;
use super::capture::{Kept, Stream};
use super::child::Shows;
use super::handler::Errand;
use super::show;
use super::signals::{self, Signals};
use crate::exit::Code;
use crate::report::{self, Form, Trouble};
use crate::view;

/// The outcome of a call that found its task done.
pub(super) const REPLAYED: &str = "replayed";

/// Writes what was told, after what is left of the command's streams.
pub(super) async fn out(
    call: &Call,
    mut told: Told,
    errand: &Errand,
    cut_by: Option<i32>,
    signals: &mut Signals,
) -> ExitCode {
    let cut_by = match cut_by {
        Some(signal) => Some(signal),
        None => shown(errand.take_shows(), signals).await,
    };
    if let (Some(signal), true) = (cut_by, told.code == Code::Fine.number()) {
        report::say(format_args!(
            "interrupted by {} before all of its output was written; it is done, and the next call replays what is kept",
            signals::name(signal)
        ));
        told.code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    told.heed_unwritten();
    if let Some(trouble) = &told.trouble {
        report::say(trouble);
        told.fields.insert("error".to_owned(), trouble.to_json());
    }
    match call.form {
        Form::Text => {}
        Form::Json => {
            told.fields.insert("key".to_owned(), json!(call.task.key.as_str()));
            told.fields.insert("outcome".to_owned(), json!(told.outcome));
            told.fields.insert("exit_code".to_owned(), json!(told.code));
            let line = report::json_line(&Value::Object(std::mem::take(&mut told.fields)));
            let cut_by = show_bytes(Stream::Stdout, line.as_bytes(), signals).await;
            if let (Some(signal), true) = (cut_by, told.code == Code::Fine.number()) {
                told.code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
            }
            told.heed_unwritten();
        }
    }
    ExitCode::from(told.code)
}

/// What is to be said.
pub(super) struct Told {
    code: u8,
    outcome: &'static str,
    trouble: Option<Trouble>,
    fields: Map<String, Value>,
}

impl Told {
    pub(super) fn new(outcome: &'static str, code: u8) -> Told {
        Told { code, outcome, trouble: None, fields: Map::new() }
    }

    pub(super) fn refused(outcome: &'static str, code: Code, text: String, hint: String) -> Told {
        let trouble = Trouble::new(code, outcome, text, hint);
        Told { trouble: Some(trouble), ..Told::new(outcome, code.number()) }
    }

    /// All that a replay has to do is to write; of a run the command's own result counts.
    fn heed_unwritten(&mut self) {
        if self.outcome == REPLAYED && self.code == Code::Fine.number() && report::is_unwritten() {
            self.code = Code::Unwritten.number();
        }
    }

    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Told {
        self.fields.insert(name.to_owned(), value.into());
        self
    }

    pub(super) fn with_seen(self, seen: &Seen) -> Told {
        self.with("owner", seen.owner())
            .with("attempt", seen.attempt())
            .with("in_state_ms", millis(seen.age()))
            .with("defer_ms", millis(seen.defer_for()))
            .with("failure", seen.failure().map(view::failure))
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Waits until what the command wrote is written on, or a signal asks to end: that is returned.
pub(super) async fn shown(shows: Shows, signals: &mut Signals) -> Option<i32> {
    for (stream, show) in shows {
        tokio::select! {
            // A writer that is gone has written all it could.
            written = show => if let Ok(Err(error)) = written {
                report::cannot_write(stream.name(), &error);
            },
            signal = signals.next_end() => return Some(signal),
        }
    }
    None
}

pub(super) async fn show_bytes(stream: Stream, bytes: &[u8], signals: &mut Signals) -> Option<i32> {
    let show = match stream {
        Stream::Stdout => show::bytes(bytes, io::stdout()),
        Stream::Stderr => show::bytes(bytes, io::stderr()),
    };
    match show {
        Ok(show) => shown(vec![(stream, show)], signals).await,
        Err(error) => {
            report::cannot_write(stream.name(), &error);
            None
        }
    }
}

pub(super) fn with_streams(told: Told, kept: &Kept<'_>) -> Told {
    let mut told = told.with("stdout_cut", kept.stdout_cut).with("stderr_cut", kept.stderr_cut);
    for (name, bytes) in [("stdout", kept.stdout), ("stderr", kept.stderr)] {
        told = match std::str::from_utf8(bytes) {
            Ok(text) => told.with(name, text),
            Err(_) => told.with(&format!("{name}_base64"), base64(bytes)),
        };
    }
    told
}

/// Bytes that are no text, for JSON.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().fold(0, |group, byte| group << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let digit = DIGITS[(group >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_rfc_4648_says() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xef, 0xbe]), "/+++");
    }
}
