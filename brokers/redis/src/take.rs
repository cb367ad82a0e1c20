//! Receiving: looks at the handlers that may have something, all at once, and waits while none has.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use taskonce_core::error::Result;
use taskonce_redis_wire::shared::join;
use taskonce_redis_wire::wire::Reply;
use taskonce_worker::source::{Death, Delivery, RECEIVE_MAX, WAIT_MAX, Want};
use tokio::time::{Instant, sleep, timeout_at};

use crate::board::{Board, Found};
use crate::keys::Key;
use crate::line;
use crate::message::{self, Holder};
use crate::queue::{Queue, mark, millis, random};
use crate::script::Verb;

/// After so many bytes of payloads a look at one handler is full.
const BYTES_MAX: usize = 1 << 20;
/// For how many milliseconds an entry is left alone that only a newer program can read.
const NEWER_DELAY: Duration = Duration::from_secs(5);
/// How many handlers are looked at at once.
const TOGETHER_MAX: usize = 256;
/// How often what was given to nobody is given back, and the first pause before that is tried again; it doubles.
const GIVE_BACK_MAX: u32 = 6;
const GIVE_BACK_PAUSE: Duration = Duration::from_millis(100);
/// How long a server keeps what a look was given: for as long as it may be given back.
const GIVEN_LIFE: Duration = Duration::from_secs(20);

/// A look at one handler, until somebody has what it was given. Dropped before, what it was given is given back.
struct Look {
    queue: Arc<Queue>,
    handler: Arc<str>,
    salt: String,
    deliveries: Vec<Delivery>,
    is_over: bool,
}

/// Receives: see [`Source::receive`](taskonce_worker::source::Source::receive).
pub(crate) async fn receive(
    queue: &Arc<Queue>,
    wants: &[Want],
    total_max: usize,
    wait: Duration,
) -> Result<Vec<Delivery>> {
    let deadline = Instant::now() + wait.min(WAIT_MAX);
    let total_max = total_max.min(RECEIVE_MAX);
    let board = queue.board()?;
    if wait.is_zero() {
        // Who does not wait is told what there is now, also what the server is about to call out.
        board.open(wants);
    }
    // Each round looks at what is open, or waits for a change, for what comes due or for the deadline, and so the loop ends.
    loop {
        tokio::task::coop::consume_budget().await;
        // Before the look, so that what changes after it is not missed.
        let (changed, closed) = (board.changed.notified(), queue.closed.notified());
        queue.check_open()?;
        let turn = queue.turn.fetch_add(1, Ordering::Relaxed);
        let chosen = board.choose(wants, total_max, turn);
        if !chosen.is_empty() {
            let deliveries = look_at_all(queue, &board, chosen).await?;
            if !deliveries.is_empty() {
                return Ok(deliveries);
            }
            // There may be more handlers than were looked at.
            if Instant::now() < deadline || board.look_at(wants).is_some_and(|at| at <= Instant::now()) {
                continue;
            }
        }
        let now = Instant::now();
        if now >= deadline {
            return Ok(Vec::new());
        }
        let until =
            if total_max == 0 { deadline } else { board.look_at(wants).map_or(deadline, |at| at.min(deadline)) };
        if until > now {
            let either = async {
                tokio::select! { () = changed => {}, () = closed => {} }
            };
            let _ = timeout_at(until, either).await;
        }
    }
}

async fn look_at_all(queue: &Arc<Queue>, board: &Arc<Board>, chosen: Vec<(Arc<str>, usize)>) -> Result<Vec<Delivery>> {
    let (mut looks, mut fault) = (Vec::new(), None);
    for some in chosen.chunks(TOGETHER_MAX) {
        let outcomes = join(some.iter().map(|(handler, max)| look_and_watch(queue, board, handler, *max))).await;
        for ((handler, _), outcome) in some.iter().zip(outcomes) {
            match outcome {
                Ok(look) => looks.push(look),
                Err(error) => {
                    board.note(handler, &Found::More);
                    fault = Some(error);
                }
            }
        }
    }
    let mut deliveries = Vec::new();
    for mut look in looks {
        look.is_over = true;
        deliveries.append(&mut look.deliveries);
    }
    match fault {
        // What others gave counts more; the fault comes again, if it stays.
        Some(error) if deliveries.is_empty() => Err(error),
        Some(_) | None => Ok(deliveries),
    }
}

/// Looks at a handler; where there is nothing and it is not watched, has it watched and looks once more.
async fn look_and_watch(queue: &Arc<Queue>, board: &Arc<Board>, handler: &Arc<str>, max: usize) -> Result<Look> {
    let (mut look, mut found) = look_at(queue, handler, max).await?;
    if look.deliveries.is_empty()
        && !matches!(found, Found::More)
        && !board.is_watched(handler)
        && line::watch(&queue.links, board, &queue.names, handler).await
    {
        (look, found) = look_at(queue, handler, max).await?;
    }
    // Unwatched, it is looked at once more before it counts as empty.
    let is_done = look.deliveries.is_empty() || board.is_watched(handler);
    board.note(handler, if is_done { &found } else { &Found::More });
    Ok(look)
}

async fn look_at(queue: &Arc<Queue>, handler: &Arc<str>, max: usize) -> Result<(Look, Found)> {
    let keys = queue.names.of(handler);
    let salt = random()[..16].to_owned();
    let mut names = keys.with(&[Key::Held, Key::Flight, Key::Later, Key::Back, Key::Since]);
    names.push(keys.given(&salt));
    let args = [
        max.to_string().into_bytes(),
        millis(queue.description.visibility),
        BYTES_MAX.to_string().into_bytes(),
        message::FORMAT.to_string().into_bytes(),
        millis(NEWER_DELAY),
        millis(GIVEN_LIFE),
    ];
    let mut look = Look {
        queue: Arc::clone(queue),
        handler: Arc::clone(handler),
        salt: salt.clone(),
        deliveries: Vec::new(),
        is_over: false,
    };
    let items = queue.call(handler, Verb::Take, &names, &salt, &args).await?;
    let [_, is_new, Reply::Int(more), Reply::Int(due), Reply::List(given)] = items.as_slice() else {
        return Err(queue.misshapen());
    };
    if !given.is_empty() {
        queue.list_again(handler, Some(is_new)).await?;
    }
    for item in given {
        look.deliveries.extend(read(queue, handler, item).await?);
    }
    // What was set aside leaves room.
    look.is_over = given.is_empty();
    let due = u64::try_from(*due).ok().map(Duration::from_millis);
    Ok((look, if *more == 1 { Found::More } else { Found::NoMore(due) }))
}

/// A delivery; nothing of one that cannot be read, which goes to the dead letters, so that it holds up nobody.
async fn read(queue: &Arc<Queue>, handler: &Arc<str>, item: &Reply) -> Result<Option<Delivery>> {
    let Reply::List(parts) = item else { return Err(queue.misshapen()) };
    let [member, receipt, Reply::Int(number), Reply::List(fields)] = parts.as_slice() else {
        return Err(queue.misshapen());
    };
    let (Some(member), Some(receipt)) = (member.text(), receipt.text()) else { return Err(queue.misshapen()) };
    let holder = Holder { member: member.into(), receipt: receipt.into(), handler: handler.to_string() };
    let entry = message::entry(handler, holder.priority(), fields).and_then(|entry| {
        let checked = entry.envelope.check(usize::MAX, taskonce_worker::source::Entrance::Open);
        checked.map(|()| entry).map_err(|error| error.to_string())
    });
    match entry {
        Ok(entry) => Ok(Some(Delivery {
            source: Arc::clone(&queue.description.name),
            number: u32::try_from(*number).unwrap_or(u32::MAX),
            coordinates: entry.coordinates.unwrap_or_else(|| foreign(queue, &holder)).into(),
            envelope: entry.envelope,
            redriven_at: entry.redriven_at,
            receipt: holder.receipt(),
        })),
        Err(what) => {
            let id = format!("unreadable/{}", foreign(queue, &holder));
            let death = Death { id, reason: "unreadable".into(), message: format!("it cannot be read: {what}") };
            // Where another has it by now, that one finds it out, too.
            let _settled = crate::source::settle(queue, &holder, crate::source::Settle::Die(&death)).await?;
            Ok(None)
        }
    }
}

/// The coordinates of what others sent: the digest of where it lies.
fn foreign(queue: &Queue, holder: &Holder) -> String {
    let stream = queue.names.of(&holder.handler).key(Key::Stream(holder.priority()));
    let id = holder.member.split_once(':').map_or("", |(_, id)| id);
    taskonce_redis_wire::script::hash([&stream[..], b"/", id.as_bytes()].concat())
}

impl Drop for Look {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        // Without a runtime there is no connection either, and what was given comes again after its visibility timeout.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (queue, handler, salt) = (Arc::clone(&self.queue), Arc::clone(&self.handler), self.salt.clone());
        runtime.spawn(async move { give_back(&queue, &handler, &salt).await });
    }
}

/// Gives back what a look was given and nobody has.
async fn give_back(queue: &Arc<Queue>, handler: &Arc<str>, salt: &str) {
    for round in 0..GIVE_BACK_MAX {
        let keys = queue.names.of(handler);
        let mut names = keys.with(&crate::source::SETTLED);
        names.push(keys.given(salt));
        let args = [b"give".to_vec(), Vec::new(), Vec::new(), b"0".to_vec()];
        if queue.call(handler, Verb::Settle, &names, &mark(), &args).await.is_ok() {
            if let Ok(board) = queue.board() {
                board.touch(handler);
            }
            return;
        }
        // sleeps: a server that is away is not asked again at once
        sleep(GIVE_BACK_PAUSE * (1 << round)).await;
    }
}
