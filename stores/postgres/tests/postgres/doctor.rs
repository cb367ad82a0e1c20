//! What an examination finds.

use taskonce_core::store::{Finding, Level, Store};
use taskonce_postgres::PostgresStore;
use taskonce_testkit::{PostgresServer, port};

use crate::common::Place;
use crate::support::{claim, key, running};

async fn find(store: &PostgresStore, subject: &str) -> Finding {
    let findings = store.examine().await;
    let found = findings.iter().find(|finding| finding.subject == subject).cloned();
    found.unwrap_or_else(|| panic!("nothing about {subject} in {findings:#?}"))
}

#[tokio::test]
async fn a_sound_server_has_no_faults() {
    let server = PostgresServer::start(&[]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    claim(&store, &key("a"), &running(1)).await;
    let findings = store.examine().await;
    assert!(findings.iter().all(|finding| finding.level == Level::Fine && finding.hint.is_empty()), "{findings:#?}");
    for subject in
        ["server", "round trip", "schema", "commit", "role", "clock", "connections", "table", "rights", "records"]
    {
        assert!(findings.iter().any(|finding| finding.subject == subject), "{subject} in {findings:#?}");
    }
}

#[tokio::test]
async fn settings_that_endanger_records_are_found() {
    let server =
        PostgresServer::start(&["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "autovacuum=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    place.beside("alter role taskonce_worker set synchronous_commit = off", &[]).await;
    let store = place.store();
    for (subject, level) in [
        ("fsync", Level::Fault),
        ("full_page_writes", Level::Fault),
        ("commit", Level::Fault),
        ("autovacuum", Level::Warning),
    ] {
        let finding = find(&store, subject).await;
        assert!(finding.level == level && !finding.hint.is_empty(), "{finding:?}");
    }
}

#[tokio::test]
async fn what_keeps_a_store_from_being_used_is_a_fault_with_its_advice() {
    let away = PostgresStore::from_url(&format!("postgres://a@127.0.0.1:{}/d", port::free().unwrap())).unwrap();
    let finding = find(&away, "server").await;
    assert!(finding.level == Level::Fault && finding.text.contains("refused"), "{finding:?}");
    let place = Place::direct().await;
    place.beside("revoke delete on {schema}.task from taskonce_worker", &[]).await;
    let finding = find(&place.store(), "rights").await;
    assert!(finding.level == Level::Fault && finding.text.contains("delete on task"), "{finding:?}");
    place.beside("update {schema}.meta set version = 9", &[]).await;
    let finding = find(&place.store(), "server").await;
    assert!(finding.level == Level::Fault && finding.text.contains("version 9"), "{finding:?}");
}

#[tokio::test]
async fn a_clock_that_went_back_is_found() {
    let place = Place::direct().await;
    let store = place.store();
    claim(&store, &key("a"), &running(1)).await;
    place.beside("update {schema}.task set written_at = written_at + interval '1 hour'", &[]).await;
    let finding = find(&store, "records").await;
    assert!(finding.level == Level::Warning && finding.text.contains("in the future"), "{finding:?}");
}

#[tokio::test]
async fn the_way_through_a_pooler_is_named() {
    let place = Place::pooled(2).await;
    let finding = find(&place.store(), "server").await;
    assert!(finding.text.contains("through a pooler"), "{finding:?}");
    assert!(find(&Place::direct().await.store(), "server").await.text.contains("reached directly"));
}
