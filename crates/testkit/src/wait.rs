//! Waiting for a condition, with a bound, instead of sleeping for a time.

use std::time::{Duration, Instant};

/// How long to pause between two looks.
const PAUSE: Duration = Duration::from_millis(2);

/// Whether the condition became true within `at_most`.
#[must_use = "the condition may never have become true"]
pub fn eventually(at_most: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() > at_most {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}
