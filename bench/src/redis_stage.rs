//! A server with everybody who is measured on it: a ledger, and bare connections beside it.

use anyhow::{Context, Result, ensure};
use redis::aio::MultiplexedConnection;
use redis::cluster_async::ClusterConnection;
use taskonce::{Admission, Ledger, Policy, Task};
use taskonce_redis_wire::pipe::Pipe;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{RedisCluster, RedisServer};
use tokio::task::block_in_place;

use crate::bare;
use crate::setup::{self, run_once};

/// The value of the floor's keys.
const SMALL: &[u8] = b"x";

/// What the calls go to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stand {
    /// `redis-server`: a record is replaced by the script, where it is older than 8.4.
    Redis,
    /// `valkey-server`, which compares a whole value by itself.
    Valkey,
    /// A Cluster of three masters on this machine, without replicas.
    Cluster,
}

impl Stand {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stand::Redis => "Redis",
            Stand::Valkey => "Valkey",
            Stand::Cluster => "Redis Cluster of 3",
        }
    }
}

/// What runs.
enum Servers {
    One(RedisServer),
    Cluster(RedisCluster),
}

impl Servers {
    fn start(stand: Stand) -> Result<Servers> {
        Ok(match stand {
            Stand::Redis => Servers::One(RedisServer::start(&[])?),
            Stand::Valkey => Servers::One(RedisServer::start_valkey(&[])?),
            Stand::Cluster => Servers::Cluster(RedisCluster::start(3, 0, &[])?),
        })
    }

    fn url(&self) -> String {
        match self {
            Servers::One(server) => server.url(),
            Servers::Cluster(cluster) => cluster.url(),
        }
    }

    fn command(&self, words: &[&str]) -> Result<Reply> {
        match self {
            Servers::One(server) => server.command(words),
            Servers::Cluster(cluster) => cluster.command(words),
        }
    }
}

/// redis-rs, bare.
enum Bare {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Bare {
    async fn pair(&self, key: &str, value: &[u8]) -> Result<()> {
        match self {
            Bare::One(bare) => bare::pair_redis_rs(&mut bare.clone(), key, value).await,
            Bare::Cluster(bare) => bare::pair_redis_rs(&mut bare.clone(), key, value).await,
        }
    }

    async fn get(&self, key: &str, bytes: usize) -> Result<()> {
        match self {
            Bare::One(bare) => bare::get_redis_rs(&mut bare.clone(), key, bytes).await,
            Bare::Cluster(bare) => bare::get_redis_rs(&mut bare.clone(), key, bytes).await,
        }
    }
}

/// What takes turns in a round, in the order of [`Rounds`](crate::measure::Rounds).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    /// redis-rs, bare, with a value of one byte: the floor, since it is what programs use.
    RedisRs,
    /// The same, with a value as large as our record.
    SameSize,
    /// The store's own client, bare, with a value of one byte. On one server only: it knows of no Cluster by itself.
    OwnClient,
}

const SIDES: [Side; 4] = [Side::Ours, Side::RedisRs, Side::SameSize, Side::OwnClient];

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// A fresh claim and its completion, beside the bare pair.
    Fresh,
    /// A duplicate of a done task, beside a bare `GET`.
    Duplicate,
}

/// A task, and a key of the same length for the floor.
#[derive(Clone)]
pub(crate) struct Item {
    pub(crate) task: Task,
    pub(crate) key: String,
}

/// So many that were not used before.
pub(crate) fn items(count: usize) -> Result<Vec<Item>> {
    let (tasks, keys) = (setup::tasks(count)?, setup::bare_keys(count)?);
    Ok(tasks.into_iter().zip(keys).map(|(task, key)| Item { task, key }).collect())
}

/// Servers, a ledger over them, and bare connections to them.
pub(crate) struct Stage {
    servers: Servers,
    ledger: Ledger,
    pipe: Option<Pipe>,
    redis_rs: Bare,
    policy: Policy,
    /// As many bytes as our record has.
    pub(crate) large: Vec<u8>,
}

impl Stage {
    pub(crate) async fn open(stand: Stand) -> Result<Stage> {
        let servers = block_in_place(|| Servers::start(stand))?;
        let ledger = setup::ledger(&servers.url())?;
        let (pipe, redis_rs) = match &servers {
            Servers::One(server) => (Some(bare::same_client(server).await?), Bare::One(bare::redis_rs(server).await?)),
            Servers::Cluster(cluster) => (None, Bare::Cluster(bare::redis_rs_cluster(cluster).await?)),
        };
        let policy = setup::policy();
        // Connections are made and the script is there before anything is measured.
        let first = setup::tasks(64)?;
        for task in &first {
            run_once(&ledger, task, &policy).await?;
        }
        setup::check_key_length(&first[0], |words| servers.command(words))?;
        let found = ledger.show(&first[0].key).await?.context("no record")?;
        let large = vec![b'x'; taskonce::store::codec::encode(&found.record).len()];
        Ok(Stage { servers, ledger, pipe, redis_rs, policy, large })
    }

    /// Who takes turns.
    pub(crate) fn sides(&self) -> &'static [Side] {
        if self.pipe.is_some() { &SIDES } else { &SIDES[..3] }
    }

    /// Every side of every round of fresh work begins with empty servers.
    pub(crate) fn flush(&self) -> Result<()> {
        match &self.servers {
            Servers::One(server) => server.command(&["FLUSHALL", "SYNC"]).map(drop),
            Servers::Cluster(cluster) => {
                (0..cluster.size()).try_for_each(|node| cluster.server(node).command(&["FLUSHALL", "SYNC"]).map(drop))
            }
        }
    }

    /// Done work, so that each side finds a duplicate of its own.
    pub(crate) async fn prepare(&self, item: &Item) -> Result<()> {
        for side in [Side::Ours, Side::RedisRs] {
            self.call(Work::Fresh, side, item).await?;
        }
        self.redis_rs.pair(&large_key(&item.key), &self.large).await
    }

    pub(crate) async fn call(&self, work: Work, side: Side, item: &Item) -> Result<()> {
        let Item { task, key } = item;
        let pipe = || self.pipe.as_ref().context("no client of the store's own here");
        match (work, side) {
            (Work::Fresh, Side::Ours) => run_once(&self.ledger, task, &self.policy).await,
            (Work::Fresh, Side::RedisRs) => self.redis_rs.pair(key, SMALL).await,
            (Work::Fresh, Side::SameSize) => self.redis_rs.pair(key, &self.large).await,
            (Work::Fresh, Side::OwnClient) => bare::pair(pipe()?, key, SMALL).await,
            (Work::Duplicate, Side::Ours) => {
                let admission = self.ledger.claim(task, &self.policy).await?;
                ensure!(matches!(admission, Admission::Replay(_)), "not a duplicate: {admission:?}");
                Ok(())
            }
            (Work::Duplicate, Side::RedisRs) => self.redis_rs.get(key, SMALL.len()).await,
            (Work::Duplicate, Side::SameSize) => self.redis_rs.get(&large_key(key), self.large.len()).await,
            (Work::Duplicate, Side::OwnClient) => bare::get(pipe()?, key, SMALL.len()).await,
        }
    }
}

/// A key beside this one, of the same length.
fn large_key(key: &str) -> String {
    key.replacen("bareonce", "largeone", 1)
}
