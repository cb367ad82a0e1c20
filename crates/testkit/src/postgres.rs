//! A PostgreSQL server of a test's own, on a free port and in a temporary folder, and databases on it.

use std::env;
use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::clock::{self, Clock};
use crate::port;
use crate::process::Running;
use crate::program::Program;
use crate::redis::again_on_a_clash;

/// What the server's log says when it can be used.
const READY: &str = "database system is ready to accept";
/// How long a server that was told to end may take before it is killed.
const END_MAX: Duration = Duration::from_secs(10);
/// How long the processes of a server that was killed may keep its memory in use.
const KILLED_MAX: Duration = Duration::from_secs(20);
/// Users whom a server may run as when the tests run as root, which it refuses.
const USERS: [&str; 2] = ["postgres", "nobody"];
/// The superuser of each server.
pub const SUPERUSER: &str = "postgres";

/// Holds a data folder that was made for all and that no server ran on: servers begin with a copy, which takes a tenth of the
/// time. They have one system identifier then, as copies of a server have.
pub const DATA_VARIABLE: &str = "TASKONCE_TEST_POSTGRES_DATA";

/// A running server. It ends with this value, or with the process that started it, even if that is killed.
pub struct PostgresServer {
    folder: TempDir,
    port: u16,
    args: Vec<String>,
    user: Option<(u32, u32)>,
    clock: Clock,
    running: Option<Running>,
}

impl PostgresServer {
    /// Starts a server that lets everybody in. `args` follow on its command line, such as `["-c", "fsync=off"]`.
    ///
    /// # Errors
    /// When there is no PostgreSQL (the error says what to install), or it does not start.
    pub fn start(args: &[&str]) -> Result<PostgresServer> {
        PostgresServer::start_with(
            args,
            "local all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n",
        )
    }

    /// The same with a `pg_hba.conf`, which says who is let in. `{dir}` in the arguments stands for the server's folder, where
    /// [`put`](PostgresServer::put) puts files; they are there before it starts.
    ///
    /// # Errors
    /// As for [`start`](PostgresServer::start).
    pub fn start_with(args: &[&str], hba: &str) -> Result<PostgresServer> {
        let mut server = PostgresServer::prepare(args)?;
        server.initialise()?;
        server.put("data/pg_hba.conf", hba.as_bytes())?;
        server.start_prepared()
    }

    /// Starts a server whose clock the test may [freeze](PostgresServer::freeze_clock) and [move](PostgresServer::shift_clock), else as
    /// [`start`](PostgresServer::start) does.
    ///
    /// # Errors
    /// When there is no PostgreSQL or no `libfaketime` (the error says what to install), or it does not start.
    pub fn start_with_clock(args: &[&str]) -> Result<PostgresServer> {
        let mut server = PostgresServer::prepare(args)?;
        server.initialise()?;
        server.clock = Clock::Test;
        clock::run(server.folder.path())?;
        server.start_prepared()
    }

    /// From now on the time of day stands still for it.
    ///
    /// # Errors
    /// When it was not started [with a clock](PostgresServer::start_with_clock) of the test's.
    pub fn freeze_clock(&self) -> Result<()> {
        ensure!(self.clock == Clock::Test, "the server goes by the machine's clock");
        clock::freeze(self.folder.path())
    }

    /// From now on its time of day is so many seconds after the machine's, or before it, and goes on.
    ///
    /// # Errors
    /// When it was not started [with a clock](PostgresServer::start_with_clock) of the test's.
    pub fn shift_clock(&self, seconds: i64) -> Result<()> {
        ensure!(self.clock == Clock::Test, "the server goes by the machine's clock");
        clock::shift(self.folder.path(), seconds)
    }

    /// A server whose folder and port are chosen, and that does not run yet.
    ///
    /// # Errors
    /// When there is no port or no folder.
    pub fn prepare(args: &[&str]) -> Result<PostgresServer> {
        let folder = tempfile::Builder::new().prefix("taskonce-postgres-").tempdir()?;
        let user = unprivileged()?;
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid))?;
        }
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Ok(PostgresServer { folder, port: port::free()?, args, user, clock: Clock::Machine, running: None })
    }

    /// Makes its data folder, as a copy where [`DATA_VARIABLE`] names one.
    ///
    /// # Errors
    /// When `initdb` fails, or the copy.
    pub fn initialise(&mut self) -> Result<()> {
        if let Some(made) = env::var_os(DATA_VARIABLE) {
            return self.initialise_from(Path::new(&made));
        }
        let mut initdb = self.command("initdb")?;
        initdb.arg("--pgdata").arg(self.data()).args(["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C"]);
        initdb.args(["--username", SUPERUSER]);
        finished(initdb, "initdb").map(drop)
    }

    /// Makes its data folder as a copy of one that no server runs on.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn initialise_from(&mut self, made: &Path) -> Result<()> {
        // By its user, whom the copy has to belong to.
        let mut copy = self.as_its_user(Command::new("cp"));
        copy.arg("-R").arg(made).arg(self.data());
        finished(copy, "cp").map(drop)
    }

    /// Makes its data folder as a standby of another server, and lets it follow that one.
    ///
    /// # Errors
    /// When `pg_basebackup` fails.
    pub fn follow(&mut self, primary: &PostgresServer) -> Result<()> {
        let mut backup = self.command("pg_basebackup")?;
        backup.args(["--host", "127.0.0.1", "--username", SUPERUSER, "--port", &primary.port.to_string()]);
        backup.args(["--checkpoint=fast", "--no-sync", "--write-recovery-conf", "--wal-method=stream", "--pgdata"]);
        backup.arg(self.data());
        finished(backup, "pg_basebackup").map(drop)
    }

    /// Starts a server whose data folder was made.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_prepared(mut self) -> Result<PostgresServer> {
        again_on_a_clash(|| {
            let started = self.launch();
            if started.is_err() {
                self.port = port::free()?;
            }
            started
        })?;
        Ok(self)
    }

    /// Puts a file into its folder, for its user only.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn put(&self, name: &str, content: &[u8]) -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let file = self.folder.path().join(name);
        fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        if let Some((uid, gid)) = self.user {
            chown(&file, Some(uid), Some(gid))?;
        }
        Ok(file)
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of its Unix socket, which is removed with it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The URL of one of its databases for its superuser.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{SUPERUSER}@127.0.0.1:{}/{database}", self.port)
    }

    /// What a script prints that `psql` runs as the superuser, without headings.
    ///
    /// # Errors
    /// When it fails; the error holds what `psql` says.
    pub fn psql(&self, database: &str, script: &str) -> Result<String> {
        psql(self.port, database, script)
    }

    /// Makes an empty database.
    ///
    /// # Errors
    /// When the server does not.
    pub fn database(&self) -> Result<Database> {
        Database::create(self.port)
    }

    /// Its process id; `None` while it does not run.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(Running::pid)
    }

    /// What its log says.
    ///
    /// # Errors
    /// When there is none.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.path().join("log"))?)
    }

    /// Ends it with SIGKILL, as a crash would. Its other processes notice and end.
    pub fn kill(&mut self) {
        self.running = None;
    }

    /// Ends it at once and in order: connections are told, and it recovers at its next start.
    ///
    /// # Errors
    /// When it does not end.
    pub fn quit(&mut self) -> Result<()> {
        self.end(Signal::QUIT)
    }

    /// Ends it when it has written down what it has: connections are told.
    ///
    /// # Errors
    /// When it does not end.
    pub fn shut_down(&mut self) -> Result<()> {
        self.end(Signal::INT)
    }

    fn end(&mut self, signal: Signal) -> Result<()> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        running.signal(signal)?;
        ensure!(running.ends_within(END_MAX)?, "the server did not end within {END_MAX:?}");
        Ok(())
    }

    /// Starts it again on the same port with the same data, ending it first if it runs.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        if self.running.is_some() {
            self.shut_down()?;
        }
        self.launch()
    }

    /// Lets a standby take writes, and waits until it does.
    ///
    /// # Errors
    /// When it does not.
    pub fn promote(&self) -> Result<()> {
        self.psql(SUPERUSER, "select pg_promote(true, 30)").map(drop)
    }

    /// Its data folder.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, program: &str) -> Result<Command> {
        Ok(self.as_its_user(Command::new(beside(program)?)))
    }

    fn as_its_user(&self, mut command: Command) -> Command {
        // Not the tests' folder: its user may not be let in there.
        command.current_dir(self.folder.path());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }

    /// The server itself, which goes by its clock.
    fn server(&self) -> Result<Command> {
        match self.clock {
            Clock::Machine => self.command("postgres"),
            // `env` becomes the server, and so its process.
            Clock::Test => {
                let mut command = self.as_its_user(Command::new("env"));
                command.args(clock::environment(self.folder.path())?).arg(beside("postgres")?);
                Ok(command)
            }
        }
    }

    fn launch(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut command = self.server()?;
            command.arg("-D").arg(self.data()).arg("-k").arg(self.folder.path()).args(["-p", &self.port.to_string()]);
            command.args(["-c", "listen_addresses=127.0.0.1"]);
            let folder = self.folder.path().to_str().context("a temporary folder that is not UTF-8")?;
            command.args(self.args.iter().map(|arg| arg.replace("{dir}", folder)));
            match Running::start_command(command, self.folder.path(), READY, "QUIT") {
                Ok(running) => {
                    self.running = Some(running);
                    return Ok(());
                }
                // The processes of one that was killed are still ending.
                Err(error) if format!("{error:#}").contains("shared memory block") && start.elapsed() < KILLED_MAX => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        if self.quit().is_err() {
            self.running = None;
        }
    }
}

/// A database of a test's own. It goes with this value.
pub struct Database {
    port: u16,
    name: String,
}

impl Database {
    /// Makes an empty one on the server at this port of 127.0.0.1.
    ///
    /// # Errors
    /// When the server does not.
    pub fn create(port: u16) -> Result<Database> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let name = format!("test_{}_{number}_{since}", std::process::id());
        psql(port, SUPERUSER, &format!("create database {name} template template0"))?;
        Ok(Database { port, name })
    }

    /// The server's port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its URL for the superuser.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of(SUPERUSER)
    }

    /// Its URL for a user without a password.
    #[must_use]
    pub fn url_of(&self, user: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{}", self.port, self.name)
    }

    /// What a script prints that `psql` runs as the superuser, without headings.
    ///
    /// # Errors
    /// When it fails; the error holds what `psql` says.
    pub fn psql(&self, script: &str) -> Result<String> {
        psql(self.port, &self.name, script)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // Its server may be gone already.
        let _ = psql(self.port, SUPERUSER, &format!("drop database if exists {} with (force)", self.name));
    }
}

/// One script by `psql`, as the superuser.
fn psql(port: u16, database: &str, script: &str) -> Result<String> {
    let mut command = Command::new(beside("psql")?);
    command.args(["--no-psqlrc", "--no-align", "--tuples-only", "--quiet", "--set", "ON_ERROR_STOP=1"]);
    command.args(["--host", "127.0.0.1", "--port", &port.to_string(), "--username", SUPERUSER]);
    command.args(["--dbname", database, "--command", script]);
    finished(command, "psql").map(|said| said.trim_end().to_owned())
}

/// A program beside the server.
fn beside(program: &str) -> Result<PathBuf> {
    let server = Program::Postgres.path()?;
    let beside = server.with_file_name(program);
    ensure!(beside.is_file(), "there is no `{program}` beside `{}`", server.display());
    Ok(beside)
}

fn finished(mut command: Command, name: &str) -> Result<String> {
    let ended = command.stdin(Stdio::null()).output().with_context(|| format!("start {name}"))?;
    if !ended.status.success() {
        bail!("{name} failed: {}", String::from_utf8_lossy(&ended.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
}

/// User and group to run a server as; `None` where the tests do not run as root.
pub(crate) fn unprivileged() -> Result<Option<(u32, u32)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd").context("read /etc/passwd")?;
    for name in USERS {
        // `postgres:x:101:104:…`
        let line = users.lines().find(|line| line.split(':').next() == Some(name));
        if let Some(fields) = line.map(|line| line.split(':').collect::<Vec<_>>())
            && let [_, _, uid, gid, ..] = fields[..]
        {
            return Ok(Some((uid.parse()?, gid.parse()?)));
        }
    }
    bail!("PostgreSQL refuses to run as root, and there is no user {}", USERS.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_starts_answers_is_killed_restarts_and_ends_with_its_value() {
        let mut server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
        let database = server.database().unwrap();
        database.psql("create table a (b int); insert into a values (7)").unwrap();
        assert_eq!(database.psql("select b from a").unwrap(), "7");
        server.kill();
        assert!(database.psql("select 1").is_err());
        server.restart().unwrap();
        assert_eq!(database.psql("select b from a").unwrap(), "7");
        let port = server.port();
        drop(server);
        assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
    }

    #[test]
    fn servers_that_begin_with_one_data_folder_share_nothing_else() {
        let mut made = PostgresServer::prepare(&[]).unwrap();
        made.initialise().unwrap();
        let server = || {
            let mut server = PostgresServer::prepare(&["-c", "fsync=off"]).unwrap();
            server.initialise_from(&made.data()).unwrap();
            server.start_prepared().unwrap()
        };
        let (one, two) = (server(), server());
        one.psql(SUPERUSER, "create table a (b int)").unwrap();
        for other in [two, server()] {
            assert_eq!(other.psql(SUPERUSER, "select to_regclass('a') is null").unwrap(), "t");
        }
    }

    #[test]
    fn a_clock_of_the_test_stands_still_and_jumps() {
        let server = PostgresServer::start_with_clock(&["-c", "fsync=off"]).unwrap();
        let time = || -> f64 {
            let said = server.psql(SUPERUSER, "select extract(epoch from clock_timestamp())").unwrap();
            said.parse().unwrap()
        };
        let before = time();
        assert!(time() > before, "it goes on");
        for seconds in [3600, -3600, 0] {
            server.shift_clock(seconds).unwrap();
            let off = time() - before - seconds as f64;
            assert!((0.0..600.0).contains(&off), "{seconds} s: {off}");
        }
        server.freeze_clock().unwrap();
        let frozen = time();
        assert_eq!([time(), time()], [frozen, frozen]);
    }

    #[test]
    fn a_server_that_cannot_start_says_why() {
        let Err(error) = PostgresServer::start(&["-c", "no_such_setting=1"]) else { panic!("it started") };
        assert!(format!("{error:#}").contains("no_such_setting"), "{error:#}");
    }
}
