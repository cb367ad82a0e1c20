//! The store: loads and swaps as commands, and answers as records with their age.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::codec;
use taskonce_core::key::Key;
use taskonce_core::record::{Age, Fence, Found, Record, Token};
use taskonce_core::store::{
    Cursor, Expected, Filter, Finding, Generation, Ground, Memory, Next, Page, Purged, Store, Swap,
};
use taskonce_core::{Error, ErrorKind, Result};
use taskonce_redis_wire::connection::{At, Link, Links};
use taskonce_redis_wire::fault::Refusal;
use taskonce_redis_wire::pipe::next_mark;
use taskonce_redis_wire::script::Dialect;
use taskonce_redis_wire::url::Further;
use taskonce_redis_wire::url::Settings;
use taskonce_redis_wire::wire::Reply;
use tokio::time::Instant;

use crate::request::Request;
use crate::script::{BODIES, Call, What};
use crate::{examine, lists, scan, watch};

/// What keys begin with, unless the URL says otherwise.
const PREFIX: &str = "taskonce:";

/// The longest life of a key: Redis computes expiry times in milliseconds that must fit into 63 bits.
const LIFE_MAX: Duration = Duration::from_secs(1000 * 365 * 24 * 60 * 60);

/// The longest record that is sent whole to be compared, in bytes: the script needs only its token.
const COMPARED_MAX: usize = 2048;

/// Where writes count only when replicas have them, a final record that is younger than this is shown to others only when
/// they have it. Whoever wrote it tries on until then, so an older one that they lack is one whose writer gave up.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(60);

/// Tasks in a Redis or Valkey server. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct RedisStore {
    links: Arc<Links>,
}

impl RedisStore {
    /// Opens a store by its URL, with `rediss` instead of `redis` for TLS:
    ///
    /// * `redis://[user[:password]@]host[:port][,host[:port]…][/database][?options]`: a server, or several that replicate
    ///   one another, of which the primary is used.
    /// * `redis+sentinel://[user:password@]sentinel[:26379][,sentinel…]/SERVICE[/database][?options]`: the server that
    ///   Sentinels name as the primary of that service.
    /// * `redis+cluster://[user:password@]node[:port][,node[:port]…][?options]`: a Cluster, by some of its nodes.
    ///
    /// | option | default | meaning |
    /// |---|---|---|
    /// | `prefix` | `taskonce:` | what every key begins with |
    /// | `timeout` | `500ms` | the longest time a call may take, `10ms` to `60s` |
    /// | `eviction` | `refuse` | `accept` uses a server that evicts keys, and so forgets tasks, when its memory is full |
    /// | `wait_replicas` | 0 | a write counts only when so many replicas acknowledged it; needs a `timeout` of `500ms` or more |
    /// | `ca` | the authorities of the web | a PEM file with the certificates to trust, for `rediss:` |
    /// | `sentinel_user`, `sentinel_password` | none | for the Sentinels, which have users of their own |
    ///
    /// Connects on first use, on the tokio runtime of that use, which needs its time and I/O drivers. Every runtime
    /// gets a connection of its own, and so does a forked child.
    ///
    /// # Errors
    /// [`ErrorKind::BadUrl`] with everything that is wrong with the URL. It never shows the password.
    pub fn from_url(url: &str) -> Result<RedisStore> {
        let further = Further { what: "store", known: &[], prefix: PREFIX, form: "", take: &mut |_, _| None };
        Ok(RedisStore { links: Arc::new(Links::new(Settings::read(url, further)?, &BODIES)?) })
    }

    fn name_of(&self, key: &Key) -> Vec<u8> {
        [self.links.settings.prefix.as_bytes(), key.as_str().as_bytes()].concat()
    }

    /// An error about one key.
    fn error(&self, key: &Key, refusal: Refusal) -> Error {
        if refusal.kind() == ErrorKind::Corrupt {
            return refusal.about(format!("task `{key}`"));
        }
        self.links.error(refusal)
    }

    /// A first claim on servers that can do it natively: one round trip, whatever the key holds.
    async fn claim(&self, deadline: Instant, key: &Key, record: &Record, bytes: &[u8]) -> Result<Answer> {
        let life = life_millis(record);
        let name = &self.name_of(key)[..];
        let answers = self
            .links
            .ask(At::Key(name), deadline, |link| {
                link.server.accept(&self.links.settings)?;
                Ok(match link.server.dialect() {
                    Dialect::Modern => Request::Claim { key: name, record: bytes, life },
                    Dialect::Legacy => Request::Script(Call {
                        dialect: Dialect::Legacy,
                        key: name,
                        id: &record.token.0,
                        what: What::Swap { expected: &[], next: Some((bytes, life)) },
                    }),
                })
            })
            .await
            .map_err(|refusal| self.error(key, refusal))?;
        let answer = match answers.as_slice() {
            // The native claim found nothing, and so it is stored.
            [Reply::Nil, Reply::Int(_)] => Ok(Answer::Stored),
            [Reply::Bulk(there), Reply::Int(left)] => Ok(held(there, *left)),
            [script] => script_answer(script),
            answers => Err(Refusal::first_of(answers, "SET")),
        };
        answer.map_err(|refusal| self.error(key, refusal))
    }

    /// Replaces a record that is known whole: natively where the server can compare, else by the script. The script also
    /// decides what the comparison left open: a record that an older version wrote otherwise, a write that was sent
    /// before, a memory that is full.
    async fn replace(
        &self,
        deadline: Instant,
        key: &Key,
        before: &Record,
        record: &Record,
        bytes: &[u8],
    ) -> Result<Answer> {
        let life = life_millis(record);
        let script = |link: &Link, name| {
            Request::Script(Call {
                dialect: link.server.dialect(),
                key: name,
                id: &record.token.0,
                what: What::Swap { expected: &before.token.0, next: Some((bytes, life)) },
            })
        };
        let name = self.name_of(key);
        let there = (before.output.len() <= COMPARED_MAX).then(|| codec::encode(before));
        let there = there.filter(|there| there.len() <= COMPARED_MAX);
        let answers = self
            .links
            .ask(At::Key(&name), deadline, |link| {
                link.server.accept(&self.links.settings)?;
                Ok(match &there {
                    Some(there) if link.server.compares() => {
                        Request::Replace { key: &name, there, record: bytes, life }
                    }
                    Some(_) | None => script(link, &name),
                })
            })
            .await
            .map_err(|refusal| self.error(key, refusal))?;
        match answers.as_slice() {
            [Reply::Status(_)] => return Ok(Answer::Stored),
            [Reply::Nil] => {}
            [Reply::Error(text)] if Refusal::of_reply(text).kind() == ErrorKind::Full => {}
            [answer] => return script_answer(answer).map_err(|refusal| self.error(key, refusal)),
            answers => return Err(self.error(key, Refusal::first_of(answers, "SET"))),
        }
        Box::pin(self.exchange(deadline, key, &before.token.0, &record.token.0, Some((bytes, life)))).await
    }

    async fn exchange(
        &self,
        deadline: Instant,
        key: &Key,
        expected: &[u8],
        id: &[u8],
        next: Option<(&[u8], u64)>,
    ) -> Result<Answer> {
        let name = self.name_of(key);
        let answers = self
            .links
            .ask(At::Key(&name), deadline, |link| {
                link.server.accept(&self.links.settings)?;
                let dialect = link.server.dialect();
                Ok(Request::Script(Call { dialect, key: &name, id, what: What::Swap { expected, next } }))
            })
            .await
            .map_err(|refusal| self.error(key, refusal))?;
        match answers.as_slice() {
            [answer] => script_answer(answer),
            answers => Err(Refusal::first_of(answers, "EVALSHA")),
        }
        .map_err(|refusal| self.error(key, refusal))
    }

    /// A write that was sent before. Where replicas must have it, that is asked of this connection, whose own write it may
    /// not have been: the script touches the record.
    async fn recognise(&self, deadline: Instant, key: &Key, ours: Found) -> Result<Swap> {
        if self.links.settings.wait_replicas == 0 {
            return Ok(Swap::Stored(ours.record.fence));
        }
        match self.exchange(deadline, key, &next_mark(), &ours.record.token.0, None).await? {
            Answer::Stored => Ok(Swap::Stored(ours.record.fence)),
            Answer::Nothing => Ok(Swap::Conflict(None)),
            Answer::Held { bytes, left } => Ok(Swap::Conflict(Some(found(key, &bytes, left)?))),
        }
    }

    /// What another wrote. Where replicas must have it, a task is not said to be over because of a record that a failover
    /// would take back: the script touches it, and the touch is waited for.
    async fn confirm(&self, deadline: Instant, key: &Key, mut there: Found) -> Result<Option<Found>> {
        while there.record.state.is_final() && !there.age.has_passed(CONFIRMED_WITHIN) {
            match self.exchange(deadline, key, &next_mark(), &there.record.token.0, None).await? {
                Answer::Stored => break,
                Answer::Nothing => return Ok(None),
                // Somebody has changed it meanwhile.
                Answer::Held { bytes, left } => there = found(key, &bytes, left)?,
            }
        }
        Ok(Some(there))
    }

    /// The swap itself, without the lists.
    async fn move_record(&self, deadline: Instant, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        let record = match next {
            // There is no store-wide sequence here: the record's own fence stands.
            Next::Keep(record) | Next::Claim(record) => record,
            Next::Erase => return Box::pin(self.erase(deadline, key, expected.token())).await,
        };
        let bytes = codec::encode(record);
        let answer = match expected {
            Expected::Nothing => self.claim(deadline, key, record, &bytes).await?,
            Expected::Token(expected) => {
                let next = Some((&bytes[..], life_millis(record)));
                Box::pin(self.exchange(deadline, key, &expected.0, &record.token.0, next)).await?
            }
            Expected::Record(before) => self.replace(deadline, key, before, record, &bytes).await?,
        };
        match answer {
            Answer::Stored => Ok(Swap::Stored(record.fence)),
            Answer::Nothing => Ok(Swap::Conflict(None)),
            Answer::Held { bytes, left } => {
                let found = found(key, &bytes, left)?;
                // An earlier sending of this swap, whose answer was lost.
                if found.record.token == record.token {
                    return Box::pin(self.recognise(deadline, key, found)).await;
                }
                if self.links.settings.wait_replicas == 0 {
                    return Ok(Swap::Conflict(Some(found)));
                }
                Ok(Swap::Conflict(Box::pin(self.confirm(deadline, key, found)).await?))
            }
        }
    }

    async fn erase(&self, deadline: Instant, key: &Key, expected: Option<Token>) -> Result<Swap> {
        let Some(expected) = expected else {
            return Ok(match self.load(key).await? {
                None => Swap::Stored(Fence::default()),
                found => Swap::Conflict(found),
            });
        };
        match self.exchange(deadline, key, &expected.0, &next_mark(), None).await? {
            Answer::Stored => Ok(Swap::Stored(Fence::default())),
            Answer::Nothing => Ok(Swap::Conflict(None)),
            Answer::Held { bytes, left } => Ok(Swap::Conflict(Some(found(key, &bytes, left)?))),
        }
    }

    /// The bytes under a key, and the milliseconds that they have left to live.
    async fn look(&self, deadline: Instant, key: &Key) -> Result<Option<(Vec<u8>, i64)>> {
        let name = self.name_of(key);
        let answers = self
            .links
            .ask(At::Key(&name), deadline, |link| {
                link.server.accept(&self.links.settings)?;
                Ok(Request::Load { key: &name })
            })
            .await
            .map_err(|refusal| self.error(key, refusal))?;
        match answers.as_slice() {
            [Reply::Nil, Reply::Int(_)] => Ok(None),
            [Reply::Bulk(bytes), Reply::Int(left)] => match held(bytes, *left) {
                Answer::Held { bytes, left } => Ok(Some((bytes, left))),
                Answer::Nothing | Answer::Stored => Ok(None),
            },
            answers => Err(self.error(key, Refusal::first_of(answers, "GET"))),
        }
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn load(&self, key: &Key) -> Result<Option<Found>> {
        self.look(self.links.deadline(), key).await?.map(|(bytes, left)| found(key, &bytes, left)).transpose()
    }

    async fn swap(&self, key: &Key, expected: Expected<'_>, next: Next<'_>) -> Result<Swap> {
        let deadline = self.links.deadline();
        match lists::Moves::of(key, expected, next) {
            None => self.move_record(deadline, key, expected, next).await,
            // Boxed, as it is rare and large: what a call may come to is copied whole when it begins.
            Some(moves) => {
                let name = self.name_of(key);
                let swap = self.move_record(deadline, key, expected, next);
                Box::pin(moves.around(&self.links, deadline, &name, swap)).await
            }
        }
    }

    async fn scan(&self, filter: &Filter, cursor: Option<Cursor>) -> Result<Page> {
        scan::page(&self.links, filter, cursor).await
    }

    /// Zero: keys expire by themselves.
    async fn purge(&self, _filter: &Filter) -> Result<Purged> {
        Ok(Purged::default())
    }

    async fn discard(&self, key: &Key) -> Result<bool> {
        let deadline = self.links.deadline();
        let Some((bytes, _)) = self.look(deadline, key).await? else { return Ok(false) };
        if !codec::is_damaged(key, &bytes) {
            return Ok(false);
        }
        // What lies where a token would must still be there; a record that was written meanwhile has another.
        let there = &bytes[codec::TOKEN_BYTES.start.min(bytes.len())..codec::TOKEN_BYTES.end.min(bytes.len())];
        Ok(match self.exchange(deadline, key, there, &next_mark(), None).await? {
            // Nothing is there any more where it was: an earlier sending erased it, whose answer was lost.
            Answer::Stored | Answer::Nothing => true,
            Answer::Held { .. } => false,
        })
    }

    async fn changed(&self, key: &Key, seen: &Record) -> Result<bool> {
        watch::changed(&self.links, &self.name_of(key), seen).await.map_err(|refusal| self.error(key, refusal))
    }

    async fn examine(&self) -> Vec<Finding> {
        taskonce_redis_wire::examine::findings(&self.links, &examine::OfStore).await
    }

    fn told(&self, _key: &Key, _end: &Arc<Record>) {}

    fn memory(&self) -> Memory {
        Memory::MayForget
    }

    fn ground(&self) -> Option<Ground> {
        None
    }

    async fn generation(&self) -> Result<Option<Generation>> {
        Ok(None)
    }
}

/// What a swap's answer says.
enum Answer {
    Stored,
    Nothing,
    Held { bytes: Vec<u8>, left: i64 },
}

fn script_answer(answer: &Reply) -> Result<Answer, Refusal> {
    match answer {
        Reply::Bulk(_) => Ok(Answer::Stored),
        Reply::List(items) => match items.as_slice() {
            [_, Reply::Nil, _] => Ok(Answer::Nothing),
            [_, Reply::Bulk(bytes), Reply::Int(left)] => Ok(held(bytes, *left)),
            _ => Err(Refusal::misshapen("EVALSHA")),
        },
        Reply::Error(text) => Err(Refusal::of_reply(text)),
        Reply::Status(_) | Reply::Int(_) | Reply::Nil => Err(Refusal::misshapen("EVALSHA")),
    }
}

/// `PTTL` says -2 when the key went between the two commands: then there is nothing.
fn held(bytes: &[u8], left: i64) -> Answer {
    if left == -2 { Answer::Nothing } else { Answer::Held { bytes: bytes.to_vec(), left } }
}

/// The record in these bytes, which have so many milliseconds left to live.
///
/// A key that never expires was not written by this store as it is now: its age is unknown, and what is of unknown age
/// counts as just written, so that it is held rather than taken.
pub(crate) fn found(key: &Key, bytes: &[u8], left: i64) -> Result<Found> {
    let record = codec::decode(key, bytes)?;
    let age = if left < 0 { 0 } else { life_millis(&record) as i64 - left };
    Ok(Found { age: Age::from_millis(age), record: Arc::new(record) })
}

/// The expiry that a record is written with. Its age is counted from it.
pub(crate) fn life_millis(record: &Record) -> u64 {
    u64::try_from(record.life().min(LIFE_MAX).as_millis()).unwrap_or(u64::MAX).max(1)
}
