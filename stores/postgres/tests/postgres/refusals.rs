//! Each thing that keeps a store from being used has an error of its own, with what to do.

use taskonce_core::ErrorKind;
use taskonce_core::store::{Expected, Next, Store};
use taskonce_postgres::PostgresStore;
use taskonce_testkit::{PostgresServer, port, shared};

use crate::common::{Place, SCHEMA};
use crate::support::{claim, claim_error, key, load, running};

fn open(url: &str) -> PostgresStore {
    PostgresStore::from_url(url).unwrap()
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let url = format!("postgres://a:hunter2@127.0.0.1:{}/d", port::free().unwrap());
    let error = claim_error(&open(&url), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("refused") && error.hint().contains("listens"), "{error:?}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    let error = claim_error(&open("postgres:///d?host=/no/such/folder"), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
}

#[tokio::test]
async fn a_wrong_password_a_missing_one_and_a_user_who_is_not_let_in() {
    let hba = "local all all trust\nhost all postgres 127.0.0.1/32 trust\nhost all ada 127.0.0.1/32 scram-sha-256\n";
    let server = PostgresServer::start_with(&["-c", "fsync=off"], hba).unwrap();
    server.psql("postgres", "create role ada login password 'right p@ss'; create role bob login").unwrap();
    let url = |login: &str| format!("postgres://{login}@127.0.0.1:{}/postgres", server.port());
    for (login, part, advice) in [
        ("ada:wrong", "refused the user or the password", "password"),
        ("ada", "asks for a password", "password"),
        ("bob", "does not let in", "pg_hba.conf"),
        ("nobody", "does not let in", "pg_hba.conf"),
    ] {
        let error = claim_error(&open(&url(login)), "a").await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{login}: {error:?}");
        assert!(error.to_string().contains(part) && error.hint().contains(advice), "{login}: {error:?}");
    }
    let error = claim_error(&open(&url("ada:right%20p%40ss")), "a").await;
    assert_eq!(error.kind(), ErrorKind::NoSchema, "the password is right: {error:?}");
}

#[tokio::test]
async fn an_unknown_database() {
    let database = shared::database().unwrap();
    let error = claim_error(&open(&database.url().replace(database.name(), "no_such_database")), "a").await;
    assert_eq!(error.kind(), ErrorKind::BadUrl, "{error:?}");
    assert!(error.to_string().contains("no_such_database") && error.hint().contains("createdb"), "{error:?}");
}

#[tokio::test]
async fn missing_rights_are_named() {
    let place = Place::direct().await;
    place.beside("revoke insert on {schema}.task from taskonce_worker", &[]).await;
    let error = claim_error(&place.store(), "a").await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("permission denied for table task"), "{error}");
    assert!(error.hint().contains("--grant-to"), "{error:?}");
    place.beside("grant insert on {schema}.task to taskonce_worker", &[]).await;
    place.beside("revoke usage on sequence {schema}.fence from taskonce_worker", &[]).await;
    let error = claim_error(&place.store(), "a").await;
    assert!(error.to_string().contains("permission denied for sequence fence"), "{error}");
    place.beside("revoke usage on schema {schema} from taskonce_worker", &[]).await;
    let error = claim_error(&place.store(), "a").await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains(SCHEMA), "{error}");
}

#[tokio::test]
async fn a_user_who_is_read_only_by_setting() {
    let place = Place::direct().await;
    let database = place.database.name();
    place.beside(&format!("alter database {database} set default_transaction_read_only = on"), &[]).await;
    let error = claim_error(&place.store(), "a").await;
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error:?}");
    assert!(error.hint().contains("read-only"), "{error:?}");
}

#[tokio::test]
async fn a_database_of_another_encoding() {
    let database = shared::database().unwrap();
    let name = format!("{}_latin", database.name());
    database.psql(&format!("create database {name} encoding 'LATIN1' template template0 locale 'C'")).unwrap();
    let error = claim_error(&open(&database.url().replace(database.name(), &name)), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains("LATIN1") && error.hint().contains("UTF8"), "{error:?}");
}

#[tokio::test]
async fn a_server_without_a_connection_left() {
    let server =
        PostgresServer::start(&["-c", "fsync=off", "-c", "max_connections=6", "-c", "max_wal_senders=0"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let mut others = Vec::new();
    while others.len() < 6 {
        match tokio_postgres::connect(&place.database.url_of("taskonce_worker"), tokio_postgres::NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                others.push(client);
            }
            Err(_) => break,
        }
    }
    let error = claim_error(&place.store(), "a").await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("no connection left") && error.hint().contains("max_connections"), "{error:?}");
}

#[tokio::test]
async fn a_server_that_starts_or_stops() {
    let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    crate::support::claim(&store, &key("a"), &running(1)).await;
    server.shut_down().unwrap();
    let error = store.load(&key("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(!error.hint().is_empty());
}

#[tokio::test]
async fn what_listens_there_is_no_postgres() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for mut stream in listener.incoming().take(3).flatten() {
            let mut bytes = [0; 64];
            let _ = stream.read(&mut bytes);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let error = claim_error(&open(&format!("postgres://a@127.0.0.1:{port}/d?timeout=1s")), "a").await;
    assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unreachable | ErrorKind::TimedOut), "{error:?}");
}

/// The host of a server that is stopped takes connections all the same, and says nothing.
#[tokio::test]
async fn a_server_that_says_nothing_hides_no_other() {
    let place = Place::direct().await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().map(|address| (address.port(), silent)).unwrap();
    let url = place.url_with("timeout=10s").replace("@127.0.0.1:", &format!("@127.0.0.1:{},127.0.0.1:", silent.0));
    crate::support::claim(&open(&url), &key("a"), &running(1)).await;
}

/// The server's own words when the system has no room for it: the table's file is `/dev/full` for a while, to which every write
/// fails so.
#[tokio::test]
async fn a_disk_that_is_full_is_told_and_what_was_there_is_kept() {
    let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let place = Place::of(server.database().unwrap()).await;
    let store = place.store();
    let held = claim(&store, &key("a"), &running(1)).await;
    let file = place.database.psql(&format!("select pg_relation_filepath('\"{SCHEMA}\".task')")).unwrap();
    let file = server.folder().join("data").join(file);
    let aside = file.with_extension("aside");
    server.shut_down().unwrap();
    std::fs::rename(&file, &aside).unwrap();
    std::os::unix::fs::symlink("/dev/full", &file).unwrap();
    server.restart().unwrap();
    let error = claim_error(&place.store(), "b").await;
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    assert!(error.to_string().contains("No space left on device") && !error.hint().is_empty(), "{error:?}");
    server.shut_down().unwrap();
    std::fs::rename(&aside, &file).unwrap();
    server.restart().unwrap();
    let store = place.store();
    assert_eq!(*load(&store, &key("a")).await.record, held);
    claim(&store, &key("b"), &running(2)).await;
}

#[test]
fn a_store_outside_of_a_runtime_says_so() {
    let store = open("postgres://a@127.0.0.1:1/d");
    let (key, record) = (key("a"), running(1));
    let mut call = store.swap(&key, Expected::Nothing, Next::Claim(&record));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = call.as_mut().poll(&mut context) else { panic!("it waits") };
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
}
