//! The floors of Redis: bare commands, over the store's own client and over redis-rs.

use anyhow::{Result, anyhow, bail, ensure};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, IntoConnectionInfo, cmd};
use taskonce_redis_wire::pipe::{Limits, Pipe, Trouble};
use taskonce_redis_wire::wire::{Commands, Digits, Reply};
use taskonce_testkit::{RedisCluster, RedisServer};
use tokio::net::TcpStream;

/// How long a bare command may take.
const BARE_WAIT: std::time::Duration = std::time::Duration::from_secs(5);

/// How long the floor's keys live: as long as our records do by default.
pub(crate) const LIFE_MS: u64 = 14 * 24 * 60 * 60 * 1000;

/// The store's own client, bare: connections are made as the store makes them, and shared as the store shares them.
pub(crate) async fn same_client(server: &RedisServer) -> Result<Pipe> {
    let stream = TcpStream::connect(server.address()).await?;
    stream.set_nodelay(true)?;
    let (pipe, driver) = Pipe::new(Box::new(stream), None);
    tokio::spawn(driver);
    Ok(pipe)
}

/// redis-rs, with a multiplexed connection: no delay in TCP, and no timeout, whose timer would make it slower.
pub(crate) async fn redis_rs(server: &RedisServer) -> Result<MultiplexedConnection> {
    let info = server.url().as_str().into_connection_info()?;
    let info = info.set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true));
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    Ok(redis::Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await?)
}

/// redis-rs on a Cluster: one connection to each node, shared by all calls.
pub(crate) async fn redis_rs_cluster(cluster: &RedisCluster) -> Result<ClusterConnection> {
    let nodes = cluster.ports().into_iter().map(|port| format!("redis://127.0.0.1:{port}"));
    let client = ClusterClientBuilder::new(nodes).build()?;
    Ok(client.get_async_connection().await?)
}

/// `SET NX PX`, then `SET XX PX`: what a claim and its completion would be without any check but the server's own.
pub(crate) async fn pair(pipe: &Pipe, key: &str, value: &[u8]) -> Result<()> {
    for condition in [b"NX", b"XX"] {
        let mut set = Commands::default();
        set.add(&[b"SET", key.as_bytes(), value, condition, b"PX", Digits::of(LIFE_MS).as_bytes()]);
        match one(pipe, set).await? {
            Reply::Status(_) => {}
            other => bail!("the bare key was not fresh: {other:?}"),
        }
    }
    Ok(())
}

/// The same over redis-rs.
pub(crate) async fn pair_redis_rs(bare: &mut impl ConnectionLike, key: &str, value: &[u8]) -> Result<()> {
    for condition in ["NX", "XX"] {
        let mut set = cmd("SET");
        set.arg(key).arg(value).arg(condition).arg("PX").arg(LIFE_MS);
        let stored: Option<String> = set.query_async(bare).await?;
        ensure!(stored.is_some(), "the bare key was not fresh");
    }
    Ok(())
}

/// `GET` of a value of so many bytes.
pub(crate) async fn get(pipe: &Pipe, key: &str, bytes: usize) -> Result<()> {
    let mut get = Commands::default();
    get.add(&[b"GET", key.as_bytes()]);
    match one(pipe, get).await? {
        Reply::Bulk(value) if value.len() == bytes => Ok(()),
        other => bail!("the bare key is not there: {other:?}"),
    }
}

/// The same over redis-rs.
pub(crate) async fn get_redis_rs(bare: &mut impl ConnectionLike, key: &str, bytes: usize) -> Result<()> {
    let value: Option<Vec<u8>> = cmd("GET").arg(key).query_async(bare).await?;
    ensure!(value.is_some_and(|value| value.len() == bytes), "the bare key is not there");
    Ok(())
}

async fn one(pipe: &Pipe, command: Commands) -> Result<Reply> {
    let deadline = tokio::time::Instant::now() + BARE_WAIT;
    let limits = Limits { patience: deadline, silence: BARE_WAIT, deadline };
    let replies = pipe.call(limits, None, |queue| queue.append(&command)).await.map_err(|trouble| match trouble {
        Trouble::Broken(refusal) | Trouble::Slow(refusal) => anyhow!(refusal.about("the bare connection")),
    })?;
    replies.into_iter().next().ok_or_else(|| anyhow!("no reply"))
}
