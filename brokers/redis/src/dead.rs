//! Dead letters: each with its handler, and so on the server of that; listed by handler and id.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::store::Cursor;
use taskonce_redis_wire::shared::{join, lock};
use taskonce_redis_wire::wire::{Commands, Reply};
use taskonce_worker::source::{DeadFilter, DeadLetter, DeadLine, DeadPage, Death, HANDLER_MAX, Left, Priority};

use crate::keys::{Key, Keys};
use crate::message;
use crate::queue::{Queue, is_so, mark};
use crate::script::Verb;
use crate::source::handlers;

/// The most dead letters that one page looks at, so that a narrow filter does not hold up the caller.
const EXAMINED_MAX: usize = 10_000;
/// The most handlers that one page looks at.
const VISITED_MAX: usize = 1000;
/// How many dead letters are read at once.
const TOGETHER_MAX: usize = 500;
/// How many handlers are asked at once for one dead letter, and how many at most.
const ASKED_AT_ONCE: usize = 256;
const ASKED_MAX: usize = 100_000;
/// The most dead letters of which a handle remembers the handlers.
const SHOWN_MAX: usize = 10_000;

/// Where a walk goes on: behind this dead letter of this handler.
struct Stop {
    handler: String,
    id: String,
}

impl Stop {
    fn cursor(&self) -> Cursor {
        Cursor(format!("{}:{}{}", self.handler.len(), self.handler, self.id))
    }

    fn read(cursor: &Cursor) -> Result<Stop> {
        let stop = cursor.0.split_once(':').and_then(|(length, rest)| {
            let length: usize = length.parse().ok().filter(|length| (1..=HANDLER_MAX).contains(length))?;
            let (handler, id) = rest.split_at_checked(length)?;
            Some(Stop { handler: handler.to_owned(), id: id.to_owned() })
        });
        stop.filter(|stop| stop.cursor() == *cursor).ok_or_else(|| cursor.refused())
    }
}

/// One page: see [`Source::dead_letters`](taskonce_worker::source::Source::dead_letters).
pub(crate) async fn page(queue: &Queue, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage> {
    let stop = cursor.as_ref().map(Stop::read).transpose()?;
    let mut page = DeadPage::default();
    let mut examined = 0;
    let mut todo: Vec<String> = match (&stop, &filter.handler) {
        (_, Some(handler)) => vec![handler.clone()],
        (Some(stop), None) => {
            let mut todo = vec![stop.handler.clone()];
            todo.extend(handlers(queue, &stop.handler, VISITED_MAX).await?);
            todo
        }
        (None, None) => handlers(queue, "", VISITED_MAX).await?,
    };
    let is_cut = filter.handler.is_none() && todo.len() >= VISITED_MAX;
    todo.reverse();
    let mut after = stop.map_or(String::new(), |stop| stop.id);
    let mut last = None;
    while let Some(handler) = todo.pop() {
        loop {
            let want = (filter.page() - page.lines.len()).min(TOGETHER_MAX);
            let (lines, seen) = lines(queue, &handler, &after, want).await?;
            let is_end = seen.is_none();
            after = seen.or_else(|| lines.last().map(|line| line.death.id.clone())).unwrap_or(after);
            for line in lines {
                examined += 1;
                if filter.reason.as_ref().is_none_or(|reason| *reason == line.death.reason) {
                    page.lines.push(line);
                }
            }
            if page.lines.len() >= filter.page() || examined >= EXAMINED_MAX {
                page.next = Some(Stop { handler, id: after }.cursor());
                return Ok(page);
            }
            if is_end {
                break;
            }
        }
        last = Some(Stop { handler, id: std::mem::take(&mut after) });
    }
    page.next = last.filter(|_| is_cut).map(|stop| stop.cursor());
    Ok(page)
}

/// Some dead letters of a handler behind this one, in the order of their ids, and the id to go on behind, if there may be more.
async fn lines(queue: &Queue, handler: &str, after: &str, max: usize) -> Result<(Vec<DeadLine>, Option<String>)> {
    let keys = queue.names.of(handler);
    let (order, graves) = (keys.key(Key::Order), keys.key(Key::Graves));
    let min = if after.is_empty() { b"-".to_vec() } else { [b"(", after.as_bytes()].concat() };
    let mut commands = Commands::default();
    commands.add(&[b"ZRANGEBYLEX", &order, &min, b"+", b"LIMIT", b"0", max.to_string().as_bytes()]);
    let answers = queue.batch(&order, &commands).await?;
    let [Reply::List(ids)] = answers.as_slice() else { return Err(queue.misshapen()) };
    let ids: Vec<&str> = ids.iter().filter_map(Reply::text).collect();
    if ids.is_empty() {
        return Ok((Vec::new(), None));
    }
    let mut words: Vec<&[u8]> = vec![b"HMGET", &graves];
    words.extend(ids.iter().map(|id| id.as_bytes()));
    let mut commands = Commands::default();
    commands.add(&words);
    let answers = queue.batch(&graves, &commands).await?;
    let [Reply::List(graves)] = answers.as_slice() else { return Err(queue.misshapen()) };
    let now = now(queue, &keys).await?;
    let mut lines = Vec::with_capacity(ids.len());
    for (id, grave) in ids.iter().zip(graves) {
        // One that goes meanwhile is passed over.
        let Reply::Bulk(grave) = grave else { continue };
        lines.extend(line(handler, id, grave, now));
    }
    let mut shown = lock(&queue.shown);
    if shown.len() + lines.len() > SHOWN_MAX {
        shown.clear();
    }
    let handler: Arc<str> = handler.into();
    shown.extend(lines.iter().map(|line: &DeadLine| (line.death.id.clone(), Arc::clone(&handler))));
    let seen = (ids.len() == max).then(|| ids[max - 1].to_owned());
    Ok((lines, seen))
}

/// What the dead letters of a page say.
fn line(handler: &str, id: &str, grave: &[u8], now: u64) -> Option<DeadLine> {
    let texts = message::texts(grave)?;
    let [_, number, died_at, size, key, reason, message] = texts.as_slice() else { return None };
    Some(DeadLine {
        death: Death { id: id.to_owned(), reason: reason.clone(), message: message.clone() },
        age: Duration::from_millis(now.saturating_sub(died_at.parse().unwrap_or(now))),
        handler: handler.to_owned(),
        key: key.strip_prefix('+').map(str::to_owned),
        number: number.parse().unwrap_or(u32::MAX),
        payload_len: size.parse().unwrap_or(0),
    })
}

/// The time of a handler's clock, in milliseconds.
async fn now(queue: &Queue, keys: &Keys) -> Result<u64> {
    let clock = keys.key(Key::Clock);
    let mut commands = Commands::default();
    commands.add(&[b"TIME"]).add(&[b"HGET", &clock, b"ahead"]);
    match queue.batch(&clock, &commands).await?.as_slice() {
        [Reply::List(time), ahead] => {
            let part = |at: usize| time.get(at).and_then(Reply::text).and_then(|text| text.parse::<u64>().ok());
            let ahead = ahead.text().and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
            match (part(0), part(1)) {
                (Some(seconds), Some(micros)) => Ok(seconds * 1000 + micros / 1000 + ahead as u64),
                _ => Err(queue.misshapen()),
            }
        }
        _ => Err(queue.misshapen()),
    }
}

/// The handlers that have a dead letter of this id, where there was one when it was shown first.
async fn owners(queue: &Queue, id: &str) -> Result<Vec<String>> {
    let shown = lock(&queue.shown).get(id).map(ToString::to_string);
    let mut owners: Vec<String> = match shown {
        Some(handler) if has(queue, &handler, id).await? => return Ok(vec![handler]),
        Some(_) | None => Vec::new(),
    };
    let mut after = String::new();
    for _ in 0..ASKED_MAX / ASKED_AT_ONCE {
        let some = handlers(queue, &after, ASKED_AT_ONCE).await?;
        for (handler, has) in some.iter().zip(join(some.iter().map(|handler| has(queue, handler, id))).await) {
            if has? {
                owners.push(handler.clone());
            }
        }
        match some.last() {
            Some(last) if some.len() == ASKED_AT_ONCE && owners.is_empty() => after.clone_from(last),
            Some(_) | None => break,
        }
    }
    Ok(owners)
}

async fn has(queue: &Queue, handler: &str, id: &str) -> Result<bool> {
    let graves = queue.names.of(handler).key(Key::Graves);
    let mut commands = Commands::default();
    commands.add(&[b"HEXISTS", &graves, id.as_bytes()]);
    Ok(matches!(queue.batch(&graves, &commands).await?.as_slice(), [Reply::Int(1)]))
}

/// The dead letter of this id, whole.
pub(crate) async fn one(queue: &Queue, id: &str) -> Result<Option<DeadLetter>> {
    for handler in owners(queue, id).await? {
        let keys = queue.names.of(&handler);
        let (graves, dead) = (keys.key(Key::Graves), keys.key(Key::Dead));
        let mut commands = Commands::default();
        commands.add(&[b"HGET", &graves, id.as_bytes()]);
        let answers = queue.batch(&graves, &commands).await?;
        let [Reply::Bulk(grave)] = answers.as_slice() else { continue };
        let now = now(queue, &keys).await?;
        let Some(line) = line(&handler, id, grave, now) else { return Err(damaged(id, "its line cannot be read")) };
        let place = message::texts(grave).and_then(|texts| texts.into_iter().next()).unwrap_or_default();
        let mut commands = Commands::default();
        commands.add(&[b"XRANGE", &dead, place.as_bytes(), place.as_bytes()]);
        let answers = queue.batch(&dead, &commands).await?;
        let [Reply::List(entries)] = answers.as_slice() else { return Err(queue.misshapen()) };
        let Some(Reply::List(parts)) = entries.first() else { continue };
        let [_, Reply::List(fields)] = parts.as_slice() else { return Err(queue.misshapen()) };
        let entry = message::entry(&handler, Priority::Normal, fields).map_err(|what| damaged(id, &what))?;
        if entry.format > message::FORMAT {
            return Err(
                Error::new(ErrorKind::NewerFormat, "a newer program wrote it").about(format!("dead letter `{id}`"))
            );
        }
        return Ok(Some(DeadLetter {
            death: line.death,
            age: Duration::from_millis(now.saturating_sub(entry.died_at)),
            envelope: entry.envelope,
            number: entry.number,
            coordinates: entry.coordinates.unwrap_or_default().into(),
            redriven_at: entry.redriven_at,
        }));
    }
    Ok(None)
}

fn damaged(id: &str, what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, what).about(format!("dead letter `{id}`"))
}

/// Publishes the dead letter of this id again, or forgets it.
pub(crate) async fn leave(queue: &Queue, id: &str, verb: &str) -> Result<Left> {
    for handler in owners(queue, id).await? {
        let keys = queue.names.of(&handler).with(&[Key::Once, Key::Dead, Key::Graves, Key::Order]);
        let args = [verb.as_bytes().to_vec(), id.as_bytes().to_vec()];
        let items = queue.call(&handler, Verb::Dead, &keys, &mark(), &args).await?;
        if is_so(&items) {
            queue.board()?.touch(&handler);
            return Ok(Left::Done);
        }
    }
    Ok(Left::NotThere)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_back_and_nothing_else_does() {
        let stop = Stop { handler: "a:1".into(), id: "dead/ü:2".into() };
        let read = Stop::read(&stop.cursor()).unwrap();
        assert_eq!((read.handler, read.id), (stop.handler, stop.id));
        for text in ["", "x' OR 1", "0:", "3:ab", "01:ab", "1:ü", "999:a"] {
            assert!(Stop::read(&Cursor(text.into())).is_err(), "{text}");
        }
    }
}
