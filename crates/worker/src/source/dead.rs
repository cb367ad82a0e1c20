//! Dead letters: deliveries that no worker can finish, with why, until a person takes them back or drops them.

use std::sync::Arc;
use std::time::Duration;

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::record::WallTime;
use taskonce_core::store::{Cursor, PAGE_MAX};

use super::Envelope;

/// The longest id of a dead letter, in bytes. The longest key takes 419 of them.
pub const DEATH_ID_MAX: usize = 512;
/// The longest reason, in bytes.
pub const DEATH_REASON_MAX: usize = 64;
/// The longest message, in bytes; what is longer is cut.
pub const DEATH_MESSAGE_MAX: usize = 4096;

/// Why a delivery goes to the dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    /// Names the dead letter, and is the same whenever the same task dies of the same: 1 to [`DEATH_ID_MAX`] bytes.
    pub id: String,
    /// Why, in a word by which dead letters are grouped, such as `parked`: 1 to [`DEATH_REASON_MAX`] bytes.
    pub reason: String,
    /// Why, for people: the last error. At most [`DEATH_MESSAGE_MAX`] bytes are kept.
    pub message: String,
}

impl Death {
    /// Refuses an id or a reason beyond its limits.
    ///
    /// # Errors
    /// [`ErrorKind::BadEnvelope`] with everything that is wrong.
    pub fn check(&self) -> Result<()> {
        let faults: Vec<String> = [("id", &self.id, DEATH_ID_MAX), ("reason", &self.reason, DEATH_REASON_MAX)]
            .into_iter()
            .filter(|(_, text, max)| text.is_empty() || text.len() > *max || text.contains(char::is_control))
            .map(|(what, text, max)| {
                format!("its {what} has {} bytes; 1 to {max} without control characters are needed", text.len())
            })
            .collect();
        if faults.is_empty() {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::BadEnvelope, faults.join("; ")).about("dead letter"))
        }
    }

    /// The message, cut to its limit between two characters.
    #[must_use]
    pub fn message_cut(&self) -> &str {
        &self.message[..self.message.floor_char_boundary(DEATH_MESSAGE_MAX)]
    }
}

/// A dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Why it died.
    pub death: Death,
    /// How long ago, by the source's clock.
    pub age: Duration,
    /// What was sent.
    pub envelope: Envelope,
    /// How often it was handed out.
    pub number: u32,
    /// Those of the delivery, which it keeps when it is redriven.
    pub coordinates: Arc<str>,
    /// When a person last took it back from the dead letters.
    pub redriven_at: Option<WallTime>,
}

/// A dead letter in a list: without its payload and headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLine {
    /// Why it died.
    pub death: Death,
    /// How long ago, by the source's clock.
    pub age: Duration,
    /// Its handler.
    pub handler: String,
    /// Its idempotency key, if it came with one.
    pub key: Option<String>,
    /// How often it was handed out.
    pub number: u32,
    /// The length of its payload, in bytes.
    pub payload_len: usize,
}

/// Which dead letters to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadFilter {
    /// Only of this handler.
    pub handler: Option<String>,
    /// Only for this reason.
    pub reason: Option<String>,
    /// The most of one page, 1 to [`PAGE_MAX`].
    pub page_max: usize,
}

impl Default for DeadFilter {
    fn default() -> DeadFilter {
        DeadFilter { handler: None, reason: None, page_max: 100 }
    }
}

impl DeadFilter {
    /// The page size, within its bounds.
    #[must_use]
    pub fn page(&self) -> usize {
        self.page_max.clamp(1, PAGE_MAX)
    }
}

/// One page of dead letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadPage {
    /// The dead letters, in an order of the source's own.
    pub lines: Vec<DeadLine>,
    /// Where to go on; `None` at the end.
    pub next: Option<Cursor>,
}

/// What became of taking a dead letter away.
#[must_use = "a dead letter that was not there was not taken"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It was there, and by this call is no more.
    Done,
    /// There is none of that id: perhaps by an earlier sending of this call.
    NotThere,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_cut_between_two_characters() {
        let death = |message: &str| Death { id: "a".into(), reason: "dead".into(), message: message.into() };
        assert_eq!(death("short").message_cut(), "short");
        let long = "é".repeat(DEATH_MESSAGE_MAX);
        assert_eq!(death(&long).message_cut().len(), DEATH_MESSAGE_MAX);
        let odd = format!("a{long}");
        assert_eq!(death(&odd).message_cut().len(), DEATH_MESSAGE_MAX - 1);
    }

    #[test]
    fn all_that_is_wrong_with_a_death_is_told_at_once() {
        let good = Death { id: "a".repeat(DEATH_ID_MAX), reason: "parked".into(), message: String::new() };
        good.check().unwrap();
        let error = Death { id: String::new(), reason: "a\nb".into(), ..good }.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadEnvelope);
        assert!(error.to_string().contains("its id") && error.to_string().contains("its reason"), "{error}");
    }
}
