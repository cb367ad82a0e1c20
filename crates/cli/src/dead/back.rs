//! `dead redrive` and `dead drop`: a preview, a question, and the work itself, which can be interrupted at any point and done again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead as _, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use taskonce::source::{Left, Source};
use taskonce::{By, Error, ErrorKind, Key, Ledger, State};
use tokio::task::JoinSet;

use super::BackArgs;
use super::pick::{Picked, Wants, by_ids, key_of, walk};
use crate::args::Common;
use crate::change::who;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::sources::Opened;
use crate::{block_on, plain, view};

/// The most that are under way at once.
const UNDER_WAY_MAX: usize = 32;
/// The most failures that are told to people.
const FAILURES_SHOWN_MAX: usize = 20;

/// What a redrive would do to a dead letter, by what its record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Dead,
    Parked,
    InWork,
    Done,
    NoRecord,
    NoTask,
    Unknown,
}

impl Fate {
    fn name(self) -> &'static str {
        match self {
            Fate::Dead => "dead",
            Fate::Parked => "parked",
            Fate::InWork => "in_work",
            Fate::Done => "done",
            Fate::NoRecord => "no_record",
            Fate::NoTask => "no_task",
            Fate::Unknown => "unknown",
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Fate::Dead => "dead: the task returns to work, its counters at the beginning",
            Fate::Parked => "parked: the task returns to work, and its effect may happen twice if it had happened",
            Fate::InWork => "in work already: only published",
            Fate::Done => "done: published, and acknowledged without a run",
            Fate::NoRecord => "without a record: runs from the beginning",
            Fate::NoTask => "of no task (mismatch, unreadable): published, and dies again unless its cause was mended",
            Fate::Unknown => "whose record cannot be read: left as it is",
        }
    }
}

/// Brings dead letters back.
pub(super) fn redrive(args: &BackArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    let picked = block_on(picked(args, &sources))??;
    let needs_ledger = picked.iter().any(|letter| key(letter).is_some());
    let ledger = if needs_ledger { Some(args.sources.ledger(common.store.as_deref())?) } else { None };
    if args.dry_run || asks(args) {
        let fates = block_on(fates(ledger.as_ref(), &picked))?;
        if args.dry_run {
            preview(&picked, &fates, form);
            return Ok(Code::Fine.exit());
        }
        report::say(summary(&fates));
        if !is_confirmed(&format!("redrive {}?", counted(picked.len())))? {
            return Err(declined());
        }
    }
    let who = who();
    let work = |letter: &Picked| {
        let (source, ledger) = (Arc::clone(&sources[letter.source].source), ledger.clone());
        let (id, key, who, why) = (letter.line.death.id.clone(), key(letter), who.clone(), args.why.clone());
        async move { bring_back(&*source, ledger.as_ref(), &id, key.as_ref(), By { who: &who, why: &why }).await }
    };
    let sum = block_on(each(&picked, work))?;
    sum.tell("redriven", form)
}

/// Forgets dead letters.
pub(super) fn drop(args: &BackArgs, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    let picked = block_on(picked(args, &sources))??;
    if args.dry_run {
        match form {
            Form::Json => report::data_json(&json!({
                "dry_run": true,
                "dead_letters": picked.iter().map(|letter| super::list::line_json(&sources, letter)).collect::<Vec<_>>(),
            })),
            Form::Text => report::data(&format!("would drop {}\n", counted(picked.len()))),
        }
        return Ok(Code::Fine.exit());
    }
    if !args.yes && !picked.is_empty() {
        can_be_asked("drop")?;
        if !is_confirmed(&format!("drop {}, with their payloads?", counted(picked.len())))? {
            return Err(declined());
        }
    }
    let work = |letter: &Picked| {
        let (source, id) = (Arc::clone(&sources[letter.source].source), letter.line.death.id.clone());
        async move { source.drop_dead(&id).await.map(Back::from) }
    };
    let sum = block_on(each(&picked, work))?;
    sum.tell("dropped", form)
}

fn key(letter: &Picked) -> Option<Key> {
    key_of(&letter.line.death.id, &letter.line.death.reason, letter.line.key.as_deref())
}

/// Those that are meant. Which they are has to be said.
async fn picked(args: &BackArgs, sources: &[Opened]) -> Result<Vec<Picked>> {
    if !args.ids.is_empty() {
        return by_ids(sources, &args.ids).await;
    }
    if !args.all && !args.pick.is_given() {
        return Err(Trouble::usage(
            "which dead letters is not said",
            "name their ids, or choose with `--handler`, `--reason` and `--text`, or say `--all`",
        ));
    }
    if !args.yes && !args.dry_run {
        can_be_asked("change")?;
    }
    let mut picked = Vec::new();
    let limit = args.limit as usize;
    walk(sources, &args.pick, |mut letter| {
        if picked.len() == limit {
            return Wants::Nothing;
        }
        // All of them are held at once, and only the ids matter.
        letter.line.death.message = String::new();
        picked.push(letter);
        Wants::More
    })
    .await?;
    Ok(picked)
}

/// Whether a person is asked: of more than they named one by one.
fn asks(args: &BackArgs) -> bool {
    !args.yes && args.ids.is_empty()
}

fn can_be_asked(what: &str) -> Result<()> {
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        return Ok(());
    }
    Err(Trouble::usage(
        format!("nobody can be asked whether to {what} them: this is no terminal"),
        "look with `--dry-run` first, then pass `--yes`",
    ))
}

fn is_confirmed(question: &str) -> Result<bool> {
    report::say(format_args!("{question} [y/N]"));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Trouble::usage(format!("the answer cannot be read: {error}"), "pass `--yes`"))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn declined() -> Trouble {
    Trouble::new(Code::NotSo, "declined", "nothing was changed", "answer `y`, or pass `--yes`")
}

fn counted(count: usize) -> String {
    view::count(count as u64, "dead letter")
}

async fn fates(ledger: Option<&Ledger>, picked: &[Picked]) -> Vec<Fate> {
    let mut fates = Vec::with_capacity(picked.len());
    for letter in picked {
        let found = match (key(letter), ledger) {
            (Some(key), Some(ledger)) => ledger.show(&key).await,
            (Some(_) | None, _) => {
                fates.push(Fate::NoTask);
                continue;
            }
        };
        fates.push(match found {
            Err(_) => Fate::Unknown,
            Ok(None) => Fate::NoRecord,
            Ok(Some(found)) => match found.record.state {
                State::Dead => Fate::Dead,
                State::Parked => Fate::Parked,
                State::Running | State::Waiting => Fate::InWork,
                State::Done => Fate::Done,
            },
        });
    }
    fates
}

fn counts(fates: &[Fate]) -> BTreeMap<Fate, usize> {
    let mut counts = BTreeMap::new();
    for fate in fates {
        *counts.entry(*fate).or_default() += 1;
    }
    counts
}

fn summary(fates: &[Fate]) -> String {
    let mut text = counted(fates.len());
    for (fate, count) in counts(fates) {
        // Writing into a string cannot fail.
        let _ = write!(text, "\n  {count:>6} {}", fate.meaning());
    }
    text
}

fn preview(picked: &[Picked], fates: &[Fate], form: Form) {
    match form {
        Form::Json => {
            let letters: Vec<Value> = picked
                .iter()
                .zip(fates)
                .map(|(letter, fate)| json!({ "id": letter.line.death.id, "task_is": fate.name() }))
                .collect();
            let counts: serde_json::Map<String, Value> =
                counts(fates).into_iter().map(|(fate, count)| (fate.name().to_owned(), json!(count))).collect();
            report::data_json(&json!({ "dry_run": true, "dead_letters": letters, "counts": counts }));
        }
        Form::Text => report::data(&format!("would redrive {}\n", summary(fates))),
    }
}

/// What became of one.
enum Back {
    Done,
    /// Another took it first.
    NotThere,
    /// It stays: whether its task took effect has to be resolved first.
    Parked,
}

impl From<Left> for Back {
    fn from(left: Left) -> Back {
        match left {
            Left::Done => Back::Done,
            Left::NotThere => Back::NotThere,
        }
    }
}

/// Returns the task to work, then publishes its delivery. In this order: a delivery that came before would be told dead, and go
/// back to the dead letters. Interrupted in between, the record waits already, and is left so the next time.
async fn bring_back(
    source: &dyn Source,
    ledger: Option<&Ledger>,
    id: &str,
    key: Option<&Key>,
    by: By<'_>,
) -> taskonce::Result<Back> {
    if let (Some(ledger), Some(key)) = (ledger, key) {
        let state = ledger.show(key).await?.map(|found| found.record.state);
        match state {
            Some(State::Dead | State::Parked) => match ledger.redrive(key, by).await {
                Ok(record) if record.state == State::Parked => return Ok(Back::Parked),
                Ok(_) => {}
                // Somebody else was faster: it is in work, or done, or its record is gone. Its delivery is published all the same.
                Err(error) if matches!(error.kind(), ErrorKind::WrongState | ErrorKind::NotFound) => {}
                Err(error) => return Err(error),
            },
            Some(State::Running | State::Waiting | State::Done) | None => {}
        }
    }
    source.redrive(id).await.map(Back::from)
}

/// What became of them.
#[derive(Default)]
struct Sum {
    done: u64,
    not_there: u64,
    parked: Vec<String>,
    /// Those of which only one is concerned.
    failed: Vec<(String, Error)>,
    /// Why the rest was left.
    stop: Option<Error>,
    left: u64,
}

/// Does it to each, many at once, with a bar on stderr where that is a terminal.
async fn each<F>(picked: &[Picked], work: impl Fn(&Picked) -> F) -> Sum
where
    F: Future<Output = taskonce::Result<Back>> + Send + 'static,
{
    let bar = ProgressBar::with_draw_target(Some(picked.len() as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    let (mut sum, mut rest, mut under_way) = (Sum::default(), picked.iter(), JoinSet::new());
    // Each round begins one or ends one.
    loop {
        if sum.stop.is_none()
            && under_way.len() < UNDER_WAY_MAX
            && let Some(letter) = rest.next()
        {
            let (id, working) = (letter.line.death.id.clone(), work(letter));
            under_way.spawn(async move { (id, working.await) });
            continue;
        }
        let Some(ended) = under_way.join_next().await else { break };
        // It neither panics nor is cancelled.
        let Ok((id, back)) = ended else { continue };
        bar.inc(1);
        match back {
            Ok(Back::Done) => sum.done += 1,
            Ok(Back::NotThere) => sum.not_there += 1,
            Ok(Back::Parked) => sum.parked.push(id),
            Err(error) if error.subject().is_some_and(|subject| subject.starts_with("task `")) => {
                sum.failed.push((id, error));
            }
            Err(error) => {
                sum.left += 1;
                sum.stop.get_or_insert(error);
            }
        }
        if !sum.failed.is_empty() {
            bar.set_message(format!("{} failed", sum.failed.len()));
        }
    }
    sum.left += rest.count() as u64;
    bar.finish_and_clear();
    sum
}

impl Sum {
    fn tell(self, what: &str, form: Form) -> Result<ExitCode> {
        match form {
            Form::Json => report::data_json(&json!({
                what: self.done,
                "not_there": self.not_there,
                "parked": self.parked,
                "failed": self.failed.iter().map(|(id, error)| json!({ "id": id, "error": error.to_string() })).collect::<Vec<_>>(),
                "left": self.left,
            })),
            Form::Text => self.say(what),
        }
        if let Some(error) = self.stop {
            let text = format!("stopped, {} left: {error}", counted(self.left as usize));
            let hint = format!("{}; then say it again: what is {what} is no dead letter any more", error.hint());
            return Err(Trouble::new(Code::of(error.kind()), error.kind().name(), text, hint));
        }
        Ok(match (self.failed.first(), self.parked.is_empty()) {
            (Some((_, error)), _) => Code::of(error.kind()).exit(),
            (None, false) => Code::Parked.exit(),
            (None, true) => Code::Fine.exit(),
        })
    }

    fn say(&self, what: &str) {
        report::data(&format!("{what}: {}\n", counted(self.done as usize)));
        if self.not_there > 0 {
            report::say(format_args!("{} were taken by another meanwhile", self.not_there));
        }
        for id in self.parked.iter().take(FAILURES_SHOWN_MAX) {
            report::say(format_args!("`{}` stays: whether its task took effect is in doubt", plain::line(id)));
        }
        for (id, error) in self.failed.iter().take(FAILURES_SHOWN_MAX) {
            report::say(format_args!(
                "`{}` failed: {}\n  hint: {}",
                plain::line(id),
                plain::line(&error.to_string()),
                error.hint()
            ));
        }
        let more = (self.failed.len() + self.parked.len()).saturating_sub(2 * FAILURES_SHOWN_MAX);
        if more > 0 {
            report::say(format_args!("and {more} more"));
        }
    }
}
