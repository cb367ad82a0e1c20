//! Private servers and misbehaving proxies for the tests of taskonce.
//!
//! [`postgres`] starts a PostgreSQL of a test's own and [`pgbouncer`] a pooler before it. [`redis`] starts a Redis or Valkey of a test's own, [`cluster`] a Cluster and [`sentinel`] a primary with replicas and
//! Sentinels; [`shared`] has one of each for many tests. [`proxy`] stands between a server and its client and misbehaves
//! on request, [`resp`] speaks to it without a client library. Nothing here uses a server that the machine runs already,
//! and nothing outlives the process that started it, however that process ends.

pub mod clock;
pub mod cluster;
mod nodes;
pub mod pgbouncer;
pub mod port;
pub mod postgres;
pub mod postgres_proxy;
mod process;
pub mod program;
pub mod proxy;
pub mod redis;
pub mod resp;
pub mod sentinel;
pub mod shared;
pub mod wait;

pub use cluster::RedisCluster;
pub use pgbouncer::PgBouncer;
pub use postgres::PostgresServer;
pub use postgres_proxy::PostgresProxy;
pub use program::Program;
pub use proxy::Proxy;
pub use redis::RedisServer;
pub use sentinel::Sentinels;
pub use wait::eventually;
