//! This program again, as another process: what it does there, and how it is begun and heard.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rusqlite::{ErrorCode, params};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use taskonce::{Admission, Output, Unsettled};

use crate::pipeline;
use crate::redis_wait;
use crate::setup::{self, run_once};

/// The first argument of such a process.
pub(crate) const COMMAND: &str = "--as-child";
/// What it says when it is ready to begin.
const READY: &str = "ready";
/// How long SQLite's stock busy handler waits at once.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// A process of this program. It ends with its report, or when the value goes.
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<ChildStdout>,
}

impl Child {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(work: &[&str]) -> Result<Child> {
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let mut process = Command::new(program)
            .arg(COMMAND)
            .args(work)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start this program again")?;
        let output = BufReader::new(process.stdout.take().context("its output is piped")?);
        let mut child = Child { process, output };
        let said = child.line()?;
        ensure!(said == READY, "a child process said `{said}`");
        Ok(child)
    }

    /// Lets it begin.
    pub(crate) fn begin(&mut self) -> Result<()> {
        Ok(writeln!(self.process.stdin.as_mut().context("its input is piped")?, "begin")?)
    }

    /// Waits for its one line of report.
    pub(crate) fn report(mut self) -> Result<String> {
        self.line()
    }

    /// The next line that it says.
    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a child process ended without a word");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Its input closes, which ends it where it waits; the signal ends it where it works.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a process that writes in a loop has to tell.
#[derive(Serialize, Deserialize)]
pub(crate) struct Wrote {
    pub(crate) writes: u64,
    pub(crate) worst_ns: u64,
}

/// What such a process does.
pub(crate) fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let report = match words[..] {
        ["sqlite-writes", file, seconds] => serde_json::to_string(&write(Path::new(file), seconds.parse()?)?)?,
        ["sqlite-bare-writes", file, seconds] => {
            serde_json::to_string(&write_bare(Path::new(file), seconds.parse()?)?)?
        }
        ["idle", milliseconds, ref urls @ ..] => {
            serde_json::to_string(&idle(urls, Duration::from_millis(milliseconds.parse()?))?)?
        }
        ["redis-wait", url, waiters] => serde_json::to_string(&redis_wait::child(url, waiters.parse()?, await_begin)?)?,
        ["redis-wait-bare", url, waiters] => {
            serde_json::to_string(&redis_wait::bare_child(url, waiters.parse()?, await_begin)?)?
        }
        ["work-and-hang", ledger, queue, lease] => {
            pipeline::work_and_hang(ledger, queue, lease, await_begin)?;
            String::new()
        }
        ["work-idle", ledger, queue, milliseconds] => {
            let long = Duration::from_millis(milliseconds.parse()?);
            serde_json::to_string(&pipeline::work_and_rest(ledger, queue, long, await_begin)?)?
        }
        _ => bail!("`{COMMAND}` is only for this program's own use"),
    };
    crate::print(&report);
    Ok(())
}

/// Says that it is ready, and waits to be told to begin.
fn await_begin() -> Result<()> {
    crate::print(READY);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    ensure!(!line.is_empty(), "the process that started this one is gone");
    Ok(())
}

impl Wrote {
    fn note(&mut self, start: Instant) {
        self.writes += 1;
        self.worst_ns = self.worst_ns.max(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Claims and completes tasks, one after the other, for so long.
fn write(file: &Path, seconds: f64) -> Result<Wrote> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let ledger = setup::ledger(&setup::sqlite_url(file))?;
        let policy = setup::policy();
        run_once(&ledger, &setup::tasks(1)?[0], &policy).await?;
        await_begin()?;
        let (begun, mut wrote) = (Instant::now(), Wrote { writes: 0, worst_ns: 0 });
        while begun.elapsed().as_secs_f64() < seconds {
            let task = &setup::tasks(1)?[0];
            let start = Instant::now();
            let Admission::Run(claim) = ledger.claim(task, &policy).await? else { bail!("the task was not fresh") };
            wrote.note(start);
            let start = Instant::now();
            claim.complete(Output::Nothing).await.map_err(Unsettled::into_error)?;
            wrote.note(start);
        }
        Ok(wrote)
    })
}

/// The same writes over a bare connection with the stock busy handler.
fn write_bare(file: &Path, seconds: f64) -> Result<Wrote> {
    let bare = crate::sqlite::bare(file)?;
    bare.busy_timeout(BUSY_TIMEOUT)?;
    let body = [b'x'; 100];
    await_begin()?;
    let (begun, mut wrote) = (Instant::now(), Wrote { writes: 0, worst_ns: 0 });
    while begun.elapsed().as_secs_f64() < seconds {
        let task = &setup::tasks(1)?[0];
        for statement in [crate::sqlite::BARE_CLAIM, crate::sqlite::BARE_COMPLETE] {
            let start = Instant::now();
            loop {
                match bare.prepare_cached(statement)?.execute(params![task.key.as_str(), &body[..]]) {
                    Ok(_) => break,
                    // It waited in vain: the wait of this write goes on.
                    Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                        if begun.elapsed().as_secs_f64() >= seconds {
                            break;
                        }
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            wrote.note(start);
        }
    }
    Ok(wrote)
}

/// Opens the stores, does one task in each, and then nothing for so long. Returns the processor time of doing nothing,
/// in nanoseconds. Without stores it is the floor.
fn idle(urls: &[&str], long: Duration) -> Result<u64> {
    let runtime = setup::runtime()?;
    let ledgers = runtime.block_on(async {
        let mut ledgers = Vec::new();
        for url in urls {
            let ledger = setup::ledger(url)?;
            run_once(&ledger, &setup::tasks(1)?[0], &setup::policy()).await?;
            ledgers.push(ledger);
        }
        anyhow::Ok(ledgers)
    })?;
    await_begin()?;
    let before = processor_time();
    std::thread::sleep(long);
    let spent = processor_time() - before;
    drop(ledgers);
    Ok(u64::try_from(spent.as_nanos())?)
}

/// What all threads of this process have spent.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
