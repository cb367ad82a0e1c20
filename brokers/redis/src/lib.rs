//! The Redis Streams queue: one server, several that replicate one another, Sentinels or a Cluster, from Redis 6.2 on.
//!
//! # What it promises
//!
//! * **One handler, one slot.** A handler has three streams, by priority, and some keys beside them, all in one slot: a script
//!   changes them together, also on a Cluster.
//! * **One holder**, judged by the server's clock in milliseconds. A clock that goes back, also by a failover, makes nothing
//!   wait longer than it was told.
//! * **In order.** By priority, then by the order of sending, which what comes again keeps. Handlers are served in turn.
//! * **Bounded.** What is settled is deleted from its stream. A handler that is empty keeps its name, its clock and its empty streams.
//! * **Soon.** A receive that waits asks nothing: a connection of its own is called by the server when something changes,
//!   also by a plain `XADD` of somebody else. Who waits has a delayed delivery some 20 ms after its time at the latest.
//! * **An end.** Every call ends within `timeout` (500 ms), a receive within that and its wait. A lost answer is asked for again
//!   within that time: a send is then looked for among the newest, and a receive is given the same deliveries.
//! * **Full memory** refuses sends, and lets through what works off the queue.
//!
//! What a receive was given and nobody took, because its future was dropped or the answer lost, is given back.
//!
//! # What it cannot
//!
//! * **It may forget** what it acknowledged: a crash loses what is not on disk, a failover what the replica had not got, a
//!   flush everything. `wait_replicas=N` in the URL lets a write count only when N replicas have it.
//! * **It must not evict.** A server with `maxmemory` and a policy other than `noeviction` is refused, unless the URL says
//!   `eviction=accept`.
//!
//! The page `docs/queue-redis.md` says how others send, and which numbers must fit together.
//!
//! ```no_run
//! use std::time::Duration;
//! use taskonce_queue_redis::RedisQueue;
//! use taskonce_worker::source::{Entrance, Envelope, Source, Want};
//!
//! # async fn example() -> taskonce_core::Result<()> {
//! let queue = RedisQueue::from_url("redis://127.0.0.1:6379/0?name=queue&visibility=30s")?;
//! let task = Envelope { key: Some("shop/charge@2/invoice-42".into()), ..Envelope::new("charge@2", r#"{"amount": 12}"#) };
//! let _sent = queue.send(&task, Duration::ZERO, Entrance::OncePerKey).await?;
//! let wants = [Want { handler: "charge@2".into(), max: 10 }];
//! for delivery in queue.receive(&wants, 10, Duration::from_secs(5)).await? {
//!     let _settled = queue.acknowledge(&delivery.receipt).await?;
//! }
//! # Ok(())
//! # }
//! ```

mod options;
mod keys;
mod message;
mod script;
mod queue;
mod source;
mod take;
mod board;
mod line;
mod dead;
mod examine;

pub use options::{NAME_DEFAULT, PREFIX_DEFAULT, VISIBILITY_DEFAULT};
pub use source::{PAYLOAD_MAX, RedisQueue, WAKE_MAX};
