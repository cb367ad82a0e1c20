//! Which store: `--store`, then `TASKONCE_STORE`, then a SQLite file in the user's state folder.

use std::env::{self, VarError};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use taskonce::{ErrorKind, Ledger};

use crate::exit::Code;
use crate::report::{Result, Trouble};

/// The environment variable that names the store.
pub(crate) const STORE_VARIABLE: &str = "TASKONCE_STORE";

/// The URL of the chosen store.
pub(crate) fn url(chosen: Option<&str>) -> Result<String> {
    named(chosen)?.map_or_else(default_url, Ok)
}

/// The URL of the store of a table of routes: `--store`, then TASKONCE_STORE, then what the table says, then the default.
pub(crate) fn of_table(chosen: Option<&str>, table: Option<&str>) -> Result<String> {
    match (named(chosen)?, table) {
        (Some(url), _) => Ok(url),
        (None, Some(url)) => Ok(url.to_owned()),
        (None, None) => default_url(),
    }
}

/// The URL of the database that has the effects of steps. TASKONCE_STORE and the default name the ledger's.
pub(crate) fn of_effects(chosen: Option<&str>) -> Result<String> {
    chosen.map(str::to_owned).ok_or_else(|| {
        Trouble::usage(
            "`--steps` needs `--store`: the database that has the effects, not the ledger's",
            "`taskonce migrate --steps --store postgres://shop.example/shop`, or `sqlite:shop.db`",
        )
    })
}

/// A ledger over the chosen store, for what makes tasks: a SQLite file that is missing is made.
pub(crate) fn open(chosen: Option<&str>) -> Result<Ledger> {
    let url = match named(chosen)? {
        Some(url) => url,
        None => {
            make_folder(&default_file()?)?;
            default_url()?
        }
    };
    Ok(taskonce::open(&url)?)
}

/// The same for what asks about tasks or changes them: a mistyped path must not answer that a task never ran.
pub(crate) fn open_existing(chosen: Option<&str>) -> Result<Ledger> {
    let url = match named(chosen)? {
        Some(url) => url,
        None => default_url()?,
    };
    taskonce::open_existing(&url).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Trouble::new(
            Code::StoreAway,
            "no_store",
            error.to_string(),
            format!("check `{}`, from {}; `taskonce run` makes the file with the first task", shown(Some(&url)), {
                if chosen.is_some() {
                    "`--store`"
                } else if env::var_os(STORE_VARIABLE).is_some_and(|url| !url.is_empty()) {
                    STORE_VARIABLE
                } else {
                    "the default"
                }
            }),
        ),
        _ => error.into(),
    })
}

/// The URL that the option or the environment names. An empty variable counts as unset.
pub(crate) fn named(chosen: Option<&str>) -> Result<Option<String>> {
    if let Some(url) = chosen {
        return Ok(Some(url.to_owned()));
    }
    match env::var(STORE_VARIABLE) {
        Ok(url) if url.is_empty() => Ok(None),
        Ok(url) => Ok(Some(url)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Trouble::new(
            Code::Configuration,
            ErrorKind::BadUrl.name(),
            format!("{STORE_VARIABLE} is not UTF-8"),
            "percent-encode the bytes of the path, such as `sqlite:/data/%FF.db`",
        )),
    }
}

/// The URL to show to people: nothing that may be a password.
pub(crate) fn shown(chosen: Option<&str>) -> String {
    let Ok(Some(url)) = named(chosen) else {
        return default_file().map_or_else(|_| "none".to_owned(), |path| format!("sqlite:{}", path.display()));
    };
    hidden(&url)
}

/// A URL without what may be a password: no user, no options.
pub(crate) fn hidden(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    match (url.split_once("://"), url.rfind('@')) {
        (Some((scheme, _)), Some(at)) => format!("{scheme}://{}", &url[at + 1..]),
        (Some(_) | None, _) => url.to_owned(),
    }
}

/// Makes the state folder, for this user only.
fn make_folder(file: &Path) -> Result<()> {
    if let Some(folder) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| {
            Trouble::new(
                Code::Configuration,
                "state_folder",
                format!("folder `{}`: {error}", folder.display()),
                "make the folder, or name another store with `--store` or `TASKONCE_STORE`",
            )
        })?;
    }
    Ok(())
}

fn default_url() -> Result<String> {
    let file = default_file()?;
    let path = file.to_str().ok_or_else(|| {
        Trouble::new(
            Code::Configuration,
            "state_folder",
            format!("the state folder's path is not UTF-8: {}", file.display()),
            "name another store with `--store` or `TASKONCE_STORE`",
        )
    })?;
    Ok(format!("sqlite:{}", percent_encoded(path)))
}

/// `$XDG_STATE_HOME/taskonce/tasks.db`, or the same below `~/.local/state`.
fn default_file() -> Result<PathBuf> {
    // A relative path there is to be ignored, says the XDG Base Directory Specification.
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    match state {
        Some(state) => Ok(state.join("taskonce").join("tasks.db")),
        None => Err(Trouble::new(
            Code::Configuration,
            "no_store",
            "no store is named, and neither XDG_STATE_HOME nor HOME says where a default one would be",
            "pass `--store sqlite:/path/to/tasks.db`, or set TASKONCE_STORE",
        )),
    }
}

pub(crate) fn percent_encoded(path: &str) -> String {
    let mut encoded = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => encoded.push(byte.into()),
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_url_has_no_user_password_or_options() {
        assert_eq!(shown(Some("redis://ada:hunter2@h:1/2?ca=x")), "redis://h:1/2");
        assert_eq!(shown(Some("redis://ada:hun@ter/2@h:1/2")), "redis://h:1/2");
        assert_eq!(shown(Some("sqlite:a@b.db?timeout=1s")), "sqlite:a@b.db");
    }

    #[test]
    fn paths_are_percent_encoded() {
        assert_eq!(percent_encoded("/a b/ü?.db"), "/a%20b/%C3%BC%3F.db");
    }
}
