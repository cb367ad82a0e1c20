//! An output that a person gives by hand: a file, or stdin, and what it is.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};

use serde::de::IgnoredAny;
use taskonce::{JSON, MSGPACK, Output};

use crate::args::OUTPUT_MAX;
use crate::exit::Code;
use crate::report::{Result, Trouble};

const TEXT: &str = "text/plain; charset=utf-8";
const BYTES: &str = "application/octet-stream";

/// Reads it. The value of a step is read by its handler, so it has to be JSON, unless another type is named.
pub(crate) fn output(from: &OsStr, content_type: Option<&str>, is_of_step: bool) -> Result<Output> {
    let bytes = read(from)?;
    let is_json = serde_json::from_slice::<IgnoredAny>(&bytes).is_ok();
    let content_type = match content_type {
        Some(JSON) if !is_json => return Err(not_json(from, "it was said to be")),
        Some(given) if is_of_step && given != JSON && given != MSGPACK => {
            return Err(not_json(from, "the value of a step is read as"));
        }
        Some(given) => given,
        None if is_json => JSON,
        None if is_of_step => return Err(not_json(from, "the value of a step is read as")),
        None if std::str::from_utf8(&bytes).is_ok() => TEXT,
        None => BYTES,
    };
    Ok(Output::kept(content_type, bytes))
}

fn read(from: &OsStr) -> Result<Vec<u8>> {
    let failed = |error: io::Error| {
        let kind = if error.kind() == io::ErrorKind::NotFound { "no_such_file" } else { "unreadable_file" };
        Trouble::new(Code::Usage, kind, format!("{}: {error}", name(from)), "name a readable file, or `-` for stdin")
    };
    // One byte more tells whether there is more.
    let most = OUTPUT_MAX as u64 + 1;
    let mut bytes = Vec::new();
    let read = if from == "-" {
        io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        File::open(from).map_err(failed)?.take(most).read_to_end(&mut bytes)
    };
    if read.map_err(failed)? > OUTPUT_MAX {
        let what = format!("{} is larger than 64 MiB, the most that a record keeps", name(from));
        return Err(Trouble::new(
            Code::Usage,
            "too_large",
            what,
            "keep it elsewhere, and give where it is as the output",
        ));
    }
    Ok(bytes)
}

fn not_json(from: &OsStr, why: &str) -> Trouble {
    let hint = "write JSON, such as `\"message-17\"` with its quotation marks, or `null`";
    Trouble::new(Code::Usage, "not_json", format!("{} is not JSON, which {why}", name(from)), hint)
}

fn name(from: &OsStr) -> String {
    if from == "-" { "stdin".to_owned() } else { format!("file `{}`", from.display()) }
}
