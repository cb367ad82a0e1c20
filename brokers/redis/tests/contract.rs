//! What every source promises, on each kind of server: every case opens an empty queue of its own.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use taskonce_contract::broker::{SourceUnderTest, VISIBILITY};
use taskonce_queue_redis::RedisQueue;
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::shared::Shared;
use taskonce_worker::source::Source;

/// What each key begins with; a pattern of Redis would read more into it.
const PREFIX: &str = "a*[prefix]?:";
/// The longest that a call may take: a machine under load is slow, and no case is about that.
const TIMEOUT: &str = "20s";

/// A place for the queue of one case.
struct Place {
    url: String,
    prefix: String,
    server: Server,
}

enum Server {
    Own(RedisServer),
    Shared(Shared),
}

impl Place {
    fn own(server: RedisServer) -> Place {
        Place { url: format!("{}/0", server.url()), prefix: PREFIX.into(), server: Server::Own(server) }
    }

    /// Servers that many cases use: each has keys that begin in its own way, so that it finds none at first.
    fn shared(shared: Shared, case: &str) -> Place {
        let (start, process) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap(), std::process::id());
        let prefix = format!("{PREFIX}{case}-{process}-{}:", start.as_nanos());
        // The prefix of a queue may have 128 bytes.
        let prefix = prefix[prefix.len().saturating_sub(120)..].to_owned();
        Place { url: shared.url().to_owned(), prefix, server: Server::Shared(shared) }
    }

    /// One command, past the queue.
    fn command(&self, words: &[&[u8]]) -> Reply {
        match &self.server {
            Server::Own(server) => server.command(words).unwrap(),
            Server::Shared(shared) => shared.command(words).unwrap(),
        }
    }

    /// The beginnings of the keys of all handlers.
    fn handlers(&self) -> Vec<String> {
        let listed = self.command(&[b"ZRANGE", format!("{}{{queue}}:handlers", self.prefix).as_bytes(), b"0", b"-1"]);
        let Reply::Array(handlers) = listed else { panic!("{listed:?}") };
        handlers.iter().map(|handler| format!("{}{{queue:{}}}:", self.prefix, handler.text())).collect()
    }
}

#[async_trait]
impl SourceUnderTest for Place {
    async fn open(&self) -> Arc<dyn Source> {
        let prefix = self.prefix.replace('[', "%5B").replace(']', "%5D").replace('?', "%3F").replace('*', "%2A");
        let visibility = VISIBILITY.as_secs();
        let url = format!("{}?prefix={prefix}&timeout={TIMEOUT}&visibility={visibility}s", self.url);
        Arc::new(RedisQueue::from_url(&url).unwrap())
    }

    /// The clock of each handler is the server's, and what it is ahead of that.
    async fn pass(&self, time: Duration) {
        for base in self.handlers() {
            let millis = time.as_millis().to_string();
            self.command(&[b"HINCRBY", format!("{base}clock").as_bytes(), b"ahead", millis.as_bytes()]);
            // So that who waits looks again.
            self.command(&[b"SET", format!("{base}wake").as_bytes(), b"", b"PX", b"60000"]);
        }
    }

    async fn kept(&self) -> usize {
        let count = |words: &[&[u8]]| usize::try_from(self.command(words).int().unwrap()).unwrap();
        let mut kept = 0;
        for base in self.handlers() {
            let key = |end: &str| format!("{base}{end}").into_bytes();
            let alive: usize = ["high", "normal", "low"].map(|end| count(&[b"XLEN", &key(end)])).iter().sum();
            let dead = count(&[b"XLEN", &key("dead")]);
            assert_eq!(count(&[b"HLEN", &key("graves")]), dead);
            assert_eq!(count(&[b"ZCARD", &key("order")]), dead);
            let known = count(&[b"HLEN", &key("held")]);
            let placed: usize = ["flight", "later", "back"].map(|end| count(&[b"ZCARD", &key(end)])).iter().sum();
            assert_eq!(known, placed, "each delivery that is known has one place");
            assert!(known <= alive && count(&[b"HLEN", &key("once")]) <= alive, "nothing is left of what is gone");
            kept += alive + dead;
        }
        kept
    }
}

/// One server.
mod server {
    use taskonce_contract::broker_suite;
    use taskonce_testkit::RedisServer;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::own(RedisServer::start(&[]).unwrap())
    }

    broker_suite!(open);
}

/// Valkey.
mod valkey {
    use taskonce_contract::broker_suite;
    use taskonce_testkit::RedisServer;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::own(RedisServer::start_valkey(&[]).unwrap())
    }

    broker_suite!(open);
}

/// Three masters, each with a replica.
mod cluster {
    use taskonce_contract::broker_suite;
    use taskonce_testkit::shared;

    use super::Place;

    async fn open(case: &str) -> Place {
        Place::shared(shared::cluster().unwrap(), case)
    }

    broker_suite!(open);
}
