//! Standbys: they are read, take no writes, and move the store's generation when they are promoted.

use std::time::Instant;

use taskonce_core::ErrorKind;
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Level, Next, Store, Swap};
use taskonce_postgres::{PostgresStore, migrate};
use taskonce_testkit::PostgresServer;

use crate::support::{PATIENCE, claim, claim_error, key, load, next, running};

fn pair() -> (PostgresServer, PostgresServer) {
    let primary = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let mut standby = PostgresServer::prepare(&["-c", "fsync=off"]).unwrap();
    standby.follow(&primary).unwrap();
    (primary, standby.start_prepared().unwrap())
}

/// Waits until a standby has what the primary has.
fn catch_up(primary: &PostgresServer, standby: &PostgresServer) {
    let written = primary.psql("postgres", "select pg_current_wal_lsn()").unwrap();
    let has = format!("select pg_last_wal_replay_lsn() >= '{written}'");
    let start = Instant::now();
    while standby.psql("postgres", &has).unwrap() != "t" {
        assert!(start.elapsed() < PATIENCE, "the standby never caught up");
    }
}

#[tokio::test]
async fn a_standby_is_read_takes_no_writes_and_moves_the_generation_when_it_is_promoted() {
    let (mut primary, standby) = pair();
    migrate(&primary.url("postgres")).await.unwrap();
    let first = PostgresStore::from_url(&primary.url("postgres")).unwrap();
    let held = claim(&first, &key("a"), &running(1)).await;
    let before = first.generation().await.unwrap().unwrap();
    assert_eq!(first.generation().await.unwrap().unwrap(), before, "it stays while nothing happens");
    catch_up(&primary, &standby);

    let second = PostgresStore::from_url(&standby.url("postgres")).unwrap();
    assert_eq!(*load(&second, &key("a")).await.record, held);
    let beat = next(&held, State::Waiting);
    for error in [
        claim_error(&second, "b").await,
        second.swap(&key("a"), Expected::Record(&held), Next::Keep(&beat)).await.unwrap_err(),
        second.generation().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
        assert!(error.hint().contains("primary"), "{error:?}");
    }
    let role = second.examine().await.into_iter().find(|finding| finding.subject == "role").unwrap();
    assert_eq!(role.level, Level::Fault, "{role:?}");
    let standbys = first.examine().await.into_iter().find(|finding| finding.subject == "standbys").unwrap();
    assert!(standbys.level == Level::Warning && standbys.hint.contains("synchronous_standby_names"), "{standbys:?}");

    // Of several servers the one that takes writes is found, before and after.
    let both =
        format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?timeout=20s", standby.port(), primary.port());
    let either = PostgresStore::from_url(&both).unwrap();
    claim(&either, &key("b"), &running(2)).await;
    primary.quit().unwrap();
    standby.promote().unwrap();
    let after = second.generation().await.unwrap().unwrap();
    assert_ne!(after, before);
    claim(&second, &key("c"), &running(3)).await;
    claim(&either, &key("d"), &running(4)).await;
    let swap = either.swap(&key("a"), Expected::Record(&held), Next::Keep(&beat)).await.unwrap();
    assert_eq!(swap, Swap::Stored(held.fence));
}

#[tokio::test]
async fn no_server_that_takes_writes_is_told_as_that() {
    let (mut primary, standby) = pair();
    let both = format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres", primary.port(), standby.port());
    primary.quit().unwrap();
    let error = claim_error(&PostgresStore::from_url(&both).unwrap(), "a").await;
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
    assert!(error.to_string().contains("none of the servers"), "{error}");
}
