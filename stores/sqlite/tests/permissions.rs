//! What a user can do who is not the worker's: read the file where that does no harm, and be told what is missing.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::path::Path;

use common::{Place, claim, commits_in_log, held, keep, key, record};
use taskonce_core::record::State;
use taskonce_core::store::{Expected, Filter, Next, Store as _};
use taskonce_sqlite::{Options, SqliteStore};

/// Uses the file that the parent names, as the parent's user or as nobody, and says what came of it. Called by itself
/// it uses a file of its own.
#[tokio::test]
async fn a_file_that_may_be_written_is_used() {
    let place = Place::new();
    let named = std::env::var_os("TASKONCE_TEST_FILE");
    let path = named.as_deref().map_or(place.path.as_path(), Path::new);
    let store = match (SqliteStore::open(path, Options::default()), named.is_some()) {
        (Ok(store), _) => store,
        (Err(error), true) => {
            return eprintln!("refused: {error:?} about {}", error.subject().unwrap());
        }
        (Err(error), false) => panic!("{error:?}"),
    };
    if named.is_none() {
        claim(&store, &key("a")).await;
        return;
    }
    // Often, since the worker may be writing meanwhile.
    for _ in 0..1000 {
        if let Err(error) = store.load(&key("a")).await {
            return eprintln!("not loaded: {error:?}");
        }
    }
    eprintln!("loaded {:?}", store.load(&key("a")).await.map(|found| found.map(|found| found.record.state)));
    eprintln!("listed {:?}", store.scan(&Filter::default(), None).await.map(|page| page.rows.len()));
    eprintln!("claimed {:?}", store.swap(&key("new"), Expected::Nothing, Next::Claim(&record(State::Running))).await);
    let findings = store.examine().await;
    eprintln!("found {:?}", findings.iter().find(|finding| finding.subject == "write").unwrap());
}

fn allow(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Permissions do not bind root, so root looks as nobody, with a copy of this program where nobody may run it.
fn seen_by_a_plain_user(place: &Place) -> String {
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::process::CommandExt as _;
    let public = tempfile::tempdir().unwrap();
    allow(public.path(), 0o755);
    let program = public.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut child = std::process::Command::new(&program);
    child.args(["--exact", "a_file_that_may_be_written_is_used", "--nocapture"]);
    child.env("TASKONCE_TEST_FILE", &place.path).env("TMPDIR", std::env::temp_dir()).current_dir("/");
    if std::fs::metadata(public.path()).unwrap().uid() == 0 {
        child.uid(65_534).gid(65_534);
    }
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A file and what SQLite keeps beside it.
fn allow_all(place: &Place, file: u32, folder: u32) {
    for suffix in ["", "-wal", "-shm"] {
        let path = place.folder.path().join(format!("tasks.db{suffix}"));
        if path.exists() {
            allow(&path, file);
        }
    }
    allow(place.folder.path(), folder);
}

fn is_read_and_not_written(seen: &str) {
    assert!(seen.contains("loaded Ok(Some(Running))") && seen.contains("listed Ok(1)"), "{seen}");
    let refused: Vec<_> = seen.lines().filter(|line| line.contains("claimed Err(") || line.contains("Fault")).collect();
    assert_eq!(refused.len(), 2, "{seen}");
    for line in refused {
        assert!(line.contains("may read the file, not write to it"), "{seen}");
        assert!(line.contains("the right to write to") && !line.contains("primary"), "{seen}");
    }
}

/// Once a person who was not the worker's user could not even look at a task.
#[test]
fn who_may_only_read_the_file_reads_beside_the_worker() {
    let place = Place::new();
    let store = place.open();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut running = runtime.block_on(claim(&store, &key("a")));
    allow_all(&place, 0o444, 0o555);
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(|| seen_by_a_plain_user(&place));
        while !reader.is_finished() {
            running = runtime.block_on(keep(&store, &key("a"), &running, record(State::Running)));
        }
        reader.join().unwrap()
    });
    is_read_and_not_written(&seen);
    allow_all(&place, 0o644, 0o755);
    runtime.block_on(keep(&store, &key("a"), &running, record(State::Done)));
}

#[tokio::test]
async fn who_may_only_read_the_file_reads_what_a_killed_worker_left() {
    let (place, left) = (Place::new(), Place::new());
    let store = place.open();
    claim(&store, &key("a")).await;
    assert!(commits_in_log(&place.path) > 0, "the record lies in the log");
    for suffix in ["", "-wal", "-shm"] {
        let name = format!("tasks.db{suffix}");
        std::fs::copy(place.folder.path().join(&name), left.folder.path().join(&name)).unwrap();
    }
    allow_all(&left, 0o444, 0o555);
    is_read_and_not_written(&seen_by_a_plain_user(&left));
    allow_all(&left, 0o644, 0o755);
    held(&left.open(), &key("a")).await;
}

#[test]
fn a_read_only_file_that_no_worker_has_open_is_refused_with_the_reason() {
    let place = Place::new();
    drop(place.open());
    allow_all(&place, 0o444, 0o555);
    let seen = seen_by_a_plain_user(&place);
    assert!(seen.contains("(read_only; hint: ") && seen.contains("tasks.db"), "{seen}");
    assert!(seen.contains("no worker has it open") && seen.contains("while a worker runs"), "{seen}");
    allow_all(&place, 0o644, 0o755);
}

/// SQLite would make files beside it there, which are the reader's own: the worker could not write any more.
#[test]
fn a_read_only_file_in_a_folder_that_may_be_written_is_refused_and_nothing_is_left_beside_it() {
    let place = Place::new();
    drop(place.open());
    allow_all(&place, 0o444, 0o777);
    let seen = seen_by_a_plain_user(&place);
    assert!(seen.contains("(read_only; hint: ") && seen.contains("tasks.db"), "{seen}");
    assert_eq!(std::fs::read_dir(place.folder.path()).unwrap().count(), 1);
}

#[test]
fn a_read_only_folder_is_refused_as_read_only() {
    let place = Place::new();
    allow(place.folder.path(), 0o555);
    let seen = seen_by_a_plain_user(&place);
    assert!(seen.contains("(read_only; hint: "), "a new file: {seen}");

    allow(place.folder.path(), 0o755);
    drop(place.open());
    allow(&place.path, 0o666);
    allow(place.folder.path(), 0o555);
    let seen = seen_by_a_plain_user(&place);
    assert!(seen.contains("(read_only; hint: "), "an old file: {seen}");
    allow(place.folder.path(), 0o755);
}
