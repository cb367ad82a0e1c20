//! Signals that are passed on to the command, and their names.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// The signals that are passed on.
const PASSED_ON: [(Signal, &str); 6] = [
    (Signal::HUP, "SIGHUP"),
    (Signal::INT, "SIGINT"),
    (Signal::QUIT, "SIGQUIT"),
    (Signal::TERM, "SIGTERM"),
    (Signal::USR1, "SIGUSR1"),
    (Signal::USR2, "SIGUSR2"),
];

/// The name of a signal's number.
pub(crate) fn name(number: i32) -> String {
    let more = [
        (Signal::ABORT, "SIGABRT"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::ILL, "SIGILL"),
        (Signal::KILL, "SIGKILL"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::SYS, "SIGSYS"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::XFSZ, "SIGXFSZ"),
    ];
    let known = PASSED_ON.into_iter().chain(more).find(|(signal, _)| signal.as_raw() == number);
    known.map_or_else(|| format!("signal {number}"), |(_, name)| name.to_owned())
}

/// Whether a terminal sends this signal to all of its foreground job.
pub(crate) fn is_from_terminal(number: i32) -> bool {
    [Signal::INT, Signal::QUIT].iter().any(|signal| signal.as_raw() == number)
}

/// Whether this signal asks a program to end: then no further attempt is made.
pub(crate) fn asks_to_end(number: i32) -> bool {
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM].iter().any(|signal| signal.as_raw() == number)
}

/// The signals that this process may get. Those that it was started to ignore (`nohup`) stay ignored, for the command too.
pub(crate) struct Signals {
    streams: Vec<(i32, Stream)>,
}

impl Signals {
    /// Begins to receive them. Must be called within an event loop.
    pub(crate) fn heed() -> io::Result<Signals> {
        let ignored = ignored();
        let mut streams = Vec::new();
        for (kind, _) in PASSED_ON {
            let number = kind.as_raw();
            if ignored & (1 << (number - 1)) == 0 {
                streams.push((number, signal(SignalKind::from_raw(number))?));
            }
        }
        Ok(Signals { streams })
    }

    /// The next signal that asks programs to end; others are dropped.
    pub(crate) async fn next_end(&mut self) -> i32 {
        loop {
            let number = self.next().await;
            if asks_to_end(number) {
                return number;
            }
        }
    }

    /// The next signal's number.
    pub(crate) async fn next(&mut self) -> i32 {
        std::future::poll_fn(|context| {
            for (number, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*number);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// The signals that this process ignores, as a set of bits; none where the system does not say.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_their_usual_names() {
        assert_eq!(name(9), "SIGKILL");
        assert_eq!(name(15), "SIGTERM");
        assert_eq!(name(63), "signal 63");
    }
}
