//! Reads what a command writes: its output up to a limit, and its stderr line by line, as log lines of the worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use taskonce::{DropReason, Output};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::Instant;

use super::child::Child;
use super::verdict::GRACE;

/// How much is read at once.
const CHUNK: usize = 64 * 1024;
/// How much is taken after a command's end from those that it left behind.
const REST_MAX: u64 = 4 * 1024 * 1024;
/// The longest line of stderr that is shown.
const LINE_MAX: usize = 2048;
/// The most lines of stderr that are shown of one task.
const LINES_MAX: u64 = 1000;
/// The longest last line that a failure tells.
const REASON_MAX: usize = 300;

/// What a stream brought: its beginning, and how much there was.
pub(crate) struct Read {
    pub(crate) bytes: Vec<u8>,
    pub(crate) total: u64,
}

/// Reads to the end, and keeps the beginning. What comes long after the command's end is not waited for.
pub(crate) async fn read(mut from: pipe::Receiver, max: usize, child: &Child) -> Read {
    let mut read = Read { bytes: Vec::new(), total: 0 };
    let mut chunk = vec![0; CHUNK];
    let mut rest = Rest::default();
    while let Some(length) = next(&mut from, &mut chunk, child, &mut rest).await {
        let take = length.min(max - read.bytes.len());
        read.bytes.extend_from_slice(&chunk[..take]);
        read.total += length as u64;
    }
    read
}

/// What is taken of a stream after its command's end.
#[derive(Default)]
struct Rest {
    bytes: u64,
    /// Until when, once the end was seen: what is left behind may write for ever, now and then.
    until: Option<Instant>,
}

/// The next bytes; `None` at the end.
async fn next(from: &mut pipe::Receiver, chunk: &mut [u8], child: &Child, rest: &mut Rest) -> Option<usize> {
    let read = tokio::select! {
        biased;
        read = from.read(chunk) => read,
        () = async {
            child.wait().await;
            let until = *rest.until.get_or_insert_with(|| Instant::now() + GRACE);
            // sleeps: a process that left the group may hold the stream open
            tokio::time::sleep_until(until).await;
        } => return None,
    };
    let length = read.ok().filter(|length| *length > 0)?;
    if child.has_ended().is_some() {
        rest.bytes += length as u64;
        if rest.bytes > REST_MAX {
            return None;
        }
    }
    Some(length)
}

impl Read {
    /// It as the output of a task.
    pub(crate) fn output(self) -> Output {
        if self.total > self.bytes.len() as u64 {
            return Output::Dropped(DropReason::TooLarge { bytes: self.total });
        }
        if self.bytes.is_empty() {
            return Output::Nothing;
        }
        let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&self.bytes).is_ok();
        let content_type = match (is_json, std::str::from_utf8(&self.bytes).is_ok()) {
            (true, _) => "application/json",
            (false, true) => "text/plain; charset=utf-8",
            (false, false) => "application/octet-stream",
        };
        Output::kept(content_type, self.bytes)
    }
}

/// The stderr of a command, for those who read the worker's log.
pub(crate) struct Errors {
    /// The task, or the handler where it has none.
    label: Mutex<String>,
    shown: AtomicU64,
    hidden: AtomicU64,
    last: Mutex<Option<String>>,
}

impl Errors {
    pub(crate) fn new(label: String) -> Arc<Errors> {
        Arc::new(Errors {
            label: Mutex::new(label),
            shown: AtomicU64::new(0),
            hidden: AtomicU64::new(0),
            last: Mutex::new(None),
        })
    }

    /// Another task begins.
    pub(crate) fn begin(&self, label: String) {
        self.tell_hidden();
        self.shown.store(0, Ordering::Relaxed);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = label;
    }

    /// The last line that says something.
    pub(crate) fn last(&self) -> Option<String> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says how many lines were left out.
    pub(crate) fn tell_hidden(&self) {
        let hidden = self.hidden.swap(0, Ordering::Relaxed);
        if hidden > 0 {
            let label = self.label.lock().unwrap_or_else(PoisonError::into_inner).clone();
            tracing::warn!(event = "stderr", key = label, "{hidden} more lines of stderr are not shown");
        }
    }

    fn line(&self, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let text = text.trim_end();
        if text.is_empty() {
            return;
        }
        let reason: String = text.chars().take(REASON_MAX).collect();
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
        if self.shown.fetch_add(1, Ordering::Relaxed) < LINES_MAX {
            let label = self.label.lock().unwrap_or_else(PoisonError::into_inner).clone();
            tracing::info!(event = "stderr", key = label, "{text}");
        } else {
            self.hidden.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads lines to the end. Of a longer line the beginning is shown.
    pub(crate) async fn read(&self, mut from: pipe::Receiver, child: &Child) {
        let mut chunk = vec![0; CHUNK];
        let mut line: Vec<u8> = Vec::new();
        let mut rest = Rest::default();
        while let Some(length) = next(&mut from, &mut chunk, child, &mut rest).await {
            let mut parts = chunk[..length].split(|byte| *byte == b'\n');
            // What follows the last line end is the beginning of a line.
            let mut part = parts.next();
            while let Some(bytes) = part {
                let room = LINE_MAX.saturating_sub(line.len());
                line.extend_from_slice(&bytes[..bytes.len().min(room)]);
                part = parts.next();
                if part.is_some() {
                    self.line(&line);
                    line.clear();
                }
            }
        }
        self.line(&line);
    }
}
