//! Processes that live on: their line protocol, their deaths, their replacement.

use taskonce::State;
use taskonce_testkit::eventually;

use crate::floor::{Floor, kept};
use crate::harness::{PATIENCE, lives};

/// The beginning of a pool's command in sh: what it is told, and a way to answer.
const HEAD: &str = "\
answer() { echo \"{\\\"id\\\":$id,$1}\"; }
echo $$ >>pids
while read -r line; do
id=${line#*:}; id=${id%%,*}
key=${line#*\\\"key\\\":\\\"}; key=${key%%\\\"*}
";

fn floor(settings: &str, body: &str) -> Floor {
    let floor = Floor::new(&format!("command = ['sh', 'pool.sh']\nmode = 'pool'\nconcurrency_max = 1\n{settings}"));
    floor.desk.script("pool.sh", &format!("{HEAD}{body}\ndone\n"));
    floor
}

#[test]
fn a_process_of_a_pool_is_told_one_task_after_the_other_and_its_answers_count() {
    let floor = floor("", "echo \"$line\" >>lines\nanswer '\"outcome\":\"done\",\"output\":{\"n\":1}'");
    for id in ["a", "b", "c"] {
        floor.send(id, "{\"amount\":\n 12}");
    }
    floor.send("bytes", vec![0xff, 0x00]);
    let worker = floor.work(&[]);
    for id in ["a", "b", "c", "bytes"] {
        let done = floor.await_record(id, |record| record.state == State::Done);
        assert_eq!(kept(&done), ("application/json".to_owned(), "{\"n\":1}".to_owned()));
    }
    assert_eq!(floor.desk.pids().len(), 1, "one process does them all");
    let lines: Vec<serde_json::Value> =
        floor.desk.read("lines").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = lines.iter().find(|line| line["key"] == "default/charge@1/a").unwrap();
    assert_eq!(first["payload"], serde_json::json!({ "amount": 12 }));
    assert_eq!(
        (&first["handler"], &first["source"], &first["attempt"]),
        (&"charge@1".into(), &"orders".into(), &1.into())
    );
    assert!(first["headers"]["traceparent"].is_string() && first["downstream_key"].is_string(), "{first}");
    let bytes = lines.iter().find(|line| line["key"] == "default/charge@1/bytes").unwrap();
    assert_eq!((&bytes["payload_base64"], &bytes["payload"]), (&"/wA=".into(), &serde_json::Value::Null));
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    assert!(!floor.desk.pids().into_iter().any(lives));
}

#[test]
fn a_process_that_dies_fails_its_task_and_another_is_started() {
    let floor = floor(
        "",
        "case \"$line\" in *'\"attempt\":1,'*) echo 'out of memory' >&2; exit 3 ;; esac\nanswer '\"outcome\":\"done\"'",
    );
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!((done.attempt, done.crashes), (2, 0));
    let told = format!("{:?}", done.history);
    assert!(told.contains("its process ended with exit code 3: out of memory"), "{told}");
    assert_eq!(floor.desk.pids().len(), 2);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_process_that_breaks_the_protocol_is_killed_and_the_reason_is_shown() {
    let floor = floor(
        "attempts_max = 1",
        "case $key in\n\
         */print) echo 'debug: charging'; sleep 600 ;;\n\
         */other) echo '{\"id\":99,\"outcome\":\"done\"}' ;;\n\
         */closed) exec >&-; sleep 600 ;;\n\
         */flood) head -c 20000000 /dev/zero; sleep 600 ;;\n\
         */twice) answer '\"outcome\":\"done\"'; answer '\"outcome\":\"done\"' ;;\n\
         *) answer '\"outcome\":\"done\"' ;;\nesac",
    );
    let cases = [
        ("print", "a line that is no answer"),
        ("other", "an answer with id 99 to the task with id 1"),
        ("closed", "it closed its stdout"),
        ("flood", "its answer is longer than 16 MiB"),
    ];
    for (id, _) in cases {
        floor.send(id, "{}");
    }
    let worker = floor.work(&[]);
    for (id, why) in cases {
        let dead = floor.await_record(id, |record| record.state == State::Dead);
        let message = &dead.failure.as_ref().unwrap().message;
        assert!(message.starts_with("its process broke the protocol: ") && message.contains(why), "{id}: {message}");
    }
    // What is said unasked is no answer to the next task.
    floor.send("twice", "{}");
    floor.await_record("twice", |record| record.state == State::Done);
    floor.send("next", "{}");
    floor.await_record("next", |record| record.state == State::Done);
    floor.await_log("it spoke without being asked");
    let pids = floor.desk.pids();
    assert_eq!(pids.len(), 6, "{}", floor.log());
    assert!(eventually(PATIENCE, || !pids[..5].iter().any(|pid| lives(*pid))));
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_process_that_has_done_its_tasks_is_replaced() {
    let floor = floor("tasks_max = 2", "answer '\"outcome\":\"done\"'");
    for id in ["a", "b", "c", "d"] {
        floor.send(id, "{}");
    }
    let worker = floor.work(&[]);
    for id in ["a", "b", "c", "d"] {
        floor.await_record(id, |record| record.state == State::Done);
    }
    assert_eq!(floor.desk.pids().len(), 2);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_task_of_a_pool_that_runs_too_long_costs_its_process() {
    let floor = floor(
        "run_max = '500ms'\nattempts_max = 1",
        "case $key in */slow) sleep 600 ;; esac\nanswer '\"outcome\":\"done\"'",
    );
    floor.send("slow", "{}");
    let worker = floor.work(&[]);
    floor.await_record("slow", |record| record.state == State::Dead);
    floor.send("b", "{}");
    floor.await_record("b", |record| record.state == State::Done);
    let pids = floor.desk.pids();
    assert_eq!(pids.len(), 2);
    assert!(eventually(PATIENCE, || !lives(pids[0])));
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}
