//! Worker processes that are killed and stopped at named points, fed by a small queue: no effect is doubled, none is lost,
//! and nothing is blocked for longer than a lease and its server's patience.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::postgres::{CommitIn as _, CompleteIn as _, RunInTransaction as _};
use taskonce::{Admission, Backoff, Effect, Ledger, Output, Policy, Settlement, State, Task};
use taskonce_testkit::PostgresProxy;

use crate::place::{EFFECT, PATIENCE, Place, connect, found, task, until};
use crate::process::{Worker, hear, tell};

const STORE: &str = "TASKONCE_TEST_STORE";
const CLIENT: &str = "TASKONCE_TEST_CLIENT";
const FORM: &str = "TASKONCE_TEST_FORM";
const POINT: &str = "TASKONCE_TEST_POINT";

/// How long a claim holds: what is killed is taken over soon.
const LEASE: Duration = Duration::from_secs(1);
/// After this a delivery that could not be handled comes again.
const AGAIN: Duration = Duration::from_millis(100);
/// Where a worker stands, in the order in which it gets there.
const POINTS: [&str; 6] = [
    "before the claim",
    "after the claim",
    "in the transaction, before the statement",
    "in the transaction, after the statement",
    "in the transaction, before the commit",
    "after the commit, before the acknowledgement",
];

/// How a worker completes: in the one call, or with a transaction that it holds by hand.
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
    fn has(self, number: usize) -> bool {
        match self {
            Form::ByHand => true,
            Form::OneCall => ![1, 4].contains(&number),
        }
    }
}

/// A worker, in its own process.
struct Inside {
    ledger: Ledger,
    client_url: String,
    client: Client,
    point: String,
}

impl Inside {
    async fn deliver(&mut self, form: Form, task: &Task) -> Settlement {
        stand(&self.point, POINTS[0]);
        if self.client.is_closed() {
            self.client = connect(&self.client_url).await;
        }
        let settlement = match form {
            Form::ByHand => self.by_hand(task).await.unwrap_or(Settlement::Defer(AGAIN)),
            Form::OneCall => self.one_call(task).await,
        };
        if settlement == Settlement::Acknowledge {
            stand(&self.point, POINTS[5]);
        }
        settlement
    }

    async fn one_call(&mut self, task: &Task) -> Settlement {
        let (wanted, policy) = (&self.point, policy());
        let outcome = self.ledger.run_in_transaction(&mut self.client, task, &policy, |tx, context| {
            Box::pin(async move {
                stand(wanted, POINTS[2]);
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                stand(wanted, POINTS[3]);
                Ok(())
            })
        });
        outcome.await.map_or(Settlement::Defer(AGAIN), |outcome| outcome.settlement())
    }

    async fn by_hand(&mut self, task: &Task) -> Result<Settlement, Box<dyn std::error::Error>> {
        let claim = match self.ledger.claim(task, &policy()).await? {
            Admission::Run(claim) => claim,
            Admission::Replay(_) => return Ok(Settlement::Acknowledge),
            Admission::Busy(seen) | Admission::Waiting(seen) => return Ok(Settlement::Defer(seen.defer_for())),
            Admission::Parked(_) => return Ok(Settlement::DeadLetter("parked")),
            other => panic!("{other:?}"),
        };
        stand(&self.point, POINTS[1]);
        let tx = self.client.transaction().await?;
        claim.lock_in(&tx).await?;
        stand(&self.point, POINTS[2]);
        tx.execute(EFFECT, &[&task.key.as_str()]).await?;
        stand(&self.point, POINTS[3]);
        let completion = claim.complete_in(&tx, Output::Nothing).await.map_err(|refused| refused.error)?;
        stand(&self.point, POINTS[4]);
        completion.commit_in(tx).await.map_err(|unresolved| unresolved.error)?;
        Ok(Settlement::Acknowledge)
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
    Policy { lease: LEASE, backoff: Backoff::NONE, ..Policy::new(Effect::Transactional) }
}

/// Takes deliveries until there are no more: of the tests below as a process of its own; by itself, of one task twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_settles_its_deliveries() {
    let Ok(store) = std::env::var(STORE) else {
        let place = Place::new();
        for form in Form::ALL {
            let (client_url, task) = (place.client_url(), task(form.name()));
            let client = connect(&client_url).await;
            let mut worker = Inside { ledger: place.ledger(), client_url, client, point: String::new() };
            for _ in 0..2 {
                assert_eq!(worker.deliver(form, &task).await, Settlement::Acknowledge);
                assert_eq!(place.effects(&task.key).await, 1);
            }
        }
        return;
    };
    let form = std::env::var(FORM).unwrap();
    let form = Form::ALL.into_iter().find(|known| known.name() == form).unwrap();
    let client_url = std::env::var(CLIENT).unwrap();
    let client = connect(&client_url).await;
    let ledger = taskonce::open(&store).unwrap();
    let mut worker = Inside { ledger, client_url, client, point: std::env::var(POINT).unwrap() };
    loop {
        let line = hear();
        let Some(id) = line.strip_prefix("task ") else { return };
        match worker.deliver(form, &task(id)).await {
            Settlement::Acknowledge => tell("acknowledge"),
            Settlement::Defer(delay) => tell(&format!("defer {}", delay.as_millis())),
            Settlement::DeadLetter(why) => tell(&format!("dead letter {why}")),
        }
    }
}

fn start(place: &Place, form: Form, point: &str) -> Worker {
    let (store, client) = (place.url_with("timeout=20s"), place.client_url());
    let variables = [(STORE, store.as_str()), (CLIENT, client.as_str()), (FORM, form.name()), (POINT, point)];
    Worker::start("kills::a_worker_settles_its_deliveries", &variables)
}

/// Delivers until the worker acknowledges.
fn deliver(worker: &mut Worker, id: &str) {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE, "`{id}` is not acknowledged");
        worker.say(&format!("task {id}"));
        let answer = worker.answer();
        match answer.split_once(' ') {
            Some(("defer", millis)) => {
                let delay = Duration::from_millis(millis.parse().unwrap());
                std::thread::sleep(AGAIN.max(delay)); // sleeps: the delivery is deferred so long
            }
            _ => return assert_eq!(answer, "acknowledge"),
        }
    }
}

/// Each form at each point that it has, in a thread of its own.
fn at_each_point(play: impl Fn(&Place, Form, usize, &Task) + Sync) {
    let place = Place::new();
    let (place, play) = (&place, &play);
    std::thread::scope(|scope| {
        for form in Form::ALL {
            for number in (0..POINTS.len()).filter(|number| form.has(*number)) {
                scope.spawn(move || play(place, form, number, &task(&format!("{}-{number}", form.name()))));
            }
        }
    });
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn a_worker_that_is_killed_at_any_point_neither_doubles_nor_loses_an_effect() {
    at_each_point(|place, form, number, task| {
        let (point, id) = (POINTS[number], task.key.id());
        let effects = || block_on(place.effects(&task.key));
        let mut victim = start(place, form, point);
        victim.say(&format!("task {id}"));
        assert_eq!(victim.answer(), "at the point");
        victim.kill();
        assert_eq!(effects(), usize::from(number == 5), "{form:?}, killed {point}");
        let mut successor = start(place, form, "");
        deliver(&mut successor, id);
        assert_eq!(effects(), 1, "{form:?}, killed {point}");
        // A late copy changes nothing.
        deliver(&mut successor, id);
        assert_eq!(effects(), 1, "{form:?}, killed {point}");
        let record = block_on(async { found(&place.ledger(), task).await.record });
        let is_second = (1..5).contains(&number);
        assert_eq!((record.attempt, record.crashes), (1 + u32::from(is_second), u32::from(is_second)), "{point}");
    });
}

/// Inside its transaction it holds the record for as long as its server is patient with it: 5 s here, its lease being short.
#[test]
fn a_worker_that_is_stopped_at_any_point_past_its_lease_is_ended_by_the_server_and_cannot_commit() {
    at_each_point(|place, form, number, task| {
        let (point, id) = (POINTS[number], task.key.id());
        let effects = || block_on(place.effects(&task.key));
        let mut stopped = start(place, form, point);
        stopped.say(&format!("task {id}"));
        assert_eq!(stopped.answer(), "at the point");
        stopped.stop();
        stopped.say("go on");
        let mut other = start(place, form, "");
        deliver(&mut other, id);
        assert_eq!(effects(), 1, "{form:?}, stopped {point}");
        let record = block_on(async { found(&place.ledger(), task).await.record });
        let is_taken_over = (1..5).contains(&number);
        assert_eq!(
            (record.state, record.crashes),
            (State::Done, u32::from(is_taken_over)),
            "{form:?}, stopped {point}"
        );
        stopped.signal(Signal::CONT);
        let answer = stopped.answer();
        // Its claim was lost, or the task was done before it asked or after it had committed.
        let wanted = if is_taken_over { ["defer", "acknowledge"] } else { ["acknowledge"; 2] };
        assert!(wanted.iter().any(|word| answer.starts_with(word)), "{form:?}, stopped {point}: {answer}");
        assert_eq!(effects(), 1, "{form:?}, stopped {point}");
        deliver(&mut other, id);
        assert_eq!(effects(), 1, "{form:?}, stopped {point}");
        let after = block_on(async { found(&place.ledger(), task).await.record });
        assert_eq!((after.token, after.attempt), (record.token, record.attempt), "{form:?}, stopped {point}");
    });
}

/// The server has committed, and the worker never learns of it.
#[test]
fn a_worker_that_is_killed_between_its_commit_and_the_reply_has_done_the_task() {
    for form in Form::ALL {
        let place = Place::new();
        let proxy = PostgresProxy::start(place.database.port()).unwrap();
        let mut victim = start(&place.through(proxy.port()), form, "");
        // Settles something first, so that the reply that is held back is the right one.
        deliver(&mut victim, "before");
        proxy.hold_commit_replies();
        victim.say("task a");
        block_on(until("the reply is held back", async || proxy.held() == 1));
        victim.kill();
        proxy.release();
        let task = task("a");
        assert_eq!(block_on(place.effects(&task.key)), 1);
        let mut successor = start(&place, form, "");
        deliver(&mut successor, "a");
        assert_eq!(block_on(place.effects(&task.key)), 1);
        let record = block_on(async { found(&place.ledger(), &task).await.record });
        assert_eq!((record.state, record.attempt, record.crashes), (State::Done, 1, 0), "{form:?}");
    }
}

#[test]
fn a_task_that_kills_its_worker_every_time_is_parked() {
    let place = Place::new();
    let task = task("poison");
    for crash in 1..=3 {
        let mut victim = start(&place, Form::OneCall, POINTS[3]);
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "it is not claimed");
            victim.say("task poison");
            let answer = victim.answer();
            if answer == "at the point" {
                break;
            }
            assert!(answer.starts_with("defer"), "{crash}: {answer}");
            std::thread::sleep(AGAIN); // sleeps: the delivery is deferred
        }
        victim.kill();
    }
    let mut last = start(&place, Form::OneCall, "");
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE, "it is not parked");
        last.say("task poison");
        let answer = last.answer();
        if answer == "dead letter parked" {
            break;
        }
        assert!(answer.starts_with("defer"), "{answer}");
        std::thread::sleep(AGAIN); // sleeps: the delivery is deferred
    }
    assert_eq!(block_on(place.effects(&task.key)), 0);
    let record = block_on(async { found(&place.ledger(), &task).await.record });
    assert_eq!((record.state, record.crashes), (State::Parked, 3));
}
