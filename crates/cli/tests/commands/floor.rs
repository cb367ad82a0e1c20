//! What the tests share: a folder with a table of routes, a queue that they send to, a ledger that they look into, and workers.

use std::fs::File;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use taskonce::source::{self, DeadFilter, DeadLine, Depth, Entrance, Envelope, Source};
use taskonce::{Handler, Ledger, Output, Record};
use taskonce_testkit::eventually;
use tokio::runtime::Runtime;

use crate::harness::{Desk, PATIENCE};

/// How long a delivery is its receiver's: short, so that a killed worker's tasks are soon delivered again.
pub(crate) const VISIBILITY: Duration = Duration::from_secs(1);
/// The lease of every route here.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// The table's beginning.
const HEAD: &str = "\
store = 'sqlite:tasks.db'
[defaults]
effect = 'keyed'
lease = '1s'
backoff_min = '10ms'
backoff_max = '20ms'
breaker_failures = 'none'
[sources.orders]
url = 'sqlite:queue.db?visibility=1s'
retry_share = 1
";

/// Everything of one test.
pub(crate) struct Floor {
    pub(crate) desk: Desk,
    runtime: Runtime,
    pub(crate) queue: Arc<dyn Source>,
    pub(crate) ledger: Ledger,
}

/// A worker that runs. It is killed when a test fails.
pub(crate) struct Working {
    child: Child,
}

impl Floor {
    /// A table with `charge` from `orders`, of which this is said.
    pub(crate) fn new(charge: &str) -> Floor {
        Floor::of_table(&format!("{HEAD}[handlers.charge]\n{charge}\n[routes.orders.charge]\n"))
    }

    pub(crate) fn of_table(table: &str) -> Floor {
        let desk = Desk::new();
        std::fs::write(desk.path("taskonce.toml"), table).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _entered = runtime.enter();
        let queue = format!("sqlite:{}?visibility=1s", desk.path("queue.db").display());
        let queue = source::open_named(&queue, "orders").unwrap();
        let ledger = taskonce::open(desk.store()).unwrap();
        drop(_entered);
        Floor { desk, runtime, queue, ledger }
    }

    /// Sends a task of `charge`.
    pub(crate) fn send(&self, id: &str, payload: impl Into<Vec<u8>>) {
        self.send_to("charge@1", id, payload);
    }

    pub(crate) fn send_to(&self, handler: &str, id: &str, payload: impl Into<Vec<u8>>) {
        let payload = payload.into();
        let is_json = payload.starts_with(b"{");
        let content_type = if is_json { "application/json" } else { "application/octet-stream" };
        let envelope = Envelope {
            key: Some(format!("default/{handler}/{id}")),
            content_type: Some(content_type.to_owned()),
            headers: vec![(
                "traceparent".to_owned(),
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned(),
            )],
            ..Envelope::new(handler, payload)
        };
        let _sent = self.runtime.block_on(self.queue.send(&envelope, Duration::ZERO, Entrance::Open)).unwrap();
    }

    /// Sends so many, with their numbers as ids.
    pub(crate) fn send_many(&self, count: usize) {
        self.runtime.block_on(async {
            let mut sends = tokio::task::JoinSet::new();
            for number in 0..count {
                let queue = Arc::clone(&self.queue);
                sends.spawn(async move {
                    let key = Some(format!("default/charge@1/{number}"));
                    let envelope = Envelope { key, ..Envelope::new("charge@1", number.to_string()) };
                    let _sent = queue.send(&envelope, Duration::ZERO, Entrance::Open).await.unwrap();
                });
            }
            while let Some(sent) = sends.join_next().await {
                sent.unwrap();
            }
        });
    }

    /// Starts a worker, which writes its log to `log`.
    pub(crate) fn work(&self, args: &[&str]) -> Working {
        let open = |name: &str| File::options().create(true).append(true).open(self.desk.path(name)).unwrap();
        let mut command = self.desk.command(&[&["work"], args].concat());
        Working { child: command.stdout(open("out")).stderr(open("log")).spawn().unwrap() }
    }

    /// The record of a task of `charge`.
    pub(crate) fn record(&self, id: &str) -> Option<Arc<Record>> {
        self.record_of("charge", id)
    }

    pub(crate) fn record_of(&self, handler: &str, id: &str) -> Option<Arc<Record>> {
        let key = Handler::new(handler, "1").unwrap().key(id).unwrap();
        let found = self.runtime.block_on(self.ledger.store().load(&key)).unwrap();
        found.map(|found| found.record)
    }

    /// Waits until a task's record is as the test wants it.
    pub(crate) fn await_record(&self, id: &str, wanted: impl Fn(&Record) -> bool) -> Arc<Record> {
        let mut found = None;
        let came = eventually(PATIENCE, || {
            found = self.record(id).filter(|record| wanted(record));
            found.is_some()
        });
        assert!(came, "{id}: {:?}\n{}", self.record(id), self.desk.read("log"));
        found.unwrap()
    }

    pub(crate) fn depth(&self) -> Depth {
        Depth::total(&self.runtime.block_on(self.queue.depth()).unwrap())
    }

    pub(crate) fn dead(&self) -> Vec<DeadLine> {
        self.runtime.block_on(self.queue.dead_letters(&DeadFilter::default(), None)).unwrap().lines
    }

    /// Waits until the queue holds nothing but dead letters.
    pub(crate) fn await_worked_off(&self, within: Duration) {
        let empty = |depth: &Depth| depth.ready + depth.deferred + depth.in_flight == 0;
        assert!(eventually(within, || empty(&self.depth())), "{:?}\n{}", self.depth(), self.desk.read("log"));
    }

    pub(crate) fn log(&self) -> String {
        self.desk.read("log")
    }

    /// Waits until the log says something.
    pub(crate) fn await_log(&self, words: &str) {
        assert!(eventually(PATIENCE, || self.log().contains(words)), "no `{words}` in\n{}", self.log());
    }
}

impl Working {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Asks it to end, and waits for that: its exit code, and how long it took.
    pub(crate) fn stop(self) -> (Option<i32>, Duration) {
        let start = Instant::now();
        self.signal(Signal::TERM);
        (self.end().code(), start.elapsed())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// A kept output as text.
pub(crate) fn kept(record: &Record) -> (String, String) {
    match &record.output {
        Output::Kept { content_type, bytes } => (content_type.clone(), String::from_utf8(bytes.clone()).unwrap()),
        other => panic!("{other:?}"),
    }
}
