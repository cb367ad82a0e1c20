//! Several processes on one queue, some of them killed: nothing that was accepted is lost, nothing has two holders.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{AT_ONCE, HANDLER, PATIENCE, Place, done, receive, send};
use taskonce_queue_sqlite::{QueueOptions, SqliteQueue};
use taskonce_worker::source::{Depth, Entrance, Envelope, Sent, Settled, Source};

const FILE: &str = "TASKONCE_TEST_FILE";
const NAME: &str = "TASKONCE_TEST_NAME";
/// Short, so that what a killed consumer held comes again soon.
const VISIBILITY: Duration = Duration::from_millis(700);

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

/// The parent's file and this child's name; nothing in a process of its own.
fn parent() -> Option<(PathBuf, String)> {
    Some((std::env::var_os(FILE)?.into(), std::env::var(NAME).ok()?))
}

/// Tells the parent something, in whole lines. By itself there is no one to tell.
fn tell(line: &str) {
    if parent().is_some() {
        std::io::stderr().lock().write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

/// Reads lines of a child until `count` begin so, kills it and says that it did, and returns all whole lines.
fn killed_after(mut child: Child, beginning: &str, count: usize, killed: impl FnOnce()) -> Vec<String> {
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let (mut told, mut line) = (Vec::new(), String::new());
    let mut killed = Some(killed);
    // Ends with the end of the child's stderr.
    loop {
        line.clear();
        if lines.read_line(&mut line).unwrap() == 0 {
            break;
        }
        // The last line may be torn.
        if let Some(line) = line.strip_suffix('\n') {
            told.push(line.to_owned());
        }
        if told.iter().filter(|line| line.starts_with(beginning)).count() >= count
            && let Some(killed) = killed.take()
        {
            child.kill().unwrap();
            killed();
        }
    }
    assert!(killed.is_none(), "the child ended by itself: {told:?}");
    child.wait().unwrap();
    told
}

fn options() -> QueueOptions {
    QueueOptions { visibility: VISIBILITY, ..QueueOptions::default() }
}

/// Sends one after the other and tells each that was accepted: a few by itself, and as a child until it is killed.
#[tokio::test]
async fn a_sender_tells_what_was_accepted() {
    let place = Place::new();
    let (path, name) = parent().unwrap_or((place.path.clone(), "alone".into()));
    let queue = SqliteQueue::open(&path, options()).unwrap();
    let count = if parent().is_some() { 1_000_000 } else { 10 };
    for number in 0..count {
        let payload = format!("{name}-{number}");
        // Each second one is too large for its row.
        let padding = if number % 2 == 0 { 0 } else { 5000 };
        let envelope = Envelope::new(HANDLER, format!("{payload} {}", "x".repeat(padding)));
        let sent = queue.send(&envelope, AT_ONCE, Entrance::Open).await.unwrap();
        assert!(matches!(sent, Sent::Accepted(_)));
        tell(&format!("accepted {payload}"));
    }
    assert!(parent().is_some() || queue.depth().await.unwrap()[0].ready == 10);
}

#[tokio::test]
async fn a_killed_sender_loses_nothing_that_was_accepted() {
    let place = Place::new();
    let mut accepted = BTreeSet::new();
    for round in 0..4 {
        let child = start("a_sender_tells_what_was_accepted", &place.path, &format!("round{round}"));
        let told = killed_after(child, "accepted ", 20 + 13 * round, || ());
        accepted.extend(told.iter().filter_map(|line| line.strip_prefix("accepted ")).map(str::to_owned));
    }
    let queue = place.open();
    let mut arrived = BTreeSet::new();
    // Each round receives something, so that the loop ends.
    loop {
        let deliveries = receive(&queue, 100, AT_ONCE).await;
        if deliveries.is_empty() {
            break;
        }
        for delivery in deliveries {
            let payload = String::from_utf8(delivery.envelope.payload).unwrap();
            let (name, padding) = payload.split_once(' ').unwrap();
            assert!([0, 5000].contains(&padding.len()), "{name} arrived whole");
            assert!(arrived.insert(name.to_owned()), "{name} is there once");
            done(queue.acknowledge(&delivery.receipt).await.unwrap());
        }
    }
    let lost: Vec<_> = accepted.difference(&arrived).collect();
    assert!(lost.is_empty(), "{lost:?}");
    // At most the one that a killed sender was about to tell.
    assert!(arrived.len() <= accepted.len() + 4, "{} of {}", arrived.len(), accepted.len());
}

/// The name of a consumer that keeps what it took first until it is killed.
const STUCK: &str = "stuck";
/// The names of consumers that work until they are killed begin so.
const KILLED: &str = "killed";
/// The most that such a one takes before it is killed, so that enough is left for the others.
const TAKEN_MAX: usize = 60;

/// Takes what there is and tells it, acknowledges that and tells it: all there is by itself, and as a child until it is
/// killed, or for a while after there is nothing more.
#[tokio::test]
async fn a_consumer_tells_what_it_took() {
    let place = Place::new();
    let (path, name) = parent().unwrap_or((place.path.clone(), "alone".into()));
    let queue = SqliteQueue::open(&path, options()).unwrap();
    if parent().is_none() {
        send(&queue, *b"alone").await;
    }
    let began = Instant::now();
    let mut taken = 0;
    while began.elapsed() < PATIENCE {
        if taken >= TAKEN_MAX && name.starts_with(KILLED) {
            return std::future::pending().await;
        }
        let deliveries = receive(&queue, 5, VISIBILITY * 3).await;
        if deliveries.is_empty() {
            break;
        }
        taken += deliveries.len();
        for delivery in &deliveries {
            tell(&format!("took {} {}", delivery.coordinates, delivery.number));
        }
        if name == STUCK {
            return std::future::pending().await;
        }
        for delivery in &deliveries {
            if queue.acknowledge(&delivery.receipt).await.unwrap() == Settled::Done {
                tell(&format!("settled {} {}", delivery.coordinates, delivery.number));
            }
        }
    }
    assert!(parent().is_some() || Depth::total(&queue.depth().await.unwrap()) == Depth::default());
}

#[tokio::test]
async fn killed_consumers_lose_nothing_and_no_delivery_has_two_holders() {
    const COUNT: usize = 400;
    let place = Place::new();
    let queue = place.open_with(options());
    let mut sent = BTreeSet::new();
    for number in 0..COUNT {
        sent.insert(send(&queue, number.to_string()).await.to_string());
    }
    let consumer = |name: &str| start("a_consumer_tells_what_it_took", &place.path, name);
    // Three are killed in the middle of their work. Two begin then, so that they cannot leave one of those without any,
    // and go on to the end.
    let (killed, was_killed) = std::sync::mpsc::channel();
    let victims: Vec<_> = [(STUCK, 5), ("killed 1", 12), ("killed 2", 17)]
        .map(|(name, count)| {
            let (child, killed) = (consumer(name), killed.clone());
            std::thread::spawn(move || killed_after(child, "took ", count, move || killed.send(()).unwrap()))
        })
        .into();
    for _ in &victims {
        was_killed.recv_timeout(PATIENCE).unwrap();
    }
    let steady = [consumer("a"), consumer("b")];
    let mut told: Vec<String> = victims.into_iter().flat_map(|victim| victim.join().unwrap()).collect();
    for child in steady {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        told.extend(text.lines().map(str::to_owned));
    }
    // On a machine that is busy a consumer may have been killed after the steady ones had found nothing more.
    let ended = Instant::now();
    while !queue.depth().await.unwrap().is_empty() {
        assert!(ended.elapsed() < PATIENCE, "what was killed holds deliveries for ever");
        for delivery in receive(&queue, 10, VISIBILITY).await {
            told.push(format!("took {} {}", delivery.coordinates, delivery.number));
            done(queue.acknowledge(&delivery.receipt).await.unwrap());
        }
    }
    let mut took: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    let mut settled: BTreeMap<&str, u32> = BTreeMap::new();
    for line in &told {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["took", coordinates, number] => {
                let is_new = took.entry(coordinates).or_default().insert(number.parse().unwrap());
                assert!(is_new, "{coordinates} was handed out twice as number {number}");
            }
            ["settled", coordinates, number] => {
                let before = settled.insert(coordinates, number.parse().unwrap());
                assert_eq!(before, None, "{coordinates} was settled twice");
            }
            _ => {}
        }
    }
    let missing: Vec<_> = sent.iter().filter(|coordinates| !took.contains_key(coordinates.as_str())).collect();
    assert!(missing.is_empty(), "{missing:?} never arrived");
    for (coordinates, number) in &settled {
        assert_eq!(took[coordinates].last(), Some(number), "{coordinates} came again after it was settled");
    }
    assert_eq!(queue.depth().await.unwrap(), [], "all of it is settled in the end");
    let again = took.values().filter(|numbers| numbers.len() > 1).count();
    assert!(again > 0, "what a killed consumer held has come again");
    let check: String = place.beside().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(check, "ok");
}

/// Waits for one delivery and tells when it has it.
#[tokio::test]
async fn a_waiting_process_tells_what_woke_it() {
    let place = Place::new();
    let path = parent().map_or_else(|| place.path.clone(), |(path, _)| path);
    let queue = SqliteQueue::open(&path, options()).unwrap();
    if parent().is_none() {
        send(&queue, *b"alone").await;
    }
    tell("waiting");
    let deliveries = receive(&queue, 1, PATIENCE).await;
    assert_eq!(deliveries.len(), 1);
    tell("woke");
    done(queue.acknowledge(&deliveries[0].receipt).await.unwrap());
}

#[tokio::test]
async fn a_process_that_waits_wakes_soon_after_another_sends() {
    let place = Place::new();
    let queue = place.open();
    let mut child = start("a_waiting_process_tells_what_woke_it", &place.path, "waiting");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "waiting"));
    // sleeps: the receive has to be waiting, at its longest distance between two looks.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sent = Instant::now();
    send(&queue, *b"wake").await;
    assert!(lines.any(|line| line.unwrap() == "woke"));
    let took = sent.elapsed();
    assert!(took < taskonce_queue_sqlite::WAKE_MAX + Duration::from_secs(2), "{took:?}");
    assert!(child.wait().unwrap().success());
}
