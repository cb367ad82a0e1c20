//! Numbers of JSON: the grammar of a literal, and what it stands for.

use super::parse::Fault;
use crate::error::ErrorKind;

/// What a literal stands for.
pub(super) enum Number {
    /// The canonical form of the literal is its text, from here on.
    Verbatim { start: usize },
    /// A finite double, still to be printed.
    Double(f64),
}

/// Reads the literal that begins at `start` with a digit or a minus sign; returns it and where it ends.
pub(super) fn read(text: &[u8], start: usize) -> Result<(Number, usize), Fault> {
    let negative = text[start] == b'-';
    let first = start + usize::from(negative);
    let mut at = match text.get(first) {
        Some(b'0') => first + 1,
        Some(b'1'..=b'9') => digits_end(text, first + 1),
        _ => return Err(Fault::new(ErrorKind::BadJson, first, "expected a digit")),
    };
    if text[first] == b'0' && text.get(at).is_some_and(u8::is_ascii_digit) {
        return Err(Fault::new(ErrorKind::BadJson, at, "expected no digit after a leading zero"));
    }
    let integer_end = at;
    if text.get(at) == Some(&b'.') {
        at = some_digits_end(text, at + 1)?;
    }
    let fraction_end = at;
    if matches!(text.get(at), Some(b'e' | b'E')) {
        at += 1;
        if matches!(text.get(at), Some(b'+' | b'-')) {
            at += 1;
        }
        at = some_digits_end(text, at)?;
    }
    if at > integer_end {
        if at == fraction_end && is_shortest(&text[first..integer_end], &text[integer_end + 1..at]) {
            return Ok((Number::Verbatim { start }, at));
        }
        let literal = std::str::from_utf8(&text[start..at]).expect("digits, signs, points and exponents are ASCII");
        let double: f64 = literal.parse().expect("every number of JSON is a number of Rust");
        if !double.is_finite() {
            return Err(Fault::new(ErrorKind::NotFinite, start, "the number is too large for a double"));
        }
        return Ok((Number::Double(double), at));
    }
    if !fits(&text[first..at], negative) {
        let what = "the integer lies outside of the i64 and u64 range, where digits would be lost";
        return Err(Fault::new(ErrorKind::IntegerRange, start, what));
    }
    // Minus zero is zero.
    Ok((Number::Verbatim { start: if text[first] == b'0' { first } else { start } }, at))
}

/// Whether a literal of these digits, without an exponent, is already what its double prints as: most prices are, and
/// need not be read and printed.
///
/// Two decimals of at most 15 digits never share a double, so that none shorter can stand for the same one; and from
/// 1e-6 to 1e21 ECMAScript prints without an exponent.
fn is_shortest(integer: &[u8], fraction: &[u8]) -> bool {
    let digits = if integer == b"0" {
        let zeros = fraction.iter().take_while(|digit| **digit == b'0').count();
        if zeros > 5 {
            return false;
        }
        fraction.len() - zeros
    } else {
        integer.len() + fraction.len()
    };
    digits <= 15 && fraction.last() != Some(&b'0')
}

/// Whether an integer without leading zeros fits into an i64 or a u64.
fn fits(digits: &[u8], negative: bool) -> bool {
    // Of as many digits as the limit has, the order of texts is the order of numbers.
    let limit: &[u8] = if negative { b"9223372036854775808" } else { b"18446744073709551615" };
    digits.len() < limit.len() || (digits.len() == limit.len() && digits <= limit)
}

fn digits_end(text: &[u8], mut at: usize) -> usize {
    while text.get(at).is_some_and(u8::is_ascii_digit) {
        at += 1;
    }
    at
}

fn some_digits_end(text: &[u8], at: usize) -> Result<usize, Fault> {
    match digits_end(text, at) {
        end if end > at => Ok(end),
        _ => Err(Fault::new(ErrorKind::BadJson, at, "expected a digit")),
    }
}
