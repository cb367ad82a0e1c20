//! Where in a document an error lies, as a JSON Pointer. It is found by reading the text up to there once more, so that
//! parser and serializer keep no path while all is well.

use std::fmt::Write as _;

use super::text;
use crate::error::Error;

/// The longest pointer in an error, in characters; the rest is cut.
const SUBJECT_MAX: usize = 512;

/// The array or object that is open, and the element or member in it.
enum Level {
    Element(usize),
    Member(Option<Vec<u8>>),
}

/// A place in a document.
pub(super) struct Place(Vec<Level>);

impl Place {
    /// The place at the end of the beginning of a document that is well formed so far.
    pub(super) fn after(beginning: &[u8]) -> Place {
        let mut levels = Vec::new();
        let mut at = 0;
        while let Some(byte) = beginning.get(at) {
            at += 1;
            match (byte, levels.last_mut()) {
                (b'{', _) => levels.push(Level::Member(None)),
                (b'[', _) => levels.push(Level::Element(0)),
                (b'}' | b']', _) => drop(levels.pop()),
                (b',', Some(Level::Element(index))) => *index += 1,
                (b',', Some(Level::Member(name))) => *name = None,
                (b'"', level) => {
                    let Some((content, end)) = read_string(beginning, at) else { break };
                    at = end;
                    if let Some(Level::Member(name @ None)) = level {
                        *name = Some(content);
                    }
                }
                _ => {}
            }
        }
        Place(levels)
    }

    /// Names another member of the innermost object.
    pub(super) fn rename(&mut self, name: &[u8]) {
        self.0.pop();
        self.0.push(Level::Member(Some(name.to_vec())));
    }

    /// Makes this place the subject of an error, unless it is the whole document.
    pub(super) fn subject(&self, error: Error) -> Error {
        let mut pointer = String::new();
        for level in &self.0 {
            match level {
                Level::Element(index) => write!(pointer, "/{index}").expect("a string takes everything"),
                Level::Member(Some(name)) => {
                    pointer.push('/');
                    for character in String::from_utf8_lossy(name).chars() {
                        match character {
                            '~' => pointer.push_str("~0"),
                            '/' => pointer.push_str("~1"),
                            control if control.is_control() => pointer.extend(control.escape_default()),
                            other => pointer.push(other),
                        }
                    }
                }
                Level::Member(None) => {}
            }
        }
        if let Some((cut, _)) = pointer.char_indices().nth(SUBJECT_MAX) {
            pointer.truncate(cut);
            pointer.push('…');
        }
        if pointer.is_empty() && !self.0.iter().any(|level| matches!(level, Level::Member(Some(_)))) {
            return error;
        }
        error.about(pointer)
    }
}

/// The content of the string whose first byte is at `at`, and where it ends; nothing when it has no end.
fn read_string(beginning: &[u8], at: usize) -> Option<(Vec<u8>, usize)> {
    let mut content = Vec::new();
    let mut start = at;
    loop {
        let end = text::plain_end(beginning, start);
        content.extend_from_slice(&beginning[start..end]);
        start = match beginning.get(end)? {
            b'"' => return Some((content, end + 1)),
            b'\\' => text::unescape(beginning, end, &mut content).ok()?,
            _ => return None,
        };
    }
}
