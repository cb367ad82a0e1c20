//! The port, kept by a SQLite file: `SqliteQueue`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::error::{ErrorKind, Result};
use taskonce_core::host::Host as _;
use taskonce_core::store::{Cursor, Finding, Memory};
use taskonce_sqlite_file::examine::{examine, fault_of};
use taskonce_sqlite_file::fault::about;
use taskonce_sqlite_file::live::Live;
use taskonce_sqlite_file::{File, Synchronous};
use taskonce_worker::SystemHost;
use taskonce_worker::source::{
    DELAY_MAX, DeadFilter, DeadLetter, DeadPage, Death, Delivery, Depth, Description, Entrance, Envelope, Left,
    RECEIVE_MAX, Receipt, Sent, Settled, Source, WAIT_MAX, Want, examine_depth,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::options::{self, QueueOptions};
use crate::read::{self, Sight};
use crate::rows::{Holder, millis};
use crate::take::Wanted;
use crate::write::{Answer, Ask, Job, Queue, Settle};

/// The largest payload, in bytes. SQLite itself takes 1 GB; what is larger than some MiB belongs beside the queue.
pub const PAYLOAD_MAX: usize = 64 * 1024 * 1024;
/// How often a receive that waits looks for what other processes sent, at most: a look reads memory that the processes
/// share, and takes some ten microseconds.
pub const WAKE_MAX: Duration = Duration::from_millis(50);
/// How soon it looks first.
const LOOK_FIRST: Duration = Duration::from_millis(5);

/// A queue in one SQLite file. Clones are one handle of it; its threads end with the last of them.
#[derive(Clone)]
pub struct SqliteQueue {
    shared: Arc<Shared>,
}

struct Shared {
    file: File<Queue>,
    description: Description,
    is_closed: AtomicBool,
    /// Wakes the receives of this handle that wait.
    changed: Notify,
    /// Moves with each receive, so that handlers are served in turn.
    turn: AtomicUsize,
}

impl SqliteQueue {
    /// Opens a file, and makes it if there is none. Its folder must exist.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] where the folder is missing or the file cannot be opened, [`ErrorKind::ReadOnly`],
    /// [`ErrorKind::Corrupt`] for a file that is no database, [`ErrorKind::BadUrl`] for what is no file and for another
    /// program's database, the ledger's included (it is left as it is), [`ErrorKind::NewerSchema`],
    /// [`ErrorKind::Unsupported`] for a SQLite that loses commits.
    pub fn open(path: &Path, options: QueueOptions) -> Result<SqliteQueue> {
        let memory = match options.file.synchronous {
            Synchronous::Full => Memory::Keeps,
            Synchronous::Normal => Memory::MayForget,
        };
        let description = Description {
            name: options.name.into(),
            visibility: options.visibility,
            payload_max: PAYLOAD_MAX,
            delay_step: WAKE_MAX,
            wake_max: WAKE_MAX,
            memory,
        };
        let (file, changed) = (File::open(path, options.file)?, Notify::new());
        let shared =
            Shared { file, description, is_closed: AtomicBool::new(false), changed, turn: AtomicUsize::new(0) };
        Ok(SqliteQueue { shared: Arc::new(shared) })
    }

    /// Opens `sqlite:queue.db`, `sqlite:/abs/path.db` or `sqlite:///abs/path.db`.
    ///
    /// Options: `visibility=30s` (default), `name=queue` (default), `synchronous=full` (default) or `normal`, `timeout=2s`
    /// (default). Paths are percent-decoded.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`] with everything that is wrong with the URL; those of [`SqliteQueue::open`].
    pub fn from_url(url: &str) -> Result<SqliteQueue> {
        let (path, options) = options::parse(url)?;
        SqliteQueue::open(&path, options)
    }

    /// Refuses a URL whose file is missing, and makes nothing.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::BadUrl`] with everything that is wrong with the URL.
    pub fn check_existing(url: &str) -> Result<()> {
        let (path, _) = options::parse(url)?;
        match path.try_exists() {
            Ok(false) => Err(about(&path, ErrorKind::NotFound, "there is no such file")
                .with_hint("check the path; the first task that is sent makes the queue")),
            // What cannot be looked at is told better by opening it.
            Ok(true) | Err(_) => Ok(()),
        }
    }

    fn live(&self) -> Result<&Arc<Live<Queue>>> {
        if self.shared.is_closed.load(Ordering::SeqCst) {
            return Err(about(self.shared.file.path(), ErrorKind::Closed, "this handle of the queue was closed"));
        }
        self.shared.file.current()
    }

    async fn ask(&self, job: Job) -> Result<Answer> {
        let live = self.live()?;
        match live.ask(job)?.await {
            Ok(answer) => answer,
            Err(_) => Err(about(live.path(), ErrorKind::Unreachable, "the thread that writes has ended")),
        }
    }

    async fn settle(&self, receipt: &Receipt, how: Settle) -> Result<Settled> {
        self.live()?;
        let Some(holder) = Holder::of(receipt) else { return Ok(Settled::Gone) };
        let makes_due = match how {
            Settle::Defer(_) | Settle::Extend(_) => true,
            Settle::Acknowledge | Settle::Die(_) => false,
        };
        match self.ask(Job::Settle(holder, how)).await? {
            Answer::Settled(settled) => {
                if makes_due {
                    self.shared.changed.notify_waiters();
                }
                Ok(settled)
            }
            Answer::Sent(_) | Answer::Taken(_) | Answer::Left(_) | Answer::Probed => Err(self.crossed()),
        }
    }

    async fn leave(&self, job: Job) -> Result<Left> {
        match self.ask(job).await? {
            Answer::Left(left) => {
                self.shared.changed.notify_waiters();
                Ok(left)
            }
            Answer::Sent(_) | Answer::Taken(_) | Answer::Settled(_) | Answer::Probed => Err(self.crossed()),
        }
    }

    async fn take(&self, wanted: &Arc<Wanted>, total_max: usize) -> Result<Vec<Delivery>> {
        let ask = Ask {
            wanted: Arc::clone(wanted),
            total_max,
            visibility: millis(self.shared.description.visibility),
            turn: self.shared.turn.fetch_add(1, Ordering::Relaxed),
            salt: SystemHost::new().random() as u64,
            source: Arc::clone(&self.shared.description.name),
            home: Arc::downgrade(self.live()?),
        };
        match self.ask(Job::Take(ask)).await? {
            Answer::Taken(taken) => Ok(taken.keep()),
            Answer::Sent(_) | Answer::Settled(_) | Answer::Left(_) | Answer::Probed => Err(self.crossed()),
        }
    }

    /// An answer to another question: never taken for one's own.
    fn crossed(&self) -> taskonce_core::Error {
        about(self.shared.file.path(), ErrorKind::Protocol, "the writer answered another question")
    }
}

#[async_trait]
impl Source for SqliteQueue {
    fn describe(&self) -> &Description {
        &self.shared.description
    }

    async fn send(&self, envelope: &Envelope, delay: Duration, entrance: Entrance) -> Result<Sent> {
        self.live()?;
        envelope.check(PAYLOAD_MAX, entrance)?;
        let job = Job::Send { envelope: Box::new(envelope.clone()), delay: millis(delay.min(DELAY_MAX)), entrance };
        match self.ask(job).await? {
            Answer::Sent(sent) => {
                self.shared.changed.notify_waiters();
                Ok(sent)
            }
            Answer::Taken(_) | Answer::Settled(_) | Answer::Left(_) | Answer::Probed => Err(self.crossed()),
        }
    }

    async fn receive(&self, wants: &[Want], total_max: usize, wait: Duration) -> Result<Vec<Delivery>> {
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        let wanted = Arc::new(Wanted::of(wants));
        let total_max = total_max.min(RECEIVE_MAX);
        let mut look = LOOK_FIRST;
        // Each round waits for a change, the next look or the deadline, and so the loop ends.
        loop {
            tokio::task::coop::consume_budget().await;
            // Before the look, so that what changes after it is not missed.
            let changed = self.shared.changed.notified();
            let live = self.live()?;
            let mut next = None;
            if !wanted.is_empty() && total_max > 0 {
                match read::look(live, &wanted)? {
                    Sight::Something => {
                        let deliveries = self.take(&wanted, total_max).await?;
                        if !deliveries.is_empty() {
                            return Ok(deliveries);
                        }
                    }
                    Sight::Nothing(due) => next = due,
                }
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(Vec::new());
            }
            let until = now + next.map_or(look, |due| due.clamp(Duration::from_millis(1), look));
            let _ = tokio::time::timeout_at(until.min(deadline), changed).await;
            look = (look * 2).min(WAKE_MAX);
        }
    }

    async fn acknowledge(&self, receipt: &Receipt) -> Result<Settled> {
        self.settle(receipt, Settle::Acknowledge).await
    }

    async fn defer(&self, receipt: &Receipt, delay: Duration) -> Result<Settled> {
        self.settle(receipt, Settle::Defer(millis(delay.min(DELAY_MAX)))).await
    }

    async fn extend(&self, receipt: &Receipt, visibility: Duration) -> Result<Settled> {
        self.settle(receipt, Settle::Extend(millis(visibility.min(DELAY_MAX)))).await
    }

    async fn dead_letter(&self, receipt: &Receipt, death: &Death) -> Result<Settled> {
        self.live()?;
        death.check()?;
        self.settle(receipt, Settle::Die(Box::new(death.clone()))).await
    }

    async fn dead_letters(&self, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage> {
        read::dead_letters(self.live()?, filter, cursor.as_ref())
    }

    async fn dead_one(&self, id: &str) -> Result<Option<DeadLetter>> {
        read::dead_one(self.live()?, id)
    }

    async fn redrive(&self, id: &str) -> Result<Left> {
        self.leave(Job::Redrive(id.to_owned())).await
    }

    async fn drop_dead(&self, id: &str) -> Result<Left> {
        self.leave(Job::DropDead(id.to_owned())).await
    }

    async fn depth(&self) -> Result<Vec<Depth>> {
        let live = Arc::clone(self.live()?);
        // It looks at every row, which takes a while where there are many.
        match tokio::task::spawn_blocking(move || read::depth(&live)).await {
            Ok(depths) => depths,
            Err(_) => Err(about(self.shared.file.path(), ErrorKind::Unreachable, "counting was stopped")),
        }
    }

    async fn examine(&self) -> Vec<Finding> {
        let live = match self.live() {
            Ok(live) => live,
            Err(error) => return vec![fault_of("source", &error)],
        };
        let began = std::time::Instant::now();
        let probe = match self.ask(Job::Probe).await {
            Ok(Answer::Probed) => Ok(began.elapsed()),
            Ok(Answer::Sent(_) | Answer::Taken(_) | Answer::Settled(_) | Answer::Left(_)) => Err(self.crossed()),
            Err(error) => Err(error),
        };
        let mut findings = examine(live, probe, &[("clock", read::clock)]);
        findings.push(match self.depth().await {
            Ok(depths) => examine_depth(&depths),
            Err(error) => fault_of("deliveries", &error),
        });
        findings
    }

    async fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.shared.changed.notify_waiters();
    }
}

impl std::fmt::Debug for SqliteQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SqliteQueue").field(&self.shared.file.path()).finish()
    }
}
