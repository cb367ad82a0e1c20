//! What an examination finds: the ledger's findings, the front's as what they mean for a front, and its own.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::store::{Finding, Level};
use tokio::time::timeout;

use crate::options::DoneHint;
use crate::store::Inner;

/// The longest that the front is examined.
const FRONT_WAIT_MAX: Duration = Duration::from_secs(5);

/// What a front may lose.
const LOSES_HINTS: &str = "it may lose hints, and no task: the database decides";

pub(crate) async fn findings(inner: &Arc<Inner>) -> Vec<Finding> {
    let mut findings = inner.ledger.examine().await;
    match timeout(FRONT_WAIT_MAX, inner.front.examine()).await {
        Ok(front) => findings.extend(front.into_iter().map(of_the_front)),
        Err(_elapsed) => findings.push(finding(
            Level::Warning,
            "front: reachability",
            format!("no answer within {FRONT_WAIT_MAX:?}"),
            "tasks do without it, slower; start it, or take `front` out of the URL",
        )),
    }
    findings.push(generation(inner).await);
    findings.push(breaker(inner));
    findings
}

/// The front holds hints. That it forgets or evicts them is its right, and nothing of it endangers a task.
fn of_the_front(found: Finding) -> Finding {
    let is_about_keeping =
        ["evict", "persist", "durab", "replicat", "flush"].iter().any(|part| found.subject.contains(part));
    let (level, text, hint) = match found.level {
        Level::Fine => (Level::Fine, found.text, found.hint),
        // What is said of a store of records is untrue of a front: it forgets no task.
        Level::Warning | Level::Fault if is_about_keeping => (Level::Fine, LOSES_HINTS.to_owned(), String::new()),
        Level::Warning | Level::Fault => (Level::Warning, found.text, found.hint),
    };
    Finding { level, subject: format!("front: {}", found.subject), text, hint }
}

async fn generation(inner: &Inner) -> Finding {
    let subject = "generation";
    match (inner.ledger.generation().await, inner.options.done) {
        (Ok(Some(generation)), _) => {
            finding(Level::Fine, subject, format!("`{}`, which hints are marked with", generation.0), "")
        }
        (Ok(None), DoneHint::Verified) => finding(Level::Fine, subject, "the database names none", ""),
        (Ok(None), DoneHint::Trusted) => finding(
            Level::Warning,
            subject,
            "the database names none, so `trust_done` has no effect: hints of done tasks are verified",
            "take `trust_done` out of the URL",
        ),
        (Err(error), _) => {
            finding(Level::Warning, subject, format!("not known, so no hint counts: {error}"), error.hint())
        }
    }
}

fn breaker(inner: &Inner) -> Finding {
    let counts = inner.tally.snapshot();
    let text = format!(
        "in this process: degraded {}, hints answered {}, trusted {}, verified {}, database reads {}, breaker openings {}",
        counts.degraded, counts.answered, counts.trusted, counts.verified, counts.database_reads, counts.openings
    );
    if inner.here().breaker().is_closed() {
        return finding(Level::Fine, "fast check", format!("the front is asked; {text}"), "");
    }
    finding(
        Level::Warning,
        "fast check",
        format!("the front is away, and tasks do without it; {text}"),
        "see to the front's server; nothing is lost meanwhile",
    )
}

fn finding(level: Level, subject: &str, text: impl Into<String>, hint: &str) -> Finding {
    Finding { level, subject: subject.into(), text: text.into(), hint: hint.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_forgets_tasks_of_a_store_forgets_only_hints_of_a_front() {
        for subject in ["persistence", "eviction policy", "flush"] {
            let front = of_the_front(finding(Level::Warning, subject, "it forgets every task", "guard it"));
            assert_eq!((front.level, &*front.text, &*front.hint), (Level::Fine, LOSES_HINTS, ""), "{subject}");
        }
        let away = of_the_front(finding(Level::Fault, "writing", "refused", "repair it"));
        assert_eq!((away.level, &*away.text, &*away.hint), (Level::Warning, "refused", "repair it"));
    }
}
