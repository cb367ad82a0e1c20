//! What one process knows: the breaker, the generation, the board, and the hints under way. A forked child begins anew.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use quick_cache::sync::Cache;
use taskonce_core::key::Key;
use taskonce_core::record::Record;
use tokio::sync::Semaphore;

use crate::board::Board;
use crate::breaker::Breaker;
use crate::generation::Known;
use crate::options::Options;

/// How many hints may be under way in the background. Further ones are not written.
pub(crate) const WRITES_MAX: usize = 1024;
/// Of how many running tasks the hints are remembered that this process wrote, so that their end takes one trip.
const WRITTEN_MAX: usize = 16_384;

pub(crate) struct Process {
    id: u32,
    pub(crate) generation: Known,
    /// One permit each hint that is written in the background.
    pub(crate) writes: Arc<Semaphore>,
    /// What the front held when this process wrote there last.
    pub(crate) written: Cache<Key, Arc<Record>>,
    breaker: Mutex<Breaker>,
    board: Mutex<Board>,
    /// Locks that were held at a fork stay so, and tasks are gone: a child does not use its parent's.
    child: OnceLock<Box<Process>>,
}

impl Process {
    pub(crate) fn new(options: &Options) -> Process {
        Process {
            id: std::process::id(),
            generation: Known::new(options.generation_every),
            writes: Arc::new(Semaphore::new(WRITES_MAX)),
            written: Cache::new(WRITTEN_MAX),
            breaker: Mutex::new(Breaker::new()),
            board: Mutex::default(),
            child: OnceLock::new(),
        }
    }

    /// That of the current process.
    pub(crate) fn here(&self, options: &Options) -> &Process {
        let id = std::process::id();
        let mut process = self;
        while process.id != id {
            process = process.child.get_or_init(|| Box::new(Process::new(options)));
        }
        process
    }

    pub(crate) fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
