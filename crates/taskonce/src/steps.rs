//! The table that steps need beside an effect in another database than the ledger's: made, printed and purged by that
//! database's URL.

use std::time::Duration;

use taskonce_core::{Error, ErrorKind, Result};

use crate::open::Migration;

/// The name of the table.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
const TABLE: &str = "taskonce_step";
/// The version of the table in SQLite, where it has had one form only.
#[cfg(feature = "sqlite")]
const SQLITE_VERSION: u32 = 1;

/// Makes the table of steps in the database of their effects: `postgres://…` (in the schema that the URL names, else where the
/// user's `search_path` says) or `sqlite:FILE`, which has to be there. Safe to call again, and by several at once.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a store without transactions of yours; [`ErrorKind::NewerSchema`], [`ErrorKind::Denied`],
/// [`ErrorKind::BadUrl`], and those of a connection or file.
pub async fn migrate_steps(url: &str) -> Result<Migration> {
    match scheme(url) {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let taskonce_postgres::Migrated { schema, from, to } =
                taskonce_postgres::tx::steps::migrate_steps(url).await?;
            let schema = format!("{schema}.{TABLE}");
            Ok(if from == to {
                Migration::UpToDate { schema, version: to }
            } else {
                Migration::Migrated { schema, from, to }
            })
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let (schema, version) = (TABLE.to_owned(), SQLITE_VERSION);
            Ok(match taskonce_sqlite::steps::migrate_steps(url)? {
                taskonce_sqlite::steps::StepTable::Made => Migration::Migrated { schema, from: 0, to: version },
                taskonce_sqlite::steps::StepTable::WasThere => Migration::UpToDate { schema, version },
            })
        }
        other => Err(unsupported(other)),
    }
}

/// The SQL of the same, for those who run migrations themselves; with the grants that the role of a worker's connection needs, if
/// one is named. A purge needs `delete` on the table, too.
///
/// # Errors
/// [`ErrorKind::Unsupported`], also for a role in a file, which has none; [`ErrorKind::BadUrl`].
pub fn steps_sql(url: &str, role: Option<&str>) -> Result<String> {
    let _ = role; // for a build with such a database
    match scheme(url) {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let schema = taskonce_postgres::tx::steps::step_schema_of(url)?;
            let mut sql = taskonce_postgres::tx::steps::step_table_sql(schema.as_deref())?;
            if let Some(role) = role {
                sql.push_str(&taskonce_postgres::tx::steps::step_grants_sql(schema.as_deref(), role)?);
            }
            Ok(sql)
        }
        #[cfg(feature = "sqlite")]
        "sqlite" if role.is_some() => Err(Error::new(ErrorKind::Unsupported, "a SQLite file has no roles")
            .about("the database of the effects")
            .with_hint("leave the role out: who may write the file may use its tables")),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(taskonce_sqlite::steps::step_table_sql().to_owned()),
        other => Err(unsupported(other)),
    }
}

/// Removes the rows of steps that ended at least so long ago, in batches of 1000, and says how many.
///
/// A row has to stay as long as its task may come again: the retention of the task's record and the longest time in which a copy
/// can still be on its way, together. What is removed earlier runs again.
///
/// # Errors
/// [`ErrorKind::NoSchema`] where there is no table; those of [`migrate_steps`].
pub async fn purge_steps(url: &str, older_than: Duration) -> Result<u64> {
    let _ = older_than; // for a build with such a database
    match scheme(url) {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => taskonce_postgres::tx::steps::purge_steps(url, older_than).await,
        #[cfg(feature = "sqlite")]
        "sqlite" => taskonce_sqlite::steps::purge_steps(url, older_than),
        other => Err(unsupported(other)),
    }
}

fn scheme(url: &str) -> &str {
    url.split_once(':').map_or("", |(scheme, _)| scheme)
}

fn unsupported(scheme: &str) -> Error {
    let what = format!("no table of steps can be in a database with the scheme `{}`", scheme.escape_debug());
    Error::new(ErrorKind::Unsupported, what)
        .about("the database of the effects")
        .with_hint("name the database that has the effects: `postgres://…` or `sqlite:FILE`")
}
