//! The same as plain SQL, for workers of other languages and for people: lock a claim and complete it in a transaction of
//! one's own. The tests and the documentation use these very texts.
//!
//! Parameters are written as PostgreSQL has them, `$1`; drivers that use `%s` or `?` take them in the same order.

/// Locks the record of a claim that holds: `$1` the key, `$2` the claim. No row: the claim is lost, and nothing may be done
/// in its name. To be run first of all in the transaction, at READ COMMITTED.
pub const LOCK: &str = "\
select fence, attempt
from {schema}.task
where key = $1::text and claim = $2::uuid and state = 1
for update";

/// Completes the claim in the same transaction: `$1` the key, `$2` the claim, `$3` the output or null, `$4` what the output is, such as
/// `application/json`, or null. It must change one row: none means that the claim is lost, and then the transaction must be
/// rolled back.
pub const COMPLETE: &str = "\
update {schema}.task
set state = 3,
    token = gen_random_uuid(),
    output = $3::bytea,
    output_type = case when $3::bytea is null then null else $4::text end,
    written_at = clock_timestamp(),
    expires_at = clock_timestamp() + retention * interval '1 millisecond',
    output_until = case when $3::bytea is null then null else clock_timestamp() + output_retention * interval '1 millisecond' end
where key = $1::text and claim = $2::uuid and state = 1";

/// Bounds how long the transaction may hold the record without saying anything. A worker that was stopped inside must not hold it
/// for ever.
pub const LIMITS: &str = "\
set local lock_timeout = '500ms';
set local idle_in_transaction_session_timeout = '30s'";

/// One of these texts for a schema.
///
/// The schema's name is quoted; it is one that a store's URL takes (letters, digits and `_`).
#[must_use]
pub fn plain_sql(text: &str, schema: &str) -> String {
    text.replace("{schema}", &format!("\"{schema}\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrate::grants_sql;

    #[test]
    fn the_page_and_the_example_in_python_show_the_very_statements() {
        let page = include_str!("../../../docs/postgres.md");
        let example = include_str!("../../../crates/taskonce/examples/python/event_consumer.py");
        for text in [LOCK, COMPLETE, LIMITS] {
            assert!(page.contains(&plain_sql(text, "taskonce")), "{text}");
            assert!(example.contains(text), "{text}");
        }
        assert!(page.contains(&grants_sql("taskonce", "worker").unwrap()));
    }
}
