//! Serialises what is a string as a value, and refuses all else: map keys, and the raw text of literals.

use std::fmt::{Display, Write as _};

use serde::ser::{self, Serialize, Serializer};

use super::serialize::{Refusal, enter};
use crate::error::ErrorKind;

/// Takes what is a string as a value, and nothing else.
pub(super) struct OnlyString {
    role: Role,
    wrappers: usize,
}

/// What the string is for.
pub(super) enum Role {
    Key,
    Literal,
}

impl OnlyString {
    pub(super) fn new(role: Role) -> OnlyString {
        OnlyString { role, wrappers: 0 }
    }

    fn wrapped<T: Serialize + ?Sized>(mut self, value: &T) -> Result<String, Refusal> {
        enter(&mut self.wrappers)?;
        value.serialize(self)
    }

    fn refuse<T>(self, found: &str) -> Result<T, Refusal> {
        match self.role {
            Role::Key => Err(Refusal::new(ErrorKind::KeyNotString, format!("a map key is {found}, not a string"))),
            Role::Literal => Err(Refusal::new(ErrorKind::NoJsonForm, format!("the raw text of the value is {found}"))),
        }
    }
}

macro_rules! no_strings {
    ($($method:ident($($type:ty),*) -> $ok:ty, $found:literal;)+) => {
        $(fn $method(self, $(_: $type),*) -> Result<$ok, Refusal> {
            self.refuse($found)
        })+
    };
}

type Never = ser::Impossible<String, Refusal>;

impl Serializer for OnlyString {
    type Ok = String;
    type Error = Refusal;
    type SerializeSeq = Never;
    type SerializeTuple = Never;
    type SerializeTupleStruct = Never;
    type SerializeTupleVariant = Never;
    type SerializeMap = Never;
    type SerializeStruct = Never;
    type SerializeStructVariant = Never;

    fn serialize_str(self, value: &str) -> Result<String, Refusal> {
        Ok(value.to_owned())
    }

    fn serialize_char(self, value: char) -> Result<String, Refusal> {
        Ok(value.to_string())
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<String, Refusal> {
        Ok(variant.to_owned())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<String, Refusal> {
        self.wrapped(value)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<String, Refusal> {
        self.wrapped(value)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<String, Refusal> {
        self.refuse("a variant with content")
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<String, Refusal> {
        let mut text = String::new();
        write!(text, "{value}").map_err(|_| Refusal::new(ErrorKind::NoJsonForm, "the key's text cannot be written"))?;
        Ok(text)
    }

    no_strings! {
        serialize_bool(bool) -> String, "a truth value";
        serialize_i8(i8) -> String, "a number";
        serialize_i16(i16) -> String, "a number";
        serialize_i32(i32) -> String, "a number";
        serialize_i64(i64) -> String, "a number";
        serialize_i128(i128) -> String, "a number";
        serialize_u8(u8) -> String, "a number";
        serialize_u16(u16) -> String, "a number";
        serialize_u32(u32) -> String, "a number";
        serialize_u64(u64) -> String, "a number";
        serialize_u128(u128) -> String, "a number";
        serialize_f32(f32) -> String, "a number";
        serialize_f64(f64) -> String, "a number";
        serialize_bytes(&[u8]) -> String, "bytes";
        serialize_none() -> String, "nothing";
        serialize_unit() -> String, "nothing";
        serialize_unit_struct(&'static str) -> String, "nothing";
        serialize_seq(Option<usize>) -> Never, "a list";
        serialize_tuple(usize) -> Never, "a list";
        serialize_tuple_struct(&'static str, usize) -> Never, "a list";
        serialize_tuple_variant(&'static str, u32, &'static str, usize) -> Never, "a variant with content";
        serialize_map(Option<usize>) -> Never, "a map";
        serialize_struct(&'static str, usize) -> Never, "a map";
        serialize_struct_variant(&'static str, u32, &'static str, usize) -> Never, "a variant with content";
    }
}
