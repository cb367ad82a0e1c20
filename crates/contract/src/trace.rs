//! A story about a task or two as text: who did what when, and what the answer was. This is its form and its parser;
//! [`play`] plays it on a store.
//!
//! ```text
//! # The first comment is the story's title.
//! policy effect=keyed lease=30s attempts=5
//!
//!   0s  a  claim       run attempt=1
//!  20s  a  heartbeat   ok
//!  40s  b  claim       busy left=10s
//!  51s  b  claim       run attempt=2    # the lease of a ended at 50 s
//!  52s  a  complete    lost
//! ```
//!
//! A line is a time, an actor, a verb with `name=value` arguments, the expected answer, and `name=value` facts that must
//! hold of it. Each actor is a process of its own. Times never go back.
//!
//! | verb | arguments | answers |
//! |---|---|---|
//! | `claim` | `key`, `payload`, `fault` | `run` `replay` `busy` `waiting` `dead` `parked` `mismatch` `unknown` |
//! | `enter` | `key` | `ok` |
//! | `heartbeat` | `key`, `fault` | `ok` `lost` `over` `unknown` |
//! | `complete` | `key`, `output`, `fault` | `ok` `lost` `unknown` |
//! | `fail` | `key`, `class`, `aftermath`, `fault` | `waiting` `dead` `parked` `lost` `unknown` |
//! | `release` | `key`, `fault` | `waiting` `dead` `parked` `lost` `unknown` |
//! | `again` (the end whose outcome is unknown) | `key`, `fault` | as that end |
//! | `drop` (the claim; its process goes on) | `key` | `ok` |
//! | `work` (what was handed to the background) | | `ok` |
//! | `die` (the process, without a word) | | `ok` |
//! | `redrive`, `resolve-done`, `resolve-not-done` | `key` | the new state, `not_found`, `wrong_state` |
//! | `clear` | `key` | `ok`, `not_found` |
//! | `purge` | | `ok` |
//! | `show` | `key` | `absent` or a state |
//!
//! Facts: `attempt`, `crashes`, `owner`, `output` (text, `nothing` or `dropped`), `class` (of the last failure), `history`
//! (lines), `left` (of the lease or the delay). A `fault` is `before` (the call does not reach the store) or `after` (it
//! does, and the answer is lost).

mod play;

use std::fmt;
use std::time::Duration;

use taskonce_core::policy::{Backoff, Effect, Policy};

pub use play::play;

/// A story.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// What it shows, in a sentence.
    pub title: String,
    /// How its tasks are treated.
    pub policy: Policy,
    /// What happens.
    pub steps: Vec<Step>,
}

/// One line of a story.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The line's number in the text, from 1.
    pub line: usize,
    /// When, from the beginning.
    pub at: Duration,
    /// Who.
    pub actor: String,
    /// What they do.
    pub verb: String,
    /// With what.
    pub arguments: Vec<(String, String)>,
    /// What they are answered.
    pub answer: String,
    /// What must hold of the answer.
    pub facts: Vec<(String, String)>,
}

/// Why a text is no story.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceError {
    /// The line's number, from 1; 0 for the whole text.
    pub line: usize,
    /// What is wrong with it, and what is allowed.
    pub message: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.message),
            line => write!(f, "line {line}: {}", self.message),
        }
    }
}

impl std::error::Error for TraceError {}

/// The most lines of a story.
pub const STEPS_MAX: usize = 200;

/// A verb: its name, its arguments, its answers.
type Verb = (&'static str, &'static [&'static str], &'static [&'static str]);

const SETTLED: &[&str] = &["ok", "waiting", "dead", "parked", "lost", "unknown"];

const VERBS: &[Verb] = &[
    (
        "claim",
        &["key", "payload", "fault"],
        &["run", "replay", "busy", "waiting", "dead", "parked", "mismatch", "unknown"],
    ),
    ("enter", &["key"], &["ok"]),
    ("heartbeat", &["key", "fault"], &["ok", "lost", "over", "unknown"]),
    ("complete", &["key", "output", "fault"], &["ok", "lost", "unknown"]),
    ("fail", &["key", "class", "aftermath", "fault"], &["waiting", "dead", "parked", "lost", "unknown"]),
    ("release", &["key", "fault"], &["waiting", "dead", "parked", "lost", "unknown"]),
    ("again", &["key", "fault"], SETTLED),
    ("drop", &["key"], &["ok"]),
    ("work", &[], &["ok"]),
    ("die", &[], &["ok"]),
    ("redrive", &["key"], &["waiting", "not_found", "wrong_state"]),
    ("resolve-done", &["key"], &["done", "not_found", "wrong_state"]),
    ("resolve-not-done", &["key"], &["waiting", "not_found", "wrong_state"]),
    ("clear", &["key"], &["ok", "not_found"]),
    ("purge", &[], &["ok"]),
    ("show", &["key"], &["absent", "running", "waiting", "done", "dead", "parked"]),
];

const FACTS: &[&str] = &["attempt", "crashes", "owner", "output", "class", "history", "left"];

impl Trace {
    /// Reads a story.
    ///
    /// # Errors
    /// The first line that is wrong, with what is allowed there.
    pub fn parse(text: &str) -> Result<Trace, TraceError> {
        let mut title = String::new();
        let mut policy = None;
        let mut steps: Vec<Step> = Vec::new();
        for (index, whole) in text.lines().enumerate() {
            let line = index + 1;
            let fault = |message: String| TraceError { line, message };
            let (said, comment) = whole.split_once('#').map_or((whole, None), |(said, comment)| (said, Some(comment)));
            let mut words = said.split_whitespace();
            let Some(first) = words.next() else {
                if let (true, Some(comment)) = (title.is_empty(), comment) {
                    title = comment.trim().to_owned();
                }
                continue;
            };
            if first == "policy" {
                if policy.is_some() || !steps.is_empty() {
                    return Err(fault("the policy is given once, before the first step".into()));
                }
                policy = Some(parse_policy(words).map_err(fault)?);
                continue;
            }
            let step = parse_step(line, first, words).map_err(fault)?;
            if let Some(before) = steps.last().filter(|before| before.at > step.at) {
                return Err(fault(format!("{:?} is before the line above, at {:?}", step.at, before.at)));
            }
            if steps.len() >= STEPS_MAX {
                return Err(fault(format!("a story has {STEPS_MAX} steps at most")));
            }
            steps.push(step);
        }
        let whole = |message: &str| TraceError { line: 0, message: message.into() };
        if title.is_empty() {
            return Err(whole("a story begins with `# ` and its title"));
        }
        if steps.is_empty() {
            return Err(whole("a story has at least one step"));
        }
        Ok(Trace { title, policy: policy.ok_or_else(|| whole("a line `policy effect=…` is missing"))?, steps })
    }
}

fn parse_step<'a>(line: usize, time: &str, mut words: impl Iterator<Item = &'a str>) -> Result<Step, String> {
    let at = parse_time(time)?;
    let actor = words.next().ok_or("an actor follows the time")?.to_owned();
    let name = words.next().ok_or("a verb follows the actor")?;
    let (verb, allowed, answers) = VERBS.iter().find(|verb| verb.0 == name).ok_or_else(|| {
        let all: Vec<_> = VERBS.iter().map(|verb| verb.0).collect();
        format!("there is no verb `{name}`; there are {}", all.join(", "))
    })?;
    let (mut arguments, mut facts) = (Vec::new(), Vec::new());
    let mut answer: Option<String> = None;
    for word in words {
        match (word.split_once('='), &answer) {
            (Some((name, value)), None) if allowed.contains(&name) => arguments.push((name.into(), value.into())),
            (Some((name, _)), None) => {
                return Err(format!("`{verb}` takes no `{name}`; it takes {}", list(allowed)));
            }
            (Some((name, value)), Some(_)) if FACTS.contains(&name) => facts.push((name.into(), value.into())),
            (Some((name, _)), Some(_)) => return Err(format!("there is no fact `{name}`; there are {}", list(FACTS))),
            (None, None) if answers.contains(&word) => answer = Some(word.into()),
            (None, None) => return Err(format!("`{verb}` never answers `{word}`; it answers {}", list(answers))),
            (None, Some(answer)) => {
                return Err(format!("`{word}` follows the answer `{answer}`; a fact is `name=value`"));
            }
        }
    }
    let answer = answer.ok_or_else(|| format!("the answer is missing; `{verb}` answers {}", list(answers)))?;
    Ok(Step { line, at, actor, verb: (*verb).into(), arguments, answer, facts })
}

fn list(words: &[&str]) -> String {
    if words.is_empty() { "nothing".into() } else { words.join(", ") }
}

fn parse_policy<'a>(words: impl Iterator<Item = &'a str>) -> Result<Policy, String> {
    let mut effect = None;
    let mut policy = Policy { backoff: Backoff::NONE, store_may_forget: true, ..Policy::new(Effect::Repeatable) };
    for word in words {
        let (name, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is not `name=value`"))?;
        let number = || value.parse::<u32>().map_err(|_| format!("`{value}` is not a number"));
        match name {
            "effect" => {
                effect = Some(Effect::from_name(value).ok_or_else(|| {
                    format!("there is no effect `{value}`; there are {}", list(&Effect::ALL.map(Effect::name)))
                })?);
            }
            "lease" => policy.lease = parse_time(value)?,
            "retention" => policy.retention = parse_time(value)?,
            "attempts" => policy.attempts_max = number()?,
            "crashes" => policy.crashes_max = number()?,
            "backoff" => {
                let (min, max) = value.split_once("..").ok_or("a backoff is written as `10s..60s`")?;
                policy.backoff =
                    Backoff { delay_min: parse_time(min)?, delay_max: parse_time(max)?, ..Backoff::default() };
            }
            _ => {
                let all = ["effect", "lease", "retention", "attempts", "crashes", "backoff"];
                return Err(format!("a policy has no `{name}`; it has {}", list(&all)));
            }
        }
    }
    policy.output_retention = policy.output_retention.min(policy.retention);
    let policy = Policy { effect: effect.ok_or("a policy names its effect: `policy effect=keyed`")?, ..policy };
    policy.check().map_err(|error| error.to_string())?;
    Ok(policy)
}

/// A time such as `0s`, `90s`, `5m`, `2h` or `14d`.
fn parse_time(text: &str) -> Result<Duration, String> {
    let unit = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)]
        .into_iter()
        .find_map(|(letter, seconds)| text.strip_suffix(letter).map(|number| (number, seconds)));
    unit.and_then(|(number, seconds)| number.parse::<u32>().ok().map(|number| u64::from(number) * seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| format!("`{text}` is not a time; write it as `20s`, `5m`, `2h` or `14d`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Trace::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_story_is_read_line_by_line() {
        let trace = Trace::parse(
            "# A title.\n# More.\npolicy effect=keyed lease=30s backoff=10s..60s\n\n  0s  a  claim key=k run attempt=1 # why\n",
        )
        .unwrap();
        assert_eq!((trace.title.as_str(), trace.steps.len()), ("A title.", 1));
        assert_eq!(trace.policy.lease, Duration::from_secs(30));
        let step = &trace.steps[0];
        assert_eq!(
            (step.line, step.actor.as_str(), step.verb.as_str(), step.answer.as_str()),
            (5, "a", "claim", "run")
        );
        assert_eq!(step.arguments, [("key".to_owned(), "k".to_owned())]);
        assert_eq!(step.facts, [("attempt".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_what_is_allowed() {
        let head = "# t\npolicy effect=keyed\n";
        for (lines, wanted) in [
            ("0s a clam run", "line 3: there is no verb `clam`; there are claim, enter"),
            ("0s a claim ok", "line 3: `claim` never answers `ok`; it answers run, replay"),
            ("0s a claim", "line 3: the answer is missing; `claim` answers run"),
            ("0s a claim colour=red run", "line 3: `claim` takes no `colour`; it takes key, payload, fault"),
            ("0s a claim run colour=red", "line 3: there is no fact `colour`; there are attempt"),
            ("0s a claim run again", "line 3: `again` follows the answer `run`"),
            ("soon a claim run", "line 3: `soon` is not a time; write it as `20s`"),
            ("0s", "line 3: an actor follows the time"),
            ("9s a work ok\n8s a work ok", "line 4: 8s is before the line above, at 9s"),
            ("0s a work ok\npolicy effect=keyed", "line 4: the policy is given once, before the first step"),
        ] {
            let said = error(&format!("{head}{lines}"));
            assert!(said.starts_with(wanted), "{said}");
        }
        assert_eq!(error("# t\n0s a work ok"), "a line `policy effect=…` is missing");
        assert_eq!(error("policy effect=keyed\n0s a work ok"), "a story begins with `# ` and its title");
        assert_eq!(error(head), "a story has at least one step");
        assert!(error("# t\npolicy effect=magic").starts_with("line 2: there is no effect `magic`; there are trans"));
        assert!(error("# t\npolicy effect=keyed lease=1s retention=0s").contains("retention"));
    }
}
