//! Ends processes: a process group, and on Linux every descendant, also those that left the group.

use std::collections::HashMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};

/// How long killing goes on: a process that the kernel does not let go of cannot be waited for.
const KILL_MAX: Duration = Duration::from_millis(800);
/// The pause between two looks at what still lives.
const PAUSE: Duration = Duration::from_millis(2);

/// The processes to which a command belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// A group of its own, with this leader.
    Group(Pid),
    /// One process in the group of the terminal's foreground job, and its descendants.
    Process(Pid),
}

impl Family {
    /// Passes a signal on. What has ended is left alone.
    pub(crate) fn signal(self, signal: Signal) {
        // It may have ended just now.
        let _ended = match self {
            Family::Group(leader) => kill_process_group(leader, signal),
            Family::Process(pid) => kill_process(pid, signal),
        };
    }

    /// Kills the command and all descendants of the calling process, until none lives. The caller is a subreaper, so
    /// that a process whose parent died is its descendant still.
    pub(crate) fn kill(self) {
        kill_until_none_lives(|| self.signal(Signal::KILL));
    }
}

/// Kills all descendants of the calling process, until none lives.
pub(crate) fn kill_descendants() {
    kill_until_none_lives(|| {});
}

fn kill_until_none_lives(mut first: impl FnMut()) {
    let start = Instant::now();
    let mut empty = 0;
    // A look is no snapshot: what moves from one parent to another meanwhile may hide from one, hardly from two.
    while empty < 2 && start.elapsed() < KILL_MAX {
        first();
        let living = descendants(getpid());
        for pid in &living {
            let _ended = kill_process(*pid, Signal::KILL);
        }
        empty = if living.is_empty() { empty + 1 } else { 0 };
        sleep(PAUSE);
    }
}

/// Every living descendant of a process. Where there is no `/proc`, none.
pub(crate) fn descendants(of: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<(i32, bool)>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A process that ended meanwhile has no file any more.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        if let Some((state, parent)) = state_and_parent(&stat) {
            children.entry(parent).or_default().push((pid, !matches!(state, 'Z' | 'X')));
        }
    }
    let mut found = Vec::new();
    let mut open = vec![of.as_raw_nonzero().get()];
    while let Some(parent) = open.pop() {
        for (pid, lives) in children.remove(&parent).unwrap_or_default() {
            if lives {
                found.extend(Pid::from_raw(pid));
            }
            // Its children may have been read before it died and left them to another.
            open.push(pid);
        }
    }
    found
}

/// The zombies whose parent the calling process is.
pub(crate) fn zombie_children() -> Vec<Pid> {
    let this = getpid().as_raw_nonzero().get();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        if state_and_parent(&stat) == Some(('Z', this)) {
            found.extend(Pid::from_raw(pid));
        }
    }
    found
}

/// From a line of `/proc/PID/stat`. The name in it may hold anything, so it is skipped to its last parenthesis.
fn state_and_parent(stat: &str) -> Option<(char, i32)> {
    let mut words = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = words.next()?.chars().next()?;
    Some((state, words.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_parentheses_does_not_mislead() {
        assert_eq!(state_and_parent("12 (a) Z 1 (b)) S 34 5"), Some(('S', 34)));
        assert_eq!(state_and_parent("12"), None);
    }

    #[test]
    fn descendants_are_found_through_their_parents() {
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let pid = Pid::from_child(&shell);
        let start = Instant::now();
        while descendants(pid).is_empty() {
            assert!(start.elapsed() < Duration::from_secs(10));
            sleep(PAUSE);
        }
        assert!(descendants(getpid()).contains(&pid));
        for pid in descendants(pid).into_iter().chain([pid]) {
            kill_process(pid, Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
    }
}
