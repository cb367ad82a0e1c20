//! The keys that this process has met before: a claim of one of them begins with a look, which costs less than a try. So does
//! one of a new key where all the last new ones were duplicates, as in a queue that is delivered a second time.
//!
//! A guess and no more. A key that is forgotten costs a duplicate what it cost the first time; one that is remembered and
//! gone from the database costs a claim a second round trip, as does a fresh task behind many duplicates.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use taskonce_core::key::Key;

/// How many keys are remembered at most, 8 bytes each; a newer one takes the place of an older one.
const KEYS_MAX: usize = 8192;
/// So many duplicates in a row let the next new key be taken for one. Among tasks half of which are duplicates, that is wrong
/// for one of 65,536.
const DUPLICATES_MIN: u32 = 16;

/// The keys that were known.
pub(crate) struct Known {
    hashes: Box<[AtomicU64]>,
    state: RandomState,
    /// How many new keys in a row were duplicates.
    duplicates: AtomicU32,
}

impl Known {
    pub(crate) fn new() -> Known {
        Known {
            hashes: (0..KEYS_MAX).map(|_| AtomicU64::new(0)).collect(),
            state: RandomState::new(),
            duplicates: AtomicU32::new(0),
        }
    }

    /// Whether the next new key is a duplicate, as far as the last ones tell.
    pub(crate) fn expects_duplicate(&self) -> bool {
        self.duplicates.load(Ordering::Relaxed) >= DUPLICATES_MIN
    }

    /// A new key was a duplicate.
    pub(crate) fn met_duplicate(&self) {
        // Calls at once may count as one, which is not much of an error.
        let before = self.duplicates.load(Ordering::Relaxed);
        if before < DUPLICATES_MIN {
            self.duplicates.store(before + 1, Ordering::Relaxed);
        }
    }

    /// A new key was a fresh task.
    pub(crate) fn met_fresh(&self) {
        if self.duplicates.load(Ordering::Relaxed) > 0 {
            self.duplicates.store(0, Ordering::Relaxed);
        }
    }

    /// There is a record under this key.
    pub(crate) fn note(&self, key: &Key) {
        let hash = self.hash(key);
        self.place(hash).store(hash, Ordering::Relaxed);
    }

    /// There is none any more.
    pub(crate) fn forget(&self, key: &Key) {
        let hash = self.hash(key);
        // Only where no other key has taken the place.
        let _other = self.place(hash).compare_exchange(hash, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether there was a record under this key when it was met last, as far as it is remembered.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        let hash = self.hash(key);
        self.place(hash).load(Ordering::Relaxed) == hash
    }

    /// Never 0, which stands for nothing.
    fn hash(&self, key: &Key) -> u64 {
        self.state.hash_one(key.as_str()) | 1 << 63
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.hashes[hash as usize % KEYS_MAX]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duplicate_is_expected_behind_many_and_not_behind_a_fresh_task() {
        let known = Known::new();
        for _ in 1..DUPLICATES_MIN {
            known.met_duplicate();
        }
        assert!(!known.expects_duplicate());
        known.met_duplicate();
        known.met_duplicate();
        assert!(known.expects_duplicate());
        known.met_fresh();
        assert!(!known.expects_duplicate());
    }

    #[test]
    fn a_key_is_known_until_it_is_forgotten() {
        let known = Known::new();
        let key = |id: &str| Key::parse(&format!("test/known@1/{id}")).unwrap();
        let (a, b) = (key("a"), key("b"));
        assert!(!known.knows(&a));
        known.note(&a);
        assert!(known.knows(&a) && !known.knows(&b));
        known.forget(&b);
        assert!(known.knows(&a));
        known.forget(&a);
        assert!(!known.knows(&a));
    }
}
