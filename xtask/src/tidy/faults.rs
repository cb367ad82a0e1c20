//! Checks of the list of planted faults: what it points at is still there. Whether its tests catch them is `mutants`' to say.

use super::Finding;
use crate::mutants::{self, LIST};
use crate::workspace::Texts;

/// Every text to replace occurs once in its file, and every test that is to catch a fault is written, in the module that
/// its name says.
pub(super) fn faults_point_at_what_is_there(texts: &Texts) -> Vec<Finding> {
    let Some(list) = texts.get(LIST) else { return Vec::new() };
    let faults = match mutants::parse(list) {
        Ok(faults) => faults,
        Err(error) => return vec![Finding::new(LIST, 0, error.to_string())],
    };
    let mut findings = Vec::new();
    for fault in faults {
        let mut find = |what: String| findings.push(Finding::new(LIST, 0, format!("fault `{}`: {what}", fault.name)));
        match texts.get(&fault.file).map(|text| text.matches(&fault.find).count()) {
            None => find(format!("there is no {}", fault.file)),
            Some(1) => {}
            Some(count) => find(format!("what it replaces occurs {count} times in {}", fault.file)),
        }
        for test in &fault.caught {
            let mut parts = test.name.rsplit("::");
            let (name, module) = (parts.next().unwrap_or_default(), parts.next());
            // Cases of a suite are functions too, in a crate of their own.
            let is_written = texts.iter().any(|(file, text)| {
                let is_function = text.contains(&format!("fn {name}("));
                let is_suite = file.starts_with("crates/contract/src/") && text.contains(name);
                let is_inside = match module {
                    None if test.target != "lib" => !is_submodule(file, &test.target),
                    None => true,
                    Some(module) => {
                        module == "tests"
                            || file.ends_with(&format!("/{module}.rs"))
                            || text.contains(&format!("mod {module} "))
                    }
                };
                is_suite || (is_function && is_inside)
            });
            if !is_written {
                find(format!("there is no test `{}` in {} {}", test.name, test.package, test.target));
            }
        }
    }
    findings
}

/// Whether a file is a module of a test that has a folder: its tests have the module's name before theirs.
fn is_submodule(file: &str, target: &str) -> bool {
    format!("/{file}").contains(&format!("/tests/{target}/")) && !file.ends_with("/main.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "fault a_fault\nwhy    It hurts.\nfile   src/a.rs\nfind\n  | if x {\nreplace\n  | if true {\ncaught core redis a_test\n";

    fn found(code: &str, test_file: &str) -> Vec<String> {
        let files = [(LIST, LISTED), ("src/a.rs", code), (test_file, "fn a_test() {}")];
        let texts: Texts = files.map(|(file, text)| (file.to_owned(), text.to_owned())).into();
        faults_point_at_what_is_there(&texts).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_fault_whose_code_is_gone_or_there_twice_is_found() {
        assert!(found("if x {", "tests/redis/main.rs").is_empty());
        for code in ["if y {", "if x {\nif x {"] {
            assert_eq!(found(code, "tests/redis/main.rs").len(), 1, "{code}");
        }
    }

    #[test]
    fn a_test_that_is_named_without_its_module_is_found() {
        assert_eq!(found("if x {", "tests/redis/replicas.rs").len(), 1);
        assert!(found("if x {", "tests/redis.rs").is_empty());
    }
}
