//! What the server or the system said, as an error of ours.

use std::{fmt, io};

use taskonce_core::{Error, ErrorKind, Retry};

use crate::wire::Reply;

/// An error before it is known what it is about. Unlike [`Error`] it can be told to several callers.
#[derive(Clone, Debug)]
pub struct Refusal {
    kind: ErrorKind,
    message: String,
    hint: Option<&'static str>,
    /// Whether a person has to mend it, although its kind may pass by itself.
    lasts: bool,
}

impl Refusal {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Refusal {
        Refusal { kind, message: message.into(), hint: None, lasts: false }
    }

    /// The same with better advice than its kind has.
    pub fn hint(self, hint: &'static str) -> Refusal {
        Refusal { hint: Some(hint), ..self }
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same, of one server among several.
    pub fn of(self, server: impl fmt::Display) -> Refusal {
        Refusal { message: format!("`{server}`: {}", self.message), ..self }
    }

    /// The same, of one Sentinel.
    pub fn of_sentinel(self, sentinel: impl fmt::Display) -> Refusal {
        Refusal { message: format!("Sentinel `{sentinel}`: {}", self.message), ..self }
    }

    /// What says more: this, or, where this is only that the time was up, what came before it.
    pub fn or_before(self, before: Option<Refusal>) -> Refusal {
        match self.kind {
            ErrorKind::TimedOut => before.unwrap_or(self),
            _ => self,
        }
    }

    /// The same with advice that is better than that of its kind, where it has no other.
    pub fn or_hint(self, hint: &'static str) -> Refusal {
        Refusal { hint: self.hint.or(Some(hint)), ..self }
    }

    /// The same in other words.
    pub fn saying(self, message: String) -> Refusal {
        Refusal { message, ..self }
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether it may pass by itself when servers change their roles, start or come back.
    pub fn may_pass(&self) -> bool {
        !self.lasts && matches!(self.kind, ErrorKind::Unreachable | ErrorKind::TimedOut | ErrorKind::ReadOnly)
    }

    /// The same of a server that was found on the way and that others may replace: asking again later may help.
    pub fn passing(self) -> Refusal {
        let kind = if self.kind.retry() == Retry::Later { self.kind } else { ErrorKind::Unreachable };
        Refusal { kind, hint: Some(self.advice()), lasts: false, ..self }
    }

    /// What to do.
    fn advice(&self) -> &'static str {
        self.hint.unwrap_or(self.kind.hint())
    }

    /// Of why none of several servers can be used. While one of the causes may pass, so may the whole.
    pub fn of_all(causes: Vec<Refusal>) -> Option<Refusal> {
        let (passing, lasting): (Vec<_>, Vec<_>) = causes.into_iter().partition(Refusal::may_pass);
        // A server that answers says more than one that does not.
        let passing = passing.into_iter().max_by_key(|refusal| refusal.kind == ErrorKind::ReadOnly);
        match (passing, lasting.into_iter().next()) {
            (Some(passing), Some(lasting)) => {
                let message = format!("{}; {}", lasting.message, passing.message);
                Some(Refusal { message, hint: Some(lasting.advice()), ..passing })
            }
            (passing, lasting) => lasting.or(passing),
        }
    }

    /// Whether an answer says that the server is no primary any more.
    pub fn is_of_a_replica(text: &str) -> bool {
        let code = text.split(' ').next().unwrap_or_default();
        let codes = ["READONLY", "UNBLOCKED", "MASTERDOWN"];
        // Servers before 7.0 wrap what a script met into a text of their own.
        let texts = ["READONLY", "read only replica", "WAIT cannot be used with replica"];
        codes.contains(&code) || texts.iter().any(|part| text.contains(part))
    }

    /// The error, now that it is known what it is about.
    pub fn about(self, subject: impl Into<String>) -> Error {
        let error = Error::new(self.kind, self.message).about(subject);
        match self.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// An answer of another shape than the command has.
    pub fn misshapen(what: &str) -> Refusal {
        Refusal::new(ErrorKind::Protocol, format!("the answer to {what} has a shape that Redis never sends"))
    }

    /// The bytes are of another protocol.
    pub fn garbled() -> Refusal {
        Refusal::new(ErrorKind::Protocol, "what listens there does not speak the protocol of Redis")
    }

    /// An answer came in the place of another.
    pub fn out_of_step() -> Refusal {
        Refusal::new(ErrorKind::Protocol, "the connection was out of step and is dropped: an answer was not ours")
    }

    /// A write is here, and too few replicas have it.
    pub fn unreplicated(reached: i64, asked: u32) -> Refusal {
        let replicas = if reached == 1 { "replica" } else { "replicas" };
        let text =
            format!("the write is on the primary, and {reached} {replicas} acknowledged it in time, not {asked}");
        Refusal::new(ErrorKind::Unreplicated, text)
    }

    /// What the system says of a connection.
    pub fn of_io(error: &io::Error) -> Refusal {
        match error.kind() {
            io::ErrorKind::TimedOut => Refusal::new(ErrorKind::TimedOut, "the server does not answer"),
            io::ErrorKind::ConnectionRefused => {
                Refusal::new(ErrorKind::Unreachable, "the connection was refused: nothing listens there")
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Refusal::new(ErrorKind::Unreachable, "the connection was closed")
            }
            // So rustls says what is wrong with a certificate, or that the other side speaks no TLS.
            io::ErrorKind::InvalidData => Refusal {
                lasts: true,
                ..Refusal::new(ErrorKind::Unreachable, format!("no TLS connection: {error}"))
                    .hint("check the server's certificate, its name in the URL, and `ca`; `redis:` is without TLS")
            },
            _ => Refusal::new(ErrorKind::Unreachable, lower(&error.to_string())),
        }
    }

    /// The first error among these answers to a command; without one their shape is wrong.
    #[must_use]
    pub fn first_of(answers: &[Reply], command: &str) -> Refusal {
        let error = answers.iter().find_map(|answer| match answer {
            Reply::Error(text) => Some(Refusal::of_reply(text)),
            Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil | Reply::List(_) => None,
        });
        error.unwrap_or_else(|| Refusal::misshapen(command))
    }

    /// An error that the server answered: a code in capitals, and a text.
    pub fn of_reply(text: &str) -> Refusal {
        let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
        Refusal::of_code(code, detail)
    }

    fn of_code(code: &str, detail: &str) -> Refusal {
        // Servers before 7.0 wrap what a script met into a text of their own.
        let says = |word: &str| code == word || detail.contains(word);
        if says("WRONGTYPE") {
            Refusal::new(ErrorKind::Corrupt, "this key holds a value that is not a record: not even a string").hint(
                "another program uses this key; look at it with `redis-cli type`, or use another `prefix`: \
                 what is no record is never removed from here",
            )
        } else if says("OOM") {
            Refusal::new(ErrorKind::Full, "the server's memory is full (`maxmemory`)")
                .hint("raise `maxmemory`, free memory, or shorten retention, then try again")
        } else if says("READONLY") || says("read only replica") {
            Refusal::new(ErrorKind::ReadOnly, "the server is a replica and refuses writes")
                .hint("a URL of one server must name the primary; in other shapes a switch is under way: try again")
        } else if code == "UNBLOCKED" || says("WAIT cannot be used with replica") {
            Refusal::new(ErrorKind::ReadOnly, "the server became a replica while a write waited for replicas")
                .hint("try again: whether the write was kept is unknown")
        } else if says("NOAUTH") {
            Refusal::new(ErrorKind::Denied, "the server asks for a password and the URL has none")
        } else if says("WRONGPASS") {
            Refusal::new(ErrorKind::Denied, "the server refused the user or the password")
        } else if says("NOPERM") || says("user executing the script") {
            Refusal::new(ErrorKind::Denied, format!("the user lacks a permission: {}", lower(detail))).hint(
                "give the user the whole line of docs/redis/README.md (`ACL SETUSER`), with the `prefix` of the URL",
            )
        } else if says("MISCONF") || says("NOREPLICAS") {
            Refusal::new(ErrorKind::ReadOnly, format!("the server refuses writes: {}", lower(detail)))
                .hint("look at the server's log: it cannot save to its disk, or misses its replicas")
        } else if ["MOVED", "ASK", "TRYAGAIN"].contains(&code) {
            Refusal::new(ErrorKind::Unreachable, "the key is on its way to another node of the Cluster, or there")
                .hint("slots are being moved; try again")
        } else if code == "BUSY" {
            Refusal::new(ErrorKind::Unreachable, "the server is busy with a script or function of somebody")
                .hint("find out whose it is; `SCRIPT KILL` or `FUNCTION KILL` ends one that has written nothing")
        } else if says("CLUSTERDOWN") {
            Refusal::new(ErrorKind::Unreachable, format!("the Cluster does not serve this key now: {}", lower(detail)))
                .hint("a node is missing and has no replica in its place yet; look at `redis-cli --cluster check`")
        } else if ["LOADING", "MASTERDOWN"].contains(&code) || says("max number of clients") {
            Refusal::new(ErrorKind::Unreachable, format!("the server cannot answer now: {}", lower(detail)))
                .hint("wait until the server has started, or has room for connections")
        } else if says("DB index") {
            Refusal::new(ErrorKind::BadUrl, "the server has no database of that number")
                .hint("give another database number, as in `redis://host:6379/0`")
        } else if says("unknown command") {
            Refusal::new(ErrorKind::Unsupported, format!("the server lacks a command: {}", lower(detail)))
                .hint("use Redis 6.2 or later, or Valkey")
        } else {
            Refusal::new(ErrorKind::Protocol, format!("the server answered: {code} {detail}"))
        }
    }
}

/// A message of another program in our style: it begins in lower case.
fn lower(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some(second)) if second.is_lowercase() => first.to_lowercase().chain(chars).collect(),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_fits_what_the_server_said() {
        let cases = [
            ("READONLY You can't write against a read only replica.", ErrorKind::ReadOnly, "a switch is under way"),
            (
                "NOPERM this user has no permissions to run the 'asking' command",
                ErrorKind::Denied,
                "docs/redis/README.md",
            ),
            ("MOVED 3999 127.0.0.1:6381", ErrorKind::Unreachable, "slots are being moved"),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                ErrorKind::Unreachable,
                "slots are being moved",
            ),
            ("BUSY Redis is busy running a script.", ErrorKind::Unreachable, "SCRIPT KILL"),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Unreachable, "has started"),
        ];
        for (text, kind, advice) in cases {
            let error = Refusal::of_reply(text).about("store `s`");
            assert!(error.kind() == kind && error.hint().contains(advice), "{text}: {error:?}");
        }
        let crossed = Refusal::of_reply("CROSSSLOT Keys in request don't hash to the same slot").about("store `s`");
        assert!(crossed.kind() == ErrorKind::Protocol && crossed.to_string().contains("CROSSSLOT"), "{crossed:?}");
    }
}
