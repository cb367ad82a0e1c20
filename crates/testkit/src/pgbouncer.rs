//! A PgBouncer of a test's own, before a PostgreSQL server on 127.0.0.1.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Result;
use tempfile::TempDir;

use crate::port;
use crate::postgres::unprivileged;
use crate::process::Running;
use crate::program::Program;
use crate::redis::again_on_a_clash;

/// What its log says when it can be used.
const READY: &str = "process up";

/// A running pooler that lends connections by the transaction. It ends with this value, or with the process that started it.
pub struct PgBouncer {
    _folder: TempDir,
    port: u16,
    _running: Running,
}

impl PgBouncer {
    /// Starts one before the server at this port, with so many connections to it for each database and user. It lets these
    /// users in without a password. `more` are lines of its settings.
    ///
    /// # Errors
    /// When there is no `pgbouncer` (the error says what to install), or it does not start.
    pub fn start(server: u16, connections: u32, users: &[&str], more: &str) -> Result<PgBouncer> {
        again_on_a_clash(|| {
            let folder = tempfile::Builder::new().prefix("taskonce-pgbouncer-").tempdir()?;
            let port = port::free()?;
            let path = folder.path().display();
            let (settings, names) = (folder.path().join("pgbouncer.ini"), folder.path().join("users.txt"));
            fs::write(
                &settings,
                format!(
                    "[databases]\n* = host=127.0.0.1 port={server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
                     unix_socket_dir =\nauth_type = trust\nauth_file = {path}/users.txt\npool_mode = transaction\n\
                     default_pool_size = {connections}\nmax_client_conn = 500\n{more}\n"
                ),
            )?;
            fs::write(&names, users.iter().map(|user| format!("\"{user}\" \"\"\n")).collect::<String>())?;
            let mut command = Command::new(Program::PgBouncer.path()?);
            command.arg(&settings).current_dir(folder.path());
            if let Some((uid, gid)) = unprivileged()? {
                for file in [folder.path(), &settings, &names] {
                    chown(file, Some(uid), Some(gid))?;
                }
                command.uid(uid).gid(gid);
            }
            let running = Running::start_command(command, folder.path(), READY, "KILL")?;
            Ok(PgBouncer { _folder: folder, port, _running: running })
        })
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}
