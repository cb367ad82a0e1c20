//! The list of planted faults: a plain text, read line by line. Its first lines explain the form.

use anyhow::{Result, bail};

/// A fault to plant, and the tests that must catch it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fault {
    /// A name for it, such as `complete_ignores_the_token`.
    pub(crate) name: String,
    /// What users would suffer.
    pub(crate) why: String,
    /// The file to change.
    pub(crate) file: String,
    /// The text to replace; it occurs once.
    pub(crate) find: String,
    /// What to put there.
    pub(crate) replace: String,
    /// Each of these must fail.
    pub(crate) caught: Vec<Test>,
}

/// A test, by its whole name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Test {
    /// Its package.
    pub(crate) package: String,
    /// `lib`, or the name of a file in `tests/`.
    pub(crate) target: String,
    /// Its name with its modules.
    pub(crate) name: String,
}

impl Fault {
    /// The tests that must catch it, for people.
    pub(crate) fn tests(&self) -> String {
        self.caught.iter().map(|test| test.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    None,
    Find,
    Replace,
}

/// Reads a list.
pub(crate) fn parse(text: &str) -> Result<Vec<Fault>> {
    let mut faults: Vec<Fault> = Vec::new();
    let mut block = Block::None;
    for (number, line) in text.lines().enumerate() {
        let place = number + 1;
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(code) = line.trim_start().strip_prefix('|') {
            let Some(fault) = faults.last_mut() else { bail!("line {place}: code before the first fault") };
            let into = match block {
                Block::Find => &mut fault.find,
                Block::Replace => &mut fault.replace,
                Block::None => bail!("line {place}: code belongs below `find` or `replace`"),
            };
            if !into.is_empty() {
                into.push('\n');
            }
            into.push_str(code.strip_prefix(' ').unwrap_or(code));
            continue;
        }
        let (word, value) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
        let value = value.trim().to_owned();
        block = match word {
            "find" => Block::Find,
            "replace" => Block::Replace,
            _ => Block::None,
        };
        if word == "fault" {
            faults.push(Fault { name: value, ..Fault::default() });
            continue;
        }
        let Some(fault) = faults.last_mut() else { bail!("line {place}: `{word}` before the first fault") };
        match word {
            "why" => fault.why = value,
            "file" => fault.file = value,
            "find" | "replace" if value.is_empty() => {}
            "caught" => fault.caught.push(test(&value, place)?),
            _ => bail!("line {place}: `{line}` is not a line of this form"),
        }
    }
    for (index, fault) in faults.iter().enumerate() {
        complete(fault)?;
        if faults[..index].iter().any(|other| other.name == fault.name) {
            bail!("fault `{}` is there twice", fault.name);
        }
    }
    Ok(faults)
}

fn test(value: &str, place: usize) -> Result<Test> {
    match value.split_whitespace().collect::<Vec<_>>()[..] {
        [package, target, name] => Ok(Test { package: package.into(), target: target.into(), name: name.into() }),
        _ => bail!("line {place}: write `caught PACKAGE lib|TEST-FILE TEST`"),
    }
}

fn complete(fault: &Fault) -> Result<()> {
    let missing = [
        ("a name", fault.name.is_empty()),
        ("`why`", fault.why.is_empty()),
        ("`file`", fault.file.is_empty()),
        ("`find`", fault.find.is_empty()),
        ("a `replace` that differs", fault.find == fault.replace),
        ("`caught`", fault.caught.is_empty()),
    ];
    match missing.iter().find(|(_, is_missing)| *is_missing) {
        Some((what, _)) => bail!("fault `{}` needs {what}", fault.name),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "# how to read it\n\nfault a_fault\nwhy    It hurts.\nfile   src/a.rs\nfind\n  | if x {\n  |     y\nreplace\n  | if true {\n  |     y\ncaught core lib m::t\ncaught contract memory c\n";

    #[test]
    fn code_keeps_its_lines_and_indentation() {
        let faults = parse(ONE).unwrap();
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].find, "if x {\n    y");
        assert_eq!(faults[0].replace, "if true {\n    y");
        assert_eq!(faults[0].why, "It hurts.");
        assert_eq!(faults[0].tests(), "m::t, c");
        assert_eq!(faults[0].caught[1].target, "memory");
    }

    #[test]
    fn code_may_be_removed_altogether() {
        let faults = parse(&ONE.replace("  | if true {\n  |     y\n", "")).unwrap();
        assert_eq!(faults[0].replace, "");
    }

    #[test]
    fn an_entry_that_lacks_a_part_or_repeats_a_name_is_refused() {
        let says = |text: String| parse(&text).unwrap_err().to_string();
        assert!(says(ONE.replace("why    It hurts.\n", "")).contains("needs `why`"));
        assert!(says(ONE.replace("if true", "if x")).contains("`replace` that differs"));
        assert!(says(ONE.replace("caught core lib m::t", "caught core m::t")).contains("line 12"));
        assert!(says(ONE.replace("file ", "flie ")).contains("line 5"));
        assert!(says(format!("{ONE}{ONE}")).contains("there twice"));
    }
}
