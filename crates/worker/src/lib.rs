//! Runs tasks of taskonce: heartbeats, cancellation, completion that survives cancellation, and waiting for another's run.
//!
//! [`run::Run`] is what users call; [`heartbeat::Heart`] keeps claims alive on a thread of its own; [`clock::SystemHost`]
//! is this process. [`source::Source`] is the port of brokers, where deliveries come from; [`send::Sender`] brings tasks
//! there; [`routes::Routes`] says how the tasks of each handler from each source are treated; [`worker::Worker`] runs them.

pub mod run;
pub mod steps;
pub mod step_in;
pub mod beside;
pub mod transaction;
pub mod elsewhere;
pub mod outcome;
pub mod heartbeat;
pub mod clock;
pub mod source;
pub mod send;
pub mod span;
pub mod routes;
pub mod worker;
pub mod events;
mod wait;

pub use clock::SystemHost;
pub use heartbeat::Heart;
pub use outcome::{Outcome, Replayed, Settlement};
pub use run::{Context, Run};
pub use steps::StepContext;
pub use worker::{Worker, WorkerBuilder};
