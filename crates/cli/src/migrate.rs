//! `migrate`: makes the store's schema by an explicit step, or prints the SQL for it.

use std::process::ExitCode;

use serde_json::json;
use taskonce::Migration;

use crate::args::{Common, MigrateArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result};
use crate::{block_on, store};

/// What is said of stores that make what they need.
const NOT_NEEDED: &str = "nothing is to be done: this store makes what it needs by itself";

/// Migrates, or prints how.
pub(crate) fn migrate(args: &MigrateArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let url = store::url(common.store.as_deref())?;
    if args.print {
        let sql = taskonce::migration_sql(&url, args.grant_to.as_deref())?;
        match (form, sql) {
            (Form::Json, sql) => report::data_json(&json!({ "sql": sql })),
            (Form::Text, Some(sql)) => report::data(&sql),
            (Form::Text, None) => report::say(NOT_NEEDED),
        }
        return Ok(Code::Fine.exit());
    }
    let migration = block_on(taskonce::migrate(&url))??;
    match form {
        Form::Json => report::data_json(&match &migration {
            Migration::NotNeeded => json!({ "migrated": false, "needed": false }),
            Migration::UpToDate { schema, version } => {
                json!({ "migrated": false, "needed": true, "schema": schema, "from": version, "to": version })
            }
            Migration::Migrated { schema, from, to } => {
                json!({ "migrated": true, "needed": true, "schema": schema, "from": from, "to": to })
            }
        }),
        Form::Text => report::data(&match &migration {
            Migration::NotNeeded => format!("{NOT_NEEDED}\n"),
            Migration::UpToDate { schema, version } => format!("schema `{schema}` is up to date: version {version}\n"),
            Migration::Migrated { schema, from: 0, to } => format!("made schema `{schema}`, version {to}\n"),
            Migration::Migrated { schema, from, to } => {
                format!("brought schema `{schema}` from version {from} to {to}\n")
            }
        }),
    }
    Ok(Code::Fine.exit())
}
