//! Opens a ledger by URL. The only place that names the stores.

use std::sync::Arc;

use taskonce_core::host::Host;
use taskonce_core::ledger::Ledger;
use taskonce_core::memory::MemoryStore;
use taskonce_core::store::Store;
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_worker::{Heart, SystemHost};

use crate::front;

/// The scheme of the store in this process's memory, for tests and examples: nothing survives the process.
pub const MEMORY_SCHEME: &str = "memory";

/// The schemes that this build knows.
pub const SCHEMES: &[&str] = &[
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
    #[cfg(feature = "postgres")]
    "postgres",
    #[cfg(feature = "postgres")]
    "postgresql",
];

/// The schemes of stores that a front may stand before.
const FRONTED: &[&str] = &["sqlite", "postgres", "postgresql"];

/// A ledger over the store that the URL names.
///
/// * `memory:`: this process's memory, a new store each time.
/// * `sqlite:tasks.db?synchronous=full`: see the `taskonce-sqlite` crate. The file is made when it is missing.
/// * `redis://user:password@host:6379/0?timeout=500ms`, with several hosts for servers that replicate one another, and
///   `redis+sentinel://sentinel:26379,sentinel/SERVICE/0` and `redis+cluster://node:6379,node`; each with TLS as
///   `rediss…`: see the `taskonce-redis` crate.
/// * `postgres://user:password@host:5432/database?schema=taskonce`: see the `taskonce-postgres` crate. Its schema is made by
///   [`migrate`], never by opening it.
///
/// With the feature `fast-check`, `front=redis://host:6379` among the options of a PostgreSQL or SQLite URL puts a Redis in
/// front of it, which answers duplicates: see the `taskonce-fast-check` crate. `front_timeout=50ms` bounds each of its calls, and with
/// `trust_done=yes` its word that a task is done is the answer. A front's URL that has options is percent-encoded.
///
/// A server is connected to on first use, so that a worker may start before its store. Heartbeats use a handle of the
/// store of their own.
///
/// # Errors
/// [`ErrorKind::BadUrl`], naming every unknown or wrong part at once. For SQLite also what keeps the file from being
/// opened.
pub fn open(url: &str) -> Result<Ledger> {
    ledger(url, Missing::Make)
}

/// The same, but a SQLite file that is missing is an error: a mistyped path must not answer that a task never ran.
///
/// # Errors
/// Those of [`open`]; [`ErrorKind::NotFound`] when the file is missing.
pub fn open_existing(url: &str) -> Result<Ledger> {
    ledger(url, Missing::Refuse)
}

/// What to do about a file that is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Make,
    Refuse,
}

fn ledger(url: &str, missing: Missing) -> Result<Ledger> {
    let host: Arc<dyn Host> = Arc::new(SystemHost::new());
    let Handles { claims, heartbeats } = fronted(url, &host, missing)?;
    let heart = Heart::new(heartbeats, Arc::clone(&host));
    Ok(Ledger::new(claims, host, Arc::new(heart)))
}

/// Two handles of one store: their connections belong to different runtimes.
struct Handles {
    claims: Arc<dyn Store>,
    heartbeats: Arc<dyn Store>,
}

/// The store that the URL names, behind the front that it names, if it does.
fn fronted(url: &str, host: &Arc<dyn Host>, missing: Missing) -> Result<Handles> {
    let (ledger, front) = front::split(url)?;
    let Some(front) = front else { return stores(url, host, missing) };
    let scheme = ledger.split_once(':').map_or("", |(scheme, _)| scheme);
    if !FRONTED.contains(&scheme) {
        return Err(Error::new(
            ErrorKind::BadUrl,
            "the option `front` stands with a store that keeps what it acknowledged",
        )
        .about(format!("store `{}:`", scheme.escape_debug()))
        .with_hint(format!("the URL begins with {}", FRONTED.join(", "))));
    }
    #[cfg(not(feature = "fast-check"))]
    {
        let _ = front;
        Err(Error::new(ErrorKind::BadUrl, "this build has no fast check")
            .about(format!("store `{scheme}:`"))
            .with_hint("`fast-check` is a feature of the crate; or take `front` out of the URL"))
    }
    #[cfg(feature = "fast-check")]
    {
        // The front's URL is looked at first, so that a mistake in it makes no file.
        let fronts = stores(&front.url, host, missing)?;
        let ledgers = stores(&ledger, host, missing)?;
        let defaults = taskonce_fast_check::Options::default();
        let options = taskonce_fast_check::Options {
            front_timeout: front.timeout.unwrap_or(defaults.front_timeout),
            done: match front.trust {
                front::Trust::Verify => taskonce_fast_check::DoneHint::Verified,
                front::Trust::Trust => taskonce_fast_check::DoneHint::Trusted,
            },
            ..defaults
        };
        let check = |front, ledger| Arc::new(taskonce_fast_check::FastCheck::new(front, ledger, options.clone()));
        Ok(Handles {
            claims: check(fronts.claims, ledgers.claims),
            heartbeats: check(fronts.heartbeats, ledgers.heartbeats),
        })
    }
}

fn stores(url: &str, host: &Arc<dyn Host>, missing: Missing) -> Result<Handles> {
    #[cfg(not(feature = "sqlite"))]
    let _ = missing; // only files can be missing
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    match scheme {
        MEMORY_SCHEME => {
            if url != "memory:" {
                return Err(Error::new(ErrorKind::BadUrl, "the memory store takes no path and no options")
                    .about(format!("store `{url}`"))
                    .with_hint("write it as `memory:`"));
            }
            let clock = Arc::clone(host);
            let store = Arc::new(MemoryStore::new(move || clock.uptime()));
            Ok(Handles { claims: Arc::clone(&store) as Arc<dyn Store>, heartbeats: store })
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let store = Arc::new(match missing {
                Missing::Make => taskonce_sqlite::SqliteStore::from_url(url)?,
                Missing::Refuse => taskonce_sqlite::SqliteStore::existing_from_url(url)?,
            });
            Ok(Handles { claims: Arc::clone(&store) as Arc<dyn Store>, heartbeats: store })
        }
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster" | "rediss+cluster" => Ok(Handles {
            claims: Arc::new(taskonce_redis::RedisStore::from_url(url)?),
            heartbeats: Arc::new(taskonce_redis::RedisStore::from_url(url)?),
        }),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Handles {
            claims: Arc::new(taskonce_postgres::PostgresStore::from_url(url)?),
            heartbeats: Arc::new(taskonce_postgres::PostgresStore::from_url(url)?),
        }),
        _ => Err(unknown(scheme)),
    }
}

fn unknown(scheme: &str) -> Error {
    Error::new(ErrorKind::BadUrl, format!("no store has the scheme `{}`", scheme.escape_debug()))
        .about("store URL")
        .with_hint(format!(
            "this build knows {}; `sqlite`, `redis` and `postgres` are features of the crate",
            SCHEMES.join(", ")
        ))
}

/// What a migration did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Migration {
    /// The store makes what it needs by itself.
    NotNeeded,
    /// The schema was there, and of this version.
    UpToDate {
        /// Its name.
        schema: String,
        /// Its version.
        version: u32,
    },
    /// The schema was made, or brought up to date.
    Migrated {
        /// Its name.
        schema: String,
        /// Its version before; 0 where there was none.
        from: u32,
        /// Its version now.
        to: u32,
    },
}

/// Makes the schema of the store that the URL names, or brings it up to date, where that is a step of its own: in
/// PostgreSQL. Safe to call again, and by several at once.
///
/// # Errors
/// [`ErrorKind::BadUrl`], [`ErrorKind::NewerSchema`], [`ErrorKind::Denied`], and those of a connection.
pub async fn migrate(url: &str) -> Result<Migration> {
    let (url, _front) = front::split(url)?;
    match known(&url)? {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let taskonce_postgres::Migrated { schema, from, to } = taskonce_postgres::migrate(&url).await?;
            Ok(if from == to {
                Migration::UpToDate { schema, version: to }
            } else {
                Migration::Migrated { schema, from, to }
            })
        }
        _ => Ok(Migration::NotNeeded),
    }
}

/// The SQL of the same, for those who run migrations themselves; with the grants that a worker's role needs, if one is
/// named. `None` where nothing is to be done.
///
/// # Errors
/// [`ErrorKind::BadUrl`]; [`ErrorKind::Unsupported`] for a role in a store that has none.
pub fn migration_sql(url: &str, role: Option<&str>) -> Result<Option<String>> {
    let (url, _front) = front::split(url)?;
    match known(&url)? {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let schema = taskonce_postgres::schema_of(&url)?;
            let mut sql = taskonce_postgres::migration_sql(&schema)?;
            if let Some(role) = role {
                sql.push_str(&taskonce_postgres::grants_sql(&schema, role)?);
            }
            Ok(Some(sql))
        }
        _ if role.is_some() => Err(Error::new(ErrorKind::Unsupported, "this store has no roles to grant anything to")
            .about("the store")
            .with_hint("name the PostgreSQL store, `--store postgres://…`, or leave the role out")),
        _ => Ok(None),
    }
}

/// The scheme of a URL, if this build has a store for it.
fn known(url: &str) -> Result<&str> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    if SCHEMES.contains(&scheme) { Ok(scheme) } else { Err(unknown(scheme)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_schemes_are_refused_with_those_that_are_known() {
        for bad in ["", "tasks.db", "mysql://localhost/x", "memory:x"] {
            let error = open(bad).err().expect("it is refused");
            assert_eq!(error.kind(), ErrorKind::BadUrl, "{bad}");
            assert!(error.hint().contains("memory"), "{}", error.hint());
        }
        assert!(open("memory:").is_ok());
    }
}
