//! A proxy before a PostgreSQL server that cuts, or holds back, what is said about commits.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

/// How much is read at once.
const CHUNK: usize = 64 * 1024;
/// How often a reply that is held back is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The code of a request for TLS, which stands where a start-up has its version.
const TLS_REQUEST: u32 = 80_877_103;

/// A running proxy. It closes with this value.
pub struct PostgresProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: SocketAddr,
    commits: AtomicU64,
    closing: AtomicBool,
    rules: Mutex<Rules>,
    open: Mutex<Vec<TcpStream>>,
}

#[derive(Default)]
struct Rules {
    /// Commits that the server shall not get.
    cut_before: u32,
    /// Commits whose replies the client shall not get.
    cut_after: u32,
    /// No reply to a commit passes.
    holds: bool,
    /// How many are held back.
    held: u32,
}

impl PostgresProxy {
    /// Listens on a free port of 127.0.0.1 and passes everything on to the server at this port of it.
    ///
    /// # Errors
    /// When no port can be had.
    pub fn start(server: u16) -> Result<PostgresProxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream: SocketAddr::from(([127, 0, 0, 1], server)),
            commits: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            rules: Mutex::default(),
            open: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || accept(&listener, &accepting));
        Ok(PostgresProxy { address, shared })
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Commits that clients have sent so far.
    #[must_use]
    pub fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::SeqCst)
    }

    /// Cuts the connection in place of each of the next `count` commits: the server never gets them.
    pub fn cut_before_commits(&self, count: u32) {
        self.shared.rules().cut_before = count;
    }

    /// Cuts the connection in place of the reply to each of the next `count` commits: the server has committed.
    pub fn cut_after_commits(&self, count: u32) {
        self.shared.rules().cut_after = count;
    }

    /// Commits that are still to be cut.
    #[must_use]
    pub fn cuts_left(&self) -> u32 {
        let rules = self.shared.rules();
        rules.cut_before + rules.cut_after
    }

    /// Holds back all replies to commits, which the server has carried out, until [`release`](PostgresProxy::release).
    pub fn hold_commit_replies(&self) {
        self.shared.rules().holds = true;
    }

    /// How many replies are held back.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.shared.rules().held
    }

    /// Lets all replies pass.
    pub fn release(&self) {
        self.shared.rules().holds = false;
    }

    /// Cuts every open connection.
    pub fn cut(&self) {
        for stream in lock(&self.shared.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for PostgresProxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.release();
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
        // A server that is away shows as a connection that closes at once.
        let _ = join(client, shared);
    }
}

/// What one connection has told about itself.
#[derive(Default)]
struct Talk {
    /// A request for TLS was sent, whose answer is one byte without a frame.
    asked_for_tls: AtomicBool,
    /// A commit was sent whose reply was not seen yet.
    commits: AtomicBool,
}

fn join(client: TcpStream, shared: &Arc<Shared>) -> Result<()> {
    let server = TcpStream::connect(shared.upstream)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    lock(&shared.open).extend([client.try_clone()?, server.try_clone()?]);
    let talk = Arc::new(Talk::default());
    let (client_reads, server_writes) = (client.try_clone()?, server.try_clone()?);
    let (asking, asked) = (Arc::clone(shared), Arc::clone(&talk));
    thread::spawn(move || requests(client_reads, server_writes, &asking, &asked));
    let answering = Arc::clone(shared);
    thread::spawn(move || replies(server, client, &answering, &talk));
    Ok(())
}

/// The length of the frame that begins here, if it is whole. `typed` frames have a byte before their length.
fn frame(bytes: &[u8], typed: bool) -> Option<usize> {
    let at = usize::from(typed);
    let length = u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?);
    let end = at + usize::try_from(length).ok()?;
    (bytes.len() >= end).then_some(end)
}

fn is_commit(frame: &[u8]) -> bool {
    frame.first() == Some(&b'Q')
        && std::str::from_utf8(&frame[5..])
            .is_ok_and(|sql| sql.trim_end_matches('\0').trim_end_matches(';').trim().eq_ignore_ascii_case("commit"))
}

fn requests(mut client: TcpStream, mut server: TcpStream, shared: &Shared, talk: &Talk) {
    let mut chunk = vec![0; CHUNK];
    let mut unread: Vec<u8> = Vec::new();
    let mut has_started = false;
    'talk: while let Ok(read @ 1..) = client.read(&mut chunk) {
        unread.extend_from_slice(&chunk[..read]);
        while let Some(length) = frame(&unread, has_started) {
            let message: Vec<u8> = unread.drain(..length).collect();
            if !has_started {
                let is_tls = message.get(4..8) == Some(&TLS_REQUEST.to_be_bytes());
                talk.asked_for_tls.store(is_tls, Ordering::SeqCst);
                has_started = !is_tls;
            } else if is_commit(&message) {
                shared.commits.fetch_add(1, Ordering::SeqCst);
                let mut rules = shared.rules();
                if rules.cut_before > 0 {
                    rules.cut_before -= 1;
                    break 'talk;
                }
                talk.commits.store(true, Ordering::SeqCst);
            }
            if server.write_all(&message).is_err() {
                break 'talk;
            }
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

fn replies(mut server: TcpStream, mut client: TcpStream, shared: &Shared, talk: &Talk) {
    let mut chunk = vec![0; CHUNK];
    let mut unread: Vec<u8> = Vec::new();
    'talk: while let Ok(read @ 1..) = server.read(&mut chunk) {
        unread.extend_from_slice(&chunk[..read]);
        if talk.asked_for_tls.swap(false, Ordering::SeqCst) && !unread.is_empty() {
            let answer = unread.remove(0);
            if client.write_all(&[answer]).is_err() {
                break;
            }
        }
        while let Some(length) = frame(&unread, true) {
            let message: Vec<u8> = unread.drain(..length).collect();
            let ends = matches!(message.first(), Some(b'C' | b'E'));
            if ends && talk.commits.swap(false, Ordering::SeqCst) {
                let mut rules = shared.rules();
                if rules.cut_after > 0 {
                    rules.cut_after -= 1;
                    break 'talk;
                }
                if rules.holds {
                    rules.held += 1;
                    while rules.holds {
                        drop(rules);
                        thread::sleep(LOOK_EVERY);
                        rules = shared.rules();
                    }
                    rules.held -= 1;
                }
            }
            if client.write_all(&message).is_err() {
                break 'talk;
            }
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}
