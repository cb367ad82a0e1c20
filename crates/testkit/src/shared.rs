//! One Cluster, one trio of Sentinels and one PostgreSQL for many tests, each of which uses keys or a database of its own.
//!
//! `cargo xtask test` starts them once and names them in the environment; without it, each process that asks starts its
//! own. Whoever kills, stops or fills a server starts another with [`RedisCluster`], [`Sentinels`] or
//! [`PostgresServer`].

use std::env;
use std::net::SocketAddr;
use std::sync::OnceLock;

use anyhow::{Context, Result};

use crate::nodes;
use crate::postgres::{DATA_VARIABLE, Database, PostgresServer};
use crate::resp::{Connection, Reply};
use crate::sentinel::{SentinelOptions, Sentinels, primary_address};
use crate::{Program, RedisCluster};

/// Holds the URL of the shared Cluster.
pub const CLUSTER_VARIABLE: &str = "TASKONCE_TEST_CLUSTER";
/// Holds the URL of the shared Sentinels.
pub const SENTINEL_VARIABLE: &str = "TASKONCE_TEST_SENTINEL";
/// Holds the port of the shared PostgreSQL.
pub const POSTGRES_VARIABLE: &str = "TASKONCE_TEST_POSTGRES";
/// Masters of the shared Cluster, and replicas of each.
const CLUSTER_SIZE: (usize, usize) = (3, 1);

/// A shared Cluster or service.
pub struct Shared {
    url: String,
    topology: Topology,
}

#[derive(Clone, Copy)]
enum Topology {
    Cluster,
    Sentinel,
}

/// The shared Cluster: three masters with a replica each.
///
/// # Errors
/// When it has to be started and does not start.
pub fn cluster() -> Result<Shared> {
    static OWN: OnceLock<Result<RedisCluster>> = OnceLock::new();
    let url = named_or(CLUSTER_VARIABLE, || started(OWN.get_or_init(start_cluster)).map(RedisCluster::url))?;
    Ok(Shared { url, topology: Topology::Cluster })
}

/// The shared Sentinels: three, with a primary and a replica.
///
/// # Errors
/// When they have to be started and do not start.
pub fn sentinel() -> Result<Shared> {
    static OWN: OnceLock<Result<Sentinels>> = OnceLock::new();
    let url = named_or(SENTINEL_VARIABLE, || started(OWN.get_or_init(start_sentinel)).map(Sentinels::url))?;
    Ok(Shared { url, topology: Topology::Sentinel })
}

/// An empty database of its own on the shared PostgreSQL, which does not wait for its disk.
///
/// # Errors
/// When the server has to be started and does not start, or the database cannot be made.
pub fn database() -> Result<Database> {
    static OWN: OnceLock<Result<PostgresServer>> = OnceLock::new();
    let port = match env::var(POSTGRES_VARIABLE) {
        Ok(port) => port.parse().with_context(|| format!("{POSTGRES_VARIABLE} is {port}, no port"))?,
        Err(_) => started(OWN.get_or_init(start_postgres))?.port(),
    };
    Database::create(port)
}

fn start_postgres() -> Result<PostgresServer> {
    PostgresServer::start(&["-c", "fsync=off", "-c", "max_connections=400"])
}

/// All of them, to be kept while tests run, and the environment that names them to the tests.
pub struct Stands {
    cluster: RedisCluster,
    sentinels: Sentinels,
    postgres: PostgresServer,
    /// Never started: what other servers of PostgreSQL begin with.
    postgres_data: PostgresServer,
}

impl Stands {
    /// Starts them.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start() -> Result<Stands> {
        let mut postgres_data = PostgresServer::prepare(&[])?;
        postgres_data.initialise()?;
        let (cluster, sentinels, postgres) = (start_cluster()?, start_sentinel()?, start_postgres()?);
        Ok(Stands { cluster, sentinels, postgres, postgres_data })
    }

    /// Variables for the tests' environment.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            (CLUSTER_VARIABLE, self.cluster.url()),
            (SENTINEL_VARIABLE, self.sentinels.url()),
            (POSTGRES_VARIABLE, self.postgres.port().to_string()),
            (DATA_VARIABLE, self.postgres_data.data().to_string_lossy().into_owned()),
        ]
    }
}

fn start_cluster() -> Result<RedisCluster> {
    RedisCluster::start_program(Program::Redis, CLUSTER_SIZE.0, CLUSTER_SIZE.1, &[])
}

fn start_sentinel() -> Result<Sentinels> {
    Sentinels::start(&SentinelOptions::default())
}

fn named_or(variable: &str, own: impl FnOnce() -> Result<String>) -> Result<String> {
    match env::var(variable) {
        Ok(url) => {
            let first = hosts(&url)?.into_iter().next().context("no host in it");
            first.and_then(Connection::open).with_context(|| format!("{variable} names {url}"))?;
            Ok(url)
        }
        Err(_) => own(),
    }
}

fn started<T>(own: &Result<T>) -> Result<&T> {
    own.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))
}

impl Shared {
    /// Its URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// One command at the node of its key, or at the primary.
    ///
    /// # Errors
    /// When no server answers. An error that one answers is a reply.
    pub fn command<A: AsRef<[u8]>>(&self, words: &[A]) -> Result<Reply> {
        let first = *hosts(&self.url)?.first().context("a URL without a host")?;
        match self.topology {
            Topology::Cluster => nodes::command(first, Connection::open, words),
            Topology::Sentinel => Connection::open(primary_address(first)?)?.ask(words),
        }
    }
}

/// The hosts of `redis+cluster://127.0.0.1:1,127.0.0.1:2/…`.
fn hosts(url: &str) -> Result<Vec<SocketAddr>> {
    let (_, rest) = url.split_once("://").with_context(|| format!("{url} is no URL"))?;
    let hosts = rest.split(['/', '?']).next().unwrap_or_default();
    hosts.split(',').map(|host| host.parse().with_context(|| format!("{host} is no address"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_cluster_takes_a_command_at_the_node_of_its_key() {
        let shared = cluster().unwrap();
        for n in 0..20 {
            let key = format!("shared-{}-{n}", std::process::id());
            assert_eq!(shared.command(&["SET", &key, "1", "EX", "60"]).unwrap().text(), "OK", "{key}");
        }
    }

    #[test]
    fn a_shared_service_takes_a_command_at_its_primary() {
        let shared = sentinel().unwrap();
        let key = format!("shared-{}", std::process::id());
        assert_eq!(shared.command(&["SET", &key, "1", "EX", "60"]).unwrap().text(), "OK");
    }

    #[test]
    fn hosts_are_read_from_a_url() {
        let read = hosts("redis+sentinel://127.0.0.1:1,127.0.0.1:2/tasks?x=y").unwrap();
        assert_eq!(read, ["127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap()]);
        assert!(hosts("127.0.0.1:1").is_err() && hosts("redis+cluster://").is_err());
    }
}
