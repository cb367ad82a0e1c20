//! Any record: a plain one to begin with, and a strategy for property tests that reaches every field.

use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use taskonce_core::codec;
use taskonce_core::key::Fingerprint;
use taskonce_core::policy::Effect;
use taskonce_core::record::{
    Aftermath, ClaimId, DropReason, Event, EventKind, Failure, FailureClass, Fence, HISTORY_MAX, MESSAGE_MAX, Output,
    Record, State, Token, WallTime,
};
use taskonce_core::step::{STEP_NAME_MAX, Step, StepState};

/// The longest duration that random records hold, in milliseconds: a hundred years.
const MILLIS_MAX: u64 = 100 * 365 * 24 * 60 * 60 * 1000;

/// A plain record of a state, with a token made of a number.
#[must_use]
pub fn plain(state: State, token: u128) -> Record {
    Record {
        state,
        token: Token::from(token),
        fence: Fence(1),
        claim: ClaimId::from(token ^ u128::MAX),
        owner: "owner".into(),
        attempt: 1,
        crashes: 0,
        effect: Effect::Keyed,
        lease: Duration::from_secs(1800),
        delay: Duration::ZERO,
        retention: Duration::from_secs(14 * 24 * 3600),
        output_retention: Duration::from_secs(24 * 3600),
        state_age: Duration::ZERO,
        ran_for: Duration::ZERO,
        fingerprint: Fingerprint([1; 16]),
        output: Output::Nothing,
        failure: None,
        steps: Vec::new(),
        history: Vec::new(),
        history_dropped: 0,
    }
}

/// Named records that use every state, every kind of output and failure, and numbers at their ends. Their bytes are held
/// in `fixtures/v1/records.json`.
#[must_use]
pub fn examples() -> Vec<(&'static str, Record)> {
    let outputs = [
        ("done_without_output", Output::Nothing),
        ("done_with_empty_output", Output::kept("", "")),
        ("done_with_output", Output::kept("application/json", *b"{\"ok\":true}")),
        ("done_with_binary_output", Output::kept("application/octet-stream", [0, 1, 0x7f, 0x80, 0xff])),
        ("done_with_output_too_large", Output::Dropped(DropReason::TooLarge { bytes: 5_000_000_000 })),
        ("done_with_output_not_encodable", Output::Dropped(DropReason::NotEncodable)),
        ("done_with_output_expired", Output::Dropped(DropReason::Expired)),
        ("done_with_output_not_kept", Output::Dropped(DropReason::NotKept)),
        ("done_as_resolved", Output::Dropped(DropReason::Resolved)),
    ];
    let token = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff;
    let done = Record { ran_for: Duration::from_millis(1234), ..plain(State::Done, token) };
    let mut all: Vec<_> = outputs.into_iter().map(|(name, output)| (name, Record { output, ..done.clone() })).collect();
    for (name, state) in [("running", State::Running), ("dead", State::Dead), ("parked", State::Parked)] {
        all.push((name, plain(state, token)));
    }
    for (index, effect) in Effect::ALL.into_iter().enumerate() {
        let names = ["transactional", "keyed", "fenced", "unrepeatable", "repeatable"];
        all.push((names[index], Record { effect, ..plain(State::Running, token) }));
    }
    let names = ["failed_retryable", "failed_permanent", "failed_ran_too_long", "failed_dropped", "failed_crashed"];
    let of_format_1 = || FailureClass::ALL.into_iter().filter(|class| !class.parks());
    for (index, class) in of_format_1().enumerate() {
        let failure =
            Failure { class, message: "not this time: ü".into(), aftermath: Aftermath::InDoubt, retry_after: None };
        let delay = Duration::from_millis(61_000);
        all.push((names[index], Record { delay, failure: Some(failure), ..plain(State::Waiting, token) }));
    }
    let kinds = of_format_1().map(EventKind::Failed).chain([
        EventKind::Redriven,
        EventKind::ResolvedDone,
        EventKind::ResolvedNotDone,
        EventKind::Cleared,
    ]);
    let history = kinds
        .zip(0..)
        .map(|(kind, number)| Event {
            kind,
            at: WallTime(1_700_000_000_000 + number),
            who: format!("who-{number}"),
            attempt: number as u32,
            note: format!("note {number} \u{1f41f}"),
        })
        .collect();
    all.push(("with_history", Record { history, history_dropped: 300, ..plain(State::Waiting, token) }));
    all.push(("at_the_ends", at_the_ends()));
    all
}

/// Named records that only format 2 has room for. Their bytes are held in `fixtures/v2/records.json`.
#[must_use]
pub fn examples_of_format_2() -> Vec<(&'static str, Record)> {
    let token = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff;
    let step = |name: &str, effect, state, output| Step {
        name: name.to_owned(),
        effect,
        input: Fingerprint([7; 16]),
        state,
        attempt: 2,
        ran_for: Duration::from_millis(15),
        output,
    };
    let charge = step("charge", Effect::Keyed, StepState::Done, Output::kept("application/json", *b"{\"id\":7}"));
    let mail = step("mail", Effect::Unrepeatable, StepState::Begun, Output::Nothing);
    let failed = |class| Failure::new(class, "a person has to look");
    vec![
        ("with_a_step", Record { steps: vec![charge.clone()], ..plain(State::Running, token) }),
        (
            "with_a_step_in_doubt",
            Record {
                steps: vec![charge, mail],
                failure: Some(failed(FailureClass::StepInDoubt)),
                ..plain(State::Parked, token)
            },
        ),
        (
            "with_other_steps_than_the_code",
            Record { failure: Some(failed(FailureClass::StepChanged)), ..plain(State::Parked, token) },
        ),
        (
            "done_with_every_kind_of_step",
            Record {
                steps: Effect::ALL
                    .into_iter()
                    .map(|effect| step(effect.name(), effect, StepState::Done, Output::Dropped(DropReason::NotKept)))
                    .collect(),
                ..plain(State::Done, token)
            },
        ),
    ]
}

/// A record with every number at its end.
fn at_the_ends() -> Record {
    let longest = Duration::from_millis(i64::MAX as u64);
    Record {
        fence: Fence(u64::MAX),
        owner: "".into(),
        attempt: u32::MAX,
        crashes: u32::MAX,
        lease: longest,
        delay: longest,
        retention: longest,
        output_retention: longest,
        state_age: longest,
        ran_for: longest,
        fingerprint: Fingerprint([0xff; 16]),
        failure: Some(Failure {
            class: FailureClass::Crashed,
            message: String::new(),
            aftermath: Aftermath::NothingHappened,
            retry_after: None,
        }),
        history_dropped: u32::MAX,
        ..plain(State::Parked, u128::MAX)
    }
}

/// Bytes as a newer version of this system might write them: a whole record of a format that nobody knows yet.
#[must_use]
pub fn of_a_newer_format() -> Vec<u8> {
    let mut bytes = codec::encode(&plain(State::Running, 5));
    bytes.truncate(bytes.len() - 4);
    bytes[0] = codec::FORMAT + 1;
    bytes.extend_from_slice(b"fields that nobody knows yet");
    let sum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Any record that the protocol could write, and some that it would not.
pub fn any() -> impl Strategy<Value = Record> {
    let identity = (
        prop::sample::select(State::ALL.to_vec()),
        prop::sample::select(Effect::ALL.to_vec()),
        any_bytes16(),
        any_bytes16(),
        any_bytes16(),
        0..=i64::MAX as u64,
        (prop::num::u32::ANY, prop::num::u32::ANY, prop::num::u32::ANY),
    );
    let durations = (millis(), millis(), millis(), millis(), millis(), millis());
    let contents = (text(64), output(), option::of(failure()), vec(event(), 0..=HISTORY_MAX), vec(step(), 0..4));
    (identity, durations, contents).prop_map(|(identity, durations, contents)| {
        let (state, effect, token, claim, fingerprint, fence, (attempt, crashes, history_dropped)) = identity;
        let (lease, delay, retention, output_retention, state_age, ran_for) = durations;
        let (owner, output, failure, history, steps) = contents;
        Record {
            state,
            token: Token(token),
            fence: Fence(fence),
            claim: ClaimId(claim),
            owner: owner.into(),
            attempt,
            crashes,
            effect,
            lease,
            delay,
            retention,
            output_retention,
            state_age,
            ran_for,
            fingerprint: Fingerprint(fingerprint),
            output,
            failure,
            steps,
            history,
            history_dropped,
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    let state = prop::sample::select(vec![StepState::Begun, StepState::Done]);
    let effect = prop::sample::select(Effect::ALL.to_vec());
    (text(STEP_NAME_MAX / 4), effect, any_bytes16(), state, prop::num::u32::ANY, millis(), output()).prop_map(
        |(name, effect, input, state, attempt, ran_for, output)| Step {
            name,
            effect,
            input: Fingerprint(input),
            state,
            attempt,
            ran_for,
            output,
        },
    )
}

fn any_bytes16() -> impl Strategy<Value = [u8; 16]> {
    prop::array::uniform16(prop::num::u8::ANY)
}

fn millis() -> impl Strategy<Value = Duration> {
    prop_oneof![Just(0), 0..100_000_u64, 0..=MILLIS_MAX].prop_map(Duration::from_millis)
}

fn text(chars_max: usize) -> impl Strategy<Value = String> {
    vec(prop::char::any(), 0..=chars_max).prop_map(String::from_iter)
}

fn output() -> impl Strategy<Value = Output> {
    prop_oneof![
        Just(Output::Nothing),
        (text(32), vec(prop::num::u8::ANY, 0..512)).prop_map(|(content_type, bytes)| Output::kept(content_type, bytes)),
        prop::num::u64::ANY.prop_map(|bytes| Output::Dropped(DropReason::TooLarge { bytes })),
        prop::sample::select(vec![
            DropReason::NotEncodable,
            DropReason::Expired,
            DropReason::NotKept,
            DropReason::Resolved
        ])
        .prop_map(Output::Dropped),
    ]
}

fn class() -> impl Strategy<Value = FailureClass> {
    prop::sample::select(FailureClass::ALL.to_vec())
}

fn failure() -> impl Strategy<Value = Failure> {
    (class(), text(MESSAGE_MAX / 4), prop::bool::ANY).prop_map(|(class, message, nothing_happened)| Failure {
        class,
        message,
        aftermath: if nothing_happened { Aftermath::NothingHappened } else { Aftermath::InDoubt },
        retry_after: None,
    })
}

fn event() -> impl Strategy<Value = Event> {
    let kind = prop_oneof![
        class().prop_map(EventKind::Failed),
        prop::sample::select(vec![
            EventKind::Redriven,
            EventKind::ResolvedDone,
            EventKind::ResolvedNotDone,
            EventKind::Cleared
        ]),
    ];
    (kind, prop::num::u64::ANY, text(16), prop::num::u32::ANY, text(32))
        .prop_map(|(kind, at, who, attempt, note)| Event { kind, at: WallTime(at), who, attempt, note })
}
