//! Checks of Rust files and manifests.

use super::Finding;
use crate::workspace::Texts;

/// The most lines of a Rust file, its tests excepted.
const LINES_MAX: usize = 600;
/// What a line has that may sleep in a test, followed by its reason; on the line itself or the one above.
const SLEEP_MARK: &str = "// sleeps: ";
/// Packages that must not be locked: a second TLS library beside ring, with a C or assembler build of its own.
const BANNED: &[&str] = &["aws-lc-rs", "aws-lc-sys", "openssl-sys", "native-tls"];

fn rust(texts: &Texts) -> impl Iterator<Item = (&str, &str)> {
    texts.iter().filter(|(file, _)| file.ends_with(".rs")).map(|(file, text)| (file.as_str(), text.as_str()))
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

/// Every file opens with `//!` and a whole sentence that says what it is.
pub(super) fn modules_open_with_a_sentence(texts: &Texts) -> Vec<Finding> {
    let opens = |text: &str| {
        let mut paragraph = String::new();
        for line in text.lines() {
            let Some(words) = line.strip_prefix("//! ") else { break };
            paragraph.push_str(words.trim_end());
            paragraph.push(' ');
        }
        let begins = paragraph.starts_with(|first: char| first.is_uppercase() || first == '`');
        begins && [". ", ": ", "? ", "! "].iter().any(|end| paragraph.contains(end))
    };
    rust(texts)
        .filter(|(_, text)| !opens(text))
        .map(|(file, _)| Finding::new(file, 1, "does not open with `//!` and a sentence that says what it is"))
        .collect()
}

/// No test is ignored, neither by attribute nor as an ignored example in a comment.
pub(super) fn no_test_is_ignored(texts: &Texts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in rust(texts) {
        for (number, line) in numbered(text) {
            let line = line.trim_start();
            let attribute =
                line.starts_with("#[ignore") || (line.starts_with("#[cfg_attr(") && line.contains(", ignore"));
            let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            let fence = comment.and_then(|comment| comment.trim_start().strip_prefix("```"));
            if attribute || fence.is_some_and(|words| words.split(',').any(|word| word.trim() == "ignore")) {
                findings.push(Finding::new(file, number, "ignores a test; run it, or remove it"));
            }
        }
    }
    findings
}

/// Lines of a file before its own test module.
fn product_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{'));
    tests.unwrap_or(lines.len())
}

fn is_test_file(file: &str) -> bool {
    file.starts_with("tests/") || file.contains("/tests/") || file.ends_with("/tests.rs")
}

/// No file is long.
pub(super) fn files_are_short(texts: &Texts) -> Vec<Finding> {
    rust(texts)
        .filter(|(file, _)| !is_test_file(file))
        .map(|(file, text)| (file, product_lines(text)))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| Finding::new(file, 0, format!("has {lines} lines before its tests; at most {LINES_MAX}")))
        .collect()
}

/// Tests wait for a condition, not for a time: a sleep stands directly in a loop that looks, or carries its reason.
pub(super) fn tests_do_not_sleep(texts: &Texts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in rust(texts) {
        let tests_begin = if is_test_file(file) { 0 } else { product_lines(text) };
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate().skip(tests_begin) {
            let sleeps = ["thread::sleep(", "time::sleep(", " sleep("].iter().any(|call| line.contains(call));
            let comment = line.trim_start().starts_with("//");
            let above = index.checked_sub(1).map_or("", |above| lines[above]);
            let reason = |line: &str| line.split_once(SLEEP_MARK).is_some_and(|(_, reason)| !reason.trim().is_empty());
            let excused = comment || line.contains("fn sleep(") || in_loop(&lines[..index], line);
            if sleeps && !excused && !reason(line) && !reason(above) {
                let message = format!("a test sleeps; wait for a condition, or say why with `{SLEEP_MARK}…`");
                findings.push(Finding::new(file, index + 1, message));
            }
        }
    }
    findings
}

/// Whether the block that holds a line is a loop, by its indentation.
fn in_loop(above: &[&str], line: &str) -> bool {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let opens = above.iter().rev().find(|other| !other.trim().is_empty() && indentation(other) < indentation(line));
    opens.is_some_and(|opens| {
        let words = opens.trim_start();
        ["while ", "loop ", "for "].iter().any(|word| words.starts_with(word)) && words.ends_with('{')
    })
}

/// Every package takes the lints of the workspace.
pub(super) fn packages_take_the_lints(texts: &Texts) -> Vec<Finding> {
    texts
        .iter()
        .filter(|(file, text)| file.ends_with("/Cargo.toml") && text.contains("[package]"))
        .filter(|(_, text)| !text.contains("[lints]\nworkspace = true\n"))
        .map(|(file, _)| Finding::new(file, 0, "does not take the lints of the workspace"))
        .collect()
}

/// Every store runs the contract suite. That all of them run the same cases is checked where tests are run.
pub(super) fn stores_run_the_contract(texts: &Texts) -> Vec<Finding> {
    texts
        .keys()
        .filter_map(|file| file.strip_prefix("stores/")?.strip_suffix("/Cargo.toml"))
        .map(|store| format!("stores/{store}/tests/contract.rs"))
        .filter(|suite| !texts.get(suite).is_some_and(|text| text.contains("store_suite!(")))
        .map(|suite| Finding::new(&suite, 0, "is not there, or does not call store_suite!"))
        .collect()
}

/// No banned package is in Cargo.lock.
pub(super) fn locked_packages_are_allowed(texts: &Texts) -> Vec<Finding> {
    let lock = texts.get("Cargo.lock").map_or("", String::as_str);
    let name = |line: &str| line.strip_prefix("name = \"").and_then(|rest| rest.strip_suffix('"')).map(str::to_owned);
    numbered(lock)
        .filter_map(|(number, line)| Some((number, name(line)?)))
        .filter(|(_, name)| BANNED.contains(&name.as_str()))
        .map(|(number, name)| {
            Finding::new("Cargo.lock", number, format!("{name} is banned: ring is the one TLS provider"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Texts {
        files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect()
    }

    fn places(findings: Vec<Finding>) -> Vec<String> {
        findings.iter().map(|finding| format!("{}:{}", finding.file, finding.line)).collect()
    }

    #[test]
    fn a_module_without_an_opening_sentence_is_found() {
        let texts = tree(&[
            ("a/good.rs", "//! What it is: this,\n//! and that.\n"),
            ("a/code.rs", "//! `Code` as bytes.\n\nfn f() {}\n"),
            ("a/none.rs", "fn f() {}\n"),
            ("a/late.rs", "use x;\n//! A sentence.\n"),
            ("a/words.rs", "//! helpers\n"),
            ("a/open.rs", "//! No end\n\n//! here.\n"),
            ("a/notes.md", "no module\n"),
        ]);
        assert_eq!(
            places(modules_open_with_a_sentence(&texts)),
            ["a/late.rs:1", "a/none.rs:1", "a/open.rs:1", "a/words.rs:1"]
        );
    }

    #[test]
    fn an_ignored_test_or_example_is_found() {
        let texts = tree(&[
            ("a.rs", "#[test]\n    #[ignore = \"slow\"]\nfn f() {}\n"),
            ("b.rs", "#[cfg_attr(miri, ignore)]\n"),
            ("c.rs", "//! ```ignore\n/// ```rust,ignore\n/// ```no_run\n"),
            ("d.rs", "// it does not #[ignore] anything\nlet x = \"#[ignore]\";\n"),
        ]);
        assert_eq!(places(no_test_is_ignored(&texts)), ["a.rs:2", "b.rs:1", "c.rs:1", "c.rs:2"]);
    }

    #[test]
    fn a_long_file_is_found_and_tests_do_not_count() {
        let long = "x\n".repeat(LINES_MAX);
        let texts = tree(&[
            ("a/just.rs", &format!("{long}#[cfg(test)]\nmod tests {{\n{long}}}\n")),
            ("a/tests/long.rs", &format!("{long}{long}")),
            ("a/long.rs", &format!("{long}#[cfg(test)]\nmod tests;\n")),
        ]);
        assert_eq!(places(files_are_short(&texts)), ["a/long.rs:0"]);
    }

    #[test]
    fn a_sleep_in_a_test_needs_a_reason() {
        // Without its parenthesis, so that this test is not found itself.
        let call = "thread::sleep";
        let product = format!("{call}(d);\n#[cfg(test)]\nmod tests {{\n    {call}(d);\n}}\n");
        let beside = format!("    tokio::time::sleep{}d).await;\n    {call}(d); // sleeps: the lease must pass\n", '(');
        let above = format!("// sleeps: a child\n{call}(d);\n{call}(d); // sleeps: \n// {call}(d)\n");
        let polls =
            format!("    while !ready() {{\n        assert!(in_time);\n\n        {call}(d);\n    }}\n    {call}(d);\n");
        let texts = tree(&[
            ("a/src/x.rs", &product),
            ("a/tests/y.rs", &beside),
            ("a/tests/z.rs", &above),
            ("a/tests/zz.rs", &polls),
        ]);
        let found = places(tests_do_not_sleep(&texts));
        assert_eq!(found, ["a/src/x.rs:4", "a/tests/y.rs:1", "a/tests/z.rs:3", "a/tests/zz.rs:6"]);
    }

    #[test]
    fn a_package_without_the_lints_is_found() {
        let texts = tree(&[
            ("Cargo.toml", "[workspace]\n"),
            ("a/Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n"),
            ("b/Cargo.toml", "[package]\n"),
        ]);
        assert_eq!(places(packages_take_the_lints(&texts)), ["b/Cargo.toml:0"]);
    }

    #[test]
    fn a_store_without_the_contract_is_found() {
        let texts = tree(&[
            ("stores/a/Cargo.toml", ""),
            ("stores/a/tests/contract.rs", "taskonce_contract::store_suite!(open);\n"),
            ("stores/b/Cargo.toml", ""),
            ("stores/c/Cargo.toml", ""),
            ("stores/c/tests/contract.rs", "fn main() {}\n"),
        ]);
        assert_eq!(
            places(stores_run_the_contract(&texts)),
            ["stores/b/tests/contract.rs:0", "stores/c/tests/contract.rs:0"]
        );
    }

    #[test]
    fn a_banned_package_is_found() {
        let texts = tree(&[("Cargo.lock", "[[package]]\nname = \"ring\"\n\n[[package]]\nname = \"aws-lc-sys\"\n")]);
        assert_eq!(places(locked_packages_are_allowed(&texts)), ["Cargo.lock:5"]);
    }
}
