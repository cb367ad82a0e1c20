//! The parser: one pass over a document into a flat tape, with every refusal. It does not recurse.

use super::DEPTH_MAX;
use super::number::{self, Number};
use super::text::{self, EscapeFault};
use crate::error::ErrorKind;

/// A value or a name. Offsets fit 32 bits by [`INPUT_MAX`](super::INPUT_MAX).
#[derive(Clone, Copy)]
pub(super) enum Node {
    /// `null`, `true`, `false` or a number that is printed as it stands: these bytes of the text are its canonical form.
    Verbatim { start: u32, end: u32 },
    /// A finite double, in two halves of its bits, so that a node stays at 12 bytes.
    Double { high: u32, low: u32 },
    /// A string without escapes: these bytes of the text are its content, and are canonical.
    Plain { start: u32, end: u32 },
    /// A string with escapes: these bytes of `Tape::unescaped` are its content.
    Unescaped { start: u32, end: u32 },
    /// An array: its elements follow, up to the node `after`.
    Array { after: u32 },
    /// An object: names, each followed by its value, up to the node `after`. `Tape::order` holds at `order` the number of
    /// members, then the nodes of their names, sorted.
    Object { order: u32, after: u32 },
}

/// A document: its nodes in the order of the text.
pub(super) struct Tape {
    pub(super) nodes: Vec<Node>,
    pub(super) order: Vec<u32>,
    pub(super) unescaped: Vec<u8>,
}

impl Tape {
    /// The content of the string or name at a node; nothing where the node is no string.
    pub(super) fn string<'t>(&'t self, text: &'t [u8], node: u32) -> &'t [u8] {
        match self.nodes[node as usize] {
            Node::Plain { start, end } => &text[start as usize..end as usize],
            Node::Unescaped { start, end } => &self.unescaped[start as usize..end as usize],
            Node::Verbatim { .. } | Node::Double { .. } | Node::Array { .. } | Node::Object { .. } => &[],
        }
    }
}

/// Why a document is refused, and where.
pub(super) struct Fault {
    pub(super) kind: ErrorKind,
    /// Offset of the first byte that does not fit.
    pub(super) at: usize,
    pub(super) what: &'static str,
    /// The name that was given twice, in the object that ends at `at`.
    pub(super) name: Option<Box<[u8]>>,
}

impl Fault {
    pub(super) fn new(kind: ErrorKind, at: usize, what: &'static str) -> Fault {
        Fault { kind, at, what, name: None }
    }
}

/// An array or object that is still open.
struct Open {
    node: u32,
    /// Where its names begin in `Parser::names`.
    names: u32,
    object: bool,
}

struct Parser<'t> {
    text: &'t [u8],
    at: usize,
    tape: Tape,
    open: Vec<Open>,
    /// The names of the open objects so far.
    names: Vec<u32>,
}

/// Reads one document, which is no longer than [`INPUT_MAX`](super::INPUT_MAX).
pub(super) fn parse(text: &[u8]) -> Result<Tape, Fault> {
    if text.starts_with("\u{feff}".as_bytes()) {
        return Err(Fault::new(ErrorKind::BadJson, 0, "expected no byte order mark"));
    }
    // JSON of records has about one value or name in eight bytes; more of them only cost a reallocation.
    let tape = Tape { nodes: Vec::with_capacity(text.len() / 8 + 4), order: Vec::new(), unescaped: Vec::new() };
    let mut parser = Parser { text, at: 0, tape, open: Vec::new(), names: Vec::new() };
    parser.document()?;
    Ok(parser.tape)
}

impl Parser<'_> {
    fn document(&mut self) -> Result<(), Fault> {
        loop {
            let opened = self.value()?;
            if !opened && !self.next_member()? {
                return Ok(());
            }
        }
    }

    /// Reads a scalar, or opens an array or object up to its first value; says whether a value must follow at once.
    fn value(&mut self) -> Result<bool, Fault> {
        match self.skip_white_space() {
            Some(b'"') => self.string()?,
            Some(b'-' | b'0'..=b'9') => {
                let (number, end) = number::read(self.text, self.at)?;
                self.tape.nodes.push(match number {
                    Number::Verbatim { start } => Node::Verbatim { start: start as u32, end: end as u32 },
                    Number::Double(double) => {
                        Node::Double { high: (double.to_bits() >> 32) as u32, low: double.to_bits() as u32 }
                    }
                });
                self.at = end;
            }
            Some(b'{') => {
                self.push(true)?;
                match self.skip_white_space() {
                    Some(b'}') => self.close()?,
                    Some(b'"') => {
                        self.name()?;
                        return Ok(true);
                    }
                    _ => return Err(self.unexpected("expected a name in quotes or `}`")),
                }
            }
            Some(b'[') => {
                self.push(false)?;
                match self.skip_white_space() {
                    Some(b']') => self.close()?,
                    _ => return Ok(true),
                }
            }
            Some(b't') => self.word(b"true")?,
            Some(b'f') => self.word(b"false")?,
            Some(b'n') => self.word(b"null")?,
            _ => return Err(self.unexpected("expected a value")),
        }
        Ok(false)
    }

    /// Goes on after a whole value: up to the next one, or to the end of the document (then false).
    fn next_member(&mut self) -> Result<bool, Fault> {
        loop {
            let Some(innermost) = self.open.last() else {
                return match self.skip_white_space() {
                    None => Ok(false),
                    Some(_) => Err(self.unexpected("expected the end of the document")),
                };
            };
            let object = innermost.object;
            match (self.skip_white_space(), object) {
                (Some(b','), true) => {
                    self.at += 1;
                    if self.skip_white_space() != Some(b'"') {
                        return Err(self.unexpected("expected a name in quotes"));
                    }
                    self.name()?;
                    return Ok(true);
                }
                (Some(b','), false) => {
                    self.at += 1;
                    return Ok(true);
                }
                (Some(b'}'), true) | (Some(b']'), false) => self.close()?,
                (_, true) => return Err(self.unexpected("expected `,` or `}`")),
                (_, false) => return Err(self.unexpected("expected `,` or `]`")),
            }
        }
    }

    fn push(&mut self, object: bool) -> Result<(), Fault> {
        if self.open.len() == DEPTH_MAX {
            return Err(Fault::new(ErrorKind::TooDeep, self.at, "more than 128 arrays and objects inside each other"));
        }
        self.open.push(Open { node: self.tape.nodes.len() as u32, names: self.names.len() as u32, object });
        self.tape.nodes.push(Node::Array { after: 0 });
        self.at += 1;
        Ok(())
    }

    fn close(&mut self) -> Result<(), Fault> {
        let closed = self.open.pop().expect("a bracket is closed only while one is open");
        let after = self.tape.nodes.len() as u32;
        self.tape.nodes[closed.node as usize] = if closed.object {
            Node::Object { order: self.sort_names(closed.names as usize)?, after }
        } else {
            Node::Array { after }
        };
        self.at += 1;
        Ok(())
    }

    /// Moves the names of the innermost object into the tape, sorted; returns where they stand there.
    fn sort_names(&mut self, start: usize) -> Result<u32, Fault> {
        let (tape, text) = (&self.tape, self.text);
        let names = &mut self.names[start..];
        let compare = |a: &u32, b: &u32| text::compare_names(tape.string(text, *a), tape.string(text, *b));
        if !names.is_sorted_by(|a, b| compare(a, b).is_lt()) {
            // A stable order, so that of a name given twice the second comes second.
            names.sort_by(compare);
            let twice = names.windows(2).filter(|pair| compare(&pair[0], &pair[1]).is_eq()).map(|pair| pair[1]).min();
            if let Some(twice) = twice {
                return Err(Fault {
                    name: Some(tape.string(text, twice).into()),
                    ..Fault::new(ErrorKind::DuplicateName, self.at, "the name is given twice in one object")
                });
            }
        }
        let order = self.tape.order.len() as u32;
        self.tape.order.push(names.len() as u32);
        self.tape.order.extend_from_slice(names);
        self.names.truncate(start);
        Ok(order)
    }

    /// Reads a name at its opening quote, and the colon.
    fn name(&mut self) -> Result<(), Fault> {
        self.names.push(self.tape.nodes.len() as u32);
        self.string()?;
        if self.skip_white_space() != Some(b':') {
            return Err(self.unexpected("expected `:`"));
        }
        self.at += 1;
        Ok(())
    }

    /// Reads a string at its opening quote.
    fn string(&mut self) -> Result<(), Fault> {
        let start = self.at + 1;
        let end = text::plain_end(self.text, start);
        if self.text.get(end) == Some(&b'"') {
            self.tape.nodes.push(Node::Plain { start: start as u32, end: end as u32 });
            self.at = end + 1;
            return Ok(());
        }
        self.string_with_escapes(start, end)
    }

    #[inline(never)]
    fn string_with_escapes(&mut self, mut start: usize, mut end: usize) -> Result<(), Fault> {
        let unescaped = self.tape.unescaped.len() as u32;
        loop {
            self.tape.unescaped.extend_from_slice(&self.text[start..end]);
            match self.text.get(end) {
                Some(b'"') => break,
                Some(b'\\') => {
                    start = text::unescape(self.text, end, &mut self.tape.unescaped).map_err(|fault| match fault {
                        EscapeFault::Unknown => Fault::new(ErrorKind::BadJson, end + 1, "expected an escape of JSON"),
                        EscapeFault::Digits => {
                            Fault::new(ErrorKind::BadJson, end, "expected four hexadecimal digits in the escape")
                        }
                        EscapeFault::LoneSurrogate => {
                            Fault::new(ErrorKind::LoneSurrogate, end, "the escape is half of a UTF-16 pair")
                        }
                    })?;
                    end = text::plain_end(self.text, start);
                }
                Some(_) => {
                    return Err(Fault::new(ErrorKind::BadJson, end, "expected control characters to be escaped"));
                }
                None => return Err(Fault::new(ErrorKind::BadJson, end, "expected the end of a string")),
            }
        }
        self.tape.nodes.push(Node::Unescaped { start: unescaped, end: self.tape.unescaped.len() as u32 });
        self.at = end + 1;
        Ok(())
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), Fault> {
        let (start, end) = (self.at, self.at + word.len());
        if self.text.get(start..end) != Some(word) {
            return Err(self.unexpected("expected a value"));
        }
        self.tape.nodes.push(Node::Verbatim { start: start as u32, end: end as u32 });
        self.at = end;
        Ok(())
    }

    /// Goes to the next byte that is not white space, and returns it.
    fn skip_white_space(&mut self) -> Option<u8> {
        loop {
            match self.text.get(self.at) {
                Some(b' ' | b'\n' | b'\t' | b'\r') => self.at += 1,
                other => return other.copied(),
            }
        }
    }

    fn unexpected(&self, what: &'static str) -> Fault {
        Fault::new(ErrorKind::BadJson, self.at, what)
    }
}
