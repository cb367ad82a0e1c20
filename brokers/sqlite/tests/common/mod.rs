//! What the tests of the SQLite queue share: files of their own, and a host's clock that can be moved.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rusqlite::Connection;
use taskonce_core::error::{Error, ErrorKind};
use taskonce_queue_sqlite::{Options, QueueOptions, SqliteQueue};
use taskonce_worker::source::{Delivery, Entrance, Envelope, Sent, Settled, Source, Want};

/// A folder of the test's own, and a queue's file in it.
pub(crate) struct Place {
    /// Removed with the place.
    pub(crate) folder: tempfile::TempDir,
    /// The file, not made yet.
    pub(crate) path: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queue.db");
        Place { folder, path }
    }

    pub(crate) fn open(&self) -> SqliteQueue {
        self.open_with(QueueOptions::default())
    }

    pub(crate) fn open_with(&self, options: QueueOptions) -> SqliteQueue {
        SqliteQueue::open(&self.path, options).unwrap()
    }

    /// The error of opening the file.
    pub(crate) fn refusal(&self) -> Error {
        match SqliteQueue::open(&self.path, QueueOptions::default()) {
            Ok(_) => panic!("{} must be refused", self.path.display()),
            Err(error) => error,
        }
    }

    /// A connection beside the queue, as another process has it.
    pub(crate) fn beside(&self) -> Connection {
        Connection::open(&self.path).unwrap()
    }
}

/// The host's clock, moved by hand.
#[derive(Clone, Default)]
pub(crate) struct Shift(Arc<AtomicI64>);

impl Shift {
    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as i64, Ordering::SeqCst);
    }

    pub(crate) fn go_back(&self, by: Duration) {
        self.0.fetch_sub(by.as_millis() as i64, Ordering::SeqCst);
    }

    pub(crate) fn options(&self) -> QueueOptions {
        let shift = Arc::clone(&self.0);
        let host = Options::default().clock;
        let clock = Arc::new(move || host() + shift.load(Ordering::SeqCst));
        QueueOptions { file: Options { clock, ..Options::default() }, ..QueueOptions::default() }
    }
}

pub(crate) const HANDLER: &str = "charge@2";
pub(crate) const AT_ONCE: Duration = Duration::ZERO;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Sends a payload to the usual handler.
pub(crate) async fn send(queue: &SqliteQueue, payload: impl Into<Vec<u8>>) -> Arc<str> {
    match queue.send(&Envelope::new(HANDLER, payload), AT_ONCE, Entrance::Open).await.unwrap() {
        Sent::Accepted(coordinates) | Sent::AlreadyQueued(coordinates) => coordinates,
    }
}

/// At most so many of the usual handler.
pub(crate) async fn receive(queue: &SqliteQueue, max: usize, wait: Duration) -> Vec<Delivery> {
    queue.receive(&[Want { handler: HANDLER.into(), max }], max, wait).await.unwrap()
}

pub(crate) fn done(settled: Settled) {
    assert_eq!(settled, Settled::Done);
}

/// Checks an error's kind and that it names what it is about.
pub(crate) fn names(error: &Error, kind: ErrorKind, subject: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.subject().is_some_and(|named| named.contains(subject)), "{error:?} does not name {subject}");
    assert!(!error.hint().is_empty());
}
