//! The reference source: a queue in this process's memory, with a clock that is given. Nothing survives the process.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::host::Host as _;
use taskonce_core::record::WallTime;
use taskonce_core::store::{Cursor, Finding, Level, Memory};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{
    DELAY_MAX, DEPTHS_MAX, DeadFilter, DeadLetter, DeadLine, DeadPage, Death, Delivery, Depth, Description, Entrance,
    Envelope, Left, RECEIVE_MAX, Receipt, Sent, Settled, Source, WAIT_MAX, Want, examine_depth,
};
use crate::clock::SystemHost;

/// The largest payload, in bytes.
const PAYLOAD_MAX: usize = 64 * 1024 * 1024;
/// How often a receive that waits looks at the clock, which may be moved by hand.
const LOOK: Duration = Duration::from_millis(20);

/// A queue in this process's memory. Clones are one handle of it.
#[derive(Clone)]
pub struct MemorySource {
    queue: Arc<Queue>,
    is_closed: Arc<AtomicBool>,
}

struct Queue {
    description: Description,
    /// Coordinates begin so: another queue of the same name, in another process, has others.
    life: u128,
    clock: Box<dyn Fn() -> Duration + Send + Sync>,
    state: Mutex<State>,
    /// Wakes who waits: something may have become deliverable, or a handle was closed.
    changed: Notify,
}

#[derive(Default)]
struct State {
    rows: BTreeMap<u64, Row>,
    ids: u64,
    receipts: u64,
    /// Moves with each receive, so that handlers are served in turn.
    turn: usize,
}

struct Row {
    envelope: Envelope,
    place: Place,
    due_at: Duration,
    number: u32,
    receipt: Option<u64>,
    entrance: Option<String>,
    redriven_at: Option<WallTime>,
}

enum Place {
    /// Deliverable from `due_at` on.
    Waiting,
    /// Handed out until `due_at`.
    Held,
    /// Dead since `due_at`.
    Dead(Death),
}

impl MemorySource {
    /// An empty queue that holds a delivery for `visibility`, and judges that by `clock`, a monotonic one.
    pub fn new(name: &str, visibility: Duration, clock: impl Fn() -> Duration + Send + Sync + 'static) -> MemorySource {
        let description = Description {
            name: name.into(),
            visibility,
            payload_max: PAYLOAD_MAX,
            delay_step: LOOK,
            wake_max: LOOK,
            memory: Memory::MayForget,
        };
        let (state, changed) = (Mutex::default(), Notify::new());
        let queue = Queue { description, life: SystemHost::new().random(), clock: Box::new(clock), state, changed };
        MemorySource { queue: Arc::new(queue), is_closed: Arc::default() }
    }

    /// Another handle of the same queue, closed by itself only.
    #[must_use]
    pub fn beside(&self) -> MemorySource {
        MemorySource { queue: Arc::clone(&self.queue), is_closed: Arc::default() }
    }

    /// How many deliveries and dead letters it holds.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.lock().rows.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.queue.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        (self.queue.clock)()
    }

    fn open(&self) -> Result<MutexGuard<'_, State>> {
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "this handle was closed").about(&*self.queue.description.name));
        }
        Ok(self.lock())
    }

    /// Hands out what can be handed out now.
    fn take(&self, wants: &[Want], total_max: usize) -> Result<Vec<Delivery>> {
        let now = self.now();
        let mut state = self.open()?;
        let left: HashMap<&str, usize> = wants.iter().map(|want| (&*want.handler, want.max)).collect();
        let mut ready: BTreeMap<&str, Vec<(&u64, &Row)>> = BTreeMap::new();
        for (id, row) in &state.rows {
            let is_wanted = left.get(row.envelope.handler.as_str()).is_some_and(|max| *max > 0);
            if is_wanted && !row.is_dead() && row.due_at <= now {
                ready.entry(&row.envelope.handler).or_default().push((id, row));
            }
        }
        for (handler, rows) in &mut ready {
            rows.sort_by_key(|(id, row)| (std::cmp::Reverse(row.envelope.priority), **id));
            rows.truncate(left[*handler]);
        }
        let total = ready.values().map(Vec::len).sum::<usize>().min(total_max.min(RECEIVE_MAX));
        let (count, turn) = (ready.len().max(1), state.turn);
        let lists: Vec<Vec<u64>> =
            ready.into_values().map(|rows| rows.into_iter().map(|(id, _)| *id).collect()).collect();
        // One of each handler in turn, beginning with another at each receive. Each round takes one or ends.
        let ids: Vec<u64> = (0..RECEIVE_MAX)
            .flat_map(|round| (0..count).map(move |at| (round, (at + turn) % count)))
            .filter_map(|(round, at)| lists.get(at)?.get(round).copied())
            .take(total)
            .collect();
        state.turn = state.turn.wrapping_add(1);
        Ok(ids.into_iter().map(|id| self.hand_out(&mut state, id, now)).collect())
    }

    fn hand_out(&self, state: &mut State, id: u64, now: Duration) -> Delivery {
        state.receipts += 1;
        let receipt = state.receipts;
        let row = state.rows.get_mut(&id).expect("the row was found under the same lock");
        row.place = Place::Held;
        row.due_at = now + self.queue.description.visibility;
        row.number = row.number.saturating_add(1);
        row.receipt = Some(receipt);
        Delivery {
            source: Arc::clone(&self.queue.description.name),
            envelope: row.envelope.clone(),
            number: row.number,
            coordinates: self.coordinates(id),
            redriven_at: row.redriven_at,
            receipt: Receipt(format!("{id}-{receipt}").into()),
        }
    }

    fn coordinates(&self, id: u64) -> Arc<str> {
        format!("{:032x}-{id}", self.queue.life).into()
    }

    /// Changes the row that a receipt holds.
    fn settle(&self, receipt: &Receipt, change: impl FnOnce(&mut State, u64, Duration)) -> Result<Settled> {
        let now = self.now();
        let mut state = self.open()?;
        let named = receipt.0.split_once('-').and_then(|(id, number)| Some((id.parse().ok()?, number.parse().ok()?)));
        let Some((id, number)) = named else { return Ok(Settled::Gone) };
        if state.rows.get(&id).is_none_or(|row| row.receipt != Some(number)) {
            return Ok(Settled::Gone);
        }
        change(&mut state, id, now);
        drop(state);
        self.queue.changed.notify_waiters();
        Ok(Settled::Done)
    }

    fn wait(&self, id: u64, state: &mut State, due_at: Duration) {
        if let Some(row) = state.rows.get_mut(&id) {
            (row.place, row.due_at, row.receipt) = (Place::Waiting, due_at, None);
        }
    }
}

impl State {
    /// What is queued of a handler's key that may be queued once.
    fn queued(&self, handler: &str, key: &str) -> Option<u64> {
        let is_it =
            |row: &Row| row.entrance.as_deref() == Some(key) && row.envelope.handler == handler && !row.is_dead();
        self.rows.iter().find(|(_, row)| is_it(row)).map(|(id, _)| *id)
    }
}

impl Row {
    fn is_dead(&self) -> bool {
        match self.place {
            Place::Dead(_) => true,
            Place::Waiting | Place::Held => false,
        }
    }

    fn death(&self) -> Option<&Death> {
        match &self.place {
            Place::Dead(death) => Some(death),
            Place::Waiting | Place::Held => None,
        }
    }
}

fn dead_id(state: &State, id: &str) -> Option<u64> {
    state.rows.iter().find(|(_, row)| row.death().is_some_and(|death| death.id == id)).map(|(id, _)| *id)
}

#[async_trait]
impl Source for MemorySource {
    fn describe(&self) -> &Description {
        &self.queue.description
    }

    async fn send(&self, envelope: &Envelope, delay: Duration, entrance: Entrance) -> Result<Sent> {
        envelope.check(PAYLOAD_MAX, entrance)?;
        let now = self.now();
        let mut state = self.open()?;
        let entrance = match entrance {
            Entrance::Open => None,
            Entrance::OncePerKey => envelope.key.clone(),
        };
        if let Some(id) = entrance.as_ref().and_then(|key| state.queued(&envelope.handler, key)) {
            return Ok(Sent::AlreadyQueued(self.coordinates(id)));
        }
        state.ids += 1;
        let id = state.ids;
        let (envelope, due_at) = (envelope.clone(), now + delay.min(DELAY_MAX));
        let row =
            Row { envelope, place: Place::Waiting, due_at, number: 0, receipt: None, entrance, redriven_at: None };
        state.rows.insert(id, row);
        drop(state);
        self.queue.changed.notify_waiters();
        Ok(Sent::Accepted(self.coordinates(id)))
    }

    async fn receive(&self, wants: &[Want], total_max: usize, wait: Duration) -> Result<Vec<Delivery>> {
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        // Each round waits for a change, the clock or the deadline, and so the loop ends.
        loop {
            let changed = self.queue.changed.notified();
            let deliveries = self.take(wants, total_max)?;
            if !deliveries.is_empty() || Instant::now() >= deadline {
                return Ok(deliveries);
            }
            let look = deadline.min(Instant::now() + LOOK);
            let _ = tokio::time::timeout_at(look, changed).await;
        }
    }

    async fn acknowledge(&self, receipt: &Receipt) -> Result<Settled> {
        self.settle(receipt, |state, id, _| drop(state.rows.remove(&id)))
    }

    async fn defer(&self, receipt: &Receipt, delay: Duration) -> Result<Settled> {
        self.settle(receipt, |state, id, now| self.wait(id, state, now + delay.min(DELAY_MAX)))
    }

    async fn extend(&self, receipt: &Receipt, visibility: Duration) -> Result<Settled> {
        self.settle(receipt, |state, id, now| {
            if let Some(row) = state.rows.get_mut(&id) {
                (row.place, row.due_at) = (Place::Held, now + visibility.min(DELAY_MAX));
            }
        })
    }

    async fn dead_letter(&self, receipt: &Receipt, death: &Death) -> Result<Settled> {
        death.check()?;
        self.settle(receipt, |state, id, now| {
            if dead_id(state, &death.id).is_some() {
                state.rows.remove(&id);
            } else if let Some(row) = state.rows.get_mut(&id) {
                let death = Death { message: death.message_cut().to_owned(), ..death.clone() };
                (row.place, row.due_at, row.receipt, row.entrance) = (Place::Dead(death), now, None, None);
            }
        })
    }

    async fn dead_letters(&self, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage> {
        let now = self.now();
        let after = cursor.map(|cursor| cursor.0.parse::<u64>().map_err(|_| cursor.refused())).transpose()?;
        let state = self.open()?;
        let mut matching = state.rows.range(after.map_or(0, |after| after + 1)..).filter_map(|(id, row)| {
            let death = row.death()?;
            let wanted = filter.handler.as_ref().is_none_or(|handler| *handler == row.envelope.handler)
                && filter.reason.as_ref().is_none_or(|reason| *reason == death.reason);
            wanted.then(|| {
                let line = DeadLine {
                    death: death.clone(),
                    age: now.saturating_sub(row.due_at),
                    handler: row.envelope.handler.clone(),
                    key: row.envelope.key.clone(),
                    number: row.number,
                    payload_len: row.envelope.payload.len(),
                };
                (*id, line)
            })
        });
        let page: Vec<_> = matching.by_ref().take(filter.page()).collect();
        let next = matching.next().and_then(|_| page.last()).map(|(id, _)| Cursor(id.to_string()));
        Ok(DeadPage { lines: page.into_iter().map(|(_, line)| line).collect(), next })
    }

    async fn dead_one(&self, id: &str) -> Result<Option<DeadLetter>> {
        let now = self.now();
        let state = self.open()?;
        Ok(dead_id(&state, id).and_then(|number| {
            let row = state.rows.get(&number)?;
            Some(DeadLetter {
                death: row.death()?.clone(),
                age: now.saturating_sub(row.due_at),
                envelope: row.envelope.clone(),
                number: row.number,
                coordinates: self.coordinates(number),
                redriven_at: row.redriven_at,
            })
        }))
    }

    async fn redrive(&self, id: &str) -> Result<Left> {
        let now = self.now();
        let mut state = self.open()?;
        let Some(number) = dead_id(&state, id) else { return Ok(Left::NotThere) };
        self.wait(number, &mut state, now);
        let entrance = state.rows.get(&number).and_then(|row| {
            let key = row.envelope.key.clone()?;
            state.queued(&row.envelope.handler, &key).is_none().then_some(key)
        });
        if let Some(row) = state.rows.get_mut(&number) {
            (row.number, row.redriven_at, row.entrance) = (0, Some(SystemHost::new().wall_time()), entrance);
        }
        drop(state);
        self.queue.changed.notify_waiters();
        Ok(Left::Done)
    }

    async fn drop_dead(&self, id: &str) -> Result<Left> {
        let mut state = self.open()?;
        let Some(number) = dead_id(&state, id) else { return Ok(Left::NotThere) };
        state.rows.remove(&number);
        Ok(Left::Done)
    }

    async fn depth(&self) -> Result<Vec<Depth>> {
        let now = self.now();
        let state = self.open()?;
        let mut depths: BTreeMap<&str, Depth> = BTreeMap::new();
        for row in state.rows.values() {
            let handler = row.envelope.handler.as_str();
            if depths.len() >= DEPTHS_MAX && !depths.contains_key(handler) {
                continue;
            }
            let depth = depths.entry(handler).or_insert_with(|| Depth { handler: handler.into(), ..Depth::default() });
            match &row.place {
                Place::Dead(_) => depth.dead += 1,
                Place::Waiting | Place::Held if row.due_at <= now => {
                    depth.ready += 1;
                    depth.oldest = depth.oldest.max(Some(now - row.due_at));
                }
                Place::Waiting => depth.deferred += 1,
                Place::Held => depth.in_flight += 1,
            }
        }
        Ok(depths.into_values().collect())
    }

    async fn examine(&self) -> Vec<Finding> {
        let depths = match self.depth().await {
            Ok(depths) => depths,
            Err(error) => {
                let (text, hint) = (error.to_string(), error.hint().to_owned());
                return vec![Finding { level: Level::Fault, subject: "source".into(), text, hint }];
            }
        };
        let durability = Finding {
            level: Level::Warning,
            subject: "durability".into(),
            text: "deliveries lie in this process's memory".into(),
            hint: "nothing survives the process; use SQLite for anything that must".into(),
        };
        vec![durability, examine_depth(&depths)]
    }

    async fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.queue.changed.notify_waiters();
    }
}

impl std::fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MemorySource").field(&self.queue.description.name).finish()
    }
}
