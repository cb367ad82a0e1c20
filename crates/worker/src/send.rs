//! Sends tasks: `NewTask`, which has its idempotency key from the moment it is made, and `Sender`, which asks at the entrance
//! whether it is queued or done already. What queues it is the port, in `source`.

mod tick;

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::host::Host;
use taskonce_core::json::{Fields, Input};
use taskonce_core::key::{Fingerprint, Handler, Key, Name, Task};
use taskonce_core::ledger::Ledger;
use taskonce_core::record::{Failure, Found, State, WallTime};

use crate::clock::SystemHost;
use crate::outcome::JSON;
use crate::routes::is_json;
use crate::source::{
    DELAY_MAX, DUE_HEADER, Entrance, Envelope, FINGERPRINT_HEADER, Priority, Sent, Source, TRACE_HEADER,
};

pub use tick::{tick_before, tick_id};

/// Where the id of a task comes from.
#[derive(Clone, Copy, Debug)]
pub enum Id<'a> {
    /// The caller's own. The fingerprint is that of the whole payload: another payload under it is a mismatch.
    Given(&'a str),
    /// From these fields of the payload. What else changes in it, such as the time of sending, makes no other task.
    Derived(&'a Fields),
    /// One tick of a schedule: whoever sends the same tick sends the same task.
    Tick {
        /// The schedule's name.
        schedule: &'a Name,
        /// When it is due; see [`tick_before`].
        tick: WallTime,
    },
}

/// When a task may be delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Due {
    /// At once.
    #[default]
    Now,
    /// So long after it is sent, at most [`DELAY_MAX`].
    After(Duration),
    /// At this time of day, by this process's clock; at once if that has passed.
    At(WallTime),
}

/// A task to be sent. Its key and fingerprint are made here, once, so that every copy that is sent of it is the same task.
///
/// ```
/// # use std::time::Duration;
/// use taskonce_core::json::Fields;
/// use taskonce_core::key::Handler;
/// use taskonce_worker::send::{Due, Id, NewTask};
///
/// let charge = Handler::within("shop", "charge", "2")?;
/// let given = NewTask::json(&charge, Id::Given("invoice-42"), r#"{"amount": 12}"#)?;
/// assert_eq!(given.key().as_str(), "shop/charge@2/invoice-42");
///
/// let fields = Fields::new(["/invoice"])?;
/// let derived = |sent: u32| {
///     NewTask::json(&charge, Id::Derived(&fields), format!(r#"{{"invoice": 42, "sent": {sent}}}"#))
/// };
/// assert_eq!(derived(1)?.key(), derived(2)?.key());
/// let later = derived(3)?.due(Due::After(Duration::from_secs(300)));
/// # let _ = later;
/// # Ok::<(), taskonce_core::Error>(())
/// ```
#[derive(Clone)]
pub struct NewTask {
    task: Task,
    /// It says what a worker could not tell by the payload alone.
    carries_fingerprint: bool,
    handler: String,
    payload: Vec<u8>,
    content_type: String,
    headers: Vec<(String, String)>,
    priority: Priority,
    due: Due,
}

impl NewTask {
    /// A task whose payload is one JSON document, sent byte for byte.
    ///
    /// # Errors
    /// What [`Input::from_json`] refuses; [`ErrorKind::BadId`]; where fields make the id, what [`Handler::task_from`] refuses.
    pub fn json(handler: &Handler, id: Id<'_>, payload: impl Into<Vec<u8>>) -> Result<NewTask> {
        let payload = payload.into();
        let input = Input::from_json(&payload)?;
        let (task, carries_fingerprint) = named(handler, id, &input)?;
        drop(input);
        Ok(NewTask::of(handler, task, carries_fingerprint, payload, JSON))
    }

    /// A task whose payload is the JSON form of a value, as `serde_json` writes it.
    ///
    /// # Errors
    /// What [`Input::from_value`] refuses; else those of [`NewTask::json`].
    pub fn value<T: Serialize + ?Sized>(handler: &Handler, id: Id<'_>, value: &T) -> Result<NewTask> {
        let (task, carries_fingerprint) = named(handler, id, &Input::from_value(value)?)?;
        let payload = serde_json::to_vec(value).map_err(|error| {
            Error::new(ErrorKind::NoJsonForm, "the payload cannot be written as JSON").with_source(error)
        })?;
        Ok(NewTask::of(handler, task, carries_fingerprint, payload, JSON))
    }

    /// A task whose payload is no JSON: its fingerprint is of its bytes, and its id has to be given.
    ///
    /// # Errors
    /// [`ErrorKind::BadId`]; [`ErrorKind::BadEnvelope`] where the content type says that it is JSON after all.
    pub fn bytes(handler: &Handler, id: &str, content_type: &str, payload: impl Into<Vec<u8>>) -> Result<NewTask> {
        if is_json(Some(content_type)) {
            let text = format!("the content type `{}` says that the payload is JSON", content_type.escape_debug());
            return Err(Error::new(ErrorKind::BadEnvelope, text)
                .about(format!("task `{}`", handler.key(id)?))
                .with_hint("send it as JSON, or name what it is, such as `application/octet-stream`"));
        }
        let payload = payload.into();
        let task = Task { key: handler.key(id)?, fingerprint: Fingerprint::of_bytes(&payload) };
        Ok(NewTask::of(handler, task, false, payload, content_type))
    }

    fn of(handler: &Handler, task: Task, carries_fingerprint: bool, payload: Vec<u8>, content_type: &str) -> NewTask {
        NewTask {
            task,
            carries_fingerprint,
            handler: format!("{}@{}", handler.handler(), handler.version()),
            payload,
            content_type: content_type.to_owned(),
            headers: Vec::new(),
            priority: Priority::default(),
            due: Due::default(),
        }
    }

    /// When it may be delivered. Default: at once.
    #[must_use]
    pub fn due(self, due: Due) -> NewTask {
        NewTask { due, ..self }
    }

    /// How soon among those of its handler. Default: normal.
    #[must_use]
    pub fn priority(self, priority: Priority) -> NewTask {
        NewTask { priority, ..self }
    }

    /// A further header. `traceparent` is one: without it the task that is running here hands its own on.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> NewTask {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Its key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.task.key
    }

    /// Its key and fingerprint.
    #[must_use]
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// How long after `now` it is due.
    fn delay(&self, now: WallTime) -> Duration {
        match self.due {
            Due::Now => Duration::ZERO,
            Due::After(delay) => delay,
            Due::At(at) => Duration::from_millis(at.0.saturating_sub(now.0)),
        }
    }

    /// What is sent of it at this time of day.
    fn envelope(&self, now: WallTime, delay: Duration) -> Envelope {
        let mut headers = self.headers.clone();
        let has =
            |headers: &[(String, String)], name: &str| headers.iter().any(|(held, _)| held.eq_ignore_ascii_case(name));
        if self.carries_fingerprint {
            headers.push((FINGERPRINT_HEADER.to_owned(), self.task.fingerprint.to_string()));
        }
        if !delay.is_zero() {
            let due_at = now.0.saturating_add(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
            headers.push((DUE_HEADER.to_owned(), due_at.to_string()));
        }
        if let Some(parent) = crate::span::current()
            && !has(&headers, TRACE_HEADER)
        {
            headers.push((TRACE_HEADER.to_owned(), parent));
        }
        Envelope {
            handler: self.handler.clone(),
            key: Some(self.task.key.as_str().to_owned()),
            payload: self.payload.clone(),
            content_type: Some(self.content_type.clone()),
            headers,
            sent_at: Some(now),
            priority: self.priority,
        }
    }
}

/// Payloads are nobody's business in logs: only their length is shown.
impl std::fmt::Debug for NewTask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewTask")
            .field("key", &self.task.key)
            .field("payload_len", &self.payload.len())
            .field("due", &self.due)
            .finish_non_exhaustive()
    }
}

/// The task, and whether its fingerprint has to be carried: a worker makes that of a given id from the whole payload.
fn named(handler: &Handler, id: Id<'_>, input: &Input<'_>) -> Result<(Task, bool)> {
    Ok(match id {
        Id::Given(id) => (handler.task(id, input)?, false),
        Id::Derived(fields) => (handler.task_from(input, fields)?, true),
        Id::Tick { schedule, tick } => (handler.task(&tick_id(schedule, tick), input)?, false),
    })
}

/// Sends tasks to a source.
///
/// ```
/// # use std::sync::Arc;
/// # use taskonce_core::key::Handler;
/// # use taskonce_core::ledger::Ledger;
/// # use taskonce_worker::send::{Entered, Id, NewTask, Sender};
/// # use taskonce_worker::source::Source;
/// # async fn example(queue: Arc<dyn Source>, ledger: Ledger) -> taskonce_core::Result<()> {
/// let sender = Sender::new(queue).once().asking(ledger);
/// let charge = Handler::within("shop", "charge", "2")?;
/// let task = NewTask::json(&charge, Id::Given("invoice-42"), r#"{"amount": 12}"#)?;
/// match sender.send(&task).await? {
///     Entered::Accepted { .. } => println!("queued"),
///     Entered::AlreadyQueued { .. } => println!("it is on its way"),
///     Entered::AlreadyDone { known, .. } => println!("done {:?} ago", known.age),
///     Entered::Ended { known, .. } => println!("{}: a person has to look", known.state),
///     Entered::Mismatch { .. } => println!("the id stands for another payload"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Sender {
    source: Arc<dyn Source>,
    ledger: Option<Ledger>,
    entrance: Entrance,
    host: Arc<dyn Host>,
}

impl Sender {
    /// A sender that queues whatever it is given: duplicates are told when they are delivered.
    #[must_use]
    pub fn new(source: Arc<dyn Source>) -> Sender {
        Sender { source, ledger: None, entrance: Entrance::Open, host: Arc::new(SystemHost::new()) }
    }

    /// The same, but a key that is queued already, by a sender like this one, is not queued again.
    #[must_use]
    pub fn once(self) -> Sender {
        Sender { entrance: Entrance::OncePerKey, ..self }
    }

    /// The same, but the ledger is asked first, one read a send: what is done, dead or parked there is not queued.
    #[must_use]
    pub fn asking(self, ledger: Ledger) -> Sender {
        Sender { host: Arc::clone(ledger.host()), ledger: Some(ledger), ..self }
    }

    /// The source.
    #[must_use]
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Sends a task. What is asked at the entrance spares work and tells the sender more; that a task takes effect once does not
    /// depend on it, since the ledger decides when it is delivered.
    ///
    /// # Errors
    /// [`ErrorKind::BadEnvelope`] for what breaks a limit; else the ledger's, and nothing was queued, or the source's. Where the
    /// outcome is unknown it can be sent again as it is.
    pub async fn send(&self, task: &NewTask) -> Result<Entered> {
        let now = self.host.wall_time();
        let delay = task.delay(now);
        if delay > DELAY_MAX {
            let (days, days_max) = (delay.as_secs() / 86_400, DELAY_MAX.as_secs() / 86_400);
            return Err(Error::new(
                ErrorKind::BadEnvelope,
                format!("it is due in {days} days; at most {days_max} are kept"),
            )
            .about(format!("task `{}`", task.key()))
            .with_hint("send it later, or let a task of a schedule send it"));
        }
        let found = match &self.ledger {
            Some(ledger) => ledger.show(task.key()).await?,
            None => None,
        };
        let key = task.key().clone();
        let known = found.as_ref().map(Known::of);
        if let (Some(found), Some(known)) = (&found, &known) {
            let (held, given) = (found.record.fingerprint, task.task.fingerprint);
            if held != given {
                return Ok(Entered::Mismatch { key, held, given, known: known.clone() });
            }
            match found.record.state {
                State::Done => return Ok(Entered::AlreadyDone { key, known: known.clone() }),
                State::Dead | State::Parked => return Ok(Entered::Ended { key, known: known.clone() }),
                // In work: its delivery may be on its way, and may be lost. The queue knows.
                State::Running | State::Waiting => {}
            }
        }
        Ok(match self.source.send(&task.envelope(now, delay), delay, self.entrance).await? {
            Sent::Accepted(coordinates) => Entered::Accepted { key, coordinates },
            Sent::AlreadyQueued(coordinates) => Entered::AlreadyQueued { key, coordinates, known },
        })
    }
}

/// What became of a task at the entrance. Each is an outcome; none is an error.
#[must_use = "only what was accepted was queued by this call"]
#[derive(Clone, Debug, PartialEq)]
pub enum Entered {
    /// It is queued, and has these coordinates.
    Accepted {
        /// Its key.
        key: Key,
        /// Names the delivery at its source.
        coordinates: Arc<str>,
    },
    /// It was queued already. Nothing was changed: neither its delay nor its priority.
    AlreadyQueued {
        /// Its key.
        key: Key,
        /// Of the delivery that there is.
        coordinates: Arc<str>,
        /// What the ledger knows of it, if it was asked and does: it runs, or waits for its next attempt.
        known: Option<Known>,
    },
    /// It took effect before: nothing was queued.
    AlreadyDone {
        /// Its key.
        key: Key,
        /// What the ledger knows of it.
        known: Known,
    },
    /// It is dead or parked: nothing was queued, since only a person's redrive brings it further.
    Ended {
        /// Its key.
        key: Key,
        /// What the ledger knows of it.
        known: Known,
    },
    /// The key stands for another payload: nothing was queued, and it would not be run.
    Mismatch {
        /// The key.
        key: Key,
        /// Of the payload that the key stands for.
        held: Fingerprint,
        /// Of the payload that was to be sent.
        given: Fingerprint,
        /// What the ledger knows of the other.
        known: Known,
    },
}

impl Entered {
    /// The word for it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Entered::Accepted { .. } => "accepted",
            Entered::AlreadyQueued { .. } => "already_queued",
            Entered::AlreadyDone { .. } => "already_done",
            Entered::Ended { known, .. } => known.state.name(),
            Entered::Mismatch { .. } => "mismatch",
        }
    }

    /// The task's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        match self {
            Entered::Accepted { key, .. }
            | Entered::AlreadyQueued { key, .. }
            | Entered::AlreadyDone { key, .. }
            | Entered::Ended { key, .. }
            | Entered::Mismatch { key, .. } => key,
        }
    }

    /// What the ledger knew of it.
    #[must_use]
    pub fn known(&self) -> Option<&Known> {
        match self {
            Entered::Accepted { .. } => None,
            Entered::AlreadyQueued { known, .. } => known.as_ref(),
            Entered::AlreadyDone { known, .. } | Entered::Ended { known, .. } | Entered::Mismatch { known, .. } => {
                Some(known)
            }
        }
    }
}

/// What the ledger knows of a task that is there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its state.
    pub state: State,
    /// The attempt that runs, or ran last.
    pub attempt: u32,
    /// Who runs it, or ran it last.
    pub owner: Arc<str>,
    /// How long it has been in its state.
    pub age: Duration,
    /// Its last failure.
    pub failure: Option<Failure>,
}

impl Known {
    fn of(found: &Found) -> Known {
        let record = &*found.record;
        Known {
            state: record.state,
            attempt: record.attempt,
            owner: Arc::clone(&record.owner),
            age: found.in_state_for(),
            failure: record.failure.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
