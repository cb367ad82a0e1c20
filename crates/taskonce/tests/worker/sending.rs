//! What becomes of a task at the entrance, and what a delayed one is when it comes.

use std::sync::Arc;
use std::time::Duration;

use taskonce::routes::Settings;
use taskonce::send::{Due, Entered, Id, NewTask, Sender};
use taskonce::source::{DELAY_MAX, DUE_HEADER, Entrance, Envelope};
use taskonce::{By, Failure, Fields, Handler, State, WallTime};
use tokio::sync::mpsc;

use crate::stage::{CHARGE, Order, PATIENCE, Stage, on_both, start};

on_both!(mod memory and mod sqlite:
    a_sender_is_told_what_is_queued_and_what_is_done,
    a_sender_is_told_what_is_dead_and_what_a_redrive_makes_of_it,
    another_payload_under_a_key_is_refused_at_the_entrance,
    a_duplicate_whose_other_fields_differ_is_replayed_and_no_mismatch,
    a_task_delayed_for_longer_than_records_stay_runs,
    a_retry_keeps_its_record_and_its_place_in_the_queue,
    a_handler_hands_on_the_trace_that_its_task_came_with,
);

fn charge() -> Handler {
    Handler::new("charge", "2").unwrap()
}

fn order(id: &str) -> NewTask {
    NewTask::value(&charge(), Id::Given(id), &Order { id: id.into() }).unwrap()
}

fn sender(stage: &Stage) -> Sender {
    Sender::new(Arc::clone(&stage.source.inner)).once().asking(stage.ledger.clone())
}

pub(crate) async fn a_sender_is_told_what_is_queued_and_what_is_done(stage: Stage) {
    let sender = sender(&stage);
    let Entered::Accepted { key, coordinates } = sender.send(&order("a")).await.unwrap() else { panic!("it is new") };
    let again = sender.send(&order("a")).await.unwrap();
    assert_eq!(again, Entered::AlreadyQueued { key: key.clone(), coordinates, known: None });
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    match sender.send(&order("a")).await.unwrap() {
        Entered::AlreadyDone { key: done, known } => {
            assert_eq!((done, known.state, known.attempt), (key, State::Done, 1));
            assert!(known.age < PATIENCE, "{known:?}");
        }
        other => panic!("it is done: {other:?}"),
    }
    running.end().await;
    assert_eq!(stage.source.inner.depth().await.unwrap(), []);
    stage.effects.are_once(1);
}

pub(crate) async fn a_sender_is_told_what_is_dead_and_what_a_redrive_makes_of_it(stage: Stage) {
    let sender = sender(&stage);
    let worker = stage.worker(Stage::settings()).handler(CHARGE, |_context, _order: Order| async move {
        Err::<(), _>(Failure::permanent("the card was declined"))
    });
    let running = start(worker.build().unwrap());
    assert_eq!(sender.send(&order("a")).await.unwrap().name(), "accepted");
    stage.is_worked_off().await;
    running.end().await;
    let entered = sender.send(&order("a")).await.unwrap();
    let Entered::Ended { known, .. } = &entered else { panic!("it is dead: {entered:?}") };
    assert_eq!((entered.name(), known.state), ("dead", State::Dead));
    assert_eq!(known.failure.as_ref().map(|failure| &*failure.message), Some("the card was declined"));
    stage.ledger.redrive(&Stage::key("a"), By { who: "ada", why: "the card works" }).await.unwrap();
    assert_eq!(sender.send(&order("a")).await.unwrap().name(), "accepted", "it is in work, and nothing is queued");
}

async fn another_payload_under_a_key_is_refused_at_the_entrance(stage: Stage) {
    let sender = sender(&stage);
    assert_eq!(sender.send(&order("a")).await.unwrap().name(), "accepted");
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    running.end().await;
    let other = NewTask::value(&charge(), Id::Given("a"), &Order { id: "b".into() }).unwrap();
    match sender.send(&other).await.unwrap() {
        Entered::Mismatch { held, given, known, .. } => {
            assert_eq!((held, given), (order("a").task().fingerprint, other.task().fingerprint));
            assert_eq!(known.state, State::Done);
        }
        entered => panic!("it is a mismatch: {entered:?}"),
    }
    assert_eq!(stage.source.inner.depth().await.unwrap(), []);
}

/// The key says which fields count. Without the fingerprint of these a worker compared the whole payload, and a producer that
/// sent again with another time of sending made a dead letter of a good duplicate.
async fn a_duplicate_whose_other_fields_differ_is_replayed_and_no_mismatch(stage: Stage) {
    let fields = Fields::new(["/id"]).unwrap();
    let sender = Sender::new(Arc::clone(&stage.source.inner));
    for sent in 0..2 {
        let payload = serde_json::json!({ "id": "a", "sent": sent });
        let task = NewTask::value(&charge(), Id::Derived(&fields), &payload).unwrap();
        assert_eq!(sender.send(&task).await.unwrap().name(), "accepted");
    }
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    assert_eq!((running.count("completed"), running.count("replayed"), running.count("mismatch")), (1, 1, 0));
    running.end().await;
    stage.effects.are_once(1);
}

/// A task that was sent with a delay of more than nine tenths of the retention was a dead letter, `too_old`, when it came.
async fn a_task_delayed_for_longer_than_records_stay_runs(stage: Stage) {
    let retention = Duration::from_secs(3600);
    let settings = Settings { retention: Some(retention), ..Stage::settings() };
    let sent = |due_after: Duration| {
        // As it is when its delay is over: sent long ago, due just now.
        let now = stage.ledger.host().wall_time();
        let sent_at = WallTime(now.0 - u64::try_from((2 * retention).as_millis()).unwrap());
        let mut envelope = Envelope::new(CHARGE, serde_json::to_vec(&Order { id: "a".into() }).unwrap());
        envelope.sent_at = Some(sent_at);
        let due_at = sent_at.0 + u64::try_from(due_after.as_millis()).unwrap();
        envelope.headers = vec![(DUE_HEADER.into(), due_at.to_string())];
        envelope
    };
    let queue = &stage.source.inner;
    let once = Entrance::Open;
    let due = Envelope { key: Some("due".into()), ..sent(2 * retention) };
    let old = Envelope { key: Some("old".into()), ..sent(retention / 100) };
    for envelope in [&due, &old] {
        queue.send(envelope, Duration::ZERO, once).await.map(drop).unwrap();
    }
    let running = start(stage.simple(settings));
    stage.is_worked_off().await;
    assert_eq!((running.count("completed"), running.count("too_old")), (1, 1));
    running.end().await;
    // The sender says when a delayed one is due, to the longest delay that there is.
    let sender = Sender::new(Arc::clone(queue));
    let entered = sender.send(&order("later").due(Due::After(DELAY_MAX))).await.unwrap();
    assert_eq!(entered.name(), "accepted");
}

async fn a_handler_hands_on_the_trace_that_its_task_came_with(stage: Stage) {
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (told, mut traces) = mpsc::unbounded_channel();
    let queue = Arc::clone(&stage.source.inner);
    let worker = stage.worker(Stage::settings()).handler(CHARGE, move |context, given: Order| {
        let (told, queue) = (told.clone(), Arc::clone(&queue));
        async move {
            told.send((given.id.clone(), context.traceparent())).unwrap();
            if given.id == "parent" {
                // What a handler sends goes on in its trace.
                Sender::new(queue)
                    .send(&order("child"))
                    .await
                    .map(drop)
                    .map_err(|error| Failure::retryable(error.to_string()))?;
            }
            Ok(())
        }
    });
    let running = start(worker.build().unwrap());
    let sender = sender(&stage);
    assert_eq!(sender.send(&order("parent").header("TraceParent", PARENT)).await.unwrap().name(), "accepted");
    let mut next = async || tokio::time::timeout(PATIENCE, traces.recv()).await.unwrap().unwrap();
    let (parent, child) = (next().await, next().await);
    assert_eq!((&*parent.0, &*child.0), ("parent", "child"));
    let (parent, child) = (parent.1.unwrap(), child.1.unwrap());
    assert_eq!((&parent[..36], &child[..36]), (&PARENT[..36], &PARENT[..36]), "one trace");
    assert!(parent[36..52] != PARENT[36..52] && child[36..52] != parent[36..52], "each has a span of its own");
    assert_eq!(sender.send(&order("alone")).await.unwrap().name(), "accepted");
    assert_eq!(next().await, ("alone".into(), None), "no trace is made up");
    running.end().await;
}

/// Elsewhere a retry lost its claim, or was refused by its own unique key.
pub(crate) async fn a_retry_keeps_its_record_and_its_place_in_the_queue(stage: Stage) {
    let sender = sender(&stage);
    let settings = Settings {
        backoff_min: Some(Duration::from_millis(1500)),
        backoff_max: Some(Duration::from_millis(1500)),
        ..Stage::settings()
    };
    let (told, mut attempts) = mpsc::unbounded_channel();
    let worker = stage.worker(settings).handler(CHARGE, move |context, _order: Order| {
        told.send(context.attempt()).unwrap();
        async move {
            match context.attempt() {
                1 => Err(Failure::retryable("not yet").retry_after(Duration::from_millis(700))),
                _ => Ok(()),
            }
        }
    });
    let running = start(worker.build().unwrap());
    let Entered::Accepted { coordinates, .. } = sender.send(&order("a")).await.unwrap() else { panic!("it is new") };
    assert_eq!(tokio::time::timeout(PATIENCE, attempts.recv()).await.unwrap(), Some(1));
    let began = std::time::Instant::now();
    while stage.record("a").await.unwrap().record.state != State::Waiting {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    match sender.send(&order("a")).await.unwrap() {
        Entered::AlreadyQueued { coordinates: queued, known: Some(known), .. } => {
            assert_eq!((queued, known.state, known.attempt), (coordinates, State::Waiting, 1));
        }
        entered => panic!("it waits for its retry: {entered:?}"),
    }
    stage.is_worked_off().await;
    assert_eq!(attempts.recv().await, Some(2));
    running.end().await;
    let record = stage.record("a").await.unwrap().record;
    assert_eq!((record.state, record.attempt), (State::Done, 2));
}
