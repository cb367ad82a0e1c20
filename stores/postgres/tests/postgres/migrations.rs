//! The schema: made by an explicit step, safe to run twice and at once, and refused where it does not fit.

use taskonce_core::ErrorKind;
use taskonce_core::store::Store;
use taskonce_postgres::{PostgresStore, grants_sql, migrate, migration_sql};
use taskonce_testkit::shared;

use crate::support::{claim, claim_error, key, running};

#[tokio::test]
async fn a_database_without_the_schema_is_told_with_the_command_to_run() {
    let database = shared::database().unwrap();
    let store = PostgresStore::from_url(&database.url()).unwrap();
    let error = claim_error(&store, "a").await;
    assert_eq!(error.kind(), ErrorKind::NoSchema, "{error:?}");
    assert!(error.to_string().contains("`taskonce`") && error.hint().contains("taskonce migrate"), "{error:?}");
    // And it works as soon as it was made, also on connections that are there.
    let done = migrate(&database.url()).await.unwrap();
    assert_eq!((done.schema.as_str(), done.from, done.to), ("taskonce", 0, 1));
    claim(&store, &key("a"), &running(1)).await;
    database.psql("drop schema taskonce cascade").unwrap();
    let error = store.load(&key("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSchema, "{error:?}");
    assert!(error.hint().contains("taskonce migrate"), "{error:?}");
}

#[tokio::test]
async fn a_migration_runs_again_and_at_once_without_harm() {
    let database = shared::database().unwrap();
    let url = format!("{}?schema=At_once", database.url());
    let (one, two, three) = tokio::join!(migrate(&url), migrate(&url), migrate(&url));
    let mut from = [one.unwrap().from, two.unwrap().from, three.unwrap().from];
    from.sort_unstable();
    assert_eq!(from, [0, 1, 1], "one of them made it");
    let store = PostgresStore::from_url(&url).unwrap();
    claim(&store, &key("a"), &running(1)).await;
    assert_eq!(migrate(&url).await.unwrap().from, 1);
    assert!(store.load(&key("a")).await.unwrap().is_some(), "what is there stays");
}

#[tokio::test]
async fn a_newer_schema_is_refused_by_store_and_migration() {
    let database = shared::database().unwrap();
    migrate(&database.url()).await.unwrap();
    database.psql("update taskonce.meta set version = 2").unwrap();
    let store = PostgresStore::from_url(&database.url()).unwrap();
    for error in [claim_error(&store, "a").await, migrate(&database.url()).await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::NewerSchema, "{error:?}");
        assert!(error.to_string().contains("version 2") && error.to_string().contains("up to 1"), "{error}");
    }
}

#[tokio::test]
async fn an_older_schema_is_told_with_the_command_to_run() {
    let database = shared::database().unwrap();
    migrate(&database.url()).await.unwrap();
    database.psql("update taskonce.meta set version = 0").unwrap();
    let error = claim_error(&PostgresStore::from_url(&database.url()).unwrap(), "a").await;
    assert_eq!(error.kind(), ErrorKind::NoSchema);
    assert!(error.to_string().contains("version 0") && error.hint().contains("taskonce migrate"), "{error:?}");
}

#[tokio::test]
async fn the_printed_migration_makes_the_same_schema() {
    let (printed, made) = (shared::database().unwrap(), shared::database().unwrap());
    printed.psql(&migration_sql("taskonce").unwrap()).unwrap();
    migrate(&made.url()).await.unwrap();
    let sql = "select table_name, column_name, data_type, is_nullable from information_schema.columns
               where table_schema = 'taskonce' order by 1, 2;
               select indexdef from pg_indexes where schemaname = 'taskonce' order by 1;
               select conname, pg_get_constraintdef(oid) from pg_constraint where connamespace = 'taskonce'::regnamespace order by 1;
               select version from taskonce.meta";
    assert_eq!(printed.psql(sql).unwrap(), made.psql(sql).unwrap());
    claim(&PostgresStore::from_url(&printed.url()).unwrap(), &key("a"), &running(1)).await;
}

#[tokio::test]
async fn who_may_not_make_a_schema_is_told_so() {
    let database = shared::database().unwrap();
    let role = "do $$ begin create role nobody_special login; exception when duplicate_object or unique_violation then null; end $$";
    database.psql(role).unwrap();
    let error = migrate(&database.url_of("nobody_special")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("permission denied"), "{error}");
    // An empty schema of one's own is enough.
    database.psql("create schema taskonce authorization nobody_special").unwrap();
    assert_eq!(migrate(&database.url_of("nobody_special")).await.unwrap().from, 0);
}

#[test]
fn names_that_would_be_sql_are_refused() {
    for name in ["", "a b", "a\"; drop table x; --", "1a", "ü", &"x".repeat(64)] {
        assert_eq!(migration_sql(name).unwrap_err().kind(), ErrorKind::BadUrl, "{name}");
        assert_eq!(grants_sql(name, "role").unwrap_err().kind(), ErrorKind::BadUrl, "{name}");
    }
    assert!(grants_sql("a", "a\"b").unwrap().contains("to \"a\"\"b\""));
    assert!(grants_sql("a", "").is_err());
}
