//! What is sent: `Envelope`, a payload with its key, its handler, its headers and their limits.

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::record::WallTime;

use super::Entrance;

/// The header in which brokers with headers carry the key: its text form, `namespace/handler@version/id`.
pub const KEY_HEADER: &str = "Idempotency-Key";
/// The header that carries the fingerprint where a worker could not make it by the payload alone, since the id was derived from
/// a part of it: 32 digits of lower hex.
pub const FINGERPRINT_HEADER: &str = "Idempotency-Fingerprint";
/// The header of a task that was sent with a delay: when it is due, in milliseconds since 1970. Its age counts from then.
pub const DUE_HEADER: &str = "Taskonce-Due-At";
/// The header that carries the trace: W3C Trace Context.
pub const TRACE_HEADER: &str = "traceparent";
/// The longest name of a handler, in bytes.
pub const HANDLER_MAX: usize = 256;
/// The longest key, in bytes. The longest that reads as a key takes 419 of them.
pub const KEY_MAX: usize = 1024;
/// The longest content type, in bytes.
pub const CONTENT_TYPE_MAX: usize = 256;
/// The most headers.
pub const HEADERS_MAX: usize = 64;
/// The most bytes of all headers, names and values together.
pub const HEADER_BYTES_MAX: usize = 16 * 1024;

/// How soon among those of its handler. Three, so that every broker can keep them apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// After all others.
    Low,
    /// As everything is, unless said otherwise.
    #[default]
    Normal,
    /// Before all others.
    High,
}

impl Priority {
    /// All, from the first to come on.
    pub const ALL: [Priority; 3] = [Priority::High, Priority::Normal, Priority::Low];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Priority::Low => "low",
            Priority::Normal => "normal",
            Priority::High => "high",
        }
    }
}

/// What is sent, and comes back with every delivery as it was sent.
#[derive(Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The handler that it is for, as the routes name it: 1 to [`HANDLER_MAX`] bytes without control characters.
    pub handler: String,
    /// The idempotency key as text, if it has one. It may be none that reads as a key: a foreign producer made it.
    pub key: Option<String>,
    /// The payload.
    pub payload: Vec<u8>,
    /// What the payload is, such as `application/json`.
    pub content_type: Option<String>,
    /// Further headers, such as `traceparent`, in their order. Names are visible ASCII without `:`, and are compared
    /// without regard to case.
    pub headers: Vec<(String, String)>,
    /// When the producer made it, by the producer's clock, if that is known.
    pub sent_at: Option<WallTime>,
    /// How soon among those of its handler.
    pub priority: Priority,
}

impl Envelope {
    /// A payload for a handler, with nothing else.
    #[must_use]
    pub fn new(handler: impl Into<String>, payload: impl Into<Vec<u8>>) -> Envelope {
        Envelope {
            handler: handler.into(),
            key: None,
            payload: payload.into(),
            content_type: None,
            headers: Vec::new(),
            sent_at: None,
            priority: Priority::default(),
        }
    }

    /// The first value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(held, _)| held.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// When it is due, as its header says, if it was sent with a delay.
    #[must_use]
    pub fn due_at(&self) -> Option<WallTime> {
        self.header(DUE_HEADER)?.parse().ok().map(WallTime)
    }

    /// Refuses what is beyond the limits of every source, and a payload beyond this one's.
    ///
    /// # Errors
    /// [`ErrorKind::BadEnvelope`] with everything that is wrong, and nothing of the payload.
    pub fn check(&self, payload_max: usize, entrance: Entrance) -> Result<()> {
        let mut faults = Vec::new();
        match entrance {
            Entrance::Open => {}
            Entrance::OncePerKey if self.key.is_some() => {}
            Entrance::OncePerKey => faults.push("it has no key, by which it could be queued once".to_owned()),
        }
        let mut text = |what: &str, text: &str, min: usize, max: usize| {
            if text.len() < min || text.len() > max || text.contains(char::is_control) {
                faults.push(format!(
                    "its {what} has {} bytes; {min} to {max} without control characters are allowed",
                    text.len()
                ));
            }
        };
        text("handler", &self.handler, 1, HANDLER_MAX);
        if let Some(key) = &self.key {
            text("key", key, 1, KEY_MAX);
        }
        if let Some(content_type) = &self.content_type {
            text("content type", content_type, 0, CONTENT_TYPE_MAX);
        }
        if self.payload.len() > payload_max {
            faults.push(format!("its payload has {} bytes; at most {payload_max} are allowed", self.payload.len()));
        }
        if self.headers.len() > HEADERS_MAX {
            faults.push(format!("it has {} headers; at most {HEADERS_MAX} are allowed", self.headers.len()));
        }
        let bytes: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > HEADER_BYTES_MAX {
            faults.push(format!("its headers have {bytes} bytes; at most {HEADER_BYTES_MAX} are allowed"));
        }
        for (number, (name, value)) in self.headers.iter().enumerate() {
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':') {
                faults.push(format!("the name of header {} is not visible ASCII without `:`", number + 1));
            } else if name.eq_ignore_ascii_case(KEY_HEADER) {
                faults.push(format!("header {} is `{KEY_HEADER}`: the key has its own place", number + 1));
            }
            if value.contains(['\r', '\n', '\0']) {
                faults.push(format!("the value of header {} has a line end or a zero byte", number + 1));
            }
            if faults.len() >= FAULTS_MAX {
                break;
            }
        }
        if faults.is_empty() {
            return Ok(());
        }
        let subject = self.key.as_deref().filter(|key| key.len() <= KEY_MAX).unwrap_or("a task without a key");
        Err(Error::new(ErrorKind::BadEnvelope, faults.join("; ")).about(subject.escape_debug().to_string()))
    }
}

/// After so many faults no more headers are looked at.
const FAULTS_MAX: usize = 10;

/// Payloads are nobody's business in logs: only their length is shown.
impl std::fmt::Debug for Envelope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Envelope")
            .field("handler", &self.handler)
            .field("key", &self.key)
            .field("payload_len", &self.payload.len())
            .field("content_type", &self.content_type)
            .field("headers", &self.headers.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .field("sent_at", &self.sent_at)
            .field("priority", &self.priority)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_kept_and_everything_beyond_them_is_told_at_once() {
        let fits = Envelope {
            handler: "h".repeat(HANDLER_MAX),
            key: Some("k".repeat(KEY_MAX)),
            content_type: Some("c".repeat(CONTENT_TYPE_MAX)),
            headers: vec![("a".into(), "b".into()); HEADERS_MAX],
            ..Envelope::new("", *b"1234")
        };
        fits.check(4, Entrance::OncePerKey).unwrap();
        let beyond = Envelope {
            handler: String::new(),
            key: Some(String::new()),
            content_type: Some("a\u{7}".into()),
            headers: vec![
                ("a b".into(), "v".into()),
                ("idempotency-key".into(), "v".into()),
                ("x".into(), "v\r\ny: z".into()),
            ],
            ..Envelope::new("", *b"secret")
        };
        let error = beyond.check(5, Entrance::Open).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadEnvelope);
        let text = error.to_string();
        for part in
            ["its handler", "its key", "its content type", "its payload has 6", "header 1", "header 2", "header 3"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("secret"), "{text}");
        let many = Envelope { headers: vec![("a".into(), "b".into()); HEADERS_MAX + 1], ..fits.clone() };
        assert!(many.check(4, Entrance::Open).unwrap_err().to_string().contains("65 headers"));
        let long = Envelope { headers: vec![("a".into(), "b".repeat(HEADER_BYTES_MAX))], ..fits.clone() };
        let nameless = Envelope { key: None, ..fits };
        nameless.check(4, Entrance::Open).unwrap();
        assert!(nameless.check(4, Entrance::OncePerKey).unwrap_err().to_string().contains("no key"));
        assert!(long.check(4, Entrance::Open).unwrap_err().to_string().contains("its headers have 16385 bytes"));
    }

    #[test]
    fn headers_are_found_without_regard_to_case() {
        let envelope = Envelope {
            headers: vec![("TraceParent".into(), "1".into()), ("traceparent".into(), "2".into())],
            ..Envelope::new("a", *b"")
        };
        assert_eq!(envelope.header("traceparent"), Some("1"));
        assert_eq!(envelope.header("absent"), None);
    }

    #[test]
    fn what_is_printed_of_an_envelope_has_no_payload_and_no_value_of_a_header() {
        let envelope = Envelope { headers: vec![("x-user".into(), "ada".into())], ..Envelope::new("a", *b"secret") };
        let text = format!("{envelope:?}");
        assert!(text.contains("payload_len: 6") && text.contains("x-user"), "{text}");
        assert!(!text.contains("ada") && !text.contains("115"), "{text}");
    }
}
