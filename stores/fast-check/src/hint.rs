//! A hint: what the front says of a task, and how it lies there as a record.
//!
//! To the front each hint is a done record whose output, of a content type of its own, holds the hint: the generation of
//! the database it was read from, how old the record was then, and the record itself, in the bytes of the core's codec.
//! So nothing of the hint hides in a label for people, the front lists none and keeps none for ten years, its token is the
//! hint's own (the same record can be hinted anew), and what is no hint is told apart and left alone.
//!
//! **Invariant:** hints of one generation never go back. They are ordered by fence, then by [`Rank`].

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::codec;
use taskonce_core::key::{Fingerprint, Key};
use taskonce_core::policy::Effect;
use taskonce_core::record::{Age, ClaimId, Failure, Fence, Output, Record, State, Token};
use taskonce_core::step;

use crate::generation::Mark;

/// What the output of a hint says that it is.
const CONTENT_TYPE: &str = "taskonce/hint";
/// The version of a hint's bytes.
const VERSION: u8 = 1;
/// The longest name of a generation, in bytes; hints of a longer one are not written.
const GENERATION_MAX: usize = 1024;
/// Where a length would stand, of a database that names no generation.
const NO_GENERATION: u16 = u16::MAX;
/// The largest record that a hint holds whole, in bytes. Of a larger one it says the state only, and is verified.
const WHOLE_MAX: usize = 64 * 1024;
/// How long it is known of a removed record that it was. A hint that its claim wrote late is refused meanwhile.
const ERASED_LIFE: Duration = Duration::from_secs(10 * 60);
/// The shortest life of a hint.
const LIFE_MIN: Duration = Duration::from_secs(1);
/// How long a hint stays that has nothing to answer and keeps late ones away, at least.
const GUARD_LIFE: Duration = Duration::from_secs(60);
/// To the front an output has no end of its own before the hint's.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// What the front says of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    pub(crate) generation: Mark,
    pub(crate) fence: Fence,
    /// The age of the record when the hint was written, by the database's clock.
    pub(crate) age: Age,
    pub(crate) tells: Tells,
}

/// What a hint tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tells {
    /// This record was there.
    Whole(Arc<Record>),
    /// A record was there that says this much; output, failure and history are left out.
    Outline(Arc<Record>),
    /// The record was removed.
    Erased,
}

/// Orders the hints of one fence: a claim, its end, its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    Running,
    Ended,
    Erased,
}

/// How much of a record of a task that is over goes into its hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    Outline,
    Whole,
}

impl Hint {
    /// The hint of a record that the database holds with this fence, and that is so old there.
    pub(crate) fn of(record: &Record, fence: Fence, age: Age, generation: &Mark, over: Detail) -> Hint {
        let tells = match (record.state, over) {
            (State::Running, _) | (State::Done, Detail::Whole) if size(record) <= WHOLE_MAX => {
                Tells::Whole(Arc::new(Record { fence, ..record.clone() }))
            }
            (State::Running | State::Waiting | State::Done | State::Dead | State::Parked, _) => {
                Tells::Outline(Arc::new(outline(record, fence)))
            }
        };
        Hint { generation: generation.clone(), fence, age, tells }
    }

    /// The hint of a record of this fence that was removed.
    pub(crate) fn erased(fence: Fence, generation: &Mark) -> Hint {
        Hint { generation: generation.clone(), fence, age: Age::default(), tells: Tells::Erased }
    }

    /// The record it tells of.
    pub(crate) fn record(&self) -> Option<&Arc<Record>> {
        match &self.tells {
            Tells::Whole(record) | Tells::Outline(record) => Some(record),
            Tells::Erased => None,
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        match self.record().map(|record| record.state) {
            Some(State::Running) => Rank::Running,
            Some(State::Waiting | State::Done | State::Dead | State::Parked) => Rank::Ended,
            None => Rank::Erased,
        }
    }

    /// Whether it may be put in place of another: one of another generation, or one that it does not fall behind.
    pub(crate) fn follows(&self, there: &Hint) -> bool {
        self.generation != there.generation || (self.fence, self.rank()) >= (there.fence, there.rank())
    }

    /// How long it stays in the front.
    fn life(&self, hint_life: Duration) -> Duration {
        let life = match self.record() {
            None => ERASED_LIFE,
            Some(record) => match record.state {
                // Past the lease it is not believed, and still lets one caller of a process ask for all.
                State::Running => self.age.left_of(record.lease).saturating_add(record.lease),
                State::Waiting | State::Parked => record.lease.max(GUARD_LIFE).min(hint_life),
                State::Done | State::Dead => self.age.left_of(record.retention).min(hint_life),
            },
        };
        life.max(LIFE_MIN)
    }

    /// The record under which it lies in the front. `None` where it cannot: its generation has too long a name.
    pub(crate) fn lay(&self, hint_life: Duration, token: Token) -> Option<Record> {
        let life = self.life(hint_life);
        Some(Record {
            state: State::Done,
            token,
            fence: self.fence,
            claim: ClaimId([0; 16]),
            owner: "".into(),
            attempt: 0,
            crashes: 0,
            effect: Effect::Repeatable,
            lease: Duration::ZERO,
            delay: Duration::ZERO,
            retention: life,
            output_retention: NEVER,
            state_age: Duration::ZERO,
            ran_for: Duration::ZERO,
            fingerprint: Fingerprint([0; 16]),
            output: Output::kept(CONTENT_TYPE, self.encode()?),
            failure: None,
            history: Vec::new(),
            history_dropped: 0,
            steps: Vec::new(),
        })
    }

    /// The hint in a record of the front; `None` for what is no hint, or is a newer version's.
    pub(crate) fn read(key: &Key, laid: &Record) -> Option<Hint> {
        match &laid.output {
            Output::Kept { content_type, bytes } if content_type == CONTENT_TYPE => decode(key, bytes),
            Output::Kept { .. } | Output::Nothing | Output::Dropped(_) => None,
        }
    }

    fn encode(&self) -> Option<Vec<u8>> {
        let name = self.generation.name();
        let length = match name {
            None => NO_GENERATION,
            Some(name) if name.len() <= GENERATION_MAX => name.len() as u16,
            Some(_) => return None,
        };
        let (code, record) = match &self.tells {
            Tells::Whole(record) => (0, codec::encode(record)),
            Tells::Outline(record) => (1, codec::encode(record)),
            Tells::Erased => (2, Vec::new()),
        };
        let mut out = vec![VERSION, code];
        out.extend_from_slice(&self.fence.0.to_le_bytes());
        out.extend_from_slice(&self.age.millis.to_le_bytes());
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(name.unwrap_or_default().as_bytes());
        out.extend_from_slice(&record);
        Some(out)
    }
}

fn decode(key: &Key, bytes: &[u8]) -> Option<Hint> {
    let (&[VERSION, code], rest) = bytes.split_first_chunk::<2>()? else { return None };
    let (fence, rest) = rest.split_first_chunk::<8>()?;
    let (age, rest) = rest.split_first_chunk::<8>()?;
    let (length, rest) = rest.split_first_chunk::<2>()?;
    let (generation, rest) = match u16::from_le_bytes(*length) {
        NO_GENERATION => (Mark::unnamed(), rest),
        length => {
            let (name, rest) = rest.split_at_checked(usize::from(length))?;
            (Mark::named(std::str::from_utf8(name).ok()?), rest)
        }
    };
    let record = || codec::decode(key, rest).ok().map(Arc::new);
    let tells = match code {
        0 => Tells::Whole(record()?),
        1 => Tells::Outline(record()?),
        2 if rest.is_empty() => Tells::Erased,
        _ => return None,
    };
    let (fence, age) = (Fence(u64::from_le_bytes(*fence)), Age::from_millis(i64::from_le_bytes(*age)));
    Some(Hint { generation, fence, age, tells })
}

/// About how large a record is, in bytes: what in it has no small bound.
fn size(record: &Record) -> usize {
    let failure = |failure: &Failure| failure.message.len();
    record.output.len()
        + step::output_bytes(record)
        + record.failure.as_ref().map_or(0, failure)
        + record.history.iter().map(|event| event.note.len() + event.who.len()).sum::<usize>()
}

/// The record without what may be large, none of which is copied on the way.
fn outline(record: &Record, fence: Fence) -> Record {
    Record {
        state: record.state,
        token: record.token,
        fence,
        claim: record.claim,
        owner: Arc::clone(&record.owner),
        attempt: record.attempt,
        crashes: record.crashes,
        effect: record.effect,
        lease: record.lease,
        delay: record.delay,
        retention: record.retention,
        output_retention: record.output_retention,
        state_age: record.state_age,
        ran_for: record.ran_for,
        fingerprint: record.fingerprint,
        output: Output::Nothing,
        failure: None,
        history: Vec::new(),
        history_dropped: 0,
        steps: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use taskonce_contract::records::plain;

    use super::*;

    fn key() -> Key {
        Key::parse("a/b@1/c").unwrap()
    }

    fn hint(state: State, fence: u64) -> Hint {
        let age = Age::from_millis(1234);
        Hint::of(&plain(state, 7), Fence(fence), age, &Mark::named("7:x"), Detail::Whole)
    }

    fn laid(hint: &Hint) -> Record {
        hint.lay(Duration::from_secs(60), Token::from(9)).unwrap()
    }

    #[test]
    fn a_hint_reads_back_as_it_was_laid() {
        let erased = Hint::erased(Fence(3), &Mark::unnamed());
        for hint in State::ALL.into_iter().map(|state| hint(state, 5)).chain([erased]) {
            assert_eq!(Hint::read(&key(), &laid(&hint)), Some(hint));
        }
    }

    #[test]
    fn what_is_no_hint_is_told_apart() {
        for state in State::ALL {
            assert_eq!(Hint::read(&key(), &plain(state, 1)), None);
        }
        let mut record = laid(&hint(State::Done, 1));
        let Output::Kept { bytes, .. } = &mut record.output else { panic!("a hint has an output") };
        for at in [0, 1] {
            let mut other = bytes.clone();
            other[at] = 77;
            assert_eq!(decode(&key(), &other), None, "byte {at}");
        }
        for length in 0..bytes.len() {
            assert_eq!(decode(&key(), &bytes[..length]), None, "{length} bytes of it");
        }
    }

    #[test]
    fn hints_of_one_generation_never_go_back() {
        let erased = Hint::erased(Fence(5), &Mark::named("7:x"));
        let order =
            [hint(State::Running, 5), hint(State::Done, 5), erased, hint(State::Running, 6), hint(State::Waiting, 6)];
        for (at, earlier) in order.iter().enumerate() {
            assert!(earlier.follows(earlier), "a hint is written anew");
            for later in &order[at + 1..] {
                assert!(later.follows(earlier) && !earlier.follows(later), "{earlier:?} {later:?}");
            }
        }
        let elsewhere = Hint { generation: Mark::named("8:x"), ..hint(State::Running, 1) };
        assert!(elsewhere.follows(&order[4]), "what another generation left is no obstacle");
    }

    #[test]
    fn an_outline_leaves_out_what_may_be_large() {
        let big = Record { output: Output::kept("", vec![0; WHOLE_MAX + 1]), ..plain(State::Done, 1) };
        let hint = Hint::of(&big, Fence(1), Age::default(), &Mark::unnamed(), Detail::Whole);
        assert!(matches!(hint.tells, Tells::Outline(_)) && hint.encode().unwrap().len() < 300, "{hint:?}");
    }

    #[test]
    fn a_hint_lives_no_longer_than_what_it_tells_of() {
        let life = |hint: &Hint| laid(hint).retention;
        let old = |state, minutes: i64| Hint { age: Age::from_millis(minutes * 60_000), ..hint(state, 1) };
        assert_eq!(life(&hint(State::Done, 1)), Duration::from_secs(60));
        assert_eq!(life(&old(State::Done, 60 * 24 * 15)), LIFE_MIN);
        assert_eq!(
            life(&old(State::Running, 29)),
            Duration::from_secs(31 * 60),
            "past the lease it lets one ask for all"
        );
        assert_eq!(life(&old(State::Running, 31)), Duration::from_secs(30 * 60));
    }
}
