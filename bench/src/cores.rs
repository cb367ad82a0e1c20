//! A core for the program and another for the server, as if they were two machines.
//!
//! Where both may run anywhere, the kernel puts a connection's two ends on one core or on two, by chance and for as long as it
//! lives: a round trip then takes 20 or 60 µs, whoever asks. Latencies on both sides of a bench must not be a draw of that lot.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Which cores are whose.
#[derive(Clone, Copy)]
pub(crate) struct Cores {
    program: CpuSet,
    server: CpuSet,
}

impl Cores {
    /// The first core that this process may use for the program, the others for the server.
    pub(crate) fn apart() -> Result<Cores> {
        let all = sched_getaffinity(None).context("ask which cores there are")?;
        let (mut program, mut server) = (CpuSet::new(), CpuSet::new());
        for core in (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core)) {
            if program.count() == 0 { program.set(core) } else { server.set(core) }
        }
        // With one core there is nothing to choose.
        Ok(Cores { program, server: if server.count() == 0 { program } else { server } })
    }

    /// From now on this thread, and those and the processes that it starts, have the program's core.
    pub(crate) fn take_programs(self) -> Result<()> {
        sched_setaffinity(None, &self.program).context("choose a core")
    }

    /// Starts something on the server's cores.
    pub(crate) fn on_servers<T>(self, start: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = sched_getaffinity(None).context("ask which cores there are")?;
        sched_setaffinity(None, &self.server).context("choose a core")?;
        let started = start();
        sched_setaffinity(None, &before).context("choose a core")?;
        started
    }
}
