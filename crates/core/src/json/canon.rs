//! The canonical form of a parsed document (RFC 8785, integer literals exact), and the way to a node in it.

use super::parse::{Node, Tape};
use super::text;

/// A text and its tape.
pub(super) struct Document<'t> {
    pub(super) text: &'t [u8],
    pub(super) tape: &'t Tape,
}

impl Document<'_> {
    /// The node of the whole document.
    pub(super) fn root(&self) -> u32 {
        0
    }

    /// Writes the canonical form of a node. It recurses no deeper than [`DEPTH_MAX`](super::DEPTH_MAX).
    pub(super) fn write(&self, node: u32, out: &mut Vec<u8>) {
        match self.tape.nodes[node as usize] {
            Node::Verbatim { start, end } => out.extend_from_slice(&self.text[start as usize..end as usize]),
            Node::Double { high, low } => {
                let double = f64::from_bits(u64::from(high) << 32 | u64::from(low));
                out.extend_from_slice(ryu_js::Buffer::new().format_finite(double).as_bytes());
            }
            // The quotes around it are copied with it.
            Node::Plain { start, end } => out.extend_from_slice(&self.text[start as usize - 1..=end as usize]),
            Node::Unescaped { start, end } => {
                text::write_string(&self.tape.unescaped[start as usize..end as usize], out);
            }
            Node::Array { after } => {
                out.push(b'[');
                let mut element = node + 1;
                while element < after {
                    if element > node + 1 {
                        out.push(b',');
                    }
                    self.write(element, out);
                    element = self.after(element);
                }
                out.push(b']');
            }
            Node::Object { order, .. } => {
                out.push(b'{');
                for (index, &name) in self.names(order).iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    self.write(name, out);
                    out.push(b':');
                    self.write(name + 1, out);
                }
                out.push(b'}');
            }
        }
    }

    /// The value of an element of an array or of a member of an object.
    pub(super) fn child(&self, node: u32, token: &str) -> Option<u32> {
        match self.tape.nodes[node as usize] {
            Node::Array { after } => {
                let index = array_index(token)?;
                let mut element = node + 1;
                // Ends at the array's end at the latest.
                for _ in 0..index {
                    if element >= after {
                        return None;
                    }
                    element = self.after(element);
                }
                (element < after).then_some(element)
            }
            Node::Object { order, .. } => {
                let names = self.names(order);
                let found = names
                    .binary_search_by(|&name| text::compare_names(self.tape.string(self.text, name), token.as_bytes()));
                found.ok().map(|found| names[found] + 1)
            }
            Node::Verbatim { .. } | Node::Double { .. } | Node::Plain { .. } | Node::Unescaped { .. } => None,
        }
    }

    /// The nodes of an object's names, sorted.
    fn names(&self, order: u32) -> &[u32] {
        let start = order as usize + 1;
        &self.tape.order[start..start + self.tape.order[order as usize] as usize]
    }

    fn after(&self, node: u32) -> u32 {
        match self.tape.nodes[node as usize] {
            Node::Array { after } | Node::Object { after, .. } => after,
            Node::Verbatim { .. } | Node::Double { .. } | Node::Plain { .. } | Node::Unescaped { .. } => node + 1,
        }
    }
}

/// An index as RFC 6901 writes it: digits without leading zeros.
fn array_index(token: &str) -> Option<usize> {
    let digits = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || (token.len() > 1 && token.starts_with('0')) {
        return None;
    }
    token.parse().ok()
}
