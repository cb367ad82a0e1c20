//! A record as bytes: versioned, compact, and checked.
//!
//! ```text
//! byte 0        format version
//! byte 1        state
//! bytes 2..18   token            (stores compare it here)
//! bytes 18..34  claim id
//! bytes 34..50  fingerprint
//! then          numbers as LEB128 (durations in milliseconds), texts and bytes with their length before them
//! last 4        CRC-32 (IEEE) of all before, little endian
//! ```
//!
//! Version 2 has steps behind the history. A record that has no use for what is new is written in version 1, so that
//! workers of the version before can read it.
//!
//! Version, state, token and checksum keep their place in every version. So a record of a newer version is told from bytes
//! that are no record at all: the one waits for a newer program, the other for a person.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{Fingerprint, Key};
use crate::policy::Effect;
use crate::record::{
    Aftermath, ClaimId, DropReason, Event, EventKind, Failure, FailureClass, Fence, Output, Record, State, Token,
    WallTime, millis,
};
use crate::step::{Step, StepState};

/// The newest version. This code reads all up to it, and writes the oldest that has room for the record.
pub const FORMAT: u8 = 2;
/// The version before there were steps.
const FORMAT_PLAIN: u8 = 1;

/// Where the token lies, in every version.
pub const TOKEN_BYTES: std::ops::Range<usize> = 2..18;

/// How much of a record [`glance`] reads.
pub const GLANCE_BYTES: std::ops::Range<usize> = 0..34;

/// The record as bytes.
#[must_use]
pub fn encode(record: &Record) -> Vec<u8> {
    let mut out = Vec::with_capacity(112 + record.owner.len() + record.output.len());
    let format = format_of(record);
    out.push(format);
    out.push(state_code(record.state));
    out.extend_from_slice(&record.token.0);
    out.extend_from_slice(&record.claim.0);
    out.extend_from_slice(&record.fingerprint.0);
    put(&mut out, record.fence.0);
    put(&mut out, u64::from(record.attempt));
    put(&mut out, u64::from(record.crashes));
    out.push(effect_code(record.effect));
    for duration in
        [record.lease, record.delay, record.retention, record.output_retention, record.state_age, record.ran_for]
    {
        put(&mut out, millis(duration));
    }
    put_bytes(&mut out, record.owner.as_bytes());
    put_output(&mut out, &record.output);
    match &record.failure {
        None => out.push(0),
        Some(failure) => {
            out.push(1 + class_code(failure.class));
            out.push(match failure.aftermath {
                Aftermath::InDoubt => 0,
                Aftermath::NothingHappened => 1,
            });
            put_bytes(&mut out, failure.message.as_bytes());
        }
    }
    put(&mut out, u64::from(record.history_dropped));
    put(&mut out, record.history.len() as u64);
    for event in &record.history {
        out.push(event_code(event.kind));
        put(&mut out, event.at.0);
        put_bytes(&mut out, event.who.as_bytes());
        put(&mut out, u64::from(event.attempt));
        put_bytes(&mut out, event.note.as_bytes());
    }
    if format > FORMAT_PLAIN {
        put(&mut out, record.steps.len() as u64);
        for step in &record.steps {
            put_step(&mut out, step);
        }
    }
    let sum = crc32fast::hash(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// The oldest version that has room for the record.
fn format_of(record: &Record) -> u8 {
    let of_steps = |kind: EventKind| match kind {
        EventKind::Failed(class) => class.parks(),
        EventKind::Redriven | EventKind::ResolvedDone | EventKind::ResolvedNotDone | EventKind::Cleared => false,
    };
    let is_plain = record.steps.is_empty()
        && !record.failure.as_ref().is_some_and(|failure| failure.class.parks())
        && !record.history.iter().any(|event| of_steps(event.kind));
    if is_plain { FORMAT_PLAIN } else { FORMAT }
}

/// The token of an encoded record, without reading the rest.
#[must_use]
pub fn token_of(bytes: &[u8]) -> Option<Token> {
    bytes.get(TOKEN_BYTES)?.try_into().ok().map(Token)
}

/// State, token and claim at the head of an encoded record, for those who wait for it to change; `None` where the head is
/// none of this version. Nothing is checked: what a glance says decides when to look, never what is so.
#[must_use]
pub fn glance(bytes: &[u8]) -> Option<(State, Token, ClaimId)> {
    let mut input = Reader { rest: bytes.get(GLANCE_BYTES)? };
    if !(FORMAT_PLAIN..=FORMAT).contains(&input.byte().ok()?) {
        return None;
    }
    Some((state_of(input.byte().ok()?).ok()?, Token(input.array().ok()?), ClaimId(input.array().ok()?)))
}

/// Reads a record.
///
/// # Errors
/// [`ErrorKind::NewerFormat`] for a record of a newer version, [`ErrorKind::Corrupt`] for anything else that is not a
/// whole record. Both name the key.
pub fn decode(key: &Key, bytes: &[u8]) -> Result<Record> {
    decode_bytes(bytes).map_err(|fault| match fault {
        Fault::Newer(version) => Error::new(
            ErrorKind::NewerFormat,
            format!("the record has format {version}, this program reads up to {FORMAT}"),
        )
        .about(format!("task `{key}`")),
        Fault::Broken(what) => {
            Error::new(ErrorKind::Corrupt, format!("{} bytes under this key are not a record: {what}", bytes.len()))
                .about(format!("task `{key}`"))
        }
    })
}

/// Whether these bytes are no record, not even one of a newer format.
#[must_use]
pub fn is_damaged(key: &Key, bytes: &[u8]) -> bool {
    decode(key, bytes).is_err_and(|error| error.kind() == ErrorKind::Corrupt)
}

enum Fault {
    Newer(u8),
    Broken(&'static str),
}

fn decode_bytes(bytes: &[u8]) -> Result<Record, Fault> {
    match bytes.first() {
        None => return Err(Fault::Broken("it is empty")),
        Some(0) => return Err(Fault::Broken("its format is 0")),
        Some(_) => {}
    }
    let (body, sum) = bytes.split_last_chunk::<4>().ok_or(Fault::Broken("it is too short"))?;
    if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
        return Err(Fault::Broken("its checksum is wrong"));
    }
    match body.first() {
        Some(&version) if version > FORMAT => return Err(Fault::Newer(version)),
        Some(_) => {}
        None => return Err(Fault::Broken("it is too short")),
    }
    let (format, rest) = body.split_first().ok_or(Fault::Broken("it is too short"))?;
    let mut input = Reader { rest };
    let state = state_of(input.byte()?)?;
    let token = Token(input.array()?);
    let claim = ClaimId(input.array()?);
    let fingerprint = Fingerprint(input.array()?);
    let fence = Fence(input.number()?);
    let attempt = input.count()?;
    let crashes = input.count()?;
    let effect = effect_of(input.byte()?)?;
    let lease = input.duration()?;
    let delay = input.duration()?;
    let retention = input.duration()?;
    let output_retention = input.duration()?;
    let state_age = input.duration()?;
    let ran_for = input.duration()?;
    let owner: Arc<str> = input.text()?.into();
    let output = input.output()?;
    let failure = match input.byte()? {
        0 => None,
        code => Some(Failure {
            class: class_of(code - 1)?,
            aftermath: match input.byte()? {
                0 => Aftermath::InDoubt,
                1 => Aftermath::NothingHappened,
                _ => return Err(Fault::Broken("its aftermath is unknown")),
            },
            message: input.text()?.to_owned(),
            retry_after: None,
        }),
    };
    let history_dropped = input.count()?;
    let lines = input.count()?;
    let mut history = Vec::new();
    for _ in 0..lines {
        history.push(Event {
            kind: event_of(input.byte()?)?,
            at: WallTime(input.number()?),
            who: input.text()?.to_owned(),
            attempt: input.count()?,
            note: input.text()?.to_owned(),
        });
    }
    let mut steps = Vec::new();
    if *format > FORMAT_PLAIN {
        for _ in 0..input.count()? {
            steps.push(input.step()?);
        }
    }
    if !input.rest.is_empty() {
        return Err(Fault::Broken("bytes follow its end"));
    }
    Ok(Record {
        state,
        token,
        fence,
        claim,
        owner,
        attempt,
        crashes,
        effect,
        lease,
        delay,
        retention,
        output_retention,
        state_age,
        ran_for,
        fingerprint,
        output,
        failure,
        steps,
        history,
        history_dropped,
    })
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_output(out: &mut Vec<u8>, output: &Output) {
    match output {
        Output::Nothing => out.push(0),
        Output::Kept { content_type, bytes } => {
            out.push(1);
            put_bytes(out, content_type.as_bytes());
            put_bytes(out, bytes);
        }
        Output::Dropped(DropReason::TooLarge { bytes }) => {
            out.push(2);
            put(out, *bytes);
        }
        Output::Dropped(DropReason::NotEncodable) => out.push(3),
        Output::Dropped(DropReason::Expired) => out.push(4),
        Output::Dropped(DropReason::NotKept) => out.push(5),
        Output::Dropped(DropReason::Resolved) => out.push(6),
    }
}

fn put_step(out: &mut Vec<u8>, step: &Step) {
    put_bytes(out, step.name.as_bytes());
    out.push(effect_code(step.effect));
    out.extend_from_slice(&step.input.0);
    out.push(match step.state {
        StepState::Begun => 1,
        StepState::Done => 2,
    });
    put(out, u64::from(step.attempt));
    put(out, millis(step.ran_for));
    put_output(out, &step.output);
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Fault> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Fault::Broken("it ends early"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        Ok(self.take(1)?[0])
    }

    fn array(&mut self) -> Result<[u8; 16], Fault> {
        self.take(16)?.try_into().map_err(|_| Fault::Broken("it ends early"))
    }

    fn number(&mut self) -> Result<u64, Fault> {
        let mut number: u64 = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Fault::Broken("a number in it is too long"))
    }

    fn count(&mut self) -> Result<u32, Fault> {
        u32::try_from(self.number()?).map_err(|_| Fault::Broken("a count in it is too large"))
    }

    fn duration(&mut self) -> Result<Duration, Fault> {
        Ok(Duration::from_millis(self.number()?))
    }

    fn bytes(&mut self) -> Result<&'a [u8], Fault> {
        let length = usize::try_from(self.number()?).map_err(|_| Fault::Broken("a length in it is too large"))?;
        self.take(length)
    }

    fn text(&mut self) -> Result<&'a str, Fault> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Fault::Broken("a text in it is not UTF-8"))
    }

    fn step(&mut self) -> Result<Step, Fault> {
        Ok(Step {
            name: self.text()?.to_owned(),
            effect: effect_of(self.byte()?)?,
            input: Fingerprint(self.array()?),
            state: match self.byte()? {
                1 => StepState::Begun,
                2 => StepState::Done,
                _ => return Err(Fault::Broken("the state of a step in it is unknown")),
            },
            attempt: self.count()?,
            ran_for: self.duration()?,
            output: self.output()?,
        })
    }

    fn output(&mut self) -> Result<Output, Fault> {
        Ok(match self.byte()? {
            0 => Output::Nothing,
            1 => Output::kept(self.text()?, self.bytes()?),
            2 => Output::Dropped(DropReason::TooLarge { bytes: self.number()? }),
            3 => Output::Dropped(DropReason::NotEncodable),
            4 => Output::Dropped(DropReason::Expired),
            5 => Output::Dropped(DropReason::NotKept),
            6 => Output::Dropped(DropReason::Resolved),
            _ => return Err(Fault::Broken("its output is of an unknown kind")),
        })
    }
}

fn state_code(state: State) -> u8 {
    match state {
        State::Running => 1,
        State::Waiting => 2,
        State::Done => 3,
        State::Dead => 4,
        State::Parked => 5,
    }
}

fn state_of(code: u8) -> Result<State, Fault> {
    State::ALL.into_iter().find(|state| state_code(*state) == code).ok_or(Fault::Broken("its state is unknown"))
}

fn effect_code(effect: Effect) -> u8 {
    match effect {
        Effect::Transactional => 1,
        Effect::Keyed => 2,
        Effect::Fenced => 3,
        Effect::Unrepeatable => 4,
        Effect::Repeatable => 5,
    }
}

fn effect_of(code: u8) -> Result<Effect, Fault> {
    Effect::ALL.into_iter().find(|effect| effect_code(*effect) == code).ok_or(Fault::Broken("its effect is unknown"))
}

fn class_code(class: FailureClass) -> u8 {
    match class {
        FailureClass::Retryable => 1,
        FailureClass::Permanent => 2,
        FailureClass::RanTooLong => 3,
        FailureClass::Dropped => 4,
        FailureClass::Crashed => 5,
        FailureClass::StepChanged => 6,
        FailureClass::StepInDoubt => 7,
    }
}

fn class_of(code: u8) -> Result<FailureClass, Fault> {
    FailureClass::ALL
        .into_iter()
        .find(|class| class_code(*class) == code)
        .ok_or(Fault::Broken("its failure is of an unknown class"))
}

/// Failures take the numbers of their class; changes by people begin here.
const BY_PERSON: u8 = 64;

fn event_code(kind: EventKind) -> u8 {
    match kind {
        EventKind::Failed(class) => class_code(class),
        EventKind::Redriven => BY_PERSON,
        EventKind::ResolvedDone => BY_PERSON + 1,
        EventKind::ResolvedNotDone => BY_PERSON + 2,
        EventKind::Cleared => BY_PERSON + 3,
    }
}

fn event_of(code: u8) -> Result<EventKind, Fault> {
    match code {
        BY_PERSON => Ok(EventKind::Redriven),
        code if code == BY_PERSON + 1 => Ok(EventKind::ResolvedDone),
        code if code == BY_PERSON + 2 => Ok(EventKind::ResolvedNotDone),
        code if code == BY_PERSON + 3 => Ok(EventKind::Cleared),
        code => class_of(code).map(EventKind::Failed),
    }
}
