//! What is put in comes out: every field, every output, every key; and what cannot be read is never "absent".

use std::time::Duration;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use taskonce_core::codec;
use taskonce_core::key::{ID_MAX, NAME_MAX};
use taskonce_core::policy::Effect;
use taskonce_core::record::{
    Aftermath, Event, EventKind, Failure, FailureClass, Fence, HISTORY_MAX, Output, Record, State, WallTime,
};
use taskonce_core::store::{Expected, Next};
use taskonce_core::{ErrorKind, Result};

use super::{load, stored};
use crate::records::{any, of_a_newer_format, plain};
use crate::stage::{Stage, policy};

pub(super) async fn every_field_of_a_record_is_kept(stage: Stage) {
    let full = Record {
        fence: Fence(1_234_567_890_123),
        owner: "host-ä/42/worker-7".into(),
        attempt: 7,
        crashes: 2,
        effect: Effect::Unrepeatable,
        lease: Duration::from_millis(1_800_001),
        delay: Duration::from_millis(62_003),
        retention: Duration::from_millis(100 * 24 * 3_600_000 + 7),
        output_retention: Duration::from_millis(50 * 24 * 3_600_000 + 9),
        state_age: Duration::from_millis(123_456),
        ran_for: Duration::from_millis(789),
        output: Output::kept("application/json", *b"{\"a\":[0,1]}\0\xff"),
        failure: Some(Failure {
            class: FailureClass::RanTooLong,
            message: "line one\nline two \u{1f41f}".into(),
            aftermath: Aftermath::NothingHappened,
            retry_after: None,
        }),
        history: (0..HISTORY_MAX as u32)
            .map(|number| Event {
                kind: if number % 2 == 0 { EventKind::Failed(FailureClass::Crashed) } else { EventKind::Redriven },
                at: WallTime(1_700_000_000_000 + u64::from(number)),
                who: format!("who {number}"),
                attempt: number,
                note: "x".repeat(number as usize * 10),
            })
            .collect(),
        history_dropped: 3,
        ..plain(State::Done, u128::MAX - 5)
    };
    for (number, state) in State::ALL.into_iter().enumerate() {
        let key = stage.key(state.name());
        let record = Record { state, token: (number as u128 + 1).into(), ..full.clone() };
        stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
        assert_eq!(*load(&stage, &key).await.record, record);
    }
}

pub(super) async fn random_records_are_kept(stage: Stage) {
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    for number in 0..48 {
        let record = any().new_tree(&mut runner).unwrap().current();
        // A store may let a record go whose retention has passed; this is not about that.
        let year = Duration::from_secs(365 * 24 * 3600);
        let record = Record { retention: year, output_retention: year, ..record };
        let key = stage.key(&format!("random-{number}"));
        stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
        assert_eq!(*load(&stage, &key).await.record, record);
    }
}

pub(super) async fn empty_output_is_not_absent(stage: Stage) {
    let outputs = [Output::Nothing, Output::kept("", ""), Output::kept("text/plain", ""), Output::kept("", "\0")];
    for (number, output) in outputs.into_iter().enumerate() {
        let key = stage.key(&format!("output-{number}"));
        let record = Record { output, ..plain(State::Done, 1) };
        stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
        assert_eq!(load(&stage, &key).await.record.output, record.output);
    }
}

pub(super) async fn an_output_of_a_mebibyte_is_kept_byte_for_byte(stage: Stage) {
    let key = stage.key("large");
    let bytes: Vec<u8> = (0..1024 * 1024_u32).map(|at| (at ^ (at >> 8) ^ (at >> 13)) as u8).collect();
    let record = Record { output: Output::kept("application/octet-stream", bytes), ..plain(State::Done, 1) };
    stored(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record)).await.unwrap());
    assert!(*load(&stage, &key).await.record == record, "a large output comes back as it was");
    let found = super::conflict(stage.store().swap(&key, Expected::Nothing, Next::Keep(&record_of(2))).await.unwrap());
    assert!(*found.expect("it is shown").record == record, "a conflict shows a large output as it was");
}

fn record_of(token: u128) -> Record {
    plain(State::Running, token)
}

/// Ids that some store, shell, pattern or text form might read as more than themselves.
fn odd_ids() -> Vec<String> {
    let mut ids: Vec<String> = [
        "*",
        "?",
        "[a-z]",
        "\\",
        "\\*",
        "%",
        "_",
        "a%b",
        "{tag}",
        "{}",
        "}{",
        "'",
        "\"",
        "`",
        "--",
        ";",
        " ",
        " a",
        "a ",
        "a  b",
        "/",
        "//",
        "@",
        "a/b@c/d",
        ":",
        "a:b",
        "#",
        "$1",
        "?1",
        "..",
        "../a",
        "NULL",
        "null",
        "0",
        "-1",
        "é",
        "e\u{301}",
        "ß",
        "SS",
        "İ",
        "\u{1f41f}",
        "日本語",
        "\u{200d}",
        "\u{feff}a",
        "a\u{a0}b",
        "\u{10ffff}",
    ]
    .map(str::to_owned)
    .to_vec();
    ids.push("x".repeat(ID_MAX));
    ids.push("x".repeat(ID_MAX - 1));
    ids.push("é".repeat(ID_MAX / 2));
    ids
}

pub(super) async fn odd_keys_are_kept_apart(stage: Stage) {
    let store = stage.store();
    let mut keys: Vec<_> = odd_ids().iter().map(|id| stage.key(id)).collect();
    let long = "n".repeat(NAME_MAX);
    keys.push(stage.key_of(&long, &long, &"y".repeat(ID_MAX)));
    keys.push(stage.key_of("a.b", "c", "x"));
    keys.push(stage.key_of("a", "b.c", "x"));
    for (number, key) in keys.iter().enumerate() {
        stored(store.swap(key, Expected::Nothing, Next::Claim(&record_of(number as u128 + 1))).await.unwrap());
    }
    for (number, key) in keys.iter().enumerate() {
        let found = store.load(key).await.unwrap().unwrap_or_else(|| panic!("`{key}` is there"));
        assert_eq!(found.record.token, record_of(number as u128 + 1).token, "`{key}`");
    }
    for key in &keys {
        let token = store.load(key).await.unwrap().expect("it is there until it is erased itself").record.token;
        stored(store.swap(key, Expected::Token(token), Next::Erase).await.unwrap());
    }
}

pub(super) async fn keys_are_compared_byte_by_byte(stage: Stage) {
    let keys = [
        stage.key("a"),
        stage.key("A"),
        stage.key_of("Contract", "case", "a"),
        stage.key_of("contract", "Case", "a"),
        stage.key("é"),
        stage.key("e\u{301}"),
        stage.key("É"),
        stage.key("a\u{a0}"),
        stage.key("a "),
    ];
    for (number, key) in keys.iter().enumerate() {
        assert_eq!(stage.store().load(key).await.unwrap(), None, "`{key}` is another key");
        stored(stage.store().swap(key, Expected::Nothing, Next::Keep(&record_of(number as u128 + 1))).await.unwrap());
    }
}

async fn errors_at(stage: &Stage, bytes: &[u8]) -> Vec<taskonce_core::Error> {
    let key = stage.key("a");
    stage.put_raw(&key, bytes).await;
    let record = record_of(1);
    let mut errors = vec![stage.store().load(&key).await.expect_err("a load of it fails")];
    for expected in [Expected::Nothing, Expected::Token(record.token), Expected::Record(&record)] {
        for next in [Next::Keep(&record), Next::Claim(&record), Next::Erase] {
            let swap: Result<_> = stage.store().swap(&key, expected, next).await;
            errors.push(swap.expect_err("a swap of it fails"));
        }
    }
    assert!(stage.other().load(&key).await.is_err(), "it is still there, and still unreadable");
    errors
}

pub(super) async fn an_unreadable_record_is_an_error_that_names_its_key(stage: Stage) {
    let whole = codec::encode(&plain(State::Done, 5));
    let mut flipped = whole.clone();
    flipped[40] ^= 1;
    let mut newer = whole.clone();
    newer[0] = codec::FORMAT + 1;
    let cases: [&[u8]; 6] = [b"garbage", &[0; 200], &[1; 40], &whole[..whole.len() - 1], &flipped, &newer];
    for bytes in cases {
        for error in errors_at(&stage, bytes).await {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains("contract/case@1/a"), "{error}");
        }
    }
}

/// During a rolling upgrade an older worker meets it, and must leave it to a newer one.
pub(super) async fn a_record_of_a_newer_format_is_an_error_of_its_own(stage: Stage) {
    for error in errors_at(&stage, &of_a_newer_format()).await {
        assert_eq!(error.kind(), ErrorKind::NewerFormat, "{error}");
        assert!(error.to_string().contains("contract/case@1/a"), "{error}");
    }
}

pub(super) async fn what_cannot_be_read_is_never_overwritten(stage: Stage) {
    let task = stage.task("a");
    let actor = stage.actor("a");
    stage.put_raw(&task.key, b"what somebody else wrote").await;
    let error = actor.ledger.claim(&task, &policy(Effect::Keyed)).await.expect_err("it cannot be claimed");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    actor.keeper.work(&*actor.store, &*actor.host).await.expect_err("nor released");
    let error = actor.ledger.show(&task.key).await.expect_err("it is still there");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(actor.ledger.purge(&taskonce_core::store::Filter::default()).await.unwrap().records, 0);
    stage.store().load(&task.key).await.expect_err("purge has not touched it");
}
