//! A Redis or Valkey server of a test's own, on a free port and in a temporary folder.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::clock::{self, Clock};
use crate::port;
use crate::process::Running;
use crate::program::{Program, parse_version};
use crate::resp::{Connection, Reply};

/// How many ports are tried when others take them first.
pub(crate) const STARTS_MAX: u32 = 10;
/// How far the port of a Cluster's bus is from that of the data, before 7.0.
const BUS_OFFSET: u16 = 10_000;

/// A running server. It ends with this value, or with the process that started it, even if that is killed.
pub struct RedisServer {
    folder: TempDir,
    program: Program,
    role: Role,
    ports: Ports,
    args: Vec<String>,
    clock: Clock,
    running: Option<Running>,
    stopped: AtomicBool,
}

/// What a server is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It keeps data.
    Data,
    /// It watches others; `sentinel.conf` in its folder says which.
    Sentinel,
}

/// The ports of one server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) plain: u16,
    /// Where `{tls}` stands in the arguments.
    pub(crate) tls: Option<u16>,
    /// Where `{bus}` stands in the arguments, or at its fixed distance.
    pub(crate) bus: Option<u16>,
}

impl RedisServer {
    /// Starts a server without persistence. `args` follow on its command line, such as `["--maxmemory", "3mb"]`;
    /// `{port}` and `{dir}` in them stand for its port and folder, `{tls}` for a second port of its own.
    ///
    /// # Errors
    /// When there is no `redis-server` (the error says what to install), or it does not start.
    pub fn start(args: &[&str]) -> Result<RedisServer> {
        RedisServer::start_program(Program::Redis, args)
    }

    /// Starts a Valkey server that compares (`SET … IFEQ`), else as [`start`](RedisServer::start) does.
    ///
    /// # Errors
    /// When there is none (the error says how to get it), or it does not start.
    pub fn start_valkey(args: &[&str]) -> Result<RedisServer> {
        RedisServer::start_program(Program::Valkey, args)
    }

    /// Starts a server of this program, else as [`start`](RedisServer::start) does.
    ///
    /// # Errors
    /// When there is no such program, or it does not start.
    pub fn start_program(program: Program, args: &[&str]) -> Result<RedisServer> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        again_on_a_clash(|| {
            let mut server = RedisServer::prepare(program, Role::Data, args.clone())?;
            server.launch()?;
            Ok(server)
        })
    }

    /// Starts a Valkey server whose clock the test may [freeze](RedisServer::freeze_clock), else as
    /// [`start`](RedisServer::start) does. (The Redis of Debian does not start under `libfaketime`: its allocator asks for
    /// the time while that library is being loaded.)
    ///
    /// # Errors
    /// When there is no Valkey or no `libfaketime` (the error says what to install), or it does not start.
    pub fn start_with_clock(args: &[&str]) -> Result<RedisServer> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        again_on_a_clash(|| {
            let mut server = RedisServer::prepare(Program::Valkey, Role::Data, args.clone())?;
            server.clock = Clock::Test;
            clock::run(server.folder.path())?;
            server.launch()?;
            Ok(server)
        })
    }

    /// From now on the time of day stands still for it. Its timers go on.
    ///
    /// # Errors
    /// When it was not started [with a clock](RedisServer::start_with_clock) of the test's.
    pub fn freeze_clock(&self) -> Result<()> {
        ensure!(self.clock == Clock::Test, "the server goes by the machine's clock");
        clock::freeze(self.folder.path())
    }

    /// From now on its time of day is the machine's again.
    ///
    /// # Errors
    /// When it was not started [with a clock](RedisServer::start_with_clock) of the test's.
    pub fn thaw_clock(&self) -> Result<()> {
        ensure!(self.clock == Clock::Test, "the server goes by the machine's clock");
        clock::run(self.folder.path())
    }

    /// A server that does not run yet: its folder and ports are chosen.
    pub(crate) fn prepare(program: Program, role: Role, args: Vec<String>) -> Result<RedisServer> {
        let has = |word: &str| args.iter().any(|arg| arg.contains(word));
        let ports = if has("--cluster-enabled") && !has("{bus}") {
            let plain = port::free_with(BUS_OFFSET)?;
            Ports { plain, tls: has("{tls}").then(port::free).transpose()?, bus: Some(plain + BUS_OFFSET) }
        } else {
            Ports {
                plain: port::free()?,
                tls: has("{tls}").then(port::free).transpose()?,
                bus: has("{bus}").then(port::free).transpose()?,
            }
        };
        let folder = tempfile::Builder::new().prefix("taskonce-redis-").tempdir()?;
        Ok(RedisServer {
            folder,
            program,
            role,
            ports,
            args,
            clock: Clock::Machine,
            running: None,
            stopped: AtomicBool::new(false),
        })
    }

    /// Its URL: with the password if `--requirepass` was given, `rediss:` if it listens with TLS.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.argument("--tls-port").is_some() { "rediss" } else { "redis" };
        let port = self.client_port();
        match self.argument("--requirepass") {
            Some(password) => format!("{scheme}://:{password}@127.0.0.1:{port}"),
            None => format!("{scheme}://127.0.0.1:{port}"),
        }
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports.plain
    }

    /// The port that clients are to use: the second one, with TLS, if `{tls}` was in its arguments.
    #[must_use]
    pub fn client_port(&self) -> u16 {
        self.ports.tls.unwrap_or(self.ports.plain)
    }

    pub(crate) fn ports(&self) -> Ports {
        self.ports
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.ports.plain))
    }

    /// Its folder, which is removed with it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its process id; `None` after [`kill`](RedisServer::kill).
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(Running::pid)
    }

    /// Whether it runs and is not [stopped](RedisServer::stop).
    #[must_use]
    pub fn answers(&self) -> bool {
        self.running.is_some() && !self.stopped.load(Ordering::SeqCst)
    }

    /// One command on a connection of its own, without a client library.
    ///
    /// # Errors
    /// When the server does not answer. An error that it answers is a reply.
    pub fn command<A: AsRef<[u8]>>(&self, words: &[A]) -> Result<Reply> {
        self.connect()?.ask(words)
    }

    /// A connection of one's own, past the password if the server has one.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn connect(&self) -> Result<Connection> {
        let mut connection = Connection::open(self.address())?;
        if let Some(password) = self.argument("--requirepass") {
            connection.ask(&["AUTH", password])?;
        }
        Ok(connection)
    }

    /// The server's version, such as `(7, 0)`: of a Valkey its own, not that of the Redis whose place it takes.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn version(&self) -> Result<(u32, u32)> {
        let info = self.command(&["INFO", "server"])?.text();
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let version = field("valkey_version:").or_else(|| field("redis_version:"));
        parse_version(version.context("no version in INFO")?)
    }

    /// Whether it has `SET … IFEQ`: found by asking it, not from its version.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn compares(&self) -> Result<bool> {
        Ok(self.command(&["SET", "taskonce-testkit:nothing", "1", "IFEQ", "0"])? == Reply::Nil)
    }

    /// How often a command has run, by the server's own statistics.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn calls(&self, command: &str) -> Result<u64> {
        let info = self.command(&["INFO", "commandstats"])?.text();
        let prefix = format!("cmdstat_{}:calls=", command.to_lowercase());
        let line = info.lines().find_map(|line| line.strip_prefix(&prefix));
        Ok(line.and_then(|line| line.split(',').next()).map_or(Ok(0), str::parse)?)
    }

    /// Stops it with SIGSTOP: connections stay, nothing is answered.
    ///
    /// # Errors
    /// When it does not run.
    pub fn stop(&self) -> Result<()> {
        self.stopped.store(true, Ordering::SeqCst);
        self.running.as_ref().context("the server does not run")?.signal(Signal::STOP)
    }

    /// Lets it go on after [`stop`](RedisServer::stop).
    ///
    /// # Errors
    /// When it does not run.
    pub fn cont(&self) -> Result<()> {
        self.running.as_ref().context("the server does not run")?.signal(Signal::CONT)?;
        self.stopped.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Ends it at once with SIGKILL.
    pub fn kill(&mut self) {
        self.running = None;
    }

    /// Starts it again on the same port and folder with the same arguments, ending it first if it runs.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.running = None;
        self.launch()
    }

    /// The value after this word of its arguments; the last, as for the server.
    pub(crate) fn argument(&self, name: &str) -> Option<&str> {
        let at = self.args.iter().rposition(|arg| arg == name)?;
        self.args.get(at + 1).map(String::as_str)
    }

    /// An argument as the server gets it.
    pub(crate) fn filled(&self, arg: &str) -> Result<String> {
        let folder = self.folder.path().to_str().context("a temporary folder that is not UTF-8")?;
        let port = |port: Option<u16>| port.map(|port| port.to_string()).unwrap_or_default();
        Ok(arg
            .replace("{port}", &self.ports.plain.to_string())
            .replace("{tls}", &port(self.ports.tls))
            .replace("{bus}", &port(self.ports.bus))
            .replace("{dir}", folder))
    }

    pub(crate) fn launch(&mut self) -> Result<()> {
        let first: &[&str] = match self.role {
            Role::Data => &["--save", "", "--appendonly", "no"],
            Role::Sentinel => &["{dir}/sentinel.conf", "--sentinel"],
        };
        let common = ["--port", "{port}", "--bind", "127.0.0.1", "--dir", "{dir}"];
        let more = ["--daemonize", "no", "--loglevel", "notice"];
        let own = self.args.iter().map(String::as_str);
        let args = first.iter().copied().chain(common).chain(more).chain(own);
        let args = args.map(|arg| Ok(self.filled(arg)?.into())).collect::<Result<Vec<OsString>>>()?;
        let ready = match self.role {
            Role::Data => "Ready to accept connections",
            Role::Sentinel => "Sentinel ID is",
        };
        let (program, folder) = (self.program.path()?, self.folder.path());
        let running = match self.clock {
            Clock::Machine => Running::start(&program, &args, folder, ready)?,
            // `env` becomes the server, and so its process.
            Clock::Test => {
                let mut words = clock::environment(folder)?;
                words.push(program.into());
                words.extend(args);
                Running::start(Path::new("env"), &words, folder, ready)?
            }
        };
        self.running = Some(running);
        self.stopped.store(false, Ordering::SeqCst);
        Ok(())
    }
}

/// Starts something, again with other ports when another process took one of them first.
pub(crate) fn again_on_a_clash<T>(mut start: impl FnMut() -> Result<T>) -> Result<T> {
    let mut clash = None;
    for _ in 0..STARTS_MAX {
        match start() {
            Err(error) if format!("{error:#}").contains("in use") => clash = Some(error),
            ended => return ended,
        }
    }
    Err(clash.unwrap_or_else(|| anyhow::anyhow!("no server started")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_starts_answers_restarts_and_ends_with_its_value() {
        let mut server = RedisServer::start(&["--requirepass", "secret"]).unwrap();
        assert_eq!(server.command(&["SET", "a", "1"]).unwrap(), Reply::Status("OK".into()));
        assert_eq!(server.calls("set").unwrap(), 1);
        assert!(server.version().unwrap() >= (6, 2));
        server.restart().unwrap();
        assert_eq!(server.command(&["GET", "a"]).unwrap(), Reply::Nil);
        let address = server.address();
        drop(server);
        assert!(Connection::open(address).is_err());
    }

    #[test]
    fn a_clock_of_the_test_stands_still_and_goes_on() {
        let server = RedisServer::start_with_clock(&[]).unwrap();
        let time = || match server.command(&["TIME"]).unwrap() {
            Reply::Array(parts) => parts.iter().map(Reply::text).collect::<Vec<_>>(),
            other => panic!("TIME answers two numbers: {other:?}"),
        };
        let goes_on = || {
            let before = time();
            crate::eventually(std::time::Duration::from_secs(2), || time() != before)
        };
        assert!(goes_on());
        server.freeze_clock().unwrap();
        assert!(crate::eventually(std::time::Duration::from_secs(10), || !goes_on()));
        server.thaw_clock().unwrap();
        assert!(goes_on());
    }

    #[test]
    fn two_servers_share_nothing() {
        let (one, two) = (RedisServer::start(&[]).unwrap(), RedisServer::start(&[]).unwrap());
        one.command(&["SET", "a", "1"]).unwrap();
        assert_eq!(two.command(&["GET", "a"]).unwrap(), Reply::Nil);
    }

    #[test]
    fn a_server_that_cannot_start_says_why() {
        let Err(error) = RedisServer::start(&["--no-such-setting", "1"]) else { panic!("it started") };
        assert!(format!("{error:#}").contains("no-such-setting"), "{error:#}");
    }

    #[test]
    fn a_valkey_server_compares_before_it_replaces() {
        let server = RedisServer::start_valkey(&[]).unwrap();
        assert!(server.version().unwrap() >= crate::program::VALKEY_VERSION_MIN && server.compares().unwrap());
        server.command(&["SET", "a", "1"]).unwrap();
        assert_eq!(server.command(&["SET", "a", "3", "IFEQ", "2"]).unwrap(), Reply::Nil);
        assert_eq!(server.command(&["SET", "a", "3", "IFEQ", "1"]).unwrap(), Reply::Status("OK".into()));
    }
}
