//! The sides: taskonce, its rivals, and the recipe that many programs write by hand. Each does a fresh run of an empty
//! task, and looks up a duplicate of a done one.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use idempotent::valkey::ValkeyStore;
use idempotent::{CachedResponse, ClaimOutcome, FencedOutcome, IdempotencyKey, IdempotencyStore as _, Metadata};
use klauthed_data::idempotency::redis::RedisIdempotencyStore;
use klauthed_data::idempotency::{IdempotencyStore as _, Outcome};
use redis::aio::ConnectionManager;
use redis::cmd;
use taskonce::{Admission, Effect, Handler, Input, Ledger, Output, Policy, Settled};
use taskonce_testkit::RedisServer;

/// How long every side remembers a task: our default.
const RETENTION: Duration = Duration::from_secs(14 * 24 * 60 * 60);
/// How long a claim holds, where a side has such a thing: our default.
const LEASE: Duration = Duration::from_secs(30);

/// Who does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Idempotent,
    Klauthed,
    Recipe,
}

pub(crate) const SIDES: [Side; 4] = [Side::Ours, Side::Idempotent, Side::Klauthed, Side::Recipe];

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Ours => "taskonce",
            Side::Idempotent => "idempotent 2.0",
            Side::Klauthed => "klauthed-data 1.0",
            Side::Recipe => "SETNX + EXPIRE",
        }
    }

    /// What taskonce promises and this side does not, read from its source.
    pub(crate) fn lacks(self) -> &'static [&'static str] {
        match self {
            Side::Ours => &[],
            Side::Idempotent => &[
                "no record of failed attempts: no count, no backoff, no dead tasks; one that kills its worker runs again for ever",
                "no effects that must not be repeated: what was cut short always runs again after the lease",
                "a heartbeat only where asked for (`keep_alive`), in the handler's own future: a blocked event loop loses the claim",
                "a claim whose answer was lost does not know itself when it asks again: it waits for the lease as a stranger does",
                "a completion whose answer was lost cannot be told from a lost claim: sent again, the store refuses it as expired",
                "no Redis Cluster: its script writes two keys",
            ],
            Side::Klauthed => &[
                "no token: completion is a GET and then an unconditional SET, so anybody's overwrites anybody's",
                "no lease and no heartbeat: a run that died holds its key for the whole retention (24 h by default)",
                "a key that expires between its SET NX and its GET counts as claimed, with nothing written",
                "no fingerprint: the same key with another payload is replayed",
                "no record of failed attempts, no release",
            ],
            Side::Recipe => &[
                "marked before the work: a run that died is lost, its duplicates are dropped",
                "SETNX and EXPIRE are two commands: a process that dies between them leaves the mark for ever",
                "no result, no token, no fingerprint, no attempts",
            ],
        }
    }
}

/// Everybody, connected to one server.
pub(crate) struct Stage {
    ledger: Ledger,
    handler: Handler,
    policy: Policy,
    payload: Input<'static>,
    idempotent: ValkeyStore,
    klauthed: RedisIdempotencyStore,
    recipe: ConnectionManager,
    server: RedisServer,
}

impl Stage {
    pub(crate) async fn open() -> Result<Stage> {
        let server = RedisServer::start(&[])?;
        let client = redis::Client::open(server.url())?;
        // All have connections of the kind that `idempotent` makes by itself, with the timeouts they have by default.
        let retention = u64::try_from(RETENTION.as_millis())?;
        Ok(Stage {
            ledger: taskonce::open(&server.url())?,
            handler: Handler::within("bench", "charge", "1")?,
            policy: Policy::new(Effect::Keyed),
            payload: Input::from_json(b"null")?,
            idempotent: ValkeyStore::with_url(server.url()).prefix("idempotent").try_build().await?,
            klauthed: RedisIdempotencyStore::with_ttl_ms(client.get_connection_manager().await?, retention),
            recipe: client.get_connection_manager().await?,
            server,
        })
    }

    pub(crate) fn server(&self) -> &RedisServer {
        &self.server
    }

    /// A fresh run of a task that does nothing and returns nothing.
    pub(crate) async fn fresh(&self, side: Side, id: &str) -> Result<()> {
        match side {
            Side::Ours => {
                let task = self.handler.task(id, &self.payload)?;
                let Admission::Run(claim) = self.ledger.claim(&task, &self.policy).await? else {
                    bail!("the task was not fresh");
                };
                let settled = claim.complete(Output::Nothing).await.map_err(taskonce::Unsettled::into_error)?;
                ensure!(matches!(settled, Settled::Recorded(_)), "the claim was lost");
            }
            Side::Idempotent => {
                let key = IdempotencyKey::new(id)?;
                let claim = self.idempotent.claim(&key, LEASE).fingerprint("charge", b"null");
                let ClaimOutcome::Claimed(guard) = claim.try_insert().await? else { bail!("the task was not fresh") };
                let nothing = CachedResponse::new(204, Metadata::new(), Vec::new().into());
                let settled = guard.complete(nothing, RETENTION).await?;
                ensure!(settled == FencedOutcome::Applied, "the claim was lost");
            }
            Side::Klauthed => {
                let key = format!("klauthed:{id}");
                ensure!(self.klauthed.begin(&key).await? == Outcome::New, "the task was not fresh");
                self.klauthed.complete(&key, serde_json::Value::Null).await?;
            }
            Side::Recipe => {
                ensure!(self.mark(id).await?, "the task was not fresh");
                let mut connection = self.recipe.clone();
                cmd("EXPIRE").arg(format!("recipe:{id}")).arg(RETENTION.as_secs()).exec_async(&mut connection).await?;
            }
        }
        Ok(())
    }

    /// A duplicate of a done task, which must be told that it is done.
    pub(crate) async fn duplicate(&self, side: Side, id: &str) -> Result<()> {
        let is_done = match side {
            Side::Ours => {
                let task = self.handler.task(id, &self.payload)?;
                matches!(self.ledger.claim(&task, &self.policy).await?, Admission::Replay(_))
            }
            Side::Idempotent => {
                let key = IdempotencyKey::new(id)?;
                let claim = self.idempotent.claim(&key, LEASE).fingerprint("charge", b"null");
                match claim.try_insert().await? {
                    ClaimOutcome::Claimed(_) => false,
                    ClaimOutcome::Exists { existing, fingerprint } => {
                        matches!(existing.replay(fingerprint), idempotent::ReplayOutcome::Replayed(_))
                    }
                }
            }
            Side::Klauthed => {
                matches!(self.klauthed.begin(&format!("klauthed:{id}")).await?, Outcome::Completed(_))
            }
            Side::Recipe => !self.mark(id).await?,
        };
        ensure!(is_done, "{}: not a duplicate", side.name());
        Ok(())
    }

    /// Whether the mark was not there.
    async fn mark(&self, id: &str) -> Result<bool> {
        let set: i64 = cmd("SETNX").arg(format!("recipe:{id}")).arg("1").query_async(&mut self.recipe.clone()).await?;
        Ok(set == 1)
    }

    /// An empty server. Scripts stay.
    pub(crate) fn flush(&self) -> Result<()> {
        self.server.command(&["FLUSHALL", "SYNC"]).context("empty the server").map(drop)
    }
}
