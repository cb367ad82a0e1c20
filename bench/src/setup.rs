//! What the benches share: a folder on disk, servers, runtimes, tasks.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use taskonce::{Admission, Effect, Handler, Input, Ledger, Output, Policy, Settled, Task};
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::cores::Cores;

/// The length of every Redis key, ours and the floor's.
pub(crate) const KEY_BYTES: usize = 60;
/// What the Redis store puts before a key.
const REDIS_PREFIX: &str = "taskonce:";
/// File systems that are memory, by the magic number of `statfs(2)`: tmpfs and ramfs.
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// How a run measures.
pub(crate) struct Setup {
    pub(crate) quick: bool,
    folder: TempDir,
    files: AtomicU64,
}

impl Setup {
    pub(crate) fn new(quick: bool) -> Result<Setup> {
        let places = [std::env::temp_dir(), PathBuf::from("/var/tmp"), std::env::current_dir()?];
        let Some(place) = places.iter().find(|place| place.is_dir() && !in_memory(place)) else {
            bail!("SQLite is measured on disk, but {places:?} all lie in memory; name a folder on disk in TMPDIR");
        };
        let folder = tempfile::Builder::new().prefix("taskonce-bench-").tempdir_in(place)?;
        Ok(Setup { quick, folder, files: AtomicU64::new(0) })
    }

    /// The one number of a quick run, the other of a whole one.
    pub(crate) fn pick<T>(&self, quick: T, whole: T) -> T {
        if self.quick { quick } else { whole }
    }

    /// The path of a new SQLite file.
    pub(crate) fn sqlite_file(&self) -> PathBuf {
        self.folder.path().join(format!("{}.db", self.files.fetch_add(1, Ordering::Relaxed)))
    }

    pub(crate) fn machine(&self) -> Result<Machine> {
        let (major, minor) = RedisServer::start(&[])?.version()?;
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
        let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        let system = system.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        Ok(Machine {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: cpu.unwrap_or("unknown processor").to_owned(),
            system: system.unwrap_or(std::env::consts::OS).trim_matches('"').to_owned(),
            redis: format!("{major}.{minor}"),
            sqlite: rusqlite::version().to_owned(),
        })
    }
}

fn in_memory(place: &Path) -> bool {
    rustix::fs::statfs(place).is_ok_and(|found| IN_MEMORY.contains(&(found.f_type as u32)))
}

/// Where the figures come from.
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    system: String,
    redis: String,
    sqlite: String,
}

impl Machine {
    pub(crate) fn line(&self) -> String {
        let Machine { cores, cpu, system, redis, sqlite } = self;
        format!("{cores} cores ({cpu}), {system}, Redis {redis} on loopback, SQLite {sqlite} on disk\n")
    }

    pub(crate) fn json(&self) -> Value {
        let Machine { cores, cpu, system, redis, sqlite } = self;
        json!({ "cores": cores, "cpu": cpu, "system": system, "redis": redis, "sqlite": sqlite })
    }
}

/// The runtime that `#[tokio::main]` gives: both sides run on it.
pub(crate) fn runtime() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().enable_all().build()?)
}

/// Runs a future as a task of the runtime, as programs do, not on the thread that waits for it.
pub(crate) fn run<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let runtime = runtime()?;
    runtime.block_on(async { tokio::spawn(work).await })?
}

/// The same on the program's core. Servers that are started by [`Cores::on_servers`] are on another.
pub(crate) fn run_apart<T, F>(work: impl FnOnce(Cores) -> F) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let cores = Cores::apart()?;
    let work = work(cores);
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(move || cores.take_programs().expect("a core that this process may use"))
        .build()?;
    runtime.block_on(async { tokio::spawn(work).await })?
}

/// A ledger as users get it, with its heart.
pub(crate) fn ledger(url: &str) -> Result<Ledger> {
    taskonce::open(url).context("open the ledger")
}

pub(crate) fn sqlite_url(file: &Path) -> String {
    format!("sqlite:{}", file.display())
}

/// The effect that most users will have.
pub(crate) fn policy() -> Policy {
    Policy::new(Effect::Keyed)
}

/// A fresh claim and its completion: two round trips.
pub(crate) async fn run_once(ledger: &Ledger, task: &Task, policy: &Policy) -> Result<()> {
    let Admission::Run(claim) = ledger.claim(task, policy).await? else { bail!("the task was not fresh") };
    match claim.complete(Output::Nothing).await {
        Ok(Settled::Recorded(_)) => Ok(()),
        Ok(Settled::Lost(_)) => bail!("the claim was lost"),
        Err(unsettled) => Err(unsettled.into_error().into()),
    }
}

/// Tasks that no bench of this process has used, prepared: their Redis keys have [`KEY_BYTES`].
pub(crate) fn tasks(count: usize) -> Result<Vec<Task>> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let process = u64::from(std::process::id());
    (0..count).map(|_| numbered_task(process << 40 | NEXT.fetch_add(1, Ordering::Relaxed))).collect()
}

/// The task with this number. Those of [`tasks`] have numbers from 2^40 on.
pub(crate) fn numbered_task(number: u64) -> Result<Task> {
    static KIND: LazyLock<Result<(Handler, Input<'static>), String>> = LazyLock::new(|| {
        let handler = Handler::within("bench", "charge", "1").map_err(|error| error.to_string())?;
        Ok((handler, Input::from_json(b"null").map_err(|error| error.to_string())?))
    });
    let (handler, payload) = KIND.as_ref().map_err(|error| anyhow!("{error}"))?;
    Ok(handler.task(&format!("{number:0width$}", width = id_width()), payload)?)
}

/// The length of a task's id.
pub(crate) fn id_width() -> usize {
    KEY_BYTES - REDIS_PREFIX.len() - "bench/charge@1/".len()
}

/// A task's key in Redis.
pub(crate) fn redis_key(task: &Task) -> String {
    format!("{REDIS_PREFIX}{}", task.key)
}

/// Keys of the floor, as long as ours.
pub(crate) fn bare_keys(count: usize) -> Result<Vec<String>> {
    Ok(tasks(count)?.iter().map(|task| format!("bareonce:{}", task.key)).collect())
}

/// Fails where the store's keys have another length than the floor's, since that would not be a comparison.
pub(crate) fn check_key_length(task: &Task, ask: impl FnOnce(&[&str]) -> Result<Reply>) -> Result<()> {
    let key = redis_key(task);
    let reply = ask(&["EXISTS", &key])?;
    if reply != Reply::Int(1) || key.len() != KEY_BYTES {
        bail!("the store's key is not `{key}` of {KEY_BYTES} bytes: {reply:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_tasks_are_equal_and_all_keys_have_one_length() {
        let (some, more) = (tasks(3).unwrap(), tasks(3).unwrap());
        assert!(some.iter().all(|task| !more.contains(task)));
        assert!(bare_keys(2).unwrap().iter().all(|key| key.len() == KEY_BYTES));
    }
}
