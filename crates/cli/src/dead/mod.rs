//! `dead`: the dead letters of queues: which there are and why, and their way back to work.

mod pick;
mod list;
mod one;
mod back;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::args::{Common, reason};
use crate::report::{Form, Result};
use crate::sources::SourcesArgs;

/// What `dead --help` and the man page say below the options.
const NOTES: &str = "\
A dead letter is a delivery that no worker can bring further: its task is dead or parked, its key stands for another payload (mismatch),
it cannot be read (unreadable), it is older than its record would be (too_old), or its record is damaged (unreadable_record).
docs/dead-letters.md says what each means, and how it is brought back.

A redrive returns the task's record to work first, its counters at the beginning and its history kept, and publishes the delivery
then. Interrupted in between, it is done again: what was returned to work already is only published.";

/// The arguments of `dead`.
#[derive(Debug, Args)]
#[command(after_long_help = NOTES)]
pub(crate) struct DeadArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List dead letters, or groups of those that died of the same
    List(ListArgs),
    /// Show a dead letter, and what its record says
    Show(ShowArgs),
    /// Bring dead letters back: return their tasks to work, and publish them again
    Redrive(BackArgs),
    /// Forget dead letters; the records of their tasks stay as they are
    Drop(BackArgs),
}

/// Which dead letters.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct PickArgs {
    /// Only of this handler, as senders name it: `charge@2`
    #[arg(long, value_name = "HANDLER@VERSION")]
    pub(crate) handler: Option<String>,
    /// Only for this reason: dead, parked, mismatch, unreadable, too_old, unreadable_record
    #[arg(long, value_name = "WORD")]
    pub(crate) reason: Option<String>,
    /// Only with this text in the error, the key or the id
    #[arg(long, value_name = "TEXT")]
    pub(crate) text: Option<String>,
}

impl PickArgs {
    fn is_given(&self) -> bool {
        self.handler.is_some() || self.reason.is_some() || self.text.is_some()
    }
}

/// The arguments of `dead list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    sources: SourcesArgs,
    #[command(flatten)]
    pick: PickArgs,
    /// Group those of one handler that died of the same, numbers and ids in the error aside
    #[arg(long)]
    group: bool,
    /// The most to list; a group counts as one
    #[arg(long, value_name = "COUNT", default_value = "100", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
}

/// The arguments of `dead show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Its id, as `dead list` prints it, or the key of its task
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    sources: SourcesArgs,
    /// Write its payload to stdout, byte for byte
    #[arg(long)]
    payload: bool,
}

/// The arguments of `dead redrive` and `dead drop`.
#[derive(Debug, Args)]
pub(crate) struct BackArgs {
    /// Their ids, as `dead list` prints them, or the keys of their tasks
    #[arg(value_name = "ID", conflicts_with_all = ["handler", "reason", "text", "all"])]
    ids: Vec<String>,
    #[command(flatten)]
    sources: SourcesArgs,
    #[command(flatten)]
    pick: PickArgs,
    /// All of them
    #[arg(long, conflicts_with_all = ["handler", "reason", "text"])]
    all: bool,
    /// The most of them
    #[arg(long, value_name = "COUNT", default_value = "100000", hide_default_value = true, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
    /// Only say what would become of them
    #[arg(long)]
    dry_run: bool,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// Why; kept in the history of each task that is returned to work
    #[arg(long, value_name = "TEXT", value_parser = reason, default_value = "no reason given", hide_default_value = true)]
    why: String,
}

/// Looks at dead letters, or changes them.
pub(crate) fn dead(args: &DeadArgs, common: &Common, form: Form) -> Result<ExitCode> {
    match &args.verb {
        Verb::List(args) => list::list(args, form),
        Verb::Show(args) => one::show(args, common, form),
        Verb::Redrive(args) => back::redrive(args, common, form),
        Verb::Drop(args) => back::drop(args, form),
    }
}
