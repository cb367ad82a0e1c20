//! How the tasks of each handler from each source are treated: `Routes`, the table, and `Route`, a line of it. Pure: no I/O, no clock.
//!
//! A table is made in code ([`Routes::builder`]) or read from a file ([`Routes::from_toml`]); either way it is checked whole, and
//! everything that is wrong is told at once. What a worker asks at each start has a type of its own, with the clock as an
//! argument: [`Gate`] (concurrency, rate and breaker of a route), [`RetryBudget`] (of a source), [`Turns`] (between routes).

mod settings;
mod fault;
mod builder;
mod command;
mod resolve;
mod check;
mod file;
mod values;
mod identity;
mod times;
mod rate;
mod breaker;
mod gate;
mod budget;
mod turns;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::key::Handler;
use taskonce_core::policy::Policy;

pub use breaker::{Breaker, BreakerRules, BreakerState};
pub use budget::{BudgetSnapshot, RETRIES_SAVED_MAX, RetryBudget};
pub use builder::RoutesBuilder;
pub use command::{COMMAND_NAMES, CommandRules, KILL_AFTER, Mode};
pub use fault::{Fault, Refused};
pub use gate::{Ended, Gate, GateSnapshot, Pass, Turn};
pub(crate) use identity::is_json;
pub use rate::{Limiter, RateRules, Start};
pub use settings::{Rate, Settings, StoreAway, WithoutKey};
pub use times::{PLANNED_MAX, Planned, Times};
pub use turns::Turns;

/// The most routes of a table.
pub const ROUTES_MAX: usize = 100_000;

/// The table of routes. It does not change; a new one is made for other settings.
#[derive(Clone, Debug)]
pub struct Routes {
    store: Option<String>,
    /// By the handler as senders name it.
    commands: HashMap<Arc<str>, Arc<CommandRules>>,
    sources: Vec<SourceRules>,
    routes: Vec<Route>,
    /// By the source's name. A look-up is two hashes, and allocates nothing.
    index: HashMap<Arc<str>, Place>,
    warnings: Vec<Fault>,
}

/// Where a source and its routes are.
#[derive(Clone, Debug, Default)]
struct Place {
    at: usize,
    routes: Range<usize>,
    /// By the handler as senders name it.
    handlers: HashMap<Arc<str>, RouteId>,
}

impl Routes {
    /// A table made in code.
    #[must_use]
    pub fn builder() -> RoutesBuilder {
        RoutesBuilder::default()
    }

    /// A table from the text of a `taskonce.toml`.
    ///
    /// # Errors
    /// Everything that is wrong with it, each with its line and what to do. Where the text is no TOML, only that is told.
    pub fn from_toml(text: &str) -> Result<Routes, Refused> {
        file::read(text)
    }

    /// The route of a delivery: of this source, for this handler as its sender names it, such as `charge@2`.
    #[must_use]
    pub fn find(&self, source: &str, handler: &str) -> Option<&Route> {
        let id = self.index.get(source)?.handlers.get(handler)?;
        Some(self.get(*id))
    }

    /// The route of this number.
    ///
    /// # Panics
    /// Where the number is another table's and this one is shorter.
    #[must_use]
    pub fn get(&self, id: RouteId) -> &Route {
        &self.routes[id.0 as usize]
    }

    /// All routes, in the order of their numbers: by source, then by handler, as the table names them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Route> {
        self.routes.iter()
    }

    /// The routes of one source, in the same order.
    pub fn of_source(&self, source: &str) -> impl ExactSizeIterator<Item = &Route> {
        let place = self.index.get(source);
        place.map_or(&[][..], |place| &self.routes[place.routes.clone()]).iter()
    }

    /// All sources, in the order of the table.
    #[must_use]
    pub fn sources(&self) -> &[SourceRules] {
        &self.sources
    }

    /// What is said of a source.
    #[must_use]
    pub fn source(&self, name: &str) -> Option<&SourceRules> {
        self.index.get(name).map(|place| &self.sources[place.at])
    }

    /// The URL of the store, where the table names one.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.store.as_deref()
    }

    /// The command that this handler is, named as its senders do (`charge@2`), where the table names one.
    #[must_use]
    pub fn command(&self, handler: &str) -> Option<&Arc<CommandRules>> {
        self.commands.get(handler)
    }

    /// What is allowed, but does not fit together; for a log line or a person.
    #[must_use]
    pub fn warnings(&self) -> &[Fault] {
        &self.warnings
    }

    /// The same, for a source as it really is: once it was opened, it says itself how long a delivery is its receiver's.
    #[must_use]
    pub fn warnings_for(&self, source: &str, visibility: Duration) -> Vec<Fault> {
        check::warnings_for(self, source, visibility)
    }
}

/// The number of a route in its table, from 0: an index for what a worker keeps of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteId(pub u32);

/// How the tasks of one handler from one source are treated.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// Its number in the table.
    pub id: RouteId,
    /// The source's name.
    pub source: Arc<str>,
    /// The handler as senders name it: name and version, `charge@2`.
    pub handler: Arc<str>,
    /// The same with its namespace: the beginning of its tasks' keys.
    pub keys: Handler,
    /// How long its source leaves a delivery to its receiver, as far as the table says that.
    pub visibility: Option<Duration>,
    /// What a claim is made with: effect, lease, `run_max`, retention, backoff, attempts. Checked.
    pub policy: Policy,
    /// The most that run at once in a process.
    pub concurrency_max: u32,
    /// The most starts in a time, in a process; `None`: no limit.
    pub rate: Option<RateRules>,
    /// When it is paused; `None`: never.
    pub breaker: Option<BreakerRules>,
    /// How many turns it has where one of weight 1 has one.
    pub weight: u32,
    /// What becomes of a delivery while the store is away.
    pub store_away: StoreAway,
    /// What becomes of a delivery without a key.
    pub without_key: WithoutKey,
}

impl Route {
    /// When its attempts come after a first failure, and when the task is dead at the latest.
    #[must_use]
    pub fn times(&self) -> Times {
        Times::of(&self.policy, self.visibility)
    }

    /// `orders × charge@2`, for people.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{} × {}", self.source, self.handler)
    }
}

/// What the table says of a source. What its broker does by its own settings is `None` where nobody said it.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceRules {
    /// Its name, as the source describes itself.
    pub name: Arc<str>,
    /// What opens it, where the table says that.
    pub url: Option<String>,
    /// How long a delivery is its receiver's alone, unless extended.
    pub visibility: Option<Duration>,
    /// The longest that the broker still delivers what was sent: its own retention.
    pub redelivery_max: Option<Duration>,
    /// The longest that a dead letter waits for a person.
    pub dead_letters_for: Option<Duration>,
    /// After so many deliveries the broker itself gives up.
    pub deliveries_max: Option<u32>,
    /// The most that retries may be among all starts, in a process: more than 0, at most 1, which is no limit. Default 0.2.
    pub retry_share: f64,
    /// The retries that may start beyond that, so that they do where nothing new comes. Default 10 a second.
    pub retry_floor: Rate,
}

impl SourceRules {
    /// A source of this name with the defaults, of whose broker nothing is known.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>) -> SourceRules {
        SourceRules {
            name: name.into(),
            url: None,
            visibility: None,
            redelivery_max: None,
            dead_letters_for: None,
            deliveries_max: None,
            retry_share: RETRY_SHARE,
            retry_floor: RETRY_FLOOR,
        }
    }
}

/// Share of retries among starts, and those beyond it, unless the table says otherwise.
///
/// Source: the defaults of `RetryBudget` in Finagle, 2016: 20 % and 10 a second.
const RETRY_SHARE: f64 = 0.2;
const RETRY_FLOOR: Rate = Rate::per_second(10);
