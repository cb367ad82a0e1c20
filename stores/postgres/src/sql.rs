//! The statements, made once for a schema: all that a call sends.
//!
//! Each is one statement, so one transaction. A claim is sent with a look at what it may have met, in one round trip; the other
//! writes of a holder nearly always find what they expect, and leave that look to a second one.

use std::time::Duration;

use tokio_postgres::types::Type;

use crate::row::{COLUMNS, NO_COLUMNS};

/// A statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// What a key holds.
    Load,
    /// The same as the answer to a claim that stored nothing.
    LoadRefusal,
    /// Puts a new claim where nothing is, and reads what is there otherwise.
    InsertClaim,
    /// Puts a new claim where nothing is, and leaves it to a look behind it to say what is there.
    TryClaim,
    /// The same for a record with the fence that it carries.
    InsertKeep,
    /// Replaces the version with a token by a new claim, and reads what is there otherwise, also where a
    /// transaction holds it.
    ReplaceClaim,
    /// Replaces the version with a token by a record with the fence that it carries.
    ReplaceKeep,
    /// The same for a record that differs from that version only by what the end of an attempt changes.
    ReplaceEnd,
    /// Removes the version with a token.
    Erase,
    /// Renews many claims.
    Renew,
    /// Puts many new claims where nothing is, and reads what is there otherwise.
    InsertClaims,
    /// Replaces versions with their tokens by records with the fences that they carry.
    ReplaceKeeps,
    /// The same for records that differ from those versions only by what the end of an attempt changes.
    ReplaceEnds,
    /// Removes bytes that are no record.
    Discard,
    /// One page of all records.
    Scan,
    /// One page of those that are not done.
    ScanOpen,
    /// Removes records past their retention.
    PurgeRecords,
    /// Removes outputs past theirs.
    PurgeOutputs,
    /// The life of what the store holds.
    Generation,
}

/// How many statements there are.
pub(crate) const VERBS: usize = 19;

/// What a pooler that lends connections by the transaction leaves of settings, said in the statement itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// The session has them.
    BySession,
    /// Each statement sets how long it waits for a lock, in milliseconds.
    ByStatement(u128),
}

/// The statements for one schema.
pub(crate) struct Sql {
    texts: [String; VERBS],
}

/// Milliseconds of a parameter as an interval.
const MS: &str = "interval '1 millisecond'";
/// The longest that a statement waits for what a transaction holds. Who has to wait longer asks again, and keeps neither a
/// connection nor those who come after it.
pub(crate) const LOCK_WAIT_MAX: Duration = Duration::from_millis(20);
/// The most values of the sequence that one claim passes over to come above the fence that its record has had.
const FENCE_STEPS_MAX: u32 = 1000;

impl Sql {
    pub(crate) fn new(schema: &str, waits: Waits) -> Sql {
        let wait = match waits {
            Waits::BySession => String::new(),
            // Read where the statement begins to wait, and gone with its transaction.
            Waits::ByStatement(millis) => {
                format!("and (select set_config('lock_timeout', '{millis}ms', true)) is not null")
            }
        };
        let task = format!("\"{schema}\".task");
        let next_fence = format!("nextval('\"{schema}\".fence'::regclass)");
        let texts = ALL.map(|verb| match verb {
            Verb::Load => format!("select {COLUMNS} from {task} t where t.key = $1"),
            Verb::LoadRefusal => format!("select null::bigint, {COLUMNS} from {task} t where t.key = $1"),
            Verb::InsertClaim => insert(&task, &claim(&next_fence), &wait),
            // The same condition: a duplicate must take no value of the sequence.
            Verb::TryClaim => format!(
                "insert into {task} {} where not exists (select from {task} t where t.key = $1) {wait}
                 on conflict (key) do nothing returning fence",
                claim(&next_fence)
            ),
            Verb::InsertKeep => insert(&task, &keep(), &wait),
            Verb::ReplaceClaim => {
                // Usually one value. A person's redrive raises a fence without the sequence, which then is passed by.
                let steps = format!(
                    "recursive step(fence, number) as (
                         select {next_fence}, 1
                         union all select {next_fence}, number + 1 from step where fence < $5 and number < {FENCE_STEPS_MAX}),
                     held as materialized (
                         select from {task} t where t.key = $1 and t.token = $2 for no key update skip locked),"
                );
                // A duplicate of a task that is long in its transaction must not keep a connection waiting.
                replace(&task, &steps, "(select greatest(max(fence), $5) from step)", "and exists (select from held)")
            }
            Verb::ReplaceKeep => update(&task, &whole("$5"), &wait),
            Verb::ReplaceEnd => update(
                &task,
                &format!(
                    "token = $3, state = $4, written_at = clock_timestamp(), expires_at = clock_timestamp() + $5 * {MS},
                     output_until = clock_timestamp() + $6 * {MS}, output_type = $7, output = $8, body = $9"
                ),
                &wait,
            ),
            Verb::Erase => format!(
                "with gone as (delete from {task} t where t.key = $1 and t.token = $2 {wait} returning t.fence)
                 select gone.fence, {NO_COLUMNS} from gone
                 union all select null, {COLUMNS} from {task} t where t.key = $1 and not exists (select from gone)"
            ),
            // What another transaction holds is passed over: it may be completing.
            Verb::Renew => format!(
                "with want as (select * from unnest($1::text[], $2::uuid[], $3::uuid[], $4::bytea[]) as w(key, expected, token, body)),
                      held as materialized (
                          select t.key from {task} t join want on want.key = t.key
                          where t.token = want.expected and t.state = 1
                          order by t.key for update of t skip locked),
                      put as (
                          update {task} t set token = want.token, written_at = clock_timestamp(), body = want.body
                          from held join want on want.key = held.key where t.key = held.key
                          returning t.key, t.fence)
                 select want.key, put.fence, {COLUMNS}
                 from want left join put on put.key = want.key
                      left join {task} t on t.key = want.key and put.key is null"
            ),
            Verb::InsertClaims => format!(
                "with want as (select * from {CLAIMS}),
                      there as materialized (select want.key as wanted, {COLUMNS} from want join {task} t on t.key = want.key),
                      put as (
                          insert into {task} (key, token, claim, fence, state, attempt, owner, effect, retention,
                                              output_retention, written_at, body)
                          select key, token, claim, {next_fence}, state, attempt, owner, effect, retention,
                                 output_retention, clock_timestamp(), body
                          from want where not exists (select from there where wanted = want.key) {wait}
                          order by key on conflict (key) do nothing returning key, fence)
                 select put.key, put.fence, {NO_COLUMNS} from put union all select there.wanted, null, {THERE} from there"
            ),
            Verb::ReplaceKeeps => update_many(
                &task,
                LINES,
                &format!(
                    "token = held.token, claim = held.claim, fence = held.fence, state = held.state, attempt = held.attempt,
                     owner = held.owner, effect = held.effect, retention = held.retention,
                     output_retention = held.output_retention, {HELD_END}"
                ),
            ),
            Verb::ReplaceEnds => {
                update_many(&task, ENDS, &format!("token = held.token, state = held.state, {HELD_END}"))
            }
            Verb::Discard => format!(
                "with gone as (delete from {task} where key = $1 and token = $2 and body = $3 {wait} returning 1)
                 select 1 from gone"
            ),
            Verb::Scan => scan(&task, ""),
            Verb::ScanOpen => scan(&task, "and state <> 3"),
            Verb::PurgeRecords => format!(
                "delete from {task} where key in (
                     select key from {task}
                     where expires_at <= (select clock_timestamp()) and state in (3, 4) and {AMONG}
                     order by expires_at limit $1 for update skip locked)
                 returning 1"
            ),
            Verb::PurgeOutputs => format!(
                "update {task} set output = null, output_until = null where key in (
                     select key from {task}
                     where output_until <= (select clock_timestamp()) and state = 3 and expires_at > (select clock_timestamp())
                           and {AMONG}
                     order by output_until limit $1 for update skip locked)
                 returning 1"
            ),
            Verb::Generation => format!(
                "select pg_is_in_recovery(),
                        case when pg_is_in_recovery() then null else substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) end,
                        born::text
                 from \"{schema}\".meta"
            ),
        });
        Sql { texts }
    }

    pub(crate) fn text(&self, verb: Verb) -> &str {
        &self.texts[verb as usize]
    }
}

/// Every statement, in the order of the enumeration.
const ALL: [Verb; VERBS] = [
    Verb::Load,
    Verb::LoadRefusal,
    Verb::InsertClaim,
    Verb::TryClaim,
    Verb::InsertKeep,
    Verb::ReplaceClaim,
    Verb::ReplaceKeep,
    Verb::ReplaceEnd,
    Verb::Erase,
    Verb::Renew,
    Verb::InsertClaims,
    Verb::ReplaceKeeps,
    Verb::ReplaceEnds,
    Verb::Discard,
    Verb::Scan,
    Verb::ScanOpen,
    Verb::PurgeRecords,
    Verb::PurgeOutputs,
    Verb::Generation,
];

impl Verb {
    /// The types of its parameters.
    pub(crate) fn types(self) -> &'static [Type] {
        const LINE: &[Type] = &[
            Type::TEXT,  // $1 key
            Type::UUID,  // $2 the token that is expected
            Type::UUID,  // $3 token
            Type::UUID,  // $4 claim
            Type::INT8,  // $5 fence
            Type::INT2,  // $6 state
            Type::INT4,  // $7 attempt
            Type::TEXT,  // $8 owner
            Type::INT2,  // $9 effect
            Type::INT8,  // $10 retention
            Type::INT8,  // $11 retention of the output
            Type::INT8,  // $12 expires after
            Type::INT8,  // $13 the output goes after
            Type::TEXT,  // $14 type of the output
            Type::BYTEA, // $15 output
            Type::BYTEA, // $16 body
        ];
        // Of them $1, $3, $4, $6 to $11 and $16.
        const CLAIM: &[Type] = &[
            Type::TEXT,
            Type::UUID,
            Type::UUID,
            Type::INT2,
            Type::INT4,
            Type::TEXT,
            Type::INT2,
            Type::INT8,
            Type::INT8,
            Type::BYTEA,
        ];
        // Of them $1 to $3, $6 and $12 to $16.
        const END: &[Type] = &[
            Type::TEXT,
            Type::UUID,
            Type::UUID,
            Type::INT2,
            Type::INT8,
            Type::INT8,
            Type::TEXT,
            Type::BYTEA,
            Type::BYTEA,
        ];
        // The same three, an array each.
        const LINES: &[Type] = &[
            Type::TEXT_ARRAY,
            Type::UUID_ARRAY,
            Type::UUID_ARRAY,
            Type::UUID_ARRAY,
            Type::INT8_ARRAY,
            Type::INT2_ARRAY,
            Type::INT4_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT2_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
            Type::BYTEA_ARRAY,
            Type::BYTEA_ARRAY,
        ];
        const CLAIMS: &[Type] = &[
            Type::TEXT_ARRAY,
            Type::UUID_ARRAY,
            Type::UUID_ARRAY,
            Type::INT2_ARRAY,
            Type::INT4_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT2_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::BYTEA_ARRAY,
        ];
        const ENDS: &[Type] = &[
            Type::TEXT_ARRAY,
            Type::UUID_ARRAY,
            Type::UUID_ARRAY,
            Type::INT2_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
            Type::BYTEA_ARRAY,
            Type::BYTEA_ARRAY,
        ];
        // $1 most rows, $2 first key, $3 end of keys, $4 handler, $5 beginning of the id, $6 states, $7 least age
        const AMONG: &[Type] =
            &[Type::INT8, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::INT2_ARRAY, Type::INT8];
        // And $8 behind this key, $9 most bytes
        const SCAN: &[Type] = &[
            Type::INT8,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::TEXT,
            Type::INT2_ARRAY,
            Type::INT8,
            Type::TEXT,
            Type::INT8,
        ];
        match self {
            Verb::Load | Verb::LoadRefusal => &[Type::TEXT],
            Verb::InsertClaim | Verb::TryClaim => CLAIM,
            Verb::InsertKeep | Verb::ReplaceClaim | Verb::ReplaceKeep => LINE,
            Verb::ReplaceEnd => END,
            Verb::Erase => &[Type::TEXT, Type::UUID],
            Verb::Renew => &[Type::TEXT_ARRAY, Type::UUID_ARRAY, Type::UUID_ARRAY, Type::BYTEA_ARRAY],
            Verb::InsertClaims => CLAIMS,
            Verb::ReplaceKeeps => LINES,
            Verb::ReplaceEnds => ENDS,
            Verb::Discard => &[Type::TEXT, Type::UUID, Type::BYTEA],
            Verb::Scan | Verb::ScanOpen => SCAN,
            Verb::PurgeRecords | Verb::PurgeOutputs => AMONG,
            Verb::Generation => &[],
        }
    }
}

/// Many records, a row each, in the order of the parameters.
const LINES: &str = "unnest($1::text[], $2::uuid[], $3::uuid[], $4::uuid[], $5::bigint[], $6::smallint[], $7::integer[],
        $8::text[], $9::smallint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::text[], $15::bytea[],
        $16::bytea[])
    as w(key, expected, token, claim, fence, state, attempt, owner, effect, retention, output_retention, expires_after,
         output_after, output_type, output, body)";

/// The same of new claims.
const CLAIMS: &str =
    "unnest($1::text[], $2::uuid[], $3::uuid[], $4::smallint[], $5::integer[], $6::text[], $7::smallint[],
        $8::bigint[], $9::bigint[], $10::bytea[])
    as w(key, token, claim, state, attempt, owner, effect, retention, output_retention, body)";

/// The same of ends.
const ENDS: &str = "unnest($1::text[], $2::uuid[], $3::uuid[], $4::smallint[], $5::bigint[], $6::bigint[], $7::text[],
        $8::bytea[], $9::bytea[])
    as w(key, expected, token, state, expires_after, output_after, output_type, output, body)";

/// What an end changes, but for the token and the state.
const HELD_END: &str =
    "written_at = clock_timestamp(), expires_at = clock_timestamp() + held.expires_after * interval '1 millisecond',
    output_until = clock_timestamp() + held.output_after * interval '1 millisecond', output_type = held.output_type,
    output = held.output, body = held.body";

/// What [`COLUMNS`] read of a row that is there already.
const THERE: &str = "state, token, claim, fence, age, body, output_type, output";

/// Which keys and states a filter admits; `$7` is the least age of the last write, in milliseconds.
const AMONG: &str = "key >= $2 and key < $3
    and ($4::text is null or split_part(split_part(key, '/', 2), '@', 1) = $4)
    and starts_with(substr(key, length(split_part(key, '/', 1)) + length(split_part(key, '/', 2)) + 3), $5)
    and ($6::smallint[] is null or state = any($6))
    and ($7 <= 0 or written_at <= clock_timestamp() - $7 * interval '1 millisecond')";

/// The columns of a new claim, and their values but for a condition. It has no output and no end, and each column more costs the
/// server time.
fn claim(next_fence: &str) -> String {
    format!(
        "(key, token, claim, fence, state, attempt, owner, effect, retention, output_retention, written_at, body)
         select $1, $2, $3, {next_fence}, $4, $5, $6, $7, $8, $9, clock_timestamp(), $10"
    )
}

/// The same of a whole record.
fn keep() -> String {
    format!(
        "(key, token, claim, fence, state, attempt, owner, effect, retention, output_retention, written_at, expires_at,
          output_until, output_type, output, body)
         select $1, $3, $4, $5, $6, $7, $8, $9, $10, $11, clock_timestamp(), clock_timestamp() + $12 * {MS},
                clock_timestamp() + $13 * {MS}, $14, $15, $16"
    )
}

/// A duplicate must cost no more than a read: no lock, no value of the sequence, and so no flush. So the row is looked for
/// first, and nothing is tried where there is one. Who comes in between is met by the index, and then neither part
/// has a row: the caller asks again.
fn insert(task: &str, values: &str, wait: &str) -> String {
    format!(
        "with there as materialized (select {COLUMNS} from {task} t where t.key = $1),
              put as (
                  insert into {task} {values} where not exists (select from there) {wait}
                  on conflict (key) do nothing returning fence)
         select put.fence, {NO_COLUMNS} from put union all select null, there.* from there"
    )
}

/// Changes the version with a token: the fence that is written, or no row.
fn update(task: &str, changes: &str, wait: &str) -> String {
    format!("update {task} t set {changes} where t.key = $1 and t.token = $2 {wait} returning t.fence")
}

/// Every column.
fn whole(fence: &str) -> String {
    format!(
        "token = $3, claim = $4, fence = {fence}, state = $6, attempt = $7, owner = $8, effect = $9, retention = $10,
         output_retention = $11, written_at = clock_timestamp(), expires_at = clock_timestamp() + $12 * {MS},
         output_until = clock_timestamp() + $13 * {MS}, output_type = $14, output = $15, body = $16"
    )
}

/// Changes many. What a transaction holds is passed over, and then asked alone, as is what is not as expected.
fn update_many(task: &str, lines: &str, changes: &str) -> String {
    format!(
        "with held as materialized (
             select w.* from {lines} join {task} t on t.key = w.key
             where t.token = w.expected order by w.key for update of t skip locked)
         update {task} t set {changes} from held where t.key = held.key returning t.key, t.fence"
    )
}

/// The same, and reads what is there where it replaced nothing.
pub(crate) fn replace(task: &str, steps: &str, fence: &str, wait: &str) -> String {
    let put = update(task, &whole(fence), wait);
    format!(
        "with {steps} put as ({put})
         select put.fence, {NO_COLUMNS} from put
         union all select null, {COLUMNS} from {task} t where t.key = $1 and not exists (select from put)"
    )
}

/// A window of rows in the order of their keys; those that do not match, and those behind the most bytes, without what they
/// hold.
fn scan(task: &str, only: &str) -> String {
    format!(
        "select w.key, w.is_match, coalesce(w.bytes_before, 0) < $9 as is_here, t.*
         from (select key, ({AMONG}) as is_match,
                      sum(case when {AMONG} then octet_length(body) + coalesce(octet_length(output), 0) else 0 end)
                          over (order by key rows between unbounded preceding and 1 preceding) as bytes_before
               from (select * from {task} where key > $8 and key >= $2 and key < $3 {only} order by key limit $1) as looked) as w
              left join lateral (
                  select {COLUMNS} from {task} t
                  where t.key = w.key and w.is_match and coalesce(w.bytes_before, 0) < $9) as t on true
         order by w.key"
    )
}
