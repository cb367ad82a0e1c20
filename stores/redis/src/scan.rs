//! Walking over the records: `SCAN` names keys, or a list does, and pipelines read those that match.
//!
//! A page is made of whole answers to `SCAN` (of a list: `ZSCAN`), so that a cursor is little more than the server's own.
//! Only what the smallest `SCAN` names may be divided between pages.
//!
//! What begins with the prefix and is no key of ours is passed over. What is a key of ours and holds no record is a row
//! with the reason. On the way a walk mends the lists: one over all keys adds what they lack, one over a list removes
//! what the records deny.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use taskonce_core::key::Key;
use taskonce_core::store::{Cursor, Filter, Page, Row};
use taskonce_core::{ErrorKind, Result};
use taskonce_redis_wire::connection::{At, Batch, Link, Links};
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::shape::Shape;
use taskonce_redis_wire::wire::{Commands, Digits, Reply};
use tokio::time::Instant;

use crate::cursor::{LOOKS_MAX, Place, Source, Stop, Taken};
use crate::lists::{self, Entry, List};
use crate::reads::Reads;
use crate::script::{Change, Verb};
use crate::store::found;

/// How often one walk begins again because slots moved.
const AGAIN_MAX: u32 = 16;
/// How fast `SCAN`s grow while matches are rare.
const GROWTH: u64 = 4;
/// How many `SCAN`s one page may take.
const SCANS_MAX: usize = 16;
/// How many records the first pipeline reads, and how many any may: outputs may be long.
const READS_MIN: usize = 16;
const READS_MAX: usize = 256;
/// About how many bytes of records one page gathers, and past which a pipeline is followed by a shorter one.
const PAGE_BYTES_MAX: usize = 16 << 20;
/// A page ends when less than this part of it is free.
const ROOM_SHARE: usize = 8;
/// Which part of a call's time may pass before a page ends early.
const TIME_SHARE: u32 = 3;
/// For which part of a call's time, at least, a page waits for the lists that it mends.
const MEND_SHARE: u32 = 8;
/// How old an entry is at least that is removed because its record denies it: its record may be on its way. No call
/// takes longer than 60 s.
const GRACE: Duration = Duration::from_secs(300);

/// What one `SCAN` answered: the server's next cursor, and keys that the filter admits, in order.
struct Named {
    end: u64,
    keys: Vec<Key>,
    /// Of a list: the entries that named them, in the same order.
    entries: Vec<Listed>,
}

/// An entry of a list, as it was found.
struct Listed {
    key: Key,
    member: Vec<u8>,
    /// When it ends, in milliseconds of its server's clock.
    ends: u64,
    /// Whether it is so old that it may be removed.
    is_old: bool,
}

/// The records of the first `read` of some keys, as far as the filter admits them.
#[derive(Default)]
struct Records {
    rows: Vec<Row>,
    bytes: usize,
    read: usize,
}

/// A page in the making.
struct Walk<'a> {
    links: &'a Arc<Links>,
    filter: &'a Filter,
    deadline: Instant,
    /// When the page ends with what it has.
    soon: Instant,
    /// The primaries to visit, by their numbers.
    order: Vec<usize>,
    reads: Reads<'a>,
    /// Lists that could not be mended.
    unmended: Vec<List>,
}

/// What a walk with this filter goes through, in its order, and where on it `place` is: at its beginning if the keys are
/// spread over servers in another way than when the walk began.
async fn way(
    links: &Arc<Links>,
    filter: &Filter,
    place: &mut Option<Place>,
    deadline: Instant,
) -> Result<(Vec<Source>, Vec<usize>)> {
    if filter.is_listed() {
        let is_wanted = |list: &List| filter.states.iter().any(|state| List::of(*state) == Some(*list));
        return Ok((List::ALL.into_iter().filter(is_wanted).map(Source::List).collect(), Vec::new()));
    }
    let known = match place {
        Some(Place { source: Source::Keys(stop), .. }) => Some(stop.mark),
        Some(Place { source: Source::List(_), .. }) | None => None,
    };
    let Shape { order, mark } = links.shape(known, deadline).await.map_err(|refusal| links.error(refusal))?;
    let mut again = 0;
    if let Some(Place { source: Source::Keys(stop), looks, .. }) = place {
        again = stop.again;
        // One server has the same shape always.
        if stop.mark != mark && stop.mark != 0 && mark != 0 {
            again += 1;
            *place = Some(begin(Source::Keys(Stop { number: 0, mark, again }), *looks));
        }
    }
    if again > AGAIN_MAX {
        let refusal = Refusal::new(ErrorKind::Unreachable, "slots of the Cluster kept moving while it was walked over");
        return Err(links.error(refusal.hint("walk again when the slots have come to rest")));
    }
    Ok(((0..order.len()).map(|number| Source::Keys(Stop { number, mark, again })).collect(), order))
}

/// The beginning of a source.
fn begin(source: Source, looks: u64) -> Place {
    Place { source, cursor: 0, looks, taken: None }
}

/// One page.
pub(crate) async fn page(links: &Arc<Links>, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
    let deadline = links.deadline();
    let mut place = cursor.as_ref().map(Place::read).transpose()?;
    let (sources, order) = way(links, filter, &mut place, deadline).await?;
    if let (Some(place), Some(cursor)) = (&place, &cursor)
        && !sources.contains(&place.source)
    {
        return Err(cursor.refused());
    }
    let Some(mut place) = place.or_else(|| Some(begin(*sources.first()?, fitting(filter.page() as u64)))) else {
        return Ok(Page::default());
    };
    let soon = deadline - links.settings.timeout / TIME_SHARE * (TIME_SHARE - 1);
    let is_spread = filter.is_listed() && links.primaries(deadline).await.map_err(|refusal| links.error(refusal))? > 1;
    let reads = Reads::new(links, deadline, is_spread);
    let mut walk = Walk { links, filter, deadline, soon, order, reads, unmended: Vec::new() };
    let mut page = Page::default();
    let mut bytes = 0;
    for _ in 0..SCANS_MAX {
        let named = walk.name(&mut place).await?;
        let room = filter.page() - page.rows.len();
        let bytes_room = PAGE_BYTES_MAX.saturating_sub(bytes);
        let mut records = walk.read(place.source, &named, room, bytes_room).await?;
        let is_least = place.looks == 1 && page.rows.is_empty();
        let fits = records.rows.len() <= room && (records.bytes <= bytes_room || is_least);
        let whole = records.read == named.keys.len() && fits;
        if !whole {
            if place.looks > 1 {
                place.looks = fewer(place.looks, &named, &records, (room, bytes_room));
            } else if is_least {
                let up_to = if records.rows.len() > room {
                    records.rows.truncate(room);
                    records.rows.last().map(|row| row.key.clone())
                } else {
                    named.keys[..records.read].last().cloned()
                };
                place.taken = up_to.map(|up_to| Taken { end: named.end, up_to });
                page.rows = records.rows;
            }
            if page.rows.is_empty() && Instant::now() < soon {
                continue;
            }
            break;
        }
        let admitted = records.rows.len();
        page.rows.append(&mut records.rows);
        bytes += records.bytes;
        let room = filter.page() - page.rows.len();
        let is_full = room * ROOM_SHARE < filter.page();
        let wanted = if is_full { filter.page() } else { room };
        let looks = next_looks(place.looks, admitted, wanted);
        place = if named.end != 0 {
            Place { cursor: named.end, looks, taken: None, ..place }
        } else {
            let behind = sources.iter().skip_while(|source| **source != place.source).nth(1);
            match behind {
                Some(source) => begin(*source, looks),
                None if walk.has_missed_none(place.source).await? => return Ok(page),
                // The next page finds that slots moved, and begins again.
                None => {
                    page.next = Some(begin(place.source, looks).write());
                    return Ok(page);
                }
            }
        };
        if is_full || Instant::now() >= soon {
            break;
        }
    }
    page.next = Some(place.write());
    Ok(page)
}

/// So many looks that as many matches as are wanted are likely not exceeded.
fn fitting(wanted: u64) -> u64 {
    (wanted * 3 / 4).clamp(1, LOOKS_MAX)
}

/// How many looks fill the room, if matches are as frequent as they were.
fn next_looks(looks: u64, admitted: usize, wanted: usize) -> u64 {
    let most = looks.saturating_mul(GROWTH).min(LOOKS_MAX);
    match admitted as u64 {
        0 => most,
        admitted => fitting(looks * wanted as u64 / admitted).min(most),
    }
}

/// How many looks find no more than there is room for, in records and in bytes, where some found more: at most half.
fn fewer(looks: u64, named: &Named, records: &Records, (room, bytes_room): (usize, usize)) -> u64 {
    let share = |room: usize, there: usize| room as f64 / there.max(room).max(1) as f64;
    let share = share(room, records.rows.len()).min(share(bytes_room, records.bytes));
    let fit = share * records.read as f64 / named.keys.len().max(1) as f64;
    ((looks as f64 * fit / 2.0) as u64).max(1)
}

impl Walk<'_> {
    /// Asks which keys come next, without those that were taken.
    async fn name(&self, place: &mut Place) -> Result<Named> {
        let mut named = match place.source {
            Source::Keys(stop) => self.name_keys(place, self.number(stop)).await?,
            Source::List(list) => self.name_entries(place, list).await?,
        };
        if let Some(taken) = place.taken.take()
            && taken.end == named.end
        {
            named.keys.retain(|key| *key > taken.up_to);
        }
        Ok(named)
    }

    async fn name_keys(&self, place: &Place, primary: usize) -> Result<Named> {
        let (from, looks) = (Digits::of(place.cursor), Digits::of(place.looks));
        let prefix = &self.links.settings.prefix;
        let pattern = pattern(&escape(prefix), self.filter);
        let mut commands = Commands::default();
        commands.add(&[b"SCAN", from.as_bytes(), b"MATCH", pattern.as_bytes(), b"COUNT", looks.as_bytes()]);
        let answers = self.ask(At::Primary(primary), &commands).await?;
        let (end, names) = scanned(answers.first(), "SCAN").map_err(|refusal| self.links.error(refusal))?;
        let keys = names.iter().filter_map(|name| Key::parse(name.text()?.strip_prefix(prefix)?).ok());
        Ok(Named { end, keys: self.admitted(keys), entries: Vec::new() })
    }

    async fn name_entries(&self, place: &Place, list: List) -> Result<Named> {
        let (from, looks) = (Digits::of(place.cursor), Digits::of(place.looks));
        let (name, pattern) = (list.name(&self.links.settings.prefix), pattern("*:*:", self.filter));
        let (key, pattern) = (name.as_bytes(), pattern.as_bytes());
        let mut commands = Commands::default();
        commands.add(&[b"ZSCAN", key, from.as_bytes(), b"MATCH", pattern, b"COUNT", looks.as_bytes()]);
        commands.add(&[b"TIME"]);
        let answers = self.ask(At::Key(key), &commands).await?;
        let (end, pairs) =
            scanned(answers.first(), "ZSCAN").map_err(|refusal| lists::error(self.links, list, refusal))?;
        let now = answers.get(1).and_then(lists::now);
        let entry = |pair: &[Reply]| {
            let (member, score) = (pair[0].text()?, pair[1].text()?);
            let ends = score.parse::<f64>().ok()? as u64;
            let (life, key) = Entry::read(member)?;
            let left = now.map(|now| ends.saturating_sub(now));
            let is_old = left.is_some_and(|left| left == 0 || life.saturating_sub(left) >= GRACE.as_millis() as u64);
            Some(Listed { key, member: member.as_bytes().to_vec(), ends, is_old })
        };
        let mut entries: Vec<Listed> = pairs.chunks_exact(2).filter_map(entry).collect();
        entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        Ok(Named { end, keys: self.admitted(entries.iter().map(|entry| entry.key.clone())), entries })
    }

    /// The keys that the filter admits, in order.
    fn admitted(&self, keys: impl Iterator<Item = Key>) -> Vec<Key> {
        let mut keys: Vec<Key> = keys.filter(|key| self.filter.admits_key(key)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Reads records until there are more than there is room for, or the time is up, which is after one pipeline at least.
    async fn read(&mut self, source: Source, named: &Named, room: usize, bytes_max: usize) -> Result<Records> {
        let mut records = Records::default();
        let mut reads = READS_MIN.min(room + 1);
        while records.read < named.keys.len() {
            let end = named.keys.len().min(records.read + reads);
            let keys = &named.keys[records.read..end];
            let bytes = self.read_some(source, keys, &named.entries, &mut records).await?;
            if records.rows.len() > room || records.bytes > bytes_max || Instant::now() >= self.soon {
                break;
            }
            let is_long = bytes > PAGE_BYTES_MAX;
            reads = if is_long { (reads / GROWTH as usize).max(1) } else { (reads * GROWTH as usize).min(READS_MAX) };
        }
        Ok(records)
    }

    /// One pipeline to each server. Says how many bytes they brought.
    async fn read_some(
        &mut self,
        source: Source,
        keys: &[Key],
        entries: &[Listed],
        records: &mut Records,
    ) -> Result<usize> {
        let number = match source {
            Source::Keys(stop) => Some(self.number(stop)),
            Source::List(_) => None,
        };
        let answers = self.reads.load(number, keys).await?;
        let (mut brought, mut changes) = (0, BTreeMap::new());
        for (key, answer) in keys.iter().zip(answers) {
            let length = if let Ok([Reply::Bulk(bytes), _]) = &answer { bytes.len() } else { 0 };
            brought += length;
            let (found, left) = match answer {
                // It went between `SCAN` and here.
                Ok([Reply::Nil, _] | [_, Reply::Int(-2)]) => (None, 0),
                Ok([Reply::Bulk(bytes), Reply::Int(left)]) => (Some(found(key, &bytes, left)), left),
                Ok(answer) => {
                    let refusal = Refusal::first_of(&answer, "GET");
                    if refusal.kind() != ErrorKind::Corrupt {
                        return Err(self.links.error(refusal));
                    }
                    (Some(Err(refusal.about(format!("task `{key}`")))), 0)
                }
                Err(refusal) => (Some(Err(self.links.error(refusal))), 0),
            };
            if !matches!(found, Some(Err(_))) {
                let entry = found.iter().flatten().find_map(|found| Entry::of_found(key, found));
                mend(source, entry.map(|entry| (entry, left)), of_key(entries, key), &mut changes);
            }
            let Some(found) = found else { continue };
            if found.as_ref().map_or(true, |found| self.filter.admits_record(found)) {
                records.bytes += length;
                records.rows.push(Row { key: key.clone(), found });
            }
        }
        self.change_lists(changes).await;
        records.read += keys.len();
        Ok(brought)
    }

    /// Mends lists, as far as there is time. One that could not be mended is left for the next page.
    async fn change_lists(&mut self, mut changes: BTreeMap<List, Vec<Change>>) {
        changes.retain(|list, _| !self.unmended.contains(list));
        let least = Instant::now() + self.links.settings.timeout / MEND_SHARE;
        let until = self.soon.max(least).min(self.deadline);
        self.unmended.extend(lists::change_all(self.links, until, changes).await);
    }

    /// The primary of a stop.
    fn number(&self, stop: Stop) -> usize {
        self.order.get(stop.number).copied().unwrap_or(usize::MAX)
    }

    /// Whether the keys are spread over servers as they were when the walk began, so that none was passed over.
    async fn has_missed_none(&self, source: Source) -> Result<bool> {
        match source {
            Source::List(_) | Source::Keys(Stop { mark: 0, .. }) => Ok(true),
            Source::Keys(stop) => {
                let shape = self.links.shape(None, self.deadline).await.map_err(|refusal| self.links.error(refusal))?;
                Ok(shape.mark == stop.mark)
            }
        }
    }

    async fn ask(&self, at: At<'_>, commands: &Commands) -> Result<Vec<Reply>> {
        let request = |link: &Link| link.server.accept(&self.links.settings).map(|()| Batch(commands));
        self.links.ask(at, self.deadline, request).await.map_err(|refusal| self.links.error(refusal))
    }
}

/// The next cursor and the items of a `SCAN`'s answer.
fn scanned<'a>(answer: Option<&'a Reply>, command: &str) -> Result<(u64, &'a [Reply]), Refusal> {
    let misshapen = || Refusal::misshapen(command);
    let Some(Reply::List(parts)) = answer else {
        return Err(Refusal::first_of(answer.map_or(&[], std::slice::from_ref), command));
    };
    let [Reply::Bulk(cursor), Reply::List(items)] = parts.as_slice() else { return Err(misshapen()) };
    let end = std::str::from_utf8(cursor).ok().and_then(|cursor| cursor.parse().ok());
    Ok((end.ok_or_else(misshapen)?, items))
}

/// The entries of one key.
fn of_key<'a>(entries: &'a [Listed], key: &Key) -> &'a [Listed] {
    let start = entries.partition_point(|entry| entry.key < *key);
    &entries[start..start + entries[start..].partition_point(|entry| entry.key == *key)]
}

/// What the lists need so that they say of one task what its record says: where that is listed with the time that it has
/// left, `None` if nowhere.
fn mend(source: Source, entry: Option<(Entry, i64)>, named_by: &[Listed], changes: &mut BTreeMap<List, Vec<Change>>) {
    let mut is_missing = matches!(source, Source::Keys(_));
    if let Source::List(list) = source {
        let denied = |named: &&Listed| !entry.as_ref().is_some_and(|(entry, _)| entry.is(list, &named.member));
        for named in named_by.iter().filter(denied).filter(|named| named.is_old) {
            // What led here is not lost with it.
            is_missing = true;
            let change = Change { verb: Verb::DropAt, entry: named.member.clone(), number: named.ends };
            changes.entry(list).or_default().push(change);
        }
    }
    if let (true, Some((entry, left))) = (is_missing, entry) {
        changes.entry(entry.list).or_default().push(entry.keep(left));
    }
}

/// The pattern of the names that a filter may admit, behind another pattern.
fn pattern(before: &str, filter: &Filter) -> String {
    let namespace = filter.namespace.as_ref().map_or("*", |name| name.as_str());
    let handler = filter.handler.as_ref().map_or("*", |name| name.as_str());
    format!("{before}{namespace}/{handler}@*/{}*", escape(&filter.id_prefix))
}

/// A text that a pattern takes literally.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use taskonce_core::key::Name;

    use super::*;

    #[test]
    fn a_pattern_takes_the_users_texts_literally() {
        let filter = Filter { id_prefix: "a*[b".into(), ..Filter::default() };
        assert_eq!(pattern(&escape("p?:"), &filter), "p\\?:*/*@*/a\\*\\[b*");
        let filter = Filter { namespace: Name::new("n").ok(), handler: Name::new("h").ok(), ..Filter::default() };
        assert_eq!(pattern("taskonce:", &filter), "taskonce:n/h@*/*");
    }

    #[test]
    fn looks_grow_while_matches_are_rare_and_shrink_to_the_room() {
        assert_eq!((fitting(1), fitting(100), fitting(1000), fitting(9000)), (1, 75, 750, LOOKS_MAX));
        assert_eq!((next_looks(75, 0, 100), next_looks(900, 0, 100)), (300, LOOKS_MAX));
        assert_eq!((next_looks(1000, 1000, 100), next_looks(100, 1, 100)), (75, 400));
        // From the most to the least in ten steps, whatever they find.
        let keys = vec![Key::parse("a/b@1/c").unwrap(); 1000];
        let named = Named { end: 1, keys, entries: Vec::new() };
        let records = Records { read: 1000, ..Records::default() };
        let looks = (0..10).fold(LOOKS_MAX, |looks, _| fewer(looks, &named, &records, (1, 1)));
        assert_eq!(looks, 1);
    }
}
