//! The protocol, as pure functions: what was found and the policy in, next record and answer out. No I/O, no clock.
//!
//! **Invariant:** a final record (`Done`, `Dead`) changes here only by a person's redrive; [`extend`] renews its
//! retention and nothing else.

use std::sync::Arc;
use std::time::Duration;

use crate::key::Fingerprint;
use crate::policy::{Effect, Policy};
use crate::record::{
    Aftermath, ClaimId, DropReason, Event, EventKind, Failure, FailureClass, Fence, Found, Output, Record, State,
    Token, WallTime,
};
use crate::step::{self, Step, StepState};

/// A claim call: who asks, for what payload, under which policy.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Names this call.
    pub claim: ClaimId,
    /// Who asks.
    pub owner: &'a Arc<str>,
    /// The payload's digest.
    pub fingerprint: Fingerprint,
    /// How the task is treated.
    pub policy: &'a Policy,
}

/// What a write is stamped with.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// The token of the new version.
    pub token: Token,
    /// A label for people.
    pub at: WallTime,
}

/// What a claim leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimStep {
    /// Write this as a new claim; then the caller runs the task.
    Run(Record),
    /// The caller's own claim, recognised: write this with the fence it has; then the caller runs the task.
    Resume(Record),
    /// Write this end of the task (dead or parked); then answer it.
    End(Record),
    /// Write nothing.
    Answer(Answer),
}

/// What a claim is told when it does not run the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Done before: here is the output.
    Replay,
    /// Another claim holds.
    Busy,
    /// The delay before the next attempt has not passed.
    Waiting,
    /// Out of attempts, or failed for good.
    Dead,
    /// In doubt; waits for a person.
    Parked,
    /// The key is in use for another payload.
    Mismatch,
}

/// What a claim makes of what it finds.
#[must_use]
pub fn claim(found: Option<&Found>, ask: &Ask<'_>, stamp: Stamp) -> ClaimStep {
    let Some(found) = found else {
        return ClaimStep::Run(first(ask, stamp));
    };
    let record = &*found.record;
    if record.state == State::Running && record.claim == ask.claim {
        return ClaimStep::Resume(heartbeat(record, stamp.token, found.in_state_for()));
    }
    if record.fingerprint != ask.fingerprint {
        return ClaimStep::Answer(Answer::Mismatch);
    }
    match record.state {
        State::Done => ClaimStep::Answer(Answer::Replay),
        State::Dead => ClaimStep::Answer(Answer::Dead),
        State::Parked => ClaimStep::Answer(Answer::Parked),
        State::Waiting if !found.age.has_passed(record.delay) => ClaimStep::Answer(Answer::Waiting),
        State::Waiting if record.attempt >= ask.policy.attempts_max => {
            ClaimStep::End(end_without_attempts(record.clone(), stamp))
        }
        State::Waiting => ClaimStep::Run(again(record, ask, stamp)),
        State::Running if !found.age.has_passed(record.lease) => ClaimStep::Answer(Answer::Busy),
        State::Running => takeover(found, ask, stamp),
    }
}

/// The first claim of a task.
#[must_use]
pub fn first(ask: &Ask<'_>, stamp: Stamp) -> Record {
    let policy = ask.policy;
    Record {
        state: State::Running,
        token: stamp.token,
        fence: Fence(1),
        claim: ask.claim,
        owner: Arc::clone(ask.owner),
        attempt: 1,
        crashes: 0,
        effect: policy.effect,
        lease: policy.lease,
        delay: Duration::ZERO,
        retention: policy.retention,
        output_retention: policy.output_retention.min(policy.retention),
        state_age: Duration::ZERO,
        ran_for: Duration::ZERO,
        fingerprint: ask.fingerprint,
        output: Output::Nothing,
        failure: None,
        steps: Vec::new(),
        history: Vec::new(),
        history_dropped: 0,
    }
}

/// The next attempt on a record: counted now, so that a task that kills its process is counted.
fn again(record: &Record, ask: &Ask<'_>, stamp: Stamp) -> Record {
    Record {
        fence: raised(record.fence),
        attempt: record.attempt.saturating_add(1),
        crashes: record.crashes,
        failure: record.failure.clone(),
        steps: record.steps.clone(),
        history: record.history.clone(),
        history_dropped: record.history_dropped,
        ..first(ask, stamp)
    }
}

/// The lease of another claim has passed: it counts as a crash, and decides between the next attempt and the end.
fn takeover(found: &Found, ask: &Ask<'_>, stamp: Stamp) -> ClaimStep {
    let crashed = crashed(&found.record, stamp);
    let in_doubt = [crashed.effect, ask.policy.effect].contains(&Effect::Unrepeatable);
    if in_doubt || crashed.crashes >= ask.policy.crashes_max {
        ClaimStep::End(end(crashed, State::Parked, stamp))
    } else if crashed.attempt >= ask.policy.attempts_max {
        ClaimStep::End(end_without_attempts(crashed, stamp))
    } else {
        ClaimStep::Run(again(&crashed, ask, stamp))
    }
}

/// The record of a claim that ended by a passed lease: one crash more, and a line of history.
fn crashed(record: &Record, stamp: Stamp) -> Record {
    let mut crashed = Record { crashes: record.crashes.saturating_add(1), ..record.clone() };
    let failure = Failure::new(
        FailureClass::Crashed,
        format!("no heartbeat for the lease of {:?}: the process was killed, hung or cut off", record.lease),
    );
    note_failure(&mut crashed, &failure, stamp.at);
    crashed
}

fn note_failure(record: &mut Record, failure: &Failure, at: WallTime) {
    record.failure = Some(Failure { retry_after: None, ..failure.clone() });
    let event = Event {
        kind: EventKind::Failed(failure.class),
        at,
        who: record.owner.to_string(),
        attempt: record.attempt,
        note: failure.message.clone(),
    };
    record.remember(event);
}

fn end(record: Record, state: State, stamp: Stamp) -> Record {
    Record { state, token: stamp.token, delay: Duration::ZERO, state_age: Duration::ZERO, ..record }
}

fn end_without_attempts(record: Record, stamp: Stamp) -> Record {
    let state = without_attempts(&record.steps);
    end(record, state, stamp)
}

/// No attempt follows: dead, unless a step is in doubt. Then a person has to look.
fn without_attempts(steps: &[Step]) -> State {
    if step::is_in_doubt(steps) { State::Parked } else { State::Dead }
}

/// Whether this failure of a handler parks its task, however many attempts are left.
fn parks(effect: Effect, failure: &Failure) -> bool {
    failure.class.parks() || (effect == Effect::Unrepeatable && failure.aftermath == Aftermath::InDoubt)
}

/// An end that was decided, over the record that is there: the steps that were written meanwhile stay, and whether one of
/// them is in doubt is judged again.
#[must_use]
pub fn carry(end: &Record, found: &Record) -> Record {
    let steps = match end.state {
        State::Done => step::settled(&found.steps),
        State::Running | State::Waiting | State::Dead | State::Parked => found.steps.clone(),
    };
    let state = match end.state {
        State::Parked if end.failure.as_ref().is_some_and(|failure| parks(end.effect, failure)) => State::Parked,
        State::Dead | State::Parked => without_attempts(&steps),
        state @ (State::Running | State::Waiting | State::Done) => state,
    };
    Record { state, steps, ..end.clone() }
}

/// The holder's record with its lease begun again.
#[must_use]
pub fn heartbeat(held: &Record, token: Token, held_for: Duration) -> Record {
    Record { token, state_age: held_for, ..held.clone() }
}

/// The holder says that the task took effect.
#[must_use]
pub fn complete(held: &Record, output: Output, policy: &Policy, ran_for: Duration, stamp: Stamp) -> Record {
    let output = match output {
        Output::Kept { .. } if policy.output_max == 0 => Output::Dropped(DropReason::NotKept),
        Output::Kept { bytes, .. } if bytes.len() > policy.output_max => {
            Output::Dropped(DropReason::TooLarge { bytes: bytes.len() as u64 })
        }
        output @ (Output::Kept { .. } | Output::Nothing | Output::Dropped(_)) => output,
    };
    let steps = step::settled(&held.steps);
    Record { output, failure: None, steps, ran_for, ..end(held.clone(), State::Done, stamp) }
}

/// The holder's record as done, where its completion was written by another's hand: by plain SQL, which knows only the new
/// token and the output.
#[must_use]
pub fn completed_elsewhere(held: &Record, token: Token, output: Output) -> Record {
    let steps = step::settled(&held.steps);
    let stamp = Stamp { token, at: WallTime::default() };
    Record { output, failure: None, steps, ..end(held.clone(), State::Done, stamp) }
}

/// The holder says that the attempt failed. `random` draws the delay.
#[must_use]
pub fn fail(held: &Record, failure: &Failure, policy: &Policy, ran_for: Duration, random: u64, stamp: Stamp) -> Record {
    let mut failed = Record { ran_for, ..held.clone() };
    note_failure(&mut failed, failure, stamp.at);
    if parks(failed.effect, failure) {
        return end(failed, State::Parked, stamp);
    }
    if failed.attempt >= policy.attempts_max_of(failure.class) {
        return end_without_attempts(failed, stamp);
    }
    let delay = match failure.retry_after {
        Some(delay) => delay.min(policy.retention),
        None => policy.backoff.delay(failed.attempt, random),
    };
    Record { delay, ..end(failed, State::Waiting, stamp) }
}

/// The holder gives the claim back before its handler was entered: the attempt does not count.
#[must_use]
pub fn release(held: &Record, stamp: Stamp) -> Record {
    let attempt = held.attempt.saturating_sub(1);
    Record { attempt, ..end(held.clone(), State::Waiting, stamp) }
}

/// A final record with its retention begun again, when less than half of it is left: a duplicate still arrives.
#[must_use]
pub fn extend(found: &Found, token: Token) -> Option<Record> {
    let record = &*found.record;
    let due = record.state.is_final() && found.age.as_duration() > record.retention / 2;
    due.then(|| Record { token, state_age: found.in_state_for(), ..record.clone() })
}

/// Who changes a record by hand, and why; both are kept in its history.
#[derive(Clone, Copy, Debug)]
pub struct By<'a> {
    /// The person.
    pub who: &'a str,
    /// The reason.
    pub why: &'a str,
}

impl By<'_> {
    fn event(&self, kind: EventKind, record: &Record, at: WallTime) -> Event {
        Event { kind, at, who: self.who.to_owned(), attempt: record.attempt, note: self.why.to_owned() }
    }
}

/// A person returns a dead or parked task to work: the counters begin again, the history stays, the fence moves.
///
/// So can a waiting task, which then need not wait for its delay any more, and a running one whose lease has passed:
/// that is a crash, kept in the history. An unrepeatable effect is parked by it, as by a takeover; what became of it must
/// be resolved first. `None`: this state cannot.
#[must_use]
pub fn redrive(found: &Found, by: By<'_>, stamp: Stamp) -> Option<Record> {
    let mut record = (*found.record).clone();
    match record.state {
        State::Dead | State::Parked | State::Waiting => {}
        State::Running if found.age.has_passed(record.lease) => {
            record = crashed(&record, stamp);
            if record.effect == Effect::Unrepeatable {
                return Some(end(record, State::Parked, stamp));
            }
        }
        State::Running | State::Done => return None,
    }
    record.remember(by.event(EventKind::Redriven, &record, stamp.at));
    Some(fresh_counters(record, stamp))
}

/// A person says of a parked task that it was done, and maybe what it returned.
#[must_use]
pub fn resolve_done(found: &Found, by: By<'_>, output: Option<Output>, stamp: Stamp) -> Option<Record> {
    let mut record = parked(found)?;
    record.remember(by.event(EventKind::ResolvedDone, &record, stamp.at));
    let fence = raised(record.fence);
    let output = output.unwrap_or(Output::Dropped(DropReason::Resolved));
    let steps = step::settled(&record.steps);
    Some(Record { output, failure: None, fence, steps, ..end(record, State::Done, stamp) })
}

/// A person says of a parked task that it had no effect: it returns to work with its counters begun again. What is said
/// is said of the step that is in doubt, where there is one: steps that ended stay ended.
#[must_use]
pub fn resolve_not_done(found: &Found, by: By<'_>, stamp: Stamp) -> Option<Record> {
    let mut record = parked(found)?;
    record.remember(by.event(EventKind::ResolvedNotDone, &record, stamp.at));
    record.steps.retain(|step| step.state == StepState::Done);
    Some(fresh_counters(record, stamp))
}

/// A person says of the step in doubt of a parked task that it took effect, and maybe what it returned: the task returns to
/// work and goes on behind that step. With a name nothing is said of a step that has another.
#[must_use]
pub fn resolve_step_done(
    found: &Found,
    by: By<'_>,
    name: Option<&str>,
    output: Option<Output>,
    stamp: Stamp,
) -> Option<Record> {
    let mut record = parked(found)?;
    let event = by.event(EventKind::ResolvedDone, &record, stamp.at);
    let step = record.steps.last_mut().filter(|step| step.state == StepState::Begun)?;
    if name.is_some_and(|name| name != step.name) {
        return None;
    }
    step.state = StepState::Done;
    step.output = output.unwrap_or(Output::Nothing);
    let note = format!("step `{}`: {}", step.name, event.note);
    record.remember(Event { note, ..event });
    Some(fresh_counters(record, stamp))
}

fn parked(found: &Found) -> Option<Record> {
    match found.record.state {
        State::Parked => Some((*found.record).clone()),
        State::Running | State::Waiting | State::Done | State::Dead => None,
    }
}

fn fresh_counters(record: Record, stamp: Stamp) -> Record {
    let fence = raised(record.fence);
    Record { attempt: 0, crashes: 0, fence, ..end(record, State::Waiting, stamp) }
}

/// The next fence, where the store has no sequence of its own.
fn raised(fence: Fence) -> Fence {
    Fence(fence.0.saturating_add(1))
}
