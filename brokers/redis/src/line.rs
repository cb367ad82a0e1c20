//! The connection that waits: the server calls out, once, when a key has changed that it was asked about.
//!
//! One for each server, runtime and process, in RESP 3 with `CLIENT TRACKING`. A handler is asked about before it is looked at
//! for the last time, so that no change after that is missed. While deliveries flow nobody asks, and nothing is called out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::node::Target;
use taskonce_redis_wire::pipe::{Wire, too_late};
use taskonce_redis_wire::shared::lock;
use taskonce_redis_wire::wire::{Commands, Reply, Word, parse_word};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::board::Board;
use crate::keys::{Key, Names, STREAMS};

/// The name that the server shows in `CLIENT LIST`.
const CLIENT_NAME: &[u8] = b"taskonce-queue";
/// The first and the longest pause between the beginnings of two lines to one server.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often a pause doubles at most.
const DOUBLINGS_MAX: u32 = 6;
/// A line that lasted so long was a good one.
const GOOD_AFTER: Duration = Duration::from_secs(5);
/// How often a server is asked whether it is there, while it says nothing.
const PING_EVERY: Duration = Duration::from_secs(5);
/// How long an answer may take at least.
const ANSWER_MIN: Duration = Duration::from_secs(1);
/// How often it is looked whether calls go to this server still.
const STILL_EVERY: Duration = Duration::from_millis(500);
/// The longest word that is believed, in bytes.
const WORD_MAX: usize = 1 << 20;
/// How many handlers may wait to be asked about.
const ASKED_MAX: usize = 65_536;

/// A line to one server, and when it began.
pub(crate) struct Line {
    asks: mpsc::Sender<Ask>,
    began: Instant,
    failures: u32,
}

/// Asks about a handler.
struct Ask {
    handler: Arc<str>,
    answer: oneshot::Sender<bool>,
}

/// Has the server call out when something of a handler changes: whether it does from now on.
pub(crate) async fn watch(links: &Arc<Links>, board: &Arc<Board>, names: &Arc<Names>, handler: &Arc<str>) -> bool {
    let target = links.server_of(&names.of(handler).key(Key::Wake));
    let Some(asks) = line(links, board, names, target) else { return false };
    let (answer, told) = oneshot::channel();
    if asks.try_send(Ask { handler: Arc::clone(handler), answer }).is_err() {
        return false;
    }
    matches!(timeout(2 * links.settings.timeout.max(ANSWER_MIN), told).await, Ok(Ok(true)))
}

/// The line to a server; none while one that failed is not to be tried again.
fn line(links: &Arc<Links>, board: &Arc<Board>, names: &Arc<Names>, target: Target) -> Option<mpsc::Sender<Ask>> {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    let now = Instant::now();
    let mut lines = lock(&board.lines);
    let mut failures = 0;
    if let Some(line) = lines.get(&target) {
        if !line.asks.is_closed() {
            return Some(line.asks.clone());
        }
        failures = if line.began.elapsed() >= GOOD_AFTER { 0 } else { line.failures.saturating_add(1) };
        if now < line.began + (PAUSE * (1 << line.failures.min(DOUBLINGS_MAX))).min(PAUSE_MAX) {
            return None;
        }
    }
    // Servers that are gone are forgotten.
    lines.retain(|_, line| !line.asks.is_closed());
    let (asks, asked) = mpsc::channel(ASKED_MAX);
    lines.insert(target.clone(), Line { asks: asks.clone(), began: now, failures });
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let talk = Talk {
        number,
        board: Arc::downgrade(board),
        links: Arc::downgrade(links),
        names: Arc::clone(names),
        pending: VecDeque::new(),
        limit: links.settings.timeout.max(ANSWER_MIN),
    };
    tokio::spawn(talk.run(target, asked));
    Some(asks)
}

/// What is said on a line.
struct Talk {
    number: u64,
    /// The line ends with its board.
    board: Weak<Board>,
    links: Weak<Links>,
    names: Arc<Names>,
    /// What is unanswered; `None` is the question whether the server is there.
    pending: VecDeque<(Option<Ask>, Instant)>,
    limit: Duration,
}

impl Talk {
    async fn run(mut self, target: Target, asked: mpsc::Receiver<Ask>) {
        // However it ends: who waits has to look.
        let _refusal = self.talk(&target, asked).await;
        if let Some(board) = self.board.upgrade() {
            board.end(self.number);
        }
    }

    async fn talk(&mut self, target: &Target, mut asked: mpsc::Receiver<Ask>) -> Result<(), Refusal> {
        let until = Instant::now() + self.limit;
        let wire = {
            let Some(links) = self.links.upgrade() else { return Ok(()) };
            timeout_at(until, links.connect_to(target)).await.unwrap_or_else(|_| Err(too_late()))?
        };
        let mut ends = Ends { wire, unread: Vec::new() };
        timeout_at(until, ends.enter()).await.unwrap_or_else(|_| Err(too_late()))?;
        let (mut ping_at, mut still_at) = (Instant::now() + PING_EVERY, Instant::now() + STILL_EVERY);
        loop {
            let answer_by = self.pending.front().map_or(ping_at, |(_, until)| *until);
            tokio::select! {
                ask = asked.recv() => {
                    let Some(ask) = ask else { return Ok(()) };
                    let mut commands = Commands::default();
                    let mut next = Some(ask);
                    // What waits goes along.
                    while let Some(ask) = next {
                        let keys = self.names.of(&ask.handler);
                        let keys: Vec<Vec<u8>> = STREAMS.into_iter().chain([Key::Wake]).map(|key| keys.key(key)).collect();
                        let mut words: Vec<&[u8]> = vec![b"EXISTS"];
                        words.extend(keys.iter().map(Vec::as_slice));
                        commands.add(&words);
                        self.pending.push_back((Some(ask), Instant::now() + self.limit));
                        next = asked.try_recv().ok();
                    }
                    timeout(self.limit, ends.send(&commands)).await.unwrap_or_else(|_| Err(too_late()))?;
                }
                read = ends.read() => {
                    read?;
                    ping_at = Instant::now() + PING_EVERY;
                    while let Some(word) = ends.next()? {
                        self.hear(word)?;
                    }
                }
                () = sleep_until(answer_by.min(ping_at).min(still_at)) => {
                    let now = Instant::now();
                    if self.pending.front().is_some_and(|(_, until)| *until <= now) {
                        return Err(too_late());
                    }
                    if still_at <= now {
                        let Some(links) = self.links.upgrade() else { return Ok(()) };
                        if self.board.strong_count() == 0 || !links.is_still(target) {
                            return Ok(());
                        }
                        still_at = now + STILL_EVERY;
                    }
                    if ping_at <= now {
                        let mut commands = Commands::default();
                        commands.add(&[b"PING"]);
                        self.pending.push_back((None, now + self.limit));
                        ping_at = now + PING_EVERY;
                        timeout(self.limit, ends.send(&commands)).await.unwrap_or_else(|_| Err(too_late()))?;
                    }
                }
            }
        }
    }

    fn hear(&mut self, word: Word) -> Result<(), Refusal> {
        let Some(board) = self.board.upgrade() else { return Ok(()) };
        match word {
            Word::Reply(reply) => {
                let (ask, _) = self.pending.pop_front().ok_or_else(Refusal::out_of_step)?;
                let Some(Ask { handler, answer }) = ask else { return Ok(()) };
                let is_watched = matches!(reply, Reply::Int(_));
                if is_watched {
                    board.watch(&handler, self.number);
                }
                // Who gave up asks again another time.
                let _ = answer.send(is_watched);
            }
            Word::Push(parts) => match parts.as_slice() {
                [what, Reply::List(keys)] if what.text() == Some("invalidate") => {
                    for key in keys {
                        if let Reply::Bulk(key) = key
                            && let Some(handler) = self.names.handler_of(key)
                        {
                            board.change(handler);
                        }
                    }
                }
                [what, Reply::Nil] if what.text() == Some("invalidate") => board.end(self.number),
                // Other pushes were not asked for, and say nothing about keys.
                _ => {}
            },
        }
        Ok(())
    }
}

/// Both directions of the connection.
struct Ends {
    wire: Box<dyn Wire>,
    unread: Vec<u8>,
}

impl Ends {
    /// Asks to be told of changes.
    async fn enter(&mut self) -> Result<(), Refusal> {
        let mut commands = Commands::default();
        commands.add(&[b"HELLO", b"3"]).add(&[b"CLIENT", b"TRACKING", b"ON"]);
        // A convenience, as on every connection.
        commands.add(&[b"CLIENT", b"SETNAME", CLIENT_NAME]);
        self.send(&commands).await?;
        let mut replies = Vec::new();
        while replies.len() < commands.count {
            match self.next()? {
                Some(Word::Reply(reply)) => replies.push(reply),
                Some(Word::Push(_)) => {}
                None => self.read().await?,
            }
        }
        match replies.iter().take(2).find(|reply| matches!(reply, Reply::Error(_))) {
            Some(Reply::Error(text)) => Err(Refusal::of_reply(text)),
            Some(_) | None => Ok(()),
        }
    }

    async fn send(&mut self, commands: &Commands) -> Result<(), Refusal> {
        self.wire.write_all(&commands.bytes).await.map_err(|error| Refusal::of_io(&error))?;
        self.wire.flush().await.map_err(|error| Refusal::of_io(&error))
    }

    async fn read(&mut self) -> Result<(), Refusal> {
        if self.unread.len() > WORD_MAX {
            return Err(Refusal::garbled());
        }
        match self.wire.read_buf(&mut self.unread).await {
            Ok(0) => Err(Refusal::of_io(&std::io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) => Err(Refusal::of_io(&error)),
        }
    }

    /// The next whole word that has arrived.
    fn next(&mut self) -> Result<Option<Word>, Refusal> {
        Ok(parse_word(&self.unread).map_err(|_| Refusal::garbled())?.map(|(word, length)| {
            self.unread.drain(..length);
            word
        }))
    }
}
