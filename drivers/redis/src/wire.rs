//! The wire protocol of Redis: commands as bytes, and bytes as replies.
//!
//! Calls speak RESP 2. A connection that is told of changes speaks RESP 3, whose further kinds become those of RESP 2.

use std::borrow::Cow;

/// The deepest nesting of a reply. `SCAN` nests twice.
const DEPTH_MAX: usize = 8;
/// The longest reply that is believed, in bytes and in items: Redis holds 512 MiB in one value.
const LENGTH_MAX: usize = 512 << 20;
/// The longest line: a status, an error or a number.
const LINE_MAX: usize = 64 << 10;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A short text, such as `OK`.
    Status(Cow<'static, str>),
    /// An error of the server's.
    Error(String),
    /// A whole number.
    Int(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// Nothing.
    Nil,
    /// A list.
    List(Vec<Reply>),
}

impl Reply {
    /// The text of a status or of bytes.
    pub fn text(&self) -> Option<&str> {
        match self {
            Reply::Status(text) => Some(text),
            Reply::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
            Reply::Error(_) | Reply::Int(_) | Reply::Nil | Reply::List(_) => None,
        }
    }
}

/// Commands, ready to be sent.
#[derive(Default)]
pub struct Commands {
    /// As they are sent.
    pub bytes: Vec<u8>,
    /// How many there are.
    pub count: usize,
}

impl Commands {
    /// Adds one command.
    pub fn add(&mut self, words: &[&[u8]]) -> &mut Commands {
        let size = words.iter().map(|word| word.len() + 16).sum::<usize>() + 16;
        self.bytes.reserve(size);
        self.header(b'*', words.len());
        for word in words {
            self.header(b'$', word.len());
            self.bytes.extend_from_slice(word);
            self.bytes.extend_from_slice(b"\r\n");
        }
        self.count += 1;
        self
    }

    /// Forgets all commands, and keeps a buffer of at most `keep` bytes.
    pub fn clear(&mut self, keep: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(keep);
        self.count = 0;
    }

    /// Adds the commands of another list.
    pub fn append(&mut self, other: &Commands) {
        self.bytes.extend_from_slice(&other.bytes);
        self.count += other.count;
    }

    /// Adds the commands of another list, and another command before each.
    pub fn append_each_after(&mut self, words: &[&[u8]], other: &Commands) {
        let mut rest = other.bytes.as_slice();
        // Commands are lists of bytes, and so have the form of replies.
        while let Ok(Some((_, length))) = parse(rest) {
            self.add(words);
            self.bytes.extend_from_slice(&rest[..length]);
            self.count += 1;
            rest = &rest[length..];
        }
    }

    fn header(&mut self, mark: u8, number: usize) {
        self.bytes.push(mark);
        self.bytes.extend_from_slice(Digits::of(number as u64).as_bytes());
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// A number as decimal digits.
pub struct Digits {
    buffer: [u8; 20],
    start: usize,
}

impl Digits {
    /// Those of a number.
    pub fn of(mut number: u64) -> Digits {
        let mut digits = Digits { buffer: [0; 20], start: 20 };
        loop {
            digits.start -= 1;
            digits.buffer[digits.start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return digits;
            }
        }
    }

    /// The digits.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

/// These bytes are not of this protocol.
#[derive(Debug, PartialEq, Eq)]
pub struct Garbled;

/// What a server says on a connection of RESP 3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// The answer to the next command.
    Reply(Reply),
    /// What nobody asked for just now.
    Push(Vec<Reply>),
}

/// The version of the protocol.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Two,
    Three,
}

/// The first reply in `bytes` and its length; `None` while its end has not arrived.
pub fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, Garbled> {
    parse_nested(bytes, DEPTH_MAX, Version::Two)
}

/// The same of RESP 3.
pub fn parse_word(bytes: &[u8]) -> Result<Option<(Word, usize)>, Garbled> {
    if bytes.first() != Some(&b'>') {
        return Ok(parse_nested(bytes, DEPTH_MAX, Version::Three)?.map(|(reply, end)| (Word::Reply(reply), end)));
    }
    let Some((start, line)) = first_line(bytes)? else { return Ok(None) };
    let count = length(line)?.ok_or(Garbled)?;
    Ok(match items(bytes, start, count, DEPTH_MAX - 1, Version::Three)? {
        Some((Reply::List(parts), end)) => Some((Word::Push(parts), end)),
        Some(_) | None => None,
    })
}

fn parse_nested(bytes: &[u8], depth: usize, version: Version) -> Result<Option<(Reply, usize)>, Garbled> {
    let Some(&mark) = bytes.first() else { return Ok(None) };
    let known = match version {
        Version::Two => matches!(mark, b'+' | b'-' | b':' | b'$' | b'*'),
        Version::Three => {
            matches!(mark, b'+' | b'-' | b':' | b'$' | b'*' | b'_' | b'#' | b',' | b'(' | b'=' | b'!' | b'~' | b'%')
        }
    };
    if !known {
        return Err(Garbled);
    }
    let Some((start, line)) = first_line(bytes)? else { return Ok(None) };
    let reply = match mark {
        // To nearly every write.
        b'+' if line == b"OK" => Reply::Status(Cow::Borrowed("OK")),
        b'+' | b',' | b'(' => Reply::Status(Cow::Owned(String::from_utf8_lossy(line).into_owned())),
        b'-' => Reply::Error(String::from_utf8_lossy(line).into_owned()),
        b':' => Reply::Int(number(line)?),
        b'_' => Reply::Nil,
        b'#' => Reply::Int(i64::from(line == b"t")),
        b'$' | b'=' | b'!' => match length(line)? {
            None => Reply::Nil,
            Some(length) => {
                let Some(whole) = bytes.get(start..start + length + 2) else { return Ok(None) };
                let content = whole.strip_suffix(b"\r\n").ok_or(Garbled)?;
                let reply = match mark {
                    b'!' => Reply::Error(String::from_utf8_lossy(content).into_owned()),
                    _ => Reply::Bulk(content.to_vec()),
                };
                return Ok(Some((reply, start + length + 2)));
            }
        },
        _ => match length(line)? {
            None => Reply::Nil,
            Some(_) if depth == 0 => return Err(Garbled),
            Some(count) => {
                let count = if mark == b'%' { count * 2 } else { count };
                return items(bytes, start, count, depth - 1, version);
            }
        },
    };
    Ok(Some((reply, start)))
}

/// The line that begins here without its mark, and where the next one begins.
fn first_line(bytes: &[u8]) -> Result<Option<(usize, &[u8])>, Garbled> {
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() > LINE_MAX { Err(Garbled) } else { Ok(None) };
    };
    let line = bytes[1..end].strip_suffix(b"\r").ok_or(Garbled)?;
    Ok(Some((end + 1, line)))
}

fn items(
    bytes: &[u8],
    start: usize,
    count: usize,
    depth: usize,
    version: Version,
) -> Result<Option<(Reply, usize)>, Garbled> {
    let mut end = start;
    // An item takes four bytes at least (three in RESP 3), so that a lying count reserves no more than arrived.
    let mut items = Vec::with_capacity(count.min(bytes.len() / 4));
    for _ in 0..count {
        let Some((item, length)) = parse_nested(&bytes[end..], depth, version)? else { return Ok(None) };
        items.push(item);
        end += length;
    }
    Ok(Some((Reply::List(items), end)))
}

fn number(line: &[u8]) -> Result<i64, Garbled> {
    std::str::from_utf8(line).ok().and_then(|text| text.parse().ok()).ok_or(Garbled)
}

/// A length, or `None` for the -1 that means nothing.
fn length(line: &[u8]) -> Result<Option<usize>, Garbled> {
    match number(line)? {
        -1 => Ok(None),
        number => usize::try_from(number).ok().filter(|length| *length <= LENGTH_MAX).map(Some).ok_or(Garbled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_reply_is_read_and_none_before_its_end() {
        let cases: [(&[u8], Reply); 9] = [
            (b"+OK\r\n", Reply::Status("OK".into())),
            (b"-ERR no\r\n", Reply::Error("ERR no".into())),
            (b":-2\r\n", Reply::Int(-2)),
            (b"$-1\r\n", Reply::Nil),
            (b"*-1\r\n", Reply::Nil),
            (b"$0\r\n\r\n", Reply::Bulk(vec![])),
            (b"$4\r\na\r\nb\r\n", Reply::Bulk(b"a\r\nb".to_vec())),
            (b"*0\r\n", Reply::List(vec![])),
            (
                b"*3\r\n$1\r\na\r\n:1\r\n*1\r\n$-1\r\n",
                Reply::List(vec![Reply::Bulk(b"a".to_vec()), Reply::Int(1), Reply::List(vec![Reply::Nil])]),
            ),
        ];
        for (bytes, reply) in cases {
            assert_eq!(parse(bytes), Ok(Some((reply, bytes.len()))));
            for end in 0..bytes.len() {
                assert_eq!(parse(&bytes[..end]), Ok(None), "{end} bytes of {bytes:?}");
            }
        }
    }

    #[test]
    fn pushes_and_the_kinds_of_resp_3_are_read_and_none_before_its_end() {
        let invalidate = |keys| Word::Push(vec![Reply::Bulk(b"invalidate".to_vec()), keys]);
        let cases: [(&[u8], Word); 7] = [
            (
                b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n",
                invalidate(Reply::List(vec![Reply::Bulk(b"k".to_vec())])),
            ),
            (b">2\r\n$10\r\ninvalidate\r\n_\r\n", invalidate(Reply::Nil)),
            (b"%1\r\n$1\r\na\r\n#t\r\n", Word::Reply(Reply::List(vec![Reply::Bulk(b"a".to_vec()), Reply::Int(1)]))),
            (b"~1\r\n,1.5\r\n", Word::Reply(Reply::List(vec![Reply::Status("1.5".into())]))),
            (b"=5\r\ntxt:a\r\n", Word::Reply(Reply::Bulk(b"txt:a".to_vec()))),
            (b"!6\r\nERR no\r\n", Word::Reply(Reply::Error("ERR no".into()))),
            (b"$0\r\n\r\n", Word::Reply(Reply::Bulk(vec![]))),
        ];
        for (bytes, word) in cases {
            assert_eq!(parse_word(bytes), Ok(Some((word, bytes.len()))));
            for end in 0..bytes.len() {
                assert_eq!(parse_word(&bytes[..end]), Ok(None), "{end} bytes of {bytes:?}");
            }
        }
        for bytes in [b">-1\r\n".as_slice(), b"*1\r\n>1\r\n:1\r\n", b"|1\r\n", b"HTTP/1.1 400\r\n"] {
            assert_eq!(parse_word(bytes), Err(Garbled), "{}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(parse(b"_\r\n"), Err(Garbled), "calls speak RESP 2");
    }

    #[test]
    fn what_is_not_the_protocol_is_refused() {
        let deep = b"*1\r\n".repeat(DEPTH_MAX + 1);
        let long = [b"+".as_slice(), &vec![b'a'; LINE_MAX + 1]].concat();
        let cases: [&[u8]; 9] = [
            b"HTTP/1.1 400 Bad Request\r\n",
            b"+OK\n",
            b":x\r\n",
            b"$-2\r\n",
            b"$99999999999\r\n",
            b"$1\r\nabc",
            b"*x\r\n",
            &deep,
            &long,
        ];
        for bytes in cases {
            assert_eq!(parse(bytes), Err(Garbled), "{}", String::from_utf8_lossy(&bytes[..bytes.len().min(40)]));
        }
    }

    #[test]
    fn commands_are_written_as_lists_of_bytes() {
        let mut commands = Commands::default();
        commands.add(&[b"GET", b"k\r\n"]).add(&[b"PING"]);
        assert_eq!(commands.bytes, b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n*1\r\n$4\r\nPING\r\n");
        assert_eq!(commands.count, 2);
        let mut asking = Commands::default();
        asking.append_each_after(&[b"A"], &commands);
        let expected = b"*1\r\n$1\r\nA\r\n*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n*1\r\n$1\r\nA\r\n*1\r\n$4\r\nPING\r\n";
        assert_eq!((asking.bytes.as_slice(), asking.count), (expected.as_slice(), 4));
        assert_eq!(Digits::of(0).as_bytes(), b"0");
        assert_eq!(Digits::of(u64::MAX).as_bytes(), u64::MAX.to_string().as_bytes());
    }
}
