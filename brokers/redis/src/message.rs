//! Deliveries as entries of a stream: an envelope as fields and back, receipts, and the lines of dead letters.

use taskonce_core::record::WallTime;
use taskonce_redis_wire::wire::Reply;
use taskonce_worker::source::{Envelope, KEY_HEADER, Priority, Receipt};

/// The newest format of an entry that this program knows, and writes.
pub(crate) const FORMAT: u64 = 1;

/// The fields that are no headers.
const PAYLOAD: &str = "payload";
const CONTENT_TYPE: &str = "content-type";
const SENT_AT: &str = "sent-at";
/// What the names of fields begin with that are the queue's own. No header has a colon in its name.
const OWN: &str = "taskonce:";
/// What a field begins with that is a header in any case.
const HEADER: &str = "header:";

/// The number of a priority: that of its stream.
pub(crate) fn priority_code(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Normal => 1,
        Priority::Low => 2,
    }
}

fn priority_of(code: &str) -> Option<Priority> {
    Priority::ALL.into_iter().find(|priority| priority_code(*priority).to_string() == code)
}

/// Whether a name means something else than a header.
fn is_reserved(name: &str) -> bool {
    [PAYLOAD, CONTENT_TYPE, SENT_AT, KEY_HEADER].iter().any(|reserved| name.eq_ignore_ascii_case(reserved))
}

/// An envelope as the fields of an entry.
pub(crate) fn fields(envelope: &Envelope, coordinates: &str, is_once: IsOnce) -> Vec<Vec<u8>> {
    let mut fields: Vec<Vec<u8>> = Vec::with_capacity(12 + 2 * envelope.headers.len());
    let mut add = |name: &str, value: &[u8]| fields.extend([name.as_bytes().to_vec(), value.to_vec()]);
    add("taskonce:id", coordinates.as_bytes());
    match is_once {
        IsOnce::No => {}
        IsOnce::Yes => add("taskonce:once", b"1"),
    }
    if let Some(key) = &envelope.key {
        add("idempotency-key", key.as_bytes());
    }
    if let Some(content_type) = &envelope.content_type {
        add(CONTENT_TYPE, content_type.as_bytes());
    }
    if let Some(sent_at) = envelope.sent_at {
        add(SENT_AT, sent_at.0.to_string().as_bytes());
    }
    for (name, value) in &envelope.headers {
        if is_reserved(name) {
            add(&format!("{HEADER}{name}"), value.as_bytes());
        } else {
            add(name, value.as_bytes());
        }
    }
    add(PAYLOAD, &envelope.payload);
    fields
}

/// Whether a key may be queued once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum IsOnce {
    No,
    Yes,
}

/// What an entry says.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) envelope: Envelope,
    /// Its coordinates, if it was sent by us.
    pub(crate) coordinates: Option<String>,
    pub(crate) redriven_at: Option<WallTime>,
    /// Of a dead letter: how often it was handed out, and when it died, by the queue's clock.
    pub(crate) number: u32,
    pub(crate) died_at: u64,
    pub(crate) format: u64,
}

/// Reads an entry of a handler, from a stream or from the dead letters. Else says what is wrong with it.
pub(crate) fn entry(handler: &str, priority: Priority, fields: &[Reply]) -> Result<Entry, String> {
    let mut envelope = Envelope { priority, ..Envelope::new(handler, Vec::new()) };
    let mut entry =
        Entry { envelope: envelope.clone(), coordinates: None, redriven_at: None, number: 0, died_at: 0, format: 1 };
    let mut has_payload = false;
    for pair in fields.chunks_exact(2) {
        let [name, Reply::Bulk(value)] = pair else { return Err("its fields have another shape".into()) };
        let name = name.text().ok_or("the name of a field is not UTF-8")?;
        if name.eq_ignore_ascii_case(PAYLOAD) {
            envelope.payload.clone_from(value);
            has_payload = true;
            continue;
        }
        let text = std::str::from_utf8(value).map_err(|_| format!("field `{}` is not UTF-8", name.escape_debug()))?;
        let number = || text.parse::<u64>().unwrap_or(0);
        match name.strip_prefix(OWN) {
            Some("id") => entry.coordinates = Some(text.to_owned()),
            Some("redriven") => entry.redriven_at = Some(WallTime(number())),
            Some("dead-priority") => envelope.priority = priority_of(text).unwrap_or_default(),
            Some("dead-number") => entry.number = u32::try_from(number()).unwrap_or(u32::MAX),
            Some("dead-at") => entry.died_at = number(),
            Some("v") => entry.format = number(),
            // Such as that its key is queued once.
            Some(_) => {}
            None if name.eq_ignore_ascii_case(KEY_HEADER) => envelope.key = Some(text.to_owned()),
            None if name.eq_ignore_ascii_case(CONTENT_TYPE) => envelope.content_type = Some(text.to_owned()),
            None if name.eq_ignore_ascii_case(SENT_AT) => envelope.sent_at = text.parse().ok().map(WallTime),
            None => {
                let name = name.strip_prefix(HEADER).unwrap_or(name);
                envelope.headers.push((name.to_owned(), text.to_owned()));
            }
        }
    }
    if !has_payload {
        return Err("it has no field `payload`".into());
    }
    entry.envelope = envelope;
    Ok(entry)
}

/// What a receipt says: the delivery, and who has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The number of its stream, and its id there: `1:1764500000000-0`.
    pub(crate) member: String,
    /// New at each handing out.
    pub(crate) receipt: String,
    pub(crate) handler: String,
}

impl Holder {
    /// The receipt.
    pub(crate) fn receipt(&self) -> Receipt {
        Receipt(format!("{}/{}/{}", self.member, self.receipt, self.handler).into())
    }

    /// What a receipt says; `None` if no queue of ours gave it.
    pub(crate) fn of(receipt: &Receipt) -> Option<Holder> {
        let mut parts = receipt.0.splitn(3, '/');
        let (member, receipt, handler) = (parts.next()?, parts.next()?, parts.next()?);
        let (stream, id) = member.split_once(':')?;
        let is_number = |text: &str| !text.is_empty() && text.len() <= 20 && text.bytes().all(|b| b.is_ascii_digit());
        let is_id = id.split_once('-').is_some_and(|(ms, seq)| is_number(ms) && is_number(seq));
        let is_ours = priority_of(stream).is_some()
            && is_id
            && !receipt.is_empty()
            && receipt.bytes().all(|byte| byte.is_ascii_alphanumeric())
            && !handler.is_empty();
        is_ours.then(|| Holder { member: member.into(), receipt: receipt.into(), handler: handler.into() })
    }

    /// The priority, by the number of its stream.
    pub(crate) fn priority(&self) -> Priority {
        self.member.split_once(':').and_then(|(stream, _)| priority_of(stream)).unwrap_or_default()
    }
}

/// The texts of a line: each its length in bytes, a colon, and itself.
pub(crate) fn texts(mut line: &[u8]) -> Option<Vec<String>> {
    let mut texts = Vec::new();
    while !line.is_empty() {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let length: usize = std::str::from_utf8(&line[..colon]).ok()?.parse().ok()?;
        let end = (colon + 1).checked_add(length)?;
        texts.push(String::from_utf8_lossy(line.get(colon + 1..end)?).into_owned());
        line = &line[end..];
    }
    Some(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replies(fields: Vec<Vec<u8>>) -> Vec<Reply> {
        fields.into_iter().map(Reply::Bulk).collect()
    }

    #[test]
    fn an_envelope_reads_back_also_where_its_headers_have_the_names_of_fields() {
        let sent = Envelope {
            key: Some("shop/charge@2/7".into()),
            content_type: Some("text/plain".into()),
            headers: vec![
                ("Payload".into(), "1".into()),
                ("sent-at".into(), "x".into()),
                ("X-a".into(), String::new()),
                ("x-a".into(), "ü\t".into()),
            ],
            sent_at: Some(WallTime(17)),
            priority: Priority::Low,
            ..Envelope::new("charge@2", vec![0, 255])
        };
        let read = entry("charge@2", Priority::Low, &replies(fields(&sent, "c", IsOnce::Yes))).unwrap();
        assert_eq!((read.envelope, read.coordinates.as_deref(), read.format), (sent, Some("c"), 1));
    }

    #[test]
    fn what_others_send_needs_a_payload_and_text_beside_it() {
        let of = |fields: &[&[u8]]| {
            entry("a", Priority::Normal, &replies(fields.iter().map(|field| field.to_vec()).collect()))
        };
        let read = of(&[b"Payload", b"\xff", b"Idempotency-Key", b"k", b"traceparent", b"00-1"]).unwrap();
        assert_eq!((read.envelope.key.as_deref(), read.envelope.header("traceparent")), (Some("k"), Some("00-1")));
        assert_eq!((read.envelope.payload.as_slice(), read.coordinates), (b"\xff".as_slice(), None));
        assert!(of(&[b"body", b"x"]).unwrap_err().contains("payload"));
        assert!(of(&[b"payload", b"x", b"a", b"\xff"]).unwrap_err().contains("`a`"));
    }

    #[test]
    fn a_receipt_reads_back_and_nothing_else_does() {
        let holder = Holder { member: "2:17-0".into(), receipt: "0a1".into(), handler: "a/b".into() };
        assert_eq!(Holder::of(&holder.receipt()), Some(holder));
        for text in
            ["", "-", "1", "1-1-1", "3:1-1/a/b", "0:1/a/b", "0:1-1/a", "0:1-1//b", "0:1-1/a b/c", "0:-/a/b", "\u{0}"]
        {
            assert_eq!(Holder::of(&Receipt(text.into())), None, "{text}");
        }
    }

    #[test]
    fn a_line_of_texts_reads_back_and_damage_is_nothing() {
        assert_eq!(texts(b"2:ab0:1:\xff").unwrap(), ["ab", "", "\u{fffd}"]);
        for line in [b"x".as_slice(), b"3:ab", b"-1:a", b"99999999999999999999:a"] {
            assert_eq!(texts(line), None);
        }
    }
}
