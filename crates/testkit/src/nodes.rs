//! What a Cluster's nodes say of one another, and commands that find the node of their key.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};

use crate::resp::{Connection, Reply};

/// How often a command follows `MOVED` before it gives up.
const HOPS_MAX: u32 = 5;

/// A line of `CLUSTER NODES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) flags: Vec<String>,
    /// The id of its master; empty for a master.
    pub(crate) master: String,
    pub(crate) is_linked: bool,
    /// The first and last of each range of slots that it owns.
    pub(crate) slots: Vec<(u16, u16)>,
}

impl Node {
    pub(crate) fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|own| own == flag)
    }

    pub(crate) fn owns(&self, slot: u16) -> bool {
        self.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot))
    }
}

/// Reads the answer to `CLUSTER NODES`.
pub(crate) fn read(table: &str) -> Result<Vec<Node>> {
    table.lines().map(|line| read_line(line).with_context(|| format!("in CLUSTER NODES: {line}"))).collect()
}

/// `<id> <address> <flags> <master> <ping> <pong> <epoch> <link> <slot>-<slot> … [<slot>-><id>]`
fn read_line(line: &str) -> Result<Node> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [id, _, flags, master, _, _, _, link, slots @ ..] = &words[..] else { bail!("too few words") };
    let range = |words: &str| -> Result<(u16, u16)> {
        let (first, last) = words.split_once('-').unwrap_or((words, words));
        Ok((first.parse()?, last.parse()?))
    };
    Ok(Node {
        id: (*id).to_owned(),
        flags: flags.split(',').map(str::to_owned).collect(),
        master: master.trim_start_matches('-').to_owned(),
        is_linked: *link == "connected",
        // In brackets are the slots that are on their way.
        slots: slots.iter().filter(|word| !word.starts_with('[')).map(|word| range(word)).collect::<Result<_>>()?,
    })
}

/// Sends a command to `first`, and from there to where the Cluster says that its key is.
///
/// # Errors
/// When a node does not answer, or the Cluster sends it round in circles. An error that it answers is a reply.
pub(crate) fn command<A: AsRef<[u8]>>(
    first: SocketAddr,
    connect: impl Fn(SocketAddr) -> Result<Connection>,
    words: &[A],
) -> Result<Reply> {
    let mut address = first;
    for _ in 0..HOPS_MAX {
        let reply = connect(address)?.ask(words)?;
        // `MOVED 3999 127.0.0.1:6381`
        let Reply::Error(text) = &reply else { return Ok(reply) };
        let Some(moved) = text.strip_prefix("MOVED ").and_then(|rest| rest.split(' ').nth(1)) else {
            return Ok(reply);
        };
        address = moved.parse().with_context(|| format!("the Cluster answered {text}"))?;
    }
    bail!("the Cluster sent a command round in circles")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_nodes_is_read() {
        let nodes = read(
            "aa 127.0.0.1:20001@20002 myself,master - 0 0 1 connected 0-99 200 [7->-bb]\n\
             bb 127.0.0.1:20003@20004,host slave,fail? aa 0 0 1 disconnected\n",
        )
        .unwrap();
        assert!(nodes[0].is("myself") && nodes[0].is_linked && nodes[0].master.is_empty());
        assert!(nodes[0].owns(99) && nodes[0].owns(200) && !nodes[0].owns(100));
        assert!(nodes[1].is("fail?") && !nodes[1].is_linked && nodes[1].master == "aa");
        assert!(read("aa 127.0.0.1:1@2 master - 0 0").is_err());
    }
}
