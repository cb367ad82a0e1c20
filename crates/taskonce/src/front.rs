//! What a URL says of a fast check in front of its store: `sqlite:tasks.db?front=redis://cache:6379`, taken apart.

use std::time::Duration;

use taskonce_core::{Error, ErrorKind, Result, units};

/// The shortest and the longest `front_timeout`.
const TIMEOUT_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(10);
/// What the keys of hints begin with, so that they are never taken for records: of those a Redis may hold some too.
const PREFIX: &str = "taskonce-hint:";
/// How to write it.
const FORM: &str = "write it as `…?front=redis://host:6379&front_timeout=50ms&trust_done=no`; where the front's URL has options \
                    of its own, percent-encode it whole: `front=redis%3A%2F%2Fhost%3Fprefix%3Dp%26timeout%3D1s`";

/// The schemes that a front may have.
const SCHEMES: [&str; 6] = ["redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"];

/// The front that a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Front {
    /// Its own URL.
    pub(crate) url: String,
    /// How long one of its calls may take.
    pub(crate) timeout: Option<Duration>,
    /// Whether a hint that says Done is the answer.
    pub(crate) trust: Trust,
}

/// Whether a hint that says Done is the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    Verify,
    Trust,
}

/// Takes the options of a front out of a store's URL.
///
/// A front's URL may stand there as it is, if it has no options; `://` tells that it is plain. Otherwise it is
/// percent-encoded as a whole.
///
/// # Errors
/// [`ErrorKind::BadUrl`] with everything that is wrong with these options. It shows no value, which may hold a password.
pub(crate) fn split(url: &str) -> Result<(String, Option<Front>)> {
    let Some((location, query)) = url.split_once('?') else { return Ok((url.to_owned(), None)) };
    let (mut front, mut timeout, mut trust) = (None, None, None);
    let (mut rest, mut faults) = (Vec::new(), Vec::new());
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let twice = match name {
            "front" => front.replace(front_url(value, &mut faults)).is_some(),
            "front_timeout" => {
                let read = units::duration(value).ok().filter(|timeout| TIMEOUT_RANGE.contains(timeout));
                if read.is_none() {
                    faults.push("option `front_timeout` is no time from `1ms` to `10s`".to_owned());
                }
                timeout.replace(read.unwrap_or_default()).is_some()
            }
            "trust_done" => {
                let read = match value {
                    "yes" => Trust::Trust,
                    "no" => Trust::Verify,
                    _ => {
                        faults.push("option `trust_done` is neither `yes` nor `no`".to_owned());
                        Trust::Verify
                    }
                };
                trust.replace(read).is_some()
            }
            _ => {
                rest.push(pair);
                false
            }
        };
        if twice {
            faults.push(format!("option `{name}` is given twice"));
        }
    }
    if front.is_none() {
        let lonely = [("front_timeout", timeout.is_some()), ("trust_done", trust.is_some())];
        for (name, _) in lonely.iter().filter(|(_, given)| *given) {
            faults.push(format!("option `{name}` needs the option `front`"));
        }
    }
    if !faults.is_empty() {
        let scheme = location.split_once(':').map_or("", |(scheme, _)| scheme);
        return Err(Error::new(ErrorKind::BadUrl, faults.join("; "))
            .about(format!("store `{}:`", scheme.escape_debug()))
            .with_hint(FORM));
    }
    let ledger = if rest.is_empty() { location.to_owned() } else { format!("{location}?{}", rest.join("&")) };
    let front = front.map(|url| Front { url, timeout, trust: trust.unwrap_or(Trust::Verify) });
    Ok((ledger, front))
}

/// The front's own URL, with what suits a front where it says nothing of it: a prefix of its own, and that hints may be
/// evicted.
fn front_url(value: &str, faults: &mut Vec<String>) -> String {
    let url = if value.contains("://") {
        if value.contains('?') {
            faults.push("the URL in `front` has options and is not percent-encoded".to_owned());
        }
        value.to_owned()
    } else {
        let Some(url) = decode(value) else {
            faults.push("option `front` is not percent-encoded UTF-8".to_owned());
            return String::new();
        };
        url
    };
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme).to_ascii_lowercase();
    if !SCHEMES.contains(&scheme.as_str()) {
        faults.push(format!("option `front` is no URL of a front; its scheme is one of {}", SCHEMES.join(", ")));
    }
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let has = |name: &str| query.split('&').any(|pair| pair.split('=').next() == Some(name));
    let missing: Vec<String> = [("prefix", PREFIX), ("eviction", "accept")]
        .into_iter()
        .filter(|(name, _)| !has(name))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    if missing.is_empty() {
        return url;
    }
    let joint = if query.is_empty() && !url.contains('?') { "?" } else { "&" };
    format!("{url}{joint}{}", missing.join("&"))
}

/// Percent-decodes strictly: a stray `%` is an error, never itself.
fn decode(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(url: &str) -> Front {
        split(url).unwrap_or_else(|error| panic!("{url}: {error}")).1.unwrap_or_else(|| panic!("{url} has a front"))
    }

    #[test]
    fn a_front_is_taken_out_of_the_url() {
        let (ledger, front) =
            split("sqlite:a.db?timeout=1s&front=redis://:p%40w@h:7/1&front_timeout=20ms&trust_done=yes&x=y").unwrap();
        assert_eq!(ledger, "sqlite:a.db?timeout=1s&x=y");
        let front = front.unwrap();
        assert_eq!(front.url, "redis://:p%40w@h:7/1?prefix=taskonce-hint:&eviction=accept");
        assert_eq!((front.timeout, front.trust), (Some(Duration::from_millis(20)), Trust::Trust));
    }

    #[test]
    fn a_url_without_a_front_stays_as_it_is() {
        for url in ["memory:", "sqlite:a.db", "sqlite:a.db?", "sqlite:a.db?timeout=1s", "redis://h?prefix=front%3D"] {
            assert_eq!(split(url).unwrap(), (url.to_owned(), None));
        }
    }

    #[test]
    fn a_front_with_options_is_percent_encoded() {
        let encoded = "redis%3A%2F%2F%3Ap%2540w%40h%3A7%3Fprefix%3Dp%26timeout%3D1s";
        assert_eq!(
            front(&format!("sqlite:a.db?front={encoded}")).url,
            "redis://:p%40w@h:7?prefix=p&timeout=1s&eviction=accept"
        );
        let plain = front("sqlite:a.db?front=redis+cluster://a:1,b:2");
        assert_eq!(plain.url, "redis+cluster://a:1,b:2?prefix=taskonce-hint:&eviction=accept");
        assert_eq!((plain.timeout, plain.trust), (None, Trust::Verify));
    }

    #[test]
    fn everything_wrong_with_a_front_is_told_at_once_and_no_password() {
        let error = split("sqlite:a.db?front=redis://:hunter2@h?a=b&front_timeout=soon&trust_done=maybe&trust_done=no")
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        let text = format!("{error:?}");
        for part in ["not percent-encoded", "`front_timeout`", "neither `yes` nor `no`", "`trust_done` is given twice"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("hunter2"), "{text}");
        for url in [
            "sqlite:a.db?front=",
            "sqlite:a.db?front=sqlite:b.db",
            "sqlite:a.db?front=postgres://h",
            "sqlite:a.db?front=redis%3",
            "sqlite:a.db?front=redis%zz",
            "sqlite:a.db?trust_done=yes",
            "sqlite:a.db?front_timeout=1s",
            "sqlite:a.db?front=redis://h&front_timeout=11s",
        ] {
            assert_eq!(split(url).map(drop).unwrap_err().kind(), ErrorKind::BadUrl, "{url}");
        }
    }
}
