//! The arguments of the command line, and what `--help` says of them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use taskonce::{Effect, Handler, Key, State};

use crate::commands::WorkArgs;
use crate::dead::DeadArgs;
use crate::demo::DemoArgs;
use crate::doctor::DoctorArgs;
use crate::queue::QueueArgs;
use crate::report::{Result, Trouble};
use crate::send::SendArgs;
use crate::top::TopArgs;
use crate::{exit, plain, units, view};

/// Runs any program once: the second call with the same key replays the first one's output.
///
///   taskonce run --key invoice-42 --effect keyed -- ./charge.sh
///   taskonce show invoice-42
#[derive(Debug, Parser)]
#[command(name = "taskonce", version, verbatim_doc_comment, after_help = exit::table(), max_term_width = 110)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// What every subcommand takes.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Where records are kept: `sqlite:/path/tasks.db`, `postgres://user@host/database`, `redis://host:6379/0`,
    /// `redis+sentinel://…` or `redis+cluster://…`; the first two with `?front=redis://…` have a Redis in front that answers
    /// duplicates. Without it TASKONCE_STORE says it, or it is a SQLite file in your state folder
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// Write results as JSON to stdout
    #[arg(long, global = true, help_heading = "Everywhere")]
    pub(crate) json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command, unless it was done before under the same key
    Run(RunArgs),
    /// Derive a key, and explain how
    Key(KeyArgs),
    /// Say what happened to a task
    Show(ShowArgs),
    /// List tasks
    List(ListArgs),
    /// Return a dead or parked task to work, or end the delay of a waiting one
    Redrive(RedriveArgs),
    /// Remove a task's record, so that it can run again
    Clear(ClearArgs),
    /// Say of a parked task whether it was done
    Resolve(ResolveArgs),
    /// Remove final records past their retention
    Purge(PurgeArgs),
    /// Make the store's schema, or bring it up to date
    Migrate(MigrateArgs),
    /// Look at the store's health, and that of queues
    Doctor(DoctorArgs),
    /// Check a table of routes, and print it with the planned times of its retries
    Routes(RoutesArgs),
    /// Queue a task, or many, and say what is queued or done already
    Send(SendArgs),
    /// Say what is queued, of each handler: ready, in flight, deferred, dead
    Queue(QueueArgs),
    /// A live view of queues, workers and running tasks
    Top(TopArgs),
    /// List, show, redrive and drop dead letters
    Dead(DeadArgs),
    /// Run the tasks that sources deliver, each once: handlers are commands
    Work(WorkArgs),
    /// See what taskonce is for: tasks that arrive twice, workers that are killed, and three ways to handle them
    Demo(DemoArgs),
    /// Print a shell's completions
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the man page
    Man {
        /// The subcommand whose page to print
        subcommand: Option<String>,
    },
}

/// Which handler a task belongs to.
#[derive(Debug, Args)]
pub(crate) struct HandlerArgs {
    /// The handler's name; part of the key [default: run]
    #[arg(long, value_name = "NAME")]
    pub(crate) handler: Option<String>,
    /// The handler's version; a new version is a new task [default: 1]
    #[arg(long = "version", value_name = "VERSION")]
    pub(crate) handler_version: Option<String>,
    /// The namespace; part of the key [default: default]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
}

impl HandlerArgs {
    pub(crate) fn handler(&self) -> Result<Handler> {
        let namespace = self.namespace.as_deref().unwrap_or("default");
        Ok(Handler::within(namespace, self.name(), self.handler_version.as_deref().unwrap_or("1"))?)
    }

    /// The handler's name.
    fn name(&self) -> &str {
        self.handler.as_deref().unwrap_or("run")
    }

    /// The handler and the id that `--key` names: what reads as a full key is one.
    pub(crate) fn of_key(&self, text: &str) -> Result<(Handler, String)> {
        let Ok(key) = Key::parse(text) else { return Ok((self.handler()?, text.to_owned())) };
        for (option, given, part) in [
            ("--namespace", &self.namespace, key.namespace()),
            ("--handler", &self.handler, key.handler()),
            ("--version", &self.handler_version, key.version()),
        ] {
            if let Some(given) = given
                && given != part
            {
                return Err(Trouble::usage(
                    format!("key `{key}` is one in full, and its `{part}` is not `{option} {given}`"),
                    format!(
                        "leave out `{option}`; for an id that reads like a key write the key in full: `{}`",
                        self.handler()?.key(text)?
                    ),
                ));
            }
        }
        Ok((Handler::within(key.namespace(), key.handler(), key.version())?, key.id().to_owned()))
    }
}

/// Where an id comes from.
#[derive(Debug, Args)]
pub(crate) struct InputArgs {
    /// Derive the id from this JSON file, or from stdin with `-`; the command gets the same bytes on its stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<OsString>,
    /// Derive it from this field only: a JSON Pointer such as `/order/id`; may be given several times
    #[arg(long, value_name = "POINTER", requires = "input")]
    pub(crate) include: Vec<String>,
    /// The same, for a field that an input may lack
    #[arg(long, value_name = "POINTER", requires = "input")]
    pub(crate) optional: Vec<String>,
    /// Beside the fields that make the key, this one must not change under it: another value is a mismatch; may be given
    /// several times
    #[arg(long, value_name = "POINTER", requires = "input")]
    pub(crate) fingerprint: Vec<String>,
}

impl InputArgs {
    /// Whether fields are chosen.
    pub(crate) fn chooses(&self) -> bool {
        !(self.include.is_empty() && self.optional.is_empty() && self.fingerprint.is_empty())
    }
}

/// What `run --help` and the man page say below the options.
fn notes_on_run() -> String {
    format!(
        "\
The command gets TASKONCE_KEY, TASKONCE_FENCE, TASKONCE_ATTEMPT and TASKONCE_DOWNSTREAM_KEY in its environment.
Exit code 0 is success: the task is done, and its output is replayed to every later call with the same key. Any
other end is a failure: it is recorded, and the next call tries again.

With `--effect transactional` it also gets TASKONCE_CLAIM_ID and TASKONCE_SCHEMA, and completes the task itself, by plain SQL in the
transaction of its effect: docs/postgres.md has the statements. Exit code 0 without that is a failure. The transaction has
to end within the lease. What the SQL gave as output is replayed, not what the command printed.

Signals (HUP, INT, QUIT, TERM, USR1, USR2) are passed on to the command, and what follows depends on how it ends. When
the claim is lost, or taskonce is killed, the command and everything it started are killed too. The command has a
process group of its own; in the foreground of a terminal it stays in the terminal's job, so that it can read the
terminal, and ctrl-C and ctrl-Z reach it from there. After a signal that comes when the command has ended, taskonce waits
for nothing more: what is recorded stays recorded.

What the command leaves running in the background when it ends is not killed, but its output is no longer read: what
still writes to the command's stdout or stderr a quarter of a second later gets SIGPIPE, and usually dies of it. Redirect
its output (`server >server.log 2>&1 &`), or use `--no-output`.

When taskonce and its guardian process are killed at the same instant, the command itself is killed by the kernel
(Linux), but not what it started; nor is a program that changes its user when it starts (setuid), or where there is no
such bond.

{}",
        exit::table()
    )
}

/// The arguments of `run`.
#[derive(Debug, Args)]
#[command(
    after_help = exit::table(),
    after_long_help = notes_on_run(),
    override_usage = "taskonce run [OPTIONS] <--key <ID>|--input <FILE>> -- <CMD>..."
)]
#[group(id = "identity", required = true, multiple = false, args = ["key", "input"])]
pub(crate) struct RunArgs {
    /// The task's id, or its key in full, `namespace/handler@version/id`; its payload is then the command itself, and
    /// another command under it is a mismatch
    #[arg(long, value_name = "ID")]
    pub(crate) key: Option<String>,
    #[command(flatten)]
    pub(crate) input: InputArgs,
    #[command(flatten)]
    pub(crate) handler: HandlerArgs,
    /// What kind of effect the command has
    #[arg(long, value_enum, default_value_t = EffectArg::Repeatable)]
    pub(crate) effect: EffectArg,
    /// Wait so long for a busy or waiting task
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, default_value = "0s")]
    pub(crate) wait: Duration,
    /// How long a claim holds when this process dies
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, default_value = "30s")]
    pub(crate) lease: Duration,
    /// How long the record is kept after its last write
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, default_value = "14d")]
    pub(crate) retain: Duration,
    /// How long the output is kept (default: 24 h, or as long as the record if that is shorter)
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration)]
    pub(crate) retain_output: Option<Duration>,
    /// Try up to so many attempts in this call, with backoff; then the task is dead. Without it a failed task is tried
    /// again by the next call, however often
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) attempts: Option<u32>,
    /// Keep only that it was done; the command writes to this stdout and stderr itself
    #[arg(long)]
    pub(crate) no_output: bool,
    /// Keep at most so much of stdout and stderr together
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = output_max, default_value = "1MiB", conflicts_with = "no_output")]
    pub(crate) output_max: usize,
    /// Accept a store that may forget what it acknowledged, for an unrepeatable effect
    #[arg(long)]
    pub(crate) store_may_forget: bool,
    /// The command and its arguments, after `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// The kinds of effect that a command can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EffectArg {
    /// Repeating is harmless: at least once
    Repeatable,
    /// A provider deduplicates on $TASKONCE_DOWNSTREAM_KEY: once within its window
    Keyed,
    /// At most once: a run that ended in doubt is parked for a person
    Unrepeatable,
    /// Once: the command completes the task by plain SQL in the transaction of its effect (PostgreSQL)
    Transactional,
}

impl EffectArg {
    pub(crate) fn effect(self) -> Effect {
        match self {
            EffectArg::Repeatable => Effect::Repeatable,
            EffectArg::Keyed => Effect::Keyed,
            EffectArg::Unrepeatable => Effect::Unrepeatable,
            EffectArg::Transactional => Effect::Transactional,
        }
    }
}

/// The arguments of `key`.
#[derive(Debug, Args)]
#[group(id = "identity", required = true, multiple = true, args = ["key", "input"])]
pub(crate) struct KeyArgs {
    /// The task's id, or its key in full, `namespace/handler@version/id`; the input or the command is then its payload
    #[arg(long, value_name = "ID")]
    pub(crate) key: Option<String>,
    #[command(flatten)]
    pub(crate) input: InputArgs,
    #[command(flatten)]
    pub(crate) handler: HandlerArgs,
    /// The step whose downstream key to print
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) step: String,
    /// The command and its arguments, after `--`: the payload under `--key`, as `run` takes it
    #[arg(last = true, value_name = "CMD", conflicts_with = "input")]
    pub(crate) command: Vec<OsString>,
}

/// One task.
#[derive(Debug, Args)]
pub(crate) struct OneTask {
    /// The key in full, `namespace/handler@version/id`, or only its id
    #[arg(value_name = "KEY")]
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) handler: HandlerArgs,
}

impl OneTask {
    /// The key: what reads as a full one is one.
    pub(crate) fn key(&self) -> Result<Key> {
        match Key::parse(&self.key) {
            Ok(key) => Ok(key),
            Err(_) => Ok(self.handler.handler()?.key(&self.key)?),
        }
    }
}

impl OneTask {
    /// Where else a task may be that is not found under its key.
    pub(crate) fn elsewhere(&self) -> String {
        if Key::parse(&self.key).is_err() && self.key.contains('/') {
            return format!(
                "this was taken as an id of handler `{}`: a key in full is `namespace/handler@version/id`",
                self.handler.name()
            );
        }
        let prefix: String = self.key.rsplit('/').next().unwrap_or_default().chars().take(PREFIX_SHOWN_MAX).collect();
        format!(
            "is it of another handler (`--handler`, `--version`, `--namespace`)? `taskonce list --prefix {}` looks in all",
            view::quoted(&prefix)
        )
    }
}

/// The longest beginning of an id that a hint shows, in characters.
const PREFIX_SHOWN_MAX: usize = 40;

/// The arguments of `show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) task: OneTask,
    /// Write the kept output of a done task to stdout, byte for byte; of a command's, what it wrote to its stdout
    #[arg(long)]
    pub(crate) output: bool,
}

/// Which tasks.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Only tasks of this namespace; `taskonce` has the notes that `clear` leaves
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Only tasks of this handler
    #[arg(long, value_name = "NAME")]
    pub(crate) handler: Option<String>,
    /// Only tasks whose id begins so
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

/// What `list --help` and the man page say below the options.
const NOTES_ON_LIST: &str = "\
Tasks that are running, waiting, dead or parked are few among many that are done. Asked for these states only, the store
looks where it lists them. On Redis that is a list beside the records: it has what failed, died or was parked, and what runs
since its first heartbeat, which comes after a third of the lease; it may miss what a process wrote right before it was
killed, what a failover forgot, and what a version of taskonce without lists left. `--all` looks at every record instead,
and adds to the lists what they miss. On SQLite and PostgreSQL, without a state, and with `--state done`,
it is the same as `--all`.";

/// The arguments of `list`.
#[derive(Debug, Args)]
#[command(after_long_help = NOTES_ON_LIST)]
pub(crate) struct ListArgs {
    /// Only tasks in this state; may be given several times
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) state: Vec<StateArg>,
    /// Look at every record, not only where the store lists these states, and mend the lists
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only tasks whose record was last written at least so long ago
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, default_value = "0s", hide_default_value = true)]
    pub(crate) older_than: Duration,
    /// The most tasks to list
    #[arg(long, value_name = "COUNT", default_value = "100", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
    /// Go on where the list before stopped
    #[arg(long, value_name = "CURSOR")]
    pub(crate) cursor: Option<String>,
}

/// The states of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateArg {
    /// A claim is out
    Running,
    /// An attempt failed; the next may start after its delay
    Waiting,
    /// It took effect
    Done,
    /// Out of attempts
    Dead,
    /// In doubt, waits for a person
    Parked,
}

impl StateArg {
    pub(crate) fn state(self) -> State {
        match self {
            StateArg::Running => State::Running,
            StateArg::Waiting => State::Waiting,
            StateArg::Done => State::Done,
            StateArg::Dead => State::Dead,
            StateArg::Parked => State::Parked,
        }
    }
}

/// The most output that can be kept, in bytes: 64 MiB.
pub(crate) const OUTPUT_MAX: usize = 64 * 1024 * 1024;

/// Reads how much output to keep.
fn output_max(text: &str) -> Result<usize, String> {
    match units::size(text)? {
        size if size > OUTPUT_MAX => {
            Err("this is more than can be kept, 64MiB; pass large output in a file, or use `--no-output`".to_owned())
        }
        size => Ok(size),
    }
}

/// Reads a reason: something, in one line that a terminal shows as it is.
pub(crate) fn reason(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("it is empty; say in a few words why, for whoever reads the history".to_owned());
    }
    match text.chars().find(|c| plain::is_unsafe(*c)) {
        Some(c) => Err(format!("it holds `{}`; write one line without control characters", c.escape_default())),
        None => Ok(text.to_owned()),
    }
}

/// The longest content type, in bytes.
const CONTENT_TYPE_MAX: usize = 128;

/// Reads a content type.
fn content_type(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_graphic() || c == ' ';
    if text.len() > CONTENT_TYPE_MAX || !text.contains('/') || !text.chars().all(is_plain) {
        return Err(format!("write `type/subtype`, in at most {CONTENT_TYPE_MAX} plain characters"));
    }
    Ok(text.to_owned())
}

/// The arguments of `redrive`.
#[derive(Debug, Args)]
pub(crate) struct RedriveArgs {
    #[command(flatten)]
    pub(crate) task: OneTask,
    /// Wait here until the lease of a running task has passed
    #[arg(long)]
    pub(crate) after_lease: bool,
    /// Why; kept in the task's history
    #[arg(long, value_name = "TEXT", value_parser = reason, default_value = "no reason given", hide_default_value = true)]
    pub(crate) reason: String,
}

/// The arguments of `clear`.
#[derive(Debug, Args)]
pub(crate) struct ClearArgs {
    #[command(flatten)]
    pub(crate) task: OneTask,
    /// Why; kept in a note that `show` prints
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub(crate) reason: String,
}

/// What `resolve --help` and the man page say below the options.
const NOTES_ON_RESOLVE: &str = "\
Without `--output` a done task is answered without output, and a step that took effect counts as one that returned nothing:
a handler that needs its value then parks the task again. An output is kept byte for byte. A handler of a library reads it
as JSON; `taskonce run` writes it to stdout, whatever it is.";

/// The arguments of `resolve`.
#[derive(Debug, Args)]
#[command(after_long_help = NOTES_ON_RESOLVE)]
#[group(id = "verdict", required = true, multiple = false, args = ["done", "not_done", "step_done"])]
pub(crate) struct ResolveArgs {
    #[command(flatten)]
    pub(crate) task: OneTask,
    /// It was done: duplicates are answered so
    #[arg(long)]
    pub(crate) done: bool,
    /// It had no effect: it may run again. Where a step is in doubt this speaks of that step; steps that ended stay ended
    #[arg(long)]
    pub(crate) not_done: bool,
    /// The step in doubt took effect: the task may run again, and goes on behind it. The step's name may be given, to be
    /// sure which one is meant: `--step-done=mail`
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
    pub(crate) step_done: Option<Option<String>>,
    /// What it returned: the content of this file, or of stdin with `-`
    #[arg(long, value_name = "FILE", conflicts_with = "not_done")]
    pub(crate) output: Option<OsString>,
    /// What the output is (default: `application/json` where it is JSON, `text/plain` where it is UTF-8, else
    /// `application/octet-stream`)
    #[arg(long, value_name = "TYPE", requires = "output", value_parser = content_type)]
    pub(crate) content_type: Option<String>,
    /// Why; kept in the task's history
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub(crate) reason: String,
}

/// The arguments of `migrate`.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// Make the table for steps in the database that `--store` names: where effects are, while the ledger's records are elsewhere
    #[arg(long)]
    pub(crate) steps: bool,
    /// Only print the SQL, for those who run migrations themselves
    #[arg(long)]
    pub(crate) print: bool,
    /// Print the grants that this role needs to use the store (or the table) too; only PostgreSQL has roles
    #[arg(long, value_name = "ROLE", requires = "print")]
    pub(crate) grant_to: Option<String>,
}

/// The arguments of `routes`.
#[derive(Debug, Args)]
pub(crate) struct RoutesArgs {
    /// The table: sources, handlers, and how the tasks of each pair are treated
    #[arg(long, value_name = "FILE", default_value = "taskonce.toml")]
    pub(crate) config: PathBuf,
}

/// The arguments of `purge`.
#[derive(Debug, Args)]
pub(crate) struct PurgeArgs {
    /// Remove rows of steps in the database that `--store` names, where effects are while the ledger's records are elsewhere
    #[arg(long, requires = "older_than", conflicts_with_all = ["namespace", "handler", "prefix", "dry_run"])]
    pub(crate) steps: bool,
    /// With `--steps`: rows of steps that ended at least so long ago. Not less than the retention of the tasks' records and the
    /// longest time in which a copy can still come, together
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, requires = "steps")]
    pub(crate) older_than: Option<Duration>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only count what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
}
