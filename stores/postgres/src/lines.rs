//! The lines of statements that many calls share: heartbeats always, claims and ends where many come at once.
//!
//! What another transaction holds is passed over, so that a claim whose completion is under way costs the others nothing: a
//! heartbeat is told so, an end is asked alone and waits. A claim waits for a row that another is making, but not long.

use std::collections::BTreeMap;

use taskonce_core::error::Result;
use taskonce_core::key::Key;
use taskonce_core::record::{Fence, Found, Token};
use taskonce_core::store::Swap;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::desk::{Desk, Line};
use crate::fault::Fault;
use crate::pool::Sent;
use crate::row::{self, Kept};
use crate::sql::Verb;
use crate::store::{Columns, Here, Write, misread};

/// The desks of one process and runtime.
#[derive(Default)]
pub(crate) struct Desks {
    renewals: Desk<Renewal>,
    claims: Desk<NewClaim>,
    ends: Desk<End>,
}

/// One claim to renew.
pub(crate) struct Renewal {
    pub(crate) expected: Token,
    pub(crate) token: Token,
    pub(crate) body: Vec<u8>,
}

impl Line for Renewal {
    /// Two writes of one claim come from its own process, and each has its turn.
    const SHARED: bool = true;

    fn desk(here: &Here) -> &Desk<Renewal> {
        &here.desks.renewals
    }

    fn bytes(&self) -> usize {
        self.body.len()
    }

    fn alone(&self) -> Option<(Option<Token>, Write<'_>)> {
        None
    }

    async fn ask(here: &Here, batch: &BTreeMap<Key, Renewal>, sent: &mut Sent) -> Result<Vec<Row>, Fault> {
        let keys: Vec<&str> = batch.keys().map(Key::as_str).collect();
        let expected: Vec<Uuid> = batch.values().map(|renewal| Uuid::from_bytes(renewal.expected.0)).collect();
        let tokens: Vec<Uuid> = batch.values().map(|renewal| Uuid::from_bytes(renewal.token.0)).collect();
        let bodies: Vec<&[u8]> = batch.values().map(|renewal| renewal.body.as_slice()).collect();
        let parameters: [&(dyn ToSql + Sync); 4] = [&keys, &expected, &tokens, &bodies];
        here.pool.ask_noting(sent, Verb::Renew, &parameters, here.pool.deadline()).await
    }

    fn judge(&self, key: &Key, row: &Row) -> Result<Option<Swap>> {
        Ok(Some(match read(key, row)? {
            Read::Written(fence) => Swap::Stored(fence),
            Read::Nothing => Swap::Conflict(None),
            Read::Found(found) if found.record.token == self.token => Swap::Stored(found.record.fence),
            // It was passed over: a transaction holds it, and may be completing it.
            Read::Found(found) if found.record.token == self.expected => Swap::Locked(Some(found)),
            Read::Found(found) => Swap::Conflict(Some(found)),
        }))
    }
}

/// One new claim, for a key that is expected to hold nothing.
pub(crate) struct NewClaim(pub(crate) Kept);

impl Line for NewClaim {
    const SHARED: bool = false;

    fn desk(here: &Here) -> &Desk<NewClaim> {
        &here.desks.claims
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn alone(&self) -> Option<(Option<Token>, Write<'_>)> {
        Some((None, Write::Claim(self.0.as_line())))
    }

    async fn ask(here: &Here, batch: &BTreeMap<Key, NewClaim>, sent: &mut Sent) -> Result<Vec<Row>, Fault> {
        let lines = Lines::of(batch.iter().map(|(key, claim)| (key, None, &claim.0)));
        lines.ask(here, LinesVerb::Claims, sent).await
    }

    fn judge(&self, key: &Key, row: &Row) -> Result<Option<Swap>> {
        Ok(match read(key, row)? {
            Read::Written(fence) => Some(Swap::Stored(fence)),
            // Who came in between is not to be seen yet.
            Read::Nothing => None,
            Read::Found(found) if found.record.token.0 == self.0.line.token.into_bytes() => {
                Some(Swap::Stored(found.record.fence))
            }
            Read::Found(found) => Some(Swap::Conflict(Some(found))),
        })
    }
}

/// One record that takes the place of a holder's.
pub(crate) struct End {
    pub(crate) expected: Token,
    pub(crate) columns: Columns,
    pub(crate) record: Kept,
}

impl Line for End {
    const SHARED: bool = false;

    fn desk(here: &Here) -> &Desk<End> {
        &here.desks.ends
    }

    fn bytes(&self) -> usize {
        self.record.bytes()
    }

    fn alone(&self) -> Option<(Option<Token>, Write<'_>)> {
        Some((Some(self.expected), Write::Keep(self.record.as_line(), self.columns)))
    }

    async fn ask(here: &Here, batch: &BTreeMap<Key, End>, sent: &mut Sent) -> Result<Vec<Row>, Fault> {
        let lines = Lines::of(batch.iter().map(|(key, end)| (key, Some(end.expected), &end.record)));
        let only_ends = batch.values().all(|end| end.columns == Columns::Ends);
        lines.ask(here, LinesVerb::Replace(if only_ends { Columns::Ends } else { Columns::All }), sent).await
    }

    fn judge(&self, key: &Key, row: &Row) -> Result<Option<Swap>> {
        written(key, row).map(|fence| fence.map(Swap::Stored))
    }
}

/// What a row of a batch says of its key.
enum Read {
    Written(Fence),
    Nothing,
    Found(Found),
}

/// The fence of what was written, behind the key.
fn written(key: &Key, row: &Row) -> Result<Option<Fence>> {
    let fence = row.try_get::<_, Option<i64>>(1).map_err(|error| misread(key, &error))?;
    Ok(fence.map(|fence| Fence(u64::try_from(fence).unwrap_or(0))))
}

/// The key, the fence of what was written, and what is there otherwise.
fn read(key: &Key, row: &Row) -> Result<Read> {
    let misread = |error: tokio_postgres::Error| misread(key, &error);
    if let Some(fence) = written(key, row)? {
        return Ok(Read::Written(fence));
    }
    if row.try_get::<_, Option<i16>>(2).map_err(misread)?.is_none() {
        return Ok(Read::Nothing);
    }
    row::found(key, row, 2).map(Read::Found)
}

/// What a statement does with many records.
enum LinesVerb {
    Claims,
    Replace(Columns),
}

/// Records as columns of arrays, in the order of the parameters.
#[derive(Default)]
struct Lines<'a> {
    keys: Vec<&'a str>,
    expected: Vec<Option<Uuid>>,
    tokens: Vec<Uuid>,
    claims: Vec<Uuid>,
    fences: Vec<i64>,
    states: Vec<i16>,
    attempts: Vec<i32>,
    owners: Vec<&'a str>,
    effects: Vec<i16>,
    retentions: Vec<i64>,
    output_retentions: Vec<i64>,
    expire_after: Vec<Option<i64>>,
    outputs_after: Vec<Option<i64>>,
    output_types: Vec<Option<&'a str>>,
    outputs: Vec<Option<&'a [u8]>>,
    bodies: Vec<&'a [u8]>,
}

impl<'a> Lines<'a> {
    fn of(records: impl Iterator<Item = (&'a Key, Option<Token>, &'a Kept)>) -> Lines<'a> {
        let mut lines = Lines::default();
        for (key, expected, kept) in records {
            let line = &kept.line;
            lines.keys.push(key.as_str());
            lines.expected.push(expected.map(|token| Uuid::from_bytes(token.0)));
            lines.tokens.push(line.token);
            lines.claims.push(line.claim);
            lines.fences.push(line.fence);
            lines.states.push(line.state);
            lines.attempts.push(line.attempt);
            lines.owners.push(&line.owner);
            lines.effects.push(line.effect);
            lines.retentions.push(line.retention);
            lines.output_retentions.push(line.output_retention);
            lines.expire_after.push(line.expires_after);
            lines.outputs_after.push(line.output_after);
            lines.output_types.push(kept.output.as_ref().map(|(name, _)| name.as_str()));
            lines.outputs.push(kept.output.as_ref().map(|(_, bytes)| bytes.as_slice()));
            lines.bodies.push(&line.body);
        }
        lines
    }

    /// The rows of a statement for them.
    async fn ask(&self, here: &Here, verb: LinesVerb, sent: &mut Sent) -> Result<Vec<Row>, Fault> {
        let deadline = here.pool.deadline();
        match verb {
            LinesVerb::Claims => {
                let parameters: [&(dyn ToSql + Sync); 10] = [
                    &self.keys,
                    &self.tokens,
                    &self.claims,
                    &self.states,
                    &self.attempts,
                    &self.owners,
                    &self.effects,
                    &self.retentions,
                    &self.output_retentions,
                    &self.bodies,
                ];
                here.pool.ask_noting(sent, Verb::InsertClaims, &parameters, deadline).await
            }
            LinesVerb::Replace(Columns::Ends) => {
                let parameters: [&(dyn ToSql + Sync); 9] = [
                    &self.keys,
                    &self.expected,
                    &self.tokens,
                    &self.states,
                    &self.expire_after,
                    &self.outputs_after,
                    &self.output_types,
                    &self.outputs,
                    &self.bodies,
                ];
                here.pool.ask_noting(sent, Verb::ReplaceEnds, &parameters, deadline).await
            }
            LinesVerb::Replace(Columns::All) => {
                let parameters: [&(dyn ToSql + Sync); 16] = [
                    &self.keys,
                    &self.expected,
                    &self.tokens,
                    &self.claims,
                    &self.fences,
                    &self.states,
                    &self.attempts,
                    &self.owners,
                    &self.effects,
                    &self.retentions,
                    &self.output_retentions,
                    &self.expire_after,
                    &self.outputs_after,
                    &self.output_types,
                    &self.outputs,
                    &self.bodies,
                ];
                here.pool.ask_noting(sent, Verb::ReplaceKeeps, &parameters, deadline).await
            }
        }
    }
}
