//! A node: one place to send to, and the connection there, made on first use and replaced when broken.
//!
//! The connection is shared by all calls of its runtime, whose requests travel together. It is replaced when it closes,
//! when nothing comes back on it for half of a call's time, and when an answer on it belongs to another request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use taskonce_core::{ErrorKind, Result};
use tokio::time::{Instant, timeout_at};

use crate::address::Address;
use crate::connection::{Link, Links, Question};
use crate::fault::Refusal;
use crate::pipe::{Limits, Trouble, too_late};
use crate::place::Place;
use crate::shared::{Attempt, Shared, outcome};
use crate::url::Settings;
use crate::wire::Reply;

/// The least time between the starts of two attempts to connect. There are none while there are no calls.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// For how long at most a server is silent before a call looks whether another has its place: a host that vanishes says
/// nothing.
const SILENCE_MAX: Duration = Duration::from_millis(500);

/// A place to send to.
pub(crate) struct Node {
    pub(crate) target: Target,
    link: Arc<Shared<Link>>,
    /// Whether a call was sent on to it since this was looked at last.
    used: AtomicBool,
}

/// Where the connection of a node goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// To this server.
    Server(Address),
    /// To the primary, wherever it is when the connection is made.
    Primary,
}

/// One sending of a request.
pub(crate) struct Sending {
    /// Whether the server is to answer for a slot that it is about to get.
    pub(crate) asking: bool,
    /// How long it waits for a connection; until the deadline if `None`.
    pub(crate) connect_wait: Option<Duration>,
    /// From here on it waits for answers only if the server has answered others; by the call's own time if `None`.
    pub(crate) patience: Option<Instant>,
    pub(crate) deadline: Instant,
}

/// Why a sending has no answers.
pub(crate) enum Failure {
    /// There was no connection to send it on.
    Unconnected(Refusal),
    /// The connection broke: sent again on another, it may be answered.
    Broken(Refusal),
    /// Nothing is to be sent again.
    Over(Refusal),
}

impl Failure {
    /// The same, of this node among several.
    pub(crate) fn of(self, node: &Node) -> Failure {
        let name = |refusal: Refusal| match &node.target {
            Target::Server(address) => refusal.of(address),
            Target::Primary => refusal,
        };
        match self {
            Failure::Unconnected(refusal) => Failure::Unconnected(name(refusal)),
            Failure::Broken(refusal) => Failure::Broken(name(refusal)),
            Failure::Over(refusal) => Failure::Over(name(refusal)),
        }
    }

    pub(crate) fn refusal(self) -> Refusal {
        match self {
            Failure::Unconnected(refusal) | Failure::Broken(refusal) | Failure::Over(refusal) => refusal,
        }
    }
}

impl Node {
    pub(crate) fn new(target: Target) -> Node {
        Node { target, link: Arc::default(), used: AtomicBool::new(false) }
    }

    /// Whether it is this server.
    pub(crate) fn is_at(&self, address: &Address) -> bool {
        matches!(&self.target, Target::Server(server) if server == address)
    }

    /// The server that it is connected to; where it would connect to if it is not.
    pub(crate) fn place(&self) -> Target {
        self.link.get().map_or_else(|| self.target.clone(), |link| Target::Server(link.address.clone()))
    }

    /// The server that it is connected to.
    pub(crate) fn connected_to(&self) -> Option<Address> {
        self.link.get().map(|link| link.address.clone())
    }

    /// Whether a call was sent on to it since this was asked last.
    pub(crate) fn was_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn mark_used(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Sends a request once. An error that the server answers is an answer; one that says that it is no primary ends the
    /// connection for all.
    pub(crate) async fn send<Q: Question>(
        &self,
        links: &Arc<Links>,
        sending: Sending,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
    ) -> Result<(Arc<Link>, Vec<Reply>), Failure> {
        let (link, made_now) = match self.now(links) {
            Ok(link) => (link, false),
            Err(attempt) => {
                let until =
                    sending.connect_wait.map_or(sending.deadline, |wait| sending.deadline.min(Instant::now() + wait));
                (Box::pin(self.wait(links, attempt, until)).await.map_err(Failure::Unconnected)?, true)
            }
        };
        let silence = silence(&links.settings);
        // The clock is read only when the call has not just begun.
        let patience = match sending.patience {
            Some(patience) => patience,
            None if made_now => halfway(sending.deadline),
            None => sending.deadline - (links.settings.timeout - silence),
        };
        let request = request(&link).map_err(|refusal| {
            if refusal.kind() == ErrorKind::Evicting {
                // A person may mend this meanwhile: the next call looks again.
                self.discard(&link);
            }
            Failure::Over(refusal)
        })?;
        let limits = Limits { patience, silence: silence / 2, deadline: sending.deadline };
        match link.send(request, sending.asking, limits).await {
            Ok(replies) => {
                if is_of_a_replica(&replies) {
                    // The primary is elsewhere.
                    self.discard(&link);
                }
                Ok((link, replies))
            }
            Err(Trouble::Slow(refusal)) => Err(Failure::Over(refusal)),
            Err(Trouble::Broken(refusal)) => {
                self.discard(&link);
                Err(Failure::Broken(refusal))
            }
        }
    }

    /// Drops the connection, so that the next call makes another.
    pub(crate) fn renew(&self) {
        self.link.drop_if(|_| true);
    }

    /// Drops the connection if this is so of its address and of the switch that made that the primary.
    pub(crate) fn leave_if(&self, is_so: impl FnOnce(&Address, u64) -> bool) {
        self.link.drop_if(|link| is_so(&link.address, link.epoch));
    }

    /// The connection, or else the attempt to make one.
    fn now(&self, links: &Arc<Links>) -> Result<Arc<Link>, Attempt<Link>> {
        let silence = silence(&links.settings);
        let most = match self.target {
            Target::Server(_) => CONNECT_PAUSE,
            // Several are asked, by every process. Of some attempts within a call's time one finds who has come back.
            Target::Primary => links.settings.timeout / 4,
        };
        self.link.now(
            |link| !link.is_silent(silence),
            CONNECT_PAUSE,
            most,
            || {
                let (links, target) = (Arc::clone(links), self.target.clone());
                async move {
                    timeout_at(links.deadline(), links.connect(&target)).await.unwrap_or_else(|_| Err(too_late()))
                }
            },
        )
    }

    /// The connection that comes of an attempt, or of a later one.
    async fn wait(&self, links: &Arc<Links>, mut attempt: Attempt<Link>, until: Instant) -> Result<Arc<Link>, Refusal> {
        loop {
            match outcome(attempt, until).await {
                // Its time had begun before ours. Each turn takes at least CONNECT_PAUSE, and all end in time.
                Err(refusal) if refusal.kind() == ErrorKind::TimedOut && Instant::now() < until => {}
                outcome => return outcome,
            }
            attempt = match self.now(links) {
                Ok(link) => return Ok(link),
                Err(attempt) => attempt,
            };
        }
    }

    fn discard(&self, broken: &Arc<Link>) {
        self.link.drop_if(|link| Arc::ptr_eq(link, broken));
    }
}

/// How long a server may be silent: where another may take its place, not for long.
fn silence(settings: &Settings) -> Duration {
    let half = settings.timeout / 2;
    match &settings.place {
        Place::Servers(hosts) if hosts.len() == 1 => half,
        Place::Servers(_) | Place::Sentinel { .. } | Place::Cluster(_) => half.min(SILENCE_MAX),
    }
}

/// The middle of the time that is left.
pub(crate) fn halfway(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + deadline.saturating_duration_since(now) / 2
}

/// Whether the answers say that the server is no primary. One that takes no writes for another cause still is.
pub(crate) fn is_of_a_replica(replies: &[Reply]) -> bool {
    replies.iter().any(|reply| matches!(reply, Reply::Error(text) if Refusal::is_of_a_replica(text)))
}
