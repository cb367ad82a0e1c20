//! A primary with replicas, watched by three Sentinels, of a test's own.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::program::Program;
use crate::redis::{RedisServer, Role, again_on_a_clash};
use crate::resp::{Connection, Reply};

/// The name by which the Sentinels know the primary.
pub const SERVICE: &str = "tasks";
/// How many Sentinels watch.
const SENTINELS: usize = 3;
/// How many of them must find the primary silent.
const QUORUM: usize = 2;
/// How long they may take to find one another, or to agree on a change.
const AGREE_WAIT: Duration = Duration::from_secs(60);
/// How often they are asked meanwhile.
const PAUSE: Duration = Duration::from_millis(20);

/// How to start [`Sentinels`].
#[derive(Clone, Debug)]
pub struct SentinelOptions {
    /// How many replicas the primary has.
    pub replicas: usize,
    /// How long a server is silent before a Sentinel takes it for dead. Small for a test about failover; else far above
    /// what a busy machine makes of it.
    pub down_after: Duration,
    /// How long a failover may take before it is tried again.
    pub failover_timeout: Duration,
    /// Arguments of the primary and its replicas, as for [`RedisServer::start`]. With `--requirepass` they and the
    /// Sentinels use that password; with `--tls-replication yes` (and the files that TLS needs) all listen with TLS, and
    /// for the testkit without.
    pub args: Vec<String>,
    /// The password of the Sentinels themselves.
    pub sentinel_password: Option<String>,
    /// Which servers.
    pub program: Program,
}

impl Default for SentinelOptions {
    fn default() -> SentinelOptions {
        SentinelOptions {
            replicas: 1,
            down_after: Duration::from_secs(30),
            failover_timeout: Duration::from_secs(60),
            args: Vec::new(),
            sentinel_password: None,
            program: Program::Redis,
        }
    }
}

impl SentinelOptions {
    /// For tests about failover: a silent primary is replaced after about two seconds.
    #[must_use]
    pub fn quick() -> SentinelOptions {
        SentinelOptions {
            down_after: Duration::from_secs(1),
            failover_timeout: Duration::from_secs(3),
            ..SentinelOptions::default()
        }
    }

    fn argument(&self, name: &str) -> Option<&str> {
        self.args.windows(2).rev().find(|pair| pair[0] == name).map(|pair| pair[1].as_str())
    }

    fn uses_tls(&self) -> bool {
        self.argument("--tls-replication") == Some("yes")
    }
}

/// A running primary, its replicas, and the Sentinels. All end with this value, or with the process that started them.
pub struct Sentinels {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
    options: SentinelOptions,
}

impl Sentinels {
    /// Starts them and waits until every Sentinel knows all others and all servers, and the replicas follow.
    ///
    /// # Errors
    /// When there is no `redis-server`, one does not start, or they do not find one another.
    pub fn start(options: &SentinelOptions) -> Result<Sentinels> {
        again_on_a_clash(|| {
            let mut servers: Vec<RedisServer> = Vec::new();
            for _ in 0..=options.replicas {
                let mut args = options.args.clone();
                if let Some(password) = options.argument("--requirepass") {
                    args.extend(["--masterauth".to_owned(), password.to_owned()]);
                }
                if options.uses_tls() {
                    args.extend(["--tls-port", "{tls}"].map(str::to_owned));
                }
                if let Some(primary) = servers.first() {
                    let port = primary.client_port().to_string();
                    args.extend(["--replicaof".to_owned(), "127.0.0.1".to_owned(), port]);
                }
                args.extend(["--repl-diskless-sync-delay", "0"].map(str::to_owned));
                let mut server = RedisServer::prepare(options.program, Role::Data, args)?;
                server.launch()?;
                servers.push(server);
            }
            let mut sentinels = (0..SENTINELS)
                .map(|_| {
                    let tls: &[&str] = if options.uses_tls() { &["--tls-port", "{tls}"] } else { &[] };
                    let mut args: Vec<String> = tls.iter().map(|arg| (*arg).to_owned()).collect();
                    if let Some(password) = &options.sentinel_password {
                        args.extend(["--requirepass".to_owned(), password.clone()]);
                    }
                    RedisServer::prepare(options.program, Role::Sentinel, args)
                })
                .collect::<Result<Vec<_>>>()?;
            for sentinel in &mut sentinels {
                let settings = settings(options, &servers[0]);
                fs::write(sentinel.folder().join("sentinel.conf"), sentinel.filled(&settings)?)?;
                sentinel.launch()?;
            }
            let stand = Sentinels { servers, sentinels, options: options.clone() };
            stand.await_whole()?;
            Ok(stand)
        })
    }

    /// The URL of the service, with all Sentinels in it.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.options.uses_tls() { "rediss" } else { "redis" };
        let hosts: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.client_port())).collect();
        let user = self.options.argument("--requirepass").map(|word| format!(":{word}@")).unwrap_or_default();
        let query = self.options.sentinel_password.as_ref().map(|word| format!("?sentinel_password={word}"));
        format!("{scheme}+sentinel://{user}{}/{SERVICE}{}", hosts.join(","), query.unwrap_or_default())
    }

    /// A server: the first primary is number 0, its replicas follow.
    #[must_use]
    pub fn server(&self, n: usize) -> &RedisServer {
        &self.servers[n]
    }

    /// A server, to end it or start it again. One that is started again takes the place that it had at the start until
    /// the Sentinels tell it another.
    pub fn server_mut(&mut self, n: usize) -> &mut RedisServer {
        &mut self.servers[n]
    }

    /// A Sentinel.
    #[must_use]
    pub fn sentinel(&self, n: usize) -> &RedisServer {
        &self.sentinels[n]
    }

    /// A Sentinel, to end it or start it again.
    pub fn sentinel_mut(&mut self, n: usize) -> &mut RedisServer {
        &mut self.sentinels[n]
    }

    /// The primary now, by what most Sentinels that answer say.
    ///
    /// # Errors
    /// When none answers, or they do not agree.
    pub fn primary(&self) -> Result<usize> {
        let running = || self.sentinels.iter().filter(|sentinel| sentinel.answers());
        let named = running().map(|sentinel| self.named_by(sentinel)).collect::<Result<Vec<_>>>()?;
        let most = named.iter().find(|n| named.iter().filter(|other| other == n).count() * 2 > named.len());
        most.copied().with_context(|| format!("the Sentinels do not agree: {named:?}"))
    }

    /// The first of the replicas now.
    ///
    /// # Errors
    /// When no Sentinel answers, or they do not agree on the primary.
    pub fn replica(&self) -> Result<usize> {
        let primary = self.primary()?;
        (0..self.servers.len()).find(|n| *n != primary).context("there is no replica")
    }

    /// One command at the primary.
    ///
    /// # Errors
    /// When no Sentinel or the primary does not answer. An error that it answers is a reply.
    pub fn command<A: AsRef<[u8]>>(&self, words: &[A]) -> Result<Reply> {
        self.servers[self.primary()?].command(words)
    }

    /// Makes the Sentinels put a replica in the place of the primary, and waits until all name it and it takes writes.
    /// Returns its number.
    ///
    /// # Errors
    /// When they refuse, or do not agree.
    pub fn failover(&self) -> Result<usize> {
        let before = self.primary()?;
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.answers()).context("no Sentinel runs")?;
        let start = Instant::now();
        // One that still ends an earlier failover says INPROG; one that has not heard of a replica of late, NOGOODSLAVE.
        while let Reply::Error(text) = sentinel.command(&["SENTINEL", "FAILOVER", SERVICE])? {
            ensure!(start.elapsed() < AGREE_WAIT, "the Sentinel answered {text}");
            std::thread::sleep(PAUSE);
        }
        self.await_failover(before)
    }

    /// Ends the primary with SIGKILL. Returns its number.
    ///
    /// # Errors
    /// When no Sentinel answers, or they do not agree on the primary.
    pub fn kill_primary(&mut self) -> Result<usize> {
        let primary = self.primary()?;
        self.servers[primary].kill();
        Ok(primary)
    }

    /// Waits until all Sentinels that answer name another primary than this, and it takes writes. Returns its number.
    ///
    /// # Errors
    /// When that does not happen.
    pub fn await_failover(&self, from: usize) -> Result<usize> {
        agree("a new primary", || {
            let running = self.sentinels.iter().filter(|sentinel| sentinel.answers());
            let named = running.map(|sentinel| self.named_by(sentinel)).collect::<Result<Vec<_>>>()?;
            let primary = *named.first().context("no Sentinel runs")?;
            ensure!(primary != from && named.iter().all(|n| *n == primary), "they name {named:?}");
            let role = self.servers[primary].command(&["INFO", "replication"])?.text();
            ensure!(role.contains("role:master"), "{role}");
            Ok(primary)
        })
    }

    /// Waits until every Sentinel knows all others and all servers, and every replica follows the primary.
    ///
    /// # Errors
    /// When that does not happen; the error holds what one of them says.
    pub fn await_whole(&self) -> Result<()> {
        agree("that all are there", || {
            for sentinel in &self.sentinels {
                let info = sentinel.command(&["INFO", "sentinel"])?.text();
                let replicas = self.options.replicas;
                let all =
                    format!("status=ok,address=127.0.0.1:{},", self.servers[self.named_by(sentinel)?].client_port());
                let counts = format!("slaves={replicas},sentinels={SENTINELS}");
                ensure!(info.contains(&all) && info.contains(&counts), "{info}");
                let quorum = sentinel.command(&["SENTINEL", "CKQUORUM", SERVICE])?.text();
                ensure!(quorum.contains(&format!("OK {SENTINELS} usable")), "{quorum}");
                let Reply::Array(replicas) = sentinel.command(&["SENTINEL", "REPLICAS", SERVICE])? else {
                    bail!("no list of replicas");
                };
                for replica in &replicas {
                    let told = |name| field(replica, name).unwrap_or_default();
                    let is_good = told("flags") == "slave" && told("master-link-status") == "ok";
                    ensure!(is_good, "a replica is not ready: {replica:?}");
                }
            }
            for server in &self.servers {
                let replication = server.command(&["INFO", "replication"])?.text();
                let follows = replication.contains("role:master") || replication.contains("master_link_status:up");
                ensure!(follows, "{replication}");
            }
            Ok(())
        })
    }

    /// The primary that one Sentinel names.
    fn named_by(&self, sentinel: &RedisServer) -> Result<usize> {
        let port = primary_port(&mut sentinel.connect()?)?;
        let known = self.servers.iter().position(|server| server.client_port() == port);
        known.with_context(|| format!("a Sentinel names port {port}, which is no server of its"))
    }
}

/// What a Sentinel is told at the start.
fn settings(options: &SentinelOptions, primary: &RedisServer) -> String {
    let port = primary.client_port();
    let (down_after, timeout) = (options.down_after.as_millis(), options.failover_timeout.as_millis());
    let mut text = format!(
        "sentinel monitor {SERVICE} 127.0.0.1 {port} {QUORUM}\n\
         sentinel down-after-milliseconds {SERVICE} {down_after}\n\
         sentinel failover-timeout {SERVICE} {timeout}\n"
    );
    if let Some(password) = options.argument("--requirepass") {
        text.push_str(&format!("sentinel auth-pass {SERVICE} {password}\n"));
    }
    if let Some(password) = &options.sentinel_password {
        text.push_str(&format!("sentinel sentinel-pass {password}\n"));
    }
    for pair in options.args.windows(2).filter(|pair| pair[0].starts_with("--tls-")) {
        text.push_str(&format!("{} {}\n", pair[0].trim_start_matches('-'), pair[1]));
    }
    text
}

/// Asks a Sentinel for the port of the primary.
pub(crate) fn primary_port(sentinel: &mut Connection) -> Result<u16> {
    match sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])? {
        Reply::Array(address) if address.len() == 2 => Ok(address[1].text().parse()?),
        other => bail!("a Sentinel answered {other:?}"),
    }
}

/// A field of a list of names and values.
fn field(pairs: &Reply, name: &str) -> Option<String> {
    let Reply::Array(pairs) = pairs else { return None };
    pairs.chunks_exact(2).find(|pair| pair[0].text() == name).map(|pair| pair[1].text())
}

fn agree<T>(on: &str, mut agreed: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match agreed() {
            Ok(answer) => return Ok(answer),
            Err(error) if start.elapsed() > AGREE_WAIT => {
                return Err(error.context(format!("no agreement within {AGREE_WAIT:?} on {on}")));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// The address of the primary that this Sentinel names.
pub(crate) fn primary_address(sentinel: SocketAddr) -> Result<SocketAddr> {
    Ok(SocketAddr::from(([127, 0, 0, 1], primary_port(&mut Connection::open(sentinel)?)?)))
}
