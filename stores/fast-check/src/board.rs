//! The board: how long this process believes a hint that says Running, and who of it asks the database meanwhile.
//!
//! A process believes one and the same hint for at most a third of its lease, counted by its own monotonic clock since it
//! first saw it, and no longer than the lease. So a front whose clock stands still, a holder that is dead, and an end whose
//! hint was lost only delay. Then one caller asks the database.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::key::Key;
use taskonce_core::record::{Age, Token};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Which part of the lease a hint is believed for.
const BELIEVED_PART: u32 = 3;
/// How many hints are remembered at once. Of further ones none is believed.
const HINTS_MAX: usize = 65_536;
/// How many leases a hint is remembered for, from when it was first seen.
const REMEMBERED_LEASES: u32 = 2;
/// The least time between two searches for hints to forget.
const FORGET_PAUSE: Duration = Duration::from_millis(100);
/// How long one caller may ask alone. Then another asks too: the first may be stuck, or never be polled again.
pub(crate) const ASKING_MAX: Duration = Duration::from_secs(1);

/// What this process has seen.
#[derive(Default)]
pub(crate) struct Board {
    hints: HashMap<Key, Sight>,
    turns: u64,
    searched_at: Option<Instant>,
}

/// One hint, since when it was first seen.
struct Sight {
    /// The hint's own token.
    token: Token,
    first: Instant,
    age_then: Age,
    believed_until: Instant,
    forget_at: Instant,
    asking: Option<Asking>,
}

struct Asking {
    since: Instant,
    number: u64,
    /// Has no permits; closed when this is over, and so for those who come to wait too late.
    ended: Arc<Semaphore>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.ended.close();
    }
}

/// What to do about a hint that says Running.
pub(crate) enum Belief {
    /// It is believed; the record is so old by now.
    Believe(Age),
    /// The database is to be asked; this is to be told when that and the new hint are over.
    Ask(Turn),
    /// Another asks just now, and the hint does not count any more: wait for it, then look again.
    Follow(Arc<Semaphore>),
    /// The database is to be asked, by whoever it is.
    AskAnyway,
}

/// The right to ask alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    number: u64,
}

impl Board {
    /// Looks at a hint of this token, whose record would be so old by the front's clock, and has this lease.
    pub(crate) fn look(&mut self, key: &Key, token: Token, age: Age, lease: Duration, now: Instant) -> Belief {
        if self.hints.get(key).is_none_or(|sight| sight.token != token) {
            if !self.has_room(key, now) {
                return Belief::AskAnyway;
            }
            let asking = self.hints.remove(key).and_then(|sight| sight.asking);
            let believed_for = (lease / BELIEVED_PART).min(age.left_of(lease));
            let sight = Sight {
                token,
                first: now,
                age_then: age,
                believed_until: now + believed_for,
                forget_at: now + lease * REMEMBERED_LEASES + ASKING_MAX,
                // Who asks because of the hint before has its answer soon, and that may be this hint.
                asking: asking.filter(|_| age.has_passed(lease)),
            };
            self.hints.insert(key.clone(), sight);
        }
        let Some(sight) = self.hints.get_mut(key) else { return Belief::AskAnyway };
        let own = i64::try_from(now.saturating_duration_since(sight.first).as_millis()).unwrap_or(i64::MAX);
        let age = age.max(Age::from_millis(sight.age_then.millis.saturating_add(own)));
        let is_over = age.has_passed(lease);
        if now < sight.believed_until && !is_over {
            return Belief::Believe(age);
        }
        match &sight.asking {
            // What is left of the lease is told, and the database is being asked.
            Some(asking) if now < asking.since + ASKING_MAX && !is_over => Belief::Believe(age),
            Some(asking) if now < asking.since + ASKING_MAX => Belief::Follow(Arc::clone(&asking.ended)),
            Some(_) | None => {
                self.turns += 1;
                sight.asking = Some(Asking { since: now, number: self.turns, ended: Arc::new(Semaphore::new(0)) });
                Belief::Ask(Turn { number: self.turns })
            }
        }
    }

    /// The database was asked, or could not be: the next one may.
    pub(crate) fn asked(&mut self, key: &Key, turn: Turn) {
        let Some(sight) = self.hints.get_mut(key) else { return };
        if sight.asking.as_ref().is_some_and(|asking| asking.number == turn.number) {
            sight.asking = None;
        }
    }

    fn has_room(&mut self, key: &Key, now: Instant) -> bool {
        if self.hints.len() < HINTS_MAX || self.hints.contains_key(key) {
            return true;
        }
        if self.searched_at.is_none_or(|searched_at| now >= searched_at + FORGET_PAUSE) {
            self.searched_at = Some(now);
            self.hints.retain(|_, sight| now < sight.forget_at);
        }
        self.hints.len() < HINTS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn key(id: &str) -> Key {
        Key::parse(&format!("a/b@1/{id}")).unwrap()
    }

    fn age(seconds: i64) -> Age {
        Age::from_millis(seconds * 1000)
    }

    fn word(belief: &Belief) -> &'static str {
        match belief {
            Belief::Believe(_) => "believe",
            Belief::Ask(_) => "ask",
            Belief::Follow(_) => "follow",
            Belief::AskAnyway => "ask anyway",
        }
    }

    /// The front's clock stands still: the hint is always as old as at first.
    #[test]
    fn a_hint_is_believed_for_a_third_of_its_lease_whatever_the_front_says() {
        let (mut board, start) = (Board::default(), Instant::now());
        let mut look = |seconds: u64, token: u128| {
            let now = start + Duration::from_secs(seconds);
            board.look(&key("a"), Token::from(token), age(0), LEASE, now)
        };
        for seconds in [0, 5, 9] {
            let Belief::Believe(believed) = look(seconds, 1) else { panic!("it is believed") };
            assert_eq!(believed, age(seconds as i64), "its age goes on by one's own clock");
        }
        assert_eq!([word(&look(10, 1)), word(&look(10, 1))], ["ask", "believe"], "one asks at a time");
        assert_eq!(word(&look(11, 1)), "ask", "who asks too long is not waited for");
        assert_eq!([word(&look(15, 2)), word(&look(24, 2)), word(&look(25, 2))], ["believe", "believe", "ask"]);
    }

    #[test]
    fn a_hint_is_not_believed_beyond_what_was_left_of_its_lease() {
        let (mut board, start) = (Board::default(), Instant::now());
        let mut look = |seconds: u64| {
            word(&board.look(&key("a"), Token::from(1), age(28), LEASE, start + Duration::from_secs(seconds)))
        };
        assert_eq!([look(0), look(1), look(2), look(2)], ["believe", "believe", "ask", "follow"]);
    }

    #[test]
    fn who_has_asked_lets_the_next_one_ask() {
        let (mut board, now) = (Board::default(), Instant::now());
        let passed = age(31);
        let Belief::Ask(turn) = board.look(&key("a"), Token::from(1), passed, LEASE, now) else { panic!("it asks") };
        assert_eq!(word(&board.look(&key("a"), Token::from(1), passed, LEASE, now)), "follow");
        assert_eq!(
            word(&board.look(&key("a"), Token::from(2), passed, LEASE, now)),
            "follow",
            "nor for another old hint"
        );
        board.asked(&key("a"), turn);
        assert_eq!(word(&board.look(&key("a"), Token::from(2), passed, LEASE, now)), "ask");
        assert_eq!(word(&board.look(&key("a"), Token::from(3), age(0), LEASE, now)), "believe");
    }

    #[test]
    fn what_finds_no_room_is_not_believed_and_old_hints_make_room() {
        let (mut board, now) = (Board::default(), Instant::now());
        for number in 0..HINTS_MAX {
            board.look(&key(&number.to_string()), Token::from(1), age(0), LEASE, now);
        }
        assert_eq!(word(&board.look(&key("more"), Token::from(1), age(0), LEASE, now)), "ask anyway");
        assert_eq!(word(&board.look(&key("7"), Token::from(1), age(0), LEASE, now)), "believe");
        let later = now + LEASE * REMEMBERED_LEASES + ASKING_MAX;
        assert_eq!(word(&board.look(&key("more"), Token::from(1), age(0), LEASE, later)), "believe");
        assert_eq!(board.hints.len(), 1);
    }
}
