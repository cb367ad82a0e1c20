//! A fast check by URL: a Redis in front of PostgreSQL, as users open it.

#![allow(clippy::unwrap_used, reason = "a test may")]

use taskonce::{Admission, Effect, Handler, Input, Ledger, Output, Policy, Task, migrate, open, open_existing};
use taskonce_testkit::{RedisServer, shared};

fn task() -> Task {
    Handler::new("front", "1").unwrap().task("x", &Input::from_json(b"{}").unwrap()).unwrap()
}

async fn claim(ledger: &Ledger) -> Admission {
    ledger.claim(&task(), &Policy::new(Effect::Unrepeatable)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_url_puts_a_front_before_a_database() {
    let (server, database) = (RedisServer::start(&[]).unwrap(), shared::database().unwrap());
    let encoded = server.url().replace(':', "%3A").replace('/', "%2F");
    let plain = format!("{}?front={}&front_timeout=1s&timeout=20s", database.url(), server.url());
    let trusting = format!("{}?timeout=20s&trust_done=yes&front={encoded}%3Ftimeout%3D1s", database.url());
    // The schema is made by the same URL.
    migrate(&plain).await.unwrap();
    let ledgers = [open(&plain).unwrap(), open_existing(&trusting).unwrap()];
    let Admission::Run(one) = claim(&ledgers[0]).await else { panic!("it runs") };
    for ledger in &ledgers {
        assert!(matches!(claim(ledger).await, Admission::Busy(_)));
    }
    one.complete(Output::kept("text/plain", "result")).await.unwrap();
    for ledger in &ledgers {
        let Admission::Replay(seen) = claim(ledger).await else { panic!("it is done") };
        assert_eq!(seen.output(), &Output::kept("text/plain", "result"));
    }
    let hint = format!("taskonce-hint:{}", task().key);
    assert_eq!(server.command(&["EXISTS", &hint]).unwrap().int(), Some(1));
    // A database names its generation, so that its word may be trusted; a file does not.
    let findings = ledgers[1].examine().await;
    assert!(findings.iter().any(|found| found.subject == "front: version"), "{findings:?}");
    assert!(findings.iter().all(|found| !found.text.contains("`trust_done` has no effect")), "{findings:?}");
}
