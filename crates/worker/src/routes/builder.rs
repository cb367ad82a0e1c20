//! A table as it is said, before it is checked: `RoutesBuilder`, and the layers that it holds.

use std::collections::HashMap;

use super::{Fault, Refused, Routes, Settings, SourceRules, command, resolve};

/// A table that is being made in code. Nothing is checked before [`RoutesBuilder::build`], which tells everything at once.
///
/// What a route does not say is inherited: from its handler's version, its handler, its source, the defaults. A handler
/// is named `charge@2`, one version of it, or `charge`, all versions that the table has, or version `1` if it has none.
///
/// ```
/// # use std::time::Duration;
/// # use taskonce_core::policy::Effect;
/// use taskonce_worker::routes::{Routes, Settings, SourceRules};
///
/// let keyed = Settings { effect: Some(Effect::Keyed), ..Settings::default() };
/// let patient = Settings { attempts_max: Some(12), ..Settings::default() };
/// let orders = SourceRules { visibility: Some(Duration::from_secs(30)), ..SourceRules::new("orders") };
/// let routes = Routes::builder()
///     .source(orders, Settings::default())
///     .handler("charge@2", keyed)
///     .route("orders", "charge", patient)
///     .build()?;
/// assert_eq!(routes.find("orders", "charge@2").unwrap().policy.attempts_max, 12);
/// # Ok::<(), taskonce_worker::routes::Refused>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct RoutesBuilder {
    /// The store's URL, and its line.
    pub(super) store: Option<(String, Option<usize>)>,
    pub(super) defaults: Layer,
    pub(super) sources: Vec<(SourceRules, Layer)>,
    pub(super) handlers: Vec<(String, Layer)>,
    pub(super) routes: Vec<RouteLayer>,
    /// What was wrong already when it was read.
    pub(super) faults: Vec<Fault>,
}

/// One layer, and where each of its settings was said.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    pub(super) settings: Settings,
    /// Of a handler: how it is started, where it is a command.
    pub(super) command: command::Said,
    /// `source orders`, `handler charge`, `route orders × charge`, `defaults`.
    pub(super) subject: String,
    pub(super) line: Option<usize>,
    /// The line of each setting, where it comes from a file.
    pub(super) lines: HashMap<&'static str, usize>,
}

#[derive(Clone, Debug)]
pub(super) struct RouteLayer {
    pub(super) source: String,
    pub(super) handler: String,
    pub(super) layer: Layer,
}

impl Layer {
    pub(super) fn new(subject: String, settings: Settings) -> Layer {
        Layer { settings, subject, ..Layer::default() }
    }

    /// A fault of one of its settings.
    pub(super) fn fault(&self, setting: &str, text: impl Into<String>, hint: impl Into<String>) -> Fault {
        let line = self.lines.get(setting).copied().or(self.line);
        Fault { line, subject: self.subject.clone(), text: text.into(), hint: hint.into() }
    }
}

impl RoutesBuilder {
    /// What holds where nothing else is said.
    #[must_use]
    pub fn defaults(mut self, settings: Settings) -> RoutesBuilder {
        self.defaults = Layer::new("defaults".to_owned(), settings);
        self
    }

    /// A source, and what holds for the tasks of all its handlers.
    #[must_use]
    pub fn source(mut self, rules: SourceRules, settings: Settings) -> RoutesBuilder {
        let subject = format!("source {}", rules.name);
        self.sources.push((rules, Layer::new(subject, settings)));
        self
    }

    /// A handler, `charge@2` or `charge`, and what holds for its tasks from all sources.
    #[must_use]
    pub fn handler(mut self, handler: &str, settings: Settings) -> RoutesBuilder {
        self.handlers.push((handler.to_owned(), Layer::new(format!("handler {handler}"), settings)));
        self
    }

    /// A route: the handler serves the source, and what holds for just these tasks.
    #[must_use]
    pub fn route(mut self, source: &str, handler: &str, settings: Settings) -> RoutesBuilder {
        let layer = Layer::new(format!("route {source} × {handler}"), settings);
        self.routes.push(RouteLayer { source: source.to_owned(), handler: handler.to_owned(), layer });
        self
    }

    /// Checks it whole.
    ///
    /// # Errors
    /// Everything that is wrong with it, each with its place and what to do.
    pub fn build(self) -> Result<Routes, Refused> {
        resolve::build(self)
    }
}
