//! A Cluster: which node a request goes to, and where it goes when that node sends it on, is busy or is away.
//!
//! Each runtime keeps a map of the slots. A map may be old: a node that is asked in error says so, and a wrong map leads
//! to another try, never to an answer of another node. One attempt at a time fetches a newer one for all calls.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use taskonce_core::{ErrorKind, Result};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::address::Address;
use crate::connection::{At, Batch, Link, Links, Question};
use crate::fault::Refusal;
use crate::node::{Failure, Node, Sending, Target, halfway};
use crate::pipe::too_late;
use crate::shape::Seen;
use crate::shared::{Attempt, Shared, lock, outcome};
use crate::slots::{self, Map, slot_of};
use crate::wire::{Commands, Reply};

/// How often a call follows a redirection without a pause.
const HOPS_MAX: u32 = 5;
/// The least time between two looks at the slots when a node does not serve what it should.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// The same when nodes merely send on, which costs a call one hop more.
const MOVED_PAUSE: Duration = Duration::from_millis(200);
/// When the next node is asked for its map if the one before has not answered.
const NEXT_WAIT: Duration = Duration::from_millis(50);
/// For which part of a call's time it waits for a connection before it looks whether another node serves the slot now.
const CONNECT_SHARE: u32 = 4;
/// The same, in time.
const CONNECT_WAIT: Duration = Duration::from_millis(250);
/// How many nodes are kept; Redis advises no more than 1000 in a Cluster.
const NODES_MAX: usize = 2048;

/// A Cluster, as one runtime of one process sees it.
pub(crate) struct Cluster {
    /// What the URL names.
    seeds: Vec<Address>,
    map: Arc<Shared<Map>>,
    nodes: Mutex<Nodes>,
    /// How the keys were spread when it was looked at last.
    pub(crate) seen: Mutex<Option<Seen>>,
}

/// The nodes that are in use.
#[derive(Default)]
struct Nodes {
    known: Vec<Arc<Node>>,
    /// The one to ask first for a newer map: it sent a call on, and so knows more.
    informed: Option<Arc<Node>>,
    /// Who was asked first the last time.
    turn: usize,
}

/// What an answer says that is none.
enum Elsewhere {
    /// The key is at another node, for good or, while its slot is on its way, perhaps.
    There { to: Address, asking: bool, why: Refusal },
    /// Nobody serves it now.
    Nowhere(Refusal),
}

impl Cluster {
    pub(crate) fn new(seeds: Vec<Address>) -> Cluster {
        Cluster { seeds, map: Arc::default(), nodes: Mutex::default(), seen: Mutex::default() }
    }

    /// See [`Links::ask`]. Goes on until the deadline as long as the cause may pass. Each turn waits for a map that is
    /// newer than the one that did not help, and those are made no sooner than [`LOOK_PAUSE`] after one another.
    ///
    /// What a person has to mend at one node may pass as well: something else may listen where a node was, and another
    /// serve its slots. It is told at once only when a newer map leads there again.
    pub(crate) async fn ask<Q: Question>(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        at: At<'_>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
    ) -> Result<Vec<Reply>, Refusal> {
        let mut map = self.map(links, deadline).await?;
        let (mut patience, mut before, mut lasting) = (None, None, None);
        loop {
            let trouble = match self.follow(links, &map, at, patience, deadline, &request).await {
                Ok(replies) => return Ok(replies),
                Err(Failure::Over(refusal)) => return Err(refusal.or_before(before)),
                Err(Failure::Unconnected(refusal) | Failure::Broken(refusal)) => refusal.or_before(before),
            };
            let is_again = lasting.as_ref().is_some_and(|message| message == trouble.message());
            if is_again || Instant::now() >= deadline {
                return Err(trouble.passing());
            }
            let newer = match self.newer_map(links, Arc::clone(&map), deadline).await {
                Some(newer) => newer,
                None => return Err(trouble.passing()),
            };
            let is_newer = !Arc::ptr_eq(&map, &newer);
            lasting = (is_newer && !trouble.may_pass()).then(|| trouble.message().to_owned());
            map = newer;
            before = Some(trouble);
            patience = Some(halfway(deadline));
        }
    }

    /// Sends a request where the map says, and from there on where it is sent on to.
    async fn follow<Q: Question>(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        map: &Arc<Map>,
        at: At<'_>,
        mut patience: Option<Instant>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
    ) -> Result<Vec<Reply>, Failure> {
        let node = match at {
            At::Key(key) => map.owner(slot_of(key)),
            At::Primary(number) => map.primaries.get(number),
        };
        let mut node = Arc::clone(node.ok_or_else(|| Failure::Broken(nobody(at)))?);
        let mut asking = false;
        let mut hops = 0;
        loop {
            let connect_wait = Some((links.settings.timeout / CONNECT_SHARE).min(CONNECT_WAIT));
            let sending = Sending { asking, connect_wait, patience, deadline };
            let (link, replies) = node.send(links, sending, &request).await.map_err(|failure| failure.of(&node))?;
            match (at, elsewhere(&replies, &link.address)) {
                (At::Key(_), Some(Elsewhere::There { to, asking: may_be, why })) => {
                    if !may_be {
                        self.look_soon(links, map, &node);
                    }
                    hops += 1;
                    if hops > HOPS_MAX {
                        return Err(Failure::Broken(why.of(&link.address)));
                    }
                    node = self.node(&to);
                    node.mark_used();
                    asking = may_be;
                    patience = Some(halfway(deadline));
                }
                (At::Key(_), Some(Elsewhere::Nowhere(why))) => return Err(Failure::Broken(why.of(&link.address))),
                // A walk decides by itself what becomes of keys that have gone elsewhere.
                (At::Key(_) | At::Primary(_), _) => return Ok(replies),
            }
        }
    }

    /// How many primaries there are.
    pub(crate) async fn primaries(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        deadline: Instant,
    ) -> Result<usize, Refusal> {
        Ok(self.map(links, deadline).await?.primaries.len())
    }

    /// The map, as far as it is known.
    pub(crate) async fn map(self: &Arc<Cluster>, links: &Arc<Links>, deadline: Instant) -> Result<Arc<Map>, Refusal> {
        match self.map.get() {
            Some(map) => Ok(map),
            None => self.first_map(links, deadline).await,
        }
    }

    /// Forgets the map, and drops all connections.
    pub(crate) fn renew(&self) {
        self.map.drop_if(|_| true);
        for node in &lock(&self.nodes).known {
            node.renew();
        }
    }

    /// Where a key is, as far as one knows: who is asked there in error says so.
    pub(crate) fn address_of(&self, key: &[u8]) -> Address {
        let map = self.map.get();
        let owner = map.as_ref().and_then(|map| map.owner(slot_of(key)));
        match owner.map(|node| &node.target) {
            Some(Target::Server(address)) => address.clone(),
            Some(Target::Primary) | None => self.seeds[0].clone(),
        }
    }

    /// Among the primaries, where a key is as far as one knows.
    pub(crate) fn number_of(&self, key: &[u8]) -> Option<usize> {
        self.map.get()?.number_of_owner(slot_of(key))
    }

    async fn first_map(self: &Arc<Cluster>, links: &Arc<Links>, deadline: Instant) -> Result<Arc<Map>, Refusal> {
        let mut before = None;
        loop {
            match self.look(links, None, LOOK_PAUSE) {
                Ok(map) => return Ok(map),
                Err(attempt) => match outcome(attempt, deadline).await {
                    Ok(map) => return Ok(map),
                    Err(refusal) if refusal.may_pass() && Instant::now() < deadline => {
                        before = Some(refusal.or_before(before));
                    }
                    Err(refusal) => return Err(refusal.or_before(before)),
                },
            }
        }
    }

    /// A map that is newer than one that did not help, or that one if there is none; `None` when the time is up.
    pub(crate) async fn newer_map(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        old: Arc<Map>,
        deadline: Instant,
    ) -> Option<Arc<Map>> {
        match self.look(links, Some(&old), LOOK_PAUSE) {
            Ok(map) => Some(map),
            Err(attempt) => match outcome(attempt, deadline).await {
                Ok(map) => Some(map),
                Err(_) => (Instant::now() < deadline).then(|| self.map.get().unwrap_or(old)),
            },
        }
    }

    /// Sees to it that there will be a newer map, from a node that knows more.
    fn look_soon(self: &Arc<Cluster>, links: &Arc<Links>, old: &Arc<Map>, informed: &Arc<Node>) {
        lock(&self.nodes).informed = Some(Arc::clone(informed));
        // Nobody waits for it: the call knows where to go.
        let _ = self.look(links, Some(old), MOVED_PAUSE);
    }

    fn look(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        old: Option<&Arc<Map>>,
        pause: Duration,
    ) -> Result<Arc<Map>, Attempt<Map>> {
        self.map.now(
            |map| old.is_none_or(|old| !Arc::ptr_eq(map, old)),
            pause,
            links.settings.timeout,
            || Arc::clone(self).fetch(Arc::clone(links)),
        )
    }

    /// Asks one node after another for its map, without waiting long for one that is slow.
    async fn fetch(self: Arc<Cluster>, links: Arc<Links>) -> Result<Map, Refusal> {
        let deadline = links.deadline();
        let mut candidates = self.candidates().into_iter();
        let mut asked = JoinSet::new();
        let mut causes: Vec<Refusal> = Vec::new();
        loop {
            match candidates.next() {
                Some(address) => {
                    let (node, links) = (self.node(&address), Arc::clone(&links));
                    asked.spawn(async move { ask_slots(&node, &links, deadline).await });
                }
                None if asked.is_empty() => return Err(Refusal::of_all(causes).unwrap_or_else(too_late)),
                None => {}
            }
            let now = Instant::now();
            if now >= deadline {
                // Those who have not answered may do so another time.
                causes.insert(0, too_late());
                return Err(Refusal::of_all(causes).unwrap_or_else(too_late));
            }
            match timeout_at(deadline.min(now + NEXT_WAIT), asked.join_next()).await {
                Ok(Some(Ok(Ok(ranges)))) => return Ok(self.adopt(ranges)),
                Ok(Some(Ok(Err(refusal)))) => causes.push(refusal),
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Whom to ask for a map, in which order. The order changes, so that one that is wrong or stuck is not asked first
    /// again.
    fn candidates(&self) -> Vec<Address> {
        let mut nodes = lock(&self.nodes);
        let mut addresses: Vec<Address> = Vec::new();
        let informed = nodes.informed.take();
        nodes.turn = nodes.turn.wrapping_add(1);
        let turn = nodes.turn;
        drop(nodes);
        let map = self.map.get();
        let primaries = map.as_ref().map_or(&[][..], |map| &map.primaries);
        let replicas = map.as_ref().map_or(&[][..], |map| &map.replicas);
        let (late, early) = primaries.split_at(turn % primaries.len().max(1));
        let nodes = informed.iter().chain(early).chain(late).filter_map(|node| match &node.target {
            Target::Server(address) => Some(address),
            Target::Primary => None,
        });
        for address in nodes.chain(replicas).chain(&self.seeds) {
            if !addresses.contains(address) {
                addresses.push(address.clone());
            }
        }
        addresses
    }

    /// The map of these ranges. Nodes that it does not name are dropped, with their connections, unless a call was sent
    /// on to them since the last time.
    fn adopt(&self, ranges: Vec<slots::Range>) -> Map {
        let map = Map::new(ranges, |address| self.node(address));
        let mut nodes = lock(&self.nodes);
        nodes.known.retain(|node| node.was_used() || map.primaries.iter().any(|primary| Arc::ptr_eq(primary, node)));
        map
    }

    /// The node of an address.
    fn node(&self, address: &Address) -> Arc<Node> {
        let mut nodes = lock(&self.nodes);
        if let Some(node) = nodes.known.iter().find(|node| node.is_at(address)) {
            return Arc::clone(node);
        }
        if nodes.known.len() >= NODES_MAX {
            nodes.known.remove(0);
        }
        let node = Arc::new(Node::new(Target::Server(address.clone())));
        nodes.known.push(Arc::clone(&node));
        node
    }
}

/// Asks one node who serves which slot.
async fn ask_slots(node: &Node, links: &Arc<Links>, deadline: Instant) -> Result<Vec<slots::Range>, Refusal> {
    let mut commands = Commands::default();
    commands.add(&[b"CLUSTER", b"SLOTS"]);
    let sending = Sending { asking: false, connect_wait: None, patience: None, deadline };
    let sent = node.send(links, sending, |_| Ok(Batch(&commands))).await;
    let (link, replies) = sent.map_err(|failure| failure.of(node).refusal())?;
    let answer = replies.first().ok_or_else(|| Refusal::misshapen("CLUSTER SLOTS"))?;
    match slots::read(answer, &link.address).map_err(|refusal| refusal.of(&link.address))? {
        ranges if ranges.is_empty() => Err(Refusal::new(ErrorKind::Unreachable, "this node knows of no slots")
            .of(&link.address)
            .hint("make the Cluster with `redis-cli --cluster create`, or name nodes that belong to it")),
        ranges => Ok(ranges),
    }
}

/// Whether the answers send a call elsewhere.
fn elsewhere(replies: &[Reply], asked: &Address) -> Option<Elsewhere> {
    replies.iter().find_map(|reply| match reply {
        Reply::Error(text) => {
            let mut words = text.split(' ');
            let code = words.next().unwrap_or_default();
            let refusal = || Refusal::of_reply(text);
            match code {
                // Such as `MOVED 3999 127.0.0.1:6381`.
                "MOVED" | "ASK" => Some(match words.nth(1).and_then(|to| Address::told(to, asked)) {
                    Some(to) => Elsewhere::There { to, asking: code == "ASK", why: refusal() },
                    None => Elsewhere::Nowhere(Refusal::misshapen(code)),
                }),
                "TRYAGAIN" | "CLUSTERDOWN" | "LOADING" => Some(Elsewhere::Nowhere(refusal())),
                _ => Refusal::is_of_a_replica(text).then(|| Elsewhere::Nowhere(refusal())),
            }
        }
        Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil | Reply::List(_) => None,
    })
}

fn nobody(at: At<'_>) -> Refusal {
    match at {
        At::Key(key) => {
            let what = format!("no node of the Cluster serves slot {}, where this key belongs", slot_of(key));
            Refusal::new(ErrorKind::Unreachable, what)
                .hint("`redis-cli --cluster check` shows which slots are not served, and `--cluster fix` mends it")
        }
        At::Primary(_) => {
            Refusal::new(ErrorKind::Unreachable, "the primaries of the Cluster are not those of a moment ago")
                .hint("slots are moving, or a replica took over; begin again")
        }
    }
}
