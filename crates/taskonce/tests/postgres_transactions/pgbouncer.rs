//! What every driver of transactions promises, by tokio-postgres behind a PgBouncer in transaction mode.

use crate::contract::Driver;

taskonce_contract::transaction_suite!(|_| async { Driver::pooled() });
