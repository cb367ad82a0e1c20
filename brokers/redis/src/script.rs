//! The scripts of the queue, in the two forms that servers need, and a call of one.

use std::sync::LazyLock;

use taskonce_redis_wire::connection::Question;
use taskonce_redis_wire::pipe::Wrote;
use taskonce_redis_wire::script::{Dialect, Script, hash};
use taskonce_redis_wire::wire::{Commands, Digits, Reply};

/// Which script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Send,
    Take,
    Settle,
    Dead,
    Depth,
}

/// A script whose first line says what it does: one that may run when memory is full works off what is there.
macro_rules! modern {
    ($first:literal, $body:literal) => {
        concat!($first, "\nlocal NEXT_ID = '-*'\n", include_str!("lua/common.lua"), include_str!($body))
    };
}

/// The same before 7.0: a script that has written may go on when memory is full, and so it begins by removing nothing.
macro_rules! legacy {
    ($begin:literal, $body:literal) => {
        concat!($begin, "\nlocal NEXT_ID = '-0'\n", include_str!("lua/common.lua"), include_str!($body))
    };
}

const SEND: &str = modern!("#!lua", "lua/send.lua");
const TAKE: &str = modern!("#!lua flags=allow-oom", "lua/take.lua");
const SETTLE: &str = modern!("#!lua flags=allow-oom", "lua/settle.lua");
const DEAD: &str = modern!("#!lua flags=allow-oom", "lua/dead.lua");
const DEPTH: &str = modern!("#!lua flags=no-writes", "lua/depth.lua");
const SEND_LEGACY: &str = legacy!("", "lua/send.lua");
const TAKE_LEGACY: &str = legacy!("redis.call('HDEL', KEYS[1], '')", "lua/take.lua");
const SETTLE_LEGACY: &str = legacy!("redis.call('HDEL', KEYS[1], '')", "lua/settle.lua");
const DEAD_LEGACY: &str = legacy!("redis.call('HDEL', KEYS[1], '')", "lua/dead.lua");
const DEPTH_LEGACY: &str = legacy!("", "lua/depth.lua");

/// The texts of all scripts. A server refuses those of another form.
pub(crate) const BODIES: [&str; 10] =
    [SEND, TAKE, SETTLE, DEAD, DEPTH, SEND_LEGACY, TAKE_LEGACY, SETTLE_LEGACY, DEAD_LEGACY, DEPTH_LEGACY];

static SCRIPTS: LazyLock<[Script; 10]> = LazyLock::new(|| BODIES.map(|body| Script { body, hash: hash(body) }));

/// One call of a script.
pub(crate) struct Call<'a> {
    pub(crate) verb: Verb,
    pub(crate) dialect: Dialect,
    pub(crate) keys: &'a [Vec<u8>],
    /// The answer begins with it.
    pub(crate) proof: &'a str,
    /// Whether it was sent before, and its answer lost.
    pub(crate) is_again: bool,
    pub(crate) args: &'a [Vec<u8>],
}

impl Call<'_> {
    fn script(&self) -> &'static Script {
        let at = match self.verb {
            Verb::Send => 0,
            Verb::Take => 1,
            Verb::Settle => 2,
            Verb::Dead => 3,
            Verb::Depth => 4,
        };
        &SCRIPTS[match self.dialect {
            Dialect::Modern => at,
            Dialect::Legacy => at + BODIES.len() / 2,
        }]
    }

    fn add(&self, commands: &mut Commands, command: &[u8], script: &[u8]) {
        let count = Digits::of(self.keys.len() as u64);
        let again: &[u8] = if self.is_again { b"1" } else { b"0" };
        let mut words: Vec<&[u8]> = Vec::with_capacity(5 + self.keys.len() + self.args.len());
        words.extend([command, script, count.as_bytes()]);
        words.extend(self.keys.iter().map(Vec::as_slice));
        words.extend([self.proof.as_bytes(), again]);
        words.extend(self.args.iter().map(Vec::as_slice));
        commands.add(&words);
    }
}

impl Question for Call<'_> {
    fn write(&self, commands: &mut Commands) {
        self.add(commands, b"EVALSHA", self.script().hash.as_bytes());
    }

    fn wrote(&self) -> Option<[Wrote; 2]> {
        match self.verb {
            Verb::Send | Verb::Take | Verb::Settle | Verb::Dead => Some([answered::<0>, answered::<1>]),
            Verb::Depth => None,
        }
    }

    fn proof(&self) -> Option<&[u8]> {
        Some(self.proof.as_bytes())
    }

    fn write_whole(&self, commands: &mut Commands) {
        self.add(commands, b"EVAL", self.script().body.as_bytes());
    }
}

/// Whether the script ran, and so may have written.
fn answered<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::List(_)))
}
