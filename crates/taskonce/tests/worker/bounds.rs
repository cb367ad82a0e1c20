//! How much a worker asks for, holds and runs at once.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use taskonce::routes::{BreakerState, Rate, Settings};
use taskonce::source::{Entrance, Envelope};
use taskonce::worker::{Monitor, Worker};
use taskonce::{Effect, ErrorKind, Failure};

use crate::stage::{CHARGE, Gauge, Kind, Order, Stage, on_both, start, until};

on_both!(mod memory and mod sqlite:
    never_more_run_at_once_than_the_route_and_the_process_allow,
    a_route_with_a_backlog_holds_up_no_other,
    what_is_settled_slowly_keeps_no_task_from_running_and_is_bounded,
    an_idle_worker_asks_twice_a_second_at_most,
);

async fn never_more_run_at_once_than_the_route_and_the_process_allow(stage: Stage) {
    let names = [("narrow@1", 2), ("wide@1", 50)];
    for number in 0..40 {
        for (name, _) in names {
            stage.send_raw(name, Some(&format!("{number}")), format!("{{\"id\": \"{name} {number}\"}}")).await;
        }
    }
    let settings = names.map(|(name, most)| (name, Settings { concurrency_max: Some(most), ..Stage::settings() }));
    let (all, gauges) = (Arc::new(Gauge::default()), [Arc::new(Gauge::default()), Arc::new(Gauge::default())]);
    let mut builder = stage.worker_of(&settings).concurrency_max(6);
    for ((name, _), gauge) in names.iter().zip(&gauges) {
        let (effects, all, gauge) = (stage.effects.clone(), Arc::clone(&all), Arc::clone(gauge));
        builder = builder.handler(name, move |_context, order: Order| {
            let (effects, all, gauge) = (effects.clone(), Arc::clone(&all), Arc::clone(&gauge));
            async move {
                all.up();
                gauge.up();
                // sleeps: so that several run at once
                tokio::time::sleep(Duration::from_millis(5)).await;
                all.down();
                gauge.down();
                effects.happen(&order.id);
                Ok(())
            }
        });
    }
    let running = start(builder.build().unwrap());
    stage.is_worked_off().await;
    stage.effects.are_once(80);
    running.end().await;
    let most = |gauge: &Gauge| gauge.most.load(Ordering::SeqCst);
    assert_eq!((most(&all), most(&gauges[0])), (6, 2));
    assert!(stage.source.most.load(Ordering::SeqCst) <= 12, "what cannot be started soon is not received");
}

async fn what_is_settled_slowly_keeps_no_task_from_running_and_is_bounded(stage: Stage) {
    /// Settlements under way at which nothing more is started.
    const SETTLING_MAX: usize = 256;
    stage.send_many(2 * SETTLING_MAX, 1).await;
    stage.source.is_slow.store(true, Ordering::SeqCst);
    let effects = stage.effects.clone();
    let worker = stage.worker(Stage::settings()).concurrency_max(1).handler(CHARGE, move |_context, order: Order| {
        effects.happen(&order.id);
        async { Ok(()) }
    });
    let running = start(worker.build().unwrap());
    until("tasks run though none is settled", || stage.effects.count() == SETTLING_MAX).await;
    // sleeps: a task more would start within this time
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(stage.effects.count(), SETTLING_MAX, "what is not settled is bounded");
    stage.source.is_slow.store(false, Ordering::SeqCst);
    stage.is_worked_off().await;
    stage.effects.are_once(2 * SETTLING_MAX);
    running.end().await;
}

pub(crate) async fn a_route_with_a_backlog_holds_up_no_other(stage: Stage) {
    for number in 0..300 {
        stage.send_raw("busy@1", Some(&format!("{number}")), format!("{{\"id\": \"busy {number}\"}}")).await;
    }
    for number in 0..5 {
        stage.send_raw("rare@1", Some(&format!("{number}")), format!("{{\"id\": \"rare {number}\"}}")).await;
    }
    let order_of = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut builder =
        stage.worker_of(&[("busy@1", Stage::settings()), ("rare@1", Stage::settings())]).concurrency_max(4);
    for name in ["busy@1", "rare@1"] {
        let order_of = Arc::clone(&order_of);
        builder = builder.handler(name, move |_context, order: Order| {
            order_of.lock().unwrap().push(order.id);
            async { Ok(()) }
        });
    }
    let running = start(builder.build().unwrap());
    stage.is_worked_off().await;
    running.end().await;
    let order_of = order_of.lock().unwrap();
    let last = order_of.iter().rposition(|id| id.starts_with("rare")).unwrap();
    // In turn it is about the tenth; a thread that the machine stops for a while may have it in hand.
    assert!(last < 200, "the last of five rare ones ran as number {last} of {}", order_of.len());
}

pub(crate) async fn an_idle_worker_asks_twice_a_second_at_most(stage: Stage) {
    // One route has room for nothing for an hour, and none of its own to do.
    let limited = Settings { rate: Some(Some(Rate::parse("1/h").unwrap())), ..Stage::settings() };
    let mut builder = stage.worker_of(&[(CHARGE, Stage::settings()), ("limited@1", limited)]);
    for name in [CHARGE, "limited@1"] {
        let effects = stage.effects.clone();
        builder = builder.handler(name, move |_context, order: Order| {
            effects.happen(&order.id);
            async { Ok(()) }
        });
    }
    let running = start(builder.build().unwrap());
    stage.send("a").await;
    stage.is_worked_off().await;
    let before = stage.source.receives.load(Ordering::SeqCst);
    // sleeps: to count what is asked in this time
    tokio::time::sleep(Duration::from_secs(2)).await;
    let asked = stage.source.receives.load(Ordering::SeqCst) - before;
    assert!(asked <= 4, "{asked} receives in 2 s");
    running.end().await;
}

/// The memory of this process, in KiB.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_deferred_deliveries_cost_a_worker_no_memory_and_no_time() {
    const COUNT: usize = 100_000;
    let stage = Stage::new(Kind::Memory);
    let hour = Duration::from_secs(3600);
    for number in 0..COUNT {
        let envelope = Envelope { key: Some(number.to_string()), ..Envelope::new(CHARGE, "{\"id\": \"a\"}") };
        stage.source.inner.send(&envelope, hour, Entrance::Open).await.map(drop).unwrap();
    }
    let before = memory();
    let running = start(stage.simple(Stage::settings()));
    stage.send("due").await;
    until("what is due runs", || stage.effects.count() == 1).await;
    let asked = stage.source.receives.load(Ordering::SeqCst);
    // sleeps: to count what is asked in this time
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = stage.source.receives.load(Ordering::SeqCst) - asked;
    assert!(asked <= 2, "{asked} receives in 1 s");
    let grown = memory().saturating_sub(before);
    assert!(grown < 16 * 1024, "{grown} KiB more");
    running.end().await;
    assert_eq!(stage.depth().await.deferred, COUNT as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_whose_breaker_is_open_leaves_its_deliveries_in_the_queue() {
    let stage = Stage::new(Kind::Memory);
    stage.send_many(50, 1).await;
    let hour = Duration::from_secs(3600);
    let settings = Settings {
        breaker_failures: Some(Some(3)),
        breaker_pause: Some(hour),
        concurrency_max: Some(1),
        ..Stage::settings()
    };
    let worker = stage
        .worker(settings)
        .handler(CHARGE, |_context, _order: Order| async { Err::<(), _>(Failure::retryable("down")) })
        .build()
        .unwrap();
    let running = start(worker);
    until("three failed", || running.count("failed") == 3).await;
    // sleeps: so that more would have failed
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(running.count("failed"), 3);
    until("what was received ahead is given back", || running.monitor.snapshot().waiting == 0).await;
    let snapshot = running.monitor.snapshot();
    let gate = &snapshot.routes[0].gate;
    assert!(matches!(gate.breaker, Some(BreakerState::Open { .. })), "it is visible: {snapshot:?}");
    assert_eq!((&*snapshot.routes[0].name, gate.running, gate.room), ("queue × charge@2", 0, 0));
    running.end().await;
    let depth = stage.depth().await;
    assert_eq!((depth.in_flight, depth.ready + depth.deferred), (0, 50), "{depth:?}");
}

/// Once they were given back by a worker that had nothing else to do, and by no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_behind_a_hung_task_is_given_back_by_a_busy_worker_too() {
    const BUSY: u64 = 4000;
    let stage = Stage::new(Kind::Memory);
    for number in 0..500 {
        stage.send_raw("hung@1", Some(&number.to_string()), "{\"id\": \"hung\"}").await;
    }
    for number in 0..BUSY {
        stage.send_raw("busy@1", Some(&number.to_string()), "{\"id\": \"busy\"}").await;
    }
    let one = Settings { concurrency_max: Some(1), ..Stage::settings() };
    let (hung, monitor) = (Arc::new(Gauge::default()), Arc::new(OnceLock::<Monitor>::new()));
    let waiting = |monitor: &OnceLock<Monitor>| {
        let routes = monitor.get().unwrap().snapshot().routes;
        routes.iter().find(|route| route.name.contains("hung")).unwrap().waiting
    };
    let (hangs, seen) = (Arc::clone(&hung), Arc::clone(&monitor));
    let worker = stage
        .worker_of(&[("hung@1", one), ("busy@1", Stage::settings())])
        .concurrency_max(8)
        .grace(Duration::ZERO)
        .handler("hung@1", move |_context, _order: Order| {
            let (hangs, seen) = (Arc::clone(&hangs), Arc::clone(&seen));
            async move {
                if waiting(&seen) > 0 {
                    hangs.up();
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        })
        .handler("busy@1", |_context, _order: Order| async {
            // sleeps: so that this one is never idle, and quick enough for others to be received ahead
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok(())
        })
        .build()
        .unwrap();
    assert!(monitor.set(worker.monitor()).is_ok());
    let running = start(worker);
    until("one hangs while others wait behind it", || hung.now() == 1).await;
    until("they are given back", || waiting(&monitor) == 0).await;
    assert!(running.count("completed") < BUSY, "the worker was busy all the time");
    running.end().await;
}

#[test]
fn everything_that_does_not_fit_a_worker_together_is_told_at_once() {
    let stage = Stage::new(Kind::Memory);
    let transactional = Settings { effect: Some(Effect::Transactional), ..Stage::settings() };
    let handler = |_context, _order: Order| async { Ok(()) };
    let built = stage
        .worker_of(&[(CHARGE, Stage::settings()), ("moved@1", transactional)])
        .handler(CHARGE, handler)
        .handler(CHARGE, handler)
        .handler("moved@1", handler)
        .handler("unknown@1", handler)
        .build();
    let Err(error) = built else { panic!("it must be refused") };
    assert_eq!(error.kind(), ErrorKind::BadRoutes);
    for part in
        ["`charge@2` is given twice", "`unknown@1` has no route", "handler_in_transaction", "no transaction of yours"]
    {
        assert!(error.to_string().contains(part), "{error}");
    }
    let none = Worker::builder(stage.ledger.clone(), Stage::table(&[(CHARGE, Stage::settings())])).build();
    assert!(none.is_err_and(|error| error.to_string().contains("no source")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_is_slow_is_not_received_before_it_can_start() {
    let stage = Stage::new(Kind::Memory);
    stage.send_many(100, 1).await;
    let began = Instant::now();
    let worker = stage
        .worker(Stage::settings())
        .concurrency_max(5)
        .handler(CHARGE, |_context, _order: Order| async {
            // sleeps: a slow task
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok(())
        })
        .build()
        .unwrap();
    let running = start(worker);
    until("some are done", || running.count("completed") >= 5).await;
    assert!(stage.depth().await.in_flight <= 5, "{:?} after {:?}", stage.depth().await, began.elapsed());
    running.end().await;
}
