//! The same ledger for code without an async runtime.
//!
//! Handlers run in the calling thread. They are not cancelled when the claim is lost; they ask
//! [`Context::may_start_effect`] before each effect, and a completion after a takeover is refused.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use taskonce_core::key::{Key, Task};
use taskonce_core::policy::Policy;
use taskonce_core::record::{Failure, Found, Output};
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_worker::{Context, Outcome, Run};
use tokio::runtime::{Builder, Runtime};

/// A ledger that blocks. It may be shared between threads; it must not be used within an async runtime.
///
/// ```
/// use taskonce::{Effect, Failure, Handler, Input, Policy};
///
/// # fn main() -> taskonce::Result<()> {
/// let ledger = taskonce::blocking::open("memory:")?;
/// let task = Handler::new("mail", "1")?.task("welcome-7", &Input::from_json(b"null")?)?;
/// let outcome = ledger.run(&task, &Policy::new(Effect::Repeatable), |context| {
///     Ok::<_, Failure>(format!("attempt {}", context.attempt()))
/// })?;
/// assert_eq!(outcome.into_value().as_deref(), Some("attempt 1"));
/// # Ok(()) }
/// ```
pub struct Ledger {
    ledger: taskonce_core::ledger::Ledger,
    runtime: Runtime,
}

/// A blocking ledger over the store that the URL names; see [`crate::open`].
///
/// # Errors
/// Those of [`crate::open`].
pub fn open(url: &str) -> Result<Ledger> {
    Ledger::over(crate::open(url)?)
}

impl Ledger {
    /// A blocking ledger over an async one, such as one [with a cache](taskonce_core::ledger::Ledger::with_cache).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the operating system gives no thread.
    pub fn over(ledger: taskonce_core::ledger::Ledger) -> Result<Ledger> {
        // One worker thread drives connections while callers block on their own.
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(|error| {
            Error::new(ErrorKind::Unsupported, "no thread for the blocking ledger").with_source(error)
        })?;
        Ok(Ledger { ledger, runtime })
    }

    /// The async ledger beneath.
    #[must_use]
    pub fn inner(&self) -> &taskonce_core::ledger::Ledger {
        &self.ledger
    }

    /// Runs the handler if the task is free; see [`Run::run`].
    ///
    /// # Errors
    /// Those of [`Run::run`].
    pub fn run<T, H>(&self, task: &Task, policy: &Policy, handler: H) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> Result<T, Failure> + Send,
    {
        self.run_or_wait(task, policy, Duration::ZERO, handler)
    }

    /// Runs the handler if the task is free, and waits for a busy one; see [`Run::run_or_wait`].
    ///
    /// # Errors
    /// Those of [`Run::run`].
    pub fn run_or_wait<T, H>(&self, task: &Task, policy: &Policy, wait_max: Duration, handler: H) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnOnce(Context) -> Result<T, Failure> + Send,
    {
        self.runtime.block_on(self.ledger.run_or_wait(
            task,
            policy,
            wait_max,
            |context| async move { handler(context) },
        ))
    }

    /// The same, with outputs as bytes of a content type.
    ///
    /// # Errors
    /// Those of [`Run::run_bytes`].
    pub fn run_bytes<H>(&self, task: &Task, policy: &Policy, wait_max: Duration, handler: H) -> Result<Outcome<Output>>
    where
        H: FnOnce(Context) -> Result<Output, Failure> + Send,
    {
        self.runtime.block_on(self.ledger.run_bytes(task, policy, wait_max, |context| async move { handler(context) }))
    }

    /// Runs the handler in a transaction on the ledger's SQLite file, and commits what it wrote together with the task's
    /// completion; see [`crate::sqlite::RunInTransaction`]. It runs in the calling thread, so `run_max` does not cut it off.
    ///
    /// # Errors
    /// Those of [`crate::sqlite::RunInTransaction::run_in_transaction`].
    #[cfg(feature = "sqlite")]
    pub fn run_in_transaction<T, H>(&self, task: &Task, policy: &Policy, handler: H) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnMut(&crate::sqlite::rusqlite::Transaction<'_>, &Context) -> Result<T, Failure> + Send,
    {
        self.run_in_transaction_or_wait(task, policy, Duration::ZERO, handler)
    }

    /// The same, but a busy or waiting task is waited for, at most `wait_max`.
    ///
    /// # Errors
    /// As for [`run_in_transaction`](Ledger::run_in_transaction).
    #[cfg(feature = "sqlite")]
    pub fn run_in_transaction_or_wait<T, H>(
        &self,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        handler: H,
    ) -> Result<Outcome<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        H: FnMut(&crate::sqlite::rusqlite::Transaction<'_>, &Context) -> Result<T, Failure> + Send,
    {
        self.runtime.block_on(crate::sqlite::run_here(&self.ledger, task, policy, wait_max, handler))
    }

    /// Anything else of the async ledger, such as `resolve_done`, `walk`, `purge` or a claim made by hand:
    /// `ledger.block_on(ledger.inner().purge(&filter))`.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// What is remembered of a task.
    ///
    /// # Errors
    /// The store's.
    pub fn show(&self, key: &Key) -> Result<Option<Found>> {
        self.block_on(self.ledger.show(key))
    }

    /// Waits until no claim of this process is held and every end is written; see
    /// [`taskonce_core::ledger::Ledger::finish`].
    pub fn finish(&self, within: Duration) -> bool {
        self.block_on(self.ledger.finish(within))
    }
}
