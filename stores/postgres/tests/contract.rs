//! What every store promises, in a database of its own for each case: by a user with the least rights, directly and
//! through a pooler that lends connections by the transaction.

#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::sync::Arc;

use async_trait::async_trait;
use common::Place;
use taskonce_contract::StoreUnderTest;
use taskonce_core::codec;
use taskonce_core::key::Key;
use taskonce_core::record::{ClaimId, State, Token};
use taskonce_core::store::Store;
use taskonce_postgres::PostgresStore;

/// The longest that a call may take: a machine under load is slow, and no case is about that.
const TIMEOUT: &str = "20s";

#[async_trait]
impl StoreUnderTest for Place {
    async fn open(&self) -> Arc<dyn Store> {
        let url = self.url_with(&format!("timeout={TIMEOUT}"));
        Arc::new(PostgresStore::from_url(&url).unwrap())
    }

    async fn shift_age(&self, key: &Key, millis: i64) {
        let sql = "update {schema}.task set written_at = written_at - $2 * interval '1 ms',
                   expires_at = expires_at - $2 * interval '1 ms', output_until = output_until - $2 * interval '1 ms'
                   where key = $1";
        self.beside(sql, &[&key.as_str(), &(millis as f64)]).await;
    }

    async fn put_raw(&self, key: &Key, bytes: &[u8]) {
        // As a program that knows the columns would, as far as the bytes say what they are.
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
        self.beside(sql, &[&key.as_str(), &state, &id(token.0), &id(claim.0), &bytes, &head.is_some()]).await;
    }
}

/// A server that is reached directly.
mod direct {
    use taskonce_contract::store_suite;

    use super::common::Place;

    async fn open(_case: &str) -> Place {
        Place::direct().await
    }

    store_suite!(open);
}

/// A server behind a PgBouncer in transaction mode.
mod pooled {
    use taskonce_contract::store_suite;

    use super::common::Place;

    async fn open(_case: &str) -> Place {
        Place::pooled(4).await
    }

    store_suite!(open);
}
