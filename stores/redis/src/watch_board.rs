//! What one watching connection watches: the keys, who waits for each, and what was read of it last.
//!
//! No I/O here. The connection takes the reads that are due, and brings their answers and what the server calls out.
//!
//! **No wake-up is lost.** A read arms the server's tracking of its key and shows what the key holds, in one step of the
//! server. Whoever waits compares with what such a read showed. What is written later is called out on the same
//! connection, behind the answer to that read, and has the key read again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use taskonce_core::codec;
use taskonce_core::record::{ClaimId, Record, State, Token};
use taskonce_redis_wire::fault::Refusal;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// How many keys one connection watches; who comes later looks by himself.
const KEYS_MAX: usize = 10_000;
/// A key that was not read for so long is read again: a server that lost the key calls nothing out, nor does a dead one.
const CHECK_AFTER: Duration = Duration::from_secs(20);
/// How often is looked for such keys.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// How long a key that could not be read is not watched: who waits for it looks by himself.
const UNREAD_FOR: Duration = Duration::from_secs(1);
/// How many reads are called for at once, some of which nobody wants any more.
const DUE_MAX: usize = 2 * KEYS_MAX;
/// The room for so many keys is kept; more is given back when most of it is empty.
const ROOM_MIN: usize = 64;
/// How long a connection that watches nothing stays.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(10);

/// A key's name, shared by those who speak of it.
pub(crate) type Name = Arc<[u8]>;

/// What is watched over one connection.
pub(crate) struct Board {
    pub(crate) began: Instant,
    state: Mutex<Watching>,
    /// A read is due, or the connection is not wanted any more.
    pub(crate) work: Notify,
}

struct Watching {
    keys: HashMap<Name, Watched>,
    due: VecDeque<Name>,
    /// Keys that could not be read, at most [`KEYS_MAX`], and until when they are not watched.
    unread: HashMap<Name, Instant>,
    /// Reads sent so far.
    reads: u64,
    ended: Option<Ended>,
    idle_since: Instant,
    checked: Instant,
}

/// A key that is watched.
struct Watched {
    sight: watch::Sender<Sight>,
    guests: usize,
    read: Read,
    read_at: Instant,
}

/// How far the last read of a key is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    /// It is to be sent.
    Due,
    /// It was sent, under this number.
    Sent(u64),
    /// It was answered, and the key has not changed since.
    Answered,
}

/// What was seen of a key.
#[derive(Clone, Copy)]
struct Sight {
    /// The number of the read that showed it; 0 before the first.
    read: u64,
    holds: Holds,
}

/// What a key holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Nothing, or it is elsewhere: reason enough to look.
    Nothing,
    /// The server does not say for now, such as while the key's slot moves.
    Unread,
    /// A record.
    Record(State, Token, ClaimId),
}

/// Why a connection watches no more.
#[derive(Clone)]
pub(crate) enum Ended {
    /// The server or the user cannot be told of changes.
    Unable,
    /// There was no connection.
    Unreached(Refusal),
    /// It was there, and broke or was given up.
    Closed,
}

/// Why a key is not watched.
pub(crate) enum NotWatched {
    /// Too many are, or it could not be read a moment ago.
    CannotTell,
    Ended(Ended),
}

impl Holds {
    /// What the head of a record says.
    pub(crate) fn of(head: &[u8]) -> Holds {
        codec::glance(head).map_or(Holds::Nothing, |(state, token, claim)| Holds::Record(state, token, claim))
    }

    /// Whether those who wait for a record that looks so should look again. Heartbeats write what is running, and are no
    /// reason; everything else that is written is one.
    fn differs(self, seen: &Record) -> bool {
        match self {
            Holds::Nothing | Holds::Unread => true,
            Holds::Record(State::Running, _, claim) => seen.state != State::Running || seen.claim != claim,
            Holds::Record(_, token, _) => seen.token != token,
        }
    }
}

impl Board {
    /// Of a connection that begins at this time.
    pub(crate) fn new(began: Instant) -> Board {
        let now = Instant::now();
        let state = Watching {
            keys: HashMap::new(),
            due: VecDeque::new(),
            unread: HashMap::new(),
            reads: 0,
            ended: None,
            idle_since: now,
            checked: now,
        };
        Board { began, state: Mutex::new(state), work: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Watching> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to wait for a key to differ from `seen`.
    pub(crate) fn join(self: &Arc<Board>, name: &[u8], seen: &Record) -> Result<Guest, NotWatched> {
        let mut state = self.lock();
        if let Some(ended) = &state.ended {
            return Err(NotWatched::Ended(ended.clone()));
        }
        let is_full = state.keys.len() >= KEYS_MAX;
        let now = Instant::now();
        let Watching { keys, due, unread, .. } = &mut *state;
        if unread.get(name).is_some_and(|until| now < *until) {
            return Err(NotWatched::CannotTell);
        }
        if let Some((name, _)) = keys.get_key_value(name) {
            let name = Arc::clone(name);
            let Some(watched) = keys.get_mut(&name) else { return Err(NotWatched::CannotTell) };
            let sight = *watched.sight.borrow();
            watched.guests += 1;
            let mut after = 0;
            if watched.read != Read::Answered || sight.holds.differs(seen) {
                // What was read may be older than what the guest has seen: the next read tells.
                after = sight.read;
                watched.call_for_read(&name, due);
                self.work.notify_one();
            }
            return Ok(Guest { board: Arc::clone(self), name, sight: watched.sight.subscribe(), after });
        }
        if is_full {
            return Err(NotWatched::CannotTell);
        }
        let name: Name = name.into();
        let (sender, sight) = watch::channel(Sight { read: 0, holds: Holds::Nothing });
        if due.len() >= DUE_MAX {
            // Those of who has gone; what is left is one for each key at most.
            due.retain(|due| keys.get_key_value(due).is_some_and(|(name, _)| Arc::ptr_eq(name, due)));
        }
        due.push_back(Arc::clone(&name));
        keys.insert(Arc::clone(&name), Watched { sight: sender, guests: 1, read: Read::Due, read_at: now });
        self.work.notify_one();
        Ok(Guest { board: Arc::clone(self), name, sight, after: 0 })
    }

    /// The next reads to send, at most `most`, each with its number.
    pub(crate) fn take(&self, most: usize) -> Vec<(Name, u64)> {
        let mut state = self.lock();
        let Watching { keys, due, reads, .. } = &mut *state;
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(name) = due.pop_front()
        {
            // Who waited for it may have gone, and it may have been asked for twice.
            if let Some(watched) = keys.get_mut(&name)
                && watched.read == Read::Due
            {
                *reads += 1;
                watched.read = Read::Sent(*reads);
                taken.push((name, *reads));
            }
        }
        taken
    }

    /// The answer to a read.
    pub(crate) fn answer(&self, name: &[u8], number: u64, holds: Holds) {
        let mut state = self.lock();
        // Another number is of those who waited for it before.
        let Watching { keys, unread, .. } = &mut *state;
        if let Some((name, _)) = keys.get_key_value(name)
            && let name = Arc::clone(name)
            && let Some(watched) = keys.get_mut(&name)
            && watched.read == Read::Sent(number)
        {
            let now = Instant::now();
            watched.read = Read::Answered;
            watched.read_at = now;
            watched.sight.send_replace(Sight { read: number, holds });
            if holds == Holds::Unread {
                if unread.len() >= KEYS_MAX {
                    unread.retain(|_, until| now < *until);
                }
                if unread.len() < KEYS_MAX {
                    unread.insert(name, now + UNREAD_FOR);
                }
            }
        }
    }

    /// The server calls out that a key has changed. A read that is under way is answered behind this, and shows it.
    pub(crate) fn changed(&self, name: &[u8]) {
        let mut state = self.lock();
        let Watching { keys, due, .. } = &mut *state;
        if let Some((name, _)) = keys.get_key_value(name) {
            let name = Arc::clone(name);
            if let Some(watched) = keys.get_mut(&name) {
                watched.call_for_read(&name, due);
            }
        }
    }

    /// The server calls out that every key may have changed.
    pub(crate) fn all_changed(&self) {
        let mut state = self.lock();
        let Watching { keys, due, .. } = &mut *state;
        for (name, watched) in keys {
            watched.call_for_read(name, due);
        }
    }

    /// When [`look`](Board::look) has something to do.
    pub(crate) fn look_at(&self) -> Instant {
        let state = self.lock();
        if state.keys.is_empty() { state.idle_since + IDLE_MAX } else { state.checked + CHECK_EVERY }
    }

    /// Calls for reads of what was not read for long; ends what watches nothing.
    pub(crate) fn look(&self) {
        let now = Instant::now();
        let mut state = self.lock();
        if state.keys.is_empty() {
            if now >= state.idle_since + IDLE_MAX {
                state.ended.get_or_insert(Ended::Closed);
            }
        } else if now >= state.checked + CHECK_EVERY {
            state.checked = now;
            let Watching { keys, due, unread, .. } = &mut *state;
            unread.retain(|_, until| now < *until);
            for (name, watched) in keys {
                if now >= watched.read_at + CHECK_AFTER {
                    watched.call_for_read(name, due);
                }
            }
        }
    }

    /// The connection ends: all who wait are told.
    pub(crate) fn end(&self, why: Ended) {
        let mut state = self.lock();
        state.ended.get_or_insert(why);
        state.due.clear();
        let keys = std::mem::take(&mut state.keys);
        drop(state);
        drop(keys);
        self.work.notify_one();
    }

    /// Why it watches no more, if it does not.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.lock().ended.clone()
    }

    /// For how many keys there is room, and how many reads are called for.
    #[cfg(test)]
    fn room(&self) -> (usize, usize) {
        let state = self.lock();
        (state.keys.capacity(), state.due.len())
    }

    /// How many keys are watched.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> usize {
        self.lock().keys.len()
    }
}

impl Watched {
    fn call_for_read(&mut self, name: &Name, due: &mut VecDeque<Name>) {
        if self.read == Read::Answered {
            self.read = Read::Due;
            due.push_back(Arc::clone(name));
        }
    }
}

/// One who waits for a key. Dropped, it leaves nothing behind.
pub(crate) struct Guest {
    board: Arc<Board>,
    name: Name,
    sight: watch::Receiver<Sight>,
    /// Only a later read than this one counts.
    after: u64,
}

impl Guest {
    /// Waits until the key differs from `seen`, or the connection ends. `false` if the key could not be read.
    pub(crate) async fn wait(&mut self, seen: &Record) -> Result<bool, Ended> {
        let after = self.after;
        let differs = |sight: &Sight| sight.read > after && sight.holds.differs(seen);
        match self.sight.wait_for(differs).await {
            Ok(sight) => Ok(sight.holds != Holds::Unread),
            Err(_) => Err(self.board.ended().unwrap_or(Ended::Closed)),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut state = self.board.lock();
        if let Some(watched) = state.keys.get_mut(&self.name) {
            watched.guests -= 1;
            if watched.guests == 0 {
                state.keys.remove(&self.name);
                if state.keys.capacity() > ROOM_MIN && state.keys.len() < state.keys.capacity() / 8 {
                    let room = 2 * state.keys.len();
                    state.keys.shrink_to(room);
                }
                if state.keys.is_empty() {
                    state.idle_since = Instant::now();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    fn record(state: State, token: u128) -> Record {
        let (claim, fingerprint) = (ClaimId::from(token), taskonce_core::key::Fingerprint([1; 16]));
        let policy = taskonce_core::policy::Policy::new(taskonce_core::policy::Effect::Keyed);
        let ask = taskonce_core::decide::Ask { claim, owner: &"owner".into(), fingerprint, policy: &policy };
        let stamp = taskonce_core::decide::Stamp { token: Token::from(token), at: Default::default() };
        Record { state, ..taskonce_core::decide::first(&ask, stamp) }
    }

    fn shows(record: &Record) -> Holds {
        Holds::of(&codec::encode(record))
    }

    fn join(board: &Arc<Board>, name: &[u8], seen: &Record) -> Guest {
        board.join(name, seen).ok().unwrap()
    }

    /// Whether it is told something now.
    async fn is_told(guest: &mut Guest, seen: &Record) -> bool {
        let mut wait = pin!(guest.wait(seen));
        std::future::poll_fn(|context| Poll::Ready(wait.as_mut().poll(context).is_ready())).await
    }

    #[tokio::test]
    async fn many_who_wait_for_one_key_are_one_read_and_are_told_by_what_it_shows() {
        let board = Arc::new(Board::new(Instant::now()));
        let (claim, last) = (record(State::Running, 1), record(State::Done, 2));
        let mut guests: Vec<_> = (0..100).map(|_| join(&board, b"k", &claim)).collect();
        let reads = board.take(10);
        assert_eq!(reads.len(), 1);
        assert!(!is_told(&mut guests[0], &claim).await, "nothing was read yet");
        board.answer(b"k", reads[0].1, shows(&claim));
        assert!(!is_told(&mut guests[0], &claim).await);
        board.changed(b"k");
        board.changed(b"k");
        let reads = board.take(10);
        assert_eq!(reads.len(), 1, "two changes before a read are one read");
        // A change behind the sending and before the answer: the server has done the read after it.
        board.changed(b"k");
        assert!(board.take(10).is_empty());
        board.answer(b"k", reads[0].1, shows(&last));
        for guest in &mut guests {
            assert!(is_told(guest, &claim).await);
        }
        drop(guests);
        assert_eq!(board.keys(), 0);
        board.changed(b"k");
        assert!(board.take(10).is_empty(), "nobody waits");
    }

    #[tokio::test]
    async fn one_who_has_seen_more_than_was_read_waits_for_the_next_read() {
        let board = Arc::new(Board::new(Instant::now()));
        let (old, new) = (record(State::Running, 1), record(State::Running, 2));
        let mut first = join(&board, b"k", &old);
        let number = board.take(10)[0].1;
        board.answer(b"k", number, shows(&old));
        let mut second = join(&board, b"k", &new);
        assert!(!is_told(&mut second, &new).await, "what was read is older than what it saw");
        let number = board.take(10)[0].1;
        board.answer(b"k", number, shows(&new));
        assert!(!is_told(&mut second, &new).await && is_told(&mut first, &old).await);
    }

    #[tokio::test]
    async fn an_answer_to_those_who_have_gone_is_not_taken_by_those_who_come() {
        let board = Arc::new(Board::new(Instant::now()));
        let (old, new) = (record(State::Running, 1), record(State::Running, 2));
        drop(join(&board, b"k", &old));
        assert!(board.take(10).is_empty(), "nobody waits for this read");
        let gone = join(&board, b"k", &old);
        let number = board.take(10)[0].1;
        drop(gone);
        let mut guest = join(&board, b"k", &new);
        board.answer(b"k", number, shows(&old));
        assert!(!is_told(&mut guest, &new).await);
        let number = board.take(10)[0].1;
        board.answer(b"k", number, shows(&new));
        assert!(!is_told(&mut guest, &new).await);
    }

    #[tokio::test]
    async fn the_end_of_the_connection_tells_all_and_lets_nobody_in() {
        let board = Arc::new(Board::new(Instant::now()));
        let claim = record(State::Running, 1);
        let mut guests = [join(&board, b"a", &claim), join(&board, b"b", &claim)];
        board.end(Ended::Unable);
        board.end(Ended::Closed);
        for guest in &mut guests {
            assert!(matches!(guest.wait(&claim).await, Err(Ended::Unable)), "the first reason stands");
        }
        assert!(matches!(board.join(b"c", &claim), Err(NotWatched::Ended(Ended::Unable))));
    }

    #[tokio::test]
    async fn beyond_the_bound_no_key_is_watched_and_those_that_are_go_on() {
        let board = Arc::new(Board::new(Instant::now()));
        let claim = record(State::Running, 1);
        let guests: Vec<_> = (0..KEYS_MAX).map(|key| join(&board, &key.to_be_bytes(), &claim)).collect();
        assert!(matches!(board.join(b"more", &claim), Err(NotWatched::CannotTell)));
        assert_eq!(board.take(100).len(), 100);
        drop(join(&board, &0_usize.to_be_bytes(), &claim));
        drop(guests);
        drop(join(&board, b"more", &claim));
    }

    #[tokio::test]
    async fn thousands_who_came_and_went_leave_no_room_behind() {
        let board = Arc::new(Board::new(Instant::now()));
        let claim = record(State::Running, 1);
        let stays = join(&board, b"stays", &claim);
        for _ in 0..10 {
            // No read is taken: the connection is not there yet.
            let guests: Vec<_> = (0..KEYS_MAX - 1).map(|key| join(&board, &key.to_be_bytes(), &claim)).collect();
            drop(guests);
        }
        let (room, due) = board.room();
        assert!(room <= 4 * ROOM_MIN, "room for {room} keys");
        assert!(due <= DUE_MAX, "{due} reads are called for");
        let (name, number) = board.take(100).pop().unwrap();
        assert_eq!(&*name, b"stays");
        assert_eq!(board.room().1, 0);
        board.answer(&name, number, shows(&claim));
        drop(stays);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_cannot_be_read_is_not_watched_for_a_while_and_others_are() {
        let board = Arc::new(Board::new(Instant::now()));
        let claim = record(State::Running, 1);
        let mut guests = [join(&board, b"a", &claim), join(&board, b"b", &claim)];
        for (name, number) in board.take(10) {
            board.answer(&name, number, if &*name == b"a" { Holds::Unread } else { shows(&claim) });
        }
        assert!(matches!(guests[0].wait(&claim).await, Ok(false)));
        assert!(!is_told(&mut guests[1], &claim).await);
        assert!(matches!(board.join(b"a", &claim), Err(NotWatched::CannotTell)));
        // sleeps: the time is not real
        tokio::time::sleep(UNREAD_FOR).await;
        let mut again = join(&board, b"a", &claim);
        let (name, number) = board.take(10).remove(0);
        board.answer(&name, number, shows(&claim));
        assert!(!is_told(&mut again, &claim).await, "it is watched again");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_read_for_long_is_read_again_and_an_idle_connection_ends() {
        let board = Arc::new(Board::new(Instant::now()));
        let claim = record(State::Running, 1);
        let guest = join(&board, b"k", &claim);
        let number = board.take(10)[0].1;
        board.answer(b"k", number, shows(&claim));
        let (mut reads, start) = (0, Instant::now());
        while start.elapsed() < Duration::from_secs(300) {
            tokio::time::sleep_until(board.look_at()).await;
            board.look();
            for (name, number) in board.take(10) {
                reads += 1;
                board.answer(&name, number, shows(&claim));
            }
        }
        assert!((10..=15).contains(&reads), "{reads} reads in five minutes");
        assert!(board.ended().is_none());
        drop(guest);
        while board.ended().is_none() {
            tokio::time::sleep_until(board.look_at()).await;
            board.look();
        }
        assert!(start.elapsed() < Duration::from_secs(340));
    }
}
