//! Several processes on one file: nobody loses what was acknowledged, nobody wins twice.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Place, held, key, record, stored};
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Next, Store as _, Swap};
use taskonce_sqlite::{Options, SqliteStore};

const FILE: &str = "TASKONCE_TEST_FILE";
const NAME: &str = "TASKONCE_TEST_NAME";

/// This program again, playing one test as a process of its own on the parent's file.
fn start(test: &str, path: &Path, name: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(FILE, path)
        .env(NAME, name)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Tells the parent something, in whole lines. By itself there is no one to tell.
fn tell(line: &str) {
    if std::env::var_os(FILE).is_none() {
        return;
    }
    let mut stderr = std::io::stderr().lock();
    stderr.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Writes with eight tasks at once, and tells each key when it is acknowledged: a few keys by itself, and as a child of
/// the test below until it is killed.
#[test]
fn every_write_of_a_process_is_acknowledged() {
    let place = Place::new();
    let named = std::env::var_os(FILE);
    let path = named.as_deref().map_or(place.path.as_path(), Path::new);
    let name = std::env::var(NAME).unwrap_or_else(|_| "alone".into());
    let writes: usize = if named.is_some() { 1_000_000 } else { 20 };
    let store = SqliteStore::open(path, Options::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..8 {
            let (store, name) = (store.clone(), name.clone());
            tasks.spawn(async move {
                for number in 0..writes {
                    let id = format!("{name}-{task}-{number}");
                    let running = record(State::Running);
                    stored(store.swap(&key(&id), Expected::Nothing, Next::Claim(&running)).await.unwrap());
                    let done = record(State::Done);
                    stored(store.swap(&key(&id), Expected::Record(&running), Next::Keep(&done)).await.unwrap());
                    tell(&format!("acknowledged {id} {}", done.token));
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    });
    drop(store);
    let store = SqliteStore::open(path, Options::default()).unwrap();
    runtime.block_on(async {
        for task in 0..8 {
            assert_eq!(held(&store, &key(&format!("{name}-{task}-{}", writes - 1))).await.record.state, State::Done);
        }
    });
}

#[test]
fn a_killed_process_loses_nothing_that_was_acknowledged() {
    const ROUNDS: usize = 8;
    let place = Place::new();
    // Open all the while, as another worker has it, in the later rounds.
    let mut beside = None;
    let mut acknowledged = Vec::new();
    for round in 0..ROUNDS {
        let mut child = start("every_write_of_a_process_is_acknowledged", &place.path, &format!("round{round}"));
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        for _ in 0..40 + round * 37 {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "the child ended by itself");
            acknowledged.extend(whole(&line));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it told before it died counts too, the torn last line excepted.
        loop {
            line.clear();
            if lines.read_line(&mut line).unwrap() == 0 {
                break;
            }
            acknowledged.extend(whole(&line));
        }
        if round == ROUNDS / 2 {
            beside = Some(place.open());
        }
    }
    drop(beside);
    assert!(acknowledged.len() >= ROUNDS * 40, "{}", acknowledged.len());
    let store = place.open();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        for (id, token) in &acknowledged {
            let found = held(&store, &key(id)).await;
            assert_eq!((found.record.state, &found.record.token.to_string()), (State::Done, token), "{id}");
        }
    });
    let check: String = place.beside().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(check, "ok");
}

fn whole(line: &str) -> Option<(String, String)> {
    let (id, token) = line.strip_suffix('\n')?.strip_prefix("acknowledged ")?.split_once(' ')?;
    Some((id.to_owned(), token.to_owned()))
}

/// Claims one key after the other and tells who has it. By itself it wins them all.
#[test]
fn a_contender_wins_or_sees_the_winner() {
    const ROUNDS: usize = 200;
    let place = Place::new();
    let named = std::env::var_os(FILE);
    let path = named.as_deref().map_or(place.path.as_path(), Path::new);
    let store = SqliteStore::open(path, Options::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut won = 0;
    for round in 0..ROUNDS {
        let running = record(State::Running);
        let key = key(&format!("{round}"));
        match runtime.block_on(store.swap(&key, Expected::Nothing, Next::Claim(&running))).unwrap() {
            Swap::Stored(fence) => {
                won += 1;
                tell(&format!("won {round} {} {fence}", running.token));
            }
            Swap::Conflict(Some(found)) => {
                tell(&format!("saw {round} {} {}", found.record.token, found.record.fence));
            }
            Swap::Conflict(None) | Swap::Locked(_) => panic!("a conflict with nothing"),
        }
    }
    assert!(named.is_some() || won == ROUNDS);
}

#[test]
fn of_two_processes_on_one_key_one_wins_and_the_other_sees_it() {
    let place = Place::new();
    drop(place.open());
    let children: Vec<Child> =
        (0..2).map(|number| start("a_contender_wins_or_sees_the_winner", &place.path, &number.to_string())).collect();
    let mut wins = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        for line in text.lines() {
            if let Some(win) = line.strip_prefix("won ") {
                assert!(wins.insert(win.to_owned()), "{win} was won twice");
            } else if let Some(sight) = line.strip_prefix("saw ") {
                seen.insert(sight.to_owned());
            }
        }
    }
    let rounds: BTreeSet<&str> = wins.iter().filter_map(|win| win.split(' ').next()).collect();
    assert_eq!((wins.len(), rounds.len()), (200, 200), "each round has one winner");
    assert_eq!(seen, wins, "and its token and fence are what the other one sees");
}
