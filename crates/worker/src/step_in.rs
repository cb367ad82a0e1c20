//! A step that is recorded in the transaction of its effect, as far as it is the same for every driver.
//!
//! The driver locks the record in the transaction, asks [`StepIn::turn`] what is to be done, and writes what
//! [`StepIn::end`] returns.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::Error;
use taskonce_core::decide;
use taskonce_core::held::Phase;
use taskonce_core::json::{Fields, Input};
use taskonce_core::key::Fingerprint;
use taskonce_core::policy::Effect;
use taskonce_core::record::{DropReason, Failure, FailureClass, Output, Record, Token};
use taskonce_core::step::{self, STEPS_BYTES_MAX, StepAsk, StepTurn};
use tokio::sync::MutexGuard;

use crate::outcome::encode;
use crate::run::Context;
use crate::steps::{Probe, Progress, StepContext, StepOf, in_doubt, replay};

/// A step under way, whose transaction is open. For drivers; users call the `step_in` of theirs.
///
/// It counts as ended once [`ended`](StepIn::ended) says that it is written. Whether its transaction commits is seen before
/// the next step, and when the handler has returned: where it did not, the attempt fails.
#[must_use = "a step that is dropped has not ended"]
pub struct StepIn<'a> {
    context: &'a Context,
    progress: MutexGuard<'a, Progress>,
    ask: StepAsk,
    began: Duration,
}

/// What a step is to do.
#[derive(Debug)]
pub enum Turn<T> {
    /// Run, in the transaction.
    Run(StepContext),
    /// Nothing: a run before has ended it with this value.
    Replay(T),
}

impl Context {
    /// Begins a step whose record a driver writes into the transaction of its effect.
    ///
    /// # Errors
    /// Why there can be no such step, to be returned by the handler: its name, another that is under way, a task that
    /// stops for a person, a handler that is one transaction anyway.
    pub fn begin_step_in(&self, name: &str) -> Result<StepIn<'_>, Failure> {
        let progress = self.steps().begin(name)?;
        if self.held().phase() == Phase::Joined {
            return Err(Failure::permanent(format!(
                "step `{name}` is asked for in a handler that is one transaction as a whole: steps are for handlers of several"
            )));
        }
        let ask = StepAsk { name: name.to_owned(), effect: Effect::Transactional, input: Fingerprint([0; 16]) };
        Ok(StepIn { context: self, progress, ask, began: self.ledger().host().uptime() })
    }
}

impl<'a> StepOf<'a> {
    /// Begins the step in a transaction that the driver has begun for it. Where that was rolled back, the same step may be
    /// begun again.
    ///
    /// # Errors
    /// As for [`Context::begin_step_in`]; its kind, its input.
    pub fn begin_in(&self) -> Result<StepIn<'a>, Failure> {
        check_kind(self.name, self.effect)?;
        let step = self.context.begin_step_in(self.name)?;
        let ask = StepAsk { input: self.input.clone()?, ..step.ask.clone() };
        Ok(StepIn { ask, ..step })
    }

    /// What the task's handler was given.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }
}

/// What runs in a transaction that has its record or its row is transactional.
pub(crate) fn check_kind(name: &str, effect: Effect) -> Result<(), Failure> {
    if effect == Effect::Transactional {
        return Ok(());
    }
    let effect = effect.name();
    Err(Failure::permanent(format!(
        "step `{name}` is {effect}: what runs in a transaction of its own is transactional"
    )))
}

impl<'a> StepIn<'a> {
    /// What the step works on. A later run with another input does not get its value, but parks the task.
    ///
    /// # Errors
    /// The input has no canonical form.
    pub fn input(mut self, input: &impl Serialize) -> Result<StepIn<'a>, Failure> {
        let digest = Input::from_value(input).and_then(|input| input.fingerprint(&Fields::all()));
        self.ask.input = digest.map_err(|error| {
            Failure::permanent(format!("the input of step `{}` has no canonical form: {error}", self.ask.name))
        })?;
        Ok(self)
    }

    /// What is to be done, as the record says that the transaction has locked.
    ///
    /// # Errors
    /// The claim is lost; the step before was rolled back; or the task stops for a person.
    pub fn turn<T: DeserializeOwned>(&self, found: Option<&Record>) -> Result<Turn<T>, Failure> {
        let (place, held) = (self.progress.ended, self.context.held());
        if let Err(error) = held.check_found(found) {
            held.lose();
            return Err(lost(&error));
        }
        let Some(found) = found else { return Err(Failure::retryable("the claim is lost: the record is gone")) };
        if found.steps.len() < place {
            let what =
                format!("step {} of this run is not recorded: its transaction did not commit", found.steps.len() + 1);
            return Err(Failure::retryable(what));
        }
        let name = &self.ask.name;
        match step::turn(found, place, &self.ask) {
            StepTurn::Run => Ok(Turn::Run(StepContext::of(self.context, name))),
            StepTurn::Replay(output) => replay(self.context, name, &output).map(Turn::Replay),
            StepTurn::Changed(what) => Err(self.stop(FailureClass::StepChanged, what)),
            StepTurn::InDoubt => Err(self.stop(FailureClass::StepInDoubt, in_doubt(name, Probe::No))),
        }
    }

    fn stop(&self, class: FailureClass, what: String) -> Failure {
        self.context.steps().stop(Failure::new(class, what))
    }

    /// The record in which the step has ended with this value: to be written in the place of `found`.
    ///
    /// # Errors
    /// The value cannot be kept: the transaction is to be rolled back.
    pub fn end<T: Serialize>(&self, found: &Record, value: &T) -> Result<Record, Failure> {
        let name = &self.ask.name;
        let output = encode(value);
        if output == Output::Dropped(DropReason::NotEncodable) {
            return Err(Failure::permanent(format!("what step `{name}` returned cannot be encoded")));
        }
        let bytes = step::output_bytes(found) + output.len();
        if bytes > STEPS_BYTES_MAX {
            return Err(Failure::permanent(format!(
                "with what step `{name}` returned, the steps have {bytes} bytes of output; {STEPS_BYTES_MAX} are kept"
            )));
        }
        let host = self.context.ledger().host();
        let now = host.uptime();
        let ended = step::end(found, self.progress.ended, &self.ask, output, now.saturating_sub(self.began));
        let held_for = now.saturating_sub(self.context.held().started());
        Ok(decide::heartbeat(&ended, Token::from(host.random()), held_for))
    }

    /// The end is written into the transaction, or was recorded by a run before.
    pub fn ended(mut self) {
        self.progress.end();
    }
}

fn lost(error: &Error) -> Failure {
    Failure::retryable(error.to_string()).nothing_happened()
}
