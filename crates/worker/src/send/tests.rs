//! What a task and its envelope hold; what becomes of it at the entrance is in the facade's tests.

use std::collections::HashMap;
use std::sync::Mutex;

use super::*;

const INVOICE: &str = r#"{"amount": 12.0, "sent": 1}"#;

fn charge() -> Handler {
    Handler::within("shop", "charge", "2").unwrap()
}

fn headers(envelope: &Envelope) -> HashMap<&str, &str> {
    envelope.headers.iter().map(|(name, value)| (&**name, &**value)).collect()
}

#[test]
fn an_envelope_has_key_time_and_payload_as_given() {
    let task = NewTask::json(&charge(), Id::Given("a/b"), INVOICE)
        .unwrap()
        .header("traceparent", "00-1")
        .header("x", "y")
        .priority(Priority::High);
    let envelope = task.envelope(WallTime(1000), Duration::ZERO);
    assert_eq!(envelope.key.as_deref(), Some("shop/charge@2/a/b"));
    assert_eq!((&*envelope.handler, &*envelope.payload), ("charge@2", INVOICE.as_bytes()));
    assert_eq!(envelope.sent_at, Some(WallTime(1000)));
    assert_eq!(envelope.content_type.as_deref(), Some("application/json"));
    assert_eq!(envelope.priority, Priority::High);
    assert_eq!(headers(&envelope), HashMap::from([("traceparent", "00-1"), ("x", "y")]));
    let delayed = task.envelope(WallTime(1000), Duration::from_secs(2));
    assert_eq!((headers(&delayed)[DUE_HEADER], delayed.due_at()), ("3000", Some(WallTime(3000))));
}

#[test]
fn a_derived_key_carries_the_fingerprint_of_its_fields() {
    let fields = Fields::new(["/amount"]).unwrap();
    let of = |payload: &str| NewTask::json(&charge(), Id::Derived(&fields), payload).unwrap();
    let (one, two) = (of(INVOICE), of(r#"{"sent": 2, "amount": 12}"#));
    assert_eq!(one.task(), two.task());
    let carried = one.envelope(WallTime(1), Duration::ZERO);
    assert_eq!(headers(&carried)[FINGERPRINT_HEADER], one.task().fingerprint.to_string());
    let given = NewTask::json(&charge(), Id::Given("a"), INVOICE).unwrap();
    assert_eq!(given.envelope(WallTime(1), Duration::ZERO).header(FINGERPRINT_HEADER), None);
}

#[test]
fn a_value_is_sent_as_its_json_and_is_the_same_task() {
    let value = serde_json::json!({ "amount": 12, "sent": 1 });
    let (by_value, by_text) = (
        NewTask::value(&charge(), Id::Given("a"), &value).unwrap(),
        NewTask::json(&charge(), Id::Given("a"), INVOICE).unwrap(),
    );
    assert_eq!(by_value.task(), by_text.task());
    assert_eq!(by_value.payload, serde_json::to_vec(&value).unwrap());
    let error = NewTask::value(&charge(), Id::Given("a"), &f64::NAN).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFinite);
}

#[test]
fn the_same_tick_is_the_same_task() {
    let nightly = Name::new("nightly").unwrap();
    let at = |moment: u64| {
        let tick = tick_before(WallTime(moment), Duration::from_secs(3600));
        NewTask::json(&charge(), Id::Tick { schedule: &nightly, tick }, "{}").unwrap().key().clone()
    };
    assert_eq!(at(7_200_000).as_str(), "shop/charge@2/nightly/1970-01-01T02:00:00Z");
    assert_eq!(at(7_200_000), at(10_799_999));
    assert_ne!(at(7_200_000), at(10_800_000));
}

#[test]
fn bytes_that_claim_to_be_json_are_refused_as_bytes() {
    NewTask::bytes(&charge(), "a", "application/octet-stream", *b"\0").unwrap();
    let error = NewTask::bytes(&charge(), "a", "application/json; charset=utf-8", *b"\0").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadEnvelope);
}

#[tokio::test]
async fn what_is_due_too_late_is_refused_and_what_is_past_is_due_now() {
    let moved = Arc::new(Mutex::new(Duration::ZERO));
    let queue =
        Arc::new(crate::source::MemorySource::new("queue", Duration::from_secs(30), move || *moved.lock().unwrap()));
    let sender = Sender::new(Arc::<crate::source::MemorySource>::clone(&queue));
    let task = |due: Due| NewTask::json(&charge(), Id::Given("a"), "{}").unwrap().due(due);
    let error = sender.send(&task(Due::After(DELAY_MAX + Duration::from_secs(1)))).await.unwrap_err();
    assert_eq!((error.kind(), queue.kept()), (ErrorKind::BadEnvelope, 0));
    let entered = sender.send(&task(Due::At(WallTime(5)))).await.unwrap();
    assert_eq!(entered.name(), "accepted");
    let depth = crate::source::Depth::total(&queue.depth().await.unwrap());
    assert_eq!((depth.ready, depth.deferred), (1, 0));
}
