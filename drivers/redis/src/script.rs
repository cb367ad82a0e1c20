//! A script as servers know it: its text, its name there, and the form that a server needs.

/// A script in one form: its text, and its name on the server.
pub struct Script {
    /// Its text. A server refuses one of another form.
    pub body: &'static str,
    /// Its name: the SHA-1 of the text.
    pub hash: String,
}

/// Which form a server needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// From 7.0 on: a script says in its first line what it does.
    Modern,
    /// Before.
    Legacy,
}

/// The name of a script with this text: its SHA-1, as the server's `sha1hex` makes it.
#[must_use]
pub fn hash(text: impl AsRef<[u8]>) -> String {
    sha1_smol::Sha1::from(text.as_ref()).hexdigest()
}
