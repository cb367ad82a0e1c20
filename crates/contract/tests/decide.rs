//! The decision table, as a table, and what must hold of it for any record whatever.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use taskonce_contract::records;
use taskonce_core::decide::{self, Answer, Ask, By, ClaimStep, Stamp};
use taskonce_core::key::Fingerprint;
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{
    Age, ClaimId, Failure, FailureClass, Fence, Found, HISTORY_MAX, Output, Record, State, Token, WallTime,
};
use taskonce_core::step::StepState;

const MINE: ClaimId = ClaimId([7; 16]);
const STAMP: Stamp = Stamp { token: Token([9; 16]), at: WallTime(1_700_000_000_000) };
const BY: By<'static> = By { who: "eva", why: "because" };

/// What a claim makes of what it finds, for a policy of 3 attempts and 2 crashes.
///
/// | found | age against lease or delay | attempt, crashes | effect | asks | then |
const CLAIMS: &str = "
    absent  -      0 0 keyed        other    | run 1 0
    running young  1 0 keyed        other    | busy
    running young  3 1 keyed        other    | busy
    running young  1 0 unrepeatable other    | busy
    running young  1 0 keyed        mismatch | mismatch
    running young  1 0 keyed        mine     | resume 1 0
    running passed 1 0 keyed        mine     | resume 1 0
    running passed 3 1 unrepeatable mine     | resume 3 1
    running back   1 0 keyed        mine     | resume 1 0
    running passed 1 0 keyed        mismatch | mismatch
    running passed 1 0 keyed        other    | run 2 1
    running passed 2 0 keyed        other    | run 3 1
    running back   1 0 keyed        other    | run 2 1
    running early  1 0 keyed        other    | busy
    running passed 3 0 keyed        other    | end dead 3 1
    running passed 1 1 keyed        other    | end parked 1 2
    running passed 3 1 keyed        other    | end parked 3 2
    running passed 1 0 unrepeatable other    | end parked 1 1
    running passed 3 0 unrepeatable other    | end parked 3 1
    running back   1 0 unrepeatable other    | end parked 1 1
    waiting young  1 0 keyed        other    | waiting
    waiting young  3 0 keyed        other    | waiting
    waiting early  1 0 keyed        other    | waiting
    waiting young  1 0 keyed        mismatch | mismatch
    waiting passed 1 0 keyed        mismatch | mismatch
    waiting passed 0 0 keyed        other    | run 1 0
    waiting passed 1 1 keyed        other    | run 2 1
    waiting passed 2 0 unrepeatable other    | run 3 0
    waiting back   1 0 keyed        other    | run 2 0
    waiting passed 3 0 keyed        other    | end dead 3 0
    waiting passed 1 0 keyed        mine     | run 2 0
    done    young  1 0 keyed        other    | replay
    done    passed 1 0 keyed        other    | replay
    done    back   1 0 keyed        other    | replay
    done    passed 1 0 keyed        mine     | replay
    done    passed 1 0 keyed        mismatch | mismatch
    dead    passed 3 0 keyed        other    | dead
    dead    passed 1 0 keyed        mismatch | mismatch
    parked  young  1 0 unrepeatable other    | parked
    parked  passed 1 0 unrepeatable other    | parked
    parked  back   1 0 unrepeatable other    | parked
    parked  passed 1 0 unrepeatable mine     | parked
    parked  passed 1 0 unrepeatable mismatch | mismatch
";

fn policy(effect: Effect) -> Policy {
    Policy { attempts_max: 3, crashes_max: 2, backoff: Backoff::NONE, ..Policy::new(effect) }
}

fn found(record: Record, millis: i64) -> Found {
    Found { record: Arc::new(record), age: Age::from_millis(millis) }
}

fn answer(step: &ClaimStep) -> String {
    match step {
        ClaimStep::Run(record) => format!("run {} {}", record.attempt, record.crashes),
        ClaimStep::Resume(record) => format!("resume {} {}", record.attempt, record.crashes),
        ClaimStep::End(record) => format!("end {} {} {}", record.state, record.attempt, record.crashes),
        ClaimStep::Answer(answer) => match answer {
            Answer::Replay => "replay",
            Answer::Busy => "busy",
            Answer::Waiting => "waiting",
            Answer::Dead => "dead",
            Answer::Parked => "parked",
            Answer::Mismatch => "mismatch",
        }
        .to_owned(),
    }
}

#[test]
fn a_claim_follows_the_table() {
    let limit = Duration::from_secs(100);
    for line in CLAIMS.lines().filter(|line| !line.trim().is_empty()) {
        let (given, wanted) = line.split_once('|').unwrap();
        let words: Vec<&str> = given.split_whitespace().collect();
        let [state, age, attempt, crashes, effect, asks] = words[..] else { panic!("six words: {line}") };
        let effect = Effect::from_name(effect).unwrap();
        let before = State::from_name(state).map(|state| Record {
            attempt: attempt.parse().unwrap(),
            crashes: crashes.parse().unwrap(),
            effect,
            lease: limit,
            delay: limit,
            claim: if asks == "mine" { MINE } else { ClaimId([1; 16]) },
            ..records::plain(state, 1)
        });
        let age = match age {
            "young" => 99_999,
            "passed" => 100_000,
            "early" => -100_000,
            "back" => -100_001,
            _ => 0,
        };
        let fingerprint = Fingerprint([if asks == "mismatch" { 2 } else { 1 }; 16]);
        let (policy, owner) = (policy(effect), Arc::from("owner"));
        let ask = Ask { claim: MINE, owner: &owner, fingerprint, policy: &policy };
        let before = before.map(|record| found(record, age));
        assert_eq!(answer(&decide::claim(before.as_ref(), &ask, STAMP)), wanted.trim(), "{line}");
    }
}

fn any_found() -> impl Strategy<Value = Found> {
    let age = prop_oneof![-200_000_000_000..200_000_000_000_i64, -2..2_i64, Just(i64::MIN), Just(i64::MAX)];
    (records::any(), age).prop_map(|(record, millis)| found(record, millis))
}

fn any_policy() -> impl Strategy<Value = Policy> {
    (prop::sample::select(Effect::ALL.to_vec()), 1..10_u32, 1..10_u32)
        .prop_map(|(effect, attempts_max, crashes_max)| Policy { attempts_max, crashes_max, ..Policy::new(effect) })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_claim_never_changes_what_is_final_or_parked_or_held(
        before in any_found(),
        policy in any_policy(),
        same_payload in any::<bool>(),
    ) {
        let record = &before.record;
        let fingerprint = if same_payload { record.fingerprint } else { Fingerprint([0x55; 16]) };
        let owner = Arc::from("owner");
        let ask = Ask { claim: MINE, owner: &owner, fingerprint, policy: &policy };
        let step = decide::claim(Some(&before), &ask, STAMP);
        let writes = !matches!(step, ClaimStep::Answer(_));
        match record.state {
            State::Done | State::Dead | State::Parked => prop_assert!(!writes),
            State::Running => prop_assert!(!writes || before.age.has_passed(record.lease)),
            State::Waiting => prop_assert!(!writes || before.age.has_passed(record.delay)),
        }
        prop_assert!(!writes || fingerprint == record.fingerprint, "a mismatch writes nothing");
    }

    #[test]
    fn a_run_is_counted_fenced_and_remembers(before in any_found(), policy in any_policy()) {
        let record = &before.record;
        let owner: Arc<str> = Arc::from("owner");
        let ask = Ask { claim: MINE, owner: &owner, fingerprint: record.fingerprint, policy: &policy };
        match decide::claim(Some(&before), &ask, STAMP) {
            ClaimStep::Run(next) => {
                prop_assert_eq!((next.state, next.token, next.claim), (State::Running, STAMP.token, MINE));
                prop_assert_eq!(&next.owner, &owner);
                prop_assert_eq!(next.attempt, record.attempt + 1);
                prop_assert!(next.attempt <= policy.attempts_max);
                prop_assert!(next.fence > record.fence || record.fence == Fence(u64::MAX));
                prop_assert_eq!((next.lease, next.retention), (policy.lease, policy.retention));
                prop_assert_eq!(next.fingerprint, record.fingerprint);
                prop_assert_eq!(&next.output, &Output::Nothing);
                prop_assert_eq!(&next.steps, &record.steps);
                let crash = u32::from(record.state == State::Running);
                prop_assert_eq!(next.crashes, record.crashes + crash);
                let lines = |record: &Record| record.history.len() as u64 + u64::from(record.history_dropped);
                prop_assert!(lines(&next) == lines(record) + u64::from(crash) || record.history_dropped == u32::MAX);
                if crash == 1 {
                    prop_assert!(record.effect != Effect::Unrepeatable && policy.effect != Effect::Unrepeatable);
                    prop_assert_eq!(next.failure.map(|failure| failure.class), Some(FailureClass::Crashed));
                }
            }
            ClaimStep::End(next) => {
                prop_assert!(matches!(next.state, State::Dead | State::Parked));
                let step_in_doubt = record.steps.iter().any(|step| step.state == StepState::Begun);
                prop_assert!(!step_in_doubt || next.state == State::Parked);
                prop_assert_eq!(&next.steps, &record.steps);
                prop_assert_eq!((next.token, next.fence, next.claim), (STAMP.token, record.fence, record.claim));
                prop_assert_eq!((next.attempt, next.fingerprint), (record.attempt, record.fingerprint));
                prop_assert_eq!((next.state_age, next.retention), (Duration::ZERO, record.retention));
            }
            ClaimStep::Answer(_) => {}
            ClaimStep::Resume(_) => prop_assert!(false, "nothing here is this claim's own"),
        }
    }

    #[test]
    fn the_ends_of_a_claim_keep_who_and_what_it_was(
        held in records::any(),
        policy in any_policy(),
        class in prop::sample::select(FailureClass::ALL.to_vec()),
        random in any::<u64>(),
    ) {
        let held = Record { state: State::Running, attempt: held.attempt.clamp(1, 100), ..held };
        let ran_for = Duration::from_secs(5);
        let done = decide::complete(&held, Output::kept("text/plain", "x"), &policy, ran_for, STAMP);
        let failed = decide::fail(&held, &Failure::new(class, "no"), &policy, ran_for, random, STAMP);
        let harmless = Failure::new(class, "no").nothing_happened();
        let failed_harmlessly = decide::fail(&held, &harmless, &policy, ran_for, random, STAMP);
        let released = decide::release(&held, STAMP);
        for next in [&done, &failed, &failed_harmlessly, &released] {
            prop_assert_eq!((next.token, next.fence, next.claim), (STAMP.token, held.fence, held.claim));
            prop_assert_eq!((next.fingerprint, next.crashes, next.state_age), (held.fingerprint, held.crashes, Duration::ZERO));
            prop_assert!(next.history.len() <= HISTORY_MAX);
            prop_assert!(next.delay <= policy.backoff.delay_max);
            prop_assert_ne!(next.state, State::Running);
        }
        prop_assert_eq!((done.state, done.attempt, &done.failure), (State::Done, held.attempt, &None));
        prop_assert_eq!((released.state, released.attempt, &released.history), (State::Waiting, held.attempt - 1, &held.history));
        let dead = class == FailureClass::Permanent || held.attempt >= policy.attempts_max;
        let step_in_doubt = dead && held.steps.iter().any(|step| step.state == StepState::Begun);
        let parks = class.parks() || step_in_doubt;
        prop_assert_eq!(failed.state == State::Parked, held.effect == Effect::Unrepeatable || parks);
        let wanted = if parks {
            State::Parked
        } else if dead {
            State::Dead
        } else {
            State::Waiting
        };
        prop_assert_eq!(failed_harmlessly.state, wanted);
        prop_assert_eq!(&failed.steps, &held.steps);
        prop_assert_eq!(&released.steps, &held.steps);
        prop_assert!(done.steps.iter().all(|step| step.output.is_empty()));
    }

    #[test]
    fn a_heartbeat_changes_the_token_and_nothing_else(held in records::any()) {
        let next = decide::heartbeat(&held, STAMP.token, Duration::from_secs(60));
        prop_assert_eq!((next.token, next.state_age), (STAMP.token, Duration::from_secs(60)));
        prop_assert_eq!(Record { token: held.token, state_age: held.state_age, ..next }, held);
    }

    #[test]
    fn only_final_records_are_extended_and_keep_their_age(before in any_found()) {
        let due = before.record.state.is_final() && before.age.as_duration() > before.record.retention / 2;
        let next = decide::extend(&before, STAMP.token);
        prop_assert_eq!(next.is_some(), due);
        if let Some(next) = next {
            prop_assert_eq!((next.token, next.state_age), (STAMP.token, before.in_state_for()));
            let record = &*before.record;
            prop_assert_eq!(&Record { token: record.token, state_age: record.state_age, ..next }, record);
        }
    }

    #[test]
    fn people_change_what_they_may_and_are_remembered(before in any_found()) {
        let record = &*before.record;
        let lapsed = record.state == State::Running && before.age.has_passed(record.lease);
        let parked = record.state == State::Parked;
        let may_redrive = parked || lapsed || matches!(record.state, State::Dead | State::Waiting);
        let (redriven, done, not_done) = (
            decide::redrive(&before, BY, STAMP),
            decide::resolve_done(&before, BY, None, STAMP),
            decide::resolve_not_done(&before, BY, STAMP),
        );
        prop_assert_eq!((redriven.is_some(), done.is_some(), not_done.is_some()), (may_redrive, parked, parked));
        let step_in_doubt = record.steps.last().is_some_and(|step| step.state == StepState::Begun);
        let step_done = decide::resolve_step_done(&before, BY, None, None, STAMP);
        prop_assert_eq!(step_done.is_some(), parked && step_in_doubt);
        if let Some(next) = &step_done {
            let ended = next.steps.last().map(|step| step.state);
            prop_assert_eq!((next.state, next.steps.len(), ended), (State::Waiting, record.steps.len(), Some(StepState::Done)));
        }
        if let Some(next) = &not_done {
            prop_assert!(next.steps.iter().all(|step| step.state == StepState::Done));
        }
        let in_doubt = lapsed && record.effect == Effect::Unrepeatable;
        if in_doubt {
            let parked = redriven.clone().unwrap();
            prop_assert_eq!((parked.state, parked.attempt), (State::Parked, record.attempt));
        }
        let redriven = redriven.filter(|_| !in_doubt);
        for next in [&redriven, &not_done].into_iter().flatten() {
            prop_assert_eq!((next.state, next.attempt, next.crashes), (State::Waiting, 0, 0));
            prop_assert_eq!(next.delay, Duration::ZERO);
            prop_assert!(next.fence > record.fence || record.fence == Fence(u64::MAX));
        }
        for next in [redriven, done, not_done].into_iter().flatten() {
            let last = next.history.last().unwrap();
            prop_assert_eq!((last.who.as_str(), last.note.as_str(), last.attempt), ("eva", "because", record.attempt));
            prop_assert_eq!((next.token, next.fingerprint), (STAMP.token, record.fingerprint));
        }
    }
}
