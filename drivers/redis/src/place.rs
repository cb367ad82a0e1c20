//! Where a URL says that the records are: servers, the Sentinels that know the server, or the nodes of a Cluster.

use percent_encoding::percent_decode_str;

use crate::address::{Address, list};

/// The ports of Redis and of Sentinel.
const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
/// How many hosts a URL may name.
const HOSTS_MAX: usize = 32;

/// Where the records are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On one of these servers, which replicate one another: on the one that is the primary.
    Servers(Vec<Address>),
    /// On the server that these Sentinels name as the primary of this service.
    Sentinel {
        /// The Sentinels.
        sentinels: Vec<Address>,
        /// By which they know the primary.
        service: String,
    },
    /// On the nodes of a Cluster, which are found by asking some of them.
    Cluster(Vec<Address>),
}

/// User and password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: String,
}

/// How a URL is written, by its scheme.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    Servers,
    Sentinel,
    Cluster,
}

impl Scheme {
    /// The scheme of this name, and whether it is with TLS.
    pub(crate) fn named(name: &str) -> Option<(Scheme, bool)> {
        Some(match name {
            "redis" => (Scheme::Servers, false),
            "rediss" => (Scheme::Servers, true),
            "redis+sentinel" => (Scheme::Sentinel, false),
            "rediss+sentinel" => (Scheme::Sentinel, true),
            "redis+cluster" => (Scheme::Cluster, false),
            "rediss+cluster" => (Scheme::Cluster, true),
            _ => return None,
        })
    }

    /// How such a URL is written.
    pub(crate) fn form(self) -> &'static str {
        match self {
            Scheme::Servers => {
                "redis://[user[:password]@]host[:port][,host[:port]…][/database]\
                 [?prefix=taskonce:&timeout=500ms&eviction=accept]"
            }
            Scheme::Sentinel => {
                "redis+sentinel://[user:password@]sentinel[:26379][,sentinel…]/SERVICE[/database]\
                 [?sentinel_user=…&sentinel_password=…&timeout=500ms]"
            }
            Scheme::Cluster => {
                "redis+cluster://[user:password@]node[:port][,node[:port]…][?prefix=taskonce:&timeout=500ms]"
            }
        }
    }
}

/// What stands before the options, taken apart.
pub(crate) struct Parts {
    pub(crate) place: Place,
    pub(crate) login: Option<Login>,
    pub(crate) database: i64,
    /// The same without user and password, to name the store in errors.
    pub(crate) label: String,
}

impl Parts {
    /// Reads what is between `scheme://` and the options, and adds what is wrong with it to `faults`.
    pub(crate) fn read(scheme: Scheme, name: &str, authority: &str, path: &str, faults: &mut Vec<String>) -> Parts {
        let (user_info, hosts) = match authority.rsplit_once('@') {
            Some((user_info, hosts)) => (user_info, hosts),
            None => ("", authority),
        };
        let login = login(user_info, faults);
        let hosts = addresses(hosts, if scheme == Scheme::Sentinel { SENTINEL_PORT } else { PORT }, faults);
        let path = path.trim_start_matches('/');
        let shown = list(&hosts);
        match scheme {
            Scheme::Servers => {
                let database = number(path, faults);
                let label = format!("{name}://{shown}/{database}");
                Parts { place: Place::Servers(hosts), login, database, label }
            }
            Scheme::Sentinel => {
                let (service, database) = path.split_once('/').unwrap_or((path, ""));
                let (service, database) = (decode(service), number(database, faults));
                if service.is_empty() {
                    faults.push("it names no service, which the Sentinels know the primary by".to_owned());
                }
                let label = format!("{name}://{shown}/{service}/{database}");
                Parts { place: Place::Sentinel { sentinels: hosts, service }, login, database, label }
            }
            Scheme::Cluster => {
                if !matches!(path, "" | "0") {
                    faults.push(format!("it names `{path}`, and a Cluster has no databases"));
                }
                Parts { label: format!("{name}://{shown}"), place: Place::Cluster(hosts), login, database: 0 }
            }
        }
    }
}

fn login(user_info: &str, faults: &mut Vec<String>) -> Option<Login> {
    let (user, password) = match user_info.split_once(':') {
        Some((user, password)) => (decode(user), Some(decode(password))),
        None => (decode(user_info), None),
    };
    let user = Some(user).filter(|user| !user.is_empty());
    match (user, password.filter(|password| !password.is_empty())) {
        (user, Some(password)) => Some(Login { user, password }),
        (Some(_), None) => {
            faults.push("it names a user and no password".to_owned());
            None
        }
        (None, None) => None,
    }
}

fn addresses(hosts: &str, port: u16, faults: &mut Vec<String>) -> Vec<Address> {
    let mut addresses: Vec<Address> = Vec::new();
    for text in hosts.split(',').take(HOSTS_MAX + 1) {
        match Address::read(text, port) {
            Ok(address) if addresses.contains(&address) => faults.push(format!("it names `{address}` twice")),
            Ok(address) => addresses.push(address),
            Err(fault) if faults.contains(&fault) => {}
            Err(fault) => faults.push(fault),
        }
    }
    if addresses.len() > HOSTS_MAX {
        faults.push(format!("it names more than {HOSTS_MAX} hosts"));
    }
    addresses
}

fn number(text: &str, faults: &mut Vec<String>) -> i64 {
    match text {
        "" => 0,
        number => number.parse().ok().filter(|number| *number >= 0).unwrap_or_else(|| {
            faults.push(format!("`{number}` is no database number"));
            0
        }),
    }
}

pub(crate) fn decode(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}
