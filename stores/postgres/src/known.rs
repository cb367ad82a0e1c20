//! The keys that this process has met before: a claim of one of them begins with a look, which costs less than a try.
//!
//! A guess and no more. A key that is forgotten costs a duplicate what it cost the first time; one that is remembered and
//! gone from the database costs a claim a second round trip.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use taskonce_core::key::Key;

/// How many keys are remembered at most, 8 bytes each; a newer one takes the place of an older one.
const KEYS_MAX: usize = 8192;

/// The keys that were known.
pub(crate) struct Known {
    hashes: Box<[AtomicU64]>,
    state: RandomState,
}

impl Known {
    pub(crate) fn new() -> Known {
        Known { hashes: (0..KEYS_MAX).map(|_| AtomicU64::new(0)).collect(), state: RandomState::new() }
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
