//! Making a connection: reaching a server, the settings of its session, and what there is to know before it is used.

use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use rustls::ClientConfig;
use taskonce_core::ErrorKind;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::fault::{Cause, Fault};
use crate::migrate::VERSION;
use crate::sql::{LOCK_WAIT_MAX, Sql, VERBS, Verb, Waits};
use crate::tls;
use crate::url::{Host, Settings, Statements, Target, TlsMode};

/// The oldest server: the first with `gen_random_uuid()` of its own.
pub(crate) const SERVER_OLDEST: i32 = 13;
/// The server ends a statement when this share of a call's time has passed, in tenths, so that its answer still counts.
const STATEMENT_TENTHS: u32 = 9;

/// How to reach the servers of one store.
pub(crate) struct Dial {
    /// One for each host, in the order in which they are tried.
    hosts: Vec<Config>,
    /// The longest that reaching one of them takes.
    host_timeout: Duration,
    tls: Option<ClientConfig>,
    schema: String,
    /// Settings of a session, for servers that are reached without a pooler.
    options: String,
    statements: Statements,
    named: Sql,
    unnamed: Sql,
}

/// Whether a connection keeps what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Session {
    /// It does: it has settings and prepared statements.
    Own,
    /// A pooler lends it anew for each transaction.
    Lent,
}

/// Whether the schema has to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schema {
    /// Of this program's version, or the connection is refused.
    Needed,
    /// It is about to be made.
    NotYet,
}

/// A connection, and what was prepared on it.
pub(crate) struct Connection {
    pub(crate) client: Client,
    /// The task that reads and writes.
    pub(crate) task: AbortHandle,
    pub(crate) session: Session,
    pub(crate) used: Instant,
    /// Whether the server may still be at a statement of a call that was given up.
    pub(crate) is_behind: bool,
    prepared: [OnceLock<Statement>; VERBS],
}

impl Dial {
    /// Checks what can be checked without a connection.
    pub(crate) fn new(settings: &Settings) -> Result<Dial, Fault> {
        let mut config = Config::new();
        if let Some(user) = &settings.user {
            config.user(user);
        }
        if let Some(password) = &settings.password {
            config.password(password);
        }
        if let Some(database) = &settings.database {
            config.dbname(database);
        }
        config.application_name(&settings.application);
        // One server that hangs must not use up the time for the others, also where its host still takes connections.
        let share = u32::try_from(settings.hosts.len()).unwrap_or(u32::MAX).max(1);
        let host_timeout = settings.timeout / share;
        config.connect_timeout(host_timeout);
        config.ssl_mode(match settings.tls.mode {
            TlsMode::Disable => SslMode::Disable,
            TlsMode::Prefer => SslMode::Prefer,
            TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
        });
        config.target_session_attrs(match settings.target {
            Target::Any => TargetSessionAttrs::Any,
            Target::ReadWrite => TargetSessionAttrs::ReadWrite,
        });
        let statement_timeout = (settings.timeout * STATEMENT_TENTHS / 10).as_millis();
        let lock_wait = settings.lock_timeout.min(LOCK_WAIT_MAX).as_millis();
        // A plan must not be made for an empty table and stay while it grows; and what a role or database sets must not
        // change how a single statement meets another.
        let options = format!(
            "-c statement_timeout={statement_timeout} -c lock_timeout={lock_wait} \
             -c idle_in_transaction_session_timeout={statement_timeout} \
             -c default_transaction_isolation=read\\ committed -c enable_seqscan=off -c jit=off"
        );
        let tls = match settings.tls.mode {
            TlsMode::Disable => None,
            TlsMode::Prefer | TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => {
                Some(tls::config(&settings.tls)?)
            }
        };
        let hosts = settings.hosts.iter().map(|host| {
            let mut config = config.clone();
            match host {
                Host::Tcp(name, port) => config.host(name).port(*port),
                Host::Unix(folder, port) => config.host_path(folder).port(*port),
            };
            config
        });
        Ok(Dial {
            hosts: hosts.collect(),
            host_timeout,
            tls,
            schema: settings.schema.clone(),
            options,
            statements: settings.statements,
            named: Sql::new(&settings.schema, Waits::BySession),
            unnamed: Sql::new(&settings.schema, Waits::ByStatement(lock_wait)),
        })
    }

    /// The schema's name.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// A connection that is ready to be used.
    pub(crate) async fn connect(&self, schema: Schema) -> Result<Connection, Fault> {
        match self.statements {
            Statements::Unnamed => self.connect_as(Session::Lent, schema).await,
            Statements::Named => self.connect_as(Session::Own, schema).await,
            Statements::Auto => match self.connect_as(Session::Own, schema).await {
                // A pooler that lends connections by the transaction refuses settings of a session, or drops them.
                Err(fault) if fault.cause == Cause::Pooler => self.connect_as(Session::Lent, schema).await,
                made => made,
            },
        }
    }

    async fn connect_as(&self, session: Session, schema: Schema) -> Result<Connection, Fault> {
        let (client, task) = self.reach(session).await?;
        let used = Instant::now();
        let connection = Connection { client, task, session, used, is_behind: false, prepared: Default::default() };
        match self.greet(&connection, schema).await {
            Ok(()) => Ok(connection),
            Err(fault) => {
                connection.task.abort();
                Err(fault)
            }
        }
    }

    /// The first host that takes us; else what the last one said.
    async fn reach(&self, session: Session) -> Result<(Client, AbortHandle), Fault> {
        let mut last = Fault::new(ErrorKind::BadUrl, "no host is named");
        for config in &self.hosts {
            let mut config = config.clone();
            if session == Session::Own {
                config.options(&self.options);
            }
            let reached = timeout(self.host_timeout, self.reach_host(&config)).await;
            match reached.unwrap_or_else(|_| Err(Fault::late(self.host_timeout))) {
                Ok(reached) => return Ok(reached),
                Err(fault) => last = fault,
            }
        }
        Err(last)
    }

    async fn reach_host(&self, config: &Config) -> Result<(Client, AbortHandle), Fault> {
        // What ends a connection is told to the calls that wait for answers.
        let (client, task) = match &self.tls {
            Some(tls) => {
                let made = config.connect(MakeRustlsConnect::new(tls.clone())).await;
                let (client, driven) = made.map_err(|error| Fault::of(&error))?;
                (client, tokio::spawn(async move { drop(driven.await) }))
            }
            None => {
                let made = config.connect(NoTls).await;
                let (client, driven) = made.map_err(|error| Fault::of(&error))?;
                (client, tokio::spawn(async move { drop(driven.await) }))
            }
        };
        Ok((client, task.abort_handle()))
    }

    /// Asks the server to end what it is at for this client. The request has a connection of its own.
    pub(crate) async fn cancel(&self, client: &Client) {
        let token = client.cancel_token();
        let asking = async {
            match &self.tls {
                Some(tls) => token.cancel_query(MakeRustlsConnect::new(tls.clone())).await,
                None => token.cancel_query(NoTls).await,
            }
        };
        // Where it cannot be asked, the server goes on by itself.
        let _asked = timeout(self.host_timeout, asking).await;
    }

    /// Refuses a server that cannot serve.
    async fn greet(&self, connection: &Connection, schema: Schema) -> Result<(), Fault> {
        const ASK: &str = "select current_setting('server_version_num')::int, current_setting('server_version'),
                                  current_setting('server_encoding'), current_setting('lock_timeout'),
                                  to_regclass(format('%I.meta', $1)) is not null";
        let rows = connection.once(ASK, &[(&self.schema, Type::TEXT)]).await?;
        let row = rows.first().ok_or_else(|| Fault::new(ErrorKind::Protocol, "the server did not say what it is"))?;
        let get = |error: tokio_postgres::Error| Fault::of(&error);
        let (number, version): (i32, &str) = (row.try_get(0).map_err(get)?, row.try_get(1).map_err(get)?);
        check_version(number, version)?;
        let encoding: &str = row.try_get(2).map_err(get)?;
        if encoding != "UTF8" {
            return Err(Fault::new(
                ErrorKind::Unsupported,
                format!("the database has the encoding {encoding}, not UTF8"),
            )
            .hint("make a database with `createdb --encoding=UTF8 --template=template0`"));
        }
        let lock_timeout: &str = row.try_get(3).map_err(get)?;
        if connection.session == Session::Own && lock_timeout == "0" {
            return Err(Fault::new(ErrorKind::Protocol, "a pooler stands between, and drops settings of a session")
                .hint("write `statements=unnamed` into the store's URL")
                .because(Cause::Pooler));
        }
        if schema == Schema::NotYet {
            return Ok(());
        }
        if !row.try_get::<_, bool>(4).map_err(get)? {
            return Err(Fault::no_schema(&self.schema));
        }
        let ask = format!("select version from \"{}\".meta", self.schema);
        let found = connection.once(&ask, &[]).await?.first().map_or(Ok(0), |row| row.try_get(0)).map_err(get)?;
        if found == VERSION { Ok(()) } else { Err(Fault::other_schema(&self.schema, found, VERSION)) }
    }

    /// The rows of a statement. A claim that stores nothing is told what is there, in the same round trip.
    pub(crate) async fn ask(
        &self,
        connection: &Connection,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Fault> {
        match (verb, connection.session) {
            (Verb::TryClaim, Session::Own) => self.try_claim(connection, parameters).await,
            // Two statements may reach the server by different connections, and in any order.
            (Verb::TryClaim, Session::Lent) => self.ask_one(connection, Verb::InsertClaim, parameters).await,
            (verb, Session::Own | Session::Lent) => self.ask_one(connection, verb, parameters).await,
        }
    }

    /// An insert, and behind it a look, which the server is at while the insert's answer is on its way. Where that answer says
    /// that the claim is stored, nobody waits for the other one, and the driver throws it away.
    async fn try_claim(&self, connection: &Connection, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Fault> {
        let mut put = pin!(self.ask_one(connection, Verb::TryClaim, parameters));
        let mut look = pin!(self.ask_one(connection, Verb::LoadRefusal, &parameters[..1]));
        let mut looked = None;
        let rows = loop {
            tokio::select! {
                biased;
                rows = &mut put => break rows?,
                rows = &mut look, if looked.is_none() => looked = Some(rows),
            }
        };
        if !rows.is_empty() {
            return Ok(rows);
        }
        match looked {
            Some(looked) => looked,
            None => look.await,
        }
    }

    async fn ask_one(
        &self,
        connection: &Connection,
        verb: Verb,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Fault> {
        let asked = match connection.session {
            Session::Lent => {
                let typed: Vec<_> = parameters.iter().copied().zip(verb.types().iter().cloned()).collect();
                connection.client.query_typed(self.unnamed.text(verb), &typed).await
            }
            Session::Own => {
                let place = &connection.prepared[verb as usize];
                let statement = match place.get() {
                    Some(statement) => statement,
                    None => {
                        let made = connection.client.prepare_typed(self.named.text(verb), verb.types()).await;
                        let made = made.map_err(|error| Fault::of(&error))?;
                        place.get_or_init(|| made)
                    }
                };
                connection.client.query(statement, parameters).await
            }
        };
        asked.map_err(|error| Fault::of(&error))
    }
}

impl Connection {
    /// The rows of a statement that is asked seldom.
    pub(crate) async fn once(
        &self,
        statement: &str,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, Fault> {
        self.client.query_typed(statement, parameters).await.map_err(|error| Fault::of(&error))
    }
}

/// Refuses a server that is too old.
fn check_version(number: i32, version: &str) -> Result<(), Fault> {
    if number / 10_000 >= SERVER_OLDEST {
        return Ok(());
    }
    Err(Fault::new(
        ErrorKind::Unsupported,
        format!("the server is PostgreSQL {version}; {SERVER_OLDEST} or later is needed"),
    )
    .hint("update the server"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_refused_by_name() {
        let error = check_version(120_022, "12.22 (Debian)").unwrap_err().about("store `s`");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("PostgreSQL 12.22 (Debian); 13 or later"), "{error}");
        check_version(130_000, "13.0").unwrap();
        check_version(180_001, "18.1").unwrap();
    }
}
