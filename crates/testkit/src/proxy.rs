//! A proxy before a Redis server that counts round trips and misbehaves on request.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::resp::{command_of, frame_length};

/// How much is read at once.
const CHUNK: usize = 256 * 1024;

/// A running proxy. It closes with this value.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: SocketAddr,
    round_trips: AtomicU64,
    commands: AtomicU64,
    connections: AtomicU64,
    closing: AtomicBool,
    rules: Mutex<Rules>,
    open: Mutex<Vec<TcpStream>>,
}

#[derive(Default)]
struct Rules {
    losses: Vec<Loss>,
    delay: Duration,
    shut: bool,
}

/// A reply that is to be lost.
struct Loss {
    command: String,
    left: u32,
    cuts: bool,
}

/// What is under way on one connection.
struct Traffic {
    unanswered: VecDeque<String>,
    answered_since_count: bool,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes everything on to `upstream`.
    ///
    /// # Errors
    /// When no port can be had.
    pub fn start(upstream: SocketAddr) -> Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            round_trips: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            rules: Mutex::default(),
            open: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || accept(&listener, &accepting));
        Ok(Proxy { address, shared })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its URL, without a password.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Round trips so far: how often a request followed a reply on its connection. With a [`delay`](Proxy::set_delay)
    /// longer than the client takes to send a burst, a pipelined burst counts once.
    #[must_use]
    pub fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Ordering::SeqCst)
    }

    /// Commands passed on so far.
    #[must_use]
    pub fn commands(&self) -> u64 {
        self.shared.commands.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Swallows the next `count` replies to a command (`SET`, `EVALSHA`) and passes on what follows, so that the
    /// connection is out of step.
    pub fn drop_replies(&self, command: &str, count: u32) {
        self.lose(command, count, false);
    }

    /// Cuts the connection in place of each of the next `count` replies to a command.
    pub fn cut_at_replies(&self, command: &str, count: u32) {
        self.lose(command, count, true);
    }

    /// Replies that are still to be lost.
    #[must_use]
    pub fn losses_left(&self) -> u32 {
        self.shared.rules().losses.iter().map(|loss| loss.left).sum()
    }

    /// Holds back every reply so long.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.rules().delay = delay;
    }

    /// Cuts every open connection.
    pub fn cut(&self) {
        for stream in lock(&self.shared.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Cuts every connection, and each new one at once, until [`reopen`](Proxy::reopen).
    pub fn shut(&self) {
        self.shared.rules().shut = true;
        self.cut();
    }

    /// Ends [`shut`](Proxy::shut).
    pub fn reopen(&self) {
        self.shared.rules().shut = false;
    }

    fn lose(&self, command: &str, count: u32, cuts: bool) {
        self.shared.rules().losses.push(Loss { command: command.to_uppercase(), left: count, cuts });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        self.cut();
    }
}

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Rules> {
        lock(&self.rules)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming().map_while(Result::ok) {
        if shared.closing.load(Ordering::SeqCst) {
            return;
        }
        shared.connections.fetch_add(1, Ordering::SeqCst);
        if shared.rules().shut {
            continue;
        }
        // A server that is away shows as a connection that closes at once.
        let _ = join(client, shared);
    }
}

fn join(client: TcpStream, shared: &Arc<Shared>) -> Result<()> {
    let server = TcpStream::connect(shared.upstream)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    lock(&shared.open).extend([client.try_clone()?, server.try_clone()?]);
    let traffic = Arc::new(Mutex::new(Traffic { unanswered: VecDeque::new(), answered_since_count: true }));
    let (client_reads, server_writes) = (client.try_clone()?, server.try_clone()?);
    let (request_traffic, request_shared) = (Arc::clone(&traffic), Arc::clone(shared));
    thread::spawn(move || {
        pump(client_reads, server_writes, |frame| request_shared.pass_request(frame, &request_traffic));
    });
    let reply_shared = Arc::clone(shared);
    thread::spawn(move || pump(server, client, |frame| reply_shared.pass_reply(frame, &traffic)));
    Ok(())
}

/// What becomes of a frame.
enum Fate {
    Pass,
    Swallow,
    Cut,
}

impl Shared {
    fn pass_request(&self, frame: &[u8], traffic: &Mutex<Traffic>) -> Fate {
        let mut traffic = lock(traffic);
        self.commands.fetch_add(1, Ordering::SeqCst);
        if std::mem::take(&mut traffic.answered_since_count) {
            self.round_trips.fetch_add(1, Ordering::SeqCst);
        }
        traffic.unanswered.push_back(command_of(frame));
        Fate::Pass
    }

    fn pass_reply(&self, _frame: &[u8], traffic: &Mutex<Traffic>) -> Fate {
        let delay = self.rules().delay;
        if !delay.is_zero() && !lock(traffic).answered_since_count {
            thread::sleep(delay);
        }
        let mut traffic = lock(traffic);
        let command = traffic.unanswered.pop_front().unwrap_or_default();
        let mut rules = self.rules();
        if let Some(loss) = rules.losses.iter_mut().find(|loss| loss.left > 0 && loss.command == command) {
            loss.left -= 1;
            return if loss.cuts { Fate::Cut } else { Fate::Swallow };
        }
        traffic.answered_since_count = true;
        Fate::Pass
    }
}

/// Reads frames until the end and writes those that pass, as many at once as have arrived.
fn pump(mut from: TcpStream, mut to: TcpStream, mut fate: impl FnMut(&[u8]) -> Fate) {
    let mut chunk = vec![0; CHUNK];
    let mut unread: Vec<u8> = Vec::new();
    let mut cut = false;
    while !cut {
        let Ok(read @ 1..) = from.read(&mut chunk) else { break };
        unread.extend_from_slice(&chunk[..read]);
        let (mut passed, mut start) = (Vec::with_capacity(unread.len()), 0);
        while !cut && let Some(length) = frame_length(&unread[start..]) {
            let frame = &unread[start..start + length];
            match fate(frame) {
                Fate::Pass => passed.extend_from_slice(frame),
                Fate::Swallow => {}
                Fate::Cut => cut = true,
            }
            start += length;
        }
        unread.drain(..start);
        if to.write_all(&passed).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::RedisServer;
    use crate::resp::{Connection, Reply, request};

    #[test]
    fn round_trips_are_counted_and_replies_are_lost_as_asked() {
        let server = RedisServer::start(&[]).unwrap();
        let proxy = Proxy::start(server.address()).unwrap();
        let mut connection = Connection::open(proxy.address()).unwrap();
        connection.ask(&["SET", "a", "1"]).unwrap();
        assert_eq!(connection.ask(&["GET", "a"]).unwrap(), Reply::Bulk(b"1".into()));
        assert_eq!((proxy.round_trips(), proxy.commands()), (2, 2));

        proxy.set_delay(Duration::from_millis(20));
        let mut burst = TcpStream::connect(proxy.address()).unwrap();
        for _ in 0..50 {
            burst.write_all(&request(&["PING"])).unwrap();
        }
        let mut replies = vec![0; 50 * 7];
        burst.read_exact(&mut replies).unwrap();
        assert_eq!((proxy.round_trips(), proxy.commands()), (3, 52));

        proxy.drop_replies("ECHO", 1);
        burst.write_all(&[request(&["ECHO", "x"]), request(&["PING"])].concat()).unwrap();
        let mut reply = [0; 7];
        burst.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"+PONG\r\n");
        proxy.cut_at_replies("GET", 1);
        assert!(connection.ask(&["GET", "a"]).is_err());
        assert_eq!(proxy.losses_left(), 0);
    }
}
