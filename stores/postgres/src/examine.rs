//! The store's health, for people: what it runs on, what endangers its records, and what to do about it.

use std::time::SystemTime;

use taskonce_core::error::Error;
use taskonce_core::store::{Finding, Level};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::connect::{Connection, SERVER_OLDEST, Session};
use crate::fault::Fault;
use crate::migrate::VERSION;
use crate::store::Inner;

/// A round trip that takes longer is worth knowing of, in milliseconds.
const TRIP_SLOW: u128 = 100;
/// Clocks that differ by more are worth knowing of, in milliseconds. No rule depends on it.
const CLOCKS_APART: i128 = 2000;
/// A table with a larger share of dead rows is cleaned too seldom, once there are some.
const DEAD_SHARE: f64 = 0.5;
/// Fewer dead rows than this are no matter.
const DEAD_MIN: i64 = 10_000;
/// With a smaller share of connections left the server refuses new ones soon.
const LEFT_SHARE: f64 = 0.1;
/// Transactions that are open for longer keep dead rows from going, in seconds.
const OPEN_MAX: i64 = 600;

const SETTINGS: &str = "select name, setting from pg_settings where name in ('fsync', 'full_page_writes',
    'synchronous_commit', 'synchronous_standby_names', 'max_connections', 'autovacuum',
    'zero_damaged_pages', 'ignore_checksum_failure', 'server_version', 'default_transaction_isolation')";
const STATE: &str = "select pg_is_in_recovery(), (extract(epoch from clock_timestamp()) * 1000)::bigint,
    (select count(*) from pg_stat_activity where backend_type = 'client backend'),
    (select count(*) from pg_stat_replication),
    coalesce((select max(extract(epoch from clock_timestamp() - xact_start))::bigint from pg_stat_activity
              where xact_start is not null and datname = current_database() and pid <> pg_backend_pid()), 0)";
const TABLE: &str = "select coalesce(n_live_tup, 0), coalesce(n_dead_tup, 0), pg_total_relation_size(to_regclass(format('%I.task', $1)))
    from pg_stat_all_tables where schemaname = $1 and relname = 'task'";
const RIGHTS: &str = "select what from (values
        ('select on task', has_table_privilege(to_regclass(format('%I.task', $1)), 'select')),
        ('insert on task', has_table_privilege(to_regclass(format('%I.task', $1)), 'insert')),
        ('update on task', has_table_privilege(to_regclass(format('%I.task', $1)), 'update')),
        ('delete on task', has_table_privilege(to_regclass(format('%I.task', $1)), 'delete')),
        ('usage on fence', has_sequence_privilege(to_regclass(format('%I.fence', $1)), 'usage'))) as r(what, has)
    where not has";
const AHEAD: &str = "select coalesce((extract(epoch from max(written_at) - clock_timestamp()) * 1000)::bigint, 0)
    from (select written_at from {task} where state <> 3 order by key limit 1000) as recent";

/// Every finding.
pub(crate) async fn examine(inner: &Inner) -> Vec<Finding> {
    match look(inner).await {
        Ok(findings) => findings,
        Err(error) => vec![fault_of("server", &error)],
    }
}

async fn look(inner: &Inner) -> Result<Vec<Finding>, Error> {
    let here = inner.here()?;
    let deadline = here.pool.deadline();
    let error = |fault| inner.error(fault);
    let lent = here.pool.lend(deadline).await.map_err(error)?;
    let connection = lent.connection();
    let began = Instant::now();
    let mut findings = Vec::new();
    let settings = connection.once(SETTINGS, &[]).await.map_err(error)?;
    let took = began.elapsed().as_millis();
    let settings = Settings(settings);
    findings.push(server(inner, connection, &settings));
    findings.push(if took > TRIP_SLOW {
        let hint = "heartbeats need far less than a third of the lease: look at the network and the server's load";
        finding(Level::Warning, "round trip", format!("{took} ms"), hint)
    } else {
        finding(Level::Fine, "round trip", format!("{took} ms"), "")
    });
    findings.push(schema(inner));
    findings.extend(durability(&settings));
    let schema = here.pool.dial().schema();
    findings.extend(or_fault("server", state(connection, &settings).await.map_err(error)));
    findings.extend(or_fault("table", table(connection, schema).await.map_err(error)));
    findings.push(rights(connection, schema).await.unwrap_or_else(|fault| fault_of("rights", &error(fault))));
    findings.push(ahead(connection, schema).await.unwrap_or_else(|fault| fault_of("records", &error(fault))));
    Ok(findings)
}

fn or_fault(subject: &str, found: Result<Vec<Finding>, Error>) -> Vec<Finding> {
    found.unwrap_or_else(|error| vec![fault_of(subject, &error)])
}

fn fault_of(subject: &str, error: &Error) -> Finding {
    finding(Level::Fault, subject, error.to_string(), error.hint())
}

fn finding(level: Level, subject: &str, text: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { level, subject: subject.to_owned(), text: text.into(), hint: hint.into() }
}

struct Settings(Vec<Row>);

impl Settings {
    fn get(&self, name: &str) -> &str {
        let row = self.0.iter().find(|row| row.try_get::<_, &str>(0).is_ok_and(|found| found == name));
        row.and_then(|row| row.try_get(1).ok()).unwrap_or_default()
    }
}

fn server(inner: &Inner, connection: &Connection, settings: &Settings) -> Finding {
    let way = match connection.session {
        Session::Own => "reached directly, statements prepared by name",
        Session::Lent => "reached through a pooler, or as one: nothing is left on a connection",
    };
    let version = settings.get("server_version");
    let text = format!("PostgreSQL {version} at {}, at least {SERVER_OLDEST} is needed; {way}", inner.settings.label);
    finding(Level::Fine, "server", text, "")
}

fn schema(inner: &Inner) -> Finding {
    // Another version is refused when a connection is made.
    finding(Level::Fine, "schema", format!("`{}`, version {VERSION}", inner.settings.schema), "")
}

/// What makes the server lose what it acknowledged.
fn durability(settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in ["fsync", "full_page_writes"] {
        if settings.get(name) == "off" {
            let text = "off: a crash of the host can damage the whole database";
            findings.push(finding(Level::Fault, name, text, format!("set `{name} = on`")));
        }
    }
    for name in ["zero_damaged_pages", "ignore_checksum_failure"] {
        if settings.get(name) == "on" {
            let text = "on: damaged pages are taken for empty ones, and tasks for new ones";
            findings.push(finding(Level::Fault, name, text, format!("set `{name} = off`")));
        }
    }
    let commit = settings.get("synchronous_commit");
    let standbys = settings.get("synchronous_standby_names");
    findings.push(match commit {
        "off" => finding(
            Level::Fault,
            "commit",
            "`synchronous_commit = off`: a crash takes back the last commits, so that tasks run again",
            "set it to `on` for the role or database: `alter role … set synchronous_commit = on`",
        ),
        "local" => finding(Level::Fine, "commit", "on this server's disk before it counts; standbys follow", ""),
        _ if standbys.is_empty() => finding(Level::Fine, "commit", "on the server's disk before it counts", ""),
        _ => finding(
            Level::Fine,
            "commit",
            format!("on the server's disk and on a standby before it counts ({standbys})"),
            "",
        ),
    });
    let isolation = settings.get("default_transaction_isolation");
    if isolation != "read committed" {
        findings.push(finding(
            Level::Warning,
            "isolation",
            format!("sessions begin as `{isolation}`: statements that meet are refused and sent again"),
            "set `default_transaction_isolation = 'read committed'` for this role",
        ));
    }
    if settings.get("autovacuum") == "off" {
        findings.push(finding(
            Level::Warning,
            "autovacuum",
            "off: the table grows by each write, and claims become slow",
            "set `autovacuum = on`",
        ));
    }
    findings
}

async fn state(connection: &Connection, settings: &Settings) -> Result<Vec<Finding>, Fault> {
    let get = |error: tokio_postgres::Error| Fault::of(&error);
    let before = wall();
    let rows = connection.once(STATE, &[]).await?;
    let Some(row) = rows.first() else { return Ok(Vec::new()) };
    let mut findings = Vec::new();
    if row.try_get::<_, bool>(0).map_err(get)? {
        let text = "a standby: it can be read, and takes no writes";
        findings.push(finding(Level::Fault, "role", text, "name the primary in the store's URL"));
    } else {
        findings.push(finding(Level::Fine, "role", "primary", ""));
    }
    let server: i64 = row.try_get(1).map_err(get)?;
    let apart = i128::from(server) - before;
    findings.push(if apart.abs() > CLOCKS_APART {
        let text = format!("the server's clock is {apart} ms away from this host's; only the server's judges leases");
        finding(Level::Warning, "clock", text, "let both follow the same time servers")
    } else {
        finding(Level::Fine, "clock", format!("{apart} ms away from this host's"), "")
    });
    let (used, standbys): (i64, i64) = (row.try_get(2).map_err(get)?, row.try_get(3).map_err(get)?);
    let max: i64 = settings.get("max_connections").parse().unwrap_or(0);
    let text = format!("{used} of {max} in use");
    findings.push(if ((max - used) as f64) < max as f64 * LEFT_SHARE {
        let hint = "raise `max_connections`, lower `connections` in the stores' URLs, or put a pooler between";
        finding(Level::Warning, "connections", text, hint)
    } else {
        finding(Level::Fine, "connections", text, "")
    });
    if standbys > 0 && settings.get("synchronous_standby_names").is_empty() {
        findings.push(finding(
            Level::Warning,
            "standbys",
            format!("{standbys}, and none of them is waited for: one that is promoted may lack the last commits"),
            "set `synchronous_standby_names`, or know that tasks of the last moments run again after a promotion",
        ));
    }
    let open: i64 = row.try_get(4).map_err(get)?;
    if open > OPEN_MAX {
        findings.push(finding(
            Level::Warning,
            "transactions",
            format!("one has been open for {open} s: what others write cannot be cleaned away meanwhile"),
            "find it with `select * from pg_stat_activity order by xact_start`",
        ));
    }
    Ok(findings)
}

async fn table(connection: &Connection, schema: &str) -> Result<Vec<Finding>, Fault> {
    let get = |error: tokio_postgres::Error| Fault::of(&error);
    let rows = connection.once(TABLE, &[(&schema, Type::TEXT)]).await?;
    let Some(row) = rows.first() else { return Ok(Vec::new()) };
    let (live, dead): (i64, i64) = (row.try_get(0).map_err(get)?, row.try_get(1).map_err(get)?);
    let bytes: Option<i64> = row.try_get(2).map_err(get)?;
    let text = format!(
        "some {live} records, {} MiB, {dead} dead rows",
        bytes.unwrap_or(0).unsigned_abs().div_ceil(1024 * 1024)
    );
    Ok(vec![if dead > DEAD_MIN && dead as f64 > live as f64 * DEAD_SHARE {
        let hint = "look whether autovacuum runs, and for transactions that are open for long";
        finding(Level::Warning, "table", text, hint)
    } else {
        finding(Level::Fine, "table", text, "")
    }])
}

async fn rights(connection: &Connection, schema: &str) -> Result<Finding, Fault> {
    let rows = connection.once(RIGHTS, &[(&schema, Type::TEXT)]).await?;
    let missing: Vec<&str> = rows.iter().filter_map(|row| row.try_get(0).ok()).collect();
    Ok(if missing.is_empty() {
        finding(Level::Fine, "rights", "this user may read and write", "")
    } else {
        finding(
            Level::Fault,
            "rights",
            format!("this user lacks {}", missing.join(", ")),
            "`taskonce migrate --store URL --print --grant-to ROLE` prints the grants that a user of the store needs",
        )
    })
}

/// Records that were written before the clock went back.
async fn ahead(connection: &Connection, schema: &str) -> Result<Finding, Fault> {
    let ask = AHEAD.replace("{task}", &format!("\"{schema}\".task"));
    let rows = connection.once(&ask, &[]).await?;
    let ahead: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(|error| Fault::of(&error))?;
    Ok(if i128::from(ahead) > CLOCKS_APART {
        finding(
            Level::Warning,
            "records",
            format!("one was written {:.1} s in the future: the server's clock went back", ahead as f64 / 1000.0),
            "its lease counts as passed when the step was longer than that; see that the clock is slewed, not stepped",
        )
    } else {
        finding(Level::Fine, "records", "none lies in the future", "")
    })
}

fn wall() -> i128 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| i128::try_from(since.as_millis()).unwrap_or(0))
}
