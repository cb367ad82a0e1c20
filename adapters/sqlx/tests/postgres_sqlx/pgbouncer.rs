//! What every driver of transactions promises, by sqlx behind a PgBouncer in transaction mode.

use crate::contract::Driver;

taskonce_contract::transaction_suite!(|_| Driver::pooled());
