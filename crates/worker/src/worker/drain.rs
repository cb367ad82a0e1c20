//! The main loop of a worker: starts what may start, and, when it is told to stop, brings to its end what is in hand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;

use super::desk::{Arrived, Next, WAIT_MAX, Which};
use super::hold::Hold;
use super::settle::{Told, Verdict, settle};
use super::{Shared, deliver, hold, publish, receive, watch};
use crate::events::Counts;
use crate::routes::{Ended, Pass, RouteId};
use crate::source::Receipt;

/// When the delivery of a handler that panicked comes again; its task has its own delay.
const PANIC_DELAY: Duration = Duration::from_secs(1);
/// The most settlements under way at which another task is started.
const SETTLING_MAX: usize = 256;
/// How long settlements may take after the grace period, for a source that is away.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// How often is looked for deliveries that have waited for too long.
const GIVE_BACK_EVERY: Duration = Duration::from_millis(200);
/// How long the ends of tasks that were cut off may take to be written.
const FINISH_MAX: Duration = Duration::from_secs(5);

/// What became of what a worker had in hand when it was told to stop.
#[derive(Clone, Debug)]
pub struct Report {
    /// Tasks that were running, and ended within the grace period.
    pub drained: usize,
    /// Deliveries that were received and not started: given back, no attempt counted.
    pub given_back: usize,
    /// Tasks that were running still when the grace period was over: cancelled, a failed attempt each.
    pub cut_off: usize,
    /// Deliveries of which the source could not be told what became of them: they come again after their visibility timeout.
    pub not_settled: usize,
    /// Whether every end of a task is written. Those that are not are taken over after their lease.
    pub is_finished: bool,
    /// How often each event has happened.
    pub counts: Arc<Counts>,
}

impl Report {
    /// Whether nothing was cut off or left open.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.cut_off == 0 && self.not_settled == 0 && self.is_finished
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} tasks ended, {} deliveries given back, {} tasks cut off, {} deliveries not settled",
            self.drained, self.given_back, self.cut_off, self.not_settled
        )?;
        if self.is_finished { Ok(()) } else { f.write_str(", some ends not written") }
    }
}

/// What runs: how it came in, and what takes it back.
struct Running {
    route: RouteId,
    source: usize,
    receipt: Receipt,
    pass: Pass,
    began: Duration,
    /// Keeps the delivery until it is settled.
    held: Hold,
}

struct Floor {
    shared: Arc<Shared>,
    tasks: JoinSet<(Ended, Verdict)>,
    running: HashMap<Id, Running>,
    /// Settlements. They hold no place of a task: while the source takes its time, the next tasks run.
    settling: JoinSet<Told>,
    not_settled: usize,
}

/// Works until `stop` completes, and drains.
pub(super) async fn run(shared: Arc<Shared>, grace: Duration, stop: impl Future<Output = ()>) -> Report {
    let mut receivers: JoinSet<()> = JoinSet::new();
    let mut by_receiver = HashMap::new();
    for (at, source) in shared.sources.iter().enumerate() {
        let description = source.describe();
        for warning in shared.routes.warnings_for(&description.name, description.visibility) {
            tracing::warn!(hint = warning.hint, "{warning}");
        }
        by_receiver.insert(receivers.spawn(receive::receive(Arc::clone(&shared), at)).id(), at);
    }
    let mut helpers = JoinSet::new();
    helpers.spawn(hold::keep(Arc::clone(&shared)));
    helpers.spawn(watch::watch(Arc::clone(&shared)));
    helpers.spawn(publish::publish(Arc::clone(&shared)));
    let mut floor = Floor {
        shared: Arc::clone(&shared),
        tasks: JoinSet::new(),
        running: HashMap::new(),
        settling: JoinSet::new(),
        not_settled: 0,
    };
    tokio::pin!(stop);
    // Of its own, for a busy worker never sleeps.
    let mut tick = tokio::time::interval(GIVE_BACK_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let wake_at = floor.start();
        tokio::select! {
            biased;
            () = &mut stop => break,
            _ = tick.tick() => {
                let overdue = shared.desk().give_back(shared.now(), Which::Overdue);
                floor.give_back(overdue);
            }
            Some(ended) = floor.tasks.join_next_with_id() => floor.end(ended),
            Some(Err(error)) = receivers.join_next() => {
                // It panicked, for it never ends: a fault of the source's code must not leave a worker that takes nothing.
                tracing::error!(%error, "receiving has ended, and begins again");
                if let Some(at) = by_receiver.remove(&error.id()) {
                    by_receiver.insert(receivers.spawn(receive::receive_again(Arc::clone(&shared), at)).id(), at);
                }
            }
            Some(told) = floor.settling.join_next() => floor.told(told),
            () = shared.work.notified() => {}
            () = tokio::time::sleep(wake_at) => {}
        }
    }
    receivers.shutdown().await;
    let report = floor.drain(grace, helpers).await;
    publish::withdraw(&shared).await;
    report
}

impl Floor {
    /// Starts what may start, and says when to look again at the latest.
    fn start(&mut self) -> Duration {
        loop {
            if self.settling.len() >= SETTLING_MAX {
                // The end of a settlement wakes the loop.
                return WAIT_MAX;
            }
            let now = self.shared.now();
            let next = self.shared.desk().next(now);
            match next {
                Next::Start(arrived, pass) => self.begin(arrived, pass, now),
                Next::Nothing(moment) => {
                    return moment.map_or(WAIT_MAX, |moment| moment.saturating_sub(now).min(WAIT_MAX));
                }
            }
        }
    }

    fn begin(&mut self, arrived: Box<Arrived>, pass: Pass, now: Duration) {
        let shared = Arc::clone(&self.shared);
        let (route, source, receipt) = (arrived.route, arrived.source, arrived.delivery.receipt.clone());
        let held = hold::hold(&shared, source, &receipt, arrived.at);
        let running = Running { route, source, receipt, pass, began: now, held };
        let task = self.tasks.spawn(async move {
            let (verdict, ended) = deliver::deliver(&shared, &arrived).await;
            (ended, verdict)
        });
        self.running.insert(task.id(), running);
    }

    /// A task has ended, panicked or was cancelled.
    fn end(&mut self, ended: Result<(Id, (Ended, Verdict)), JoinError>) {
        let (id, ended, verdict) = match ended {
            Ok((id, (ended, verdict))) => (id, ended, verdict),
            // It did not run to its end: its delivery comes again.
            Err(error) if error.is_panic() => (error.id(), Ended::Failed, Verdict::Defer(PANIC_DELAY)),
            Err(error) => (error.id(), Ended::Neither, Verdict::Defer(Duration::ZERO)),
        };
        let Some(Running { route, source, receipt, pass, began, held }) = self.running.remove(&id) else { return };
        let shared = Arc::clone(&self.shared);
        self.settling.spawn(async move {
            let told = settle(&shared, source, &receipt, &verdict).await;
            drop(held);
            told
        });
        let now = self.shared.now();
        self.shared.desk().end(route, pass, ended, now.saturating_sub(began), now);
        self.shared.room.notify_waiters();
    }

    fn give_back(&mut self, given: Vec<Arrived>) {
        for arrived in given {
            let shared = Arc::clone(&self.shared);
            self.settling.spawn(async move {
                let verdict = Verdict::Defer(Duration::ZERO);
                settle(&shared, arrived.source, &arrived.delivery.receipt, &verdict).await
            });
        }
    }

    fn told(&mut self, told: Result<Told, JoinError>) {
        match told {
            Ok(Told::Yes) => {}
            Ok(Told::Unknown) | Err(_) => self.not_settled += 1,
        }
    }

    async fn drain(mut self, grace: Duration, mut helpers: JoinSet<()>) -> Report {
        let until = Instant::now() + grace;
        // What could not be settled before the stop is no part of what was in hand at it.
        self.not_settled = 0;
        let waiting = self.shared.desk().give_back(self.shared.now(), Which::All);
        let (given_back, running) = (waiting.len(), self.tasks.len());
        tracing::info!(given_back, running, ?grace, "stopping: nothing more is received");
        self.give_back(waiting);
        while let Ok(Some(ended)) = tokio::time::timeout_at(until, self.tasks.join_next_with_id()).await {
            self.end(ended);
        }
        let cut_off = self.tasks.len();
        self.tasks.abort_all();
        while let Some(ended) = self.tasks.join_next_with_id().await {
            self.end(ended);
        }
        let until = until.max(Instant::now() + SETTLE_MAX);
        while let Ok(Some(told)) = tokio::time::timeout_at(until, self.settling.join_next()).await {
            self.told(told);
        }
        self.not_settled += self.settling.len();
        self.settling.shutdown().await;
        helpers.shutdown().await;
        let is_finished = self.shared.ledger.finish(FINISH_MAX).await;
        let counts = Arc::clone(&self.shared.counts);
        let report = Report {
            drained: running - cut_off,
            given_back,
            cut_off,
            not_settled: self.not_settled,
            is_finished,
            counts,
        };
        tracing::info!("stopped: {report}");
        report
    }
}
