//! What every driver of transactions promises, by tokio-postgres, at each isolation.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::postgres::{RunInTransaction as _, StepIn as _};
use taskonce::store::codec;
use taskonce::{ClaimId, Context, Failure, Key, Ledger, Outcome, Policy, Result, State, Store, Task, Token};
use taskonce_contract::StoreUnderTest;
use taskonce_contract::transactional::{ByHand, Script, StepEnd, TransactionsUnderTest};
use taskonce_testkit::PgBouncer;

use crate::hand::Hand;
use crate::place::{EFFECT, Place, WORKER};

/// A driver with a database of its own.
pub(crate) struct Driver {
    place: Place,
    /// Settings of each session of its clients.
    settings: &'static str,
    /// A database like it, that its transactions do not reach.
    elsewhere: Place,
    _pooler: Option<PgBouncer>,
}

impl Driver {
    fn direct(settings: &'static str) -> Driver {
        Driver { place: Place::new(), settings, elsewhere: Place::new(), _pooler: None }
    }

    pub(crate) fn pooled() -> Driver {
        let place = Place::new();
        let pooler = PgBouncer::start(place.database.port(), 4, &[WORKER], "").unwrap();
        let place = place.through(pooler.port());
        Driver { place, settings: "", elsewhere: Place::new(), _pooler: Some(pooler) }
    }

    async fn client(&self) -> Client {
        self.place.client_with(self.settings).await
    }
}

pub(crate) fn store_at(url: &str) -> Arc<dyn Store> {
    Arc::clone(taskonce::open(url).unwrap().store())
}

#[async_trait]
impl StoreUnderTest for Driver {
    async fn open(&self) -> Arc<dyn Store> {
        store_at(&self.place.url_with("timeout=20s"))
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        let sql = "update {schema}.task set written_at = written_at - $2 * interval '1 ms',
                   expires_at = expires_at - $2 * interval '1 ms', output_until = output_until - $2 * interval '1 ms'
                   where key = $1";
        self.place.beside(sql, &[&key.as_str(), &(millis as f64)]).await;
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        let (state, token, claim) = codec::glance(bytes).unwrap_or((State::Done, Token::from(7), ClaimId::from(8)));
        let state = 1 + State::ALL.into_iter().position(|known| known == state).unwrap() as i16;
        let hex = |id: [u8; 16]| format!("{:032x}", u128::from_be_bytes(id));
        let sql = "insert into {schema}.task (key, state, token, claim, fence, attempt, owner, effect, retention,
                       output_retention, written_at, expires_at, body)
                   values ($1, $2, $3::text::uuid, $4::text::uuid, 1, 1, 'somebody', 2, 1209600000, 86400000, clock_timestamp(),
                       case when $2 in (3, 4) then clock_timestamp() + interval '14 days' end, $5)";
        self.place.beside(sql, &[&key.as_str(), &state, &hex(token.0), &hex(claim.0), &bytes]).await;
    }
}

#[async_trait]
impl TransactionsUnderTest for Driver {
    async fn open_elsewhere(&self) -> Arc<dyn Store> {
        // The schema's name is the same.
        store_at(&self.elsewhere.url_with("timeout=20s"))
    }

    async fn effects(&self, key: &Key) -> usize {
        self.place.effects(key).await
    }

    async fn run(
        &self,
        ledger: &Ledger,
        task: &Task,
        policy: &Policy,
        wait_max: Duration,
        script: Arc<Script>,
    ) -> Result<Outcome<String>> {
        let mut client = self.client().await;
        ledger
            .run_in_transaction_or_wait(&mut client, task, policy, wait_max, |tx, context| {
                let script = Arc::clone(&script);
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    Ok(script.play().await?)
                })
            })
            .await
    }

    async fn begin(&self) -> Box<dyn ByHand> {
        Box::new(Hand::new(self.client().await))
    }

    async fn step(
        &self,
        context: &Context,
        name: &str,
        input: u32,
        script: Arc<Script>,
        end: StepEnd,
    ) -> std::result::Result<String, Failure> {
        let mut client = self.client().await;
        let tx = client.transaction().await?;
        let stepped = context
            .step_in_with(&tx, name, &input, |_step| async {
                tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                Ok(script.play().await?)
            })
            .await;
        match (&stepped, end) {
            (Ok(_), StepEnd::Commit) => tx.commit().await?,
            (Ok(_), StepEnd::RollBack) | (Err(_), StepEnd::Commit | StepEnd::RollBack) => tx.rollback().await?,
        }
        stepped
    }
}

/// A server that is reached directly.
mod direct {
    taskonce_contract::transaction_suite!(|_| async { super::Driver::direct("") });
}

/// Transactions that see one moment.
mod repeatable_read {
    const SETTINGS: &str = "set default_transaction_isolation = 'repeatable read'";

    taskonce_contract::transaction_suite!(|_| async { super::Driver::direct(SETTINGS) });
}

/// Transactions as if one followed another.
mod serializable {
    const SETTINGS: &str = "set default_transaction_isolation = 'serializable'";

    taskonce_contract::transaction_suite!(|_| async { super::Driver::direct(SETTINGS) });
}
