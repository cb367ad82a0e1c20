//! `purge`: removes final records past their retention, in bounded batches; or rows of steps beside their effects.

use std::process::ExitCode;

use serde_json::json;
use taskonce::store::PAGE_MAX;
use taskonce::{Filter, Ledger, Purged, State};

use crate::args::{Common, PurgeArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::{block_on, store, view};

/// The most batches of one call: a store that grows as fast as it is purged must not hold the caller for ever.
const BATCHES_MAX: usize = 100_000;

/// Purges, or counts what would be purged.
pub(crate) fn purge(args: &PurgeArgs, common: &Common, form: Form) -> Result<ExitCode> {
    if let Some(older_than) = args.older_than.filter(|_| args.steps) {
        let url = store::of_effects(common.store.as_deref())?;
        let rows = block_on(taskonce::purge_steps(&url, older_than))??;
        match form {
            Form::Json => report::data_json(&json!({ "steps": rows })),
            Form::Text => report::data(&format!("removed {}\n", view::count(rows, "step row"))),
        }
        return Ok(Code::Fine.exit());
    }
    let filter = args.filter.filter(PAGE_MAX)?;
    let ledger = store::open_existing(common.store.as_deref())?;
    if args.dry_run {
        let records = block_on(count(&ledger, filter))??;
        match form {
            Form::Json => report::data_json(&json!({ "would_remove_records": records })),
            Form::Text => report::data(&match records {
                1 => "1 record is past its retention\n".to_owned(),
                more => format!("{more} records are past their retention\n"),
            }),
        }
        return Ok(Code::Fine.exit());
    }
    let purged = block_on(remove(&ledger, &filter))??;
    match form {
        Form::Json => report::data_json(&json!({ "records": purged.records, "outputs": purged.outputs })),
        Form::Text => report::data(&format!(
            "removed {} past retention, and {} of records that stay\n",
            view::count(purged.records as u64, "record"),
            view::count(purged.outputs as u64, "output")
        )),
    }
    Ok(Code::Fine.exit())
}

async fn remove(ledger: &Ledger, filter: &Filter) -> Result<Purged> {
    let mut total = Purged::default();
    for _ in 0..BATCHES_MAX {
        let batch = ledger.purge(filter).await?;
        total.records += batch.records;
        total.outputs += batch.outputs;
        if batch == Purged::default() {
            break;
        }
    }
    Ok(total)
}

async fn count(ledger: &Ledger, filter: Filter) -> Result<usize> {
    let mut walk = ledger.walk(Filter { states: vec![State::Done, State::Dead], ..filter });
    let mut records = 0;
    while let Some(page) = walk.next_page().await.map_err(Trouble::from)? {
        let due = page.iter().filter_map(|row| row.found.as_ref().ok());
        records += due.filter(|found| found.age.has_passed(found.record.retention)).count();
    }
    Ok(records)
}
