//! Behind a PgBouncer that lends connections by the transaction.

use taskonce_core::ErrorKind;
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Next, Store, Swap};
use taskonce_postgres::{PostgresStore, migrate};
use taskonce_testkit::{PgBouncer, shared};

use crate::common::{Place, SCHEMA, WORKER};
use crate::support::{claim, claim_error, key, next, replace, running};

/// Once elsewhere: a transaction pooler dropped what a session had locked (good_job 52, 90, 802).
#[tokio::test]
async fn many_callers_share_few_connections_and_nothing_is_left_on_them() {
    let place = Place::pooled(2).await;
    let store = place.store_with("timeout=20s&connections=32");
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..64_u128 {
        let store = store.clone();
        calls.spawn(async move {
            let key = key(&format!("k-{number}"));
            let mut held = claim(&store, &key, &running(number + 1)).await;
            for _ in 0..3 {
                let beat = next(&held, State::Running);
                replace(&store, &key, &held, &beat).await;
                held = beat;
            }
            replace(&store, &key, &held, &next(&held, State::Done)).await;
            let swap = store.swap(&key, Expected::Nothing, Next::Claim(&running(1000 + number))).await.unwrap();
            let Swap::Conflict(Some(found)) = swap else { panic!("{swap:?}") };
            assert_eq!((found.record.state, found.record.claim), (State::Done, held.claim));
        });
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap();
    }
    // What one call set for itself is not there for the next: neither a limit nor a statement.
    let port = place.url_with("").split(':').nth(2).unwrap().split('/').next().unwrap().to_owned();
    let client =
        crate::common::connect(&format!("postgres://{WORKER}@127.0.0.1:{port}/{}", place.database.name())).await;
    let state = "select current_setting('lock_timeout') || (select count(*) from pg_prepared_statements)::text";
    for _ in 0..10 {
        let rows = client.query_typed(state, &[]).await.unwrap();
        assert_eq!(rows[0].get::<_, &str>(0), "00");
    }
}

#[tokio::test]
async fn a_pooler_that_drops_settings_in_silence_is_found_out() {
    let place = Place::direct().await;
    let more = "ignore_startup_parameters = options,extra_float_digits";
    let pooler = PgBouncer::start(place.database.port(), 2, &[WORKER], more).unwrap();
    let url = |options: &str| {
        format!(
            "postgres://{WORKER}@127.0.0.1:{}/{}?schema={SCHEMA}&timeout=20s&{options}",
            pooler.port(),
            place.database.name()
        )
    };
    claim(&PostgresStore::from_url(&url("")).unwrap(), &key("a"), &running(1)).await;
    claim(&PostgresStore::from_url(&url("statements=unnamed")).unwrap(), &key("b"), &running(2)).await;
    let error = claim_error(&PostgresStore::from_url(&url("statements=named")).unwrap(), "c").await;
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
    assert!(error.hint().contains("statements=unnamed"), "{error:?}");
}

#[tokio::test]
async fn a_schema_is_made_through_a_pooler_too() {
    let database = shared::database().unwrap();
    let pooler = PgBouncer::start(database.port(), 2, &["postgres"], "").unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{}/{}", pooler.port(), database.name());
    assert_eq!(migrate(&url).await.unwrap().from, 0);
    claim(&PostgresStore::from_url(&url).unwrap(), &key("a"), &running(1)).await;
}
