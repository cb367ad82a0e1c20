//! What one runtime knows of the handlers that it receives from: which may have something, and when the others are looked at
//! again. No I/O here.
//!
//! A handler is looked at when something may have become deliverable: at first, when its line says that one of its keys has
//! changed, when something comes due, and once in a while: each second while no line watches it, seldom else.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use taskonce_redis_wire::node::Target;
use taskonce_redis_wire::shared::lock;
use taskonce_worker::source::Want;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::line::Line;

/// How often a handler is looked at that no line watches.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often a handler is looked at at least that a line watches: what a line was not told (a slot that moved when it was empty, a
/// primary that was replaced and does not know it), and what a dropped receive did not hear, is found then.
pub(crate) const LOOK_ANYWAY: Duration = Duration::from_secs(30);
/// The same for each handler, so that however many there are, they cost about one look a second together.
const LOOK_ANYWAY_EACH: Duration = Duration::from_secs(1);

/// How long until such a look, among so many handlers.
fn look_anyway(handlers: usize) -> Duration {
    LOOK_ANYWAY.max(LOOK_ANYWAY_EACH * u32::try_from(handlers).unwrap_or(u32::MAX))
}

/// What is known.
#[derive(Default)]
pub(crate) struct Board {
    spots: Mutex<HashMap<Arc<str>, Spot>>,
    /// The connections that watch, one to each server.
    pub(crate) lines: Mutex<HashMap<Target, Line>>,
    /// Wakes who waits: something may have become deliverable.
    pub(crate) changed: Notify,
}

/// What is known of one handler.
struct Spot {
    /// Whether it may have something.
    is_open: bool,
    /// The line that watches it.
    watched_by: Option<u64>,
    /// When something comes due, or is looked for.
    look_at: Option<Instant>,
}

/// What a look found.
pub(crate) enum Found {
    /// It may have more.
    More,
    /// Nothing more, and something comes due after so long.
    NoMore(Option<Duration>),
}

impl Board {
    /// The handlers to ask now, and for how many, in turn: together for no more than `total`. They are not asked again until
    /// something is found or has changed.
    pub(crate) fn choose(&self, wants: &[Want], total: usize, turn: usize) -> Vec<(Arc<str>, usize)> {
        let now = Instant::now();
        let mut spots = lock(&self.spots);
        let mut open: Vec<&Want> = Vec::new();
        for want in wants.iter().filter(|want| want.max > 0) {
            let is_open = match spots.get(&want.handler) {
                Some(spot) => spot.is_open || spot.look_at.is_some_and(|at| at <= now),
                None => {
                    spots.insert(Arc::clone(&want.handler), Spot { is_open: true, watched_by: None, look_at: None });
                    true
                }
            };
            if is_open {
                open.push(want);
            }
        }
        if open.is_empty() || total == 0 {
            return Vec::new();
        }
        let anyway = now + look_anyway(spots.len());
        let count = open.len();
        open.rotate_left(turn % count);
        open.truncate(total);
        let (share, rest) = (total / open.len(), total % open.len());
        let chosen = open.into_iter().enumerate().map(|(at, want)| {
            if let Some(spot) = spots.get_mut(&want.handler) {
                (spot.is_open, spot.look_at) = (false, Some(anyway));
            }
            (Arc::clone(&want.handler), want.max.min(share + usize::from(at < rest)))
        });
        chosen.collect()
    }

    /// Each of these handlers is to be looked at, whatever is known.
    pub(crate) fn open(&self, wants: &[Want]) {
        let mut spots = lock(&self.spots);
        for want in wants {
            if let Some(spot) = spots.get_mut(&want.handler) {
                spot.is_open = true;
            }
        }
    }

    /// When one of these handlers has to be looked at; now, if one of them may have something.
    pub(crate) fn look_at(&self, wants: &[Want]) -> Option<Instant> {
        let now = Instant::now();
        let spots = lock(&self.spots);
        let wanted = wants.iter().filter(|want| want.max > 0).filter_map(|want| spots.get(&want.handler));
        wanted.filter_map(|spot| if spot.is_open { Some(now) } else { spot.look_at }).min()
    }

    /// Notes what a look found.
    pub(crate) fn note(&self, handler: &Arc<str>, found: &Found) {
        let mut spots = lock(&self.spots);
        let anyway = look_anyway(spots.len());
        let Some(spot) = spots.get_mut(handler) else { return };
        match found {
            Found::More => spot.is_open = true,
            Found::NoMore(due) => {
                let due = due.map(|due| Instant::now() + due);
                let look = Instant::now() + if spot.watched_by.is_none() { LOOK_EVERY } else { anyway };
                spot.look_at = [due, Some(look), spot.look_at].into_iter().flatten().min();
            }
        }
        let is_open = spot.is_open;
        drop(spots);
        if is_open {
            self.changed.notify_waiters();
        }
    }

    /// Whether a line watches it.
    pub(crate) fn is_watched(&self, handler: &str) -> bool {
        lock(&self.spots).get(handler).is_some_and(|spot| spot.watched_by.is_some())
    }

    /// A line watches it from now on.
    pub(crate) fn watch(&self, handler: &str, line: u64) {
        if let Some(spot) = lock(&self.spots).get_mut(handler) {
            spot.watched_by = Some(line);
        }
    }

    /// Something of it has changed, which its line tells once.
    pub(crate) fn change(&self, handler: &str) {
        if let Some(spot) = lock(&self.spots).get_mut(handler) {
            (spot.is_open, spot.watched_by) = (true, None);
        }
        self.changed.notify_waiters();
    }

    /// Something of it was changed from here.
    pub(crate) fn touch(&self, handler: &str) {
        let is_known = match lock(&self.spots).get_mut(handler) {
            Some(spot) => {
                spot.is_open = true;
                true
            }
            None => false,
        };
        if is_known {
            self.changed.notify_waiters();
        }
    }

    /// A line has ended, or was told that everything has changed.
    pub(crate) fn end(&self, line: u64) {
        for spot in lock(&self.spots).values_mut().filter(|spot| spot.watched_by == Some(line)) {
            (spot.is_open, spot.watched_by) = (true, None);
        }
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want(handler: &str, max: usize) -> Want {
        Want { handler: handler.into(), max }
    }

    fn chosen(board: &Board, wants: &[Want], total: usize, turn: usize) -> Vec<(String, usize)> {
        board.choose(wants, total, turn).into_iter().map(|(handler, max)| (handler.to_string(), max)).collect()
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_handler_is_asked_again_only_when_something_may_be_there() {
        let (board, wants) = (Board::default(), [want("a", 9)]);
        assert_eq!(chosen(&board, &wants, 9, 0), [("a".to_owned(), 9)]);
        board.watch("a", 1);
        board.note(&"a".into(), &Found::NoMore(None));
        assert!(chosen(&board, &wants, 9, 0).is_empty());
        assert!(board.look_at(&wants).unwrap() > Instant::now() + LOOK_ANYWAY / 2);
        board.change("a");
        assert!(board.look_at(&wants).unwrap() <= Instant::now() && !board.is_watched("a"));
        assert_eq!(chosen(&board, &wants, 9, 0).len(), 1);
        // Unwatched, it is looked at once in a while.
        board.note(&"a".into(), &Found::NoMore(None));
        let at = board.look_at(&wants).unwrap();
        assert!(at > Instant::now() && at <= Instant::now() + LOOK_EVERY);
        board.watch("a", 2);
        board.end(1);
        board.note(&"a".into(), &Found::NoMore(Some(Duration::ZERO)));
        assert_eq!(chosen(&board, &wants, 9, 0).len(), 1, "something came due");
    }

    /// Once a receive that was dropped in the middle of its look left the handler closed, and nobody looked at it again.
    #[tokio::test(flavor = "current_thread")]
    async fn a_look_of_which_nobody_heard_and_a_line_that_was_not_told_are_made_up_for() {
        let (board, wants) = (Board::default(), [want("a", 9)]);
        assert_eq!(chosen(&board, &wants, 9, 0).len(), 1);
        let is_anyway = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now() + LOOK_ANYWAY);
        assert!(is_anyway(board.look_at(&wants)), "the look was dropped");
        board.watch("a", 1);
        board.note(&"a".into(), &Found::NoMore(None));
        assert!(is_anyway(board.look_at(&wants)), "the line may be deaf");
        assert_eq!(look_anyway(10_000), Duration::from_secs(10_000), "ten thousand cost one look a second together");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn what_changes_during_a_look_is_not_forgotten_by_what_it_found() {
        let (board, wants) = (Board::default(), [want("a", 9)]);
        board.choose(&wants, 9, 0);
        board.watch("a", 1);
        board.change("a");
        board.note(&"a".into(), &Found::NoMore(None));
        assert_eq!(chosen(&board, &wants, 9, 0).len(), 1);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn shares_keep_to_the_total_and_take_turns() {
        let wants = [want("a", 9), want("b", 1), want("c", 0), want("d", 9)];
        let sum = |chosen: &[(String, usize)]| chosen.iter().map(|(_, max)| max).sum::<usize>();
        assert_eq!(sum(&chosen(&Board::default(), &wants, 8, 0)), 3 + 1 + 2);
        let mut first = Vec::new();
        for turn in 0..3 {
            let board = Board::default();
            let chosen = chosen(&board, &wants, 1, turn);
            assert_eq!(sum(&chosen), 1);
            first.push(chosen[0].0.clone());
        }
        assert_eq!(first, ["a", "b", "d"]);
        assert!(chosen(&Board::default(), &wants, 0, 0).is_empty());
    }
}
