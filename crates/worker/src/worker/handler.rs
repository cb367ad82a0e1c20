//! The user's functions in one form: a payload in, something that runs out.

use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::Result;
use taskonce_core::key::Task;
use taskonce_core::ledger::Ledger;
use taskonce_core::policy::Policy;
use taskonce_core::record::{Failure, Output};

use crate::outcome::{MSGPACK, Outcome, encode};
use crate::run::Context;
use crate::source::{Delivery, Envelope};

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

type Claiming = dyn FnOnce(Ledger, Task, Policy) -> Boxed<Result<Outcome<()>>> + Send;

/// What a handler that claims by itself is given.
pub struct Job {
    /// The ledger to claim it in.
    pub ledger: Ledger,
    /// The task.
    pub task: Task,
    /// How its route treats it.
    pub policy: Policy,
    /// What brought it.
    pub delivery: Delivery,
}

/// Something that runs, with its payload read.
pub(super) enum Prepared {
    /// In a claim of the worker's.
    Plain(Box<dyn FnOnce(Context) -> Boxed<Result<Output, Failure>> + Send>),
    /// In a claim of its own.
    Own(Box<Claiming>),
}

/// Reads a payload; refuses one that cannot be read, with why.
pub(super) type Prepare = Arc<dyn Fn(Delivery) -> Result<Prepared, String> + Send + Sync>;

/// Who claims the task of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The worker.
    Plain,
    /// The handler.
    Own,
}

impl Kind {
    /// What is wrong with a handler of this kind for a route of the other.
    pub(super) fn needs(self) -> &'static str {
        match self {
            Kind::Plain => "its handler writes in no transaction: give it by `handler_in_transaction`",
            Kind::Own => "its handler is given by `handler_in_transaction`, which is for transactional ones",
        }
    }
}

pub(super) fn typed<T, O, H, F>(handler: H) -> Prepare
where
    T: DeserializeOwned + Send + 'static,
    O: Serialize + 'static,
    H: Fn(Context, T) -> F + Send + Sync + 'static,
    F: Future<Output = Result<O, Failure>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |delivery| {
        let payload: T = read(&delivery.envelope)?;
        let handler = Arc::clone(&handler);
        Ok(Prepared::Plain(Box::new(move |context| {
            let running = handler(context, payload);
            Box::pin(async move { running.await.map(|output| encode(&output)) })
        })))
    })
}

pub(super) fn of_bytes<H, F>(handler: H) -> Prepare
where
    H: Fn(Context, Envelope) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Output, Failure>> + Send + 'static,
{
    of_delivery(move |context, delivery| handler(context, delivery.envelope))
}

pub(super) fn of_delivery<H, F>(handler: H) -> Prepare
where
    H: Fn(Context, Delivery) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Output, Failure>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |delivery| {
        let handler = Arc::clone(&handler);
        Ok(Prepared::Plain(Box::new(move |context| Box::pin(handler(context, delivery)))))
    })
}

pub(super) fn own<H, F>(handler: H) -> Prepare
where
    H: Fn(Job) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Outcome<()>>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |delivery| {
        let handler = Arc::clone(&handler);
        Ok(Prepared::Own(Box::new(move |ledger, task, policy| {
            Box::pin(handler(Job { ledger, task, policy, delivery }))
        })))
    })
}

/// The words of the error hold no part of the payload but its place: serde's own may quote a value of it.
fn read<T: DeserializeOwned>(envelope: &Envelope) -> Result<T, String> {
    let type_name = std::any::type_name::<T>();
    if envelope.content_type.as_deref() == Some(MSGPACK) {
        return rmp_serde::from_slice(&envelope.payload)
            .map_err(|_| format!("the payload is no MessagePack that reads as `{type_name}`"));
    }
    serde_json::from_slice(&envelope.payload).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        match error.classify() {
            serde_json::error::Category::Data => {
                format!("the payload does not read as `{type_name}`: line {line}, column {column}")
            }
            serde_json::error::Category::Io
            | serde_json::error::Category::Syntax
            | serde_json::error::Category::Eof => {
                format!("the payload is no JSON: line {line}, column {column}")
            }
        }
    })
}
