//! The store's URL, read into settings. Everything wrong with it is said at once, and never its password.

use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use taskonce_core::{Error, ErrorKind, Result, units};

/// The form of a URL, for hints.
const FORM: &str = "write it as `postgres://user:password@host:5432/database?schema=taskonce`";
/// The port, unless the URL says otherwise.
const PORT: u16 = 5432;
/// The schema, unless the URL says otherwise.
pub(crate) const SCHEMA: &str = "taskonce";
/// The longest name of a schema, in bytes: PostgreSQL cuts longer ones.
const SCHEMA_MAX: usize = 63;
/// How long a call may take, unless the URL says otherwise.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The shortest and the longest time for a call.
const TIMEOUT_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(60);
/// How long a call waits for a record that a transaction holds, unless the URL says otherwise.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Unless the URL says otherwise, a wait for a record takes at most this part of a call's time.
const LOCK_SHARE: u32 = 4;
/// Connections of one process and runtime at most, unless the URL says otherwise.
const CONNECTIONS: usize = 16;
/// The most connections that a URL may ask for.
const CONNECTIONS_MAX: usize = 256;

/// What may stand behind the `?`.
const OPTIONS: &str = "`schema`, `timeout`, `lock_timeout`, `connections`, `statements`, `sslmode`, `sslrootcert`, \
                       `sslcert`, `sslkey`, `target_session_attrs`, `host` and `application_name`";

/// What the URL says.
pub(crate) struct Settings {
    /// One server, or several of which one takes writes.
    pub(crate) hosts: Vec<Host>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: Option<String>,
    pub(crate) application: String,
    pub(crate) schema: String,
    pub(crate) timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) connections: usize,
    pub(crate) statements: Statements,
    pub(crate) target: Target,
    pub(crate) tls: Tls,
    /// The URL without user and password, to name the store in errors.
    pub(crate) label: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Tcp(String, u16),
    /// The folder of its Unix socket.
    Unix(PathBuf, u16),
}

/// Whether statements are prepared under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statements {
    /// Named, unless a pooler stands between.
    Auto,
    Named,
    /// Nothing is left on a connection: for poolers that lend it anew for each transaction.
    Unnamed,
}

/// Which of several servers is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Any,
    ReadWrite,
}

/// Whether the way is encrypted, and whom to trust.
pub(crate) struct Tls {
    pub(crate) mode: TlsMode,
    /// Certificates to trust, in PEM form; the authorities of the web without.
    pub(crate) roots: Option<Vec<u8>>,
    /// A certificate of this client and its key, in PEM form.
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

/// How much is demanded of the way, in the words of libpq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsMode {
    Disable,
    /// Encrypted where the server can.
    Prefer,
    /// Encrypted, whoever the server is.
    Require,
    /// The server's certificate comes from an authority that is trusted.
    VerifyCa,
    /// And it names the host.
    VerifyFull,
}

impl Settings {
    pub(crate) fn read(text: &str) -> Result<Settings> {
        let text = text.trim();
        let refused = |what: &str| Error::new(ErrorKind::BadUrl, what).with_hint(FORM);
        let Some(rest) = text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) else {
            return Err(refused("it does not begin with `postgres://`"));
        };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if place.contains('#') || query.contains('#') {
            return Err(refused("it has a `#`, which must be written as `%23` in a password or an option"));
        }
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        if path.contains('@') || query.contains('@') || authority.matches('@').count() > 1 {
            return Err(refused("a `/`, `?`, `#` or `@` in user or password must be percent-encoded"));
        }
        let mut faults = Vec::new();
        let mut settings = Settings::new();
        let (login, hosts) = authority.split_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        settings.read_login(login, &mut faults);
        settings.read_hosts(hosts, &mut faults);
        settings.database = text_of(path, "the database", &mut faults).filter(|name| !name.is_empty());
        let mut given = Given::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, raw) = pair.split_once('=').unwrap_or((pair, ""));
            if given.seen.contains(&name) {
                faults.push(format!("`{name}` is given twice"));
                continue;
            }
            given.seen.push(name);
            let Some(value) = text_of(raw, &format!("`{name}`"), &mut faults) else { continue };
            if let Err(fault) = settings.set(name, &value, &mut given) {
                faults.push(fault);
            }
        }
        settings.settle(&given, &mut faults);
        if faults.is_empty() {
            return Ok(settings);
        }
        Err(Error::new(ErrorKind::BadUrl, faults.join("; "))
            .about(format!("store `{}`", settings.label))
            .with_hint(FORM))
    }

    fn new() -> Settings {
        Settings {
            hosts: Vec::new(),
            user: None,
            password: None,
            database: None,
            application: "taskonce".to_owned(),
            schema: SCHEMA.to_owned(),
            timeout: TIMEOUT,
            lock_timeout: LOCK_TIMEOUT,
            connections: CONNECTIONS,
            statements: Statements::Auto,
            target: Target::Any,
            tls: Tls { mode: TlsMode::Prefer, roots: None, own: None },
            label: String::new(),
        }
    }

    fn read_login(&mut self, login: Option<&str>, faults: &mut Vec<String>) {
        let Some(login) = login else { return };
        let (user, password) = login.split_once(':').map_or((login, None), |(user, pass)| (user, Some(pass)));
        self.user = text_of(user, "the user", faults).filter(|user| !user.is_empty());
        self.password = password.and_then(|password| text_of(password, "the password", faults));
    }

    fn read_hosts(&mut self, hosts: &str, faults: &mut Vec<String>) {
        for host in hosts.split(',').filter(|_| !hosts.is_empty()) {
            let (name, port) = match host.rsplit_once(':') {
                // The colons of an IPv6 address stand in brackets.
                Some((name, port)) if !port.contains(']') => (name, Some(port)),
                Some(_) | None => (host, None),
            };
            let port = match port.map(str::parse::<u16>) {
                None => PORT,
                Some(Ok(port)) if port > 0 => port,
                Some(Ok(_) | Err(_)) => {
                    faults.push(format!("the port of `{name}` is no number from 1 to 65535"));
                    continue;
                }
            };
            let Some(name) = text_of(name.trim_start_matches('[').trim_end_matches(']'), "a host", faults) else {
                continue;
            };
            let host = match name.as_str() {
                "" => {
                    faults.push("a host has no name".to_owned());
                    continue;
                }
                folder if folder.starts_with('/') => Host::Unix(PathBuf::from(folder), port),
                name => Host::Tcp(name.to_owned(), port),
            };
            if self.hosts.contains(&host) {
                faults.push(format!("`{host}` is named twice"));
            }
            self.hosts.push(host);
        }
    }

    fn set(&mut self, name: &str, value: &str, given: &mut Given<'_>) -> Result<(), String> {
        match name {
            "schema" => {
                if !is_schema(value) {
                    return Err(format!(
                        "`schema` is `{}`, not a name of letters, digits and `_` of at most {SCHEMA_MAX} bytes",
                        value.escape_debug()
                    ));
                }
                self.schema = value.to_owned();
            }
            "timeout" => {
                self.timeout =
                    units::duration(value).ok().filter(|timeout| TIMEOUT_RANGE.contains(timeout)).ok_or_else(|| {
                        format!("`timeout` is `{}`, not a time from `50ms` to `60s`", value.escape_debug())
                    })?;
            }
            "lock_timeout" => {
                let time = units::duration(value).ok().filter(|time| !time.is_zero());
                given.lock_timeout = Some(time.ok_or_else(|| {
                    format!("`lock_timeout` is `{}`, not a time from `1ms` on", value.escape_debug())
                })?);
            }
            "connections" => {
                self.connections =
                    value.parse().ok().filter(|count| (1..=CONNECTIONS_MAX).contains(count)).ok_or_else(|| {
                        format!("`connections` is `{}`, not a number from 1 to {CONNECTIONS_MAX}", value.escape_debug())
                    })?;
            }
            "statements" => {
                self.statements = match value {
                    "auto" => Statements::Auto,
                    "named" => Statements::Named,
                    "unnamed" => Statements::Unnamed,
                    _ => return Err(not_one_of(name, value, "`auto`, `named` or `unnamed`")),
                };
            }
            "target_session_attrs" => {
                given.target = Some(match value {
                    "any" => Target::Any,
                    "read-write" => Target::ReadWrite,
                    _ => return Err(not_one_of(name, value, "`any` or `read-write`")),
                });
            }
            "sslmode" => {
                self.tls.mode = match value {
                    "disable" => TlsMode::Disable,
                    "prefer" => TlsMode::Prefer,
                    "require" => TlsMode::Require,
                    "verify-ca" => TlsMode::VerifyCa,
                    "verify-full" => TlsMode::VerifyFull,
                    _ => {
                        let words = "`disable`, `prefer`, `require`, `verify-ca` or `verify-full`";
                        return Err(not_one_of(name, value, words));
                    }
                };
            }
            "sslrootcert" => self.tls.roots = Some(pem(name, value, "-----BEGIN CERTIFICATE-----")?),
            "sslcert" => given.certificate = Some(pem(name, value, "-----BEGIN CERTIFICATE-----")?),
            "sslkey" => given.key = Some(pem(name, value, "PRIVATE KEY-----")?),
            "host" => given.socket = Some(value.to_owned()),
            "application_name" => self.application = value.to_owned(),
            // Its value may be a password that was put in the wrong place.
            other => return Err(format!("`{}` is no option; there are {OPTIONS}", other.escape_debug())),
        }
        Ok(())
    }

    /// What can be said only when everything was read.
    fn settle(&mut self, given: &Given<'_>, faults: &mut Vec<String>) {
        match &given.socket {
            Some(_) if !self.hosts.is_empty() => {
                faults.push("it names a host twice: before the `/` and as `host`".into())
            }
            Some(folder) if folder.starts_with('/') => self.hosts.push(Host::Unix(PathBuf::from(folder), PORT)),
            Some(folder) => faults.push(format!("`host` is `{}`, not the folder of a socket", folder.escape_debug())),
            None if self.hosts.is_empty() && faults.is_empty() => faults.push("it names no host".into()),
            None => {}
        }
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        let database = self.database.as_deref().unwrap_or_default();
        self.label = format!("postgres://{}/{database}", hosts.join(","));
        match given.lock_timeout {
            None => self.lock_timeout = LOCK_TIMEOUT.min(self.timeout / LOCK_SHARE),
            Some(wait) if wait >= self.timeout => faults.push(format!(
                "`lock_timeout` is {} ms, and has to be shorter than `timeout`, which is {} ms",
                wait.as_millis(),
                self.timeout.as_millis()
            )),
            Some(wait) => self.lock_timeout = wait,
        }
        let sockets = self.hosts.iter().filter(|host| matches!(host, Host::Unix(..))).count();
        match self.tls.mode {
            TlsMode::Disable => {}
            // Nobody listens on the way.
            TlsMode::Prefer if sockets == self.hosts.len() => self.tls.mode = TlsMode::Disable,
            TlsMode::Prefer | TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull if sockets > 0 => {
                faults.push("a Unix socket takes no TLS: name it alone, or use `sslmode=disable`".into());
            }
            TlsMode::Prefer | TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => {}
        }
        // Of several servers only one takes writes.
        let of_several = if self.hosts.len() > 1 { Target::ReadWrite } else { Target::Any };
        self.target = given.target.unwrap_or(of_several);
        match (&given.certificate, &given.key) {
            (Some(certificate), Some(key)) => self.tls.own = Some((certificate.clone(), key.clone())),
            (None, None) => {}
            (Some(_), None) => faults.push("it has a `sslcert` and no `sslkey`".into()),
            (None, Some(_)) => faults.push("it has a `sslkey` and no `sslcert`".into()),
        }
        let needs_tls = [("sslrootcert", self.tls.roots.is_some()), ("sslcert", given.certificate.is_some())];
        for (name, _) in needs_tls.iter().filter(|(_, is_given)| *is_given && self.tls.mode == TlsMode::Disable) {
            faults.push(format!("`{name}` needs TLS, and `sslmode` is `disable`"));
        }
    }
}

/// What options say until all of them were read.
#[derive(Default)]
struct Given<'url> {
    seen: Vec<&'url str>,
    lock_timeout: Option<Duration>,
    target: Option<Target>,
    socket: Option<String>,
    certificate: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Host::Tcp(name, port) if name.contains(':') => write!(f, "[{name}]:{port}"),
            Host::Tcp(name, port) => write!(f, "{name}:{port}"),
            Host::Unix(folder, port) => write!(f, "{}:{port}", folder.display()),
        }
    }
}

/// Whether this is a name for a schema. Quoted in every statement, so that case is kept.
pub(crate) fn is_schema(name: &str) -> bool {
    let mut bytes = name.bytes();
    let begins = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    begins && name.len() <= SCHEMA_MAX && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Percent-decodes strictly: a stray `%` is an error, never itself. What it says of a fault never holds the text.
fn text_of(raw: &str, what: &str, faults: &mut Vec<String>) -> Option<String> {
    let bytes = raw.as_bytes();
    let is_stray = bytes.iter().enumerate().any(|(at, byte)| {
        *byte == b'%' && !bytes.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    });
    let text = percent_decode_str(raw).decode_utf8().ok().filter(|text| !is_stray && !text.contains('\0'));
    if text.is_none() {
        faults.push(format!("{what} is not percent-encoded UTF-8"));
    }
    text.map(std::borrow::Cow::into_owned)
}

fn not_one_of(name: &str, value: &str, words: &str) -> String {
    format!("`{name}` is `{}`, not {words}", value.escape_debug())
}

fn pem(name: &str, path: &str, mark: &str) -> Result<Vec<u8>, String> {
    let pem = std::fs::read(Path::new(path)).map_err(|error| format!("`{name}` names `{path}`: {error}"))?;
    if String::from_utf8_lossy(&pem).contains(mark) {
        Ok(pem)
    } else {
        Err(format!("`{name}` names `{path}`, which holds nothing of the kind in PEM form"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str) -> Error {
        let Err(error) = Settings::read(url) else { panic!("`{url}` was taken") };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        error
    }

    fn read(url: &str) -> Settings {
        Settings::read(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn a_full_url_is_read() {
        let settings = read(
            "postgres://ada:p%40ss@a.example:7000,[::1]/my%20tasks?schema=Jobs_2&timeout=4s&lock_timeout=1s\
             &connections=3&statements=unnamed&sslmode=require&target_session_attrs=any&application_name=x",
        );
        let hosts = [Host::Tcp("a.example".into(), 7000), Host::Tcp("::1".into(), PORT)];
        assert_eq!(settings.hosts, hosts);
        assert_eq!((settings.user.as_deref(), settings.password.as_deref()), (Some("ada"), Some("p@ss")));
        assert_eq!((settings.database.as_deref(), settings.schema.as_str()), (Some("my tasks"), "Jobs_2"));
        assert_eq!((settings.timeout, settings.lock_timeout), (Duration::from_secs(4), Duration::from_secs(1)));
        assert_eq!((settings.connections, settings.statements), (3, Statements::Unnamed));
        assert_eq!((settings.tls.mode, settings.target), (TlsMode::Require, Target::Any));
        assert_eq!(settings.label, "postgres://a.example:7000,[::1]:5432/my tasks");
    }

    #[test]
    fn a_short_url_has_the_defaults() {
        let settings = read("postgresql://h/d");
        assert_eq!(
            (settings.schema.as_str(), settings.timeout, settings.lock_timeout),
            (SCHEMA, TIMEOUT, LOCK_TIMEOUT)
        );
        assert_eq!((settings.connections, settings.statements), (CONNECTIONS, Statements::Auto));
        assert_eq!((settings.tls.mode, settings.target), (TlsMode::Prefer, Target::Any));
        assert_eq!(read("postgres://a,b/d").target, Target::ReadWrite, "of several one takes writes");
        for (url, port) in [("postgres:///d?host=/run/p", PORT), ("postgres://%2Frun%2Fp:6/d", 6)] {
            let settings = read(url);
            assert_eq!(settings.hosts, [Host::Unix(PathBuf::from("/run/p"), port)]);
            assert_eq!(settings.tls.mode, TlsMode::Disable);
        }
    }

    #[test]
    fn a_wait_for_a_record_is_always_shorter_than_the_call() {
        let settings = read("postgres://h/d?timeout=200ms");
        assert_eq!(settings.lock_timeout, Duration::from_millis(50));
        let text = refused("postgres://h/d?timeout=1s&lock_timeout=1s").to_string();
        assert!(text.contains("`lock_timeout` is 1000 ms") && text.contains("`timeout`, which is 1000 ms"), "{text}");
    }

    #[test]
    fn everything_wrong_is_said_at_once_and_never_a_password() {
        let error = refused(
            "postgres://ada:hunter2@h:0/d?schema=a-b&timeout=soon&connections=0&statements=some&sslmode=maybe&secret=hunter2\
             &sslcert=/no/such&target_session_attrs=standby&timeout=1s&lock_timeout=x",
        );
        let text = format!("{error:?}");
        for part in [
            "the port of `h`",
            "`schema` is `a-b`",
            "`timeout` is `soon`",
            "`connections`",
            "`statements` is `some`",
            "`sslmode` is `maybe`",
            "`secret` is no option",
            "`sslcert` names",
            "`target_session_attrs`",
            "`timeout` is given twice",
            "`lock_timeout` is `x`",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("hunter2"), "{text}");
    }

    #[test]
    fn a_password_with_a_slash_is_not_shown_in_part() {
        for url in
            ["postgres://ada:12/34@h/d", "postgres://ada:12?34@h/d", "postgres://ada:12#34@h/d", "postgres://a:12@34@h"]
        {
            let text = format!("{:?}", refused(url));
            assert!(!text.contains("12") && !text.contains("34"), "{text}");
        }
    }

    #[test]
    fn odd_urls_are_refused() {
        for url in [
            "",
            "localhost:5432",
            "redis://h",
            "postgres:h",
            "postgres://",
            "postgres:///d",
            "postgres://h:99999/d",
            "postgres://h,h/d",
            "postgres://a,,b/d",
            "postgres://h/%zz",
            "postgres://h/d?host=/x",
            "postgres:///d?host=x",
            "postgres:///d?host=/x&sslmode=require",
            "postgres://a,%2Fx/d",
            "postgres://h/d?sslkey=/etc/hostname",
            "postgres://h/d?schema=",
            "postgres://h/d?timeout=10ms",
        ] {
            refused(url);
        }
    }
}
