//! What the store asks of a server: the script, or native commands that do the same.

use taskonce_redis_wire::connection::Question;
use taskonce_redis_wire::pipe::Wrote;
use taskonce_redis_wire::wire::{Commands, Digits, Reply};

use crate::script::Call;

/// Something to send.
pub(crate) enum Request<'a> {
    /// The script, which answers with the call's id, alone or at the head of a list.
    Script(Call<'a>),
    /// A first claim where the server can do it natively: answers with what the key held, and its `PTTL`.
    Claim { key: &'a [u8], record: &'a [u8], life: u64 },
    /// Replaces what a key holds if it is byte for byte what is expected, natively.
    Replace { key: &'a [u8], there: &'a [u8], record: &'a [u8], life: u64 },
    /// What a key holds, and its `PTTL`.
    Load { key: &'a [u8] },
}

impl Question for Request<'_> {
    fn write(&self, commands: &mut Commands) {
        match *self {
            Request::Script(call) => call.write_hashed(commands),
            Request::Claim { key, record, life } => {
                commands.add(&[b"SET", key, record, b"NX", b"GET", b"PX", Digits::of(life).as_bytes()]);
                commands.add(&[b"PTTL", key]);
            }
            Request::Replace { key, there, record, life } => {
                commands.add(&[b"SET", key, record, b"IFEQ", there, b"PX", Digits::of(life).as_bytes()]);
            }
            Request::Load { key } => {
                commands.add(&[b"GET", key]).add(&[b"PTTL", key]);
            }
        }
    }

    fn wrote(&self) -> Option<[Wrote; 2]> {
        match self {
            Request::Script(_) => Some([swapped::<0>, swapped::<1>]),
            Request::Claim { .. } => Some([claimed::<0>, claimed::<1>]),
            Request::Replace { .. } => Some([replaced::<0>, replaced::<1>]),
            Request::Load { .. } => None,
        }
    }

    fn proof(&self) -> Option<&[u8]> {
        match self {
            Request::Script(call) => Some(call.id),
            Request::Claim { .. } | Request::Replace { .. } | Request::Load { .. } => None,
        }
    }

    fn write_whole(&self, commands: &mut Commands) {
        match self {
            Request::Script(call) => call.write_whole(commands),
            Request::Claim { .. } | Request::Replace { .. } | Request::Load { .. } => self.write(commands),
        }
    }
}

/// Whether a native claim was stored: the key held nothing.
fn claimed<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Nil))
}

/// Whether a native replacement was stored.
fn replaced<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Status(_)))
}

/// Whether the script wrote. What it recognises as written before it also touches, so that this connection waits for it.
fn swapped<const AT: usize>(replies: &[Reply]) -> bool {
    matches!(replies.get(AT), Some(Reply::Bulk(_)))
}
