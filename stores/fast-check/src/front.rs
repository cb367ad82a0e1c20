//! Questions to the front: each with a deadline, none while the breaker is open, and none that can fail the caller.

use std::future::Future;
use std::sync::Arc;

use taskonce_core::key::Key;
use taskonce_core::record::{Age, Found, Record};
use taskonce_core::store::{Expected, Next, Swap};
use taskonce_core::{ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

use crate::breaker::{Change, Gate};
use crate::hint::Hint;
use crate::store::Inner;

/// What lies in the front under a key.
#[derive(Clone, Debug)]
pub(crate) enum There {
    /// Nobody knows: the front is away.
    Unknown,
    /// Nothing.
    Nothing,
    /// A hint.
    Hint(Laid),
    /// A hint whose life has passed, in a front whose keys do not expire by themselves. It counts as nothing.
    Old(Arc<Record>),
    /// Something that is no hint of this version, and is left alone.
    Other,
}

/// A hint where it lies.
#[derive(Clone, Debug)]
pub(crate) struct Laid {
    pub(crate) hint: Hint,
    /// The record under which it lies.
    pub(crate) record: Arc<Record>,
    /// How long it has lain there, by the front's clock.
    pub(crate) since: Age,
}

impl Laid {
    /// How old the record is that it tells of, by the front's clock.
    pub(crate) fn age(&self) -> Age {
        Age::from_millis(self.hint.age.millis.saturating_add(self.since.millis))
    }
}

/// What became of a write to the front.
pub(crate) enum Put {
    /// It lies there.
    Stored,
    /// Something else does.
    Conflict(There),
    /// Nobody knows.
    Unknown,
}

/// What the front said.
enum Said<T> {
    This(T),
    /// What lies there cannot be read.
    Unreadable(ErrorKind),
    /// Nothing, in time.
    Away,
}

impl Inner {
    /// What lies under a key.
    pub(crate) async fn look(self: &Arc<Inner>, key: &Key) -> There {
        match self.ask_front(key, self.front.load(key)).await {
            Said::This(found) => there(key, found),
            Said::Unreadable(_) => There::Other,
            Said::Away => There::Unknown,
        }
    }

    /// Puts a hint's record where this one lies, or nothing.
    pub(crate) async fn put(self: &Arc<Inner>, key: &Key, before: Option<&Record>, next: &Record) -> Put {
        let swap = self.front.swap(key, Expected::record(before), Next::Keep(next));
        match self.ask_front(key, swap).await {
            Said::This(Swap::Stored(_)) => Put::Stored,
            Said::This(Swap::Conflict(found)) => Put::Conflict(there(key, found)),
            Said::Unreadable(kind) => {
                if kind == ErrorKind::Corrupt {
                    // It is of no use to anybody, and the next hint finds a place.
                    let _gone = self.ask_front(key, self.front.discard(key)).await;
                }
                Put::Unknown
            }
            // No transaction of anybody's reaches a front's records.
            Said::This(Swap::Locked(_)) | Said::Away => Put::Unknown,
        }
    }

    async fn ask_front<T>(self: &Arc<Inner>, key: &Key, call: impl Future<Output = Result<T>>) -> Said<T> {
        let here = self.here();
        let gate = here.breaker().gate(Instant::now());
        match gate {
            Gate::Pass => {}
            Gate::Refuse | Gate::RefuseAndProbe => {
                self.tally.degraded.add();
                if gate == Gate::RefuseAndProbe {
                    self.probe(key);
                }
                return Said::Away;
            }
        }
        let (said, fault) = match timeout(self.options.front_timeout, call).await {
            Ok(Ok(answer)) => (Said::This(answer), None),
            Ok(Err(error)) if is_about_a_record(error.kind()) => (Said::Unreadable(error.kind()), None),
            // It answers reads all the same.
            Ok(Err(error)) if error.kind() == ErrorKind::Full => return Said::Away,
            Ok(Err(error)) => (Said::Away, Some(error.to_string())),
            Err(_elapsed) => (Said::Away, Some(format!("no answer within {:?}", self.options.front_timeout))),
        };
        if fault.is_some() {
            self.tally.degraded.add();
        }
        let change = here.breaker().ended(fault.is_none(), Instant::now());
        self.tell(change, fault.as_deref());
        said
    }

    /// Asks in the background whether the front is back, for the key that is wanted.
    fn probe(self: &Arc<Inner>, key: &Key) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (inner, key) = (Arc::clone(self), key.clone());
        runtime.spawn(async move {
            let answer = timeout(inner.options.front_timeout, inner.front.load(&key)).await;
            let succeeded = match &answer {
                Ok(Ok(_)) => true,
                Ok(Err(error)) => is_about_a_record(error.kind()),
                Err(_elapsed) => false,
            };
            let change = inner.here().breaker().probed(succeeded, Instant::now());
            inner.tell(change, None);
        });
    }

    fn tell(&self, change: Option<Change>, fault: Option<&str>) {
        match change {
            Some(Change::Opened) => {
                self.tally.openings.add();
                tracing::warn!(fault, "the front is away: tasks do without it, slower");
            }
            Some(Change::Closed) => tracing::info!("the front is back"),
            None => {}
        }
    }
}

/// Whether the front is there, and what lies in it cannot be read.
fn is_about_a_record(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::NewerFormat)
}

fn there(key: &Key, found: Option<Found>) -> There {
    let Some(found) = found else { return There::Nothing };
    match Hint::read(key, &found.record) {
        Some(hint) if !found.age.has_passed(found.record.retention) => {
            There::Hint(Laid { hint, record: found.record, since: found.age })
        }
        Some(_) => There::Old(found.record),
        None => There::Other,
    }
}
