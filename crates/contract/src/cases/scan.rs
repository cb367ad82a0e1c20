//! Walks over records: no gaps, bounded pages, filters that mean what they say.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::key::{ID_MAX, Key, NAME_MAX, Name};
use taskonce_core::record::{Record, State};
use taskonce_core::store::{CURSOR_MAX, Cursor, Expected, Filter, Next, PAGE_MAX};

use super::stored;
use crate::records::{of_a_newer_format, plain};
use crate::stage::Stage;

/// The most pages that a walk of these cases may take; a walk without an end is a failure.
const PAGES_MAX: usize = 20_000;

async fn put(stage: &Stage, key: &Key, record: &Record) {
    stored(stage.store().swap(key, Expected::Nothing, Next::Keep(record)).await.unwrap());
}

/// Walks to the end through a ledger, and returns the keys in the order in which they came.
async fn walk(stage: &Stage, filter: Filter) -> Vec<Key> {
    let mut walk = stage.actor("walker").ledger.walk(filter);
    let mut keys = Vec::new();
    for _ in 0..PAGES_MAX {
        match walk.next_page().await.unwrap() {
            None => return keys,
            Some(rows) => keys.extend(rows.into_iter().map(|row| {
                row.found.unwrap();
                row.key
            })),
        }
    }
    panic!("the walk has no end");
}

fn set(keys: impl IntoIterator<Item = Key>) -> BTreeSet<Key> {
    keys.into_iter().collect()
}

pub(super) async fn an_empty_store_is_walked_to_an_end(stage: Stage) {
    assert_eq!(walk(&stage, Filter::default()).await, []);
    assert_eq!(walk(&stage, Filter { id_prefix: "a".into(), page_max: 1, ..Filter::default() }).await, []);
}

pub(super) async fn a_walk_sees_every_record_once(stage: Stage) {
    let keys: Vec<Key> = (0..120).map(|number| stage.key(&format!("id-{number}"))).collect();
    for key in &keys {
        put(&stage, key, &plain(State::Done, 1)).await;
    }
    for page_max in [1, 7, 120, PAGE_MAX] {
        let seen = walk(&stage, Filter { page_max, ..Filter::default() }).await;
        assert_eq!(seen.len(), keys.len(), "pages of {page_max}");
        assert_eq!(set(seen), set(keys.clone()), "pages of {page_max}");
    }
}

/// Records that are there during the whole walk are seen, whatever comes, changes and goes around them.
pub(super) async fn a_walk_misses_nothing_while_others_write(stage: Stage) {
    let keys: Vec<Key> = (0..80).map(|number| stage.key(&format!("id-{number}"))).collect();
    for key in &keys {
        put(&stage, key, &plain(State::Running, 1)).await;
    }
    let mut walk = stage.actor("walker").ledger.walk(Filter { page_max: 5, ..Filter::default() });
    let mut seen = Vec::new();
    for round in 0..PAGES_MAX {
        let Some(rows) = walk.next_page().await.unwrap() else { break };
        seen.extend(rows.into_iter().map(|row| row.key));
        if round < 80 {
            let changed = &keys[(round * 31) % keys.len()];
            let found = super::load(&stage, changed).await;
            let next = plain(State::Done, 1000 + round as u128);
            stored(stage.other().swap(changed, Expected::Record(&found.record), Next::Keep(&next)).await.unwrap());
            let passing = stage.key(&format!("passing-{round}"));
            put(&stage, &passing, &plain(State::Running, 1)).await;
            let token = plain(State::Running, 1).token;
            stored(stage.other().swap(&passing, Expected::Token(token), Next::Erase).await.unwrap());
            put(&stage, &stage.key(&format!("late-{round}")), &plain(State::Running, 1)).await;
        }
    }
    assert!(walk.next_page().await.unwrap().is_none(), "the walk has ended");
    let count = seen.len();
    let seen = set(seen);
    assert_eq!(seen.len(), count, "the ledger drops what a store repeats");
    assert!(keys.iter().all(|key| seen.contains(key)), "no record that was there all the time is missed");
}

pub(super) async fn a_page_is_bounded(stage: Stage) {
    for number in 0..60 {
        put(&stage, &stage.key(&format!("id-{number}")), &plain(State::Done, 1)).await;
    }
    for page_max in [0, 1, 3, 10] {
        let filter = Filter { page_max, ..Filter::default() };
        let (mut cursor, mut rows) = (None, 0);
        for _ in 0..PAGES_MAX {
            let page = stage.store().scan(&filter, cursor).await.unwrap();
            assert!(page.rows.len() <= page_max.max(1), "{} rows on a page of {page_max}", page.rows.len());
            rows += page.rows.len();
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        assert!(rows >= 60, "{rows} rows in pages of {page_max}");
    }
}

pub(super) async fn a_walk_goes_on_from_its_cursor(stage: Stage) {
    let keys: Vec<Key> = (0..40).map(|number| stage.key(&format!("id-{number}"))).collect();
    for key in &keys {
        put(&stage, key, &plain(State::Done, 1)).await;
    }
    let filter = Filter { page_max: 6, ..Filter::default() };
    let mut seen = BTreeSet::new();
    let mut cursor = None;
    for _ in 0..PAGES_MAX {
        // Another process goes on each time: a cursor is all that a walk needs.
        let mut walk = stage.actor("walker").ledger.walk(filter.clone()).from(cursor);
        let rows = walk.next_page().await.unwrap().expect("the walk has not ended");
        seen.extend(rows.into_iter().map(|row| row.key));
        cursor = walk.cursor().cloned();
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, set(keys));
}

/// A cursor once held the rest of what the server had named: more than an argument of a command line may be long.
pub(super) async fn a_cursor_is_short_and_of_one_line(stage: Stage) {
    // The longest keys, with what a line, a shell or a URL would read more into.
    let names = ["n".repeat(NAME_MAX), "h".repeat(NAME_MAX)];
    let keys: Vec<Key> = (0..150)
        .map(|number| {
            let id = format!("{number:03}\u{2028}'\"%20&#?= {}", "é".repeat(120));
            let id = format!("{id}{}", "x".repeat(ID_MAX - id.len()));
            stage.key_of(&names[0], &names[1], &id)
        })
        .collect();
    for key in &keys {
        put(&stage, key, &plain(State::Done, 1)).await;
    }
    for page_max in [1, 2, 5, 64, 149] {
        let filter = Filter { page_max, ..Filter::default() };
        let (mut cursor, mut seen, mut pages) = (None, BTreeSet::new(), 0);
        loop {
            let page = stage.store().scan(&filter, cursor).await.unwrap();
            seen.extend(page.rows.into_iter().map(|row| row.key));
            pages += 1;
            assert!(pages < PAGES_MAX, "the walk has no end");
            let Some(next) = page.next else { break };
            assert!(next.0.len() <= CURSOR_MAX, "{} bytes, pages of {page_max}", next.0.len());
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/@:".contains(&byte);
            assert!(!next.0.is_empty() && next.0.bytes().all(plain), "{next:?}, pages of {page_max}");
            cursor = Some(next);
        }
        assert_eq!(seen, set(keys.clone()), "pages of {page_max}");
    }
}

pub(super) async fn a_foreign_cursor_is_refused(stage: Stage) {
    let keys: Vec<Key> = (0..3).map(|number| stage.key(&format!("id-{number}"))).collect();
    for key in &keys {
        put(&stage, key, &plain(State::Done, 1)).await;
    }
    let long = "nonsense".repeat(100_000);
    for text in
        ["nonsense", "", " ", "0", "17", "-1", "\u{0}", "a\nb", "contract/case@1/", "contract/case@1/a b", &long]
    {
        let error = stage.store().scan(&Filter::default(), Some(Cursor(text.into()))).await.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadCursor, "{text:.20}: {error:?}");
        let shown: String = text.escape_debug().take(20).collect();
        let said = error.to_string();
        assert!(said.contains(&format!("cursor `{shown}")), "{said} names the cursor");
        assert!(said.len() < 1000 && said.lines().count() == 1, "{said} is short");
    }
    // Nothing is broken by it.
    assert_eq!(set(walk(&stage, Filter::default()).await), set(keys));
}

pub(super) async fn a_walk_keeps_to_namespace_and_handler(stage: Stage) {
    let keys = [
        stage.key_of("a", "x", "1"),
        stage.key_of("a", "y", "1"),
        stage.key_of("b", "x", "1"),
        stage.key_of("a.", "x", "1"),
        stage.key_of("ab", "x", "1"),
        stage.key_of("a", "xy", "1"),
        stage.key_of("A", "x", "1"),
        // An id that looks like the rest of another key.
        stage.key_of("c", "z", "a/x@1/1"),
    ];
    for key in &keys {
        put(&stage, key, &plain(State::Done, 1)).await;
    }
    let name = |name: &str| Some(Name::new(name).unwrap());
    let all = |namespace: Option<Name>, handler: Option<Name>| Filter { namespace, handler, ..Filter::default() };
    let pick = |wanted: &[usize]| set(wanted.iter().map(|at| keys[*at].clone()));
    assert_eq!(set(walk(&stage, all(name("a"), None)).await), pick(&[0, 1, 5]));
    assert_eq!(set(walk(&stage, all(None, name("x"))).await), pick(&[0, 2, 3, 4, 6]));
    assert_eq!(set(walk(&stage, all(name("a"), name("x"))).await), pick(&[0]));
    assert_eq!(set(walk(&stage, all(name("a."), None)).await), pick(&[3]));
    assert_eq!(set(walk(&stage, all(name("nobody"), None)).await), pick(&[]));
}

pub(super) async fn a_walk_keeps_to_its_states(stage: Stage) {
    for state in State::ALL {
        for number in 0..3 {
            put(&stage, &stage.key(&format!("{state}-{number}")), &plain(state, 1)).await;
        }
    }
    for state in State::ALL {
        let seen = walk(&stage, Filter { states: vec![state], page_max: 2, ..Filter::default() }).await;
        assert_eq!(seen.len(), 3, "{state}");
        assert!(seen.iter().all(|key| key.id().starts_with(state.name())), "{seen:?}");
    }
    let seen = walk(&stage, Filter { states: vec![State::Dead, State::Parked], ..Filter::default() }).await;
    assert_eq!(seen.len(), 6);
}

pub(super) async fn a_prefix_of_ids_is_taken_literally(stage: Stage) {
    let ids = ["a", "a*", "a*b", "ab", "a%", "a%b", "a_b", "axb", "a[b]", "a?", "a\\b", "A", "b", "{t}a", "é", "éa"];
    for id in ids {
        put(&stage, &stage.key(id), &plain(State::Done, 1)).await;
    }
    for prefix in ["a", "a*", "a%", "a_", "a[b]", "a?", "a\\", "A", "{t}", "é", "zz", "[", "*", "%", "_"] {
        let seen = walk(&stage, Filter { id_prefix: prefix.into(), ..Filter::default() }).await;
        let wanted = ids.iter().filter(|id| id.starts_with(prefix)).map(|id| stage.key(id));
        assert_eq!(set(seen), set(wanted), "prefix `{prefix}`");
    }
}

pub(super) async fn a_walk_keeps_to_an_age(stage: Stage) {
    let (old, young) = (stage.key("old"), stage.key("young"));
    for key in [&old, &young] {
        put(&stage, key, &plain(State::Running, 1)).await;
    }
    stage.shift_age(&old, 3_600_000).await;
    let older_than = |age_min| Filter { age_min, ..Filter::default() };
    assert_eq!(walk(&stage, older_than(Duration::from_secs(1800))).await, std::slice::from_ref(&old));
    assert_eq!(walk(&stage, older_than(Duration::from_secs(7200))).await, []);
    assert_eq!(set(walk(&stage, older_than(Duration::ZERO)).await), set([old, young]));
}

pub(super) async fn an_unreadable_record_is_a_row_with_its_error(stage: Stage) {
    let (fine, broken, newer) = (stage.key("fine"), stage.key("broken"), stage.key("newer"));
    put(&stage, &fine, &plain(State::Done, 1)).await;
    stage.put_raw(&broken, b"garbage").await;
    stage.put_raw(&newer, &of_a_newer_format()).await;
    let mut walk = stage.actor("walker").ledger.walk(Filter { page_max: 1, ..Filter::default() });
    let mut rows = Vec::new();
    while let Some(page) = walk.next_page().await.unwrap() {
        rows.extend(page);
    }
    let mut seen: Vec<_> =
        rows.into_iter().map(|row| (row.key, row.found.map(|_| ()).map_err(|error| error.kind()))).collect();
    seen.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(seen, [(broken, Err(ErrorKind::Corrupt)), (fine, Ok(())), (newer, Err(ErrorKind::NewerFormat))]);
}
