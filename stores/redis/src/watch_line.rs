//! The connection that watches: it reads keys, which has the server call out their changes, and hears what it calls out.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::codec;
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::pipe::{Wire, too_late};
use taskonce_redis_wire::wire::{Commands, Digits, Reply, Word, parse_word};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::watch_board::{Board, Ended, Holds, Name};

/// The name that the server shows in `CLIENT LIST`.
const CLIENT_NAME: &[u8] = b"taskonce-watch";
/// How many reads are unanswered at once.
const READS_MAX: usize = 1024;
/// The longest word that is believed, in bytes: a read shows no more than the head of a record.
const WORD_MAX: usize = 1 << 20;
/// How often it is looked whether calls go to this server still.
const STILL_EVERY: Duration = Duration::from_millis(500);

/// A read that is unanswered.
struct Asked {
    name: Name,
    number: u64,
    until: Instant,
}

/// A connection in RESP 3.
struct Line {
    wire: Box<dyn Wire>,
    unread: Vec<u8>,
}

/// Tells those who wait when its task ends in whatever way, also with its runtime.
struct Ender(Arc<Board>);

impl Drop for Ender {
    fn drop(&mut self) {
        self.0.end(Ended::Closed);
    }
}

/// Watches what is on the board, until the connection breaks or has nothing to watch, or calls go to another server.
/// Connects no sooner than `earliest`. An answer takes at most `timeout`.
pub(crate) async fn run(
    board: Arc<Board>,
    earliest: Instant,
    timeout: Duration,
    connect: impl Future<Output = Result<Box<dyn Wire>, Refusal>> + Send,
    is_still: impl Fn() -> bool + Send,
) {
    let ender = Ender(board);
    let board = &ender.0;
    sleep_until(earliest).await;
    let until = Instant::now() + timeout;
    let wire = timeout_at(until, connect).await.unwrap_or_else(|_| Err(too_late()));
    let mut line = match wire {
        Ok(wire) => Line { wire, unread: Vec::new() },
        Err(refusal) => return board.end(Ended::Unreached(refusal)),
    };
    match timeout_at(until, line.enter()).await {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => return board.end(Ended::Unable),
        Ok(Err(refusal)) => return board.end(Ended::Unreached(refusal)),
        Err(_elapsed) => return board.end(Ended::Unreached(too_late())),
    }
    // However it ends: who waits has to look.
    let _refusal = line.watch(board, timeout, is_still).await;
}

/// Whether a server calls changes out, on a new connection to it.
pub(crate) async fn can_enter(wire: Box<dyn Wire>) -> Result<bool, Refusal> {
    Line { wire, unread: Vec::new() }.enter().await
}

impl Line {
    /// Asks to be told of changes: whether the server does that, and lets this user.
    async fn enter(&mut self) -> Result<bool, Refusal> {
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
        Ok(!replies[..2].iter().any(|reply| matches!(reply, Reply::Error(_))))
    }

    async fn watch(&mut self, board: &Board, timeout: Duration, is_still: impl Fn() -> bool) -> Result<(), Refusal> {
        let mut asked: VecDeque<Asked> = VecDeque::new();
        let mut still_at = Instant::now() + STILL_EVERY;
        while board.ended().is_none() {
            if still_at <= Instant::now() {
                if !is_still() {
                    return Ok(());
                }
                still_at = Instant::now() + STILL_EVERY;
            }
            let reads = board.take(READS_MAX - asked.len());
            if !reads.is_empty() {
                let until = Instant::now() + timeout;
                let mut commands = Commands::default();
                for (name, number) in reads {
                    let last = Digits::of(codec::GLANCE_BYTES.end as u64 - 1);
                    commands.add(&[b"GETRANGE", &name, b"0", last.as_bytes()]);
                    asked.push_back(Asked { name, number, until });
                }
                timeout_at(until, self.send(&commands)).await.unwrap_or_else(|_| Err(too_late()))?;
            }
            let answer_by = asked.front().map(|asked| asked.until);
            let look_at = board.look_at().min(still_at);
            tokio::select! {
                () = board.work.notified() => {}
                read = self.read() => {
                    read?;
                    while let Some(word) = self.next()? {
                        hear(board, word, &mut asked)?;
                    }
                }
                () = sleep_until(answer_by.map_or(look_at, |answer_by| answer_by.min(look_at))) => {
                    if answer_by.is_some_and(|answer_by| answer_by <= Instant::now()) {
                        return Err(too_late());
                    }
                    board.look();
                }
            }
        }
        Ok(())
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

/// Brings what the server says to the board.
fn hear(board: &Board, word: Word, asked: &mut VecDeque<Asked>) -> Result<(), Refusal> {
    match word {
        Word::Reply(reply) => {
            let Asked { name, number, .. } = asked.pop_front().ok_or_else(Refusal::out_of_step)?;
            let holds = match &reply {
                Reply::Bulk(head) => Holds::of(head),
                Reply::Error(text) if text.starts_with("NOPERM") => {
                    board.end(Ended::Unable);
                    return Ok(());
                }
                // Who looks finds out where it is.
                Reply::Error(text) if text.starts_with("MOVED") => Holds::Nothing,
                // Such as ASK, which may be the answer for hours.
                Reply::Error(_) => Holds::Unread,
                Reply::Status(_) | Reply::Int(_) | Reply::Nil | Reply::List(_) => Holds::Nothing,
            };
            board.answer(&name, number, holds);
        }
        Word::Push(parts) => match parts.as_slice() {
            [what, Reply::List(names)] if what.text() == Some("invalidate") => {
                for name in names {
                    if let Reply::Bulk(name) = name {
                        board.changed(name);
                    }
                }
            }
            [what, Reply::Nil] if what.text() == Some("invalidate") => board.all_changed(),
            // Other pushes were not asked for, and say nothing about keys.
            _ => {}
        },
    }
    Ok(())
}
