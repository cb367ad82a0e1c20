//! Records that outlive their use fill disks: what is purged makes room, and the file stops growing.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::time::Duration;

use common::{Place, claim, keep, key, record};
use taskonce_core::record::{Output, Record, State};
use taskonce_core::store::{Filter, Store as _};

/// Records of one round, above what a page of purge takes.
const ROUND: usize = 1500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_purged_stops_growing() {
    let place = Place::new();
    let store = place.open();
    let mut sizes = Vec::new();
    for round in 0..4 {
        let mut writes = tokio::task::JoinSet::new();
        for number in 0..ROUND {
            let store = store.clone();
            writes.spawn(async move {
                let key = key(&format!("{round}-{number}"));
                let running = claim(&store, &key).await;
                let output = Output::kept("text/plain", vec![b'x'; 500]);
                let brief = Duration::ZERO;
                keep(&store, &key, &running, Record { output, retention: brief, ..record(State::Done) }).await;
            });
        }
        while let Some(written) = writes.join_next().await {
            written.unwrap();
        }
        let mut purged = 0;
        while purged < ROUND {
            let removed = store.purge(&Filter { page_max: 400, ..Filter::default() }).await.unwrap().records;
            assert!((1..=400).contains(&removed), "{removed} of the rest of {}", ROUND - purged);
            purged += removed;
        }
        sizes.push(std::fs::metadata(&place.path).unwrap().len());
    }
    assert!(sizes[3] <= sizes[1] + sizes[1] / 10, "it goes on growing: {sizes:?}");
}
