//! Reads a stream of the command, byte for byte and at once.

use std::io::{PipeReader, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread};

/// How much is read at once.
const CHUNK: usize = 64 * 1024;
/// How long a stream may stay open after the command has ended, held by processes that it left behind.
const GRACE: Duration = Duration::from_millis(250);

/// How much is taken after the command has ended, from processes that it left behind: more than any pipe holds.
const REST_MAX: usize = 4 * 1024 * 1024;

/// Reads until the stream ends, or `ended` closes: then takes what is there, and waits a little for the rest.
pub(crate) fn copy(mut from: &PipeReader, ended: &impl AsFd, mut take: impl FnMut(&[u8])) {
    let mut chunk = vec![0; CHUNK];
    // After the end: how many bytes the command itself has left in the pipe, and until when to wait for others.
    let mut rest: Option<(u64, Instant)> = None;
    let mut rest_taken = 0;
    while rest_taken < REST_MAX {
        let timeout = match rest {
            None => None,
            Some((0, until)) => match until.checked_duration_since(Instant::now()) {
                Some(left) => Timespec::try_from(left).ok(),
                None => return,
            },
            Some(_) => Some(Timespec::default()),
        };
        let mut fds = [PollFd::new(&from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        let watched = if rest.is_none() { 2 } else { 1 };
        match poll(&mut fds[..watched], timeout.as_ref()) {
            Ok(0) if rest.is_some_and(|(left, _)| left > 0) => rest = rest.map(|(_, until)| (0, until)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        let [readable, over] = fds.map(|fd| !fd.revents().is_empty());
        if rest.is_none() && over {
            rest = Some((ioctl_fionread(from).unwrap_or(0), Instant::now() + GRACE));
        }
        if !readable {
            continue;
        }
        let read = match from.read(&mut chunk) {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        if rest.is_some() {
            rest_taken += read;
        }
        rest = rest.map(|(left, until)| (left.saturating_sub(read as u64), until));
        take(&chunk[..read]);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_the_command_left_in_a_pipe_that_stays_open_is_taken() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (here, ended) = UnixStream::pair().unwrap();
        writer.write_all(&[7; 40_000]).unwrap();
        drop(here);
        let mut kept = 0;
        let start = Instant::now();
        copy(&reader, &ended, |bytes| kept += bytes.len());
        assert_eq!(kept, 40_000);
        assert!(start.elapsed() < Duration::from_secs(5), "it does not wait for the writer");
        drop(writer);
    }
}
