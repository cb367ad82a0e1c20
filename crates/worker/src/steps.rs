//! The steps of a handler that changes several resources: each is recorded when it has ended, and a later run of the task
//! gets what it returned instead of running it again.
//!
//! What is recorded, and what follows from it, is decided in `taskonce_core::step`.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::held::Phase;
use taskonce_core::json::{Fields, Input};
use taskonce_core::key::{DownstreamKey, Fingerprint};
use taskonce_core::policy::Effect;
use taskonce_core::record::{Aftermath, DropReason, Failure, FailureClass, Output, Record};
use taskonce_core::step::{self, STEP_NAME_MAX, STEPS_BYTES_MAX, STEPS_MAX, StepAsk, StepTurn};
use taskonce_core::{Error, Retry};
use tokio::sync::MutexGuard;
use tokio::time::sleep;

use crate::heartbeat::{AGAIN_MAX, AGAIN_MIN};
use crate::outcome::{decode, encode};
use crate::run::Context;

tokio::task_local! {
    /// The steps of the task whose step the code that runs now belongs to, by their address.
    static WITHIN: usize;
}

/// How long a step waits for what the transaction of the step before it has recorded.
const REFRESH_MAX: Duration = Duration::from_secs(2);

/// Where the steps of one run stand.
#[derive(Default)]
pub(crate) struct Steps {
    /// Held while one runs: steps follow one another.
    progress: tokio::sync::Mutex<Progress>,
    /// Why the task stops for a person.
    stopped: Mutex<Option<Failure>>,
}

/// How far the steps of one run have come.
#[derive(Default)]
pub(crate) struct Progress {
    /// How many ended.
    pub(crate) ended: usize,
    /// The one that was asked for last, where it failed or was given up.
    unended: Option<String>,
}

impl Progress {
    /// The step under way has ended.
    pub(crate) fn end(&mut self) {
        self.ended += 1;
        self.unended = None;
    }
}

impl Steps {
    /// What tells them from those of other tasks, for as long as they live.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub(crate) fn stopped(&self) -> Option<Failure> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins this step, where none is under way.
    pub(crate) fn begin(&self, name: &str) -> Result<MutexGuard<'_, Progress>, Failure> {
        let progress = self.progress.try_lock().map_err(|_| {
            Failure::permanent(format!("step `{name}` was asked for while another step of the task is under way"))
        })?;
        self.admit(progress, name)
    }

    /// The same, behind those that are under way.
    pub(crate) async fn begin_behind(&self, name: &str) -> Result<MutexGuard<'_, Progress>, Failure> {
        if WITHIN.try_with(|within| *within == self.address()).unwrap_or(false) {
            return Err(Failure::permanent(format!(
                "step `{name}` was asked for inside another step of the same task: steps follow one another"
            )));
        }
        let progress = self.progress.lock().await;
        self.admit(progress, name)
    }

    fn admit<'a>(
        &self,
        mut progress: MutexGuard<'a, Progress>,
        name: &str,
    ) -> Result<MutexGuard<'a, Progress>, Failure> {
        if let Some(failure) = self.stopped() {
            return Err(failure);
        }
        check_name(name, progress.ended)?;
        if let Some(unended) = progress.unended.as_ref().filter(|unended| *unended != name) {
            return Err(Failure::retryable(format!(
                "step `{name}` was asked for behind step `{unended}`, which did not end: its failure is to be returned, or \
                 what the code goes on with is to be its value"
            )));
        }
        progress.unended = Some(name.to_owned());
        Ok(progress)
    }

    /// Runs the code of a step.
    pub(crate) async fn within<F: Future>(&self, code: F) -> F::Output {
        WITHIN.scope(self.address(), code).await
    }

    /// The same for code that blocks.
    pub(crate) fn within_blocking<T>(&self, code: impl FnOnce() -> T) -> T {
        WITHIN.sync_scope(self.address(), code)
    }

    /// Parks the task when its handler has ended, whatever that makes of it.
    pub(crate) fn stop(&self, failure: Failure) -> Failure {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.clone());
        failure
    }
}

/// What the code of a step is given.
#[derive(Clone, Debug)]
pub struct StepContext {
    downstream: DownstreamKey,
    attempt: u32,
}

impl StepContext {
    pub(crate) fn of(context: &Context, name: &str) -> StepContext {
        StepContext { downstream: context.downstream_key(name), attempt: context.attempt() }
    }

    /// The key for a provider that deduplicates: this step's own, the same in every attempt of the task.
    #[must_use]
    pub fn downstream_key(&self) -> DownstreamKey {
        self.downstream
    }

    /// The number of the task's attempt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }
}

/// A step that is about to run; see [`Context::step_of`].
#[must_use = "a step does nothing until `run` is awaited"]
pub struct StepOf<'a> {
    pub(crate) context: &'a Context,
    pub(crate) name: &'a str,
    pub(crate) effect: Effect,
    pub(crate) input: Result<Fingerprint, Failure>,
}

impl Context {
    /// Runs a step of this task, unless a run before has ended it: then its recorded value is returned.
    ///
    /// A step's name is its own within the task (1 to 128 bytes), and names and order are the same in every run. When a
    /// run finds another step recorded in the place of the one that it asks for, the code changed under the task: the
    /// task is parked, with both named. Steps run one after the other; at most 64 of them; their outputs have 1 MiB
    /// together.
    ///
    /// What `effect` says of the step decides what happens when a run before was cut off inside it: a `Keyed`, `Fenced` or
    /// `Repeatable` one runs again (a keyed one with the same [`StepContext::downstream_key`]). An `Unrepeatable` one is
    /// noted before it begins, and parks the task. `Transactional` is for the drivers' `step_in`, which writes the step
    /// into the transaction of its effect, and for their `beside`, which writes a row there where the ledger is in another
    /// database.
    ///
    /// A step that fails is not recorded: it is asked for again, by the same run or the next. So its failure is to be
    /// returned, and no other step runs behind it. What the code goes on with is a value: a payment that was declined is
    /// `Ok(Declined)`, which is recorded, and every run then takes the same way, to a compensation for example, which is
    /// a step like any other.
    ///
    /// # Errors
    /// The step's own failure, or why it could not be run or recorded: to be returned by the handler. An unrepeatable step
    /// that fails parks the task unless its failure says that [nothing happened](Failure::nothing_happened).
    pub async fn step<T, F>(
        &self,
        name: &str,
        effect: Effect,
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Failure>> + Send,
    {
        self.step_of(name, effect).run(run).await
    }

    /// The same with an input, or for an unrepeatable step with a way to ask whether it happened.
    pub fn step_of<'a>(&'a self, name: &'a str, effect: Effect) -> StepOf<'a> {
        StepOf { context: self, name, effect, input: Ok(Fingerprint([0; 16])) }
    }

    /// The handler has returned: nothing is recorded behind the steps that it took, and what the ledger holds of them is
    /// what is stored.
    pub(crate) async fn end_steps(&self) -> Result<(), Failure> {
        let Ok(progress) = self.steps().progress.try_lock() else {
            return Err(Failure::retryable(
                "the handler has returned while a step of it was still under way elsewhere",
            ));
        };
        let count = progress.ended;
        if count > self.held().record().steps.len() {
            self.refresh(count).await?;
        }
        match step::left_over(&self.held().record(), count) {
            Some(failure) => Err(self.steps().stop(failure)),
            None => Ok(()),
        }
    }

    /// Takes over the steps that transactions of the handler's have recorded.
    pub(crate) async fn refresh(&self, count: usize) -> Result<(), Failure> {
        // A transaction of this very handler that is still open would be waited for in vain.
        let Ok(record) = tokio::time::timeout(REFRESH_MAX, self.advance(Record::clone)).await else {
            let what = "a step was asked for while the transaction of the step before it is open: commit that first";
            return Err(Failure::retryable(what));
        };
        let record = record?;
        if record.steps.len() < count {
            let what =
                format!("step {} of this run is not recorded: its transaction did not commit", record.steps.len() + 1);
            return Err(Failure::retryable(what));
        }
        Ok(())
    }

    /// Changes the claim's record, and tries so as long as the lease lasts.
    pub(crate) async fn advance(
        &self,
        change: impl Fn(&Record) -> Record + Send + Sync,
    ) -> Result<std::sync::Arc<Record>, Failure> {
        let (store, host) = (self.ledger().store(), self.ledger().host());
        let mut delay = AGAIN_MIN;
        loop {
            match self.held().advance(&**store, &**host, &change).await {
                Ok(Some(record)) => return Ok(record),
                Ok(None) => return Err(Failure::retryable("the claim is lost: another took over")),
                Err(error) if error.kind().retry() == Retry::Later && host.uptime() < self.held().deadline() => {
                    tracing::warn!(key = %self.key(), %error, "a step is not recorded, trying again");
                    sleep(delay).await;
                    delay = (delay * 2).min(AGAIN_MAX);
                }
                Err(error) => return Err(not_recorded(error)),
            }
        }
    }
}

fn not_recorded(error: Error) -> Failure {
    Failure::retryable(format!("a step could not be recorded: {error}"))
}

impl<'a> StepOf<'a> {
    /// What the step works on. A later run with another input does not get its value, but parks the task.
    pub fn input(mut self, input: &impl Serialize) -> StepOf<'a> {
        self.input = Input::from_value(input).and_then(|input| input.fingerprint(&Fields::all())).map_err(|error| {
            Failure::permanent(format!("the input of step `{}` has no canonical form: {error}", self.name))
        });
        self
    }

    /// Runs it, as [`Context::step`] says.
    ///
    /// # Errors
    /// As there.
    pub async fn run<T, F>(self, run: impl FnOnce(StepContext) -> F + Send) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let no_probe = async |_: StepContext| Ok(None);
        self.run_or_probe(Probe::No, no_probe, run).await
    }

    /// Runs an unrepeatable step; where a run before was cut off inside it, `probe` is asked whether it happened. What it
    /// finds is recorded as the step's value. Where it finds nothing the task is parked all the same: what is not there
    /// yet may still come.
    ///
    /// # Errors
    /// As for [`Context::step`], and the probe's.
    pub async fn run_or_ask<T, F, P>(
        self,
        probe: impl FnOnce(StepContext) -> P + Send,
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Failure>> + Send,
        P: Future<Output = Result<Option<T>, Failure>> + Send,
    {
        self.run_or_probe(Probe::Given, probe, run).await
    }

    async fn run_or_probe<T, F, P>(
        self,
        asks: Probe,
        probe: impl FnOnce(StepContext) -> P + Send,
        run: impl FnOnce(StepContext) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<T, Failure>> + Send,
        P: Future<Output = Result<Option<T>, Failure>> + Send,
    {
        let StepOf { context, name, effect, input } = self;
        let steps = context.steps();
        let mut progress = steps.begin_behind(name).await?;
        let place = progress.ended;
        check(context, name, effect)?;
        if context.held().record().steps.len() < place {
            context.refresh(place).await?;
        }
        let ask = StepAsk { name: name.to_owned(), effect, input: input? };
        let record = context.held().record();
        let given = StepContext::of(context, name);
        let value = match step::turn(&record, place, &ask) {
            StepTurn::Replay(output) => replay(context, name, &output)?,
            StepTurn::Changed(what) => return Err(steps.stop(Failure::new(FailureClass::StepChanged, what))),
            StepTurn::InDoubt => {
                let found = match asks {
                    Probe::Given => steps.within(probe(given)).await?,
                    Probe::No => None,
                };
                let Some(value) = found else {
                    return Err(steps.stop(Failure::new(FailureClass::StepInDoubt, in_doubt(name, asks))));
                };
                record_end(context, place, &ask, &value, Duration::ZERO).await?;
                value
            }
            StepTurn::Run => run_step(context, place, &ask, given, run).await?,
        };
        progress.end();
        Ok(value)
    }
}

/// Whether there is a way to ask if a step happened.
#[derive(Clone, Copy)]
pub(crate) enum Probe {
    Given,
    No,
}

pub(crate) fn in_doubt(name: &str, asks: Probe) -> String {
    let asked = match asks {
        Probe::Given => ", and its probe found nothing",
        Probe::No => "",
    };
    format!("step `{name}` began and must not be repeated; whether it took effect is not known{asked}")
}

fn check_name(name: &str, place: usize) -> Result<(), Failure> {
    if name.is_empty() || name.len() > STEP_NAME_MAX || name.chars().any(char::is_control) {
        return Err(Failure::permanent(format!(
            "`{}` is no name of a step: it has 1 to {STEP_NAME_MAX} bytes and no control characters",
            name.escape_debug()
        )));
    }
    if place >= STEPS_MAX {
        return Err(Failure::permanent(format!("step `{name}` is one more than the {STEPS_MAX} that a task may have")));
    }
    Ok(())
}

fn check(context: &Context, name: &str, effect: Effect) -> Result<(), Failure> {
    if effect == Effect::Transactional {
        return Err(Failure::permanent(format!(
            "step `{name}` is transactional: run it with `step_in`, which records it in the transaction of its effect, or \
             where that is in another database than the ledger's with `beside`"
        )));
    }
    if context.held().phase() == Phase::Joined {
        return Err(Failure::permanent(format!(
            "step `{name}` cannot be recorded while a transaction holds the task's record: a task that runs in one \
             transaction has its effect there; tasks of several steps are run without"
        )));
    }
    let memory = context.held().policy().check_memory(effect, &**context.ledger().store());
    memory.map_err(|error| Failure::permanent(format!("step `{name}` cannot run: {error}")).nothing_happened())
}

/// Demands that a step's code may begin now.
pub(crate) fn check_time(context: &Context, name: &str) -> Result<(), Failure> {
    if context.may_start_effect() {
        return Ok(());
    }
    let late = format!("step `{name}` was not begun: what is left of the lease does not suffice");
    Err(Failure::retryable(late).nothing_happened())
}

async fn run_step<T, F>(
    context: &Context,
    place: usize,
    ask: &StepAsk,
    given: StepContext,
    run: impl FnOnce(StepContext) -> F + Send,
) -> Result<T, Failure>
where
    T: Serialize + DeserializeOwned + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    let once = ask.effect == Effect::Unrepeatable;
    if once {
        // Until it really begins, the end of the claim leaves the intent out, wherever this is cut off.
        context.held().did_not_begin(place);
        context.advance(|record| step::begin(record, place, ask)).await.map_err(Failure::nothing_happened)?;
    }
    check_time(context, &ask.name)?;
    context.held().begins();
    let host = context.ledger().host();
    let began = host.uptime();
    match context.steps().within(run(given)).await {
        Ok(value) => {
            let ran_for = host.uptime().saturating_sub(began);
            record_end(context, place, ask, &value, ran_for).await?;
            Ok(value)
        }
        Err(failure) if once && failure.aftermath == Aftermath::NothingHappened => {
            // Where that is not to be had, the end of the claim leaves the intent out.
            context.held().did_not_begin(place);
            let _undone = context.advance(|record| step::undo(record, place)).await;
            Err(failure)
        }
        Err(failure) if once => {
            let what = format!("step `{}` failed and must not be repeated: {}", ask.name, failure.message);
            Err(context.steps().stop(Failure::new(FailureClass::StepInDoubt, what)))
        }
        Err(failure) => Err(failure),
    }
}

async fn record_end<T: Serialize>(
    context: &Context,
    place: usize,
    ask: &StepAsk,
    value: &T,
    ran_for: Duration,
) -> Result<(), Failure> {
    let output = encode(value);
    if output == Output::Dropped(DropReason::NotEncodable) {
        return Err(Failure::permanent(format!("what step `{}` returned cannot be encoded", ask.name)));
    }
    let bytes = step::output_bytes(&context.held().record()) + output.len();
    if bytes > STEPS_BYTES_MAX {
        return Err(Failure::permanent(format!(
            "with what step `{}` returned, the steps have {bytes} bytes of output; {STEPS_BYTES_MAX} are kept",
            ask.name
        )));
    }
    context.advance(|record| step::end(record, place, ask, output.clone(), ran_for)).await.map(drop)
}

/// The value of a step that ended in a run before. A person who resolved it may have given none: then only a type that
/// has a value for nothing can be returned.
pub(crate) fn replay<T: DeserializeOwned>(context: &Context, name: &str, output: &Output) -> Result<T, Failure> {
    let other = |why: String| {
        let what = format!("what step `{name}` returned cannot be read: {why}");
        context.steps().stop(Failure::new(FailureClass::StepChanged, what))
    };
    match decode(context.key(), output) {
        Ok(Some(value)) => Ok(value),
        Ok(None) => rmp_serde::from_slice(NIL)
            .map_err(|_| other("it was resolved without an output, and the code needs one".into())),
        Err(error) => Err(other(error.to_string())),
    }
}

/// Nothing, in MessagePack.
const NIL: &[u8] = &[0xc0];
