//! `run`: runs a command unless it was done before, keeps what it wrote, and replays that to duplicates.
//!
//! The claim, the heartbeat and the record are the ledger's; here are the command's process, its streams and signals.

pub(crate) mod capture;
mod child;
mod copy;
pub(crate) mod exec;
pub(crate) mod guard;
mod handler;
mod show;
pub(crate) mod signals;
mod tell;
mod told;
pub(crate) use told::base64;
mod tree;
mod wire;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use taskonce::{Backoff, Context, Effect, ErrorKind, Failure, Ledger, Outcome, Output, Policy, Run, State, Task};

use tokio::time::Instant;

use crate::args::{Common, RunArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::{block_on, key, store};
use capture::Capture;
use child::{Spec, Streams};
use handler::{Errand, Stage};
use signals::Signals;
use wire::Order;

/// How long the end of the program waits for the release of a claim that it gave up.
/// The keeper looks twice, 0.7 s apart.
const RELEASE_MAX: Duration = Duration::from_millis(1500);
/// How long the end of a command may take to be recorded after a signal has come.
const RECORD_MAX: Duration = Duration::from_millis(500);
/// How long a next attempt of the same call waits for a store's clock that is behind this one.
const CLOCK_SLACK: Duration = Duration::from_secs(2);
/// The longest output that is kept as long as its record, unless it is asked for.
const OUTPUT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Runs the command, or says why not.
pub(crate) fn run(args: &RunArgs, common: &Common, form: Form) -> Result<ExitCode> {
    if args.input.input.is_none() && args.input.chooses() {
        return Err(Trouble::usage(
            "`--include`, `--optional` and `--fingerprint` choose fields of an input",
            "pass `--input`, not `--key`",
        ));
    }
    let (task, input) = match (&args.key, &args.input.input) {
        (Some(text), _) => {
            let (handler, id) = args.handler.of_key(text)?;
            (key::task_of_command(&handler, &id, &args.command)?, None)
        }
        (None, Some(from)) => {
            let handler = args.handler.handler()?;
            let bytes = key::read(from)?;
            (key::task_of_input(&handler, from, &bytes, &args.input)?, Some(bytes.into()))
        }
        (None, None) => {
            return Err(Trouble::usage("there is nothing that names the task", "pass `--key` or `--input`"));
        }
    };
    let policy = policy(args);
    policy.check()?;
    for warning in policy.warnings() {
        report::say(format_args!("warning: {warning}"));
    }
    let ledger = store::open(common.store.as_deref())?;
    check_ground(&policy, &ledger)?;
    let streams = match (args.no_output, form) {
        (true, Form::Text) => Streams::Own,
        (true, Form::Json) => Streams::OwnStderr,
        (false, form) => Streams::Kept { capture: Arc::new(Capture::new(args.output_max)), stdout: form == Form::Text },
    };
    let spec = Spec { command: args.command.clone(), input, streams };
    let call =
        Call { ledger, task, policy, spec: Arc::new(spec), wait: args.wait, retries: args.attempts.is_some(), form };
    block_on(call.go())?
}

/// The library that a command has for SQLite must not write to a file that this one writes to, unless it is new enough: before
/// 3.51.3 it may silently lose what is committed. Nobody can see which one a command uses.
fn check_ground(policy: &Policy, ledger: &Ledger) -> Result<()> {
    let system = ledger.store().ground().map(|ground| ground.system);
    if policy.effect == Effect::Transactional && system == Some("sqlite") {
        return Err(Trouble::new(
            Code::Configuration,
            ErrorKind::Unsupported.name(),
            "a command cannot complete a task in a SQLite file: many SQLite libraries lose data beside a newer one",
            "use a PostgreSQL store; or write the handler in Rust, with `run_in_transaction`",
        ));
    }
    Ok(())
}

fn policy(args: &RunArgs) -> Policy {
    let defaults = Policy::new(args.effect.effect());
    let backoff = match args.attempts {
        // The record must outlive the wait for the next attempt.
        Some(_) => {
            let delay_max = defaults.backoff.delay_max.min(args.retain);
            Backoff { delay_max, delay_min: defaults.backoff.delay_min.min(delay_max), ..defaults.backoff }
        }
        None => Backoff::NONE,
    };
    Policy {
        lease: args.lease,
        retention: args.retain,
        output_retention: args.retain_output.unwrap_or(OUTPUT_RETENTION.min(args.retain)),
        // Without a number a failed task is tried by every call.
        attempts_max: args.attempts.unwrap_or(u32::MAX),
        backoff,
        output_max: if args.no_output { 0 } else { args.output_max.saturating_add(capture::HEAD_MAX) },
        store_may_forget: args.store_may_forget,
        ..defaults
    }
}

/// One call of `run`.
struct Call {
    ledger: Ledger,
    task: Task,
    policy: Policy,
    spec: Arc<Spec>,
    wait: Duration,
    retries: bool,
    form: Form,
}

/// How one attempt of a call ended.
enum Ended {
    Outcome {
        outcome: Outcome<Output>,
        errand: Arc<Errand>,
        /// A signal came that asks programs to end: no attempt follows.
        asked_to_end: bool,
    },
    /// A signal came while no command ran.
    Interrupted(i32),
    /// The command has ended, and a signal came while that could not be recorded.
    NotRecorded { errand: Arc<Errand>, signal: i32 },
}

impl Call {
    async fn go(&self) -> Result<ExitCode> {
        let mut signals = Signals::heed().map_err(|error| {
            Trouble::new(Code::StoreAway, "no_signals", format!("no signals: {error}"), "raise the limit of open files")
        })?;
        let mut wait = self.wait;
        for _ in 0..self.policy.attempts_max {
            let (outcome, errand, asked_to_end) = match self.once(&mut signals, wait).await? {
                Ended::Outcome { outcome, errand, asked_to_end } => (outcome, errand, asked_to_end),
                Ended::Interrupted(signal) => return Ok(self.interrupted(signal).await),
                Ended::NotRecorded { errand, signal } => {
                    return Ok(tell::not_recorded_for(self, &errand, signal, &mut signals).await);
                }
            };
            let delay = match &outcome {
                Outcome::Failed { record: Some(record), .. }
                    if self.retries && !asked_to_end && record.state == State::Waiting =>
                {
                    if let Some(signal) = tell::will_retry(self, &outcome, &errand, &mut signals).await {
                        return Ok(self.interrupted(signal).await);
                    }
                    record.delay
                }
                _ => return Ok(tell::tell(self, outcome, &errand, &mut signals).await),
            };
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                signal = signals.next() => return Ok(self.interrupted(signal).await),
            }
            wait = self.wait.max(CLOCK_SLACK);
        }
        Err(Trouble::new(
            Code::Dead,
            "dead",
            format!("task `{}` has used up its attempts", self.task.key),
            "look at it with `taskonce show`",
        ))
    }

    /// Claims, and runs the command if the task is free. Signals go to the command while it runs.
    async fn once(&self, signals: &mut Signals, wait: Duration) -> Result<Ended> {
        let errand = Arc::new(Errand::new(Arc::clone(&self.spec), self.policy.effect, Arc::clone(self.ledger.host())));
        let handler = {
            let errand = Arc::clone(&errand);
            move |context| async move { errand.run(context).await }
        };
        let mut asked_to_end = false;
        // After the command's end: the signal that came, and until when a store that is well has recorded the end.
        let mut hurry: Option<(i32, Instant)> = None;
        let outcome = {
            let mut running = std::pin::pin!(self.claimed(wait, handler));
            loop {
                tokio::select! {
                    outcome = &mut running => break outcome,
                    signal = async {
                        match hurry {
                            Some((signal, until)) => {
                                tokio::time::sleep_until(until).await;
                                signal
                            }
                            None => std::future::pending().await,
                        }
                    } => return Ok(Ended::NotRecorded { errand, signal }),
                    signal = signals.next() => {
                        asked_to_end |= signals::asks_to_end(signal);
                        match errand.stage() {
                            // What was claimed is released when the future is dropped.
                            Stage::Before => return Ok(Ended::Interrupted(signal)),
                            Stage::During(child) if child.shares_terminal() && signals::is_from_terminal(signal) => {}
                            Stage::During(child) => child.order(Order::Signal(signal)),
                            Stage::After if signals::asks_to_end(signal) && hurry.is_none() => {
                                hurry = Some((signal, Instant::now() + RECORD_MAX));
                            }
                            Stage::After => {}
                        }
                    }
                }
            }
        };
        match outcome {
            Ok(outcome) => Ok(Ended::Outcome { outcome, errand, asked_to_end }),
            Err(error) => {
                self.ledger.finish(RELEASE_MAX).await;
                Err(error.into())
            }
        }
    }

    /// A command whose effect is transactional completes its record itself.
    async fn claimed<F>(
        &self,
        wait: Duration,
        handler: impl FnOnce(Context) -> F + Send,
    ) -> taskonce::Result<Outcome<Output>>
    where
        F: Future<Output = std::result::Result<Output, Failure>> + Send,
    {
        match self.policy.effect {
            Effect::Transactional => {
                let handler = |context| async move { handler(context).await.map(drop) };
                taskonce::run_elsewhere(&self.ledger, &self.task, &self.policy, wait, handler).await
            }
            Effect::Keyed | Effect::Fenced | Effect::Unrepeatable | Effect::Repeatable => {
                self.ledger.run_bytes(&self.task, &self.policy, wait, handler).await
            }
        }
    }

    async fn interrupted(&self, signal: i32) -> ExitCode {
        self.ledger.finish(RELEASE_MAX).await;
        report::say(format_args!("interrupted by {} while no command ran", signals::name(signal)));
        let code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
        match self.form {
            Form::Text => {}
            Form::Json => report::data_json(
                &json!({ "key": self.task.key.as_str(), "outcome": "interrupted", "exit_code": code }),
            ),
        }
        ExitCode::from(code)
    }
}
