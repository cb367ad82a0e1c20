//! Strings of JSON: where they end, what their escapes mean, their canonical form, and the order of names.

use std::cmp::Ordering;

use super::hex_digit;

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHS: u64 = 0x8080_8080_8080_8080;

/// The first place at or after `at` that holds a quote, a backslash or a control character; else the end.
///
/// Eight bytes at a time: in each term, the lowest byte that is marked is marked rightly, and only that one is used.
pub(super) fn plain_end(text: &[u8], mut at: usize) -> usize {
    while let Some(chunk) = text.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        let word = u64::from_le_bytes(*chunk);
        let quote = word ^ (ONES * b'"' as u64);
        let backslash = word ^ (ONES * b'\\' as u64);
        let marks = ((quote.wrapping_sub(ONES) & !quote)
            | (backslash.wrapping_sub(ONES) & !backslash)
            | (word.wrapping_sub(ONES * 0x20) & !word))
            & HIGHS;
        if marks != 0 {
            return at + (marks.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while at < text.len() && !matches!(text[at], b'"' | b'\\' | 0..=0x1f) {
        at += 1;
    }
    at
}

/// Writes a string in its canonical form, quotes included.
pub(super) fn write_string(content: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    let mut start = 0;
    loop {
        let end = plain_end(content, start);
        out.extend_from_slice(&content[start..end]);
        let Some(&byte) = content.get(end) else { break };
        out.push(b'\\');
        match byte {
            b'"' | b'\\' => out.push(byte),
            0x08 => out.push(b'b'),
            b'\t' => out.push(b't'),
            b'\n' => out.push(b'n'),
            0x0c => out.push(b'f'),
            b'\r' => out.push(b'r'),
            control => {
                out.extend_from_slice(b"u00");
                out.extend([hex_digit(control >> 4) as u8, hex_digit(control & 15) as u8]);
            }
        }
        start = end + 1;
    }
    out.push(b'"');
}

/// Why an escape means nothing.
pub(super) enum EscapeFault {
    /// JSON has no such escape.
    Unknown,
    /// Not four hexadecimal digits after `\u`.
    Digits,
    /// Half of a UTF-16 pair.
    LoneSurrogate,
}

/// Reads the escape that begins with the backslash at `at`, and appends what it means; returns where it ends.
pub(super) fn unescape(text: &[u8], at: usize, out: &mut Vec<u8>) -> Result<usize, EscapeFault> {
    let plain = match text.get(at + 1) {
        Some(byte @ (b'"' | b'\\' | b'/')) => *byte,
        Some(b'b') => 0x08,
        Some(b'f') => 0x0c,
        Some(b'n') => b'\n',
        Some(b'r') => b'\r',
        Some(b't') => b'\t',
        Some(b'u') => {
            let first = four_digits(text, at + 2).ok_or(EscapeFault::Digits)?;
            let (code, end) = match first {
                0xd800..=0xdbff => {
                    if text.get(at + 6..at + 8) != Some(br"\u") {
                        return Err(EscapeFault::LoneSurrogate);
                    }
                    match four_digits(text, at + 8).ok_or(EscapeFault::Digits)? {
                        second @ 0xdc00..=0xdfff => (0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00), at + 12),
                        _ => return Err(EscapeFault::LoneSurrogate),
                    }
                }
                code => (code, at + 6),
            };
            // Only the second half of a pair is left to be refused here.
            let character = char::from_u32(code).ok_or(EscapeFault::LoneSurrogate)?;
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            return Ok(end);
        }
        Some(_) | None => return Err(EscapeFault::Unknown),
    };
    out.push(plain);
    Ok(at + 2)
}

fn four_digits(text: &[u8], at: usize) -> Option<u32> {
    text.get(at..at + 4)?.iter().try_fold(0, |code, &byte| Some(code << 4 | char::from(byte).to_digit(16)?))
}

/// Orders names by their UTF-16 code units, without making these.
///
/// UTF-8 sorts by code point, and UTF-16 differs in one thing: U+E000 to U+FFFF, whose first byte in UTF-8 is EE or EF,
/// come after all characters beyond, whose first byte is F0 to F4.
pub(super) fn compare_names(a: &[u8], b: &[u8]) -> Ordering {
    fn weight(byte: u8) -> u8 {
        if byte == 0xee || byte == 0xef { byte + 0x0a } else { byte }
    }
    match a.iter().zip(b).find(|(a, b)| a != b) {
        Some((&a, &b)) => weight(a).cmp(&weight(b)),
        None => a.len().cmp(&b.len()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_are_ordered_by_their_utf_16_code_units(a in any::<String>(), b in any::<String>()) {
            prop_assert_eq!(compare_names(a.as_bytes(), b.as_bytes()), a.encode_utf16().cmp(b.encode_utf16()));
        }

        #[test]
        fn names_near_the_surrogates_are_ordered_by_their_utf_16_code_units(
            a in "[\u{d7ff}\u{e000}\u{efff}\u{ffff}\u{10000}\u{10ffff}a]{0,3}",
            b in "[\u{d7ff}\u{e000}\u{efff}\u{ffff}\u{10000}\u{10ffff}a]{0,3}",
        ) {
            prop_assert_eq!(compare_names(a.as_bytes(), b.as_bytes()), a.encode_utf16().cmp(b.encode_utf16()));
        }

        #[test]
        fn a_run_of_plain_bytes_ends_where_a_slow_search_says(
            bytes in proptest::collection::vec(
                prop_oneof![8 => any::<u8>(), 1 => Just(b'"'), 1 => Just(b'\\'), 2 => Just(0x1f), 20 => 0x20..=0xff_u8], 0..40
            ),
            start in 0_usize..40,
        ) {
            let start = start.min(bytes.len());
            let slow = bytes[start..].iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f));
            prop_assert_eq!(plain_end(&bytes, start), slow.map_or(bytes.len(), |found| start + found));
        }
    }
}
