//! Which slot a key has, and which node serves it.

use std::sync::Arc;

use crate::address::Address;
use crate::fault::Refusal;
use crate::node::Node;
use crate::wire::Reply;

/// How many slots a Cluster has.
pub(crate) const SLOTS: usize = 16384;
/// The mark of a slot that no node serves.
const NOBODY: u16 = u16::MAX;
/// The polynomial of CRC-16/XMODEM.
const POLYNOMIAL: u16 = 0x1021;
/// What each byte does to the checksum.
const TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 0x8000 != 0 { value << 1 ^ POLYNOMIAL } else { value << 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
}

/// The slot of a key: by the part between its first `{` and the next `}`, if there is something between them.
pub(crate) fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|start| {
        let rest = &key[start + 1..];
        rest.iter().position(|byte| *byte == b'}').filter(|end| *end > 0).map(|end| &rest[..end])
    });
    let sum = tag.unwrap_or(key).iter().fold(0_u16, |sum, byte| sum << 8 ^ TABLE[usize::from((sum >> 8) as u8 ^ byte)]);
    sum % SLOTS as u16
}

/// Some slots and who serves them.
pub(crate) struct Range {
    first: u16,
    last: u16,
    primary: Address,
    replicas: Vec<Address>,
}

/// Reads the answer of the server `asked` to `CLUSTER SLOTS`.
pub(crate) fn read(answer: &Reply, asked: &Address) -> Result<Vec<Range>, Refusal> {
    let misshapen = || Refusal::misshapen("CLUSTER SLOTS");
    let ranges = match answer {
        Reply::List(ranges) => ranges,
        Reply::Error(text) => return Err(Refusal::of_reply(text)),
        Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil => return Err(misshapen()),
    };
    ranges.iter().map(|range| read_range(range, asked).ok_or_else(misshapen)).collect()
}

fn read_range(range: &Reply, asked: &Address) -> Option<Range> {
    let Reply::List(parts) = range else { return None };
    let [Reply::Int(first), Reply::Int(last), primary, replicas @ ..] = parts.as_slice() else { return None };
    let slot = |number: &i64| u16::try_from(*number).ok().filter(|number| usize::from(*number) < SLOTS);
    let (first, last) = (slot(first)?, slot(last)?);
    let node = |node: &Reply| match node {
        Reply::List(parts) => match parts.as_slice() {
            [host, Reply::Int(port), ..] => {
                Some(Address::of(host.text().unwrap_or_default(), u16::try_from(*port).ok()?, asked))
            }
            _ => None,
        },
        _ => None,
    };
    let replicas = replicas.iter().filter_map(node).collect();
    (first <= last).then_some(Range { first, last, primary: node(primary)?, replicas })
}

/// Who serves which slot, as some node saw it at some time. It may be wrong by now: who is asked in error says so.
pub(crate) struct Map {
    owners: Box<[u16]>,
    /// In the order of their addresses.
    pub(crate) primaries: Vec<Arc<Node>>,
    /// To be asked for a newer map when no primary answers.
    pub(crate) replicas: Vec<Address>,
}

impl Map {
    /// The map of these ranges. `node` finds or makes the node of an address.
    pub(crate) fn new(ranges: Vec<Range>, mut node: impl FnMut(&Address) -> Arc<Node>) -> Map {
        let mut addresses: Vec<Address> = ranges.iter().map(|range| range.primary.clone()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let mut owners = vec![NOBODY; SLOTS].into_boxed_slice();
        let mut replicas: Vec<Address> = Vec::new();
        for range in ranges {
            let owner = addresses.binary_search(&range.primary).ok().and_then(|at| u16::try_from(at).ok());
            owners[usize::from(range.first)..=usize::from(range.last)].fill(owner.unwrap_or(NOBODY));
            replicas.extend(range.replicas);
        }
        replicas.sort_unstable();
        replicas.dedup();
        Map { owners, primaries: addresses.iter().map(&mut node).collect(), replicas }
    }

    /// Who serves a slot.
    pub(crate) fn owner(&self, slot: u16) -> Option<&Arc<Node>> {
        self.primaries.get(usize::from(self.owners[usize::from(slot)]))
    }

    /// Its number among the primaries.
    pub(crate) fn number_of_owner(&self, slot: u16) -> Option<usize> {
        Some(usize::from(self.owners[usize::from(slot)])).filter(|number| *number < self.primaries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Target;

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        // The checksum's own test, and what `CLUSTER KEYSLOT` of Redis 7.0 answers.
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        let cases: [(&[u8], u16); 8] = [
            (b"", 0),
            (b"foo", 12182),
            (b"bar", 5061),
            (b"{foo}.x", 12182),
            (b"a{foo}{bar}", 12182),
            (b"{}foo", 9500),
            (b"foo{", 7673),
            (b"a{foo", 113),
        ];
        for (key, slot) in cases {
            assert_eq!(slot_of(key), slot, "{}", String::from_utf8_lossy(key));
        }
    }

    fn node(host: &str, port: i64) -> Reply {
        Reply::List(vec![Reply::Bulk(host.into()), Reply::Int(port), Reply::Bulk(b"id".to_vec())])
    }

    fn range(first: i64, last: i64, nodes: Vec<Reply>) -> Reply {
        Reply::List([vec![Reply::Int(first), Reply::Int(last)], nodes].concat())
    }

    #[test]
    fn a_map_finds_the_owner_of_each_slot_and_knows_gaps() {
        let asked = Address { host: "asked".into(), port: 1 };
        let answer = Reply::List(vec![
            range(0, 99, vec![node("b", 7), node("c", 7)]),
            range(200, 16383, vec![node("", 7)]),
            range(100, 100, vec![node("b", 7)]),
        ]);
        let ranges = read(&answer, &asked).unwrap_or_else(|_| panic!("it is read"));
        let map = Map::new(ranges, |address| Arc::new(Node::new(Target::Server(address.clone()))));
        let owner = |slot| match &map.owner(slot)?.target {
            Target::Server(address) => Some(address.to_string()),
            Target::Primary => None,
        };
        assert_eq!((owner(0), owner(100), owner(150)), (Some("b:7".into()), Some("b:7".into()), None));
        assert_eq!((owner(200), owner(16383)), (Some("asked:7".into()), Some("asked:7".into())));
        assert_eq!(map.primaries.len(), 2);
        assert_eq!(map.replicas, [Address { host: "c".into(), port: 7 }]);
    }

    #[test]
    fn an_answer_of_another_shape_is_refused() {
        let asked = Address { host: "asked".into(), port: 1 };
        for answer in [
            Reply::Nil,
            Reply::List(vec![Reply::Nil]),
            Reply::List(vec![range(5, 4, vec![node("a", 1)])]),
            Reply::List(vec![range(0, 16384, vec![node("a", 1)])]),
            Reply::List(vec![range(0, 1, vec![node("a", 70000)])]),
            Reply::List(vec![range(0, 1, vec![])]),
        ] {
            assert!(read(&answer, &asked).is_err(), "{answer:?}");
        }
    }
}
