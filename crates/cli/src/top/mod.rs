//! `top`: a live view of queues, workers and running tasks, drawn again and again. What it shows is asked of the queues, of the
//! ledger's list of running tasks, and of what processes publish of themselves.

mod look;
mod show;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::sources::SourcesArgs;
use crate::{block_on, units, width};
use look::Looker;

/// The shortest pause between two looks: each counts every delivery.
const EVERY_MIN: Duration = Duration::from_millis(200);

/// What `top --help` and the man page say below the options.
const NOTES: &str = "\
QUEUES has a line of each handler: what is ready and for how long the oldest has been so, in flight, deferred and dead, and by how much \
all of it but the dead grows or shrinks a second. WORKERS are the processes that hold claims, or publish how they stand: those have \
rates. RUNNING are the tasks, the longest first.

On Redis a task is listed from its first heartbeat on, a third of its lease after it began: short ones are not seen there. \
Outside of a terminal, and with `--json`, there is one view, or as many as `--times` says.";

/// The arguments of `top`.
#[derive(Debug, Args)]
#[command(after_long_help = NOTES)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    sources: SourcesArgs,
    /// Look so often
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = units::duration)]
    every: Duration,
    /// End after so many views [default: none on a terminal, else 1]
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..))]
    times: Option<u64>,
}

/// Draws it until it is interrupted.
pub(crate) fn top(args: &TopArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    // Without a ledger there are still the queues; why there is none is shown.
    let ledger = args.sources.ledger(common.store.as_deref());
    let is_live = form == Form::Text && io::stdout().is_terminal();
    let times = args.times.unwrap_or(if is_live { u64::MAX } else { 1 });
    let every = args.every.max(EVERY_MIN);
    let mut looker = Looker::new(&sources, ledger);
    block_on(async {
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        let mut screen = Screen::new(is_live);
        for time in 1..=times {
            let view = looker.look(Instant::now()).await;
            match form {
                Form::Json => report::data_json(&show::json(&view)),
                Form::Text => screen.draw(&show::text(&view, screen.columns(), screen.lines())),
            }
            if time == times {
                break;
            }
            tokio::select! {
                _ = &mut interrupted => break,
                () = tokio::time::sleep(every) => {}
            }
        }
    })?;
    Ok(if looker.has_failed() { Code::StoreAway.exit() } else { Code::Fine.exit() })
}

/// Where it is drawn: over the view before, on a terminal.
struct Screen {
    is_live: bool,
}

impl Screen {
    fn new(is_live: bool) -> Screen {
        if is_live {
            report::data_bytes(b"\x1b[2J");
        }
        Screen { is_live }
    }

    fn columns(&self) -> Option<usize> {
        width::of(io::stdout())
    }

    /// How many lines there are; none outside of a terminal.
    fn lines(&self) -> Option<usize> {
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|_| self.is_live)?;
        Some(usize::from(size.ws_row)).filter(|lines| *lines > 0)
    }

    fn draw(&mut self, text: &str) {
        if !self.is_live {
            return report::data(text);
        }
        // Each line is written over the one that stands there, so that nothing flickers.
        let mut drawn = String::from("\x1b[H");
        for line in text.lines() {
            drawn.push_str(line);
            drawn.push_str("\x1b[K\n");
        }
        drawn.push_str("\x1b[J");
        report::data_bytes(drawn.as_bytes());
    }
}
