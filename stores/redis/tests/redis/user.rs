//! The user whom the documentation gives to the store: it can do all that the store does, and no more.

use std::time::Duration;

use taskonce_core::record::{Record, State, Token};
use taskonce_core::store::{Expected, Filter, Level, Next, Store, Swap, Walk};
use taskonce_testkit::resp::Reply;
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{Program, RedisCluster, RedisServer, Sentinels};

use crate::support::{Pair, done, key, load, open, record, running, store};

/// The line of the page, as words.
fn line() -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/redis/README.md");
    let page = std::fs::read_to_string(page).unwrap();
    let line = page.lines().find(|line| line.starts_with("ACL SETUSER taskonce ")).unwrap();
    line.split(' ').map(str::to_owned).collect()
}

fn add(server: &RedisServer) {
    assert_eq!(server.command(&line()).unwrap(), Reply::Status("OK".into()));
}

/// Every kind of call.
async fn use_all(url: &str) {
    let redis = open(url);
    let (claim, beat) = (running(), running());
    store(&redis, &key("a"), None, &claim).await;
    let busy = redis.swap(&key("a"), Expected::Nothing, Next::Claim(&running())).await.unwrap();
    assert!(matches!(busy, Swap::Conflict(Some(_))), "{busy:?}");
    // A heartbeat and a failure stand in lists, a redrive leaves them.
    let beat = Record { claim: claim.claim, state_age: Duration::from_secs(10), ..beat };
    store(&redis, &key("a"), Some(&claim), &beat).await;
    let waiting = record(State::Waiting);
    store(&redis, &key("a"), Some(&beat), &waiting).await;
    for walk in [Walk::Listed, Walk::All] {
        let filter = Filter { states: vec![State::Waiting], walk, ..Filter::default() };
        let (mut found, mut cursor) = (0, None);
        loop {
            let page = redis.scan(&filter, cursor).await.unwrap();
            found += page.rows.len();
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, 1, "{walk:?}");
    }
    // Who waits is called.
    let seen = load(&redis, &key("a")).await.record;
    let waits = {
        let (redis, seen) = (redis.clone(), seen.clone());
        tokio::spawn(async move { redis.changed(&key("a"), &seen).await.unwrap() })
    };
    let last = Record { token: Token::from(fastrand::u128(..)), ..done() };
    store(&redis, &key("a"), Some(&seen), &last).await;
    assert!(tokio::time::timeout(Duration::from_secs(20), waits).await.unwrap().unwrap());
    let gone = redis.swap(&key("a"), Expected::Record(&last), Next::Erase).await.unwrap();
    assert!(matches!(gone, Swap::Stored(_)), "{gone:?}");
    let findings = redis.examine().await;
    assert!(findings.iter().all(|finding| finding.level != Level::Fault), "{findings:#?}");
    for subject in ["flush", "waiting", "lists", "eviction policy"] {
        let all: Vec<_> = findings.iter().filter(|finding| finding.subject == subject).collect();
        assert!(!all.is_empty() && all.iter().all(|finding| finding.level == Level::Fine), "{all:#?}");
    }
}

/// What the line does not allow.
fn cannot_harm(server: &RedisServer) {
    let mut connection = server.connect().unwrap();
    connection.ask(&["AUTH", "taskonce", "PASSWORD"]).unwrap();
    for words in [
        &["FLUSHALL"][..],
        &["FLUSHDB"],
        &["CONFIG", "GET", "requirepass"],
        &["ACL", "LIST"],
        &["SHUTDOWN", "NOSAVE"],
        &["SET", "other:key", "x"],
        &["KEYS", "*"],
    ] {
        let answer = connection.ask(words).unwrap();
        assert!(matches!(&answer, Reply::Error(text) if text.starts_with("NOPERM")), "{words:?}: {answer:?}");
    }
}

#[tokio::test]
async fn a_user_with_the_line_of_the_page_can_do_all_that_the_store_does_and_no_harm() {
    let pair = Pair::start();
    add(&pair.primary);
    let host = format!("taskonce:PASSWORD@127.0.0.1:{}", pair.primary.port());
    use_all(&format!("redis://{host}?wait_replicas=1&timeout=20s")).await;
    cannot_harm(&pair.primary);
}

#[tokio::test]
async fn the_same_user_can_do_all_that_the_store_does_on_a_cluster() {
    let cluster = RedisCluster::start(3, 0, &[]).unwrap();
    (0..3).for_each(|n| add(cluster.server(n)));
    let host = format!("taskonce:PASSWORD@127.0.0.1:{}", cluster.ports()[0]);
    use_all(&format!("redis+cluster://{host}?timeout=20s")).await;
}

/// What an example of a page connects to.
enum Stand {
    Server(RedisServer),
    Cluster(RedisCluster),
    Sentinels(Sentinels),
}

impl Stand {
    fn of(example: &str, program: Program) -> Stand {
        let stand = if example.starts_with("redis+cluster:") {
            let replicas = usize::from(example.contains("wait_replicas=1"));
            Stand::Cluster(RedisCluster::start_program(program, 3, replicas, &[]).unwrap())
        } else if example.starts_with("redis+sentinel:") {
            let sentinel_password = example.split_once("sentinel_password=").map(|(_, password)| password.to_owned());
            let options = SentinelOptions { sentinel_password, program, ..SentinelOptions::default() };
            Stand::Sentinels(Sentinels::start(&options).unwrap())
        } else {
            Stand::Server(RedisServer::start_program(program, &[]).unwrap())
        };
        match &stand {
            Stand::Server(server) => add(server),
            Stand::Cluster(cluster) => (0..cluster.size()).for_each(|n| add(cluster.server(n))),
            Stand::Sentinels(sentinels) => (0..2).for_each(|n| add(sentinels.server(n))),
        }
        stand
    }

    fn hosts(&self) -> String {
        let url = match self {
            Stand::Server(server) => server.url(),
            Stand::Cluster(cluster) => cluster.url(),
            Stand::Sentinels(sentinels) => sentinels.url(),
        };
        let after = url.split_once("://").unwrap().1;
        after.split(['/', '?']).next().unwrap().to_owned()
    }
}

/// Each with its own user, database and options; only the addresses and the name of the service are other ones, and there
/// is time enough for a busy machine.
#[tokio::test]
async fn with_every_connection_example_of_the_pages_a_task_is_claimed_and_completed() {
    let mut tried = 0;
    for page in ["README", "server", "sentinel", "cluster", "valkey"] {
        let path = format!("{}/../../docs/redis/{page}.md", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let program = if page == "valkey" { Program::Valkey } else { Program::Redis };
        for example in text.split(['\'', '"']).filter(|part| part.starts_with("redis") && part.contains('@')) {
            let stand = Stand::of(example, program);
            let (login, place) = example.split_once('@').unwrap();
            let rest = &place[place.find(['/', '?']).unwrap_or(place.len())..];
            let rest = rest.replace("/mymaster", "/tasks").replace("timeout=500ms", "");
            let joint = if rest.contains('?') { "&" } else { "?" };
            let url = format!("{login}@{}{rest}{joint}timeout=20s", stand.hosts()).replace("?&", "?");
            let (redis, claim, last) = (open(&url), running(), done());
            store(&redis, &key("a"), None, &claim).await;
            store(&redis, &key("a"), Some(&claim), &last).await;
            assert_eq!(*load(&redis, &key("a")).await.record, last, "{example}");
            tried += 1;
        }
    }
    assert!(tried >= 8, "{tried} examples are too few");
}
