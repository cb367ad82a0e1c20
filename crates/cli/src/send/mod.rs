//! `send`: makes tasks and queues them, one or a file of them, and says what became of each at the entrance.

mod bulk;
mod when;

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use taskonce::routes::{Route, Routes, WithoutKey};
use taskonce::send::{Due, Entered, Id, Known, NewTask, Sender, tick_before};
use taskonce::source::{Priority, TRACE_HEADER};
use taskonce::store::record::WallTime;
use taskonce::{Fields, Handler, Host as _, Key, Name, State, SystemHost};

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::sources::SourcesArgs;
use crate::units::spell;
use crate::{block_on, key, plain, store, units, view};

/// What `send --help` and the man page say below the options.
const NOTES: &str = "\
The task's id is that of `--key`, or is derived from the fields of `--include`, or is the tick of `--schedule`; without any of them it is
derived from the whole payload. Whoever sends the same id to the same handler sends the same task, which takes effect once, however often
it is queued. `--once` spares the queue the duplicates that are seen here: what is queued already, and, where `--store` or TASKONCE_STORE
names the ledger, what is done, dead or parked.

A schedule needs nothing but cron on as many hosts as one likes, which all send the same tick:

  0 * * * *  taskonce send report@1 --schedule hourly --every 1h --once --source sqlite:/var/lib/shop/queue.db

With `--lines` each line is the JSON payload of a task. What cannot be used is refused, with its line, and the rest is sent. Where the queue
cannot serve, or at a signal, it stops and says at which line: all before it is sent, and `--from-line` goes on there. Lines that are
sent twice are duplicates, which the ledger tells.

A `traceparent` in the environment's TRACEPARENT is handed on.";

/// The arguments of `send`.
#[derive(Debug, Args)]
#[command(after_long_help = NOTES)]
pub(crate) struct SendArgs {
    /// The handler and its version, `charge@2`, or with its namespace, `shop/charge@2`
    #[arg(value_name = "HANDLER@VERSION")]
    handler: String,
    #[command(flatten)]
    sources: SourcesArgs,
    /// The source of the table to send to, where it has several
    #[arg(long, value_name = "SOURCE", conflicts_with = "source")]
    to: Option<String>,
    /// The task's id, or its key in full, `namespace/handler@version/id`
    #[arg(long, value_name = "ID", conflicts_with_all = ["lines", "include", "schedule"])]
    key: Option<String>,
    /// Derive the id from this field of the payload: a JSON Pointer such as `/order/id`; may be given several times
    #[arg(long, value_name = "POINTER", conflicts_with = "schedule")]
    include: Vec<String>,
    /// The same, for a field that a payload may lack
    #[arg(long, value_name = "POINTER", requires = "include")]
    optional: Vec<String>,
    /// The task is one tick of this schedule; due then, unless said otherwise
    #[arg(long, value_name = "NAME", conflicts_with = "lines", requires = "tick_from")]
    schedule: Option<String>,
    /// When that tick is, with its offset: `2026-11-30T02:00Z`
    #[arg(long, value_name = "TIME", group = "tick_from", requires = "schedule", value_parser = when::instant)]
    tick: Option<WallTime>,
    /// It is the last one of a schedule that ticks every so often, counted from the beginning of 1970 in UTC
    #[arg(long, value_name = "DURATION", group = "tick_from", requires = "schedule", conflicts_with = "tick", value_parser = every)]
    every: Option<Duration>,
    /// The payload: this file, or stdin with `-`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["payload", "lines"])]
    input: Option<OsString>,
    /// The payload itself
    #[arg(long, value_name = "JSON", conflicts_with = "lines")]
    payload: Option<String>,
    /// Send many: each line of this file, or of stdin with `-`, is the JSON payload of a task
    #[arg(long, value_name = "FILE")]
    lines: Option<OsString>,
    /// Begin at this line
    #[arg(long, value_name = "NUMBER", requires = "lines", default_value = "1", hide_default_value = true, value_parser = clap::value_parser!(u64).range(1..))]
    from_line: u64,
    /// What the payload is, where it is no JSON; the id has to be given then
    #[arg(long, value_name = "TYPE", requires = "key", conflicts_with = "lines")]
    content_type: Option<String>,
    /// Deliver it so long from now
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration)]
    delay: Option<Duration>,
    /// Deliver it at this time, of this machine's zone where it has no offset: `2026-11-30T02:00`
    #[arg(long, value_name = "TIME", conflicts_with = "delay", value_parser = when::time)]
    at: Option<WallTime>,
    /// Do not queue what is queued, done, dead or parked already
    #[arg(long)]
    once: bool,
    /// How soon among those of its handler
    #[arg(long, value_enum, default_value_t = PriorityArg::Normal)]
    priority: PriorityArg,
    /// A further header; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = header)]
    header: Vec<(String, String)>,
    /// The handler's namespace; part of the key [default: default]
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
}

/// How soon among those of its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PriorityArg {
    /// Before all others
    High,
    /// As everything is
    Normal,
    /// After all others
    Low,
}

impl PriorityArg {
    fn priority(self) -> Priority {
        match self {
            PriorityArg::High => Priority::High,
            PriorityArg::Normal => Priority::Normal,
            PriorityArg::Low => Priority::Low,
        }
    }
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => Err("write `NAME=VALUE`, such as `x-tenant=7`".to_owned()),
    }
}

/// The shortest interval of a schedule: what is sent more often needs no clock.
const EVERY_MIN: Duration = Duration::from_secs(1);

fn every(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        every if every < EVERY_MIN => {
            Err("a schedule ticks every second at most; write such as `15m` or `1h`".to_owned())
        }
        every => Ok(every),
    }
}

/// Sends a task, or those of a file.
pub(crate) fn send(args: &SendArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let table = args.sources.table()?;
    let opened = args.sources.open_to(table.as_ref(), args.to.as_deref())?;
    let route = match &table {
        Some((path, routes)) => Some(route(path, routes, opened.name(), args)?),
        None => None,
    };
    let maker = Maker::of(args, route)?;
    let sender = Sender::new(Arc::clone(&opened.source));
    let store = match (store::named(common.store.as_deref())?, &table) {
        (Some(url), _) => Some(url),
        (None, Some((_, routes))) => routes.store().map(str::to_owned),
        (None, None) => None,
    };
    let sender = match store {
        Some(url) if args.once => sender.once().asking(taskonce::open(&url)?),
        Some(_) | None if args.once => sender.once(),
        Some(_) | None => sender,
    };
    match &args.lines {
        Some(from) => bulk::send(&maker, &sender, from, args.from_line, form),
        None => one(&maker, &sender, form),
    }
}

/// The route by which the task will come.
fn route<'t>(path: &Path, routes: &'t Routes, source: &str, args: &SendArgs) -> Result<&'t Route> {
    let wanted = args.handler.split_once('/').map_or(&*args.handler, |(_, handler)| handler);
    routes.find(source, wanted).ok_or_else(|| {
        let has: Vec<&str> = routes.of_source(source).map(|route| &*route.handler).collect();
        Trouble::usage(
            format!("{} has no route `{source} × {}`: no worker would take it", path.display(), wanted.escape_debug()),
            format!("the handlers of `{source}`: {}", if has.is_empty() { "none".to_owned() } else { has.join(", ") }),
        )
    })
}

/// Makes tasks of payloads.
pub(crate) struct Maker<'a> {
    args: &'a SendArgs,
    handler: Handler,
    id: Option<String>,
    fields: Fields,
    schedule: Option<(Name, WallTime)>,
}

impl<'a> Maker<'a> {
    /// Where there is a route, it says the namespace, and what makes the id of a task that is given none.
    fn of(args: &'a SendArgs, route: Option<&Route>) -> Result<Maker<'a>> {
        let handler = handler(args, route)?;
        let id = match &args.key {
            Some(text) => Some(id_of(&handler, text)?),
            None => None,
        };
        let fields = match (&*args.include, route.map(|route| &route.without_key)) {
            ([], Some(WithoutKey::Derive(fields))) => fields.clone(),
            ([], Some(WithoutKey::Refuse | WithoutKey::Coordinates) | None) => Fields::all(),
            (include, _) => Fields::new(include)?.optional(&args.optional)?,
        };
        let tick = match (args.tick, args.every) {
            (Some(tick), _) => tick,
            (None, Some(every)) => tick_before(SystemHost::new().wall_time(), every),
            (None, None) => WallTime(0),
        };
        let schedule = args.schedule.as_deref().map(Name::new).transpose()?.map(|name| (name, tick));
        Ok(Maker { args, handler, id, fields, schedule })
    }

    fn id(&self) -> Id<'_> {
        match (&self.id, &self.schedule) {
            (Some(id), _) => Id::Given(id),
            (None, Some((schedule, tick))) => Id::Tick { schedule, tick: *tick },
            (None, None) => Id::Derived(&self.fields),
        }
    }

    /// The task of a payload.
    pub(crate) fn make(&self, payload: Vec<u8>) -> taskonce::Result<NewTask> {
        let mut task = match (&self.args.content_type, &self.id) {
            (Some(content_type), Some(id)) => NewTask::bytes(&self.handler, id, content_type, payload)?,
            (Some(_) | None, _) => NewTask::json(&self.handler, self.id(), payload)?,
        };
        let tick = self.schedule.as_ref().map(|(_, tick)| Due::At(*tick));
        let due = self.args.delay.map(Due::After).or(self.args.at.map(Due::At)).or(tick).unwrap_or_default();
        task = task.due(due).priority(self.args.priority.priority());
        for (name, value) in &self.args.header {
            task = task.header(name, value);
        }
        let has_trace = self.args.header.iter().any(|(name, _)| name.eq_ignore_ascii_case(TRACE_HEADER));
        match env::var("TRACEPARENT") {
            Ok(parent) if !has_trace && !parent.is_empty() => Ok(task.header(TRACE_HEADER, parent)),
            Ok(_) | Err(_) => Ok(task),
        }
    }

    /// The payload of the one task.
    fn payload(&self) -> Result<Vec<u8>> {
        match (&self.args.payload, &self.args.input, &self.schedule) {
            (Some(text), _, _) => Ok(text.clone().into_bytes()),
            (None, Some(from), _) => key::read(from),
            (None, None, Some((name, tick))) => {
                Ok(json!({ "schedule": name.as_str(), "tick": view::time_json(*tick) }).to_string().into_bytes())
            }
            (None, None, None) => Err(Trouble::usage(
                "there is no payload",
                "pass `--payload JSON`, `--input FILE` (`-` is stdin), or many with `--lines FILE`",
            )),
        }
    }
}

/// The handler that the argument names, in the namespace of its route.
fn handler(args: &SendArgs, route: Option<&Route>) -> Result<Handler> {
    let (namespace, rest) = match args.handler.split_once('/') {
        Some((namespace, rest)) => (Some(namespace), rest),
        None => (None, &*args.handler),
    };
    let Some((name, version)) = rest.split_once('@') else {
        return Err(Trouble::usage(
            format!("`{}` names no version of a handler", args.handler.escape_debug()),
            format!("write handler and version, such as `{}@1`", view::quoted(rest)),
        ));
    };
    if let (Some(one), Some(other)) = (namespace, &args.namespace)
        && one != other
    {
        return Err(Trouble::usage(
            format!("`{}` is of namespace `{one}`, not `{other}`", args.handler),
            "leave out `--namespace`",
        ));
    }
    let given = namespace.or(args.namespace.as_deref());
    match (given, route) {
        (Some(given), Some(route)) if route.keys.namespace() != given => Err(Trouble::usage(
            format!("route `{}` is of namespace `{}`, not `{given}`", route.name(), route.keys.namespace()),
            "leave the namespace out",
        )),
        (_, Some(route)) => Ok(route.keys.clone()),
        (given, None) => Ok(Handler::within(given.unwrap_or("default"), name, version)?),
    }
}

/// The id that `--key` names: what reads as a full key is one, and has to be this handler's.
fn id_of(handler: &Handler, text: &str) -> Result<String> {
    let Ok(key) = Key::parse(text) else { return Ok(text.to_owned()) };
    if handler.key(key.id()).is_ok_and(|own| own == key) {
        return Ok(key.id().to_owned());
    }
    Err(Trouble::usage(
        format!("key `{key}` is one in full, and not of `{handler}`"),
        format!("name its handler, or for an id that reads like a key write it in full: `{}`", handler.key(text)?),
    ))
}

fn one(maker: &Maker<'_>, sender: &Sender, form: Form) -> Result<ExitCode> {
    let task = maker.make(maker.payload()?)?;
    let entered = block_on(sender.send(&task))??;
    match form {
        Form::Json => report::data_json(&json_of(&entered)),
        Form::Text => report::data(&format!("{}\n", sentence(&entered))),
    }
    Ok(code(&entered).exit())
}

/// The exit code of an outcome.
fn code(entered: &Entered) -> Code {
    match entered {
        Entered::Accepted { .. } | Entered::AlreadyQueued { .. } | Entered::AlreadyDone { .. } => Code::Fine,
        Entered::Ended { known, .. } => match known.state {
            State::Parked => Code::Parked,
            State::Running | State::Waiting | State::Done | State::Dead => Code::Dead,
        },
        Entered::Mismatch { .. } => Code::Mismatch,
    }
}

/// What became of it, for people.
fn sentence(entered: &Entered) -> String {
    let key = plain::line(entered.key().as_str());
    match entered {
        Entered::Accepted { coordinates, .. } => format!("accepted: task `{key}` is queued as {coordinates}"),
        Entered::AlreadyQueued { coordinates, known, .. } => match known {
            Some(known) => format!(
                "already queued: task `{key}` as {coordinates}; it is {}, attempt {}, for {}",
                known.state,
                known.attempt,
                spell(known.age)
            ),
            None => format!("already queued: task `{key}` as {coordinates}"),
        },
        Entered::AlreadyDone { known, .. } => format!(
            "already done: task `{key}` took effect {} ago, attempt {} of {}; nothing is queued",
            spell(known.age),
            known.attempt,
            plain::line(&known.owner)
        ),
        Entered::Ended { known, .. } => format!(
            "{}: task `{key}` has been so for {}{}; nothing is queued\n{}",
            known.state,
            spell(known.age),
            why(known),
            match known.state {
                State::Parked => format!(
                    "`taskonce show {0}` says why; `taskonce resolve {0}` what became of it",
                    view::quoted(&key)
                ),
                State::Running | State::Waiting | State::Done | State::Dead => {
                    format!("`taskonce redrive {}` returns it to work", view::quoted(&key))
                }
            }
        ),
        Entered::Mismatch { held, given, known, .. } => format!(
            "mismatch: key `{key}` stands for another payload, which is {}; nothing is queued\nfingerprint {held}, and {given} here",
            known.state
        ),
    }
}

fn why(known: &Known) -> String {
    known.failure.as_ref().map_or_else(String::new, |failure| format!(" ({})", view::failure(failure)))
}

/// The same for programs.
pub(crate) fn json_of(entered: &Entered) -> Value {
    let mut value = json!({ "outcome": entered.name(), "key": entered.key().as_str() });
    match entered {
        Entered::Accepted { coordinates, .. } | Entered::AlreadyQueued { coordinates, .. } => {
            value["coordinates"] = json!(&**coordinates);
        }
        Entered::Mismatch { held, given, .. } => {
            value["fingerprint"] = json!(held.to_string());
            value["given_fingerprint"] = json!(given.to_string());
        }
        Entered::AlreadyDone { .. } | Entered::Ended { .. } => {}
    }
    if let Some(known) = entered.known() {
        value["state"] = json!(known.state.name());
        value["attempt"] = json!(known.attempt);
        value["owner"] = json!(&*known.owner);
        value["age_ms"] = json!(view::millis(known.age));
        value["error"] = json!(known.failure.as_ref().map(|failure| &failure.message));
    }
    value
}
