//! Readers that are slow, gone or full, and what a call owes to its caller all the same.

use std::fs::{self, File};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use taskonce_testkit::{RedisServer, eventually};

use crate::harness::{Desk, PATIENCE, Said};

/// Writes more than one pipe holds, and less than two.
const MUCH: &str = "head -c 100000 /dev/zero; echo x >> runs";

fn state(desk: &Desk) -> String {
    let shown = desk.say(&["show", "--json", "a"]);
    if shown.stdout.is_empty() { String::new() } else { shown.json()["state"].as_str().unwrap_or_default().to_owned() }
}

/// Starts a call whose stdout nobody reads, and waits until its task is done.
fn unread(desk: &Desk, args: &[&str]) -> Child {
    let child = desk.command(args).spawn().unwrap();
    assert!(eventually(PATIENCE, || state(desk) == "done"), "it is recorded while nobody reads");
    child
}

/// A finished effect went unrecorded for as long as nobody read the command's output; a kill then parked it.
#[test]
fn the_end_is_recorded_while_nobody_reads_and_all_is_written_at_last() {
    let desk = Desk::new();
    let args = ["run", "--key", "a", "--effect", "unrepeatable", "--lease", "2s", "--", "sh", "-c", MUCH];
    let child = unread(&desk, &args);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 100_000));
}

#[test]
fn a_signal_ends_the_writing_of_what_is_recorded_and_the_next_call_replays_it() {
    for args in
        [&["run", "--key", "a", "--", "sh", "-c", MUCH][..], &["run", "--json", "--key", "a", "--", "sh", "-c", MUCH]]
    {
        let desk = Desk::new();
        // The first is the run, the second a replay: nobody reads either.
        for _ in 0..2 {
            let mut child = unread(&desk, args);
            // It writes as soon as it has something to write, and then it heeds signals in every state.
            let mut first = [0];
            child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            assert!(eventually(PATIENCE, || child.try_wait().unwrap().is_some()), "it ends");
            assert_eq!(child.wait().unwrap().code(), Some(143));
        }
        let whole = desk.say(&["run", "--key", "a", "--", "sh", "-c", MUCH]);
        assert_eq!((whole.code, whole.stdout.len(), desk.lines("runs")), (0, 100_000, 1));
    }
}

#[test]
fn a_slow_reader_slows_the_command_down_and_not_taskonces_memory_up() {
    let desk = Desk::new();
    let args =
        ["run", "--key", "a", "--output-max", "1KiB", "--", "sh", "-c", "head -c 100000000 /dev/zero; touch end"];
    let mut child = desk.command(&args).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut some = vec![0; 1 << 20];
    stdout.read_exact(&mut some).unwrap();
    assert!(!desk.path("end").exists(), "the command waits for its reader");
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len() + some.len(), 100_000_000);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_the_trying_on_at_once_with_a_plain_sentence() {
    let server = RedisServer::start(&[]).unwrap();
    let desk = Desk::over(&server.url());
    desk.script("task.sh", "echo $$ > pids; while [ ! -e go ]; do sleep 0.01; done; echo result");
    let log = File::create(desk.path("log")).unwrap();
    let mut call = desk
        .command(&["run", "--key", "a", "--lease", "1m", "--", "sh", "task.sh"])
        .stderr(Stdio::from(log))
        .spawn()
        .unwrap();
    desk.await_lines("pids", 1);
    server.stop().unwrap();
    fs::write(desk.path("go"), "").unwrap();
    let [shell] = desk.pids()[..] else { panic!("one process") };
    assert!(eventually(PATIENCE, || !crate::harness::lives(shell)));
    // sleeps: nothing shows that the end was seen, and a signal before that is passed on to the command
    std::thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&call), Signal::TERM).unwrap();
    assert!(
        eventually(Duration::from_secs(5), || call.try_wait().unwrap().is_some()),
        "it ends, a minute before the lease"
    );
    assert_eq!(call.wait().unwrap().code(), Some(69));
    let said = desk.read("log");
    assert!(
        said.contains("the command was done, and that could not be recorded: ") && said.contains("SIGTERM"),
        "{said}"
    );
    assert!(said.lines().last().unwrap().starts_with("hint: repair the store; "), "{said}");
}

fn into_full(desk: &Desk, args: &[&str]) -> Said {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = desk.command(args).stdout(full).output().unwrap();
    Said {
        code: output.status.code().unwrap(),
        stdout: output.stdout,
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn data_or_a_replay_that_cannot_be_written_is_74_and_the_result_of_a_run_stays_its_own() {
    let desk = Desk::new();
    assert_eq!(desk.say(&["run", "--key", "a", "--", "echo", "x"]).code, 0);
    for args in
        [&["list"][..], &["list", "--json"], &["show", "a"], &["doctor"], &["--help"], &["man"], &["key", "--key", "a"]]
    {
        let said = into_full(&desk, args);
        assert_eq!(said.code, 74, "{args:?}: {said:?}");
        assert!(said.stderr.contains("error: stdout cannot be written: "), "{args:?}: {said:?}");
        assert!(said.stderr.lines().last().unwrap().starts_with("hint: "), "{args:?}: {said:?}");
    }
    for (args, code) in [
        (&["run", "--key", "a", "--", "echo", "x"][..], 74),
        (&["run", "--json", "--key", "a", "--", "echo", "x"], 74),
        (&["run", "--key", "b", "--", "echo", "x"], 0),
        (&["run", "--key", "c", "--", "sh", "-c", "echo x; exit 3"], 3),
        (&["run", "--json", "--key", "d", "--", "sh", "-c", "echo x; exit 3"], 3),
    ] {
        let said = into_full(&desk, args);
        assert_eq!(said.code, code, "{args:?}: {said:?}");
        assert!(said.stderr.contains("error: stdout cannot be written: "), "{args:?}: {said:?}");
    }
    let gone = Command::new("sh")
        .args(["-c", "{ \"$0\" list; echo $? > code; } | true", crate::harness::PROGRAM])
        .current_dir(desk.folder())
        .env("TASKONCE_STORE", desk.store())
        .output()
        .unwrap();
    assert_eq!((desk.read("code").as_str(), gone.stderr.as_slice()), ("0\n", &b""[..]), "a reader that has gone away");
}

/// Programs got the output of a command that succeeded, and nothing of one that failed.
#[test]
fn json_has_the_output_of_a_failing_command_too() {
    let desk = Desk::new();
    let said = desk.say(&["run", "--json", "--key", "a", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    let json = said.json();
    assert_eq!((said.code, &json["outcome"], &json["state"]), (3, &"failed".into(), &"waiting".into()));
    assert_eq!((&json["stdout"], &json["stderr"]), (&"out\n".into(), &"err\n".into()));
}

#[test]
fn what_is_left_in_the_background_goes_on_and_is_no_longer_read() {
    let desk = Desk::new();
    let left = "( while [ ! -e go ]; do sleep 0.01; done; echo late; echo lived >> {} ) {} &";
    let (read, own) =
        (left.replacen("{}", "read", 1).replace("{}", ""), left.replacen("{}", "own", 1).replace("{}", "> log 2>&1"));
    let said = desk.say(&["run", "--key", "a", "--", "sh", "-c", &format!("{read} echo $! > pids; {own} echo $$")]);
    assert_eq!(said.code, 0, "{said:?}");
    fs::write(desk.path("go"), "").unwrap();
    desk.await_lines("own", 1);
    assert_eq!(desk.read("log"), "late\n", "it redirected its output");
    assert!(!said.text().contains("late"), "{said:?}");
    let [reader] = desk.pids()[..] else { panic!("one process") };
    assert!(eventually(PATIENCE, || !crate::harness::lives(reader)));
    assert_eq!(desk.read("read"), "", "SIGPIPE ended what wrote to the command's stdout");
}
