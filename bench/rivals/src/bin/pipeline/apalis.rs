//! A worker of apalis with its Redis backend, in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, anyhow};
use apalis::prelude::*;
use apalis_redis::{Config, RedisStorage};
use taskonce_testkit::RedisServer;

use crate::{AT_ONCE, clock};

pub(crate) async fn rate(server: &RedisServer, tasks: usize) -> Result<f64> {
    let connection = apalis_redis::connect(server.url()).await?;
    let mut storage = RedisStorage::new(connection).with_config(Config::default().batch_size(AT_ONCE));
    for number in 0..tasks {
        storage.push(number).await.map_err(|error| anyhow!("{error}"))?;
    }
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ran);
    let empty = move |_number: usize| {
        counted.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok::<(), BoxDynError>(()))
    };
    let worker = WorkerBuilder::new("rival").backend(storage).parallelize(tokio::spawn).build(empty);
    let working = tokio::spawn(worker.run());
    let rate = clock(tasks, || Ok(ran.load(Ordering::Relaxed))).await;
    working.abort();
    rate
}
