//! A record as a row, and back: what lies in columns, what in the body, and which of the two decides.
//!
//! The columns have what a person or another program may need, and write: the token, the fence, the state, the output.
//! The body is the codec's record without the output that is kept; in its place stands that it has expired, which is true
//! as soon as the column is empty.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::codec;
use taskonce_core::decide;
use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::key::Key;
use taskonce_core::policy::Effect;
use taskonce_core::record::{Age, ClaimId, DropReason, Fence, Found, Output, Record, State, Token};
use tokio_postgres::Row;
use uuid::Uuid;

/// The columns of a record as [`found`] reads them, of the table named `t`. The clock is read after the row.
pub(crate) const COLUMNS: &str = "t.state, t.token, t.claim, t.fence, \
     floor(date_part('epoch', clock_timestamp() - t.written_at) * 1000)::bigint as age, t.body, t.output_type, \
     case when t.output_until <= clock_timestamp() then null else t.output end as output";
/// As many empty ones of the same types.
pub(crate) const NO_COLUMNS: &str =
    "null::smallint, null::uuid, null::uuid, null::bigint, null::bigint, null::bytea, null::text, null::bytea";

/// What an output is that nobody gave a type.
const UNTYPED: &str = "application/octet-stream";
/// The longest life of a record that is final, in milliseconds: a thousand years. What is longer is for ever.
const LIFE_MAX: i64 = 31_536_000_000_000;
/// The largest record and the largest output. PostgreSQL itself takes 1 GB.
const BYTES_MAX: usize = 256 * 1024 * 1024;

/// A record as a row, its times still relative to the moment of the write: the values of a statement that writes it, in
/// the order of its parameters from `$3`.
#[derive(Clone)]
pub struct Line<'a> {
    /// `$3`.
    pub token: Uuid,
    /// `$4`.
    pub claim: Uuid,
    /// `$5`.
    pub fence: i64,
    /// `$6`: the state's number.
    pub state: i16,
    /// `$7`.
    pub attempt: i32,
    /// `$8`.
    pub owner: String,
    /// `$9`: the effect's number.
    pub effect: i16,
    /// `$10`, in milliseconds.
    pub retention: i64,
    /// `$11`, in milliseconds.
    pub output_retention: i64,
    /// `$12`: when it may be purged, if it is final, in milliseconds.
    pub expires_after: Option<i64>,
    /// `$13`: when its output goes, if it is done and has one, in milliseconds.
    pub output_after: Option<i64>,
    /// `$14`.
    pub output_type: Option<&'a str>,
    /// `$15`.
    pub output: Option<&'a [u8]>,
    /// `$16`: the record but its output.
    pub body: Vec<u8>,
}

impl<'a> Line<'a> {
    pub(crate) fn of(record: &'a Record) -> Result<Line<'a>> {
        // Where the text has what PostgreSQL takes in no text, the output stays in the body, as long as the record.
        let kept = match &record.output {
            Output::Kept { content_type, bytes } if !content_type.contains('\0') => {
                Some((content_type.as_str(), bytes.as_slice()))
            }
            Output::Kept { .. } | Output::Nothing | Output::Dropped(_) => None,
        };
        let body = match kept {
            Some(_) => codec::encode(&Record { output: Output::Dropped(DropReason::Expired), ..record.clone() }),
            None => codec::encode(record),
        };
        let bytes = body.len().max(kept.map_or(0, |(_, bytes)| bytes.len()));
        if bytes > BYTES_MAX {
            return Err(Error::new(
                ErrorKind::BadOutput,
                format!("the record or its output has {bytes} bytes, {BYTES_MAX} at most are stored"),
            )
            .with_hint("keep a reference to the output, not the output"));
        }
        Ok(Line {
            state: state_code(record.state),
            token: Uuid::from_bytes(record.token.0),
            claim: Uuid::from_bytes(record.claim.0),
            fence: i64::try_from(record.fence.0).unwrap_or(i64::MAX),
            attempt: i32::try_from(record.attempt).unwrap_or(i32::MAX),
            owner: record.owner.replace('\0', " "),
            effect: effect_code(record.effect),
            retention: millis(record.retention),
            output_retention: millis(record.output_retention),
            expires_after: record.state.is_final().then(|| millis(record.retention)),
            output_after: (record.state == State::Done && kept.is_some()).then(|| millis(record.output_retention)),
            output_type: kept.map(|(content_type, _)| content_type),
            output: kept.map(|(_, bytes)| bytes),
            body,
        })
    }

    /// The same, to be kept: its output, and the type of it, apart.
    pub(crate) fn kept(self) -> Kept {
        let output = self.output_type.zip(self.output).map(|(name, bytes)| (name.to_owned(), bytes.to_vec()));
        let Line { token, claim, fence, state, attempt, owner, effect, retention, output_retention, .. } = self;
        let Line { expires_after, output_after, body, .. } = self;
        let (output_type, bytes) = (None, None);
        let line = Line {
            token,
            claim,
            fence,
            state,
            attempt,
            owner,
            effect,
            retention,
            output_retention,
            expires_after,
            output_after,
            output_type,
            output: bytes,
            body,
        };
        Kept { line, output }
    }
}

/// A line that waits for others.
pub(crate) struct Kept {
    pub(crate) line: Line<'static>,
    /// What stands in `output_type` and `output`.
    pub(crate) output: Option<(String, Vec<u8>)>,
}

impl Kept {
    /// How many bytes it carries.
    pub(crate) fn bytes(&self) -> usize {
        self.line.body.len() + self.output.as_ref().map_or(0, |(_, bytes)| bytes.len())
    }

    /// The row that it stands for.
    pub(crate) fn as_line(&self) -> Line<'_> {
        let output = self.output.as_ref();
        Line {
            output_type: output.map(|(content_type, _)| content_type.as_str()),
            output: output.map(|(_, bytes)| bytes.as_slice()),
            ..self.line.clone()
        }
    }
}

/// The columns of a record as a driver reads them, in the order in which the statements return them.
#[derive(Clone, Copy, Debug)]
pub struct Cells<'a> {
    /// Its state's number.
    pub state: i16,
    /// Its token.
    pub token: Uuid,
    /// Its claim.
    pub claim: Uuid,
    /// Its fence.
    pub fence: i64,
    /// Its age by the server's clock, in milliseconds.
    pub age: i64,
    /// The record but its output.
    pub body: &'a [u8],
    /// What the output is.
    pub output_type: Option<&'a str>,
    /// The output.
    pub output: Option<&'a [u8]>,
}

fn broken(key: &Key, what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the columns of this row are not a record: {what}"))
        .about(format!("task `{key}`"))
}

/// The record in a row whose columns [`COLUMNS`] begin at `at`.
pub(crate) fn found(key: &Key, row: &Row, at: usize) -> Result<Found> {
    let get = |error: tokio_postgres::Error| broken(key, &error.to_string());
    let cells = Cells {
        state: row.try_get(at).map_err(get)?,
        token: row.try_get(at + 1).map_err(get)?,
        claim: row.try_get(at + 2).map_err(get)?,
        fence: row.try_get(at + 3).map_err(get)?,
        age: row.try_get(at + 4).map_err(get)?,
        body: row.try_get(at + 5).map_err(get)?,
        output_type: row.try_get(at + 6).map_err(get)?,
        output: row.try_get(at + 7).map_err(get)?,
    };
    found_in(key, &cells)
}

/// The record in these columns.
pub(crate) fn found_in(key: &Key, cells: &Cells<'_>) -> Result<Found> {
    let broken = |what: &str| broken(key, what);
    let &Cells { state, token, claim, fence, age, body, output_type, output } = cells;
    let mut record = codec::decode(key, body)?;
    let (token, claim) = (Token(token.into_bytes()), ClaimId(claim.into_bytes()));
    let state = State::ALL.into_iter().find(|known| state_code(*known) == state).ok_or_else(|| broken("its state"))?;
    if claim != record.claim {
        return Err(broken("its claim is not that of its body"));
    }
    let output = match (output_type, output) {
        (Some(content_type), Some(bytes)) => Some(Output::kept(content_type, bytes)),
        (Some(_), None) => Some(Output::Dropped(DropReason::Expired)),
        // Completed by SQL that did not say what it is.
        (None, Some(bytes)) => Some(Output::kept(UNTYPED, bytes)),
        (None, None) => None,
    };
    let fence = Fence(u64::try_from(fence).map_err(|_| broken("its fence is negative"))?);
    if token != record.token {
        // Somebody completed the claim with SQL of their own, who knew the columns and not the body.
        if state != State::Done || record.state != State::Running {
            return Err(broken("its token is not that of its body, and the claim was not completed by SQL"));
        }
        record = decide::completed_elsewhere(&record, token, output.unwrap_or(Output::Nothing));
    } else {
        if state != record.state {
            return Err(broken("its state is not that of its body"));
        }
        if let Some(output) = output {
            record.output = output;
        }
    }
    record.fence = fence;
    Ok(Found { record: Arc::new(record), age: Age::from_millis(age) })
}

/// The number of a state, as the schema has it.
pub(crate) fn state_code(state: State) -> i16 {
    match state {
        State::Running => 1,
        State::Waiting => 2,
        State::Done => 3,
        State::Dead => 4,
        State::Parked => 5,
    }
}

fn effect_code(effect: Effect) -> i16 {
    match effect {
        Effect::Transactional => 1,
        Effect::Keyed => 2,
        Effect::Fenced => 3,
        Effect::Unrepeatable => 4,
        Effect::Repeatable => 5,
    }
}

/// Milliseconds as the columns have them.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(LIFE_MAX).min(LIFE_MAX)
}
