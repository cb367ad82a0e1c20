//! The suite: how one case is run, and the macro that makes a test of each.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::cases::CASES;
use crate::stage::{Stage, StoreUnderTest};

/// One case: a sentence about how a store, or a ledger over it, behaves.
pub struct Case {
    /// The sentence.
    pub name: &'static str,
    /// What it is about: a module of this crate.
    pub topic: &'static str,
    pub(crate) play: fn(Stage) -> Pin<Box<dyn Future<Output = ()>>>,
}

/// The longest that one case may take. Far above what any needs: it turns a hang into a failure.
const CASE_TIME_MAX: Duration = Duration::from_secs(120);
/// Threads of the runtime that a case plays on.
const THREADS: usize = 4;

/// Runs one case on a store that `open` makes. [`store_suite!`](crate::store_suite) calls it.
///
/// # Panics
/// When the case fails, takes too long, or is not in the list.
pub fn run_case<S, F>(name: &'static str, open: impl FnOnce(&'static str) -> F)
where
    S: StoreUnderTest + 'static,
    F: Future<Output = S>,
{
    let case = CASES.iter().find(|case| case.name == name).expect("the case is in the list");
    play_within_bounds(name, async {
        let stage = Stage::new(open(name).await).await;
        (case.play)(stage).await;
    });
}

/// Plays a case on a runtime of its own, for a bounded time.
pub(crate) fn play_within_bounds(name: &str, play: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .expect("a runtime can be started");
    runtime.block_on(async {
        if tokio::time::timeout(CASE_TIME_MAX, play).await.is_err() {
            panic!("the case `{name}` did not end within {CASE_TIME_MAX:?}");
        }
    });
}

/// Makes one `#[test]` of each case of the suite.
///
/// Takes a function (or closure) from the case's name to a future of a [`StoreUnderTest`](crate::StoreUnderTest); see
/// the crate's page for a whole example. Each test opens an empty store of its own.
#[macro_export]
macro_rules! store_suite {
    ($open:expr) => {
        $crate::__each_case!(__tests $open);
    };
}

#[macro_export]
#[doc(hidden)]
macro_rules! __tests {
    (($open:expr) $($topic:ident { $($name:ident)+ })+) => {
        $($(
            #[test]
            fn $name() {
                $crate::run_case(stringify!($name), $open);
            }
        )+)+
    };
}
