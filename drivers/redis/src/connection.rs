//! The connections of a store or a queue: which server a question goes to, and what is done when it is not answered there.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use taskonce_core::{Error, ErrorKind, Result};
use tokio::time::{Instant, sleep_until};

use crate::address::Address;
use crate::cluster::Cluster;
use crate::dial::Dial;
use crate::fault::Refusal;
use crate::node::{Failure, Node, Sending, Target, halfway, is_of_a_replica};
use crate::pipe::{Limits, Pipe, Trouble, Wire, Wrote, too_late};
use crate::place::Place;
use crate::primary::{Primary, Reached};
use crate::process::{Pid, Process};
use crate::server::Server;
use crate::shape::Shape;
use crate::shared::lock;
use crate::url::Settings;
use crate::wire::{Commands, Reply};

/// How often one call sends its request to a server that has no other in its place: again only on a fresh connection,
/// and only what may be repeated.
const SENDS_MAX: u32 = 2;
/// How long a call waits before it looks for the primary again.
const PRIMARY_PAUSE: Duration = Duration::from_millis(20);
/// A call gives up this part of its time before the end, so that it has ended by then on a busy machine too.
const END_SHARE: u32 = 50;

/// The connections of a store.
pub struct Links {
    /// What the URL says.
    pub settings: Settings,
    dial: Dial,
    process: Process<Here>,
    pid: Pid,
}

/// What one runtime of one process has.
struct Here {
    reach: Reach,
    /// What its user keeps beside, one of each type.
    beside: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
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
pub struct Link {
    /// What is known of its server.
    pub server: Server,
    /// Where it goes.
    pub address: Address,
    /// The number of the switch that made it the primary, where Sentinels count them.
    pub epoch: u64,
    pipe: Pipe,
}

/// Where a request goes.
#[derive(Clone, Copy)]
pub enum At<'a> {
    /// To the server that holds this key.
    Key(&'a [u8]),
    /// To one of the [`primaries`](Links::primaries), by its number.
    Primary(usize),
}

/// Something to send: commands, of which each has one answer.
pub trait Question {
    /// Adds its commands.
    fn write(&self, commands: &mut Commands);

    /// What tells of its answers whether it wrote, where it may write.
    /// The second looks where each answer comes after that to an `ASKING`.
    fn wrote(&self) -> Option<[Wrote; 2]>;

    /// Of one script: what its answer begins with, alone or at the head of a list, which proves that it is its own.
    fn proof(&self) -> Option<&[u8]>;

    /// Of one script: the call with its text in it, which leaves it on the server.
    fn write_whole(&self, commands: &mut Commands);
}

/// Commands of any kind.
pub struct Batch<'a>(pub &'a Commands);

impl Question for Batch<'_> {
    fn write(&self, commands: &mut Commands) {
        commands.append(self.0);
    }

    fn wrote(&self) -> Option<[Wrote; 2]> {
        None
    }

    fn proof(&self) -> Option<&[u8]> {
        None
    }

    fn write_whole(&self, commands: &mut Commands) {
        self.write(commands);
    }
}

impl Links {
    /// Those that a URL says. Each server is given `scripts` when it is connected to.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`] for what cannot be connected to at all.
    pub fn new(settings: Settings, scripts: &'static [&'static str]) -> Result<Links> {
        let dial = Dial::new(&settings, scripts).map_err(|refusal| refusal.about(settings.subject()))?;
        Ok(Links { settings, dial, process: Process::new(std::process::id()), pid: Pid::new() })
    }

    /// Names the store or the queue in an error.
    pub fn error(&self, refusal: Refusal) -> Error {
        refusal.about(self.settings.subject())
    }

    /// When a call that begins now must have ended.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.settings.timeout - self.settings.timeout / END_SHARE
    }

    /// Sends a request and returns its own answers: of a script one, of a batch one per command. An error that the
    /// server answers is an answer. What is sent must be repeatable: it is sent again if its first answer is lost, or if
    /// the key turns out to be elsewhere.
    pub async fn ask<Q: Question>(
        self: &Arc<Links>,
        at: At<'_>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
    ) -> Result<Vec<Reply>, Refusal> {
        match &self.here(self.pid.at(deadline - self.settings.timeout))?.reach {
            Reach::Server(node) => self.ask_server(node, deadline, request).await,
            Reach::Primary(primary) => Box::pin(self.ask_primary(primary, deadline, request)).await,
            Reach::Cluster(cluster) => Box::pin(cluster.ask(self, at, deadline, request)).await,
        }
    }

    /// How many primaries share the keys.
    pub async fn primaries(self: &Arc<Links>, deadline: Instant) -> Result<usize, Refusal> {
        match &self.here(std::process::id())?.reach {
            Reach::Server(_) | Reach::Primary(_) => Ok(1),
            Reach::Cluster(cluster) => cluster.primaries(self, deadline).await,
        }
    }

    /// How the keys are spread over servers: now, or about now if it is as `mark` says.
    pub async fn shape(self: &Arc<Links>, mark: Option<u32>, deadline: Instant) -> Result<Shape, Refusal> {
        match &self.here(std::process::id())?.reach {
            Reach::Server(_) | Reach::Primary(_) => Ok(Shape::single()),
            Reach::Cluster(cluster) => cluster.shape(self, mark, deadline).await,
        }
    }

    /// Drops the connections of this runtime, so that the next call looks for the server again.
    pub fn renew(&self) {
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
            Here { reach, beside: Mutex::default() }
        })
    }

    async fn ask_server<Q: Question>(
        self: &Arc<Links>,
        node: &Node,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
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
    async fn ask_primary<Q: Question>(
        self: &Arc<Links>,
        primary: &Arc<Primary>,
        deadline: Instant,
        request: impl Fn(&Link) -> Result<Q, Refusal>,
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
    pub fn server_of(&self, key: &[u8]) -> Target {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Cluster(cluster)) => Target::Server(cluster.address_of(key)),
            // The one that calls go to: after a switch of the primary it is another.
            Ok(Reach::Server(node)) => node.place(),
            Ok(Reach::Primary(primary)) => primary.node.place(),
            Err(_) => Target::Primary,
        }
    }

    /// The number of the primary that serves this key, as far as is known.
    pub fn number_of(&self, key: &[u8]) -> Option<usize> {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Cluster(cluster)) => cluster.number_of(key),
            Ok(Reach::Server(_) | Reach::Primary(_)) => Some(0),
            Err(_) => None,
        }
    }

    /// Whether calls go to this server still. Where the primary may be replaced, it is looked at as calls do it.
    pub fn is_still(self: &Arc<Links>, server: &Target) -> bool {
        match self.here(std::process::id()).as_deref().map(|here| &here.reach) {
            Ok(Reach::Primary(primary)) => {
                primary.look_now_and_then(self, Instant::now());
                primary.node.place() == *server
            }
            Ok(Reach::Server(_) | Reach::Cluster(_)) | Err(_) => true,
        }
    }

    /// A connection of one's own to such a server, logged in.
    pub async fn connect_to(&self, target: &Target) -> Result<Box<dyn Wire>, Refusal> {
        Ok(self.reach_out(target).await?.wire)
    }

    /// What this runtime of this process keeps beside its connections, made on first use. It ends with them.
    ///
    /// # Errors
    /// Outside of a tokio runtime.
    pub fn beside<T: Any + Send + Sync + Default>(&self) -> Result<Arc<T>, Refusal> {
        let here = self.here(std::process::id())?;
        let mut beside = lock(&here.beside);
        if let Some(there) = beside.iter().find_map(|there| Arc::clone(there).downcast::<T>().ok()) {
            return Ok(there);
        }
        let made = Arc::new(T::default());
        beside.push(Arc::<T>::clone(&made));
        Ok(made)
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
    pub(crate) async fn send(
        &self,
        question: impl Question,
        asking: bool,
        limits: Limits,
    ) -> Result<Vec<Reply>, Trouble> {
        let wrote = question.wrote();
        let mut replies = self.exchange(asking, limits, wrote, |commands| question.write(commands)).await?;
        let Some(proof) = question.proof() else { return Ok(replies) };
        if matches!(replies.first(), Some(Reply::Error(text)) if text.starts_with("NOSCRIPT")) {
            // The server restarted, or its scripts were flushed: this loads it again.
            let whole = |commands: &mut Commands| question.write_whole(commands);
            replies = Box::pin(self.exchange(asking, limits, wrote, whole)).await?;
        }
        let head = match replies.first() {
            Some(Reply::List(items)) => items.first(),
            other => other,
        };
        match head {
            Some(Reply::Bulk(bytes)) if bytes == proof => Ok(replies),
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
