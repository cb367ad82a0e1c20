//! `doctor`: looks at the store's health, each finding with a hint.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::{Value, json};
use taskonce::{Finding, Level};

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::{block_on, store};

/// Examines the store. A fault makes the exit code that of a store that cannot serve; a warning does not.
pub(crate) fn doctor(common: &Common, form: Form) -> Result<ExitCode> {
    let ledger = store::open_existing(common.store.as_deref())?;
    let findings = block_on(ledger.examine())?;
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (warnings, faults) = (count(Level::Warning), count(Level::Fault));
    let store = store::shown(common.store.as_deref());
    match form {
        Form::Json => report::data_json(&json!({
            "store": store,
            "version": env!("CARGO_PKG_VERSION"),
            "healthy": faults == 0,
            "findings": findings.iter().map(finding_json).collect::<Vec<_>>(),
        })),
        Form::Text => {
            let mut text = format!("taskonce {}, store {store}\n\n", env!("CARGO_PKG_VERSION"));
            let width = findings.iter().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
            for finding in &findings {
                let _ = writeln!(text, "  {:<8} {:<width$}  {}", finding.level.name(), finding.subject, finding.text);
                if !finding.hint.is_empty() {
                    let _ = writeln!(text, "           hint: {}", finding.hint);
                }
            }
            let verdict = match (faults, warnings) {
                (0, 0) => "all is well".to_owned(),
                (0, warnings) => format!("it works; warnings: {warnings}"),
                (faults, warnings) => {
                    format!("it does not keep what it promises; faults: {faults}, warnings: {warnings}")
                }
            };
            let _ = writeln!(text, "\n{verdict}");
            report::data(&text);
        }
    }
    Ok(if faults == 0 { Code::Fine.exit() } else { Code::StoreAway.exit() })
}

fn finding_json(finding: &Finding) -> Value {
    json!({ "level": finding.level.name(), "subject": finding.subject, "text": finding.text, "hint": finding.hint })
}
