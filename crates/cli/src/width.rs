//! The width of a terminal, and text and tables that keep to it.

use std::os::fd::AsFd;

use comfy_table::{Table, presets};

/// The columns of the terminal behind a stream; `None` when it is none.
pub(crate) fn of(stream: impl AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Breaks lines between words, so that none is wider than `columns`, but for a word that is. A broken line goes on under
/// its first word.
pub(crate) fn wrap(text: &str, columns: usize) -> String {
    let mut wrapped = String::with_capacity(text.len() + text.len() / 16);
    for line in text.split_inclusive('\n') {
        let (body, end) = line.strip_suffix('\n').map_or((line, ""), |body| (body, "\n"));
        let indent = &body[..body.len() - body.trim_start().len()];
        let mut used = 0;
        for word in body.split_whitespace() {
            let width = word.chars().count();
            if used > 0 && used + 1 + width > columns {
                wrapped.push('\n');
                used = 0;
            }
            if used == 0 {
                wrapped.push_str(indent);
                used = indent.chars().count();
            } else {
                wrapped.push(' ');
                used += 1;
            }
            wrapped.push_str(word);
            used += width;
        }
        wrapped.push_str(end);
    }
    wrapped
}

/// The column of a table that is cut where the terminal is narrower, and the least that is left of it.
#[derive(Clone, Copy)]
pub(crate) struct Shrinks {
    pub(crate) column: usize,
    pub(crate) min: usize,
}

/// A table without lines around it. With `columns` no line is wider, unless the columns that stay are already.
pub(crate) fn table<const N: usize>(
    heads: [&str; N],
    mut rows: Vec<[String; N]>,
    shrinks: Shrinks,
    columns: Option<usize>,
) -> String {
    if let Some(columns) = columns {
        let widest = |at: usize| rows.iter().map(|row| row[at].chars().count()).fold(heads[at].len(), usize::max);
        // A column has a space on each side; those at the ends of a line are trimmed.
        let others: usize = (0..N).filter(|at| *at != shrinks.column).map(|at| 2 + widest(at)).sum();
        let room = columns.saturating_sub(others).max(shrinks.min);
        for row in &mut rows {
            row[shrinks.column] = cut(&row[shrinks.column], room);
        }
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(heads);
    table.add_rows(rows);
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim());
        text.push('\n');
    }
    text
}

/// The text, or its beginning and `…`, in at most `columns`.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(columns.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_go_on_under_their_first_word() {
        for (text, columns, wrapped) in [
            ("", 9, ""),
            ("one two three\n", 9, "one two\nthree\n"),
            ("one two three", 13, "one two three"),
            ("  (one two)\nthree\n", 8, "  (one\n  two)\nthree\n"),
            ("a unbreakable b", 4, "a\nunbreakable\nb"),
            ("äö üß", 5, "äö üß"),
            ("one\n\ntwo", 9, "one\n\ntwo"),
        ] {
            assert_eq!(wrap(text, columns), wrapped);
        }
    }

    #[test]
    fn one_column_of_a_table_gives_way_and_no_more_than_it_may() {
        let rows = || vec![["a long name".to_owned(), "5".to_owned()], ["b".to_owned(), "11".to_owned()]];
        let shrinks = Shrinks { column: 0, min: 4 };
        let of = |columns| table(["NAME", "N"], rows(), shrinks, columns);
        assert_eq!(of(None), "NAME         N\na long name  5\nb            11\n");
        assert_eq!(of(Some(12)), "NAME      N\na long …  5\nb         11\n");
        assert_eq!(of(Some(3)), "NAME  N\na l…  5\nb     11\n");
    }

    #[test]
    fn what_is_cut_says_so() {
        assert_eq!((cut("exit code 3", 11).as_str(), cut("exit code 3", 6).as_str()), ("exit code 3", "exit …"));
    }
}
