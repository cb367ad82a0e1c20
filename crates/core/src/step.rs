//! The steps of a task that changes several resources: what is kept of each in the task's record, and what a later run
//! makes of it.
//!
//! Steps run one after the other. What ended is replayed, so that a second run is short; what cannot be replayed safely
//! parks the task. Pure functions; the running of steps is in the worker crate.

use std::time::Duration;

use crate::key::Fingerprint;
use crate::policy::Effect;
use crate::record::{DropReason, Failure, FailureClass, Output, Record};

/// The most steps of a task.
pub const STEPS_MAX: usize = 64;
/// The longest name of a step, in bytes.
pub const STEP_NAME_MAX: usize = 128;
/// The most bytes that the outputs of a task's steps have together. They are written again with each heartbeat.
pub const STEPS_BYTES_MAX: usize = 1024 * 1024;

/// One step, as the record keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name, given by the code.
    pub name: String,
    /// What kind of effect it has.
    pub effect: Effect,
    /// The digest of its input.
    pub input: Fingerprint,
    /// Whether it ended.
    pub state: StepState,
    /// The attempt of the task that ran it last.
    pub attempt: u32,
    /// How long it took, on its worker's own clock; zero while it has not ended.
    pub ran_for: Duration,
    /// What it returned. Once the task is done nobody needs it any more, and it goes.
    pub output: Output,
}

/// Where a recorded step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepState {
    /// It was to begin. Whether it had its effect is not known. Only unrepeatable steps are recorded so.
    Begun,
    /// It took effect.
    Done,
}

impl StepState {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StepState::Begun => "begun",
            StepState::Done => "done",
        }
    }
}

/// A step as the code asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepAsk {
    /// Its name.
    pub name: String,
    /// What kind of effect it has.
    pub effect: Effect,
    /// The digest of its input.
    pub input: Fingerprint,
}

/// What the row of a step says, that stands beside its effect in another database than the ledger's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// The digest of the input.
    pub input: Vec<u8>,
    /// In which encoding the step's output is, and its bytes.
    pub output: Option<(String, Vec<u8>)>,
    /// The attempt of the task that ran it.
    pub attempt: u32,
}

/// What a step is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepTurn {
    /// It never ran to its end: run it.
    Run,
    /// It ended before: here is what it returned.
    Replay(Output),
    /// It was to begin and never ended, and must not be repeated: ask whether it happened, or park the task.
    InDoubt,
    /// Another step, or one with another input, is recorded in its place: the code changed under the task. Both are named.
    Changed(String),
}

/// What the step in this place, counted from 0, is to do.
#[must_use]
pub fn turn(record: &Record, place: usize, ask: &StepAsk) -> StepTurn {
    let Some(step) = record.steps.get(place) else {
        return match record.steps.iter().position(|step| step.name == ask.name) {
            None => StepTurn::Run,
            Some(other) => {
                StepTurn::Changed(format!("step {} is named `{}` like step {}", place + 1, ask.name, other + 1))
            }
        };
    };
    if (&step.name, step.effect, step.input) != (&ask.name, ask.effect, ask.input) {
        return StepTurn::Changed(format!(
            "the code changed under the task: step {} was `{}` ({}, input {}), the code now asks for `{}` ({}, input {})",
            place + 1,
            step.name,
            step.effect.name(),
            step.input,
            ask.name,
            ask.effect.name(),
            ask.input
        ));
    }
    match step.state {
        StepState::Done => StepTurn::Replay(step.output.clone()),
        StepState::Begun => StepTurn::InDoubt,
    }
}

/// Why a task cannot end where the code has ended after `count` of its recorded steps: the code asks for fewer than it did,
/// or has given up one whose outcome is not known.
#[must_use]
pub fn left_over(record: &Record, count: usize) -> Option<Failure> {
    let step = record.steps.get(count)?;
    Some(match step.state {
        StepState::Begun => Failure::new(
            FailureClass::StepInDoubt,
            format!("step `{}` began and must not be repeated; the code has ended without its outcome", step.name),
        ),
        StepState::Done => Failure::new(
            FailureClass::StepChanged,
            format!(
                "the code changed under the task: step {} was `{}` ({}, input {}), the code now ends after {count} steps",
                count + 1,
                step.name,
                step.effect.name(),
                step.input
            ),
        ),
    })
}

/// Whether one of them began, and nobody knows whether it took effect.
#[must_use]
pub fn is_in_doubt(steps: &[Step]) -> bool {
    steps.iter().any(|step| step.state == StepState::Begun)
}

/// The record in which this step is to begin: to be stored before an unrepeatable one runs.
#[must_use]
pub fn begin(record: &Record, place: usize, ask: &StepAsk) -> Record {
    with(record, place, ask, StepState::Begun, record.attempt, Duration::ZERO, Output::Nothing)
}

/// The record in which this step has ended.
#[must_use]
pub fn end(record: &Record, place: usize, ask: &StepAsk, output: Output, ran_for: Duration) -> Record {
    with(record, place, ask, StepState::Done, record.attempt, ran_for, output)
}

/// The record in which this step has ended as its row says: in an attempt before, whose worker did not come to record it.
#[must_use]
pub fn found(record: &Record, place: usize, ask: &StepAsk, output: Output, attempt: u32) -> Record {
    with(record, place, ask, StepState::Done, attempt, Duration::ZERO, output)
}

/// The record without the intent of this step: it says that nothing happened.
#[must_use]
pub fn undo(record: &Record, place: usize) -> Record {
    let mut undone = record.clone();
    if undone.steps.get(place).is_some_and(|step| step.state == StepState::Begun) {
        undone.steps.truncate(place);
    }
    undone
}

fn with(
    record: &Record,
    place: usize,
    ask: &StepAsk,
    state: StepState,
    attempt: u32,
    ran_for: Duration,
    output: Output,
) -> Record {
    let mut next = record.clone();
    let step = Step { name: ask.name.clone(), effect: ask.effect, input: ask.input, state, attempt, ran_for, output };
    match next.steps.get_mut(place) {
        // Written before, by a sending whose answer was lost.
        Some(there) => *there = step,
        None => next.steps.push(step),
    }
    next
}

/// How many bytes the outputs of the recorded steps have together.
#[must_use]
pub fn output_bytes(record: &Record) -> usize {
    record.steps.iter().map(|step| step.output.len()).sum()
}

/// The steps of a task that is done: what each returned is not needed any more.
#[must_use]
pub fn settled(steps: &[Step]) -> Vec<Step> {
    let stripped = |step: &Step| Step {
        output: match &step.output {
            Output::Kept { .. } => Output::Dropped(DropReason::NotKept),
            other @ (Output::Nothing | Output::Dropped(_)) => other.clone(),
        },
        ..step.clone()
    };
    steps.iter().map(stripped).collect()
}
