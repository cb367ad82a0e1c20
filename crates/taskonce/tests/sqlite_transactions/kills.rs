//! Worker processes that are killed and stopped at named points, fed by a small queue: no effect is doubled, none is lost.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use taskonce::blocking::Ledger;
use taskonce::sqlite::CompleteIn as _;
use taskonce::sqlite::rusqlite::Connection;
use taskonce::{Admission, Effect, ErrorKind, Handler, Input, Output, Policy, Settlement, Task};

use super::{InFile, PATIENCE, add_effect};

const FILE: &str = "TASKONCE_TEST_FILE";
const FORM: &str = "TASKONCE_TEST_FORM";
const POINT: &str = "TASKONCE_TEST_POINT";

/// How long a claim holds: what is killed is taken over soon.
const LEASE: Duration = Duration::from_secs(1);
/// After this a delivery that could not be handled comes again.
const AGAIN: Duration = Duration::from_millis(100);
/// The longest that a delivery may take until it is acknowledged.
const DELIVERY_MAX: Duration = Duration::from_secs(60);
/// Where a worker stands, in the order in which it gets there.
const POINTS: [&str; 6] = [
    "before the claim",
    "after the claim",
    "in the transaction, before the statement",
    "in the transaction, after the statement",
    "in the transaction, before the commit",
    "after the commit, before the acknowledgement",
];

/// How a worker completes: with a transaction of its own, or in the one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    ByHand,
    OneCall,
}

impl Form {
    const ALL: [Form; 2] = [Form::ByHand, Form::OneCall];

    fn name(self) -> &'static str {
        match self {
            Form::ByHand => "by hand",
            Form::OneCall => "one call",
        }
    }

    /// Whether code of the worker's own runs at that point.
    fn has(self, point: &str) -> bool {
        match self {
            Form::ByHand => true,
            Form::OneCall => ![POINTS[1], POINTS[4]].contains(&point),
        }
    }
}

/// A worker, in its own process.
struct Inside {
    ledger: Ledger,
    conn: Connection,
    point: String,
}

impl Inside {
    fn at(&self, point: &str) {
        stand(&self.point, point);
    }

    fn deliver(&mut self, form: Form, task: &Task) -> Settlement {
        self.at(POINTS[0]);
        let settlement = match form {
            Form::ByHand => self.by_hand(task),
            Form::OneCall => self.one_call(task),
        };
        if settlement == Settlement::Acknowledge {
            self.at(POINTS[5]);
        }
        settlement
    }

    fn one_call(&self, task: &Task) -> Settlement {
        let wanted = &self.point;
        let outcome = self.ledger.run_in_transaction(task, &policy(), |tx, context| {
            stand(wanted, POINTS[2]);
            add_effect(tx, context.key());
            stand(wanted, POINTS[3]);
            Ok(())
        });
        outcome.map_or(Settlement::Defer(AGAIN), |outcome| outcome.settlement())
    }

    fn by_hand(&mut self, task: &Task) -> Settlement {
        let claim = match self.ledger.block_on(self.ledger.inner().claim(task, &policy())) {
            Ok(Admission::Run(claim)) => claim,
            Ok(Admission::Replay(_)) => return Settlement::Acknowledge,
            Ok(Admission::Busy(seen) | Admission::Waiting(seen)) => return Settlement::Defer(seen.defer_for()),
            Ok(other) => panic!("{other:?}"),
            Err(_) => return Settlement::Defer(AGAIN),
        };
        self.at(POINTS[1]);
        let tx = self.conn.unchecked_transaction().unwrap();
        match claim.lock_in(&tx) {
            Ok(()) => {}
            Err(error) if [ErrorKind::ClaimLost, ErrorKind::Locked].contains(&error.kind()) => {
                return Settlement::Defer(AGAIN);
            }
            Err(error) => panic!("{error:?}"),
        }
        self.at(POINTS[2]);
        add_effect(&tx, &task.key);
        self.at(POINTS[3]);
        let completion = claim.complete_in(&tx, Output::Nothing).unwrap();
        self.at(POINTS[4]);
        tx.commit().unwrap();
        completion.committed();
        Settlement::Acknowledge
    }
}

/// Where the worker is killed or stopped, and goes on if it was only stopped.
fn stand(wanted: &str, point: &str) {
    if wanted == point {
        tell("at the point");
        assert_eq!(hear(), "go on");
    }
}

fn policy() -> Policy {
    Policy { lease: LEASE, ..Policy::new(Effect::Transactional) }
}

fn task(id: &str) -> Task {
    Handler::new("pay", "1").unwrap().task(id, &Input::from_json(b"1200").unwrap()).unwrap()
}

/// Tells the queue something, in whole lines.
fn tell(line: &str) {
    std::io::stderr().lock().write_all(format!("queue: {line}\n").as_bytes()).unwrap();
}

fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Takes deliveries until there are no more: of the tests below as a process of its own; by itself, of one task twice.
#[test]
fn a_worker_settles_its_deliveries() {
    let Ok(url) = std::env::var(FILE) else {
        for form in Form::ALL {
            let place = InFile::new();
            let ledger = taskonce::blocking::open(&place.url()).unwrap();
            let mut worker = Inside { ledger, conn: place.beside(), point: String::new() };
            for _ in 0..2 {
                assert_eq!(worker.deliver(form, &task("a")), Settlement::Acknowledge);
                assert_eq!(place.count(&task("a").key), 1);
            }
        }
        return;
    };
    let form = std::env::var(FORM).unwrap();
    let form = Form::ALL.into_iter().find(|known| known.name() == form).unwrap();
    let conn = Connection::open(url.strip_prefix("sqlite:").unwrap()).unwrap();
    conn.busy_timeout(PATIENCE).unwrap();
    let ledger = taskonce::blocking::open(&url).unwrap();
    let mut worker = Inside { ledger, conn, point: std::env::var(POINT).unwrap() };
    loop {
        let line = hear();
        let Some(id) = line.strip_prefix("task ") else { return };
        match worker.deliver(form, &task(id)) {
            Settlement::Acknowledge => tell("acknowledge"),
            Settlement::Defer(delay) => tell(&format!("defer {}", delay.as_millis())),
            Settlement::DeadLetter(why) => tell(&format!("dead letter {why}")),
        }
    }
}

/// A worker, as the queue sees it. Killed when it is dropped.
struct Worker {
    process: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStderr>,
}

impl Worker {
    fn start(place: &InFile, form: Form, point: &str) -> Worker {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills::a_worker_settles_its_deliveries", "--nocapture"])
            .env(FILE, place.url())
            .env(FORM, form.name())
            .env(POINT, point)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, answers) = (process.stdin.take().unwrap(), process.stderr.take().unwrap());
        Worker { process, asks, answers: BufReader::new(answers) }
    }

    fn say(&mut self, line: &str) {
        self.asks.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn answer(&mut self) -> String {
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

    /// Stops it, and waits until all of its threads stand still.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let until = Instant::now() + DELIVERY_MAX;
        let tasks = format!("/proc/{}/task", self.process.id());
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        while !std::fs::read_dir(&tasks).unwrap().all(stands) {
            assert!(Instant::now() < until, "the worker does not stop");
            std::thread::yield_now();
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}

/// Delivers until the worker acknowledges.
fn deliver(worker: &mut Worker, id: &str) {
    let until = Instant::now() + DELIVERY_MAX;
    let mut deliveries = VecDeque::from([Duration::ZERO]);
    while let Some(delay) = deliveries.pop_front() {
        assert!(Instant::now() < until, "`{id}` is not acknowledged");
        std::thread::sleep(delay); // sleeps: the delivery is deferred so long
        worker.say(&format!("task {id}"));
        let answer = worker.answer();
        match answer.split_once(' ') {
            Some(("defer", millis)) => deliveries.push_back(AGAIN.max(Duration::from_millis(millis.parse().unwrap()))),
            _ => assert_eq!(answer, "acknowledge"),
        }
    }
}

#[test]
fn a_worker_that_is_killed_at_any_point_neither_doubles_nor_loses_an_effect() {
    std::thread::scope(|scope| {
        for form in Form::ALL {
            for (number, point) in POINTS.into_iter().enumerate().filter(|(_, point)| form.has(point)) {
                scope.spawn(move || {
                    let place = InFile::new();
                    let mut victim = Worker::start(&place, form, point);
                    victim.say("task a");
                    assert_eq!(victim.answer(), "at the point");
                    victim.signal(Signal::KILL);
                    victim.process.wait().unwrap();
                    let key = task("a").key;
                    assert_eq!(place.count(&key), usize::from(number == 5), "{form:?}, killed {point}");
                    let mut successor = Worker::start(&place, form, "");
                    deliver(&mut successor, "a");
                    assert_eq!(place.count(&key), 1, "{form:?}, killed {point}");
                    // A late copy changes nothing.
                    deliver(&mut successor, "a");
                    assert_eq!(place.count(&key), 1, "{form:?}, killed {point}");
                    let record = taskonce::blocking::open(&place.url()).unwrap().show(&key).unwrap().unwrap().record;
                    let is_second = (1..5).contains(&number);
                    assert_eq!((record.attempt, record.crashes), (1 + u32::from(is_second), u32::from(is_second)));
                });
            }
        }
    });
}

/// One that is stopped inside its transaction holds the file's write lock until it goes on: the others wait so long.
#[test]
fn a_worker_that_is_stopped_at_any_point_past_its_lease_neither_doubles_nor_loses_an_effect() {
    std::thread::scope(|scope| {
        for form in Form::ALL {
            for (number, point) in POINTS.into_iter().enumerate().filter(|(_, point)| form.has(point)) {
                scope.spawn(move || {
                    let place = InFile::new();
                    let mut stopped = Worker::start(&place, form, point);
                    stopped.say("task a");
                    assert_eq!(stopped.answer(), "at the point");
                    stopped.stop();
                    // Not in the middle of a heartbeat, which would hold the file as a transaction does.
                    while !(2..5).contains(&number) && place.is_held() {
                        stopped.signal(Signal::CONT);
                        stopped.stop();
                    }
                    stopped.say("go on");
                    let mut other = Worker::start(&place, form, "");
                    let key = task("a").key;
                    if (2..5).contains(&number) {
                        std::thread::sleep(LEASE * 2); // sleeps: the lease has to pass
                        other.say("task a");
                        let answer = other.answer();
                        assert!(answer.starts_with("defer "), "{form:?}, stopped {point}: {answer}");
                        assert_eq!(place.count(&key), 0, "{form:?}, stopped {point}");
                        stopped.signal(Signal::CONT);
                        assert_eq!(stopped.answer(), "acknowledge", "{form:?}, stopped {point}");
                    } else {
                        // Takes over, where the lease has passed without an effect, or finds it done.
                        deliver(&mut other, "a");
                        stopped.signal(Signal::CONT);
                        let answer = stopped.answer();
                        let wanted = if number == 1 { "defer " } else { "acknowledge" };
                        assert!(answer.starts_with(wanted), "{form:?}, stopped {point}: {answer}");
                    }
                    assert_eq!(place.count(&key), 1, "{form:?}, stopped {point}");
                    for worker in [&mut stopped, &mut other] {
                        worker.signal(Signal::CONT);
                        deliver_without_point(worker);
                    }
                    assert_eq!(place.count(&key), 1, "{form:?}, stopped {point}");
                });
            }
        }
    });
}

/// A late copy of the task. A worker that has a point comes to it again, and is told to go on.
fn deliver_without_point(worker: &mut Worker) {
    worker.say("task a");
    let mut answer = worker.answer();
    if answer == "at the point" {
        worker.say("go on");
        answer = worker.answer();
    }
    assert_eq!(answer, "acknowledge");
}
