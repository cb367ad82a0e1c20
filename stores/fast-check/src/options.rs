//! How a fast check is opened: `Options`, with their defaults.

use std::time::Duration;

/// How a fast check is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// The longest that one call of the front takes. Default 50 ms: far above the round trip within a data centre, and
    /// what a claim waits at most three times before the front counts as away.
    pub front_timeout: Duration,
    /// How often the database's generation is read anew, while there are calls. Default 5 s. Hints count only while it was
    /// read within twice that time.
    pub generation_every: Duration,
    /// The longest life of a hint of a task that is over. Default 24 h. It bounds for how long [`DoneHint::Trusted`] may
    /// replay what a person cleared while the front was away.
    pub hint_life: Duration,
    /// What a hint counts for that says Done. Default: it is verified.
    pub done: DoneHint,
}

/// What a hint counts for that says that a task is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DoneHint {
    /// The record is read in the database, by its primary key, and that is the answer.
    #[default]
    Verified,
    /// The hint is the answer, and the database is not asked, where the ledger names its generation
    /// ([`Store::generation`](taskonce_core::store::Store::generation)); elsewhere it is verified.
    ///
    /// The risk: a hint may outlive what it tells of. A database that forgot commits is noticed by its generation, up to
    /// twice [`Options::generation_every`] late, and one that was restored from a backup without a new generation is not
    /// noticed. A task that a person cleared past the front, by a URL without it or by SQL, or while the front was away, is
    /// replayed for [`Options::hint_life`].
    Trusted,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            front_timeout: Duration::from_millis(50),
            generation_every: Duration::from_secs(5),
            hint_life: Duration::from_secs(24 * 60 * 60),
            done: DoneHint::default(),
        }
    }
}
