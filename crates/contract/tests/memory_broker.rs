//! The suite for sources on the memory source.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use taskonce_contract::broker::{SourceUnderTest, VISIBILITY};
use taskonce_contract::broker_suite;
use taskonce_worker::source::{MemorySource, Source};

struct InMemory {
    source: MemorySource,
    passed: Arc<Mutex<Duration>>,
}

async fn open(_case: &str) -> InMemory {
    let (began, passed) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
    let clock = Arc::clone(&passed);
    let clock = move || began.elapsed() + *clock.lock().unwrap();
    InMemory { source: MemorySource::new("queue", VISIBILITY, clock), passed }
}

#[async_trait]
impl SourceUnderTest for InMemory {
    async fn open(&self) -> Arc<dyn Source> {
        Arc::new(self.source.beside())
    }

    async fn pass(&self, time: Duration) {
        *self.passed.lock().unwrap() += time;
    }

    async fn kept(&self) -> usize {
        self.source.kept()
    }
}

broker_suite!(open);
