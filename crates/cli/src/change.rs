//! `redrive`, `clear` and `resolve`: changes by a person, kept with who, when and why.

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use taskonce::{By, ErrorKind, Found, Key, Ledger, Record, State};

use crate::args::{ClearArgs, Common, OneTask, RedriveArgs, ResolveArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::sources::CONFIG;
use crate::units::{spell, spell_left};
use crate::{block_on, given, plain, store, view};

/// How long `--after-lease` waits in all; a living holder renews its lease for ever.
const AFTER_LEASE_MAX: Duration = Duration::from_secs(60 * 60);
/// The shortest pause between two looks at a lease.
const LOOK_MIN: Duration = Duration::from_millis(20);
/// The longest pause between two looks: the holder may end before its lease does.
const LOOK_MAX: Duration = Duration::from_secs(1);
/// The longest name of a person, in characters.
const WHO_MAX: usize = 128;

/// Returns a dead or parked task to work, or ends the delay of a waiting one.
pub(crate) fn redrive(args: &RedriveArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let key = args.task.key()?;
    let ledger = store::open_existing(common.store.as_deref())?;
    let who = who();
    let redriven = block_on(async {
        if args.after_lease {
            await_lease(&ledger, &key).await?;
        }
        let by = By { who: &who, why: &args.reason };
        match ledger.redrive(&key, by).await {
            Ok(record) if record.state == State::Parked => Err(parked(&key, &record)),
            Ok(record) => Ok(record),
            Err(error) => Err(refused(&ledger, &args.task, &key, error, Change::Redrive).await),
        }
    })??;
    let in_doubt = view::step_in_doubt(&redriven).map_or_else(String::new, |step| {
        format!(
            "\nits step `{}` is still in doubt, and parks it again unless its code can ask; `taskonce resolve` says what \
             became of it",
            plain::line(&step.name)
        )
    });
    let dead = if std::path::Path::new(CONFIG).exists() {
        format!(
            "\nits delivery may be among the dead letters: `taskonce dead redrive {}` publishes it again",
            view::quoted(key.as_str())
        )
    } else {
        String::new()
    };
    let text = format!(
        "redriven: task `{key}` may run again; its counters begin anew, its history stays\n\
         the next delivery or `taskonce run` of it runs it{in_doubt}{dead}"
    );
    done(form, &key, "redriven", &who, &args.reason, &text)
}

/// Removes a record.
pub(crate) fn clear(args: &ClearArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let key = args.task.key()?;
    let ledger = store::open_existing(common.store.as_deref())?;
    let who = who();
    let removed = match block_on(ledger.clear(&key, By { who: &who, why: &args.reason }))? {
        Ok(removed) => removed,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(not_found(&args.task, &error)),
        Err(error) => return Err(error.into()),
    };
    let was = removed.as_ref().map_or("damaged and could not be read".to_owned(), view::sentence);
    match form {
        Form::Json => report::data_json(&json!({
            "key": key.as_str(), "change": "cleared", "who": who, "why": args.reason,
            "removed": removed.as_ref().map(|found| view::record_json(&key, found)),
        })),
        Form::Text => report::data(&format!(
            "cleared: the record of task `{key}` is removed; it was {}\nthe task may run again; who removed it and why is kept, see `taskonce show {}`\n",
            was,
            view::quoted(key.as_str()),
        )),
    }
    Ok(Code::Fine.exit())
}

/// What a person says became of a parked task.
#[derive(Clone, Copy)]
enum Verdict<'a> {
    Done,
    NotDone,
    /// Its step in doubt took effect; the name that was given for it.
    StepDone(Option<&'a str>),
}

/// Says what became of a parked task, or of its step that is in doubt.
pub(crate) fn resolve(args: &ResolveArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let key = args.task.key()?;
    let verdict = match &args.step_done {
        Some(name) => Verdict::StepDone(name.as_deref()),
        None if args.done => Verdict::Done,
        None => Verdict::NotDone,
    };
    let output = match &args.output {
        Some(from) => Some(given::output(from, args.content_type.as_deref(), matches!(verdict, Verdict::StepDone(_)))?),
        None => None,
    };
    let ledger = store::open_existing(common.store.as_deref())?;
    let who = who();
    let by = By { who: &who, why: &args.reason };
    let step = block_on(async {
        let found = ledger.show(&key).await?;
        let step = found.as_ref().and_then(|found| view::step_in_doubt(&found.record)).map(|step| step.name.clone());
        let changed = match verdict {
            Verdict::Done => ledger.resolve_done(&key, by, output.clone()).await,
            Verdict::NotDone => ledger.resolve_not_done(&key, by).await,
            Verdict::StepDone(name) => ledger.resolve_step_done(&key, by, name, output.clone()).await,
        };
        let change = if args.step_done.is_some() { Change::ResolveStep } else { Change::Resolve };
        match (changed, verdict) {
            // The one that was changed, which the look before may not have seen.
            (Ok(record), Verdict::StepDone(_)) => Ok(record.steps.last().map(|step| step.name.clone())),
            (Ok(_record), Verdict::Done | Verdict::NotDone) => Ok(step),
            (Err(error), Verdict::StepDone(Some(name))) if error.kind() == ErrorKind::WrongState => {
                let found = ledger.show(&key).await?.filter(|found| found.record.state == State::Parked);
                match found.as_ref().and_then(|found| view::step_in_doubt(&found.record)) {
                    Some(step) if step.name != name => Err(another_step(&key, name, &step.name)),
                    Some(_) | None => Err(refused(&ledger, &args.task, &key, error, change).await),
                }
            }
            (Err(error), Verdict::Done | Verdict::NotDone | Verdict::StepDone(_)) => {
                Err(refused(&ledger, &args.task, &key, error, change).await)
            }
        }
    })??;
    let what = output.as_ref().map_or_else(|| "without output".to_owned(), view::output);
    let of_step = step.as_ref().map(|step| format!("step `{}` of ", plain::line(step))).unwrap_or_default();
    let (name, text) = match verdict {
        Verdict::Done => {
            ("resolved_done", format!("resolved: task `{key}` is done; duplicates are answered so, {what}"))
        }
        Verdict::NotDone if step.is_some() => {
            ("resolved_not_done", format!("resolved: {of_step}task `{key}` had no effect; the task may run again"))
        }
        Verdict::NotDone => ("resolved_not_done", format!("resolved: task `{key}` had no effect and may run again")),
        Verdict::StepDone(_) => (
            "resolved_step_done",
            format!(
                "resolved: {of_step}task `{key}` took effect, {what}; the task may run again and goes on behind it"
            ),
        ),
    };
    done(form, &key, name, &who, &args.reason, &text)
}

fn another_step(key: &Key, name: &str, step: &str) -> Trouble {
    Trouble::new(
        Code::NotSo,
        ErrorKind::WrongState.name(),
        format!("step `{}` of task `{key}` is in doubt, not `{}`", plain::line(step), plain::line(name)),
        format!("`taskonce show {}` lists its steps", view::quoted(key.as_str())),
    )
}

fn done(form: Form, key: &Key, change: &str, who: &str, why: &str, text: &str) -> Result<ExitCode> {
    match form {
        Form::Json => {
            report::data_json(&json!({ "key": key.as_str(), "change": change, "who": who, "why": why }));
        }
        Form::Text => report::data(&format!("{text}\n")),
    }
    Ok(Code::Fine.exit())
}

/// Waits until no lease holds the task. Its holder may end it meanwhile.
async fn await_lease(ledger: &Ledger, key: &Key) -> Result<()> {
    let start = std::time::Instant::now();
    let mut told = false;
    loop {
        let Some(found) = ledger.show(key).await? else { return Ok(()) };
        let left = found.lease_left();
        if found.record.state != State::Running || left.is_zero() {
            return Ok(());
        }
        if start.elapsed() >= AFTER_LEASE_MAX {
            return Err(Trouble::new(
                Code::Busy,
                "busy",
                format!(
                    "task `{key}` still runs after {}: its holder renews the lease\n{}",
                    spell(AFTER_LEASE_MAX),
                    holder(&found)
                ),
                "the holder lives; stop it, or wait for the task's end",
            ));
        }
        if !told {
            report::say(format_args!("waiting for the lease to end\n{}", holder(&found)));
            told = true;
        }
        tokio::time::sleep(left.clamp(LOOK_MIN, LOOK_MAX)).await;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Redrive,
    Resolve,
    ResolveStep,
}

fn holder(found: &Found) -> String {
    let record = &*found.record;
    let ends = match found.lease_left() {
        left if left.is_zero() => "lease has passed".to_owned(),
        left => format!("lease ends in {}", spell_left(left)),
    };
    format!("  held by  {}, attempt {}, {ends}", plain::line(&record.owner), record.attempt)
}

/// A redrive found that the last attempt of an unrepeatable effect had ended without a word: the task is not returned
/// to work.
fn parked(key: &Key, record: &Record) -> Trouble {
    let attempt = record.attempt;
    let why = record.failure.as_ref().map_or_else(String::new, |failure| format!(" ({})", view::failure(failure)));
    Trouble::new(
        Code::Parked,
        State::Parked.name(),
        format!(
            "task `{key}` is not redriven but parked: attempt {attempt} ended without a word{why}; \
             whether it took effect is in doubt"
        ),
        view::advice(key, record),
    )
}

/// The refusal of a change, with what the task is now and what can be done instead.
async fn refused(ledger: &Ledger, task: &OneTask, key: &Key, error: taskonce::Error, change: Change) -> Trouble {
    if error.kind() == ErrorKind::NotFound {
        return not_found(task, &error);
    }
    let found = match error.kind() {
        ErrorKind::WrongState => ledger.show(key).await.ok().flatten(),
        _ => None,
    };
    let Some(found) = found else { return error.into() };
    let what = match change {
        Change::Redrive => "redriven",
        Change::Resolve | Change::ResolveStep => "resolved",
    };
    let shown = view::quoted(key.as_str());
    let state = found.record.state;
    let (more, hint) = match (state, change) {
        (State::Running, Change::Redrive) => (
            format!("\n{}", holder(&found)),
            "wait for the lease to end, or pass `--after-lease` to wait for it here".to_owned(),
        ),
        (State::Running, Change::Resolve | Change::ResolveStep) => {
            (format!("\n{}", holder(&found)), "only a parked task is in doubt; wait for the end of this one".to_owned())
        }
        (State::Waiting, Change::Resolve | Change::ResolveStep) => (
            String::new(),
            format!(
                "it is in work: the next delivery or `taskonce run` of it runs it; `taskonce redrive {shown}` ends its delay"
            ),
        ),
        (State::Done, _) => (
            String::new(),
            format!(
                "nothing is left to do: it took effect; only if it must happen again, \
                 `taskonce clear {shown} --reason …` removes the record"
            ),
        ),
        (State::Parked, Change::ResolveStep) => (
            "\n  no step of it is in doubt".to_owned(),
            format!("{}; `taskonce show {shown}` lists its steps", view::advice(key, &found.record)),
        ),
        (State::Dead, Change::Resolve | Change::ResolveStep) => {
            (String::new(), format!("`taskonce redrive {shown}` returns it to work"))
        }
        (State::Parked, Change::Resolve) | (State::Dead | State::Parked | State::Waiting, Change::Redrive) => {
            (String::new(), "it changed just now; try again".to_owned())
        }
    };
    let text = format!("task `{key}` is {state} and cannot be {what}{more}");
    Trouble::new(Code::of(error.kind()), error.kind().name(), text, hint)
}

fn not_found(task: &OneTask, error: &taskonce::Error) -> Trouble {
    Trouble::new(Code::of(error.kind()), error.kind().name(), error.to_string(), task.elsewhere())
}

/// The person, as kept in the history: `user@host`.
pub(crate) fn who() -> String {
    let user = ["USER", "LOGNAME"]
        .into_iter()
        .find_map(|name| env::var(name).ok().filter(|user| !user.is_empty()))
        .unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()));
    let name = rustix::system::uname();
    let who = format!("{user}@{}", name.nodename().to_string_lossy());
    who.chars().filter(|c| !plain::is_unsafe(*c)).take(WHO_MAX).collect()
}
