//! How a queue is opened: `QueueOptions`, with their defaults, and the URL that tells them.

use std::path::PathBuf;
use std::time::Duration;

use taskonce_core::error::Result;
use taskonce_core::units;
use taskonce_sqlite_file::Options;
use taskonce_sqlite_file::url::{self, Further};

/// How long a delivery is its receiver's alone, unless said otherwise: as long as the default lease of a claim, so that a
/// killed worker's tasks are delivered again when their leases have passed.
pub const VISIBILITY_DEFAULT: Duration = Duration::from_secs(30);
/// The shortest and the longest visibility timeout that a URL may set.
const VISIBILITY_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(86_400);
/// The name of a source whose URL gives none.
pub const NAME_DEFAULT: &str = "queue";
/// The longest name, in bytes.
const NAME_MAX: usize = 64;

/// How a queue is opened.
#[derive(Clone)]
pub struct QueueOptions {
    /// The source's name, one half of a route. Default [`NAME_DEFAULT`].
    pub name: String,
    /// How long a delivery is its receiver's alone. Default [`VISIBILITY_DEFAULT`].
    pub visibility: Duration,
    /// How the file is opened: when a write counts as stored, the longest that a call takes, the largest file, the clock.
    pub file: Options,
}

impl Default for QueueOptions {
    fn default() -> QueueOptions {
        QueueOptions { name: NAME_DEFAULT.to_owned(), visibility: VISIBILITY_DEFAULT, file: Options::default() }
    }
}

/// Reads `sqlite:queue.db?visibility=30s&name=queue`, with the options of a file: `synchronous`, `timeout`.
pub(crate) fn parse(url: &str) -> Result<(PathBuf, QueueOptions)> {
    let mut options = QueueOptions::default();
    let mut take = |name: &str, value: &str| match name {
        "visibility" => Some(match units::duration(value).ok() {
            Some(visibility) if VISIBILITY_RANGE.contains(&visibility) => {
                options.visibility = visibility;
                Ok(())
            }
            Some(_) => Err(format!("option `visibility` is `{value}`; 500ms to 24h is allowed")),
            None => Err(format!("option `visibility` is `{value}`; a number with `ms`, `s`, `m` or `h` is needed")),
        }),
        "name" => Some(if is_name(value) {
            options.name = value.to_owned();
            Ok(())
        } else {
            Err(format!("option `name` is `{value}`; 1 to {NAME_MAX} letters, digits, `.`, `_` and `-` are needed"))
        }),
        _ => None,
    };
    let further = Further { what: "source", known: "`visibility=30s`, `name=queue`", take: &mut take };
    let (path, file) = url::parse(url, further)?;
    Ok((path, QueueOptions { file, ..options }))
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= NAME_MAX
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use taskonce_core::ErrorKind;
    use taskonce_sqlite_file::Synchronous;

    use super::*;

    #[test]
    fn a_url_tells_the_options_of_the_queue_and_of_its_file() {
        let (path, options) = parse("sqlite:/a/q.db?visibility=90s&name=orders&synchronous=normal&timeout=1s").unwrap();
        assert_eq!(path, Path::new("/a/q.db"));
        assert_eq!((options.visibility, options.name.as_str()), (Duration::from_secs(90), "orders"));
        assert_eq!((options.file.synchronous, options.file.timeout), (Synchronous::Normal, Duration::from_secs(1)));
        let (_, options) = parse("sqlite:q.db").unwrap();
        assert_eq!((options.visibility, options.name.as_str()), (VISIBILITY_DEFAULT, NAME_DEFAULT));
    }

    #[test]
    fn everything_wrong_with_a_url_is_told_at_once() {
        let Err(error) = parse("sqlite:?visibility=1ms&name=a%20b&sync=1&timeout=5&visibility=2s") else {
            panic!("it must be refused")
        };
        assert_eq!(error.kind(), ErrorKind::BadUrl);
        let text = error.to_string();
        for part in [
            "source `sqlite:",
            "names no file",
            "`visibility` is `1ms`",
            "`name` is `a b`",
            "`sync` is unknown",
            "`timeout` is `5`",
            "given twice",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.hint().contains("`visibility=30s`") && error.hint().contains("`timeout=2s`"), "{}", error.hint());
    }
}
