//! What a command wrote, as bytes: a line of JSON with the lengths, then stdout and stderr byte for byte.
//!
//! Version 1: `{"v":1,"stdout":LEN,"stderr":LEN,"stdout_cut":LEN,"stderr_cut":LEN}\n`, where `…_cut` counts the bytes
//! that came after the limit and are not kept. Only a success is kept, so there is no exit code other than 0.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use taskonce::Output;

use crate::report;

/// The content type of a kept output.
pub(crate) const CONTENT_TYPE: &str = "application/vnd.taskonce.run";
/// What the line of lengths takes at most, in bytes.
pub(crate) const HEAD_MAX: usize = 256;

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Head {
    v: u32,
    stdout: usize,
    stderr: usize,
    stdout_cut: u64,
    stderr_cut: u64,
}

/// Which of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stream::Stdout => report::STDOUT,
            Stream::Stderr => "stderr",
        }
    }
}

/// Collects both streams, at most `max` bytes together; what comes after that is counted.
pub(crate) struct Capture {
    max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    stdout_cut: u64,
    stderr_cut: u64,
}

impl Capture {
    pub(crate) fn new(max: usize) -> Capture {
        Capture { max, inner: Mutex::default() }
    }

    /// Takes what a stream brought.
    pub(crate) fn add(&self, stream: Stream, bytes: &[u8]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { stdout, stderr, stdout_cut, stderr_cut } = &mut *inner;
        let room = self.max.saturating_sub(stdout.len() + stderr.len());
        let (kept, cut) = match stream {
            Stream::Stdout => (stdout, stdout_cut),
            Stream::Stderr => (stderr, stderr_cut),
        };
        // A stream that was cut stays cut, so that what is kept is its beginning.
        let take = if *cut > 0 { 0 } else { bytes.len().min(room) };
        kept.extend_from_slice(&bytes[..take]);
        *cut += (bytes.len() - take) as u64;
    }

    /// What was taken, as the output of the task.
    pub(crate) fn output(&self) -> Output {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let head = Head {
            v: VERSION,
            stdout: inner.stdout.len(),
            stderr: inner.stderr.len(),
            stdout_cut: inner.stdout_cut,
            stderr_cut: inner.stderr_cut,
        };
        let mut bytes = serde_json::to_vec(&head).expect("a struct of numbers has a JSON form");
        bytes.reserve(1 + head.stdout + head.stderr);
        bytes.push(b'\n');
        bytes.extend_from_slice(&inner.stdout);
        bytes.extend_from_slice(&inner.stderr);
        Output::kept(CONTENT_TYPE, bytes)
    }
}

/// A kept output, read.
pub(crate) struct Kept<'a> {
    pub(crate) stdout: &'a [u8],
    pub(crate) stderr: &'a [u8],
    pub(crate) stdout_cut: u64,
    pub(crate) stderr_cut: u64,
}

impl Kept<'_> {
    /// Whether something of it was not kept.
    pub(crate) fn is_cut(&self) -> bool {
        self.stdout_cut > 0 || self.stderr_cut > 0
    }
}

/// Reads a kept output; `None` when it is of another version, or damaged.
pub(crate) fn read(bytes: &[u8]) -> Option<Kept<'_>> {
    let line_end = bytes.iter().take(HEAD_MAX).position(|byte| *byte == b'\n')?;
    let head: Head = serde_json::from_slice(&bytes[..line_end]).ok()?;
    let rest = &bytes[line_end + 1..];
    if head.v != VERSION || head.stdout.checked_add(head.stderr)? != rest.len() {
        return None;
    }
    let (stdout, stderr) = rest.split_at(head.stdout);
    Some(Kept { stdout, stderr, stdout_cut: head.stdout_cut, stderr_cut: head.stderr_cut })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(capture: &Capture) -> Vec<u8> {
        match capture.output() {
            Output::Kept { bytes, .. } => bytes,
            Output::Nothing | Output::Dropped(_) => panic!("nothing is kept"),
        }
    }

    #[test]
    fn both_streams_come_back_byte_for_byte() {
        let capture = Capture::new(1024);
        let all: Vec<u8> = (0..=255).collect();
        capture.add(Stream::Stdout, &all);
        capture.add(Stream::Stderr, b"\n{}\n");
        capture.add(Stream::Stdout, b"\0");
        let bytes = bytes(&capture);
        let kept = read(&bytes).unwrap();
        assert_eq!(kept.stdout, [&all[..], b"\0"].concat());
        assert_eq!(kept.stderr, b"\n{}\n");
        assert!(!kept.is_cut());
    }

    #[test]
    fn what_comes_after_the_limit_is_counted_and_not_kept() {
        let capture = Capture::new(5);
        capture.add(Stream::Stdout, b"abc");
        capture.add(Stream::Stderr, b"xyz");
        capture.add(Stream::Stdout, b"d");
        let bytes = bytes(&capture);
        let kept = read(&bytes).unwrap();
        assert_eq!((kept.stdout, kept.stdout_cut), (&b"abc"[..], 1));
        assert_eq!((kept.stderr, kept.stderr_cut), (&b"xy"[..], 1));
        assert!(kept.is_cut() && bytes.len() <= 5 + HEAD_MAX);
    }

    #[test]
    fn damaged_and_newer_outputs_are_not_read() {
        for bad in
            [&b""[..], b"{}", b"{}\n", b"{\"v\":2,\"stdout\":0,\"stderr\":0,\"stdout_cut\":0,\"stderr_cut\":0}\n"]
        {
            assert!(read(bad).is_none());
        }
        let mut bytes = bytes(&Capture::new(9));
        bytes.push(0);
        assert!(read(&bytes).is_none());
    }
}
