//! Lists of tasks in rare states: one sorted set a state, kept beside the records, so that nobody looks for a few among
//! millions.
//!
//! A task is listed while its record is Waiting, Dead or Parked, and while it is Running and was renewed at least once: a
//! task that is done before its first heartbeat touches no list. An entry goes with the write of its record, in the same
//! round trip, and is not part of it: a list may lag, and a list that is broken or not allowed fails no write. So whoever
//! reads a list believes the records.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::key::Key;
use taskonce_core::record::{Found, Record, State};
use taskonce_core::store::{Expected, Finding, Level, Next, Swap};
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_redis_wire::connection::{At, Batch, Link, Links};
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::pipe::next_mark;
use taskonce_redis_wire::shared::join;
use taskonce_redis_wire::wire::{Commands, Reply};
use tokio::time::{Instant, timeout_at};

use crate::behind::{Behind, Leg};
use crate::request::Request;
use crate::script::{Call, Change, Verb, What};
use crate::store::life_millis;

/// What the names of lists begin with, below the prefix. No key of a task does.
const NAME: &str = "~list:";
/// A call whose record is written waits for its list at most this part of a call's time, and at most so long.
const PATIENCE_SHARE: u32 = 10;
const PATIENCE_MAX: Duration = Duration::from_millis(500);
/// How long it waits at most, if it has so much time left, for the list of what is Dead or Parked.
const LAST_PATIENCE_MAX: Duration = Duration::from_secs(5);
/// A claim that is older than this part of its lease has missed its first heartbeat.
const HEARTBEAT_SHARE: u32 = 3;
/// How many bytes of a claim's id an entry carries.
const CLAIM_BYTES: usize = 8;

/// A list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum List {
    Running,
    Waiting,
    Dead,
    Parked,
}

impl List {
    pub(crate) const ALL: [List; 4] = [List::Running, List::Waiting, List::Dead, List::Parked];

    /// The list of a state; Done has none.
    pub(crate) fn of(state: State) -> Option<List> {
        match state {
            State::Running => Some(List::Running),
            State::Waiting => Some(List::Waiting),
            State::Done => None,
            State::Dead => Some(List::Dead),
            State::Parked => Some(List::Parked),
        }
    }

    /// Its state's word.
    pub(crate) fn word(self) -> &'static str {
        match self {
            List::Running => State::Running.name(),
            List::Waiting => State::Waiting.name(),
            List::Dead => State::Dead.name(),
            List::Parked => State::Parked.name(),
        }
    }

    /// The key of the sorted set.
    pub(crate) fn name(self, prefix: &str) -> String {
        format!("{prefix}{NAME}{}", self.word())
    }
}

/// Where a record is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) list: List,
    /// `life:claim:key`. The life tells how old an entry is, as it ends by then. The claim keeps apart the entries of one
    /// task: who was succeeded takes none away but its own.
    pub(crate) member: Vec<u8>,
    life: u64,
}

impl Entry {
    /// Where this record is listed, if it is.
    pub(crate) fn of(key: &Key, record: &Record) -> Option<Entry> {
        let list = List::of(record.state)?;
        if list == List::Running && record.state_age.as_millis() == 0 {
            return None;
        }
        Some(Entry::in_list(list, key, record))
    }

    /// The life and the key of an entry, if it is one.
    pub(crate) fn read(member: &str) -> Option<(u64, Key)> {
        let mut parts = member.splitn(3, ':');
        let life = parts.next()?.parse().ok()?;
        let _claim = parts.next()?;
        Some((life, Key::parse(parts.next()?).ok()?))
    }

    /// Where a walk over all records lists what it found: also a claim that has missed its first heartbeat.
    pub(crate) fn of_found(key: &Key, found: &Found) -> Option<Entry> {
        let record = &found.record;
        let is_late = record.state == State::Running && found.age.has_passed(record.lease / HEARTBEAT_SHARE);
        Entry::of(key, record).or_else(|| is_late.then(|| Entry::in_list(List::Running, key, record)))
    }

    fn in_list(list: List, key: &Key, record: &Record) -> Entry {
        let life = life_millis(record);
        let claim = u64::from_be_bytes(std::array::from_fn::<u8, CLAIM_BYTES, _>(|at| record.claim.0[at]));
        Entry { list, member: format!("{life}:{claim:016x}:{key}").into_bytes(), life }
    }

    pub(crate) fn change(&self, verb: Verb, number: u64) -> Change {
        Change { verb, entry: self.member.clone(), number }
    }

    /// Whether this is it.
    pub(crate) fn is(&self, list: List, member: &[u8]) -> bool {
        (self.list, self.member.as_slice()) == (list, member)
    }

    /// Mends the list, where the entry is missing or ends before its record, which has so many milliseconds left; all of
    /// its life if it was made permanent by hand.
    pub(crate) fn keep(&self, left: i64) -> Change {
        self.change(Verb::Keep, u64::try_from(left).unwrap_or(self.life))
    }
}

/// What a swap changes of the lists.
pub(crate) struct Moves<'a> {
    key: &'a Key,
    add: Option<Entry>,
    remove: Option<Entry>,
}

impl Moves<'_> {
    /// `None` for most swaps: a fresh claim, and an end before the first heartbeat.
    pub(crate) fn of<'a>(key: &'a Key, expected: Expected<'_>, next: Next<'_>) -> Option<Moves<'a>> {
        let add = match next {
            Next::Keep(record) | Next::Claim(record) => Entry::of(key, record),
            Next::Erase => None,
        };
        let remove = match expected {
            Expected::Record(before) => Entry::of(key, before).filter(|entry| add.as_ref() != Some(entry)),
            Expected::Nothing | Expected::Token(_) => None,
        };
        (add.is_some() || remove.is_some()).then_some(Moves { key, add, remove })
    }

    /// Makes the swap together with the changes: all leave at once, on one connection in this order, so that what is cut
    /// off between them is an entry too many rather than one too few. `record` is the name of the record's key.
    pub(crate) async fn around(
        self,
        links: &Arc<Links>,
        deadline: Instant,
        record: &[u8],
        swap: impl Future<Output = Result<Swap>>,
    ) -> Result<Swap> {
        let behind = links.beside::<Behind>().map_err(|refusal| links.error(refusal))?;
        if let Some(entry) = &self.remove {
            behind.forget(entry);
        }
        let leg = |entry: &Entry, verb, number| {
            let leg = Leg::new(links, deadline, entry, verb, number);
            let may_go = behind.may_try(entry.list) || are_together(links, record, entry.list);
            if may_go { leg } else { leg.held_back() }
        };
        let mut add = self.add.as_ref().map(|entry| leg(entry, Verb::Add, entry.life));
        let mut remove = self.remove.as_ref().map(|entry| leg(entry, Verb::Drop, 0));
        let mut swap = pin!(swap);
        let outcome = poll_fn(|context| {
            add.iter_mut().for_each(|leg| leg.poll(context));
            let outcome = swap.as_mut().poll(context);
            remove.iter_mut().for_each(|leg| leg.poll(context));
            outcome
        })
        .await;
        let legs: Vec<Leg> = add.into_iter().chain(remove).collect();
        match &outcome {
            Ok(Swap::Stored(_)) => finish(links, &behind, deadline, record, legs).await,
            // What was announced did not happen, and what would be left is not, unless what is there says the same.
            Ok(Swap::Conflict(found)) => {
                let there = found.as_ref().and_then(|found| Entry::of(self.key, &found.record));
                let age = found.as_ref().map_or(Duration::ZERO, |found| found.age.as_duration());
                let left =
                    |entry: &Entry| entry.life.saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
                let is_there = |entry: &&Entry| there.as_ref() == Some(*entry);
                let take_back = self.add.iter().filter(|entry| !is_there(entry)).map(|entry| (entry, Verb::Drop, 0));
                let put_back = self.remove.iter().filter(is_there).map(|entry| (entry, Verb::Keep, left(entry)));
                let others = take_back.chain(put_back);
                let others = others.map(|(entry, verb, number)| Leg::new(links, links.deadline(), entry, verb, number));
                behind.go_on(links, legs, false, others.collect());
            }
            // What was left may be there still. (No transaction of anybody's is open on Redis.)
            Ok(Swap::Locked(_)) | Err(_) => {
                let again = |entry| Leg::new(links, links.deadline(), entry, Verb::Add, entry.life);
                behind.go_on(links, legs, false, self.remove.iter().map(again).collect());
            }
        }
        outcome
    }
}

/// Whether a list lies on the server of a record, as far as is known.
fn are_together(links: &Links, record: &[u8], list: List) -> bool {
    links.server_of(record) == links.server_of(list.name(&links.settings.prefix).as_bytes())
}

/// Waits for what is worth it; the rest goes on behind the call. The answers of the record's own server are all here, or
/// nearly. Another one has been told; it is waited for where nobody else would announce the task, and only until it is
/// known to be away. What is Dead or Parked needs a person, and its process may end with this call.
async fn finish(links: &Arc<Links>, behind: &Arc<Behind>, deadline: Instant, record: &[u8], legs: Vec<Leg>) {
    let now = Instant::now();
    let soon = deadline.min(now + PATIENCE_MAX.min(links.settings.timeout / PATIENCE_SHARE));
    let wait = |leg: &Leg| {
        if !leg.is_going() {
            return None;
        }
        if are_together(links, record, leg.list) {
            return Some(soon);
        }
        if leg.verb != Verb::Add || behind.is_away(leg.list) {
            return None;
        }
        match leg.list {
            List::Running => None,
            List::Waiting => Some(soon),
            List::Dead | List::Parked => Some(deadline.min(now + LAST_PATIENCE_MAX)),
        }
    };
    let (waited, others): (Vec<_>, Vec<_>) =
        legs.into_iter().map(|leg| (wait(&leg), leg)).partition(|(wait, _)| wait.is_some());
    behind.go_on(links, others.into_iter().map(|(_, leg)| leg).collect(), true, Vec::new());
    let waited = waited.into_iter().map(async |(wait, mut leg)| {
        if let Some(wait) = wait
            && timeout_at(wait, leg.end()).await.is_err()
        {
            behind.mark_away(leg.list);
        }
        leg
    });
    let waited = join(waited).await;
    behind.go_on(links, waited, true, Vec::new());
}

/// Names a list in an error.
pub(crate) fn error(links: &Links, list: List, refusal: Refusal) -> Error {
    if refusal.kind() != ErrorKind::Corrupt {
        return links.error(refusal);
    }
    let name = list.name(&links.settings.prefix);
    Error::new(ErrorKind::Corrupt, "this key holds a value that is not a list of tasks")
        .about(format!("list `{name}`"))
        .with_hint(
            "another program uses this key: remove it with `redis-cli del`, and `taskonce list --all` makes the list \
             again; or use another `prefix`",
        )
}

/// Whether this user may keep and read the lists, and what is in their place.
pub(crate) async fn finding(links: &Arc<Links>) -> Finding {
    let mut counts = Vec::new();
    for list in List::ALL {
        match count(links, list).await {
            Ok(count) => counts.push(format!("{count} {}", list.word())),
            Err(refusal) => {
                let error = error(links, list, refusal);
                let (text, hint) = (error.to_string(), error.hint().to_owned());
                return Finding { level: Level::Warning, subject: "lists".into(), text, hint };
            }
        }
    }
    Finding { level: Level::Fine, subject: "lists".into(), text: counts.join(", "), hint: String::new() }
}

/// About how many entries a list has. On the way it is trimmed, and everything that is done to lists is tried.
async fn count(links: &Arc<Links>, list: List) -> Result<i64, Refusal> {
    // It names no key of a task, so that a list which is read meanwhile passes over it.
    let entry = b"examined".to_vec();
    let change_of = |verb, number| Change { verb, entry: entry.clone(), number };
    let deadline = links.deadline();
    let changes = [change_of(Verb::Keep, 1), change_of(Verb::DropAt, 0), change_of(Verb::Drop, 0)];
    change(links, deadline, list, &changes).await?;
    let name = list.name(&links.settings.prefix).into_bytes();
    let mut commands = Commands::default();
    commands.add(&[b"ZSCAN", &name, b"0", b"COUNT", b"1"]).add(&[b"ZCARD", &name]).add(&[b"TIME"]);
    let answers = links.ask(At::Key(&name), deadline, |_| Ok(Batch(&commands))).await?;
    match answers.as_slice() {
        [Reply::List(_), Reply::Int(count), Reply::List(_)] => Ok(*count),
        answers => Err(Refusal::first_of(answers, "ZSCAN")),
    }
}

/// The milliseconds of an answer to `TIME`.
pub(crate) fn now(time: &Reply) -> Option<u64> {
    let Reply::List(parts) = time else { return None };
    let number = |part: &Reply| part.text().and_then(|text| text.parse::<u64>().ok());
    Some(number(parts.first()?)? * 1000 + number(parts.get(1)?)? / 1000)
}

/// Changes a list.
pub(crate) async fn change(
    links: &Arc<Links>,
    deadline: Instant,
    list: List,
    changes: &[Change],
) -> Result<(), Refusal> {
    let (name, mark) = (list.name(&links.settings.prefix).into_bytes(), next_mark());
    let request = |link: &Link| {
        link.server.accept(&links.settings)?;
        let dialect = link.server.dialect();
        Ok(Request::Script(Call { dialect, key: &name, id: &mark, what: What::List(changes) }))
    };
    match links.ask(At::Key(&name), deadline, request).await?.as_slice() {
        [Reply::Bulk(_)] => Ok(()),
        answers => Err(Refusal::first_of(answers, "EVALSHA")),
    }
}

/// Changes several lists at once, and says which of them could not be changed. That is left for the next walk.
pub(crate) async fn change_all(
    links: &Arc<Links>,
    deadline: Instant,
    changes: BTreeMap<List, Vec<Change>>,
) -> Vec<List> {
    let all = changes.iter().map(async |(list, changes)| (*list, change(links, deadline, *list, changes).await));
    join(all).await.into_iter().filter(|(_, outcome)| outcome.is_err()).map(|(list, _)| list).collect()
}
