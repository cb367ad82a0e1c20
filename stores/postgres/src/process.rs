//! What belongs to one process and one runtime, and is not shared with a forked child.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use taskonce_core::ErrorKind;
use tokio::runtime::{Handle, Id};

use crate::fault::Fault;

/// How many runtimes of one process keep connections; the one that came first gives way.
const RUNTIMES_MAX: usize = 16;

/// The connections of one process, a `T` for each runtime: a connection is driven by a task of the runtime that made it.
/// A forked child gets its own, and never touches its parent's, not even a lock that was held when it was forked.
pub(crate) struct Process<T> {
    id: u32,
    runtimes: Mutex<Vec<(Id, Arc<T>)>>,
    child: OnceLock<Box<Process<T>>>,
}

impl<T> Process<T> {
    pub(crate) fn new(id: u32) -> Process<T> {
        Process { id, runtimes: Mutex::default(), child: OnceLock::new() }
    }

    /// Those of the current runtime in the current process.
    pub(crate) fn here(&self, make: impl FnOnce() -> T) -> Result<Arc<T>, Fault> {
        let id = std::process::id();
        let mut process = self;
        // One step a fork between the process that opened the store and this one.
        while process.id != id {
            process = process.child.get_or_init(|| Box::new(Process::new(id)));
        }
        let runtime = Handle::try_current()
            .map_err(|_| {
                Fault::new(ErrorKind::Unsupported, "the PostgreSQL store was used outside of a tokio runtime")
            })?
            .id();
        let mut runtimes = lock(&process.runtimes);
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
            // These connections are the parent's: closing them would say goodbye to the server in its name.
            std::mem::forget(std::mem::take(self.runtimes.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

/// Takes a lock that no panic can leave in a bad state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_forked_child_shares_no_connection_and_no_lock_with_its_parent() {
        // Of another process, as it is for a child.
        let parent = Process::<u8>::new(0);
        let held = lock(&parent.runtimes);
        let here = || parent.here(|| 7).map_err(|fault| fault.about("here")).unwrap();
        assert!(Arc::ptr_eq(&here(), &here()));
        assert!(held.is_empty(), "the parent has none of them");
        drop(held);
    }
}
