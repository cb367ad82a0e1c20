//! The store's health, for people: what is looked at beside the servers themselves.

use std::sync::Arc;

use async_trait::async_trait;
use taskonce_core::store::{Finding, Level};
use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::examine::Further;
use taskonce_redis_wire::health::finding;
use taskonce_redis_wire::node::Target;
use taskonce_redis_wire::server::Server;
use tokio::time::timeout_at;

use crate::{lists, watch_line};

/// What the store looks at.
pub(crate) struct OfStore;

#[async_trait]
impl Further for OfStore {
    fn version(&self, server: &Server) -> String {
        let how =
            if server.compares() { "compares records itself (`SET … IFEQ`)" } else { "compares records by a script" };
        format!(", which {how}")
    }

    async fn look_at(&self, links: &Arc<Links>, server: &Target) -> Option<Finding> {
        Some(waiting(links, server).await)
    }

    async fn look(&self, links: &Arc<Links>) -> Vec<Finding> {
        vec![lists::finding(links).await]
    }
}

/// Whether those who wait for a task are called by the server, or look again and again.
async fn waiting(links: &Arc<Links>, server: &Target) -> Finding {
    let subject = "waiting";
    let enters = async { watch_line::can_enter(links.connect_to(server).await?).await };
    match timeout_at(links.deadline(), enters).await {
        Ok(Ok(true)) => {
            finding(Level::Fine, subject, "the server calls those who wait for a task (`CLIENT TRACKING`)", "")
        }
        Ok(Ok(false)) => finding(
            Level::Warning,
            subject,
            "the server does not call those who wait for a task, so they look again every 10 to 250 ms",
            "allow the user `hello` and `client|tracking`",
        ),
        Ok(Err(refusal)) => finding(Level::Warning, subject, refusal.message(), "try again"),
        Err(_elapsed) => finding(Level::Warning, subject, "no second connection was made in time", "try again"),
    }
}
