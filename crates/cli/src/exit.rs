//! What the program's own exit codes mean, and which error leads to which: one table.

use std::process::ExitCode;

use taskonce::ErrorKind;

/// An exit code of taskonce's own. `run` passes the command's codes on beside these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// It is as asked.
    Fine,
    /// There is no record, or its state does not allow the change.
    NotSo,
    /// The arguments or the input cannot be used.
    Usage,
    /// The key is in use for another payload.
    Mismatch,
    /// The store cannot serve; whether something was recorded may be unknown.
    StoreAway,
    /// Stdout cannot be written.
    Unwritten,
    /// Another runs the task, or it waits for its next attempt.
    Busy,
    /// Out of attempts.
    Dead,
    /// In doubt; waits for a person.
    Parked,
    /// The store's URL, its settings or the policy are wrong.
    Configuration,
    /// The command exists and cannot be started.
    NotExecutable,
    /// There is no such command.
    NotFound,
}

impl Code {
    /// Every code, in the order of their numbers.
    pub(crate) const ALL: [Code; 12] = [
        Code::Fine,
        Code::NotSo,
        Code::Usage,
        Code::Mismatch,
        Code::StoreAway,
        Code::Unwritten,
        Code::Busy,
        Code::Dead,
        Code::Parked,
        Code::Configuration,
        Code::NotExecutable,
        Code::NotFound,
    ];

    pub(crate) fn number(self) -> u8 {
        match self {
            Code::Fine => 0,
            Code::NotSo => 1,
            Code::Usage => 64,
            Code::Mismatch => 65,
            Code::StoreAway => 69,
            Code::Unwritten => 74,
            Code::Busy => 75,
            Code::Dead => 76,
            Code::Parked => 77,
            Code::Configuration => 78,
            Code::NotExecutable => 126,
            Code::NotFound => 127,
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Code::Fine => "done now, or done before and replayed",
            Code::NotSo => "there is no record of the task, or its state does not allow the change",
            Code::Usage => "the arguments or the input cannot be used",
            Code::Mismatch => "the key is in use for another payload",
            Code::StoreAway => "the store cannot serve, or the command was done and that could not be recorded",
            Code::Unwritten => "stdout cannot be written; what was done stays done",
            Code::Busy => "busy, waiting, cut off by a stop, or the claim was lost: come again later",
            Code::Dead => "dead: out of attempts",
            Code::Parked => "parked: in doubt, a person must say what became of it",
            Code::Configuration => "the store's URL or settings, or the policy, are wrong",
            Code::NotExecutable => "the command cannot be started",
            Code::NotFound => "the command is not found",
        }
    }

    pub(crate) fn exit(self) -> ExitCode {
        ExitCode::from(self.number())
    }

    /// The code of an error kind.
    pub(crate) fn of(kind: ErrorKind) -> Code {
        match kind {
            ErrorKind::Unreachable
            | ErrorKind::TimedOut
            | ErrorKind::Locked
            | ErrorKind::Full
            | ErrorKind::ReadOnly
            | ErrorKind::Unreplicated
            | ErrorKind::Corrupt
            | ErrorKind::NewerFormat
            | ErrorKind::NewerSchema
            | ErrorKind::Protocol
            | ErrorKind::Closed
            | ErrorKind::BadOutput
            | ErrorKind::RolledBack => Code::StoreAway,
            ErrorKind::Denied
            | ErrorKind::NoSchema
            | ErrorKind::Evicting
            | ErrorKind::Unsupported
            | ErrorKind::BadUrl
            | ErrorKind::BadPolicy
            | ErrorKind::BadRoutes
            | ErrorKind::ForgetfulStore => Code::Configuration,
            ErrorKind::BadName
            | ErrorKind::BadId
            | ErrorKind::BadKey
            | ErrorKind::BadJson
            | ErrorKind::DuplicateName
            | ErrorKind::LoneSurrogate
            | ErrorKind::IntegerRange
            | ErrorKind::NotFinite
            | ErrorKind::TooDeep
            | ErrorKind::KeyNotString
            | ErrorKind::NoJsonForm
            | ErrorKind::BadPointer
            | ErrorKind::PointerMissing
            | ErrorKind::NothingChosen
            | ErrorKind::BadCursor
            | ErrorKind::BadEnvelope
            | ErrorKind::DuplicateHandler => Code::Usage,
            ErrorKind::NotFound | ErrorKind::WrongState => Code::NotSo,
            ErrorKind::ClaimLost | ErrorKind::Changed => Code::Busy,
        }
    }
}

/// The table for `--help` and the man page.
pub(crate) fn table() -> String {
    let mut text = String::from("Exit codes:\n");
    for code in Code::ALL {
        text.push_str(&format!("  {:<5}{}\n", code.number(), code.meaning()));
    }
    text.push_str(
        "  other  the command's own exit code, passed on by `run`; 128+N when signal N ended it\n\n\
         Every error ends with a `hint:` line. Data goes to stdout, everything else to stderr.",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_kind_has_a_code_and_every_code_its_number() {
        assert!(ErrorKind::ALL.iter().all(|kind| Code::of(*kind).number() != 0));
        let mut numbers = Code::ALL.map(Code::number);
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
        assert!(Code::ALL.iter().all(|code| table().contains(&format!("  {:<5}{}", code.number(), code.meaning()))));
    }

    #[test]
    fn the_page_of_errors_says_the_same() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(page).unwrap();
        for kind in ErrorKind::ALL {
            let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", kind.name())));
            let row = row.unwrap_or_else(|| panic!("{} is not on the page", kind.name()));
            assert!(row.contains(&format!("| {} |", Code::of(*kind).number())), "{row}");
        }
        for code in Code::ALL {
            assert!(page.contains(&format!("| {} | {} |", code.number(), code.meaning())), "{code:?}");
        }
    }
}
