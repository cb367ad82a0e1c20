//! Lists of tasks in rare states: what they cost, what they may lose, and how that is mended.

use std::collections::BTreeSet;
use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::key::Key;
use taskonce_core::record::{ClaimId, Record, State, Token};
use taskonce_core::store::{Expected, Filter, Next, Store, Swap, Walk};
use taskonce_redis::RedisStore;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{Proxy, RedisServer, eventually};

use crate::support::{RETENTION, done, key, load, open, record, running, store};

const RARE: [State; 4] = [State::Running, State::Waiting, State::Dead, State::Parked];
/// Longer than a client takes to send what belongs together.
const HOLD: Duration = Duration::from_millis(100);
/// Older than an entry must be to be removed.
const OLD: Duration = Duration::from_secs(600);

fn list(state: State) -> String {
    format!("taskonce:~list:{state}")
}

/// The running record of the same claim, as a heartbeat writes it.
fn beat(before: &Record) -> Record {
    let state_age = before.state_age + Duration::from_secs(10);
    Record { token: Token::from(fastrand::u128(..)), state_age, ..before.clone() }
}

/// How the claim of a record ends.
fn end(before: &Record, state: State) -> Record {
    Record { token: Token::from(fastrand::u128(..)), state, state_age: Duration::ZERO, ..before.clone() }
}

/// The ids that a walk finds in these states.
async fn ids(redis: &RedisStore, states: &[State], walk: Walk) -> BTreeSet<String> {
    let filter = Filter { states: states.to_vec(), walk, ..Filter::default() };
    let (mut ids, mut cursor) = (BTreeSet::new(), None);
    for _ in 0..1000 {
        let page = redis.scan(&filter, cursor).await.unwrap();
        ids.extend(page.rows.into_iter().map(|row| row.key.id().to_owned()));
        cursor = page.next;
        if cursor.is_none() {
            return ids;
        }
    }
    panic!("the walk has no end");
}

async fn listed(redis: &RedisStore, state: State) -> Vec<String> {
    ids(redis, &[state], Walk::Listed).await.into_iter().collect()
}

fn entries(server: &RedisServer, state: State) -> i64 {
    server.command(&["ZCARD", &list(state)]).unwrap().int().unwrap()
}

/// The entry of a record, and when it ends.
fn entry(server: &RedisServer, state: State, key: &Key) -> Option<(String, i64)> {
    let Reply::Array(items) = server.command(&["ZRANGE", &list(state), "0", "-1", "WITHSCORES"]).unwrap() else {
        panic!("no list")
    };
    items
        .chunks(2)
        .map(|pair| (pair[0].text(), pair[1].text().parse::<f64>().unwrap() as i64))
        .find(|(member, _)| member.ends_with(&format!(":{key}")))
}

#[tokio::test]
async fn a_task_that_ends_before_its_first_heartbeat_touches_no_list() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    for round in 0..20 {
        let (key, first) = (key(&format!("id-{round}")), running());
        store(&redis, &key, None, &first).await;
        store(&redis, &key, Some(&first), &end(&first, State::Done)).await;
    }
    for command in ["zadd", "zrem", "time", "zrangebyscore", "exists"] {
        assert_eq!(server.calls(command).unwrap(), 0, "{command}");
    }
    assert_eq!(server.command(&["DBSIZE"]).unwrap().int(), Some(20));
}

#[tokio::test]
async fn a_list_changes_in_the_round_trip_of_its_record() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&format!("{}?timeout=20s", proxy.url()));
    store(&redis, &key("warm"), None, &done()).await;
    proxy.set_delay(HOLD);
    let claimed = running();
    let renewed = beat(&claimed);
    let failed = end(&renewed, State::Waiting);
    let again = Record { claim: ClaimId::from(7), ..end(&failed, State::Running) };
    let parked = end(&again, State::Parked);
    let redriven = end(&parked, State::Waiting);
    let dead = end(&redriven, State::Dead);
    let (key, mut before) = (key("a"), None);
    for (next, added, removed) in [
        (&claimed, 0, 0),
        (&renewed, 1, 0),
        (&beat(&renewed), 1, 0),
        (&failed, 1, 1),
        (&again, 0, 1),
        (&parked, 1, 0),
        (&redriven, 1, 1),
        (&dead, 1, 1),
    ] {
        let count = || (proxy.round_trips(), server.calls("zadd").unwrap(), server.calls("zrem").unwrap());
        let (trips, adds, removals) = count();
        store(&redis, &key, before.as_ref(), next).await;
        let now = count();
        assert_eq!((now.0 - trips, now.1 - adds, now.2 - removals), (1, added, removed), "to {}", next.state);
        before = Some(next.clone());
    }
    proxy.set_delay(Duration::ZERO);
    let left = RARE.map(|state| entries(&server, state));
    assert_eq!(left, [0, 0, 1, 0]);
}

#[tokio::test]
async fn a_list_is_read_without_a_look_at_other_records() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let redis = open(&format!("{}?timeout=20s", proxy.url()));
    store(&redis, &key("done"), None, &done()).await;
    let script = "local value = redis.call('GET', KEYS[1]) \
        for number = 1, 50000 do redis.call('SET', KEYS[1] .. number, value, 'PX', 3600000) end";
    server.command(&["EVAL", script, "1", &format!("taskonce:{}", key("done"))]).unwrap();
    for state in RARE {
        for number in 0..3 {
            store(&redis, &key(&format!("{state}-{number}")), None, &beat(&record(state))).await;
        }
    }
    for state in RARE {
        let (trips, scans) = (proxy.round_trips(), server.calls("scan").unwrap());
        assert_eq!(listed(&redis, state).await, [0, 1, 2].map(|number| format!("{state}-{number}")));
        let trips = proxy.round_trips() - trips;
        assert!(trips <= 4, "{trips} round trips for a list of three");
        assert_eq!(server.calls("scan").unwrap(), scans);
    }
}

#[tokio::test]
async fn a_walk_over_all_mends_the_lists() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    for state in RARE {
        store(&redis, &key(state.name()), None, &beat(&record(state))).await;
    }
    store(&redis, &key("fresh"), None, &running()).await;
    store(&redis, &key("done"), None, &done()).await;
    // As an older version of this store left them, which had no lists.
    for state in RARE {
        server.command(&["DEL", &list(state)]).unwrap();
    }
    assert_eq!(ids(&redis, &RARE, Walk::Listed).await, BTreeSet::new());
    // Whatever that walk looks for.
    assert_eq!(ids(&redis, &[State::Done], Walk::All).await.len(), 1);
    for state in RARE {
        assert_eq!(listed(&redis, state).await, [state.name()]);
        let (_, ends) = entry(&server, state, &key(state.name())).unwrap();
        let name = format!("taskonce:{}", key(state.name()));
        let expires = server.command(&["PTTL", &name]).unwrap().int().unwrap() + now(&server);
        assert!((ends - expires).abs() <= 1000, "{state}: the entry ends at {ends}, its record at {expires}");
    }
}

/// What a process that was killed before its first heartbeat left.
#[tokio::test]
async fn a_walk_over_all_lists_a_claim_that_has_missed_its_first_heartbeat() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let silent = Record { lease: Duration::from_millis(30), ..running() };
    store(&redis, &key("silent"), None, &silent).await;
    store(&redis, &key("fresh"), None, &Record { lease: RETENTION, ..running() }).await;
    assert_eq!(listed(&redis, State::Running).await, [] as [&str; 0]);
    let name = format!("taskonce:{}", key("silent"));
    let age = || RETENTION.as_millis() as i64 - server.command(&["PTTL", &name]).unwrap().int().unwrap();
    assert!(eventually(Duration::from_secs(20), || age() >= 10));
    assert_eq!(ids(&redis, &[State::Done], Walk::All).await.len(), 0);
    assert_eq!(listed(&redis, State::Running).await, ["silent"]);
    // And stays listed.
    make_older(&server, State::Running, &key("silent"), OLD);
    assert_eq!(listed(&redis, State::Running).await, ["silent"]);
    assert_eq!(listed(&redis, State::Running).await, ["silent"]);
}

/// The server's time, in milliseconds.
fn now(server: &RedisServer) -> i64 {
    let Reply::Array(parts) = server.command(&["TIME"]).unwrap() else { panic!("no time") };
    parts[0].text().parse::<i64>().unwrap() * 1000 + parts[1].text().parse::<i64>().unwrap() / 1000
}

/// Makes an entry older, as if it had been added so much earlier.
fn make_older(server: &RedisServer, state: State, key: &Key, by: Duration) -> String {
    let (member, ends) = entry(server, state, key).unwrap();
    let ends = (ends - by.as_millis() as i64).to_string();
    server.command(&["ZADD", &list(state), "XX", &ends, &member]).unwrap();
    member
}

#[tokio::test]
async fn what_a_record_denies_is_left_out_and_removed_once_it_is_old() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    for id in ["gone", "done", "dead"] {
        store(&redis, &key(id), None, &record(State::Dead)).await;
    }
    // Writes whose changes of the list were lost.
    let name = |id: &str| format!("taskonce:{}", key(id));
    server.command(&["DEL", &name("gone")]).unwrap();
    let (finished, at) = (taskonce_core::codec::encode(&done()), name("done"));
    server.command(&[b"SET".as_slice(), at.as_bytes(), &finished, b"PX", b"3600000"]).unwrap();
    // Young entries stay: their records may be on their way.
    assert_eq!(listed(&redis, State::Dead).await, ["dead"]);
    assert_eq!(entries(&server, State::Dead), 3);
    for id in ["gone", "done", "dead"] {
        make_older(&server, State::Dead, &key(id), OLD);
    }
    assert_eq!(listed(&redis, State::Dead).await, ["dead"]);
    assert_eq!(entries(&server, State::Dead), 1);
    assert_eq!(listed(&redis, State::Dead).await, ["dead"]);
}

/// Between the look at a list and the removal of what was denied there, the task died again, of the same claim.
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_was_added_again_is_not_removed_with_the_old_one() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    let (near, far) = (open(&server.url()), open(&format!("{}?timeout=20s", proxy.url())));
    let (dead, waiting) = (record(State::Dead), record(State::Waiting));
    assert_eq!(listed(&far, State::Dead).await, [] as [&str; 0]);
    store(&near, &key("a"), None, &dead).await;
    make_older(&server, State::Dead, &key("a"), OLD);
    let swap = near.swap(&key("a"), Expected::Token(dead.token), Next::Keep(&waiting)).await.unwrap();
    assert!(matches!(swap, Swap::Stored(_)));
    let (looks, removals) = (server.calls("zscan").unwrap(), server.calls("zscore").unwrap());
    proxy.set_delay(Duration::from_millis(500));
    let looking = tokio::spawn(async move { listed(&far, State::Dead).await });
    assert!(eventually(Duration::from_secs(20), || server.calls("zscan").unwrap() > looks));
    // The reader knows the old end of the entry, and reads the record next.
    assert!(
        eventually(Duration::from_secs(20), || server.calls("pttl").unwrap() > 0 && server.calls("get").unwrap() > 0)
    );
    let again = Record { claim: dead.claim, ..record(State::Dead) };
    store(&near, &key("a"), Some(&waiting), &again).await;
    looking.await.unwrap();
    assert!(server.calls("zscore").unwrap() > removals, "nothing was removed");
    assert_eq!(entries(&server, State::Dead), 1);
    proxy.set_delay(Duration::ZERO);
    assert_eq!(listed(&near, State::Dead).await, ["a"]);
}

/// A task failed, was claimed and failed again; of the four changes of the list only the first was made.
#[tokio::test]
async fn an_old_entry_that_still_leads_to_its_task_is_replaced() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let (key, first, second) = (key("a"), record(State::Waiting), record(State::Waiting));
    store(&redis, &key, None, &first).await;
    let old = make_older(&server, State::Waiting, &key, OLD);
    let swap = redis.swap(&key, Expected::Token(first.token), Next::Keep(&second)).await.unwrap();
    assert!(matches!(swap, Swap::Stored(_)));
    let new = entries(&server, State::Waiting);
    assert_eq!(new, 2);
    let members = server.command(&["ZRANGE", &list(State::Waiting), "0", "-1"]).unwrap();
    let Reply::Array(members) = members else { panic!("no list") };
    let new = members.iter().map(Reply::text).find(|member| *member != old).unwrap();
    server.command(&["ZREM", &list(State::Waiting), &new]).unwrap();

    assert_eq!(listed(&redis, State::Waiting).await, ["a"]);
    let (member, ends) = entry(&server, State::Waiting, &key).unwrap();
    assert_eq!((member, entries(&server, State::Waiting)), (new, 1));
    assert!((ends - now(&server) - RETENTION.as_millis() as i64).abs() < 60_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_swap_takes_back_what_it_announced() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let (first, other) = (running(), running());
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &other).await;
    // The first holder was succeeded, and fails too late.
    let late = end(&first, State::Waiting);
    let swap = redis.swap(&key("a"), Expected::Record(&first), Next::Keep(&late)).await.unwrap();
    assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
    assert!(eventually(Duration::from_secs(20), || server.calls("zrem").unwrap() > 0));
    assert!(eventually(Duration::from_secs(20), || entries(&server, State::Waiting) == 0));
}

/// Its answer came too late for the heartbeat before: what it would leave is there still, by the same entry.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_swap_puts_back_what_is_still_so() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let first = beat(&running());
    let second = beat(&first);
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &second).await;
    let (_, ends) = entry(&server, State::Running, &key("a")).unwrap();
    let removed = server.calls("zrem").unwrap();
    let late = end(&first, State::Done);
    let swap = redis.swap(&key("a"), Expected::Record(&first), Next::Keep(&late)).await.unwrap();
    assert!(matches!(swap, Swap::Conflict(Some(_))), "{swap:?}");
    assert!(eventually(Duration::from_secs(20), || server.calls("zrem").unwrap() > removed));
    assert!(eventually(Duration::from_secs(20), || entries(&server, State::Running) == 1));
    let (_, again) = entry(&server, State::Running, &key("a")).unwrap();
    assert!((again - ends).abs() <= 1000, "the entry ends at {again}, and ended at {ends}");
    assert_eq!(listed(&redis, State::Running).await, ["a"]);
}

#[tokio::test]
async fn an_entry_ends_with_its_record_and_a_list_with_its_last_entry() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    let brief = |state| Record { retention: Duration::from_millis(400), ..record(state) };
    for number in 0..150 {
        store(&redis, &key(&format!("dead-{number}")), None, &brief(State::Dead)).await;
        store(&redis, &key(&format!("waiting-{number}")), None, &brief(State::Waiting)).await;
    }
    let long = record(State::Waiting);
    store(&redis, &key("long"), None, &long).await;
    assert_eq!(entries(&server, State::Waiting), 151);
    // By itself, with its last entry.
    assert!(eventually(Duration::from_secs(20), || entries(&server, State::Dead) == 0));
    // What has ended is no longer listed, and makes room for what comes.
    assert!(eventually(Duration::from_secs(20), || server.command(&["DBSIZE"]).unwrap().int() == Some(2)));
    assert_eq!(listed(&redis, State::Waiting).await, ["long"]);
    store(&redis, &key("more"), None, &brief(State::Waiting)).await;
    store(&redis, &key("more still"), None, &brief(State::Waiting)).await;
    assert!(entries(&server, State::Waiting) <= 3, "{} entries", entries(&server, State::Waiting));
    // And with its last entry gone the list lives no longer than the others.
    let left = || server.command(&["PTTL", &list(State::Waiting)]).unwrap().int().unwrap();
    assert!(left() > RETENTION.as_millis() as i64 / 2, "{} ms", left());
    store(&redis, &key("long"), Some(&long), &end(&long, State::Done)).await;
    assert!(left() < 5000, "{} ms", left());
}

#[tokio::test]
async fn a_key_of_another_kind_in_place_of_a_list_fails_no_write() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    server.command(&["SET", &list(State::Dead), "x"]).unwrap();
    let first = running();
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("a"), Some(&first), &end(&first, State::Dead)).await;
    let filter = Filter { states: vec![State::Dead], walk: Walk::Listed, ..Filter::default() };
    let error = redis.scan(&filter, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
    assert!(error.to_string().contains("list `taskonce:~list:dead`"), "{error}");
    assert!(error.hint().contains("redis-cli del"), "{error:?}");
    assert_eq!(ids(&redis, &[State::Dead], Walk::All).await.len(), 1);
    let said = |redis: &RedisStore| {
        let redis = redis.clone();
        async move { redis.examine().await.into_iter().find(|finding| finding.subject == "lists").unwrap() }
    };
    let finding = said(&redis).await;
    assert!(finding.text.contains("taskonce:~list:dead"), "{finding:?}");

    server.command(&["DEL", &list(State::Dead)]).unwrap();
    assert_eq!(ids(&redis, &[State::Dead], Walk::All).await.len(), 1);
    assert_eq!(listed(&redis, State::Dead).await, ["a"]);
    assert!(said(&redis).await.hint.is_empty());
}

#[tokio::test]
async fn a_user_who_may_not_use_lists_can_write_and_is_told_what_is_missing() {
    let server = RedisServer::start(&[]).unwrap();
    let rights = "+get +set +del +getrange +pexpire +pttl +evalsha +eval +scan +echo";
    let mut words = vec!["ACL", "SETUSER", "ada", "on", ">pw", "~taskonce:*"];
    words.extend(rights.split(' '));
    server.command(&words).unwrap();
    let redis = open(&format!("redis://ada:pw@127.0.0.1:{}", server.port()));
    let first = running();
    store(&redis, &key("a"), None, &first).await;
    let renewed = beat(&first);
    store(&redis, &key("a"), Some(&first), &renewed).await;
    store(&redis, &key("a"), Some(&renewed), &end(&renewed, State::Dead)).await;
    assert_eq!(load(&redis, &key("a")).await.record.state, State::Dead);
    let filter = Filter { states: vec![State::Dead], walk: Walk::Listed, ..Filter::default() };
    let error = redis.scan(&filter, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    // The command that is missing, and where all that are needed stand.
    assert!(error.to_string().contains("zscan") && error.hint().contains("docs/redis/README.md"), "{error:?}");
    let finding = redis.examine().await.into_iter().find(|finding| finding.subject == "lists").unwrap();
    assert!(finding.hint.contains("docs/redis/README.md"), "{finding:?}");
    assert_eq!(ids(&redis, &[State::Dead], Walk::All).await.len(), 1);
}

#[tokio::test]
async fn what_fails_while_memory_is_full_is_listed() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]).unwrap();
    let redis = open(&server.url());
    let (first, second) = (running(), running());
    store(&redis, &key("a"), None, &first).await;
    store(&redis, &key("b"), None, &second).await;
    server.command(&["CONFIG", "SET", "maxmemory", "100kb"]).unwrap();
    store(&redis, &key("a"), Some(&first), &end(&first, State::Waiting)).await;
    store(&redis, &key("b"), Some(&second), &beat(&second)).await;
    assert_eq!(listed(&redis, State::Waiting).await, ["a"]);
    assert_eq!(listed(&redis, State::Running).await, ["b"]);
}

#[tokio::test]
async fn cursors_of_lists_and_of_keys_are_not_exchanged() {
    let server = RedisServer::start(&[]).unwrap();
    let redis = open(&server.url());
    for number in 0..200 {
        store(&redis, &key(&format!("id-{number}")), None, &record(State::Dead)).await;
    }
    let filter = |states: &[State], walk| Filter { states: states.to_vec(), walk, page_max: 5, ..Filter::default() };
    let of_list = redis.scan(&filter(&[State::Dead], Walk::Listed), None).await.unwrap().next;
    let of_keys = redis.scan(&filter(&[State::Dead], Walk::All), None).await.unwrap().next;
    assert!(of_list.is_some() && of_keys.is_some());
    for (states, walk, cursor) in [
        (&[State::Dead], Walk::All, &of_list),
        (&[State::Dead], Walk::Listed, &of_keys),
        (&[State::Waiting], Walk::Listed, &of_list),
    ] {
        let error = redis.scan(&filter(states, walk), cursor.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadCursor, "{error:?}");
    }
}
