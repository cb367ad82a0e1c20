//! What a fast check has done in this process: `Counts`, a snapshot, and the tally that it is taken from.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What a fast check has done in this process since it was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        /// The numbers, as they grow.
        #[derive(Debug, Default)]
        pub(crate) struct Tally {
            $(pub(crate) $name: Number,)+
        }

        impl Tally {
            pub(crate) fn snapshot(&self) -> Counts {
                Counts { $($name: self.$name.0.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counts! {
    /// Calls that did without the front, as it was away or too slow: slower, and never wrong.
    degraded,
    /// Duplicates of running tasks that a hint answered, without the database.
    answered,
    /// Duplicates of done tasks that a hint answered, without the database.
    trusted,
    /// Duplicates of tasks that are over, verified by one read of the database.
    verified,
    /// Questions of duplicates to the database: verified ones, and those that no hint could answer.
    database_reads,
    /// Hints that were of another generation of the database, and so ignored.
    stale,
    /// Hints that the front took.
    written,
    /// Hints that were not written: too many were under way, or the front refused.
    dropped,
    /// How often the front was found to be away.
    openings,
}

#[derive(Debug, Default)]
pub(crate) struct Number(AtomicU64);

impl Number {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
