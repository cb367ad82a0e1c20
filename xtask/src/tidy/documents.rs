//! Checks of the documents for people.

use std::path::{Component, Path};

use super::Finding;
use crate::workspace::Texts;

/// Documents with a bound of their own, in lines.
const LINES_MAX: &[(&str, usize)] = &[("CONTRIBUTING.md", 100), ("ARCHITECTURE.md", 300)];
/// Where kinds of errors are declared, and where they are explained.
const KINDS: &str = "crates/core/src/error.rs";
const EXPLAINED: &str = "docs/errors.md";
/// Beginnings of paths in this tree; in backticks they are checked like links.
const FOLDERS: &[&str] = &["bench/", "crates/", "docs/", "stores/", "xtask/", ".github/"];

fn documents(texts: &Texts) -> impl Iterator<Item = (&str, &str)> {
    texts.iter().filter(|(file, _)| file.ends_with(".md")).map(|(file, text)| (file.as_str(), text.as_str()))
}

/// Lines outside of code blocks, counted from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        (!in_code && !fence).then_some((index + 1, line))
    })
}

/// Every link to a file, and every path in backticks, leads to something in the tree.
pub(super) fn links_lead_somewhere(texts: &Texts) -> Vec<Finding> {
    let there = |path: &str| {
        let path = path.trim_end_matches('/');
        let below = format!("{path}/");
        path.is_empty() || texts.contains_key(path) || texts.keys().any(|file| file.starts_with(&below))
    };
    let mut findings = Vec::new();
    for (file, text) in documents(texts) {
        for (number, line) in prose(text) {
            let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for link in links.filter(|link| !link.contains(':') && !link.starts_with('#')) {
                let path = link.split('#').next().unwrap_or(link);
                if !resolve(file, path).is_some_and(|path| there(&path)) {
                    findings.push(Finding::new(file, number, format!("the link `{link}` leads nowhere")));
                }
            }
            let quoted = line.split('`').skip(1).step_by(2);
            for path in quoted.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder))) {
                let path = path.split("::").next().unwrap_or(path);
                if !path.contains([' ', '*', '{', '<', '…']) && !there(path) {
                    findings.push(Finding::new(file, number, format!("there is no `{path}`")));
                }
            }
        }
    }
    findings
}

/// The path of a link, from the root; `None` when it leaves the tree.
fn resolve(file: &str, link: &str) -> Option<String> {
    let mut path = Path::new(file).parent().unwrap_or(Path::new("")).to_path_buf();
    for part in Path::new(link).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if path.pop() => {}
            Component::Normal(name) => path.push(name),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path.to_string_lossy().replace('\\', "/"))
}

/// No document names a folder of one machine.
pub(super) fn no_path_of_one_machine(texts: &Texts) -> Vec<Finding> {
    // In two parts, as this file is text of the tree too.
    let (workplace, temporary) = (concat!("/wo", "rk/"), concat!("/t", "mp/"));
    let mut findings = Vec::new();
    for (file, text) in texts {
        let in_document = file.ends_with(".md");
        for (index, line) in text.lines().enumerate() {
            if line.contains(workplace) || (in_document && line.contains(temporary)) {
                findings.push(Finding::new(file, index + 1, "names a folder of one machine"));
            }
        }
    }
    findings
}

/// Every kind of error stands in the document that explains them.
pub(super) fn every_error_kind_is_explained(texts: &Texts) -> Vec<Finding> {
    let source = texts.get(KINDS).map_or("", String::as_str);
    let kinds: Vec<&str> = source.lines().filter_map(kind_of).collect();
    if kinds.is_empty() {
        return vec![Finding::new(KINDS, 0, "no kinds of errors are found; this check must learn their new form")];
    }
    let explained = texts.get(EXPLAINED).map_or("", String::as_str);
    kinds
        .into_iter()
        .filter(|kind| !explained.contains(&format!("`{kind}`")))
        .map(|kind| Finding::new(EXPLAINED, 0, format!("does not explain the error kind `{kind}`")))
        .collect()
}

/// The name in a line like `Unreachable = "unreachable", Later, hint "…";`.
fn kind_of(line: &str) -> Option<&str> {
    let (variant, rest) = line.trim().split_once(" = \"")?;
    let (name, rest) = rest.split_once("\", ")?;
    let is_variant = variant.starts_with(char::is_uppercase) && variant.chars().all(char::is_alphanumeric);
    (is_variant && rest.contains(", hint \"")).then_some(name)
}

/// Documents that promise to be short are.
pub(super) fn documents_are_short(texts: &Texts) -> Vec<Finding> {
    LINES_MAX
        .iter()
        .filter_map(|(file, max)| Some((*file, texts.get(*file)?.lines().count(), *max)))
        .filter(|(_, lines, max)| lines >= max)
        .map(|(file, lines, max)| Finding::new(file, 0, format!("has {lines} lines; it stays under {max}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Texts {
        files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect()
    }

    fn messages(findings: Vec<Finding>) -> Vec<String> {
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_link_or_path_that_leads_nowhere_is_found() {
        let texts = tree(&[
            (
                "README.md",
                "[a](docs/a.md) [b](docs/b.md#x) [c](https://x.y/z) [d](#d) [e](docs) `crates/core/src/lib.rs`\n",
            ),
            (
                "docs/a.md",
                "[r](../README.md) [u](../../up.md)\n`crates/core/src/gone.rs::f` `crates/*/x`\n```text\n[x](y)\n```\n",
            ),
            ("crates/core/src/lib.rs", ""),
        ]);
        assert_eq!(
            messages(links_lead_somewhere(&texts)),
            [
                "README.md:1: the link `docs/b.md#x` leads nowhere",
                "docs/a.md:1: the link `../../up.md` leads nowhere",
                "docs/a.md:2: there is no `crates/core/src/gone.rs`",
            ]
        );
    }

    #[test]
    fn a_folder_of_one_machine_is_found() {
        let (workplace, temporary) = (concat!("see /wo", "rk/x\n"), concat!("\nin /t", "mp/x\n"));
        let texts = tree(&[("docs/a.md", temporary), ("a.rs", workplace), ("b.rs", temporary)]);
        assert_eq!(
            messages(no_path_of_one_machine(&texts)),
            ["a.rs:1: names a folder of one machine", "docs/a.md:2: names a folder of one machine"]
        );
    }

    #[test]
    fn an_error_kind_that_is_not_explained_is_found() {
        let kinds = "    /// Gone.\n    NotFound = \"not_found\", Never, hint \"x\";\n    Full = \"full\", Later, hint \"y\";\n";
        let texts = tree(&[(KINDS, kinds), (EXPLAINED, "* `full`: no room; not_found\n")]);
        assert_eq!(
            messages(every_error_kind_is_explained(&texts)),
            ["docs/errors.md: does not explain the error kind `not_found`"]
        );
        assert_eq!(every_error_kind_is_explained(&tree(&[(KINDS, "enum ErrorKind {}\n")])).len(), 1);
    }

    #[test]
    fn a_document_above_its_bound_is_found() {
        let texts = tree(&[("CONTRIBUTING.md", &"x\n".repeat(100)), ("ARCHITECTURE.md", &"x\n".repeat(299))]);
        assert_eq!(messages(documents_are_short(&texts)), ["CONTRIBUTING.md: has 100 lines; it stays under 100"]);
    }
}
