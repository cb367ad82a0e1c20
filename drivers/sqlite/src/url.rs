//! A file's URL as path and options: `sqlite:tasks.db?synchronous=normal&timeout=500ms`, and further ones of its content.

use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::units;

use crate::options::{Options, Synchronous};

/// The options that every URL may have.
const KNOWN: &str = "`synchronous=full|normal`, `timeout=2s`";

/// The shortest and the longest `timeout`.
const TIMEOUT_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// Reads an option of the content's own: nothing for one that it does not know, else what is wrong with it.
pub type Take<'a> = &'a mut dyn FnMut(&str, &str) -> Option<Result<(), String>>;

/// What a URL may say beyond what concerns the file.
pub struct Further<'a> {
    /// What the URL is of: `store`.
    pub what: &'a str,
    /// The further options, for people; empty where there are none.
    pub known: &'a str,
    /// Takes one.
    pub take: Take<'a>,
}

/// Reads a URL. Everything that is wrong with it is told at once.
///
/// # Errors
/// [`ErrorKind::BadUrl`].
pub fn parse(url: &str, further: Further<'_>) -> Result<(PathBuf, Options)> {
    let mut faults = Vec::new();
    let mut options = Options::default();
    let (location, query) = match url.split_once('?') {
        Some((location, query)) => (location, query),
        None => (url, ""),
    };
    let path = path_of(location).unwrap_or_else(|fault| {
        faults.push(fault);
        PathBuf::new()
    });
    let mut seen: Vec<&str> = Vec::new();
    let mut unknown = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, raw) = pair.split_once('=').unwrap_or((pair, ""));
        if seen.contains(&name) {
            faults.push(format!("option `{name}` is given twice"));
            continue;
        }
        seen.push(name);
        let Some(value) = decode(raw).and_then(|bytes| String::from_utf8(bytes).ok()) else {
            faults.push(format!("option `{name}` is not percent-encoded UTF-8"));
            continue;
        };
        match name {
            "synchronous" => match value.as_str() {
                "full" => options.synchronous = Synchronous::Full,
                "normal" => options.synchronous = Synchronous::Normal,
                _ => faults.push(format!("option `synchronous` is `{value}`; `full` or `normal` is needed")),
            },
            "timeout" => match units::duration(&value).ok() {
                Some(timeout) if TIMEOUT_RANGE.contains(&timeout) => options.timeout = timeout,
                Some(_) => faults.push(format!("option `timeout` is `{value}`; 1ms to 1h is allowed")),
                None => {
                    faults.push(format!("option `timeout` is `{value}`; a number with `ms`, `s`, `m` or `h` is needed"))
                }
            },
            _ => match (further.take)(name, &value) {
                Some(Ok(())) => {}
                Some(Err(fault)) => faults.push(fault),
                None => {
                    unknown = true;
                    faults.push(format!("option `{name}` is unknown"));
                }
            },
        }
    }
    if faults.is_empty() {
        return Ok((path, options));
    }
    let known = if further.known.is_empty() { KNOWN.to_owned() } else { format!("{}, {KNOWN}", further.known) };
    let hint = if unknown {
        format!("the options are {known}")
    } else {
        format!("write it as `sqlite:tasks.db` or `sqlite:///abs/path.db`, with the options {known}")
    };
    Err(Error::new(ErrorKind::BadUrl, faults.join("; ")).about(format!("{} `{url}`", further.what)).with_hint(hint))
}

fn path_of(location: &str) -> Result<PathBuf, String> {
    let rest = location.strip_prefix("sqlite:").ok_or("it does not begin with `sqlite:`")?;
    let raw = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(host) if !host.is_empty() => {
            return Err(format!("`{host}` after `//` would be a host; write `sqlite:{host}` or `sqlite:///{host}`"));
        }
        Some(_) | None => rest,
    };
    if raw.is_empty() || raw == "//" {
        return Err("it names no file".to_owned());
    }
    if raw == ":memory:" {
        return Err("`:memory:` is not a file; the store in memory is `memory:`".to_owned());
    }
    let bytes = decode(raw).ok_or("its path has a `%` that is not followed by two hex digits")?;
    if bytes.contains(&0) {
        return Err("its path has a zero byte".to_owned());
    }
    path_from(bytes)
}

#[cfg(unix)]
fn path_from(bytes: Vec<u8>) -> Result<PathBuf, String> {
    use std::os::unix::ffi::OsStringExt as _;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

#[cfg(not(unix))]
fn path_from(bytes: Vec<u8>) -> Result<PathBuf, String> {
    String::from_utf8(bytes).map(PathBuf::from).map_err(|_| "its path is not UTF-8".to_owned())
}

/// Percent-decodes strictly: a stray `%` is an error, never itself.
fn decode(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    let stray = bytes.iter().enumerate().any(|(at, byte)| {
        *byte == b'%' && !bytes.get(at + 1..at + 3).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    });
    if stray { None } else { Some(percent_decode_str(text).collect()) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(url: &str) -> Result<(PathBuf, Options)> {
        super::parse(url, Further { what: "store", known: "", take: &mut |_, _| None })
    }

    #[test]
    fn paths_are_relative_or_absolute_and_percent_decoded() {
        for (url, path) in [
            ("sqlite:tasks.db", "tasks.db"),
            ("sqlite:./a/tasks.db", "./a/tasks.db"),
            ("sqlite:/abs/path.db", "/abs/path.db"),
            ("sqlite:///abs/path.db", "/abs/path.db"),
            ("sqlite:a%20b%3Fc%25.db", "a b?c%.db"),
            ("sqlite:/a/%C3%BC.db?timeout=1s", "/a/ü.db"),
        ] {
            assert_eq!(parse(url).unwrap().0, Path::new(path), "{url}");
        }
    }

    #[test]
    fn options_are_read() {
        let (_, options) = parse("sqlite:a.db?synchronous=normal&timeout=500ms").unwrap();
        assert_eq!((options.synchronous, options.timeout), (Synchronous::Normal, Duration::from_millis(500)));
        let (_, options) = parse("sqlite:a.db?").unwrap();
        assert_eq!((options.synchronous, options.timeout), (Synchronous::Full, Duration::from_secs(2)));
    }

    #[test]
    fn everything_wrong_with_a_url_is_told_at_once() {
        let error = match parse("sqlite:?synchronous=off&timeout=5&sync=1&timeout=1s&cache=%zz") {
            Err(error) => error,
            Ok(_) => panic!("it must be refused"),
        };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        let text = error.to_string();
        for part in [
            "it names no file",
            "option `synchronous` is `off`",
            "option `timeout` is `5`",
            "option `sync` is unknown",
            "option `timeout` is given twice",
            "option `cache` is not percent-encoded",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.hint().contains(KNOWN), "{}", error.hint());
    }

    #[test]
    fn further_options_are_taken_and_told_beside_the_others() {
        let mut depth = String::new();
        let mut take = |name: &str, value: &str| match (name, value) {
            ("depth", "bad") => Some(Err("option `depth` is bad".to_owned())),
            ("depth", _) => {
                depth = value.to_owned();
                Some(Ok(()))
            }
            _ => None,
        };
        let mut further = |url| super::parse(url, Further { what: "pond", known: "`depth=7`", take: &mut take });
        let (path, options) = further("sqlite:a.db?depth=7&timeout=1s").unwrap();
        assert_eq!((path.as_path(), options.timeout), (Path::new("a.db"), Duration::from_secs(1)));
        let Err(error) = further("sqlite:a.db?depth=bad&width=1") else { panic!("it must be refused") };
        let text = error.to_string();
        for part in ["pond `sqlite:", "option `depth` is bad", "option `width` is unknown"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.hint().contains("`depth=7`, `synchronous"), "{}", error.hint());
        assert_eq!(depth, "7");
    }

    #[test]
    fn urls_that_name_no_file_are_refused() {
        for url in [
            "sqlite:",
            "sqlite://",
            "sqlite://tasks.db",
            "sqlite::memory:",
            "sqlite:a%0.db",
            "sqlite:a%00b",
            "redis://host",
            "sqlite:a.db?timeout=0ms",
            "sqlite:a.db?timeout=2h",
            "sqlite:a.db?timeout=99999999999999999999s",
            "sqlite:a.db?timeout=s",
        ] {
            let Err(error) = parse(url) else { panic!("{url} must be refused") };
            assert_eq!(error.kind(), ErrorKind::BadUrl, "{url}");
            assert!(!error.hint().is_empty());
        }
    }
}
