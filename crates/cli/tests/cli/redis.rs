//! The same over Redis, and what only a server can do: go away in the middle.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use taskonce_testkit::resp::Reply;
use taskonce_testkit::{Proxy, RedisServer, eventually};

use crate::harness::{Desk, PATIENCE, lives};

#[test]
fn a_command_runs_once_and_is_replayed_over_redis() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction", "--requirepass", "hunter2"]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo run >> runs; printf 'a\\000b'");
    let args = ["run", "--key", "a", "--", "sh", "task.sh"];
    for _ in 0..2 {
        assert_eq!(desk.say(&args).stdout, b"a\0b");
    }
    assert_eq!(desk.lines("runs"), 1);
    assert!(desk.say(&["list"]).text().contains("default/run@1/a"));
    let doctor = desk.say(&["doctor"]);
    let all = doctor.text() + &doctor.stderr;
    assert!(!all.contains("hunter2") && all.contains("store redis://127.0.0.1:"), "{all}");
    assert_eq!(desk.say(&["clear", "a", "--reason", "test"]).code, 0);
    assert!(desk.say(&["show", "a"]).text().contains("a person removed it"));
}

/// The states that people ask for are found without a look at each record, and `--all` mends what that missed.
#[test]
fn rare_states_are_listed_over_redis_and_all_mends_the_lists() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("hang.sh", "echo $$ > pids; exec sleep 600");
    assert_eq!(desk.say(&["run", "--key", "done", "--", "true"]).code, 0);
    assert_eq!(desk.say(&["run", "--key", "waiting", "--", "false"]).code, 1);
    assert_eq!(desk.say(&["run", "--key", "dead", "--attempts", "1", "--", "false"]).code, 1);
    let once = ["run", "--key", "parked", "--effect", "unrepeatable", "--store-may-forget", "--", "false"];
    assert_eq!(desk.say(&once).code, 1);
    let running = desk.start(&["run", "--key", "running", "--lease", "1s", "--", "sh", "hang.sh"]);
    desk.await_lines("pids", 1);
    let listed = |args: &[&str]| -> Vec<String> {
        let said = desk.say(&[&["list", "--json"], args].concat());
        let tasks = said.json()["tasks"].as_array().unwrap().clone();
        let mut keys: Vec<String> = tasks.iter().map(|task| task["key"].as_str().unwrap().to_owned()).collect();
        keys.sort();
        keys
    };
    let key = |id: &str| vec![format!("default/run@1/{id}")];
    // From its first heartbeat on.
    assert!(eventually(Duration::from_secs(30), || listed(&["--state", "running"]) == key("running")));
    let scans = server.calls("scan").unwrap();
    for state in ["running", "waiting", "dead", "parked"] {
        assert_eq!(listed(&["--state", state]), key(state));
    }
    assert_eq!(listed(&["--state", "running,waiting,dead,parked"]).len(), 4);
    assert_eq!(server.calls("scan").unwrap(), scans, "a list is asked, not every key");
    assert_eq!(listed(&["--state", "done"]), key("done"));
    assert!(server.calls("scan").unwrap() > scans);

    // As a version without lists left it.
    server.command(&["DEL", "taskonce:~list:dead"]).unwrap();
    let none = desk.say(&["list", "--state", "dead"]);
    assert!(none.code == 0 && none.stderr.contains("`--all` looks at every record"), "{none:?}");
    assert_eq!(listed(&["--state", "dead", "--all"]), key("dead"));
    assert_eq!(listed(&["--state", "dead"]), key("dead"));
    running.signal(Signal::TERM);
    running.end();
    assert!(eventually(Duration::from_secs(30), || listed(&["--state", "running"]).is_empty()));
}

#[test]
fn an_unrepeatable_effect_on_a_store_that_may_forget_is_refused_unless_accepted() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    let refused = desk.say(&["run", "--key", "a", "--effect", "unrepeatable", "--", "true"]);
    assert_eq!(refused.code, 78, "{refused:?}");
    assert!(refused.stderr.contains("--store-may-forget"), "{}", refused.stderr);
    let accepted = ["run", "--key", "a", "--effect", "unrepeatable", "--store-may-forget", "--", "true"];
    assert_eq!(desk.say(&accepted).code, 0);
}

#[test]
fn a_killed_run_is_taken_over_after_its_lease_over_redis() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "[ -e go ] && { echo result; exit 0; }; echo $$ > pids; exec sleep 600");
    let args = ["run", "--key", "a", "--lease", "1s", "--wait", "30s", "--", "sh", "task.sh"];
    let call = desk.start(&args);
    desk.await_lines("pids", 1);
    call.signal(Signal::KILL);
    assert!(eventually(Duration::from_secs(1), || !desk.pids().iter().any(|pid| lives(*pid))));
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(desk.say(&args).text(), "result\n");
}

/// How many connections to the server are called when a task changes: one of each process that waits.
fn watchers(server: &RedisServer) -> usize {
    server.command(&["CLIENT", "LIST"]).unwrap().text().matches("name=taskonce-watch").count()
}

#[test]
fn calls_that_wait_are_called_when_the_run_ends_and_ask_nothing_meanwhile() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo run >> runs; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let args = ["run", "--key", "a", "--wait", "60s", "--", "sh", "task.sh"];
    let leader = desk.start(&args);
    desk.await_lines("runs", 1);
    let waiting: Vec<_> = (0..3).map(|_| desk.start(&args)).collect();
    assert!(eventually(PATIENCE, || watchers(&server) == 3 && server.calls("getrange").unwrap() >= 3));
    let asked = || ["set", "evalsha", "getrange", "get"].map(|command| server.calls(command).unwrap());
    let before: u64 = asked().iter().sum();
    // sleeps: nothing must be asked while nothing happens
    std::thread::sleep(Duration::from_secs(1));
    let meanwhile = asked().iter().sum::<u64>() - before;
    assert!(meanwhile <= 6, "{meanwhile} commands in a second of three processes that wait");
    fs::write(desk.path("go"), "").unwrap();
    assert_eq!(leader.end().text(), "result\n");
    for call in waiting {
        let said = call.end();
        assert_eq!((said.code, said.text().as_str()), (0, "result\n"), "{said:?}");
    }
    assert_eq!(desk.lines("runs"), 1);
}

#[test]
fn of_the_calls_that_wait_one_inherits_when_the_leader_is_killed() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo $$ >> pids; [ -e go ] && { echo result; exit 0; }; exec sleep 600");
    let args = ["run", "--key", "a", "--lease", "2s", "--wait", "60s", "--", "sh", "task.sh"];
    let leader = desk.start(&args);
    desk.await_lines("pids", 1);
    let waiting: Vec<_> = (0..3).map(|_| desk.start(&args)).collect();
    assert!(eventually(PATIENCE, || watchers(&server) == 3));
    fs::write(desk.path("go"), "").unwrap();
    leader.signal(Signal::KILL);
    for call in waiting {
        let said = call.end();
        assert_eq!((said.code, said.text().as_str()), (0, "result\n"), "{said:?}");
    }
    assert_eq!(desk.lines("pids"), 2, "the leader's run, and one more");
}

#[test]
fn a_success_that_cannot_be_recorded_is_69_and_says_so_plainly() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let call = desk.start(&["run", "--key", "a", "--lease", "2s", "--", "sh", "task.sh"]);
    desk.await_lines("pids", 1);
    server.stop().unwrap();
    fs::write(desk.path("go"), "").unwrap();
    let said = call.end();
    assert_eq!((said.code, said.text().as_str()), (69, "result\n"), "{said:?}");
    assert!(said.stderr.contains("the command was done, and that could not be recorded"), "{}", said.stderr);
    assert!(said.stderr.lines().last().unwrap().starts_with("hint: repair the store; "), "{}", said.stderr);
}

#[test]
fn a_success_that_can_be_recorded_late_is_recorded() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let args = ["run", "--key", "a", "--lease", "3s", "--", "sh", "task.sh"];
    let call = desk.start(&args);
    desk.await_lines("pids", 1);
    let [shell] = desk.pids()[..] else { panic!("one process") };
    server.stop().unwrap();
    fs::write(desk.path("go"), "").unwrap();
    assert!(eventually(Duration::from_secs(10), || !lives(shell)));
    server.cont().unwrap();
    let said = call.end();
    assert_eq!((said.code, said.text().as_str()), (0, "result\n"), "{said:?}");
    assert!(desk.say(&args).stderr.contains("replayed: done "));
}

#[test]
fn a_store_away_for_longer_than_the_lease_ends_the_command() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    let call = desk.start(&["run", "--key", "a", "--lease", "1s", "--", "sh", "-c", "echo $$ > pids; exec sleep 600"]);
    desk.await_lines("pids", 1);
    server.stop().unwrap();
    assert!(eventually(Duration::from_secs(3), || !desk.pids().iter().any(|pid| lives(*pid))));
    let said = call.end();
    assert_eq!(said.code, 75, "{said:?}");
    assert!(said.stderr.contains("was lost while its command ran; the command was killed"), "{}", said.stderr);
}

#[test]
fn a_record_that_cannot_be_read_is_an_error_of_its_own_and_nothing_runs() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    let command = ["run", "--key", "a", "--", "sh", "-c", "echo run >> runs"];
    assert_eq!(desk.say(&command).code, 0);
    let keys = server.command(&["KEYS", "*"]).unwrap();
    let Reply::Array(keys) = keys else { panic!("{keys:?}") };
    let [key] = &keys[..] else { panic!("{keys:?}") };
    server.command(&["SET", &key.text(), "garbage"]).unwrap();

    for args in [&command[..], &["show", "a"], &["redrive", "a"]] {
        let said = desk.say(args);
        assert_eq!(said.code, 69, "{args:?}: {said:?}");
        assert!(said.stderr.contains("default/run@1/a"), "it names the key: {}", said.stderr);
        assert!(said.stderr.lines().last().unwrap().starts_with("hint: "), "{}", said.stderr);
    }
    assert_eq!(desk.lines("runs"), 1);
    let list = desk.say(&["list"]);
    assert!(list.code == 0 && list.text().contains("corrupt  default/run@1/a"), "{list:?}");
    assert_eq!(desk.say(&["list", "--json"]).json()["tasks"][0]["error"]["kind"], "corrupt");

    let cleared = desk.say(&["clear", "a", "--reason", "garbage"]);
    assert!(cleared.code == 0 && cleared.text().contains("it was damaged and could not be read"), "{cleared:?}");
    assert_eq!(desk.say(&command).code, 0);
    assert_eq!(desk.lines("runs"), 2);
}

#[test]
fn a_server_that_may_evict_records_is_refused_and_doctor_says_what_to_do() {
    let server = RedisServer::start(&["--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru"]).unwrap();
    let desk = Desk::over(&server.url());
    let said = desk.say(&["run", "--key", "a", "--", "true"]);
    assert_eq!(said.code, 78, "{said:?}");
    let doctor = desk.say(&["doctor"]);
    assert_eq!(doctor.code, 69, "{doctor:?}");
    assert!(doctor.text().contains("allkeys-lru") && doctor.text().contains("hint: "), "{}", doctor.text());
}

/// It was told that the claim was lost while its command ran, though no command was ever started.
#[test]
fn a_claim_that_is_lost_before_its_command_is_started_says_that_none_was_run() {
    let server = RedisServer::start(&[]).unwrap();
    let proxy = Proxy::start(server.address()).unwrap();
    proxy.set_delay(Duration::from_millis(700));
    let desk = Desk::over(&format!("{}?timeout=5s", proxy.url()));
    let said = desk.say(&["run", "--key", "a", "--lease", "500ms", "--", "sh", "-c", "echo run >> runs"]);
    assert_eq!((said.code, desk.lines("runs")), (75, 0), "{said:?}");
    assert!(said.stderr.contains("was lost before its command was started; no command was run"), "{}", said.stderr);
}

/// The hint was to `taskonce clear` it, which cannot.
#[test]
fn a_key_that_holds_something_else_is_not_to_be_cleared() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    assert_eq!(desk.say(&["run", "--key", "a", "--", "true"]).code, 0);
    let Reply::Array(keys) = server.command(&["KEYS", "*"]).unwrap() else { panic!("a list") };
    let key = keys[0].text();
    server.command(&["DEL", &key]).unwrap();
    server.command(&["LPUSH", &key, "x"]).unwrap();
    for args in
        [&["show", "a"][..], &["clear", "a", "--reason", "x"], &["run", "--key", "a", "--", "true"], &["doctor"]]
    {
        let said = desk.say(args);
        let all = said.text() + &said.stderr;
        assert!(!all.contains("taskonce clear"), "{args:?}: {said:?}");
        if args[0] != "doctor" {
            assert_eq!(said.code, 69, "{said:?}");
            assert!(
                said.stderr.lines().last().unwrap().contains("what is no record is never removed from here"),
                "{args:?}: {said:?}"
            );
        }
    }
    assert_eq!(server.command(&["TYPE", &key]).unwrap().text(), "list");
}
