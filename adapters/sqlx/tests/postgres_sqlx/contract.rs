//! What every driver of transactions promises, by sqlx, also at the strictest isolation.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{PgPool, Postgres, Transaction};
use taskonce_contract::StoreUnderTest;
use taskonce_contract::transactional::{ByHand, Script, StepEnd, TransactionsUnderTest};
use taskonce_core::codec;
use taskonce_core::error::Result;
use taskonce_core::key::{Key, Task};
use taskonce_core::ledger::{Claim, Completion, Ledger, Refused};
use taskonce_core::policy::Policy;
use taskonce_core::record::{ClaimId, Failure, Output, State, Token};
use taskonce_core::store::Store;
use taskonce_sqlx::{CompleteIn as _, RunInTransaction as _, StepIn as _};
use taskonce_testkit::PgBouncer;
use taskonce_worker::{Context, Outcome};

use crate::place::{EFFECT, Place, WORKER};

/// Connections of a driver's pool: as many as a case has runs at once.
const CONNECTIONS: u32 = 10;

pub(crate) struct Driver {
    place: Place,
    elsewhere: Place,
    pool: PgPool,
    _pooler: Option<PgBouncer>,
}

impl Driver {
    async fn direct(settings: &'static str) -> Driver {
        let place = Place::new();
        let pool = place.pool_at(place.database.port(), CONNECTIONS, settings).await;
        Driver { place, elsewhere: Place::new(), pool, _pooler: None }
    }

    pub(crate) async fn pooled() -> Driver {
        let place = Place::new();
        // sqlx says at the start of a session how it wants numbers, which this pooler has to be told to let pass.
        let more = "ignore_startup_parameters = extra_float_digits";
        let pooler = PgBouncer::start(place.database.port(), 4, &[WORKER], more).unwrap();
        let pool = place.pool_at(pooler.port(), CONNECTIONS, "").await;
        Driver { place, elsewhere: Place::new(), pool, _pooler: Some(pooler) }
    }
}

#[async_trait]
impl StoreUnderTest for Driver {
    async fn open(&self) -> Arc<dyn Store> {
        self.place.store()
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        let by = format!("{millis} * interval '1 ms'");
        self.place.beside(&format!(
            "update {{schema}}.task set written_at = written_at - {by}, expires_at = expires_at - {by},
                    output_until = output_until - {by} where key = '{key}'"
        ));
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        let (state, token, claim) = codec::glance(bytes).unwrap_or((State::Done, Token::from(7), ClaimId::from(8)));
        let state = 1 + State::ALL.into_iter().position(|known| known == state).unwrap();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        self.place.beside(&format!(
            "insert into {{schema}}.task (key, state, token, claim, fence, attempt, owner, effect, retention,
                 output_retention, written_at, expires_at, body)
             values ('{key}', {state}, '{}', '{}', 1, 1, 'somebody', 2, 1209600000, 86400000, clock_timestamp(),
                 case when {state} in (3, 4) then clock_timestamp() + interval '14 days' end, '\\x{}')",
            hex(&token.0),
            hex(&claim.0),
            hex(bytes)
        ));
    }
}

#[async_trait]
impl TransactionsUnderTest for Driver {
    async fn open_elsewhere(&self) -> Arc<dyn Store> {
        self.elsewhere.store()
    }

    async fn effects(&self, key: &Key) -> usize {
        self.place.effects(key)
    }

    async fn run(
        &self,
        ledger: &Ledger,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        script: Arc<Script>,
    ) -> Result<Outcome<String>> {
        ledger
            .run_in_transaction_or_wait(&self.pool, task, policy, wait_max, |mut tx, context| {
                let script = &script;
                Box::pin(async move {
                    sqlx::query(EFFECT).persistent(false).bind(context.key().as_str()).execute(&mut *tx).await?;
                    Ok(script.play().await?)
                })
            })
            .await
    }

    async fn begin(&self) -> Box<dyn ByHand> {
        Box::new(Hand(self.pool.begin().await.unwrap()))
    }

    async fn step(
        &self,
        context: &Context,
        name: &str,
        input: u32,
        script: Arc<Script>,
        end: StepEnd,
    ) -> Result<String, Failure> {
        let mut tx = self.pool.begin().await?;
        let stepped = context
            .step_in_with(&mut tx, name, &input, |mut tx, _step| {
                Box::pin(async move {
                    sqlx::query(EFFECT).persistent(false).bind(context.key().as_str()).execute(&mut *tx).await?;
                    Ok(script.play().await?)
                })
            })
            .await;
        match (&stepped, end) {
            (Ok(_), StepEnd::Commit) => tx.commit().await?,
            (Ok(_), StepEnd::RollBack) | (Err(_), StepEnd::Commit | StepEnd::RollBack) => tx.rollback().await?,
        }
        stepped
    }
}

/// A transaction that a test holds.
struct Hand(Transaction<'static, Postgres>);

#[async_trait]
impl ByHand for Hand {
    async fn lock(&mut self, claim: Claim) -> (Claim, Result<()>) {
        let locked = claim.lock_in(&mut self.0).await;
        (claim, locked)
    }

    async fn add_effect(&mut self, key: &Key) {
        sqlx::query(EFFECT).persistent(false).bind(key.as_str()).execute(&mut *self.0).await.unwrap();
    }

    async fn complete(&mut self, claim: Claim, output: Output) -> Result<Completion, Refused> {
        claim.complete_in(&mut self.0, output).await
    }

    async fn commit(self: Box<Self>) {
        self.0.commit().await.unwrap();
    }

    async fn roll_back(self: Box<Self>) {
        self.0.rollback().await.unwrap();
    }
}

/// A server that is reached directly.
mod direct {
    taskonce_contract::transaction_suite!(|_| super::Driver::direct(""));
}

/// Transactions as if one followed another.
mod serializable {
    const SETTINGS: &str = "set default_transaction_isolation = 'serializable'";

    taskonce_contract::transaction_suite!(|_| super::Driver::direct(SETTINGS));
}
