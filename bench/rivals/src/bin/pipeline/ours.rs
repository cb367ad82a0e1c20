//! A worker of taskonce on Redis Streams, with its ledger on the same Redis.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use taskonce::routes::Routes;
use taskonce::source::{self, Entrance, Envelope};
use taskonce::worker::Worker;
use taskonce_testkit::RedisServer;
use tokio::task::JoinSet;

use crate::{AT_ONCE, clock};

const ROUTES: &str = r#"
[sources.queue]
[handlers."empty@1"]
effect = "keyed"
concurrency_max = 64
[routes.queue."empty@1"]
"#;

pub(crate) async fn rate(server: &RedisServer, tasks: usize) -> Result<f64> {
    let queue = source::open(&format!("{}?name=queue", server.url()))?;
    let mut sends = JoinSet::new();
    for number in 0..tasks {
        if sends.len() == AT_ONCE {
            sends.join_next().await.context("a send is under way")???;
        }
        let queue = Arc::clone(&queue);
        sends.spawn(async move {
            let task = Envelope { key: Some(format!("default/empty@1/{number}")), ..Envelope::new("empty@1", "null") };
            queue.send(&task, Duration::ZERO, Entrance::Open).await.map(drop)
        });
    }
    while let Some(sent) = sends.join_next().await {
        sent??;
    }
    let worker = Worker::builder(taskonce::open(&server.url())?, Routes::from_toml(ROUTES)?)
        .source(queue)
        .concurrency_max(AT_ONCE)
        .handler("empty@1", |_context, _payload: Value| std::future::ready(Ok(())))
        .build()?;
    let monitor = worker.monitor();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let working = tokio::spawn(worker.run_until(async { drop(stopped.await) }));
    let rate = clock(tasks, || Ok(usize::try_from(monitor.counts().of("completed"))?)).await?;
    drop(stop);
    let report = working.await?;
    ensure!(report.is_clean(), "{report}");
    Ok(rate)
}
