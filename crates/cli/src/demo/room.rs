//! A column's folder, which goes with it, and the signals that end the demo.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use taskonce::sqlite::rusqlite::Connection;
use tokio::signal::unix::{SignalKind, signal};

use super::column::Column;
use super::{VISIBILITY, trouble};
use crate::report::Result;

/// The name of the store's file, beside the file of effects.
pub(crate) const STORE: &str = "tasks.db";
/// The name of the queue's.
const QUEUE: &str = "queue.db";

/// How long a transaction waits for the others.
const BUSY_MAX: Duration = Duration::from_secs(5);

/// A temporary folder with the store and the files that are counted from.
pub(crate) struct Room {
    folder: PathBuf,
    /// Those that the user named.
    store: Option<String>,
    source: Option<String>,
}

impl Room {
    pub(crate) fn new(column: Column, store: Option<&str>, source: Option<&str>) -> Result<Room> {
        let name = format!("taskonce-demo-{}-{}-{:08x}", std::process::id(), column.name(), fastrand::u32(..));
        let folder = std::env::temp_dir().join(name);
        // Not `recursive`: a folder that is there already is somebody else's.
        DirBuilder::new().mode(0o700).create(&folder).map_err(trouble)?;
        let room = Room { folder, store: store.map(str::to_owned), source: source.map(str::to_owned) };
        for file in [room.effects(), room.runs()] {
            fs::write(file, "").map_err(trouble)?;
        }
        Ok(room)
    }

    /// The store of the columns that have one.
    pub(crate) fn store(&self) -> PathBuf {
        self.folder.join(STORE)
    }

    /// Makes the table of the effects that commit with their record, in the store's own file. It is only inserted into, and has
    /// no index that would keep a second effect out.
    pub(crate) fn make_table(&self) -> io::Result<()> {
        // Makes the file.
        drop(taskonce::open(&self.store_url()).map_err(io::Error::other)?);
        self.connect()?.execute_batch("CREATE TABLE charge (task INTEGER NOT NULL)").map_err(io::Error::other)
    }

    /// The effects of that table, a line each as in the file of effects.
    pub(crate) fn charges(&self) -> io::Result<String> {
        let conn = self.connect()?;
        let lines = conn.prepare("SELECT task FROM charge").and_then(|mut charges| {
            let tasks = charges.query_map([], |row| row.get::<_, i64>(0))?;
            tasks.map(|task| task.map(|task| format!("{task}\n"))).collect()
        });
        lines.map_err(io::Error::other)
    }

    fn connect(&self) -> io::Result<Connection> {
        connect(&self.store())
    }

    /// The demo ends processes and not the host, so its store need not wait for the disk at every write.
    pub(crate) fn store_url(&self) -> String {
        self.store.clone().unwrap_or_else(|| url(&self.store()))
    }

    /// The same of its queue.
    pub(crate) fn source_url(&self) -> String {
        let visibility = VISIBILITY.as_millis();
        self.source.clone().unwrap_or_else(|| format!("{}&visibility={visibility}ms", url(&self.folder.join(QUEUE))))
    }

    /// One line an effect.
    pub(crate) fn effects(&self) -> PathBuf {
        self.folder.join("effects")
    }

    /// One line a start of a task's work.
    pub(crate) fn runs(&self) -> PathBuf {
        self.folder.join("runs")
    }
}

fn url(file: &Path) -> String {
    format!("sqlite:{}?synchronous=normal", crate::store::percent_encoded(&file.to_string_lossy()))
}

impl Drop for Room {
    fn drop(&mut self) {
        // What cannot be removed stays for the system's own cleaning of temporary files.
        let _left = fs::remove_dir_all(&self.folder);
    }
}

/// A connection to the store's file for transactions of a worker's own.
pub(crate) fn connect(file: &Path) -> io::Result<Connection> {
    let conn = Connection::open(file).map_err(io::Error::other)?;
    conn.busy_timeout(BUSY_MAX).map_err(io::Error::other)?;
    conn.pragma_update(None, "synchronous", "normal").map_err(io::Error::other)?;
    Ok(conn)
}

/// Appends one line in one write, so that lines of several processes do not mix, and a kill leaves all of it or nothing.
pub(crate) fn append(file: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().append(true).open(file)?.write_all(format!("{line}\n").as_bytes())
}

/// Becomes true at ctrl-C, SIGTERM or SIGHUP, so that the demo ends its workers and removes its folders.
pub(crate) fn on_signal() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::Builder::new()
        .name("demo-signals".into())
        .spawn(move || {
            let watch = || -> io::Result<()> {
                tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
                    let mut interrupt = signal(SignalKind::interrupt())?;
                    let mut terminate = signal(SignalKind::terminate())?;
                    let mut hangup = signal(SignalKind::hangup())?;
                    let _waiting = ready.send(Ok(()));
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hangup.recv() => {}
                    }
                    told.store(true, Ordering::SeqCst);
                    Ok(())
                })
            };
            if let Err(error) = watch() {
                let _waiting = ready.send(Err(error));
            }
        })
        .map_err(trouble)?;
    is_ready.recv().unwrap_or_else(|gone| Err(io::Error::other(gone))).map_err(trouble)?;
    Ok(stop)
}
