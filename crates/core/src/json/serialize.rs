//! Any `serde::Serialize` as the text of a document, which the parser then reads: so there is one set of rules.
//!
//! It goes through no `serde_json::Value`, whose meaning changes with features that other crates switch on. Of
//! `serde_json`'s own types, a `Number` (under `arbitrary_precision`) and a `RawValue` arrive as structs of known names.

use std::fmt::{self, Display, Write as _};

use serde::ser::{self, Serialize, Serializer};

use super::only_string::{OnlyString, Role};
use super::text::write_string;
use super::{DEPTH_MAX, INPUT_MAX, locate, parse};
use crate::error::{Error, ErrorKind, Result};

/// The most wrappers without brackets (`Some`, newtypes) around a value: they too take stack.
const WRAPPERS_MAX: usize = 4 * DEPTH_MAX;

/// How `serde_json` hands on a number as text, and raw JSON.
const LITERALS: [&str; 2] = ["$serde_json::private::Number", "$serde_json::private::RawValue"];

/// The text of a value. Duplicate names and the ranges of literals are left to the parser.
pub(super) fn to_text<T: Serialize + ?Sized>(value: &T) -> Result<String> {
    let mut writer = Writer { text: Vec::with_capacity(256), depth: 0, wrappers: 0 };
    match value.serialize(&mut writer) {
        Ok(()) => Ok(String::from_utf8(writer.text).expect("only strings and ASCII were written")),
        Err(Refusal(error)) => Err(locate::Place::after(&writer.text).subject(*error)),
    }
}

struct Writer {
    text: Vec<u8>,
    depth: usize,
    wrappers: usize,
}

/// An error on its way through the value's own `Serialize`.
#[derive(Debug)]
pub(super) struct Refusal(Box<Error>);

impl Refusal {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Refusal {
        Refusal(Box::new(Error::new(kind, message)))
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refusal {}

impl ser::Error for Refusal {
    fn custom<T: Display>(message: T) -> Refusal {
        Refusal::new(ErrorKind::NoJsonForm, format!("the value refuses to be serialised: {message}"))
    }
}

impl Writer {
    fn open<'w>(&'w mut self, opening: &[u8], closing: &'static str) -> Result<Members<'w>, Refusal> {
        self.depth += closing.len();
        if self.depth > DEPTH_MAX {
            let message = "more than 128 arrays and objects inside each other";
            return Err(Refusal::new(ErrorKind::TooDeep, message));
        }
        self.text.extend_from_slice(opening);
        Ok(Members { writer: self, first: true, closing })
    }

    /// Opens the object of one member that an enum's variant is, and what its content opens.
    fn open_variant(&mut self, variant: &str, opening: u8, closing: &'static str) -> Result<Members<'_>, Refusal> {
        let mut start = vec![b'{'];
        write_string(variant.as_bytes(), &mut start);
        start.extend([b':', opening]);
        self.open(&start, closing)
    }

    fn wrapped<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
        enter(&mut self.wrappers)?;
        value.serialize(&mut *self)?;
        self.wrappers -= 1;
        Ok(())
    }

    fn display(&mut self, value: impl Display) -> Result<(), Refusal> {
        use std::io::Write as _;
        write!(self.text, "{value}").expect("a vector takes everything");
        Ok(())
    }

    /// A double keeps a mark that it is no integer literal.
    fn double(&mut self, finite: bool, shortest: &str) -> Result<(), Refusal> {
        if !finite {
            return Err(Refusal::new(ErrorKind::NotFinite, "NaN and infinities are no numbers of JSON"));
        }
        self.text.extend_from_slice(shortest.as_bytes());
        if shortest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
            self.text.extend_from_slice(b".0");
        }
        Ok(())
    }

    /// Raw JSON as text. What the parser refuses for another reason than its grammar, it refuses again with its place.
    fn literal(&mut self, literal: &str) -> Result<(), Refusal> {
        if literal.len() > INPUT_MAX {
            return Err(Refusal::new(ErrorKind::NoJsonForm, "the raw text of the value is longer than any input"));
        }
        match parse::parse(literal.as_bytes()) {
            Err(fault) if fault.kind == ErrorKind::BadJson => {
                Err(Refusal::new(ErrorKind::NoJsonForm, "the raw text of the value is not JSON"))
            }
            Ok(_) | Err(_) => {
                self.text.extend_from_slice(literal.as_bytes());
                Ok(())
            }
        }
    }
}

/// Counts one more wrapper.
pub(super) fn enter(wrappers: &mut usize) -> Result<(), Refusal> {
    *wrappers += 1;
    if *wrappers > WRAPPERS_MAX {
        return Err(Refusal::new(ErrorKind::TooDeep, "more than 512 wrappers around a value"));
    }
    Ok(())
}

macro_rules! as_display {
    ($($method:ident($type:ty);)+) => {
        $(fn $method(self, value: $type) -> Result<(), Refusal> {
            self.display(value)
        })+
    };
}

impl<'w> Serializer for &'w mut Writer {
    type Ok = ();
    type Error = Refusal;
    type SerializeSeq = Members<'w>;
    type SerializeTuple = Members<'w>;
    type SerializeTupleStruct = Members<'w>;
    type SerializeTupleVariant = Members<'w>;
    type SerializeMap = Members<'w>;
    type SerializeStruct = Struct<'w>;
    type SerializeStructVariant = Members<'w>;

    // Integers out of range are written too: the parser refuses them.
    as_display! {
        serialize_bool(bool);
        serialize_i8(i8);
        serialize_i16(i16);
        serialize_i32(i32);
        serialize_i64(i64);
        serialize_i128(i128);
        serialize_u8(u8);
        serialize_u16(u16);
        serialize_u32(u32);
        serialize_u64(u64);
        serialize_u128(u128);
    }

    fn serialize_f32(self, value: f32) -> Result<(), Refusal> {
        self.double(value.is_finite(), ryu_js::Buffer::new().format(value))
    }

    fn serialize_f64(self, value: f64) -> Result<(), Refusal> {
        self.double(value.is_finite(), ryu_js::Buffer::new().format(value))
    }

    fn serialize_char(self, value: char) -> Result<(), Refusal> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), Refusal> {
        write_string(value.as_bytes(), &mut self.text);
        Ok(())
    }

    fn serialize_bytes(self, _: &[u8]) -> Result<(), Refusal> {
        Err(Refusal::new(ErrorKind::NoJsonForm, "bytes have no form of their own in JSON"))
    }

    fn serialize_none(self) -> Result<(), Refusal> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Refusal> {
        self.wrapped(value)
    }

    fn serialize_unit(self) -> Result<(), Refusal> {
        self.text.extend_from_slice(b"null");
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Refusal> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Refusal> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), Refusal> {
        self.wrapped(value)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Refusal> {
        let mut object = self.open(b"{", "}")?;
        object.named(variant, value)?;
        object.finish()
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Members<'w>, Refusal> {
        self.open(b"[", "]")
    }

    fn serialize_tuple(self, _: usize) -> Result<Members<'w>, Refusal> {
        self.open(b"[", "]")
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Members<'w>, Refusal> {
        self.open(b"[", "]")
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Members<'w>, Refusal> {
        self.open_variant(variant, b'[', "]}")
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Members<'w>, Refusal> {
        self.open(b"{", "}")
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Result<Struct<'w>, Refusal> {
        if LITERALS.contains(&name) { Ok(Struct::Literal(self)) } else { Ok(Struct::Object(self.open(b"{", "}")?)) }
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Members<'w>, Refusal> {
        self.open_variant(variant, b'{', "}}")
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<(), Refusal> {
        let mut text = String::new();
        write!(text, "{value}")
            .map_err(|_| Refusal::new(ErrorKind::NoJsonForm, "the value's text cannot be written"))?;
        self.serialize_str(&text)
    }
}

/// An array or object that is being written.
struct Members<'w> {
    writer: &'w mut Writer,
    first: bool,
    closing: &'static str,
}

impl Members<'_> {
    fn comma(&mut self) {
        if !std::mem::take(&mut self.first) {
            self.writer.text.push(b',');
        }
    }

    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
        self.comma();
        value.serialize(&mut *self.writer)
    }

    fn named<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Refusal> {
        self.comma();
        write_string(name.as_bytes(), &mut self.writer.text);
        self.writer.text.push(b':');
        value.serialize(&mut *self.writer)
    }

    fn finish(self) -> Result<(), Refusal> {
        self.writer.depth -= self.closing.len();
        self.writer.text.extend_from_slice(self.closing.as_bytes());
        Ok(())
    }
}

macro_rules! list {
    ($($port:ident::$method:ident;)+) => {
        $(impl ser::$port for Members<'_> {
            type Ok = ();
            type Error = Refusal;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
                self.element(value)
            }

            fn end(self) -> Result<(), Refusal> {
                self.finish()
            }
        })+
    };
}

list! {
    SerializeSeq::serialize_element;
    SerializeTuple::serialize_element;
    SerializeTupleStruct::serialize_field;
    SerializeTupleVariant::serialize_field;
}

impl ser::SerializeMap for Members<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Refusal> {
        self.comma();
        let content = key.serialize(OnlyString::new(Role::Key))?;
        write_string(content.as_bytes(), &mut self.writer.text);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Refusal> {
        self.writer.text.push(b':');
        value.serialize(&mut *self.writer)
    }

    fn end(self) -> Result<(), Refusal> {
        self.finish()
    }
}

impl ser::SerializeStructVariant for Members<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Refusal> {
        self.named(name, value)
    }

    fn end(self) -> Result<(), Refusal> {
        self.finish()
    }
}

/// A struct, or one of `serde_json`'s that stand for a literal.
enum Struct<'w> {
    Object(Members<'w>),
    Literal(&'w mut Writer),
}

impl ser::SerializeStruct for Struct<'_> {
    type Ok = ();
    type Error = Refusal;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Refusal> {
        match self {
            Struct::Object(members) => members.named(name, value),
            Struct::Literal(writer) => {
                let literal = value.serialize(OnlyString::new(Role::Literal))?;
                writer.literal(&literal)
            }
        }
    }

    fn end(self) -> Result<(), Refusal> {
        match self {
            Struct::Object(members) => members.finish(),
            Struct::Literal(_) => Ok(()),
        }
    }
}
