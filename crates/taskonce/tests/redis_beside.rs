//! Steps beside their effects where the ledger is on Redis: what every driver promises that runs them.

#![allow(clippy::unwrap_used, reason = "a test may")]

#[path = "shops/postgres.rs"]
mod postgres_shop;
#[path = "shops/sqlite.rs"]
mod sqlite_shop;

use std::sync::Arc;

use taskonce::store::Store;
use taskonce_testkit::RedisServer;

/// A ledger's store on a server of its own, which lives as long as the way to it.
fn on_redis() -> impl Fn() -> Arc<dyn Store> + Send + Sync {
    let server = RedisServer::start(&[]).unwrap();
    move || Arc::clone(taskonce::open(&format!("{}?timeout=20s", server.url())).unwrap().store())
}

/// The effects are in PostgreSQL.
mod postgres {
    use super::on_redis;
    use super::postgres_shop::ByTokioPostgres;

    taskonce_contract::beside_suite!(|_| async { ByTokioPostgres::new("", on_redis()) });
}

/// The effects are in a SQLite file.
mod sqlite {
    use super::on_redis;
    use super::sqlite_shop::ByRusqlite;

    taskonce_contract::beside_suite!(|_| async { ByRusqlite::new(on_redis()) });
}
