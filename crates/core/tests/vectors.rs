//! The published vectors: every one of them, and the test data of RFC 8785.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use taskonce_core::json::{Fields, Input};
use taskonce_core::key::{Handler, Key, Task};
use taskonce_core::{Error, ErrorKind};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vectors {
    format: u32,
    keys: Vec<KeyVector>,
    text_forms: Vec<TextFormVector>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyVector {
    name: String,
    input: Option<String>,
    input_hex: Option<String>,
    fields: Option<FieldsVector>,
    handler: HandlerVector,
    given_id: Option<String>,
    #[serde(default = "whole_task")]
    steps: Vec<String>,
    expect: KeyExpected,
}

fn whole_task() -> Vec<String> {
    vec![String::new()]
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FieldsVector {
    #[serde(default)]
    required: Vec<String>,
    #[serde(default)]
    optional: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HandlerVector {
    namespace: String,
    handler: String,
    version: String,
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum KeyExpected {
    Refused {
        error: String,
        path: Option<String>,
    },
    Key {
        canonical: String,
        sha256: String,
        id: String,
        fingerprint: String,
        key: String,
        downstream: BTreeMap<String, String>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextFormVector {
    name: String,
    text: String,
    expect: TextFormExpected,
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum TextFormExpected {
    Refused { error: String },
    Parts { namespace: String, handler: String, version: String, id: String },
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../contract/vectors")
}

fn vectors() -> Vectors {
    let path = folder().join("keys.json");
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let vectors: Vectors = serde_json::from_slice(&text).unwrap();
    assert_eq!(vectors.format, 1);
    vectors
}

impl KeyVector {
    fn bytes(&self) -> Vec<u8> {
        match (&self.input, &self.input_hex) {
            (Some(text), None) => text.clone().into_bytes(),
            (None, Some(hex)) => {
                (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
            }
            _ => panic!("{}: one of `input` and `input_hex`", self.name),
        }
    }

    fn derive(&self, bytes: &[u8]) -> Result<Derived, Error> {
        let fields = match &self.fields {
            None => Fields::all(),
            Some(fields) => Fields::new(&fields.required)?.optional(&fields.optional)?,
        };
        let input = Input::from_json(bytes)?;
        let HandlerVector { namespace, handler, version } = &self.handler;
        let handler = Handler::within(namespace, handler, version)?;
        let task = match &self.given_id {
            Some(id) => handler.task(id, &input)?,
            None => handler.task_from(&input, &fields)?,
        };
        let canonical = String::from_utf8(input.canonical(&fields)?).unwrap();
        Ok(Derived { canonical, sha256: input.digest(&fields)?.to_string(), task })
    }
}

struct Derived {
    canonical: String,
    sha256: String,
    task: Task,
}

#[test]
fn every_published_vector_gives_its_key_or_its_refusal() {
    let vectors = vectors();
    assert!(vectors.keys.len() >= 180, "only {} vectors were read", vectors.keys.len());
    for vector in &vectors.keys {
        let name = &vector.name;
        let bytes = vector.bytes();
        match (vector.derive(&bytes), &vector.expect) {
            (Ok(derived), KeyExpected::Key { canonical, sha256, id, fingerprint, key, downstream }) => {
                assert_eq!(&derived.canonical, canonical, "{name}");
                assert_eq!(&derived.sha256, sha256, "{name}");
                assert_eq!(derived.task.key.id(), id, "{name}");
                assert_eq!(&derived.task.fingerprint.to_string(), fingerprint, "{name}");
                assert_eq!(derived.task.key.as_str(), key, "{name}");
                assert_eq!(Key::parse(key).unwrap(), derived.task.key, "{name}");
                let steps = vector.steps.iter();
                let steps: BTreeMap<_, _> =
                    steps.map(|step| (step.clone(), derived.task.key.downstream(step).to_string())).collect();
                assert_eq!(&steps, downstream, "{name}");
            }
            (Err(error), KeyExpected::Refused { error: kind, path }) => {
                assert_eq!(error.kind().name(), kind, "{name}: {error:?}");
                if let Some(path) = path {
                    assert_eq!(error.subject().unwrap_or_default(), path, "{name}: {error:?}");
                }
            }
            (Ok(derived), KeyExpected::Refused { error, .. }) => {
                panic!("{name}: expected {error}, got {}", derived.canonical)
            }
            (Err(error), KeyExpected::Key { .. }) => panic!("{name}: {error:?}"),
        }
    }
}

#[test]
fn every_published_text_form_is_read_or_refused() {
    for vector in vectors().text_forms {
        let name = &vector.name;
        match (Key::parse(&vector.text), &vector.expect) {
            (Ok(key), TextFormExpected::Parts { namespace, handler, version, id }) => {
                assert_eq!((key.namespace(), key.handler()), (&**namespace, &**handler), "{name}");
                assert_eq!((key.version(), key.id()), (&**version, &**id), "{name}");
                assert_eq!(key.as_str(), vector.text, "{name}");
            }
            (Err(error), TextFormExpected::Refused { error: kind }) => assert_eq!(error.kind().name(), kind, "{name}"),
            (Ok(key), TextFormExpected::Refused { error }) => panic!("{name}: expected {error}, got {key}"),
            (Err(error), TextFormExpected::Parts { .. }) => panic!("{name}: {error:?}"),
        }
    }
}

#[test]
fn the_vectors_hold_every_refusal_of_an_input_but_those_of_values() {
    let refused: Vec<_> = vectors()
        .keys
        .into_iter()
        .filter_map(|vector| match vector.expect {
            KeyExpected::Refused { error, .. } => Some(error),
            KeyExpected::Key { .. } => None,
        })
        .collect();
    for kind in [
        ErrorKind::BadName,
        ErrorKind::BadId,
        ErrorKind::BadJson,
        ErrorKind::DuplicateName,
        ErrorKind::LoneSurrogate,
        ErrorKind::IntegerRange,
        ErrorKind::NotFinite,
        ErrorKind::TooDeep,
        ErrorKind::BadPointer,
        ErrorKind::PointerMissing,
        ErrorKind::NothingChosen,
    ] {
        assert!(refused.iter().any(|name| name == kind.name()), "{kind:?}");
    }
}

#[test]
fn the_test_data_of_rfc_8785_has_its_canonical_form() {
    for name in ["arrays", "french", "structures", "unicode", "values", "weird"] {
        let read = |part| std::fs::read(folder().join(format!("jcs/{name}.{part}.json"))).unwrap();
        let input = read("input");
        let canonical = Input::from_json(&input).unwrap().canonical(&Fields::all()).unwrap();
        assert_eq!(String::from_utf8(canonical).unwrap(), String::from_utf8(read("output")).unwrap(), "{name}");
    }
}
