//! A claim that is completed by plain SQL, in a transaction of somebody's own, as a worker in another language does.

use taskonce_core::record::{DropReason, Output, State};
use taskonce_core::store::{Expected, Filter, Next, Store, Swap};
use taskonce_postgres::{COMPLETE, LIMITS, LOCK, plain_sql};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::common::{Place, SCHEMA};
use crate::support::{claim, key, load, next, replace, running};

/// One statement in the caller's transaction; how many rows it found or changed.
async fn rows(client: &Client, sql: &str, parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)]) -> usize {
    client.query(&format!("{}{}", plain_sql(sql, SCHEMA), returning(sql)), parameters).await.unwrap().len()
}

fn returning(sql: &str) -> &'static str {
    if sql.starts_with("update") { " returning 1" } else { "" }
}

#[tokio::test]
async fn what_plain_sql_completed_is_replayed_with_its_output() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    let (key, held) = (key("a"), running(1));
    let held = claim(&store, &key, &held).await;
    let id = Uuid::from_bytes(held.claim.0);
    client.batch_execute(&format!("begin; {}", plain_sql(LIMITS, SCHEMA))).await.unwrap();
    assert_eq!(rows(&client, LOCK, &[&key.as_str(), &id]).await, 1);
    client.batch_execute("create temp table effect (n int); insert into effect values (1)").await.unwrap();
    let output = br#"{"charged":1200}"#.as_slice();
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &id, &output, &"application/json"]).await, 1);
    client.batch_execute("commit").await.unwrap();

    let found = load(&store, &key).await;
    assert_eq!(found.record.state, State::Done);
    assert_eq!(found.record.output, Output::kept("application/json", output));
    assert_eq!((found.record.claim, found.record.fence, found.record.attempt), (held.claim, held.fence, 1));
    assert!((0..60_000).contains(&found.age.millis), "{:?}", found.age);
    // The worker that holds the claim learns of it with its next heartbeat, and a duplicate is shown the end.
    let beat = next(&held, State::Running);
    for (expected, write) in [
        (Expected::Record(&held), Next::Keep(&beat)),
        (Expected::Record(&held), Next::Claim(&beat)),
        (Expected::Nothing, Next::Claim(&beat)),
    ] {
        let Swap::Conflict(Some(shown)) = store.swap(&key, expected, write).await.unwrap() else {
            panic!("it is done")
        };
        assert_eq!((shown.record.state, shown.record.token), (State::Done, found.record.token));
    }
    // It is a record like any other: renewed by a duplicate, walked over, and purged when its time has come.
    let renewed = next(&found.record, State::Done);
    replace(&store, &key, &found.record, &renewed).await;
    assert_eq!(*load(&store, &key).await.record, renewed);
    let page = store.scan(&Filter { states: vec![State::Done], ..Filter::default() }, None).await.unwrap();
    assert_eq!(page.rows.len(), 1);
}

#[tokio::test]
async fn an_output_without_a_type_is_replayed_as_bytes() {
    let place = Place::direct().await;
    let (store, client, key) = (place.store(), place.client().await, key("a"));
    let held = claim(&store, &key, &running(1)).await;
    let parameters = (Uuid::from_bytes(held.claim.0), b"x".as_slice(), None::<&str>);
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &parameters.0, &parameters.1, &parameters.2]).await, 1);
    assert_eq!(load(&store, &key).await.record.output, Output::kept("application/octet-stream", "x"));
}

#[tokio::test]
async fn an_output_of_plain_sql_expires_like_any_other() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    for (name, output) in [("with", Some(b"x".as_slice())), ("without", None)] {
        let (key, held) = (key(name), running(1));
        let held = claim(&store, &key, &held).await;
        let id = Uuid::from_bytes(held.claim.0);
        assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &id, &output, &"text/plain"]).await, 1);
        assert_eq!(load(&store, &key).await.record.output.is_empty(), output.is_none());
        for days in [2, 20] {
            let sql =
                "update {schema}.task set written_at = written_at - $2 * interval '1 day', expires_at = expires_at -
                $2 * interval '1 day', output_until = output_until - $2 * interval '1 day' where key = $1";
            place.beside(sql, &[&key.as_str(), &f64::from(days)]).await;
            let expected = if output.is_some() { Output::Dropped(DropReason::Expired) } else { Output::Nothing };
            // Whether a purge has come by or not.
            if days == 2 {
                assert_eq!(load(&store, &key).await.record.output, expected);
                assert_eq!(store.purge(&Filter::default()).await.unwrap().outputs, usize::from(output.is_some()));
                assert_eq!(load(&store, &key).await.record.output, expected);
            }
        }
        assert_eq!(store.purge(&Filter::default()).await.unwrap().records, 1, "{name}");
        assert_eq!(store.load(&key).await.unwrap(), None);
    }
}

/// The time of a transaction stands still from its first statement on; a lease and a retention must not have passed before
/// they begin.
#[tokio::test]
async fn a_completion_is_as_young_as_its_statement_not_as_its_transaction() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    let (key, held) = (key("a"), running(1));
    let id = Uuid::from_bytes(claim(&store, &key, &held).await.claim.0);
    client.batch_execute("begin").await.unwrap();
    assert_eq!(rows(&client, LOCK, &[&key.as_str(), &id]).await, 1);
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &id, &b"x".as_slice(), &"text/plain"]).await, 1);
    let sql = "select written_at > now() and expires_at > now() + retention * interval '1 ms'
               and output_until > now() + output_retention * interval '1 ms' from {schema}.task";
    assert!(client.query(&plain_sql(sql, SCHEMA), &[]).await.unwrap()[0].get::<_, bool>(0));
    client.batch_execute("commit").await.unwrap();
}

#[tokio::test]
async fn what_is_rolled_back_leaves_no_completion() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    let (key, held) = (key("a"), running(1));
    let held = claim(&store, &key, &held).await;
    let id = Uuid::from_bytes(held.claim.0);
    client.batch_execute("begin").await.unwrap();
    assert_eq!(rows(&client, LOCK, &[&key.as_str(), &id]).await, 1);
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &id, &b"x".as_slice(), &"text/plain"]).await, 1);
    client.batch_execute("rollback").await.unwrap();
    assert_eq!(*load(&store, &key).await.record, held);
    replace(&store, &key, &held, &next(&held, State::Done)).await;
}

#[tokio::test]
async fn a_lost_claim_locks_nothing_and_completes_nothing() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    let (key, held) = (key("a"), running(1));
    let held = claim(&store, &key, &held).await;
    let lost = Uuid::from_bytes(held.claim.0);
    let taken = taskonce_core::record::Record { token: running(2).token, claim: running(2).claim, ..held.clone() };
    let Swap::Stored(_) = store.swap(&key, Expected::Record(&held), Next::Claim(&taken)).await.unwrap() else {
        panic!("it was held")
    };
    let before = load(&store, &key).await.record;
    client.batch_execute("begin").await.unwrap();
    assert_eq!(rows(&client, LOCK, &[&key.as_str(), &lost]).await, 0);
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &lost, &b"x".as_slice(), &"text/plain"]).await, 0);
    client.batch_execute("commit").await.unwrap();
    assert_eq!(load(&store, &key).await.record, before);
    // So does one whose task is done.
    replace(&store, &key, &before, &next(&before, State::Done)).await;
    let done = Uuid::from_bytes(before.claim.0);
    assert_eq!(rows(&client, LOCK, &[&key.as_str(), &done]).await, 0);
    assert_eq!(rows(&client, COMPLETE, &[&key.as_str(), &done, &None::<&[u8]>, &None::<&str>]).await, 0);
}

#[tokio::test]
async fn the_view_reads_as_people_and_programs_need_it() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    let key = taskonce_core::key::Key::parse("billing/charge@2/a/b@c ü").unwrap();
    let held = claim(&store, &key, &running(5)).await;
    let sql = "select namespace, handler, version, id, state, effect, owner, attempt, fence, claim from {schema}.tasks";
    let row = &client.query(&plain_sql(sql, SCHEMA), &[]).await.unwrap()[0];
    let texts: Vec<&str> = (0..7).map(|column| row.get(column)).collect();
    assert_eq!(texts, ["billing", "charge", "2", "a/b@c ü", "running", "keyed", "owner"]);
    assert_eq!((row.get::<_, i32>(7), row.get::<_, i64>(8)), (1, i64::try_from(held.fence.0).unwrap()));
    assert_eq!(row.get::<_, Uuid>(9).into_bytes(), held.claim.0);
}

#[tokio::test]
async fn a_row_that_contradicts_itself_is_damaged_and_never_absent() {
    let place = Place::direct().await;
    let store = place.store();
    for (id, change) in [
        ("token", "token = gen_random_uuid()"),
        ("claim", "claim = gen_random_uuid()"),
        ("state", "state = 2"),
        ("body", "body = '\\x01'"),
    ] {
        let key = key(id);
        let held = claim(&store, &key, &running(1)).await;
        place.beside(&format!("update {{schema}}.task set {change} where key = $1"), &[&key.as_str()]).await;
        let error = store.load(&key).await.unwrap_err();
        assert_eq!(error.kind(), taskonce_core::ErrorKind::Corrupt, "{id}");
        assert!(error.to_string().contains(key.as_str()), "{error}");
        let again = next(&held, State::Running);
        store.swap(&key, Expected::Nothing, Next::Claim(&again)).await.unwrap_err();
        assert!(store.discard(&key).await.unwrap(), "{id}");
        assert_eq!(store.load(&key).await.unwrap(), None);
    }
}
