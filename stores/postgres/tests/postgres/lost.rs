//! Servers that restart, are killed or stopped, and connections that are cut: calls end in time, and work again.

use std::time::{Duration, Instant};

use taskonce_core::ErrorKind;
use taskonce_core::key::Key;
use taskonce_core::record::{Fence, Record, State};
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_postgres::PostgresStore;
use taskonce_testkit::{PostgresProxy, PostgresServer};
use tokio::task::JoinHandle;

use crate::common::{Place, WORKER};
use crate::support::{PATIENCE, claim, claim_error, key, load, next, running, until_claimed};

#[tokio::test]
async fn a_server_that_was_restarted_is_used_again_without_an_error() {
    let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    let held = claim(&store, &key("a"), &running(1)).await;
    // Several idle connections, all of which are cut.
    let calls = (0..8).map(|number| {
        let store = store.clone();
        tokio::spawn(async move { claim(&store, &key(&format!("b-{number}")), &running(number + 2)).await })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    server.restart().unwrap();
    assert_eq!(*load(&store, &key("a")).await.record, held);
    claim(&store, &key("c"), &running(20)).await;
}

#[tokio::test]
async fn a_server_that_was_killed_keeps_what_it_acknowledged() {
    let mut server = PostgresServer::start(&[]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store_with("timeout=5s");
    let held = claim(&store, &key("a"), &running(1)).await;
    let done = next(&held, State::Done);
    store.swap(&key("a"), Expected::Record(&held), Next::Keep(&done)).await.unwrap();
    server.kill();
    let error = claim_error(&store, "b").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(!error.hint().is_empty());
    server.restart().unwrap();
    let after = until_claimed(&store, "c").await;
    assert_eq!(*load(&store, &key("a")).await.record, done);
    load(&store, &after).await;
}

#[tokio::test]
async fn connections_that_were_cut_are_replaced_and_writes_are_not_doubled() {
    let place = Place::direct().await;
    let store = place.store();
    let mut held = claim(&store, &key("a"), &running(1)).await;
    for _ in 0..20 {
        let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                   where datname = current_database() and pid <> pg_backend_pid()";
        place.beside(cut, &[]).await;
        let beat = next(&held, State::Waiting);
        let swap = store.swap(&key("a"), Expected::Token(held.token), Next::Keep(&beat)).await.unwrap();
        assert_eq!(swap, Swap::Stored(held.fence));
        held = beat;
    }
    assert_eq!(*load(&store, &key("a")).await.record, held);
}

#[tokio::test]
async fn a_server_that_is_stopped_costs_a_call_its_time_and_no_more() {
    let server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store_with("timeout=1s");
    let (held, first) = (running(1), key("a"));
    let held = claim(&store, &first, &held).await;
    // The process that serves the connection, which is the only one of its user.
    let serving = place.beside("select pid from pg_stat_activity where usename = 'taskonce_worker'", &[]).await;
    let pid = rustix::process::Pid::from_raw(serving[0].get::<_, i32>(0)).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let start = Instant::now();
    let beat = next(&held, State::Waiting);
    let error = store.swap(&first, Expected::Record(&held), Next::Keep(&beat)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!((Duration::from_millis(900)..Duration::from_secs(8)).contains(&start.elapsed()), "{:?}", start.elapsed());
    // The others are served meanwhile, on a connection of their own.
    claim(&store, &key("b"), &running(2)).await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    // The first sending may have arrived or not; sent again it is recognised.
    let swap = store.swap(&first, Expected::Record(&held), Next::Keep(&beat)).await.unwrap();
    assert_eq!(swap, Swap::Stored(held.fence));
}

#[tokio::test]
async fn the_server_ends_a_statement_that_takes_too_long() {
    let place = Place::direct().await;
    let store = place.store_with("timeout=1s&lock_timeout=900ms");
    claim(&store, &key("a"), &running(1)).await;
    let client = place.client().await;
    // Each read of the table sleeps: a server that is slow.
    place.beside("alter table {schema}.task enable row level security", &[]).await;
    place.beside("create policy slow on {schema}.task using (pg_sleep(5) is not null)", &[]).await;
    let start = Instant::now();
    let error = store.load(&key("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!(error.to_string().contains("statement timeout") && error.hint().contains("`timeout`"), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    drop(client);
}

#[tokio::test]
async fn a_pool_that_is_exhausted_says_so_by_its_name() {
    let place = Place::direct().await;
    let store = place.store_with("timeout=1s&connections=1");
    claim(&store, &key("a"), &running(1)).await;
    // A call that is not polled keeps the one connection.
    let (a, b) = (key("a"), key("b"));
    let mut stuck = std::pin::pin!(store.load(&a));
    let first = std::future::poll_fn(|context| std::task::Poll::Ready(stuck.as_mut().poll(context).is_ready())).await;
    assert!(!first, "it waits for the server");
    let error = store.load(&b).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error:?}");
    assert!(error.to_string().contains("all 1 connections") && error.hint().contains("`connections`"), "{error:?}");
    let _its_time_is_up = stuck.await;
    store.load(&b).await.unwrap();
}

/// Longer than a record's lock is waited for in the tests below.
const LOCK_WAIT: Duration = Duration::from_millis(100);

/// A claim by takeover, whose connection is cut while its commit waits for a standby that is away, so that it is sent again.
struct CutOff {
    place: Place,
    store: PostgresStore,
    takeover: Record,
    fence_before: Fence,
    /// The session that is at the first sending.
    first: i32,
    call: JoinHandle<taskonce_core::Result<Swap>>,
    _proxy: PostgresProxy,
    _server: PostgresServer,
}

impl CutOff {
    fn key() -> Key {
        key("a")
    }

    /// With this `timeout` of the store.
    async fn begin(timeout: &str) -> CutOff {
        let arguments = ["fsync=off", "synchronous_commit=local", "synchronous_standby_names=nobody"];
        let server = PostgresServer::start(&arguments.map(|setting| ["-c", setting]).concat()).unwrap();
        let place = Place::of(server.database().unwrap()).await;
        let held = claim(&place.store(), &CutOff::key(), &running(1)).await;
        place.database.psql(&format!("alter role {WORKER} set synchronous_commit = 'on'")).unwrap();
        let proxy = PostgresProxy::start(server.port()).unwrap();
        let url = place.url_with(&format!("timeout={timeout}&lock_timeout={}ms", LOCK_WAIT.as_millis()));
        let url = url.replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
        let store = PostgresStore::from_url(&url).unwrap();
        // One that was made for the call would not be replaced.
        load(&store, &CutOff::key()).await;
        let takeover = running(2);
        let fence_before = held.fence;
        let call = {
            let (store, takeover) = (store.clone(), takeover.clone());
            tokio::spawn(
                async move { store.swap(&CutOff::key(), Expected::Record(&held), Next::Claim(&takeover)).await },
            )
        };
        let waits = "select pid from pg_stat_activity where wait_event = 'SyncRep'";
        let start = Instant::now();
        let first = loop {
            if let Some(row) = place.beside(waits, &[]).await.first() {
                break row.get(0);
            }
            assert!(start.elapsed() < PATIENCE && !call.is_finished(), "its commit waits for the standby");
        };
        proxy.cut();
        CutOff { place, store, takeover, fence_before, first, call, _proxy: proxy, _server: server }
    }

    /// The first sending's commit waits no longer, and is seen.
    async fn commit_without_standby(&self) {
        self.place.beside("select pg_cancel_backend($1)", &[&self.first]).await;
    }
}

/// It met the lock of its own first sending and was told that the task is busy. The claim, which was stored a moment later,
/// was nobody's until its lease had passed.
#[tokio::test]
async fn a_takeover_that_is_sent_again_waits_for_its_own_first_sending() {
    let cut_off = CutOff::begin("20s").await;
    // sleeps: a record that another holds is waited for no longer than this
    tokio::time::sleep(LOCK_WAIT * 5).await;
    assert!(!cut_off.call.is_finished(), "who holds the record is not known");
    cut_off.commit_without_standby().await;
    let swap = cut_off.call.await.unwrap().unwrap();
    assert!(matches!(swap, Swap::Stored(fence) if fence > cut_off.fence_before), "{swap:?}");
}

#[tokio::test]
async fn a_takeover_that_is_sent_again_and_still_locked_is_an_error_since_it_may_be_stored() {
    let mut cut_off = CutOff::begin("10s").await;
    let error = (&mut cut_off.call).await.unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Locked | ErrorKind::TimedOut), "{error:?}");
    cut_off.commit_without_standby().await;
    let start = Instant::now();
    while load(&cut_off.store, &CutOff::key()).await.record.claim != cut_off.takeover.claim {
        assert!(start.elapsed() < PATIENCE, "the first sending is stored after all");
    }
}
