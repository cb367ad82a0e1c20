//! Where a walk stands, as the cursor that a page gives and the next one takes.

use taskonce_core::Result;
use taskonce_core::key::Key;
use taskonce_core::store::Cursor;

use crate::lists::List;

/// How many keys one `SCAN` looks at, at most: the server does nothing else meanwhile.
pub(crate) const LOOKS_MAX: u64 = 1000;

/// What is walked over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The keys of a primary.
    Keys(Stop),
    /// The entries of a list.
    List(List),
}

/// A primary on the way of a walk over all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stop {
    /// Its number on that way.
    pub(crate) number: usize,
    /// How the keys were spread over servers when the walk began.
    pub(crate) mark: u32,
    /// How often the walk has begun again since.
    pub(crate) again: u32,
}

/// Where a walk stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) source: Source,
    /// The server's cursor.
    pub(crate) cursor: u64,
    /// How many keys the next `SCAN` looks at.
    pub(crate) looks: u64,
    /// What was taken of that `SCAN` already.
    pub(crate) taken: Option<Taken>,
}

/// The part of a `SCAN`'s answer that pages have shown: its keys in their order, up to one.
///
/// The next page asks again, and passes over these keys if the answer ends where it ended before: then it names no key
/// that the first one did not, except such as are new or were named by an earlier answer. If it ends elsewhere (the
/// server's table was resized), nothing is passed over: a row may come twice, and none is missed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) end: u64,
    pub(crate) up_to: Key,
}

impl Source {
    /// The number of a primary, with the rest on a Cluster, or the word of a list.
    fn write(self) -> String {
        match self {
            Source::Keys(Stop { number, mark: 0, again: 0 }) => number.to_string(),
            Source::Keys(Stop { number, mark, again }) => format!("{number}-{mark}-{again}"),
            Source::List(list) => list.word().to_owned(),
        }
    }

    fn read(text: &str) -> Option<Source> {
        let list = List::ALL.into_iter().find(|list| list.word() == text);
        list.map(Source::List).or_else(|| {
            let mut parts = text.splitn(3, '-');
            let number = parts.next()?.parse().ok()?;
            let mark = parts.next().map_or(Some(0), |mark| mark.parse().ok())?;
            let again = parts.next().map_or(Some(0), |again| again.parse().ok())?;
            Some(Source::Keys(Stop { number, mark, again }))
        })
    }
}

impl Place {
    /// `source:cursor:looks`, or `source:cursor:end:key` where a part of an answer was taken, which a `SCAN` of one look
    /// gave. Neither is the cursor of a store that walks in the order of keys.
    pub(crate) fn write(self) -> Cursor {
        let (source, cursor) = (self.source.write(), self.cursor);
        match self.taken {
            None => Cursor(format!("{source}:{cursor}:{}", self.looks)),
            Some(Taken { end, up_to }) => Cursor(format!("{source}:{cursor}:{end}:{}", Cursor::behind(&up_to).0)),
        }
    }

    /// Only as it is written, and within the bounds of what is.
    pub(crate) fn read(cursor: &Cursor) -> Result<Place> {
        let place = Place::parse(&cursor.0).filter(|place| (1..=LOOKS_MAX).contains(&place.looks));
        place.filter(|place| place.clone().write() == *cursor).ok_or_else(|| cursor.refused())
    }

    fn parse(text: &str) -> Option<Place> {
        let mut parts = text.splitn(4, ':');
        let source = Source::read(parts.next()?)?;
        let (cursor, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(match parts.next() {
            None => Place { source, cursor, looks: number, taken: None },
            Some(key) => {
                let up_to = Cursor(key.to_owned()).key().ok()?;
                Place { source, cursor, looks: 1, taken: Some(Taken { end: number, up_to }) }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use taskonce_core::ErrorKind;
    use taskonce_core::store::CURSOR_MAX;

    use super::*;

    #[test]
    fn a_cursor_reads_back_and_a_foreign_one_is_refused() {
        let key = Key::parse("a/b@1/c d:é").unwrap();
        let taken = Some(Taken { end: 0, up_to: key.clone() });
        let keys = |number, mark, again| Source::Keys(Stop { number, mark, again });
        let (first, dead) = (keys(0, 0, 0), Source::List(List::Dead));
        for (place, text) in [
            (Place { source: first, cursor: 17, looks: 40, taken: None }, "0:17:40"),
            (Place { source: keys(12, 0, 0), cursor: 17, looks: 40, taken: None }, "12:17:40"),
            (Place { source: keys(2, 7, 1), cursor: 17, looks: 40, taken: None }, "2-7-1:17:40"),
            (Place { source: dead, cursor: 17, looks: 40, taken: None }, "dead:17:40"),
            (Place { source: first, cursor: 0, looks: 1, taken: taken.clone() }, "0:0:0:a/b@1/c~20d:~C3~A9"),
            (Place { source: dead, cursor: 0, looks: 1, taken }, "dead:0:0:a/b@1/c~20d:~C3~A9"),
        ] {
            let cursor = place.clone().write();
            assert_eq!(cursor.0, text);
            assert_eq!(Place::read(&cursor).unwrap(), place);
            // Nor does a store that walks in the order of keys take it.
            assert!(cursor.key().is_err());
        }
        let foreign = [
            "",
            "x",
            "17",
            "17:",
            "17:40",
            "0:17:0",
            "0:17:1001",
            "0:+17:40",
            "0:017:40",
            "00:17:40",
            "0:17:40:",
            "0:17:40:x",
            "0:17:40:a/b@1/c d",
            "done:17:40",
            "Dead:17:40",
            "dead:17",
            "-1:17:40",
            "1-0-0:17:40",
            "1-2:17:40",
            "1-2-3-4:17:40",
        ];
        for text in foreign.into_iter().chain([Cursor::behind(&key).0.as_str()]) {
            let error = Place::read(&Cursor(text.into())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadCursor, "{text}");
            assert!(error.to_string().starts_with(&format!("cursor `{text}`: ")), "{error}");
        }
    }

    #[test]
    fn the_longest_cursor_is_within_its_bound() {
        let id = "é".repeat(128);
        let text = format!("{}/{}@{}/{id}", "n".repeat(64), "h".repeat(64), "1".repeat(32));
        let taken = Some(Taken { end: u64::MAX, up_to: Key::parse(&text).unwrap() });
        let source = Source::Keys(Stop { number: usize::MAX, mark: u32::MAX, again: u32::MAX });
        let cursor = Place { source, cursor: u64::MAX, looks: 1, taken }.write();
        assert!(cursor.0.len() <= CURSOR_MAX, "{} bytes", cursor.0.len());
    }
}
