//! `list`: tasks by state, namespace, handler, prefix and age, page by page.

use std::collections::HashSet;
use std::io;
use std::process::ExitCode;

use serde_json::{Value, json};
use taskonce::{Cursor, Filter, Found, Key, Ledger, Name, Row, State};

use crate::args::{Common, FilterArgs, ListArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::units::{spell, spell_left};
use crate::width::Shrinks;
use crate::{block_on, plain, store, view, width};

/// The largest page asked of a store at once.
const PAGE_MAX: usize = 500;
/// The namespace of the notes that clears leave: listed only when it is asked for.
const NOTES: &str = "taskonce";
/// The longest note in a table, in characters.
const NOTE_MAX: usize = 60;

impl FilterArgs {
    /// The filter, for pages of at most `page_max`.
    pub(crate) fn filter(&self, page_max: usize) -> Result<Filter> {
        Ok(Filter {
            namespace: self.namespace.as_deref().map(Name::new).transpose()?,
            handler: self.handler.as_deref().map(Name::new).transpose()?,
            id_prefix: self.prefix.clone(),
            page_max,
            ..Filter::default()
        })
    }
}

struct Listed {
    rows: Vec<Row>,
    next: Option<Cursor>,
}

/// Lists tasks.
pub(crate) fn list(args: &ListArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let filter = Filter {
        states: args.state.iter().map(|state| state.state()).collect(),
        age_min: args.older_than,
        ..args.filter.filter(PAGE_MAX)?
    };
    let filter = if args.all { filter } else { filter.listed() };
    let is_listed = filter.is_listed();
    let ledger = store::open_existing(common.store.as_deref())?;
    let cursor = args.cursor.clone().map(Cursor);
    let listed = block_on(collect(&ledger, filter, cursor, args.limit as usize))??;
    match form {
        Form::Json => {
            let tasks: Vec<Value> = listed.rows.iter().map(row_json).collect();
            report::data_json(&json!({ "tasks": tasks, "next": listed.next.map(|cursor| cursor.0) }));
        }
        Form::Text => {
            report::data(&table(&listed.rows, width::of(io::stdout())));
            if listed.rows.is_empty() {
                report::say(if is_listed {
                    "no task matches; `--all` looks at every record"
                } else {
                    "no task matches"
                });
            }
            if let Some(Cursor(cursor)) = &listed.next {
                report::say(format_args!("there may be more: add `--cursor {}`", view::quoted(cursor)));
            }
        }
    }
    Ok(Code::Fine.exit())
}

/// Up to `limit` rows. Pages shrink towards the end, so that the cursor stands right behind the last row.
async fn collect(ledger: &Ledger, filter: Filter, cursor: Option<Cursor>, limit: usize) -> Result<Listed> {
    let mut listed = Listed { rows: Vec::new(), next: cursor };
    let mut seen: HashSet<Key> = HashSet::new();
    while listed.rows.len() < limit {
        let page_max = PAGE_MAX.min(limit - listed.rows.len());
        let mut walk = ledger.walk(Filter { page_max, ..filter.clone() }).from(listed.next.take());
        let Some(page) = walk.next_page().await.map_err(Trouble::from)? else { break };
        // A store may repeat a row; the reader must not see it twice.
        let asked = page.into_iter().filter(|row| filter.namespace.is_some() || row.key.namespace() != NOTES);
        listed.rows.extend(asked.filter(|row| seen.insert(row.key.clone())));
        listed.next = walk.cursor().cloned();
        if listed.next.is_none() {
            break;
        }
    }
    Ok(listed)
}

fn row_json(row: &Row) -> Value {
    match &row.found {
        Ok(found) => view::record_json(&row.key, found),
        Err(error) => json!({ "key": row.key.as_str(), "state": null, "error": error_json(error) }),
    }
}

fn error_json(error: &taskonce::Error) -> Value {
    json!({ "kind": error.kind().name(), "message": error.to_string(), "hint": error.hint() })
}

/// The heads of the table's columns.
const HEADS: [&str; 6] = ["STATE", "KEY", "FOR", "ATTEMPT", "OWNER", "NOTE"];

/// The table; on a terminal its notes are cut, so that no line is wider, unless the other columns are already.
fn table(rows: &[Row], columns: Option<usize>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let shrinks = Shrinks { column: 5, min: HEADS[5].len() };
    width::table(HEADS, rows.iter().map(cells).collect(), shrinks, columns)
}

fn cells(row: &Row) -> [String; 6] {
    let key = plain::line(row.key.as_str()).into_owned();
    match &row.found {
        Ok(found) => [
            found.record.state.name().to_owned(),
            key,
            spell(found.in_state_for()),
            found.record.attempt.to_string(),
            plain::line(&found.record.owner).into_owned(),
            note(found),
        ],
        Err(error) => [
            error.kind().name().replace('_', " "),
            key,
            String::new(),
            String::new(),
            String::new(),
            plain::line(&error.to_string()).into_owned(),
        ],
    }
}

fn note(found: &Found) -> String {
    let record = &*found.record;
    let note = match record.state {
        State::Running => match found.lease_left() {
            left if left.is_zero() => "lease passed".to_owned(),
            left => format!("lease ends in {}", spell_left(left)),
        },
        State::Waiting => {
            let when = match found.delay_left() {
                left if left.is_zero() => "may start now".to_owned(),
                left => format!("may start in {}", spell_left(left)),
            };
            match &record.failure {
                Some(failure) => format!("{when}; {}", plain::line(&failure.message)),
                None => when,
            }
        }
        State::Done => String::new(),
        State::Dead | State::Parked => record.failure.as_ref().map_or_else(String::new, view::failure),
    };
    width::cut(&note, NOTE_MAX)
}
