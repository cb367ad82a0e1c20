//! `queue`: what sources hold, of each handler; once, or again and again.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use taskonce::source::Depth;

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::sources::{Opened, SourcesArgs};
use crate::units::spell;
use crate::width::Shrinks;
use crate::{block_on, plain, units, view, width};

/// The shortest pause between two looks: each counts every delivery.
const WATCH_MIN: Duration = Duration::from_millis(200);

/// The arguments of `queue`.
#[derive(Debug, Args)]
pub(crate) struct QueueArgs {
    #[command(flatten)]
    sources: SourcesArgs,
    /// Look again and again, every 2 s or as often as is said, until ctrl-C
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "2s", value_parser = units::duration)]
    watch: Option<Duration>,
}

/// Prints what there is.
pub(crate) fn queue(args: &QueueArgs, _common: &Common, form: Form) -> Result<ExitCode> {
    let sources = args.sources.open_existing()?;
    let Some(every) = args.watch else {
        let held = block_on(look(&sources))??;
        show(&held, form);
        return Ok(Code::Fine.exit());
    };
    let every = every.max(WATCH_MIN);
    block_on(async {
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        // Until somebody interrupts it, or nobody reads it.
        loop {
            let held = look(&sources).await?;
            if form == Form::Text && io::stdout().is_terminal() {
                // To the upper left corner, and nothing below.
                report::data_bytes(b"\x1b[H\x1b[2J");
            }
            show(&held, form);
            tokio::select! {
                _ = &mut interrupted => return Ok(Code::Fine.exit()),
                () = tokio::time::sleep(every) => {}
            }
        }
    })?
}

/// A source, and what it holds of each handler.
struct Held<'a> {
    source: &'a Opened,
    depths: Vec<Depth>,
}

async fn look(sources: &[Opened]) -> Result<Vec<Held<'_>>> {
    let mut held = Vec::with_capacity(sources.len());
    for source in sources {
        let mut depths = source.source.depth().await?;
        depths.sort_by(|a, b| a.handler.cmp(&b.handler));
        held.push(Held { source, depths });
    }
    Ok(held)
}

fn show(held: &[Held<'_>], form: Form) {
    match form {
        Form::Json => report::data_json(&json!({ "sources": held.iter().map(source_json).collect::<Vec<_>>() })),
        Form::Text => {
            let parts: Vec<String> = held.iter().map(text).collect();
            report::data(&parts.join("\n"));
        }
    }
}

fn source_json(held: &Held<'_>) -> Value {
    let handlers = held.depths.iter().map(|depth| {
        let mut value = json!({ "handler": &*depth.handler });
        fill(&mut value, depth);
        value
    });
    let mut value = json!({
        "source": held.source.name(),
        "url": held.source.shown,
        "visibility_ms": view::millis(held.source.source.describe().visibility),
        "handlers": handlers.collect::<Vec<_>>(),
    });
    fill(&mut value, &Depth::total(&held.depths));
    value
}

fn fill(value: &mut Value, depth: &Depth) {
    value["ready"] = json!(depth.ready);
    value["oldest_ready_ms"] = json!(depth.oldest.map(view::millis));
    value["in_flight"] = json!(depth.in_flight);
    value["deferred"] = json!(depth.deferred);
    value["dead"] = json!(depth.dead);
}

fn text(held: &Held<'_>) -> String {
    let source = held.source;
    let visibility = spell(source.source.describe().visibility);
    let mut text = format!("{}  {}, visibility {visibility}\n", plain::line(source.name()), plain::line(&source.shown));
    if held.depths.is_empty() {
        text.push_str("nothing is queued\n");
        return text;
    }
    let total = Depth::total(&held.depths);
    let mut rows: Vec<_> = held.depths.iter().map(|depth| cells(&depth.handler, depth)).collect();
    if rows.len() > 1 {
        rows.push(cells("all", &total));
    }
    // Writing into a string cannot fail.
    let _ = write!(text, "{}", width::table(HEADS, rows, Shrinks { column: 0, min: 12 }, width::of(io::stdout())));
    if total.dead > 0 {
        let _ = writeln!(text, "`taskonce dead list {}` shows the dead letters", source.option);
    }
    text
}

const HEADS: [&str; 6] = ["HANDLER", "READY", "OLDEST", "IN FLIGHT", "DEFERRED", "DEAD"];

fn cells(name: &str, depth: &Depth) -> [String; 6] {
    [
        plain::line(name).into_owned(),
        depth.ready.to_string(),
        depth.oldest.map_or_else(|| "-".to_owned(), spell),
        depth.in_flight.to_string(),
        depth.deferred.to_string(),
        depth.dead.to_string(),
    ]
}
