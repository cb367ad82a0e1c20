//! What a command is given, and what becomes of its task by what it says.

use taskonce::{DropReason, FailureClass, Output, State};
use taskonce_testkit::eventually;

use crate::floor::{Floor, kept};
use crate::harness::PATIENCE;

#[test]
fn a_command_is_given_its_task_and_its_stdout_is_the_output() {
    let floor = Floor::new("command = ['sh', 'charge.sh', 'with an argument']\nenvironment = { REGION = 'eu' }");
    floor.desk.script("charge.sh", "env >seen; cat >payload; echo \"$1\" >argument; echo '{\"receipt\": 7}'\n");
    floor.send("a", r#"{"amount": 12}"#);
    let worker = floor.work(&[]);
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!(kept(&done), ("application/json".to_owned(), "{\"receipt\": 7}\n".to_owned()));
    assert_eq!(floor.desk.read("payload"), r#"{"amount": 12}"#);
    assert_eq!(floor.desk.read("argument"), "with an argument\n");
    let seen = floor.desk.read("seen");
    for line in [
        "TASKONCE_KEY=default/charge@1/a",
        "TASKONCE_HANDLER=charge@1",
        "TASKONCE_SOURCE=orders",
        "TASKONCE_ATTEMPT=1",
        "TASKONCE_CONTENT_TYPE=application/json",
        "TASKONCE_RESULT_FD=3",
        "REGION=eu",
    ] {
        assert!(seen.lines().any(|seen| seen == line), "{line} is not in\n{seen}");
    }
    for begin in
        ["TASKONCE_FENCE=", "TASKONCE_DOWNSTREAM_KEY=", "TRACEPARENT=00-", "TASKONCE_HEADERS={\"traceparent\":"]
    {
        assert!(seen.lines().any(|seen| seen.starts_with(begin)), "{begin} is not in\n{seen}");
    }
    floor.await_worked_off(PATIENCE);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    assert!(floor.log().contains("orders × charge@1: sh charge.sh"), "{}", floor.log());
}

/// Once each line of what it left behind began the wait for the stream's end anew, and the task ran into its `run_max`.
#[test]
fn what_a_command_leaves_behind_and_goes_on_writing_does_not_keep_its_task() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\nrun_max = '60s'\nattempts_max = 1");
    floor.desk.script(
        "charge.sh",
        "setsid sh -c 'n=0; while [ $n -lt 900 ]; do echo there >&2 || exit; n=$((n + 1)); sleep 0.1; done' &\n\
         # It has to have left the group, which is killed with its command.\n\
         sleep 0.5\n",
    );
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!(done.attempt, 1, "{}", floor.log());
    floor.await_worked_off(PATIENCE);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn exit_codes_and_descriptor_3_decide_what_becomes_of_a_task() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\nattempts_max = 2");
    floor.desk.script(
        "charge.sh",
        "case $TASKONCE_KEY in\n\
         */retryable) echo 'no route to host' >&2; exit 75 ;;\n\
         */permanent) exit 65 ;;\n\
         */told) echo '{\"outcome\":\"permanent\",\"message\":\"no such card\"}' >&3; exit 1 ;;\n\
         */later) [ $TASKONCE_ATTEMPT = 2 ] || { echo '{\"outcome\":\"retryable\",\"retry_after\":\"1s\"}' >&3; } ;;\n\
         */garbage) echo '{\"outcome\":' >&3 ;;\n\
         esac\n",
    );
    let cases = [
        ("retryable", FailureClass::Retryable, 2, "exit code 75: no route to host"),
        ("permanent", FailureClass::Permanent, 1, "exit code 65"),
        ("told", FailureClass::Permanent, 1, "no such card"),
        ("garbage", FailureClass::Retryable, 2, "the command's result cannot be used"),
    ];
    for (id, ..) in cases {
        floor.send(id, "{}");
    }
    floor.send("later", "{}");
    let worker = floor.work(&[]);
    for (id, class, attempts, message) in cases {
        let dead = floor.await_record(id, |record| record.state == State::Dead);
        let failure = dead.failure.as_ref().unwrap();
        assert_eq!((failure.class, dead.attempt), (class, attempts), "{id}: {dead:?}");
        assert!(failure.message.starts_with(message), "{id}: {failure:?}");
    }
    let later = floor.await_record("later", |record| record.state == State::Done);
    assert_eq!((later.attempt, later.output.clone()), (2, Output::Nothing));
    floor.await_worked_off(PATIENCE);
    assert_eq!(floor.dead().len(), cases.len());
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
    // Its stderr is in the log, with its task.
    assert!(floor.log().contains("stderr default/charge@1/retryable: no route to host"), "{}", floor.log());
}

#[test]
fn an_unrepeatable_effect_is_tried_again_only_where_the_command_says_that_nothing_happened() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\neffect = 'unrepeatable'");
    floor.desk.script(
        "charge.sh",
        "case $TASKONCE_KEY in\n\
         */doubt) exit 1 ;;\n\
         */nothing) [ $TASKONCE_ATTEMPT = 2 ] || { echo '{\"outcome\":\"nothing_happened\"}' >&3; exit 1; } ;;\n\
         esac\n",
    );
    floor.send("doubt", "{}");
    floor.send("nothing", "{}");
    let worker = floor.work(&[]);
    floor.await_record("doubt", |record| record.state == State::Parked);
    assert_eq!(floor.await_record("nothing", |record| record.state == State::Done).attempt, 2);
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_command_that_floods_its_streams_is_done_without_its_output() {
    let floor = Floor::new("command = ['sh', 'charge.sh']\noutput_max = '1KiB'");
    floor.desk.script(
        "charge.sh",
        "head -c 300000000 /dev/zero\ni=0\nwhile [ $i -lt 3000 ]; do echo \"noise $i\" >&2; i=$((i+1)); done\n",
    );
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!(done.output, Output::Dropped(DropReason::TooLarge { bytes: 300_000_000 }));
    // What is not kept is never held.
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.pid().as_raw_nonzero())).unwrap();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    assert!(peak.is_some_and(|peak| peak < 150_000), "{peak:?} kB");
    floor.await_log("2000 more lines of stderr are not shown");
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_payload_of_fifty_megabytes_goes_through() {
    let floor = Floor::new("command = ['wc', '-c']");
    floor.send("a", vec![b'x'; 50_000_000]);
    let worker = floor.work(&[]);
    let done = floor.await_record("a", |record| record.state == State::Done);
    assert_eq!(kept(&done).1.trim(), "50000000");
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn what_a_command_leaves_running_ends_with_its_task() {
    let floor = Floor::new("command = ['sh', 'charge.sh']");
    floor.desk.script("charge.sh", "sleep 600 & echo $! >>pids\n");
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    floor.await_record("a", |record| record.state == State::Done);
    let left = floor.desk.pids();
    assert_eq!(left.len(), 1);
    assert!(eventually(PATIENCE, || !crate::harness::lives(left[0])));
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_command_that_is_not_there_has_done_nothing() {
    let floor = Floor::new("command = ['./no-such-program']\neffect = 'unrepeatable'\nattempts_max = 2");
    floor.send("a", "{}");
    let worker = floor.work(&[]);
    let dead = floor.await_record("a", |record| record.state == State::Dead);
    assert!(dead.failure.as_ref().unwrap().message.contains("`./no-such-program` cannot be started"), "{dead:?}");
    assert_eq!(worker.stop().0, Some(0), "{}", floor.log());
}

#[test]
fn a_table_that_no_worker_can_serve_is_refused_with_every_fault() {
    let floor = Floor::of_table(
        "[sources.orders]\n[sources.mails]\nurl = 'sqlite:mail.db?size=1'\n\
         [handlers.charge]\neffect = 'keyed'\ncommand = ['true']\n[handlers.mail]\neffect = 'keyed'\ncommand = ['true']\n\
         [routes.orders.charge]\n[routes.mails.mail]\n",
    );
    let said = floor.desk.say(&["work", "--json"]);
    assert_eq!(said.code, 78, "{said:?}");
    let faults = said.json()["error"]["faults"].as_array().unwrap().clone();
    assert_eq!(faults.len(), 2, "{said:?}");
    assert!(said.stderr.contains("source orders: nothing says what opens it"), "{said:?}");
    assert!(said.stderr.contains("option `size` is unknown"), "{said:?}");
    std::fs::write(
        floor.desk.path("taskonce.toml"),
        "[sources.orders]\nurl = 'sqlite:queue.db'\n[handlers.charge]\neffect = 'transactional'\ncommand = ['true']\n\
         [routes.orders.charge]\n",
    )
    .unwrap();
    let said = floor.desk.say(&["work"]);
    assert_eq!(said.code, 78, "{said:?}");
    assert!(said.stderr.contains("in PostgreSQL only"), "{said:?}");
}
