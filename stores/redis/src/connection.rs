//! The store's connections: which server a request goes to, and what is done when it is not answered there.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::{Error, ErrorKind, Result};
use tokio::time::{Instant, sleep_until};

use crate::address::Address;
use crate::behind::Behind;
use crate::cluster::Cluster;
use crate::dial::Dial;
use crate::fault::Refusal;
use crate::node::{Failure, Node, Sending, Target, halfway, is_of_a_replica};
use crate::pipe::{Limits, Pipe, Trouble, Wire, Wrote, too_late};
use crate::place::Place;
use crate::primary::{Primary, Reached};
use crate::process::{Pid, Process};
use crate::script::Call;
use crate::server::Server;
use crate::shape::Shape;
use crate::url::Settings;
use crate::watch::Watches;
use crate::wire::{Commands, Digits, Reply};

/// How often one call sends its request to a server that has no other in its place: again only on a fresh connection,
/// and only what may be repeated.
const SENDS_MAX: u32 = 2;
/// How long a call waits before it looks for the primary again.
const PRIMARY_PAUSE: Duration = Duration::from_millis(20);
/// A call gives up this part of its time before the end, so that it has ended by then on a busy machine too.
const END_SHARE: u32 = 50;

/// The connections of a store.
pub(crate) struct Links {
    pub(crate) settings: Settings,
    dial: Dial,
    process: Process<Here>,
    pid: Pid,
}

/// What one runtime of one process has.
struct Here {
    reach: Reach,
    watches: Watches,
    behind: Arc<Behind>,
}

/// What it reaches.
enum Reach {
    /// One server, and no other.
    Server(Node),
    /// The one of several servers that is the primary, which may change.
    Primary(Arc<Primary>),
    /// The nodes of a Cluster.
    Cluster(Arc<Cluster>),
}

/// One connection.
pub(crate) struct Link {
    pub(crate) server: Server,
    pub(crate) address: Address,
    /// The number of the switch that made it the primary, where Sentinels count them.
    pub(crate) epoch: u64,
    pipe: Pipe,
}

/// Where a request goes.
#[derive(Clone, Copy)]
pub(crate) enum At<'a> {
    /// To the server that holds this key.
    Key(&'a [u8]),
    /// To one of the [`primaries`](Links::primaries), by its number.
    Primary(usize),
}

/// Something to send.
pub(crate) enum Request<'a> {
    /// The script, which answers with the call's id, alone or at the head of a list.
    Script(Call<'a>),
    /// A first claim where the server can do it natively: answers with what the key held, and its `PTTL`.
    Claim { key: &'a [u8], record: &'a [u8], life: u64 },
    /// Replaces what a key holds if it is byte for byte what is expected, natively.
    Replace { key: &'a [u8], there: &'a [u8], record: &'a [u8], life: u64 },
    /// What a key holds, and its `PTTL`.
    Load { key: &'a [u8] },
    /// Commands of any kind.
    Batch(&'a Commands),
}

impl Links {
    pub(crate) fn new(settings: Settings) -> Result<Links> {
        let dial = Dial::new(&settings).map_err(|refusal| refusal.about(format!("store `{}`", settings.label)))?;
        Ok(Links { settings, dial, process: Process::new(std::process::id()), pid: Pid::new() })
    }

    /// Names the store in an error.
    pub(crate) fn error(&self, refusal: Refusal) -> Error {
        refusal.about(format!("store `{}`", self.settings.label))
    }

    /// When a call that begins now must have ended.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.settings.timeout - self.settings.timeout / END_SHARE
    }

    /// Sends a request and returns its own answers: of a script one, of a batch one per command. An error that the
    /// server answers is an answer. What is sent must be repeatable: it is sent again if its first answer is lost, or if
    /// the key turns out to be elsewhere.
    pub(crate) async fn ask<'a>(
        self: &Arc<Links>,
        at: At<'_>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Request<'a>, Refusal>,
    ) -> Result<Vec<Reply>, Refusal> {
        match &self.here(self.pid.at(deadline - self.settings.timeout))?.reach {
            Reach::Server(node) => self.ask_server(node, deadline, request).await,
            Reach::Primary(primary) => Box::pin(self.ask_primary(primary, deadline, request)).await,
            Reach::Cluster(cluster) => Box::pin(cluster.ask(self, at, deadline, request)).await,
        }
    }

    /// How many primaries share the keys.
    pub(crate) async fn primaries(self: &Arc<Links>, deadline: Instant) -> Result<usize, Refusal> {
        match &self.here(std::process::id())?.reach {
            Reach::Server(_) | Reach::Primary(_) => Ok(1),
            Reach::Cluster(cluster) => cluster.primaries(self, deadline).await,
        }
    }

    /// How the keys are spread over servers: now, or about now if it is as `mark` says.
    pub(crate) async fn shape(self: &Arc<Links>, mark: Option<u32>, deadline: Instant) -> Result<Shape, Refusal> {
        match &self.here(std::process::id())?.reach {
            Reach::Server(_) | Reach::Primary(_) => Ok(Shape::single()),
            Reach::Cluster(cluster) => cluster.shape(self, mark, deadline).await,
        }
    }

    /// Drops the connections of this runtime, so that the next call looks for the server again.
    pub(crate) fn renew(&self) {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Server(node)) => node.renew(),
            Ok(Reach::Primary(primary)) => primary.node.renew(),
            Ok(Reach::Cluster(cluster)) => cluster.renew(),
            Err(_) => {}
        }
    }

    fn here(&self, process: u32) -> Result<Arc<Here>, Refusal> {
        self.process.of(process).here(|| {
            let primary = || Arc::new(Primary::new(&self.settings.place, &self.dial));
            let reach = match &self.settings.place {
                Place::Cluster(seeds) => Reach::Cluster(Arc::new(Cluster::new(seeds.clone()))),
                Place::Servers(hosts) => match hosts.as_slice() {
                    [one] => Reach::Server(Node::new(Target::Server(one.clone()))),
                    _ => Reach::Primary(primary()),
                },
                Place::Sentinel { .. } => Reach::Primary(primary()),
            };
            Here { reach, watches: Watches::default(), behind: Arc::default() }
        })
    }

    async fn ask_server<'a>(
        self: &Arc<Links>,
        node: &Node,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Request<'a>, Refusal>,
    ) -> Result<Vec<Reply>, Refusal> {
        let mut last = None;
        for send in 1..=SENDS_MAX {
            let patience = (send == SENDS_MAX).then_some(deadline);
            let sending = Sending { asking: false, connect_wait: None, patience, deadline };
            match node.send(self, sending, &request).await {
                Ok((_, replies)) => return Ok(replies),
                Err(Failure::Over(refusal) | Failure::Unconnected(refusal)) => return Err(refusal),
                Err(Failure::Broken(refusal)) => last = Some(refusal),
            }
        }
        Err(last.unwrap_or_else(too_late))
    }

    /// Goes on until the deadline as long as another server may become the primary.
    async fn ask_primary<'a>(
        self: &Arc<Links>,
        primary: &Arc<Primary>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Request<'a>, Refusal>,
    ) -> Result<Vec<Reply>, Refusal> {
        let (mut patience, mut before) = (None, None);
        primary.look_now_and_then(self, deadline - self.settings.timeout);
        loop {
            let sending = Sending { asking: false, connect_wait: None, patience, deadline };
            let outcome = match primary.node.send(self, sending, &request).await {
                // The node has dropped its connection.
                Ok((_, replies)) if is_of_a_replica(&replies) => Ok(replies),
                Ok((_, replies)) => {
                    primary.note_answer();
                    return Ok(replies);
                }
                Err(Failure::Over(refusal)) => return Err(refusal.or_before(before)),
                Err(Failure::Unconnected(refusal) | Failure::Broken(refusal)) => Err(refusal.or_before(before)),
            };
            let outcome = outcome.map_err(|refusal| if primary.has_answered() { refusal.passing() } else { refusal });
            let next = Instant::now() + PRIMARY_PAUSE;
            before = match outcome {
                Err(refusal) if refusal.may_pass() && next < deadline => Some(refusal),
                Ok(_) if next < deadline => None,
                outcome => return outcome,
            };
            sleep_until(next).await;
            patience = Some(halfway(deadline));
        }
    }

    /// The server that holds this key, as far as is known.
    pub(crate) fn server_of(&self, key: &[u8]) -> Target {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Cluster(cluster)) => Target::Server(cluster.address_of(key)),
            // The one that calls go to: after a switch of the primary it is another.
            Ok(Reach::Server(node)) => node.place(),
            Ok(Reach::Primary(primary)) => primary.node.place(),
            Err(_) => Target::Primary,
        }
    }

    /// The number of the primary that serves this key, as far as is known.
    pub(crate) fn number_of(&self, key: &[u8]) -> Option<usize> {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Cluster(cluster)) => cluster.number_of(key),
            Ok(Reach::Server(_) | Reach::Primary(_)) => Some(0),
            Err(_) => None,
        }
    }

    /// Whether calls go to this server still. Where the primary may be replaced, it is looked at as calls do it.
    pub(crate) fn is_still(self: &Arc<Links>, server: &Target) -> bool {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Primary(primary)) => {
                primary.look_now_and_then(self, Instant::now());
                primary.node.place() == *server
            }
            Ok(Reach::Server(_) | Reach::Cluster(_)) | Err(_) => true,
        }
    }

    /// A connection of one's own to such a server, logged in.
    pub(crate) async fn connect_to(&self, target: &Target) -> Result<Box<dyn Wire>, Refusal> {
        Ok(self.reach_out(target).await?.wire)
    }

    /// What this runtime of this process watches.
    pub(crate) fn with_watches<T>(&self, work: impl FnOnce(&Watches) -> T) -> Result<T, Refusal> {
        Ok(work(&self.here(std::process::id())?.watches))
    }

    /// What goes on behind the calls of this runtime.
    pub(crate) fn behind(&self) -> Result<Arc<Behind>, Refusal> {
        Ok(Arc::clone(&self.here(std::process::id())?.behind))
    }

    /// A new connection for calls.
    pub(crate) async fn connect(&self, target: &Target) -> Result<Link, Refusal> {
        let Reached { address, wire, server, epoch } = self.reach_out(target).await?;
        let (pipe, driver) = Pipe::new(wire, self.settings.replicas());
        tokio::spawn(driver);
        Ok(Link { server, address, epoch, pipe })
    }

    async fn reach_out(&self, target: &Target) -> Result<Reached, Refusal> {
        match target {
            Target::Server(address) => self.dial.connect(address).await,
            Target::Primary => match &self.here(std::process::id())?.reach {
                Reach::Primary(primary) => primary.connect().await,
                // Their nodes are servers.
                Reach::Server(_) | Reach::Cluster(_) => {
                    Err(Refusal::new(ErrorKind::Unreachable, "no primary is looked for"))
                }
            },
        }
    }
}

impl Link {
    /// Whether something has been unanswered so long while nothing came back.
    pub(crate) fn is_silent(&self, limit: Duration) -> bool {
        self.pipe.is_silent(limit)
    }

    /// Sends a request; `asking` says before each command that the key may be on its way to this server.
    pub(crate) async fn send(&self, request: Request<'_>, asking: bool, limits: Limits) -> Result<Vec<Reply>, Trouble> {
        let mut replies = self.exchange(asking, limits, request.wrote(), |commands| request.write(commands)).await?;
        let Request::Script(call) = request else { return Ok(replies) };
        if matches!(replies.first(), Some(Reply::Error(text)) if text.starts_with("NOSCRIPT")) {
            // The server restarted, or its scripts were flushed: this loads it again.
            let whole = |commands: &mut Commands| call.write_whole(commands);
            replies = Box::pin(self.exchange(asking, limits, Some(SWAPPED), whole)).await?;
        }
        let head = match replies.first() {
            Some(Reply::List(items)) => items.first(),
            other => other,
        };
        match head {
            Some(Reply::Bulk(bytes)) if bytes == call.id => Ok(replies),
            Some(Reply::Error(_)) => Ok(replies),
            _ => Err(Trouble::Broken(Refusal::out_of_step())),
        }
    }

    /// `wrote` looks at the first answer, or at the second.
    async fn exchange(
        &self,
        asking: bool,
        limits: Limits,
        wrote: Option<[Wrote; 2]>,
        write: impl FnOnce(&mut Commands),
    ) -> Result<Vec<Reply>, Trouble> {
        if !asking {
            return self.pipe.call(limits, wrote.map(|[wrote, _]| wrote), write).await;
        }
        let mut plain = Commands::default();
        write(&mut plain);
        let after_asking = |commands: &mut Commands| commands.append_each_after(&[b"ASKING"], &plain);
        self.pipe.call(limits, wrote.map(|[_, wrote]| wrote), after_asking).await.map(without_asking)
    }
}

impl Request<'_> {
    fn write(&self, commands: &mut Commands) {
        match *self {
            Request::Script(call) => call.write_hashed(commands),
            Request::Claim { key, record, life } => {
                commands.add(&[b"SET", key, record, b"NX", b"GET", b"PX", Digits::of(life).as_bytes()]);
                commands.add(&[b"PTTL", key]);
            }
            Request::Replace { key, there, record, life } => {
                commands.add(&[b"SET", key, record, b"IFEQ", there, b"PX", Digits::of(life).as_bytes()]);
            }
            Request::Load { key } => {
                commands.add(&[b"GET", key]).add(&[b"PTTL", key]);
            }
            Request::Batch(batch) => commands.append(batch),
        }
    }

    /// What tells of its answers whether it wrote, where it may write.
    fn wrote(&self) -> Option<[Wrote; 2]> {
        match self {
            Request::Script(_) => Some(SWAPPED),
            Request::Claim { .. } => Some([claimed::<0>, claimed::<1>]),
            Request::Replace { .. } => Some([replaced::<0>, replaced::<1>]),
            Request::Load { .. } | Request::Batch(_) => None,
        }
    }
}

/// The own answers of commands that each had an `ASKING` before them, which holds for one. An error in the place of the
/// other's stays, and says why.
fn without_asking(mut replies: Vec<Reply>) -> Vec<Reply> {
    let mut number = 0;
    replies.retain(|reply| {
        number += 1;
        number % 2 == 0 || matches!(reply, Reply::Error(_))
    });
    replies
}

/// Whether a native claim was stored: the key held nothing.
fn claimed<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Nil))
}

/// Whether a native replacement was stored.
fn replaced<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Status(_)))
}

/// Whether the script wrote. What it recognises as written before it also touches, so that this connection waits for it.
fn swapped<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Bulk(_)))
}

const SWAPPED: [Wrote; 2] = [swapped::<0>, swapped::<1>];
