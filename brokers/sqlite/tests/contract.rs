//! What every source promises, on a file of its own for each case.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::{Place, Shift};
use taskonce_contract::broker::{SourceUnderTest, VISIBILITY};
use taskonce_contract::broker_suite;
use taskonce_queue_sqlite::QueueOptions;
use taskonce_worker::source::Source;

struct InFile {
    place: Place,
    clock: Shift,
}

async fn open(_case: &str) -> InFile {
    InFile { place: Place::new(), clock: Shift::default() }
}

#[async_trait]
impl SourceUnderTest for InFile {
    async fn open(&self) -> Arc<dyn Source> {
        Arc::new(self.place.open_with(QueueOptions { visibility: VISIBILITY, ..self.clock.options() }))
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }

    async fn kept(&self) -> usize {
        let beside = self.place.beside();
        let rows = |table| beside.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0));
        let (rows, large) = (rows("delivery").unwrap(), rows("large").unwrap());
        assert!(large <= rows, "{large} payloads of {rows} deliveries");
        usize::try_from(rows).unwrap()
    }
}

broker_suite!(open);
