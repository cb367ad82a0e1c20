//! What a connection learns of its server when it is made.

use taskonce_core::ErrorKind;

use crate::fault::Refusal;
use crate::place::Place;
use crate::script::Dialect;
use crate::url::{Eviction, Settings};
use crate::wire::Reply;

/// The oldest server that is supported.
const VERSION_MIN: Version = (6, 2);
/// The first with `SET … IFEQ`.
const VERSION_COMPARES_VALKEY: Version = (8, 1);
const VERSION_COMPARES_REDIS: Version = (8, 4);
/// The first with `SET … NX GET` and script flags.
const VERSION_MODERN: Version = (7, 0);

/// Major and minor version.
type Version = (u32, u32);

/// What a server takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A server by itself, or one that replicates another.
    Standalone,
    /// A node of a Cluster.
    Cluster,
    /// A Sentinel, which keeps no keys.
    Sentinel,
}

/// A server.
#[derive(Clone)]
pub struct Server {
    /// What it takes part in.
    pub mode: Mode,
    version: Version,
    is_valkey: bool,
    /// `redis` or `valkey`, and the full version.
    pub name: String,
    /// Whether it replicates another.
    pub is_replica: bool,
    /// What it does when its memory is full; `None` if this user may not know.
    pub memory: Option<Memory>,
}

/// What a server does when its memory is full.
#[derive(Clone)]
pub struct Memory {
    /// In bytes; 0 means without a limit.
    pub limit: u64,
    /// In bytes.
    pub used: u64,
    /// What is forgotten when it is full, as the server calls it.
    pub policy: String,
}

impl Memory {
    /// Whether it would rather forget keys than refuse writes.
    pub fn evicts(&self) -> bool {
        self.limit > 0 && self.policy != "noeviction"
    }
}

impl Server {
    /// Reads the answers to `HELLO` and `INFO memory`.
    pub fn read(hello: &Reply, info: &Reply) -> Result<Server, Refusal> {
        let pairs = match hello {
            Reply::List(pairs) => pairs,
            Reply::Error(text) => return Err(refused(text)),
            Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil => return Err(Refusal::misshapen("HELLO")),
        };
        let full = get(pairs, "version").ok_or_else(|| Refusal::misshapen("HELLO"))?;
        let mut parts = full.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        let product = get(pairs, "server").unwrap_or("redis");
        let name = format!("{product} {full}");
        if version < VERSION_MIN {
            return Err(too_old(&name));
        }
        let memory = info.text().and_then(|info| {
            Some(Memory {
                limit: field(info, "maxmemory")?.parse().ok()?,
                used: field(info, "used_memory")?.parse().ok()?,
                policy: field(info, "maxmemory_policy")?.to_owned(),
            })
        });
        Ok(Server {
            mode: match get(pairs, "mode") {
                Some("cluster") => Mode::Cluster,
                Some("sentinel") => Mode::Sentinel,
                Some(_) | None => Mode::Standalone,
            },
            version,
            is_valkey: product == "valkey",
            name,
            is_replica: get(pairs, "role") != Some("master"),
            memory,
        })
    }

    /// Reads the answer to `CONFIG GET maxmemory*`, which some users may ask who may not ask `INFO`.
    pub fn read_settings(&mut self, settings: &Reply) {
        if let Reply::List(pairs) = settings
            && let Some(limit) = get(pairs, "maxmemory").and_then(|limit| limit.parse().ok())
            && let Some(policy) = get(pairs, "maxmemory-policy")
        {
            self.memory = Some(Memory { limit, used: 0, policy: policy.to_owned() });
        }
    }

    /// Which form of a script it needs.
    pub fn dialect(&self) -> Dialect {
        if self.version >= VERSION_MODERN { Dialect::Modern } else { Dialect::Legacy }
    }

    /// Whether it can compare a whole value before it replaces it.
    pub fn compares(&self) -> bool {
        self.version >= if self.is_valkey { VERSION_COMPARES_VALKEY } else { VERSION_COMPARES_REDIS }
    }

    /// Whether it is what the URL says that it is.
    pub fn belongs(&self, place: &Place) -> Result<(), Refusal> {
        let refuse = |what: &str, hint| Err(Refusal::new(ErrorKind::BadUrl, what).hint(hint));
        match (self.mode, place) {
            (Mode::Standalone, Place::Servers(_) | Place::Sentinel { .. }) | (Mode::Cluster, Place::Cluster(_)) => {
                Ok(())
            }
            (Mode::Cluster, Place::Servers(_) | Place::Sentinel { .. }) => refuse(
                "the server is a node of a Cluster, and the URL is that of a single server",
                "begin the URL with `redis+cluster:`, as in `redis+cluster://host:6379`",
            ),
            (Mode::Standalone, Place::Cluster(_)) => refuse(
                "the server is not a node of a Cluster, and the URL is that of one",
                "begin the URL with `redis:`, as in `redis://host:6379/0`, or start the server with `cluster-enabled yes`",
            ),
            (Mode::Sentinel, Place::Servers(_) | Place::Cluster(_)) => refuse(
                "a Sentinel listens there, which keeps no keys",
                "write it as `redis+sentinel://host:26379/SERVICE`",
            ),
            (Mode::Sentinel, Place::Sentinel { .. }) => refuse(
                "the Sentinels name another Sentinel as the primary",
                "look at the service with `redis-cli -p 26379 SENTINEL MASTERS`",
            ),
        }
    }

    /// Whether the store may be used here.
    pub fn accept(&self, settings: &Settings) -> Result<(), Refusal> {
        match &self.memory {
            Some(memory) if memory.evicts() && settings.eviction == Eviction::Refuse => Err(Refusal::new(
                ErrorKind::Evicting,
                format!(
                    "the server evicts keys when its memory is full (`maxmemory-policy {}`, `maxmemory {}`), \
                     which would silently forget tasks",
                    memory.policy, memory.limit
                ),
            )),
            Some(_) | None => Ok(()),
        }
    }
}

fn get<'a>(pairs: &'a [Reply], name: &str) -> Option<&'a str> {
    pairs.chunks_exact(2).find(|pair| pair[0].text() == Some(name)).and_then(|pair| pair[1].text())
}

fn refused(text: &str) -> Refusal {
    let refusal = Refusal::of_reply(text);
    match refusal.kind() {
        // Before 6.2 `HELLO` is unknown, or asks for an argument.
        ErrorKind::Unsupported | ErrorKind::Protocol => too_old("this server"),
        _ => refusal,
    }
}

fn too_old(name: &str) -> Refusal {
    Refusal::new(
        ErrorKind::Unsupported,
        format!("{name} is too old: {}.{} is the oldest that is supported", VERSION_MIN.0, VERSION_MIN.1),
    )
}

/// A field of an answer to `INFO`.
pub fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}
