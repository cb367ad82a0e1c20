//! The primary, wherever it is: among servers that replicate one another, or the one that Sentinels name.
//!
//! Everybody is asked at once, and those who do not answer hold nobody up: when there is an answer to go by, the others
//! get [`OTHERS_WAIT`] more.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use taskonce_core::ErrorKind;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::address::Address;
use crate::connection::Links;
use crate::dial::Dial;
use crate::fault::Refusal;
use crate::lines::Lines;
use crate::node::{Node, Target};
use crate::pipe::{Wire, too_late};
use crate::place::Place;
use crate::sentinels::{Sentinels, Word};
use crate::server::Server;
use crate::wire::{Commands, Reply};

/// How long the others may take once one has given an answer to go by.
const OTHERS_WAIT: Duration = Duration::from_millis(50);
/// The same where nobody waits for it.
const OTHERS_WAIT_BESIDE: Duration = Duration::from_secs(1);
/// How often, while there are calls, it is asked whether the primary is still the one that is used.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often those that are no primary are asked again while others do not answer.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A connection that is logged in, and where it goes.
pub(crate) struct Reached {
    pub(crate) address: Address,
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) server: Server,
    /// The number of the switch that made it the primary, where Sentinels count them.
    pub(crate) epoch: u64,
}

/// The primary, as one runtime of one process knows it.
pub(crate) struct Primary {
    pub(crate) node: Arc<Node>,
    base: Instant,
    /// When it was last asked whether it is still the primary, in milliseconds since `base`.
    looked: AtomicU64,
    /// Whether that is being asked.
    looks: AtomicBool,
    /// Whether it ever answered: the URL is right, then, and what is wrong with a server may pass.
    answered: AtomicBool,
    finder: Finder,
}

/// How it is found.
enum Finder {
    Hosts { dial: Dial, hosts: Vec<Address>, lines: Arc<Lines> },
    Sentinels(Sentinels),
}

impl Primary {
    pub(crate) fn new(place: &Place, dial: &Dial) -> Primary {
        let finder = match place {
            Place::Servers(hosts) | Place::Cluster(hosts) => {
                Finder::Hosts { dial: dial.clone(), hosts: hosts.clone(), lines: Arc::default() }
            }
            Place::Sentinel { sentinels, service } => {
                Finder::Sentinels(Sentinels::new(dial.clone(), sentinels.clone(), service.clone()))
            }
        };
        Primary {
            node: Arc::new(Node::new(Target::Primary)),
            base: Instant::now(),
            looked: AtomicU64::new(0),
            looks: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            finder,
        }
    }

    pub(crate) fn note_answer(&self) {
        if !self.has_answered() {
            self.answered.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// A new connection to it.
    pub(crate) async fn connect(&self) -> Result<Reached, Refusal> {
        match &self.finder {
            Finder::Hosts { dial, hosts, .. } => among(dial, hosts).await,
            Finder::Sentinels(sentinels) => sentinels.connect(OTHERS_WAIT).await,
        }
    }

    /// A primary that was replaced may not know it yet, and take writes that will be lost. So it is asked once in a
    /// while, beside the calls, and a connection to one that was replaced is left.
    pub(crate) fn look_now_and_then(self: &Arc<Primary>, links: &Arc<Links>, now: Instant) {
        if !self.is_to_be_looked_at(now) {
            return;
        }
        let (links, primary) = (Arc::clone(links), Arc::clone(self));
        tokio::spawn(async move {
            let looking = Looking(&primary.looks);
            let at_most = links.settings.timeout.max(OTHERS_WAIT_BESIDE * 2);
            // Without an answer there is nothing to go by.
            let _ = timeout(at_most, primary.look()).await;
            drop(looking);
        });
    }

    async fn look(&self) {
        match &self.finder {
            Finder::Hosts { dial, hosts, lines } => {
                if let Some(used) = self.node.connected_to()
                    && is_doubtful(dial, lines, hosts, &used).await
                {
                    self.node.leave_if(|address, _| *address == used);
                }
            }
            Finder::Sentinels(sentinels) => {
                if let Ok(word) = sentinels.resolve(OTHERS_WAIT_BESIDE).await {
                    self.node.leave_if(|address, epoch| Word { address: address.clone(), epoch }.is_left_for(&word));
                }
            }
        }
    }

    /// Whether it is time to look whether it is still the primary. Says so to one caller, and to none while one looks.
    fn is_to_be_looked_at(&self, now: Instant) -> bool {
        let now = u64::try_from(now.saturating_duration_since(self.base).as_millis()).unwrap_or(u64::MAX);
        let looked = self.looked.load(Ordering::Relaxed);
        u128::from(now.saturating_sub(looked)) >= LOOK_EVERY.as_millis()
            && self.looked.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            && !self.looks.swap(true, Ordering::Relaxed)
    }
}

/// A look that is under way; also one whose runtime ends is over.
struct Looking<'a>(&'a AtomicBool);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Whether the used one of these hosts says that it is no primary any more, or another says that it is one too.
async fn is_doubtful(dial: &Dial, lines: &Arc<Lines>, hosts: &[Address], used: &Address) -> bool {
    let ask = |host: Address| {
        let (dial, lines) = (dial.clone(), Arc::clone(lines));
        async move {
            let mut commands = Commands::default();
            commands.add(&[b"HELLO"]);
            let connect = async || dial.connect(&host).await.map(|reached| reached.wire);
            let answers = lines.ask(&host, &commands, connect).await?;
            let hello = answers.first().ok_or_else(|| Refusal::misshapen("HELLO"))?;
            Server::read(hello, &Reply::Nil)
        }
    };
    let mut doubtful = false;
    each(hosts, OTHERS_WAIT_BESIDE, ask, |host, answer| {
        doubtful |= answer.is_ok_and(|server| server.is_replica == (host == *used));
        doubtful
    })
    .await;
    doubtful
}

/// A connection to the one of these servers that is the primary.
///
/// Two that both say so are refused: which of them has the truth cannot be known here. One that does not answer in time
/// is not heard; while it is waited for, the others are asked again, as one of them may be promoted meanwhile.
async fn among(dial: &Dial, hosts: &[Address]) -> Result<Reached, Refusal> {
    let mut asked = JoinSet::new();
    let ask = |asked: &mut JoinSet<_>, address: Address, pause: Duration| {
        let dial = dial.clone();
        asked.spawn(async move {
            sleep(pause).await;
            let answer = dial.connect(&address).await;
            (address, answer)
        });
    };
    for host in hosts {
        ask(&mut asked, host.clone(), Duration::ZERO);
    }
    let mut primaries: Vec<Reached> = Vec::new();
    let mut others: Vec<(Address, Result<(), Refusal>)> = Vec::new();
    let mut until = None;
    loop {
        let next = match until {
            None => asked.join_next().await,
            Some(until) => timeout_at(until, asked.join_next()).await.unwrap_or(None),
        };
        let Some(answer) = next else { break };
        // One without an answer of its own ended with its runtime.
        let Ok((address, answer)) = answer else { continue };
        match answer {
            Ok(reached) if !reached.server.is_replica => {
                primaries.push(reached);
                until.get_or_insert(Instant::now() + OTHERS_WAIT);
            }
            answer => {
                others.retain(|(other, _)| *other != address);
                others.push((address.clone(), answer.map(drop)));
                if primaries.is_empty() && others.len() == hosts.len() {
                    break;
                }
                if primaries.is_empty() {
                    ask(&mut asked, address, ASK_AGAIN);
                }
            }
        }
    }
    let mut primaries = primaries.into_iter();
    match (primaries.next(), primaries.next()) {
        (Some(primary), None) => Ok(primary),
        (Some(one), Some(other)) => Err(Refusal::new(
            ErrorKind::Unreachable,
            format!("two servers say that they are the primary: `{}` and `{}`", one.address, other.address),
        )
        .hint(
            "make one a replica of the other with `REPLICAOF`: which of them has the latest records is for you to say",
        )),
        (None, _) => Err(no_primary(others)),
    }
}

fn no_primary(others: Vec<(Address, Result<(), Refusal>)>) -> Refusal {
    let causes: Vec<Refusal> = others
        .into_iter()
        .map(|(address, answer)| match answer {
            Ok(()) => Refusal::new(ErrorKind::ReadOnly, format!("`{address}` is a replica"))
                .hint("start the primary, or promote a replica with `REPLICAOF NO ONE`"),
            Err(refusal) => refusal.of(address),
        })
        .collect();
    let said: Vec<&str> = causes.iter().map(Refusal::message).collect();
    let said = format!("none of the servers is the primary: {}", said.join("; "));
    Refusal::of_all(causes).unwrap_or_else(too_late).saying(said)
}

/// Asks all at once. `hear` is told each answer, and says whether there is one to go by: the others get `others_wait`
/// more, then.
pub(crate) async fn each<T: Send + 'static, F>(
    addresses: &[Address],
    others_wait: Duration,
    ask: impl Fn(Address) -> F,
    mut hear: impl FnMut(Address, Result<T, Refusal>) -> bool,
) where
    F: Future<Output = Result<T, Refusal>> + Send + 'static,
{
    let mut asked = JoinSet::new();
    for address in addresses {
        let answer = ask(address.clone());
        let address = address.clone();
        asked.spawn(async move { (address, answer.await) });
    }
    let mut until = None;
    loop {
        let next = match until {
            None => asked.join_next().await,
            Some(until) => timeout_at(until, asked.join_next()).await.unwrap_or(None),
        };
        match next {
            None => return,
            // One without an answer of its own ended with its runtime.
            Some(Err(_)) => {}
            Some(Ok((address, answer))) => {
                if hear(address, answer) && until.is_none() {
                    until = Some(Instant::now() + others_wait);
                }
            }
        }
    }
}
