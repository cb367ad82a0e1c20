//! What a walk over a Cluster has to know: which nodes to visit, and whether slots or keys moved meanwhile.
//!
//! A key that moves from a node that is still to be visited to one that was visited would be missed. So every primary
//! says itself which slots it has and which are on their way, before a walk and after it: when that differs, the walk
//! begins again. A slot that is on its way all the time changes nothing in that; its keys move one by one, and only to the
//! node that takes the slot, so this one is visited once more after all others.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::{ErrorKind, Result};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::connection::{Batch, Links};
use crate::fault::Refusal;
use crate::node::{Node, Sending};
use crate::shared::lock;
use crate::slots::{Map, SLOTS};
use crate::wire::Commands;

/// How the keys are spread over servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The primaries to visit, by their numbers, in this order.
    pub order: Vec<usize>,
    /// Changes when slots move, or begin to.
    pub mark: u32,
}

impl Shape {
    /// That of one server.
    pub(crate) fn single() -> Shape {
        Shape { order: vec![0], mark: 0 }
    }
}

/// For how long a shape is taken for granted in the midst of a walk.
const TRUSTED: Duration = Duration::from_secs(1);

/// A shape, and by which map and when it was seen.
pub(crate) struct Seen {
    shape: Shape,
    map: Arc<Map>,
    at: Instant,
}

/// What a primary says of itself.
struct Own {
    id: String,
    /// The slots that it has, and those on their way, as it writes them.
    slots: String,
    /// How many slots it has.
    count: usize,
    /// Whether it is taking a slot.
    takes: bool,
}

impl Cluster {
    /// The shape now, when each slot is served by one node.
    ///
    /// Of a walk that goes on by the shape of this `mark` it is taken for granted for [`TRUSTED`]: the answers grow with
    /// the number of nodes, and pages are many. Who ends a walk asks without one.
    ///
    /// A slot that nobody serves also when it is looked at again is left out: nobody can have its tasks.
    pub(crate) async fn shape(
        self: &Arc<Cluster>,
        links: &Arc<Links>,
        mark: Option<u32>,
        deadline: Instant,
    ) -> Result<Shape, Refusal> {
        let mut map = self.map(links, deadline).await?;
        if let Some(seen) = &*lock(&self.seen)
            && mark == Some(seen.shape.mark)
            && seen.at.elapsed() < TRUSTED
            && Arc::ptr_eq(&seen.map, &map)
        {
            return Ok(seen.shape.clone());
        }
        let mut before = None;
        loop {
            let trouble = match all(&map.primaries, links, deadline).await {
                Ok(owns) => {
                    let (shape, count) = (shape(&owns), owns.iter().map(|own| own.count).sum::<usize>());
                    if count == SLOTS || (count < SLOTS && before.as_ref() == Some(&shape)) {
                        *lock(&self.seen) = Some(Seen { shape: shape.clone(), map, at: Instant::now() });
                        return Ok(shape);
                    }
                    before = Some(shape);
                    Refusal::new(ErrorKind::Unreachable, "some slots of the Cluster are not served by one node")
                        .hint("`redis-cli --cluster check` shows which; a walk would miss their tasks")
                }
                Err(refusal) if refusal.may_pass() => refusal,
                Err(refusal) => return Err(refusal),
            };
            map = match self.newer_map(links, map, deadline).await {
                Some(map) if Instant::now() < deadline => map,
                Some(_) | None => return Err(trouble),
            };
        }
    }
}

fn shape(owns: &[Own]) -> Shape {
    let mut hasher = DefaultHasher::new();
    for own in owns {
        (&own.id, &own.slots).hash(&mut hasher);
    }
    let once_more = owns.iter().enumerate().filter(|(_, own)| own.takes).map(|(number, _)| number);
    // Zero is that of one server.
    Shape { order: (0..owns.len()).chain(once_more).collect(), mark: (hasher.finish() as u32).max(1) }
}

/// Asks all primaries at once, and returns what they say in their order.
async fn all(primaries: &[Arc<Node>], links: &Arc<Links>, deadline: Instant) -> Result<Vec<Own>, Refusal> {
    let mut asked = JoinSet::new();
    for (number, node) in primaries.iter().enumerate() {
        let (node, links) = (Arc::clone(node), Arc::clone(links));
        asked.spawn(async move { (number, ask(&node, &links, deadline).await) });
    }
    let mut owns = Vec::with_capacity(primaries.len());
    for (number, own) in asked.join_all().await {
        owns.push((number, own?));
    }
    owns.sort_by_key(|(number, _)| *number);
    Ok(owns.into_iter().map(|(_, own)| own).collect())
}

async fn ask(node: &Node, links: &Arc<Links>, deadline: Instant) -> Result<Own, Refusal> {
    let mut commands = Commands::default();
    commands.add(&[b"CLUSTER", b"NODES"]);
    let sending = Sending { asking: false, connect_wait: None, patience: None, deadline };
    let sent = node.send(links, sending, |_| Ok(Batch(&commands))).await;
    let (link, replies) = sent.map_err(|failure| failure.of(node).refusal())?;
    let own = replies.first().and_then(|reply| own(reply.text()?));
    own.ok_or_else(|| Refusal::first_of(&replies, "CLUSTER NODES").of(&link.address))
}

/// The line of the one that was asked: `id address flags master ping pong epoch link slots…`.
fn own(table: &str) -> Option<Own> {
    let line = table.lines().find(|line| line.split(' ').nth(2).is_some_and(|flags| flags.contains("myself")))?;
    let mut fields = line.split(' ');
    let id = fields.next()?.to_owned();
    let slots: Vec<&str> = fields.skip(7).collect();
    let mut count = 0;
    for range in slots.iter().filter(|field| !field.starts_with('[')) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        count += (last.parse::<usize>().ok()? + 1).checked_sub(first.parse().ok()?)?;
    }
    let takes = slots.iter().any(|field| field.starts_with('[') && field.contains("-<-"));
    Some(Own { id, slots: slots.join(" "), count, takes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_says_what_it_has_and_what_is_on_its_way() {
        let table = "aa 127.0.0.1:1@2 master - 0 0 1 connected 5462-10922\n\
                     bb 127.0.0.1:3@4 myself,master - 0 0 2 connected 0-5460 10923 [77->-aa] [5500-<-aa]\n";
        let bb = own(table).unwrap();
        assert_eq!((bb.id.as_str(), bb.count, bb.takes), ("bb", 5462, true));
        let cc = own("cc 127.0.0.1:5@6 myself,slave aa 0 0 1 connected").unwrap();
        assert_eq!((cc.count, cc.takes), (0, false));
        assert!(own("aa 127.0.0.1:1@2 master - 0 0 1 connected 0-5").is_none());
        let (one, other) = (shape(&[bb, cc]), shape(&[own(&table.replace("[77->-aa] ", "")).unwrap()]));
        assert_eq!(one.order, [0, 1, 0]);
        assert_ne!(one.mark, other.mark);
    }
}
