//! Values of serde as inputs: their JSON form, and each refusal with its place.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::collections::{BTreeMap, HashMap};

use serde::ser::{Error as _, SerializeMap as _};
use serde::{Serialize, Serializer};
use taskonce_core::json::{DEPTH_MAX, Fields, Input};
use taskonce_core::key::Handler;
use taskonce_core::{Error, ErrorKind};

fn canonical<T: Serialize + ?Sized>(value: &T) -> String {
    let input = Input::from_value(value).unwrap_or_else(|error| panic!("{error:?}"));
    String::from_utf8(input.canonical(&Fields::all()).unwrap()).unwrap()
}

fn refusal<T: Serialize + ?Sized>(value: &T) -> (ErrorKind, String) {
    let error: Error = Input::from_value(value).expect_err("the value should be refused");
    (error.kind(), error.subject().unwrap_or_default().to_owned())
}

#[derive(Serialize, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Plain,
    Wrapped(Option<u8>),
    Pair(u8, &'static str),
    Record { amount: u8 },
}

#[derive(Serialize)]
struct Unit;

#[derive(Clone, Serialize, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Name<T>(T);

#[derive(Serialize)]
struct Line<T> {
    sku: &'static str,
    price: T,
}

/// A price in the fourth line of an order.
fn order<T: Serialize>(price: impl Fn() -> T) -> impl Serialize {
    let lines: Vec<_> = (0..4).map(|line| Line { sku: "a", price: (line == 3).then(&price) }).collect();
    BTreeMap::from([("lines", lines)])
}

#[test]
fn values_have_the_json_form_that_serde_json_writes() {
    fn same<T: Serialize>(value: T) {
        let text = serde_json::to_vec(&value).unwrap();
        let read = Input::from_json(&text).unwrap().canonical(&Fields::all()).unwrap();
        assert_eq!(canonical(&value), String::from_utf8(read).unwrap());
    }
    same(());
    same(Unit);
    same(None::<u8>);
    same(Some(Some(1)));
    same(Name("a"));
    same(('x', "y\n\"\u{1}", true, [1_u8, 2], ()));
    same([Kind::Plain, Kind::Wrapped(None), Kind::Wrapped(Some(1)), Kind::Pair(1, "b"), Kind::Record { amount: 1 }]);
    same((i8::MIN, i16::MIN, i32::MIN, i64::MIN, i128::from(i64::MIN), u128::from(u64::MAX)));
    same((u8::MAX, u16::MAX, u32::MAX, u64::MAX));
    same((0.1_f32, 1e20_f32, 16_777_216_f32, f32::MAX, -0.0_f32));
    same((0.1_f64, 1e20_f64, 1e21_f64, f64::MAX, 5e-324, -0.0_f64, 18_446_744_073_709_551_615_f64));
    same(b"bytes without a wrapper are numbers".to_vec());
    same(std::net::Ipv4Addr::LOCALHOST);
    same(HashMap::from([(Name('a'), 1)]));
    same(BTreeMap::from([(Kind::Plain, 1)]));
    same(Line { sku: "z", price: [1.5] });
    same(serde_json::json!({"b": [1, 2.5, null, u64::MAX], "a": {"c": "d"}}));
}

#[test]
fn an_f32_is_its_own_shortest_digits() {
    assert_eq!(canonical(&0.1_f32), "0.1");
}

#[test]
fn a_number_that_is_not_finite_is_refused_with_its_path() {
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(refusal(&order(|| number)), (ErrorKind::NotFinite, "/lines/3/price".to_owned()));
        assert_eq!(refusal(&order(|| number as f32)), (ErrorKind::NotFinite, "/lines/3/price".to_owned()));
    }
    assert_eq!(refusal(&f64::NAN), (ErrorKind::NotFinite, String::new()));
}

#[test]
fn an_integer_out_of_range_is_refused_with_its_path_and_advice() {
    for number in [i128::from(u64::MAX) + 1, i128::from(i64::MIN) - 1, i128::MAX] {
        assert_eq!(refusal(&order(|| number)), (ErrorKind::IntegerRange, "/lines/3/price".to_owned()));
    }
    let error = Input::from_value(&u128::MAX).unwrap_err();
    assert_eq!((error.kind(), error.hint()), (ErrorKind::IntegerRange, "pass it as a string"));
}

#[test]
fn a_map_key_that_is_no_string_is_refused_with_the_path_of_its_map() {
    fn refused<K: Serialize + Ord>(key: K) {
        let refusal = refusal(&order(|| BTreeMap::from([(&key, 1)])));
        assert_eq!(refusal, (ErrorKind::KeyNotString, "/lines/3/price".to_owned()));
    }
    refused(1_u8);
    refused(-1_i64);
    refused(1_i128);
    refused(true);
    refused(());
    refused(None::<&str>);
    refused(Some(1));
    refused(Name(1));
    refused(("a", "b"));
    refused(vec!["a"]);
    refused(BTreeMap::from([("a", 1)]));
    refused(Kind::Wrapped(Some(1)));
    refused(Kind::Pair(1, "a"));
    refused(Kind::Record { amount: 1 });
    assert_eq!(canonical(&BTreeMap::from([(Some(Name("b")), 1), (Some(Name("a")), 2)])), r#"{"a":2,"b":1}"#);
}

#[test]
fn a_value_without_a_json_form_is_refused_with_its_path() {
    struct Bytes;
    impl Serialize for Bytes {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_bytes(b"abc")
        }
    }
    struct Unwilling;
    impl Serialize for Unwilling {
        fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(S::Error::custom("no thanks"))
        }
    }
    struct Speechless;
    impl std::fmt::Display for Speechless {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            Err(std::fmt::Error)
        }
    }
    impl Serialize for Speechless {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_str(self)
        }
    }
    let expected = (ErrorKind::NoJsonForm, "/lines/3/price".to_owned());
    assert_eq!(refusal(&order(|| Bytes)), expected);
    assert_eq!(refusal(&order(|| Unwilling)), expected);
    assert_eq!(refusal(&order(|| Speechless)), expected);
    let message = Input::from_value(&Unwilling).unwrap_err().to_string();
    assert!(message.ends_with("no thanks"), "{message}");
}

#[test]
fn a_name_given_twice_is_refused_with_its_path() {
    #[derive(Serialize)]
    struct Flat {
        id: u8,
        #[serde(flatten)]
        rest: BTreeMap<String, u8>,
    }
    struct Twice;
    impl Serialize for Twice {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(None)?;
            for (key, value) in [("a/b", 1), ("c", 2), ("a/b", 1)] {
                map.serialize_entry(key, &value)?;
            }
            map.end()
        }
    }
    assert_eq!(refusal(&order(|| Twice)), (ErrorKind::DuplicateName, "/lines/3/price/a~1b".to_owned()));
    let flat = |name: &str| Flat { id: 1, rest: BTreeMap::from([(name.to_owned(), 2)]) };
    assert_eq!(refusal(&flat("id")), (ErrorKind::DuplicateName, "/id".to_owned()));
    assert_eq!(canonical(&flat("other")), r#"{"id":1,"other":2}"#);
}

/// Lists inside lists, or `Some`s around nothing, or variants inside variants, without an end.
enum Endless {
    Lists,
    Wrappers,
    Variants,
}

impl Serialize for Endless {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Endless::Lists => serializer.collect_seq([Endless::Lists]),
            Endless::Wrappers => serializer.serialize_some(&Endless::Wrappers),
            Endless::Variants => serializer.serialize_newtype_variant("Endless", 0, "v", &Endless::Variants),
        }
    }
}

#[test]
fn an_endless_value_is_refused_without_a_stack_overflow() {
    for endless in [Endless::Lists, Endless::Wrappers, Endless::Variants] {
        assert_eq!(refusal(&order(|| &endless)).0, ErrorKind::TooDeep);
        assert_eq!(refusal(&endless).0, ErrorKind::TooDeep);
    }
    assert_eq!(refusal(&BTreeMap::from([(Some(Name("a")), Endless::Wrappers)])).0, ErrorKind::TooDeep);
}

#[test]
fn values_are_as_deep_as_texts_may_be() {
    struct Deep(usize);
    impl Serialize for Deep {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            match self.0 {
                0 => serializer.serialize_unit(),
                depth => serializer.collect_seq([Deep(depth - 1)]),
            }
        }
    }
    assert_eq!(canonical(&Deep(DEPTH_MAX)).len(), 2 * DEPTH_MAX + "null".len());
    assert_eq!(refusal(&Deep(DEPTH_MAX + 1)).0, ErrorKind::TooDeep);
    let side_by_side: Vec<_> = (0..300).map(|_| Deep(DEPTH_MAX - 1)).collect();
    assert_eq!(canonical(&side_by_side).matches("null").count(), 300);
    assert_eq!(canonical(&vec![Some(Name(1)); 2_000]).matches('1').count(), 2_000);
}

/// What `serde_json::Number` hands to a serializer under its feature `arbitrary_precision`.
#[derive(Serialize)]
#[serde(rename = "$serde_json::private::Number")]
struct ArbitraryPrecision {
    #[serde(rename = "$serde_json::private::Number")]
    digits: &'static str,
}

/// What `serde_json::value::RawValue` hands to a serializer.
#[derive(Serialize)]
#[serde(rename = "$serde_json::private::RawValue")]
struct Raw {
    #[serde(rename = "$serde_json::private::RawValue")]
    text: &'static str,
}

#[test]
fn numbers_of_arbitrary_precision_are_literals() {
    let canonical_of = |digits| canonical(&ArbitraryPrecision { digits });
    assert_eq!(canonical_of("9007199254740993"), "9007199254740993");
    assert_eq!(canonical_of("1.0"), "1");
    assert_eq!(canonical_of("1e+20"), "100000000000000000000");
    let refused = |digits| refusal(&order(|| ArbitraryPrecision { digits }));
    let path = || "/lines/3/price".to_owned();
    assert_eq!(refused("100000000000000000000"), (ErrorKind::IntegerRange, path()));
    assert_eq!(refused("1e400"), (ErrorKind::NotFinite, path()));
    assert_eq!(refused("1,2"), (ErrorKind::NoJsonForm, path()));
}

#[test]
fn raw_json_is_read_as_strictly_as_any_text() {
    assert_eq!(canonical(&Raw { text: r#" {"b": 1.0, "a": [2e0]} "# }), r#"{"a":[2],"b":1}"#);
    let refused = |text| refusal(&order(|| Raw { text }));
    assert_eq!(refused(r#"{"a":1,"a":2}"#), (ErrorKind::DuplicateName, "/lines/3/price/a".to_owned()));
    assert_eq!(refused(r#"["\ud800"]"#), (ErrorKind::LoneSurrogate, "/lines/3/price/0".to_owned()));
    for broken in [r#"1,"x":2"#, "", "]", "{"] {
        assert_eq!(refused(broken), (ErrorKind::NoJsonForm, "/lines/3/price".to_owned()), "{broken}");
    }
}

#[test]
fn the_type_of_a_value_is_a_part_of_its_key() {
    let handler = Handler::new("charge", "1").unwrap();
    fn key<T: Serialize>(handler: &Handler, value: T) -> String {
        let input = Input::from_value(&value).unwrap();
        handler.task_from(&input, &Fields::all()).unwrap().key.to_string()
    }
    let mut keys = vec![
        key(&handler, 1),
        key(&handler, "1"),
        key(&handler, [1]),
        key(&handler, ("a", "b")),
        key(&handler, "a,b"),
        key(&handler, ["a,b"]),
        key(&handler, 0),
        key(&handler, ""),
        key(&handler, [0_u8; 0]),
        key(&handler, BTreeMap::<String, u8>::new()),
        key(&handler, false),
        key(&handler, ()),
        key(&handler, 9_007_199_254_740_992_u64),
        key(&handler, 9_007_199_254_740_993_u64),
        key(&Handler::new("charge", "2").unwrap(), 1),
        key(&Handler::new("refund", "1").unwrap(), 1),
        key(&Handler::within("test", "charge", "1").unwrap(), 1),
    ];
    let count = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), count);
    assert_eq!(key(&handler, 1), key(&handler, 1.0));
}

#[test]
fn what_is_outside_of_the_chosen_fields_changes_neither_key_nor_fingerprint() {
    let handler = Handler::new("charge", "1").unwrap();
    let task =
        |text: &str, fields: &Fields| handler.task_from(&Input::from_json(text.as_bytes()).unwrap(), fields).unwrap();
    let (first, again) = (r#"{"id":7,"sent_at":"monday"}"#, r#"{"sent_at":"friday","id":7}"#);
    let id = Fields::new(["/id"]).unwrap();
    assert_eq!(task(first, &id), task(again, &id));
    assert_ne!(task(first, &Fields::all()).key, task(again, &Fields::all()).key);

    let given = |text: &str| handler.task("7", &Input::from_json(text.as_bytes()).unwrap()).unwrap();
    assert_eq!(given(first).key, given(again).key);
    assert_ne!(given(first).fingerprint, given(again).fingerprint);
}

#[test]
fn an_error_says_what_and_where_but_not_the_value() {
    let says = |text: &str| Input::from_json(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(
        says(r#"{"lines":[{"a":1},{"price":[1,}]}"#),
        "/lines/1/price/1: expected a value at byte 30, found `}`"
    );
    assert_eq!(says(r#"{"a":1,"k":"v" "w"}"#), "/k: expected `,` or `}` at byte 15, found `\"`");
    assert_eq!(says("[1"), "/0: expected `,` or `]`, but the input ends at byte 2");
    assert_eq!(says(""), "expected a value, but the input ends at byte 0");
    assert_eq!(says("{} x"), "expected the end of the document at byte 3, found `x`");
    assert_eq!(says(r#"{"a":"secret\x"}"#), "/a: expected an escape of JSON at byte 13, found `x`");
    assert_eq!(says("[\"\u{7}\"]"), "/0: expected control characters to be escaped at byte 2, found byte 0x07");
    assert_eq!(
        says(r#"{"a":[5555555555555555555555]}"#),
        "/a/0: the integer lies outside of the i64 and u64 range, where digits would be lost"
    );
    assert_eq!(says(r#"{"a\nb":1e999}"#), "/a\\nb: the number is too large for a double");
    let long = format!("{{\"{}\":x}}", "n".repeat(10_000));
    assert!(Input::from_json(long.as_bytes()).unwrap_err().to_string().len() < 700);
    let input = Input::from_json(br#"{"card":"4111"}"#).unwrap();
    assert_eq!(format!("{input:?}"), "Input(15 bytes)");
}
