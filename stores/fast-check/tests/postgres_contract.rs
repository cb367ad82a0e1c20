//! What every store promises, with a Redis as the front and a PostgreSQL database as the ledger; and what a standby that was
//! promoted has forgotten.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "../../postgres/tests/common/mod.rs"]
mod database;

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use taskonce_contract::StoreUnderTest;
use taskonce_core::codec;
use taskonce_core::key::Key;
use taskonce_core::record::{ClaimId, State, Token};
use taskonce_core::store::Store;
use taskonce_fast_check::{DoneHint, FastCheck, Options};
use taskonce_postgres::PostgresStore;
use taskonce_redis::RedisStore;
use taskonce_testkit::RedisServer;

const PREFIX: &str = "hint:";

/// What the front is given on a busy machine: a hint that was not written in time only delays, and the cases ask for more.
const FRONT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// A database and a server for the records and hints of one case.
struct Place {
    database: database::Place,
    front: RedisServer,
    done: DoneHint,
    opened: Mutex<Vec<FastCheck>>,
}

impl Place {
    async fn new(done: DoneHint) -> Place {
        let front = RedisServer::start(&[]).unwrap();
        Place { database: database::Place::direct().await, front, done, opened: Mutex::default() }
    }
}

#[async_trait]
impl StoreUnderTest for Place {
    async fn open(&self) -> Arc<dyn Store> {
        let ledger = PostgresStore::from_url(&self.database.url_with("timeout=20s")).unwrap();
        let front = RedisStore::from_url(&format!("{}?prefix={PREFIX}", self.front.url())).unwrap();
        let options = Options { done: self.done, front_timeout: FRONT_TIMEOUT, ..Options::default() };
        let fast = FastCheck::new(Arc::new(front), Arc::new(ledger), options);
        self.opened.lock().unwrap().push(fast.clone());
        Arc::new(fast)
    }

    /// Both clocks go on: those of the database and of the front. Hints under way are of the time before.
    async fn shift_age(&self, key: &Key, millis: i64) {
        let opened = self.opened.lock().unwrap().clone();
        for fast in opened {
            fast.hints_written().await;
        }
        let name = format!("{PREFIX}{key}");
        let left = self.front.command(&["PTTL", &name]).unwrap().int().unwrap();
        if left >= 0 {
            self.front.command(&["PEXPIRE", &name, &(left - millis).to_string()]).unwrap();
        }
        let sql = "update {schema}.task set written_at = written_at - $2 * interval '1 ms',
                   expires_at = expires_at - $2 * interval '1 ms', output_until = output_until - $2 * interval '1 ms'
                   where key = $1";
        self.database.beside(sql, &[&key.as_str(), &(millis as f64)]).await;
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        let head = codec::glance(bytes);
        let (state, token, claim) = head.unwrap_or((State::Done, Token::from(7), ClaimId::from(8)));
        let state = 1 + State::ALL.into_iter().position(|known| known == state).unwrap() as i16;
        let id = |bytes: [u8; 16]| uuid::Uuid::from_bytes(bytes);
        let sql = "insert into {schema}.task as t (key, state, token, claim, fence, attempt, owner, effect, retention,
                       output_retention, written_at, expires_at, body)
                   values ($1, $2::smallint, $3, $4, 1, 1, 'somebody', 2, 1209600000, 86400000, clock_timestamp(),
                       case when $2::smallint in (3, 4) then clock_timestamp() + interval '14 days' end, $5)
                   on conflict (key) do update set body = $5,
                       state = case when $6 then $2::smallint else t.state end,
                       token = case when $6 then $3 else t.token end,
                       claim = case when $6 then $4 else t.claim end,
                       expires_at = case when $6 then excluded.expires_at else t.expires_at end";
        self.database.beside(sql, &[&key.as_str(), &state, &id(token.0), &id(claim.0), &bytes, &head.is_some()]).await;
    }
}

/// Hints of done tasks are verified.
mod verified {
    use taskonce_contract::store_suite;
    use taskonce_fast_check::DoneHint;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::new(DoneHint::Verified).await
    }

    store_suite!(open);
}

/// Hints of done tasks are trusted.
mod trusted {
    use taskonce_contract::store_suite;
    use taskonce_fast_check::DoneHint;

    use super::Place;

    async fn open(_case: &str) -> Place {
        Place::new(DoneHint::Trusted).await
    }

    store_suite!(open);
}
