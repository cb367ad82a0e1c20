//! The suite on the memory store.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use taskonce_contract::{StoreUnderTest, store_suite};
use taskonce_core::key::Key;
use taskonce_core::memory::MemoryStore;
use taskonce_core::store::Store;

struct InMemory(MemoryStore);

async fn open(_case: &str) -> InMemory {
    let start = Instant::now();
    InMemory(MemoryStore::new(move || start.elapsed()))
}

#[async_trait]
impl StoreUnderTest for InMemory {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        self.0.age_by(key, millis);
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        self.0.put_raw(key, bytes.to_vec());
    }
}

store_suite!(open);
