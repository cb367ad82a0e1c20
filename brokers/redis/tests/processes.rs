//! Several processes on one queue, some of them killed: nothing that was accepted is lost, nothing has two holders.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{AT_ONCE, HANDLER, PATIENCE, payloads, receive, send};
use taskonce_queue_redis::RedisQueue;
use taskonce_testkit::RedisServer;
use taskonce_worker::source::{Depth, Entrance, Envelope, Settled, Source};

const URL: &str = "TASKONCE_TEST_URL";
const COUNT: usize = 400;
/// Short, so that what a killed consumer held comes again soon; far above what a consumer takes for one.
const VISIBILITY: Duration = Duration::from_millis(1500);

/// This program again, as a consumer in a process of its own.
fn start(url: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_consumer_tells_what_it_took", "--nocapture"])
        .env(URL, url)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Takes what there is and tells it, acknowledges that and tells it: until there is nothing for a while, or it is killed.
#[tokio::test]
async fn a_consumer_tells_what_it_took() {
    let server = if std::env::var_os(URL).is_none() { Some(RedisServer::start(&[]).unwrap()) } else { None };
    let queue = match &server {
        Some(server) => common::open(server),
        None => RedisQueue::from_url(&std::env::var(URL).unwrap()).unwrap(),
    };
    if server.is_some() {
        send(&queue, *b"alone").await;
    }
    let tell = |line: String| {
        if server.is_none() {
            std::io::stderr().lock().write_all(format!("{line}\n").as_bytes()).unwrap();
        }
    };
    let wait = if server.is_none() { 2 * VISIBILITY } else { AT_ONCE };
    let mut taken = 0;
    // Each round takes something, so that the loop ends.
    loop {
        let held = receive(&queue, 5, wait).await;
        if held.is_empty() {
            break;
        }
        for delivery in held {
            let name = payloads(std::slice::from_ref(&delivery)).remove(0);
            tell(format!("taken {name} {}", delivery.number));
            match queue.acknowledge(&delivery.receipt).await.unwrap() {
                Settled::Done => tell(format!("done {name}")),
                Settled::Gone => tell(format!("gone {name}")),
            }
            taken += 1;
        }
    }
    assert!(server.is_none() || taken == 1);
}

#[tokio::test]
async fn killed_processes_lose_nothing_and_no_delivery_has_two_holders() {
    let server = RedisServer::start(&[]).unwrap();
    let url = format!("{}/0?timeout=20s&visibility={}ms", server.url(), VISIBILITY.as_millis());
    let queue = RedisQueue::from_url(&url).unwrap();
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut children = Vec::new();
    for number in 0..4 {
        let mut child = start(&url);
        let (lines, told) = (BufReader::new(child.stderr.take().unwrap()), Arc::clone(&told));
        let reader = std::thread::spawn(move || {
            let mut seen = 0;
            for line in lines.lines().map_while(Result::ok) {
                seen += 1;
                told.lock().unwrap().push(line);
                // Two are killed in the midst of it.
                if number < 2 && seen == 40 + 15 * number {
                    child.kill().unwrap();
                }
            }
            child.wait().unwrap();
        });
        children.push(reader);
    }
    for number in 0..COUNT {
        let envelope = Envelope { key: Some(number.to_string()), ..Envelope::new(HANDLER, number.to_string()) };
        // Three copies of everything; one at a time is queued.
        for _ in 0..3 {
            let _sent = queue.send(&envelope, AT_ONCE, Entrance::OncePerKey).await.unwrap();
        }
    }
    let began = Instant::now();
    while Depth::total(&queue.depth().await.unwrap()) != Depth::default() {
        assert!(began.elapsed() < 3 * PATIENCE, "{:?}", queue.depth().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::task::spawn_blocking(move || children.into_iter().for_each(|child| child.join().unwrap())).await.unwrap();
    let told = told.lock().unwrap();
    let done: BTreeSet<&str> = told.iter().filter_map(|line| line.strip_prefix("done ")).collect();
    let taken: BTreeSet<&str> = told.iter().filter_map(|line| line.strip_prefix("taken ")?.split(' ').next()).collect();
    assert_eq!(taken.len(), COUNT, "nothing is lost");
    // What a killed one took and did not tell as done, another has; or it was done, and could not be told.
    assert!(COUNT - done.len() <= 2, "{} of {COUNT}", done.len());
    assert!(told.iter().all(|line| !line.starts_with("gone ")), "nobody's delivery went to another while it had it");
}
