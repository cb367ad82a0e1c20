//! Which sources: the queue that `--source` names, or those of a table of routes.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use taskonce::routes::Routes;
use taskonce::source::{self, Source};
use taskonce::{ErrorKind, Ledger};

use crate::exit::Code;
use crate::report::{Result, Trouble};
use crate::{routes, store, view};

/// The table of routes that is read where nothing is named.
pub(crate) const CONFIG: &str = "taskonce.toml";

/// Where deliveries are.
#[derive(Debug, Args)]
pub(crate) struct SourcesArgs {
    /// The queue, by its URL: `sqlite:queue.db`
    #[arg(long, value_name = "URL", conflicts_with = "config")]
    pub(crate) source: Option<String>,
    /// The queues of this table of routes [default: taskonce.toml, where there is one]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// A source that was opened.
pub(crate) struct Opened {
    pub(crate) source: Arc<dyn Source>,
    /// Its URL, without what may be a password.
    pub(crate) shown: String,
    /// How a command names it: `--source URL` or `--config FILE`.
    pub(crate) option: String,
}

impl Opened {
    pub(crate) fn name(&self) -> &str {
        &self.source.describe().name
    }
}

/// What to do about a file that is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Make,
    Refuse,
}

impl SourcesArgs {
    /// The table of routes: the one that is named, or the default one where there is one and no source is named.
    pub(crate) fn table(&self) -> Result<Option<(PathBuf, Routes)>> {
        let path = match (&self.config, &self.source) {
            (Some(path), _) => path.clone(),
            (None, Some(_)) => return Ok(None),
            (None, None) => PathBuf::from(CONFIG),
        };
        if self.config.is_none() && !path.exists() {
            return Ok(None);
        }
        let routes = routes::load(&path)?;
        Ok(Some((path, routes)))
    }

    /// All sources, for what looks at deliveries or changes them: a mistyped path must not answer that nothing is queued.
    pub(crate) fn open_existing(&self) -> Result<Vec<Opened>> {
        let table = self.table()?;
        self.open_of(table.as_ref().map(|(path, routes)| (path, routes)), None, Missing::Refuse)
    }

    /// The one source that tasks are sent to: a SQLite file that is missing is made.
    pub(crate) fn open_to(&self, table: Option<&(PathBuf, Routes)>, to: Option<&str>) -> Result<Opened> {
        let mut opened = self.open_of(table.map(|(path, routes)| (path, routes)), Some(to), Missing::Make)?;
        opened.pop().ok_or_else(none_named)
    }

    /// The ledger of their tasks: `--store`, TASKONCE_STORE, what the table says, or the default.
    pub(crate) fn ledger(&self, chosen: Option<&str>) -> Result<Ledger> {
        let table = self.table()?;
        let url = store::of_table(chosen, table.as_ref().and_then(|(_, routes)| routes.store()))?;
        store::open_existing(Some(&url))
    }

    /// Whether one is named here.
    pub(crate) fn is_given(&self) -> bool {
        self.source.is_some() || self.config.is_some()
    }

    fn open_of(
        &self,
        table: Option<(&PathBuf, &Routes)>,
        to: Option<Option<&str>>,
        missing: Missing,
    ) -> Result<Vec<Opened>> {
        if let Some(url) = &self.source {
            let option = format!("--source {}", view::quoted(url));
            let source = match missing {
                Missing::Make => source::open(url),
                Missing::Refuse => source::open_existing(url),
            };
            return Ok(vec![Opened { source: source.map_err(missing_file)?, shown: store::hidden(url), option }]);
        }
        let Some((path, routes)) = table else { return Err(none_named()) };
        let option = format!("--config {}", view::quoted(&path.display().to_string()));
        let with_url = routes.sources().iter().filter_map(|rules| Some((rules, rules.url.as_deref()?)));
        let mut chosen: Vec<_> = with_url.collect();
        if let Some(to) = to {
            let names: Vec<String> = chosen.iter().map(|(rules, _)| rules.name.to_string()).collect();
            chosen.retain(|(rules, _)| to.is_none_or(|to| *rules.name == *to));
            if chosen.len() != 1 {
                return Err(which(path, to, &names));
            }
        }
        if chosen.is_empty() {
            return Err(Trouble::usage(
                format!("{} says of no source what opens it", path.display()),
                "write `url = \"sqlite:queue.db\"` in `[sources.NAME]`, or pass `--source URL`",
            ));
        }
        let mut opened = Vec::with_capacity(chosen.len());
        for (rules, url) in chosen {
            let source = match missing {
                Missing::Make => source::open_named(url, &rules.name),
                Missing::Refuse => source::open_existing_named(url, &rules.name),
            };
            let (source, shown) = (source.map_err(missing_file)?, store::hidden(url));
            opened.push(Opened { source, shown, option: option.clone() });
        }
        Ok(opened)
    }
}

fn none_named() -> Trouble {
    Trouble::usage(
        "no queue is named",
        "pass `--source sqlite:/path/to/queue.db`, or `--config FILE` with the table of routes that names it",
    )
}

fn which(path: &std::path::Path, to: Option<&str>, names: &[String]) -> Trouble {
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    match to {
        Some(to) => Trouble::usage(
            format!("{} has no source `{}` with a URL", path.display(), to.escape_debug()),
            format!("its sources with a URL: {names}"),
        ),
        None => Trouble::usage(
            format!("{} has several sources, or none, to send to", path.display()),
            format!("name one with `--to`; its sources with a URL: {names}"),
        ),
    }
}

fn missing_file(error: taskonce::Error) -> Trouble {
    match error.kind() {
        ErrorKind::NotFound => Trouble::new(
            Code::StoreAway,
            "no_queue",
            error.to_string(),
            "check the path; `taskonce send` makes the file with the first task",
        ),
        _ => error.into(),
    }
}
