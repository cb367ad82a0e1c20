//! The store's threads: begun by the first write, ended with the last clone. Alone in its process, to count them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use common::{Place, claim, held, key};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("taskonce-"))
        .count()
}

/// Waits until there are so many. A thread has its name, and is gone, a moment after it was started or said its last word.
fn becomes(count: usize) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while threads() != count {
        assert!(std::time::Instant::now() < end, "there are {} threads, not {count}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn threads_begin_with_the_first_write_and_end_with_the_last_clone() {
    let place = Place::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = place.open();
    assert_eq!(runtime.block_on(taskonce_core::store::Store::load(&store, &key("a"))).unwrap(), None);
    assert_eq!(threads(), 0, "reading needs none");
    runtime.block_on(claim(&store, &key("a")));
    becomes(2);
    let clone = store.clone();
    drop(store);
    assert_eq!(threads(), 2);
    drop(runtime);
    // Another runtime serves as well: the store belongs to none.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(claim(&clone, &key("b")));
    runtime.block_on(held(&clone, &key("a")));
    drop(clone);
    becomes(0);
    let rest: Vec<_> =
        std::fs::read_dir(place.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(rest, ["tasks.db"], "the log is written back and gone");
}
