//! Text from outside, made safe to show: nothing in it moves a terminal's cursor, turns its direction or forges a line.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Whether a character does something to a terminal, or to how the line around it reads: control characters, line and
/// paragraph separators, marks that turn the direction of writing.
pub(crate) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// One line: every unsafe character is written as its escape, such as `\n` or `\u{202e}`.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Several lines: the same, but line ends and tabs stay.
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(|c| is_unsafe(c) && !stays(c)) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) && !stays(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    Cow::Owned(safe)
}

/// A JSON document with every unsafe character written as `\uXXXX`. Its meaning stays: they stand only within strings.
pub(crate) fn json(document: &str) -> Cow<'_, str> {
    if !document.chars().any(is_unsafe) {
        return Cow::Borrowed(document);
    }
    let mut safe = String::with_capacity(document.len() + 16);
    for c in document.chars() {
        if is_unsafe(c) {
            // All of them lie in the basic plane; writing into a string cannot fail.
            let _ = write!(safe, "\\u{:04x}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_a_terminal_or_turns_a_line_is_escaped_and_all_else_stays() {
        assert_eq!(line("über 日本 🦀"), "über 日本 🦀");
        assert_eq!(line("a\u{1b}[2Jb\nc\u{9b}\u{202e}d\r"), r"a\u{1b}[2Jb\nc\u{9b}\u{202e}d\r");
        assert_eq!(lines("a\n\tb\u{7f}\u{2028}"), "a\n\tb\\u{7f}\\u{2028}");
    }

    #[test]
    fn escaped_json_means_the_same() {
        let value = serde_json::json!({ "a": "x\u{202e}\u{9b}\u{7f}\n" });
        let text = value.to_string();
        let safe = json(&text);
        assert!(!safe.chars().any(is_unsafe), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
    }
}
