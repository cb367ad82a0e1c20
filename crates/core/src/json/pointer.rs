//! The choice of fields: JSON Pointers (RFC 6901), required or optional.

use super::canon::Document;
use super::text;
use crate::error::{Error, ErrorKind, Result};

/// The fields of an input that make its key.
///
/// A pointer names one place: `/order/id`, `/lines/0/sku`; `~1` stands for `/` and `~0` for `~` in a name, and `""` is the
/// whole document. What is hashed for it is in the [contract](super).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Sorted as members are; nothing for the whole document.
    pointers: Option<Vec<Pointer>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pointer {
    text: String,
    tokens: Vec<String>,
    optional: bool,
}

impl Fields {
    /// The whole input.
    #[must_use]
    pub fn all() -> Fields {
        Fields { pointers: None }
    }

    /// These fields, which every input must have. Their order means nothing.
    ///
    /// # Errors
    /// [`ErrorKind::BadPointer`] when one is malformed or given twice.
    pub fn new<I>(required: I) -> Result<Fields>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        Fields { pointers: Some(Vec::new()) }.with(required, Need::Required)
    }

    /// Also these fields, where an input has them.
    ///
    /// # Errors
    /// [`ErrorKind::BadPointer`] when one is malformed or given twice, or when the whole input is chosen already.
    pub fn optional<I>(self, optional: I) -> Result<Fields>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        self.with(optional, Need::Optional)
    }

    fn with<I>(mut self, texts: I, need: Need) -> Result<Fields>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        for text in texts {
            let pointer = Pointer::parse(text.as_ref(), need)?;
            let refused = |message| Err(Error::new(ErrorKind::BadPointer, message).about(&pointer.text));
            let Some(pointers) = &mut self.pointers else {
                return refused("the whole input is chosen already, an optional pointer adds nothing");
            };
            let order = |other: &Pointer| text::compare_names(other.text.as_bytes(), pointer.text.as_bytes());
            match pointers.binary_search_by(order) {
                Ok(_) => return refused("the pointer is given twice"),
                Err(place) => pointers.insert(place, pointer),
            }
        }
        Ok(self)
    }

    pub(super) fn pointers(&self) -> Option<&[Pointer]> {
        self.pointers.as_deref()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Required,
    Optional,
}

impl Pointer {
    fn parse(text: &str, need: Need) -> Result<Pointer> {
        let refused = |message: &str| Error::new(ErrorKind::BadPointer, message).about(format!("pointer {text:?}"));
        let tokens = match text.strip_prefix('/') {
            None if text.is_empty() => Vec::new(),
            None => return Err(refused("a pointer begins with `/`")),
            Some(rest) => rest
                .split('/')
                .map(|token| {
                    // Whatever follows a tilde must be one of the two escapes.
                    if token.split('~').skip(1).any(|after| !after.starts_with(['0', '1'])) {
                        return Err(refused("a `~` is followed by neither `0` nor `1`"));
                    }
                    Ok(token.replace("~1", "/").replace("~0", "~"))
                })
                .collect::<Result<_>>()?,
        };
        Ok(Pointer { text: text.to_owned(), tokens, optional: need == Need::Optional })
    }

    /// The node that the pointer names; else how many of its tokens were found.
    fn find(&self, document: &Document<'_>) -> std::result::Result<u32, usize> {
        self.tokens
            .iter()
            .enumerate()
            .try_fold(document.root(), |node, (found, token)| document.child(node, token).ok_or(found))
    }

    fn missing(&self, found: usize) -> Error {
        let parent: String = self.text.split_inclusive('/').take(found + 1).collect();
        let parent = parent.strip_suffix('/').unwrap_or(&parent);
        let token = &self.tokens[found];
        let message = if parent.is_empty() {
            format!("the input has no {token:?}")
        } else {
            format!("the input has `{parent}`, but no {token:?} in it")
        };
        Error::new(ErrorKind::PointerMissing, message).about(&self.text)
    }
}

/// Writes the canonical form of the object of the chosen fields.
pub(super) fn write_chosen(document: &Document<'_>, pointers: &[Pointer], out: &mut Vec<u8>) -> Result<()> {
    out.push(b'{');
    for pointer in pointers {
        match pointer.find(document) {
            Ok(node) => {
                if out.len() > 1 {
                    out.push(b',');
                }
                text::write_string(pointer.text.as_bytes(), out);
                out.push(b':');
                document.write(node, out);
            }
            Err(_) if pointer.optional => {}
            Err(found) => return Err(pointer.missing(found)),
        }
    }
    if out.len() == 1 {
        return Err(Error::new(ErrorKind::NothingChosen, "the input has none of the chosen fields"));
    }
    out.push(b'}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Input;

    #[test]
    fn a_malformed_or_repeated_pointer_is_refused_by_name() {
        for bad in ["a", "#/a", "/a~", "/a~2", "/~~0", " /a"] {
            let error = Fields::new([bad]).unwrap_err();
            assert_eq!((error.kind(), error.subject()), (ErrorKind::BadPointer, Some(&*format!("pointer {bad:?}"))));
        }
        let twice = [
            Fields::new(["/a", "/b", "/a"]),
            Fields::new(["/a"]).unwrap().optional(["/b", "/a"]),
            Fields::all().optional(["/a"]),
        ];
        for error in twice.map(Result::unwrap_err) {
            assert_eq!((error.kind(), error.subject()), (ErrorKind::BadPointer, Some("/a")));
        }
    }

    #[test]
    fn a_missing_pointer_says_how_far_it_came() {
        let input = Input::from_json(br#"{"a~b": {"c": [1]}}"#).unwrap();
        for (pointer, says) in [
            ("/x/y", r#"/x/y: the input has no "x""#),
            ("/a~0b/x", r#"/a~0b/x: the input has `/a~0b`, but no "x" in it"#),
            ("/a~0b/c/1", r#"/a~0b/c/1: the input has `/a~0b/c`, but no "1" in it"#),
            ("/a~0b/c/0/z", r#"/a~0b/c/0/z: the input has `/a~0b/c/0`, but no "z" in it"#),
        ] {
            let error = input.digest(&Fields::new([pointer]).unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PointerMissing);
            assert_eq!(error.to_string(), says);
        }
    }

    #[test]
    fn the_order_of_pointers_means_nothing() {
        let input = Input::from_json(br#"{"a": 1, "b": 2, "c": 3}"#).unwrap();
        let canonical = |fields: Fields| String::from_utf8(input.canonical(&fields).unwrap()).unwrap();
        let expected = r#"{"/a":1,"/b":2,"/c":3}"#;
        assert_eq!(canonical(Fields::new(["/c", "/a", "/b"]).unwrap()), expected);
        assert_eq!(canonical(Fields::new(["/b"]).unwrap().optional(["/d", "/c", "/a"]).unwrap()), expected);
    }
}
