//! What a command is told of its task beside the payload: as variables, or as members of a line.

use std::collections::BTreeMap;

use serde::Serialize;
use taskonce::source::Delivery;
use taskonce::{Context, Effect};

/// What a command is told.
#[derive(Serialize)]
pub(crate) struct Facts {
    pub(crate) key: String,
    handler: String,
    source: String,
    attempt: u32,
    fence: u64,
    downstream_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
    /// Of a transactional effect: the claim that its transaction has to complete, and where.
    #[serde(skip_serializing_if = "Option::is_none")]
    claim_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<String>,
}

/// The headers that have variables of their own, as other tools know them.
const OF_TRACES: [(&str, &str); 3] =
    [("traceparent", "TRACEPARENT"), ("tracestate", "TRACESTATE"), ("baggage", "BAGGAGE")];

impl Facts {
    /// Those of a task that runs.
    pub(crate) fn of(context: &Context, delivery: &Delivery) -> Facts {
        let envelope = &delivery.envelope;
        let mut headers = BTreeMap::new();
        for (name, value) in &envelope.headers {
            // The first of a name counts.
            headers.entry(name.to_ascii_lowercase()).or_insert_with(|| value.clone());
        }
        // In the same trace, with this run as the parent.
        if let Some(of_run) = context.traceparent() {
            headers.insert(OF_TRACES[0].0.to_owned(), of_run);
        }
        let is_transactional = context.held().policy().effect == Effect::Transactional;
        let ground = context.ledger().store().ground().filter(|_| is_transactional);
        Facts {
            key: context.key().to_string(),
            handler: envelope.handler.clone(),
            source: delivery.source.to_string(),
            attempt: context.attempt(),
            fence: context.fence().0,
            downstream_key: context.downstream_key("").to_string(),
            content_type: envelope.content_type.clone(),
            headers,
            claim_id: ground.as_ref().map(|_| context.held().claim_id().to_string()),
            schema: ground.map(|ground| ground.place),
        }
    }

    /// They as variables.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let mut variables = vec![
            ("TASKONCE_KEY".to_owned(), self.key.clone()),
            ("TASKONCE_HANDLER".to_owned(), self.handler.clone()),
            ("TASKONCE_SOURCE".to_owned(), self.source.clone()),
            ("TASKONCE_ATTEMPT".to_owned(), self.attempt.to_string()),
            ("TASKONCE_FENCE".to_owned(), self.fence.to_string()),
            ("TASKONCE_DOWNSTREAM_KEY".to_owned(), self.downstream_key.clone()),
            ("TASKONCE_HEADERS".to_owned(), serde_json::json!(self.headers).to_string()),
        ];
        let further = [
            ("TASKONCE_CONTENT_TYPE", self.content_type.as_ref()),
            ("TASKONCE_CLAIM_ID", self.claim_id.as_ref()),
            ("TASKONCE_SCHEMA", self.schema.as_ref()),
        ];
        let traces = OF_TRACES.map(|(header, variable)| (variable, self.headers.get(header)));
        for (name, value) in further.into_iter().chain(traces) {
            variables.extend(value.map(|value| (name.to_owned(), value.clone())));
        }
        // No variable can have one; a foreign producer may have sent one.
        variables.retain(|(_, value)| !value.contains('\0'));
        variables
    }
}
