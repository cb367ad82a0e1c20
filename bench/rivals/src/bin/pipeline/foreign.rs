//! Celery and BullMQ, in processes of their own. How many tasks are done is what their own records in Redis say.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use taskonce_testkit::RedisServer;
use taskonce_testkit::resp::Reply;

use crate::{AT_ONCE, clock};

/// Where the programs of the rivals are.
pub(crate) struct Tools {
    python: PathBuf,
    scripts: PathBuf,
    modules: PathBuf,
}

impl Tools {
    /// Installs what is not there yet.
    pub(crate) fn install() -> Result<Tools> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (scripts, folder) = (here.join("pipeline"), here.join("target/pipeline"));
        std::fs::create_dir_all(&folder)?;
        let (venv, modules) = (folder.join("venv"), folder.join("node"));
        let python = venv.join("bin/python");
        if !venv.join("bin/celery").exists() {
            run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
            run(Command::new(&python)
                .args(["-m", "pip", "install", "--quiet", "--requirement"])
                .arg(scripts.join("requirements.txt")))?;
        }
        if !modules.join("node_modules/bullmq").exists() {
            std::fs::create_dir_all(&modules)?;
            std::fs::copy(scripts.join("package.json"), modules.join("package.json"))?;
            run(Command::new("npm").args(["install", "--silent", "--no-audit", "--no-fund"]).current_dir(&modules))?;
        }
        // A module of JavaScript looks for others from where it lies.
        std::fs::copy(scripts.join("bullmq_side.mjs"), modules.join("bullmq_side.mjs"))?;
        Ok(Tools { python, scripts, modules })
    }
}

/// A process that is ended with the value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Its own children notice that their parent is gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn celery(tools: &Tools, server: &RedisServer, tasks: usize) -> Result<f64> {
    let script = tools.scripts.join("celery_side.py");
    let command = || {
        let mut command = Command::new(&tools.python);
        command.env("RIVAL_REDIS", server.url()).env("PYTHONPATH", &tools.scripts).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    run(command().arg(script).args(["fill", &tasks.to_string()]))?;
    let work = [
        "-m",
        "celery",
        "-A",
        "celery_side",
        "worker",
        "--concurrency=2",
        "--loglevel=ERROR",
        "--without-gossip",
        "--without-mingle",
    ];
    let _worker = Ended(command().args(work).stdout(Stdio::null()).spawn().context("start celery")?);
    watch(tasks, || count(server, &["EVAL", "return #redis.call('KEYS', 'celery-task-meta-*')", "0"]))
}

pub(crate) fn bullmq(tools: &Tools, server: &RedisServer, tasks: usize) -> Result<f64> {
    let command = |words: [&str; 2]| {
        let mut command = Command::new("node");
        command.arg(tools.modules.join("bullmq_side.mjs")).args(words).env("RIVAL_REDIS", server.url());
        command
    };
    run(&mut command(["fill", &tasks.to_string()]))?;
    let _worker = Ended(command(["work", &AT_ONCE.to_string()]).spawn().context("start node")?);
    watch(tasks, || count(server, &["ZCARD", "bull:rival:completed"]))
}

fn watch(tasks: usize, done: impl FnMut() -> Result<usize>) -> Result<f64> {
    tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(clock(tasks, done))
}

pub(crate) fn count(server: &RedisServer, words: &[&str]) -> Result<usize> {
    match server.command(words)? {
        Reply::Int(number) => Ok(usize::try_from(number)?),
        other => bail!("{words:?} was answered with {other:?}"),
    }
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {:?}", command.get_program()))?;
    ensure!(status.success(), "{:?} ended with {status}", command.get_program());
    Ok(())
}
