//! The keys of a queue: those of one handler share a slot, and one key lists the handlers.

use taskonce_worker::source::Priority;

/// The keys of one source.
#[derive(Debug)]
pub(crate) struct Names {
    /// What the keys of its handlers begin with, `prefix{name:`.
    start: String,
    /// A sorted set of the handlers that it has ever had something of.
    pub(crate) handlers: Vec<u8>,
}

impl Names {
    pub(crate) fn new(prefix: &str, name: &str) -> Names {
        Names { start: format!("{prefix}{{{name}:"), handlers: format!("{prefix}{{{name}}}:handlers").into_bytes() }
    }

    /// The keys of a handler.
    pub(crate) fn of(&self, handler: &str) -> Keys {
        Keys { base: format!("{}{handler}}}:", self.start) }
    }

    /// The handler that a key belongs to.
    pub(crate) fn handler_of<'a>(&self, key: &'a [u8]) -> Option<&'a str> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(self.start.as_str())?;
        Some(rest.rsplit_once("}:")?.0)
    }
}

/// The keys of one handler.
#[derive(Debug)]
pub(crate) struct Keys {
    base: String,
}

/// One of the keys of a handler.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    Clock,
    Stream(Priority),
    Held,
    Flight,
    Later,
    Back,
    Since,
    Once,
    Wake,
    Dead,
    Graves,
    Order,
}

/// The streams, in the order of their numbers.
pub(crate) const STREAMS: [Key; 3] =
    [Key::Stream(Priority::High), Key::Stream(Priority::Normal), Key::Stream(Priority::Low)];

impl Keys {
    pub(crate) fn key(&self, key: Key) -> Vec<u8> {
        let end = match key {
            Key::Clock => "clock",
            Key::Stream(priority) => priority.name(),
            Key::Held => "held",
            Key::Flight => "flight",
            Key::Later => "later",
            Key::Back => "back",
            Key::Since => "since",
            Key::Once => "once",
            Key::Wake => "wake",
            Key::Dead => "dead",
            Key::Graves => "graves",
            Key::Order => "order",
        };
        format!("{}{end}", self.base).into_bytes()
    }

    /// The key that keeps for a moment what a receive was given.
    pub(crate) fn given(&self, salt: &str) -> Vec<u8> {
        format!("{}given:{salt}", self.base).into_bytes()
    }

    /// The clock, the streams, and these.
    pub(crate) fn with(&self, others: &[Key]) -> Vec<Vec<u8>> {
        let all = std::iter::once(Key::Clock).chain(STREAMS).chain(others.iter().copied());
        all.map(|key| self.key(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_handler_share_a_slot_and_name_it() {
        let names = Names::new("a:", "queue");
        for handler in ["charge@2", "a}:b", "{x}", "ü"] {
            let keys = names.of(handler);
            for key in keys.with(&[Key::Held, Key::Order]) {
                assert!(key.starts_with(format!("a:{{queue:{handler}}}:").as_bytes()));
                assert_eq!(names.handler_of(&key), Some(handler));
            }
        }
        assert_eq!(names.handler_of(b"a:{other:charge@2}:high"), None);
        assert_eq!(names.of("charge@2").key(Key::Stream(Priority::Normal)), b"a:{queue:charge@2}:normal");
    }
}
