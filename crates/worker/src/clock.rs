//! This process: a clock that counts suspend, random numbers of the operating system, and a label.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use taskonce_core::host::Host;
use taskonce_core::record::WallTime;

/// This process as the ledger sees it.
#[derive(Debug, Default)]
pub struct SystemHost {
    /// The process that the label was made for; another one after a fork.
    owner: Mutex<Option<(u32, Arc<str>)>>,
}

impl SystemHost {
    /// This process.
    #[must_use]
    pub fn new() -> SystemHost {
        SystemHost::default()
    }
}

/// The longest host name in a label, in bytes.
const HOST_NAME_MAX: usize = 48;

fn label(pid: u32) -> Arc<str> {
    let name = rustix::system::uname();
    let mut host: String = name.nodename().to_string_lossy().chars().filter(|c| !c.is_control()).collect();
    while host.len() > HOST_NAME_MAX {
        host.pop();
    }
    format!("{host}/{pid}/{:04x}", random() as u16).into()
}

/// How many random numbers are fetched at once: a call of the system for each would take longer than the rest of a claim.
const FETCHED: usize = 32;

/// Random numbers of the operating system, fetched ahead by one thread of one process. A forked child inherits the rest
/// of its parent's and must not use it, so it is told by the process id.
struct Fetched {
    process: u32,
    left: usize,
    numbers: [u8; FETCHED * 16],
}

thread_local! {
    static AHEAD: RefCell<Fetched> = const { RefCell::new(Fetched { process: 0, left: 0, numbers: [0; FETCHED * 16] }) };
}

fn random() -> u128 {
    let process = std::process::id();
    AHEAD.with_borrow_mut(|ahead| {
        if ahead.left == 0 || ahead.process != process {
            getrandom::fill(&mut ahead.numbers).expect("the operating system gives random numbers");
            (ahead.process, ahead.left) = (process, FETCHED);
        }
        ahead.left -= 1;
        let mut bytes = [0; 16];
        // Each is used once, and is gone then.
        bytes.swap_with_slice(&mut ahead.numbers[ahead.left * 16..][..16]);
        u128::from_be_bytes(bytes)
    })
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

impl Host for SystemHost {
    fn random(&self) -> u128 {
        random()
    }

    fn uptime(&self) -> Duration {
        let now = clock_gettime(CLOCK);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
    }

    fn wall_time(&self) -> WallTime {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        WallTime(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    fn owner(&self) -> Arc<str> {
        let pid = std::process::id();
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        match &*owner {
            Some((made_by, label)) if *made_by == pid => Arc::clone(label),
            Some(_) | None => {
                let label = label(pid);
                *owner = Some((pid, Arc::clone(&label)));
                label
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_names_host_and_process_and_stays() {
        let host = SystemHost::new();
        let owner = host.owner();
        assert!(owner.contains(&format!("/{}/", std::process::id())), "{owner}");
        assert_eq!(owner, host.owner());
        assert_ne!(owner, SystemHost::new().owner(), "two workers of one process differ");
    }

    #[test]
    fn the_clock_goes_on_and_random_numbers_differ() {
        let host = SystemHost::new();
        let before = host.uptime();
        assert!(host.uptime() >= before);
        let drawn: std::collections::HashSet<u128> = (0..FETCHED * 3).map(|_| host.random()).collect();
        assert_eq!(drawn.len(), FETCHED * 3);
        assert!(!drawn.contains(&0));
    }

    #[test]
    fn numbers_fetched_by_another_process_are_never_used() {
        let host = SystemHost::new();
        host.random();
        // As a forked child finds it.
        let inherited = AHEAD.with_borrow_mut(|ahead| {
            ahead.process = ahead.process.wrapping_add(1);
            ahead.numbers
        });
        for _ in 0..FETCHED {
            let number = host.random().to_be_bytes();
            assert!(!inherited.chunks_exact(16).any(|old| old == number));
        }
    }
}
