//! What belongs to one process and one runtime, and is not shared with a forked child.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use taskonce_core::{ErrorKind, Result};
use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

use crate::fault::Refusal;
use crate::shared::lock;

/// How many runtimes of one process keep connections; the one that came first gives way.
const RUNTIMES_MAX: usize = 16;

/// The connections of one process, a `T` for each runtime. A forked child gets its own, and never touches its parent's,
/// not even a lock that was held when it was forked.
pub(crate) struct Process<T> {
    id: u32,
    runtimes: Mutex<Vec<(Id, Arc<T>)>>,
    child: OnceLock<Box<Process<T>>>,
}

impl<T> Process<T> {
    pub(crate) fn new(id: u32) -> Process<T> {
        Process { id, runtimes: Mutex::default(), child: OnceLock::new() }
    }

    /// Those of the process with this id, which is the current one.
    pub(crate) fn of(&self, id: u32) -> &Process<T> {
        let mut process = self;
        while process.id != id {
            process = process.child.get_or_init(|| Box::new(Process::new(id)));
        }
        process
    }

    /// Those of the current runtime.
    pub(crate) fn here(&self, make: impl FnOnce() -> T) -> Result<Arc<T>, Refusal> {
        let runtime = Handle::try_current()
            .map_err(|_| Refusal::new(ErrorKind::Unsupported, "Redis was used outside of a tokio runtime"))?
            .id();
        let mut runtimes = lock(&self.runtimes);
        if let Some((_, there)) = runtimes.iter().find(|(id, _)| *id == runtime) {
            return Ok(Arc::clone(there));
        }
        if runtimes.len() >= RUNTIMES_MAX {
            runtimes.remove(0);
        }
        let made = Arc::new(make());
        runtimes.push((runtime, Arc::clone(&made)));
        Ok(made)
    }
}

impl<T> Drop for Process<T> {
    fn drop(&mut self) {
        if self.id != std::process::id() {
            // These connections belong to the parent's runtime, which does not exist here.
            std::mem::forget(std::mem::take(self.runtimes.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

/// The process's id, asked of the system once in a while: each question costs as much as a tenth of a call.
pub(crate) struct Pid {
    base: Instant,
    id: AtomicU32,
    /// When it was asked last, in milliseconds since `base`.
    asked: AtomicU64,
}

impl Pid {
    pub(crate) fn new() -> Pid {
        Pid { base: Instant::now(), id: AtomicU32::new(std::process::id()), asked: AtomicU64::new(0) }
    }

    /// The id at about this time. A child that was forked within the same millisecond may be told its parent's: it has
    /// no runtime of its parent's, and so no connection of its either.
    pub(crate) fn at(&self, now: Instant) -> u32 {
        let now = u64::try_from(now.saturating_duration_since(self.base).as_millis()).unwrap_or(u64::MAX);
        if self.asked.swap(now, Ordering::Relaxed) != now {
            self.id.store(std::process::id(), Ordering::Relaxed);
        }
        self.id.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_forked_child_shares_no_connection_and_no_lock_with_its_parent() {
        let parent = Process::<u8>::new(0);
        let held = lock(&parent.runtimes);
        let child = parent.of(std::process::id());
        assert_eq!(child.id, std::process::id());
        let here = || child.here(|| 7).map_err(|refusal| refusal.about("here")).unwrap();
        assert!(Arc::ptr_eq(&here(), &here()));
        assert!(std::ptr::eq(parent.of(child.id), child));
        drop(held);
    }
}
