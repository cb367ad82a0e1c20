//! The bytes of a record: what was written stays readable, and what is damaged is never taken for another record.

#![allow(clippy::unwrap_used, reason = "a test may")]

use proptest::prelude::*;
use serde_json::{Value, json};
use taskonce_contract::records;
use taskonce_core::ErrorKind;
use taskonce_core::codec::{FORMAT, GLANCE_BYTES, decode, encode, glance, token_of};
use taskonce_core::key::{Handler, Key};
use taskonce_core::record::{Aftermath, DropReason, Output, Record};

fn key() -> Key {
    Handler::new("codec", "1").unwrap().key("a").unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A record as JSON, with integers of 64 bits as text.
fn describe(record: &Record) -> Value {
    let millis = |duration: std::time::Duration| duration.as_millis().to_string();
    let output = match &record.output {
        Output::Nothing => json!("nothing"),
        Output::Kept { content_type, bytes } => json!({ "content_type": content_type, "bytes": hex(bytes) }),
        Output::Dropped(DropReason::TooLarge { bytes }) => {
            json!({ "dropped": "too_large", "bytes": bytes.to_string() })
        }
        Output::Dropped(reason) => json!({ "dropped": reason.name() }),
    };
    let failure = record.failure.as_ref().map(|failure| {
        json!({
            "class": failure.class.name(),
            "message": failure.message,
            "nothing_happened": failure.aftermath == Aftermath::NothingHappened,
        })
    });
    let history: Vec<_> = record
        .history
        .iter()
        .map(|event| {
            let at = event.at.0.to_string();
            json!({ "kind": event.kind.name(), "at": at, "who": event.who, "attempt": event.attempt, "note": event.note })
        })
        .collect();
    let steps: Vec<_> = record
        .steps
        .iter()
        .map(|step| {
            let output = match &step.output {
                Output::Nothing => json!("nothing"),
                Output::Kept { content_type, bytes } => json!({ "content_type": content_type, "bytes": hex(bytes) }),
                Output::Dropped(reason) => json!({ "dropped": reason.name() }),
            };
            json!({
                "name": step.name,
                "effect": step.effect.name(),
                "input": step.input.to_string(),
                "state": step.state.name(),
                "attempt": step.attempt,
                "ran_for_ms": millis(step.ran_for),
                "output": output,
            })
        })
        .collect();
    let mut described = json!({
        "state": record.state.name(),
        "token": record.token.to_string(),
        "claim": record.claim.to_string(),
        "fingerprint": record.fingerprint.to_string(),
        "fence": record.fence.0.to_string(),
        "attempt": record.attempt,
        "crashes": record.crashes,
        "effect": record.effect.name(),
        "lease_ms": millis(record.lease),
        "delay_ms": millis(record.delay),
        "retention_ms": millis(record.retention),
        "output_retention_ms": millis(record.output_retention),
        "state_age_ms": millis(record.state_age),
        "ran_for_ms": millis(record.ran_for),
        "owner": &*record.owner,
        "output": output,
        "failure": failure,
        "history": history,
        "history_dropped": record.history_dropped,
    });
    if !steps.is_empty() {
        described["steps"] = json!(steps);
    }
    described
}

/// Stores are full of records of format 1. Neither their bytes nor their meaning may change unnoticed: a change of the
/// encoding is a new format, with fixtures of its own.
#[test]
fn records_of_format_1_are_read_and_written_as_ever() {
    hold(include_str!("../fixtures/v1/records.json"), &records::examples(), 1);
}

#[test]
fn records_of_format_2_are_read_and_written_as_ever() {
    hold(include_str!("../fixtures/v2/records.json"), &records::examples_of_format_2(), 2);
    assert_eq!(FORMAT, 2, "a new format needs fixtures of its own, beside these");
}

fn hold(fixtures: &str, examples: &[(&str, Record)], format: u8) {
    let fixtures: Value = serde_json::from_str(fixtures).unwrap();
    let fixtures = fixtures.as_array().unwrap();
    let now: Vec<Value> = examples
        .iter()
        .map(|(name, record)| json!({ "name": name, "bytes": hex(&encode(record)), "record": describe(record) }))
        .collect();
    let whole = serde_json::to_string_pretty(&now).unwrap();
    assert_eq!(fixtures.len(), now.len(), "the fixtures would be:\n{whole}");
    for (fixture, now) in fixtures.iter().zip(&now) {
        assert_eq!(fixture, now, "{}", fixture["name"]);
        assert_eq!(bytes(fixture["bytes"].as_str().unwrap())[0], format, "{}", fixture["name"]);
        let read = decode(&key(), &bytes(fixture["bytes"].as_str().unwrap())).unwrap();
        assert_eq!(describe(&read), fixture["record"], "{}", fixture["name"]);
    }
}

#[test]
fn a_record_of_a_newer_format_is_told_from_garbage() {
    let error = decode(&key(), &records::of_a_newer_format()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NewerFormat);
    for garbage in [&b"garbage that somebody put here"[..], b"", &[0; 64], &[255; 64], &[9], &[9; 5]] {
        let error = decode(&key(), garbage).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{garbage:?}");
        assert!(error.to_string().contains(key().as_str()));
    }
}

/// A checksum over what the encoder never writes: the decoder must not trust it.
fn sealed(mut body: Vec<u8>) -> Vec<u8> {
    let sum = crc32fast::hash(&body);
    body.extend_from_slice(&sum.to_le_bytes());
    body
}

#[test]
fn a_small_record_is_small() {
    let record = records::plain(taskonce_core::record::State::Done, 1);
    assert!(encode(&record).len() <= 96, "{} bytes", encode(&record).len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_record_reads_back_as_it_was(record in records::any()) {
        let bytes = encode(&record);
        prop_assert_eq!(token_of(&bytes), Some(record.token));
        prop_assert_eq!(decode(&key(), &bytes).unwrap(), record);
    }

    #[test]
    fn a_shortened_record_is_corrupt(record in records::any(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(&record);
        let error = decode(&key(), &bytes[..cut.index(bytes.len())]).unwrap_err();
        prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_lengthened_record_is_corrupt(record in records::any(), more in prop::collection::vec(any::<u8>(), 1..8)) {
        let bytes = [encode(&record), more].concat();
        prop_assert_eq!(decode(&key(), &bytes).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_flipped_bit_is_corrupt(record in records::any(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
        let mut bytes = encode(&record);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert_eq!(decode(&key(), &bytes).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn any_bytes_are_a_record_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = [&[1, 3][..], &bytes].concat();
        if let Ok(record) = decode(&key(), &sealed(bytes.clone())) {
            // What is read can be written, though perhaps more shortly: numbers have long forms too.
            prop_assert_eq!(decode(&key(), &encode(&record)).unwrap(), record);
        }
        prop_assert!(decode(&key(), &bytes).is_err());
    }

    #[test]
    fn a_record_with_a_right_checksum_and_a_wrong_byte_never_panics(
        record in records::any(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut body = encode(&record);
        body.truncate(body.len() - 4);
        let at = at.index(body.len());
        body[at] = byte;
        match decode(&key(), &sealed(body)) {
            Ok(_) => {}
            Err(error) => prop_assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NewerFormat)),
        }
    }
}

#[test]
fn a_glance_at_the_head_says_what_the_whole_record_says() {
    for (name, record) in records::examples() {
        let bytes = encode(&record);
        let said = Some((record.state, record.token, record.claim));
        assert_eq!(glance(&bytes), said, "{name}");
        assert_eq!(glance(&bytes[GLANCE_BYTES]), said, "{name}");
        assert_eq!(glance(&bytes[..GLANCE_BYTES.end - 1]), None, "{name}");
    }
    assert_eq!(glance(&records::of_a_newer_format()), None);
    assert_eq!(glance(&[0; 64]), None);
}
