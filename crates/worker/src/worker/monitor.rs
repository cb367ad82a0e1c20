//! How a worker stands, for those who look at it: `Monitor`, and what it says.

use std::sync::Arc;

use super::Shared;
use crate::events::Counts;
use crate::routes::{BudgetSnapshot, GateSnapshot, RouteId};

/// A handle on a worker for those who look at it. Good after its end too.
#[derive(Clone)]
pub struct Monitor {
    shared: Arc<Shared>,
}

/// A worker at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Tasks that run.
    pub running: usize,
    /// Deliveries that were received and not started.
    pub waiting: usize,
    /// Whether the store did not answer when it was asked last.
    pub is_store_away: bool,
    /// The routes that it serves, in the order of the table.
    pub routes: Vec<RouteSnapshot>,
    /// The retry budgets, by source.
    pub budgets: Vec<(String, BudgetSnapshot)>,
}

/// A route at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSnapshot {
    /// Its number in the table.
    pub id: RouteId,
    /// `orders × charge@2`.
    pub name: String,
    /// Deliveries that were received and not started.
    pub waiting: usize,
    /// What may start, and what keeps it from that.
    pub gate: GateSnapshot,
}

impl Monitor {
    pub(super) fn new(shared: &Arc<Shared>) -> Monitor {
        Monitor { shared: Arc::clone(shared) }
    }

    /// How often each event has happened in this worker.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// How it stands.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let served = self.shared.routes.iter().filter(|route| self.shared.handler(route.id).is_some());
        self.shared.desk().snapshot(served, self.shared.now())
    }
}
