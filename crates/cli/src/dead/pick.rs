//! Which dead letters are meant: a walk with a filter, or ids that were given; and which task each belongs to.

use std::collections::HashSet;

use taskonce::Key;
use taskonce::source::{DeadFilter, DeadLine};

use super::PickArgs;
use crate::exit::Code;
use crate::report::{Result, Trouble};
use crate::sources::Opened;
use crate::view;

/// How many dead letters are asked for at once.
const PAGE: usize = 500;
/// The reasons whose dead letters are named by the key of their task.
const NAMED_BY_KEY: [&str; 4] = ["dead", "parked", "too_old", "unreadable_record"];

/// A dead letter, and where it is.
pub(super) struct Picked {
    /// The number of its source.
    pub(super) source: usize,
    pub(super) line: DeadLine,
}

/// The key of the task whose record a redrive returns to work: its own. A mismatch is about another task's record, and what
/// cannot be read has none. Where another program named a dead or parked one otherwise, the key that it was sent with counts.
pub(super) fn key_of(id: &str, reason: &str, sent: Option<&str>) -> Option<Key> {
    if !NAMED_BY_KEY.contains(&reason) {
        return None;
    }
    let named = id.strip_prefix(reason).and_then(|rest| rest.strip_prefix('/'));
    let named = named.and_then(|key| Key::parse(key).ok());
    named.or_else(|| Key::parse(sent?).ok().filter(|_| matches!(reason, "dead" | "parked")))
}

impl PickArgs {
    fn matches(&self, line: &DeadLine) -> bool {
        self.text.as_ref().is_none_or(|text| {
            let is_in = |held: &str| held.contains(text.as_str());
            is_in(&line.death.message) || is_in(&line.death.id) || line.key.as_deref().is_some_and(is_in)
        })
    }
}

/// Calls `take` with each dead letter that matches, until it says that this is enough; says whether it did.
pub(super) async fn walk(sources: &[Opened], pick: &PickArgs, mut take: impl FnMut(Picked) -> Wants) -> Result<Wants> {
    let filter = DeadFilter { handler: pick.handler.clone(), reason: pick.reason.clone(), page_max: PAGE };
    for (at, opened) in sources.iter().enumerate() {
        let mut cursor = None;
        // Each round takes a page, and only the end of the walk has no cursor.
        loop {
            let page = opened.source.dead_letters(&filter, cursor).await?;
            for line in page.lines.into_iter().filter(|line| pick.matches(line)) {
                if take(Picked { source: at, line }) == Wants::Nothing {
                    return Ok(Wants::Nothing);
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
    }
    Ok(Wants::More)
}

/// Whether a walk goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    More,
    Nothing,
}

/// The dead letters of these ids or keys, in their order. One that is not there is an error: nothing is changed then.
pub(super) async fn by_ids(sources: &[Opened], ids: &[String]) -> Result<Vec<Picked>> {
    let mut picked = Vec::new();
    let mut seen = HashSet::new();
    for id in ids {
        let found = by_id(sources, id).await?;
        if found.is_empty() {
            return Err(not_there(id, sources));
        }
        picked.extend(found.into_iter().filter(|letter| seen.insert((letter.source, letter.line.death.id.clone()))));
    }
    Ok(picked)
}

/// That of this id; else all of the task with this key.
async fn by_id(sources: &[Opened], id: &str) -> Result<Vec<Picked>> {
    let mut names = vec![id.to_owned()];
    if Key::parse(id).is_ok() {
        names.extend(NAMED_BY_KEY.iter().map(|reason| format!("{reason}/{id}")));
    }
    let mut found = Vec::new();
    for (at, opened) in sources.iter().enumerate() {
        for name in &names {
            if let Some(letter) = opened.source.dead_one(name).await? {
                let line = DeadLine {
                    death: letter.death,
                    age: letter.age,
                    handler: letter.envelope.handler,
                    key: letter.envelope.key,
                    number: letter.number,
                    payload_len: letter.envelope.payload.len(),
                };
                found.push(Picked { source: at, line });
            }
        }
    }
    Ok(found)
}

pub(super) fn not_there(id: &str, sources: &[Opened]) -> Trouble {
    let option = sources.first().map_or("", |opened| &opened.option);
    Trouble::new(
        Code::NotSo,
        "not_found",
        format!("there is no dead letter `{}`", id.escape_debug()),
        format!("`taskonce dead list {option} --text {}` looks for it", view::quoted(id)),
    )
}
