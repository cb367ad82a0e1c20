//! A synchronous standby that is away: commits wait for it, and are seen, and counted, when they have waited.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use taskonce::postgres::RunInTransaction as _;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::{Admission, Effect, ErrorKind, Ledger, Outcome, Policy, Result, Settlement, State, Task};
use taskonce_testkit::{PostgresProxy, PostgresServer};

use crate::place::{EFFECT, Place, WORKER, found, policy, state, task, until};

/// A server whose standby is away; only sessions that say so wait for it.
struct Primary {
    place: Place,
    server: PostgresServer,
}

/// What lets the commits of a session wait.
const WAITS: &str = "set synchronous_commit = on";

impl Primary {
    fn start() -> Primary {
        let server = PostgresServer::start(&["-c", "fsync=off", "-c", "synchronous_commit=local"]).unwrap();
        let place = Place::of(server.database().unwrap());
        let primary = Primary { place, server };
        primary.set("synchronous_standby_names = 'nobody'");
        primary
    }

    fn set(&self, setting: &str) {
        self.server.psql("postgres", &format!("alter system set {setting}")).unwrap();
        self.server.psql("postgres", "select pg_reload_conf()").unwrap();
    }

    /// Every commit of the worker's waits.
    fn let_the_worker_wait(&self) {
        self.place.database.psql(&format!("alter role {WORKER} set synchronous_commit = on")).unwrap();
    }

    /// What waits has waited, and nothing waits from now on.
    fn do_without_the_standby(&self) {
        self.set("synchronous_standby_names = ''");
    }

    /// Calls a function of the server for the session whose commit waits, once there is one.
    async fn end_the_wait(&self, function: &str) {
        let ask = format!("select {function}(pid) from pg_stat_activity where wait_event = 'SyncRep'");
        until("a commit waits for the standby", async || !self.place.beside(&ask, &[]).await.is_empty()).await;
    }
}

/// It was looked for twice within 700 ms, was seen later, and counted as a crash: an unrepeatable task was parked although
/// nothing of it had run.
#[tokio::test]
async fn a_claim_that_comes_to_light_after_its_error_is_released_and_is_no_crash() {
    let primary = Primary::start();
    primary.let_the_worker_wait();
    // As behind a pooler, where the server cannot be asked to end a statement.
    let ledger = taskonce::open(&primary.place.url_with("timeout=1s&statements=unnamed")).unwrap();
    let (task, lease) = (task("a"), Duration::from_secs(6));
    let policy = Policy { lease, ..Policy::new(Effect::Unrepeatable) };
    let error = ledger.claim(&task, &policy).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    // sleeps: whoever looks twice has looked
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(ledger.show(&task.key).await.unwrap(), None, "it is not seen yet");
    primary.do_without_the_standby();
    until("it is seen", async || ledger.show(&task.key).await.unwrap().is_some()).await;
    until("it is released", async || {
        let seen = found(&ledger, &task).await;
        assert!(seen.record.state == State::Waiting || !seen.lease_left().is_zero(), "its lease has passed");
        seen.record.state == State::Waiting
    })
    .await;
    claims_as_if_nothing_was(&ledger, &task, &policy).await;
}

/// It came to light behind its lease.
#[tokio::test]
async fn a_claim_whose_commit_waits_for_longer_than_its_lease_is_no_crash() {
    let primary = Primary::start();
    primary.let_the_worker_wait();
    let ledger = taskonce::open(&primary.place.url_with("timeout=1s")).unwrap();
    let task = task("a");
    let policy = Policy { lease: Duration::from_secs(3), ..Policy::new(Effect::Unrepeatable) };
    ledger.claim(&task, &policy).await.unwrap_err();
    // The server is asked to end the wait, so that the claim is seen and its release can wait behind it.
    let seen = until("the claim is seen", async || ledger.show(&task.key).await.unwrap().is_some());
    tokio::time::timeout(policy.lease, seen).await.unwrap();
    until("its lease has passed", async || found(&ledger, &task).await.lease_left().is_zero()).await;
    primary.do_without_the_standby();
    until("it is released", async || state(&ledger, &task).await == State::Waiting).await;
    claims_as_if_nothing_was(&ledger, &task, &policy).await;
}

async fn claims_as_if_nothing_was(ledger: &Ledger, task: &Task, policy: &Policy) {
    let Admission::Run(claim) = ledger.claim(task, policy).await.unwrap() else { panic!("it is free") };
    assert_eq!((claim.held().attempt(), claim.held().crashes()), (1, 0));
    assert!(matches!(claim.release().await, Ok(_released)));
}

async fn pay(
    ledger: &Ledger,
    client: &mut Client,
    task: &Task,
    policy: &Policy,
    calls: &AtomicU32,
) -> Result<Outcome<u32>> {
    ledger
        .run_in_transaction(client, task, policy, |tx, context| {
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(context.attempt())
            })
        })
        .await
}

/// Who ends such a wait does not end the commit: it is there, and its server says so, or says nothing.
#[tokio::test]
async fn a_commit_whose_wait_for_the_standby_is_ended_has_taken_effect_once() {
    let primary = Primary::start();
    let (place, ledger, policy) = (&primary.place, primary.place.ledger(), policy());
    for function in ["pg_cancel_backend", "pg_terminate_backend"] {
        let (task, calls, mut client) = (task(function), AtomicU32::new(0), place.client_with(WAITS).await);
        let (outcome, ()) =
            tokio::join!(pay(&ledger, &mut client, &task, &policy, &calls), primary.end_the_wait(function));
        let outcome = outcome.unwrap();
        let Outcome::Ran { value: 1, record } = outcome else { panic!("{function}: {outcome:?}") };
        assert_eq!((record.state, record.crashes, record.history.len()), (State::Done, 0, 0), "{function}");
        assert_eq!((calls.into_inner(), place.effects(&task.key).await), (1, 1), "{function}");
    }
}

/// Longer than a lease: nobody can say what became of it, nobody may run the task, and nothing is written in its place.
#[tokio::test]
async fn a_commit_that_waits_for_the_standby_and_loses_its_connection_keeps_others_out_until_it_is_seen() {
    let primary = Primary::start();
    let proxy = PostgresProxy::start(primary.server.port()).unwrap();
    let ledger = taskonce::open(&primary.place.url_with("timeout=1s")).unwrap();
    let place = primary.place.through(proxy.port());
    let (task, calls, mut client) = (task("a"), AtomicU32::new(0), place.client_with(WAITS).await);
    let policy = Policy { lease: Duration::from_secs(2), ..policy() };
    let cut = async {
        primary.end_the_wait("abs").await;
        proxy.cut();
    };
    let (outcome, ()) = tokio::join!(pay(&ledger, &mut client, &task, &policy, &calls), cut);
    let error = outcome.unwrap_err();
    assert!(error.hint().contains("the next delivery finds out"), "{error:?}");
    let mut client = place.client().await;
    let outcome = pay(&ledger, &mut client, &task, &policy, &calls).await.unwrap();
    assert!(matches!(outcome.settlement(), Settlement::Defer(_)), "{outcome:?}");
    primary.do_without_the_standby();
    until("it is done", async || state(&ledger, &task).await == State::Done).await;
    let outcome = pay(&ledger, &mut client, &task, &policy, &calls).await.unwrap();
    assert!(matches!(outcome, Outcome::Replayed(_)), "{outcome:?}");
    let record = found(&ledger, &task).await.record;
    assert_eq!((record.attempt, record.crashes, record.history.len()), (1, 0, 0));
    assert_eq!((calls.into_inner(), place.effects(&task.key).await), (1, 1));
}
