//! Handlers that are services of tower, with whatever middleware stands around them.

use std::error::Error as StdError;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::record::Failure;
use tower_service::Service;

use super::handler::{Prepare, typed};
use crate::run::Context;

/// What a service is called with.
pub struct Request<T> {
    /// What the handler may ask of its claim.
    pub context: Context,
    /// The payload.
    pub payload: T,
}

/// A failure as an error, so that a service can say of what class it is. Any other error of a service is retryable.
///
/// ```
/// # use taskonce_core::record::Failure;
/// # use taskonce_worker::worker::ServiceFailure;
/// fn check(amount: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     if amount == 0 {
///         return Err(ServiceFailure(Failure::permanent("the amount is zero")).into());
///     }
///     Ok(())
/// }
/// # assert!(check(0).is_err() && check(1).is_ok());
/// ```
#[derive(Debug)]
pub struct ServiceFailure(pub Failure);

impl fmt::Display for ServiceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl StdError for ServiceFailure {}

type BoxError = Box<dyn StdError + Send + Sync>;

fn told(error: impl Into<BoxError>) -> Failure {
    failure(&error.into())
}

/// The failure that an error of a service is: the one that it says it is, however it is wrapped, or a retryable one.
fn failure(error: &BoxError) -> Failure {
    let mut message = error.to_string();
    let mut cause: Option<&(dyn StdError + 'static)> = Some(&**error);
    let mut is_first = true;
    while let Some(error) = cause {
        if let Some(ServiceFailure(failure)) = error.downcast_ref::<ServiceFailure>() {
            return failure.clone();
        }
        if !is_first {
            message.push_str(": ");
            message.push_str(&error.to_string());
        }
        is_first = false;
        cause = error.source();
    }
    Failure::retryable(message)
}

/// A handler that waits until its service is ready, and calls it. Each task has a clone of the service, as is usual.
pub(super) fn service<T, O, S>(service: S) -> Prepare
where
    T: DeserializeOwned + Send + 'static,
    O: Serialize + 'static,
    S: Service<Request<T>, Response = O> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    // A service need not be `Sync`: the lock is held only while it is cloned.
    let service = Mutex::new(service);
    typed(move |context, payload| {
        let mut service = service.lock().unwrap_or_else(PoisonError::into_inner).clone();
        async move {
            poll_fn(|waker| service.poll_ready(waker)).await.map_err(told)?;
            service.call(Request { context, payload }).await.map_err(told)
        }
    })
}

#[cfg(test)]
mod tests {
    use taskonce_core::record::FailureClass;

    use super::*;

    #[derive(Debug)]
    struct Wrapped(BoxError);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("around it")
        }
    }

    impl StdError for Wrapped {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&*self.0)
        }
    }

    #[test]
    fn a_failure_is_found_however_it_is_wrapped_and_any_other_error_is_retryable_with_its_causes() {
        let said = ServiceFailure(Failure::permanent("the amount is zero").nothing_happened());
        let found = failure(&Wrapped(Box::new(Wrapped(said.into()))).into());
        assert_eq!(found, Failure::permanent("the amount is zero").nothing_happened());
        let found = failure(&Wrapped("no route to host".into()).into());
        assert_eq!((found.class, found.message.as_str()), (FailureClass::Retryable, "around it: no route to host"));
    }
}
