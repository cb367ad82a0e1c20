//! What is wrong with a table of routes: `Fault`, each with its place and what to do, and `Refused`, all of them at once.

use std::fmt;

use taskonce_core::error::{Error, ErrorKind};

/// One thing that is wrong, or, as a warning, that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The line of the file, counted from 1, where it is one line's.
    pub line: Option<usize>,
    /// What it is about: `source orders`, `route orders × charge@2`.
    pub subject: String,
    /// What is wrong.
    pub text: String,
    /// What to do.
    pub hint: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.subject.is_empty() {
            write!(f, "{}: ", self.subject)?;
        }
        f.write_str(&self.text)
    }
}

/// A table that cannot be used, with everything that is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// In the order of the lines, then of the routes; at least one.
    pub faults: Vec<Fault>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.faults.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Refused {}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        let hints: Vec<&str> = refused.faults.iter().map(|fault| fault.hint.as_str()).collect();
        Error::new(ErrorKind::BadRoutes, refused.to_string()).about("routes").with_hint(hints.join("; "))
    }
}
