//! The wire protocol of Redis, as much as tests need: requests out, replies in, and where a frame ends.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How long a test waits for one reply.
const REPLY_WAIT: Duration = Duration::from_secs(5);

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A short text, such as `OK`.
    Status(String),
    /// An error of the server's.
    Error(String),
    /// A whole number.
    Int(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// Nothing.
    Nil,
    /// A list.
    Array(Vec<Reply>),
}

impl Reply {
    /// The reply as text: of a status, an error, a number or bytes; empty for nothing and for a list.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Reply::Status(text) | Reply::Error(text) => text.clone(),
            Reply::Int(number) => number.to_string(),
            Reply::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Reply::Nil | Reply::Array(_) => String::new(),
        }
    }

    /// The bytes of the reply, as [`text`](Reply::text) has them.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Reply::Bulk(bytes) => bytes,
            other => other.text().into_bytes(),
        }
    }

    /// The number in it, if there is one.
    #[must_use]
    pub fn int(&self) -> Option<i64> {
        match self {
            Reply::Int(number) => Some(*number),
            Reply::Status(_) | Reply::Error(_) | Reply::Bulk(_) | Reply::Nil | Reply::Array(_) => None,
        }
    }
}

/// A connection that waits for each reply.
pub struct Connection {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nothing listens there.
    pub fn open(address: SocketAddr) -> Result<Connection> {
        let stream =
            TcpStream::connect_timeout(&address, REPLY_WAIT).with_context(|| format!("connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_WAIT))?;
        Ok(Connection { stream, unread: Vec::new() })
    }

    /// Sends one command and waits for its reply; an error of the server's is a reply.
    ///
    /// # Errors
    /// When the connection breaks or no reply comes.
    pub fn ask<A: AsRef<[u8]>>(&mut self, words: &[A]) -> Result<Reply> {
        self.stream.write_all(&request(words))?;
        loop {
            if let Some(length) = frame_length(&self.unread) {
                let frame: Vec<u8> = self.unread.drain(..length).collect();
                return Ok(parse(&frame)?.0);
            }
            let mut chunk = [0; 16 * 1024];
            let read = self.stream.read(&mut chunk)?;
            if read == 0 {
                bail!("the server closed the connection");
            }
            self.unread.extend_from_slice(&chunk[..read]);
        }
    }
}

/// A command as bytes.
#[must_use]
pub fn request<A: AsRef<[u8]>>(words: &[A]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        let word = word.as_ref();
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
    out
}

/// The length of the first whole frame in `bytes`, request or reply; `None` while its end has not arrived.
#[must_use]
pub fn frame_length(bytes: &[u8]) -> Option<usize> {
    let line_end = bytes.windows(2).position(|pair| pair == b"\r\n")? + 2;
    let count = || std::str::from_utf8(&bytes[1..line_end - 2]).ok()?.parse::<i64>().ok();
    match bytes[0] {
        b'$' | b'=' | b'!' => {
            let length = usize::try_from(count()?).map_or(line_end, |length| line_end + length + 2);
            (bytes.len() >= length).then_some(length)
        }
        b'*' | b'~' | b'>' | b'%' => {
            let children = count()? * if bytes[0] == b'%' { 2 } else { 1 };
            let mut end = line_end;
            for _ in 0..children {
                end += frame_length(bytes.get(end..)?)?;
            }
            Some(end)
        }
        _ => Some(line_end),
    }
}

/// The first word of a request, in capitals: `SET`.
#[must_use]
pub fn command_of(frame: &[u8]) -> String {
    match parse(frame) {
        Ok((Reply::Array(words), _)) => words.first().map_or_else(String::new, |word| word.text().to_uppercase()),
        _ => String::new(),
    }
}

fn parse(bytes: &[u8]) -> Result<(Reply, usize)> {
    let line_end = bytes.windows(2).position(|pair| pair == b"\r\n").context("a reply without a line end")? + 2;
    let line = std::str::from_utf8(&bytes[1..line_end - 2])?;
    Ok(match bytes[0] {
        b'+' => (Reply::Status(line.to_owned()), line_end),
        b'-' => (Reply::Error(line.to_owned()), line_end),
        b':' => (Reply::Int(line.parse()?), line_end),
        b'_' => (Reply::Nil, line_end),
        b'$' => match usize::try_from(line.parse::<i64>()?) {
            Err(_) => (Reply::Nil, line_end),
            Ok(length) => (Reply::Bulk(bytes[line_end..line_end + length].to_vec()), line_end + length + 2),
        },
        b'*' => match usize::try_from(line.parse::<i64>()?) {
            Err(_) => (Reply::Nil, line_end),
            Ok(count) => {
                let mut end = line_end;
                let mut items = Vec::new();
                for _ in 0..count {
                    let (item, length) = parse(&bytes[end..])?;
                    items.push(item);
                    end += length;
                }
                (Reply::Array(items), end)
            }
        },
        other => bail!("a reply that begins with {:?}", char::from(other)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_ends_where_its_last_part_ends() {
        let frame = request(&["SET", "k", ""]);
        assert_eq!(frame_length(&frame), Some(frame.len()));
        for end in 0..frame.len() {
            assert_eq!(frame_length(&frame[..end]), None, "{end} bytes");
        }
        assert_eq!(frame_length(b"$-1\r\n+OK\r\n"), Some(5));
        assert_eq!(frame_length(b"*2\r\n:1\r\n$2\r\nab\r\n:7\r\n"), Some(16));
        assert_eq!(command_of(&request(&["evalsha", "x"])), "EVALSHA");
    }
}
