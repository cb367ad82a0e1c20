//! What an input says: strict JSON in, canonical JSON of the chosen fields and its digest out.
//!
//! How names and ids become a key is in [`key`](crate::key).
//!
//! # The contract, for every language
//!
//! Two inputs are the same task when the canonical JSON of their chosen fields is the same bytes. The published vectors
//! (`crates/contract/vectors/keys.json`) hold an example of every rule below.
//!
//! **What is hashed.** With [`Fields::all`], the canonical JSON of the whole document. With JSON Pointers, the canonical
//! JSON of one object whose member names are the pointers, as they were written, and whose members are the values found
//! there: `{"/customer/id":7,"/lines/0/sku":"a"}`. An optional pointer that finds nothing leaves no member; `null` is a
//! value like any other. The order in which pointers are given means nothing. SHA-256 of these bytes is the [`Digest`]:
//! its first 20 bytes in lower hex are the derived id, its first 16 bytes the fingerprint.
//!
//! **Canonical JSON** is RFC 8785: no white space, members sorted by the UTF-16 code units of their names, the shortest
//! escapes, numbers as ECMAScript prints a double; no Unicode normalisation. One addition: an *integer literal* (no
//! fraction, no exponent) keeps its exact digits, so that 64-bit ids never collapse into one double.
//!
//! | written | canonical | why |
//! |---|---|---|
//! | `1`, `1.0`, `1e0`, `10e-1` | `1` | one number |
//! | `-0`, `-0.0`, `1e-400` | `0` | zero has one form |
//! | `1e2`, `100.0` | `100` | one number |
//! | `9007199254740993` | `9007199254740993` | an integer literal keeps its digits |
//! | `9007199254740993.0` | `9007199254740992` | any other literal is the double nearest to it |
//! | `1e20` | `100000000000000000000` | RFC 8785 prints doubles below 1e21 without an exponent |
//! | `100000000000000000000` | refused, `integer_range` | an integer literal outside of -2^63 to 2^64 - 1: pass a string |
//! | `1e400` | refused, `not_finite` | too large for a double |
//!
//! So the literals `1` and `1.0` are equal up to 2^53, beyond which a double cannot hold every integer. The canonical
//! form is a form to be hashed, not one to be read again: that of `1e20` is an integer literal out of range.
//!
//! **Refused**, each by a kind of its own and with the JSON Pointer of the place as the error's subject (no subject means
//! the whole document): a name given twice in one object, compared after unescaping (`duplicate_name`); half of a UTF-16
//! pair (`lone_surrogate`); more than [`DEPTH_MAX`] arrays and objects inside each other (`too_deep`); the numbers above;
//! and, as `bad_json` with the offset in bytes, all that RFC 8259 does not allow: bytes that are not UTF-8, a byte order
//! mark, a comment, a trailing comma, `NaN`, a second document. An input longer than [`INPUT_MAX`] is `bad_json` too.

mod canon;
mod locate;
mod number;
mod only_string;
mod parse;
mod pointer;
mod serialize;
mod text;

use std::borrow::Cow;
use std::fmt;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::key::Fingerprint;
use parse::{Fault, Tape};
pub use pointer::Fields;

/// The most arrays and objects that may stand inside each other.
pub const DEPTH_MAX: usize = 128;
/// The longest input, in bytes: one GiB.
pub const INPUT_MAX: usize = 1 << 30;

/// A task's input: one JSON document without any ambiguity.
///
/// Both ways in give the same canonical bytes for the same data: `from_value` of a value is `from_json` of the text that
/// `serde_json::to_vec` writes for it.
///
/// ```
/// use taskonce_core::json::{Fields, Input};
///
/// let input = Input::from_json(br#"{"b": 1.0, "a": 9007199254740993, "sent_at": "2026-01-01"}"#)?;
/// assert_eq!(input.canonical(&Fields::all())?, br#"{"a":9007199254740993,"b":1,"sent_at":"2026-01-01"}"#);
///
/// let fields = Fields::new(["/b", "/a"])?.optional(["/c"])?;
/// assert_eq!(input.canonical(&fields)?, br#"{"/a":9007199254740993,"/b":1}"#);
/// # Ok::<(), taskonce_core::Error>(())
/// ```
pub struct Input<'a> {
    text: Cow<'a, str>,
    tape: Tape,
}

impl<'a> Input<'a> {
    /// Reads one JSON document.
    ///
    /// # Errors
    /// Every refusal of the [contract](self). Its subject is the JSON Pointer of the place; offsets count bytes from 0.
    pub fn from_json(bytes: &'a [u8]) -> Result<Input<'a>> {
        check_length(bytes.len())?;
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let fault = Fault::new(ErrorKind::BadJson, error.valid_up_to(), "the input is not UTF-8");
            refuse(&fault, bytes)
        })?;
        let tape = parse::parse(text.as_bytes()).map_err(|fault| refuse(&fault, bytes))?;
        Ok(Input { text: Cow::Borrowed(text), tape })
    }
}

impl Input<'static> {
    /// Takes the JSON form of any value.
    ///
    /// It is the form that `serde_json` writes, whichever of its features are on: `None`, `()` and unit structs are `null`,
    /// a unit variant is its name, other variants are objects of one member, an `f32` is its own shortest digits. A map
    /// key must be what is a string as a value: a string, a `char`, a unit variant, or a newtype of these.
    ///
    /// # Errors
    /// The refusals of the [contract](self), with the JSON Pointer of the place as subject, and:
    /// [`ErrorKind::NotFinite`] for NaN and infinities; [`ErrorKind::IntegerRange`] for an `i128` or `u128` outside of the
    /// i64 and u64 range; [`ErrorKind::KeyNotString`] for other map keys (`1` and `"1"` must not be one key);
    /// [`ErrorKind::NoJsonForm`] for bytes (`serialize_bytes`; a `Vec<u8>` without it is a list of numbers), and where the
    /// value's own `Serialize` fails.
    pub fn from_value<T: Serialize + ?Sized>(value: &T) -> Result<Input<'static>> {
        let text = serialize::to_text(value)?;
        check_length(text.len())?;
        let tape = parse::parse(text.as_bytes()).map_err(|fault| refuse(&fault, text.as_bytes()))?;
        Ok(Input { text: Cow::Owned(text), tape })
    }
}

impl Input<'_> {
    /// The bytes that are hashed for these fields.
    ///
    /// # Errors
    /// [`ErrorKind::PointerMissing`] names the required pointer that finds nothing; [`ErrorKind::NothingChosen`] when none
    /// of the pointers is present.
    pub fn canonical(&self, fields: &Fields) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(self.text.len());
        let document = canon::Document { text: self.text.as_bytes(), tape: &self.tape };
        match fields.pointers() {
            None => document.write(document.root(), &mut out),
            Some(pointers) => pointer::write_chosen(&document, pointers, &mut out)?,
        }
        Ok(out)
    }

    /// The digest of the chosen fields.
    ///
    /// # Errors
    /// As [`Input::canonical`].
    pub fn digest(&self, fields: &Fields) -> Result<Digest> {
        Ok(Digest(Sha256::digest(self.canonical(fields)?).into()))
    }

    /// The fingerprint of the chosen fields.
    ///
    /// # Errors
    /// As [`Input::canonical`].
    pub fn fingerprint(&self, fields: &Fields) -> Result<Fingerprint> {
        Ok(self.digest(fields)?.fingerprint())
    }
}

/// Says the size only: an input may hold what belongs into no log.
impl fmt::Debug for Input<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Input({} bytes)", self.text.len())
    }
}

/// The SHA-256 of the canonical JSON of chosen fields.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The derived id: the first 20 bytes in lower hex.
    #[must_use]
    pub fn id(&self) -> String {
        let mut id = String::with_capacity(40);
        for byte in &self.0[..20] {
            id.extend([hex_digit(byte >> 4), hex_digit(byte & 15)]);
        }
        id
    }

    /// The fingerprint: the first 16 bytes.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.0[..16]);
        Fingerprint(bytes)
    }

    /// All 32 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// All 32 bytes in lower hex.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// The lower hex digit of a number below 16.
fn hex_digit(half: u8) -> char {
    char::from(b"0123456789abcdef"[usize::from(half & 15)])
}

fn check_length(length: usize) -> Result<()> {
    if length > INPUT_MAX {
        let message = format!("the input has {length} bytes, {INPUT_MAX} at most are allowed");
        return Err(Error::new(ErrorKind::BadJson, message).with_hint("pass what names the task, not all of its data"));
    }
    Ok(())
}

/// The error of a fault: its words, its offset where the grammar was broken, and its place as a JSON Pointer.
fn refuse(fault: &Fault, text: &[u8]) -> Error {
    let message = match (fault.kind, text.get(fault.at)) {
        (ErrorKind::BadJson, Some(byte @ b' '..=b'~')) => {
            format!("{} at byte {}, found `{}`", fault.what, fault.at, char::from(*byte))
        }
        (ErrorKind::BadJson, Some(byte)) => format!("{} at byte {}, found byte 0x{byte:02x}", fault.what, fault.at),
        (ErrorKind::BadJson, None) => format!("{}, but the input ends at byte {}", fault.what, fault.at),
        _ => fault.what.to_owned(),
    };
    let mut place = locate::Place::after(&text[..fault.at.min(text.len())]);
    if let Some(name) = &fault.name {
        place.rename(name);
    }
    place.subject(Error::new(fault.kind, message))
}
