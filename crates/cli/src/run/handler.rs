//! What the ledger calls once it has claimed the task: starts the command, keeps its guardian's deadline in step with
//! the claim, and says how the command ended.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use taskonce::{Context, DropReason, Effect, Failure, FailureClass, Host, Output};

use super::child::{self, Ears, Running, Shows, Spec, Streams};
use super::signals;
use super::wire::{News, Order};
use crate::exit::Code;
use crate::report;

/// How often the deadline is looked at within a lease.
const LOOKS_PER_LEASE: u32 = 12;
/// The longest pause between two looks.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// How long the ledger may take to notice what the guardian noticed: that the lease has passed.
const NOTICE_MAX: Duration = Duration::from_secs(1);

/// How the command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(i32),
    Killed(i32),
    /// It could not be started: the exit code for that, and why.
    NotStarted(Code, String),
    /// Its guardian killed it, since the lease passed without news.
    LeasePassed,
    /// Its guardian was killed, and it with it.
    GuardGone,
}

impl End {
    /// The exit code that a shell would give.
    pub(crate) fn code(&self) -> u8 {
        match self {
            End::Exited(code) => u8::try_from(*code).unwrap_or(u8::MAX),
            End::Killed(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            End::NotStarted(code, _) => code.number(),
            End::LeasePassed => Code::Busy.number(),
            End::GuardGone => 137,
        }
    }
}

/// One attempt of one call: what is to be done, and how far it is.
pub(crate) struct Errand {
    spec: Arc<Spec>,
    effect: Effect,
    host: Arc<dyn Host>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    child: Option<Arc<Running>>,
    end: Option<End>,
    shows: Shows,
    /// A command may have been started; stays so.
    begun: bool,
}

/// Where the errand stands.
pub(crate) enum Stage {
    /// No command was started.
    Before,
    /// It runs.
    During(Arc<Running>),
    /// It has ended.
    After,
}

impl Errand {
    pub(crate) fn new(spec: Arc<Spec>, effect: Effect, host: Arc<dyn Host>) -> Errand {
        Errand { spec, effect, host, progress: Mutex::default() }
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stage(&self) -> Stage {
        let progress = self.progress();
        match (&progress.child, &progress.end) {
            (_, Some(_)) => Stage::After,
            (Some(child), None) => Stage::During(Arc::clone(child)),
            (None, None) => Stage::Before,
        }
    }

    /// How the command ended, if it was started and has.
    pub(crate) fn end(&self) -> Option<End> {
        self.progress().end.clone()
    }

    /// What the streams brought.
    pub(crate) fn streams(&self) -> &Streams {
        &self.spec.streams
    }

    /// All is recorded: lets go of the guardian.
    pub(crate) fn close(&self) {
        let child = self.progress().child.take();
        if let Some(child) = child {
            child.over();
        }
    }

    fn begin(&self, shows: Shows) {
        let mut progress = self.progress();
        (progress.shows, progress.begun) = (shows, true);
    }

    /// Whether a command may have been started.
    pub(crate) fn has_begun(&self) -> bool {
        self.progress().begun
    }

    /// What is still being written on; once.
    pub(crate) fn take_shows(&self) -> Shows {
        std::mem::take(&mut self.progress().shows)
    }

    fn ended(&self, end: End) -> End {
        self.progress().end = Some(end.clone());
        end
    }

    /// The handler: runs the command once.
    pub(crate) async fn run(&self, context: Context) -> Result<Output, Failure> {
        warn_of_takeover(&context, self.effect);
        let mut variables = vec![
            ("TASKONCE_KEY", context.key().to_string()),
            ("TASKONCE_FENCE", context.fence().to_string()),
            ("TASKONCE_ATTEMPT", context.attempt().to_string()),
            ("TASKONCE_DOWNSTREAM_KEY", context.downstream_key("").to_string()),
        ];
        if let (Effect::Transactional, Some(ground)) = (self.effect, context.ledger().store().ground()) {
            variables.push(("TASKONCE_CLAIM_ID", context.held().claim_id().to_string()));
            variables.push(("TASKONCE_SCHEMA", ground.place));
        }
        let end = match child::start(&self.spec, &variables, self.deadline(&context)) {
            Ok((running, ears, shows)) => {
                self.begin(shows);
                self.attend(&context, running, ears).await
            }
            Err(error) => {
                self.ended(End::NotStarted(Code::NotExecutable, format!("no guardian could be started: {error}")))
            }
        };
        match end {
            End::Exited(0) => Ok(match &self.spec.streams {
                Streams::Kept { capture, .. } => capture.output(),
                Streams::Own | Streams::OwnStderr => Output::Dropped(DropReason::NotKept),
            }),
            End::Exited(code) => Err(Failure::retryable(format!("exit code {code}"))),
            End::Killed(signal) => Err(Failure::retryable(format!("ended by {}", signals::name(signal)))),
            End::NotStarted(_, why) => Err(Failure::retryable(why).nothing_happened()),
            End::LeasePassed => {
                if tokio::time::timeout(NOTICE_MAX, context.lost()).await.is_ok() {
                    // The ledger knows that the claim is lost, and drops this.
                    std::future::pending::<()>().await;
                }
                Err(Failure::new(FailureClass::Dropped, "killed: the lease passed without a renewal"))
            }
            End::GuardGone => Err(Failure::new(FailureClass::Dropped, "killed together with its guardian")),
        }
    }

    /// The claim's deadline. The clock is read first, so that a pause in between makes it too early, never too late.
    fn deadline(&self, context: &Context) -> Duration {
        let now = self.host.uptime();
        now + context.lease_left()
    }

    /// Listens until the command has ended and what it wrote is in memory. Dropped before, it kills the command.
    async fn attend(&self, context: &Context, running: Running, mut ears: Ears) -> End {
        let running = Arc::new(running);
        self.progress().child = Some(Arc::clone(&running));
        let mut leash = Leash { running: Arc::clone(&running), held: true };
        let mut told = Duration::ZERO;
        let look = (context.lease_left() / LOOKS_PER_LEASE).min(LOOK_MAX);
        let end = loop {
            tokio::select! {
                news = ears.news.recv() => match news {
                    Some(News::Started(pid)) => running.started(pid),
                    Some(News::Exited(code)) => break End::Exited(code),
                    Some(News::Killed(signal)) => break End::Killed(signal),
                    Some(News::NotStarted(number)) => break self.not_started(number),
                    Some(News::LeasePassed) => break End::LeasePassed,
                    None => {
                        running.guard_is_gone();
                        break End::GuardGone;
                    }
                },
                () = tokio::time::sleep(look) => {
                    let deadline = self.deadline(context);
                    if deadline > told {
                        running.order(Order::Deadline(deadline));
                        told = deadline;
                    }
                }
            }
        };
        let end = self.ended(end);
        ears.drain().await;
        leash.held = false;
        end
    }

    fn not_started(&self, number: i32) -> End {
        let error = io::Error::from_raw_os_error(number);
        let program = self.spec.command.first().map(|word| word.display().to_string()).unwrap_or_default();
        match error.kind() {
            io::ErrorKind::NotFound => End::NotStarted(Code::NotFound, format!("command not found: {program}")),
            _ => End::NotStarted(Code::NotExecutable, format!("command cannot be started: {program}: {error}")),
        }
    }
}

/// Kills the command when the handler is dropped: the claim was lost.
struct Leash {
    running: Arc<Running>,
    held: bool,
}

impl Drop for Leash {
    fn drop(&mut self) {
        if self.held {
            self.running.kill();
        }
    }
}

/// A claim that ended by a passed lease came before: says what running again means for this kind of effect.
fn warn_of_takeover(context: &Context, effect: Effect) {
    let Some(failure) = context.last_failure() else { return };
    if failure.class != FailureClass::Crashed {
        return;
    }
    let meaning = match effect {
        Effect::Keyed => "its effect is keyed: the provider must know TASKONCE_DOWNSTREAM_KEY again",
        Effect::Transactional => "its effect is transactional: what the run before did not commit is rolled back",
        Effect::Repeatable | Effect::Fenced | Effect::Unrepeatable => {
            "it runs again, since its effect is `repeatable`; if repeating does harm, \
             use `--effect keyed` or `--effect unrepeatable`"
        }
    };
    report::say(format_args!(
        "note: attempt {} takes over; the run before ended without a word, and may have had its effect\n      {meaning}",
        context.attempt()
    ));
}
