//! A Redis Cluster of a test's own: formed at once, by files that tell each node of all others.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::nodes::{self, Node};
use crate::program::{Program, version_of};
use crate::redis::{RedisServer, Role, again_on_a_clash};
use crate::resp::{Connection, Reply};

/// How many slots a Cluster has.
pub const SLOTS: u16 = 16_384;
/// How long a Cluster may take to form, or to agree on a change. A node waits 2 s before it takes writes.
const AGREE_WAIT: Duration = Duration::from_secs(60);
/// How often the nodes are asked meanwhile.
const PAUSE: Duration = Duration::from_millis(20);
/// How many keys of a slot are moved at once.
const KEYS_AT_ONCE: &str = "100";
/// How long the move of some keys may take, in milliseconds.
const MIGRATE_MS: &str = "5000";
/// The first version whose bus may be at any port.
const VERSION_BUS_PORT: (u32, u32) = (7, 0);
/// What each node begins with; the caller's arguments follow, and win. A node that is silent only because the machine is
/// busy is not to be taken for dead.
const ARGS: &[&str] = &[
    "--cluster-enabled",
    "yes",
    "--cluster-config-file",
    "nodes.conf",
    "--cluster-announce-ip",
    "127.0.0.1",
    "--cluster-node-timeout",
    "15000",
    "--repl-diskless-sync-delay",
    "0",
];

/// A running Cluster. Its nodes end with this value, or with the process that started them.
///
/// Nodes are numbered: first the masters as they were at the start, then the replicas of the first, of the second, and so
/// on.
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    ids: Vec<String>,
}

impl RedisCluster {
    /// Starts a Cluster and waits until every node says that it is whole, and every replica follows its master.
    ///
    /// `args` follow on each node's command line, as for [`RedisServer::start`]. For a test about failover:
    /// `["--cluster-node-timeout", "1000"]`. With `--requirepass` nodes use the same password among themselves. With
    /// `--tls-cluster yes` (and the files that TLS needs) clients and nodes use a TLS port, and the testkit a plain one.
    ///
    /// # Errors
    /// When there is no `redis-server`, a node does not start, or the Cluster does not form.
    pub fn start(masters: usize, replicas_each: usize, args: &[&str]) -> Result<RedisCluster> {
        RedisCluster::start_program(Program::Redis, masters, replicas_each, args)
    }

    /// Starts a Cluster of this program's servers, else as [`start`](RedisCluster::start) does.
    ///
    /// # Errors
    /// When there is no such program, a node does not start, or the Cluster does not form.
    pub fn start_program(
        program: Program,
        masters: usize,
        replicas_each: usize,
        args: &[&str],
    ) -> Result<RedisCluster> {
        ensure!(masters > 0, "a Cluster has a master");
        let args = arguments(program, args)?;
        again_on_a_clash(|| {
            let mut nodes = (0..masters * (1 + replicas_each))
                .map(|_| RedisServer::prepare(program, Role::Data, args.clone()))
                .collect::<Result<Vec<_>>>()?;
            // No two Clusters may have a node's name in common: one may get a port that was another's.
            let ids: Vec<String> = nodes.iter().map(|_| random_id()).collect();
            for (n, node) in nodes.iter().enumerate() {
                let table = table(&nodes, &ids, masters, replicas_each, n);
                fs::write(node.folder().join("nodes.conf"), table)?;
            }
            nodes.iter_mut().try_for_each(RedisServer::launch)?;
            let cluster = RedisCluster { nodes, ids };
            cluster.await_whole()?;
            Ok(cluster)
        })
    }

    /// Its URL, with all nodes in it.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of(&(0..self.nodes.len()).collect::<Vec<_>>())
    }

    /// Its URL, with these nodes in it.
    #[must_use]
    pub fn url_of(&self, numbers: &[usize]) -> String {
        let scheme = if self.nodes[0].ports().tls.is_some() { "rediss" } else { "redis" };
        let hosts: Vec<String> =
            numbers.iter().map(|n| format!("127.0.0.1:{}", self.nodes[*n].client_port())).collect();
        let user = self.nodes[0].argument("--requirepass").map(|password| format!(":{password}@")).unwrap_or_default();
        format!("{scheme}+cluster://{user}{}", hosts.join(","))
    }

    /// The ports that clients use, by the nodes' numbers.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.nodes.iter().map(RedisServer::client_port).collect()
    }

    /// How many nodes it has.
    #[must_use]
    pub fn size(&self) -> usize {
        self.nodes.len()
    }

    /// A node.
    #[must_use]
    pub fn server(&self, n: usize) -> &RedisServer {
        &self.nodes[n]
    }

    /// The name by which the other nodes know it.
    #[must_use]
    pub fn id(&self, n: usize) -> &str {
        &self.ids[n]
    }

    /// One command, at the node of its key; for one without a key, at any that answers.
    ///
    /// # Errors
    /// When a node does not answer. An error that it answers is a reply.
    pub fn command<A: AsRef<[u8]>>(&self, words: &[A]) -> Result<Reply> {
        nodes::command(self.any()?.address(), |address| self.connect(address), words)
    }

    /// The slot of a key.
    ///
    /// # Errors
    /// When no node answers.
    pub fn slot_of(&self, key: impl AsRef<[u8]>) -> Result<u16> {
        let reply = self.any()?.command(&[b"CLUSTER", b"KEYSLOT", key.as_ref()])?;
        Ok(u16::try_from(reply.int().context("no number")?)?)
    }

    /// The master of a slot.
    ///
    /// # Errors
    /// When no node answers, or none has the slot.
    pub fn owner_of_slot(&self, slot: u16) -> Result<usize> {
        let table = self.table(self.any()?)?;
        let owner = table.iter().find(|node| node.owns(slot)).with_context(|| format!("no node has slot {slot}"))?;
        self.number(&owner.id)
    }

    /// The master of a key.
    ///
    /// # Errors
    /// When no node answers, or none has the key's slot.
    pub fn server_of(&self, key: impl AsRef<[u8]>) -> Result<usize> {
        self.owner_of_slot(self.slot_of(key)?)
    }

    /// The masters now, those without slots too.
    ///
    /// # Errors
    /// When no node answers.
    pub fn masters(&self) -> Result<Vec<usize>> {
        self.numbers_of(|node| node.is("master"))
    }

    /// The replicas of a master now.
    ///
    /// # Errors
    /// When no node answers.
    pub fn replicas_of(&self, master: usize) -> Result<Vec<usize>> {
        self.numbers_of(|node| node.master == self.ids[master])
    }

    /// Ends a node at once with SIGKILL.
    pub fn kill(&mut self, n: usize) {
        self.nodes[n].kill();
    }

    /// Stops a node with SIGSTOP: connections stay, nothing is answered.
    ///
    /// # Errors
    /// When it does not run.
    pub fn stop(&self, n: usize) -> Result<()> {
        self.nodes[n].stop()
    }

    /// Lets a node go on after [`stop`](RedisCluster::stop).
    ///
    /// # Errors
    /// When it does not run.
    pub fn cont(&self, n: usize) -> Result<()> {
        self.nodes[n].cont()
    }

    /// Starts a node again: with its place in the Cluster, and without its data unless `args` made it keep them. A
    /// master that comes back before its replica took over has lost everything, as in life.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self, n: usize) -> Result<()> {
        self.nodes[n].restart()
    }

    /// Moves a whole slot with its keys.
    ///
    /// # Errors
    /// When a node does not answer or refuses.
    pub fn move_slot(&self, slot: u16, to: usize) -> Result<()> {
        if self.owner_of_slot(slot)? != to {
            self.begin_move(slot, to)?;
            self.end_move(slot, to)?;
        }
        Ok(())
    }

    /// Marks a slot as on its way: keys that are at its master are answered there, others with `ASK`.
    ///
    /// # Errors
    /// When a node does not answer or refuses.
    pub fn begin_move(&self, slot: u16, to: usize) -> Result<()> {
        let (from, slot) = (self.owner_of_slot(slot)?, slot.to_string());
        self.at(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]])?;
        self.at(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]])?;
        Ok(())
    }

    /// Moves one key of a slot that is on its way.
    ///
    /// # Errors
    /// When a node does not answer or refuses, or there is no such key.
    pub fn migrate_key(&self, key: impl AsRef<[u8]>, to: usize) -> Result<()> {
        self.migrate(self.server_of(&key)?, to, &[key.as_ref()])
    }

    /// Moves what is left in a slot that is on its way, and says so to all.
    ///
    /// # Errors
    /// When a node does not answer or refuses.
    pub fn end_move(&self, slot: u16, to: usize) -> Result<()> {
        let from = self.owner_of_slot(slot)?;
        let name = slot.to_string();
        loop {
            let Reply::Array(keys) = self.at(from, &["CLUSTER", "GETKEYSINSLOT", &name, KEYS_AT_ONCE])? else {
                bail!("no list of keys");
            };
            if keys.is_empty() {
                break;
            }
            let keys: Vec<Vec<u8>> = keys.into_iter().map(Reply::into_bytes).collect();
            self.migrate(from, to, &keys)?;
        }
        // First where it went, so that no node is left without an owner to name.
        let others = self.masters()?.into_iter().filter(|n| *n != to && *n != from && self.nodes[*n].answers());
        for n in [to, from].into_iter().chain(others) {
            self.at(n, &["CLUSTER", "SETSLOT", &name, "NODE", &self.ids[to]])?;
        }
        self.agree("the new owner of a slot", || {
            self.all_say(|table| table.iter().any(|node| node.id == self.ids[to] && node.owns(slot)))
        })
    }

    /// Makes a replica take over from its master without loss, and waits until all nodes know.
    ///
    /// # Errors
    /// When it refuses, or does not take over.
    pub fn failover(&self, replica: usize) -> Result<()> {
        self.at(replica, &["CLUSTER", "FAILOVER"])?;
        self.await_master(replica)
    }

    /// Waits until a node is a master with slots in the eyes of all nodes that answer.
    ///
    /// # Errors
    /// When that does not happen.
    pub fn await_master(&self, n: usize) -> Result<()> {
        self.agree("a new master", || {
            self.all_say(|table| {
                table.iter().any(|node| node.id == self.ids[n] && node.is("master") && !node.slots.is_empty())
            })
        })
    }

    /// Waits until every node runs, knows all others, says that all slots are served, and each replica follows its
    /// master.
    ///
    /// # Errors
    /// When that does not happen; the error holds what a node says.
    pub fn await_whole(&self) -> Result<()> {
        self.agree("that the Cluster is whole", || {
            for node in &self.nodes {
                let info = node.command(&["CLUSTER", "INFO"])?.text();
                let slots = format!("cluster_slots_ok:{SLOTS}\r");
                ensure!(info.contains("cluster_state:ok") && info.contains(&slots), "{info}");
                let replication = node.command(&["INFO", "replication"])?.text();
                let follows = replication.contains("role:master") || replication.contains("master_link_status:up");
                ensure!(follows, "{replication}");
            }
            self.all_say(|table| {
                table.len() == self.nodes.len()
                    && table.iter().all(|node| node.is("myself") || node.is_linked)
                    && !table.iter().any(|node| node.is("fail") || node.is("fail?") || node.is("handshake"))
            })
        })
    }

    /// Whether the tables of all nodes that answer are so; the first that is not is the error.
    fn all_say(&self, so: impl Fn(&[Node]) -> bool) -> Result<()> {
        for node in self.nodes.iter().filter(|node| node.answers()) {
            let table = self.table(node)?;
            ensure!(so(&table), "the node at {} says {table:#?}", node.address());
        }
        Ok(())
    }

    fn agree(&self, on: &str, mut agreed: impl FnMut() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        loop {
            match agreed() {
                Ok(()) => return Ok(()),
                Err(error) if start.elapsed() > AGREE_WAIT => {
                    return Err(error.context(format!("no agreement within {AGREE_WAIT:?} on {on}")));
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn migrate<K: AsRef<[u8]>>(&self, from: usize, to: usize, keys: &[K]) -> Result<()> {
        let port = self.nodes[to].client_port().to_string();
        let mut words: Vec<&[u8]> =
            vec![b"MIGRATE", b"127.0.0.1", port.as_bytes(), b"", b"0", MIGRATE_MS.as_bytes(), b"REPLACE"];
        if let Some(password) = self.nodes[to].argument("--requirepass") {
            words.extend([b"AUTH", password.as_bytes()]);
        }
        words.push(b"KEYS");
        words.extend(keys.iter().map(AsRef::as_ref));
        let moved = self.at(from, &words)?;
        // A key that ended by itself meanwhile is not there any more.
        ensure!(keys.len() > 1 || moved.text() != "NOKEY", "there is no such key");
        Ok(())
    }

    /// A command at this node, which may not refuse it.
    fn at<A: AsRef<[u8]>>(&self, n: usize, words: &[A]) -> Result<Reply> {
        match self.nodes[n].command(words)? {
            Reply::Error(text) => bail!("node {n} answered {text}"),
            reply => Ok(reply),
        }
    }

    fn table(&self, node: &RedisServer) -> Result<Vec<Node>> {
        nodes::read(&node.command(&["CLUSTER", "NODES"])?.text())
    }

    /// The numbers, in order, of the nodes that are so in the eyes of one that answers.
    fn numbers_of(&self, so: impl Fn(&Node) -> bool) -> Result<Vec<usize>> {
        let table = self.table(self.any()?)?;
        let numbers = table.iter().filter(|node| so(node)).map(|node| self.number(&node.id));
        let mut numbers = numbers.collect::<Result<Vec<_>>>()?;
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn any(&self) -> Result<&RedisServer> {
        self.nodes.iter().find(|node| node.answers()).context("no node of the Cluster runs")
    }

    /// A connection to the node at an address that the Cluster named.
    fn connect(&self, address: SocketAddr) -> Result<Connection> {
        let known = self.nodes.iter().find(|node| node.address() == address);
        known.with_context(|| format!("the Cluster named {address}, which is no node of it"))?.connect()
    }

    fn number(&self, id: &str) -> Result<usize> {
        self.ids.iter().position(|own| own == id).with_context(|| format!("{id} is no node of the Cluster"))
    }
}

/// The arguments of each node.
fn arguments(program: Program, own: &[&str]) -> Result<Vec<String>> {
    let value = |name: &str| own.windows(2).rev().find(|pair| pair[0] == name).map(|pair| pair[1]);
    let mut args = ARGS.to_vec();
    if version_of(&program.path()?)? >= VERSION_BUS_PORT {
        args.extend(["--cluster-port", "{bus}"]);
    }
    if let Some(password) = value("--requirepass") {
        args.extend(["--masterauth", password]);
    }
    if value("--tls-cluster") == Some("yes") {
        args.extend(["--tls-port", "{tls}", "--tls-replication", "yes"]);
    }
    Ok(args.iter().chain(own).map(|arg| (*arg).to_owned()).collect())
}

/// What one node is told of all: the file that it would have written itself when it had met the others.
fn table(nodes: &[RedisServer], ids: &[String], masters: usize, replicas_each: usize, own: usize) -> String {
    let mut table = String::new();
    let slot = |master: usize| master * usize::from(SLOTS) / masters;
    for (n, node) in nodes.iter().enumerate() {
        let (ports, id) = (node.ports(), &ids[n]);
        let address = format!("127.0.0.1:{}@{}", node.client_port(), ports.bus.unwrap_or_default());
        let myself = if n == own { "myself," } else { "" };
        if n < masters {
            let (first, last, epoch) = (slot(n), slot(n + 1) - 1, n + 1);
            table.push_str(&format!("{id} {address} {myself}master - 0 0 {epoch} connected {first}-{last}\n"));
        } else {
            let master = (n - masters) / replicas_each;
            let (epoch, master) = (master + 1, &ids[master]);
            table.push_str(&format!("{id} {address} {myself}slave {master} 0 0 {epoch} connected\n"));
        }
    }
    table.push_str(&format!("vars currentEpoch {masters} lastVoteEpoch 0\n"));
    table
}

/// A name for a node: 40 hexadecimal digits.
fn random_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    let number = || RandomState::new().hash_one(0);
    format!("{:016x}{:016x}{:08x}", number(), number(), number() >> 32)
}
