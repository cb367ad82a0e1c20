//! The port, kept by streams: `RedisQueue`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::error::Result;
use taskonce_core::store::{Cursor, Finding, Level, Memory};
use taskonce_redis_wire::connection::Links;
use taskonce_redis_wire::shared::join;
use taskonce_redis_wire::wire::{Commands, Reply};
use taskonce_worker::source::{
    DELAY_MAX, DEPTHS_MAX, DeadFilter, DeadLetter, DeadPage, Death, Delivery, Depth, Description, Entrance, Envelope,
    Left, Receipt, Sent, Settled, Source, Want, examine_depth,
};

use crate::keys::{Key, Names};
use crate::message::{self, Holder, IsOnce};
use crate::options;
use crate::queue::{Queue, is_so, mark, millis, random};
use crate::script::{BODIES, Verb};
use crate::{dead, examine, take};

/// The largest payload, in bytes. What is larger than some kilobytes belongs beside the queue: all of it lies in memory.
pub const PAYLOAD_MAX: usize = 16 * 1024 * 1024;
/// How much later than its delay a deferred delivery may come.
const DELAY_STEP: Duration = Duration::from_millis(20);
/// How long after a send a receive that waits may wake.
pub const WAKE_MAX: Duration = Duration::from_millis(50);
/// How many handlers are counted at once.
const TOGETHER_MAX: usize = 256;

/// The keys of a settlement behind the clock and the streams.
pub(crate) const SETTLED: [Key; 10] = [
    Key::Held,
    Key::Flight,
    Key::Later,
    Key::Back,
    Key::Since,
    Key::Once,
    Key::Wake,
    Key::Dead,
    Key::Graves,
    Key::Order,
];

/// A queue in a Redis or Valkey server. Clones are one handle of it, and share its connections.
#[derive(Clone)]
pub struct RedisQueue {
    queue: Arc<Queue>,
}

/// What becomes of a delivery.
pub(crate) enum Settle<'a> {
    Acknowledge,
    Defer(Duration),
    Extend(Duration),
    Die(&'a Death),
}

impl RedisQueue {
    /// Opens a queue by its URL: one of those that the store in Redis takes (`redis://host:6379/0`, several hosts,
    /// `redis+sentinel:`, `redis+cluster:`, and each with `rediss` for TLS), with these options beside those of the servers:
    ///
    /// | option | default | meaning |
    /// |---|---|---|
    /// | `name` | `queue` | the source's name, one half of a route |
    /// | `visibility` | `30s` | how long a delivery is its receiver's alone unless extended, `500ms` to `24h` |
    /// | `prefix` | `taskonce-queue:` | what every key begins with |
    ///
    /// Connects on first use, on the tokio runtime of that use, which needs its time and I/O drivers.
    ///
    /// # Errors
    /// [`BadUrl`](taskonce_core::ErrorKind::BadUrl) with everything that is wrong with the URL. It never shows the password.
    pub fn from_url(url: &str) -> Result<RedisQueue> {
        let (settings, options) = options::parse(url)?;
        let names = Names::new(&settings.prefix, &options.name);
        let description = Description {
            name: options.name.into(),
            visibility: options.visibility,
            payload_max: PAYLOAD_MAX,
            delay_step: DELAY_STEP,
            wake_max: WAKE_MAX,
            memory: Memory::MayForget,
        };
        Ok(RedisQueue { queue: Arc::new(Queue::new(Links::new(settings, &BODIES)?, names, description)) })
    }

    async fn settle(&self, receipt: &Receipt, how: Settle<'_>) -> Result<Settled> {
        self.queue.check_open()?;
        let Some(holder) = Holder::of(receipt) else { return Ok(Settled::Gone) };
        settle(&self.queue, &holder, how).await
    }
}

/// Settles the delivery of this holder.
pub(crate) async fn settle(queue: &Queue, holder: &Holder, how: Settle<'_>) -> Result<Settled> {
    let text = |text: &str| text.as_bytes().to_vec();
    let (verb, millis, makes_due) = match how {
        Settle::Acknowledge => ("acknowledge", b"0".to_vec(), false),
        Settle::Defer(delay) => ("defer", millis(delay.min(DELAY_MAX)), true),
        Settle::Extend(visibility) => ("extend", millis(visibility.min(DELAY_MAX)), true),
        Settle::Die(_) => ("die", b"0".to_vec(), false),
    };
    let mut args = vec![text(verb), text(&holder.member), text(&holder.receipt), millis];
    match how {
        Settle::Acknowledge | Settle::Defer(_) | Settle::Extend(_) => {}
        Settle::Die(death) => args.extend([text(&death.id), text(&death.reason), text(death.message_cut())]),
    }
    let keys = queue.names.of(&holder.handler).with(&SETTLED);
    let items = queue.call(&holder.handler, Verb::Settle, &keys, &mark(), &args).await?;
    if makes_due {
        queue.board()?.touch(&holder.handler);
    }
    Ok(if is_so(&items) { Settled::Done } else { Settled::Gone })
}

#[async_trait]
impl Source for RedisQueue {
    fn describe(&self) -> &Description {
        &self.queue.description
    }

    async fn send(&self, envelope: &Envelope, delay: Duration, entrance: Entrance) -> Result<Sent> {
        let queue = &self.queue;
        queue.check_open()?;
        envelope.check(PAYLOAD_MAX, entrance)?;
        queue.list(&envelope.handler).await?;
        let once = match entrance {
            Entrance::Open => None,
            Entrance::OncePerKey => envelope.key.as_deref(),
        };
        let coordinates = random();
        let keys = queue.names.of(&envelope.handler).with(&[Key::Held, Key::Later, Key::Once]);
        let mut args = vec![
            message::priority_code(envelope.priority).to_string().into_bytes(),
            millis(delay.min(DELAY_MAX)),
            once.unwrap_or_default().as_bytes().to_vec(),
        ];
        args.extend(message::fields(envelope, &coordinates, if once.is_some() { IsOnce::Yes } else { IsOnce::No }));
        let items = queue.call(&envelope.handler, Verb::Send, &keys, &coordinates, &args).await?;
        queue.list_again(&envelope.handler, items.get(1)).await?;
        queue.board()?.touch(&envelope.handler);
        match items.get(2) {
            None => Ok(Sent::Accepted(coordinates.into())),
            Some(there) => {
                let there = there.text().ok_or_else(|| queue.misshapen())?;
                Ok(Sent::AlreadyQueued(there.into()))
            }
        }
    }

    async fn receive(&self, wants: &[Want], total_max: usize, wait: Duration) -> Result<Vec<Delivery>> {
        take::receive(&self.queue, wants, total_max, wait).await
    }

    async fn acknowledge(&self, receipt: &Receipt) -> Result<Settled> {
        self.settle(receipt, Settle::Acknowledge).await
    }

    async fn defer(&self, receipt: &Receipt, delay: Duration) -> Result<Settled> {
        self.settle(receipt, Settle::Defer(delay)).await
    }

    async fn extend(&self, receipt: &Receipt, visibility: Duration) -> Result<Settled> {
        self.settle(receipt, Settle::Extend(visibility)).await
    }

    async fn dead_letter(&self, receipt: &Receipt, death: &Death) -> Result<Settled> {
        self.queue.check_open()?;
        death.check()?;
        self.settle(receipt, Settle::Die(death)).await
    }

    async fn dead_letters(&self, filter: &DeadFilter, cursor: Option<Cursor>) -> Result<DeadPage> {
        self.queue.check_open()?;
        dead::page(&self.queue, filter, cursor).await
    }

    async fn dead_one(&self, id: &str) -> Result<Option<DeadLetter>> {
        self.queue.check_open()?;
        dead::one(&self.queue, id).await
    }

    async fn redrive(&self, id: &str) -> Result<Left> {
        self.queue.check_open()?;
        dead::leave(&self.queue, id, "redrive").await
    }

    async fn drop_dead(&self, id: &str) -> Result<Left> {
        self.queue.check_open()?;
        dead::leave(&self.queue, id, "drop").await
    }

    async fn depth(&self) -> Result<Vec<Depth>> {
        self.queue.check_open()?;
        let handlers = handlers(&self.queue, "", DEPTHS_MAX).await?;
        let mut depths = Vec::new();
        for some in handlers.chunks(TOGETHER_MAX) {
            for depth in join(some.iter().map(|handler| depth_of(&self.queue, handler))).await {
                let depth = depth?;
                if depth.ready + depth.deferred + depth.in_flight + depth.dead > 0 {
                    depths.push(depth);
                }
            }
        }
        Ok(depths)
    }

    async fn examine(&self) -> Vec<Finding> {
        if let Err(error) = self.queue.check_open() {
            let (text, hint) = (error.to_string(), error.hint().to_owned());
            return vec![Finding { level: Level::Fault, subject: "source".into(), text, hint }];
        }
        let mut findings = taskonce_redis_wire::examine::findings(&self.queue.links, &examine::OfQueue).await;
        if findings.iter().all(|finding| finding.subject != "reachability") {
            findings.push(match self.depth().await {
                Ok(depths) => examine_depth(&depths),
                Err(error) => {
                    let (text, hint) = (error.to_string(), error.hint().to_owned());
                    Finding { level: Level::Fault, subject: "deliveries".into(), text, hint }
                }
            });
        }
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
        findings
    }

    async fn close(&self) {
        self.queue.is_closed.store(true, Ordering::SeqCst);
        self.queue.closed.notify_waiters();
    }
}

/// The handlers after this one that are listed, at most so many, in the order of their bytes.
pub(crate) async fn handlers(queue: &Queue, after: &str, max: usize) -> Result<Vec<String>> {
    let min = if after.is_empty() { b"-".to_vec() } else { [b"(", after.as_bytes()].concat() };
    let mut commands = Commands::default();
    let max = max.to_string();
    commands.add(&[b"ZRANGEBYLEX", &queue.names.handlers, &min, b"+", b"LIMIT", b"0", max.as_bytes()]);
    match queue.batch(&queue.names.handlers, &commands).await?.as_slice() {
        [Reply::List(names)] => Ok(names.iter().filter_map(|name| Some(name.text()?.to_owned())).collect()),
        _ => Err(queue.misshapen()),
    }
}

async fn depth_of(queue: &Queue, handler: &str) -> Result<Depth> {
    let keys = queue.names.of(handler).with(&[Key::Held, Key::Flight, Key::Later, Key::Since, Key::Order]);
    let items = queue.call(handler, Verb::Depth, &keys, &mark(), &[]).await?;
    let [_, Reply::Int(ready), Reply::Int(deferred), Reply::Int(in_flight), Reply::Int(dead), Reply::Int(oldest)] =
        items.as_slice()
    else {
        return Err(queue.misshapen());
    };
    let count = |number: &i64| u64::try_from(*number).unwrap_or(0);
    Ok(Depth {
        handler: handler.into(),
        ready: count(ready),
        deferred: count(deferred),
        in_flight: count(in_flight),
        dead: count(dead),
        oldest: u64::try_from(*oldest).ok().map(Duration::from_millis),
    })
}

impl std::fmt::Debug for RedisQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RedisQueue").field(&self.queue.links.settings.label).finish()
    }
}
