//! Handlers that are services of tower, behind real middleware.

use std::sync::Arc;
use std::time::Duration;

use taskonce::routes::Settings;
use taskonce::worker::{Request, ServiceFailure};
use taskonce::{Failure, State};
use tower::{ServiceBuilder, service_fn};

use crate::stage::{CHARGE, Gauge, Order, Stage, on_both, start};

on_both!(mod memory and mod sqlite:
    a_service_runs_behind_its_middleware_and_says_what_kind_of_failure_it_had,
);

async fn a_service_runs_behind_its_middleware_and_says_what_kind_of_failure_it_had(stage: Stage) {
    let (effects, gauge) = (stage.effects.clone(), Arc::new(Gauge::default()));
    let most = Arc::clone(&gauge);
    let service = ServiceBuilder::new().concurrency_limit(2).timeout(Duration::from_millis(200)).service(service_fn(
        move |request: Request<Order>| {
            let (effects, gauge) = (effects.clone(), Arc::clone(&gauge));
            async move {
                let Request { context, payload } = request;
                match payload.id.as_str() {
                    "hangs" if context.attempt() == 1 => std::future::pending::<()>().await,
                    "never" => return Err(ServiceFailure(Failure::permanent("it cannot be"))),
                    _ => {}
                }
                gauge.up();
                // sleeps: so that several would run at once
                tokio::time::sleep(Duration::from_millis(5)).await;
                gauge.down();
                effects.happen(&payload.id);
                Ok(context.attempt())
            }
        },
    ));
    for number in 0..20 {
        stage.send(&number.to_string()).await;
    }
    stage.send("hangs").await;
    stage.send("never").await;
    let settings = Settings { concurrency_max: Some(8), ..Stage::settings() };
    let worker = stage.worker(settings).handler_service(CHARGE, service).build().unwrap();
    let running = start(worker);
    stage.is_worked_off().await;
    running.end().await;
    stage.effects.are_once(21);
    assert_eq!(most.most.load(std::sync::atomic::Ordering::SeqCst), 2, "the limit of the service is kept");
    let of = async |id: &str| stage.ledger.show(&Stage::key(id)).await.unwrap().unwrap().record;
    let hung = of("hangs").await;
    assert_eq!((hung.state, hung.attempt), (State::Done, 2), "the middleware's error is retryable");
    let never = of("never").await;
    assert_eq!((never.state, never.attempt), (State::Dead, 1), "{never:?}");
}
