//! What the handler of a case does, told beforehand: `Script`; and what a case and a handler wait for: `Gate`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use taskonce_core::record::Failure;
use tokio::sync::Notify;

/// The longest that anybody waits at a gate. It turns a hang into a failure.
const GATE_MAX: Duration = Duration::from_secs(60);

/// What a handler does after its effect.
#[derive(Clone, Debug)]
pub enum Act {
    /// Returns this.
    Return(String),
    /// Fails so.
    Fail(Failure),
    /// Panics.
    Panic,
    /// Waits until the script's gate `go` is opened, then returns this.
    WaitThenReturn(String),
}

/// What the handlers of a case do, one act a call, and how often they were called.
pub struct Script {
    acts: Mutex<VecDeque<Act>>,
    calls: AtomicUsize,
    /// Opened by each handler that is entered.
    pub entered: Gate,
    /// Opened by the case, to let go on who waits.
    pub go: Gate,
    /// Opened by each handler that has done its act.
    pub left: Gate,
}

impl Script {
    /// One act for each call of a handler. There are no calls beyond them.
    #[must_use]
    pub fn new(acts: impl IntoIterator<Item = Act>) -> Arc<Script> {
        Arc::new(Script {
            acts: Mutex::new(acts.into_iter().collect()),
            calls: AtomicUsize::new(0),
            entered: Gate::default(),
            go: Gate::default(),
            left: Gate::default(),
        })
    }

    /// How often a handler was called.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn next(&self) -> Act {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.entered.open();
        let act = self.acts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        act.expect("a handler is called as often as the script says")
    }

    fn after(&self, act: Act) -> Result<String, Failure> {
        self.left.open();
        match act {
            Act::Return(value) | Act::WaitThenReturn(value) => Ok(value),
            Act::Fail(failure) => Err(failure),
            Act::Panic => panic!("planned: the handler panics"),
        }
    }

    /// What an async handler does after its effect.
    ///
    /// # Errors
    /// The failure that was planned.
    ///
    /// # Panics
    /// Where that was planned.
    pub async fn play(&self) -> Result<String, Failure> {
        let act = self.next();
        match act {
            Act::WaitThenReturn(_) => self.go.pass().await,
            Act::Return(_) | Act::Fail(_) | Act::Panic => {}
        }
        self.after(act)
    }

    /// What a handler that blocks its thread does after its effect.
    ///
    /// # Errors
    /// The failure that was planned.
    ///
    /// # Panics
    /// Where that was planned.
    pub fn play_blocking(&self) -> Result<String, Failure> {
        let act = self.next();
        match act {
            Act::WaitThenReturn(_) => self.go.pass_blocking(),
            Act::Return(_) | Act::Fail(_) | Act::Panic => {}
        }
        self.after(act)
    }
}

/// Something that happens once, and that others wait for.
#[derive(Default)]
pub struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    notify: Notify,
}

impl Gate {
    /// It has happened.
    pub fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
        self.notify.notify_waiters();
    }

    /// Whether it has happened.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for it.
    ///
    /// # Panics
    /// If it does not happen within a minute.
    pub async fn pass(&self) {
        let passed = async {
            loop {
                let notified = self.notify.notified();
                tokio::pin!(notified);
                // Enrolled before the look, so that an opening between the two is not missed.
                notified.as_mut().enable();
                if self.is_open() {
                    return;
                }
                notified.await;
            }
        };
        tokio::time::timeout(GATE_MAX, passed).await.expect("the gate is opened");
    }

    /// Waits for it, and blocks the thread meanwhile.
    ///
    /// # Panics
    /// If it does not happen within a minute.
    pub fn pass_blocking(&self) {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        let (_open, waited) = self
            .opened
            .wait_timeout_while(is_open, GATE_MAX, |is_open| !*is_open)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "the gate is opened");
    }
}
