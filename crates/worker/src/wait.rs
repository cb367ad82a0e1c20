//! Waits for another's run: per task and process one watches the store, the others queue behind it.
//!
//! The one that watches is called by the store when the task changes ([`Store::changed`](taskonce_core::store::Store::changed)),
//! or looks now and then where the store cannot call. When the run has ended in this process, it learns it at once. What it finds is
//! told to all: a task that ended is looked at once per process, however many wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use taskonce_core::key::{Key, Task};
use taskonce_core::ledger::{Admission, Ledger, Seen};
use taskonce_core::policy::Policy;
use taskonce_core::record::{Record, State};
use taskonce_core::{ErrorKind, Result, Retry};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep_until, timeout_at};

/// The first pause between two looks at a task that another runs.
const LOOK_MIN: Duration = Duration::from_millis(10);
/// The longest pause between two looks at what does not change, where the store cannot call or calls for nothing.
const LOOK_MAX: Duration = Duration::from_millis(250);
/// A call that was waited for so long was for something: the next look comes at once, and the pauses begin anew.
const CALM: Duration = Duration::from_secs(1);
/// How long those who wait bear with a store that is away, before they are told.
const AWAY_MAX: Duration = Duration::from_secs(10);

/// Of one handle on a store, and one task.
type Place = (usize, Key);

/// Where those of this process wait who wait for one task.
struct Room {
    /// One permit: who holds it watches the store. Closed when there is an answer for all, or none to be had.
    turn: Semaphore,
    /// The task's run ended in this process.
    ended: Notify,
    /// How the task ended.
    answer: OnceLock<Seen>,
}

/// The rooms of one process. A forked child has its own: who waits in its parent's does not exist in it, and a lock that
/// was held at the fork stays so.
struct Rooms {
    process: u32,
    open: Mutex<HashMap<Place, Arc<Room>>>,
    child: OnceLock<Box<Rooms>>,
}

static ROOMS: LazyLock<Rooms> = LazyLock::new(|| Rooms::new(std::process::id()));
/// How many rooms there are, so that a run nobody waits for pays one load. In a forked child it may count its parent's
/// until somebody waits there.
static ROOMS_OPEN: AtomicUsize = AtomicUsize::new(0);

fn place(ledger: &Ledger, key: &Key) -> Place {
    (Arc::as_ptr(ledger.store()).cast::<()>() as usize, key.clone())
}

impl Rooms {
    fn new(process: u32) -> Rooms {
        Rooms { process, open: Mutex::default(), child: OnceLock::new() }
    }

    /// Those of the current process.
    fn here(&self) -> &Rooms {
        let process = std::process::id();
        let mut rooms = self;
        while rooms.process != process {
            rooms = rooms.child.get_or_init(|| Box::new(Rooms::new(process)));
        }
        rooms
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, Arc<Room>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, place: Place) -> Guest<'_> {
        let mut rooms = self.lock();
        let room = rooms.entry(place.clone()).or_insert_with(|| {
            Arc::new(Room { turn: Semaphore::new(1), ended: Notify::new(), answer: OnceLock::new() })
        });
        let room = Arc::clone(room);
        ROOMS_OPEN.store(rooms.len(), Ordering::Release);
        Guest { rooms: self, place, room }
    }
}

/// A place in a room; the last to leave closes it.
struct Guest<'a> {
    rooms: &'a Rooms,
    place: Place,
    room: Arc<Room>,
}

impl Guest<'_> {
    /// All who are in the room go on together, and who comes later waits in a room of its own.
    fn open_doors(&self) {
        self.room.turn.close();
        let mut rooms = self.rooms.lock();
        if rooms.get(&self.place).is_some_and(|room| Arc::ptr_eq(room, &self.room)) {
            rooms.remove(&self.place);
        }
        ROOMS_OPEN.store(rooms.len(), Ordering::Release);
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if self.rooms.process != std::process::id() {
            // A copy of the parent's, in a forked child.
            return;
        }
        let mut rooms = self.rooms.lock();
        // One in the map, one here: nobody else is in it.
        if rooms.get(&self.place).is_some_and(|room| Arc::ptr_eq(room, &self.room) && Arc::strong_count(room) <= 2) {
            rooms.remove(&self.place);
        }
        ROOMS_OPEN.store(rooms.len(), Ordering::Release);
    }
}

/// Tells those who wait in this process that a run of the task ended here.
pub(crate) fn ended(ledger: &Ledger, key: &Key) {
    if ROOMS_OPEN.load(Ordering::Acquire) == 0 {
        return;
    }
    if let Some(room) = ROOMS.here().lock().get(&place(ledger, key)) {
        room.ended.notify_one();
    }
}

/// Claims; and while the task is busy or waiting, claims again, at most until `wait_max` has passed.
pub(crate) async fn claim_or_wait(
    ledger: &Ledger,
    task: &Task,
    policy: &Policy,
    wait_max: Duration,
) -> Result<Admission> {
    // A duplicate may be answered without waiting for anything; a loop over such answers must let others run.
    tokio::task::coop::consume_budget().await;
    let until = Instant::now() + wait_max;
    let mut admission = ledger.claim(task, policy).await?;
    while deferred(&admission).is_some() && Instant::now() < until {
        let guest = ROOMS.here().enter(place(ledger, &task.key));
        let watch = Watch { ledger, task, policy, guest: &guest, until };
        if let Ok(_turn) = guest.room.turn.try_acquire() {
            return watch.from(admission).await;
        }
        match timeout_at(until, guest.room.turn.acquire()).await {
            Err(_elapsed) => return ledger.claim(task, policy).await,
            // Who watched before has gone, and what was seen is old.
            Ok(Ok(_turn)) => {
                let admission = watch.look().await?;
                return watch.from(admission).await;
            }
            Ok(Err(_closed)) => {
                if let Some(admission) = guest.room.answer.get().and_then(|ended| answer_of(ended, task)) {
                    return Ok(admission);
                }
            }
        }
        admission = ledger.claim(task, policy).await?;
    }
    Ok(admission)
}

/// What the one does who has the turn.
struct Watch<'a> {
    ledger: &'a Ledger,
    task: &'a Task,
    policy: &'a Policy,
    guest: &'a Guest<'a>,
    until: Instant,
}

/// What ended a wait between two looks.
enum News {
    /// The store called soon, or cannot call for now: if the look shows nothing new, the next pause is longer.
    Pressing,
    /// The run ended here, or a time has come.
    Due,
}

impl Watch<'_> {
    /// Waits and looks until the task is the caller's, or ended, or the time is over.
    async fn from(&self, mut admission: Admission) -> Result<Admission> {
        let mut pause = LOOK_MIN;
        while let Some(seen) = deferred(&admission) {
            let start = Instant::now();
            if start >= self.until {
                return Ok(admission);
            }
            // No later than the lease or delay ends, so that a dead leader is succeeded at once.
            let end = self.until.min(start + seen.defer_for().max(LOOK_MIN));
            let record = Arc::clone(&seen.found.record);
            drop(admission);
            let news = self.news(&record, pause, end).await;
            admission = self.look().await?;
            pause = match news {
                News::Pressing if deferred(&admission).is_some_and(|seen| is_same(&seen.found.record, &record)) => {
                    (pause * 3 / 2).min(LOOK_MAX)
                }
                News::Pressing | News::Due => LOOK_MIN,
            };
        }
        if let Some(ended) = ended_as(&admission) {
            let _first = self.guest.room.answer.set(ended.clone());
            self.guest.open_doors();
        }
        Ok(admission)
    }

    /// Waits until there may be something to see, at most until `end`.
    async fn news(&self, seen: &Record, pause: Duration, end: Instant) -> News {
        let start = Instant::now();
        let called = async {
            match self.ledger.store().changed(&self.task.key, seen).await {
                // A long wait was for something; many short ones may be for nothing.
                Ok(true) if start.elapsed() > CALM => News::Due,
                Ok(_) | Err(_) => {
                    sleep_until(start + pause).await;
                    News::Pressing
                }
            }
        };
        tokio::select! {
            biased;
            () = self.guest.room.ended.notified() => News::Due,
            called = timeout_at(end, called) => called.unwrap_or(News::Due),
        }
    }

    /// Claims. A store that is away for a moment ends no wait; one that stays away ends that of all.
    async fn look(&self) -> Result<Admission> {
        let give_up = self.until.min(Instant::now() + AWAY_MAX);
        let mut pause = LOOK_MIN;
        loop {
            match self.ledger.claim(self.task, self.policy).await {
                // The store is there, and somebody's transaction holds it: that may take as long as the wait.
                Err(error) if error.kind() == ErrorKind::Locked && Instant::now() < self.until => {
                    sleep_until(self.until.min(Instant::now() + LOOK_MAX)).await;
                }
                Err(error) if error.kind().retry() == Retry::Later && Instant::now() < give_up => {
                    sleep_until(give_up.min(Instant::now() + pause)).await;
                    pause = (pause * 2).min(LOOK_MAX);
                }
                Err(error) => {
                    self.guest.open_doors();
                    return Err(error);
                }
                Ok(admission) => return Ok(admission),
            }
        }
    }
}

/// Whether a look shows what was seen before, apart from heartbeats.
fn is_same(found: &Record, seen: &Record) -> bool {
    (found.state, found.claim) == (seen.state, seen.claim)
}

fn deferred(admission: &Admission) -> Option<&Seen> {
    match admission {
        Admission::Busy(seen) | Admission::Waiting(seen) => Some(seen),
        Admission::Run(_)
        | Admission::Replay(_)
        | Admission::Dead(_)
        | Admission::Parked(_)
        | Admission::Mismatch { .. } => None,
    }
}

/// How the task ended, if it did.
fn ended_as(admission: &Admission) -> Option<&Seen> {
    match admission {
        Admission::Replay(seen) | Admission::Dead(seen) | Admission::Parked(seen) => Some(seen),
        Admission::Run(_) | Admission::Busy(_) | Admission::Waiting(_) | Admission::Mismatch { .. } => None,
    }
}

/// What a claim of the same task would be answered right after another saw how it ended.
fn answer_of(ended: &Seen, task: &Task) -> Option<Admission> {
    if ended.found.record.fingerprint != task.fingerprint {
        return None;
    }
    let seen = ended.clone();
    match seen.found.record.state {
        State::Done => Some(Admission::Replay(seen)),
        State::Dead => Some(Admission::Dead(seen)),
        State::Parked => Some(Admission::Parked(seen)),
        State::Running | State::Waiting => None,
    }
}

#[cfg(test)]
mod tests {
    use taskonce_core::key::Handler;

    use super::*;

    fn place() -> Place {
        (7, Handler::new("worker", "1").unwrap().key("forked").unwrap())
    }

    #[test]
    fn a_forked_child_enters_no_room_of_its_parent_and_needs_no_lock_of_it() {
        let parent = Rooms::new(0);
        let guest = parent.enter(place());
        let turn = guest.room.turn.try_acquire().unwrap();
        // As the fork finds it: somebody watches, and a third thread holds the lock.
        let held = parent.lock();
        let child = parent.here();
        assert_eq!(child.process, std::process::id());
        let own = child.enter(place());
        assert!(own.room.turn.try_acquire().is_ok(), "nobody watches in the child");
        drop(own);
        assert!(child.lock().is_empty());
        // The child drops what it has a copy of, such as with its parent's runtime.
        drop(turn);
        drop(guest);
        assert_eq!(held.len(), 1);
    }
}
