//! What goes wrong around a worker: its store, its source, its handlers, and what newer programs wrote.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use taskonce::routes::{Rate, Routes, Settings, SourceRules, StoreAway};
use taskonce::store::MemoryStore;
use taskonce::worker::Worker;
use taskonce::{Effect, Failure, Heart, Host, Ledger, State, SystemHost};
use taskonce_contract::records::of_a_newer_format;

use crate::stage::{CHARGE, Gauge, Kind, Order, Stage, on_both, start, until};
use crate::wrap::Meter;

on_both!(mod memory and mod sqlite:
    while_the_store_is_away_nothing_runs_and_no_attempt_is_counted,
    a_route_that_is_open_runs_unguarded_while_the_store_is_away,
    a_source_that_was_away_is_received_from_again,
    a_handler_that_hangs_is_ended_and_the_others_go_on,
    a_store_that_goes_away_while_tasks_run_doubles_and_loses_nothing,
    a_handler_whose_lease_is_lost_is_cancelled_and_its_task_is_taken_over,
);

async fn while_the_store_is_away_nothing_runs_and_no_attempt_is_counted(stage: Stage) {
    stage.store_is_away(true);
    stage.send_many(200, 1).await;
    let running = start(stage.simple(Stage::settings()));
    until("it is told", || running.count("degraded") > 0).await;
    // sleeps: so that a worker that asks again and again would have done so often
    tokio::time::sleep(Duration::from_secs(1)).await;
    // One batch before the first answer, and then one at a time after pauses that double.
    let tried = running.count("degraded");
    assert!(tried <= 64 + 10, "{tried} deliveries tried a store that is away");
    assert_eq!((stage.effects.count(), stage.dead().await.len()), (0, 0));
    stage.store_is_away(false);
    stage.is_worked_off().await;
    stage.effects.are_once(200);
    running.end().await;
    for number in 0..200 {
        let record = stage.record(&format!("order-{number}")).await.unwrap().record;
        assert_eq!((record.state, record.attempt), (State::Done, 1));
    }
}

async fn a_route_that_is_open_runs_unguarded_while_the_store_is_away(stage: Stage) {
    stage.store_is_away(true);
    stage.send("fine").await;
    stage.send("fails once").await;
    let (effects, tries) = (stage.effects.clone(), Arc::new(AtomicUsize::new(0)));
    let settings =
        Settings { effect: Some(Effect::Repeatable), store_away: Some(StoreAway::Open), ..Stage::settings() };
    let worker = stage
        .worker(settings)
        .handler(CHARGE, move |context, order: Order| {
            let (effects, tries) = (effects.clone(), Arc::clone(&tries));
            async move {
                assert!(context.may_start_effect());
                if order.id == "fails once" && tries.fetch_add(1, Ordering::SeqCst) == 0 {
                    return Err(Failure::retryable("no luck"));
                }
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    stage.effects.are_once(2);
    assert_eq!(running.count("unguarded"), 3, "each run that nothing guards is counted");
    stage.store_is_away(false);
    stage.send("guarded").await;
    stage.is_worked_off().await;
    assert_eq!((running.count("unguarded"), stage.effects.of("guarded")), (3, 1));
    assert_eq!(stage.record("guarded").await.unwrap().record.state, State::Done);
    running.end().await;
}

async fn a_source_that_was_away_is_received_from_again(stage: Stage) {
    let running = start(stage.simple(Stage::settings()));
    stage.source.is_away.store(true, Ordering::SeqCst);
    stage.send_many(20, 1).await;
    let before = stage.source.receives.load(Ordering::SeqCst);
    // sleeps: so that a worker that asks again and again would have done so often
    tokio::time::sleep(Duration::from_millis(700)).await;
    let asked = stage.source.receives.load(Ordering::SeqCst) - before;
    assert!(asked <= 10, "{asked} receives of a source that is away");
    stage.source.is_away.store(false, Ordering::SeqCst);
    stage.is_worked_off().await;
    stage.effects.are_once(20);
    running.end().await;
}

async fn a_handler_that_hangs_is_ended_and_the_others_go_on(stage: Stage) {
    for id in ["hangs", "a", "b", "c"] {
        stage.send(id).await;
    }
    let effects = stage.effects.clone();
    let settings = Settings {
        run_max: Some(Some(Duration::from_millis(150))),
        attempts_max: Some(2),
        concurrency_max: Some(1),
        ..Stage::settings()
    };
    let worker = stage
        .worker(settings)
        .handler(CHARGE, move |_context, order: Order| {
            let effects = effects.clone();
            async move {
                if order.id == "hangs" {
                    std::future::pending::<()>().await;
                }
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    stage.effects.are_once(3);
    let dead = stage.dead().await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert!(dead[0].death.message.contains("run_max"), "{:?}", dead[0].death);
    assert_eq!((running.count("failed"), running.count("dead")), (1, 1));
    running.end().await;
}

async fn a_store_that_goes_away_while_tasks_run_doubles_and_loses_nothing(stage: Stage) {
    stage.send_many(300, 1).await;
    let (effects, gauge) = (stage.effects.clone(), Arc::new(Gauge::default()));
    let entered = Arc::clone(&gauge);
    let worker = stage
        .worker(Settings { lease: Some(Duration::from_secs(8)), ..Stage::settings() })
        .handler(CHARGE, move |_context, order: Order| {
            let (effects, entered) = (effects.clone(), Arc::clone(&entered));
            async move {
                entered.up();
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    for round in 1..4 {
        until("tasks run", || gauge.now() >= round * 40).await;
        stage.store_is_away(true);
        // sleeps: the store is away for so long, all in all far less than a lease
        tokio::time::sleep(Duration::from_millis(150)).await;
        stage.store_is_away(false);
    }
    stage.is_worked_off().await;
    stage.effects.are_once(300);
    running.end().await;
}

async fn a_handler_whose_lease_is_lost_is_cancelled_and_its_task_is_taken_over(stage: Stage) {
    stage.send("a").await;
    let (effects, entered) = (stage.effects.clone(), Arc::new(Gauge::default()));
    let held = Arc::clone(&entered);
    let worker = stage
        .worker(Settings { lease: Some(Duration::from_millis(600)), ..Stage::settings() })
        .handler(CHARGE, move |context, order: Order| {
            let (effects, held) = (effects.clone(), Arc::clone(&held));
            async move {
                held.up();
                if context.attempt() == 1 {
                    std::future::pending::<()>().await;
                }
                effects.happen(&order.id);
                Ok(())
            }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("it runs", || entered.now() == 1).await;
    stage.store_is_away(true);
    until("its lease is lost", || running.count("lease_lost") == 1).await;
    stage.store_is_away(false);
    stage.is_worked_off().await;
    stage.effects.are_once(1);
    assert_eq!((entered.now(), running.count("completed")), (2, 1));
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_a_newer_format_is_left_to_a_newer_worker() {
    let mut stage = Stage::new(Kind::Memory);
    let host: Arc<dyn Host> = Arc::new(SystemHost::new());
    let clock = Arc::clone(&host);
    let store = MemoryStore::new(move || clock.uptime());
    stage.ledger =
        Ledger::new(Arc::new(store.clone()), Arc::clone(&host), Arc::new(Heart::new(Arc::new(store.clone()), host)));
    store.put_raw(&Stage::key("newer"), of_a_newer_format());
    store.put_raw(&Stage::key("damaged"), b"no record".to_vec());
    stage.send("newer").await;
    stage.send("damaged").await;
    let running = start(stage.simple(Stage::settings()));
    until("both are told", || running.count("newer") == 1 && running.count("unreadable") == 1).await;
    running.end().await;
    let dead = stage.dead().await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!(dead[0].death.id, "unreadable_record/default/charge@2/damaged");
    assert_eq!((stage.depth().await.deferred, stage.effects.count()), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_of_which_nothing_arrives_is_told() {
    let stage = Stage::new(Kind::Memory);
    stage.send("a").await;
    stage.source.is_mute.store(true, Ordering::SeqCst);
    let effects = stage.effects.clone();
    let worker = stage
        .worker(Stage::settings())
        .stalled_after(Duration::from_millis(200))
        .handler(CHARGE, move |_context, order: Order| {
            effects.happen(&order.id);
            async { Ok(()) }
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("it is told", || running.count("stalled") > 0).await;
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_beyond_their_share_are_put_off_and_no_attempt_is_counted() {
    let stage = Stage::new(Kind::Memory);
    stage.send_many(30, 1).await;
    // No first start saves a retry up, and one an hour comes through all the same.
    let floor = Rate::parse("1/h").unwrap();
    let rules = SourceRules { retry_share: 0.01, retry_floor: floor, ..SourceRules::new("queue") };
    let routes = Routes::builder()
        .source(rules, Settings::default())
        .handler(CHARGE, Stage::settings())
        .route("queue", CHARGE, Settings::default())
        .build()
        .unwrap();
    let worker = Worker::builder(stage.ledger.clone(), routes)
        .source(Arc::<Meter>::clone(&stage.source))
        .handler(CHARGE, |_context, _order: Order| async { Err::<(), _>(Failure::retryable("down")) })
        .build()
        .unwrap();
    let running = start(worker);
    until("every first attempt was made, and a retry put off", || {
        running.count("failed") >= 30 && running.count("retry_put_off") >= 10
    })
    .await;
    let budget = running.monitor.snapshot().budgets[0].1;
    assert_eq!((budget.first, budget.retries), (30, 1), "{budget:?}");
    running.end().await;
    for number in 0..30 {
        let record = stage.record(&format!("order-{number}")).await.unwrap().record;
        assert!(record.attempt <= 2 && record.state == State::Waiting, "{record:?}");
    }
}
