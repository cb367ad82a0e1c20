//! Waiting for a key to change, without asking for it again and again: the server calls changes out.
//!
//! One connection for each server, runtime and process, made when somebody waits and closed some time after nobody does.
//! It asks for `CLIENT TRACKING`: the server remembers which keys it has read and tells it, once, when one of them
//! changes. So completions cost nothing for it, and a thousand who wait cost what one does.
//!
//! Where the server cannot do that, or the user may not, the answer is "cannot tell", and is remembered for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use taskonce_core::record::Record;
use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::node::Target;
use tokio::time::Instant;

use crate::watch_board::{Board, Ended, Guest, NotWatched};
use crate::watch_line;

/// How long it is remembered that a server cannot tell.
const UNABLE_FOR: Duration = Duration::from_secs(60);
/// How long it is remembered that a server was not reached.
const UNREACHED_FOR: Duration = Duration::from_millis(250);
/// The least time between the starts of two connections to one server.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);
/// How many servers are watched at once; of others it cannot be told.
const SERVERS_MAX: usize = 1024;

/// What one runtime watches, by server.
#[derive(Default)]
pub(crate) struct Watches {
    servers: Mutex<HashMap<Target, Watch>>,
}

/// What is known of one server.
enum Watch {
    On(Arc<Board>),
    /// Nobody asks before this time.
    Resting(Instant, Rest),
}

#[derive(Clone)]
enum Rest {
    Unable,
    Unreached(Refusal),
}

/// Waits until what the key of this name holds may be another state or claim than `seen`. `false` where that cannot be
/// told.
pub(crate) async fn changed(links: &Arc<Links>, name: &[u8], seen: &Record) -> Result<bool, Refusal> {
    let server = links.server_of(name);
    let mut guest = match links.beside::<Watches>()?.join(links, &server, name, seen) {
        Joined::Guest(guest) => guest,
        Joined::CannotTell => return Ok(false),
        Joined::Unreached(refusal) => return Err(refusal),
    };
    match guest.wait(seen).await {
        Ok(told) => Ok(told),
        Err(Ended::Closed) => Ok(true),
        Err(Ended::Unable) => Ok(false),
        Err(Ended::Unreached(refusal)) => Err(refusal),
    }
}

/// What became of joining those who wait.
pub(crate) enum Joined {
    Guest(Guest),
    CannotTell,
    Unreached(Refusal),
}

impl Watches {
    fn lock(&self) -> MutexGuard<'_, HashMap<Target, Watch>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(&self, links: &Arc<Links>, server: &Target, name: &[u8], seen: &Record) -> Joined {
        let now = Instant::now();
        let mut servers = self.lock();
        let mut earliest = now;
        if let Some(Watch::On(board)) = servers.get(server) {
            earliest = earliest.max(board.began + CONNECT_PAUSE);
            let rest = match board.join(name, seen) {
                Ok(guest) => return Joined::Guest(guest),
                Err(NotWatched::CannotTell) => return Joined::CannotTell,
                Err(NotWatched::Ended(Ended::Closed)) => None,
                Err(NotWatched::Ended(Ended::Unable)) => Some(Watch::Resting(now + UNABLE_FOR, Rest::Unable)),
                Err(NotWatched::Ended(Ended::Unreached(refusal))) => {
                    Some(Watch::Resting(now + UNREACHED_FOR, Rest::Unreached(refusal)))
                }
            };
            match rest {
                Some(rest) => servers.insert(server.clone(), rest),
                None => servers.remove(server),
            };
        }
        match servers.get(server) {
            Some(Watch::Resting(until, Rest::Unable)) if now < *until => return Joined::CannotTell,
            Some(Watch::Resting(until, Rest::Unreached(refusal))) if now < *until => {
                return Joined::Unreached(refusal.clone());
            }
            Some(Watch::On(_) | Watch::Resting(..)) | None => {}
        }
        servers.retain(|_, watch| match watch {
            Watch::On(board) => board.ended().is_none() || now < board.began + CONNECT_PAUSE,
            Watch::Resting(until, _) => now < *until,
        });
        if servers.len() >= SERVERS_MAX {
            return Joined::CannotTell;
        }
        let board = Arc::new(Board::new(earliest));
        let Ok(guest) = board.join(name, seen) else { return Joined::CannotTell };
        servers.insert(server.clone(), Watch::On(Arc::clone(&board)));
        drop(servers);
        let timeout = links.settings.timeout;
        // The connection ends with its store, and so does not hold it.
        let (store, there) = (Arc::downgrade(links), server.clone());
        let is_still = move || store.upgrade().is_some_and(|links| links.is_still(&there));
        let (links, server) = (Arc::clone(links), server.clone());
        let connect = async move { links.connect_to(&server).await };
        tokio::spawn(watch_line::run(board, earliest, timeout, connect, is_still));
        Joined::Guest(guest)
    }
}

impl Drop for Watches {
    /// The store is gone, or its runtime gave way: its connections end with it.
    fn drop(&mut self) {
        for watch in self.lock().values() {
            if let Watch::On(board) = watch {
                board.end(Ended::Closed);
            }
        }
    }
}
