//! The scripts, in the two forms that servers need: the compare-and-swap of a record, and changes of a list.

use std::sync::LazyLock;

use taskonce_redis_wire::script::{Dialect, Script, hash};
use taskonce_redis_wire::wire::{Commands, Digits};

const SWAP_BODY: &str = include_str!("swap.lua");
const SWAP_LEGACY_BODY: &str = include_str!("swap_6_2.lua");
/// A memory that is full must not hide what failed.
const LIST_BODY: &str = concat!("#!lua flags=allow-oom\n", include_str!("lists.lua"));
/// Here a script that has written may go on when memory is full, and so it begins by removing nothing.
const LIST_LEGACY_BODY: &str = concat!("redis.call('ZREM', KEYS[1], '')\n", include_str!("lists.lua"));

/// The texts of all scripts. A server refuses those of another form.
pub(crate) const BODIES: [&str; 4] = [SWAP_BODY, SWAP_LEGACY_BODY, LIST_BODY, LIST_LEGACY_BODY];

static SWAP: LazyLock<Script> = LazyLock::new(|| Script { body: SWAP_BODY, hash: hash(SWAP_BODY) });
static SWAP_LEGACY: LazyLock<Script> =
    LazyLock::new(|| Script { body: SWAP_LEGACY_BODY, hash: hash(SWAP_LEGACY_BODY) });
static LIST: LazyLock<Script> = LazyLock::new(|| Script { body: LIST_BODY, hash: hash(LIST_BODY) });
static LIST_LEGACY: LazyLock<Script> =
    LazyLock::new(|| Script { body: LIST_LEGACY_BODY, hash: hash(LIST_LEGACY_BODY) });

/// One call of a script.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) dialect: Dialect,
    pub(crate) key: &'a [u8],
    /// The answer begins with it: of a swap the next token, or a mark where there is none.
    pub(crate) id: &'a [u8],
    pub(crate) what: What<'a>,
}

/// What a call asks for.
#[derive(Clone, Copy)]
pub(crate) enum What<'a> {
    /// To replace a record.
    Swap {
        /// The token that must be there; empty if nothing must be there.
        expected: &'a [u8],
        /// The next record and its life in milliseconds; `None` erases.
        next: Option<(&'a [u8], u64)>,
    },
    /// To change a list.
    List(&'a [Change]),
}

/// One change of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) verb: Verb,
    pub(crate) entry: Vec<u8>,
    /// In milliseconds: what is left of the entry, or when it ends; nothing to the others.
    pub(crate) number: u64,
}

/// What a change does; `lists.lua` says more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Add,
    Keep,
    Drop,
    DropAt,
}

impl Verb {
    fn name(self) -> &'static [u8] {
        match self {
            Verb::Add => b"add",
            Verb::Keep => b"keep",
            Verb::Drop => b"drop",
            Verb::DropAt => b"drop_at",
        }
    }
}

impl Call<'_> {
    /// The call by the script's hash.
    pub(crate) fn write_hashed(&self, commands: &mut Commands) {
        self.write(commands, b"EVALSHA", self.script().hash.as_bytes());
    }

    /// The call with the script in it, which leaves it on the server.
    pub(crate) fn write_whole(&self, commands: &mut Commands) {
        self.write(commands, b"EVAL", self.script().body.as_bytes());
    }

    fn script(&self) -> &'static Script {
        match (self.what, self.dialect) {
            (What::Swap { .. }, Dialect::Modern) => &SWAP,
            (What::Swap { .. }, Dialect::Legacy) => &SWAP_LEGACY,
            (What::List(_), Dialect::Modern) => &LIST,
            (What::List(_), Dialect::Legacy) => &LIST_LEGACY,
        }
    }

    fn write(&self, commands: &mut Commands, verb: &[u8], script: &[u8]) {
        match self.what {
            What::Swap { expected, next: Some((record, life)) } => {
                let life = Digits::of(life);
                commands.add(&[verb, script, b"1", self.key, expected, self.id, record, life.as_bytes()]);
            }
            What::Swap { expected, next: None } => {
                commands.add(&[verb, script, b"1", self.key, expected, self.id]);
            }
            What::List(changes) => {
                let numbers: Vec<Digits> = changes.iter().map(|change| Digits::of(change.number)).collect();
                let mut words = vec![verb, script, b"1", self.key, self.id];
                for (change, number) in changes.iter().zip(&numbers) {
                    words.extend([change.verb.name(), &change.entry, number.as_bytes()]);
                }
                commands.add(&words);
            }
        }
    }
}
