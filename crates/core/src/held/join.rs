//! A held claim whose end a transaction of the caller's writes: heartbeats stand back, and what became of the transaction
//! is found out.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::{ADOPT_MAX, Held, Inner, Phase, Written, is_end, stamp};
use crate::decide;
use crate::error::{Error, ErrorKind, Result};
use crate::host::Host;
use crate::record::{DropReason, Found, Output, Record, State};
use crate::store::Store;

/// What became of a caller's transaction that was to write the end of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It committed: the end is stored together with the effect.
    Committed(Arc<Record>),
    /// It did not, and never will: the claim holds, and its lease has begun again.
    RolledBack,
    /// Another took over, or the record is gone. Holds what is there now.
    Lost(Option<Found>),
}

impl Held {
    /// Lets a transaction of the caller's hold the record in the place of heartbeats: stops them, and waits until those
    /// under way are answered. Says whether the claim is still there to be joined; the transaction finds out by locking
    /// the record.
    pub async fn join(&self) -> bool {
        {
            let mut inner = self.lock();
            match inner.phase {
                Phase::Claimed | Phase::Entered | Phase::Joined => inner.phase = Phase::Joined,
                Phase::Settling | Phase::Settled | Phase::Lost => return false,
            }
        }
        poll_fn(|context| {
            let mut inner = self.lock();
            if inner.renewals == 0 {
                return Poll::Ready(inner.phase == Phase::Joined);
            }
            if !inner.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                inner.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// The caller's transaction is over and has written no end: heartbeats keep the claim again. Does nothing where it may have
    /// written one; [`resolve`](Held::resolve) finds that out.
    pub fn part(&self) {
        let mut inner = self.lock();
        if inner.joined.is_none() {
            leave(&mut inner);
        }
    }

    /// The end that the caller's transaction is to write in the place of `found`, the record that it has locked.
    ///
    /// # Errors
    /// [`ErrorKind::BadOutput`] for an output that was not encoded, or that is larger than the policy allows;
    /// [`ErrorKind::ClaimLost`] where `found` is not this claim's running record; [`ErrorKind::WrongState`] where the claim
    /// was not joined, or given up meanwhile: in each case the transaction has to be rolled back.
    pub fn join_end(&self, host: &dyn Host, found: &Record, output: Output) -> Result<Arc<Record>> {
        let refused = |what: String| {
            Error::new(ErrorKind::BadOutput, what)
                .about(format!("task `{}`", self.key))
                .with_hint("return less, or raise `output_max`; the transaction is to be rolled back")
        };
        match &output {
            Output::Kept { bytes, .. } if self.policy.output_max > 0 && bytes.len() > self.policy.output_max => {
                let most = self.policy.output_max;
                return Err(refused(format!("the output has {} bytes, `output_max` allows {most}", bytes.len())));
            }
            Output::Dropped(DropReason::NotEncodable) => return Err(refused("the output cannot be encoded".into())),
            Output::Kept { .. } | Output::Nothing | Output::Dropped(_) => {}
        }
        self.check_found(Some(found))?;
        let ran_for = host.uptime().saturating_sub(self.started);
        let end = Arc::new(decide::complete(found, output, &self.policy, ran_for, stamp(host)));
        let mut inner = self.lock();
        match inner.phase {
            Phase::Joined => inner.joined = Some(Arc::clone(&end)),
            Phase::Claimed | Phase::Entered => return Err(self.not_joined()),
            // Another end was decided first, and only that one is ever written.
            Phase::Settling | Phase::Settled | Phase::Lost => return Err(self.over()),
        }
        Ok(end)
    }

    /// Whether what the caller's transaction found and locked is the running record of this claim. The token may have
    /// moved since this process saw it, by a heartbeat whose answer was lost.
    ///
    /// # Errors
    /// [`ErrorKind::ClaimLost`] where it is not.
    pub fn check_found(&self, found: Option<&Record>) -> Result<()> {
        let what = match found {
            Some(record) if record.state == State::Running && record.claim == self.claim => return Ok(()),
            Some(record) if record.state == State::Running => "another claim has taken the task over".to_owned(),
            Some(record) => format!("the claim is lost: the task is {}", record.state.name()),
            None => "the claim is lost: the record is gone".to_owned(),
        };
        Err(Error::new(ErrorKind::ClaimLost, what).about(format!("task `{}`", self.key)))
    }

    /// Takes over what the caller's transaction found and locked, as what this process holds.
    ///
    /// # Errors
    /// As [`check_found`](Held::check_found).
    pub fn join_found(&self, found: &Found) -> Result<()> {
        self.check_found(Some(&found.record))?;
        // Nothing of this process's is under way, and nobody else can write: it is the latest there is.
        self.lock().record = Arc::clone(&found.record);
        Ok(())
    }

    fn not_joined(&self) -> Error {
        Error::new(ErrorKind::WrongState, "the record was not locked for this claim")
            .about(format!("task `{}`", self.key))
            .with_hint("lock it first in the transaction, before any statement of your own")
    }

    /// Whether what is there is this claim's completion, written by another's hand: by plain SQL, in a program that was told
    /// the claim. Then the claim is settled.
    pub fn completed_elsewhere(&self, found: &Found) -> bool {
        let mut inner = self.lock();
        let record = &found.record;
        let is_mine = (record.state, record.claim, record.fence) == (State::Done, self.claim, inner.record.fence);
        if is_mine {
            self.enter_phase(&mut inner, Phase::Settled);
        }
        is_mine
    }

    /// The caller's transaction has committed: the claim is settled, with the end of [`join_end`](Held::join_end).
    /// Nothing where none was written.
    pub fn join_committed(&self) -> Option<Arc<Record>> {
        let mut inner = self.lock();
        let end = inner.joined.clone()?;
        self.enter_phase(&mut inner, Phase::Settled);
        Some(end)
    }

    /// Finds out what became of the caller's transaction, by a write that waits for it to end. Where it was rolled back,
    /// the claim goes on.
    ///
    /// # Errors
    /// The store's, [`ErrorKind::Locked`] while the transaction is still open: ask again.
    pub async fn resolve(&self, store: &dyn Store, host: &dyn Host) -> Result<Joined> {
        for _ in 0..ADOPT_MAX {
            let (before, end) = {
                let inner = self.lock();
                (Arc::clone(&inner.record), inner.joined.clone())
            };
            match self.write(store, host, &before, &before).await? {
                Written::Stored(_) => {
                    leave(&mut self.lock());
                    return Ok(Joined::RolledBack);
                }
                Written::Again => {}
                Written::Refused(Some(found)) if end.as_ref().is_some_and(|end| is_end(&found.record, end)) => {
                    self.enter_phase(&mut self.lock(), Phase::Settled);
                    return Ok(Joined::Committed(found.record));
                }
                Written::Refused(found) => {
                    self.lose();
                    return Ok(Joined::Lost(found));
                }
            }
        }
        Err(self.unsteady())
    }
}

/// The caller's transaction is no more: heartbeats keep the claim again.
fn leave(inner: &mut Inner) {
    inner.joined = None;
    if inner.phase == Phase::Joined {
        inner.phase = if inner.entered { Phase::Entered } else { Phase::Claimed };
    }
}
