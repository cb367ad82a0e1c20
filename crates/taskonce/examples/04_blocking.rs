//! Without an async runtime: the same ledger, blocking; eight threads deliver one task.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use taskonce::{Effect, Failure, Handler, Input, Policy};

fn main() -> taskonce::Result<()> {
    let ledger = taskonce::blocking::open("sqlite:tasks.db")?;
    let task = Handler::new("import", "1")?.task("file-9", &Input::from_json(b"{}")?)?;
    let policy = Policy::new(Effect::Repeatable);
    let runs = AtomicUsize::new(0);

    let rows: Vec<Option<u32>> = std::thread::scope(|scope| {
        let deliver = || {
            // A duplicate waits for the first run, then gets its value.
            let outcome = ledger.run_or_wait(&task, &policy, Duration::from_secs(10), |_context| {
                runs.fetch_add(1, Ordering::Relaxed);
                Ok::<u32, Failure>(1200)
            });
            outcome.ok().and_then(|outcome| outcome.into_value())
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(deliver)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(None)).collect()
    });

    println!("runs: {}", runs.load(Ordering::Relaxed));
    println!("all got its value: {}", rows.iter().all(|value| *value == Some(1200)));
    Ok(())
}

// Output:
// runs: 1
// all got its value: true
