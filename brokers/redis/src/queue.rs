//! A handle of the queue: its connections, the call of a script, and errors with their names.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::host::Host as _;
use taskonce_redis_wire::connection::{At, Batch, Links};
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::pipe::next_mark;
use taskonce_redis_wire::shared::lock;
use taskonce_redis_wire::wire::{Commands, Reply};
use taskonce_worker::SystemHost;
use taskonce_worker::source::Description;
use tokio::sync::Notify;

use crate::board::Board;
use crate::keys::Names;
use crate::script::{Call, Verb};

/// The most handlers of which a handle remembers that they are listed; beyond, it lists them anew.
const LISTED_MAX: usize = 100_000;

/// A handle.
pub(crate) struct Queue {
    pub(crate) links: Arc<Links>,
    pub(crate) names: Arc<Names>,
    pub(crate) description: Description,
    pub(crate) is_closed: AtomicBool,
    /// Wakes the receives of this handle when it is closed.
    pub(crate) closed: Notify,
    /// Moves with each look, so that handlers are served in turn.
    pub(crate) turn: AtomicUsize,
    /// The handlers that are known to be listed.
    listed: Mutex<HashSet<Arc<str>>>,
    /// The handlers of dead letters that were shown: where to look for them first.
    pub(crate) shown: Mutex<HashMap<String, Arc<str>>>,
}

impl Queue {
    pub(crate) fn new(links: Links, names: Names, description: Description) -> Queue {
        Queue {
            links: Arc::new(links),
            names: Arc::new(names),
            description,
            is_closed: AtomicBool::new(false),
            closed: Notify::new(),
            turn: AtomicUsize::new(0),
            listed: Mutex::default(),
            shown: Mutex::default(),
        }
    }

    /// Refuses when this handle was closed.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "this handle of the queue was closed")
                .about(self.links.settings.subject()));
        }
        Ok(())
    }

    /// What this runtime knows of the handlers.
    pub(crate) fn board(&self) -> Result<Arc<Board>> {
        self.links.beside::<Board>().map_err(|refusal| self.links.error(refusal))
    }

    /// Calls a script: the items of its answer, of which the first is the proof.
    pub(crate) async fn call(
        &self,
        handler: &str,
        verb: Verb,
        keys: &[Vec<u8>],
        proof: &str,
        args: &[Vec<u8>],
    ) -> Result<Vec<Reply>> {
        let sendings = AtomicU32::new(0);
        let call = |link: &taskonce_redis_wire::connection::Link| {
            link.server.accept(&self.links.settings)?;
            let is_again = sendings.fetch_add(1, Ordering::Relaxed) > 0;
            Ok(Call { verb, dialect: link.server.dialect(), keys, proof, is_again, args })
        };
        let answers = self.links.ask(At::Key(&keys[0]), self.links.deadline(), call).await;
        let refusal = match answers {
            Ok(answers) => match answers.into_iter().next() {
                Some(Reply::List(items)) => return Ok(items),
                Some(Reply::Error(text)) => refused(&text),
                Some(Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil) | None => {
                    Refusal::misshapen("EVALSHA")
                }
            },
            Err(refusal) => refusal,
        };
        Err(self.error(handler, refusal))
    }

    /// An error about what is kept of a handler.
    pub(crate) fn error(&self, handler: &str, refusal: Refusal) -> Error {
        if refusal.kind() == ErrorKind::Corrupt {
            let subject = format!("handler `{}` of {}", handler.escape_debug(), self.links.settings.subject());
            return refusal
                .saying("a key of the queue holds a value of another type".to_owned())
                .hint("another program uses keys that begin so: look at them with `redis-cli type`, or use another `prefix`")
                .about(subject);
        }
        self.links.error(refusal)
    }

    /// Commands to the server that has a key.
    pub(crate) async fn batch(&self, key: &[u8], commands: &Commands) -> Result<Vec<Reply>> {
        let answers = self.links.ask(At::Key(key), self.links.deadline(), |link| {
            link.server.accept(&self.links.settings).map(|()| Batch(commands))
        });
        let answers = answers.await.map_err(|refusal| self.links.error(refusal))?;
        match answers.iter().find_map(|answer| match answer {
            Reply::Error(text) => Some(refused(text)),
            Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil | Reply::List(_) => None,
        }) {
            Some(refusal) => Err(self.error("", refusal)),
            None => Ok(answers),
        }
    }

    /// Sees to it that a handler is listed, before there is something of it. The list lies on a server of its own.
    pub(crate) async fn list(&self, handler: &str) -> Result<()> {
        if lock(&self.listed).contains(handler) {
            return Ok(());
        }
        let mut commands = Commands::default();
        commands.add(&[b"ZADD", &self.names.handlers, b"0", handler.as_bytes()]);
        self.batch(&self.names.handlers, &commands).await?;
        let mut listed = lock(&self.listed);
        if listed.len() >= LISTED_MAX {
            listed.clear();
        }
        listed.insert(handler.into());
        Ok(())
    }

    /// The same of a handler of which a script says whether its queue is new: then the list may be, too.
    pub(crate) async fn list_again(&self, handler: &str, is_new: Option<&Reply>) -> Result<()> {
        if matches!(is_new, Some(Reply::Int(1))) {
            lock(&self.listed).remove(handler);
        }
        self.list(handler).await
    }

    /// An answer of another shape than the script has.
    pub(crate) fn misshapen(&self) -> Error {
        self.links.error(Refusal::misshapen("EVALSHA"))
    }
}

/// An error that a script or a server answered.
fn refused(text: &str) -> Refusal {
    if text.contains("NEWERLAYOUT") {
        return Refusal::new(ErrorKind::NewerSchema, "a newer program has changed how this queue is kept");
    }
    Refusal::of_reply(text)
}

/// A number that no other call has.
pub(crate) fn mark() -> String {
    format!("{:016x}", u64::from_be_bytes(next_mark()))
}

/// Random digits that no other process draws.
pub(crate) fn random() -> String {
    format!("{:032x}", SystemHost::new().random())
}

/// Whole milliseconds of a duration, the begun one included: a delay never ends early.
pub(crate) fn millis(duration: Duration) -> Vec<u8> {
    duration.as_nanos().div_ceil(1_000_000).to_string().into_bytes()
}

/// Whether an answer says that it is so.
pub(crate) fn is_so(items: &[Reply]) -> bool {
    matches!(items.get(1), Some(Reply::Int(1)))
}
