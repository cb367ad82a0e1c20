//! The arguments of `work`, and what `--help` says of them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::sources::CONFIG;
use crate::{exit, units};

/// How much a worker says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogArg {
    /// What failed for the worker itself
    Error,
    /// And what a person should look at
    Warn,
    /// And every skip, with its reason
    Info,
    /// And every start and end of a task
    Debug,
}

impl LogArg {
    pub(crate) fn level(self) -> tracing::Level {
        match self {
            LogArg::Error => tracing::Level::ERROR,
            LogArg::Warn => tracing::Level::WARN,
            LogArg::Info => tracing::Level::INFO,
            LogArg::Debug => tracing::Level::DEBUG,
        }
    }
}

/// What `work --help` and the man page say below the options.
fn notes_on_work() -> String {
    format!(
        "\
Handlers are the commands that the table names, `command = [\"./charge.sh\"]`. Each gets its task's payload on stdin, and
TASKONCE_KEY, TASKONCE_DOWNSTREAM_KEY, TASKONCE_ATTEMPT, TASKONCE_FENCE, TASKONCE_HANDLER, TASKONCE_SOURCE and TASKONCE_HEADERS in
its environment. Exit code 0: done, and its stdout is the output; 65: failed for good; any other: failed, to be tried again.
What it writes as JSON to descriptor 3 says more: docs/commands.md.

SIGTERM, SIGINT: nothing more is received, running tasks have `--grace`, then they are cancelled: exit code 0 when all ended, 75
when some were cut off or could not be settled. A second signal ends at once, with 128+N.

When the worker is killed, so are its commands.

{}",
        exit::table()
    )
}

/// The arguments of `work`.
#[derive(Debug, Args)]
#[command(after_help = exit::table(), after_long_help = notes_on_work())]
pub(crate) struct WorkArgs {
    /// The table: sources with their URLs, handlers with their commands, and how the tasks of each pair are treated
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub(crate) config: PathBuf,
    /// The most tasks that run at once, of all routes [default: 64]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) concurrency: Option<u32>,
    /// How long running tasks may go on after a signal
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::duration, default_value = "20s")]
    pub(crate) grace: Duration,
    /// How much it says, on stderr
    #[arg(long, value_enum, default_value_t = LogArg::Info)]
    pub(crate) log: LogArg,
}
