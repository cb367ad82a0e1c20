//! What every store promises, on each kind of server: every case opens an empty store of its own.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use taskonce_contract::StoreUnderTest;
use taskonce_core::key::Key;
use taskonce_core::store::Store;
use taskonce_redis::RedisStore;
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::shared::Shared;

/// What each key begins with; a pattern of Redis would read more into it.
const PREFIX: &str = "a*[prefix]?:";
/// The longest that a call may take: a machine under load is slow, and no case is about that.
const TIMEOUT: &str = "20s";

/// A place for the records of one case.
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
        Place { url: shared.url().to_owned(), prefix, server: Server::Shared(shared) }
    }

    /// One command, past the store.
    fn command(&self, words: &[&[u8]]) -> Reply {
        match &self.server {
            Server::Own(server) => server.command(words).unwrap(),
            Server::Shared(shared) => shared.command(words).unwrap(),
        }
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        format!("{}{key}", self.prefix).into_bytes()
    }
}

#[async_trait]
impl StoreUnderTest for Place {
    async fn open(&self) -> Arc<dyn Store> {
        let prefix = self.prefix.replace('[', "%5B").replace(']', "%5D").replace('?', "%3F").replace('*', "%2A");
        let url = format!("{}?prefix={prefix}&timeout={TIMEOUT}", self.url);
        Arc::new(RedisStore::from_url(&url).unwrap())
    }

    /// The age of a record is the life that it was written with, less what is left of it.
    async fn shift_age(&self, key: &Key, millis: i64) {
        let name = self.name(key);
        let left = self.command(&[b"PTTL", &name]).int().unwrap();
        if left >= 0 {
            self.command(&[b"PEXPIRE", &name, (left - millis).to_string().as_bytes()]);
        }
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        self.command(&[b"SET", &self.name(key), bytes]);
    }
}

/// A server that replaces a record by a script.
mod server {
    use taskonce_contract::store_suite;
    use taskonce_testkit::RedisServer;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::own(RedisServer::start(&[]).unwrap())
    }

    store_suite!(open);
}

/// A server that compares a record itself before it replaces it.
mod valkey {
    use taskonce_contract::store_suite;
    use taskonce_testkit::RedisServer;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::own(RedisServer::start_valkey(&[]).unwrap())
    }

    store_suite!(open);
}

/// Three masters, each with a replica.
mod cluster {
    use taskonce_contract::store_suite;
    use taskonce_testkit::shared;

    use super::Place;

    async fn open(case: &str) -> Place {
        Place::shared(shared::cluster().unwrap(), case)
    }

    store_suite!(open);
}

/// A primary and a replica, found through three Sentinels.
mod sentinel {
    use taskonce_contract::store_suite;
    use taskonce_testkit::shared;

    use super::Place;

    async fn open(case: &str) -> Place {
        Place::shared(shared::sentinel().unwrap(), case)
    }

    store_suite!(open);
}
