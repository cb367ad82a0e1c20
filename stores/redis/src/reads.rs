//! Reading the records that a walk has named, wherever they are.
//!
//! The records of a list may lie on several servers. Those of one are asked for together, and all servers at once. One
//! that is away must not hide what the others have: in place of its records the walk shows why they cannot be read.

use std::collections::BTreeMap;
use std::sync::Arc;

use taskonce_core::Result;
use taskonce_core::key::Key;
use taskonce_redis_wire::connection::{At, Batch, Link, Links};
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::shared::join;
use taskonce_redis_wire::wire::{Commands, Reply};
use tokio::time::Instant;

use crate::request::Request;

/// For which part of a call's time a page waits for one of several servers.
const NODE_SHARE: u32 = 2;

/// What a key holds and has left to live, or why its server cannot say.
pub(crate) type Loaded = Result<[Reply; 2], Refusal>;

/// The reads of one page.
pub(crate) struct Reads<'a> {
    links: &'a Arc<Links>,
    deadline: Instant,
    /// Whether what is read lies on several servers.
    is_spread: bool,
    /// Primaries that did not answer, by their numbers, and why. `None` stands for the keys that nobody serves.
    away: BTreeMap<Option<usize>, Refusal>,
}

impl<'a> Reads<'a> {
    pub(crate) fn new(links: &'a Arc<Links>, deadline: Instant, is_spread: bool) -> Reads<'a> {
        Reads { links, deadline, is_spread, away: BTreeMap::new() }
    }

    /// What these keys hold, in their order: keys of this primary, or each of the one that serves it.
    pub(crate) async fn load(&mut self, primary: Option<usize>, keys: &[Key]) -> Result<Vec<Loaded>> {
        let links = self.links;
        let share = Instant::now() + links.settings.timeout / NODE_SHARE;
        let until = if self.is_spread { self.deadline.min(share) } else { self.deadline };
        let name = |key: &Key| format!("{}{key}", links.settings.prefix).into_bytes();
        let names: Vec<Vec<u8>> = keys.iter().map(name).collect();
        let mut groups: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        for (at, name) in names.iter().enumerate() {
            groups.entry(primary.or_else(|| links.number_of(name))).or_default().push(at);
        }
        let outcomes = join(groups.iter().map(async |(number, group)| {
            let mut names = group.iter().map(|at| &names[*at][..]);
            match (self.away.get(number), number) {
                (Some(refusal), _) => Err(refusal.clone()),
                (None, Some(number)) => load_at(links, *number, names, until).await,
                (None, None) => match names.next() {
                    // One says for all that nobody serves them, or who does: then the map is known for those to come.
                    Some(first) => match load_one(links, first, until).await {
                        Ok(first) => {
                            let others = join(names.map(|name| load_one(links, name, until))).await;
                            std::iter::once(Ok(first)).chain(others).collect()
                        }
                        Err(refusal) => Err(refusal),
                    },
                    None => Ok(Vec::new()),
                },
            }
        }))
        .await;
        let mut loaded: BTreeMap<usize, Loaded> = BTreeMap::new();
        for ((number, group), outcome) in groups.iter().zip(outcomes) {
            match outcome {
                Ok(answers) => loaded.extend(group.iter().copied().zip(answers.into_iter().map(Ok))),
                Err(refusal) => {
                    let refusal = self.bearable(refusal)?;
                    loaded.extend(group.iter().map(|at| (*at, Err(refusal.clone()))));
                    self.away.insert(*number, refusal);
                }
            }
        }
        // Some have moved since they were named.
        let is_moved = |answer: &Loaded| answer.as_ref().is_ok_and(|answer| answer.iter().any(is_elsewhere));
        let moved: Vec<usize> = loaded.iter().filter(|(_, answer)| is_moved(answer)).map(|(at, _)| *at).collect();
        let answers = join(moved.iter().map(|at| load_one(links, &names[*at], until))).await;
        for (at, answer) in moved.into_iter().zip(answers) {
            let answer = match answer {
                Ok(answer) => Ok(answer),
                Err(refusal) => Err(self.bearable(refusal)?),
            };
            loaded.insert(at, answer);
        }
        Ok(loaded.into_values().map(|answer| self.answered(answer)).collect())
    }

    /// What is said in place of records, as others are there; else the page fails.
    fn bearable(&self, refusal: Refusal) -> Result<Refusal> {
        if self.is_spread && refusal.may_pass() { Ok(refusal) } else { Err(self.links.error(refusal)) }
    }

    /// The same where a server answers that it cannot tell now.
    fn answered(&self, answer: Loaded) -> Loaded {
        let answer = answer?;
        if answer.iter().any(|reply| matches!(reply, Reply::Error(_))) {
            let refusal = Refusal::first_of(&answer, "GET");
            if self.is_spread && refusal.may_pass() {
                return Err(refusal);
            }
        }
        Ok(answer)
    }
}

/// What these keys of one primary hold and have left to live.
async fn load_at(
    links: &Arc<Links>,
    number: usize,
    names: impl ExactSizeIterator<Item = &[u8]>,
    until: Instant,
) -> Result<Vec<[Reply; 2]>, Refusal> {
    let (mut commands, count) = (Commands::default(), names.len());
    for name in names {
        commands.add(&[b"GET", name]).add(&[b"PTTL", name]);
    }
    let request = |link: &Link| link.server.accept(&links.settings).map(|()| Batch(&commands));
    let mut answers = links.ask(At::Primary(number), until, request).await?.into_iter();
    let pairs: Vec<[Reply; 2]> = std::iter::from_fn(|| Some([answers.next()?, answers.next()?])).collect();
    if pairs.len() == count { Ok(pairs) } else { Err(Refusal::misshapen("GET")) }
}

/// The same of one key, wherever it is.
async fn load_one(links: &Arc<Links>, name: &[u8], until: Instant) -> Loaded {
    let request = |link: &Link| link.server.accept(&links.settings).map(|()| Request::Load { key: name });
    let answers = links.ask(At::Key(name), until, request).await?;
    answers.try_into().map_err(|answers: Vec<Reply>| Refusal::first_of(&answers, "GET"))
}

/// Whether a key is at another server than the one that was asked.
fn is_elsewhere(reply: &Reply) -> bool {
    matches!(reply, Reply::Error(text) if text.starts_with("MOVED ") || text.starts_with("ASK "))
}
