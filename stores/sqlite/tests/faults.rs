//! What goes wrong with files and disks, and what is said of it.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Hand, Place, claim, held, keep, key, names, record, refusal, stored};
use rusqlite::Connection;
use taskonce_core::ErrorKind;
use taskonce_core::record::{Output, Record, State};
use taskonce_core::store::{Expected, Filter, Level, Next, Store as _, Swap};
use taskonce_sqlite::{Options, SqliteStore};

#[test]
fn a_missing_folder_is_refused_with_advice() {
    let place = Place::new();
    let path = place.folder.path().join("not there").join("tasks.db");
    let error = refusal(&path);
    names(&error, ErrorKind::Unreachable, "tasks.db");
    assert!(error.hint().contains("mkdir -p"), "{}", error.hint());
    names(&refusal(place.folder.path()), ErrorKind::BadUrl, &place.folder.path().display().to_string());
}

/// Once a pipe was told as a disk that refuses to be read.
#[cfg(target_os = "linux")]
#[test]
fn what_is_no_file_is_refused_by_its_name() {
    let place = Place::new();
    let pipe = place.folder.path().join("pipe");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let socket = place.folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let linked = place.folder.path().join("linked");
    std::os::unix::fs::symlink(&pipe, &linked).unwrap();
    let named = [(pipe, "a pipe"), (linked, "a pipe"), (socket, "a socket"), ("/dev/null".into(), "a device")];
    for (path, name) in named {
        let error = refusal(&path);
        names(&error, ErrorKind::BadUrl, &path.display().to_string());
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.hint().contains("name a file"), "{}", error.hint());
    }
}

#[test]
fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let place = Place::new();
    let garbage: Vec<u8> = (0..20_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&place.path, &garbage).unwrap();
    names(&refusal(&place.path), ErrorKind::Corrupt, "tasks.db");
    assert_eq!(std::fs::read(&place.path).unwrap(), garbage);
}

#[tokio::test]
async fn a_damaged_page_is_corrupt_and_never_absent() {
    let place = Place::new();
    {
        let store = place.open();
        for number in 0..200 {
            let key = key(&format!("{number:04}"));
            stored(store.swap(&key, Expected::Nothing, Next::Claim(&record(State::Running))).await.unwrap());
        }
    }
    // Every page but the first, which holds the schema.
    let mut bytes = std::fs::read(&place.path).unwrap();
    bytes[4096..].fill(0xa5);
    std::fs::write(&place.path, &bytes).unwrap();
    let store = place.open();
    names(&store.load(&key("0007")).await.unwrap_err(), ErrorKind::Corrupt, "tasks.db");
    let next = record(State::Running);
    names(
        &store.swap(&key("0007"), Expected::Nothing, Next::Claim(&next)).await.unwrap_err(),
        ErrorKind::Corrupt,
        "tasks.db",
    );
    names(
        &store.swap(&key("0007"), Expected::Record(&next), Next::Keep(&next)).await.unwrap_err(),
        ErrorKind::Corrupt,
        "tasks.db",
    );
    names(&store.scan(&Filter::default(), None).await.unwrap_err(), ErrorKind::Corrupt, "tasks.db");
    let findings = store.examine().await;
    assert!(
        findings.iter().any(|finding| finding.subject == "content" && finding.level == Level::Fault),
        "{findings:?}"
    );
}

#[test]
fn another_programs_database_is_refused_and_left_as_it_is() {
    let place = Place::new();
    place.beside().execute_batch("CREATE TABLE task (id); INSERT INTO task VALUES (1)").unwrap();
    let before = std::fs::read(&place.path).unwrap();
    let error = refusal(&place.path);
    names(&error, ErrorKind::BadUrl, "tasks.db");
    assert!(error.to_string().contains("another program"), "{error}");
    assert_eq!(std::fs::read(&place.path).unwrap(), before);
    let mode: String = place.beside().pragma_query_value(None, "journal_mode", |row| row.get(0)).unwrap();
    assert_eq!(mode, "delete");
}

#[test]
fn a_newer_schema_is_refused() {
    let place = Place::new();
    drop(place.open());
    place.beside().pragma_update(None, "user_version", 99).unwrap();
    let error = refusal(&place.path);
    names(&error, ErrorKind::NewerSchema, "tasks.db");
    assert!(error.to_string().contains("version 99"), "{error}");
}

#[tokio::test]
async fn a_schema_that_becomes_newer_under_way_stops_writes() {
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("a")).await;
    place.beside().pragma_update(None, "user_version", 99).unwrap();
    let next = record(State::Running);
    for _ in 0..2 {
        let error = store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap_err();
        names(&error, ErrorKind::NewerSchema, "tasks.db");
    }
    place.beside().pragma_update(None, "user_version", 1).unwrap();
    stored(store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap());
}

#[tokio::test]
async fn garbage_under_a_key_is_an_error_that_names_the_key_and_stays() {
    let place = Place::new();
    let store = place.open();
    let running = claim(&store, &key("good")).await;
    let bad = claim(&store, &key("bad")).await;
    let garbage = b"\x01no record at all, and long enough to look like one, if nobody checks it".as_slice();
    place.beside().execute("UPDATE task SET body = ?1 WHERE key LIKE '%/bad'", [garbage]).unwrap();

    names(&store.load(&key("bad")).await.unwrap_err(), ErrorKind::Corrupt, "billing/charge@2/bad");
    let next = record(State::Running);
    for expected in [Expected::Nothing, Expected::Token(bad.token)] {
        let error = store.swap(&key("bad"), expected, Next::Claim(&next)).await.unwrap_err();
        names(&error, ErrorKind::Corrupt, "billing/charge@2/bad");
        let error = store.swap(&key("bad"), expected, Next::Erase).await.unwrap_err();
        names(&error, ErrorKind::Corrupt, "billing/charge@2/bad");
    }
    let kept: Vec<u8> =
        place.beside().query_row("SELECT body FROM task WHERE key LIKE '%/bad'", [], |row| row.get(0)).unwrap();
    assert_eq!(kept, garbage);

    // It spoils neither a list nor its neighbours.
    let page = store.scan(&Filter::default(), None).await.unwrap();
    let kinds: Vec<_> = page.rows.iter().map(|row| row.found.as_ref().err().map(|error| error.kind())).collect();
    assert_eq!(kinds, [Some(ErrorKind::Corrupt), None]);
    keep(&store, &key("good"), &running, record(State::Done)).await;
}

#[tokio::test]
async fn a_record_of_a_newer_format_is_an_error_of_its_own() {
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("a")).await;
    place.beside().execute("UPDATE task SET body = ?1", [taskonce_contract::records::of_a_newer_format()]).unwrap();
    names(&store.load(&key("a")).await.unwrap_err(), ErrorKind::NewerFormat, "billing/charge@2/a");
}

#[tokio::test]
async fn a_locked_file_is_refused_at_the_deadline_and_read_all_the_while() {
    let place = Place::new();
    let timeout = Duration::from_millis(150);
    let store = place.open_with(Options { timeout, ..Options::default() });
    let running = claim(&store, &key("a")).await;
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();

    let began = Instant::now();
    let next = record(State::Running);
    let error = store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap_err();
    let took = began.elapsed();
    names(&error, ErrorKind::Locked, "tasks.db");
    assert!(took >= timeout && took < Duration::from_secs(2), "{took:?}");
    assert_eq!(held(&store, &key("a")).await.record.token, running.token);
    let duplicate = store.swap(&key("a"), Expected::Nothing, Next::Claim(&next)).await.unwrap();
    assert!(matches!(duplicate, Swap::Conflict(Some(_))), "a duplicate needs no turn to write");
    let findings = store.examine().await;
    let write = findings.iter().find(|finding| finding.subject == "write").unwrap();
    assert_eq!(write.level, Level::Fault, "{write:?}");

    beside.execute_batch("ROLLBACK").unwrap();
    stored(store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap());
}

#[tokio::test]
async fn callers_are_answered_in_time_when_the_writer_hangs() {
    let place = Place::new();
    let (release, held_up) = mpsc::channel::<()>();
    let held_up = Mutex::new(held_up);
    let timeout = Duration::from_millis(200);
    // A clock that does not return stands for a disk that does not.
    let clock = Arc::new(move || {
        let _ = held_up.lock().unwrap().recv();
        1_000_000
    });
    let store = place.open_with(Options { timeout, clock, ..Options::default() });
    let (first, second) = (record(State::Running), record(State::Running));
    let began = Instant::now();
    let (one, two) = (key("one"), key("two"));
    let (in_flight, waiting) = tokio::join!(
        store.swap(&one, Expected::Nothing, Next::Claim(&first)),
        store.swap(&two, Expected::Nothing, Next::Claim(&second))
    );
    let took = began.elapsed();
    for error in [in_flight.unwrap_err(), waiting.unwrap_err()] {
        names(&error, ErrorKind::TimedOut, "tasks.db");
    }
    assert!(took >= timeout && took < Duration::from_secs(2), "{took:?}");
    drop(release);
    // The outcome was unknown: asked again, the claim recognises itself or is stored now.
    stored(store.swap(&one, Expected::Nothing, Next::Claim(&first)).await.unwrap());
    stored(store.swap(&two, Expected::Nothing, Next::Claim(&second)).await.unwrap());
}

#[tokio::test]
async fn a_full_disk_is_told_and_loses_nothing() {
    let place = Place::new();
    let store = place.open_with(Options { size_max: Some(300 * 1024), ..Options::default() });
    let mut kept = Vec::new();
    let full = loop {
        assert!(kept.len() < 100, "it must become full");
        let key = key(&format!("{:03}", kept.len()));
        let done = Record { output: Output::kept("text/plain", vec![b'x'; 20_000]), ..record(State::Done) };
        match store.swap(&key, Expected::Nothing, Next::Keep(&done)).await {
            Ok(swap) => {
                stored(swap);
                kept.push((key, done));
            }
            Err(error) => break error,
        }
    };
    names(&full, ErrorKind::Full, "tasks.db");
    for (key, done) in &kept {
        assert_eq!(*held(&store, key).await.record, *done);
    }
    let running = record(State::Running);
    let (key, done) = kept.pop().unwrap();
    stored(store.swap(&key, Expected::Record(&done), Next::Erase).await.unwrap());
    stored(store.swap(&key, Expected::Nothing, Next::Claim(&running)).await.unwrap());
}

/// Once a new task that a full disk refused failed every heartbeat and every end that shared its commit.
#[tokio::test]
async fn on_a_full_disk_new_tasks_fail_alone_and_what_runs_goes_on() {
    let place = Place::new();
    let store = place.open_with(Options { size_max: Some(300 * 1024), ..Options::default() });
    let large = || Record { output: Output::kept("text/plain", vec![b'x'; 20_000]), ..record(State::Done) };
    let mut kept = Vec::new();
    loop {
        let (key, done) = (key(&format!("{:03}", kept.len())), large());
        match store.swap(&key, Expected::Nothing, Next::Keep(&done)).await {
            Ok(_) => kept.push((key, done)),
            Err(error) => break names(&error, ErrorKind::Full, "tasks.db"),
        }
        assert!(kept.len() < 100, "it must become full");
    }
    // Held, so that all that is asked meanwhile shares one commit.
    let beside = place.beside();
    beside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (mut new, mut known) = (tokio::task::JoinSet::new(), tokio::task::JoinSet::new());
    for (number, (held, done)) in kept.into_iter().enumerate() {
        let (store, beside, next) = (store.clone(), store.clone(), large());
        new.spawn(
            async move { beside.swap(&key(&format!("new {number}")), Expected::Nothing, Next::Keep(&next)).await },
        );
        let next = large();
        let is_erased = number == 0;
        known.spawn(async move {
            let next = if is_erased { Next::Erase } else { Next::Keep(&next) };
            store.swap(&held, Expected::Record(&done), next).await
        });
    }
    // On one thread, each asks before this goes on.
    tokio::task::yield_now().await;
    beside.execute_batch("ROLLBACK").unwrap();
    while let Some(swap) = known.join_next().await {
        stored(swap.unwrap().unwrap());
    }
    let mut accepted = 0;
    while let Some(swap) = new.join_next().await {
        match swap.unwrap() {
            Ok(swap) => {
                stored(swap);
                accepted += 1;
            }
            Err(error) => names(&error, ErrorKind::Full, "tasks.db"),
        }
    }
    assert_eq!(accepted, 1, "one was removed, so there is room for one");
}

#[tokio::test]
async fn a_removed_file_is_never_silently_begun_again() {
    let place = Place::new();
    let store = place.open();
    claim(&store, &key("a")).await;
    let aside = place.folder.path().join("aside");
    std::fs::create_dir(&aside).unwrap();
    for suffix in ["", "-wal", "-shm"] {
        let name = format!("tasks.db{suffix}");
        std::fs::rename(place.folder.path().join(&name), aside.join(&name)).unwrap();
    }
    let next = record(State::Running);
    for _ in 0..2 {
        let error = store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap_err();
        names(&error, ErrorKind::Unreachable, "tasks.db");
        assert!(error.to_string().contains("removed"), "{error}");
    }
    assert!(!place.path.exists());

    for suffix in ["", "-wal", "-shm"] {
        let name = format!("tasks.db{suffix}");
        std::fs::rename(aside.join(&name), place.folder.path().join(&name)).unwrap();
    }
    stored(store.swap(&key("b"), Expected::Nothing, Next::Claim(&next)).await.unwrap());
    held(&store, &key("a")).await;
}

#[tokio::test]
async fn an_examination_finds_a_good_store_good_and_a_clock_that_went_back() {
    let place = Place::new();
    let hand = Hand::at(1_700_000_000_000);
    let store = place.open_with(hand.options());
    claim(&store, &key("a")).await;
    let subjects = ["library", "file", "synchronous", "write", "journal", "clock", "content"];
    let findings = store.examine().await;
    for subject in subjects {
        let found = findings.iter().find(|finding| finding.subject == subject);
        assert!(found.is_some_and(|finding| finding.level < Level::Fault), "{subject}: {findings:?}");
    }
    let clock = |findings: &[taskonce_core::store::Finding]| {
        findings.iter().find(|finding| finding.subject == "clock").cloned().unwrap()
    };
    assert_eq!(clock(&findings).level, Level::Fine);
    hand.set(1_700_000_000_000 - 90_000);
    let jumped = clock(&store.examine().await);
    assert_eq!(jumped.level, Level::Warning);
    assert!(jumped.text.contains("90.0 s"), "{jumped:?}");
    // The lease is 30 s. Back by more than that it counts as passed, back by less it lasts longer.
    assert!(held(&store, &key("a")).await.age.has_passed(Duration::from_secs(30)));
    assert!(jumped.hint.contains("a shorter one count as passed"), "{jumped:?}");
    hand.set(1_700_000_000_000 - 20_000);
    assert!(!held(&store, &key("a")).await.age.has_passed(Duration::from_secs(30)));
    assert!(clock(&store.examine().await).hint.contains("last that much longer"));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_examination_warns_of_a_file_in_memory() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = SqliteStore::open(&folder.path().join("tasks.db"), Options::default()).unwrap();
    let findings = store.examine().await;
    let found = findings.iter().find(|finding| finding.subject == "file system").unwrap();
    assert_eq!(found.level, Level::Warning, "{found:?}");
    assert!(found.text.contains("tmpfs"), "{found:?}");
}

#[test]
fn a_store_of_schema_version_1_is_marked_as_ours() {
    let place = Place::new();
    drop(place.open());
    let conn: Connection = place.beside();
    let application: i32 = conn.pragma_query_value(None, "application_id", |row| row.get(0)).unwrap();
    let version: i32 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!((application, version), (0x7461_736b, 1));
}
