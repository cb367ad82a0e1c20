//! `migrate`: makes the store's schema by an explicit step, or the table for steps beside their effects; or prints the SQL.

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
    let url =
        if args.steps { store::of_effects(common.store.as_deref())? } else { store::url(common.store.as_deref())? };
    if args.steps && args.print {
        let sql = taskonce::steps_sql(&url, args.grant_to.as_deref())?;
        match form {
            Form::Json => report::data_json(&json!({ "sql": sql })),
            Form::Text => report::data(&sql),
        }
        return Ok(Code::Fine.exit());
    }
    if args.print {
        let sql = taskonce::migration_sql(&url, args.grant_to.as_deref())?;
        match (form, sql) {
            (Form::Json, sql) => report::data_json(&json!({ "sql": sql })),
            (Form::Text, Some(sql)) => report::data(&sql),
            (Form::Text, None) => report::say(NOT_NEEDED),
        }
        return Ok(Code::Fine.exit());
    }
    let (what, migration) = if args.steps {
        ("table", block_on(taskonce::migrate_steps(&url))??)
    } else {
        ("schema", block_on(taskonce::migrate(&url))??)
    };
    match form {
        Form::Json => report::data_json(&match &migration {
            Migration::NotNeeded => json!({ "migrated": false, "needed": false }),
            Migration::UpToDate { schema, version } => {
                json!({ "migrated": false, "needed": true, what: schema, "from": version, "to": version })
            }
            Migration::Migrated { schema, from, to } => {
                json!({ "migrated": true, "needed": true, what: schema, "from": from, "to": to })
            }
        }),
        Form::Text => report::data(&match &migration {
            Migration::NotNeeded => format!("{NOT_NEEDED}\n"),
            Migration::UpToDate { schema, version } => format!("{what} `{schema}` is up to date: version {version}\n"),
            Migration::Migrated { schema, from: 0, to } => format!("made {what} `{schema}`, version {to}\n"),
            Migration::Migrated { schema, from, to } => {
                format!("brought {what} `{schema}` from version {from} to {to}\n")
            }
        }),
    }
    Ok(Code::Fine.exit())
}
