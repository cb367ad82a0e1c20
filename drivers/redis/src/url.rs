//! The URL of a store or a queue, read into settings. Everything wrong with it is said at once, and never its password.

use std::path::Path;
use std::time::Duration;

use taskonce_core::{Error, ErrorKind, Result, units};
use url::Url;

use crate::pipe::Replicas;
use crate::place::{Login, Parts, Place, Scheme};

/// The longest prefix, in bytes.
const PREFIX_MAX: usize = 128;
/// How long a call may take, unless the URL says otherwise.
const TIMEOUT: Duration = Duration::from_millis(500);
/// The shortest and the longest time for a call.
const TIMEOUT_MIN: Duration = Duration::from_millis(10);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// How many replicas a write may wait for.
const WAIT_REPLICAS_MAX: u32 = 16;
/// Replicas are waited for at most this part of a call's time. A call may also have to sit out the wait of the batch before
/// its own.
const WAIT_SHARE: u32 = 4;
/// The shortest time for a call that waits for replicas: two waits that the server ends late
/// ([`WAIT_SLACK`](crate::pipe::WAIT_SLACK)), and what is left for the way.
const WAIT_TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// What may stand behind the `?`.
const OPTIONS: &[&str] = &[
    "`prefix`",
    "`timeout`",
    "`eviction`",
    "`wait_replicas`",
    "`ca`",
    "and for Sentinels `sentinel_user` and `sentinel_password`",
];

/// What the URL says.
pub struct Settings {
    /// Where the servers are.
    pub place: Place,
    pub(crate) login: Option<Login>,
    /// For the Sentinels, which have users of their own.
    pub(crate) sentinel_login: Option<Login>,
    /// The number of the database.
    pub database: i64,
    pub(crate) tls: Option<Tls>,
    /// What every key begins with.
    pub prefix: String,
    /// The longest time that a call may take.
    pub timeout: Duration,
    /// What to do with a server that evicts.
    pub eviction: Eviction,
    /// How many replicas must have a write before it counts.
    pub wait_replicas: u32,
    /// What the URL is of: `store`.
    pub(crate) what: &'static str,
    /// The URL without user and password, to name it in errors.
    pub label: String,
}

/// Reads an option of the user's own: nothing for one that it does not know, else what is wrong with it.
pub type Take<'a> = &'a mut dyn FnMut(&str, &str) -> Option<Result<(), String>>;

/// What a URL may say beyond what concerns the servers.
pub struct Further<'a> {
    /// What the URL is of: `store`.
    pub what: &'static str,
    /// The further options, for people, each in backticks.
    pub known: &'static [&'static str],
    /// What keys begin with, unless the URL says otherwise.
    pub prefix: &'static str,
    /// How such options are written, behind the URL; empty where there are none.
    pub form: &'static str,
    /// Takes one.
    pub take: Take<'a>,
}

/// Whom to trust.
pub(crate) enum Tls {
    /// The certificate authorities of the web.
    Public,
    /// The certificates of this PEM file.
    Private(Vec<u8>),
}

/// What to do with a server that evicts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// It is refused.
    Refuse,
    /// It is used, and may forget.
    Accept,
}

impl Settings {
    /// Reads a URL. Everything that is wrong with it is told at once.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`].
    pub fn read(text: &str, further: Further<'_>) -> Result<Settings> {
        let Further { what, known, prefix, form: options, take } = further;
        let form = |scheme: Scheme| form(scheme, options);
        let not_a_url = |why: &str| {
            Error::new(ErrorKind::BadUrl, format!("this is not a URL: {why}")).with_hint(form(Scheme::Servers))
        };
        let Some((name, rest)) = text.trim().split_once("://") else {
            return Err(not_a_url("it has no `://`"));
        };
        let name = name.to_ascii_lowercase();
        let mut faults = Vec::new();
        let (scheme, secure) = Scheme::named(&name).unwrap_or_else(|| {
            faults.push(format!(
                "the scheme is `{}`, not `redis`, `redis+sentinel` or `redis+cluster`, nor one of them with `rediss` (TLS)",
                name.escape_debug()
            ));
            (Scheme::Servers, false)
        });
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        // What follows the hosts is the same whatever they are.
        let rest = Url::parse(&format!("redis://host{rest}")).map_err(|error| not_a_url(&error.to_string()))?;
        // A password with one of these characters in it ends there, and its rest is taken for something else.
        let spilled = rest.path().contains('@')
            || rest.fragment().is_some_and(|fragment| fragment.contains('@'))
            || rest.query_pairs().any(|(name, _)| name.contains('@'));
        if spilled {
            let why = "a `/`, `?`, `#` or `@` in user or password must be percent-encoded";
            return Err(Error::new(ErrorKind::BadUrl, why).about(format!("{what} `{name}:`")).with_hint(form(scheme)));
        }
        let parts = Parts::read(scheme, &name, authority, rest.path(), &mut faults);
        let mut settings = Settings {
            place: parts.place,
            login: parts.login,
            sentinel_login: None,
            database: parts.database,
            tls: secure.then_some(Tls::Public),
            prefix: prefix.to_owned(),
            timeout: TIMEOUT,
            eviction: Eviction::Refuse,
            what,
            label: parts.label,
            wait_replicas: 0,
        };
        let mut seen = Vec::new();
        for (name, value) in rest.query_pairs() {
            if seen.contains(&name) {
                faults.push(format!("`{name}` is given twice"));
                continue;
            }
            match settings.set(scheme, &name, &value).or_else(|| take(&name, &value)) {
                Some(Ok(())) => {}
                Some(Err(fault)) => faults.push(fault),
                // Its value may be a password that was put in the wrong place.
                None => {
                    faults.push(format!("`{name}` is no option; there are {}", [known, OPTIONS].concat().join(", ")))
                }
            }
            seen.push(name);
        }
        if settings.sentinel_login.as_ref().is_some_and(|login| login.password.is_empty()) {
            faults.push("it has a `sentinel_user` and no `sentinel_password`".to_owned());
        }
        if settings.wait_replicas > 0 && settings.timeout < WAIT_TIMEOUT_MIN {
            faults.push(format!(
                "`timeout` is {} ms, too short for `wait_replicas`, which needs at least {} ms",
                settings.timeout.as_millis(),
                WAIT_TIMEOUT_MIN.as_millis()
            ));
        }
        if rest.fragment().is_some() {
            faults.push("it has a `#`, which must be written as `%23` in a password or an option".to_owned());
        }
        if faults.is_empty() {
            return Ok(settings);
        }
        Err(Error::new(ErrorKind::BadUrl, faults.join("; ")).about(settings.subject()).with_hint(form(scheme)))
    }

    /// Names what the URL is of, in errors.
    #[must_use]
    pub fn subject(&self) -> String {
        format!("{} `{}`", self.what, self.label)
    }

    /// Which replicas must have a write before it counts.
    pub(crate) fn replicas(&self) -> Option<Replicas> {
        let at_most = self.timeout / WAIT_SHARE;
        (self.wait_replicas > 0).then_some(Replicas { count: self.wait_replicas, at_most })
    }

    /// Sets an option; nothing for one that is unknown.
    fn set(&mut self, scheme: Scheme, name: &str, value: &str) -> Option<Result<(), String>> {
        Some(match name {
            "prefix" if value.len() <= PREFIX_MAX && !value.contains(char::is_control) => {
                self.prefix = value.to_owned();
                Ok(())
            }
            "prefix" => Err(format!("`prefix` must have at most {PREFIX_MAX} bytes and no control characters")),
            "timeout" => units::duration(value)
                .ok()
                .filter(|timeout| (TIMEOUT_MIN..=TIMEOUT_MAX).contains(timeout))
                .map(|timeout| self.timeout = timeout)
                .ok_or_else(|| format!("`timeout` is `{value}`, not a time from `10ms` to `60s`")),
            "eviction" => match value {
                "accept" => Ok(Eviction::Accept),
                "refuse" => Ok(Eviction::Refuse),
                _ => Err(format!("`eviction` is `{value}`, not `refuse` or `accept`")),
            }
            .map(|eviction| self.eviction = eviction),
            "wait_replicas" => value
                .parse()
                .ok()
                .filter(|count| *count <= WAIT_REPLICAS_MAX)
                .map(|count| self.wait_replicas = count)
                .ok_or_else(|| format!("`wait_replicas` is `{value}`, not a number from 0 to {WAIT_REPLICAS_MAX}")),
            "ca" if self.tls.is_none() => Err("`ca` needs TLS: begin the URL with `rediss:`".to_owned()),
            "ca" => certificates(Path::new(value)).map(|pem| self.tls = Some(Tls::Private(pem))),
            "sentinel_user" | "sentinel_password" if scheme != Scheme::Sentinel => {
                Err(format!("`{name}` needs a URL that begins with `redis+sentinel:`"))
            }
            "sentinel_user" => {
                self.sentinel_login().user = Some(value.to_owned());
                Ok(())
            }
            "sentinel_password" => {
                self.sentinel_login().password = value.to_owned();
                Ok(())
            }
            _ => return None,
        })
    }
}

impl Settings {
    fn sentinel_login(&mut self) -> &mut Login {
        self.sentinel_login.get_or_insert_with(|| Login { user: None, password: String::new() })
    }
}

fn form(scheme: Scheme, options: &str) -> String {
    let further = if options.is_empty() { String::new() } else { format!(", with further options as in `{options}`") };
    format!("write it as `{}`{further}", scheme.form())
}

fn certificates(path: &Path) -> Result<Vec<u8>, String> {
    let pem = std::fs::read(path).map_err(|error| format!("`ca` names `{}`: {error}", path.display()))?;
    if String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
        Ok(pem)
    } else {
        Err(format!("`ca` names `{}`, which holds no certificate in PEM form", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Address;

    fn refused(url: &str) -> Error {
        let Err(error) = Settings::read(
            url,
            Further { what: "store", known: &[], prefix: "taskonce:", form: "", take: &mut |_, _| None },
        ) else {
            panic!("`{url}` was taken")
        };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        error
    }

    fn read(url: &str) -> Settings {
        Settings::read(
            url,
            Further { what: "store", known: &[], prefix: "taskonce:", form: "", take: &mut |_, _| None },
        )
        .unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    fn at(host: &str, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    #[test]
    fn a_full_url_is_read() {
        let settings =
            read("redis://ada:p%40ss@example.org:7000/3?prefix=a%3A&timeout=2s&eviction=accept&wait_replicas=2");
        assert_eq!(settings.place, Place::Servers(vec![at("example.org", 7000)]));
        let login = settings.login.unwrap();
        assert_eq!((settings.database, login.user.as_deref(), login.password.as_str()), (3, Some("ada"), "p@ss"));
        assert_eq!((settings.prefix.as_str(), settings.timeout), ("a:", Duration::from_secs(2)));
        assert!(settings.eviction == Eviction::Accept);
        assert_eq!(settings.wait_replicas, 2);
        assert_eq!(settings.label, "redis://example.org:7000/3");
    }

    #[test]
    fn a_short_url_has_the_defaults() {
        let settings = read("redis://[::1]");
        assert_eq!((&settings.place, settings.database), (&Place::Servers(vec![at("::1", 6379)]), 0));
        assert_eq!((settings.prefix.as_str(), settings.timeout), ("taskonce:", TIMEOUT));
        assert!(settings.eviction == Eviction::Refuse && settings.tls.is_none() && settings.login.is_none());
        assert!(settings.replicas().is_none());
        assert_eq!(settings.label, "redis://[::1]:6379/0");
    }

    #[test]
    fn several_hosts_are_read() {
        let settings = read("rediss://:p%2Cw@a,[::2]:7,c:8/1");
        assert_eq!(settings.place, Place::Servers(vec![at("a", 6379), at("::2", 7), at("c", 8)]));
        assert_eq!(settings.login.unwrap().password, "p,w");
        assert!(settings.tls.is_some());
        assert_eq!(settings.label, "rediss://a:6379,[::2]:7,c:8/1");
    }

    #[test]
    fn a_sentinel_url_is_read() {
        let url = "redis+sentinel://ada:a@s1,s2:7/my%20tasks/2?sentinel_user=bob&sentinel_password=b%26";
        let settings = read(url);
        let sentinels = vec![at("s1", 26379), at("s2", 7)];
        assert_eq!(settings.place, Place::Sentinel { sentinels, service: "my tasks".into() });
        let (login, theirs) = (settings.login.unwrap(), settings.sentinel_login.unwrap());
        assert_eq!((login.user.as_deref(), login.password.as_str()), (Some("ada"), "a"));
        assert_eq!((theirs.user.as_deref(), theirs.password.as_str()), (Some("bob"), "b&"));
        assert_eq!(settings.label, "redis+sentinel://s1:26379,s2:7/my tasks/2");
    }

    #[test]
    fn a_cluster_url_is_read() {
        let settings = read("rediss+cluster://:pw@a:7000,b/?prefix=p");
        assert_eq!(settings.place, Place::Cluster(vec![at("a", 7000), at("b", 6379)]));
        assert!(settings.tls.is_some() && settings.label == "rediss+cluster://a:7000,b:6379");
    }

    #[test]
    fn every_contradiction_is_named_at_once_in_every_form() {
        let cases: [(&str, &[&str]); 4] = [
            (
                "redis+cluster://h,h/3?sentinel_user=a&timeout=x",
                &["`h:6379` twice", "`3`", "`sentinel_user`", "`timeout`"],
            ),
            (
                "redis+sentinel://h:0,?sentinel_user=a",
                &["the port of `h` is 0", "no host", "no service", "no `sentinel_password`"],
            ),
            ("redis+sentinel://ada@h/s/x", &["a user and no password", "`x` is no database"]),
            ("redis://a:b,c d?sentinel_password=hunter2", &["a host is wrong", "`sentinel_password`"]),
        ];
        for (url, parts) in cases {
            let text = format!("{:?}", refused(url));
            for part in parts {
                assert!(text.contains(part), "{part} in {text}");
            }
            assert!(!text.contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn everything_wrong_is_said_at_once_and_never_a_password() {
        let error = refused(
            "redis://ada:hunter2@h/x?timeout=soon&evict=yes&eviction=no&wait_replicas=17&ca=f&secret=hunter2&prefix=a&prefix=b",
        );
        let text = format!("{error:?}");
        for part in [
            "`x`",
            "`timeout`",
            "`evict`",
            "`eviction`",
            "`wait_replicas` is",
            "`ca`",
            "`secret`",
            "given twice",
            "redis://[",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("hunter2"), "{text}");
    }

    #[test]
    fn a_time_too_short_to_wait_for_replicas_is_refused_and_both_options_are_named() {
        for url in ["redis://h?timeout=499ms&wait_replicas=1", "redis+cluster://h?wait_replicas=2&timeout=10ms"] {
            let text = refused(url).to_string();
            assert!(
                text.contains("`timeout` is") && text.contains("`wait_replicas`") && text.contains("500 ms"),
                "{text}"
            );
        }
        let [wait, slack] = [read("redis://h?wait_replicas=1").replicas().unwrap().at_most, crate::pipe::WAIT_SLACK];
        assert!(
            2 * (wait + slack) < WAIT_TIMEOUT_MIN,
            "{wait:?}: a call that sits out another's wait has time for its own"
        );
        read("redis://h?timeout=10ms&wait_replicas=0");
    }

    #[test]
    fn a_password_with_a_slash_is_not_shown_in_part() {
        for url in ["redis://ada:12/34@h", "redis://ada:12?34@h", "redis+sentinel://ada:12#34@h/s"] {
            let text = format!("{:?}", refused(url));
            assert!(text.contains("percent-encoded") && !text.contains("12") && !text.contains("34"), "{text}");
        }
    }

    #[test]
    fn odd_urls_are_refused() {
        for url in [
            "",
            "localhost:6379",
            "http://h",
            "redis://",
            "redis://h/-1",
            "redis://ada@h",
            "redis://h?timeout=1ms",
            "redis://h:99999",
            "redis://:a#b@h",
            "rediss://h?ca=/no/such/file",
            "redis://a,,b",
            "redis+sentinel://h",
            "redis+cluster://",
            "redis+sentinel:",
            "sqlite://h",
        ] {
            refused(url);
        }
    }
}
