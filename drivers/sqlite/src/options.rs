//! How a file is opened: `Options`, with their defaults.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The clock that judges ages, in milliseconds since 1970. Every process that shares a file must share the clock.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// When a write counts as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// When the disk has it. Survives a power cut.
    #[default]
    Full,
    /// When the operating system has it. Survives the end of any process; a power cut may take it back.
    Normal,
}

impl Synchronous {
    /// The word for it, in URLs and in SQLite.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Synchronous::Full => "full",
            Synchronous::Normal => "normal",
        }
    }
}

/// How a file is opened.
#[derive(Clone)]
pub struct Options {
    /// When a write counts as stored. Default: when the disk has it.
    pub synchronous: Synchronous,
    /// The longest that a call takes. Default 2 s: far above the wait of a fair turn among several processes (below 0.5 s)
    /// and a slow disk's commit, far below the default lease of 30 s. A read that waits for a hung disk is not bounded.
    pub timeout: Duration,
    /// The largest file, in bytes, beyond which writes are refused as full. Default: none but the disk's.
    pub size_max: Option<u64>,
    /// The clock that judges ages. Default: the host's.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Options {
        Options { synchronous: Synchronous::default(), timeout: TIMEOUT, size_max: None, clock: Arc::new(host_clock) }
    }
}

/// The longest that a call takes, unless said otherwise.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The host's clock, in milliseconds since 1970.
#[must_use]
pub fn host_clock() -> i64 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_millis()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_millis()).map_or(i64::MIN, |millis| -millis),
    }
}
