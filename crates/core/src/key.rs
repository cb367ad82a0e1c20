//! Who is the same task: names, keys, fingerprints and the keys for providers downstream.
//!
//! How JSON becomes canonical bytes is in `json`.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::json::{Fields, Input};

/// The longest namespace and handler, in bytes.
pub const NAME_MAX: usize = 64;
/// The longest version, in bytes.
pub const VERSION_MAX: usize = 32;
/// The longest id, in bytes.
pub const ID_MAX: usize = 256;

/// A namespace or a handler's name: 1 to [`NAME_MAX`] of `[A-Za-z0-9._-]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ErrorKind::BadName`] when it is empty, too long, or has other characters.
    pub fn new(name: &str) -> Result<Name> {
        check_name("name", name, NAME_MAX)?;
        Ok(Name(name.into()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check_name(what: &str, name: &str, max: usize) -> Result<()> {
    let fault = if name.is_empty() {
        format!("the {what} is empty")
    } else if name.len() > max {
        format!("the {what} has {} bytes, {max} at most are allowed", name.len())
    } else if let Some(other) = name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
        format!("the {what} has the character {other:?}")
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::BadName, fault).about(format!("{what} `{}`", name.escape_debug())))
}

fn check_id(id: &str) -> Result<()> {
    let fault = if id.is_empty() {
        "the id is empty".to_owned()
    } else if id.len() > ID_MAX {
        format!("the id has {} bytes, {ID_MAX} at most are allowed", id.len())
    } else if let Some(control) = id.chars().find(|c| c.is_control()) {
        format!("the id has the control character {control:?}")
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::BadId, fault))
}

/// Which code runs a task: namespace, handler and version.
///
/// The name is given by the user, never taken from a function, so that renaming a function changes no key. A new
/// version makes new tasks: it never falls under the old version's keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Handler {
    prefix: Arc<str>,
    namespace_end: usize,
    handler_end: usize,
}

impl Handler {
    /// A handler of the namespace `default`.
    ///
    /// # Errors
    /// [`ErrorKind::BadName`], naming which part is wrong.
    pub fn new(handler: &str, version: &str) -> Result<Handler> {
        Handler::within("default", handler, version)
    }

    /// A handler of a namespace.
    ///
    /// # Errors
    /// [`ErrorKind::BadName`], naming which part is wrong.
    pub fn within(namespace: &str, handler: &str, version: &str) -> Result<Handler> {
        check_name("namespace", namespace, NAME_MAX)?;
        check_name("handler", handler, NAME_MAX)?;
        check_name("version", version, VERSION_MAX)?;
        let namespace_end = namespace.len();
        Ok(Handler {
            prefix: format!("{namespace}/{handler}@{version}/").into(),
            namespace_end,
            handler_end: namespace_end + 1 + handler.len(),
        })
    }

    /// Takes this handler for one piece of code of this process, for as long as the process lives.
    ///
    /// Two functions under one name would replay each other's results. Registering where handlers are set up finds that
    /// before the first task runs.
    ///
    /// # Errors
    /// [`ErrorKind::DuplicateHandler`] when it was registered before.
    pub fn register(self) -> Result<Handler> {
        static REGISTERED: LazyLock<Mutex<HashSet<Arc<str>>>> = LazyLock::new(Mutex::default);
        let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        if !registered.insert(Arc::clone(&self.prefix)) {
            return Err(Error::new(ErrorKind::DuplicateHandler, "it is registered by other code of this process")
                .about(format!("handler `{self}`")));
        }
        drop(registered);
        Ok(self)
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.prefix[..self.namespace_end]
    }

    /// The handler's name.
    #[must_use]
    pub fn handler(&self) -> &str {
        &self.prefix[self.namespace_end + 1..self.handler_end]
    }

    /// The version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.prefix[self.handler_end + 1..self.prefix.len() - 1]
    }

    /// The key of the caller's own id.
    ///
    /// # Errors
    /// [`ErrorKind::BadId`] when it is empty, longer than [`ID_MAX`] bytes, or has control characters.
    pub fn key(&self, id: &str) -> Result<Key> {
        check_id(id)?;
        let mut text = String::with_capacity(self.prefix.len() + id.len());
        text.push_str(&self.prefix);
        text.push_str(id);
        Ok(Key {
            text: text.into(),
            namespace_end: self.namespace_end,
            handler_end: self.handler_end,
            version_end: self.prefix.len() - 1,
        })
    }

    /// The task of the caller's own id. Its fingerprint is that of the whole payload.
    ///
    /// # Errors
    /// [`ErrorKind::BadId`].
    pub fn task(&self, id: &str, payload: &Input<'_>) -> Result<Task> {
        Ok(Task { key: self.key(id)?, fingerprint: payload.fingerprint(&Fields::all())? })
    }

    /// The task of an input: its id is derived from the chosen fields, and so is its fingerprint (a changed `sent_at`
    /// outside of them must not condemn a good duplicate).
    ///
    /// # Errors
    /// [`ErrorKind::PointerMissing`] and [`ErrorKind::NothingChosen`] where the fields do not fit the input.
    pub fn task_from(&self, input: &Input<'_>, fields: &Fields) -> Result<Task> {
        let digest = input.digest(fields)?;
        Ok(Task { key: self.key(&digest.id())?, fingerprint: digest.fingerprint() })
    }
}

impl fmt::Display for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix[..self.prefix.len() - 1])
    }
}

/// The idempotency key of a task, `namespace/handler@version/id`. Equal keys are the same task.
///
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    text: Arc<str>,
    namespace_end: usize,
    handler_end: usize,
    version_end: usize,
}

impl Key {
    /// Reads the text form, as it travels in the header `Idempotency-Key`.
    ///
    /// # Errors
    /// [`ErrorKind::BadKey`], [`ErrorKind::BadName`] or [`ErrorKind::BadId`].
    pub fn parse(text: &str) -> Result<Key> {
        let malformed = || {
            Error::new(ErrorKind::BadKey, "this is not `namespace/handler@version/id`")
                .about(format!("key `{}`", text.escape_debug()))
        };
        let (namespace, rest) = text.split_once('/').ok_or_else(malformed)?;
        let (handler, rest) = rest.split_once('@').ok_or_else(malformed)?;
        let (version, id) = rest.split_once('/').ok_or_else(malformed)?;
        Handler::within(namespace, handler, version)?.key(id)
    }

    /// The text form.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.text[..self.namespace_end]
    }

    /// The handler's name.
    #[must_use]
    pub fn handler(&self) -> &str {
        &self.text[self.namespace_end + 1..self.handler_end]
    }

    /// The handler's version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.text[self.handler_end + 1..self.version_end]
    }

    /// The id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.text[self.version_end + 1..]
    }

    /// The key for a provider that deduplicates: stable per task and step, the same in every attempt.
    ///
    /// A UUID of version 8 from SHA-256 of the text form, a zero byte and the step's name. A task of one step uses `""`.
    #[must_use]
    pub fn downstream(&self, step: &str) -> DownstreamKey {
        let digest: [u8; 32] = Sha256::new()
            .chain_update(self.text.as_bytes())
            .chain_update([0])
            .chain_update(step.as_bytes())
            .finalize()
            .into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        bytes[6] = (bytes[6] & 0x0f) | 0x80;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        DownstreamKey(bytes)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.text)
    }
}

/// A key for a provider that deduplicates, as a UUID of version 8.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DownstreamKey([u8; 16]);

impl fmt::Display for DownstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DownstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DownstreamKey({self})")
    }
}

/// The digest of a payload: one key with another fingerprint is a mismatch, never run and never replayed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    /// That of a payload which is no JSON: the first 16 bytes of the SHA-256 of its bytes.
    #[must_use]
    pub fn of_bytes(payload: &[u8]) -> Fingerprint {
        let digest: [u8; 32] = Sha256::digest(payload).into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        Fingerprint(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// A task: its key, and the fingerprint of its payload. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// The idempotency key.
    pub key: Key,
    /// The payload's digest.
    pub fingerprint: Fingerprint,
}

impl Task {
    /// The same task with another fingerprint: of fields that must not change under one key, beyond those that make it.
    ///
    /// ```
    /// use taskonce_core::{json::{Fields, Input}, key::Handler};
    ///
    /// let input = Input::from_json(br#"{"order": 7, "cents": 1200, "sent_at": "10:00"}"#)?;
    /// let checked = Fields::new(["/order", "/cents"])?;
    /// let task = Handler::new("charge", "1")?
    ///     .task_from(&input, &Fields::new(["/order"])?)?
    ///     .with_fingerprint(input.fingerprint(&checked)?);
    /// # Ok::<(), taskonce_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_fingerprint(self, fingerprint: Fingerprint) -> Task {
        Task { fingerprint, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_back_from_its_text_form() {
        let key = Handler::within("billing", "charge", "2").unwrap().key("a/b@c/d ü").unwrap();
        assert_eq!(key.as_str(), "billing/charge@2/a/b@c/d ü");
        let read = Key::parse(key.as_str()).unwrap();
        assert_eq!(read, key);
        assert_eq!(
            (read.namespace(), read.handler(), read.version(), read.id()),
            ("billing", "charge", "2", "a/b@c/d ü")
        );
    }

    #[test]
    fn names_and_ids_out_of_bounds_are_refused() {
        for bad in ["", "a b", "ä", "a/b", "a@b", &"x".repeat(NAME_MAX + 1)] {
            assert_eq!(Handler::new(bad, "1").unwrap_err().kind(), ErrorKind::BadName, "{bad}");
        }
        assert_eq!(Handler::new("a", &"1".repeat(VERSION_MAX + 1)).unwrap_err().kind(), ErrorKind::BadName);
        let handler = Handler::new("a", "1").unwrap();
        for bad in ["", "a\nb", "\u{7f}", "\u{85}", &"x".repeat(ID_MAX + 1)] {
            assert_eq!(handler.key(bad).unwrap_err().kind(), ErrorKind::BadId, "{bad}");
        }
        for bad in ["", "a", "a/b", "a/b@1", "a/b/c"] {
            assert_eq!(Key::parse(bad).unwrap_err().kind(), ErrorKind::BadKey, "{bad}");
        }
    }

    #[test]
    fn two_functions_cannot_register_one_handler_in_a_process() {
        assert!(Handler::new("twice", "1").unwrap().register().is_ok());
        assert!(Handler::new("twice", "2").unwrap().register().is_ok(), "another version is another handler");
        let refused = Handler::new("twice", "1").unwrap().register().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::DuplicateHandler);
    }

    #[test]
    fn the_downstream_key_differs_by_step_and_is_a_uuid_of_version_8() {
        let key = Handler::new("charge", "1").unwrap().key("invoice-42").unwrap();
        let text = key.downstream("").to_string();
        assert_eq!(text.len(), 36);
        assert_eq!(text.as_bytes()[14], b'8');
        assert!(matches!(text.as_bytes()[19], b'8' | b'9' | b'a' | b'b'));
        assert_ne!(key.downstream(""), key.downstream("mail"));
        assert_eq!(key.downstream("mail"), key.downstream("mail"));
    }
}
