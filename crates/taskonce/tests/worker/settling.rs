//! How deliveries are settled, by what the claim says of their tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use taskonce::routes::{Settings, WithoutKey};
use taskonce::source::{Entrance, Envelope, Left, Source as _};
use taskonce::{By, Failure, Fields, Host as _, State, SystemHost, WallTime};

use crate::stage::{CHARGE, Order, Stage, VISIBILITY, on_both, start, until};

on_both!(mod memory and mod sqlite:
    each_of_many_duplicates_takes_effect_once,
    a_failed_task_comes_again_after_its_backoff,
    a_task_without_further_attempts_is_one_dead_letter_and_a_person_takes_it_back,
    what_cannot_be_read_goes_to_the_dead_letters_with_its_reason,
    a_handler_that_is_not_there_leaves_its_deliveries_in_place,
    a_delivery_without_a_key_is_treated_as_its_route_says,
    a_task_that_runs_longer_than_the_visibility_timeout_is_delivered_once,
    a_duplicate_of_a_running_task_is_deferred_and_never_acknowledged,
    a_settlement_whose_answer_was_lost_is_sent_again,
    what_is_older_than_its_record_would_be_waits_for_a_person,
);

pub(crate) async fn each_of_many_duplicates_takes_effect_once(stage: Stage) {
    stage.send_many(150, 3).await;
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    stage.effects.are_once(150);
    assert_eq!(running.count("completed"), 150);
    let others = running.count("replayed") + running.count("busy");
    assert!(others >= 300, "{others}");
    let report = running.end().await;
    assert!(report.is_clean(), "{report}");
}

pub(crate) async fn a_failed_task_comes_again_after_its_backoff(stage: Stage) {
    stage.send("a").await;
    let (effects, tries) = (stage.effects.clone(), Arc::new(AtomicUsize::new(0)));
    let tried = Arc::clone(&tries);
    let worker = stage
        .worker(Stage::settings())
        .handler(CHARGE, move |context, order: Order| {
            let (effects, is_first) = (effects.clone(), tried.fetch_add(1, Ordering::SeqCst) == 0);
            async move {
                assert_eq!(context.attempt() == 1, is_first);
                if is_first {
                    return Err(Failure::retryable("no luck").retry_after(Duration::from_millis(80)));
                }
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    assert_eq!((tries.load(Ordering::SeqCst), running.count("failed"), running.count("completed")), (2, 1, 1));
    running.end().await;
    assert_eq!(stage.record("a").await.unwrap().record.attempt, 2);
}

pub(crate) async fn a_task_without_further_attempts_is_one_dead_letter_and_a_person_takes_it_back(stage: Stage) {
    for _copy in 0..3 {
        stage.send("a").await;
    }
    let (effects, tries) = (stage.effects.clone(), Arc::new(AtomicUsize::new(0)));
    let tried = Arc::clone(&tries);
    let worker = stage
        .worker(Settings { attempts_max: Some(2), ..Stage::settings() })
        .handler(CHARGE, move |_context, order: Order| {
            let (effects, count) = (effects.clone(), tried.fetch_add(1, Ordering::SeqCst));
            async move {
                if count < 2 {
                    return Err(Failure::retryable(format!("no luck, {count}")));
                }
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    assert_eq!(tries.load(Ordering::SeqCst), 2, "copies count their attempts together");
    let dead = stage.dead().await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    let death = &dead[0].death;
    assert_eq!((&*death.id, &*death.reason, &*death.message), ("dead/default/charge@2/a", "dead", "no luck, 1"));

    let person = By { who: "eva", why: "mended" };
    stage.ledger.redrive(&Stage::key("a"), person).await.unwrap();
    assert_eq!(stage.source.redrive(&death.id).await.unwrap(), Left::Done);
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    assert_eq!((running.count("redriven"), running.count("completed")), (1, 1));
    running.end().await;
}

pub(crate) async fn what_cannot_be_read_goes_to_the_dead_letters_with_its_reason(stage: Stage) {
    stage.send("good").await;
    stage.send_raw(CHARGE, Some("default/charge@2/no-json"), "no json").await;
    stage.send_raw(CHARGE, Some("default/charge@2/no-order"), "{\"secret\": 7}").await;
    stage.send_raw(CHARGE, Some("default/other@1/a"), "{\"id\": \"a\"}").await;
    stage.send_raw(CHARGE, None, "{\"id\": \"a\"}").await;
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    // A key is in use for another payload only once that one was claimed.
    stage.send_raw(CHARGE, Some("default/charge@2/good"), "{\"id\": \"another\"}").await;
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    let mut reasons: Vec<String> = stage.dead().await.iter().map(|line| line.death.reason.clone()).collect();
    reasons.sort();
    assert_eq!(reasons, ["mismatch", "unreadable", "unreadable", "unreadable", "unreadable"]);
    let messages: Vec<String> = stage.dead().await.into_iter().map(|line| line.death.message).collect();
    assert!(messages.iter().any(|message| message.contains("fingerprint")), "{messages:?}");
    assert!(messages.iter().all(|message| !message.contains("secret")), "no payload: {messages:?}");
    assert_eq!((running.count("unreadable"), running.count("mismatch")), (4, 1));
    running.end().await;
    assert_eq!(stage.record("no-order").await, None, "nothing was claimed of what cannot be read");
}

async fn a_handler_that_is_not_there_leaves_its_deliveries_in_place(stage: Stage) {
    stage.send_raw("newcomer@1", Some("default/newcomer@1/a"), "{}").await;
    stage.send("a").await;
    let effects = stage.effects.clone();
    let worker = stage
        .worker_of(&[(CHARGE, Stage::settings()), ("newcomer@1", Stage::settings())])
        .stalled_after(Duration::from_millis(100))
        .handler(CHARGE, move |_context, order: Order| {
            effects.happen(&order.id);
            async { Ok(()) }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("the unknown one is told of", || running.count("left_in_place") > 0).await;
    until("the known one runs", || stage.effects.count() == 1).await;
    running.end().await;
    let depth = stage.depth().await;
    assert_eq!((depth.ready, depth.dead, depth.in_flight), (1, 0, 0), "it waits for a worker that has it");
}

async fn a_delivery_without_a_key_is_treated_as_its_route_says(stage: Stage) {
    for _copy in 0..2 {
        stage.send_raw("by-field@1", None, "{\"id\": \"a\", \"sent_at\": 1}").await;
        stage.send_raw("by-place@1", None, "{\"id\": \"b\"}").await;
        stage.send_raw("by-place@1", Some("given"), "{\"id\": \"c\"}").await;
    }
    let derived = WithoutKey::Derive(Fields::new(["/id"]).unwrap());
    let by = |without_key| Settings { without_key: Some(without_key), ..Stage::settings() };
    let mut builder = stage.worker_of(&[("by-field@1", by(derived)), ("by-place@1", by(WithoutKey::Coordinates))]);
    for name in ["by-field@1", "by-place@1"] {
        let effects = stage.effects.clone();
        builder = builder.handler(name, move |_context, order: Order| {
            effects.happen(&order.id);
            async { Ok(()) }
        });
    }
    let running = start(builder.build().unwrap());
    stage.is_worked_off().await;
    running.end().await;
    let counts = ["a", "b", "c"].map(|id| stage.effects.of(id));
    assert_eq!(counts, [1, 2, 1], "a broker's name for a delivery tells none of two sendings");
}

async fn a_task_that_runs_longer_than_the_visibility_timeout_is_delivered_once(stage: Stage) {
    stage.send("slow").await;
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Stage::settings())
        .handler(CHARGE, move |_context, order: Order| {
            let effects = effects.clone();
            async move {
                // sleeps: the visibility timeout has to pass several times
                tokio::time::sleep(VISIBILITY * 3).await;
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    assert_eq!((running.count("claimed"), running.count("busy")), (1, 0), "it was extended");
    running.end().await;
}

async fn a_duplicate_of_a_running_task_is_deferred_and_never_acknowledged(stage: Stage) {
    for _copy in 0..3 {
        stage.send("a").await;
    }
    let (effects, gate) = (stage.effects.clone(), Arc::new(tokio::sync::Semaphore::new(0)));
    let held = Arc::clone(&gate);
    let worker = stage
        .worker(Settings { lease: Some(Duration::from_secs(1)), ..Stage::settings() })
        .handler(CHARGE, move |_context, order: Order| {
            let (effects, held) = (effects.clone(), Arc::clone(&held));
            async move {
                held.acquire().await.unwrap().forget();
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("both duplicates are told that it is busy", || running.count("busy") >= 2).await;
    let depth = stage.depth().await;
    assert_eq!(depth.ready + depth.deferred + depth.in_flight, 3, "{depth:?}");
    gate.add_permits(1);
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    assert_eq!(running.count("replayed"), 2);
    running.end().await;
    assert_eq!(stage.record("a").await.unwrap().record.state, State::Done);
}

async fn a_settlement_whose_answer_was_lost_is_sent_again(stage: Stage) {
    stage.send_many(20, 2).await;
    stage.source.lose_answers.store(25, Ordering::SeqCst);
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    stage.effects.are_once(20);
    let report = running.end().await;
    assert_eq!(stage.source.lose_answers.load(Ordering::SeqCst), 0);
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.counts.of("not_settled"), stage.dead().await), (0, vec![]));
}

async fn what_is_older_than_its_record_would_be_waits_for_a_person(stage: Stage) {
    let now = SystemHost::new().wall_time().0;
    let day = 86_400_000;
    for (id, days) in [("fresh", 1), ("old", 20)] {
        let key = Some(Stage::key(id).to_string());
        let payload = format!("{{\"id\": \"{id}\"}}");
        let sent_at = Some(WallTime(now - days * day));
        let envelope = Envelope { key, sent_at, ..Envelope::new(CHARGE, payload) };
        stage.source.send(&envelope, Duration::ZERO, Entrance::Open).await.map(drop).unwrap();
    }
    let running = start(stage.simple(Stage::settings()));
    stage.is_worked_off().await;
    let dead = stage.dead().await;
    assert_eq!((stage.effects.of("fresh"), stage.effects.of("old"), dead.len()), (1, 0, 1), "{dead:?}");
    assert_eq!((&*dead[0].death.reason, running.count("too_old")), ("too_old", 1));
    assert_eq!(stage.source.redrive(&dead[0].death.id).await.unwrap(), Left::Done);
    stage.is_worked_off().await;
    stage.effects.are_once(2);
    running.end().await;
}
