//! The queue's health, for people: what is looked at beside the servers themselves.

use std::sync::Arc;

use async_trait::async_trait;
use taskonce_core::store::{Finding, Level};
use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::dial::exchange;
use taskonce_redis_wire::examine::Further;
use taskonce_redis_wire::health::finding;
use taskonce_redis_wire::node::Target;
use taskonce_redis_wire::server::Server;
use taskonce_redis_wire::wire::{Commands, Reply};
use tokio::time::timeout_at;

/// What the queue looks at.
pub(crate) struct OfQueue;

#[async_trait]
impl Further for OfQueue {
    fn version(&self, _server: &Server) -> String {
        String::new()
    }

    /// Whether those who wait are called by the server, or look again and again.
    async fn look_at(&self, links: &Arc<Links>, server: &Target) -> Option<Finding> {
        let subject = "waiting";
        let asks = async {
            let mut wire = links.connect_to(server).await?;
            let mut commands = Commands::default();
            commands.add(&[b"CLIENT", b"TRACKING", b"OFF"]);
            exchange(&mut wire, &commands).await
        };
        Some(match timeout_at(links.deadline(), asks).await {
            Ok(Ok(replies)) if matches!(replies.first(), Some(Reply::Error(_))) => finding(
                Level::Warning,
                subject,
                "the server does not call those who wait for deliveries, so they look once a second for each handler",
                "allow the user `hello` and `client|tracking`",
            ),
            Ok(Ok(_)) => {
                finding(Level::Fine, subject, "the server calls those who wait for deliveries (`CLIENT TRACKING`)", "")
            }
            Ok(Err(refusal)) => finding(Level::Warning, subject, refusal.message(), "try again"),
            Err(_elapsed) => finding(Level::Warning, subject, "no second connection was made in time", "try again"),
        })
    }

    async fn look(&self, _links: &Arc<Links>) -> Vec<Finding> {
        Vec::new()
    }
}
