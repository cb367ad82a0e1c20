//! Properties of canonical JSON: against another implementation, between the two ways in, and on bytes of any kind.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::{Serialize, Serializer};
use taskonce_core::ErrorKind;
use taskonce_core::json::{DEPTH_MAX, Fields, INPUT_MAX, Input};

/// A document.
#[derive(Clone, Debug)]
enum Doc {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Double(f64),
    Text(String),
    List(Vec<Doc>),
    Map(BTreeMap<String, Doc>),
}

impl Serialize for Doc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Doc::Null => serializer.serialize_none(),
            Doc::Bool(value) => value.serialize(serializer),
            Doc::Signed(value) => value.serialize(serializer),
            Doc::Unsigned(value) => value.serialize(serializer),
            Doc::Double(value) => value.serialize(serializer),
            Doc::Text(value) => value.serialize(serializer),
            Doc::List(items) => items.serialize(serializer),
            Doc::Map(members) => members.serialize(serializer),
        }
    }
}

fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z]{0,6}",
        2 => any::<String>(),
        1 => "[\u{0}-\u{1f}\"\\\\/\u{7f}\u{80}\u{2028}\u{d7ff}\u{e000}\u{fb33}\u{ffff}\u{10000}\u{10ffff}]{0,6}",
    ]
}

fn doubles() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>().prop_filter("finite", |value| value.is_finite()),
        (-1_000_000_i64..1_000_000, 0..8).prop_map(|(digits, scale)| digits as f64 / 10_f64.powi(scale)),
        (any::<i64>(), -20..20).prop_map(|(digits, scale)| digits as f64 * 10_f64.powi(scale)),
        any::<u64>().prop_map(|integer| integer as f64),
        prop::sample::select(vec![
            0.0,
            -0.0,
            1e-6,
            9.999_999e-7,
            1e20,
            1e21,
            9.999_999_999_999_999e20,
            f64::MAX,
            5e-324
        ]),
    ]
}

/// Documents whose integers are at most `integer_max` away from zero.
fn docs(integer_max: u64) -> impl Strategy<Value = Doc> {
    let signed_max = integer_max.min(i64::MAX as u64) as i64;
    let leaf = prop_oneof![
        1 => Just(Doc::Null),
        1 => any::<bool>().prop_map(Doc::Bool),
        2 => (-signed_max..=signed_max).prop_map(Doc::Signed),
        2 => (0..=integer_max).prop_map(Doc::Unsigned),
        3 => doubles().prop_map(Doc::Double),
        4 => texts().prop_map(Doc::Text),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Doc::List),
            prop::collection::btree_map(texts(), inner, 0..8).prop_map(Doc::Map),
        ]
    })
}

fn canonical(bytes: &[u8]) -> String {
    let input = Input::from_json(bytes).unwrap_or_else(|error| panic!("{error:?}"));
    String::from_utf8(input.canonical(&Fields::all()).unwrap()).unwrap()
}

fn canonical_of_value(value: &impl Serialize) -> String {
    let input = Input::from_value(value).unwrap_or_else(|error| panic!("{error:?}"));
    String::from_utf8(input.canonical(&Fields::all()).unwrap()).unwrap()
}

/// Writes the same document in another way: white space, escapes, order of members, forms of numbers.
struct Scribe {
    choices: Vec<u8>,
    at: usize,
    text: String,
}

impl Scribe {
    fn choose(&mut self, below: u8) -> u8 {
        self.at += 1;
        self.choices[self.at % self.choices.len()].wrapping_add(self.at as u8) % below
    }

    fn space(&mut self) {
        let spaces = ["", "", " ", "\n", "\t\r\n  "];
        let space = spaces[usize::from(self.choose(5))];
        self.text.push_str(space);
    }

    fn string(&mut self, content: &str) {
        self.text.push('"');
        for character in content.chars() {
            let must = matches!(character, '"' | '\\' | '\0'..='\u{1f}');
            if must || self.choose(4) == 0 {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let upper = self.choose(2) == 0;
                    self.text.push_str(&if upper { format!("\\u{unit:04X}") } else { format!("\\u{unit:04x}") });
                }
            } else {
                self.text.push(character);
            }
        }
        self.text.push('"');
    }

    fn document(&mut self, doc: &Doc) {
        self.space();
        match doc {
            Doc::Null => self.text.push_str("null"),
            Doc::Bool(value) => self.text.push_str(&value.to_string()),
            Doc::Signed(value) => self.integer(&value.to_string()),
            Doc::Unsigned(value) => self.integer(&value.to_string()),
            Doc::Double(value) => {
                let text = match self.choose(4) {
                    0 => format!("{value:e}"),
                    1 => format!("{value:E}").replace('E', "E+").replace("E+-", "E-0"),
                    2 => format!("{value:?}"),
                    // Rust prints a double's exact digits, however many they are.
                    _ => format!("{value:.1100}"),
                };
                self.text.push_str(&text);
                // An integer literal would be something else.
                if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
                    self.text.push_str(".0");
                }
            }
            Doc::Text(value) => self.string(value),
            Doc::List(items) => {
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        self.text.push(',');
                    }
                    self.document(item);
                }
                self.text.push(']');
            }
            Doc::Map(members) => {
                let mut members: Vec<_> = members.iter().collect();
                let turn = usize::from(self.choose(8));
                if turn == 0 {
                    members.reverse();
                } else if !members.is_empty() {
                    let length = members.len();
                    members.rotate_left(turn % length);
                }
                self.text.push('{');
                for (index, (name, member)) in members.into_iter().enumerate() {
                    if index > 0 {
                        self.text.push(',');
                    }
                    self.space();
                    self.string(name);
                    self.space();
                    self.text.push(':');
                    self.document(member);
                }
                self.text.push('}');
            }
        }
        self.space();
    }

    fn integer(&mut self, digits: &str) {
        self.text.push_str(digits);
        // Up to 2^53, a fraction of zero or an exponent of zero makes no difference.
        if digits.trim_start_matches('-').len() <= 15 {
            let ending = ["", ".0", "e0", ".00E-0"][usize::from(self.choose(4))];
            self.text.push_str(ending);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn without_large_integers_the_canonical_form_is_that_of_another_implementation(doc in docs(1 << 53)) {
        let oracle = serde_json_canonicalizer::to_string(&doc).unwrap();
        prop_assert_eq!(&canonical_of_value(&doc), &oracle);
        prop_assert_eq!(&canonical(&serde_json::to_vec(&doc).unwrap()), &oracle);
    }

    #[test]
    fn a_value_and_its_text_have_one_canonical_form(doc in docs(u64::MAX)) {
        prop_assert_eq!(canonical_of_value(&doc), canonical(&serde_json::to_vec(&doc).unwrap()));
    }

    #[test]
    fn how_a_document_is_written_changes_nothing(
        doc in docs(u64::MAX),
        choices in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let mut scribe = Scribe { choices, at: 0, text: String::new() };
        scribe.document(&doc);
        prop_assert_eq!(canonical(scribe.text.as_bytes()), canonical_of_value(&doc), "{}", scribe.text);
    }

    #[test]
    fn every_pointer_to_a_member_chooses_that_member(members in prop::collection::btree_map(texts(), docs(u64::MAX), 1..12)) {
        let input = Input::from_value(&members).unwrap();
        for (name, member) in &members {
            let pointer = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
            let chosen = input.canonical(&Fields::new([&pointer]).unwrap()).unwrap();
            let expected = format!("{{{}:{}}}", canonical_of_value(&pointer), canonical_of_value(member));
            prop_assert_eq!(String::from_utf8(chosen).unwrap(), expected);
        }
    }

    #[test]
    fn a_price_has_the_canonical_form_of_its_double(
        negative in any::<bool>(), integer in "0|[1-9][0-9]{0,17}", fraction in "[0-9]{1,18}", zeros in 0_usize..9,
    ) {
        let literal = format!("{}{integer}.{}{fraction}", if negative { "-" } else { "" }, "0".repeat(zeros));
        let double: f64 = literal.parse().unwrap();
        prop_assert_eq!(canonical(literal.as_bytes()), serde_json_canonicalizer::to_string(&double).unwrap());
    }

    #[test]
    fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        agrees_with_serde_json(&bytes)?;
    }

    #[test]
    fn almost_json_is_accepted_only_where_another_parser_accepts_it(
        pieces in prop::collection::vec(prop::sample::select(PIECES), 0..24),
    ) {
        agrees_with_serde_json(&pieces.concat().into_bytes())?;
    }

    #[test]
    fn a_document_with_one_byte_changed_is_answered(doc in docs(u64::MAX), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = serde_json::to_vec(&doc).unwrap();
        let place = place.index(bytes.len());
        bytes[place] = byte;
        agrees_with_serde_json(&bytes)?;
        agrees_with_serde_json(&bytes[..place])?;
    }
}

const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u",
    "\\n",
    "\"a\"",
    "\"b\"",
    "\"a\":",
    "\"\\u0061\"",
    "\\ud83d",
    "\\ude00",
    " ",
    "\n",
    "\u{a0}",
    "true",
    "false",
    "null",
    "nul",
    "0",
    "-",
    "-0",
    "1",
    "01",
    ".",
    "1.5",
    "e",
    "E+",
    "1e400",
    "1e-400",
    "18446744073709551615",
    "18446744073709551616",
    "\t",
    "é",
    "\u{feff}",
    "[1,",
    "{\"a\":1,",
    "]}",
    "NaN",
    "//",
    "'",
];

/// What `serde_json` accepts is accepted, but for what is refused on purpose; all else is refused.
fn agrees_with_serde_json(bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = serde_json::from_slice::<serde_json::Value>(bytes);
    match Input::from_json(bytes) {
        Ok(input) => {
            prop_assert!(theirs.is_ok(), "accepted, but {:?}", theirs);
            prop_assert!(std::str::from_utf8(&input.canonical(&Fields::all()).unwrap()).is_ok());
        }
        Err(error) => match error.kind() {
            ErrorKind::DuplicateName | ErrorKind::IntegerRange => {}
            ErrorKind::BadJson | ErrorKind::LoneSurrogate | ErrorKind::NotFinite => {
                prop_assert!(theirs.is_err(), "{:?}, but serde_json accepts it", error)
            }
            other => prop_assert!(false, "{other:?} for {bytes:?}"),
        },
    }
    Ok(())
}

fn nested(depth: usize) -> Vec<u8> {
    [b"[".repeat(depth), b"]".repeat(depth)].concat()
}

#[test]
fn a_million_brackets_are_refused_on_a_small_stack() {
    let small_stack = std::thread::Builder::new().stack_size(96 * 1024);
    let checked = small_stack.spawn(|| {
        for text in [nested(1_000_000), b"[".repeat(1_000_000), b"{\"a\":".repeat(1_000_000)] {
            assert_eq!(Input::from_json(&text).unwrap_err().kind(), ErrorKind::TooDeep);
        }
        let deepest = nested(DEPTH_MAX);
        assert_eq!(Input::from_json(&deepest).unwrap().canonical(&Fields::all()).unwrap(), deepest);
        assert_eq!(Input::from_json(&nested(DEPTH_MAX + 1)).unwrap_err().kind(), ErrorKind::TooDeep);
    });
    checked.unwrap().join().unwrap();
}

#[test]
fn an_object_of_many_members_is_sorted_and_checked() {
    let names =
        |count: u32| (0..count).map(|n| format!("\"{}\":{n}", n.wrapping_mul(2_654_435_761))).collect::<Vec<_>>();
    let whole = format!("{{{}}}", names(100_000).join(","));
    let members: BTreeMap<String, u32> = serde_json::from_str(&whole).unwrap();
    assert_eq!(canonical(whole.as_bytes()), serde_json::to_string(&members).unwrap());

    let twice = format!("{{{},\"2654435761\":0}}", names(100_000).join(","));
    let error = Input::from_json(twice.as_bytes()).unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::DuplicateName, Some("/2654435761")));
}

#[test]
fn of_several_names_given_twice_the_one_repeated_first_is_named() {
    let between = (0..40).map(|n| format!("\"{n}\":0")).collect::<Vec<_>>().join(",");
    for text in [
        r#"{"b":1,"c":1,"c":2,"b":2,"a":1,"a":2}"#.to_owned(),
        format!("{{\"b\":1,\"c\":1,{between},\"c\":2,\"b\":2,\"a\":1,\"a\":2}}"),
    ] {
        assert_eq!(Input::from_json(text.as_bytes()).unwrap_err().subject(), Some("/c"));
    }
}

#[test]
fn an_input_longer_than_the_limit_is_refused_unread() {
    // The memory is never touched, so that the system hands out none.
    let error = Input::from_json(&vec![0; INPUT_MAX + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadJson);
    assert!(error.to_string().contains("1073741825 bytes"), "{error}");
}
