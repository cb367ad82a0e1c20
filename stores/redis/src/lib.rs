//! The Redis and Valkey store of taskonce: one server, several that replicate one another, Sentinels or a Cluster, from
//! Redis 6.2 on.
//!
//! # What it promises
//!
//! * **One key a task**, `prefix` and the key's text form, written by compare-and-swap: of concurrent writers one wins.
//! * **One clock.** Ages come from the server's own expiry times; no worker's clock takes part.
//! * **One round trip** for a fresh claim, a duplicate of a done task, a heartbeat and a completion. Calls made at the
//!   same time travel together.
//! * **An end.** Every call ends within `timeout` (500 ms), whatever the servers do. A lost answer is asked for again
//!   within that time, on a fresh connection: the write is recognised, never doubled.
//! * **No mix-up.** Every answer carries proof of which request it belongs to. If one does not fit, the connection is
//!   dropped and everything on it is unknown.
//! * **Nothing while idle**: no commands, no timers.
//! * **Replicas, if asked for.** With `wait_replicas=N` a write counts only when N replicas acknowledged it; what was sent
//!   before on another connection is asked for anew. So is the end that a duplicate is told of, while it is young; other
//!   answers tell what the primary holds.
//! * **Growth is bounded.** Every key expires: after the record's retention, counted from its last write; parked tasks
//!   after ten years. The lease is never an expiry.
//! * **Lists.** What is waiting, dead, parked, or running since its first heartbeat, is found by four sorted sets,
//!   `prefix` and `~list:` and the state, without a walk over all keys. An entry goes with the write of its record, in the
//!   same round trip, and expires with it. A task that is done before its first heartbeat touches none. A list decides
//!   nothing: it may lag, its readers believe the records, and a walk over all keys mends it.
//! * **Full memory** refuses new claims and, from 6.2 on, still takes heartbeats, completions and failures.
//!
//! # What it cannot
//!
//! * **It may forget** what it acknowledged: a crash loses what is not on disk (with `appendfsync everysec` up to two
//!   seconds), a failover what the replica had not got, a flush everything. Fences begin again at 1 when a record is
//!   gone. Unrepeatable and fenced effects on it are therefore refused unless the user accepts that.
//! * **It must not evict.** A server with `maxmemory` and a policy other than `noeviction` is refused when it is
//!   connected to, unless the URL says `eviction=accept`. A user who may read neither `INFO` nor `CONFIG` is trusted.
//!
//! # On several servers
//!
//! | URL | who is asked | when the primary changes |
//! |---|---|---|
//! | `redis://a,b` | the one that says that it is the primary; two that say so are refused | a write that is refused, or a connection that breaks, makes it look again; and while there are calls their roles are asked each second |
//! | `redis+sentinel://s1,s2/SERVICE` | the one that the Sentinels name, and that says itself that it is the primary; of their answers the one of the latest switch counts | the same, and while there are calls the Sentinels are asked each second: a primary that was replaced and does not know it is left |
//! | `redis+cluster://a,b` | the node that serves the key's slot, never a replica | redirections are followed; a node that does not answer makes it look who serves the slot now |
//!
//! * A call goes on trying until its deadline while the cause may pass, except with a single server: that is asked again
//!   only on a fresh connection, and its absence is told at once.
//! * On a Cluster a node that is stopped or dead fails only the calls for its own slots, and holds up no other but the first
//!   whose task becomes dead or parked while the node has the list of those. What could not be listed is kept, and listed
//!   when the node is back, for some two minutes. A list shows the tasks of a node that is away by their keys, with the
//!   reason.
//! * An old map of the slots leads to another try, never to another answer. One look at the slots serves all calls of a
//!   runtime, at most one in 50 ms.
//! * A walk over a Cluster misses no task that is there all the time, also while slots move: it begins again when they
//!   have. It needs every slot to be served. A failover during a walk may hide what it moves.
//! * A failover forgets what the new primary had not got: a claim that was acknowledged is gone, or an earlier state is
//!   back. The task runs again, and its old holder is told that its claim is lost. A primary that is cut off takes writes
//!   that are lost until it is found out; `min-replicas-to-write` on the servers bounds that, `wait_replicas` excludes most
//!   of it. After a failover ages are counted by the new primary's clock.
//! * Where a replica was promoted by hand, `load` may show an old state until the first write on that connection.
//!
//! A key that holds something else than a record is an error that names it, never "absent". A key that was made
//! permanent by hand has no age; it counts as just written, so that it is held rather than taken.
//!
//! A user of the server needs the commands of one line, for every shape: it is in `docs/redis/README.md`, with what is lost
//! without each. A user of Sentinels needs `sentinel|master sentinel|get-master-addr-by-name` there.
//!
//! ```no_run
//! let store = taskonce_redis::RedisStore::from_url("redis://127.0.0.1:6379/0?timeout=500ms")?;
//! # Ok::<(), taskonce_core::Error>(())
//! ```

mod store;
mod scan;
mod reads;
mod cursor;
mod lists;
mod behind;
mod watch;
mod watch_board;
mod watch_line;
mod examine;
mod request;
mod script;

pub use store::RedisStore;
