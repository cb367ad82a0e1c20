//! A worker in a process of its own: this very program, asked to run one of its tests.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use crate::place::PATIENCE;

/// Tells the one who started this process something, in whole lines.
pub(crate) fn tell(line: &str) {
    std::io::stderr().lock().write_all(format!("queue: {line}\n").as_bytes()).unwrap();
}

/// What the one who started this process says.
pub(crate) fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// A worker, as the queue sees it. Killed when it is dropped.
pub(crate) struct Worker {
    process: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStderr>,
}

impl Worker {
    /// Runs this test, with these variables.
    pub(crate) fn start(test: &str, variables: &[(&str, &str)]) -> Worker {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, answers) = (process.stdin.take().unwrap(), process.stderr.take().unwrap());
        Worker { process, asks, answers: BufReader::new(answers) }
    }

    pub(crate) fn say(&mut self, line: &str) {
        self.asks.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        let (mut line, mut said) = (String::new(), String::new());
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the worker ended by itself: {said}");
            match line.trim_end().strip_prefix("queue: ") {
                Some(answer) => return answer.to_owned(),
                None => said.push_str(&line),
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Stops it, and waits until all of its threads stand still.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let start = Instant::now();
        let threads = format!("/proc/{}/task", self.process.id());
        let stands = |thread: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        while !std::fs::read_dir(&threads).unwrap().all(stands) {
            assert!(start.elapsed() < PATIENCE, "the worker does not stop");
            std::thread::yield_now();
        }
    }

    pub(crate) fn kill(mut self) {
        self.signal(Signal::KILL);
        self.process.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}
