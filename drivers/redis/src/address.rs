//! The address of a server: as a URL names it, and as servers tell of one another.

use std::fmt;

use url::Url;

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// A name, or an IP address without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
}

impl Address {
    /// Reads `host[:port]`, an IPv6 address in brackets.
    pub fn read(text: &str, default_port: u16) -> Result<Address, String> {
        let whole = match text.is_empty() {
            false => Url::parse(&format!("redis://{text}")).map_err(|error| format!("a host is wrong: {error}"))?,
            true => return Err("it names no host".to_owned()),
        };
        let host = whole.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        match (host.is_empty(), whole.port().unwrap_or(default_port)) {
            (true, _) => Err("it names no host".to_owned()),
            (false, 0) => Err(format!("the port of `{host}` is 0")),
            (false, port) => Ok(Address { host, port }),
        }
    }

    /// Reads `host:port` as a redirection tells it. Where it leaves the host out, it means that of the one that was
    /// asked.
    pub fn told(text: &str, asked: &Address) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        Some(Address::of(host, port.parse().ok()?, asked))
    }

    /// The same of a host and a port.
    pub fn of(host: &str, port: u16, asked: &Address) -> Address {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let host = if matches!(host, "" | "?") { &asked.host } else { host };
        Address { host: host.to_owned(), port }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Several addresses, one after another.
pub fn list(addresses: &[Address]) -> String {
    addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_shown() {
        for (text, shown) in [("h", "h:6379"), ("h:1", "h:1"), ("[::1]", "[::1]:6379"), ("[::1]:7", "[::1]:7")] {
            assert_eq!(Address::read(text, 6379).unwrap().to_string(), shown);
        }
        for text in ["", ":1", "h:0", "h:x", "h:99999", "a b", "::1", "[::1"] {
            assert!(Address::read(text, 6379).is_err(), "{text}");
        }
    }

    #[test]
    fn a_redirection_without_a_host_means_the_one_that_was_asked() {
        let asked = Address { host: "asked".into(), port: 1 };
        for (text, shown) in [(":7", "asked:7"), ("?:7", "asked:7"), ("a.b:7", "a.b:7"), ("::1:7", "[::1]:7")] {
            assert_eq!(Address::told(text, &asked).unwrap().to_string(), shown);
        }
        assert_eq!(Address::told("nothing", &asked), None);
        assert_eq!(Address::told("a:x", &asked), None);
    }
}
