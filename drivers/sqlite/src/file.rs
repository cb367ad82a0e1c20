//! A file as a process has it open: `File`, whose threads end with it.

use std::path::Path;
use std::sync::Arc;

use taskonce_core::error::{ErrorKind, Result};

use crate::Content;
use crate::connect::{Purpose, Turn, check_library, connect, is_read_only, prepare};
use crate::fault::about;
use crate::host;
use crate::live::Live;
use crate::options::Options;

/// An open file. Its threads end when it is dropped.
pub struct File<C: Content> {
    /// Of the process that opened it; that of a forked child hangs on it.
    opened: Arc<Live<C>>,
}

impl<C: Content> File<C> {
    /// Opens a file, and makes it if there is none. Its folder must exist.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] where the folder is missing or the file cannot be opened, [`ErrorKind::ReadOnly`],
    /// [`ErrorKind::Corrupt`] for a file that is no database, [`ErrorKind::BadUrl`] for what is no file and for another
    /// program's database (it is left as it is), [`ErrorKind::NewerSchema`], [`ErrorKind::Unsupported`] for a SQLite that loses commits.
    pub fn open(path: &Path, options: Options) -> Result<File<C>> {
        check_library()?;
        // Absolute, so that a later change of the working folder changes nothing.
        let path = std::path::absolute(path)
            .map_err(|error| about(path, ErrorKind::BadUrl, format!("this is no path: {error}")).with_source(error))?;
        let folder = host::folder(&path);
        if !folder.is_dir() {
            return Err(about(
                &path,
                ErrorKind::Unreachable,
                format!("the folder `{}` does not exist", folder.display()),
            )
            .with_hint(format!("make it first: mkdir -p '{}'", folder.display())));
        }
        if path.is_dir() {
            return Err(about(&path, ErrorKind::BadUrl, "this is a folder").with_hint("name a file in it"));
        }
        if let Some(name) = host::no_file(&path) {
            let message = format!("this is {name}, and a {} needs a file", C::KIND.noun);
            return Err(
                about(&path, ErrorKind::BadUrl, message).with_hint("name a file, or a path where one can be made")
            );
        }
        let turn = Turn::new(options.timeout);
        let conn = connect(C::KIND, &path, &options, Purpose::Open, &turn)?;
        prepare(C::KIND, &conn, &path, &options)?;
        // Where this user may only read, every write asks again, and is refused until that changes.
        let writer = if is_read_only(&conn, &path)? { None } else { Some(conn) };
        Ok(File { opened: Live::new(path, options, writer, turn) })
    }

    /// As this process has it, which may have been forked since.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] in a child that was forked while the file was in use.
    pub fn current(&self) -> Result<&Arc<Live<C>>> {
        self.opened.current()
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.opened.path()
    }

    /// How it was opened.
    #[must_use]
    pub fn options(&self) -> &Options {
        self.opened.options()
    }
}

impl<C: Content> Drop for File<C> {
    fn drop(&mut self) {
        if let Some(live) = self.opened.begun() {
            live.desk.close(live.options().timeout);
        }
    }
}
