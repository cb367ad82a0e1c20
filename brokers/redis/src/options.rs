//! How a queue is opened: the URL of the servers, with the options of a queue.

use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::units;
use taskonce_redis_wire::url::{Further, Settings};

/// How long a delivery is its receiver's alone, unless said otherwise: as long as the default lease of a claim, so that a
/// killed worker's tasks are delivered again when their leases have passed.
pub const VISIBILITY_DEFAULT: Duration = Duration::from_secs(30);
/// The shortest and the longest visibility timeout that a URL may set.
const VISIBILITY_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(86_400);
/// The name of a source whose URL gives none.
pub const NAME_DEFAULT: &str = "queue";
/// The longest name, in bytes.
const NAME_MAX: usize = 64;
/// What every key begins with, unless the URL says otherwise. Not as the ledger's, whose walks then pass over the queue.
pub const PREFIX_DEFAULT: &str = "taskonce-queue:";

/// What the URL says of the queue.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) name: String,
    pub(crate) visibility: Duration,
}

/// Reads `redis://host:6379/0?visibility=30s&name=queue`, with the options of servers: `prefix`, `timeout`, `eviction`, ….
pub(crate) fn parse(url: &str) -> Result<(Settings, Options)> {
    let mut options = Options { name: NAME_DEFAULT.to_owned(), visibility: VISIBILITY_DEFAULT };
    let mut take = |name: &str, value: &str| match name {
        "visibility" => Some(match units::duration(value).ok() {
            Some(visibility) if VISIBILITY_RANGE.contains(&visibility) => {
                options.visibility = visibility;
                Ok(())
            }
            Some(_) | None => Err(format!("`visibility` is `{value}`, not a time from `500ms` to `24h`")),
        }),
        "name" => Some(if is_name(value) {
            options.name = value.to_owned();
            Ok(())
        } else {
            Err(format!("`name` is `{value}`, not 1 to {NAME_MAX} letters, digits, `.`, `_` and `-`"))
        }),
        _ => None,
    };
    let further = Further {
        what: "source",
        known: &["`name`", "`visibility`"],
        prefix: PREFIX_DEFAULT,
        form: "?name=queue&visibility=30s",
        take: &mut take,
    };
    let settings = Settings::read(url, further)?;
    // Braces say which part of a key decides where it lies: empty ones, that the whole does, and keys of one handler part.
    if settings.prefix.contains("{}") || settings.prefix.starts_with('}') {
        return Err(Error::new(ErrorKind::BadUrl, "`prefix` has `{}` in it, which would part the keys of one handler")
            .about(settings.subject())
            .with_hint("leave the braces out, or put a word between them"));
    }
    Ok((settings, options))
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= NAME_MAX
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_tells_the_options_of_the_queue_and_of_its_servers() {
        let (settings, options) =
            parse("redis://h:7/3?visibility=90s&name=orders&prefix=a%3A&timeout=2s").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((options.visibility, options.name.as_str()), (Duration::from_secs(90), "orders"));
        assert_eq!((settings.prefix.as_str(), settings.timeout), ("a:", Duration::from_secs(2)));
        let (settings, options) = parse("redis+cluster://h").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((options.visibility, options.name.as_str()), (VISIBILITY_DEFAULT, NAME_DEFAULT));
        assert_eq!(settings.prefix, PREFIX_DEFAULT);
    }

    #[test]
    fn everything_wrong_with_a_url_is_told_at_once() {
        let Err(error) = parse("redis://h/x?visibility=1ms&name=a%20b&wait=1&timeout=soon&visibility=2s") else {
            panic!("it must be refused")
        };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        let text = error.to_string();
        for part in
            ["source `redis:", "`x`", "`visibility` is `1ms`", "`name` is `a b`", "`wait`", "`timeout`", "twice"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(error.hint().contains("visibility=30s"), "{}", error.hint());
        let Err(error) = parse("redis://h?prefix=%7B%7D") else { panic!("it must be refused") };
        assert!(error.to_string().contains("`prefix`"), "{error}");
    }
}
