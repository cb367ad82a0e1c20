//! Purges: bounded, in batches that pass over what others hold, and never by themselves.

use taskonce_core::record::{Output, Record, State};
use taskonce_core::store::{Filter, Store};

use crate::common::{Place, SCHEMA};
use crate::support::{claim, key, load, next, replace, running};

/// Each project wrote its own sweeper where none was shipped (pay-connector 4453).
#[tokio::test]
async fn a_sweep_is_bounded_and_two_at_once_share_the_work() {
    let place = Place::direct().await;
    let (one, two) = (place.store(), place.store());
    for number in 0..60 {
        let key = key(&format!("k-{number}"));
        let held = claim(&one, &key, &running(number + 1)).await;
        replace(&one, &key, &held, &next(&held, State::Done)).await;
    }
    let sql = "update {schema}.task set expires_at = clock_timestamp() - interval '1 hour' where key not like '%k-59'";
    place.beside(sql, &[]).await;
    let filter = Filter { page_max: 7, ..Filter::default() };
    let mut removed = 0;
    for _ in 0..20 {
        let (first, second) = tokio::join!(one.purge(&filter), two.purge(&filter));
        let (first, second) = (first.unwrap().records, second.unwrap().records);
        assert!(first <= 7 && second <= 7, "{first} and {second}");
        removed += first + second;
    }
    assert_eq!(removed, 59);
    load(&one, &key("k-59")).await;
}

#[tokio::test]
async fn a_sweep_passes_over_what_a_transaction_holds() {
    let place = Place::direct().await;
    let (store, client) = (place.store(), place.client().await);
    for id in ["held", "free"] {
        let key = key(id);
        let record = claim(&store, &key, &running(1)).await;
        replace(&store, &key, &record, &next(&record, State::Dead)).await;
    }
    place.beside("update {schema}.task set expires_at = clock_timestamp() - interval '1 hour'", &[]).await;
    client.batch_execute("begin").await.unwrap();
    client.query(&format!("select from \"{SCHEMA}\".task where key like '%held' for update"), &[]).await.unwrap();
    assert_eq!(store.purge(&Filter::default()).await.unwrap().records, 1);
    client.batch_execute("rollback").await.unwrap();
    assert_eq!(store.purge(&Filter::default()).await.unwrap().records, 1);
}

#[tokio::test]
async fn nothing_is_swept_unless_it_is_asked_for() {
    let place = Place::direct().await;
    let store = place.store();
    let key = key("a");
    let held = claim(&store, &key, &running(1)).await;
    let done = Record { output: Output::kept("text/plain", "x"), ..next(&held, State::Done) };
    replace(&store, &key, &held, &done).await;
    place.beside("update {schema}.task set expires_at = clock_timestamp() - interval '1 hour'", &[]).await;
    for _ in 0..10 {
        assert_eq!(*load(&store, &key).await.record, done);
    }
}

#[tokio::test]
async fn a_walk_with_a_narrow_filter_ends_each_page_soon_and_misses_nothing() {
    let place = Place::direct().await;
    let store = place.store();
    let sample = claim(&store, &key("sample"), &running(1)).await;
    replace(&store, &key("sample"), &sample, &next(&sample, State::Done)).await;
    let many = "insert into {schema}.task select 'billing/charge@1/n-' || lpad(number::text, 6, '0'), state, token, claim, fence,
        attempt, owner, effect, retention, output_retention, written_at, expires_at, output_until, output_type, output, body
        from {schema}.task, generate_series(1, 5000) as number where key like '%sample'";
    place.beside(many, &[]).await;
    let filter = Filter { id_prefix: "n-00499".into(), states: vec![State::Done], page_max: 3, ..Filter::default() };
    let (mut cursor, mut keys, mut pages) = (None, Vec::new(), 0);
    loop {
        let page = store.scan(&filter, cursor).await.unwrap();
        keys.extend(page.rows.into_iter().map(|row| row.key.id().to_owned()));
        pages += 1;
        let Some(next) = page.next else { break };
        cursor = Some(next);
        assert!(pages < 50, "{pages} pages");
    }
    let wanted: Vec<String> = (4990..=4999).map(|number| format!("n-{number:06}")).collect();
    assert_eq!(keys, wanted);
}

#[tokio::test]
async fn a_page_of_large_outputs_is_cut_by_their_bytes() {
    let place = Place::direct().await;
    let store = place.store();
    let large = Output::kept("application/octet-stream", vec![7; 6 << 20]);
    for number in 0..5 {
        let key = key(&format!("k-{number}"));
        let held = claim(&store, &key, &running(number + 1)).await;
        replace(&store, &key, &held, &Record { output: large.clone(), ..next(&held, State::Done) }).await;
    }
    let (mut cursor, mut sizes) = (None, Vec::new());
    loop {
        let page = store.scan(&Filter::default(), cursor).await.unwrap();
        sizes.push(page.rows.len());
        assert!(page.rows.iter().all(|row| row.found.as_ref().unwrap().record.output == large));
        let Some(next) = page.next else { break };
        cursor = Some(next);
    }
    assert_eq!(sizes, [3, 2], "16 MiB at most, and the one that goes beyond");
}
