//! How one attempt in a transaction of the caller's ended: what a driver says to whoever runs the task.
//!
//! The transaction itself, and its SQL, are the driver's.

use crate::error::Error;
use crate::record::Failure;

/// How an attempt in a transaction of the caller's ended.
#[derive(Debug)]
pub enum Attempted<T> {
    /// It committed, and its server said so: effect and completion are stored together.
    Committed(T),
    /// The handler failed, and all that it did was rolled back.
    Failed(Failure),
    /// The database refused it for what others did at the same time (a serialisation failure, a deadlock), and rolled it
    /// back: the same attempt may be tried again.
    Again(Error),
    /// The record is not this claim's any more: the handler did not run.
    Lost,
    /// The connection broke, or its server did not answer. Whether a commit that was sent took effect is unknown; where
    /// none was, there is no value.
    Unknown(Option<T>, Error),
    /// Nothing was begun, and trying again at once cannot help: the database cannot be used so.
    Refused(Error),
}
