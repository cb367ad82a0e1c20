//! What taskonce and its guardian tell each other: nine bytes a message, over a socket between the two.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// The length of a message.
const LENGTH: usize = 9;
/// The most descriptors that come with the first order: stdin, stdout and stderr of the command, and one for its result.
const STREAMS_MAX: usize = 4;

/// What taskonce tells the guardian. The end of the socket means: taskonce is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The claim holds until this moment of the clock that counts suspend.
    Deadline(Duration),
    /// Pass this signal on.
    Signal(i32),
    /// All is recorded; leave what still runs alone.
    Over,
}

/// What the guardian tells taskonce. The end of the socket means: the guardian is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// The command runs as this process.
    Started(i32),
    /// It could not be started, for this error number.
    NotStarted(i32),
    /// It ended with this code.
    Exited(i32),
    /// It was ended by this signal.
    Killed(i32),
    /// The deadline passed: it was killed, or not started.
    LeasePassed,
}

fn frame(tag: u8, value: u64) -> [u8; LENGTH] {
    let mut bytes = [tag; LENGTH];
    bytes[1..].copy_from_slice(&value.to_be_bytes());
    bytes
}

fn unframe(bytes: [u8; LENGTH]) -> (u8, u64) {
    let [tag, value @ ..] = bytes;
    (tag, u64::from_be_bytes(value))
}

fn small(value: i32) -> u64 {
    u64::from(value.unsigned_abs())
}

fn unknown() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an unknown message between taskonce and its guardian")
}

impl Order {
    fn to_bytes(self) -> [u8; LENGTH] {
        match self {
            Order::Deadline(at) => frame(b'D', u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)),
            Order::Signal(signal) => frame(b'S', small(signal)),
            Order::Over => frame(b'O', 0),
        }
    }

    fn from_bytes(bytes: [u8; LENGTH]) -> io::Result<Order> {
        match unframe(bytes) {
            (b'D', nanos) => Ok(Order::Deadline(Duration::from_nanos(nanos))),
            (b'S', signal) => Ok(Order::Signal(i32::try_from(signal).map_err(|_| unknown())?)),
            (b'O', 0) => Ok(Order::Over),
            _ => Err(unknown()),
        }
    }

    pub(crate) fn send(self, mut socket: &UnixStream) -> io::Result<()> {
        socket.write_all(&self.to_bytes())
    }

    /// Sends the order and the command's stdin, stdout and stderr with it, and whatever else it writes to.
    pub(crate) fn send_with(self, socket: &UnixStream, streams: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STREAMS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(streams)) {
            return Err(io::Error::other("no room for the descriptors"));
        }
        let bytes = self.to_bytes();
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)? {
            LENGTH => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    pub(crate) fn receive(mut socket: &UnixStream) -> io::Result<Order> {
        let mut bytes = [0; LENGTH];
        socket.read_exact(&mut bytes)?;
        Order::from_bytes(bytes)
    }

    /// Receives an order that was sent by [`Order::send_with`].
    pub(crate) fn receive_with(socket: &UnixStream) -> io::Result<(Order, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STREAMS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; LENGTH];
        let received =
            recvmsg(socket.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes != LENGTH {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut streams = Vec::with_capacity(STREAMS_MAX);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                streams.extend(descriptors);
            }
        }
        Ok((Order::from_bytes(bytes)?, streams))
    }
}

impl News {
    fn to_bytes(self) -> [u8; LENGTH] {
        match self {
            News::Started(pid) => frame(b'P', small(pid)),
            News::NotStarted(number) => frame(b'E', small(number)),
            News::Exited(code) => frame(b'X', small(code)),
            News::Killed(signal) => frame(b'K', small(signal)),
            News::LeasePassed => frame(b'L', 0),
        }
    }

    pub(crate) fn send(self, mut socket: &UnixStream) -> io::Result<()> {
        socket.write_all(&self.to_bytes())
    }

    pub(crate) fn receive(mut socket: &UnixStream) -> io::Result<News> {
        let mut bytes = [0; LENGTH];
        socket.read_exact(&mut bytes)?;
        let (tag, value) = unframe(bytes);
        let value = i32::try_from(value).map_err(|_| unknown())?;
        match tag {
            b'P' => Ok(News::Started(value)),
            b'E' => Ok(News::NotStarted(value)),
            b'X' => Ok(News::Exited(value)),
            b'K' => Ok(News::Killed(value)),
            b'L' => Ok(News::LeasePassed),
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_news_come_through_the_socket_unchanged() {
        let (here, there) = UnixStream::pair().unwrap();
        for order in [Order::Deadline(Duration::from_nanos(1 << 60)), Order::Signal(15), Order::Over] {
            order.send(&here).unwrap();
            assert_eq!(Order::receive(&there).unwrap(), order);
        }
        for news in [News::Started(7), News::NotStarted(2), News::Exited(255), News::Killed(9), News::LeasePassed] {
            news.send(&there).unwrap();
            assert_eq!(News::receive(&here).unwrap(), news);
        }
        drop(here);
        assert!(Order::receive(&there).is_err());
    }

    #[test]
    fn descriptors_travel_with_the_first_order() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let order = Order::Deadline(Duration::from_secs(1));
        order.send_with(&here, &[writer.as_fd(), writer.as_fd(), writer.as_fd()]).unwrap();
        drop(writer);
        let (received, streams) = Order::receive_with(&there).unwrap();
        let [stdin, stdout, stderr] = <[OwnedFd; 3]>::try_from(streams).unwrap();
        assert_eq!(received, order);
        drop((stdin, stderr));
        std::fs::File::from(stdout).write_all(b"hello").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
    }
}
