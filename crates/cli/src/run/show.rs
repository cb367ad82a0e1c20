//! Writes a stream of the command on, on a thread of its own, so that nobody waits for a slow reader but who wants to.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::oneshot;

/// What is still to be shown of one stream.
#[derive(Default)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    chunks: VecDeque<Vec<u8>>,
    /// Nothing more comes.
    closed: bool,
    /// The command has ended: what it left in its pipe is taken without waiting for room.
    unbounded: bool,
    /// Nobody reads it, or it cannot be written: the rest is not shown.
    broken: bool,
}

impl Queue {
    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a piece. While the command runs at most one piece waits, so that a slow reader slows the command down.
    pub(crate) fn add(&self, bytes: &[u8]) {
        let mut inner = self.locked();
        while !(inner.chunks.is_empty() || inner.unbounded || inner.broken) {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        if !inner.broken {
            inner.chunks.push_back(bytes.to_vec());
            self.changed.notify_all();
        }
    }

    /// The command has ended: nobody waits for room any more.
    pub(crate) fn unbind(&self) {
        self.locked().unbounded = true;
        self.changed.notify_all();
    }

    /// Nothing more comes.
    pub(crate) fn close(&self) {
        self.locked().closed = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Vec<u8>> {
        let mut inner = self.locked();
        loop {
            if let Some(chunk) = inner.chunks.pop_front() {
                self.changed.notify_all();
                return Some(chunk);
            }
            if inner.closed {
                return None;
            }
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_up(&self) {
        let mut inner = self.locked();
        inner.broken = true;
        inner.chunks.clear();
        self.changed.notify_all();
    }
}

/// Starts to write what comes into the queue. The receiver gets how that ended; a reader that has gone away is no error.
pub(crate) fn start(queue: Arc<Queue>, to: File) -> io::Result<oneshot::Receiver<io::Result<()>>> {
    let (done, shown) = oneshot::channel();
    thread::Builder::new().spawn(move || {
        let written = write(&queue, to);
        // Nobody waits when the claim was lost.
        let _gone = done.send(written);
    })?;
    Ok(shown)
}

/// Starts to write these bytes.
pub(crate) fn bytes(bytes: &[u8], to: impl AsFd) -> io::Result<oneshot::Receiver<io::Result<()>>> {
    let queue = Arc::new(Queue::default());
    queue.add(bytes);
    queue.close();
    start(queue, File::from(to.as_fd().try_clone_to_owned()?))
}

fn write(queue: &Queue, mut to: File) -> io::Result<()> {
    while let Some(chunk) = queue.next() {
        if let Err(error) = to.write_all(&chunk) {
            queue.give_up();
            return if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use super::*;

    fn pipe() -> (io::PipeReader, File) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, File::from(OwnedFd::from(writer)))
    }

    #[test]
    fn what_comes_is_written_in_order_and_nobody_waits_for_room_after_the_end() {
        let (mut reader, writer) = pipe();
        let queue = Arc::new(Queue::default());
        let shown = start(Arc::clone(&queue), writer).unwrap();
        queue.unbind();
        // More than a pipe holds, and nobody reads yet.
        let pieces: Vec<Vec<u8>> = (0..10).map(|number| vec![number; 100_000]).collect();
        pieces.iter().for_each(|piece| queue.add(piece));
        queue.close();
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert!(all == pieces.concat());
        shown.blocking_recv().unwrap().unwrap();
    }

    #[test]
    fn a_reader_that_has_gone_away_is_no_error_and_holds_nobody_up() {
        let (reader, writer) = pipe();
        drop(reader);
        let queue = Arc::new(Queue::default());
        let shown = start(Arc::clone(&queue), writer).unwrap();
        for _ in 0..100 {
            queue.add(b"x");
        }
        queue.close();
        shown.blocking_recv().unwrap().unwrap();
    }

    #[test]
    fn a_full_disk_is_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let queue = Arc::new(Queue::default());
        let shown = start(Arc::clone(&queue), full).unwrap();
        queue.add(b"x");
        queue.close();
        assert_eq!(shown.blocking_recv().unwrap().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
