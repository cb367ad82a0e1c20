//! `doctor`: looks at the health of the store, and of queues that are named, each finding with a hint.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use taskonce::routes::Routes;
use taskonce::{Finding, Level};

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::sources::SourcesArgs;
use crate::{block_on, store};

/// The arguments of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    sources: SourcesArgs,
}

/// What was found of a store or a queue.
struct Examined {
    /// Of a queue.
    name: Option<String>,
    url: String,
    findings: Vec<Finding>,
}

/// Examines the store, and the queues that are named, or those of the table in the folder; queues alone where one is named and no store. A fault makes the exit code
/// that of a store that cannot serve; a warning does not.
pub(crate) fn doctor(args: &DoctorArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let mut examined = Vec::new();
    let table = args.sources.table()?;
    let has_urls = |routes: &Routes| routes.sources().iter().any(|rules| rules.url.is_some());
    let with_queues = args.sources.is_given() || table.as_ref().is_some_and(|(_, routes)| has_urls(routes));
    let of_table = table.as_ref().and_then(|(_, routes)| routes.store());
    let named = store::named(common.store.as_deref())?.or_else(|| of_table.map(str::to_owned));
    if named.is_some() || !args.sources.is_given() {
        let ledger = store::open_existing(named.as_deref())?;
        let findings = block_on(ledger.examine())?;
        examined.push(Examined { name: None, url: store::shown(named.as_deref()), findings });
    }
    if with_queues {
        for opened in args.sources.open_existing()? {
            let findings = block_on(opened.source.examine())?;
            examined.push(Examined { name: Some(opened.name().to_owned()), url: opened.shown, findings });
        }
    }
    let count = |level| examined.iter().flat_map(|one| &one.findings).filter(|finding| finding.level == level).count();
    let (warnings, faults) = (count(Level::Warning), count(Level::Fault));
    match form {
        Form::Json => report::data_json(&json(&examined, faults)),
        Form::Text => report::data(&text(&examined, faults, warnings)),
    }
    Ok(if faults == 0 { Code::Fine.exit() } else { Code::StoreAway.exit() })
}

fn json(examined: &[Examined], faults: usize) -> Value {
    let of_store = examined.iter().find(|one| one.name.is_none());
    let findings = |one: &Examined| one.findings.iter().map(finding_json).collect::<Vec<_>>();
    let sources = examined.iter().filter_map(|one| {
        let name = one.name.as_ref()?;
        Some(json!({ "source": name, "url": one.url, "findings": findings(one) }))
    });
    json!({
        "store": of_store.map(|one| &one.url),
        "version": env!("CARGO_PKG_VERSION"),
        "healthy": faults == 0,
        "findings": of_store.map(findings).unwrap_or_default(),
        "sources": sources.collect::<Vec<_>>(),
    })
}

fn text(examined: &[Examined], faults: usize, warnings: usize) -> String {
    let mut text = String::new();
    for (at, one) in examined.iter().enumerate() {
        let head = if at == 0 { format!("taskonce {}, ", env!("CARGO_PKG_VERSION")) } else { String::new() };
        let what = one.name.as_ref().map_or_else(|| "store".to_owned(), |name| format!("source {name},"));
        let _ = writeln!(text, "{head}{what} {}\n", one.url);
        let width = one.findings.iter().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
        for finding in &one.findings {
            let _ = writeln!(text, "  {:<8} {:<width$}  {}", finding.level.name(), finding.subject, finding.text);
            if !finding.hint.is_empty() {
                let _ = writeln!(text, "           hint: {}", finding.hint);
            }
        }
        text.push('\n');
    }
    let verdict = match (faults, warnings) {
        (0, 0) => "all is well".to_owned(),
        (0, warnings) => format!("it works; warnings: {warnings}"),
        (faults, warnings) => format!("it does not keep what it promises; faults: {faults}, warnings: {warnings}"),
    };
    let _ = writeln!(text, "{verdict}");
    text
}

fn finding_json(finding: &Finding) -> Value {
    json!({ "level": finding.level.name(), "subject": finding.subject, "text": finding.text, "hint": finding.hint })
}
