//! A worker of apalis with its Redis backend, in this process. How many tasks are done is what its records say.

use anyhow::{Result, anyhow};
use apalis::prelude::*;
use apalis_redis::{Config, RedisStorage};
use taskonce_testkit::RedisServer;

use crate::foreign::count;
use crate::{AT_ONCE, clock};

pub(crate) async fn rate(server: &RedisServer, tasks: usize) -> Result<f64> {
    let connection = apalis_redis::connect(server.url()).await?;
    let config = Config::default().batch_size(AT_ONCE);
    let done = config.done_jobs_set();
    let mut storage = RedisStorage::new(connection).with_config(config);
    for number in 0..tasks {
        storage.push(number).await.map_err(|error| anyhow!("{error}"))?;
    }
    let empty = |_number: usize| std::future::ready(Ok::<(), BoxDynError>(()));
    let worker = WorkerBuilder::new("rival").backend(storage).parallelize(tokio::spawn).build(empty);
    tokio::select! {
        ended = worker.run() => Err(anyhow!("apalis ended: {ended:?}")),
        rate = clock(tasks, || count(server, &["SCARD", &done])) => rate,
    }
}
