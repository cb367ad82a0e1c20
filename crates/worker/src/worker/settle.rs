//! What becomes of a delivery, told to its source until it is known to be so.

use std::time::Duration;

use taskonce_core::{Error, Retry};

use super::Shared;
use crate::events::Event;
use crate::heartbeat::{AGAIN_MAX, AGAIN_MIN};
use crate::source::{Death, Receipt, Settled};

/// What becomes of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its task is done.
    Acknowledge,
    /// It comes again after so long.
    Defer(Duration),
    /// No delivery brings its task further.
    Die(Death),
}

/// Whether a source knows of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It does, or the delivery is another's by now.
    Yes,
    /// Nobody knows: the delivery comes again if it does not, and its record answers it.
    Unknown,
}

/// Tells the source, again and again for a visibility timeout where the outcome is not known. A receipt that is gone was
/// settled by an earlier sending, or holds nothing any more.
pub(super) async fn settle(shared: &Shared, source: usize, receipt: &Receipt, verdict: &Verdict) -> Told {
    let until = shared.now() + shared.sources[source].describe().visibility;
    let mut delay = AGAIN_MIN;
    let mut is_told = false;
    loop {
        match once(shared, source, receipt, verdict).await {
            Ok(Settled::Done | Settled::Gone) => return Told::Yes,
            Err(error) if error.kind().retry() == Retry::Later && shared.now() < until => {
                // Once for each delivery: an outage is no flood of lines.
                if is_told {
                    tracing::debug!(%error, "a delivery could not be settled, trying again");
                } else {
                    tracing::warn!(%error, "a delivery could not be settled, trying again");
                }
                is_told = true;
                // sleeps: before the settlement is sent again
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(AGAIN_MAX);
            }
            Err(error) => {
                let event = Event::NotSettled { error: error.to_string() };
                shared.counts.tell(&event, &shared.sources[source].describe().name);
                return Told::Unknown;
            }
        }
    }
}

async fn once(shared: &Shared, source: usize, receipt: &Receipt, verdict: &Verdict) -> Result<Settled, Error> {
    let source = &shared.sources[source];
    match verdict {
        Verdict::Acknowledge => source.acknowledge(receipt).await,
        Verdict::Defer(delay) => source.defer(receipt, *delay).await,
        Verdict::Die(death) => source.dead_letter(receipt, death).await,
    }
}
