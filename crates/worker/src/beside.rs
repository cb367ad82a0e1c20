//! A step whose effect lives in another database than the ledger's, as far as it is the same for every driver: the step has a
//! row there, written in the transaction of its effect, and the row decides.
//!
//! The driver inserts the row first of all in its transaction, and does nothing on conflict. [`StepBeside`] says what
//! follows from that, and repeats in the task's record what the row says.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::held::Phase;
use taskonce_core::record::{DropReason, Failure, FailureClass, Output};
use taskonce_core::step::{self, STEPS_BYTES_MAX, StepAsk, StepRow, StepTurn};
use tokio::sync::MutexGuard;

use crate::outcome::encode;
use crate::run::Context;
use crate::step_in::check_kind;
use crate::steps::{Probe, Progress, StepContext, StepOf, check_time, in_doubt, replay};

/// A step whose row is to be asked for. For drivers; users call the `beside` of theirs.
#[must_use = "a step that is dropped has not ended"]
pub struct StepBeside<'a> {
    context: &'a Context,
    progress: MutexGuard<'a, Progress>,
    ask: StepAsk,
    began: Duration,
}

/// What a step is to do.
pub enum Turn<'a, T> {
    /// Look for its row.
    Ask(StepBeside<'a>),
    /// Nothing: the task's record has this value of it already.
    Replay(T),
}

impl<'a> StepOf<'a> {
    /// Begins a step whose row a driver writes into the transaction of its effect.
    ///
    /// # Errors
    /// Why there can be no such step, to be returned by the handler: its name, its kind, a task that stops for a person, a
    /// handler that is one transaction anyway.
    pub async fn begin_beside<T: DeserializeOwned>(self) -> Result<Turn<'a, T>, Failure> {
        let StepOf { context, name, effect, input } = self;
        let steps = context.steps();
        let mut progress = steps.begin_behind(name).await?;
        check_kind(name, effect)?;
        let held = context.held();
        if held.phase() == Phase::Joined {
            return Err(Failure::permanent(format!(
                "step `{name}` is asked for in a handler that is one transaction as a whole: steps are for handlers of several"
            )));
        }
        let place = progress.ended;
        if held.record().steps.len() < place {
            context.refresh(place).await?;
        }
        let ask = StepAsk { name: name.to_owned(), effect, input: input? };
        match step::turn(&held.record(), place, &ask) {
            StepTurn::Replay(output) => {
                let value = replay(context, name, &output)?;
                progress.end();
                return Ok(Turn::Replay(value));
            }
            StepTurn::Changed(what) => return Err(steps.stop(Failure::new(FailureClass::StepChanged, what))),
            StepTurn::InDoubt => {
                return Err(steps.stop(Failure::new(FailureClass::StepInDoubt, in_doubt(name, Probe::No))));
            }
            StepTurn::Run => {}
        }
        held.begins();
        Ok(Turn::Ask(StepBeside { context, progress, ask, began: context.ledger().host().uptime() }))
    }
}

impl StepBeside<'_> {
    /// The task that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.context
    }

    /// Its name, which is a part of the row's key.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.ask.name
    }

    /// The digest of its input, for the row.
    #[must_use]
    pub fn input(&self) -> &[u8] {
        &self.ask.input.0
    }

    /// The attempt of the task, for the row.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.context.attempt()
    }

    /// The row is inserted: what the step's code is given. Until here it may have waited for another run's transaction, and for a
    /// connection.
    ///
    /// # Errors
    /// What is left of the lease does not suffice: the transaction is to be rolled back.
    pub fn given(&self) -> Result<StepContext, Failure> {
        check_time(self.context, self.name())?;
        Ok(StepContext::of(self.context, self.name()))
    }

    /// Runs its code: a step that is asked for within is an error.
    pub async fn within<F: Future>(&self, code: F) -> F::Output {
        self.context.steps().within(code).await
    }

    /// The same for code that blocks.
    pub fn within_blocking<T>(&self, code: impl FnOnce() -> T) -> T {
        self.context.steps().within_blocking(code)
    }

    /// What the row has to hold of the value.
    ///
    /// # Errors
    /// The value cannot be kept: the transaction is to be rolled back.
    pub fn output<T: Serialize>(&self, value: &T) -> Result<Output, Failure> {
        let output = encode(value);
        if output == Output::Dropped(DropReason::NotEncodable) {
            return Err(Failure::permanent(format!("what step `{}` returned cannot be encoded", self.name())));
        }
        self.check_room(&output)?;
        Ok(output)
    }

    fn check_room(&self, output: &Output) -> Result<(), Failure> {
        let bytes = step::output_bytes(&self.context.held().record()) + output.len();
        if bytes > STEPS_BYTES_MAX {
            return Err(Failure::permanent(format!(
                "with what step `{}` returned, the steps have {bytes} bytes of output; {STEPS_BYTES_MAX} are kept",
                self.name()
            )));
        }
        Ok(())
    }

    /// The transaction has committed: the task's record gets what the row says.
    ///
    /// # Errors
    /// The claim is lost, or the store is away. The row stands, so that the next run of the step replays it.
    pub async fn committed(mut self, output: Output) -> Result<(), Failure> {
        let ran_for = self.context.ledger().host().uptime().saturating_sub(self.began);
        let (place, ask) = (self.progress.ended, &self.ask);
        self.context.advance(|record| step::end(record, place, ask, output.clone(), ran_for)).await?;
        self.progress.end();
        Ok(())
    }

    /// The row was there: its output is the step's value, and the task's record gets it.
    ///
    /// # Errors
    /// The row is of another input, or has no value that the code can read: the task is parked. Or the record could not
    /// be written.
    pub async fn found<T: DeserializeOwned>(mut self, row: StepRow) -> Result<T, Failure> {
        let name = self.name();
        if row.input != self.ask.input.0 {
            let there: String = row.input.iter().map(|byte| format!("{byte:02x}")).collect();
            let what = format!(
                "the code changed under the task: step `{name}` took effect with input {there}, as its row says, the code \
                 now asks with input {}",
                self.ask.input
            );
            return Err(self.context.steps().stop(Failure::new(FailureClass::StepChanged, what)));
        }
        let output = match row.output {
            Some((content_type, bytes)) => Output::kept(content_type, bytes),
            None => Output::Nothing,
        };
        let value = replay(self.context, name, &output)?;
        self.check_room(&output)?;
        let (place, ask) = (self.progress.ended, &self.ask);
        self.context.advance(|record| step::found(record, place, ask, output.clone(), row.attempt)).await?;
        self.progress.end();
        Ok(value)
    }
}
