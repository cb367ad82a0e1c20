//! Where deliveries come from: the port of brokers, and `open`, which names them by URL.
//!
//! ```
//! use std::time::Duration;
//! use taskonce::source::{self, Entrance, Envelope, Want};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> taskonce::Result<()> {
//! let queue = source::open("memory:")?;
//! let _sent = queue.send(&Envelope::new("charge@2", r#"{"amount": 1200}"#), Duration::ZERO, Entrance::Open).await?;
//! let wants = [Want { handler: "charge@2".into(), max: 10 }];
//! for delivery in queue.receive(&wants, 10, Duration::from_secs(1)).await? {
//!     println!("{:?}", delivery.envelope);
//!     let _settled = queue.acknowledge(&delivery.receipt).await?;
//! }
//! # Ok(()) }
//! ```

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::host::Host as _;
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_worker::SystemHost;

pub use taskonce_worker::source::*;

use crate::MEMORY_SCHEME;

/// The schemes of sources that this build knows.
pub const SOURCE_SCHEMES: &[&str] = &[
    MEMORY_SCHEME,
    #[cfg(feature = "sqlite")]
    "sqlite",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redis")]
    "rediss",
    #[cfg(feature = "redis")]
    "redis+sentinel",
    #[cfg(feature = "redis")]
    "rediss+sentinel",
    #[cfg(feature = "redis")]
    "redis+cluster",
    #[cfg(feature = "redis")]
    "rediss+cluster",
];

/// How long a source in memory holds a delivery for its receiver.
const MEMORY_VISIBILITY: Duration = Duration::from_secs(30);

/// The source that the URL names.
///
/// * `memory:`: a queue in this process's memory, a new one each time. Nothing survives the process.
/// * `sqlite:queue.db?visibility=30s&name=queue`: the embedded queue, in a file of its own, which is made when it is missing: see
///   the `taskonce-queue-sqlite` crate.
/// * `redis://host:6379/0?visibility=30s&name=queue`, and `redis+sentinel:` and `redis+cluster:` as for the store: a queue on
///   Redis Streams, which connects on first use: see the `taskonce-queue-redis` crate.
///
/// # Errors
/// [`ErrorKind::BadUrl`], naming every unknown or wrong part at once. For SQLite also what keeps the file from being
/// opened.
pub fn open(url: &str) -> Result<Arc<dyn Source>> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    match scheme {
        MEMORY_SCHEME if url == "memory:" => {
            let host = SystemHost::new();
            Ok(Arc::new(MemorySource::new("memory", MEMORY_VISIBILITY, move || host.uptime())))
        }
        MEMORY_SCHEME => Err(Error::new(ErrorKind::BadUrl, "the source in memory takes no path and no options")
            .about(format!("source `{url}`"))
            .with_hint("write it as `memory:`")),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(taskonce_queue_sqlite::SqliteQueue::from_url(url)?)),
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster" | "rediss+cluster" => {
            Ok(Arc::new(taskonce_queue_redis::RedisQueue::from_url(url)?))
        }
        _ => Err(Error::new(ErrorKind::BadUrl, format!("no source has the scheme `{}`", scheme.escape_debug()))
            .about("source URL")
            .with_hint(format!(
                "this build knows {}; `sqlite` and `redis` are features of the crate",
                SOURCE_SCHEMES.join(", ")
            ))),
    }
}

/// The same, by this name: that of the table of routes, `[sources.orders]`, which is the source's own.
///
/// # Errors
/// Those of [`open`]; [`ErrorKind::BadUrl`] too where the URL gives another name.
pub fn open_named(url: &str, name: &str) -> Result<Arc<dyn Source>> {
    if url == "memory:" {
        let host = SystemHost::new();
        return Ok(Arc::new(MemorySource::new(name, MEMORY_VISIBILITY, move || host.uptime())));
    }
    let query = url.split_once('?').map(|(_, query)| query);
    let source = if query.is_some_and(|query| query.split('&').any(|pair| pair.starts_with("name="))) {
        open(url)?
    } else {
        let mark = if query.is_some() { '&' } else { '?' };
        open(&format!("{url}{mark}name={}", encoded(name)))?
    };
    let own = &source.describe().name;
    if **own != *name {
        return Err(Error::new(ErrorKind::BadUrl, format!("its URL names it `{}`", own.escape_debug()))
            .about(format!("source `{name}`"))
            .with_hint("leave `name=` out of the URL"));
    }
    Ok(source)
}

/// As [`open`], but a SQLite file that is missing is an error: a mistyped path must not answer that nothing is queued.
///
/// # Errors
/// Those of [`open`]; [`ErrorKind::NotFound`] when the file is missing.
pub fn open_existing(url: &str) -> Result<Arc<dyn Source>> {
    check_existing(url)?;
    open(url)
}

/// As [`open_named`], but a SQLite file that is missing is an error.
///
/// # Errors
/// Those of [`open_named`]; [`ErrorKind::NotFound`] when the file is missing.
pub fn open_existing_named(url: &str, name: &str) -> Result<Arc<dyn Source>> {
    check_existing(url)?;
    open_named(url, name)
}

fn check_existing(url: &str) -> Result<()> {
    match url.split_once(':').map_or("", |(scheme, _)| scheme) {
        #[cfg(feature = "sqlite")]
        "sqlite" => taskonce_queue_sqlite::SqliteQueue::check_existing(url),
        // Only files can be missing.
        _ => Ok(()),
    }
}

fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_' | b'~' => encoded.push(byte.into()),
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_source_has_the_name_that_the_table_gives_it() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("queue").display());
        for url in [url.clone(), format!("{url}?visibility=1s"), format!("{url}?name=orders"), "memory:".to_owned()] {
            assert_eq!(&*open_named(&url, "orders").unwrap().describe().name, "orders", "{url}");
        }
        let Err(error) = open_named(&format!("{url}?name=others"), "orders") else { panic!("it has another name") };
        assert!(error.to_string().contains("`others`"), "{error}");
        let Err(error) = open_named(&url, "a b") else { panic!("no queue has such a name") };
        assert!(error.to_string().contains("`a b`"), "{error}");
    }

    #[test]
    fn a_url_of_no_source_is_refused_with_what_there_is() {
        for url in ["", "queue", "memory:a", "kafka://host", "postgres://host/database"] {
            let Err(error) = open(url) else { panic!("{url} must be refused") };
            assert_eq!(error.kind(), ErrorKind::BadUrl, "{url}");
            assert!(error.hint().contains("memory"), "{}", error.hint());
        }
        assert_eq!(&*open("memory:").unwrap().describe().name, "memory");
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_file_that_is_missing_is_made_only_for_who_sends() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}?visibility=1s", folder.path().join("queue").display());
        for opened in [open_existing(&url), open_existing_named(&url, "orders")] {
            let Err(error) = opened else { panic!("there is no such file") };
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
        drop(open_named(&url, "orders").unwrap());
        assert_eq!(&*open_existing_named(&url, "orders").unwrap().describe().name, "orders");
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_queue_on_streams_is_named_by_each_scheme_of_redis() {
        for url in ["redis://h?name=orders", "redis+cluster://a,b?name=orders", "rediss+sentinel://s/tasks?name=orders"]
        {
            let source = open(url).unwrap();
            assert_eq!((&*source.describe().name, source.describe().visibility), ("orders", Duration::from_secs(30)));
        }
        let Err(error) = open("redis://h?visibility=1ms") else { panic!("it must be refused") };
        assert!(error.to_string().contains("`visibility`"), "{error}");
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn the_ledgers_file_is_no_queue_and_the_queues_is_no_ledger() {
        let folder = tempfile::tempdir().unwrap();
        let url = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
        let _ledger = taskonce_sqlite::SqliteStore::from_url(&url("ledger")).unwrap();
        let _queue = open(&url("queue")).unwrap();
        let Err(error) = open(&url("ledger")) else { panic!("a ledger is no queue") };
        assert!(error.hint().contains("give the queue a file of its own"), "{error:?}");
        let Err(error) = taskonce_sqlite::SqliteStore::from_url(&url("queue")) else { panic!("a queue is no ledger") };
        assert!(error.hint().contains("give the store a file of its own"), "{error:?}");
    }
}
