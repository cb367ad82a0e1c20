//! An asynchronous standby is promoted that lacks the last commits: what the database forgot is never replayed from a hint.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use taskonce_contract::{Delays, RecordingKeeper, VirtualHost};
use taskonce_core::key::{Fingerprint, Handler, Task};
use taskonce_core::ledger::{Admission, Ledger};
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::Output;
use taskonce_fast_check::{DoneHint, FastCheck, Options};
use taskonce_postgres::{PostgresStore, migrate};
use taskonce_redis::RedisStore;
use taskonce_testkit::RedisServer;
use taskonce_testkit::postgres::PostgresServer;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the generation is read here.
const EVERY: Duration = Duration::from_millis(200);

fn task(id: &str) -> Task {
    let key = Handler::new("promotion", "1").unwrap().key(id).unwrap();
    Task { key, fingerprint: Fingerprint([1; 16]) }
}

/// A process that trusts hints of done tasks.
fn process(name: &str, database: &str, front: &str) -> (Ledger, FastCheck) {
    let ledger = PostgresStore::from_url(database).unwrap();
    let front = RedisStore::from_url(front).unwrap();
    let options = Options {
        done: DoneHint::Trusted,
        generation_every: EVERY,
        front_timeout: Duration::from_secs(1),
        ..Options::default()
    };
    let fast = FastCheck::new(Arc::new(front), Arc::new(ledger), options);
    let host = VirtualHost::new(name, Arc::default(), u64::from(name.as_bytes()[0]), Delays::Drawn);
    (Ledger::new(Arc::new(fast.clone()), Arc::new(host), Arc::new(RecordingKeeper::default())), fast)
}

async fn claim(ledger: &Ledger, id: &str) -> Admission {
    ledger.claim(&task(id), &Policy::new(Effect::Keyed)).await.unwrap()
}

async fn complete(ledger: &Ledger, id: &str) {
    let Admission::Run(claim) = claim(ledger, id).await else { panic!("`{id}` runs") };
    claim.complete(Output::kept("text/plain", id.to_owned())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_promoted_standby_lacks_is_not_replayed_and_what_it_has_is() {
    let mut primary = PostgresServer::start(&[]).unwrap();
    let mut standby = PostgresServer::prepare(&[]).unwrap();
    standby.follow(&primary).unwrap();
    let standby = standby.start_prepared().unwrap();
    migrate(&primary.url("postgres")).await.unwrap();
    let front = RedisServer::start(&[]).unwrap();
    let both =
        format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?timeout=20s", primary.port(), standby.port());
    let (a, _) = process("a", &both, &front.url());
    let (b, fast) = process("b", &both, &front.url());

    complete(&a, "kept").await;
    let written = primary.psql("postgres", "select pg_current_wal_lsn()").unwrap();
    let start = Instant::now();
    while standby.psql("postgres", &format!("select pg_last_wal_replay_lsn() >= '{written}'")).unwrap() != "t" {
        assert!(start.elapsed() < PATIENCE, "the standby never caught up");
    }
    // From here on it receives nothing: what the primary acknowledges is lost with it.
    standby.psql("postgres", "alter system set primary_conninfo = ''").unwrap();
    standby.psql("postgres", "select pg_reload_conf()").unwrap();
    while standby.psql("postgres", "select count(*) from pg_stat_wal_receiver").unwrap() != "0" {
        assert!(start.elapsed() < PATIENCE, "the standby still receives");
    }
    complete(&a, "forgotten").await;
    for id in ["kept", "forgotten"] {
        let Admission::Replay(seen) = claim(&b, id).await else { panic!("`{id}` is done") };
        assert_eq!(seen.output(), &Output::kept("text/plain", id.to_owned()));
    }
    assert_eq!(fast.counts().trusted, 2, "both are answered from hints");

    primary.quit().unwrap();
    standby.promote().unwrap();
    let start = Instant::now();
    loop {
        match b.claim(&task("forgotten"), &Policy::new(Effect::Keyed)).await {
            Ok(Admission::Run(claim)) => {
                assert_eq!(claim.attempt(), 1);
                break;
            }
            // For as long as the generation of before counts, and while the servers change places.
            Ok(Admission::Replay(_)) | Err(_) => {}
            Ok(other) => panic!("{other:?}"),
        }
        assert!(start.elapsed() < PATIENCE, "what the database forgot is replayed for ever");
        // sleeps: between two deliveries
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let Admission::Replay(seen) = claim(&b, "kept").await else { panic!("what the standby has is replayed") };
    assert_eq!(seen.output(), &Output::kept("text/plain", "kept".to_owned()));
}
