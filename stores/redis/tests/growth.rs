//! Records that outlive their keys' use fill other people's servers: everything written here expires.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::time::Duration;

use taskonce_contract::{Delays, VirtualHost};
use taskonce_core::decide::By;
use taskonce_core::host::{Host, NoKeeper};
use taskonce_core::json::Input;
use taskonce_core::key::Handler;
use taskonce_core::ledger::{Admission, Claim, Ledger};
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, Output};
use taskonce_redis::RedisStore;
use taskonce_testkit::{RedisServer, eventually};

const BY: By<'static> = By { who: "eva", why: "to see what is left" };

fn policy(effect: Effect) -> Policy {
    let retention = Duration::from_millis(1500);
    Policy {
        lease: Duration::from_millis(500),
        retention,
        output_retention: retention,
        backoff: Backoff::NONE,
        store_may_forget: true,
        ..Policy::new(effect)
    }
}

async fn claim(ledger: &Ledger, id: &str, policy: &Policy) -> Claim {
    let task = Handler::new("growth", "1").unwrap().task(id, &Input::from_json(b"{}").unwrap()).unwrap();
    match ledger.claim(&task, policy).await.unwrap() {
        Admission::Run(claim) => claim,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn everything_written_expires_and_the_server_returns_to_where_it_began() {
    let server = RedisServer::start(&[]).unwrap();
    let keys = || server.command(&["DBSIZE"]).unwrap().int().unwrap();
    let store = Arc::new(RedisStore::from_url(&server.url()).unwrap());
    let host: Arc<dyn Host> = Arc::new(VirtualHost::new("growth", Arc::default(), 1, Delays::Full));
    let ledger = Ledger::new(store, host, Arc::new(NoKeeper));
    let (keyed, once) = (policy(Effect::Keyed), policy(Effect::Unrepeatable));
    for round in 0..200 {
        let id = |what: &str| format!("{what}-{round}");
        claim(&ledger, &id("done"), &keyed).await.complete(Output::kept("text/plain", *b"x")).await.unwrap();
        claim(&ledger, &id("waiting"), &keyed).await.fail(Failure::retryable("no")).await.unwrap();
        claim(&ledger, &id("dead"), &keyed).await.fail(Failure::permanent("no")).await.unwrap();
        claim(&ledger, &id("released"), &keyed).await.release().await.unwrap();
        std::mem::forget(claim(&ledger, &id("running"), &keyed).await);
        // A parked task stays for ten years, for a person; once resolved it goes like the others.
        let parked = claim(&ledger, &id("parked"), &once).await;
        let key = parked.held().key().clone();
        parked.fail(Failure::retryable("timed out")).await.unwrap();
        ledger.resolve_done(&key, BY, None).await.unwrap();
    }
    assert!(keys() >= 1000, "{} keys", keys());
    assert!(eventually(Duration::from_secs(20), || keys() == 0), "{} keys are left", keys());
}
